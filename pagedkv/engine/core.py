"""The engine: requests in, steps of the model, tokens out. Knows no prompts as text and no threads."""

import functools
import hashlib
import time
from collections import deque

import numpy as np

from pagedkv.engine.pool_map import PoolMap, SampleBlocks, count_owners
from pagedkv.engine.prefix_cache import PrefixCache
from pagedkv.engine.request import Request
from pagedkv.engine.sampler import Sampler
from pagedkv.engine.scheduler import Scheduler
from pagedkv.errors import BoundsError, PoolExhausted, TokenError


def _changes(method):
    """A method that is counted while it runs: a process forked meanwhile has an engine that is half changed."""

    @functools.wraps(method)
    def counted(self, *args, **options):
        self.n_inside += 1
        try:
            return method(self, *args, **options)
        finally:
            self.n_inside -= 1

    return counted


class Engine:
    """Runs requests over one pool.

    How a token is scheduled never shows in it: a row's bits depend on its own sequence alone, and the random number of
    a draw on (seed, sample, position) alone.

    Parameters
    ----------
    model : LlamaModel
    pool : BlockPool
        Whose blocks fit the model. Others may use it too; the engine does with what is free.
    max_num_seqs, max_num_batched_tokens : int
        Sequences at the same time, and rows of a step, at most.
    enable_prefix_caching : bool
    seed : int
        Of the seeds that requests without one get.
    drafter : Drafter, optional
        Proposes tokens that the steps check.
    """

    def __init__(self, model, pool, max_num_seqs, max_num_batched_tokens, enable_prefix_caching=True, seed=0,
                 drafter=None):
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.model, self.pool, self._seed = model, pool, seed
        self.tokenizer = _tokenizer_or_none(model)
        # The last token of a text is never fed, so its row takes no place.
        self.max_model_len = min(model.config.context_len, pool.n_blocks * pool.block_size + 1)
        self.cache = PrefixCache(pool, enable_prefix_caching)
        self.scheduler = Scheduler(pool, self.cache, max_num_seqs, max_num_batched_tokens, model.config.context_len,
                                   drafter)  # fmt: skip
        self.sampler = Sampler(model.config.vocab_size, self.tokenizer)
        self._end_ids = frozenset(model.config.eos_token_ids)
        if self.tokenizer is not None:
            self._end_ids |= frozenset(self.tokenizer.eos_token_ids)
        self._end_ids = frozenset(token for token in self._end_ids if 0 <= token < model.config.vocab_size)
        self._n_requests = self._n_tokens = self._n_steps = self._n_drafted = self._n_accepted = 0
        self._most_used = self._most_unshared = 0
        self.records = []  # PoolRecords that want to see the pool in each step
        self._busy_s = 0.0
        self._torn = None  # the request that takes a token just now
        self._stepping = []  # requests of the rows of the last step
        self.n_inside = 0  # calls that are changing the engine just now
        self._live = {}  # request number -> Request that runs or waits, whatever the scheduler's lists hold
        self._leaving = deque()  # arguments of aborts that are still to be done
        self._is_busy = False  # a call is under way
        self._is_cut = False  # one was cut off, and lists and counts may not agree

    def check(self, prompt_ids, params):
        """Raise, with the numbers, what keeps a request from ever running; returns its tokens a sample, at most.

        Raises
        ------
        ValueError, TokenError, BoundsError, PoolExhausted
        """
        config, vocab_size = self.model.config, self.model.config.vocab_size
        n = len(prompt_ids)
        if not n:
            raise ValueError("it has no tokens")
        for place, token in enumerate(prompt_ids):
            if not 0 <= token < vocab_size:
                raise TokenError(f"token {token} at place {place} is outside [0, {vocab_size})")
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if not 0 <= token < vocab_size:
                    raise TokenError(f"token {token} of {name} is outside [0, {vocab_size})")
        if params.stop and self.tokenizer is None:
            raise ValueError("it has stop texts, but the model has no tokenizer to make text with")
        if n >= config.context_len:
            raise BoundsError(f"it has {n} tokens, the model's context holds {config.context_len}, of which a prompt "
                              "may take all but one")
        max_tokens = (self.max_model_len if params.max_tokens is None else config.context_len) - n
        if params.max_tokens is not None:
            max_tokens = min(max_tokens, params.max_tokens)
        n_rows = n + max(1, max_tokens) - 1
        needed = -(-n_rows // self.pool.block_size)
        if needed > self.pool.n_blocks:
            raise PoolExhausted(f"{n} tokens and {max_tokens} to come need {needed} blocks of {self.pool.block_size}, "
                                f"the pool has {self.pool.n_blocks}")
        return max_tokens

    def add(self, prompt, prompt_ids, params, request_id=None):
        """Take a request, which :meth:`check` lets pass; it runs with the coming steps.

        Returns
        -------
        Request
        """
        request = self.request(prompt, prompt_ids, params, request_id)
        self.start(request)
        return request

    def request(self, prompt, prompt_ids, params, request_id=None):
        """The first half of :meth:`add`: a request that nothing knows yet. Who keeps it before :meth:`start` can end it
        whatever happens in between."""
        return self._request(prompt, prompt_ids, params, request_id, self.check(prompt_ids, params))

    @_changes
    def start(self, request):
        """The second half: it waits for its turn."""
        self.settle()
        self._live[request.number] = request
        self._is_cut = True
        self.scheduler.add(request.samples[0])
        self._is_cut = False

    def _request(self, prompt, prompt_ids, params, request_id, max_tokens):
        number, self._n_requests = self._n_requests, self._n_requests + 1
        seed = params.seed
        if seed is None:
            digest = hashlib.blake2b(f"{self._seed} {number}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little")
        return Request(number, str(number) if request_id is None else request_id, prompt, prompt_ids, params, seed,
                       max_tokens, frozenset() if params.ignore_eos else self._end_ids, self.tokenizer)  # fmt: skip

    def refused(self, prompt, prompt_ids, params, error):
        """A request that never runs: it has ended, with this error."""
        request = self._request(prompt, prompt_ids, params, None, 1)
        request.end("error", error)
        return request

    @_changes
    def abort(self, request, reason="abort", error=None):
        """End a request now, and give its blocks back. One that has ended stays as it is.

        From inside another call (the collector may close a stream anywhere) it takes effect when that one is over."""
        self._leaving.append((request, reason, error))
        self.settle()

    def settle(self):
        """Before anything else: put in order what a call left that was cut off, and end who is to end.

        An exception, Ctrl-C too, may come between any two lines, here as well: what is not done is done by the next
        call."""
        if self._is_busy:
            return
        self._is_busy = True
        try:
            if self._is_cut:
                self._recover()
            self._is_cut = True
            while self._leaving:
                self._end(*self._leaving[0])
                self._leaving.popleft()
            self._is_cut = False
        finally:
            self._is_busy = False

    def _end(self, request, reason="abort", error=None):
        request.end(reason, error)
        for sample in request.samples:
            self.scheduler.remove(sample)
        self._live.pop(request.number, None)

    @property
    def has_work(self):
        return bool(self.scheduler.running or self.scheduler.waiting)

    def run(self, requests, step=None):
        """Run requests as they come, and hand out those that have ended after each step.

        Parameters
        ----------
        requests : iterable of (object, list of int, SamplingParams)
            A key, and a prompt and its parameters that :meth:`check` lets pass. One is asked for when there is place
            for its samples: as many as run at a time, and as many again that wait, are in memory.
        step : callable, optional
            Instead of :meth:`step`.

        Yields
        ------
        list of (object, Request)
            The keys and requests that a step has ended, if any; one may have ended with an error.

        Notes
        -----
        Nobody else may step meanwhile. Closing the generator, or an exception in it, ends the requests under way.
        """
        most, coming, step = 2 * self.scheduler.max_num_seqs, iter(requests), step or self.step
        going, n_samples = {}, 0  # number of a request -> its key and itself; samples of them all
        try:
            ready = next(coming, None)
            while ready is not None or going:
                while ready is not None and (not going or n_samples + ready[2].n <= most):
                    key, prompt_ids, params = ready
                    request = self.request(None, prompt_ids, params)
                    going[request.number] = key, request
                    self.start(request)
                    n_samples += params.n
                    ready = next(coming, None)
                ended = [going.pop(request.number) for request in step() if request.finished]
                n_samples -= sum(request.params.n for _, request in ended)
                yield ended
        finally:
            for _, request in going.values():
                self.abort(request)

    @_changes
    def step(self):
        """One step of the model, over rows of as many requests as fit.

        After an exception all rows are given back and the engine is usable; requests that go on are computed anew from
        their tokens by the next steps, with the same outcome.

        Returns
        -------
        list of Request
            Those that got a token or ended, each once.
        """
        self.settle()
        if self._is_busy:
            raise RuntimeError("a step was asked for inside a step")
        started = time.perf_counter()
        self._is_busy = self._is_cut = True
        try:
            rows = self.scheduler.schedule()
            self._stepping = list({sample.request.number: sample.request for sample, *_ in rows}.values())
            requests = self._run(rows) if rows else [self._refuse_first()] if self.scheduler.waiting else []
            self._is_cut = False
            self.scheduler.n_most = min(2 * self.scheduler.n_most, self.scheduler.max_num_seqs)
            return requests
        except BaseException as error:
            self._recover(error)
            raise
        finally:
            self._is_busy = False
            self._busy_s += time.perf_counter() - started
            self.settle()

    def step_for_all(self):
        """As :meth:`step`, where requests are of many users: an exception ends the request that it belongs to, and no other.

        Whose step fails though it runs alone ends with the exception. Else all but half of those that ran wait from now
        on, and after each step that succeeds twice as many may run again."""
        self._stepping = list(self._live.values())
        try:
            return self.step()
        except BaseException as error:
            n_most = min(self.scheduler.n_most, len(self._stepping))
            if all(request.error is None for request in self._stepping):  # else the one whose token it was has ended
                if n_most == 1:
                    self.abort(self._stepping[0], "error", error)
                self.scheduler.n_most = max(1, n_most // 2)
            return [request for request in self._stepping if request.finished]

    def _recover(self, error=None):
        """After an exception anywhere: nothing runs, and who has not ended waits to be computed anew. May be cut off
        itself, and done again."""
        requests = list(self._live.values())
        self.scheduler.reset([sample for request in requests for sample in request.samples])
        if self._torn is not None:  # its last token may be half there
            self._torn.end("error", error or RuntimeError("the step that gave its last token was cut off"))
            self._torn = None
        for request in requests:  # in the order of arrival
            if request.finished:
                self._live.pop(request.number, None)
                continue
            request.forked = request.forked or request.samples[0].n_generated > 0
            for sample in request.samples if request.forked else request.samples[:1]:
                if sample.finish_reason is None:
                    self.scheduler.add(sample)
        self._is_cut = False

    def _run(self, rows):
        # Rows of logits: for the prompt's log-probabilities those of all its tokens, else those that tokens are drawn
        # from, the last pending one's and the drafts'.
        counts = [n if sample.needs_prompt_logits else 1 + len(drafts) if n == sample.n_pending else 0
                  for sample, n, drafts in rows]
        batch = []
        for sample, n, drafts in rows:
            first = len(sample.seq)
            batch.append((sample.seq, np.array(sample.tokens[first:first + n] + drafts, np.int64)))
        logits = self.model.step(batch, n_logits=counts, out=self.sampler.rows(sum(counts)))
        self._n_steps += 1
        self._note_blocks()

        wanted, end = [], 0
        for (sample, _, drafts), count in zip(rows, counts):
            end += count
            if sample.needs_prompt_logits:
                self._add_prompt_logprobs(sample, logits[end - count:end])
            if sample.n_pending == -len(drafts):
                wanted += [(end - 1 - len(drafts), each, drafts) for each in self._drawn_with(sample)]
        requests = self._draw(logits, wanted)
        for sample, _, drafts in rows:
            if drafts:
                self._take_back(sample, drafts)
            self.cache.extend(sample.path, sample.tokens, sample.seq)
        for request in requests:
            if request.error is not None:
                self._end(request, "error", request.error)
                continue
            self._fork(request)
            for sample in request.samples:
                if sample.finish_reason is not None:
                    self.scheduler.remove(sample)
            if request.finished:
                del self._live[request.number]
        return requests

    def _note_blocks(self):
        """Compare the blocks in use with the most so far: in fact, and if each sample had all of its own."""
        n_used = self.pool.n_blocks - self.pool.n_free - self.cache.n_idle
        self._most_used = max(self._most_used, n_used)
        for record in self.records:
            record.note(n_used, self.pool_map)
        block_size = self.pool.block_size
        self._most_unshared = max(self._most_unshared, sum(
            len(self._drawn_with(sample)) * -(-len(sample.seq) // block_size) for sample in self.scheduler.running))

    def _draw(self, logits, wanted):
        """Give samples their tokens: the next one, and while it is the draft, the one after.

        A draft's row was computed after the very tokens that plain decoding would have fed, and the token is drawn
        from it as plain decoding would: what a draft is decides only how many tokens a step gives.

        Parameters
        ----------
        logits : numpy.ndarray
        wanted : list of (int, Sample, list of int)
            The row of the next token, and the drafts whose rows follow it.

        Returns
        -------
        list of Request
            Those of the samples, each once; with an error where a row held no numbers.
        """
        requests, place = {}, 0
        while wanted:
            drawn = self.sampler.draw(logits, [(row + place, sample) for row, sample, _ in wanted])
            further = []
            for each, (token, logprobs) in zip(wanted, drawn):
                _, sample, drafts = each
                request = requests.setdefault(sample.request.number, sample.request)
                if token < 0:
                    request.error = ValueError("the model's logits hold NaN, or no finite maximum")
                elif request.error is None:
                    self._torn = request
                    sample.append(token, logprobs)
                    self._torn = None
                    self._n_tokens += 1
                    if sample.finish_reason is None and drafts[place:place + 1] == [token]:
                        further.append(each)
            wanted, place = further, place + 1
        return list(requests.values())

    def _take_back(self, sample, drafts):
        """Cut a sequence to the rows of the sample's own tokens, the last of which is pending or has ended it."""
        n_before = len(sample.seq) - len(drafts)
        sample.seq.truncate(len(sample.tokens) - 1)
        n_accepted = max(0, len(sample.seq) - n_before)
        self.scheduler.drafter.judge(sample, len(drafts), n_accepted)
        self._n_drafted += len(drafts)
        self._n_accepted += n_accepted

    @staticmethod
    def _drawn_with(sample):
        """Samples whose next token comes of this one's logits: all of a request, when its prompt is done."""
        request = sample.request
        return [sample] if request.forked else request.samples

    def _fork(self, request):
        """Let the samples past the first begin, with the rows of the first."""
        if request.forked:
            return
        request.forked = True
        first = request.samples[0]
        if first.seq is not None and len(request.samples) > 1 and len(first.seq) % self.pool.block_size:
            place = len(first.seq) // self.pool.block_size
            first.shared_tail = place, int(first.seq.block_table[place])
        for sample in request.samples[1:]:
            if sample.finish_reason is None and first.seq is not None:
                sample.seq = first.seq.fork()
                sample.path, sample.shared_tail = list(first.path), first.shared_tail
                self.cache.hold(sample.path)
                self.scheduler.run(sample)
            elif sample.finish_reason is None:
                self.scheduler.add(sample)

    def _add_prompt_logprobs(self, sample, logits):
        """Log-probabilities of the prompt's tokens that follow the rows just computed."""
        request = sample.request
        first = len(sample.seq) - len(logits)  # position of the first row; its logits are about the next token
        known = request.prompt_logprobs
        rows = [i for i in range(len(logits)) if len(known) <= first + i + 1 < len(request.prompt_ids)]
        if rows:
            tokens = [request.prompt_ids[first + i + 1] for i in rows]
            known += self.sampler.logprobs(logits, rows, tokens, [request.params.prompt_logprobs] * len(rows))

    def _refuse_first(self):
        """End the request that would run next: nothing runs, and yet its blocks are not there."""
        request = self.scheduler.waiting[0].request
        needed = -(-len(self.scheduler.waiting[0].tokens) // self.pool.block_size)
        n_free = self.pool.n_free + self.cache.n_idle
        error = PoolExhausted(f"needs {needed} blocks, {n_free} of {self.pool.n_blocks} are free while nothing of this "
                              "engine runs: the others are held outside it")
        self._end(request, "error", error)
        return request

    def pool_map(self):
        """The pool as it is now; between steps, or where a step has computed its rows.

        Returns
        -------
        PoolMap
        """
        samples = [SampleBlocks.of(sample) for request in self._live.values() for sample in request.samples
                   if sample.finish_reason is None]  # fmt: skip
        return PoolMap(self.pool.block_size, self.pool.ref_counts, self.cache.owned(), tuple(samples),
                       self.stats())  # fmt: skip

    def stats(self):
        """What the engine does now and has done.

        Returns
        -------
        dict
            ``running``, ``waiting``: samples. ``blocks_free``, ``blocks_used`` (by sequences), ``blocks_cached``
            (kept for later prompts, evicted when needed): all add up to the pool. ``blocks_shared``: of those used,
            held by more than one sequence; that the cache holds one does not count. ``blocks_used_most``,
            ``blocks_unshared_most``: the most that a step had, and that it would have had without sharing.
            ``prefix_queries``, ``prefix_hits``: tokens looked for in the prefix cache, and found. ``evicted``: blocks that
            it gave back for others. ``preemptions``, ``steps``, ``tokens``: since the start. ``drafted``, ``accepted``:
            tokens proposed by speculation, and those that were drawn then. ``tokens_per_s``: drawn in the time that steps
            took.
        """
        n_free, n_cached = self.pool.n_free, self.cache.n_idle
        # Without a lock, as AsyncLLM asks: a sequence may be taken away meanwhile.
        seqs = [sample.seq for sample in list(self.scheduler.running)]
        n_owners = count_owners([seq.block_table for seq in seqs if seq is not None], self.pool.n_blocks)
        return {
            "running": len(self.scheduler.running), "waiting": len(self.scheduler.waiting),
            "blocks_free": n_free, "blocks_used": self.pool.n_blocks - n_free - n_cached, "blocks_cached": n_cached,
            "blocks_shared": int((n_owners > 1).sum()),
            "blocks_used_most": self._most_used, "blocks_unshared_most": self._most_unshared,
            "prefix_queries": self.cache.n_queries, "prefix_hits": self.cache.n_hits,
            "evicted": self.cache.n_evicted,
            "preemptions": self.scheduler.n_preemptions, "steps": self._n_steps, "tokens": self._n_tokens,
            "drafted": self._n_drafted, "accepted": self._n_accepted,
            "tokens_per_s": self._n_tokens / self._busy_s if self._busy_s else 0.0,
        }  # fmt: skip


def _tokenizer_or_none(model):
    """The model's tokenizer; None where its file has none."""
    from pagedkv.errors import FormatError

    try:
        return model.tokenizer
    except FormatError:
        return None
