"""From a problem and a kernel to work on a device.

``forward_launch`` fills the parameter struct: a ``Launch`` is plain data that a test can read. A
back end runs it: ``CudaBackend`` through libcupyflash, ``EmulatedBackend`` on the CPU emulator, so
that every line above the driver is exercised without a GPU. A ``Plan`` is a launch on a GPU, or the
three of a backward, with all but stream and addresses settled; running it allocates nothing and
waits for nothing, so a plan can be recorded into a CUDA graph and shared by threads.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupyflash import driver as drivers
from cupyflash.cache import CacheEntry, CubinCache, default_cache
from cupyflash.driver import PreparedLaunch, PreparedPlan, TensorMap
from cupyflash.errors import DriverError
from cupyflash.params import (
    DEVICE_LENGTHS,
    FORWARD,
    SCALE_KINDS,
    SCALED,
    SCALES,
    StructLayout,
    TensorMapRequest,
)
from cupyflash.problem import DeviceInfo, Problem, Scaling, ragged_strides
from cupyflash.schedule import plan_tiles
from cupyflash.select import FORWARD_KERNELS, KernelSpec, siblings, tensor_maps
from cupyflash.tensor import DType, TensorView

logger = logging.getLogger("cupyflash")

TENSORS = ("q", "k", "v", "out", "lse", *DEVICE_LENGTHS, *SCALES)
"""Arrays of a forward, in the order of ``Launch.pointers``."""

FAR_ROW = 1 << 30  # kFarRow of kernels_cu/attn/ragged.cuh

# CUresults that say "this cubin is no good here", as opposed to "something else is wrong".
_CUBIN_REFUSED = (200, 209, 218, 222, 223, 300, 301, 500)


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel, complete.

    Attributes:
        spec: the kernel.
        grid: blocks along x, y, z.
        params: the parameter struct; tensor maps are still zero.
        maps: the tensor maps to encode into it.
        pointers: addresses of ``layout.pointers``, 0 for what is not there. The tile counter is
            left out, except where it belongs to the launch as its arrays do.
        dynamic: whether blocks claim tiles from a counter of the stream (``tile_counter``), if
            there is one.
        stream: handle of the CUDA stream.
        layout: of the parameter struct.
    """

    spec: KernelSpec
    grid: tuple[int, int, int]
    params: bytes
    maps: tuple[TensorMapRequest, ...]
    pointers: tuple[int, ...]
    stream: int = 0
    dynamic: bool = False
    layout: StructLayout = FORWARD

    @property
    def block(self) -> tuple[int, int, int]:
        return self.spec.threads, 1, 1


def forward_launch(
    problem: Problem,
    spec: KernelSpec,
    device: DeviceInfo,
    views: dict[str, TensorView],
    stream: int = 0,
    clear_out: bool = False,
) -> Launch:
    """The launch that solves ``problem`` with ``spec``.

    Args:
        problem: what is to be computed; not empty.
        spec: the chosen kernel.
        device: where.
        views: q, k, v, out in bshd order (packed arrays as a batch of one), lse [batch, heads_q,
            seqlen_q] where wanted, the arrays of ``problem.lengths`` and those given of ``SCALES``.
            A transposed v (``Scaling.v_slot``) is [batch, slot tokens, heads, width].
        stream: handle of the CUDA stream.
        clear_out: whether rows of out that belong to no sequence are set to 0.
    """
    tiles = plan_tiles(problem, spec, device)
    pointers = tuple(views[tensor].pointer if tensor in views else 0 for tensor in TENSORS)
    values: dict[str, int | float] = dict(zip(TENSORS, pointers))
    for tensor in ("q", "k", "v", "out"):
        for axis, name in enumerate(("batch", "seqlen", "head")):
            values[f"{tensor}_stride_{name}"] = views[tensor].strides[axis]
    if "lse" in views:
        *batch_stride, values["lse_stride_head"], _ = views["lse"].strides
        values["lse_stride_batch"] = batch_stride[0] if batch_stride else 0
    scale, rows_q, rows_kv = problem.softmax_scale, problem.rows_q, problem.rows_kv
    assert scale is not None and rows_q is not None and rows_kv is not None  # a Problem sets them
    if problem.softcap:
        values.update(softcap=problem.softcap, softcap_slope=scale / problem.softcap)
        scale = 1.0  # of what comes out of the cap
    if problem.scaling is not None:
        values.update(_scale_members(problem.scaling, views))
    if spec.general:
        for tensor in ("q", "k", "v"):
            if views[tensor].strides[3] == 1:  # not a transposed v
                values[f"{tensor}_batch_rows"] = ragged_strides(views[tensor])[1] or 0
    params = FORWARD.pack(
        **values,
        batch=problem.batch,
        seqlen_q=problem.seqlen_q,
        seqlen_kv=problem.seqlen_kv,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        head_dim_qk=problem.head_dim_qk,
        head_dim_v=problem.head_dim_v,
        group=problem.group,
        rows_q=rows_q,
        rows_kv=rows_kv,
        mask_left=problem.mask_left,
        mask_right=problem.mask_right,
        bottom_right=bool(problem.lengths) and problem.mask.align == "bottom_right",
        num_m_blocks=tiles.num_m_blocks,
        num_tiles=tiles.num_tiles,
        section_heads=tiles.section_heads,
        section_rows=tiles.section_rows,
        tail_heads=tiles.tail_heads,
        clear_out=clear_out,
        softmax_scale=scale,
        softmax_scale_log2=scale * math.log2(math.e),
    )
    return Launch(
        spec=spec,
        grid=(tiles.num_blocks, 1, 1),
        params=bytes(params),
        maps=_map_requests(spec, views),
        pointers=pointers,
        stream=stream,
        dynamic=tiles.dynamic,
    )


