"""The public functions.

``attention`` has two ways. The long one turns arguments into a ``Problem``, chooses a kernel and
settles a ``Plan``; everything that can be wrong is found there. The short one serves a CuPy or
PyTorch call whose shapes, strides, types and options have been seen before: it finds the plan in a
dictionary, allocates the outputs and launches.
"""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from cupyflash import arrays
from cupyflash.arguments import Options, options_of, resolve
from cupyflash.arrays import Array
from cupyflash.cache import default_cache
from cupyflash.driver import default_driver
from cupyflash.errors import UnsupportedError
from cupyflash.fp8 import Quantized
from cupyflash.gradients import resolve_backward, run_backward
from cupyflash.launch import EmulatedBackend, forward_launch, load_kernel, prepare
from cupyflash.merging import merge_on_device
from cupyflash.params import DEVICE_LENGTHS, FORWARD
from cupyflash.quantizing import resolve_quantize, run_quantize
from cupyflash.schedule import describe_work
from cupyflash.select import explain as explain_choice
from cupyflash.select import select
from cupyflash.serve import (
    NO_LENGTHS,
    allocate,
    backend_of,
    describe_on_host,
    lookup,
    run_on_device,
    run_on_host,
    with_lengths,
)
from cupyflash.tensor import DeviceKind, DType, TensorView


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    align: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    seqused_q: Array | None = None,
    seqused_kv: Array | None = None,
    q_offset: int | Array | None = None,
    kv_offset: int | Array | None = None,
    q_scale: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    layout: str = "bshd",
    out: Array | None = None,
    out_dtype: Any = None,
    out_scale: Array | None = None,
    return_lse: bool = False,
    num_sms: int | None = None,
    stream: Any = None,
) -> Any:
    r"""Exact scaled dot-product attention.

    For every batch entry b, query i and query head h, over the keys j that the mask leaves visible,

    .. math::
        s_{ij} = \text{softmax\_scale} \cdot q_i \cdot k_j, \qquad
        \text{lse}_i = \log \sum_j e^{s_{ij}}, \qquad
        \text{out}_i = \sum_j e^{s_{ij} - \text{lse}_i} v_j .

    Query head h uses key and value head ``h // (heads_q // heads_kv)``. A query that sees no key
    gives out = 0 and lse = -inf. A key that the mask hides counts for nothing on the CPU; on a GPU
    a NaN or an infinity in its value may reach rows that do not see it (0 times NaN is NaN).

    CuPy, PyTorch, JAX, Numba and other DLPack arrays on a GPU are served by a CUDA kernel, enqueued
    on the stream that the library would use next; the call returns without waiting. NumPy arrays,
    and PyTorch and JAX arrays on the CPU, are served on the CPU. Memory beyond the outputs does not
    grow with seqlen_q * seqlen_kv on any path.

    8-bit floats (float8_e4m3fn) are numbers with scales, value = number * scale: q, k and v as
    ``quantize`` makes them, or arrays beside ``q_scale``, ``k_scale`` and ``v_scale``. They are
    computed on the CPU only so far; no GPU kernel takes them yet. They have no gradients yet.

    Args:
        q: queries, [batch, seqlen_q, heads_q, head_dim_qk], or packed [total_q, heads_q,
            head_dim_qk] with ``cu_seqlens_*``. On a GPU bfloat16 or float16; on the CPU also
            float32 and float64. The last dimension is contiguous; a GPU kernel wants the address
            and the other strides in multiples of 16 bytes. Or float8_e4m3fn, with a head_dim_qk
            that is a multiple of 16, or Quantized with the role "q".
        k: keys, [batch, seqlen_kv, heads_kv, head_dim_qk], q's dtype; heads_q is a multiple of
            heads_kv. Quantized where q is, with the role "k" and q's hadamard_seed.
        v: values, [batch, seqlen_kv, heads_kv, head_dim_v], q's dtype; as an fp8 array row-major
            as k. Quantized where q is, with the role "v".
        causal: hides the keys after the query's position (the bound right = 0).
        align: "bottom_right": the last query stands at the last key's position; "top_left": the
            first query at the first key's.
        window: (left, right), how many keys before and after the query's position are visible, not
            counting the one at it; None for no bound.
        softmax_scale: factor on q . k, a number known to the host; None means head_dim_qk ** -0.5.
        softcap: c > 0 replaces every score s by c * tanh(s / c).
        cu_seqlens_q, cu_seqlens_kv: int32 [batch + 1], where each packed sequence starts, 0 first;
            the last entry is where the last one ends. Rows behind it are 0 in an output allocated
            here, untouched in the caller's. Arrays of lengths lie beside q; a GPU kernel reads
            them when it runs, the host never does, and clamps what exceeds the arrays
            (CUPYFLASH_CHECK=1 raises instead).
        max_seqlen_q, max_seqlen_kv: upper bounds of the packed lengths; on a GPU they help to
            choose a kernel and are not needed.
        seqused_q, seqused_kv: int32 [batch], how many leading tokens of each sequence count. Rows
            past them are 0 in an output allocated here, untouched in the caller's.
        q_offset, kv_offset: positions, for the mask, of the first query and of the first key: they
            add q_offset - kv_offset to what ``align`` gives. An int, or int32 [batch].
        q_scale, k_scale, v_scale: scales of fp8 arrays, float32 beside q: [] for one, or [batch,
            heads] of the operand, for packed sequences too; on the CPU also a number. None means 1.
            Quantized operands have scales of their own.
        layout: "bshd", or "bhsd" for [batch, heads, seqlen, head_dim] arrays; Quantized is "bshd".
        out: where to write the output, [batch, seqlen_q, heads_q, head_dim_v] in ``layout``; shares
            no memory with q, k, v.
        out_dtype: dtype of the output. For fp8 inputs bfloat16 (the default, or that of ``out``),
            float16 or float8_e4m3fn; otherwise q's dtype is the only choice.
        out_scale: float32 [] beside q, on the CPU also a number, for an output of float8_e4m3fn: it
            holds out / out_scale, rounded to nearest even and saturated at 448. None means 1.
        return_lse: whether to return (out, lse).
        num_sms: GPU multiprocessors to use at most; None means all.
        stream: CUDA stream to launch on: a handle, or a stream of CuPy, PyTorch or anything with
            ``__cuda_stream__``. The caller orders it after whatever wrote the inputs. None means
            the current stream of the arrays' library.

    Returns:
        out, in the caller's array type (CuPy arrays for unknown DLPack producers on a GPU), in the
        shape and layout of q with head_dim_v as the last dimension, in q's dtype or ``out_dtype``.
        With ``return_lse`` also lse, float32 (float64 for float64 inputs), [batch, heads_q,
        seqlen_q], packed [heads_q, total_q].

    Raises:
        UnsupportedError: no kernel serves this combination; the message lists every candidate with
            the first condition that rules it out.
        ValueError: shapes, strides or values that do not go together, a read-only ``out``.
        TypeError: not an array; dtypes, devices or libraries that do not go together; a tensor with
            a forward-mode tangent, or ``out`` beside tensors that require grad.
        DriverError: a GPU array without a usable NVIDIA driver, or a failed launch.
        MissingKernelError, CompileError: the kernel is not at hand and cannot be compiled.
        RuntimeError: the kernel is not loaded yet and a CUDA graph is being captured.

    Example:
        >>> import numpy, cupyflash
        >>> q = k = numpy.zeros((1, 2, 1, 64), numpy.float16)
        >>> v = numpy.arange(2, dtype=numpy.float16).reshape(1, 2, 1, 1) * numpy.ones_like(q)
        >>> cupyflash.attention(q, k, v, causal=True)[0, :, 0, 0]
        array([0. , 0.5], dtype=float16)
        >>> quantized = [cupyflash.quantize(x, role) for role, x in zip("qkv", (q, k, v))]
        >>> cupyflash.attention(*quantized, causal=True, out_dtype="float16")[0, :, 0, 0]
        array([0. , 0.5], dtype=float16)

    References:
        Tri Dao et al., FlashAttention, 2022, arXiv:2205.14135; Tri Dao, FlashAttention-2, 2023,
        arXiv:2307.08691; Jay Shah et al., FlashAttention-3, 2024, arXiv:2407.08608.
    """
    key = None
    if (
        q_scale is None
        and k_scale is None
        and v_scale is None
        and out_dtype is None
        and out_scale is None
    ):
        lengths: tuple[Any, ...] = NO_LENGTHS
        settings: tuple[Any, ...] = (
            causal,
            align,
            window,
            softmax_scale,
            softcap,
            q_offset,
            kv_offset,
            layout,
            return_lse,
            num_sms,
        )
        if not (
            cu_seqlens_q is cu_seqlens_kv is seqused_q is seqused_kv is None
            and max_seqlen_q is max_seqlen_kv is None
            and not hasattr(q_offset, "shape")
            and not hasattr(kv_offset, "shape")
        ):
            settings, lengths = with_lengths(
                settings,
                (cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv),
                (q_offset, kv_offset),
                (max_seqlen_q, max_seqlen_kv),
            )
        key, configuration, pointers = lookup((q, k, v, out), settings, lengths)
        if configuration is not None:
            return configuration.run(pointers, (out,), stream)
    options = Options(
        causal=causal,
        align=align,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        seqused_q=seqused_q,
        seqused_kv=seqused_kv,
        q_offset=q_offset,
        kv_offset=kv_offset,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        layout=layout,
        out=out,
        out_dtype=out_dtype,
        out_scale=out_scale,
        return_lse=return_lse,
        num_sms=num_sms,
        stream=stream,
    )
    recorder = _adapters.recorder(q, k, v, options)
    if recorder is not None:
        return recorder(q, k, v, options)
    call = resolve(q, k, v, options)
    if call.adapter.kind is DeviceKind.cpu:
        return run_on_host(call)
    return run_on_device(call, key)


