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
from cupyflash.arguments import Call, Options, as_one, resolve
from cupyflash.arrays import Array
from cupyflash.backward import (
    PART_BYTES,
    WORKSPACE,
    Workspace,
    backward_launches,
    workspace_of,
)
from cupyflash.errors import UnsupportedError
from cupyflash.launch import CudaBackend, EmulatedBackend, Launch, Plan
from cupyflash.params import BACKWARD, DEVICE_LENGTHS
from cupyflash.problem import (
    DeviceInfo,
    Problem,
    alignment_fault,
    check_writable,
    ragged_fault,
    tma_fault,
    to_bshd,
)
from cupyflash.select import KernelSpec, select
from cupyflash.serve import (
    Configuration,
    Pointers,
    backend_of,
    check_lengths,
    host_arguments,
    remember,
    run_plan,
)
from cupyflash.tensor import DeviceKind, DType, TensorView

GIVEN = ("q", "k", "v", "dout", "out", "lse", "dlse", "delta", "dq", "dk", "dv")
"""Arrays that ``attention_backward`` takes, in the order in which ``serve.lookup`` sees them."""

_LIKE = {"dq": "q", "dk": "k", "dv": "v"}


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
    if call.problem.scaling is not None:
        raise UnsupportedError(
            "q, k, v: 8-bit floats have no gradients yet; pass the arrays that they were made from"
        )
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


def run_backward(
    grad_call: GradCall, key: tuple[Any, ...] | None = None
) -> tuple[Array, Array, Array]:
    """dq, dk, dv: the caller's arrays where given.

    Args:
        grad_call: what to do.
        key: to remember the configuration by, or None.
    """
    if grad_call.call.adapter.kind is DeviceKind.cpu:
        return _run_on_host(grad_call)
    return _run_on_device(grad_call, key)


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


def _run_on_device(grad_call: GradCall, key: tuple[Any, ...] | None) -> tuple[Array, Array, Array]:
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
        grads, views = allocate_grads(grad_call)
        if spec is not None:
            if call.problem.lengths and os.environ.get("CUPYFLASH_CHECK") == "1":
                check_lengths(call)
                key = None  # the short way does not check
            _launch(grad_call, problem, spec, backend, views, stream, key)
        dq, dk, dv = (
            grad_call.arrays[name] if name in grad_call.arrays else adapter.give(grad)
            for name, grad in grads.items()
        )
    return dq, dk, dv


def allocate_grads(grad_call: GradCall) -> tuple[dict[str, Array], dict[str, TensorView]]:
    """dq, dk, dv in the caller's layout, and the views of everything."""
    call, views = grad_call.call, dict(grad_call.views)
    adapter = call.adapter
    grads = {}
    for name, like in _LIKE.items():
        array = grad_call.arrays.get(name)
        if array is None:
            array = adapter.empty(_grad_shape(call, like), grad_call.grad_dtype, views[like].device)
            view = adapter.view(name, array)
            views[name] = as_one(view) if call.packed else to_bshd(view, call.options.layout)
        grads[name] = array
    return grads, views


def _grad_shape(call: Call, like: str) -> tuple[int, ...]:
    """Shape of the gradient of q, k or v in the caller's layout."""
    shape = call.views[like].shape
    if call.packed:
        return shape[1:]
    if call.options.layout == "bhsd":
        return shape[0], shape[2], shape[1], shape[3]
    return shape


def settle_launches(
    grad_call: GradCall,
    problem: Problem,
    spec: KernelSpec,
    device: DeviceInfo,
    views: dict[str, TensorView],
    workspace: dict[str, int],
    stream: int = 0,
) -> tuple[Launch, ...]:
    """The launches of a call whose gradients and workspace are allocated.

    Args:
        grad_call: the call.
        problem: ``grad_problem`` of it.
        spec: the chosen kernel.
        device: where.
        views: of everything, dq, dk and dv too.
        workspace: as ``backward_launches`` takes it.
        stream: handle of the stream.
    """
    return backward_launches(
        problem,
        spec,
        device,
        views,
        workspace,
        accumulate=grad_call.accumulate,
        clear_grads=not grad_call.accumulate and not _LIKE.keys() <= grad_call.arrays.keys(),
        stream=stream,
    )


