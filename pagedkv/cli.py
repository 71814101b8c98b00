"""The command: ``pagedkv generate``, of one prompt or of a file of them, ``pagedkv serve``, ``info`` and ``bench``.

Nothing of the package is imported here before :func:`main` runs, so that a run of this file alone ends a bad environment
variable or Ctrl-C during the imports like any other; for ``pagedkv`` and ``python -m pagedkv`` the package itself sees to
the former.
"""

import argparse
import ipaddress
import json
import os
import socket
import sys
import time
import warnings
from dataclasses import replace

BLOCK_SIZE = 16
# Rows of a step that a prompt gets: 0.2 to 0.5 s of a 135M model on two cores, after which Ctrl-C is heard.
STEP_ROWS = 256
PICTURES = (".png", ".svg", ".pdf")
MOST = 2**31 - 1  # of any count: what the kernels and block tables count in
# The arguments that are fields of SamplingParams.
SAMPLING = ("n", "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "stop", "ignore_eos", "seed")  # fmt: skip


class UsageError(Exception):
    """Something in what the user typed or asked for cannot be done; the message is one sentence."""


class _ReaderGone(Exception):
    """The reader of standard output went away, as ``head`` does: no text is owed any more."""


# ---- Streams ------------------------------------------------------------------------------------


def _write(text):
    """Write to standard output, and out of every buffer: an error must show here, not when the interpreter ends."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise _ReaderGone from None
    except OSError as error:
        raise UsageError(f"writing to standard output failed: {error.strerror}") from None


def _say(text):
    """Write a line to standard error, if there is one."""
    try:
        if sys.stderr is not None:  # print() would take standard output in its place
            print(text, file=sys.stderr, flush=True)
    except OSError:
        pass


def _drop_unwritten():
    """Let what the standard streams still hold go nowhere, so that the interpreter does not try and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            try:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
            except OSError:
                pass
        except AttributeError:  # None: it was closed before we began
            pass


# ---- Arguments ----------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message, file=None):
        _write(message)  # argparse's own drops errors; only help comes here, as error() prints nothing


class _Version(argparse.Action):
    def __call__(self, parser, *_):
        import pagedkv

        _write(f"pagedkv {pagedkv.__version__}\n")
        parser.exit()


def _count(text):
    value = int(text)
    if not 1 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"must be from 1 to {MOST}, not {text}")
    return value


_count.__name__ = "count"  # argparse names the type in "invalid count value"


