"""Serves a resolved call: on the CPU, on a GPU, on an emulated device.

A ``Configuration`` is the short way: a CuPy or PyTorch call like one that has been served before
needs only new outputs, addresses and the current stream. ``gradients.GradConfiguration`` is that of
``attention_backward``; both are found by ``lookup``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from cupyflash import arrays
from cupyflash import driver as drivers
from cupyflash.arguments import Call, as_one
from cupyflash.arrays import Adapter, Array
from cupyflash.driver import Driver, PreparedLaunch
from cupyflash.fp8 import DEFAULT_SLOT, Arrangement, Stored
from cupyflash.launch import (
    CudaBackend,
    EmulatedBackend,
    Launch,
    Plan,
    announce,
    forward_launch,
    in_flight,
    load_kernel,
)
from cupyflash.params import DEVICE_LENGTHS, SCALES
from cupyflash.problem import Scaling, as_int, to_bshd
from cupyflash.select import describe_problem, select
from cupyflash.tensor import Device, DeviceKind, DType, TensorView

MAX_CONFIGURATIONS = 4096
"""How many are remembered before all are forgotten: a decoder meets a new length at every step."""

Pointers = tuple[tuple[int, ...], tuple[int, ...]]
"""Addresses of the arrays of a call, 0 for one that is not given, and of its arrays of lengths."""

NO_LENGTHS: tuple[None, ...] = (None,) * len(DEVICE_LENGTHS)
_NO_ADDRESSES = (0,) * len(DEVICE_LENGTHS)
_NOTHING: Pointers = ((), _NO_ADDRESSES)
_NO_SCALES = (0,) * len(SCALES)


class Configuration:
    """Everything that calls of one function, shape, type and set of options have in common.

    Args:
        adapter: of the arrays.
        device: the GPU that they are on.
        plan: the launches that served one of the calls.
        views: of the arrays that the call was given, in the order of ``lookup``; None for others.
        lengths: of its arrays of lengths.
        written: which of the arrays, by position, the caller gave to be written to.
    """

    __slots__ = ("_adapter", "_device", "_spans", "_stream", "_written", "plan")

    def __init__(
        self,
        adapter: Adapter,
        device: Device,
        plan: Plan,
        views: Sequence[TensorView | None],
        lengths: Sequence[TensorView | None],
        written: Sequence[int],
    ) -> None:
        assert isinstance(adapter, (arrays.CupyAdapter, arrays.TorchAdapter))
        self._adapter = adapter
        self._device = device
        self.plan = plan
        self._stream = adapter.stream_getter(device.index)
        self._spans = tuple(
            (position, low - view.pointer, high - view.pointer)
            for position, view in enumerate((*views, *lengths))
            if view is not None and view.size
            for low, high in (view.byte_range(),)
        )
        self._written = tuple(span for span in self._spans if span[0] in written)

    def is_apart(self, pointers: Pointers) -> bool:
        """Whether what the caller gave to be written to is certainly apart from every other array
        at these addresses."""
        addresses = pointers[0] + pointers[1]
        for own, low, high in self._written:
            low += addresses[own]
            high += addresses[own]
            for other, first, last in self._spans:
                address = addresses[other]
                if first + address < high and low < last + address and other != own:
                    return False
        return True

    def run(self, pointers: Pointers, outputs: tuple[Array | None, ...], stream: Any) -> Any:
        """Allocates those of ``outputs`` that the caller did not give, launches, returns what the
        function returns."""
        adapter = self._adapter
        if stream is None and adapter.is_current(self._device.index):
            return self._launch(pointers, outputs, self._stream())
        handle = None if stream is None else arrays.stream_handle(stream)
        with adapter.scope(self._device, handle):
            return self._launch(pointers, outputs, self._stream() if handle is None else handle)

    def _launch(self, pointers: Pointers, outputs: tuple[Array | None, ...], stream: int) -> Any:
        raise NotImplementedError


class _ForwardConfiguration(Configuration):
    """That of ``attention``, whose arrays are q, k, v and the caller's out."""

    __slots__ = ("_has_lse", "_lse_shape", "_new_lse", "_new_out", "_out_shape")

    def __init__(self, call: Call, plan: Plan) -> None:
        adapter, views, device = call.adapter, call.views, call.views["q"].device
        own = call.options.out is not None
        super().__init__(
            adapter,
            device,
            plan,
            [*(views[tensor] for tensor in ("q", "k", "v")), views["out"] if own else None],
            [views.get(name) for name in DEVICE_LENGTHS],
            [3] if own else [],
        )
        assert isinstance(adapter, (arrays.CupyAdapter, arrays.TorchAdapter))
        self._out_shape = _out_shape(call)
        self._lse_shape = _lse_shape(call)
        self._has_lse = bool(call.options.return_lse)
        self._new_out = adapter.allocator(views["out"].dtype, device)
        self._new_lse = adapter.allocator(DType.float32, device)

    def _launch(self, pointers: Pointers, outputs: tuple[Array | None, ...], stream: int) -> Any:
        (q, k, v, out_pointer), lengths = pointers
        (out,) = outputs
        pointer = self._adapter.pointer
        if out is None:
            out = self._new_out(self._out_shape)
            out_pointer = pointer(out)
        if not self._has_lse:
            self.plan.run(stream, q, k, v, out_pointer, 0, *lengths, *_NO_SCALES)
            return out
        lse = self._new_lse(self._lse_shape)
        self.plan.run(stream, q, k, v, out_pointer, pointer(lse), *lengths, *_NO_SCALES)
        return out, lse


