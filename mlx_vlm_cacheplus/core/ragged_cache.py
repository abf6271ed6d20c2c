"""Keys and values of rows that keep each what they accept, with nothing moved for it.

A verify step appends as many columns to every row; a row that accepts fewer of them than
another leaves rejected columns behind its newest one.  ``BatchKVCache`` rolls all keys
and values of all layers until they are left padding, in every such round.  Here they
stay as *holes*, which the mask hides: the next columns are appended behind them.

Invariants:

1. Columns of a row are in the order of its tokens, so masks are causal by column.  A
   row's next position is its ``offset``, never its column.
2. Where there are holes, ``left_padding`` is None: who computes attention by it, and
   not by ``make_mask``, would read them, and takes its general path so.
3. Which columns are holes is known on the host, from what the rounds have accepted: a
   round computes nothing for them but ``offset``, and waits for nothing.
4. Rows are moved together (``compact``) where they are moved anyway: when rows leave
   or come, and when a row is taken.  And where every row has holes in a quarter of the
   columns, for those cost attention to all.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import BatchKVCache

# Share of the columns that compacting must win.
WASTE = 4


class HoledKVCache(BatchKVCache):
    """A ``BatchKVCache`` whose rows may have holes between their columns."""

    keys: Any
    values: Any
    _right_padding: Any

    def __init__(self, left_padding: Sequence[int]):
        super().__init__(list(left_padding))
        self._holes: list[list[int]] = [[] for _ in left_padding]

    @classmethod
    def of(cls, entry: BatchKVCache) -> HoledKVCache:
        """A cache that goes on with the rows of ``entry``, which is not used again.

        Waits for the left padding of ``entry``, so that nobody has to later.
        """
        cache = cls([0] * entry.batch_size)
        cache.__dict__.update(
            {name: value for name, value in vars(entry).items() if name in vars(cache)}
        )
        cache.left_padding = entry.left_padding
        cache._paddings()
        return cache

    def plain(self) -> BatchKVCache:
        """A ``BatchKVCache`` of these rows, which are compacted; it shares the arrays."""
        self.compact()
        cache = BatchKVCache([])
        cache.keys, cache.values, cache._idx = self.keys, self.values, self._idx
        cache.offset, cache.left_padding = map(mx.array, (self.offset, self._padding))
        return cache

    def __copy__(self) -> HoledKVCache:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._holes = [list(row) for row in self._holes]
        other.offset = mx.array(self.offset)  # ``+=`` writes into it
        return other

    @property
    def has_holes(self) -> bool:
        """Whether a row has a hole."""
        return any(self._holes)

    @property
    def left_padding(self) -> Any:
        """Columns before each row's first, [rows]; None where rows have holes."""
        return None if self.has_holes else self._padding

    @left_padding.setter
    def left_padding(self, padding: mx.array) -> None:
        self._padding = padding
        self._known: list[int] | None = None

    def _paddings(self) -> list[int]:
        """Columns before each row's first, on the host."""
        if self._known is None:
            columns: Any = self._padding.tolist()
            self._known = list(columns)
        return self._known

    def _pad(self, columns: list[int]) -> None:
        self._padding, self._known = mx.array(columns), columns

    def prepare(
        self,
        *,
        left_padding: Any = None,
        lengths: Any = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        super().prepare(left_padding=left_padding, lengths=lengths)
        if right_padding is not None and max(right_padding) > 0:
            self._right_padding = [int(columns) for columns in right_padding]

    def finalize(self) -> None:
        """Hide the right padding of each row, where ``BatchKVCache`` moves the rows."""
        padding, self._right_padding = self._right_padding, None
        if padding is None or self.keys is None:
            return
        for row, columns in zip(self._holes, padding, strict=True):
            row.extend(range(self._idx - columns, self._idx))
        self.offset -= mx.array(padding)
        if min(map(len, self._holes)) * WASTE > self._idx:
            self.compact()

    def trim(self, n: int) -> int:
        trimmed = int(super().trim(n))
        counts = [_cut_from(row, self._idx) for row in self._holes]
        if any(counts):
            self.offset += mx.array(counts)  # these columns were not the row's
        return trimmed

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,
        **kwargs: Any,
    ) -> mx.array:
        """The mask of the next ``N`` columns, [rows, 1, N, columns], True where seen.

        Args:
            window_size: tokens that each sees, itself included; holes do not count.
        """
        if not self.has_holes:
            return super().make_mask(N, return_array, window_size=window_size, **kwargs)
        columns = self._idx + N
        number = mx.arange(columns)
        held = self._held(columns) & (self._padding[:, None] <= number)
        mask = held[:, None] & (number[self._idx :, None] >= number)
        if window_size is not None:
            place = mx.cumsum(held.astype(mx.int32), axis=1)
            mask &= place[:, self._idx :, None] < place[:, None] + window_size
        return mask[:, None]

    def _held(self, columns: int) -> mx.array:
        """The columns that are no holes, [rows, columns]; left padding is none."""
        held = mx.ones((len(self._holes) * columns,), dtype=mx.bool_)
        holes = [
            row * columns + column
            for row, of_row in enumerate(self._holes)
            for column in of_row
        ]
        held[mx.array(holes)] = False
        return held.reshape(-1, columns)

    def compact(self) -> None:
        """Make left padding of the holes, and drop what all rows then have of them."""
        if not self.has_holes:
            return
        counts = list(map(len, self._holes))
        number = mx.arange(self._idx)
        order = mx.argsort(number + self._idx * self._held(self._idx), axis=1)
        order = order[:, None, min(counts) :, None]
        self.keys = mx.take_along_axis(self.keys[..., : self._idx, :], order, axis=2)
        self.values = mx.take_along_axis(
            self.values[..., : self._idx, :], order, axis=2
        )
        self._idx -= min(counts)
        least = min(counts)
        padded = zip(self._paddings(), counts, strict=True)
        self._pad([padding + holes - least for padding, holes in padded])
        self._holes = [[] for _ in counts]

    def filter(self, batch_indices: mx.array) -> None:
        """Keep these rows; ``BatchKVCache`` waits for the device once a layer."""
        self.compact()
        rows: Any = batch_indices.tolist()
        paddings = [self._paddings()[row] for row in rows]
        least = min([*paddings, self._idx])
        self._pad([padding - least for padding in paddings])
        if self.keys is not None:
            self.keys = self.keys[batch_indices][..., least:, :]
            self.values = self.values[batch_indices][..., least:, :]
        self._idx -= least
        self.offset = self.offset[batch_indices]
        self._holes = [[] for _ in rows]
        if self._right_padding is not None:
            self._right_padding = [self._right_padding[row] for row in rows]

    def extend(self, other: BatchKVCache) -> None:
        self.compact()
        if isinstance(other, HoledKVCache):
            other = copy.copy(other).plain()
        super().extend(other)
        self._holes = [[] for _ in range(self.batch_size)]

    def extract(self, idx: int) -> Any:
        if not self.has_holes:
            return super().extract(idx)
        row = copy.copy(self)
        row.filter(mx.array([idx]))
        return row.extract(0)

    @property
    def state(self) -> tuple:
        """Keys, values, offset and left padding; ``meta_state`` has the holes."""
        keys, values = self.keys, self.values
        if keys is not None:
            keys, values = keys[..., : self._idx, :], values[..., : self._idx, :]
        return keys, values, self.offset, self._padding

    @state.setter
    def state(self, state: tuple) -> None:
        self.keys, self.values, self.offset, self.left_padding = state
        self._idx = 0 if self.keys is None else self.keys.shape[2]
        self._holes = [[] for _ in range(self.batch_size)]
        self._right_padding = None

    @property
    def meta_state(self) -> list[list[int]]:
        """The columns of each row that are holes."""
        return [list(row) for row in self._holes]

    @meta_state.setter
    def meta_state(self, holes: Sequence[Sequence[int]]) -> None:
        self._holes = [list(row) for row in holes]


def _cut_from(holes: list[int], stop: int) -> int:
    """Drop the columns from ``stop`` on; return how many that were."""
    before = len(holes)
    while holes and holes[-1] >= stop:
        holes.pop()
    return before - len(holes)
