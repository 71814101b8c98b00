"""From logits to a token: greedy, temperature, top-k, top-p, with counter-based randomness."""

import math
import operator
from dataclasses import dataclass

import numpy as np

from pagedkv.ops import exp

_U64 = 2**64
_F32_MAX = float(np.finfo(np.float32).max)

# Probabilities of a whole vocabulary are summed in so many lanes, lane j over ids j, j + 256, ...: an order fixed on
# every machine, as np.sum's is not, and ten times as fast as one running sum over 49,152 ids.
_N_LANES = 256

# Candidates are taken from the top down by distance from the largest logit, in units of the temperature, until
# there are enough: a few hundred of 49,152 as a rule, so that few are sorted.
_REACHES = (2.0, 4.0, 6.0, 8.0, 10.0, 13.0, 17.0, math.inf)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    The random number of a token is a function of (seed, sample, position) alone, so a sample does not
    change with the other samples of its batch, with their number, or with a restart.

    Attributes
    ----------
    temperature : float
        Divides the logits; 0 is greedy.
    top_k : int
        Choose among this many most likely tokens; 0 for all. Of equal logits the lowest id comes first.
    top_p : float
        Choose among the fewest most likely tokens (of those that `top_k` leaves) whose probabilities reach this
        sum; in (0, 1].
    seed : int
        In [0, 2**64).

    Raises
    ------
    ValueError
        A value outside its range.

    Examples
    --------
    >>> import numpy as np
    >>> logits = np.array([0.0, 2.0, 2.0, 1.0], np.float32)
    >>> Sampling(temperature=0).choose(logits, sample=0, position=5)
    1
    >>> {Sampling(top_k=2, seed=7).choose(logits, sample=i, position=5) for i in range(50)} == {1, 2}
    True
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be 0 or a positive number, not {self.temperature}")
        if operator.index(self.top_k) < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or positive, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if not 0 <= operator.index(self.seed) < _U64:
            raise ValueError(f"seed must be in [0, 2**64), not {self.seed}")

    def choose(self, logits, sample, position):
        """The token that follows.

        Parameters
        ----------
        logits : numpy.ndarray
            float32 ``[vocab_size]``. Minus infinity excludes a token.
        sample : int
            Index of this sample among those of one prompt; in [0, 2**64).
        position : int
            Index that the token will have in its sequence; in [0, 2**64).

        Returns
        -------
        int

        Raises
        ------
        ValueError
            `logits` is no such array, its largest value is not finite or it holds NaN; `sample` or `position`
            is outside its range.
        """
        logits = np.asarray(logits, np.float32)
        if logits.ndim != 1 or not logits.size:
            raise ValueError(f"logits must have shape [vocab_size], not {list(logits.shape)}")
        best = int(np.argmax(logits))  # NaN counts as the largest here
        if not math.isfinite(logits[best]):
            raise ValueError(f"the largest logit is {logits[best]}")
        uniform = self._uniform(sample, position)
        # A larger temperature than float32 holds is as flat; a smaller one than it holds is 0.
        temperature = np.float32(min(self.temperature, _F32_MAX))
        if temperature == 0 or self.top_k == 1:
            return best

        # Distances from the maximum: no temperature, however small, can overflow them to a NaN. Padding weighs 0.
        n = len(logits)
        scaled = np.full(-(-n // _N_LANES) * _N_LANES, -np.inf, np.float32)
        with np.errstate(over="ignore"):
            np.subtract(logits, logits[best], out=scaled[:n])
            np.divide(scaled, temperature, out=scaled)
        weights = exp(scaled)  # the package's kernel: the same bits on every machine

        top_k = self.top_k if self.top_k < n else 0
        if not top_k:
            lanes = weights.reshape(-1, _N_LANES)
            reached = np.cumsum(lanes.sum(axis=0, dtype=np.float64))
            if self.top_p == 1:
                threshold = uniform * reached[-1]
                lane = _first_above(reached, threshold)
                if lane:
                    threshold -= reached[lane - 1]
                return lane + _N_LANES * _first_above(np.cumsum(lanes[:, lane], dtype=np.float64), threshold)
            needed = self.top_p * reached[-1]

        for reach in _REACHES:
            with np.errstate(over="ignore"):
                bound = np.float32(float(logits[best]) - reach * float(temperature))
            ids = np.flatnonzero(logits >= bound)
            if bound == -np.inf or (len(ids) >= top_k if top_k else _sum(weights[ids]) >= needed):
                break
        ids = ids[np.argsort(-logits[ids], kind="stable")][: top_k or None]
        reached = np.cumsum(weights[ids], dtype=np.float64)
        if top_k:
            needed = self.top_p * reached[-1]
        # The fewest that reach the sum. Rounding may leave all of them a bit below it: then they are all kept.
        reached = reached[: int(np.searchsorted(reached, needed)) + 1]
        return int(ids[_first_above(reached, uniform * reached[-1])])

    def _uniform(self, sample, position):
        """A number in [0, 1) for (seed, sample, position): Philox in counter mode (Salmon et al. 2011)."""
        for name, value in (("sample", sample), ("position", position)):
            if not 0 <= operator.index(value) < _U64:
                raise ValueError(f"{name} must be in [0, 2**64), not {value}")
        key = np.array([self.seed, sample], np.uint64)
        word = np.random.Philox(key=key, counter=np.array([position, 0, 0, 0], np.uint64)).random_raw()
        return (int(word) >> 11) * 2.0**-53


def _sum(weights):
    """Sum in the order of the array, which np.sum's is not."""
    return np.cumsum(weights, dtype=np.float64)[-1]


def _first_above(reached, threshold):
    """First index at which a running sum passes `threshold`; of an index that adds to the sum, even where rounding
    lifted `threshold` to all of it."""
    last = np.searchsorted(reached, reached[-1])
    return int(min(np.searchsorted(reached, threshold, side="right"), last))