# Derivatives stand above this module and call it; it calls them by name.
_adapters = importlib.import_module("cupyflash.adapters")
lookup._torchdynamo_inline = _adapters.no_configuration  # type: ignore[attr-defined]


def explain(q: Array, k: Array, v: Array, **options: Any) -> str:
    """Says which kernel would serve ``attention(q, k, v, **options)``, and why no other would.

    Args:
        q, k, v, options: as for ``attention``. Nothing is computed, compiled or launched.

    Returns:
        Lines: the problem, the device, the kernel with its tile, where its cubin comes from, how
        many key blocks it visits of how many, and every other candidate with the first condition
        that ruled it out.

    Raises:
        ValueError, TypeError, UnsupportedError: as ``attention``, for arguments that are wrong or
            supported by no kernel at all.

    Example:
        >>> import numpy, cupyflash
        >>> x = numpy.zeros((1, 4, 2, 64), numpy.float16)
        >>> print(cupyflash.explain(x, x, x).splitlines()[-1])
        kernel   the CPU path: the arrays are on the CPU
    """
    call = resolve(q, k, v, options_of("explain", options))
    if call.adapter.kind is DeviceKind.cpu:
        return (
            f"problem  {describe_on_host(call)}\nkernel   the CPU path: the arrays are on the CPU"
        )
    backend = backend_of(call)
    if isinstance(backend, EmulatedBackend):
        return explain_choice(
            call.problem, backend.info, lambda spec: "built by g++, emulated", describe_work
        )
    return explain_choice(call.problem, backend.info, default_cache().locate, describe_work)


