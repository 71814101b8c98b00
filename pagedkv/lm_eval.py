"""A model for EleutherAI's lm-evaluation-harness: importing this registers ``pagedkv`` there.

Needs the extra ``pagedkv[lm-eval]``. From the shell, with all arguments of ``lm_eval``::

    python -m pagedkv.lm_eval --model pagedkv --model_args pretrained=smollm2-135m --tasks hellaswag

A result depends on the model and on its own request, never on the batch: the harness's reports of scores that change
with the batch size do not arise.
"""

from collections import Counter
from contextlib import closing

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from pagedkv.engine import SamplingParams
from pagedkv.engine.core import Engine
from pagedkv.model import LlamaModel
from pagedkv.progress import progress_bar
from pagedkv.scoring import score

# Requests that are scored together: many enough to share prompts, few enough for a progress bar that moves.
_N_TOGETHER = 256
# Of the engine; see LLM.
_MAX_NUM_SEQS, _MAX_NUM_BATCHED_TOKENS = 64, 512
# Tokens of the default pool, at least: where a model's context is short, several requests run together all the same.
_POOL_TOKENS = 8192

# Generation options with the meanings of SamplingParams; the harness's own names for the others are read below.
_SAMPLING = {"top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float, "presence_penalty": float,
             "frequency_penalty": float}  # fmt: skip
_MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@register_model("pagedkv")
class PagedKVLM(TemplateLM):
    """A pagedkv model as the harness wants it.

    Parameters
    ----------
    pretrained : str or LlamaModel
        As of :meth:`LlamaModel.load`.
    weights, compute : str
        As of :meth:`LlamaModel.load`.
    kv_dtype : str
        Type of the pool, see :class:`BlockPool`.
    n_tokens : int, optional
        Tokens in the pool: more let more requests run together. By default those of the model's context, or 8,192 if
        it is shorter, or less where half of the available memory holds less.
    max_length : int, optional
        Tokens of a request, at most; by default the model's context, or the pool if it holds less. What is longer
        loses its beginning.
    max_gen_toks : int
        Tokens to generate where a task does not say.
    seed : int
        Of sampling, where a task asks for it.
    batch_size, max_batch_size, device : optional
        Taken because the harness passes them, ``"cuda:0"`` where its command is told nothing; they change nothing.

    Raises
    ------
    ValueError
        A `max_length` that the model's context or the pool does not hold.

    Examples
    --------
    >>> import lm_eval, pagedkv.lm_eval                                               # doctest: +SKIP
    >>> arguments = "pretrained=smollm2-135m,kv_dtype=float16"
    >>> lm_eval.simple_evaluate("pagedkv", arguments, tasks=["arc_easy"])["results"]  # doctest: +SKIP
    """

    def __init__(self, pretrained, weights="auto", compute="float32", kv_dtype="float32", n_tokens=None,
                 max_length=None, max_gen_toks=256, seed=0, batch_size=None, max_batch_size=None,
                 device=None):  # fmt: skip
        super().__init__()
        self.model = pretrained if isinstance(pretrained, LlamaModel) else LlamaModel.load(pretrained, weights, compute)
        self.tokenizer = self.model.tokenizer
        context_len = self.model.config.context_len
        self.pool = self.model.new_pool(n_tokens=n_tokens, dtype=kv_dtype, n_seqs=max(1, _POOL_TOKENS // context_len))
        room = min(context_len, self.pool.n_blocks * self.pool.block_size)
        self.max_length = room if max_length is None else int(max_length)
        if not 1 <= self.max_length <= room:
            raise ValueError(f"max_length {self.max_length} is outside [1, {room}], what the model's context of "
                             f"{context_len} tokens and the pool of {self.pool.n_blocks} blocks of "
                             f"{self.pool.block_size} hold")
        self.max_gen_toks, self.seed = int(max_gen_toks), int(seed)

    @property
    def eot_token_id(self):
        """The model's first end token."""
        if not self.model.config.eos_token_ids:
            raise ValueError("the model names no end token, which stands before a text that has nothing before it")
        return self.model.config.eos_token_ids[0]

    @property
    def prefix_token_id(self):
        """What a text without context follows: the beginning-of-text token, else the end token."""
        bos = self.model.config.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string, add_special_tokens=None, **_):
        """Ids of a text; by default with the special tokens that the model wants, once."""
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    def _score(self, pairs, disable_tqdm, done=lambda i, result: None):
        """(sum of log-probabilities, whether greedy) of each pair of token ids."""
        results = []
        with _bar("loglikelihood", len(pairs), disable_tqdm) as bar:
            for begin in range(0, len(pairs), _N_TOGETHER):
                for each in score(self.model, pairs[begin:begin + _N_TOGETHER], self.pool):
                    results.append((each.logprob, each.is_greedy))
                    done(len(results) - 1, results[-1])
                    bar.update()
        return results

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        pairs = []
        for (_, text), context, continuation in requests:
            # The last token is not fed, so a row more than max_length tokens fit.
            if len(continuation) > self.max_length:
                raise ValueError(f"the continuation {text[:40]!r} has {len(continuation)} tokens; "
                                 f"{self.max_length} fit")
            pairs.append((context[-(self.max_length + 1 - len(continuation)):], continuation))
        return self._score(pairs, disable_tqdm, lambda i, result: self.cache_hook.add_partial(
            "loglikelihood", requests[i][0], result))  # fmt: skip

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Log-probability of each whole text, in windows of max_length tokens where it is longer."""
        pairs, counts = [], []
        for request in requests:
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            windows = list(map(utils.make_disjoint_window, windows))
            pairs += windows
            counts.append(len(windows))
        results, totals = iter(self._score(pairs, disable_tqdm)), []
        for request, n in zip(requests, counts):
            totals.append(sum(next(results)[0] for _ in range(n)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """Continue each context up to a stop text, an end token or the number of tokens asked for.

        All requests go through one engine, each with its own options, as many at a time as the pool holds. Those whose
        options are impossible are refused before the first step.
        """
        params, seen = [], Counter()
        for request in requests:
            context, options = request.args
            # Another sample for a request that comes again, the same in each run.
            params.append(self._sampling_params(dict(options), self.seed + seen[context]))
            seen[context] += 1
        texts = [None] * len(requests)
        engine = Engine(self.model, self.pool, _MAX_NUM_SEQS, _MAX_NUM_BATCHED_TOKENS)
        coming = ((i, self._prompt_ids(request.args[0], each.max_tokens), each)
                  for i, (request, each) in enumerate(zip(requests, params)))
        try:
            with (_bar("generate_until", len(requests), disable_tqdm) as bar,
                  closing(engine.run(coming)) as steps):  # fmt: skip
                for ended in steps:
                    for i, request in ended:
                        if request.error is not None:
                            raise request.error
                        texts[i] = request.output().outputs[0].text
                        self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
                        bar.update()
        finally:
            engine.cache.evict(engine.cache.n_idle)  # the pool is for scoring too
        return texts

    def _sampling_params(self, options, seed):
        """A request's options, as the harness's own models read them."""
        options = {name: value for name, value in options.items() if value is not None}
        until = options.pop("until", [])
        until = [text for text in ([until] if isinstance(until, str) else until) if text]
        max_tokens = int(next((options.pop(name) for name in _MAX_TOKENS_NAMES if name in options), self.max_gen_toks))
        if max_tokens >= self.max_length:
            raise ValueError(f"{max_tokens} tokens to generate leave no room for a prompt in {self.max_length}")
        temperature = float(options.pop("temperature", 1.0 if options.get("do_sample") else 0.0))
        if not options.pop("do_sample", bool(temperature)):
            temperature = 0.0
        chosen = {name: kind(options.pop(name)) for name, kind in _SAMPLING.items() if name in options}
        if options.get("num_beams") == 1:
            del options["num_beams"]
        unknown = sorted(set(options) - {*_MAX_TOKENS_NAMES})
        if unknown:
            raise ValueError(f"generation options {unknown} are not known here")
        return SamplingParams(temperature=temperature, seed=seed, stop=until, max_tokens=max_tokens, **chosen)

    def _prompt_ids(self, context, max_tokens):
        """A context's ids, without their beginning where they would leave no place for `max_tokens`."""
        return (self.tok_encode(context) or [self.prefix_token_id])[-(self.max_length - max_tokens):]

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        """The text of a conversation; without a generation prompt it ends where its last message does."""
        text = self.tokenizer.apply_chat_template(chat_history, add_generation_prompt, tokenize=False)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[:text.rindex(last) + len(last)]

    @property
    def tokenizer_name(self):
        """The model's fingerprint: what the harness keeps prompts apart by."""
        return self.model.fingerprint


def _bar(kind, n, disable):
    return progress_bar(total=n, desc=f"Running {kind} requests", disable=disable)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
