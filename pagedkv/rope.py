"""Rotary frequencies: from a configuration to radians a position."""

import math
from decimal import Context, Decimal

import numpy as np
import numpy.typing as npt

from pagedkv.errors import BadDimError


def rope_inv_freq(theta: float, rope_dim: int, scaling: str = "none", factor: float = 1.0, low_freq_factor: float = 1.0,
                  high_freq_factor: float = 4.0, original_context_len: int = 8192,
                  freq_factors: npt.ArrayLike | None = None) -> npt.NDArray[np.float64]:
    """Radians that each pair of a head turns by for one position.

    Parameters
    ----------
    theta : float
        Base of the frequencies, ``theta ** (-2 i / rope_dim)``.
    rope_dim : int
        Rotating dimensions of a head; even.
    scaling : {"none", "linear", "llama3"}
        ``"linear"`` divides by `factor`; ``"llama3"`` divides the low frequencies by `factor`, keeps the
        high ones, and blends between (Llama 3.1).
    factor, low_freq_factor, high_freq_factor, original_context_len : float
        Parameters of the scaling.
    freq_factors : sequence of float, optional
        Divisors ``[rope_dim // 2]`` as a GGUF file stores them; applied after `scaling`.

    Returns
    -------
    numpy.ndarray
        float64 ``[rope_dim // 2]``.

    Raises
    ------
    BadDimError
        `rope_dim` is odd or not positive, or `freq_factors` has another length.

    Examples
    --------
    >>> rope_inv_freq(10000.0, 4).tolist()
    [1.0, 0.01]
    """
    if rope_dim <= 0 or rope_dim % 2:
        raise BadDimError(f"rope_dim must be positive and even, not {rope_dim}")
    if not theta > 0 or not math.isfinite(theta):
        raise BadDimError(f"rope_theta must be positive and finite, not {theta}")
    # Decimal, because C libraries and processors differ in the last bit of pow().
    digits = Context(prec=40)
    base = Decimal(float(theta))
    inv_freq = np.array([float(digits.power(base, digits.divide(Decimal(-2 * i), Decimal(rope_dim))))
                         for i in range(rope_dim // 2)])
    if scaling == "linear":
        inv_freq = inv_freq / factor
    elif scaling == "llama3":
        turns = original_context_len * inv_freq / (2 * math.pi)  # of a pair, over the original context
        keep = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        blend = (1 - keep) * inv_freq / factor + keep * inv_freq
        inv_freq = np.where(turns < low_freq_factor, inv_freq / factor,
                            np.where(turns > high_freq_factor, inv_freq, blend))
    elif scaling != "none":
        raise BadDimError(f"rope scaling {scaling!r} is not one of none, linear, llama3")
    if freq_factors is not None:
        if len(freq_factors) != rope_dim // 2:
            raise BadDimError(f"{len(freq_factors)} frequency factors for {rope_dim // 2} pairs")
        inv_freq = inv_freq / np.asarray(freq_factors, np.float64)
    if not (np.isfinite(inv_freq).all() and np.abs(inv_freq).max() <= 64):
        # 64 radians a position keep the angles of 16 million positions below the 2**30 that sincos is made for.
        raise BadDimError(f"rotary frequencies must be finite and at most 64 radians a position, not {inv_freq.max()}")
    return inv_freq