@dataclass(frozen=True, eq=False)
class RawKernel:
    """A chosen kernel for CuPy, with the arguments of one call; calling it launches it.

    Attributes:
        kernel: cupy.RawKernel of the compiled kernel.
        grid: blocks.
        block: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        args: the one argument, the packed parameter struct as numpy.void, tensor maps included.
        out, lse: the arrays that it writes; lse is None where not wanted.
        inputs: q, k, v and the arrays of lengths; ``args`` holds their addresses.
        tile_counter: int32 [1] from which blocks claim tiles, 0 between launches, or None. Launches
            of one RawKernel must not overlap.
    """

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    args: tuple[numpy.void]
    out: Array
    lse: Array | None
    inputs: tuple[Array, ...]
    tile_counter: Array | None

    def __call__(self) -> None:
        """Launches on CuPy's current stream."""
        self.kernel(self.grid, self.block, self.args, shared_mem=self.shared_bytes)


def raw_kernel(q: Array, k: Array, v: Array, **options: Any) -> RawKernel:
    """The kernel of ``attention(q, k, v, **options)`` as a ``cupy.RawKernel``, ready to launch.

    Args:
        q, k, v, options: as for ``attention``, arrays on a GPU; outputs that are not given are
            allocated, nothing is launched.

    Returns:
        RawKernel: ``raw()`` launches, and so does
        ``raw.kernel(raw.grid, raw.block, raw.args, shared_mem=raw.shared_bytes)``.

    Raises:
        TypeError: the arrays are not on a GPU.
        ValueError: the problem is empty, there is nothing to launch; or ``stream`` is given, but a
            raw kernel runs on CuPy's current stream.
        UnsupportedError: as ``attention``; also where CuPy is not installed.
        DriverError, MissingKernelError, CompileError: as ``attention``.

    Example:
        >>> raw = cupyflash.raw_kernel(q, k, v, causal=True)  # doctest: +SKIP
        >>> raw()  # doctest: +SKIP
        >>> raw.out  # doctest: +SKIP
    """
    call = resolve(q, k, v, options_of("raw_kernel", options))
    if call.adapter.kind is not DeviceKind.cuda:
        raise TypeError(f"raw_kernel: expected arrays on a GPU, got {call.adapter.library}")
    if call.problem.is_empty:
        raise ValueError("raw_kernel: the output is empty, there is nothing to launch")
    if call.stream is not None:
        raise ValueError("stream: a raw kernel runs on CuPy's current stream, choose it at launch")
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedError(f"raw_kernel: needs CuPy ({error})") from error
    device, info = call.views["q"].device, backend_of(call).info
    # CuPy launches no clusters.
    problem = dataclasses.replace(call.problem, clusters=False)
    spec = select(problem, info).spec
    with call.adapter.scope(device, None):
        out, lse = allocate(call)
    launch = forward_launch(problem, spec, info, call.views, clear_out=call.options.out is None)
    kernel = load_kernel(spec, device.index)
    counter = None
    if launch.dynamic:
        with cupy.cuda.Device(device.index):
            counter = cupy.zeros(1, numpy.int32)
    pointers = (*launch.pointers, 0 if counter is None else counter.data.ptr)
    params = default_driver().encode(prepare(kernel, launch), pointers)
    entry = default_cache().get(spec)
    with cupy.cuda.Device(device.index), tempfile.TemporaryDirectory() as scratch:
        path = entry.path
        if path is None:
            path = Path(scratch) / f"{spec.name}.cubin"
            path.write_bytes(entry.cubin)
        function = cupy.RawModule(path=str(path)).get_function(spec.name)
        function.max_dynamic_shared_size_bytes = spec.shared_bytes
    return RawKernel(
        kernel=function,
        grid=launch.grid,
        block=launch.block,
        shared_bytes=spec.shared_bytes,
        args=(numpy.frombuffer(params, FORWARD.dtype)[0],),
        out=call.adapter.give(out),
        lse=None if lse is None else call.adapter.give(lse),
        inputs=tuple(array for name, array in call.arrays.items() if name != "out"),
        tile_counter=counter,
    )