_configurations: dict[tuple[Any, ...], Configuration] = {}


def lookup(
    given: tuple[Array | None, ...],
    settings: tuple[Any, ...],
    lengths: tuple[Array | None, ...] = NO_LENGTHS,
) -> tuple[tuple[Any, ...] | None, Configuration | None, Pointers]:
    """The configuration of a call, if it has been served before.

    Args:
        given: the arrays, unchecked, as many as the function takes, q first.
        settings: every other option that the result depends on, those of ``attention`` first and in
            their order.
        lengths: arrays that a kernel reads on the device, in the order of ``DEVICE_LENGTHS``.

    Returns:
        The key to remember the call by, or None where it must not be remembered; the configuration
        or None; the addresses of the arrays.
    """
    fast = arrays.FAST
    adapter = fast.get(type(given[0]))
    if adapter is None:
        return None, None, _NOTHING
    pointer, signature = adapter.pointer, adapter.signature
    try:
        causal, _, window, scale, softcap, q_offset, kv_offset, _, *last = settings
        # True == 1 == 1.0 find each other in a dictionary, but no option takes all three.
        types = (
            type(causal),
            None if window is None else tuple(map(type, window)),
            type(scale),
            type(softcap),
            type(q_offset),
            type(kv_offset),
            *map(type, last),
        )
        addresses, length_signatures = _NO_ADDRESSES, None
        if lengths is not NO_LENGTHS:
            if any(x is not None and fast.get(type(x)) is not adapter for x in lengths):
                return None, None, _NOTHING
            addresses = tuple(0 if x is None else pointer(x) for x in lengths)
            length_signatures = tuple(None if x is None else signature(x) for x in lengths)
        places: list[int] = []
        signatures: list[tuple[Any, ...] | None] = []
        bits = 0
        for array in given:
            if array is None:
                places.append(0)
                signatures.append(None)
                continue
            if fast.get(type(array)) is not adapter:
                return None, None, _NOTHING
            address = pointer(array)
            bits |= address
            places.append(address)
            signatures.append(signature(array))
        misaligned = tuple(address & 15 for address in places) if bits & 15 else 0
        key = (*signatures, misaligned, settings, types, length_signatures)
        configuration = _configurations.get(key)
    except (TypeError, RuntimeError, AttributeError):
        # Unhashable options, no address, a tensor that may record gradients, a PyTorch that does
        # not tell: resolve says what is wrong, if anything is.
        return None, None, _NOTHING
    pointers = (tuple(places), addresses)
    if configuration is not None and not configuration.is_apart(pointers):
        configuration = None
    return key, configuration, pointers


