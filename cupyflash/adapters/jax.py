"""``attention`` under JAX's transformations: ``grad``, ``vmap`` and ``jit``.

Forward and backward are two primitives under one ``jax.custom_vjp``. A primitive with concrete
arrays calls the public function, on the CPU or, through DLPack, on a GPU; so ``jax.grad`` outside
of ``jit`` works on both. In a program that XLA compiles for the CPU it is a callback, in one for
GPUs a call of libcupyflash (``adapters/xla.py``).

Note [Callbacks without a second JAX]: ``jax.pure_callback`` gives the callback JAX arrays, and
reading one waits for a thread of the pool that the callback itself may occupy: with one core it
hangs on arrays of 4 MB (JAX 0.10.2). ``buffer_callback`` gives the memory itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from cupyflash import api
from cupyflash.adapters import LENGTHS, refuse_fp8, xla
from cupyflash.arguments import Options, resolve
from cupyflash.errors import UnsupportedError
from cupyflash.problem import as_float, as_int

Array = Any
_OFFSETS = ("q_offset", "kv_offset")


@dataclass(frozen=True)
class Static:
    """What a traced call knows besides its arrays; hashable.

    Attributes:
        lengths: which of ``LENGTHS`` are arrays, in order.
        settings: all other options of ``attention``, by name.
    """

    lengths: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...]

    def options(self, lengths: Sequence[Array]) -> dict[str, Any]:
        """Keyword arguments of ``attention`` and ``attention_backward``."""
        return {**dict(self.settings), **dict(zip(self.lengths, lengths))}

    @property
    def is_packed(self) -> bool:
        return "cu_seqlens_q" in self.lengths


def attention(q: Array, k: Array, v: Array, options: Options) -> Any:
    """``attention`` of arrays of which one is traced.

    Args:
        q, k, v, options: as for ``api.attention``; NumPy arrays may stand beside JAX's.

    Returns:
        out or (out, lse), traced.

    Raises:
        TypeError: another library's array, or a traced number where the host must know it.
        ValueError: an ``out``; JAX arrays are read-only.
        UnsupportedError: a stream; from JAX, where it asks for a forward-mode or second derivative,
            compiles for what is neither a CPU nor a CUDA GPU, or maps over packed sequences.
    """
    if options.out is not None:
        raise ValueError("out: the array is read-only, as all JAX arrays are")
    if options.stream is not None:
        raise UnsupportedError("stream: JAX chooses the stream of what it traces")
    given = [getattr(x, "dtype", None) for x in (q, k, v)]
    refuse_fp8(options, any(str(dtype).startswith("float8") for dtype in given))
    q, k, v = (_as_array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    static, lengths = _static(q, options)
    out, lse = _attend(static, q, k, v, tuple(lengths))
    return (out, lse) if options.return_lse else out


def _as_array(name: str, given: Any) -> Array:
    if not isinstance(given, (jax.Array, numpy.ndarray)):
        raise TypeError(
            f"{name}: all arrays must be JAX's, or NumPy's beside them, got "
            f"{type(given).__module__}.{type(given).__qualname__}"
        )
    return jax.numpy.asarray(given)


def _static(q: Array, options: Options) -> tuple[Static, list[Array]]:
    """The options of a call as what is known now and arrays."""
    settings = {
        name: value
        for name, value in vars(options).items()
        if name not in LENGTHS and name not in ("out", "stream", "return_lse")
    }
    for name, value in settings.items():
        if isinstance(value, jax.core.Tracer):
            raise TypeError(f"{name}: expected a value known to the host, got a JAX tracer")
    if options.window is not None:
        settings["window"] = tuple(
            None if bound is None else as_int("window", bound) for bound in options.window
        )
    for name in ("softmax_scale", "softcap"):
        if settings[name] is not None:
            settings[name] = as_float(name, settings[name])
    lengths: dict[str, Array] = {}
    for name in LENGTHS:
        given = getattr(options, name)
        if given is None:
            continue
        if name in _OFFSETS and not isinstance(given, jax.Array) and not getattr(given, "ndim", 0):
            settings[name] = as_int(name, given, "int or int32 [batch]")
        else:
            lengths[name] = _as_array(name, given)
    for name in _OFFSETS:
        if name in lengths and lengths[name].ndim == 0:  # a traced number
            starts = lengths.get("cu_seqlens_q")
            batch = q.shape[0] if starts is None else starts.shape[0] - 1
            lengths[name] = jax.numpy.broadcast_to(lengths[name], (batch,))
    return Static(tuple(lengths), tuple(settings.items())), list(lengths.values())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: Static, q: Array, k: Array, v: Array, lengths: tuple[Array, ...]
) -> tuple[Array, Array]:
    return tuple(_forward_p.bind(q, k, v, *lengths, static=static))


def _attend_and_keep(
    static: Static, q: Array, k: Array, v: Array, lengths: tuple[Array, ...]
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    out, lse = _attend(static, q, k, v, lengths)
    return (out, lse), (q, k, v, out, lse, *lengths)


def _pull_back(
    static: Static, kept: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, Array, None]:
    return (*_backward_p.bind(*cotangents, *kept, static=static), None)


_attend.defvjp(_attend_and_keep, _pull_back)


# --- primitives -----------------------------------------------------------------------------------


def _run(q: Array, k: Array, v: Array, *lengths: Array, static: Static) -> list[Array]:
    return list(api.attention(q, k, v, **static.options(lengths), return_lse=True))


def _run_backward(
    dout: Array,
    dlse: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *lengths: Array,
    static: Static,
) -> list[Array]:
    options = static.options(lengths)
    return list(api.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options))


def _shapes(q: Any, k: Any, v: Any, *lengths: Any, static: Static) -> list[Any]:
    # Says what is wrong now; an error in a compiled program would come late and in disguise. What
    # only a GPU can do is looked at when it is known what the program is for.
    options = {**static.options([_stand_in(x) for x in lengths]), "num_sms": None}
    resolve(_stand_in(q), _stand_in(k), _stand_in(v), Options(**options))
    # [batch, heads, seqlen], or [heads, total] of packed sequences.
    rows = q.shape[:-1]
    if options["layout"] == "bshd":
        rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    lse_dtype = numpy.float64 if q.dtype == numpy.float64 else numpy.float32
    return [_abstract(q, (*q.shape[:-1], v.shape[-1])), _abstract(q, rows, lse_dtype)]


def _shapes_backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, *_: Any, static: Static
) -> list[Any]:
    return [_abstract(x, x.shape) for x in (q, k, v)]


def _abstract(like: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    return jax.core.ShapedArray(shape, like.dtype if dtype is None else dtype)


def _stand_in(aval: Any) -> numpy.ndarray:
    """A NumPy array of the same shape and type, of one element's memory."""
    return numpy.broadcast_to(numpy.zeros((), aval.dtype), aval.shape)


