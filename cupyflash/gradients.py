"""Serves ``attention_backward``: checks its arrays, then runs it on the CPU or by three kernels.

What ``attention`` has in common with it is resolved by ``arguments.resolve``; the launches are
those of ``backward.py``.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import numpy

from cupyflash import arrays
from cupyflash import driver as drivers
from cupyflash.arguments import Call, Options, as_one, resolve
from cupyflash.arrays import Adapter, Array
from cupyflash.backward import WORKSPACE, backward_launches, workspace_of
from cupyflash.driver import PreparedLaunch, TensorMap
from cupyflash.launch import CudaBackend, EmulatedBackend, Launch, announce, load_kernel
from cupyflash.params import BACKWARD, MAPPED_BACKWARD
from cupyflash.problem import (
    Problem,
    alignment_fault,
    check_writable,
    ragged_fault,
    tma_fault,
    to_bshd,
)
from cupyflash.select import KernelSpec, select
from cupyflash.serve import backend_of, check_lengths, host_arguments, reading
from cupyflash.tensor import DeviceKind, DType, TensorView

_TENSOR_OF_MAP = {BACKWARD.offsets[f"{tensor}_map"]: tensor for tensor in MAPPED_BACKWARD}
_PART_BYTES = 256  # to which the parts of the workspace are aligned


@dataclass(frozen=True, eq=False)
class GradCall:
    """A call of ``attention_backward`` with everything checked.

    Attributes:
        call: the forward that it belongs to.
        arrays: those given of dout, out, lse, dlse, delta, dq, dk, dv, in the adapter's form.
        views: theirs and those of q, k, v and of the lengths, the big ones in bshd order.
        accumulate, deterministic: as given.
        grad_dtype: of dq, dk and dv.
    """

    call: Call
    arrays: dict[str, Array]
    views: dict[str, TensorView]
    accumulate: bool
    deterministic: bool
    grad_dtype: DType


def resolve_backward(
    given: dict[str, Array],
    qkv: tuple[Array, Array, Array],
    options: Options,
    accumulate: bool,
    deterministic: bool,
) -> GradCall:
    """Checks all arguments of ``attention_backward``.

    Args:
        given: dout, out, lse, dlse, delta, dq, dk, dv that are not None.
        qkv: q, k, v.
        options: those of the forward.
        accumulate, deterministic: as given.
    """
    for name, flag in (("accumulate", accumulate), ("deterministic", deterministic)):
        if not isinstance(flag, (bool, numpy.bool_)):
            raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}")
    if options.out is not None or options.return_lse:
        raise TypeError("attention_backward: out is the result of the forward; it returns no lse")
    if "delta" in given and "dlse" in given:
        raise ValueError("delta and dlse: delta contains dlse already, expected one of them")
    call = resolve(*qkv, dataclasses.replace(options, return_lse=True))
    everything = {**dict(zip(("q", "k", "v"), qkv)), **given}
    adapter = arrays.adapter_for(everything)
    adopted = {name: adapter.adopt(name, array) for name, array in given.items()}
    views = dict(call.views)
    for name, array in adopted.items():
        view = adapter.view(name, array)
        if name not in ("lse", "dlse", "delta"):
            if call.packed and view.ndim == 3:
                view = as_one(view)
            elif not call.packed:
                view = to_bshd(view, options.layout)
        views[name] = view
    grad_dtype = _check_views(call, views, bool(accumulate))
    return GradCall(call, adopted, views, bool(accumulate), bool(deterministic), grad_dtype)


def _check_views(call: Call, views: dict[str, TensorView], accumulate: bool) -> DType:
    q, k, v = (views[name] for name in ("q", "k", "v"))
    batch, seqlen, heads, _ = q.shape
    of_out = (batch, seqlen, heads, v.shape[3])
    of_rows = (heads, seqlen) if call.packed else (batch, heads, seqlen)
    shapes: dict[str, tuple[int, ...]] = {"dout": of_out, "out": of_out}
    shapes |= {"lse": of_rows, "dlse": of_rows, "delta": of_rows}
    shapes |= {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    float_type = DType.float64 if q.dtype is DType.float64 else DType.float32
    for name, shape in shapes.items():
        view = views.get(name)
        if view is None:
            continue
        if view.shape != shape:
            raise ValueError(
                f"{name}: expected shape {list(shape)} (in the order batch, seqlen, heads, head_dim"
                f" where it has four), got {list(view.shape)}"
            )
        if view.device != q.device:
            raise TypeError(f"{name}: expected an array on {q.device}, got {view.device}")
        if name in ("dout", "out") and view.dtype != q.dtype:
            raise TypeError(f"{name}: expected {q.dtype}, the dtype of q, got {view.dtype}")
        if name in ("lse", "dlse", "delta") and view.dtype != float_type:
            raise TypeError(f"{name}: expected {float_type}, got {view.dtype}")
    return _check_grads(call, views, accumulate, float_type)


def _check_grads(
    call: Call, views: dict[str, TensorView], accumulate: bool, float_type: DType
) -> DType:
    """Checks the caller's dq, dk and dv; returns the dtype of all three."""
    own = {name: views[name] for name in ("dq", "dk", "dv") if name in views}
    if accumulate and len(own) < 3:
        raise ValueError("accumulate: expected dq, dk and dv to add to")
    dtypes = {view.dtype for view in own.values()} or {views["q"].dtype}
    if len(dtypes) > 1:
        raise TypeError(f"dq, dk, dv: expected one dtype, got {', '.join(map(str, dtypes))}")
    (dtype,) = dtypes
    allowed = [views["q"].dtype, float_type]
    if call.adapter.kind is DeviceKind.cpu:
        allowed.append(DType.float64)
    if dtype not in allowed:
        raise TypeError(f"dq, dk, dv: expected {views['q'].dtype} or {float_type}, got {dtype}")
    for name, view in own.items():
        others = {other: views[other] for other in views if other != name}
        check_writable(name, view, others, call.options.layout)
        fault = alignment_fault(view) if call.adapter.kind is not DeviceKind.cpu else None
        if fault is not None and view.size:
            raise ValueError(f"{name}: {fault}; pass a contiguous array")
    return dtype


