"""From logits to a token: greedy, temperature, top-k, top-p, with counter-based randomness."""

import math
from dataclasses import dataclass

import numpy as np

from pagedkv.ops import softmax

_U64 = 2**64


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    The random number of a token is a function of (seed, sample, position) alone, so a sample does not
    change with the other samples of its batch, with their number, or with a restart.

    Attributes
    ----------
    temperature : float
        Divides the logits; 0 is greedy. Of equal logits the lowest id wins.
    top_k : int
        Choose among this many most likely tokens; 0 for all.
    top_p : float
        Choose among the fewest tokens whose probabilities reach this sum; in (0, 1].
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
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or positive, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if not 0 <= self.seed < _U64:
            raise ValueError(f"seed must be in [0, 2**64), not {self.seed}")

    def choose(self, logits, sample, position):
        """The token that follows.

        Parameters
        ----------
        logits : numpy.ndarray
            float32 ``[vocab_size]``.
        sample : int
            Index of this sample among those of one prompt.
        position : int
            Index that the token will have in its sequence.

        Returns
        -------
        int
        """
        best = int(np.argmax(logits))
        temperature = np.float32(self.temperature)
        if temperature == 0 or self.top_k == 1:
            return best
        # Distances from the maximum: no temperature, however small, can overflow them to a NaN.
        with np.errstate(over="ignore"):
            scaled = (logits - logits[best]) / temperature
        if self.top_k and self.top_k < len(logits):
            # The k-th largest bounds the candidates; ties at the bound go to the lowest ids below.
            bound = np.partition(scaled, -self.top_k)[-self.top_k]
            ids = np.flatnonzero(scaled >= bound)
        else:
            ids = np.arange(len(logits))
        ids = ids[np.argsort(-scaled[ids], kind="stable")][: self.top_k or None]
        # The kernel's softmax and a running float64 sum: the same choice on every machine.
        reached = np.cumsum(softmax(scaled[ids]), dtype=np.float64)
        n_kept = int(np.searchsorted(reached, self.top_p * reached[-1])) + 1
        reached = reached[:n_kept]
        chosen = int(np.searchsorted(reached, self._uniform(sample, position) * reached[-1], side="right"))
        return int(ids[min(chosen, len(reached) - 1)])

    def _uniform(self, sample, position):
        """A number in [0, 1) for (seed, sample, position): Philox in counter mode (Salmon et al. 2011)."""
        key = np.array([self.seed, sample], np.uint64)
        word = np.random.Philox(key=key, counter=np.array([position, 0, 0, 0], np.uint64)).random_raw()
        return (int(word) >> 11) * 2.0**-53