def with_lengths(
    settings: tuple[Any, ...],
    starts_and_used: tuple[Array | None, ...],
    offsets: tuple[Any, Any],
    bounds: tuple[int | None, int | None],
) -> tuple[tuple[Any, ...], tuple[Array | None, ...]]:
    """The settings and the arrays of lengths of a call, as ``lookup`` takes them.

    Args:
        settings: of the call without lengths, up to num_sms; offsets may be arrays.
        starts_and_used: cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv.
        offsets: q_offset, kv_offset.
        bounds: max_seqlen_q, max_seqlen_kv.
    """
    on_device = [x if hasattr(x, "shape") else None for x in offsets]
    if all(x is None for x in (*starts_and_used, *on_device)):
        return (*settings, *bounds), NO_LENGTHS
    ints = [None if hasattr(x, "shape") else x for x in offsets]
    return (*settings[:5], *ints, *settings[7:], *bounds), (*starts_and_used, *on_device)


def remember(key: tuple[Any, ...] | None, configuration: Configuration) -> None:
    """Serves later calls with this key the short way, unless it is None."""
    if key is not None:
        if len(_configurations) >= MAX_CONFIGURATIONS:
            _configurations.clear()
        _configurations[key] = configuration


def forget_configurations() -> None:
    """Makes the next call of every configuration choose its kernel anew.

    The environment (CUPYFLASH_FAMILY) is read when a configuration is first met; a program that
    changes it afterwards calls this.
    """
    _configurations.clear()


def backend_of(call: Call) -> CudaBackend | EmulatedBackend:
    """Where the call runs; it is not one for the CPU."""
    if call.adapter.kind is DeviceKind.cuda:
        return CudaBackend(call.views["q"].device.index)
    return EmulatedBackend(call.arrays["q"].device)


def allocate(call: Call) -> tuple[Array, Array | None]:
    """Outputs in the adapter's own form; their views are added to ``call.views``."""
    adapter, device = call.adapter, call.views["q"].device
    out = call.arrays.get("out")
    if out is None:
        out = adapter.empty(_out_shape(call), _out_dtype(call), device)
        view = adapter.view("out", out)
        call.views["out"] = as_one(view) if call.packed else to_bshd(view, call.options.layout)
    lse = None
    if call.options.return_lse:
        lse = adapter.empty(_lse_shape(call), DType.float32, device)
        call.views["lse"] = adapter.view("lse", lse)
    return out, lse


def _out_shape(call: Call) -> tuple[int, ...]:
    """Shape of the output in the caller's layout."""
    batch, seqlen, heads, _ = call.views["q"].shape
    head_dim = call.problem.head_dim_v
    if call.packed:
        return seqlen, heads, head_dim
    if call.options.layout == "bhsd":
        return batch, heads, seqlen, head_dim
    return batch, seqlen, heads, head_dim


def _out_dtype(call: Call) -> DType:
    out_dtype = call.problem.out_dtype
    assert out_dtype is not None  # for the type checker: a Problem sets it
    return out_dtype


def _lse_shape(call: Call) -> tuple[int, ...]:
    batch, seqlen, heads, _ = call.views["q"].shape
    return (heads, seqlen) if call.packed else (batch, heads, seqlen)


def run_on_device(call: Call, key: tuple[Any, ...] | None) -> Any:
    """Launches on a GPU or an emulated device.

    Args:
        call: what to do.
        key: to remember the configuration by, or None.
    """
    adapter, device = call.adapter, call.views["q"].device
    backend = backend_of(call)
    choice = None if call.problem.is_empty else select(call.problem, backend.info)
    with adapter.scope(device, call.stream):
        stream = call.stream
        if stream is None:
            stream = adapter.current_stream(device)
        out, lse = allocate(call)
        if choice is not None:
            if call.problem.lengths and os.environ.get("CUPYFLASH_CHECK") == "1":
                check_lengths(call)
                key = None  # the short way does not check
            launch = forward_launch(
                *(call.problem, choice.spec, backend.info, call.views, stream),
                clear_out=call.options.out is None,
            )
            if isinstance(backend, CudaBackend):
                plan = backend.plan(launch)
                run_plan(plan, adapter, stream, launch.pointers, list(call.arrays.values()))
                if key is not None:
                    remember(key, _ForwardConfiguration(call, plan))
            else:
                backend.run(launch)
        result = adapter.give(out) if call.options.out is None else call.options.out
        return (result, adapter.give(lse)) if lse is not None else result