def _parser():
    parser = _Parser(prog="pagedkv", description="Batched Llama decoding on CPUs over a paged KV cache.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    command = commands.add_parser(
        "generate", help="continue a prompt, or a file of them",
        description="Continue a prompt, one or several times from one prefill. Text goes to standard output as it "
        "comes, one sample after the other; the last line says how fast it was and what sharing saved.")  # fmt: skip
    command.add_argument("prompt", nargs="?", help="text to continue; standard input where missing or '-', without "
                         "its last line end")  # fmt: skip
    command.add_argument("-n", type=_count, default=1, metavar="N", help="samples (default: 1)")
    command.add_argument("--model", default="smollm2-135m", help="a .gguf file, a Hugging Face directory or a known "
                         "name (default: smollm2-135m)")  # fmt: skip
    command.add_argument("--compute", choices=("float32", "int8"), default="float32", help="what quantised weights "
                         "meet: activations in float32, or quantised too, which is faster (default: float32)")  # fmt: skip
    command.add_argument("--chat", action="store_true", help="take the prompt as a user's message, through the "
                         "model's chat template")  # fmt: skip
    command.add_argument("--max-tokens", type=_count, default=128, metavar="N", help="tokens a sample (default: 128)")
    command.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end a sample where it says this "
                         "text, which is left out; may be given several times ($'\\n' is a line end in bash)")  # fmt: skip
    command.add_argument("--ignore-eos", action="store_true", help="go on after the model's end tokens")
    command.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default: 0.8)")
    command.add_argument("--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest tokens "
                         "(default: 0, all)")  # fmt: skip
    command.add_argument("--top-p", type=float, default=0.95, metavar="P", help="choose among the likeliest tokens "
                         "that make up probability P (default: 0.95)")  # fmt: skip
    command.add_argument("--min-p", type=float, default=0.0, metavar="P", help="leave out tokens less likely than P "
                         "times the likeliest one (default: 0)")  # fmt: skip
    command.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1, tokens of the "
                         "prompt and the text so far become less likely (default: 1)")  # fmt: skip
    for name, what in (("presence", "that the text has"), ("frequency", "each time that the text has it")):
        command.add_argument(f"--{name}-penalty", type=float, default=0.0, metavar="X", help=f"taken off the logit of "
                             f"a token {what}; -2 to 2 (default: 0)")  # fmt: skip
    command.add_argument("--seed", type=int, default=0, help="same seed, same text, on every machine (default: 0)")
    command.add_argument("--kv-dtype", choices=["float32", "float16", "bfloat16", "q8_0"], default="float32",
                         help="how K and V are stored: less memory for a small rounding (default: float32)")
    command.add_argument("--threads", type=_count, metavar="N", help="threads (default: the physical cores)")
    command.add_argument("--speculative", metavar="WHAT", help="check several guessed tokens in a step, for the same "
                         "text sooner where it repeats itself: 'ngram' guesses from the text so far; or a smaller model "
                         "of the same vocabulary guesses, given as for --model")  # fmt: skip
    command.add_argument("--show", nargs="?", const="pool.png", metavar="FILE", help="draw the blocks at their fullest: "
                         "which ones the samples shared, and what that saved. FILE ends in .png, .svg or .pdf (default: "
                         "pool.png); needs matplotlib, pip install \"pagedkv[plot]\"")  # fmt: skip
    command.add_argument("--quiet", action="store_true", help="only the text, and the headers of several samples: no "
                         "last line of statistics; of a batch, no progress")  # fmt: skip
    group = command.add_argument_group(
        "batches", "A file of prompts becomes a file of rows, one JSON object a line: {\"prompt\": ...}, "
        "{\"messages\": [...]} or {\"prompt_token_ids\": [...]}, with \"id\" and sampling parameters of their own "
        "where they differ from those above; --seed is that of every line. Rows are written as they are finished, in "
        "that order. The same command again goes on where it was cut off; rows that are deleted run again. A line that "
        "cannot be run gives a row with \"error\" and exit status 1. See docs/formats.md.")  # fmt: skip
    group.add_argument("--input", metavar="FILE", help="prompts; '-' is standard input")
    group.add_argument("--output", metavar="FILE", help="rows; '-' (the default) is standard output, where nothing can "
                       "go on")  # fmt: skip
    group.add_argument("--overwrite", action="store_true", help="begin anew, and lose what --output holds")
    group.add_argument("--max-num-seqs", type=_count, metavar="N", help="samples at the same time (default: 64)")
    group.add_argument("--n-blocks", type=_count, metavar="N", help=f"blocks of the KV cache, of {BLOCK_SIZE} tokens "
                       "(default: what all may need, or half of the available memory)")  # fmt: skip
    command.set_defaults(run=_generate)

    command = commands.add_parser("info", help="print a model's configuration",
                                  description="Print a model's configuration and the memory it needs.")  # fmt: skip
    command.add_argument("model", help="a .gguf file, a Hugging Face directory or a known name")
    command.set_defaults(run=_info)

    command = commands.add_parser(
        "serve", help="serve a model over HTTP, with OpenAI's API",
        description="Serve a model over HTTP, with OpenAI's API. SIGTERM or Ctrl-C ends it when the requests under way "
        "have ended. See docs/server.md.")  # fmt: skip
    command.add_argument("--model", default="smollm2-135m", help="as for generate (default: smollm2-135m)")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)")
    command.add_argument("--port", type=int, default=8000, help="0 for one that is free (default: 8000)")
    command.add_argument("--api-key", metavar="KEY", help="that clients must send (default: PAGEDKV_API_KEY, which other "
                         "users of this machine do not see; without both, none)")  # fmt: skip
    command.add_argument("--max-queue", type=_count, default=256, metavar="N", help="choices that may wait for their turn; "
                         "more are refused with 429 (default: 256)")  # fmt: skip
    command.add_argument("--max-num-seqs", type=_count, default=64, metavar="N", help="choices at the same time (default: 64)")
    command.add_argument("--n-blocks", type=_count, metavar="N", help=f"blocks of the KV cache, of {BLOCK_SIZE} tokens "
                         "(default: full contexts for all, or half of the available memory)")  # fmt: skip
    command.add_argument("--kv-dtype", choices=["float32", "float16", "bfloat16", "q8_0"], default="float32",
                         help="how K and V are stored (default: float32)")
    command.add_argument("--compute", choices=("float32", "int8"), default="float32", help="as for generate")
    command.add_argument("--speculative", metavar="WHAT", help="as for generate")
    command.add_argument("--threads", type=_count, metavar="N", help="threads (default: the physical cores)")
    command.add_argument("--drain-s", type=float, default=30.0, metavar="S", help="seconds that requests under way have "
                         "to end after SIGTERM (default: 30)")  # fmt: skip
    command.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help="let pages of this origin use the "
                         "server; may be given several times (default: none)")  # fmt: skip
    command.add_argument("--log-requests", action="store_true", help="write requests to standard error, with their texts")
    command.set_defaults(run=_serve)

    commands.add_parser("bench", help="time this machine, pagedkv and its peers")  # has a parser of its own: see _run
    return parser


