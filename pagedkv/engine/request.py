"""A request and its samples: tokens so far, text so far, and why they end."""

import numpy as np

from pagedkv.engine.outputs import CompletionOutput, RequestOutput


class Request:
    """A prompt with its samples.

    Parameters
    ----------
    number : int
        Order of arrival.
    request_id : str
    prompt : str or None
    prompt_ids : list of int
    params : SamplingParams
    seed : int
        Of the request: that of `params`, or the engine's choice.
    max_tokens : int
        Of each sample, as the context and the pool allow.
    end_ids : frozenset of int
        The model's own end tokens; empty where they are ignored.
    tokenizer : Tokenizer or None
        Makes the text.
    """

    def __init__(self, number, request_id, prompt, prompt_ids, params, seed, max_tokens, end_ids, tokenizer):
        self.number, self.request_id = number, request_id
        self.prompt, self.prompt_ids, self.params, self.seed = prompt, prompt_ids, params, seed
        self.max_tokens, self.end_ids = max_tokens, end_ids
        self.stop_ids = end_ids | frozenset(params.stop_token_ids)
        self.tokenizer = tokenizer if params.detokenize else None
        self.samples = [Sample(self, i) for i in range(params.n)]
        self.forked = False  # whether the samples past the first have begun
        self.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        self.n_cached = None  # of the prompt's tokens; known when the first sample starts
        self.error = None
        self.unique_prompt_ids = None  # for the repetition penalty

    @property
    def finished(self):
        return all(sample.finish_reason is not None for sample in self.samples)

    def end(self, reason, error=None):
        """End what goes on."""
        if not self.finished:
            self.error = error
        for sample in self.samples:
            if sample.finish_reason is None:
                sample.finish(reason)

    def output(self, delta=False):
        """A RequestOutput of all so far, or, with `delta`, of what is new since the last one."""
        return RequestOutput(self.request_id, self.prompt, self.prompt_ids, self.prompt_logprobs,
                             [sample.output(delta) for sample in self.samples], self.finished, self.n_cached or 0,
                             self.error)  # fmt: skip

    @property
    def has_news(self):
        return any(sample.has_news for sample in self.samples)


class Sample:
    """One text of a request. Its sequence may be taken away and computed again from its tokens at any time."""

    def __init__(self, request, index):
        self.request, self.index = request, index
        self.tokens = list(request.prompt_ids)
        self.seq = None  # while it runs
        self.path = []  # Nodes of the prefix cache that it uses
        self.shared_tail = None  # (place in the table, id) of a partly filled block that it began on with others
        self.preempted = False  # whether it waits as its rows were taken away
        self.n_drafts = None  # worth proposing next, where the engine speculates
        self.ngrams, self.n_looked = None, 0  # the drafter's: places of n-grams, and tokens that are in there
        params = request.params
        self.counts = {}  # token -> times generated, for penalties
        self.text = ""
        self.logprobs = None if params.logprobs is None else []
        self.cumulative_logprob = None if params.logprobs is None else 0.0
        self.finish_reason = self.stop_reason = None
        self._stream = request.tokenizer and request.tokenizer.stream(params.skip_special_tokens, continuing=True)
        # The beginning of a stop text may not be shown: it could be cut off.
        self._n_hold = 0 if params.include_stop_str_in_output else max(map(len, params.stop), default=1) - 1
        self._n_shown = self._n_shown_tokens = 0
        self._shown_end = False

    @property
    def order(self):
        """Samples run in this order, and the last of those that run is the first to give its blocks up."""
        return self.request.number, self.index

    @property
    def n_generated(self):
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def n_pending(self):
        """Tokens whose rows are to be computed before the next token can be drawn."""
        return len(self.tokens) - (0 if self.seq is None else len(self.seq))

    @property
    def needs_prompt_logits(self):
        """Whether rows of the prompt are wanted that no step has given yet: none may come from the cache then."""
        request = self.request
        return (self.index == 0 and request.prompt_logprobs is not None
                and len(request.prompt_logprobs) < len(request.prompt_ids))

    def seen_ids(self):
        """Distinct ids of the prompt and of the text so far, an int64 array."""
        request = self.request
        if request.unique_prompt_ids is None:
            request.unique_prompt_ids = np.unique(np.asarray(request.prompt_ids, np.int64))
        return np.union1d(request.unique_prompt_ids, np.fromiter(self.counts, np.int64, len(self.counts)))

    def append(self, token, logprobs=None):
        """Take the next token, with its dict of Logprobs where they are wanted, and see whether the text ends."""
        request, params = self.request, self.request.params
        self.tokens.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token].logprob
        n = self.n_generated
        may_stop = n > params.min_tokens
        stops = may_stop and token in request.stop_ids
        if self._stream is not None and not (stops and not params.include_stop_str_in_output):
            n_before = len(self.text)
            self.text += self._stream.push(token)
            if params.stop and may_stop and self._cut_at_stop(n_before):
                return
        if stops:
            self.finish("stop", None if token in request.end_ids else token)
        elif n >= request.max_tokens:
            self.finish("length")

    def _cut_at_stop(self, n_before):
        """End at the earliest stop text that the text past `n_before` completes."""
        params = self.request.params
        found = []
        for stop in params.stop:
            at = self.text.find(stop, max(0, n_before - len(stop) + 1))
            if at >= 0:
                found.append((at, len(found), stop))
        if not found:
            return False
        at, _, stop = min(found)
        self.text = self.text[: at + (len(stop) if params.include_stop_str_in_output else 0)]
        self._stream = None  # what bytes it holds came after
        self.finish("stop", stop)
        return True

    def finish(self, reason, stop_reason=None):
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._stream is not None:
            self.text += self._stream.finish()
            self._stream = None

    @property
    def has_news(self):
        if self.finish_reason is not None:
            return not self._shown_end
        return self.n_generated > self._n_shown_tokens

    def output(self, delta):
        begin, first = (self._n_shown, self._n_shown_tokens) if delta else (0, 0)
        end = len(self.text)
        if delta and self.finish_reason is None:
            end = max(begin, end - self._n_hold)
        token_ids = self.tokens[len(self.request.prompt_ids) + first:]
        logprobs = None if self.logprobs is None else self.logprobs[first:]
        if delta:
            self._n_shown, self._n_shown_tokens = end, self.n_generated
            self._shown_end = self.finish_reason is not None
        return CompletionOutput(self.index, self.text[begin:end], token_ids, self.cumulative_logprob, logprobs,
                                self.finish_reason, self.stop_reason)  # fmt: skip
