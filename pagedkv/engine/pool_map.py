"""What a pool holds at one moment: who owns each block, without a word of what is in it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


def count_owners(tables, n_blocks):
    """How many block tables hold each block, int64 ``[n_blocks]``."""
    return np.bincount(np.concatenate([np.empty(0, np.int32), *tables]), minlength=n_blocks)


@dataclass(frozen=True, slots=True)
class SampleBlocks:
    """A sample that runs or waits, and its blocks.

    Attributes
    ----------
    number : int
        Of its request: the order of arrival, from 0.
    request_id : str
    index : int
        Of the sample, in ``[0, n)``.
    state : str
        ``"running"``; ``"waiting"`` for its turn, or for the rows of the prompt that the first sample computes;
        ``"preempted"``: its blocks were taken away for others, and it waits to be computed anew.
    n_prompt, n_tokens, n_rows : int
        Tokens of the prompt, tokens so far, and tokens whose rows are in the blocks.
    block_table : numpy.ndarray
        int32 ids of its blocks, in order; empty while it waits.
    copied : tuple of (int, int) or None
        A block of its own, and the shared one, only partly filled, that it was copied from as the sample appended.
    """

    number: int
    request_id: str
    index: int
    state: str
    n_prompt: int
    n_tokens: int
    n_rows: int
    block_table: npt.NDArray[np.int32]
    copied: tuple[int, int] | None

    @classmethod
    def of(cls, sample):
        """Of a Sample of the engine."""
        request, seq, copied = sample.request, sample.seq, None
        table = np.empty(0, np.int32) if seq is None else seq.block_table
        if sample.shared_tail is not None:
            place, block_id = sample.shared_tail
            if place < len(table) and table[place] != block_id:
                copied = int(table[place]), block_id
        state = "running" if seq is not None else "preempted" if sample.preempted else "waiting"
        return cls(request.number, request.request_id, sample.index, state, len(request.prompt_ids), len(sample.tokens),
                   0 if seq is None else len(seq), table, copied)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class PoolMap:
    """The blocks of an engine's pool between two steps. A notebook shows it as a picture (matplotlib draws it).

    Attributes
    ----------
    block_size : int
    ref_counts : numpy.ndarray
        int32 ``[n_blocks]``: owners of each block as the pool counts them, the prefix cache too; 0 is free.
    cached : numpy.ndarray
        bool ``[n_blocks]``: whether the prefix cache is one of the owners.
    samples : tuple of SampleBlocks
        All that run or wait, in the order of arrival.
    stats : dict
        As of :meth:`pagedkv.LLM.stats`, at the same moment.

    Notes
    -----
    A block whose count is more than its samples and the cache make up is held outside the engine.
    """

    block_size: int
    ref_counts: npt.NDArray[np.int32]
    cached: npt.NDArray[np.bool_]
    samples: tuple[SampleBlocks, ...]
    stats: dict[str, Any]

    @property
    def n_blocks(self) -> int:
        return len(self.ref_counts)

    @property
    def n_owners(self) -> npt.NDArray[np.int64]:
        """How many samples hold each block, int64 ``[n_blocks]``."""
        return count_owners([sample.block_table for sample in self.samples], self.n_blocks)

    @property
    def n_filled(self) -> npt.NDArray[np.int64]:
        """Rows in each block that a sample or the cache holds, int64 ``[n_blocks]``; 0 in the others."""
        filled = np.where(self.cached, self.block_size, 0)
        for sample in self.samples:
            n_rows = sample.n_rows - self.block_size * np.arange(len(sample.block_table))
            # Of samples that share a block, the one that got furthest in it.
            np.maximum.at(filled, sample.block_table, np.clip(n_rows, 0, self.block_size))
        return filled

    @property
    def n_saved(self) -> int:
        """Blocks more that the samples would need if each had all of its own."""
        n_owners = self.n_owners
        return int(n_owners.sum() - np.count_nonzero(n_owners))

    def figure(self, dark: bool = False) -> Any:
        """The picture, a ``matplotlib.figure.Figure``; ``pip install "pagedkv[plot]"`` brings matplotlib.

        Raises
        ------
        ImportError
            It is not installed.
        """
        from pagedkv.plot import draw_pool

        return draw_pool(self, dark)

    def _repr_png_(self):
        from pagedkv.plot import png

        return png(self.figure())

    def __repr__(self) -> str:
        n_free, n_cached = (int(np.count_nonzero(which)) for which in (
            self.ref_counts == 0, self.cached & (self.ref_counts == 1)))  # fmt: skip
        return (f"PoolMap(n_blocks={self.n_blocks}, block_size={self.block_size}, n_free={n_free}, n_cached={n_cached}, "
                f"n_samples={len(self.samples)}, n_saved={self.n_saved})")


class PoolRecord:
    """What :meth:`pagedkv.LLM.record_pool` keeps.

    Attributes
    ----------
    fullest : PoolMap or None
        After the step in which most blocks were in use, the last one of several; None: there was no step.
    """

    def __init__(self) -> None:
        self.fullest: PoolMap | None = None
        self._most_used = 0

    def note(self, n_used, pool_map):
        """Take the map that the function `pool_map` gives, if no step before used more blocks."""
        if n_used >= self._most_used:
            self._most_used, self.fullest = n_used, pool_map()

    def _repr_png_(self):
        return None if self.fullest is None else self.fullest._repr_png_()

    def __repr__(self) -> str:
        return f"PoolRecord(fullest={self.fullest})"
