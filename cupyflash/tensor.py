"""What the library knows about an array: address, shape, strides, element type, device."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace


class DType(enum.Enum):
    """Element types. ``short`` is the spelling in kernel names, ``itemsize`` is in bytes."""

    float16 = ("f16", 2)
    bfloat16 = ("bf16", 2)
    float32 = ("f32", 4)
    float64 = ("f64", 8)
    float8_e4m3fn = ("e4m3", 1)
    float8_e5m2 = ("e5m2", 1)
    boolean = ("b8", 1)
    int8 = ("i8", 1)
    int16 = ("i16", 2)
    int32 = ("i32", 4)
    int64 = ("i64", 8)
    uint8 = ("u8", 1)
    uint16 = ("u16", 2)
    uint32 = ("u32", 4)
    uint64 = ("u64", 8)

    short: str
    itemsize: int

    def __init__(self, short: str, itemsize: int) -> None:
        self.short = short
        self.itemsize = itemsize

    def __repr__(self) -> str:
        return f"DType.{self.name}"

    def __str__(self) -> str:
        return self.name


FP8_DTYPES = (DType.float8_e4m3fn, DType.float8_e5m2)
"""8-bit floats, which have scales."""


class DeviceKind(enum.Enum):
    """Where an array lives. ``emulated`` is the CPU emulator of the kernels, for tests."""

    cpu = "cpu"
    cuda = "cuda"
    emulated = "emulated"

    def __repr__(self) -> str:
        return f"DeviceKind.{self.name}"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Device:
    """A device: its kind and, where there can be several, its index."""

    kind: DeviceKind
    index: int = 0

    def __str__(self) -> str:
        return "cpu" if self.kind is DeviceKind.cpu else f"{self.kind}:{self.index}"


CPU = Device(DeviceKind.cpu)


@dataclass(frozen=True)
class TensorView:
    """An array, reduced to what a kernel needs. It does not keep the array alive.

    Attributes:
        pointer: address of the first element.
        shape: number of elements along each dimension.
        strides: distance between neighbours along each dimension, in elements; any sign.
        dtype: element type.
        device: where ``pointer`` is valid.
        readonly: whether the owner forbids writing.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: Device
    readonly: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product

    def permuted(self, axes: Sequence[int]) -> TensorView:
        """The same elements with dimensions in another order (as ``numpy.transpose``)."""
        return replace(
            self,
            shape=tuple(self.shape[axis] for axis in axes),
            strides=tuple(self.strides[axis] for axis in axes),
        )

    def byte_range(self) -> tuple[int, int]:
        """Lowest address touched and one past the highest; (pointer, pointer) when empty."""
        if self.size == 0:
            return self.pointer, self.pointer
        low = high = 0
        for extent, stride in zip(self.shape, self.strides):
            reach = (extent - 1) * stride
            low += min(reach, 0)
            high += max(reach, 0)
        itemsize = self.dtype.itemsize
        return self.pointer + low * itemsize, self.pointer + (high + 1) * itemsize


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array of this shape."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