def _parse(argv):
    args, others = _parser().parse_known_args(argv)
    if others:
        message = f"unrecognized arguments: {' '.join(others)}"
        if args.command == "generate" and args.prompt is not None and not others[0].startswith("-"):
            message = (f"the prompt must be one argument, but {others[0]!r} comes after {args.prompt!r}: put the whole "
                       "prompt in quotes")  # fmt: skip
        raise UsageError(f"{message} (see pagedkv {args.command} --help)")
    if args.command == "generate" and args.show is not None and not args.show.lower().endswith(PICTURES):
        if args.prompt is not None or args.input is not None:
            raise UsageError(f"--show's file must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}, not {args.show!r}")
        args.prompt, args.show = args.show, "pool.png"  # what follows --show is the prompt
    return args


def _utf8(data, source):
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8: {error.reason} at byte {error.start}") from None


def _read_prompt(args):
    if args.prompt not in (None, "-"):
        try:
            # Bytes of the command line that are no text come as lone surrogates (PEP 383).
            return _utf8(args.prompt.encode("utf-8", "surrogateescape"), "the prompt")
        except UnicodeEncodeError:
            raise UsageError("the prompt holds a lone surrogate, which is no character") from None
    if sys.stdin is None:
        raise UsageError("standard input is closed; give the prompt as an argument")
    if args.prompt is None and sys.stdin.isatty():
        raise UsageError("give a prompt as an argument or on standard input (see pagedkv generate --help)")
    prompt = _utf8(sys.stdin.buffer.read(), "standard input")
    return prompt.removesuffix("\n").removesuffix("\r") if prompt.endswith("\n") else prompt


def _open(name):
    """The model file, open."""
    from pagedkv import hub
    from pagedkv.formats import open_model

    path = hub.find_model(name)
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if files:
            which = f"its GGUF file, {files[0]}" if len(files) == 1 else f"one of its GGUF files, such as {files[0]}"
            raise UsageError(f"the directory {path} has no config.json; to use {which}, give that path")
    return open_model(path)


# ---- Words --------------------------------------------------------------------------------------


def _n(count, noun):
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _size(nbytes):
    """Bytes in the unit that a person would use."""
    value, units = float(nbytes), ["kB", "MB", "GB", "TB", "PB", "EB", "ZB"]
    value, unit = value / 1e3, units.pop(0)
    while value >= 999.5 and units:
        value, unit = value / 1e3, units.pop(0)
    return f"{value:.{0 if value >= 9.95 else 1}f} {unit}"


def _sentence(error):
    """What went wrong, on one line, without the status codes that programs read."""
    if isinstance(error, MemoryError):
        text = f"not enough memory: {error}" if str(error) else "not enough memory"
    elif hasattr(error, "message"):
        text = error.message
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error)
    return " ".join(text.split()) or type(error).__name__


# ---- serve --------------------------------------------------------------------------------------