def _scale_members(scaling: Scaling, views: dict[str, TensorView]) -> dict[str, int]:
    """What the parameters say about scales and a transposed v, but addresses."""
    members = {"v_stride_dim": views["v"].strides[3]}
    for tensor in SCALED:
        scale = getattr(scaling, tensor)
        if scale.kind == "none":
            continue
        by_batch = by_head = by_block = 0
        strides = views[f"{tensor}_scale"].strides
        if scale.kind == "head":
            by_batch, by_head = strides
        elif scale.kind in ("block", "token"):  # packed: of all sequences, without their dimension
            by_batch, by_head, by_block = (0, *strides)[-3:]
        members |= {
            f"{tensor}_scale_stride_batch": by_batch,
            f"{tensor}_scale_stride_head": by_head,
            f"{tensor}_scale_stride_block": by_block,
            f"{tensor}_scale_kind": SCALE_KINDS.index(scale.kind),
            f"{tensor}_scale_tokens_log2": max(scale.tokens.bit_length() - 1, 0),
        }
    if scaling.v_slot:
        members |= {
            "v_slot_log2": scaling.v_slot.bit_length() - 1,
            "v_columns": views["v"].shape[1],
        }
    return members


def _map_requests(spec: KernelSpec, views: dict[str, TensorView]) -> tuple[TensorMapRequest, ...]:
    requests = []
    for plan in tensor_maps(spec):
        view = views[plan.tensor]
        if view.size == 0:  # no keys: the map stays zero and the kernel does not use it
            continue
        itemsize = view.dtype.itemsize
        batch, seqlen, heads, head_dim = view.shape
        by_row, by_head, by_batch = (
            map_stride(view.shape[axis], view.strides[axis] * itemsize, head_dim * itemsize)
            for axis in (1, 2, 0)
        )
        dims: tuple[int, ...] = (head_dim, seqlen, heads, batch)
        strides: tuple[int, ...] = (by_row, by_head, by_batch)
        if plan.transposed:
            dims = (seqlen, head_dim, heads, batch)
            strides = (view.strides[3] * itemsize, by_head, by_batch)
        box: tuple[int, ...] = (plan.chunk, plan.rows, 1, 1)
        shift = 0
        if plan.ragged:  # Note [Ragged maps] in kernels_cu/attn/ragged.cuh
            box = (plan.chunk, plan.rows, 1, 1, 1)
            if plan.tensor == "out":
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
                offset=FORWARD.offsets[plan.field],
                pointer=view.pointer,
                element_bytes=itemsize,
                dims=dims,
                strides_bytes=strides,
                box=box,
                swizzle=plan.swizzle,
                shift_bytes=shift,
            )
        )
    return tuple(requests)


