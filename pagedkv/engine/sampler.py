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
        draws, counts = ([], []), ([], [])  # of rows as they are, and of edited copies
        for (row, sample), is_edited in zip(wanted, edits):
            params, place = sample.request.params, row
            if is_edited:
                place = len(draws[True])
                np.copyto(edited[place], logits[row])
                _edit(edited[place], sample)
            draws[is_edited].append(params._draw(place, sample.request.seed, sample.index, len(sample.tokens)))
            counts[is_edited].append(-1 if sample.logprobs is None else self._count(params.logprobs))

        # One reading of a row gives the token and its log-probabilities, which are those of the row as it was.
        drawn = [None, None]
        if draws[False]:
            each = np.array(draws[False], _core.DRAW)
            tokens, *found = _core.sample_logprobs(logits, each, np.array(counts[False], np.int64))
            drawn[False] = zip(tokens.tolist(), self._dicts(logits, each["row"], tokens, counts[False], *found))
        if draws[True]:
            rows = [row for (row, _), is_edited in zip(wanted, edits) if is_edited]
            tokens = _core.sample(edited, np.array(draws[True], _core.DRAW)).tolist()
            asked = [i for i, n in enumerate(counts[True]) if n >= 0 and tokens[i] >= 0]
            dicts = [None] * len(rows)
            found = self.logprobs(logits, *([each[i] for i in asked] for each in (rows, tokens, counts[True])))
            for i, each in zip(asked, found):
                dicts[i] = each
            drawn[True] = zip(tokens, dicts)
        return [next(drawn[is_edited]) for is_edited in edits]

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
        counts = [self._count(n) for n in counts]
        rows, tokens = np.array(rows, np.int64), np.array(tokens, np.int64)
        found = _core.logprobs(logits, rows, tokens, max(counts, default=0))
        return self._dicts(logits, rows, tokens, counts, *found)

    def _count(self, n):
        """Of the likeliest tokens, by a count as users give it."""
        return self._vocab_size if n < 0 else min(n, self._vocab_size)

    def _dicts(self, logits, rows, tokens, counts, log_sums, ranks, top):
        """What _core.logprobs has found as dicts of Logprobs; None where a count or a token is negative."""
        if max(counts, default=-1) < 0:
            return [None] * len(counts)
        own = (logits[rows, tokens] - log_sums).tolist()  # float32 less float64: rounded once
        others = (logits[rows[:, None], top] - log_sums[:, None]).tolist()
        dicts = []
        for token, n, value, rank, ids, values in zip(tokens.tolist(), counts, own, ranks.tolist(), top.tolist(), others):
            if n < 0 or token < 0:
                dicts.append(None)
                continue
            each = {token: Logprob(value, rank, self._text(token))}
            for i, (other, logprob) in enumerate(zip(ids[:n], values), 1):
                if other != token:
                    each[other] = Logprob(logprob, i, self._text(other))
            dicts.append(each)
        return dicts

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