def _lower_for_cpu(run: Callable[..., list[Array]], shapes: Callable[..., list[Any]]) -> Any:
    """The lowering of a primitive for the CPU: a callback that writes XLA's buffers."""

    def call(*operands: Array, static: Static) -> Any:
        from jax.experimental.buffer_callback import buffer_callback

        if dict(static.settings)["num_sms"] is not None:
            raise UnsupportedError("num_sms: limits a GPU kernel, but the program is for a CPU")

        def fill(context: Any, targets: Sequence[Any], *sources: Any) -> None:
            results = run(*(numpy.asarray(x) for x in sources), static=static)
            for target, result in zip(targets, results):
                numpy.asarray(target)[...] = result

        avals = shapes(*(jax.typeof(x) for x in operands), static=static)
        results = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return buffer_callback(fill, results)(*operands)

    return mlir.lower_fun(call, multiple_results=True)


def _lower_for_cuda(
    target: str, settle: xla.Settle, shapes: Callable[..., list[Any]], num_arrays: int
) -> Any:
    """The lowering of a primitive for CUDA GPUs: a call of libcupyflash."""

    def call(*operands: Array, static: Static) -> Any:
        avals = shapes(*(jax.typeof(x) for x in operands), static=static)
        results = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return xla.call(target, settle, operands, results, static.options, num_arrays)

    return mlir.lower_fun(call, multiple_results=True)


def _refuse_to_lower(context: Any, *_: Any, **__: Any) -> NoReturn:
    platforms = ", ".join(context.module_context.platforms)
    raise UnsupportedError(
        f"attention inside jax.jit for {platforms}: there are kernels for CUDA GPUs and code for "
        "the CPU, nothing else"
    )


def _refuse_derivative(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "attention: the backward cannot be differentiated again (there are no second derivatives), "
        "and there is no forward-mode derivative"
    )


def _batch(
    primitive: Primitive,
    operands: Sequence[Array],
    axes: Sequence[int | None],
    *,
    static: Static,
) -> tuple[list[Array], list[int]]:
    """jax.vmap: what is mapped over joins the batch, which is the first axis of every operand."""
    if static.is_packed:
        raise UnsupportedError(
            "attention: jax.vmap over packed sequences (cu_seqlens_q); append them to the pack"
        )
    size = next(x.shape[axis] for x, axis in zip(operands, axes) if axis is not None)
    batch = 0
    joined = []
    for x, axis in zip(operands, axes):
        if axis is None:
            x = jax.numpy.broadcast_to(x, (size, *x.shape))
        else:
            x = jax.numpy.moveaxis(x, axis, 0)
        batch = x.shape[1]
        joined.append(x.reshape(size * batch, *x.shape[2:]))
    results = primitive.bind(*joined, static=static)
    return [x.reshape(size, batch, *x.shape[1:]) for x in results], [0] * len(results)


def _define(
    name: str,
    run: Callable[..., list[Array]],
    shapes: Callable[..., list[Any]],
    settle: xla.Settle,
    num_arrays: int,
) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True

    def run_on_arrays(*operands: Any, static: Static) -> list[Array]:
        return run(*(jax.numpy.asarray(x) for x in operands), static=static)

    primitive.def_impl(run_on_arrays)
    primitive.def_abstract_eval(shapes)
    ad.primitive_jvps[primitive] = _refuse_derivative
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    mlir.register_lowering(primitive, _refuse_to_lower)
    mlir.register_lowering(primitive, _lower_for_cpu(run, shapes), platform="cpu")
    on_cuda = _lower_for_cuda(name, settle, shapes, num_arrays)
    mlir.register_lowering(primitive, on_cuda, platform="cuda")
    return primitive


# The numbers: operands before the lengths.
_forward_p = _define(xla.TARGETS[0], _run, _shapes, xla.settle_forward, 3)
_backward_p = _define(xla.TARGETS[1], _run_backward, _shapes_backward, xla.settle_backward, 7)
