"""What the arguments of ``attention`` mean: all that can be checked before choosing a kernel.

``resolve`` turns arrays of any library and options of any numeric type into a ``Call``. No argument
is accepted and ignored: what the device of the arrays does not serve is refused here, by name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy

from cupyflash import arrays
from cupyflash.arrays import Adapter, Array
from cupyflash.errors import UnsupportedError
from cupyflash.operands import (
    check_dtype_of_scales,
    check_plain,
    out_dtype_of,
    quantized_operands,
    scales_given,
    scaling_of,
    view_of_quantized,
)
from cupyflash.params import DEVICE_LENGTHS, SCALES
from cupyflash.problem import LAYOUTS, Mask, Problem, as_float, as_int, make_problem, to_bshd
from cupyflash.tensor import FP8_DTYPES, DeviceKind, DType, TensorView

_MAX_FLOAT32 = float(numpy.finfo(numpy.float32).max)
_MAX_FLOAT64 = float(numpy.finfo(numpy.float64).max)
_MIN_SCALE = float(numpy.finfo(numpy.float32).tiny)
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, eq=False)
class Options:
    """The keyword arguments of ``attention``, as given."""

    causal: bool = False
    align: str = "bottom_right"
    window: tuple[int | None, int | None] | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    cu_seqlens_q: Array | None = None
    cu_seqlens_kv: Array | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    seqused_q: Array | None = None
    seqused_kv: Array | None = None
    q_offset: int | Array | None = None
    kv_offset: int | Array | None = None
    q_scale: Array | None = None
    k_scale: Array | None = None
    v_scale: Array | None = None
    layout: str = "bshd"
    out: Array | None = None
    out_dtype: Any = None
    out_scale: Array | None = None
    return_lse: bool = False
    num_sms: int | None = None
    stream: Any = None


@dataclass(frozen=True, eq=False)
class Call:
    """A call with everything checked that does not depend on the choice of a kernel.

    Attributes:
        options: as given.
        adapter: of all arrays.
        arrays: q, k, v and, where given, out and ``params.SCALES``, in the adapter's own form; of
            quantized q, k and v the data; on a GPU also the arrays of lengths
            (``params.DEVICE_LENGTHS``).
        views: the same, q, k, v and out in bshd order and packed ones as a batch of one, q and k in
            their shapes, a transposed v as ``launch.forward_launch`` takes it. ``serve.allocate``
            adds out and lse.
        packed: whether the arrays are packed sequences; ``problem`` then takes them for one.
        problem: shapes, mask and scale.
        softcap: 0 for none.
        stream: handle, or None for the current stream.
    """

    options: Options
    adapter: Adapter
    arrays: dict[str, Array]
    views: dict[str, TensorView]
    packed: bool
    problem: Problem
    softcap: float
    stream: int | None


def options_of(function: str, given: dict[str, Any]) -> Options:
    """Keyword arguments of another function that takes those of ``attention``."""
    names = {field.name for field in dataclasses.fields(Options)}
    unknown = sorted(given.keys() - names)
    if unknown:
        raise TypeError(f"{function}: unexpected argument {', '.join(unknown)}")
    return Options(**given)


def resolve(q: Array, k: Array, v: Array, options: Options) -> Call:
    """Checks all arguments and returns what they mean."""
    if options.layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {options.layout!r}")
    if not isinstance(options.return_lse, (bool, numpy.bool_)):
        raise TypeError(f"return_lse: expected a bool, got {type(options.return_lse).__name__}")
    quantized = quantized_operands(q, k, v)
    if quantized and options.layout != "bshd":
        raise ValueError('layout: quantized tensors are in the order of "bshd", pass that')
    given = {"q": q, "k": k, "v": v} | {name: x.data for name, x in quantized.items()}
    if options.out is not None:
        given["out"] = options.out
    adapter = arrays.adapter_for(given)
    on_host = adapter.kind is DeviceKind.cpu
    lengths = {} if on_host else _device_lengths(options)
    scale_options = {name: getattr(options, name) for name in SCALES}
    if not quantized and any(x is not None for x in scale_options.values()):
        dtype_q = adapter.view("q", adapter.adopt("q", q)).dtype
        check_dtype_of_scales(dtype_q, scale_options)
    scales, numbers = scales_given(quantized, scale_options, on_host)
    if lengths or scales:
        given |= lengths | scales
        adapter = arrays.adapter_for(given)
    adopted = {name: adapter.adopt(name, array) for name, array in given.items()} | numbers
    views = {name: adapter.view(name, array) for name, array in adopted.items()}
    mask = Mask.resolve(options.causal, options.window, options.align)
    softmax_scale = _softmax_scale(options.softmax_scale)
    softcap = as_float("softcap", options.softcap)
    if softcap < 0:
        raise ValueError(f"softcap: expected 0 (none) or more, got {softcap}")
    if options.num_sms is not None and as_int("num_sms", options.num_sms) < 1:
        raise ValueError(f"num_sms: expected at least 1, got {options.num_sms}")
    _check_supported(options, adapter.kind)
    packed = options.cu_seqlens_q is not None or options.cu_seqlens_kv is not None
    if not packed and (options.max_seqlen_q is not None or options.max_seqlen_kv is not None):
        raise ValueError("max_seqlen_q, max_seqlen_kv: only with cu_seqlens_q and cu_seqlens_kv")
    num_sequences = _num_sequences(options)
    stored_v = views["v"]
    for name, x in quantized.items():
        views[name] = view_of_quantized(name, x, views[name], num_sequences or 0, packed)
    tensors = {name: views[name] for name in ("q", "k", "v", "out") if name in views}
    if packed:
        views.update(_views_of_packed(tensors, options))
    else:
        views.update({name: to_bshd(view, options.layout) for name, view in tensors.items()})
    shape = None
    if packed and not on_host:
        shape = _packed_shape(views, options)
    batch = views["q"].shape[0] if shape is None else shape[0]
    for name in lengths:
        _check_lengths(name, views[name], batch, views["q"])
    dtype = views["q"].dtype
    scaling = None
    if dtype in FP8_DTYPES and all(views[name].ndim == 4 for name in ("q", "k", "v")):
        num_sequences = views["q"].shape[0] if num_sequences is None else num_sequences
        scaling = scaling_of(quantized, views, num_sequences, packed)
    asked = None if options.out_dtype is None else _as_dtype(options.out_dtype)
    out_dtype = out_dtype_of(dtype, asked, views.get("out"), "out_scale" in views)
    problem = make_problem(
        views["q"],
        views["k"],
        views["v"],
        mask=mask,
        softmax_scale=softmax_scale,
        want_lse=bool(options.return_lse),
        position_offset=0 if on_host else _offset(options),
        out=views.get("out"),
        num_sms=None if options.num_sms is None else int(options.num_sms),
        layout=options.layout,
        softcap=0.0 if on_host else softcap,
        lengths=tuple(name for name in DEVICE_LENGTHS if name in lengths),
        packed=shape,
        out_dtype=out_dtype,
        scaling=scaling,
    )
    _check_element_type(problem, bool(quantized), adapter.kind)
    if quantized:
        views["v"] = _as_stored(views["v"], stored_v)
    _check_softcap(softcap, problem)
    if not on_host:
        _check_for_kernel(problem)
    return Call(
        options=options,
        adapter=adapter,
        arrays=adopted,
        views=views,
        packed=packed,
        problem=problem,
        softcap=softcap,
        stream=_stream(options.stream, adapter.kind),
    )


def _softmax_scale(given: object) -> float | None:
    if given is None:
        return None
    scale = as_float("softmax_scale", given)
    if abs(scale) * _LOG2_E > _MAX_FLOAT32:
        raise ValueError(f"softmax_scale: {scale} does not fit float32 in units of log2")
    return scale


def _device_lengths(options: Options) -> dict[str, Array]:
    """The arrays of lengths and offsets that a kernel reads on the device."""
    found = {}
    for name in DEVICE_LENGTHS:
        given = getattr(options, name)
        if given is None or (name.endswith("_offset") and getattr(given, "ndim", 0) == 0):
            continue
        found[name] = given
    return found


def _num_sequences(options: Options) -> int | None:
    """How many packed sequences there are; None where they are not packed."""
    starts = options.cu_seqlens_q
    if starts is None:
        return None
    shape = getattr(starts, "shape", None)
    if shape is None:
        arrays.adapter_for({"cu_seqlens_q": starts})  # says that it is no array
    if shape is None or len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"cu_seqlens_q: expected shape [batch + 1], got {shape}")
    return int(shape[0]) - 1


def _as_stored(view: TensorView, data: TensorView) -> TensorView:
    """A transposed v as [batch, slot tokens, heads, width]."""
    heads, width, columns = data.shape[-3:]
    return dataclasses.replace(view, shape=(view.shape[0], columns, heads, width))


def _packed_shape(views: dict[str, TensorView], options: Options) -> tuple[int, int, int]:
    """How many packed sequences there are, and bounds of their lengths."""
    counts = {name: views[name].shape for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    for name, shape in counts.items():
        if len(shape) != 1 or shape[0] < 1:
            raise ValueError(f"{name}: expected shape [batch + 1], got {list(shape)}")
    if counts["cu_seqlens_q"] != counts["cu_seqlens_kv"]:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_kv: expected as many entries in both, got "
            f"{counts['cu_seqlens_q'][0]} and {counts['cu_seqlens_kv'][0]}"
        )
    bounds = []
    for name, tensor in (("max_seqlen_q", "q"), ("max_seqlen_kv", "k")):
        given, total = getattr(options, name), views[tensor].shape[1]
        bound = total if given is None else as_int(name, given)
        if bound < 0:
            raise ValueError(f"{name}: expected a length, got {bound}")
        bounds.append(bound)
    return counts["cu_seqlens_q"][0] - 1, bounds[0], bounds[1]


def _check_lengths(name: str, view: TensorView, batch: int, q: TensorView) -> None:
    """Raises unless a kernel can read these lengths: int32, contiguous, beside q."""
    if view.dtype is not DType.int32:
        raise TypeError(f"{name}: expected int32 on a GPU, got {view.dtype}; convert the array")
    expected = batch + 1 if name.startswith("cu_seqlens") else batch
    if view.shape != (expected,):
        raise ValueError(f"{name}: expected shape [{expected}], got {list(view.shape)}")
    if expected > 1 and view.strides != (1,):
        raise ValueError(f"{name}: expected a contiguous array, got stride {view.strides[0]}")
    if view.device != q.device:
        raise TypeError(f"{name}: expected an array on {q.device}, where q is, got {view.device}")


def _check_supported(options: Options, kind: DeviceKind) -> None:
    """Raises for arguments that no host code looks at."""
    if kind is DeviceKind.cpu and options.num_sms is not None:
        raise UnsupportedError("num_sms: limits a GPU kernel, but the arrays are on the CPU")


def _check_element_type(problem: Problem, quantized: bool, kind: DeviceKind) -> None:
    dtype = problem.dtype
    if dtype in FP8_DTYPES:
        if not quantized:
            check_plain(dtype, (problem.head_dim_qk, problem.head_dim_v))
        return
    if kind is not DeviceKind.cpu and dtype not in (DType.bfloat16, DType.float16):
        raise UnsupportedError(
            f"q, k, v: {dtype} has no GPU kernel; convert the arrays to bfloat16 or float16, or "
            "pass NumPy arrays to compute on the CPU"
        )


def _check_softcap(softcap: float, problem: Problem) -> None:
    """Raises where softmax_scale / softcap, by which queries are multiplied, is infinite: times a
    query of 0 it would be NaN."""
    scale = problem.softmax_scale
    assert scale is not None
    limit = _MAX_FLOAT64 if problem.dtype is DType.float64 else _MAX_FLOAT32
    if softcap and abs(scale) / softcap > limit:
        raise ValueError(
            f"softcap: expected 0 (none) or enough that softmax_scale / softcap is finite, got "
            f"{softcap} for a softmax_scale of {scale}"
        )


def _as_dtype(given: Any) -> DType:
    """A dtype of any library, or its name."""
    if isinstance(given, DType):
        return given
    name = given if isinstance(given, str) else str(given).rpartition(".")[2]
    if name not in DType.__members__:
        try:
            name = numpy.dtype(given).name
        except TypeError:
            name = ""
    if name not in DType.__members__:
        raise TypeError(f"out_dtype: expected a dtype, got {given!r}")
    return DType[name]


def _check_for_kernel(problem: Problem) -> None:
    """Raises for what no GPU kernel takes, in better words than a list of candidates has."""
    scale = problem.softmax_scale
    assert scale is not None
    if scale < _MIN_SCALE:
        raise UnsupportedError(
            f"softmax_scale: GPU kernels need a positive float32, got {scale}; negate q for a "
            "negative one"
        )
    if problem.head_dim_qk % 8 == 0 and problem.head_dim_v % 8 == 0 and problem.unaligned:
        name, reason = problem.unaligned[0]
        raise ValueError(
            f"{name}: {reason}; GPU kernels move 16 bytes at a time, so the address and all "
            "strides but the last must be multiples of 16 bytes: pass a contiguous copy"
        )


def _offset(options: Options) -> int:
    """What ints among q_offset and kv_offset add to the mask's shift."""
    total = 0
    for name, sign in (("q_offset", 1), ("kv_offset", -1)):
        given = getattr(options, name)
        if given is None:
            continue
        if getattr(given, "ndim", 0) == 0:
            total += sign * as_int(name, given, "int or int32 [batch]")
    return total


