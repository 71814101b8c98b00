"""Log-probabilities of given continuations: what multiple choice and perplexity are made of."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv._core import Flv4Status, PkvStatus
from pagedkv.errors import PoolExhausted, TokenError
from pagedkv.model import LlamaModel, _token_array
from pagedkv.pool import BlockPool

# Rows a step, and so rows of logits in memory at once: 50 MB at a vocabulary of 49,152.
STEP_ROWS = 256

# Probabilities are summed in so many lanes, lane j over ids j, j + 256, ..., an order that is fixed.
_N_LANES = 256


class Score(NamedTuple):
    """What a model thinks of one continuation.

    Attributes
    ----------
    logprob : float
        Sum of `token_logprobs`, rounded once.
    is_greedy : bool
        Whether each token has the largest logit (of equal ones: the lowest id). True of no tokens.
    token_logprobs : numpy.ndarray
        float64 ``[n]``: natural logarithm of each token's probability after all that go before it.
    """

    logprob: float
    is_greedy: bool
    token_logprobs: npt.NDArray[np.float64]


class _Node:
    """Rows that come after those of the node above, shared by all pairs whose tokens lead here."""

    __slots__ = ("tokens", "below", "wanted")

    def __init__(self, tokens):
        self.tokens = tokens
        self.below = {}  # first token -> _Node
        self.wanted = []  # (row, pair, place): what follows the row is token `place` of the pair's continuation

    def grow(self, ids):
        """Make the path of `ids` end at the end of a node."""
        node = self
        while len(ids):
            child = node.below.get(ids[0])
            if child is None:
                node.below[ids[0]] = _Node(ids)
                return
            n = min(len(child.tokens), len(ids))
            differ = np.flatnonzero(child.tokens[:n] != ids[:n])
            n = int(differ[0]) if differ.size else n
            if n < len(child.tokens):
                upper = node.below[ids[0]] = _Node(child.tokens[:n])
                child.tokens = child.tokens[n:]
                upper.below[child.tokens[0]] = child
                child = upper
            node, ids = child, ids[n:]

    def want(self, ids, first, pair):
        """Ask for what follows each row of the path from row `first` on."""
        node, begin = self, 0
        while begin < len(ids):
            node = node.below[ids[begin]]
            for row in range(max(0, first - begin), len(node.tokens)):
                node.wanted.append((row, pair, begin + row - first))
            begin += len(node.tokens)

    @property
    def is_loud(self):
        """More than the last row's logits are wanted."""
        return any(row < len(self.tokens) - 1 for row, _, _ in self.wanted)


def _n_shared(a, b):
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


