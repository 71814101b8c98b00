"""From rows of logits to the next tokens of samples, and their log-probabilities."""

import numpy as np

from pagedkv import _core
from pagedkv.engine.outputs import Logprob


class Sampler:
    """Draws for the samples of a step; the arithmetic over the vocabulary is the core's.

    Parameters
    ----------
    vocab_size : int
    tokenizer : Tokenizer or None
        Gives the text of single tokens.
    """

    def __init__(self, vocab_size, tokenizer):
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        self._buffers = {}  # what for -> rows
        self._texts = {}  # token -> its text

    def rows(self, n):
        """Place for `n` rows of logits; valid until the next call. Fresh memory would cost page faults each time."""
        return self._rows("logits", n)

    def _rows(self, purpose, n):
        rows = self._buffers.get(purpose)
        if rows is None or n > len(rows):
            n_before = 0 if rows is None else len(rows)
            rows = self._buffers[purpose] = np.empty((max(n, 2 * n_before), self._vocab_size), np.float32)
        return rows[:n]

    def draw(self, logits, wanted):
        """The next token of each sample.

        Parameters
        ----------
        logits : numpy.ndarray
            float32 ``[n, vocab_size]``; not changed.
        wanted : list of (int, Sample)
            Row of the logits, and whose token it gives.

        Returns
        -------
        list of (int, dict of int to Logprob or None)
            The token, -1 where the row holds NaN or has no finite maximum; its log-probabilities where asked for.
        """
        edits = [_edits(sample) for _, sample in wanted]
        edited = self._rows("edited", sum(edits))
        draws = [], []  # of rows as they are, and of edited copies
        for (row, sample), is_edited in zip(wanted, edits):
            if is_edited:
                values = edited[len(draws[True])]
                np.copyto(values, logits[row])
                _edit(values, sample)
                row = len(draws[True])
            draws[is_edited].append(sample.request.params._draw(row, sample.request.seed, sample.index,
                                                                len(sample.tokens)))  # fmt: skip
        drawn = [iter(_core.sample(rows, np.array(each, _core.DRAW)).tolist()) if each else None
                 for rows, each in zip((logits, edited), draws)]  # fmt: skip
        tokens = [next(drawn[is_edited]) for is_edited in edits]

        logprobs = [None] * len(wanted)
        asked = [i for i, (_, sample) in enumerate(wanted) if sample.logprobs is not None and tokens[i] >= 0]
        if asked:
            counts = [wanted[i][1].request.params.logprobs for i in asked]
            dicts = self.logprobs(logits, [wanted[i][0] for i in asked], [tokens[i] for i in asked], counts)
            for i, each in zip(asked, dicts):
                logprobs[i] = each
        return list(zip(tokens, logprobs))

    def logprobs(self, logits, rows, tokens, counts):
        """A dict of Logprobs for each of some rows: the token itself, then the likeliest ``counts[i]``.

        Parameters
        ----------
        logits : numpy.ndarray
            float32 ``[n, vocab_size]``.
        rows, tokens, counts : list of int
            A count of -1 is the whole vocabulary.

        Returns
        -------
        list of dict of int to Logprob
        """
        counts = [self._vocab_size if n < 0 else min(n, self._vocab_size) for n in counts]
        rows, chosen = np.array(rows, np.int64), np.array(tokens, np.int64)
        log_sums, ranks, top = _core.logprobs(logits, rows, chosen, max(counts, default=0))
        own = (logits[rows, chosen] - log_sums).tolist()  # float32 less float64: rounded once
        others = (logits[rows[:, None], top] - log_sums[:, None]).tolist()
        out = []
        for token, n, rank, value, ids, values in zip(tokens, counts, ranks.tolist(), own, top.tolist(), others):
            each = {token: Logprob(value, rank, self._text(token))}
            for place in range(n):
                if ids[place] != token:
                    each[ids[place]] = Logprob(values[place], place + 1, self._text(ids[place]))
            out.append(each)
        return out

    def _text(self, token):
        if self._tokenizer is None:
            return None
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._tokenizer.decode([token])
        return text


def _edits(sample):
    """Whether a sample's logits are changed before its token is drawn."""
    params = sample.request.params
    return bool(params.repetition_penalty != 1 or params.logit_bias
                or (sample.counts and (params.presence_penalty or params.frequency_penalty))
                or sample.n_generated < params.min_tokens)


def _edit(values, sample):
    """Change a row of logits in place, in vLLM's order: tokens that may not end the text yet, bias, penalties."""
    params = sample.request.params
    if sample.n_generated < params.min_tokens:
        values[list(sample.request.stop_ids)] = -np.inf
    if params.logit_bias:
        values[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
    if params.repetition_penalty != 1:
        ids, penalty = sample.seen_ids(), np.float32(params.repetition_penalty)
        seen = values[ids]
        values[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    if sample.counts and (params.presence_penalty or params.frequency_penalty):
        ids = np.fromiter(sample.counts, np.int64, len(sample.counts))
        times = np.fromiter(sample.counts.values(), np.float32, len(sample.counts))
        values[ids] -= np.float32(params.frequency_penalty) * times + np.float32(params.presence_penalty)