def run_backward(grad_call: GradCall) -> tuple[Array, Array, Array]:
    """dq, dk, dv: the caller's arrays where given."""
    if grad_call.call.adapter.kind is DeviceKind.cpu:
        return _run_on_host(grad_call)
    return _run_on_device(grad_call)


def grad_problem(grad_call: GradCall) -> Problem:
    """The forward's problem, with what is wrong with the addresses of dq, dk and dv."""
    call, views = grad_call.call, grad_call.views
    if grad_call.grad_dtype.itemsize != 2 or grad_call.accumulate:
        return call.problem  # they are written without tensor maps
    grads = {name: views[name] for name in ("dq", "dk", "dv") if name in views and views[name].size}
    faults = {"no_tma": tma_fault, "no_ragged": ragged_fault}
    found = {
        field: tuple((name, why) for name, view in grads.items() if (why := fault(view)))
        for field, fault in faults.items()
    }
    problem = call.problem
    return dataclasses.replace(
        problem,
        no_tma=problem.no_tma + found["no_tma"],
        no_ragged=problem.no_ragged + found["no_ragged"],
    )


# --- a GPU, or an emulated one --------------------------------------------------------------------


def _run_on_device(grad_call: GradCall) -> tuple[Array, Array, Array]:
    call = grad_call.call
    adapter, device = call.adapter, call.views["q"].device
    backend = backend_of(call)
    problem = grad_problem(grad_call)
    empty = call.views["q"].size == 0 and call.views["k"].size == 0
    spec = None if empty else select(problem, backend.info, "backward").spec
    with adapter.scope(device, call.stream):
        stream = call.stream
        if stream is None:
            stream = adapter.current_stream(device)
        grads, views = _allocate_grads(grad_call)
        if spec is not None:
            if call.problem.lengths and os.environ.get("CUPYFLASH_CHECK") == "1":
                check_lengths(call)
            _launch(grad_call, problem, spec, backend, views, stream)
        dq, dk, dv = (
            grad_call.arrays[name] if name in grad_call.arrays else adapter.give(grad)
            for name, grad in grads.items()
        )
    return dq, dk, dv


def _allocate_grads(grad_call: GradCall) -> tuple[dict[str, Array], dict[str, TensorView]]:
    """dq, dk, dv in the caller's layout, and the views of everything."""
    call, views = grad_call.call, dict(grad_call.views)
    adapter, layout = call.adapter, call.options.layout
    grads = {}
    for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        array = grad_call.arrays.get(name)
        if array is None:
            shape = views[like].shape
            if call.packed:
                shape = shape[1:]
            elif layout == "bhsd":
                shape = (shape[0], shape[2], shape[1], shape[3])
            array = adapter.empty(shape, grad_call.grad_dtype, views[like].device)
            view = adapter.view(name, array)
            views[name] = as_one(view) if call.packed else to_bshd(view, layout)
        grads[name] = array
    return grads, views


