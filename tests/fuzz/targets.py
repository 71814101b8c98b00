"""What each reader may do with a wrong file: refuse it with a FormatError that names it, or read it so that it can be used.

``check(kind, files, folder)`` writes the files of a case (see corpus.py) and raises AssertionError for anything else.
"""

import io
import shutil
import warnings
from pathlib import Path

import pagedkv as pk
from pagedkv import batch
from pagedkv.batch import job, rows
from pagedkv.chat import ChatError, ChatTemplate
from pagedkv.engine.core import Engine
from pagedkv.engine.params import SamplingParams
from pagedkv.errors import FormatError, PagedKVError
from pagedkv.tokenizer import Tokenizer

TEXT = "Hi the <end> </s> é\u1234 \x00 11"


def named(error, path):
    """The error says which file it is of, in one line of a length that can be read."""
    text = str(error)
    assert str(path) in text, f"names no file: {text}"
    assert "\n" not in text and len(text) < 1500, f"{len(text)} characters: {text[:2000]!r}"


def use_tokenizer(make, path):
    try:
        tokenizer = make()
    except FormatError as error:
        named(error, path)
        return
    for special in (True, False):
        try:
            ids = tokenizer.encode(TEXT, special, special)
        except FormatError as error:  # of the library, on this text
            named(error, path)
            return
        assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
        text = tokenizer.decode(ids, skip_special_tokens=special)
        stream = tokenizer.stream(skip_special_tokens=special)
        assert "".join(map(stream.push, ids)) + stream.finish() == text
    for i in {0, 1, tokenizer.vocab_size - 1, tokenizer.vocab_size // 2}:
        tokenizer.decode([i])
    assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in tokenizer.eos_token_ids)
    assert tokenizer.bos_token_id is None or 0 <= tokenizer.bos_token_id < tokenizer.vocab_size
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    except (ChatError, FormatError) as error:
        assert len(str(error)) < 1500


def use_model(path):
    try:
        model = pk.LlamaModel.load(path)
    except FormatError as error:
        named(error, path)
        return False
    pool = model.new_pool(n_tokens=16)
    with model.new_sequence(pool) as seq:
        logits = model.step([(seq, [0, model.config.vocab_size - 1])])
    assert logits.shape == (1, model.config.vocab_size)
    use_tokenizer(lambda: model.tokenizer, path)
    return True


def check_gguf(folder):
    path = folder / "model.gguf"
    used = use_model(path)
    if not used:  # a reader of its own, and of files without weights that can be used
        use_tokenizer(lambda: Tokenizer.from_model_file(path), path)
    return used


def check_hf(folder):
    used = use_model(folder)
    use_tokenizer(lambda: Tokenizer.from_directory(folder), folder)
    return used


def check_saved(folder):
    path = folder / "kv"
    used = False
    for dtype in ("float32", "float16", "q8_0"):
        pool = pk.BlockPool(4, 1, 32, dtype=dtype)
        try:
            seq = pk.Sequence.load(path, pool)
        except FormatError as error:
            named(error, path)
        except PagedKVError:  # right, but for another pool
            pk.Sequence.read_header(path)
        else:
            assert len(seq) == pk.Sequence.read_header(path).n_tokens
            seq.free()
            used = True
        assert pool.n_free == pool.n_blocks
    return used


def check_template(folder):
    data = (folder / "template").read_bytes()
    try:
        source = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        source = data.decode("latin-1")
    try:
        ChatTemplate(source).render(
            [{"role": "user", "content": "Hi </t> <b>"}, {"role": "assistant", "content": None}], True, bos_token="<s>"
        )
    except (ChatError, FormatError) as error:
        assert len(str(error)) < 700
        return False
    return True


_engine = []


def _batch_engine():
    """Of a right model, made once."""
    if not _engine:
        import tempfile

        from corpus import seeds

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            path.write_bytes(seeds("gguf")[0]["model.gguf"])
            model = pk.LlamaModel.load(path)
        _engine.append(Engine(model, model.new_pool(n_tokens=1024), 8, 64))
    return _engine[0]


def check_jsonl(folder):
    engine, used = _batch_engine(), False
    with open(folder / "in.jsonl", "rb") as file:
        for line in batch.Input(file, "in.jsonl"):
            assert line.key is not None
            try:
                ids, params = batch.read_request(
                    line, engine.tokenizer, SamplingParams(max_tokens=2), False, engine.model.config.context_len
                )
                if not job._fits_pool(engine, ids, params, batch.Outcome(0, 0, 0)):
                    continue
                request = engine.add(None, ids, params)
            except batch.LineError as error:
                rows._bytes_of({"id": line.id, **rows.error_row(error)})
                continue
            used = True
            for _ in range(2):
                for done in engine.step():
                    if done.finished and done.error is None:
                        rows._bytes_of({"id": line.id, **rows.answer_row(done)})
            engine.abort(request)
    return used


def check(kind, files, folder):
    """Whether the case could be used; AssertionError, or whatever else escapes, is a bug."""
    folder = Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "gguf": check_gguf,
            "hf": check_hf,
            "saved": check_saved,
            "template": check_template,
            "jsonl": check_jsonl,
        }[kind](folder)
