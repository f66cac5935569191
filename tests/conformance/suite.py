"""The conformance cases: do the emulator's wrappers do what the GPU's instructions do?

Each case calls one wrapper (or the few that belong together) of ``kernels_cu/ptx`` in a tiny
kernel of ``kernels.cuh``. The same source is compiled by NVRTC for a GPU and by g++ for the
emulator, gets the same seeded input, and must leave the same bytes. ``run.py`` records on a GPU
what they are; the tests replay the emulator against that record on machines without one.

Matrix products multiply small integers: their sums are exact in any order of addition.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cupyflash import source
from cupyflash.params import TensorMapRequest
from cupyflash.source import TranslationUnit
from cupyflash.tensor import DType
from tests.conformance.boxes import Map, Sequence, loaded_box, stored_box
from tests.conformance.values import (
    BF16,
    CPP,
    F16,
    NAME,
    THREADS,
    counted,
    floats_to_round,
    function_arguments,
    product,
    received,
    small_integers,
    twice,
    vote_bits,
    words,
)

TARGET = "sm_90a"
KERNELS = Path(__file__).with_name("kernels.cuh")
WRAPPERS = ("ptx/common.cuh", "ptx/sm80.cuh", "ptx/sm90.cuh", "ptx/wgmma.cuh", "tile/layout.cuh")
SHARED_BYTES = 96 * 1024 + 64
IN_OFFSET, OUT_OFFSET, WHICH_OFFSET, ARGUMENT_OFFSET, PARAMS_BYTES = 128, 136, 144, 148, 192
UNWRITTEN = 0xA5


@dataclass(frozen=True)
class Case:
    """One call of a wrapper.

    Attributes:
        name: unique, and the key in the record.
        group: the kernel that holds it: cases of one group are compiled together.
        call: the C++ expression.
        make_input: the input's bytes from a generator.
        out_bytes: size of what it writes.
        out_values: what the output holds before; None for bytes 0xA5.
        map: of TMA cases.
        arguments: of TMA cases and a few more; kernels.cuh says what they mean.
        cluster: CTAs.
        ulps: results may differ by so many units in the last place of float32; 0 for not at all.
        expected: what it must write, by the PTX manual, from its input; None where that would only
            repeat the emulator.
    """

    name: str
    group: str
    call: str
    make_input: Callable[[np.random.Generator], NDArray]
    out_bytes: int
    out_values: NDArray | None = None
    map: Map | None = None
    arguments: tuple[int, ...] = ()
    cluster: int = 1
    ulps: int = 0
    expected: Callable[[NDArray], NDArray] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.name

    @property
    def input(self) -> NDArray[np.uint8]:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return np.ascontiguousarray(self.make_input(rng)).view(np.uint8).ravel()

    @property
    def output_before(self) -> NDArray[np.uint8]:
        if self.out_values is None:
            return _unwritten(self.out_bytes)
        return np.ascontiguousarray(self.out_values).view(np.uint8).ravel().copy()

    @property
    def which(self) -> int:
        """Its number in its kernel's switch."""
        return [case.name for case in of_group(self.group)].index(self.name)

    def params(self, in_pointer: int, out_pointer: int) -> bytes:
        """conformance::Params with the map still zero."""
        buffer = np.zeros(PARAMS_BYTES, np.uint8)
        buffer[IN_OFFSET : IN_OFFSET + 16].view(np.uint64)[:] = (in_pointer, out_pointer)
        buffer[WHICH_OFFSET : WHICH_OFFSET + 4].view(np.int32)[:] = self.which
        arguments = buffer[ARGUMENT_OFFSET : ARGUMENT_OFFSET + 32].view(np.int32)
        arguments[: len(self.arguments)] = self.arguments
        return buffer.tobytes()

    def map_requests(self, in_pointer: int, out_pointer: int) -> tuple[TensorMapRequest, ...]:
        if self.map is None:
            return ()
        return (
            TensorMapRequest(
                offset=0,
                pointer=in_pointer if self.map.of == "in" else out_pointer,
                element_bytes=self.map.dtype.itemsize,
                dims=self.map.dims,
                strides_bytes=self.map.strides_bytes,
                box=self.map.box,
                swizzle=self.map.swizzle,
                shift_bytes=self.map.shift_bytes,
            ),
        )