def run_plan(
    plan: Plan,
    adapter: Adapter,
    stream: int,
    pointers: Sequence[int],
    inputs: list[Array],
    counter: int = 0,
) -> None:
    """Launches a plan that reads ``inputs``."""
    with reading(adapter, plan.driver, plan.device_index, stream, inputs):
        plan.run(stream, *pointers, counter=counter)


@contextlib.contextmanager
def reading(
    adapter: Adapter, driver: Driver, index: int, stream: int, inputs: list[Array]
) -> Iterator[None]:
    """Where a launch on ``stream`` of a GPU reads ``inputs``: it comes after what their producers
    have enqueued, and they are held until it is done where their owner does not know of it."""
    for array in inputs:
        for producer in adapter.producers(array):
            driver.wait(index, stream, producer)
    yield
    if adapter.keeps_alive:
        in_flight.hold(index, stream, inputs)


def enqueue(
    adapter: Adapter, backend: CudaBackend, launches: Sequence[Launch], inputs: list[Array]
) -> None:
    """Enqueues launches without tensor maps, one after another, that read ``inputs``; does not
    wait."""
    index, stream, driver = backend.device_index, launches[0].stream, drivers.default_driver()
    kernels = [load_kernel(launch.spec, index, stream) for launch in launches]
    with reading(adapter, driver, index, stream, inputs):
        for launch, kernel in zip(launches, kernels):
            announce(launch.spec, f"GPU {index} ({backend.info.name})", kernel.origin)
            prepared = PreparedLaunch(
                context=kernel.context,
                function=kernel.function,
                grid=launch.grid,
                block=launch.block,
                cluster=launch.spec.cluster,
                shared_bytes=launch.spec.shared_bytes,
                params=launch.params,
                pointer_offsets=(),
                maps=(),
            )
            driver.launch(prepared, stream, ())


def check_lengths(call: Call) -> None:
    """CUPYFLASH_CHECK=1: waits for the GPU and reads the lengths that a kernel will read.

    Raises:
        ValueError: a length that the kernel would clamp.
    """
    problem, host = call.problem, call.adapter.to_numpy
    lengths = {name: host(call.arrays[name]) for name in problem.lengths}
    for suffix, rows in (("q", problem.rows_q), ("kv", problem.rows_kv)):
        spans = numpy.full(problem.batch, rows)
        starts = lengths.get(f"cu_seqlens_{suffix}")
        if starts is not None:
            spans = numpy.diff(starts)
            if starts[0] != 0 or (spans < 0).any() or starts[-1] > rows:
                raise ValueError(
                    f"cu_seqlens_{suffix}: expected 0 first, no decrease and at most {rows}, the "
                    f"rows of the array, at the end, got {_brief(starts)}"
                )
            bound = getattr(call.options, f"max_seqlen_{suffix}")
            if bound is not None and spans.max(initial=0) > bound:
                raise ValueError(
                    f"max_seqlen_{suffix}: {bound} is less than the longest sequence, {spans.max()}"
                )
        used = lengths.get(f"seqused_{suffix}")
        if used is not None and ((used < 0) | (used > spans)).any():
            raise ValueError(
                f"seqused_{suffix}: expected lengths from 0 to {_brief(spans)}, got {_brief(used)}"
            )


# --- the CPU --------------------------------------------------------------------------------------