def _serve(args):
    try:
        from pagedkv.server import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pagedkv"):
            raise
        raise UsageError(f'serve needs {error.name}, which is not installed: pip install "pagedkv[server]"') from None
    import pagedkv as pk

    api_key = os.environ.get("PAGEDKV_API_KEY") if args.api_key is None else args.api_key
    if api_key is not None and not api_key.strip():
        raise UsageError("the API key, of --api-key or PAGEDKV_API_KEY, is empty")
    if not 0 <= args.port < 2**16:
        raise UsageError(f"--port must be from 0 to {2**16 - 1}, not {args.port}")
    if not 0 <= args.drain_s <= 86400:
        raise UsageError(f"--drain-s must be from 0 to 86400 seconds, not {args.drain_s}")
    with _bound_socket(args.host, args.port) as sock:  # before the model is loaded, which takes longer to fail
        options = {name: getattr(args, name) for name in ("n_blocks", "kv_dtype", "max_num_seqs", "compute")}
        llm = pk.AsyncLLM(args.model, num_threads=args.threads, speculative=_speculative(args), **options)
        name = os.path.basename(os.path.normpath(args.model)).removesuffix(".gguf")
        host, port = sock.getsockname()[:2]
        if api_key is None and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
            _say(f"pagedkv: warning: whoever reaches {host} may use this server; --api-key asks for a key")
        ready = f"pagedkv: {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        app.serve(llm, name, sock, lambda: _say(ready), args.drain_s, api_key=api_key, max_queue=args.max_queue, cors=args.cors,
                  log_requests=args.log_requests)  # fmt: skip
    return 0


def _bound_socket(host, port):
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                             flags=socket.AI_PASSIVE)[0]  # fmt: skip
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {host}, port {port}: {getattr(error, 'strerror', None) or error}") from None
    return sock


# ---- generate -----------------------------------------------------------------------------------


class _Samples:
    """Prints n interleaved texts one after the other: the first that has not ended streams, the others wait.

    A character that a sample's last token leaves unfinished is dropped.
    """

    def __init__(self, n):
        self.waiting = [""] * n
        self.ended = [False] * n
        self.shown = -1  # the sample that streams

    def push(self, output):
        """Take what is new of a sample, a CompletionOutput."""
        self.ended[output.index] = output.finished()
        self.waiting[output.index] += output.text.removesuffix("\ufffd") if output.finished() else output.text

    def end(self):
        """Show all that there is: no token comes any more."""
        self.ended = [True] * len(self.ended)
        self.show()

    def show(self):
        n, out = len(self.ended), []
        while self.shown < n:
            if self.shown >= 0:
                # Taken before it is written: Ctrl-C while writing leaves it in the stream, and must not repeat it.
                out.append(self.waiting[self.shown])
                self.waiting[self.shown] = ""
                if not self.ended[self.shown]:
                    break
                out.append("\n")
            self.shown += 1
            if n > 1 and self.shown < n:
                out.append(f"--- sample {self.shown + 1} of {n} ---\n")
        _write("".join(out))


def _sampling(args):
    """The SamplingParams of the command."""
    import pagedkv as pk

    if args.seed < 0:
        raise UsageError(f"seed must be in [0, 2**64), not {args.seed}")
    return pk.SamplingParams(**{name: getattr(args, name) for name in SAMPLING})


def _speculative(args):
    from pagedkv.engine.speculation import speculative_of

    return speculative_of(args.speculative)


def _check_show(args):
    """Refuse what could not be drawn, before anything is computed."""
    if args.show is not None:
        from pagedkv.plot import check_matplotlib

        try:
            check_matplotlib()
        except ImportError as error:
            raise UsageError(str(error)) from None
        folder = os.path.dirname(args.show) or "."
        if not os.path.isdir(folder):
            raise UsageError(f"--show {args.show}: there is no folder {folder}")


def _record(args, engine):
    """The PoolRecord of what an engine runs from now on, where --show wants one."""
    from pagedkv.engine import PoolRecord

    record = PoolRecord()
    if args.show is not None:
        engine.records.append(record)
    return record


def _show(args, record):
    """Draw what was recorded."""
    if record.fullest is not None:
        record.fullest.figure().savefig(args.show)
        _say(f"pagedkv: the pool at its fullest is in {args.show}")


