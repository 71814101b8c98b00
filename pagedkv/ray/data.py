"""Offline batches over many machines: a class for ``ray.data.Dataset.map_batches``."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields, replace
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from pagedkv.batch.job import check_fits
from pagedkv.batch.lines import Line, LineError, check_params, read_request
from pagedkv.batch.rows import error_row
from pagedkv.engine import LLM, SamplingParams
from pagedkv.errors import PoolExhausted
from pagedkv.ray.threads import use_assigned_cpus

PREFIX = "generated_"
_LOGPROB = pa.struct({"token_id": pa.int32(), "logprob": pa.float64(), "rank": pa.int32(),
                      "decoded_token": pa.string()})  # fmt: skip
_TYPES = {
    "sample": pa.int32(), "text": pa.string(), "token_ids": pa.list_(pa.int32()), "finish_reason": pa.string(),
    "seed": pa.uint64(), "cumulative_logprob": pa.float64(), "logprobs": pa.list_(pa.list_(_LOGPROB)),
    "prompt_logprobs": pa.list_(pa.list_(_LOGPROB)), "error": pa.struct({"type": pa.string(), "message": pa.string()}),
}  # fmt: skip
_PARAMS = {each.name for each in fields(SamplingParams)}


class BatchLLM:
    """An LLM for ``map_batches``: each actor loads the model once, and the rows of a batch are decoded together.

    The actor's `num_cpus` are its threads. What a row gives depends on the row, the model and the parameters alone: not
    on the batch size, the number of actors or machines, or on what was run again after a worker died.

    Parameters
    ----------
    model : str
        As of :class:`pagedkv.LLM`; a file must be there on every machine.
    column : str
        The prompts: texts, lists of token ids, or lists of messages (structs with role and content).
    chat : bool
        Take a text as a user's message.
    sampling_params : SamplingParams or dict, optional
        Of what a row does not say. With `n` samples a row becomes `n` rows.
    row_params : list of str
        Columns with a row's own parameters, each named as the field of SamplingParams; null: as `sampling_params`.
    id_column : str, optional
        A column of texts or integers from which rows have their seeds, where neither they nor `sampling_params` have
        one. Without it the seed comes from the prompt's tokens, and rows with equal prompts give equal texts.
    seed : int
        From it and from the id, or the tokens, those seeds are made; another one gives other texts.
    **options
        As of :class:`pagedkv.LLM`, but `num_threads`.

    Notes
    -----
    A batch is a :class:`pyarrow.Table` (``batch_format="pyarrow"``) or a dict of arrays. Its columns stay, and these
    are added: ``generated_sample`` (int32), ``generated_text`` (string), ``generated_token_ids`` (list of int32),
    ``generated_finish_reason`` (string), ``generated_seed`` (uint64, with which :class:`pagedkv.LLM` gives the same),
    where asked for ``generated_cumulative_logprob`` (float64), ``generated_logprobs`` and
    ``generated_prompt_logprobs`` (for each token a list of structs, the token itself first), and ``generated_error``:
    null, or a struct of `type` and `message` as in the batches of ``pagedkv generate`` (docs/formats.md), or of the
    type ``pool_too_small``; then the others are null.

    Examples
    --------
    >>> rows = ray.data.read_parquet("prompts").map_batches(                              # doctest: +SKIP
    ...     BatchLLM, fn_constructor_kwargs={"model": "smollm2-135m"}, num_cpus=2, concurrency=4,
    ...     batch_size=256, batch_format="pyarrow")
    >>> rows.write_parquet("rows")                                                        # doctest: +SKIP
    """

    def __init__(self, model, column="prompt", *, chat=False, sampling_params=None, row_params=(), id_column=None,
                 seed=0, **options):
        if "num_threads" in options:
            raise TypeError("an actor has as many threads as its num_cpus; num_threads is not chosen beside it")
        if isinstance(sampling_params, Mapping):
            sampling_params = SamplingParams(**sampling_params)
        self._defaults = sampling_params or SamplingParams()
        try:
            check_params(self._defaults)
        except LineError as error:
            raise ValueError(error.message) from None
        if unknown := sorted(set(row_params) - _PARAMS):
            raise ValueError(f"row_params: SamplingParams has no {', '.join(unknown)}")
        self._column, self._chat, self._row_params = column, chat, list(row_params)
        self._id_column, self._seed = id_column, seed
        absent = {"logprobs", "cumulative_logprob"} if not self._may_have("logprobs") else set()
        absent |= {"prompt_logprobs"} if not self._may_have("prompt_logprobs") else set()
        self._names = [name for name in _TYPES if name not in absent]
        use_assigned_cpus()
        self._engine = LLM(model, **options)._engine

    def _may_have(self, name):
        return name in self._row_params or getattr(self._defaults, name) is not None

    def __call__(self, batch):
        """The batch with its new columns, a :class:`pyarrow.Table`."""
        if isinstance(batch, Mapping):
            batch = pa.table({name: pa.array(list(values)) for name, values in batch.items()})
        self._check_columns(batch.column_names)
        answers = [None] * len(batch)  # of each row a list of dicts
        with closing(self._engine.run(self._requests(batch, answers))) as steps:
            for ended in steps:
                for row, request in ended:
                    answers[row] = _answers(request)
        rows = [row for row, found in enumerate(answers) for _ in found]
        if len(rows) > len(batch):
            batch = batch.take(rows)
        found = [each for each in answers for each in each]
        for name in self._names:
            batch = batch.append_column(PREFIX + name, pa.array([each.get(name) for each in found], _TYPES[name]))
        return batch

    def _check_columns(self, names):
        wanted = [self._column, *self._row_params, *([] if self._id_column is None else [self._id_column])]
        for name in wanted:
            if name not in names:
                raise ValueError(f"the dataset has no column {name!r}; it has {', '.join(names)}")
        for name in self._names:
            if PREFIX + name in names:
                raise ValueError(f"the dataset has a column {PREFIX + name!r} already; rename or drop it")

    def _requests(self, batch, answers):
        """The requests of the rows; those that cannot run have their answers at once."""
        context_len = self._engine.model.config.context_len
        for row, values in enumerate(batch.to_pylist()):
            try:
                line = Line(row + 1, row + 1, "", self._fields(values))
                ids, params = read_request(line, self._engine.tokenizer, self._defaults, self._chat, context_len)
                check_fits(self._engine, ids, params)
                if params.seed is None:
                    params = replace(params, seed=self._row_seed(ids, values))
            except LineError as error:
                answers[row] = [error_row(error)]
            except PoolExhausted as error:
                answers[row] = [error_row(LineError("pool_too_small", error.message))]
            else:
                yield row, ids, params

    def _fields(self, values):
        """A row as a line of a batch says it."""
        prompt = values[self._column]
        if isinstance(prompt, str):
            found = {"prompt": prompt}
        elif isinstance(prompt, list) and prompt and all(isinstance(each, dict) for each in prompt):
            # A struct of Arrow has all fields that any row has; those that this one lacks are null.
            found = {"messages": [{name: value for name, value in each.items() if value is not None}
                                  for each in prompt]}  # fmt: skip
        elif isinstance(prompt, list):
            found = {"prompt_token_ids": prompt}
        else:
            raise LineError("bad_request", f"{self._column} must be a text, token ids or messages, not "
                            f"{'null' if prompt is None else type(prompt).__name__}")  # fmt: skip
        for name in self._row_params:
            if values[name] is not None:
                found[name] = values[name]
        if isinstance(found.get("logit_bias"), list):  # a map of Arrow
            found["logit_bias"] = {str(token_id): bias for token_id, bias in found["logit_bias"]}
        return found

    def _row_seed(self, ids, values):
        """Of the row's id, or of its tokens: neither knows where the row stands, or what ran before it."""
        what = np.asarray(ids, "<i8").tobytes()
        if self._id_column is not None:
            row_id = values[self._id_column]
            if isinstance(row_id, bool) or not isinstance(row_id, (str, int)):
                raise LineError("bad_request", f"{self._id_column} must be a text or an integer, not {row_id!r:.60}")
            what = repr(row_id).encode()
        state = blake2b(b"%d %s " % (self._seed, b"tokens" if self._id_column is None else b"id"), digest_size=8)
        state.update(what)
        return int.from_bytes(state.digest(), "little")


def _answers(request):
    """A dict of columns for each sample of a request that has ended."""
    if isinstance(request.error, PoolExhausted):
        raise request.error
    if request.error is not None:
        return [error_row(LineError("failed", str(request.error)))]
    output = request.output()
    return [{"sample": each.index, "text": each.text, "token_ids": each.token_ids, "finish_reason": each.finish_reason,
             "seed": request.seed, "cumulative_logprob": each.cumulative_logprob, "logprobs": _places(each.logprobs),
             "prompt_logprobs": _places(output.prompt_logprobs)} for each in output.outputs]  # fmt: skip


def _places(places):
    return places and [place and [{"token_id": token, "logprob": each.logprob, "rank": each.rank,
                                   "decoded_token": each.decoded_token} for token, each in place.items()]
                       for place in places]  # fmt: skip