def run_on_host(call: Call) -> Any:
    """Attention of NumPy arrays, dense or packed."""
    from cupyflash import host  # 10 ms that a GPU's first call does not pay

    options, adapter, problem = call.options, call.adapter, call.problem
    starts, common = host_arguments(call)
    out = call.arrays.get("out")
    if out is None:
        padded = call.packed or any(common[name] is not None for name in _USED)
        make = numpy.zeros if padded else numpy.empty
        out = make(_out_shape(call), arrays.NUMPY_DTYPES[_out_dtype(call)])
    common.update(want_lse=problem.want_lse, out=_in_bshd(out, options.layout))
    if problem.scaling is not None:
        lse = _run_scaled_on_host(call, problem.scaling, starts, common)
    else:
        inputs = [_in_bshd(call.arrays[name], options.layout) for name in ("q", "k", "v")]
        function = host.attention_varlen if call.packed else host.attention
        _, lse = function(*inputs, *starts, **common)
    result = adapter.give(out) if options.out is None else options.out
    return (result, adapter.give(lse)) if problem.want_lse else result


def _run_scaled_on_host(
    call: Call, scaling: Scaling, starts: tuple[numpy.ndarray, ...], common: dict[str, Any]
) -> numpy.ndarray | None:
    """Attention of 8-bit floats; lse where it is wanted."""
    from cupyflash import host_fp8

    num_sequences = len(starts[0]) - 1 if call.packed else call.problem.batch
    shapes = {name: call.views[name].shape for name in ("q", "k")}
    shapes["v"] = (*shapes["k"][:3], call.problem.head_dim_v)
    stored = {}
    for name, (batch, seqlen, heads, head_dim) in shapes.items():
        scale, data = getattr(scaling, name), call.arrays[name]
        transposed = name == "v" and scaling.v_slot > 0
        slot = scaling.v_slot if transposed else scale.tokens if scale.kind == "block" else 0
        kind = "tensor" if scale.kind == "none" else scale.kind
        arrangement = Arrangement(
            *(kind, slot or DEFAULT_SLOT, call.packed, (batch, seqlen, heads, head_dim)),
            num_sequences,
        )
        data = data[None] if call.packed else _in_bshd(data, call.options.layout)
        scales = call.arrays.get(f"{name}_scale", numpy.ones((), numpy.float32))
        stored[name] = Stored(data.view(numpy.uint8), scales, arrangement, transposed)
    out_scale = call.arrays.get("out_scale", numpy.ones((), numpy.float32))
    q, k, v = stored["q"], stored["k"], stored["v"]
    return host_fp8.attention(q, k, v, starts, out_scale=float(out_scale), **common)


_USED = ("seqused_q", "seqused_kv")


def host_arguments(call: Call) -> tuple[tuple[numpy.ndarray, ...], dict[str, Any]]:
    """What the functions of ``host`` take beside arrays: (cu_seqlens_q, cu_seqlens_kv) of packed
    sequences, and mask, scale and lengths by name."""
    problem = call.problem
    starts: tuple[numpy.ndarray, ...] = _both_starts(call) if call.packed else ()
    batch = len(starts[0]) - 1 if call.packed else problem.batch
    lengths = {name: _lengths(call, name, batch) for name in _USED}
    if call.packed:
        seqlens_q, seqlens_kv = (numpy.diff(start) for start in starts)
    else:
        seqlens_q = numpy.full(batch, problem.seqlen_q)
        seqlens_kv = numpy.full(batch, problem.seqlen_kv)
    options: dict[str, Any] = {
        "left": problem.mask.left,
        "right": problem.mask.right,
        "shift": _shift(call, seqlens_q, seqlens_kv, lengths),
        "softmax_scale": problem.softmax_scale,
        "softcap": call.softcap,
        **lengths,
    }
    return starts, options


