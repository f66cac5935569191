"""Serves ``quantize``: checks its arguments, then runs ``fp8.quantize`` on the CPU or kernels.

A scale of a block of tokens or of a token takes one launch, that of a whole sequence or tensor
three: the largest magnitudes of all tiles, their maxima, the numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from typing import Any

import numpy

from cupyflash import arrays, fp8
from cupyflash.arguments import as_one
from cupyflash.arrays import Adapter, Array
from cupyflash.errors import UnsupportedError
from cupyflash.fp8 import Arrangement, Quantized
from cupyflash.launch import CudaBackend, EmulatedBackend, Launch
from cupyflash.params import QUANTIZE, QUANTIZE_STAGES, SCALE_KINDS
from cupyflash.problem import LAYOUTS, alignment_fault, as_int, to_bshd
from cupyflash.select import KernelSpec, describe_device, native_target, quantize_spec
from cupyflash.serve import enqueue
from cupyflash.tensor import DeviceKind, DType, TensorView
from cupyflash.tuning import QUANTIZE_BLOCKS, QUANTIZE_DTYPES, QUANTIZE_THREADS

MAX_HEAD_DIM = 256  # one tile has all channels
HEAD_DIM_STEP = 8  # 16 bytes of x
MAX_TILES = 2**31 - 1
MAX_STRIDE = 1 << 31  # of tokens, in elements


@dataclass(frozen=True, eq=False)
class QuantizeCall:
    """A call of ``quantize`` with everything checked.

    Attributes:
        adapter: of x and cu_seqlens.
        x, cu_seqlens: as given, in the adapter's form; None for sequences that are not packed.
        view, starts: what they are, x in bshd order and packed as a batch of one.
        arrangement: where things will lie.
        role, block, hadamard_seed, for_backward, layout: as given.
    """

    adapter: Adapter
    x: Array
    cu_seqlens: Array | None
    view: TensorView
    starts: TensorView | None
    arrangement: Arrangement
    role: str
    block: fp8.Block
    hadamard_seed: int | None
    for_backward: bool
    layout: str


def resolve_quantize(
    x: Array,
    role: str,
    fmt: str,
    block: Any,
    hadamard_seed: int | None,
    for_backward: bool,
    cu_seqlens: Array | None,
    layout: str,
) -> QuantizeCall:
    """Checks all arguments of ``quantize``."""
    if role not in fp8.ROLES:
        raise ValueError(f"role: expected one of {', '.join(fp8.ROLES)}, got {role!r}")
    if fmt != "e4m3":
        raise UnsupportedError(f'fmt: nothing but "e4m3" is made yet, got {fmt!r}')
    kind, slot = fp8.kind_of(block, role)
    seed = _seed(hadamard_seed, role)
    if not isinstance(for_backward, (bool, numpy.bool_)):
        raise TypeError(f"for_backward: expected a bool, got {type(for_backward).__name__}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    packed = cu_seqlens is not None
    if packed and layout != "bshd":
        raise ValueError('layout: packed sequences are [total, heads, head_dim], pass "bshd"')
    given = {"x": x} | ({"cu_seqlens": cu_seqlens} if packed else {})
    adapter = arrays.adapter_for(given)
    adopted = {name: adapter.adopt(name, array) for name, array in given.items()}
    views = {name: adapter.view(name, array) for name, array in adopted.items()}
    view, starts = views["x"], views.get("cu_seqlens")
    _check_tensor(view, packed, layout)
    num_sequences = view.shape[0]
    if starts is not None:
        _check_starts_view(starts)
        num_sequences = starts.shape[0] - 1
    view = as_one(view) if packed else to_bshd(view, layout)
    batch, seqlen, heads, head_dim = view.shape
    return QuantizeCall(
        adapter=adapter,
        x=adopted["x"],
        cu_seqlens=adopted.get("cu_seqlens"),
        view=view,
        starts=starts,
        arrangement=Arrangement(
            kind, slot, packed, (batch, seqlen, heads, head_dim), num_sequences
        ),
        role=role,
        block=block,
        hadamard_seed=seed,
        for_backward=bool(for_backward),
        layout=layout,
    )


def _seed(given: Any, role: str) -> int | None:
    if given is None:
        return None
    seed = as_int("hadamard_seed", given, "int or None")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"hadamard_seed: expected 0 to 2**64 - 1, got {seed}")
    if role not in ("q", "k"):
        raise ValueError(
            f"hadamard_seed: rotates q and k, whose products stay what they are, got role {role!r}"
        )
    return seed


def _check_tensor(view: TensorView, packed: bool, layout: str) -> None:
    if view.ndim != (3 if packed else 4):
        order = "batch, seqlen, heads" if layout == "bshd" else "batch, heads, seqlen"
        expected = "[total, heads, head_dim] with cu_seqlens" if packed else f"[{order}, head_dim]"
        raise ValueError(f"x: expected {expected}, got {view.ndim} dimensions: {list(view.shape)}")
    if view.shape[-1] == 0:
        raise ValueError(f"x: expected a head_dim of at least 1, got {list(view.shape)}")
    if view.dtype not in (DType.float16, DType.bfloat16, DType.float32, DType.float64):
        raise TypeError(f"x: expected floating-point numbers, got {view.dtype}")


def _check_starts_view(starts: TensorView) -> None:
    if starts.ndim != 1 or starts.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens: expected shape [batch + 1] for at least one sequence, got "
            f"{list(starts.shape)}"
        )
    if not starts.dtype.name.startswith(("int", "uint")):
        raise TypeError(f"cu_seqlens: expected integers, got {starts.dtype}")


def run_quantize(call: QuantizeCall) -> Quantized:
    """Quantizes where the tensor is."""
    if call.adapter.kind is DeviceKind.cpu:
        return _run_on_host(call)
    return _run_on_device(call)


# --- a GPU, or an emulated one --------------------------------------------------------------------


def _run_on_device(call: QuantizeCall) -> Quantized:
    _check_for_kernel(call)
    adapter, device, arrangement = call.adapter, call.view.device, call.arrangement
    backend: CudaBackend | EmulatedBackend
    if adapter.kind is DeviceKind.cuda:
        backend = CudaBackend(device.index)
    else:
        backend = EmulatedBackend(call.x.device)
    target = native_target(backend.info.capability)
    if target is None:
        raise UnsupportedError(
            f"quantize: needs compute capability 8.0 or later, got {describe_device(backend.info)}"
        )
    if call.cu_seqlens is not None and os.environ.get("CUPYFLASH_CHECK") == "1":
        fp8.check_starts(adapter.to_numpy(call.cu_seqlens), arrangement.shape[1])
    spec = spec_for(call, target)
    shapes: dict[str, tuple[int, ...]] = {"scale": arrangement.scale_shape}
    if call.role != "v" or call.for_backward:
        shapes["data"] = arrangement.natural_shape
    if call.role == "v" or call.for_backward:
        shapes["data_t"] = arrangement.transposed_shape
    if arrangement.kind in ("tensor", "head"):
        shapes["tops"] = (num_tiles(arrangement),)
    with adapter.scope(device, None):
        stream = adapter.current_stream(device)
        made: dict[str, Array] = {}
        for name, shape in shapes.items():
            dtype = DType.float32 if name in ("scale", "tops") else DType.uint8
            made[name] = adapter.empty(shape, dtype, device)
        views = {name: adapter.view(name, array) for name, array in made.items()}
        launches = quantize_launches(call, spec, views, stream)
        if isinstance(backend, EmulatedBackend):
            for launch in launches:
                backend.run(launch)
        elif launches:
            inputs = [x for x in (call.x, call.cu_seqlens) if x is not None]
            enqueue(adapter, backend, launches, inputs)
        made.pop("tops", None)
        given = {name: adapter.give(array) for name, array in made.items()}
    data, data_t = given.get("data"), given.get("data_t")
    if call.role == "v":
        data, data_t = data_t, data
    batch, seqlen, heads, head_dim = arrangement.shape
    return Quantized(
        data=data,
        scale=given["scale"],
        fmt="e4m3",
        block=call.block,
        role=call.role,
        shape=(() if arrangement.packed else (batch,)) + (seqlen, heads, head_dim),
        hadamard_seed=call.hadamard_seed,
        data_t=data_t,
    )


def spec_for(call: QuantizeCall, target: str) -> KernelSpec:
    """The kernel whose threads hold a tile with the fewest registers."""
    arrangement, rotate = call.arrangement, call.hadamard_seed is not None
    needed = arrangement.slot * arrangement.width // fp8.WIDTH_STEP
    held = (pieces for pieces, rotates in QUANTIZE_BLOCKS if rotates == rotate)
    pieces = next(pieces for pieces in held if pieces * QUANTIZE_THREADS >= needed)
    return quantize_spec(call.view.dtype, target, pieces, rotate)


def num_tiles(arrangement: Arrangement) -> int:
    """Slots of all heads."""
    batch, _, heads, _ = arrangement.shape
    return batch * arrangement.num_slots * heads


def quantize_launches(
    call: QuantizeCall, spec: KernelSpec, views: dict[str, TensorView], stream: int = 0
) -> tuple[Launch, ...]:
    """What must run, in this order; nothing for a tensor without elements and scales.

    Args:
        call: what is to be quantized.
        spec: the kernel.
        views: of "scale" and, where wanted, "data" (not transposed), "data_t" (transposed) and
            "tops", the workspace for scales of whole sequences.
        stream: handle of the CUDA stream.
    """
    arrangement = call.arrangement
    _, rows, heads, head_dim = arrangement.shape
    tiles, pieces = num_tiles(arrangement), arrangement.width // fp8.WIDTH_STEP
    values: dict[str, int | float] = {
        name: views[name].pointer if name in views else 0
        for name in ("data", "data_t", "scale", "tops")
    }
    for name, axis in (("batch", 0), ("seqlen", 1), ("head", 2)):
        values[f"x_stride_{name}"] = call.view.strides[axis]
        if "data" in views:
            values[f"data_stride_{name}"] = _of_batch(views["data"])[axis]
    if "data_t" in views:
        for name, axis in (("batch", 0), ("head", 1), ("channel", 2)):
            values[f"data_t_stride_{name}"] = _of_batch(views["data_t"])[axis]
    if arrangement.kind in ("block", "token"):
        by_batch, by_head, _ = (0, *views["scale"].strides)[-3:]
        values |= {"scale_stride_batch": by_batch, "scale_stride_head": by_head}
    if call.hadamard_seed is not None:
        for piece, bits in enumerate(_sign_bits(call.hadamard_seed, head_dim)):
            values[f"negated[{piece}]"] = bits
        values["rotation_width"] = fp8.hadamard_width(head_dim)
        values["rotation_factor"] = float(fp8.hadamard_factor(head_dim))
    values |= dict(
        x=call.view.pointer,
        cu_seqlens=0 if call.starts is None else call.starts.pointer,
        sequences=arrangement.num_sequences,
        rows=rows,
        heads=heads,
        head_dim=head_dim,
        pieces=pieces,
        reciprocal=-(-(1 << 16) // pieces),
        slot_log2=arrangement.slot.bit_length() - 1,
        num_slots=arrangement.num_slots,
        num_tiles=tiles,
        kind=SCALE_KINDS.index(arrangement.kind),
        row_pairs=fp8.order_of(call.role) == fp8.ROW_PAIR_ORDER,
    )
    stages = {"whole": tiles}
    if "tops" in views:
        stages = {"tops": tiles, "reduce": views["scale"].size, "convert": tiles}
    launches = []
    for stage, blocks in stages.items():
        if blocks:
            params = QUANTIZE.pack(**values, stage=QUANTIZE_STAGES.index(stage))
            launches.append(Launch(spec, (blocks, 1, 1), bytes(params), (), (), stream))
    return tuple(launches)


@functools.lru_cache(maxsize=64)
def _sign_bits(seed: int, head_dim: int) -> tuple[int, ...]:
    """``QuantizeParams.negated``: channels 2 i and 2 i + 1 of a piece have bits 15 - i and 31 - i,
    so that a shift by i puts them where two 16-bit floats have their signs."""
    mask = fp8.negated_channels(seed, head_dim)
    words = []
    for first in range(0, head_dim, fp8.WIDTH_STEP):
        bits = 0
        for channel in range(fp8.WIDTH_STEP):
            place = 15 + 16 * (channel % 2) - channel // 2
            bits |= (mask >> first + channel & 1) << place
        words.append(bits - (bits >> 31 << 32))  # as int32
    return tuple(words)


def _of_batch(view: TensorView) -> tuple[int, ...]:
    """Strides with that of the batch; packed arrays are a batch of one."""
    return (0,) * (4 - view.ndim) + view.strides


def _check_for_kernel(call: QuantizeCall) -> None:
    view, starts = call.view, call.starts
    head_dim = view.shape[3]
    if view.dtype not in QUANTIZE_DTYPES:
        raise UnsupportedError(
            f"x: {view.dtype} has no GPU kernel; convert the array to bfloat16 or float16, or pass "
            "NumPy arrays to compute on the CPU"
        )
    if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(
            f"x: GPU kernels take a head_dim that is a multiple of {HEAD_DIM_STEP} up to "
            f"{MAX_HEAD_DIM}, got {head_dim}"
        )
    if view.shape[3] > 1 and view.strides[3] != 1:
        raise ValueError(
            "x: the last dimension must be contiguous (stride 1), got strides "
            f"{list(view.strides)} in elements; pass a contiguous copy"
        )
    fault = alignment_fault(view) if view.size else None
    if fault is None and not -MAX_STRIDE <= view.strides[1] < MAX_STRIDE and view.shape[1] > 1:
        fault = f"seqlen stride of {view.strides[1]} elements does not fit 32 bits"
    if fault is not None:
        raise ValueError(f"x: {fault}; pass a contiguous copy")
    if starts is not None:
        if starts.dtype is not DType.int32:
            raise TypeError(
                f"cu_seqlens: expected int32 on a GPU, got {starts.dtype}; convert the array"
            )
        if starts.strides != (1,):
            raise ValueError(
                f"cu_seqlens: expected a contiguous array, got stride {starts.strides[0]}"
            )
        if starts.device != view.device:
            raise TypeError(
                f"cu_seqlens: expected an array on {view.device}, where x is, got {starts.device}"
            )
    tiles, row = num_tiles(call.arrangement), view.shape[2] * call.arrangement.width
    if tiles > MAX_TILES or row >= MAX_STRIDE:
        raise UnsupportedError(
            f"x: {tiles} slots of heads, {row} numbers of a token: a launch takes fewer than 2**31"
        )


# --- the CPU --------------------------------------------------------------------------------------


def _run_on_host(call: QuantizeCall) -> Quantized:
    x, give = call.x, call.adapter.give
    if call.layout == "bhsd":
        x = x.transpose(0, 2, 1, 3)
    starts = None
    if call.cu_seqlens is not None:
        starts = call.cu_seqlens.astype(numpy.int64)
        fp8.check_starts(starts, call.arrangement.shape[1])
    made = fp8.quantize(x, call.role, call.block, call.hadamard_seed, call.for_backward, starts)
    data_t = None if made.data_t is None else give(made.data_t)
    return dataclasses.replace(made, data=give(made.data), scale=give(made.scale), data_t=data_t)