def of_group(group: str) -> tuple[Case, ...]:
    return tuple(case for case in CASES if case.group == group)


def translation_unit(group: str) -> TranslationUnit:
    """One kernel with a switch over the cases of a group."""
    root = source.include_root()
    cases = of_group(group)
    labels: dict[str, list[str]] = {}
    for i, case in enumerate(cases):
        labels.setdefault(case.call, []).append(f"case {i}:")
    body = "\n".join(
        f"    {' '.join(places)} cf::conformance::{call}(params); break;"
        for call, places in labels.items()
    )
    text = f"""\
#include "tile/layout.cuh"
{KERNELS.read_text()}
static_assert(CF_OFFSETOF(cf::conformance::Params, in) == {IN_OFFSET});
static_assert(CF_OFFSETOF(cf::conformance::Params, which) == {WHICH_OFFSET});
static_assert(CF_OFFSETOF(cf::conformance::Params, argument) == {ARGUMENT_OFFSET});
static_assert(sizeof(cf::conformance::Params) == {PARAMS_BYTES});
CF_KERNEL(conformance_{group}, cf::conformance::Params, {THREADS}, 1, {cases[0].cluster}) {{
  switch (params.which) {{
{body}
  }}
}}
"""
    options = (
        f"--gpu-architecture={TARGET}",
        "--std=c++20",
        "--ptxas-options=-v",
        f"-I{root}",
    )
    digest = hashlib.sha256("\0".join((text, wrapper_digest(), *options[:3])).encode())
    return TranslationUnit(
        name=f"conformance_{group}",
        text=text,
        target=TARGET,
        options=options,
        include_root=root,
        includes=source._transitive_includes(root, text),
        registers=None,
        digest=digest.hexdigest(),
    )


def wrapper_digest() -> str:
    """What the record depends on: the device's wrappers and the kernels around them.

    Comments and white space are left out, so that rewording one does not ask for a GPU.
    """
    digest = hashlib.sha256()
    root = source.include_root()
    for path in (*(root / name for name in WRAPPERS), KERNELS):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        digest.update(" ".join(text.split()).encode() + b"\0")
    for case in CASES:
        shape = (case.name, case.group, case.call, case.map, case.arguments, case.cluster)
        digest.update(repr(shape).encode() + b"\0")
        digest.update(case.input.tobytes() + case.output_before.tobytes())
    return digest.hexdigest()


# -- the list --------------------------------------------------------------------------------------


