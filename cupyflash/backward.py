"""The launches of a backward pass: three kernels that share one parameter struct.

``backward_delta`` reads out and dout and prepares a workspace of O(seqlen), the main kernel of a
family writes dk and dv and adds up dq in the workspace, ``backward_convert`` makes dq of the sums.
``workspace_of`` says what must be allocated, ``backward_launches`` fills the parameters; both are
plain data, so all of this is tested without a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cupyflash.launch import FAR_ROW, Launch, map_stride
from cupyflash.params import BACKWARD, TensorMapRequest
from cupyflash.problem import (
    ALIGNMENT,
    DeviceInfo,
    Problem,
    alignment_fault,
    ragged_fault,
    ragged_strides,
    tma_fault,
)
from cupyflash.select import (
    KernelSpec,
    backward_convert_spec,
    backward_delta_spec,
    backward_queries_spec,
)
from cupyflash.tensor import DType, TensorView, contiguous_strides
from cupyflash.tuning import FAMILIES

WORKSPACE = ("row_lse", "row_delta", "dq_sums", "dq_turns", "dout_copy")
"""Arrays that live from the first kernel to the last."""

PART_BYTES = 256
"""To which the arrays of the workspace are aligned, from its begin; a kernel needs 16."""

_LEAST_HEADS = 4  # that are scheduled together: as in the forward
_HELPER_BLOCKS = 4  # blocks an SM of the kernels before and after the main one


@dataclass(frozen=True)
class Workspace:
    """What a backward pass needs beside its arrays, in elements; 0: not needed.

    Attributes:
        num_slots: slots of ``block_m`` queries (Note [Query slots]).
        row_lse, row_delta, dq_sums: float32.
        dq_turns: int32; behind the turns, the tile counter.
        dout_copy: of the inputs' type.
        dtype: that type.
    """

    num_slots: int
    row_lse: int
    row_delta: int
    dq_sums: int
    dq_turns: int
    dout_copy: int
    dtype: DType

    def places(self) -> tuple[dict[str, int], int]:
        """Where the arrays lie in one buffer, those that are needed, and how long it is; bytes."""
        places, end = {}, 0
        for name in WORKSPACE:
            count = getattr(self, name)
            if count:
                places[name] = end
                itemsize = self.dtype.itemsize if name == "dout_copy" else 4
                end += -(-count * itemsize // PART_BYTES) * PART_BYTES
        return places, end

    @property
    def counter_place(self) -> int:
        """Byte offset of the tile counter in dq_turns."""
        return 4 * (self.dq_turns - 1)


def num_slots(problem: Problem, block_m: int) -> int:
    """Slots of queries of a head, in all sequences: at least as many as there are tiles."""
    if problem.is_packed:
        assert problem.rows_q is not None  # a Problem sets it
        return problem.rows_q // block_m + problem.batch
    return -(-problem.seqlen_q // block_m) * problem.batch


def workspace_of(
    problem: Problem, spec: KernelSpec, dout: TensorView, deterministic: bool
) -> Workspace:
    """The workspace of a problem solved by the main kernel ``spec``."""
    split = spec.kernel == "backward_keys"  # dq is not added up in global memory
    slots = num_slots(problem, spec.block_m)
    rows = problem.heads_q * slots * spec.block_m
    return Workspace(
        num_slots=slots,
        row_lse=rows,
        row_delta=rows,
        dq_sums=0 if split else rows * spec.head_dim_qk,
        dq_turns=problem.heads_q * slots + 1 if deterministic and not split else 0,
        dout_copy=math.prod(dout.shape) if must_copy(dout, spec) else 0,
        dtype=spec.dtype,
    )


def must_copy(dout: TensorView, spec: KernelSpec) -> bool:
    """Whether the main kernel cannot address dout where it lies."""
    if dout.size and dout.shape[-1] > 1 and dout.strides[-1] != 1:
        return True
    fault = alignment_fault
    if FAMILIES[spec.family].uses_tma:
        fault = ragged_fault if spec.general else tma_fault
    return fault(dout) is not None


def backward_launches(
    problem: Problem,
    spec: KernelSpec,
    device: DeviceInfo,
    views: dict[str, TensorView],
    workspace: dict[str, int],
    *,
    accumulate: bool = False,
    clear_grads: bool = False,
    stream: int = 0,
) -> tuple[Launch, Launch, Launch]:
    """The launches that solve a problem, in order.

    Args:
        problem: what is to be computed; there are queries and keys.
        spec: the chosen main kernel.
        device: where.
        views: q, k, v, dout, dq, dk, dv in bshd order (packed arrays as a batch of one), lse
            [batch, heads_q, seqlen_q] ([heads_q, total] packed) and, shaped as it, dlse where there
            is one; out, or delta in its place; the arrays of ``problem.lengths``.
        workspace: addresses of the arrays of ``WORKSPACE`` that ``workspace_of`` names, and with
            dq_turns that of "tile_counter".
        accumulate: whether gradients are added to what dq, dk and dv hold.
        clear_grads: whether rows that belong to no sequence are set to 0.
        stream: handle of the CUDA stream.
    """
    given = views["dout"]
    dout = given
    if workspace.get("dout_copy"):
        dout = TensorView(
            workspace["dout_copy"],
            given.shape,
            contiguous_strides(given.shape),
            given.dtype,
            given.device,
        )
    addresses = {name: view.pointer for name, view in views.items()}
    addresses |= workspace | {"dout": dout.pointer, "dout_given": given.pointer}
    in_turns = "dq_turns" in workspace
    pointers = tuple(addresses.get(name, 0) for name in BACKWARD.pointers)
    values: dict[str, int | float] = dict(zip(BACKWARD.pointers, pointers))
    main = {**views, "dout": dout}
    for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        if name in main:
            for axis, axis_name in enumerate(("batch", "seqlen", "head")):
                values[f"{name}_stride_{axis_name}"] = main[name].strides[axis]
    for axis, axis_name in enumerate(("batch", "seqlen", "head", "dim")):
        values[f"dout_given_stride_{axis_name}"] = given.strides[axis]
    for name in ("lse", "dlse", "delta"):
        if name in views:
            strides = (0, 0, *views[name].strides)[-3:]
            for axis_name, stride in zip(("batch", "head", "seqlen"), strides):
                values[f"{name}_stride_{axis_name}"] = stride
    if spec.general:
        for name in ("q", "k", "v", "dout"):
            values[f"{name}_batch_rows"] = ragged_strides(main[name])[1] or 0
    scale = problem.softmax_scale
    assert scale is not None and problem.rows_q is not None and problem.rows_kv is not None
    values["grad_scale"] = scale
    if problem.softcap:
        values.update(softcap=problem.softcap, softcap_slope=scale / problem.softcap)
        scale = 1.0
    n_blocks = -(-problem.seqlen_kv // spec.block_n)
    tiles = n_blocks * problem.heads_kv * problem.batch
    all_heads = problem.heads_kv * problem.batch
    if problem.is_packed:
        n_blocks = problem.rows_kv // spec.block_n + problem.batch
        tiles = n_blocks * problem.heads_kv
        all_heads = problem.heads_kv
    num_sms = min(problem.num_sms or device.num_sms, device.num_sms)
    section = max(_LEAST_HEADS, -(-num_sms // max(n_blocks, 1)))
    slots = num_slots(problem, spec.block_m)
    queries = backward_queries_spec(spec) if spec.kernel == "backward_keys" else None
    query_blocks = query_tiles = query_heads = 0
    if queries is not None:
        query_blocks = -(-problem.seqlen_q // queries.block_m)
        query_heads = problem.heads_q * problem.batch
        if problem.is_packed:
            query_blocks = problem.rows_q // queries.block_m + problem.batch
            query_heads = problem.heads_q
        query_tiles = query_blocks * query_heads
        together = max(_LEAST_HEADS, -(-num_sms // max(query_blocks, 1)))
        query_heads = max(min(together, query_heads), 1)
    params = BACKWARD.pack(
        **values,
        batch=problem.batch,
        seqlen_q=problem.seqlen_q,
        seqlen_kv=problem.seqlen_kv,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        group=problem.group,
        rows_q=problem.rows_q,
        rows_kv=problem.rows_kv,
        mask_left=problem.mask_left,
        mask_right=problem.mask_right,
        bottom_right=bool(problem.lengths) and problem.mask.align == "bottom_right",
        block_m=spec.block_m,
        width_qk=spec.head_dim_qk,
        num_m_blocks=-(-problem.seqlen_q // spec.block_m),
        num_slots=slots,
        num_n_blocks=n_blocks,
        num_tiles=tiles,
        section_heads=max(min(section, all_heads), 1),
        num_query_blocks=query_blocks,
        num_query_tiles=query_tiles,
        query_section_heads=query_heads,
        float_grads=views["dq"].dtype is DType.float32,
        accumulate=accumulate,
        clear_grads=clear_grads,
        copy_dout=dout is not given,
        vectors=_is_vectorial(given) and ("out" not in views or _is_vectorial(views["out"])),
        softmax_scale=scale,
        softmax_scale_log2=scale * math.log2(math.e),
    )
    helpers = min(_HELPER_BLOCKS * device.num_sms, max(problem.heads_q * slots, 1))
    blocks = max(tiles, 1)
    if spec.scheduler == "persistent":
        blocks = max(min(num_sms * spec.min_blocks, tiles), 1)

    dynamic = FAMILIES[spec.family].claims_tiles and spec.scheduler == "persistent"
    dynamic = dynamic and not in_turns  # which bring their own counter

    def launch(kernel: KernelSpec, grid: int, maps: tuple[TensorMapRequest, ...] = ()) -> Launch:
        claims = dynamic and kernel is spec and grid < tiles
        own = pointers if in_turns else pointers[:-1]
        return Launch(kernel, (grid, 1, 1), bytes(params), maps, own, stream, claims, BACKWARD)

    maps = _map_requests(spec, main)
    return (
        launch(backward_delta_spec(spec.dtype, spec.target), helpers),
        launch(spec, blocks, maps),
        launch(queries, max(query_tiles, 1), maps)
        if queries is not None
        else launch(backward_convert_spec(spec, spec.target), helpers),
    )


def _is_vectorial(view: TensorView) -> bool:
    """Whether all rows can be read 16 bytes at a time, to their end."""
    return (
        view.strides[-1] == 1
        and alignment_fault(view) is None
        and view.shape[-1] * view.dtype.itemsize % ALIGNMENT == 0
    )


def _map_requests(spec: KernelSpec, views: dict[str, TensorView]) -> tuple[TensorMapRequest, ...]:
    """Tensor maps of the main kernel: boxes of one swizzle span times the rows of a tile."""
    family = FAMILIES[spec.family]
    if not family.uses_tma:
        return ()
    requests = []
    for tensor, width, rows in (
        ("q", spec.head_dim_qk, spec.block_m),
        ("k", spec.head_dim_qk, spec.block_n),
        ("v", spec.head_dim_v, spec.block_n),
        ("dout", spec.head_dim_v, spec.block_m),
        ("dq", spec.head_dim_qk, family.map_rows),
        ("dk", spec.head_dim_qk, family.map_rows),
        ("dv", spec.head_dim_v, family.map_rows),
    ):
        if tensor == "dq" and spec.kernel != "backward_keys":
            continue
        view = views[tensor]
        if view.size == 0 or view.dtype is not spec.dtype:
            continue
        itemsize = view.dtype.itemsize
        chunk = 64 if width % 64 == 0 else 32
        batch, seqlen, heads, head_dim = view.shape
        by_row, by_head, by_batch = (
            map_stride(view.shape[axis], view.strides[axis] * itemsize, head_dim * itemsize)
            for axis in (1, 2, 0)
        )
        dims: tuple[int, ...] = (head_dim, seqlen, heads, batch)
        strides: tuple[int, ...] = (by_row, by_head, by_batch)
        box: tuple[int, ...] = (chunk, rows, 1, 1)
        shift = 0
        if spec.general:  # Note [Ragged maps] in kernels_cu/attn/ragged.cuh
            box = (chunk, rows, 1, 1, 1)
            if tensor in ("dq", "dk", "dv"):
                dims = (head_dim, seqlen, seqlen + 1, heads, batch)
                strides = (by_row, by_row, by_head, by_batch)
                shift = -seqlen * by_row
            else:
                by_row, batch_rows = ragged_strides(view)
                assert batch_rows is not None  # select: ragged_fault
                origins = (batch - 1) * batch_rows + seqlen + 1
                dims = (head_dim, FAR_ROW, heads, FAR_ROW + 1, origins)
                strides = (by_row, by_head, (1 << 64) // FAR_ROW - by_row, by_row)
        requests.append(
            TensorMapRequest(
                offset=BACKWARD.offsets[f"{tensor}_map"],
                pointer=view.pointer,
                element_bytes=itemsize,
                dims=dims,
                strides_bytes=strides,
                box=box,
                swizzle=chunk * itemsize,
                shift_bytes=shift,
            )
        )
    return tuple(requests)
