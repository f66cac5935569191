"""The launches of a backward pass over 8-bit floats (``fp8.quantize`` with ``for_backward``).

Three kernels, as for 16 bits (``backward.py``): ``backward_delta_fp8`` prepares rows and scales,
``backward_fp8`` writes dk and dv and adds up dq, ``backward_convert`` makes dq of the sums. What
they compute is defined by ``fp8_gradients.py``. ``fp8_backward_spec`` says which kernel serves,
``fp8_workspace`` what must be allocated, ``fp8_backward_launches`` fills the parameters.

    spec = fp8_backward_spec(problem, device, blocks)
    sizes = fp8_workspace(problem, spec, deterministic=False)
    ...                                     # allocate, 256-byte aligned
    for launch in fp8_backward_launches(problem, spec, device, views, blocks, workspace):
        backend.run(launch)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cupyflash import fp8
from cupyflash.backward import Workspace, backward_launches, num_slots
from cupyflash.errors import UnsupportedError
from cupyflash.launch import Launch, map_stride
from cupyflash.params import BACKWARD, BACKWARD_FP8, SCALED_BACKWARD, TensorMapRequest
from cupyflash.problem import DeviceInfo, Problem, tma_fault
from cupyflash.select import (
    KernelSpec,
    backward_delta_fp8_spec,
    backward_fp8_spec,
    native_target,
)
from cupyflash.tensor import TensorView

SLOT_SCALES = 4
"""Floats of a slot: the scale of q, its inverse, and two to make 16 bytes."""

Blocks = dict[str, fp8.Block]
"""What shares a scale, of each of q, k, v and dout: ``Quantized.block``."""

_NATURAL = {"q": "block_m", "k": "block_n", "v": "block_n", "dout": "block_m"}
_TRANSPOSED = {"q_t": "block_m", "k_t": "block_n", "dout_t": "block_m"}
_BASE = BACKWARD_FP8.size - BACKWARD.size  # offset of ``base``


@dataclass(frozen=True)
class Fp8Workspace:
    """What a backward pass over 8-bit floats needs beside its arrays, in elements.

    Attributes:
        base: what the one over 16 bits needs; nothing of dout is copied.
        slot_scales: float32.
    """

    base: Workspace
    slot_scales: int


def fp8_backward_spec(problem: Problem, device: DeviceInfo, blocks: Blocks) -> KernelSpec:
    """The main kernel that serves a problem.

    Args:
        problem: ``dtype`` is that of out and of the gradients, bfloat16 or float16.
        device: where.
        blocks: what shares a scale.

    Raises:
        UnsupportedError: none does; with the reason.
    """
    target = native_target(device.capability)
    if target != "sm_90a":
        raise UnsupportedError(
            f"backward over 8-bit floats: needs compute capability 9.0, got {device.capability}"
        )
    if problem.lengths:
        raise UnsupportedError(
            f"backward over 8-bit floats: {problem.lengths[0]} is not served yet, sequences of one "
            "length only"
        )
    if problem.softcap:
        raise UnsupportedError("backward over 8-bit floats: softcap is not served yet")
    head_dim = problem.head_dim_qk
    spec = backward_fp8_spec(head_dim, problem.dtype, problem.mask_kind, target)
    if spec is None or problem.head_dim_v != head_dim or head_dim % 8:
        raise UnsupportedError(
            "backward over 8-bit floats: expected one head_dim of q, k and v, a multiple of 8 up "
            f"to 128, got {head_dim} and {problem.head_dim_v}"
        )
    # A step has one scale of each tensor; values are a matter of a warpgroup's 64 keys.
    least = {"q": spec.block_m, "k": spec.block_n, "v": 64, "dout": spec.block_m}
    for name in SCALED_BACKWARD:
        kind, tokens = fp8.kind_of(blocks[name], name)
        if kind == "token" or (kind == "block" and tokens < least[name]):
            raise UnsupportedError(
                f"{name}: expected scales of blocks of at least {least[name]} tokens, got block "
                f"{blocks[name]}"
            )
    return spec


def fp8_workspace(problem: Problem, spec: KernelSpec, deterministic: bool) -> Fp8Workspace:
    """The workspace of a problem solved by ``spec``."""
    slots = problem.heads_q * num_slots(problem, spec.block_m)
    base = Workspace(
        num_slots=num_slots(problem, spec.block_m),
        row_lse=slots * spec.block_m,
        row_delta=slots * spec.block_m,
        dq_sums=slots * spec.block_m * spec.head_dim_qk,
        dq_turns=slots + 1 if deterministic else 0,
        dout_copy=0,
        dtype=spec.dtype,
    )
    return Fp8Workspace(base, SLOT_SCALES * slots)


def fp8_backward_launches(
    problem: Problem,
    spec: KernelSpec,
    device: DeviceInfo,
    views: dict[str, TensorView],
    blocks: Blocks,
    workspace: dict[str, int],
    *,
    accumulate: bool = False,
    stream: int = 0,
) -> tuple[Launch, Launch, Launch]:
    """The launches that solve a problem, in order.

    Args:
        problem: what is to be computed; there are queries and keys.
        spec: what ``fp8_backward_spec`` returned.
        device: where.
        views: "q", "k", "dout" (``Quantized.data``) and "v" (its ``data_t``), uint8 [batch, seqlen,
            heads, width]; "q_t", "k_t", "dout_t" (``data_t``), [batch, heads, width, tokens];
            "q_scale", "k_scale", "v_scale", "dout_scale", float32; "dq", "dk", "dv" of the
            problem's dtype or float32; "lse" and, where there is one, "dlse", float32 [batch,
            heads_q, seqlen_q]; "out" of the problem's dtype, or "delta" in its place.
        blocks: what shares a scale.
        workspace: addresses of the arrays of ``Fp8Workspace``: "row_lse", "row_delta", "dq_sums",
            "slot_scales", and for additions in turns "dq_turns" and "tile_counter".
        accumulate: whether gradients are added to what dq, dk and dv hold.
        stream: handle of the CUDA stream.

    Raises:
        UnsupportedError: an array lies where the kernels cannot address it.
    """
    for name in (*_NATURAL, *_TRANSPOSED, "out"):
        fault = tma_fault(views[name]) if name in views else None
        if fault is not None:
            raise UnsupportedError(f"{name}: {fault}; pass a contiguous copy")
    own = {name: address for name, address in workspace.items() if name != "slot_scales"}
    _, main, convert = backward_launches(
        problem, spec, device, views, own, accumulate=accumulate, stream=stream
    )
    values: dict[str, int | float] = {
        f"base.{name}": value for name, value in BACKWARD.unpack(main.params).items()
    }
    values |= {name: views[name].pointer for name in _TRANSPOSED}
    values |= {f"{name}_scale": views[f"{name}_scale"].pointer for name in SCALED_BACKWARD}
    values["slot_scales"] = workspace["slot_scales"]
    for name in SCALED_BACKWARD:
        strides = _scale_strides(views[f"{name}_scale"], blocks[name], name)
        for member, value in zip(("batch", "head", "block", "tokens_log2"), strides):
            values[f"{name}_scales.{member}"] = value
    params = bytes(BACKWARD_FP8.pack(**values))
    pointers = tuple(int(values[name]) for name in BACKWARD_FP8.pointers)
    if "tile_counter" not in workspace:
        pointers = pointers[:-1]
    maps = (
        *(_map(f"{name}_map", views[name], *_boxes(spec, name)) for name in _TRANSPOSED),
        *(_map(f"base.{name}_map", views[name], *_boxes(spec, name)) for name in _NATURAL),
        # Of dk and dv, where they are 16-bit.
        *(dataclasses.replace(made, offset=made.offset + _BASE) for made in main.maps),
    )
    before = Launch(
        spec=backward_delta_fp8_spec(spec.dtype, spec.target),
        grid=convert.grid,
        params=params,
        maps=(),
        pointers=pointers,
        stream=stream,
        layout=BACKWARD_FP8,
    )
    main = dataclasses.replace(
        main, params=params, maps=maps, pointers=pointers, layout=BACKWARD_FP8
    )
    return before, main, convert


def _scale_strides(view: TensorView, block: fp8.Block, role: str) -> tuple[int, int, int, int]:
    """``cf::ScaleStrides``."""
    kind, tokens = fp8.kind_of(block, role)
    if kind == "tensor":
        return 0, 0, 0, 0
    if kind == "head":
        by_batch, by_head = view.strides
        return by_batch, by_head, 0, 0
    by_batch, by_head, by_block = view.strides
    return by_batch, by_head, by_block, tokens.bit_length() - 1


def _boxes(spec: KernelSpec, name: str) -> tuple[int, int]:
    """Bytes and rows of the box that makes a whole tile."""
    if name in _TRANSPOSED:
        return getattr(spec, _TRANSPOSED[name]), spec.head_dim_qk
    return spec.head_dim_qk, getattr(spec, _NATURAL[name])


def _map(field: str, view: TensorView, columns: int, rows: int) -> TensorMapRequest:
    """A map of rank 4 over a view of bytes; heads are the third dimension, whatever the order in
    which the view has rows and heads."""
    batch, second, third, width = view.shape
    row_axis, head_axis = (2, 1) if field in _TRANSPOSED_FIELDS else (1, 2)
    extents = {1: second, 2: third}
    by_row, by_head, by_batch = (
        map_stride(view.shape[axis], view.strides[axis], width) for axis in (row_axis, head_axis, 0)
    )
    return TensorMapRequest(
        offset=BACKWARD_FP8.offsets[field],
        pointer=view.pointer,
        element_bytes=1,
        dims=(width, extents[row_axis], extents[head_axis], batch),
        strides_bytes=(by_row, by_head, by_batch),
        box=(columns, rows, 1, 1),
        swizzle=columns,
    )


_TRANSPOSED_FIELDS = tuple(f"{name}_map" for name in _TRANSPOSED)
