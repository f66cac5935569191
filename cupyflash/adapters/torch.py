"""``attention`` under PyTorch's autograd and torch.compile.

A call that autograd records runs ``_Attention``, a ``torch.autograd.Function`` around the two
public functions. A call in a graph of torch.compile or torch.export is the operator
``cupyflash::attention``, whose derivative is ``cupyflash::attention_backward``. Both do the same
work. They are two because a compiler needs an operator that it does not look into, while a Function
costs a recorded call half of what an operator with a registered derivative does.

Note [Two outputs]: the forward always returns lse too, because the backward reads it, and lse is an
output with a gradient of its own. A loss may use out, lse or both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor
from torch.autograd import forward_ad

from cupyflash import api
from cupyflash.adapters import LENGTHS, refuse_fp8
from cupyflash.arguments import Options
from cupyflash.errors import UnsupportedError
from cupyflash.problem import as_int

Settings = dict[str, Any]
"""Keyword arguments of ``attention`` and of ``attention_backward``, without ``LENGTHS``."""

_OFFSETS = ("q_offset", "kv_offset")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Any:
    """``attention`` of tensors of which one requires grad, or that stand for others in a graph.

    Args:
        q, k, v, options: as for ``api.attention``.

    Returns:
        out or (out, lse), recorded by autograd.

    Raises:
        TypeError: a tensor to write to, or one with a forward-mode tangent.
        UnsupportedError: a stream. Also raised by the backward of the backward.
    """
    _check(options)
    refuse_fp8(options, any(getattr(x, "dtype", None) in _FP8 for x in (q, k, v)))
    if torch.compiler.is_compiling():
        return _call_operator(q, k, v, options)
    _check_tangents(q, k, v)
    settings = {
        name: value
        for name, value in vars(options).items()
        if name not in LENGTHS and name not in ("out", "stream", "return_lse")
    }
    lengths = [_as_length(name, getattr(options, name)) for name in LENGTHS]
    out, lse = _Attention.apply(q, k, v, settings, *lengths)
    return (out, lse) if options.return_lse else out


def _check(options: Options) -> None:
    """Raises for what neither autograd nor a graph can express."""
    if options.out is not None:
        raise TypeError(
            "out: autograd and torch.compile do not record a result that is written to a given "
            "tensor; leave it away, or call attention under torch.no_grad() and outside of graphs"
        )
    if options.stream is not None:
        raise UnsupportedError(
            "stream: autograd runs a backward on the stream that was current in the forward; call "
            "attention under torch.cuda.stream(...) instead"
        )


def _check_tangents(*tensors: Tensor) -> None:
    if forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise TypeError(
            "q, k, v: a tensor has a forward-mode tangent, and attention has no forward-mode "
            "derivative; pass tensor.detach()"
        )


def _as_length(name: str, given: Any) -> Any:
    """An option among ``LENGTHS`` in a form that nobody changes unseen before the backward."""
    if isinstance(given, numpy.ndarray) and given.ndim:
        return torch.from_numpy(given.copy())
    if name in _OFFSETS and given is not None and getattr(given, "ndim", 0) == 0:
        return as_int(name, given, "int or int32 [batch]")
    return given


def _run(
    q: Tensor, k: Tensor, v: Tensor, settings: Settings, lengths: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    return api.attention(q, k, v, **settings, **dict(zip(LENGTHS, lengths)), return_lse=True)


def _run_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    settings: Settings,
    deterministic: bool,
    *lengths: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    grads = api.attention_backward(
        dout.resolve_neg(),
        q,
        k,
        v,
        out,
        lse,
        dlse=None if dlse is None else dlse.resolve_neg(),
        deterministic=deterministic,
        **settings,
        **dict(zip(LENGTHS, lengths)),
    )
    return grads.dq, grads.dk, grads.dv


class _Attention(torch.autograd.Function):
    """(q, k, v, settings, *lengths) -> (out, lse), recorded."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, settings: Settings, *lengths: Any
    ) -> tuple[Tensor, Tensor]:
        return _run(q, k, v, settings, lengths)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, settings, *lengths = inputs
        ctx.set_materialize_grads(False)
        tensors = [x if isinstance(x, Tensor) else None for x in lengths]
        ctx.save_for_backward(q, k, v, *output, *tensors)
        ctx.settings = settings
        ctx.numbers = [None if isinstance(x, Tensor) else x for x in lengths]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * len(ctx.needs_input_grad)
        if dout is None and dlse is None:
            return nothing
        kept = ctx.saved_tensors
        saved, tensors = kept[:5], kept[5:]
        lengths = [number if x is None else x for x, number in zip(tensors, ctx.numbers)]
        if dout is None:
            dout = torch.zeros_like(saved[3])
        run = _AttentionBackward.apply if torch.is_grad_enabled() else _run_backward
        deterministic = torch.are_deterministic_algorithms_enabled()
        grads = run(dout, dlse, *saved, ctx.settings, deterministic, *lengths)
        wanted = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad))
        return (*wanted, *nothing[3:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise UnsupportedError("attention has no forward-mode derivative")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        _refuse_vmap()


class _AttentionBackward(torch.autograd.Function):
    """``_run_backward`` where gradients are recorded as well: they have no derivatives."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _run_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        _refuse_second_derivative()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        _refuse_vmap()


def _refuse_second_derivative(*_: Any) -> NoReturn:
    raise UnsupportedError(
        "attention: the backward cannot be differentiated again (there are no second derivatives)"
    )


def _refuse_vmap(*_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        "attention cannot run inside torch.func.vmap; it takes a batch as the first dimension"
    )


# --- operators ------------------------------------------------------------------------------------

# An offset that is an int has a name of its own; a window is two bounds.
_LENGTHS_SCHEMA = "".join(f", Tensor? {name}=None" for name in LENGTHS)
_OPTIONS_SCHEMA = (
    ', *, bool causal=False, str align="bottom_right", SymInt? window_left=None, '
    "SymInt? window_right=None, float? softmax_scale=None, float softcap=0.0, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_kv=None, SymInt? q_position=None, "
    'SymInt? kv_position=None, str layout="bshd", SymInt? num_sms=None'
)
# A kernel reads strides, but takes only some: a compiler hands over those that it was shown.
_TAGS = (torch.Tag.needs_exact_strides,)

torch.library.define(
    "cupyflash::attention",
    f"(Tensor q, Tensor k, Tensor v{_LENGTHS_SCHEMA}{_OPTIONS_SCHEMA}) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
torch.library.define(
    "cupyflash::attention_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
    f"{_LENGTHS_SCHEMA}{_OPTIONS_SCHEMA}, bool deterministic=False)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_TAGS,
)


def _call_operator(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Any:
    """``attention`` in a graph. The operator checks its arguments when it runs."""
    if forward_ad._current_level >= 0:
        raise UnsupportedError("attention has no forward-mode derivative")
    if options.out_dtype is not None and options.out_dtype != q.dtype:
        raise TypeError(f"out_dtype: expected {q.dtype}, as q has, got {options.out_dtype}")
    left, right = (None, None) if options.window is None else options.window
    q_offset, kv_offset = options.q_offset, options.kv_offset
    result = torch.ops.cupyflash.attention(
        q,
        k,
        v,
        options.cu_seqlens_q,
        options.cu_seqlens_kv,
        options.seqused_q,
        options.seqused_kv,
        q_offset if isinstance(q_offset, Tensor) else None,
        kv_offset if isinstance(kv_offset, Tensor) else None,
        causal=options.causal,
        align=options.align,
        window_left=left,
        window_right=right,
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        max_seqlen_q=options.max_seqlen_q,
        max_seqlen_kv=options.max_seqlen_kv,
        q_position=None if isinstance(q_offset, Tensor) else q_offset,
        kv_position=None if isinstance(kv_offset, Tensor) else kv_offset,
        layout=options.layout,
        num_sms=options.num_sms,
    )
    return result if options.return_lse else result[0]


def _settings(
    lengths: tuple[Tensor | None, ...],
    *,
    window_left: int | None = None,
    window_right: int | None = None,
    q_position: int | None = None,
    kv_position: int | None = None,
    **settings: Any,
) -> tuple[Settings, list[Any]]:
    """The other way round: arguments of an operator as settings and lengths."""
    settings["window"] = (window_left, window_right)
    found: list[Any] = [*lengths] + [None] * (len(LENGTHS) - len(lengths))
    for name, position in zip(_OFFSETS, (q_position, kv_position)):
        if position is not None:
            found[LENGTHS.index(name)] = position
    return settings, found


@torch.library.impl("cupyflash::attention", ("cpu", "cuda"))
def _operate(
    q: Tensor, k: Tensor, v: Tensor, *lengths: Tensor | None, **operands: Any
) -> tuple[Tensor, Tensor]:
    return _run(q, k, v, *_settings(lengths, **operands))


@torch.library.impl("cupyflash::attention_backward", ("cpu", "cuda"))
def _operate_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *lengths: Tensor | None,
    deterministic: bool = False,
    **operands: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    saved = (q, k, v, out, lse)
    settings, found = _settings(lengths, **operands)
    return _run_backward(dout, dlse, *saved, settings, deterministic, *found)


@torch.library.register_fake("cupyflash::attention")
def _shapes(
    q: Tensor, k: Tensor, v: Tensor, *lengths: Tensor | None, layout: str = "bshd", **_: Any
) -> tuple[Tensor, Tensor]:
    # [batch, heads, seqlen], or [heads, total] of packed sequences.
    rows = q.shape[:-1] if layout == "bhsd" else (*q.shape[:-3], q.shape[-2], q.shape[-3])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(rows, dtype=lse_dtype)


@torch.library.register_fake("cupyflash::attention_backward")
def _shapes_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:])
    ctx.operands = keyword_only_inputs


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    nothing = (None,) * len(LENGTHS)
    if dout is None and dlse is None:
        return (None, None, None, *nothing)
    kept = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(kept[3])
    grads = torch.ops.cupyflash.attention_backward(
        *(dout, dlse, *kept),
        **ctx.operands,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return (*grads, *nothing)


torch.library.register_autograd("cupyflash::attention", _differentiate, setup_context=_remember)
torch.library.register_autograd("cupyflash::attention_backward", _refuse_second_derivative)
for _name in ("cupyflash::attention", "cupyflash::attention_backward"):
    torch.library.register_vmap(_name, _refuse_vmap)
