"""Merges attention over disjoint sets of keys on a GPU or an emulated device, by one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from cupyflash.arrays import Adapter, Array
from cupyflash.errors import UnsupportedError
from cupyflash.launch import CudaBackend, EmulatedBackend, Launch
from cupyflash.params import MAX_MERGE_PARTS, MERGE, MERGE_STRIDES
from cupyflash.problem import ALIGNMENT, DeviceInfo
from cupyflash.select import KernelSpec, describe_device, merge_spec, native_target
from cupyflash.serve import enqueue
from cupyflash.tensor import DeviceKind, DType, TensorView
from cupyflash.tuning import MERGE_DTYPES

MAX_ROWS = 2**31 - 2**20  # 32-bit row indices that a block steps past the last one
_WARP = 32
_MIN_LANES_LOG2, _MAX_LANES_LOG2 = 3, 5  # of a row; the kernel's kMinLanes, a whole warp
_PIECES_OF_LANE = 2  # vectors of a row that a lane takes, while more lanes can still join


def merge_on_device(
    adapter: Adapter,
    outs: Sequence[Array],
    lses: Sequence[Array],
    views: dict[str, TensorView],
    return_lse: bool,
) -> Array | tuple[Array, Array]:
    """Launches the merge on the current stream; does not wait.

    Args:
        adapter: of all arrays.
        outs, lses: the parts, adopted by the adapter.
        views: of all of them, "outs[0]", ..., "lses[0]", ...; shapes and dtypes go together.
        return_lse: whether to return (out, lse).

    Raises:
        UnsupportedError: an element type, or a device, without a kernel.
        ValueError: too many parts, or a last dimension that is not contiguous.
        TypeError: lses that are not float32, or arrays on several devices.
    """
    parts = [(views[f"outs[{index}]"], views[f"lses[{index}]"]) for index in range(len(outs))]
    first = parts[0][0]
    _check_for_kernel(views, len(parts))
    device = first.device
    backend: CudaBackend | EmulatedBackend
    if adapter.kind is DeviceKind.cuda:
        backend = CudaBackend(device.index)
    else:
        backend = EmulatedBackend(outs[0].device)
    spec = _spec_for(first.dtype, backend.info)
    with adapter.scope(device, None):
        stream = adapter.current_stream(device)
        out = adapter.empty(first.shape, first.dtype, device)
        lse = adapter.empty(parts[0][1].shape, DType.float32, device) if return_lse else None
        if parts[0][1].size:
            lse_view = None if lse is None else adapter.view("lse", lse)
            result = adapter.view("out", out), lse_view
            launch = merge_launch(spec, backend.info, parts, result, stream)
            if isinstance(backend, CudaBackend):
                enqueue(adapter, backend, [launch], [*outs, *lses])
            else:
                backend.run(launch)
        given = adapter.give(out)
        return given if lse is None else (given, adapter.give(lse))


def merge_launch(
    spec: KernelSpec,
    device: DeviceInfo,
    parts: Sequence[tuple[TensorView, TensorView]],
    result: tuple[TensorView, TensorView | None],
    stream: int = 0,
) -> Launch:
    """The launch that merges ``parts`` into ``result``, (out, lse) each; there is a row at least.

    Args:
        spec: the kernel.
        device: where.
        parts: views in the shapes of ``api.merge``.
        result: where to write.
        stream: handle of the CUDA stream.
    """
    shape = result[0].shape
    seqlen, heads, head_dim = shape[-3:]
    num_rows = seqlen * heads * (shape[0] if len(shape) == 4 else 1)
    outs = [result[0], *(out for out, _ in parts)]
    vectors = all(_is_vectorial(out) for out in outs)
    columns = ALIGNMENT // spec.dtype.itemsize if vectors else 1  # that a lane takes at a time
    lanes = -(-head_dim // (columns * _PIECES_OF_LANE))
    lanes_log2 = max(lanes - 1, 0).bit_length()
    lanes_log2 = min(max(lanes_log2, _MIN_LANES_LOG2), _MAX_LANES_LOG2)
    values = _members("", *result)
    for index, part in enumerate(parts):
        values |= _members(f"parts[{index}].", *part)
    params = MERGE.pack(
        **values,
        seqlen=seqlen,
        heads=heads,
        head_dim=head_dim,
        num_rows=num_rows,
        num_parts=len(parts),
        lanes_log2=lanes_log2,
        vectors=vectors,
    )
    rows_of_block = spec.threads // _WARP * (_WARP >> lanes_log2)
    blocks = min(-(-num_rows // rows_of_block), spec.min_blocks * device.num_sms)
    return Launch(spec, (blocks, 1, 1), bytes(params), maps=(), pointers=(), stream=stream)


def _members(prefix: str, out: TensorView, lse: TensorView | None) -> dict[str, int]:
    """Addresses and strides of a part, or of the result, as members of the parameter struct."""
    strides = [*_of_three(out.strides[:-1]), *_of_three(() if lse is None else lse.strides)]
    values = dict(
        zip(MERGE_STRIDES, strides), out=out.pointer, lse=0 if lse is None else lse.pointer
    )
    return {prefix + name: value for name, value in values.items()}


def _of_three(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides with those of dimensions that are not there: packed arrays are a batch of one."""
    return (0,) * (3 - len(strides)) + strides


def _is_vectorial(out: TensorView) -> bool:
    """Whether every row starts and ends at a multiple of 16 bytes."""
    itemsize = out.dtype.itemsize
    steps = [stride for extent, stride in zip(out.shape[:-1], out.strides[:-1]) if extent > 1]
    offsets = [out.pointer, *(itemsize * step for step in (out.shape[-1], *steps))]
    return all(offset % ALIGNMENT == 0 for offset in offsets)


def _check_for_kernel(views: dict[str, TensorView], num_parts: int) -> None:
    first = views["outs[0]"]
    if num_parts > MAX_MERGE_PARTS:
        raise ValueError(
            f"merge: expected at most {MAX_MERGE_PARTS} parts on a GPU, got {num_parts}; merge "
            "them in several calls with return_lse"
        )
    if first.dtype not in MERGE_DTYPES:
        raise UnsupportedError(
            f"merge: {first.dtype} has no GPU kernel; convert outs to float32, or pass NumPy "
            "arrays to compute on the CPU"
        )
    for name, view in views.items():
        if view.device != first.device:
            raise TypeError(
                f"{name}: expected an array on {first.device}, where outs[0] is, got {view.device}"
            )
        if name.startswith("lses") and view.dtype is not DType.float32:
            raise TypeError(f"{name}: expected float32 on a GPU, got {view.dtype}")
        if name.startswith("outs") and view.shape[-1] > 1 and view.strides[-1] != 1:
            raise ValueError(
                f"{name}: the last dimension must be contiguous (stride 1), got strides "
                f"{list(view.strides)} in elements; pass a contiguous copy"
            )
    rows = views["lses[0]"].size
    if rows > MAX_ROWS:
        raise UnsupportedError(f"merge: {rows} rows exceed the {MAX_ROWS} of a launch")


def _spec_for(dtype: DType, device: DeviceInfo) -> KernelSpec:
    target = native_target(device.capability)
    if target is None:
        raise UnsupportedError(
            f"merge: needs compute capability 8.0 or later, got {describe_device(device)}"
        )
    return merge_spec(dtype, target)
