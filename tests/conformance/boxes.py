"""Tensor maps of the conformance cases, and what the PTX manual says that TMA does with them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cupyflash.tensor import DType


@dataclass(frozen=True)
class Map:
    """A tensor map over the input or the output of a case; dimensions fastest first.

    Its base address lies ``shift_bytes`` behind the array's.
    """

    of: str
    dtype: DType
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    shift_bytes: int = 0

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.dtype.itemsize

    def over_output(self) -> Map:
        return dataclasses.replace(self, of="out")


@dataclass(frozen=True)
class Sequence:
    """Rows ``begin`` to ``begin + length`` of an array [batch, seqlen, heads, head_dim]."""

    begin: int
    length: int

    def ragged_map(self, array: Map) -> Map:
        """Note [Ragged maps] of kernels_cu/attn/ragged.cuh, of stores: rows twice, from a base
        before them. (Here, on small arrays, loads may go through it too.)"""
        (head_dim, rows, *outer), (by_row, *by_outer) = array.dims, array.strides_bytes
        return dataclasses.replace(
            array,
            dims=(head_dim, rows, rows + 1, *outer),
            strides_bytes=(by_row, by_row, *by_outer),
            box=(*array.box[:2], 1, *array.box[2:]),
            shift_bytes=-rows * by_row,
        )

    def ragged_coordinates(self, array: Map, at: tuple[int, ...]) -> tuple[int, ...]:
        """Where in the ragged map a box lies that begins at ``at``, counted in this sequence."""
        column, row, *outer = at
        return (column, array.dims[1] - self.length + row, self.begin + self.length, *outer)

    def own_map(self, array: Map) -> Map:
        """Over this sequence alone: what the ragged map must be equal to."""
        head_dim, _, *outer = array.dims
        return dataclasses.replace(
            array,
            dims=(head_dim, self.length, *outer),
            shift_bytes=self.begin * array.strides_bytes[0],
        )


def swizzled(row: NDArray, byte: NDArray, span: int) -> NDArray:
    """Offset, in a box whose rows are span bytes long, of a byte of a row: 16-byte granules are
    XORed with bits of the row."""
    offset = row * span + byte
    bits = {0: 0, 32: 1, 64: 3, 128: 7}[span]
    return offset ^ (((offset >> 7) & bits) << 4)


def _elements(map_: Map, coordinates: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Bytes in shared memory and in the array of those elements of a box that exist."""
    size, columns = map_.dtype.itemsize, map_.box[0]
    outer = itertools.product(*(range(extent) for extent in reversed(map_.box[1:])))
    for r, indices in enumerate(outer):
        for c in range(columns):
            at = [x + i for x, i in zip(coordinates, (c, *reversed(indices)), strict=True)]
            if any(not 0 <= x < extent for x, extent in zip(at, map_.dims, strict=True)):
                continue
            address = map_.shift_bytes + at[0] * size
            address += sum(x * s for x, s in zip(at[1:], map_.strides_bytes, strict=True))
            place = (r * columns + c) * size
            if map_.swizzle:
                place = int(swizzled(np.int64(r), np.int64(c * size), map_.swizzle))
            yield slice(place, place + size), slice(address, address + size)


def loaded_box(map_: Map, coordinates: tuple[int, ...]) -> Callable[[NDArray], NDArray]:
    """Shared memory after a TMA load, zero filled outside of the tensor."""

    def expected(data: NDArray) -> NDArray:
        out = np.zeros(map_.box_bytes, np.uint8)
        for place, address in _elements(map_, coordinates):
            out[place] = data[address]
        return out

    return expected


def stored_box(
    map_: Map, coordinates: tuple[int, ...], before: NDArray[np.uint8]
) -> Callable[[NDArray], NDArray]:
    """The array after a TMA store of the input: what lies outside of the tensor goes nowhere."""

    def expected(data: NDArray) -> NDArray:
        out = before.copy()
        for place, address in _elements(map_, coordinates):
            out[address] = data[place]
        return out

    return expected