def _blocks_needed(n_prompt, n, max_tokens):
    """Blocks that n samples of a prompt take at most: its full ones once, then each sample's own.

    A sample's last token is not fed back, so it needs no row."""
    if max_tokens == 1:
        return -(-n_prompt // BLOCK_SIZE)
    n_shared = n_prompt // BLOCK_SIZE
    return n_shared + n * (-(-(n_prompt + max_tokens - 1) // BLOCK_SIZE) - n_shared)


def _check_memory(config, params, n_rows, n_blocks, kv_dtype):
    from pagedkv import model

    block_nbytes = model.kv_token_nbytes(config, kv_dtype) * BLOCK_SIZE
    needed, available = n_blocks * block_nbytes, model._available_nbytes()
    logits = 4 * params.n * config.vocab_size
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        logits *= 2  # penalties change a copy
    if needed + logits > available:
        what = f"-n {params.n} with {_n(n_rows, 'token')} (prompt and --max-tokens)"
        raise UsageError(f"{what} needs about {_size(needed)} for the KV cache and {_size(logits)} for logits, "
                         f"{_size(available)} are available")  # fmt: skip


def _generate(args):
    if args.input is not None:
        return _generate_batch(args)
    for name in ("output", "overwrite", "max_num_seqs", "n_blocks"):
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')} needs --input (see pagedkv generate --help)")
    import pagedkv as pk
    from pagedkv.tokenizer import Tokenizer

    params = _sampling(args)
    _check_show(args)
    if args.threads:
        pk.set_num_threads(args.threads)
    prompt = _read_prompt(args)
    if not prompt:
        raise UsageError("the prompt is empty")
    with _open(args.model) as file:
        # All that can be refused is, before the weights are read.
        config, tokenizer = file.config, Tokenizer.from_model_file(file)
        if args.chat:
            ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        else:
            ids = tokenizer.encode(prompt)
        if not ids:
            raise UsageError("the prompt has no tokens")
        if len(ids) >= config.context_len:
            raise UsageError(f"the prompt has {_n(len(ids), 'token')}, the model's context holds "
                             f"{config.context_len:,}")  # fmt: skip
        max_tokens = min(params.max_tokens, config.context_len - len(ids))
        if max_tokens < params.max_tokens:
            _say(f"pagedkv: --max-tokens {params.max_tokens} is cut to {max_tokens}: the model's context holds "
                 f"{_n(config.context_len, 'token')}, and the prompt takes {len(ids):,}")  # fmt: skip
            params = replace(params, max_tokens=max_tokens)
        n_blocks = _blocks_needed(len(ids), params.n, max_tokens)
        _check_memory(config, params, len(ids) + max_tokens, n_blocks, args.kv_dtype)
        model = pk.LlamaModel.from_file(file, compute=args.compute)
    if params.n > 1 and params.temperature == 0:
        _say("pagedkv: at temperature 0 all samples are the same")
    # No later prompt will look for what this one leaves.
    llm = pk.LLM(model, n_blocks, args.kv_dtype, BLOCK_SIZE, max_num_seqs=params.n,
                 max_num_batched_tokens=max(STEP_ROWS, params.n), enable_prefix_caching=False,
                 speculative=_speculative(args))  # fmt: skip

    samples, n_tokens, n_first = _Samples(params.n), 0, 0
    started = first = time.perf_counter()
    record = _record(args, llm._engine)
    try:
        for output in llm.stream({"prompt_token_ids": ids}, params):
            if output.error is not None:
                raise output.error
            n_tokens += sum(len(each.token_ids) for each in output.outputs)
            if not n_first:
                first, n_first = time.perf_counter(), n_tokens
            for each in output.outputs:
                samples.push(each)
            samples.show()
    except KeyboardInterrupt:
        if n_tokens:
            samples.end()
        raise
    ended = time.perf_counter()
    _show(args, record)
    if args.quiet:
        return 0
    # The first tokens come of the prompt's logits: no step of decoding made them.
    n_decoded, stats = n_tokens - n_first, llm.stats()
    rate = f"{n_decoded / (ended - first):.1f} tokens/s" if n_decoded else "no token decoded after the prompt's"
    n_stopped = sum(each.finish_reason == "stop" for each in output.outputs)
    stopped = ("none ended by itself" if not n_stopped else "1 ended by itself" if n_stopped == 1
               else f"{n_stopped} ended by themselves")  # fmt: skip
    drafts = f"; {stats['accepted']:,} of {_n(stats['drafted'], 'draft')} accepted" if args.speculative else ""
    n_used, n_unshared = stats["blocks_used_most"], stats["blocks_unshared_most"]
    _write(f"[{_n(n_tokens, 'token')} in {_n(params.n, 'sample')}, {rate} on {_n(pk.get_num_threads(), 'thread')}"
           f"{drafts}; {stopped}; prompt of {_n(len(ids), 'token')} in {first - started:.2f} s; "
           f"{_n(n_used, 'block')} used, {n_unshared - n_used:,} saved by sharing]\n")  # fmt: skip
    return 0


# ---- generate --input ---------------------------------------------------------------------------


def _open_input(name):
    if name != "-":
        return open(name, "rb")
    if sys.stdin is None:
        raise UsageError("standard input is closed; give the prompts as a file")
    return sys.stdin.buffer


def _generate_batch(args):
    import pagedkv as pk
    from pagedkv import batch
    from pagedkv.engine.core import Engine
    from pagedkv.engine.speculation import read_speculative
    from pagedkv.tokenizer import Tokenizer

    if args.prompt is not None:
        raise UsageError("give a prompt or --input, not both")
    defaults = _sampling(args)
    _check_show(args)
    try:
        batch.check_params(defaults)
    except batch.LineError as error:
        raise UsageError(error.message) from None
    # All that a row depends on beside its line and the model's file.
    settings = {"sampling": batch.changed_params(defaults), "chat": args.chat,
                "kv_dtype": args.kv_dtype, "compute": args.compute}  # fmt: skip
    if args.threads:
        pk.set_num_threads(args.threads)
    lines = batch.Input(_open_input(args.input), "standard input" if args.input == "-" else args.input)
    output = (batch.RowStream(lambda row: _write(row.decode()), "standard output") if args.output in (None, "-")
              else batch.open_output(args.output, lines, args.overwrite))  # fmt: skip
    try:
        with _open(args.model) as file:
            # All that can be refused is, before the weights are read.
            if dict(_tokenizer_rows(file))["tokenizer"] != "none":
                Tokenizer.from_model_file(file)
            stamp = batch.Stamp(file, settings)
            plan = batch.make_plan(lines, output, stamp)
            outcome = batch.Outcome(plan.n_rows, plan.n_done, plan.n_errors)
            if plan.n_rows:
                model = pk.LlamaModel.from_file(file, compute=args.compute)
                stamp.name_model(model)
                batch.check_model(plan, output, stamp)
        output.open()
        started = time.perf_counter()
        if plan.n_done < plan.n_rows:
            n_seqs = args.max_num_seqs or 64
            pool = model.new_pool(n_blocks=args.n_blocks, block_size=BLOCK_SIZE, dtype=args.kv_dtype, n_seqs=n_seqs)
            drafter = read_speculative(_speculative(args), model, pool.n_blocks * BLOCK_SIZE, BLOCK_SIZE)
            engine = Engine(model, pool, n_seqs, 512, drafter=drafter)
            record = _record(args, engine)
            progress = batch.Progress(plan, engine, None if args.quiet else sys.stderr)
            with batch.stop_signals() as received:
                try:
                    batch.run(engine, lines, plan, output, stamp, defaults, args.chat, outcome, progress, received)
                except (OSError, MemoryError, batch.BatchError) as error:
                    raise UsageError(f"{_sentence(error)}; {_so_far(outcome, output)}") from None
                finally:
                    progress.close()
            _show(args, record)
    finally:
        output.close()
        if args.input != "-":
            lines.file.close()
    return _end_batch(args, plan, outcome, output, time.perf_counter() - started)


def _so_far(outcome, output):
    """What there is after a batch was cut off, and how it goes on."""
    rows = f"{outcome.n_done:,} of {_n(outcome.n_rows, 'row')}"
    return (f"{rows} are in {output.name}, and the same command goes on from there" if output.is_file
            else f"{rows} were written")  # fmt: skip


def _end_batch(args, plan, outcome, output, seconds):
    """Say how a batch ended; returns the exit status."""
    if outcome.signal is not None:
        _say(f"pagedkv: stopped: {_so_far(outcome, output)}")
        return 128 + outcome.signal
    if outcome.n_too_large:
        _say(f"pagedkv: {outcome.n_too_large:,} of {_n(outcome.n_rows, 'line')} got no row: more blocks are needed "
             f"than the pool has; the same command with --n-blocks {outcome.n_blocks_needed} runs them all")
    if not args.quiet:
        errors = f", {outcome.n_errors:,} of them with an error" if outcome.n_errors else ""
        before = f", {plan.n_done:,} from before" if plan.n_done else ""
        speed = (f"; {_n(outcome.n_tokens, 'token')} in {seconds:.1f} s, {outcome.n_tokens / seconds:.1f} tokens/s"
                 if outcome.n_tokens else "")  # fmt: skip
        _say(f"pagedkv: {_n(outcome.n_done, 'row')} in {output.name}{errors}{before}{speed}")
    return 1 if outcome.n_errors or outcome.n_too_large else 0


# ---- info ---------------------------------------------------------------------------------------


def _tokenizer_rows(file):
    """What a model brings to turn text into tokens, without building it."""
    if not file.path.is_dir():
        kind, pre = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
        names = ", ".join(str(name) for name in (kind, pre) if name is not None)
        return [("tokenizer", names or "none"),
                ("chat template", "yes" if "tokenizer.chat_template" in file.metadata else "none")]  # fmt: skip
    has_template = (file.path / "chat_template.jinja").is_file()
    try:
        has_template |= bool(json.loads((file.path / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        pass  # its absence is normal, and what is wrong with it the tokenizer will say
    return [("tokenizer", "tokenizer.json" if (file.path / "tokenizer.json").is_file() else "none"),
            ("chat template", "yes" if has_template else "none")]  # fmt: skip


def _config_rows(config):
    scaling = {"none": (), "linear": ("rope_factor",)}.get(config.rope_scaling, (
        "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_context_len"))  # fmt: skip
    for name in config.__dataclass_fields__:
        value = getattr(config, name)
        if name == "rope_freq_factors":
            if value is None:
                continue
            value = f"{len(value)} values, {min(value):.7g} to {max(value):.7g}"
        elif name.startswith("rope_") and name not in ("rope_theta", "rope_dim", "rope_scaling", *scaling):
            continue
        elif isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, float):
            value = f"{value:.7g}"  # a float32 carries no more
        elif isinstance(value, tuple):
            value = ", ".join(map(str, value)) or "none"
        yield name, "none" if value is None else value


def _info(args):
    with _open(args.model) as file:
        config = file.config
        types, n_params, n_bytes = {}, 0, 0
        for name in file.names():
            tensor = file.tensor(name)
            types[tensor.dtype] = types.get(tensor.dtype, 0) + 1
            size = 1
            for dim in tensor.shape:
                size *= dim
            n_params += size
            n_bytes += tensor.stored.size
        rows = [("file", file.path), ("parameters", f"{n_params:,}"), ("weight bytes", f"{n_bytes:,}"),
                ("weight types", ", ".join(f"{dtype} x {count}" for dtype, count in sorted(types.items()))),
                *_tokenizer_rows(file), *_config_rows(config)]  # fmt: skip
        token_nbytes = 2 * 4 * config.n_layers * config.kv_dim
        full = _size(token_nbytes * config.context_len)
        rows += [("KV bytes a token", f"{token_nbytes:,}"),
                 ("memory needed", f"{_size(4 * n_params)} for the weights as float32, and {_size(token_nbytes)} for "
                  f"each token in the KV cache: {full} for a full context")]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    _write("".join(f"{name:<{width}}  {value}\n" for name, value in rows))
    return 0


# ---- main ---------------------------------------------------------------------------------------


def _run(argv):
    if sys.stdout is None:
        raise UsageError("standard output is closed")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["bench"]:
        from pagedkv.bench.__main__ import main as bench

        sys.exit(bench(argv[1:], "pagedkv bench"))
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say(f"pagedkv: warning: {message}")
        args = _parse(argv)
        return args.run(args)


def main(argv=None):
    """Run the command.

    Parameters
    ----------
    argv : list of str, optional
        Arguments; those of the process by default.

    Returns
    -------
    int
        The exit status: 0, 1 for a batch with lines that failed, 2 for bad input or a full disk, 130 for Ctrl-C,
        143 for a batch that SIGTERM stopped.
    """
    try:
        try:
            return _run(argv)
        except SystemExit as end:  # after --help and --version
            return end.code or 0
        except _ReaderGone:
            return 0
        except KeyboardInterrupt:
            _say("pagedkv: interrupted")
            return 130
        except Exception as error:
            errors = sys.modules.get("pagedkv.errors")  # not there if it is the import that failed
            ours = (errors.PagedKVError,) if errors else ()
            if not isinstance(error, (UsageError, OSError, MemoryError, ValueError, *ours)):
                raise
            _say(f"pagedkv: error: {_sentence(error)}")
            return 2
        finally:
            _drop_unwritten()
    except KeyboardInterrupt:  # a second one, while the first was being dealt with
        return 130


if __name__ == "__main__":
    sys.exit(main())