class Grads(NamedTuple):
    """Gradients of a loss with respect to q, k and v, in their shapes and dtypes."""

    dq: Array
    dk: Array
    dv: Array


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    lse: Array,
    *,
    dlse: Array | None = None,
    delta: Array | None = None,
    accumulate: bool = False,
    deterministic: bool = False,
    dout_scale: Array | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    **options: Any,
) -> Grads:
    r"""Gradients of ``attention``, by recomputing its weights from lse.

    With the scores s, the weights p_ij = exp(s_ij - lse_i) and delta_i = dout_i . out_i - dlse_i,

    .. math::
        dv_j = \sum_i p_{ij}\, dout_i, \qquad
        ds_{ij} = p_{ij} (dout_i \cdot v_j - delta_i), \qquad
        dq_i = scale \sum_j ds_{ij} k_j, \qquad
        dk_j = scale \sum_i ds_{ij} q_i,

    where a softcap c multiplies ds_ij by 1 - (s_ij / c)^2. Gradients of queries without visible
    keys, of keys that no query sees and of rows that belong to no sequence are 0; dk and dv are
    sums over the query heads that share them.

    Runs where the arrays are, as ``attention`` does. Memory beyond the results grows with seqlen_q:
    about one float32 array in the shape of q.

    Args:
        dout: gradient of the loss with respect to ``out``, in its shape and dtype, of any strides.
        q, k, v: the inputs of the forward.
        out: its result; may be None where ``delta`` is given.
        lse: its log-sum-exp, or that of a larger set of keys of which k and v are a part.
        dlse: gradient with respect to lse, in its shape, float32; None means zero.
        delta: rowsum(dout * out) - dlse, in the shape of lse, float32, where it is known already:
            for a part of the keys, that of all.
        accumulate: adds to what ``dq``, ``dk`` and ``dv`` hold in place of overwriting it.
        deterministic: fixes the order of additions, so that repeated calls agree bit for bit.
        dout_scale: scale of an fp8 ``dout``. Not supported yet.
        dq, dk, dv: where to write the gradients, in the shapes of q, k and v; all in their dtype or
            all float32 (float64 on the CPU); addresses and strides multiples of 16 bytes. Rows that
            belong to no sequence stay as they are if all three are given.
        options: those of ``attention`` that the forward was called with, ``stream`` and ``num_sms``
            too; not ``out`` and ``return_lse``.

    Returns:
        Grads: dq, dk, dv, the caller's or new ones in q's dtype and ``layout``.

    Raises:
        UnsupportedError, ValueError, TypeError, DriverError, MissingKernelError, CompileError,
            RuntimeError: as ``attention``.

    Example:
        >>> import numpy, cupyflash
        >>> x = numpy.ones((1, 2, 1, 8), numpy.float32)
        >>> out, lse = cupyflash.attention(x, x, x, causal=True, return_lse=True)
        >>> cupyflash.attention_backward(x, x, x, x, out, lse, causal=True).dv[0, :, 0, 0]
        array([1.5, 0.5], dtype=float32)

    References:
        Tri Dao, Daniel Y. Fu, Stefano Ermon, Atri Rudra, Christopher Re, FlashAttention, 2022,
        arXiv:2205.14135, appendix B.4. Tri Dao, FlashAttention-2, 2023, arXiv:2307.08691,
        algorithm 2.
    """
    if dout_scale is not None:
        raise UnsupportedError("dout_scale: scales belong to fp8 arrays, which have no gradients")
    if out is None and delta is None:
        raise TypeError("out: may be None only where delta is given")
    key = None
    get = options.get
    others = options.keys() - _REMEMBERED
    if not others or (others <= _NOT_REMEMBERED and all(get(name) is None for name in others)):
        settings: tuple[Any, ...] = (
            get("causal", False),
            get("align", "bottom_right"),
            get("window"),
            get("softmax_scale"),
            get("softcap", 0.0),
            get("q_offset"),
            get("kv_offset"),
            get("layout", "bshd"),
            None,  # attention's return_lse
            get("num_sms"),
            accumulate,
            deterministic,
        )
        lengths: tuple[Any, ...] = NO_LENGTHS
        if not options.keys().isdisjoint(_WITH_LENGTHS):
            settings, lengths = with_lengths(
                settings,
                tuple(map(get, ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv"))),
                (get("q_offset"), get("kv_offset")),
                (get("max_seqlen_q"), get("max_seqlen_kv")),
            )
        arrays_given = (q, k, v, dout, out, lse, dlse, delta, dq, dk, dv)
        key, configuration, pointers = lookup(arrays_given, settings, lengths)
        if configuration is not None:
            return Grads(*configuration.run(pointers, (dq, dk, dv), get("stream")))
    given = {"dout": dout, "out": out, "lse": lse, "dlse": dlse, "delta": delta}
    given |= {"dq": dq, "dk": dk, "dv": dv}
    grad_call = resolve_backward(
        {name: array for name, array in given.items() if array is not None},
        (q, k, v),
        options_of("attention_backward", options),
        accumulate,
        deterministic,
    )
    return Grads(*run_backward(grad_call, key))


_WITH_LENGTHS = frozenset((*DEVICE_LENGTHS, "max_seqlen_q", "max_seqlen_kv"))
_REMEMBERED = _WITH_LENGTHS | {
    *("causal", "align", "window", "softmax_scale", "softcap", "layout", "num_sms", "stream"),
}
"""Options with which a call of ``attention_backward`` may be served the short way."""

_NOT_REMEMBERED = frozenset(field.name for field in dataclasses.fields(Options)) - _REMEMBERED
"""Options that must be None for that."""


def quantize(
    x: Array,
    role: str,
    *,
    fmt: str = "e4m3",
    block: tuple[int | None, int | None] | None = (128, None),
    hadamard_seed: int | None = None,
    for_backward: bool = False,
    cu_seqlens: Array | None = None,
    layout: str = "bshd",
) -> Quantized:
    r"""Scales and rounds a tensor to 8-bit floats, in the order in which kernels read them.

    Every block of the tensor gets one float32 scale from the largest magnitude of its finite
    values, after the rotation if there is one:

    .. math::
        \text{scale} = \max(\text{amax} / 448, 2^{-126}), \qquad
        \text{data} = \text{e4m3}(x \cdot (1 / \text{scale})),

    rounded to nearest even. A block of zeros has the scale 1. An infinity becomes 448 times the
    scale, a NaN stays NaN, and neither changes the scale of its neighbours. The bits are the same
    on every device; ``cupyflash/fp8.py`` defines them. ``attention`` takes the results on the CPU;
    no GPU kernel does yet.

    Args:
        x: [batch, seqlen, heads, head_dim], or packed [total, heads, head_dim] with ``cu_seqlens``.
            bfloat16, float16, on the CPU also float32 and float64 (which is rounded to float32
            first).
        role: "q", "k", "v" or "dout": which operand of attention it will be. "v" is stored
            transposed, its tokens in another order of each sixteen (``Quantized.data``).
        fmt: "e4m3", four exponent and three fraction bits, up to 448.
        block: (tokens, channels) that share a scale, of one head: (128, None) and (64, None) for
            blocks of tokens, (1, None) for every token (role "q" only), (None, None) for all of a
            sequence. None for one scale of the whole tensor.
        hadamard_seed: 0 to 2^64 - 1: multiplies q or k with a random orthogonal matrix, signs from
            this seed and a Hadamard matrix, before it is rounded: single large channels are spread
            over all. With the same seed for both, q . k is what it was.
        for_backward: also stores the tensor the other way round (``Quantized.data_t``), which
            gradients need.
        cu_seqlens: [batch + 1] integers, where each packed sequence starts, 0 first, and where the
            last one ends; int32 beside x on a GPU. Rows behind it are 0.
        layout: "bshd", or "bhsd" for x [batch, heads, seqlen, head_dim]; the result is in the order
            of "bshd" in any case.

    Returns:
        Quantized: data and scales, arrays of x's library where x is.

    Raises:
        UnsupportedError: a format, block or element type that has no kernel.
        ValueError: shapes, strides or values that do not go together.
        TypeError: not an array, dtypes or devices that do not go together.
        DriverError, MissingKernelError, CompileError, RuntimeError: as ``attention``.

    Example:
        >>> import numpy, cupyflash
        >>> x = numpy.array([0.25, -3.5, 7, 1], numpy.float32).reshape(1, 1, 1, 4)
        >>> quantized = cupyflash.quantize(x, "q")
        >>> quantized.scale[0, 0, 0], quantized.dequantize()[0, 0, 0]
        (np.float32(0.015625), array([ 0.25, -3.5 ,  7.  ,  1.  ], dtype=float32))

    References:
        Jay Shah et al., FlashAttention-3, 2024, arXiv:2407.08608, section 3.3 (scales of blocks,
        incoherent processing, V in another order). Jerry Chee et al., QuIP, 2023, arXiv:2307.13304
        (incoherence by random orthogonal matrices).
    """
    call = resolve_quantize(*(x, role, fmt, block, hadamard_seed, for_backward, cu_seqlens, layout))
    return run_quantize(call)


def merge(outs: Sequence[Array], lses: Sequence[Array], *, return_lse: bool = False) -> Any:
    """Attention over a union of disjoint sets of keys, from attention over each.

    lse = log(sum_p exp(lse_p)) and out = sum_p exp(lse_p - lse) * out_p. A part with lse_p = -inf
    counts for nothing, whatever its out holds; where every part has it, out is 0 and lse is -inf.

    Arrays on a GPU are merged by one kernel in float32, enqueued on their library's current stream;
    the call returns without waiting.

    Args:
        outs: outputs of ``attention``, [batch, seqlen, heads, head_dim] or packed [total, heads,
            head_dim], one a set of keys. On a GPU at most 32, bfloat16, float16 or float32, of any
            strides but a contiguous last dimension (fastest where addresses and strides are
            multiples of 16 bytes); on the CPU any number, also float64.
        lses: their log-sum-exps, [batch, heads, seqlen] or [heads, total]: float32, on the CPU also
            float64.
        return_lse: whether to return (out, lse).

    Returns:
        out in the dtype of ``outs``, or (out, lse) with lse in float32 (float64 for float64 lses).

    Raises:
        UnsupportedError: float64 on a GPU.
        ValueError: no parts, more than 32 on a GPU, shapes that do not go together, or strides that
            the kernel does not read.
        TypeError: not arrays, dtypes that do not go together, or several libraries or devices.
        DriverError, MissingKernelError, CompileError, RuntimeError: as ``attention``.

    Example:
        >>> import numpy, cupyflash
        >>> one = numpy.ones((1, 1, 1, 8), numpy.float32)
        >>> lse = numpy.zeros((1, 1, 1), numpy.float32)
        >>> cupyflash.merge([one, 3 * one], [lse, lse])[0, 0, 0, 0]
        np.float32(2.0)
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge: expected as many lses as outs and at least one, got {len(outs)} outs and "
            f"{len(lses)} lses"
        )
    named = {f"outs[{index}]": part for index, part in enumerate(outs)}
    named |= {f"lses[{index}]": part for index, part in enumerate(lses)}
    adapter = arrays.adapter_for(named)
    adopted = {name: adapter.adopt(name, part) for name, part in named.items()}
    views = {name: adapter.view(name, part) for name, part in adopted.items()}
    _check_parts(views, len(outs))
    parts = list(adopted.values())
    outs, lses = parts[: len(outs)], parts[len(outs) :]
    if adapter.kind is not DeviceKind.cpu:
        return merge_on_device(adapter, outs, lses, views, return_lse)
    from cupyflash import host  # 10 ms that a GPU's first call does not pay

    out, lse = host.merge(outs, lses)
    return (adapter.give(out), adapter.give(lse)) if return_lse else adapter.give(out)


def _check_parts(views: dict[str, TensorView], num_parts: int) -> None:
    first = views["outs[0]"]
    if first.ndim not in (3, 4):
        raise ValueError(
            "outs[0]: expected [batch, seqlen, heads, head_dim] or [total, heads, head_dim], got "
            f"{list(first.shape)}"
        )
    if first.dtype not in (DType.float16, DType.bfloat16, DType.float32, DType.float64):
        raise TypeError(f"outs[0]: expected floating-point numbers, got {first.dtype}")
    *leading, seqlen, heads, _ = first.shape
    expected_lse = (*leading, heads, seqlen)
    for index in range(num_parts):
        out, lse = views[f"outs[{index}]"], views[f"lses[{index}]"]
        if out.shape != first.shape:
            raise ValueError(
                f"outs[{index}]: expected shape {list(first.shape)} like outs[0], got "
                f"{list(out.shape)}"
            )
        if out.dtype != first.dtype:
            raise TypeError(f"outs[{index}]: expected {first.dtype} like outs[0], got {out.dtype}")
        if lse.shape != expected_lse:
            raise ValueError(
                f"lses[{index}]: expected shape {list(expected_lse)}, got {list(lse.shape)}"
            )
        if lse.dtype not in (DType.float32, DType.float64):
            raise TypeError(f"lses[{index}]: expected float32 or float64, got {lse.dtype}")
