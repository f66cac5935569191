"""Small kernels for testing the emulator itself: a body of CUDA text, three arrays, one launch."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest
from numpy.typing import NDArray

from cupyflash import emulate, source
from cupyflash.emulate import EmulatedArray, Report
from cupyflash.errors import EmulationError
from cupyflash.launch import FAR_ROW
from cupyflash.params import TensorMapRequest

MODES = (("early", 0), ("late", 0), ("random", 1), ("random", 2), ("pct", 1))
"""Schedules and seeds that every correct kernel must survive."""

PRELUDE = """\
#include "ptx/ptx.cuh"
{includes}
using namespace cf;
using namespace cf::ptx;
struct Params {{
  CUtensorMap a_map, b_map, out_map;
  const void* a;
  const void* b;
  float* out;
  int size;
}};
{functions}
CF_KERNEL({name}, Params, {threads}, 1, {cluster}) {{
{body}
}}
"""
MAP_OFFSETS = {"a": 0, "b": 128, "out": 256}
PARAMS_BYTES = 448


@dataclass(frozen=True)
class Unit:
    """A translation unit, as ``emulate.build`` takes it."""

    name: str
    text: str
    target: str

    @property
    def include_root(self) -> Path:
        return source.include_root()

    @property
    def digest(self) -> str:
        """Of the text and of every header that a kernel may include."""
        digest = hashlib.sha256(self.text.encode())
        for path in sorted(self.include_root.rglob("*.cuh")):
            digest.update(path.read_bytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Kernel:
    """A test kernel: what stands in its body, and its shape."""

    body: str
    target: str = "sm_80"
    threads: int = 32
    cluster: int = 1
    grid: int = 1
    shared_bytes: int = 4096
    functions: str = ""
    includes: str = ""
    name: str = "test"
    defines: tuple[str, ...] = ()
    sanitize: bool = False

    def build(self) -> emulate.EmulatedKernel:
        text = PRELUDE.format(
            name=self.name,
            threads=self.threads,
            cluster=self.cluster,
            body=self.body,
            functions=self.functions,
            includes=self.includes,
        )
        return emulate.build(
            Unit(self.name, text, self.target), self.defines, sanitize=self.sanitize
        )


@dataclass
class Launch:
    """Arguments of a launch: arrays, and boxes of the tensor maps over them.

    Attributes:
        a, b, out: the kernel's arrays.
        boxes: for a, b or out: (box, swizzle span), fastest dimension first.
        ragged: whether maps have rows twice (kernels_cu/attn/ragged.cuh); arrays are then [batch,
            heads, rows, columns].
        size: the kernel's integer parameter.
    """

    a: NDArray | None = None
    b: NDArray | None = None
    out: NDArray = field(default_factory=lambda: numpy.full(1024, numpy.nan, numpy.float32))
    boxes: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    size: int = 0
    ragged: bool = False


def run(
    kernel: Kernel,
    launch: Launch | None = None,
    *,
    schedule: str = "early",
    seed: int = 0,
    race: bool | str = True,
    **options: float,
) -> tuple[NDArray, Report]:
    """Builds and launches; returns ``out`` after the launch, and the report."""
    launch = launch or Launch()
    device = emulate.device(kernel.target)
    arrays = {
        name: device.array(array)
        for name, array in (("a", launch.a), ("b", launch.b), ("out", launch.out))
        if array is not None
    }
    params = bytearray(PARAMS_BYTES)
    for i, name in enumerate(("a", "b", "out")):
        pointer = arrays[name].pointer if name in arrays else 0
        params[384 + 8 * i : 392 + 8 * i] = pointer.to_bytes(8, "little")
    params[408:412] = launch.size.to_bytes(4, "little")
    maps = []
    for name, box in launch.boxes.items():
        make_map = tensor_map
        if launch.ragged:
            make_map = ragged_map if name == "out" else ragged_load_map
        maps.append(make_map(MAP_OFFSETS[name], arrays[name], *box))
    report = emulate.run(
        kernel.build(),
        kernel.grid,
        params,
        maps,
        shared_bytes=kernel.shared_bytes,
        schedule=schedule,
        seed=seed,
        race=race,
        **options,  # type: ignore[arg-type]
    )
    return arrays["out"].numpy(), report


def tensor_map(
    offset: int, array: EmulatedArray, box: tuple[int, ...], swizzle: int
) -> TensorMapRequest:
    """A map over the whole array, its last dimension fastest."""
    return TensorMapRequest(
        offset=offset,
        pointer=array.pointer,
        element_bytes=array.dtype.itemsize,
        dims=array.shape[::-1],
        strides_bytes=array.strides[::-1][1:],
        box=box,
        swizzle=swizzle,
    )


def ragged_load_map(
    offset: int, array: EmulatedArray, box: tuple[int, ...], swizzle: int
) -> TensorMapRequest:
    """A map that has the array's rows twice, what is too much taken back modulo 2^64."""
    batch, heads, rows, columns = array.shape
    by_batch, by_head, by_row, _ = array.strides
    return dataclasses.replace(
        tensor_map(offset, array, box, swizzle),
        dims=(columns, FAR_ROW, heads, FAR_ROW + 1, (batch - 1) * (by_batch // by_row) + rows + 1),
        strides_bytes=(by_row, by_head, (1 << 64) // FAR_ROW - by_row, by_row),
    )


def ragged_map(
    offset: int, array: EmulatedArray, box: tuple[int, ...], swizzle: int
) -> TensorMapRequest:
    """A map that has the array's rows twice, from a base as many rows before it."""
    batch, heads, rows, columns = array.shape
    by_batch, by_head, by_row, _ = array.strides
    return dataclasses.replace(
        tensor_map(offset, array, box, swizzle),
        dims=(columns, rows, rows + 1, heads, batch),
        strides_bytes=(by_row, by_row, by_head, by_batch),
        shift_bytes=-rows * by_row,
    )


@dataclass(frozen=True)
class Hazard:
    """A kernel with a planted mistake, and what the emulator must say about it.

    Attributes:
        name: of the test.
        kernel: the kernel.
        message: regular expression for the report.
        launch: its arguments.
        schedules: those that must catch it; all by default.
        race: whether the race detector is on.
        options: further arguments of ``emulate.run``.
    """

    name: str
    kernel: Kernel
    message: str
    launch: Launch = field(default_factory=Launch)
    schedules: tuple[tuple[str, int], ...] = MODES
    race: bool | str = True
    options: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def check_hazard(hazard: Hazard) -> None:
    """Every one of the hazard's schedules reports it, naming the kernel and a source line."""
    for schedule, seed in hazard.schedules:
        with pytest.raises(EmulationError, match=hazard.message) as caught:
            run(
                hazard.kernel,
                hazard.launch,
                schedule=schedule,
                seed=seed,
                race=hazard.race,
                **hazard.options,
            )
        text = str(caught.value)
        assert f"kernel {hazard.kernel.name}" in text
        assert f"schedule {schedule}" in text