def _basic() -> Iterator[Case]:
    row_bytes = 16 * THREADS
    for count in (1, 2, 4):
        for transposed in (False, True):
            suffix = "_trans" if transposed else ""
            yield Case(
                f"ldmatrix_x{count}{suffix}",
                "basic",
                f"ldmatrix<{count}, {str(transposed).lower()}>",
                words(row_bytes // 4),
                count * THREADS * 4,
            )
    for transposed in (False, True):
        suffix = "_trans" if transposed else ""
        yield Case(
            f"stmatrix_x4{suffix}",
            "basic",
            f"stmatrix<{str(transposed).lower()}>",
            words(4 * THREADS),
            row_bytes,
        )
    yield Case("shuffles", "basic", "shuffles", words(THREADS), 96 * THREADS * 4)
    yield Case("votes", "basic", "votes", vote_bits, 24 * THREADS * 4)
    for dtype in (BF16, F16):
        yield Case(
            f"pack2_{NAME[dtype]}",
            "basic",
            f"pack<{CPP[dtype]}>",
            floats_to_round,
            64 * THREADS * 4,
        )
        yield Case(
            f"mma_m16n8k16_{NAME[dtype]}",
            "basic",
            f"mma<{CPP[dtype]}>",
            small_integers(dtype, (12 * THREADS,)),
            4 * THREADS * 4,
        )
    yield Case(
        "opaque",
        "basic",
        "opaque",
        floats_to_round,
        128 * THREADS * 4,
        expected=lambda data: data,
    )
    yield Case("cp_async", "basic", "cp_async", words(4 * THREADS), 40 * THREADS)
    yield Case("named_barriers", "basic", "named_barriers", words(THREADS), THREADS * 4)
    yield Case("mbarrier_sequence", "basic", "mbarrier_sequence", words(4), 24 * THREADS * 4)
    for function, low, high in (("Ex2", -60.0, 20.0), ("Lg2", 0.01, 4e4), ("Rcp", 0.01, 4e4)):
        yield Case(
            f"approximate_{function.lower()}",
            "basic",
            f"approximate<cf::conformance::Function::k{function}>",
            function_arguments(low, high),
            THREADS * 4,
            ulps=4,
        )


# A tensor [batch 2, seqlen 50, heads 3, head_dim 72] of 16-bit elements.
_DIMS = (72, 50, 3, 2)
_STRIDES = (3 * 72 * 2, 72 * 2, 50 * 3 * 72 * 2)
_ELEMENTS = 72 * 50 * 3 * 2
_PLACES = {
    "inside": (0, 8, 1, 1),
    "rows_overhang": (0, 40, 2, 0),
    "columns_overhang": (64, 3, 0, 1),
    "before_the_first_row": (0, -5, 1, 0),
    "before_the_first_column": (-8, 0, 1, 0),
    "outside": (0, 60, 0, 0),
    "another_batch": (8, 49, 2, 1),
}


def _unwritten(count: int) -> NDArray[np.uint8]:
    return np.full(count, UNWRITTEN, np.uint8)


def _tma() -> Iterator[Case]:
    for swizzle, columns, rows in (
        (128, 64, 32),
        (128, 64, 64),
        (64, 32, 24),
        (32, 16, 16),
        (0, 72, 8),
    ):
        for place, coordinates in _PLACES.items():
            if swizzle == 0 and place == "before_the_first_column":
                continue
            box = (columns, rows, 1, 1)
            arguments = (*coordinates, columns * rows * 2)
            load = Map("in", DType.bfloat16, _DIMS, _STRIDES, box, swizzle)
            yield Case(
                f"tma_load_{swizzle}_{rows}_{place}",
                "tma",
                "tma_load<4>",
                words(_ELEMENTS // 2),
                columns * rows * 2,
                map=load,
                arguments=arguments,
                expected=loaded_box(load, coordinates),
            )
            if min(coordinates) < 0:  # a store may not begin before the tensor: an H200 faults
                continue
            yield Case(
                f"tma_store_{swizzle}_{rows}_{place}",
                "tma",
                "tma_store<4, false>",
                words(columns * rows // 2),
                _ELEMENTS * 2,
                map=load.over_output(),
                arguments=arguments,
                expected=stored_box(load, coordinates, _unwritten(_ELEMENTS * 2)),
            )
    # Reductions: floats of 4 bytes and of 2, sums of small integers.
    for dtype, name, columns in (
        (DType.float32, np.dtype(np.float32), 32),
        (DType.bfloat16, BF16, 64),
    ):
        strides = tuple(stride * dtype.itemsize // 2 for stride in _STRIDES)
        for place in ("inside", "rows_overhang", "columns_overhang"):
            yield Case(
                f"tma_reduce_add_{dtype.short}_{place}",
                "tma",
                "tma_store<4, true>",
                small_integers(name, (columns * 16,)),
                _ELEMENTS * dtype.itemsize,
                out_values=(np.arange(_ELEMENTS) % 11 - 5).astype(name),
                map=Map("out", dtype, _DIMS, strides, (columns, 16, 1, 1), 128),
                arguments=(*_PLACES[place], columns * 16 * dtype.itemsize),
            )


# A tensor [batch 2, rows 10, slices 5, heads 3, head_dim 72], its dimensions in the order
# (head_dim, rows, slices, heads, batch).
_DIMS_5D = (72, 10, 5, 3, 2)
_STRIDES_5D = (5 * 3 * 72 * 2, 3 * 72 * 2, 72 * 2, 10 * 5 * 3 * 72 * 2)
_ELEMENTS_5D = 72 * 10 * 5 * 3 * 2
_PLACES_5D = {
    "inside": (8, 2, 1, 1, 0),
    "two_overhang": (0, 8, 4, 0, 0),
    "all_overhang": (64, 8, 3, 2, 1),
    "before_and_behind": (-8, -1, 4, -1, 1),
    "outside": (0, 0, 0, 0, 2),
    "outside_of_two": (0, 10, 0, 3, 0),
}

# Sequences of the array of _DIMS, and the first row of a tile in them.
_TILES = {
    "all_rows": (Sequence(5, 40), 16),
    "last_rows": (Sequence(5, 20), 16),
    "no_rows_left": (Sequence(5, 20), 32),
    "one_row": (Sequence(0, 1), 0),
    "last_row_of_the_array": (Sequence(49, 1), 0),
    "end_of_the_array": (Sequence(0, 50), 40),
    "empty": (Sequence(7, 0), 0),
    "empty_at_the_end": (Sequence(50, 0), 0),
}


def _tma_5d() -> Iterator[Case]:
    for swizzle, columns in ((128, 64), (64, 32), (32, 16), (0, 64)):
        load = Map("in", DType.bfloat16, _DIMS_5D, _STRIDES_5D, (columns, 4, 3, 2, 2), swizzle)
        for place, at in _PLACES_5D.items():
            if swizzle == 0 and min(at) < 0:
                continue
            yield from _load_and_store(f"{swizzle}_{place}", load, at, load, at, _ELEMENTS_5D)


def _tma_ragged() -> Iterator[Case]:
    for swizzle, columns, rows in ((128, 64, 16), (64, 32, 64), (0, 72, 8)):
        array = Map("in", DType.bfloat16, _DIMS, _STRIDES, (columns, rows, 1, 1), swizzle)
        for tile, (sequence, row) in _TILES.items():
            at = (64 if tile == "last_rows" and columns == 64 else 0, row, 2, 1)
            yield from _load_and_store(
                f"ragged_{swizzle}_{tile}",
                sequence.ragged_map(array),
                sequence.ragged_coordinates(array, at),
                sequence.own_map(array),
                at,
                _ELEMENTS,
            )


def _load_and_store(
    name: str,
    map_: Map,
    coordinates: tuple[int, ...],
    same: Map,
    same_coordinates: tuple[int, ...],
    elements: int,
) -> Iterator[Case]:
    """A load and, if it may be, a store of a box of 16-bit elements in five dimensions, which must
    do what the manual says of the box ``same``."""
    arguments = (*coordinates, map_.box_bytes)
    yield Case(
        f"tma_load_5d_{name}",
        "tma_5d",
        "tma_load<5>",
        words(elements // 2),
        map_.box_bytes,
        map=map_,
        arguments=arguments,
        expected=loaded_box(same, same_coordinates),
    )
    if min(coordinates) < 0:  # a store may not begin before the tensor: an H200 faults
        return
    yield Case(
        f"tma_store_5d_{name}",
        "tma_5d",
        "tma_store<5, false>",
        words(map_.box_bytes // 4),
        elements * 2,
        map=map_.over_output(),
        arguments=arguments,
        expected=stored_box(same, same_coordinates, _unwritten(elements * 2)),
    )


def _cluster() -> Iterator[Case]:
    rows = 16
    array = Map("in", DType.bfloat16, _DIMS, _STRIDES, (64, rows, 1, 1), 128)
    yield _multicast("tma_multicast", array, (0, 25, 1, 0), rows, array, (0, 25, 1, 0), _ELEMENTS)
    five = Map("in", DType.bfloat16, _DIMS_5D, _STRIDES_5D, (64, 4, 3, 2, 1), 128)
    for place, at in (("inside", (0, 1, 1, 0, 1)), ("overhang", (16, 5, 3, 2, 0))):
        yield _multicast(f"tma_multicast_5d_{place}", five, at, 4, five, at, _ELEMENTS_5D)
    for tile, sequence, row in (
        ("both_halves", Sequence(3, 41), 0),
        ("second_half_ends", Sequence(3, 41), 16),
        ("first_half_ends", Sequence(3, 41), 32),
        ("no_rows", Sequence(9, 0), 0),
    ):
        tile_at = (0, row, 1, 1)
        yield _multicast(
            f"tma_multicast_5d_ragged_{tile}",
            sequence.ragged_map(array),
            sequence.ragged_coordinates(array, tile_at),
            rows,
            sequence.own_map(array),
            tile_at,
            _ELEMENTS,
        )
    for name, to_peer in (("to_the_peer", 1), ("to_itself", 0)):
        yield Case(
            f"store_async_32_{name}",
            "cluster",
            "store_async",
            words(2 * 2 * 2 * THREADS),
            2 * 2 * 2 * THREADS * 4,
            arguments=(to_peer,),
            cluster=2,
            expected=received(to_peer),
        )
    for name, times, step, start in (("up", 8, 1, 0), ("down", 4, -7, 1000)):
        count = 2 * THREADS * times
        before = _unwritten(4 * (2 + count)).view(np.uint32)
        before[0] = start
        yield Case(
            f"atomic_add_{name}",
            "cluster",
            "atomic_add",
            words(count),
            before.nbytes,
            out_values=before,
            arguments=(times, step, start),
            cluster=2,
            expected=counted(before, times, step),
        )


def _multicast(
    name: str,
    map_: Map,
    coordinates: tuple[int, ...],
    rows: int,
    same: Map,
    same_coordinates: tuple[int, ...],
    elements: int,
) -> Case:
    """Two boxes of 16-bit elements, ``rows`` apart in dimension 1, to both CTAs of a cluster."""
    column, row, *outer = same_coordinates
    return Case(
        name,
        "cluster",
        f"tma_multicast<{len(map_.dims)}>",
        words(elements // 2),
        4 * map_.box_bytes,
        map=map_,
        arguments=(*coordinates, map_.box_bytes, rows),
        cluster=2,
        expected=twice(
            loaded_box(same, same_coordinates), loaded_box(same, (column, row + rows, *outer))
        ),
    )


def _wgmma() -> Iterator[Case]:
    for dtype in (BF16, F16):
        for n, k in (
            (16, 64),
            (64, 64),
            (128, 128),
            (192, 64),
            (176, 128),
            (256, 64),
            (96, 96),
            (128, 32),
        ):
            if dtype == F16 and n not in (64, 128):
                continue
            yield Case(
                f"wgmma_k_major_{NAME[dtype]}_n{n}_k{k}",
                "wgmma_k_major",
                f"wgmma_k_major<{CPP[dtype]}, {n}, {k}>",
                small_integers(dtype, (64, k), (n, k)),
                n // 2 * THREADS * 4,
                expected=product(dtype, n, k, b_is_kn=False, keep=True),
            )
    for dtype in (BF16, F16):
        for n, k in ((64, 64), (96, 64), (128, 128), (192, 64), (256, 80), (32, 32)):
            if dtype == F16 and n not in (64, 128):
                continue
            yield Case(
                f"wgmma_registers_mn_major_{NAME[dtype]}_n{n}_k{k}",
                "wgmma_mn_major",
                f"wgmma_registers_mn_major<{CPP[dtype]}, {n}, {k}>",
                small_integers(dtype, (64, k), (k, n)),
                n // 2 * THREADS * 4,
                expected=product(dtype, n, k, b_is_kn=True, keep=False),
            )
    for n, k in ((64, 64), (96, 32), (128, 128), (256, 64)):
        yield Case(
            f"wgmma_mn_major_bf16_n{n}_k{k}",
            "wgmma_mn_major",
            f"wgmma_mn_major<cf::bf16_t, {n}, {k}>",
            small_integers(BF16, (64, k), (k, n)),
            n // 2 * THREADS * 4,
            expected=product(BF16, n, k, b_is_kn=True, keep=False),
        )


CASES: tuple[Case, ...] = (
    *_basic(),
    *_tma(),
    *_tma_5d(),
    *_tma_ragged(),
    *_cluster(),
    *_wgmma(),
)
GROUPS = tuple(dict.fromkeys(case.group for case in CASES))
