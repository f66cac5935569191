"""q, k and v of ``attention`` as 8-bit floats: their arrays, how these lie and what scales them.

They come as arrays of e4m3 numbers, with scales as arguments, or as what ``quantize`` has made.
Both become views in [batch, seqlen, heads, head_dim] order, arrays of scales by name
(``params.SCALES``) and a ``Scaling``.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import numpy

from cupyflash import fp8
from cupyflash.arrays import Array
from cupyflash.errors import UnsupportedError
from cupyflash.fp8 import Quantized
from cupyflash.params import SCALED
from cupyflash.problem import OperandScale, Scaling, as_float
from cupyflash.tensor import FP8_DTYPES, DType, TensorView

OUT_DTYPES = (DType.bfloat16, DType.float16, DType.float8_e4m3fn)
"""What attention of 8-bit floats may write; the first unless asked otherwise."""


def quantized_operands(q: Any, k: Any, v: Any) -> dict[str, Quantized]:
    """q, k and v by name where they are quantized; nothing where they are plain arrays.

    Raises:
        TypeError: some are and some are not.
        ValueError: their roles or rotations do not go together.
    """
    given = {"q": q, "k": k, "v": v}
    found = {name: x for name, x in given.items() if isinstance(x, Quantized)}
    if not found:
        return found
    if len(found) < len(given):
        types = ", ".join(f"{name} {type(x).__qualname__}" for name, x in given.items())
        raise TypeError(f"q, k and v: expected all of them Quantized or none, got {types}")
    for name, x in found.items():
        if x.role != name:
            raise ValueError(
                f"{name}: expected a tensor quantized with the role {name!r}, got the role "
                f"{x.role!r}: a role is the order in which a kernel reads the numbers"
            )
        if x.fmt != "e4m3":
            raise UnsupportedError(f'{name}: expected the format "e4m3", got {x.fmt!r}')
    if found["q"].hadamard_seed != found["k"].hadamard_seed:
        raise ValueError(
            f"q and k: expected one hadamard_seed, got {found['q'].hadamard_seed} and "
            f"{found['k'].hadamard_seed}; q . k is what it was only if both are rotated alike"
        )
    if found["v"].hadamard_seed is not None:
        raise ValueError(f"v: expected no rotation, got hadamard_seed {found['v'].hadamard_seed}")
    return found


def scales_given(
    quantized: dict[str, Quantized], scales: dict[str, Any], on_host: bool
) -> tuple[dict[str, Array], dict[str, numpy.ndarray]]:
    """The arrays of scales by name, and those given as numbers, which only the CPU takes.

    Args:
        quantized: q, k and v, or nothing.
        scales: the arguments ``params.SCALES``.
        on_host: whether the arrays are on the CPU.
    """
    found, as_numbers = {}, {}
    for name, given in scales.items():
        operand = name.removesuffix("_scale")
        if operand in quantized:
            if given is not None:
                raise ValueError(f"{name}: {operand} is quantized and has scales of its own")
            found[name] = quantized[operand].scale
        elif on_host and isinstance(given, (numbers.Real, numpy.generic)):
            as_numbers[name] = numpy.asarray(as_float(name, given), numpy.float32)
        elif given is not None:
            found[name] = given
    return found, as_numbers


def check_dtype_of_scales(dtype: DType, scales: dict[str, Any]) -> None:
    """Raises for scales of other types than 8-bit floats."""
    for name, given in scales.items():
        if given is not None and dtype not in FP8_DTYPES:
            raise TypeError(f"{name}: scales belong to fp8 arrays, got q of {dtype}")


def view_of_quantized(
    name: str, quantized: Quantized, data: TensorView, num_sequences: int, packed: bool
) -> TensorView:
    """The numbers of a quantized tensor in its shape, whichever way they are stored.

    Along the tokens of a transposed one strides are 1: which lies where is another matter.

    Raises:
        TypeError, ValueError: data is not what ``quantize`` makes for the shape.
    """
    _check_rank(name, quantized, packed)
    if data.dtype not in (DType.uint8, DType.float8_e4m3fn):
        raise TypeError(f"{name}: data: expected uint8 or float8_e4m3fn, got {data.dtype}")
    arrangement = fp8.arrangement_of(quantized, num_sequences if packed else None)
    transposed = quantized.role == "v"
    expected = arrangement.transposed_shape if transposed else arrangement.natural_shape
    if data.shape != expected:
        raise ValueError(
            f"{name}: data: expected shape {list(expected)} for a tensor of shape "
            f"{list(quantized.shape)}, got {list(data.shape)}"
        )
    strides = data.strides
    if transposed:
        *batch, by_head, by_channel, by_token = strides
        strides = (*batch, by_token, by_head, by_channel)
    shape = tuple(quantized.shape)
    return dataclasses.replace(data, shape=shape, strides=strides, dtype=DType.float8_e4m3fn)


def _check_rank(name: str, quantized: Quantized, packed: bool) -> None:
    rank = len(quantized.shape)
    if rank != (3 if packed else 4):
        how = "packed sequences" if rank == 3 else "sequences that are not packed"
        wanted = "cu_seqlens_q and cu_seqlens_kv" if rank == 3 else "no cu_seqlens"
        raise ValueError(f"{name}: quantized as {how}, expected {wanted}")


def scaling_of(
    quantized: dict[str, Quantized],
    views: dict[str, TensorView],
    num_sequences: int,
    packed: bool,
) -> Scaling:
    """How operands are scaled.

    Args:
        quantized: q, k and v, or nothing.
        views: q, k and v in bshd order, and the scales that there are.
        num_sequences: sequences, packed or not.
        packed: whether they are packed.

    Raises:
        TypeError, ValueError: scales that do not belong to the operands.
    """
    scales = {
        name: _scale_of(name, quantized.get(name), views, num_sequences, packed) for name in SCALED
    }
    _check_scale("out_scale", views, ((),), "[]")
    v_slot = fp8.kind_of(quantized["v"].block, "v")[1] if quantized else 0
    return Scaling(**scales, v_slot=v_slot, out="out_scale" in views)


def _scale_of(
    operand: str,
    quantized: Quantized | None,
    views: dict[str, TensorView],
    num_sequences: int,
    packed: bool,
) -> OperandScale:
    name, heads = f"{operand}_scale", views[operand].shape[2]
    if quantized is not None:
        kind, slot = fp8.kind_of(quantized.block, operand)
        shape = fp8.arrangement_of(quantized, num_sequences if packed else None).scale_shape
        _check_scale(name, views, (shape,), f"{list(shape)}")
        return OperandScale(kind, {"block": slot, "token": 1}.get(kind, 0))
    if name not in views:
        return OperandScale()
    _check_scale(name, views, ((), (num_sequences, heads)), f"[] or [{num_sequences}, {heads}]")
    return OperandScale("head" if views[name].ndim else "tensor")


def _check_scale(
    name: str, views: dict[str, TensorView], shapes: tuple[tuple[int, ...], ...], words: str
) -> None:
    view, device = views.get(name), views["q"].device
    if view is None:
        return
    if view.dtype is not DType.float32:
        raise TypeError(f"{name}: expected float32, got {view.dtype}")
    if view.shape not in shapes:
        raise ValueError(f"{name}: expected shape {words}, got {list(view.shape)}")
    if view.device != device:
        raise TypeError(f"{name}: expected an array on {device}, where q is, got {view.device}")


def out_dtype_of(dtype: DType, asked: DType | None, out: TensorView | None, scaled: bool) -> DType:
    """The element type of the output.

    Args:
        dtype: of q.
        asked: ``out_dtype``.
        out: the caller's output.
        scaled: whether there is an ``out_scale``.
    """
    if dtype not in FP8_DTYPES:
        if asked is not None and asked != dtype:
            raise TypeError(f"out_dtype: expected {dtype}, the dtype of q, got {asked}")
        return dtype
    own = OUT_DTYPES[0] if out is None else out.dtype
    chosen = own if asked is None else asked
    if chosen not in OUT_DTYPES:
        name = "out" if asked is None else "out_dtype"
        wanted = f"{OUT_DTYPES[0]} (the default), {', '.join(map(str, OUT_DTYPES[1:]))}"
        raise TypeError(f"{name}: expected {wanted} for q of {dtype}, got {chosen}")
    if scaled and chosen is not DType.float8_e4m3fn:
        raise ValueError(f"out_scale: scales an output of float8_e4m3fn, this one is {chosen}")
    return chosen


def check_plain(dtype: DType, head_dims: tuple[int, int]) -> None:
    """Raises for 8-bit arrays that no kernel will take."""
    if dtype is DType.float8_e5m2:
        raise UnsupportedError(
            f"q, k, v: {dtype} is not served, on any device: two bits of fraction are too few for "
            "scores; convert the arrays to float8_e4m3fn"
        )
    for name, head_dim in zip(("q and k", "v"), head_dims):
        if head_dim % fp8.WIDTH_STEP:
            raise UnsupportedError(
                f"{name}: head_dim of {dtype} arrays must be a multiple of {fp8.WIDTH_STEP}, got "
                f"{head_dim}; quantize pads others"
            )