def _launch(
    grad_call: GradCall,
    problem: Problem,
    spec: KernelSpec,
    backend: CudaBackend | EmulatedBackend,
    views: dict[str, TensorView],
    stream: int,
) -> None:
    """Enqueues the three kernels. The workspace is given back to the library's own allocator, which
    reuses it in the order of the stream."""
    call = grad_call.call
    adapter, device = call.adapter, views["q"].device
    needs = workspace_of(problem, spec, views["dout"], grad_call.deterministic)
    floats = {name: getattr(needs, name) for name in WORKSPACE if name != "dout_copy"}
    step = _PART_BYTES // 4
    places, total = {}, 0
    for name, count in floats.items():
        places[name] = total
        total += -(-count // step) * step
    buffer = adapter.empty((total + step,), DType.float32, device)
    base = -(-adapter.view("workspace", buffer).pointer // _PART_BYTES) * _PART_BYTES
    workspace = {name: base + 4 * places[name] for name, count in floats.items() if count}
    copy = None
    if needs.dout_copy:
        copy = adapter.empty((needs.dout_copy,), spec.dtype, device)
        workspace["dout_copy"] = adapter.view("workspace", copy).pointer
    given = set(grad_call.arrays)
    launches = backward_launches(
        problem,
        spec,
        backend.info,
        views,
        workspace,
        accumulate=grad_call.accumulate,
        clear_grads=not grad_call.accumulate and not {"dq", "dk", "dv"} <= given,
        stream=stream,
    )
    if isinstance(backend, EmulatedBackend):
        for launch in launches:
            backend.run(launch)
        return
    inputs = [*call.arrays.values(), *grad_call.arrays.values()]
    run_launches(adapter, backend, launches, inputs)


def run_launches(
    adapter: Adapter, backend: CudaBackend, launches: tuple[Launch, ...], inputs: list[Array]
) -> None:
    """Enqueues launches that read ``inputs`` on their stream of a GPU; does not wait."""
    driver, index, stream = drivers.default_driver(), backend.device_index, launches[0].stream
    kernels = [load_kernel(launch.spec, index, stream) for launch in launches]
    with reading(adapter, driver, index, stream, inputs):
        for launch, kernel in zip(launches, kernels):
            announce(launch.spec, f"GPU {index} ({backend.info.name})", kernel.origin)
            counters = driver.tile_counters(index) if launch.dynamic else None
            bases = {_TENSOR_OF_MAP[request.offset]: request.pointer for request in launch.maps}
            pointers = [bases.get(tensor, 0) for tensor in MAPPED_BACKWARD]
            prepared = PreparedLaunch(
                context=kernel.context,
                function=kernel.function,
                grid=launch.grid,
                block=launch.block,
                cluster=launch.spec.cluster,
                shared_bytes=launch.spec.shared_bytes,
                params=launch.params,
                pointer_offsets=[
                    *[None] * len(MAPPED_BACKWARD),
                    None if counters is None else BACKWARD.offsets["tile_counter"],
                ],
                maps=[
                    TensorMap(
                        offset=request.offset,
                        pointer_idx=MAPPED_BACKWARD.index(_TENSOR_OF_MAP[request.offset]),
                        dtype=launch.spec.dtype,
                        dims=request.dims,
                        strides_bytes=request.strides_bytes,
                        box=request.box,
                        swizzle=request.swizzle,
                        shift_bytes=request.shift_bytes,
                    )
                    for request in launch.maps
                ],
                counter_idx=None if counters is None else len(MAPPED_BACKWARD),
                counters=counters,
            )
            counter = 0 if counters is None else counters.of_stream(stream)
            driver.launch(prepared, stream, (*pointers, counter))


# --- the CPU --------------------------------------------------------------------------------------


def _run_on_host(grad_call: GradCall) -> tuple[Array, Array, Array]:
    from cupyflash import host

    call, layout = grad_call.call, grad_call.call.options.layout
    adapter = call.adapter

    def in_bshd(array: numpy.ndarray) -> numpy.ndarray:
        return array.transpose(0, 2, 1, 3) if layout == "bhsd" else array

    inputs = {name: in_bshd(call.arrays[name]) for name in ("q", "k", "v")}
    own = grad_call.arrays
    inputs |= {name: in_bshd(own[name]) for name in ("dout", "out") if name in own}
    rows: dict[str, Any] = {name: own[name] for name in ("dlse", "delta") if name in own}
    grads: dict[str, numpy.ndarray] = {}
    for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        dtype = arrays.NUMPY_DTYPES[grad_call.grad_dtype]
        grads[name] = own.get(name, numpy.zeros(call.arrays[like].shape, dtype))
    starts, options = host_arguments(call)
    function: Any = host.attention_varlen_backward if call.packed else host.attention_backward
    function(
        *(inputs[name] for name in ("dout", "q", "k", "v")),
        inputs.get("out"),
        own["lse"],
        *starts,
        **{name: in_bshd(grad) for name, grad in grads.items()},
        **options,
        **rows,
        accumulate=grad_call.accumulate,
    )
    dq, dk, dv = (own[name] if name in own else adapter.give(grads[name]) for name in grads)
    return dq, dk, dv