def _launch(
    grad_call: GradCall,
    problem: Problem,
    spec: KernelSpec,
    backend: CudaBackend | EmulatedBackend,
    views: dict[str, TensorView],
    stream: int,
    key: tuple[Any, ...] | None,
) -> None:
    """Enqueues the three kernels. The workspace is given back to the library's own allocator, which
    reuses it in the order of the stream."""
    call = grad_call.call
    adapter, device = call.adapter, views["q"].device
    needs = workspace_of(problem, spec, views["dout"], grad_call.deterministic)
    places, nbytes = needs.places()
    buffer = adapter.empty(_buffer_shape(nbytes), DType.float32, device)
    base = _aligned(adapter.view("workspace", buffer).pointer)
    workspace = {name: base + place for name, place in places.items()}
    counter = 0
    if needs.dq_turns:
        counter = workspace["tile_counter"] = workspace["dq_turns"] + needs.counter_place
    launches = settle_launches(grad_call, problem, spec, backend.info, views, workspace, stream)
    if isinstance(backend, EmulatedBackend):
        for launch in launches:
            backend.run(launch)
        return
    plan = backend.plan(*launches)
    pointers = launches[0].pointers[: len(BACKWARD.pointers) - 1]
    inputs = [*call.arrays.values(), *grad_call.arrays.values()]
    run_plan(plan, adapter, stream, pointers, inputs, counter)
    if key is not None:
        remember(key, _GradConfiguration(grad_call, plan, needs))


def _buffer_shape(nbytes: int) -> tuple[int]:
    """Of a float32 array that holds this many bytes behind an aligned address."""
    return (nbytes // 4 + PART_BYTES // 4,)


def _aligned(address: int) -> int:
    return (address + PART_BYTES - 1) & -PART_BYTES


class _GradConfiguration(Configuration):
    """That of ``attention_backward``, whose arrays are ``GIVEN``."""

    __slots__ = ("_counter", "_copy", "_new_buffer", "_new_grad", "_parts", "_shape", "_shapes")

    def __init__(self, grad_call: GradCall, plan: Plan, needs: Workspace) -> None:
        call, views = grad_call.call, grad_call.views
        adapter, device = call.adapter, views["q"].device
        super().__init__(
            adapter,
            device,
            plan,
            [views.get(name) for name in GIVEN],
            [views.get(name) for name in DEVICE_LENGTHS],
            [GIVEN.index(name) for name in _LIKE if name in grad_call.arrays],
        )
        assert isinstance(adapter, (arrays.CupyAdapter, arrays.TorchAdapter))
        self._shapes = tuple(_grad_shape(call, like) for like in _LIKE.values())
        self._new_grad = adapter.allocator(grad_call.grad_dtype, device)
        places, nbytes = needs.places()
        self._shape = _buffer_shape(nbytes)
        self._new_buffer = adapter.allocator(DType.float32, device)
        self._copy = places.pop("dout_copy", None)
        self._parts = tuple(places.get(name) for name in WORKSPACE if name != "dout_copy")
        self._counter = None
        if needs.dq_turns:
            self._counter = places["dq_turns"] + needs.counter_place

    def _launch(self, pointers: Pointers, outputs: tuple[Array | None, ...], stream: int) -> Any:
        (q, k, v, dout, out, lse, dlse, delta, *own), lengths = pointers
        pointer, new = self._adapter.pointer, self._new_grad
        grads, addresses = [], []
        for array, address, shape in zip(outputs, own, self._shapes):
            if array is None:
                array = new(shape)
                address = pointer(array)
            grads.append(array)
            addresses.append(address)
        buffer = self._new_buffer(self._shape)
        base = _aligned(pointer(buffer))
        self.plan.run(
            stream,
            *(q, k, v, out, dout if self._copy is None else base + self._copy, dout),
            *(lse, dlse, delta),
            *addresses,
            *[0 if place is None else base + place for place in self._parts],
            *lengths,
            counter=0 if self._counter is None else base + self._counter,
        )
        return tuple(grads)


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
