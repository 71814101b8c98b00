"""Which rows the next step computes: continuous batching, chunked prefill, admission and preemption."""

from bisect import insort

from pagedkv import _core
from pagedkv.engine.speculation import DRAFT_STEP_ROWS
from pagedkv.sequence import Sequence

# Rows of a step that give log-probabilities of prompts: each takes a row of logits, 200 kB with 49,152 of them.
PROMPT_LOGPROB_ROWS = 64


class Scheduler:
    """Samples that run and samples that wait, over one pool.

    All choices follow the order of arrival. Whoever runs goes on; who waits is admitted while there is place; when
    blocks run out the newest that runs gives all of its up and waits again, to be computed anew from its tokens. The
    oldest can always go on, alone at the worst, as no request is taken that does not fit the pool.

    Parameters
    ----------
    pool : BlockPool
    cache : PrefixCache
    max_num_seqs : int
        Sequences that run at the same time, at most.
    max_num_batched_tokens : int
        Rows of a step, at most.
    max_tokens : int
        Bound of every sequence.
    drafter : Drafter or None
    """

    def __init__(self, pool, cache, max_num_seqs, max_num_batched_tokens, max_tokens, drafter=None):
        self.pool, self.cache, self.drafter = pool, cache, drafter
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_tokens = max_tokens
        self.n_most = max_num_seqs  # of these that run now; fewer after a step that failed
        self.running = []  # samples with a sequence, in their order
        self.waiting = []  # samples without one, in their order
        self.n_preemptions = 0
        self._n_rows = self._n_logit_rows = 0  # of the next step, not given to anybody yet
        self._n_taken = 0  # blocks that are spoken for: by the next step, and by the rest of prompts under way

    def add(self, sample):
        """Let a sample wait for its turn."""
        insort(self.waiting, sample, key=lambda each: each.order)

    def run(self, sample):
        """A sample that has a sequence runs; one too many is preempted at once, and starts when there is place."""
        insort(self.running, sample, key=lambda each: each.order)
        if len(self.running) > self.n_most:
            self.preempt(self.running[-1])

    def remove(self, sample):
        """Forget a sample, and give back what it holds."""
        if sample in self.running:
            self.running.remove(sample)
        elif sample in self.waiting:
            self.waiting.remove(sample)
        self._drop_rows(sample)

    def preempt(self, sample):
        """Take a running sample's rows away; it waits, ahead of all that came later."""
        self.running.remove(sample)
        self._drop_rows(sample)
        sample.preempted = True
        self.add(sample)
        self.n_preemptions += 1

    def reset(self, samples):
        """Forget everything, and free the sequences of `samples`: all that there are."""
        self.running, self.waiting = [], []
        for sample in samples:
            if sample.seq is not None:
                sample.seq.free()
            sample.seq, sample.path, sample.shared_tail = None, [], None
            if self.drafter is not None:
                self.drafter.forget(sample)
        self.cache.leave_all()

    def _drop_rows(self, sample):
        if sample.seq is not None:
            sample.seq.free()
            sample.seq = None
        if self.drafter is not None:
            self.drafter.forget(sample)
        self.cache.leave(sample.path)
        sample.path, sample.shared_tail = [], None

    def schedule(self):
        """Choose the rows of the next step, and make sure that the pool has blocks for them.

        Returns
        -------
        list of (Sample, int, list of int)
            How many of its pending tokens each computes, and the drafts that follow them. Empty: nobody waits or runs,
            or (where somebody outside holds blocks) the first that waits does not fit.
        """
        self._n_rows, self._n_logit_rows = self.max_num_batched_tokens, PROMPT_LOGPROB_ROWS
        rows, self._n_taken = self._go_on()
        self._n_rows = self.max_num_batched_tokens - sum(n for _, n in rows)
        # What prompts under way still need after this step.
        self._n_taken += sum(self._n_blocks(len(sample.tokens)) - self._n_blocks(len(sample.seq) + n)
                             for sample, n in rows)
        rows += self._admit()
        drafts = self._draft(rows) if self.drafter is not None else {}
        return [(sample, n, drafts.get(sample, [])) for sample, n in rows]

    def _share(self, sample):
        """The rows that a sample gets of those left of this step."""
        n = min(sample.n_pending, self._n_rows)
        if sample.needs_prompt_logits:
            n = min(n, self._n_logit_rows)
            self._n_logit_rows -= n
        self._n_rows -= n
        return n

    def _go_on(self):
        """Rows of those that run, who decode first, so that no prompt keeps them waiting; and the blocks they take."""
        order = sorted(self.running, key=lambda each: each.n_pending > 1)
        rows = [(sample, n) for sample in order if (n := self._share(sample))]
        while True:
            needed = _core.blocks_needed([sample.seq for sample, _ in rows], [n for _, n in rows])
            if self._free(needed):
                return rows, needed
            newest = self.running[-1]
            self.preempt(newest)
            rows = [row for row in rows if row[0] is not newest]

    def _n_blocks(self, n_tokens):
        return -(-n_tokens // self.pool.block_size)

    def _free(self, n_blocks):
        """Whether the pool has so many free blocks, after idle ones of the cache were evicted where they must."""
        short = n_blocks - self.pool.n_free
        if short > self.cache.n_idle:
            return False
        if short > 0:
            self.cache.evict(short)
        return True

    def _admit(self):
        """Start those who wait, oldest first, while rows and blocks are left.

        A sample starts where all its rows fit beside what the prompts under way still need, and not only the first
        chunk: else long prompts would push each other out halfway. One whose next block is just being computed by
        another waits for it, and those behind it may go ahead: of prompts that begin alike and come together, the
        first computes the beginning for all."""
        rows, block_size = [], self.pool.block_size
        coming = {self.cache.next_block(each.path, each.tokens) for each in self.running} - {None}
        place = 0
        while (place < min(len(self.waiting), self.max_num_seqs) and self._n_rows > 0
               and len(self.running) < self.n_most):  # fmt: skip
            sample = self.waiting[place]
            path = [] if sample.needs_prompt_logits else self.cache.find(sample.tokens)
            if not sample.needs_prompt_logits and self.cache.next_block(path, sample.tokens) in coming:
                place += 1
                continue
            self.cache.hold(path)
            # The last token's logits are wanted even where its row is there: its block is then copied and the row
            # computed once more.
            n_rows = min(len(path) * block_size, len(sample.tokens) - 1)
            needed = self._n_blocks(len(sample.tokens)) - n_rows // block_size
            if not self._free(self._n_taken + needed):
                self.cache.leave(path)
                break
            sample.seq = Sequence.from_blocks(self.pool, [node.block_id for node in path], self.max_tokens)
            sample.seq.truncate(n_rows)
            n_kept = n_rows // block_size
            self.cache.leave(path[n_kept:])
            sample.path = path[:n_kept]
            sample.shared_tail = (n_kept, path[n_kept].block_id) if n_kept < len(path) else None
            sample.preempted = False
            self.cache.n_queries += len(sample.tokens)
            self.cache.n_hits += n_rows
            if sample.request.n_cached is None:
                sample.request.n_cached = n_rows
            self.running.append(self.waiting.pop(place))
            coming |= {self.cache.next_block(sample.path, sample.tokens)} - {None}
            self._n_taken += needed
            n = self._share(sample)
            if n:
                rows.append((sample, n))
        self.running.sort(key=lambda each: each.order)
        return rows

    def _draft(self, rows):
        """Drafts for those who decode, out of rows and blocks that nobody else wants; a dict of Sample to tokens."""
        n_left = min(self._n_rows, DRAFT_STEP_ROWS - sum(n for _, n in rows))
        decoding = [sample for sample, n in rows if n == sample.n_pending == 1 and sample.request.forked]
        wanted = []
        for i, sample in enumerate(decoding):
            # The token that the last draft leads to is still the sample's, so one less may be drafted.
            n_to_come = sample.request.max_tokens - sample.n_generated - 1
            n = min(self.drafter.n_wanted(sample), n_to_come, n_left // (len(decoding) - i))
            if n > 0:
                wanted.append((sample, n))
                n_left -= n
        drafts = {}
        for (sample, n), tokens in zip(wanted, self.drafter.propose(wanted) if wanted else ()):
            tokens = self._that_fit(len(sample.seq) + 1, tokens[:n])
            if tokens:
                drafts[sample] = tokens
        return drafts

    def _that_fit(self, n_rows, tokens):
        """Those drafts after a sequence of `n_rows` for which blocks are free; they are spoken for then."""
        n_held = self._n_blocks(n_rows)
        while tokens:
            needed = self._n_blocks(n_rows + len(tokens)) - n_held
            if needed == 0 or self._free(self._n_taken + needed):
                self._n_taken += needed
                break
            tokens = tokens[:(n_held + needed - 1) * self.pool.block_size - n_rows]
        return tokens