def _groups(order, rows, pool):
    """Cut the ordered pairs into runs whose blocks fit the pool together, whatever the order of their steps."""
    group, n_blocks = [], 0
    for i in order:
        need = -(-len(rows[i]) // pool.block_size)
        if group:
            # Full blocks before the fork are shared. Two nodes at most are new, each with a copy of a last block.
            more = need - _n_shared(rows[group[-1]], rows[i]) // pool.block_size + 2
            if n_blocks + more <= pool.n_free:
                group.append(i)
                n_blocks += more
                continue
            yield group
        group, n_blocks = [i], need
    if group:
        yield group


def _log_sum_exp(logits):
    """Of a float32 row, in float64."""
    x = np.full(-(-len(logits) // _N_LANES) * _N_LANES, -np.inf)
    x[:len(logits)] = logits
    most = float(x.max())
    if not math.isfinite(most):
        return most
    return most + math.log(np.cumsum(np.exp(x - most).reshape(-1, _N_LANES).sum(axis=0))[-1])


def score(model: LlamaModel, pairs: Iterable[tuple[npt.ArrayLike, npt.ArrayLike]], pool: BlockPool | None = None,
          step_rows: int = STEP_ROWS) -> list[Score]:
    """Log-probabilities of continuations, each after its context.

    Tokens that several pairs begin with, contexts or parts of them, are computed once and shared by fork; what the
    pairs go on with is computed in batches. The results are those of scoring each pair alone, to the last bit.

    Parameters
    ----------
    model : LlamaModel
    pairs : iterable of (context, continuation)
        Token ids. A context has at least one token (a beginning-of-text token, where there is nothing else); an empty
        continuation scores 0.
    pool : BlockPool, optional
        Its free blocks bound how many pairs are computed together; it must hold the longest one. By default a new
        one, for as many tokens as the model's context or the longest pair has.
    step_rows : int
        Tokens a step, at most.

    Returns
    -------
    list of Score
        In the order of `pairs`.

    Raises
    ------
    ValueError
        A context without tokens; `step_rows` is not positive.
    TokenError
        An id outside the vocabulary.
    PoolExhausted
        The longest pair does not fit the pool's free blocks. All this before the first step; after any error the
        pool's blocks are given back.

    Notes
    -----
    The softmax is computed in float64 from the float32 logits, and summed in one order on all machines; NumPy's exp may
    differ between machines in a last bit of float64.

    Examples
    --------
    >>> import pagedkv as pk
    >>> model = pk.LlamaModel.load("smollm2-135m")                                         # doctest: +SKIP
    >>> encode = model.tokenizer.encode                                                    # doctest: +SKIP
    >>> question = encode("The capital of France is")                                      # doctest: +SKIP
    >>> choices = [encode(text, add_special_tokens=False) for text in (" London", " Paris")]  # doctest: +SKIP
    >>> [round(each.logprob, 2) for each in pk.score(model, [(question, c) for c in choices])]  # doctest: +SKIP
    [-4.38, -0.26]
    """
    if step_rows < 1:
        raise ValueError(f"step_rows must be positive, not {step_rows}")
    pairs = [(_token_array(context), _token_array(continuation)) for context, continuation in pairs]
    vocab_size = model.config.vocab_size
    for i, (context, continuation) in enumerate(pairs):
        if not len(context):
            raise ValueError(f"pair {i} has no context: the first token needs one to follow")
        for ids in (context, continuation):
            wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
            if wrong.size:
                raise TokenError(f"token {ids[wrong[0]]} of pair {i} is outside [0, {vocab_size})",
                                 (Flv4Status.FLV4_ERR_TOKEN,))
    # The last token of a continuation is never fed, and a pair without one needs no row at all.
    rows = [np.concatenate([context, continuation[:-1]]) if len(continuation) else continuation
            for context, continuation in pairs]  # fmt: skip
    longest = max(range(len(pairs)), key=lambda i: len(rows[i]), default=None)
    if longest is None or not len(rows[longest]):
        return [Score(0.0, True, np.empty(0)) for _ in pairs]
    if pool is None:
        n_tokens = max(len(rows[longest]), min(model.config.context_len, sum(map(len, rows)) + 32 * len(rows)))
        pool = model.new_pool(n_tokens=n_tokens)
    need = -(-len(rows[longest]) // pool.block_size)
    if need > pool.n_free:
        raise PoolExhausted(f"pair {longest} needs {need} blocks, {pool.n_free} of {pool.n_blocks} are free",
                            (PkvStatus.PKV_ERR_EXHAUST,))
    logprobs = [np.empty(len(continuation)) for _, continuation in pairs]
    greedy = [True] * len(pairs)

    def note(node, logits, first):
        """Take what is wanted from the logits of the node's rows from `first` on."""
        sums = {}
        for row, pair, place in node.wanted:
            if first <= row < first + len(logits):
                x, token = logits[row - first], pairs[pair][1][place]
                if row not in sums:
                    sums[row] = _log_sum_exp(x), int(x.argmax())
                logprobs[pair][place] = float(x[token]) - sums[row][0]
                greedy[pair] = greedy[pair] and sums[row][1] == int(token)

    order = sorted((i for i in range(len(pairs)) if len(rows[i])), key=lambda i: rows[i].tolist())
    for group in _groups(order, rows, pool):
        root = _Node(rows[group[0]][:0])
        for i in group:
            root.grow(rows[i][:len(pairs[i][0])])
            root.grow(rows[i])
        for i in group:
            root.want(rows[i], len(pairs[i][0]) - 1, i)
        _walk(model, pool, root, step_rows, len(rows[longest]), note)
    return [Score(math.fsum(each), is_greedy, each) for each, is_greedy in zip(logprobs, greedy)]


def _walk(model, pool, root, step_rows, max_tokens, note):
    """Compute all nodes, as many in a step as its rows allow; a node is whole before those below it begin.

    Nodes of which all rows' logits are wanted wait for the others: together they make larger steps."""
    ready = []  # [node, is_loud, sequence, rows done]
    try:
        for node in root.below.values():
            ready.append([node, node.is_loud, model.new_sequence(pool, max_tokens), 0])
        while ready:
            is_loud, batch, left = all(item[1] for item in ready), [], step_rows
            for item in ready:
                if left and item[1] == is_loud:
                    batch.append((item, item[0].tokens[item[3]:item[3] + left]))
                    left -= len(batch[-1][1])
            logits = model.step([(item[2], ids) for item, ids in batch], all_logits=is_loud)
            begin = 0
            for item, ids in batch:
                n = len(ids) if is_loud else 1
                item[3] += len(ids)
                note(item[0], logits[begin:begin + n], item[3] - n)
                begin += n
            for item, _ in batch:
                node, _, seq, done = item
                if done < len(node.tokens):
                    continue
                first, *others = node.below.values() or [None]
                ready.extend([other, other.is_loud, seq.fork(), 0] for other in others)
                if first is None:
                    seq.free()
                else:  # it goes on with the sequence itself
                    item[:] = first, first.is_loud, seq, 0
            ready = [item for item in ready if item[3] < len(item[0].tokens)]
    finally:
        for item in ready:
            item[2].free()