def map_stride(extent: int, stride_bytes: int, row_bytes: int) -> int:
    """A stride fit for a tensor map: that of a dimension of size 1 may be anything, so it becomes
    the size of a row, rounded up to the 16 bytes that a map demands."""
    return stride_bytes if extent > 1 else -(-row_bytes // 16) * 16


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, loaded onto one GPU for the rest of the process.

    Attributes:
        spec: what it is.
        device_index: the GPU.
        context: its primary context.
        function: CUfunction, valid in that context.
        origin: where the cubin came from.
    """

    spec: KernelSpec
    device_index: int
    context: int
    function: int
    origin: str


_kernels: dict[tuple[KernelSpec, int], Kernel] = {}
_kernels_lock = threading.Lock()


def load_kernel(spec: KernelSpec, device_index: int, stream: int = 0) -> Kernel:
    """The kernel of ``spec`` on a GPU, loaded at the first call.

    Args:
        spec: which kernel.
        device_index: which GPU.
        stream: where it is to run; asked only whether a graph is being captured.

    Raises:
        RuntimeError: it is not loaded yet and the stream is being captured.
        MissingKernelError, CompileError: as ``CubinCache.get``.
        DriverError: the driver refuses it.
    """
    kernel = _kernels.get((spec, device_index))
    if kernel is not None:
        return kernel
    driver = drivers.default_driver()
    if driver.is_capturing(device_index, stream):
        advice = "call attention once before the capture, with the same dtype, head dimensions, "
        advice += "mask and lengths"
        if spec.kernel not in FORWARD_KERNELS:
            advice = f"call {spec.kernel} once before the capture, with the same dtype"
        raise RuntimeError(
            f"{spec.name} is not loaded on GPU {device_index} yet, and a CUDA graph is being "
            f"captured on this stream; {advice}"
        )
    with _kernels_lock:
        kernel = _kernels.get((spec, device_index))
        if kernel is None:
            cache = default_cache()
            kernel = _load(driver, cache, spec, device_index, cache.get(spec))
            _kernels[spec, device_index] = kernel
            # Other lengths may take another tile: it should not be met cold, in a capture say.
            for sibling in siblings(spec):
                if (sibling, device_index) in _kernels:
                    continue
                entry = cache.get_at_hand(sibling)
                if entry is not None:
                    loaded = _load(driver, cache, sibling, device_index, entry)
                    _kernels[sibling, device_index] = loaded
    return kernel


def _load(
    driver: drivers.Driver,
    cache: CubinCache,
    spec: KernelSpec,
    device_index: int,
    entry: CacheEntry,
) -> Kernel:
    """The kernel of ``spec`` from this entry, or from a new one if the driver refuses it."""
    try:
        function = driver.load(device_index, entry.cubin, spec.name, spec.shared_bytes)
    except DriverError as error:
        if error.code not in _CUBIN_REFUSED or entry.origin == "compiled":
            raise
        cache.discard(spec, str(error))
        entry = cache.get(spec)
        function = driver.load(device_index, entry.cubin, spec.name, spec.shared_bytes)
    return Kernel(spec, device_index, driver.context(device_index), function, entry.origin)


class Plan:
    """Launches on a GPU, one behind the other, with all but stream and addresses settled.

    Args:
        kernels: the loaded kernel of each.
        launches: on one GPU and of one parameter struct; their streams and addresses are not used.
    """

    def __init__(self, kernels: Sequence[Kernel], launches: Sequence[Launch]) -> None:
        self.kernels = tuple(kernels)
        self.launches = tuple(launches)
        self.device_index = kernels[0].device_index
        driver = drivers.default_driver()
        self.driver = driver
        dynamic = any(launch.dynamic for launch in launches)
        self._counters = driver.tile_counters(self.device_index) if dynamic else None
        self.prepared = PreparedPlan(
            [prepare(kernel, made, self._counters) for kernel, made in zip(kernels, launches)]
        )
        self._function = driver.run_function
        self._pack = drivers.argument_packer(len(launches[0].layout.pointers))
        self._address = self.prepared.address

    def run(self, stream: int, *pointers: int, counter: int = 0) -> None:
        """Launches on ``stream``; does not wait.

        Args:
            stream: handle of the stream.
            pointers: one for each of ``layout.pointers`` but the tile counter.
            counter: the tile counter of launches that bring their own.
        """
        if self._counters is not None:
            counter = self._counters.of_stream(stream)
        result = self._function(self._address, self._pack(stream, *pointers, counter))
        if result:
            self.driver.raise_for_launch(result)


def prepare(
    kernel: Kernel, launch: Launch, counters: drivers.TileCounters | None = None
) -> PreparedLaunch:
    """The launch as libcupyflash reads it, its addresses in the order of ``layout.pointers``."""
    layout = launch.layout
    tensors = {layout.offsets[f"{name}_map"]: name for name in layout.mapped}
    offsets: list[int | None] = [layout.offsets[name] for name in layout.pointers]
    if not launch.dynamic and len(launch.pointers) < len(offsets):
        offsets[-1] = None  # another launch of the plan has a counter, this one has none
    return PreparedLaunch(
        context=kernel.context,
        function=kernel.function,
        grid=launch.grid,
        block=launch.block,
        cluster=launch.spec.cluster,
        shared_bytes=launch.spec.shared_bytes,
        params=launch.params,
        pointer_offsets=offsets,
        maps=[
            TensorMap(
                offset=request.offset,
                pointer_idx=layout.pointers.index(tensors[request.offset]),
                dtype=DType.uint8 if request.element_bytes == 1 else launch.spec.dtype,
                dims=request.dims,
                strides_bytes=request.strides_bytes,
                box=request.box,
                swizzle=request.swizzle,
                shift_bytes=request.shift_bytes,
            )
            for request in launch.maps
        ],
        counter_idx=len(offsets) - 1 if launch.dynamic and counters is not None else None,
        counters=counters,
    )


class CudaBackend:
    """Runs launches on a GPU."""

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self.info = drivers.default_driver().device_info(device_index)

    def plan(self, *launches: Launch) -> Plan:
        """Loads the kernels, compiling what must be, and settles the launches."""
        return Plan(self.load(*launches), launches)

    def load(self, *launches: Launch) -> list[Kernel]:
        """The kernels of launches, announced."""
        kernels = []
        for launch in launches:
            kernel = load_kernel(launch.spec, self.device_index, launch.stream)
            announce(launch.spec, f"GPU {self.device_index} ({self.info.name})", kernel.origin)
            kernels.append(kernel)
        return kernels

    def run(self, launch: Launch) -> None:
        self.plan(launch).run(launch.stream, *launch.pointers)


class EmulatedBackend:
    """Runs launches on the CPU emulator; faults are raised when the launch returns."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.info: DeviceInfo = device.info

    def run(self, launch: Launch) -> None:
        announce(launch.spec, f"emulated {launch.spec.target}", "g++")
        self._device.run(launch)


_announced: set[tuple[KernelSpec, str]] = set()


def announce(spec: KernelSpec, place: str, origin: str) -> None:
    """One INFO line for the first use of a kernel in a place."""
    configure_logging()
    if (spec, place) not in _announced:
        _announced.add((spec, place))
        logger.info("%s for %s serves on %s; cubin: %s", spec.name, spec.target, place, origin)


@functools.lru_cache(maxsize=1)
def configure_logging() -> None:
    """Does what CUPYFLASH_LOG asks for, at the first use of a kernel: a level name sends the
    logger "cupyflash" to standard error."""
    level = os.environ.get("CUPYFLASH_LOG")
    if not level:
        return
    number = logging.getLevelName(level.upper())
    if not isinstance(number, int):
        raise ValueError(f"CUPYFLASH_LOG={level}: expected debug, info, warning or error")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("cupyflash: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(number)


class InFlight:
    """Objects held until the GPU has passed the point at which they were handed over.

    For arrays whose owner does not know that a kernel is reading them (memory imported through
    DLPack may be reused by its owner once the import is dropped). Nothing waits: what is done is
    let go at the next call.
    """

    def __init__(self) -> None:
        self._held: collections.deque[tuple[drivers.Event, Sequence[Any]]] = collections.deque()
        self._lock = threading.Lock()

    def hold(self, device_index: int, stream: int, objects: Sequence[Any]) -> None:
        """Keeps ``objects`` until everything enqueued on ``stream`` so far is done."""
        driver = drivers.default_driver()
        self.release()
        if driver.is_capturing(device_index, stream):
            return  # a graph's memory is for whoever captures it to keep
        event = driver.record(device_index, stream)
        with self._lock:
            self._held.append((event, objects))

    def release(self) -> None:
        """Lets go of what the GPU is done with, in the order of the calls."""
        while True:
            with self._lock:
                if not self._held or not self._held[0][0].is_reached():
                    return
                event, objects = self._held.popleft()
            event.destroy()
            del objects


in_flight = InFlight()