def _stream(given: Any, kind: DeviceKind) -> int | None:
    if given is None:
        return None
    if kind is DeviceKind.cpu:
        raise UnsupportedError("stream: the arrays are on the CPU, where there are no streams")
    if kind is DeviceKind.emulated:
        raise UnsupportedError("stream: emulated devices have no streams")
    return arrays.stream_handle(given)


def _views_of_packed(views: dict[str, TensorView], options: Options) -> dict[str, TensorView]:
    """[total, heads, head_dim] as [1, total, heads, head_dim]."""
    if options.cu_seqlens_q is None or options.cu_seqlens_kv is None:
        raise ValueError("cu_seqlens_q and cu_seqlens_kv: expected both or none")
    if options.layout != "bshd":
        raise ValueError('layout: packed sequences are [total, heads, head_dim], pass "bshd"')
    for name, view in views.items():
        if view.ndim != 3:
            raise ValueError(
                f"{name}: expected 3 dimensions [total, heads, head_dim] with cu_seqlens, got "
                f"{view.ndim}: {list(view.shape)}"
            )
    return {name: as_one(view) for name, view in views.items()}


def as_one(view: TensorView) -> TensorView:
    """A packed array as a batch of one."""
    return dataclasses.replace(view, shape=(1, *view.shape), strides=(0, *view.strides))