def describe_on_host(call: Call) -> str:
    """One line about a call for the CPU: its problem and what only the CPU serves."""
    problem = call.problem
    batch, lengths = problem.batch, None
    if call.packed:
        batch = len(_both_starts(call)[0]) - 1
        lengths = f"packed, batch {batch}, total {problem.seqlen_q} x {problem.seqlen_kv}"
    parts = [describe_problem(problem, lengths)]
    if call.softcap:
        parts.append(f"softcap {call.softcap:.6g}")
    for name in ("seqused_q", "seqused_kv"):
        used = _lengths(call, name, batch)
        if used is not None:
            parts.append(f"{name} {_brief(used)}")
    for name in ("q_offset", "kv_offset"):
        offset = _offset(call, name, batch)
        if offset is not None:
            parts.append(f"{name} {_brief(offset)}")
    return ", ".join(parts)


def _brief(values: int | numpy.ndarray) -> str:
    """All of a few numbers, the first and the last of many."""
    return numpy.array2string(numpy.asarray(values), threshold=8, separator=", ")


def _in_bshd(array: numpy.ndarray, layout: str) -> numpy.ndarray:
    return array.transpose(0, 2, 1, 3) if layout == "bhsd" else array


def _shift(
    call: Call,
    seqlens_q: numpy.ndarray,
    seqlens_kv: numpy.ndarray,
    used: dict[str, numpy.ndarray | None],
) -> numpy.ndarray:
    """Position of each sequence's first query on its axis of keys, int64 [batch]."""
    batch = len(seqlens_q)
    shift = numpy.zeros(batch, numpy.int64)
    if call.problem.mask.align == "bottom_right":
        used_q, used_kv = used["seqused_q"], used["seqused_kv"]
        shift += seqlens_kv if used_kv is None else used_kv
        shift -= seqlens_q if used_q is None else used_q
    for name, sign in (("q_offset", 1), ("kv_offset", -1)):
        offset = _offset(call, name, batch)
        if offset is not None:
            shift += sign * offset
    return shift


def _offset(call: Call, name: str, batch: int) -> int | numpy.ndarray | None:
    """q_offset or kv_offset: for all sequences, or int64 [batch]."""
    given = getattr(call.options, name)
    if given is None:
        return None
    if getattr(given, "ndim", 0) == 0:
        return as_int(name, given, "int or int [batch]")
    return _of_batch(name, _integers(call, name), batch)


def _integers(call: Call, name: str) -> numpy.ndarray:
    """An integer array among the options, [n], as int64."""
    given = getattr(call.options, name)
    adapter = arrays.adapter_for({name: given})
    if adapter.kind is not DeviceKind.cpu:
        raise TypeError(f"{name}: expected an array on the CPU, where q is")
    array = adapter.adopt(name, given)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {list(array.shape)}")
    return array.astype(numpy.int64)


def _of_batch(name: str, array: numpy.ndarray, batch: int) -> numpy.ndarray:
    if array.shape != (batch,):
        raise ValueError(f"{name}: expected shape [{batch}], got {list(array.shape)}")
    return array


def _lengths(call: Call, name: str, batch: int) -> numpy.ndarray | None:
    if getattr(call.options, name) is None:
        return None
    return _of_batch(name, _integers(call, name), batch)


def _both_starts(call: Call) -> tuple[numpy.ndarray, numpy.ndarray]:
    """cu_seqlens_q and cu_seqlens_kv."""
    starts_q, starts_kv = (_starts(call, suffix) for suffix in ("q", "kv"))
    if len(starts_q) != len(starts_kv):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_kv: expected as many entries in both, got "
            f"{len(starts_q)} and {len(starts_kv)}"
        )
    return starts_q, starts_kv


def _starts(call: Call, suffix: str) -> numpy.ndarray:
    """cu_seqlens_q or cu_seqlens_kv, checked against its max_seqlen."""
    starts = _integers(call, f"cu_seqlens_{suffix}")
    longest = int(numpy.diff(starts).max(initial=0))
    limit = getattr(call.options, f"max_seqlen_{suffix}")
    if limit is not None and as_int(f"max_seqlen_{suffix}", limit) < longest:
        raise ValueError(
            f"max_seqlen_{suffix}: {limit} is less than the longest sequence, {longest}"
        )
    return starts
