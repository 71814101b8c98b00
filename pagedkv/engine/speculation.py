"""Speculation: guesses of the tokens to come, checked by one step. A guess can cost time and never changes a text."""

import operator
from collections.abc import Mapping

import numpy as np

from pagedkv import _core
from pagedkv.errors import FormatError
from pagedkv.model import LlamaModel

# Rows of a step that carries drafts, at most. While a step waits for the weights, one more row costs a third or less of
# a step of its own; past some 32 it costs its arithmetic, drafted or decoded, and can save nothing.
DRAFT_STEP_ROWS = 32
# Drafts of a sample that has just begun.
FIRST_DRAFTS = 2


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


class ModelDrafter(Drafter):
    """A smaller model of the same vocabulary says how the texts go on.

    It draws with the random number that the sample itself will use, so where both models think alike a sampled token is
    the same too.

    Parameters
    ----------
    model : LlamaModel
    pool : BlockPool
        Whose blocks fit the model; for its own sequences. A sample that finds no place there gets no drafts.
    num_speculative_tokens : int
    """

    def __init__(self, model, pool, num_speculative_tokens=4):
        super().__init__(num_speculative_tokens)
        self.model, self.pool = model, pool
        self._held = {}  # Sample -> (its Sequence, rows of the sample's tokens, drafts whose rows follow them)

    def propose(self, wanted):
        out = [[] for _ in wanted]
        going, n_free = [], self.pool.n_free  # (place, sample, how many, its sequence)
        for place, (sample, n) in enumerate(wanted):
            seq = self._own_rows(sample)
            n_rows = len(sample.tokens) + n - 1  # the last draft is not fed
            needed = self._n_blocks(n_rows) - self._n_blocks(len(seq))
            if n_rows <= self.model.config.context_len and needed <= n_free:
                n_free -= needed
                going.append((place, sample, n, seq))
        if not going:
            return out
        for _, sample, _, seq in going:  # prompts in chunks; a step computes all of its rows in one
            if len(sample.tokens) - len(seq) > self.num_speculative_tokens + 1:
                self.model.prefill(sample.tokens[len(seq):-1], seq)
        rows = [(seq, sample.tokens[len(seq):]) for _, sample, _, seq in going]
        while rows:
            tokens = self._draw(self.model.step(rows), going, out)
            rows, still = [], []
            for each, token in zip(going, tokens):
                place, sample, n, seq = each
                if token >= 0:
                    out[place].append(token)
                    if len(out[place]) < n:
                        rows.append((seq, [token]))
                        still.append(each)
            going = still
        for (sample, _), drafts in zip(wanted, out):
            if drafts:
                self._held[sample] = self._held[sample][0], len(sample.tokens), drafts
        return out

    def _own_rows(self, sample):
        """The draft model's sequence of a sample, cut to rows of the sample's tokens, the last one left to feed."""
        if sample not in self._held:
            self._held[sample] = self.model.new_sequence(self.pool), 0, []
        seq, n, drafts = self._held[sample]
        for draft, token in zip(drafts, sample.tokens[n:]):
            if draft != token:
                break
            n += 1
        seq.truncate(min(n, len(seq), len(sample.tokens) - 1))
        self._held[sample] = seq, len(seq), []
        return seq

    def _draw(self, logits, going, out):
        draws = [sample.request.params._draw(row, sample.request.seed, sample.index,
                                             len(sample.tokens) + len(out[place]))
                 for row, (place, sample, *_) in enumerate(going)]  # fmt: skip
        return _core.sample(logits, np.array(draws, _core.DRAW)).tolist()

    def _n_blocks(self, n_rows):
        return -(-n_rows // self.pool.block_size)

    def forget(self, sample):
        if sample in self._held:
            self._held.pop(sample)[0].free()


# Method -> the other names that a dict may have.
FIELDS = {"ngram": {"num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"},
          "draft_model": {"num_speculative_tokens", "model"}}  # fmt: skip


def speculative_of(what):
    """What :class:`LLM` takes for what a command says: nothing, a method's name, or a model by its path or name."""
    return what if what in (None, "ngram") else {"model": what}


def read_speculative(speculative, model, n_tokens, block_size):
    """The Drafter that the argument of :class:`LLM` means, or None.

    Parameters
    ----------
    speculative : None, str, LlamaModel or dict
    model : LlamaModel
        Whose texts it is for.
    n_tokens, block_size : int
        Place for sequences of a draft model.

    Raises
    ------
    ValueError
        It is none of these, or the draft model has another vocabulary.
    """
    if speculative is None:
        return None
    if isinstance(speculative, LlamaModel):
        speculative = {"model": speculative}
    elif isinstance(speculative, str):
        speculative = {"method": speculative}
    elif not isinstance(speculative, Mapping):
        raise ValueError(f"speculative must be None, 'ngram', a LlamaModel or a dict, not {speculative!r}")
    fields = dict(speculative)
    method = fields.pop("method", "draft_model" if "model" in fields else None)
    if method not in FIELDS:
        raise ValueError(f"the method of speculative must be 'ngram' or 'draft_model', not {method!r}")
    unknown = sorted(set(fields) - FIELDS[method], key=str)
    if unknown:
        raise ValueError(f"speculative has {', '.join(map(repr, unknown))}; method {method!r} takes "
                         f"{', '.join(sorted(FIELDS[method]))}")
    if method == "ngram":
        return NgramDrafter(**fields)
    if "model" not in fields:
        raise ValueError("speculative needs a model for method 'draft_model'")
    draft = fields.pop("model")
    if not isinstance(draft, LlamaModel):
        draft = LlamaModel.load(draft)
    _check_vocabulary(draft, model)
    return ModelDrafter(draft, draft.new_pool(n_tokens=n_tokens, block_size=block_size), **fields)


def _check_vocabulary(draft, model):
    """Refuse a draft model whose ids mean something else."""
    n, n_draft = model.config.vocab_size, draft.config.vocab_size
    if n != n_draft:
        raise ValueError(f"the draft model has {n_draft} tokens in its vocabulary, the model {n}")
    try:
        mine, its = model.tokenizer, draft.tokenizer
    except FormatError:  # one has none: its ids are taken at their word
        return
    for token in range(n if mine is not its else 0):
        if mine.id_to_token(token) != its.id_to_token(token):
            raise ValueError(f"token {token} is {its.id_to_token(token)!r} in the draft model's vocabulary, "
                             f"{mine.id_to_token(token)!r} in the model's")
