"""Speculation: guesses of the tokens to come, checked by one step. A guess can cost time and never changes a text."""

import operator
from collections.abc import Mapping

# Rows of a step that carries drafts, at most. While a step waits for the weights, one more row costs a third or less of
# a step of its own; past some 32 it costs its arithmetic, drafted or decoded, and can save nothing.
DRAFT_STEP_ROWS = 32
# Drafts of a sample that has just begun.
FIRST_DRAFTS = 3


class Drafter:
    """Guesses the next tokens of samples. What it proposes decides how fast a text comes, and not which.

    Parameters
    ----------
    num_speculative_tokens : int
        Drafts of a sample in one step, at most.
    """

    def __init__(self, num_speculative_tokens):
        self.num_speculative_tokens = operator.index(num_speculative_tokens)
        if self.num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, not {num_speculative_tokens}")

    def propose(self, wanted):
        """Drafts for samples.

        Parameters
        ----------
        wanted : list of (Sample, int)
            Each once, and how many drafts of it have place, at least one.

        Returns
        -------
        list of list of int
            Tokens that may follow those of each sample, up to so many; none where it has no guess.
        """
        raise NotImplementedError

    def n_wanted(self, sample):
        """How many drafts of a sample are worth their rows: more while all are accepted, fewer after one was not."""
        return FIRST_DRAFTS if sample.n_drafts is None else sample.n_drafts

    def judge(self, sample, n, n_accepted):
        """Learn how many of a sample's `n` drafts were its tokens."""
        n_next = 2 * max(n, self.n_wanted(sample)) if n == n_accepted else max(1, n_accepted)
        sample.n_drafts = min(n_next, self.num_speculative_tokens)

    def forget(self, sample):
        """The sample runs no more, or not for now: free what is held for it."""


class NgramDrafter(Drafter):
    """Prompt lookup: what followed the last tokens where they stood before, in the prompt or in the text so far.

    Parameters
    ----------
    num_speculative_tokens : int
    prompt_lookup_max, prompt_lookup_min : int
        How many last tokens are looked for: the most, and then fewer, down to the least. Of several places the last
        one counts.

    Notes
    -----
    A dict of each length leads from tokens to the place after their last occurrence; each token is added once. The
    method is prompt lookup decoding (Saxena 2023), the names are vLLM's.
    """

    def __init__(self, num_speculative_tokens=16, prompt_lookup_max=5, prompt_lookup_min=3):
        super().__init__(num_speculative_tokens)
        self.prompt_lookup_max = operator.index(prompt_lookup_max)
        self.prompt_lookup_min = operator.index(prompt_lookup_min)
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min must be at least 1 and at most prompt_lookup_max, "
                             f"{prompt_lookup_max}, not {prompt_lookup_min}")

    def propose(self, wanted):
        return [self._look_up(sample, n) for sample, n in wanted]

    def _look_up(self, sample, n):
        tokens = sample.tokens
        sizes = range(self.prompt_lookup_max, self.prompt_lookup_min - 1, -1)
        if sample.ngrams is None:
            sample.ngrams, sample.n_looked = {size: {} for size in sizes}, 0
        # Places that a token follows; the end of the tokens is not one yet.
        for at in range(sample.n_looked, len(tokens)):
            for size in sizes:
                if at >= size:
                    sample.ngrams[size][tuple(tokens[at - size:at])] = at
        sample.n_looked = len(tokens)
        for size in sizes:
            at = sample.ngrams[size].get(tuple(tokens[-size:])) if len(tokens) > size else None
            if at is not None:
                distance = len(tokens) - at  # a text that has come round goes on so
                return [tokens[at + i % distance] for i in range(n)]
        return []


def read_speculative(speculative, model):
    """The Drafter that the argument of :class:`LLM` means, or None."""
    if speculative is None:
        return None
    if isinstance(speculative, str):
        speculative = {"method": speculative}
    if not isinstance(speculative, Mapping):
        raise ValueError(f"speculative must be None, 'ngram' or a dict, not {speculative!r}")
    fields = dict(speculative)
    method = fields.pop("method", None)
    if method != "ngram":
        raise ValueError(f"the method of speculative must be 'ngram', not {method!r}")
    known = {"num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
    unknown = sorted(set(fields) - known, key=str)
    if unknown:
        raise ValueError(f"speculative has {', '.join(map(repr, unknown))}; method {method!r} takes "
                         f"{', '.join(sorted(known))}")
    return NgramDrafter(**fields)
