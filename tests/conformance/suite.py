"""The conformance cases: do the emulator's wrappers do what the GPU's instructions do?

Each case calls one wrapper (or the few that belong together) of ``kernels_cu/ptx`` in a tiny
kernel of ``kernels.cuh``. The same source is compiled by NVRTC for a GPU and by g++ for the
emulator, gets the same seeded input, and must leave the same bytes. ``run.py`` records on a GPU
what they are; the tests replay the emulator against that record on machines without one.

Matrix products multiply small integers: their sums are exact in any order of addition.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupyflash import source
from cupyflash.params import TensorMapRequest
from cupyflash.source import TranslationUnit
from cupyflash.tensor import DType

TARGET = "sm_90a"
KERNELS = Path(__file__).with_name("kernels.cuh")
WRAPPERS = ("ptx/common.cuh", "ptx/sm80.cuh", "ptx/sm90.cuh", "ptx/wgmma.cuh", "tile/layout.cuh")
THREADS = 128
SHARED_BYTES = 96 * 1024 + 64
IN_OFFSET, OUT_OFFSET, WHICH_OFFSET, ARGUMENT_OFFSET, PARAMS_BYTES = 128, 136, 144, 148, 192
UNWRITTEN = 0xA5


@dataclass(frozen=True)
class Map:
    """A tensor map over the input or the output of a case; dimensions fastest first."""

    of: str
    dtype: DType
    dims: tuple[int, int, int, int]
    strides_bytes: tuple[int, int, int]
    box: tuple[int, int, int, int]
    swizzle: int


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
        map, arguments: of TMA cases.
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
            return np.full(self.out_bytes, UNWRITTEN, np.uint8)
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
        arguments = buffer[ARGUMENT_OFFSET : ARGUMENT_OFFSET + 20].view(np.int32)
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
            ),
        )


def of_group(group: str) -> tuple[Case, ...]:
    return tuple(case for case in CASES if case.group == group)


def translation_unit(group: str) -> TranslationUnit:
    """One kernel with a switch over the cases of a group."""
    root = source.include_root()
    cases = of_group(group)
    body = "\n".join(
        f"    case {i}: cf::conformance::{case.call}(params); break;"
        for i, case in enumerate(cases)
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


# -- inputs ----------------------------------------------------------------------------------------


def words(count: int) -> Callable[[np.random.Generator], NDArray]:
    return lambda rng: rng.integers(0, 2**32, count, dtype=np.uint32)


def small_integers(
    dtype: np.dtype, *shapes: tuple[int, ...]
) -> Callable[[np.random.Generator], NDArray]:
    """Integers from -3 to 3 as 16-bit floats."""
    count = sum(int(np.prod(shape)) for shape in shapes)
    return lambda rng: rng.integers(-3, 4, count).astype(dtype)


def vote_bits(rng: np.random.Generator) -> NDArray:
    return rng.integers(0, 64, THREADS, dtype=np.uint32) | np.uint32(128)


def floats_to_round(rng: np.random.Generator) -> NDArray:
    """Every kind of float32: random bits, ties and near ties of both 16-bit types, specials."""
    count = 64 * THREADS * 2
    values = rng.integers(0, 2**32, count, dtype=np.uint32)
    ordinary = rng.standard_normal(count // 4).astype(np.float32)
    tie_bf16 = (ordinary.view(np.uint32) & 0xFFFF0000) | 0x8000
    tie_f16 = (ordinary.view(np.uint32) & 0xFFFFE000) | 0x1000
    nudge = rng.integers(-1, 2, count // 4).astype(np.int64)
    values[: count // 4] = (tie_bf16.astype(np.int64) + nudge).astype(np.uint32)
    values[count // 4 : count // 2] = (tie_f16.astype(np.int64) + nudge).astype(np.uint32)
    special = np.array(
        [
            0.0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
            65504,
            65519.9,
            65520,
            6e-8,
            2.9e-8,
            3e38,
            3.4e38,
            1e-40,
        ],
        np.float32,
    )
    values[-len(special) :] = special.view(np.uint32)
    return values


def function_arguments(low: float, high: float) -> Callable[[np.random.Generator], NDArray]:
    def make(rng: np.random.Generator) -> NDArray:
        values = rng.uniform(low, high, THREADS).astype(np.float32)
        whole = np.arange(8, dtype=np.float32) + max(1, int(low))
        values[: len(whole)] = whole
        return values

    return make


# -- what the manual says --------------------------------------------------------------------------

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
CPP = {BF16: "cf::bf16_t", F16: "cf::f16_t"}
NAME = {BF16: "bf16", F16: "f16"}


def accumulator_words(d: NDArray[np.float32]) -> NDArray[np.uint8]:
    """[64, N] as the threads hold and write it: word i of thread t at i * 128 + t."""
    columns = d.shape[1]
    warp, group, quad = np.meshgrid(range(4), range(8), range(4), indexing="ij")
    out = np.empty((columns // 2, THREADS), np.float32)
    for i in range(columns // 2):
        block, e = divmod(i, 4)
        row = 16 * warp + group + 8 * (e // 2)
        out[i] = d[row, 8 * block + 2 * quad + e % 2].ravel()
    return out.view(np.uint8).ravel()


def accumulators_before(columns: int) -> NDArray[np.float32]:
    """What ``start_accumulators`` puts into D, as a matrix [64, N]."""
    d = np.empty((64, columns), np.float32)
    for thread in range(THREADS):
        warp, lane = divmod(thread, 32)
        for i in range(columns // 2):
            block, e = divmod(i, 4)
            row = 16 * warp + lane // 4 + 8 * (e // 2)
            d[row, 8 * block + 2 * (lane % 4) + e % 2] = (thread + i) % 5
    return d


def product(
    dtype: np.dtype, n: int, k: int, b_is_kn: bool, keep: bool
) -> Callable[[NDArray], NDArray]:
    def expected(data: NDArray) -> NDArray:
        values = data.view(dtype).astype(np.float32)
        a = values[: 64 * k].reshape(64, k)
        b = values[64 * k :].reshape((k, n) if b_is_kn else (n, k))
        d = a @ (b if b_is_kn else b.T)
        return accumulator_words(d + accumulators_before(n) if keep else d)

    return expected


def swizzled(row: NDArray, byte: NDArray, span: int) -> NDArray:
    """Offset, in a box whose rows are span bytes long, of a byte of a row: 16-byte granules are
    XORed with bits of the row."""
    offset = row * span + byte
    bits = {0: 0, 32: 1, 64: 3, 128: 7}[span]
    return offset ^ (((offset >> 7) & bits) << 4)


def loaded_box(map_: Map, arguments: tuple[int, ...]) -> Callable[[NDArray], NDArray]:
    """Shared memory after a TMA load of 16-bit elements, zero filled outside of the tensor."""

    def expected(data: NDArray) -> NDArray:
        columns, rows = map_.box[:2]
        c0, c1, c2, c3 = arguments[:4]
        out = np.zeros(rows * columns * 2, np.uint8)
        for r in range(rows):
            for c in range(columns):
                at = (c0 + c, c1 + r, c2, c3)
                if any(not 0 <= x < extent for x, extent in zip(at, map_.dims, strict=True)):
                    continue
                address = at[0] * 2 + sum(
                    x * stride for x, stride in zip(at[1:], map_.strides_bytes, strict=True)
                )
                place = (
                    swizzled(np.int64(r), np.int64(2 * c), map_.swizzle)
                    if map_.swizzle
                    else (r * columns + c) * 2
                )
                out[place : place + 2] = data[address : address + 2]
        return out

    return expected


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
                "tma_load",
                words(_ELEMENTS // 2),
                columns * rows * 2,
                map=load,
                arguments=arguments,
                expected=loaded_box(load, arguments),
            )
            if min(coordinates) < 0:  # a store may not begin before the tensor: an H200 faults
                continue
            yield Case(
                f"tma_store_{swizzle}_{rows}_{place}",
                "tma",
                "tma_store<false>",
                words(columns * rows // 2),
                _ELEMENTS * 2,
                map=dataclasses.replace(load, of="out"),
                arguments=arguments,
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
                "tma_store<true>",
                small_integers(name, (columns * 16,)),
                _ELEMENTS * dtype.itemsize,
                out_values=(np.arange(_ELEMENTS) % 11 - 5).astype(name),
                map=Map("out", dtype, _DIMS, strides, (columns, 16, 1, 1), 128),
                arguments=(*_PLACES[place], columns * 16 * dtype.itemsize),
            )


def _cluster() -> Iterator[Case]:
    rows = 16
    yield Case(
        "tma_multicast",
        "cluster",
        "tma_multicast",
        words(_ELEMENTS // 2),
        4 * rows * 128,
        map=Map("in", DType.bfloat16, _DIMS, _STRIDES, (64, rows, 1, 1), 128),
        arguments=(0, 25, 1, rows, rows * 128),
        cluster=2,
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


CASES: tuple[Case, ...] = (*_basic(), *_tma(), *_cluster(), *_wgmma())
GROUPS = tuple(dict.fromkeys(case.group for case in CASES))
