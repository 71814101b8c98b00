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
        self._buffer = np.empty((0, vocab_size), np.float32)
        self._texts = {}  # token -> its text

    def rows(self, n):
        """Place for `n` rows of logits; valid until the next call."""
        if n > len(self._buffer):
            self._buffer = np.empty((max(n, 2 * len(self._buffer)), self._vocab_size), np.float32)
        return self._buffer[:n]

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
        draws, edited, draws_edited = [], [], []
        for row, sample in wanted:
            request = sample.request
            draw = request.params._draw(row, request.seed, sample.index, len(sample.tokens))
            values = _edited(logits[row], sample)
            if values is None:
                draws.append(draw)
            else:
                draws_edited.append((len(edited), *draw[1:]))
                edited.append(values)
        plain = iter(_core.sample(logits, np.array(draws, _core.DRAW)).tolist() if draws else ())
        others = iter(_core.sample(np.stack(edited), np.array(draws_edited, _core.DRAW)).tolist() if edited else ())
        tokens = [next(others if _edits(sample) else plain) for _, sample in wanted]

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
        log_sums, ranks, top = _core.logprobs(logits, np.array(rows, np.int64), np.array(tokens, np.int64),
                                              max(counts, default=0))
        out = []
        for row, token, n, log_sum, rank, ids in zip(rows, tokens, counts, log_sums, ranks.tolist(), top):
            ids = ids[:n]
            values = (logits[row, ids] - log_sum).tolist()  # float32 less float64: exact up to one rounding
            each = {token: Logprob(float(logits[row, token] - log_sum), rank, self._text(token))}
            for place, (other, value) in enumerate(zip(ids.tolist(), values), 1):
                if other != token:
                    each[other] = Logprob(value, place, self._text(other))
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


def _edited(logits, sample):
    """A changed copy of a row of logits, or None where nothing changes. In vLLM's order: tokens that may not end the
    text yet, bias, penalties."""
    if not _edits(sample):
        return None
    params, values = sample.request.params, logits.copy()
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
    return values
