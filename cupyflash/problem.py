"""The attention problem as validated, frozen data.

``make_problem`` is the one place where shapes, dtypes, strides and values are checked. What it
returns is printable, hashable and says nothing about how the problem will be solved.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

from cupyflash.tensor import Device, DeviceKind, DType, TensorView, contiguous_strides

UNBOUNDED = 1 << 30
"""A diagonal of scores beyond all others: the mask of a kernel hides nothing up to it."""

FAR = 1 << 62
"""The same before what only the device knows is added."""

MAX_SEQLEN = 1 << 29
"""Longest sequence: a query's position plus a diagonal must fit 32 bits."""

ALIGNMENT = 16
"""Bytes: vector loads, cp.async and TMA move 16 at a time, from addresses that are multiples."""

ALIGNS = ("bottom_right", "top_left")
LAYOUTS = ("bshd", "bhsd")


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: j is visible to i iff i + shift - left <= j <= i + shift + right.

    ``shift`` depends on the lengths (``Problem.shift``): with ``align="bottom_right"`` the last
    query and the last key stand at the same position, with ``"top_left"`` the first ones do. None
    means no bound on that side. Without any bound every query sees every key.
    """

    left: int | None = None
    right: int | None = None
    align: str = "bottom_right"

    def __post_init__(self) -> None:
        if self.align not in ALIGNS:
            raise ValueError(f"align: expected one of {ALIGNS}, got {self.align!r}")
        for name, bound in (("window left", self.left), ("window right", self.right)):
            if bound is not None and not 0 <= bound < 2**31:
                raise ValueError(
                    f"{name}: expected a count of keys in [0, 2**31), got {bound}; "
                    "use None for no bound"
                )

    @classmethod
    def resolve(
        cls,
        causal: bool = False,
        window: Sequence[int | None] | None = None,
        align: str = "bottom_right",
    ) -> Mask:
        """The mask of the public arguments: ``causal`` adds the bound right = 0 to ``window``."""
        if not isinstance(causal, (bool, numpy.bool_)):
            raise TypeError(f"causal: expected a bool, got {type(causal).__name__}")
        left = right = None
        if window is not None:
            if isinstance(window, (str, bytes)) or not (
                isinstance(window, Sequence) or getattr(window, "ndim", 0) == 1
            ):
                raise TypeError(
                    f"window: expected a pair (left, right) of counts or None, got {window!r}"
                )
            if len(window) != 2:
                raise ValueError(f"window: expected a pair (left, right), got {window!r}")
            left, right = (
                None if bound is None else as_int(f"window[{position}]", bound, "int or None")
                for position, bound in enumerate(window)
            )
        if causal:
            right = 0 if right is None or right >= 0 else right
        return cls(left=left, right=right, align=align)


@dataclass(frozen=True)
class OperandScale:
    """What shares a scale in an operand of 8-bit floats.

    Attributes:
        kind: "none" (every scale is 1), "tensor", "head" (of one sequence), "block" of tokens,
            "token".
        tokens: of a block, 64 or 128; 1 for a token; otherwise 0.
    """

    kind: str = "none"
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.tokens} tokens" if self.kind == "block" else self.kind


@dataclass(frozen=True)
class Scaling:
    """How operands of 8-bit floats are scaled and stored: value = data * scale.

    Attributes:
        q, k, v: what shares a scale.
        v_slot: tokens of a slot of v, 64 or 128, where it is stored transposed as ``quantize``
            stores it (``fp8.Arrangement``); 0 where it is row-major.
        out: whether the output has a scale: out = data * scale.
    """

    q: OperandScale = OperandScale()
    k: OperandScale = OperandScale()
    v: OperandScale = OperandScale()
    v_slot: int = 0
    out: bool = False

    def __str__(self) -> str:
        scales = ", ".join(f"{name} {getattr(self, name)}" for name in ("q", "k", "v"))
        stored = f", v transposed in slots of {self.v_slot}" if self.v_slot else ""
        return f"scales: {scales}{stored}" + ", out scaled" * self.out


@dataclass(frozen=True)
class DeviceInfo:
    """What choosing a kernel needs to know about a GPU.

    Attributes:
        name: as the driver gives it.
        capability: compute capability, such as (9, 0).
        num_sms: number of multiprocessors.
        shared_memory_per_block: largest dynamic shared memory a block may opt in to, in bytes.
        l2_bytes: size of the L2 cache.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_memory_per_block: int
    l2_bytes: int


@dataclass(frozen=True)
class Problem:
    """One attention forward, validated.

    Attributes:
        batch: number of independent sequences.
        seqlen_q: queries of each, or of the longest.
        seqlen_kv: keys of each, or of the longest.
        heads_q: query heads; a multiple of ``heads_kv``.
        heads_kv: key and value heads.
        head_dim_qk: elements of a query and of a key.
        head_dim_v: elements of a value and of an output row.
        dtype: element type of q, k and v.
        mask: visible keys.
        softmax_scale: factor on q . k before the softmax; None at construction means
            head_dim_qk ** -0.5.
        want_lse: whether log-sum-exp is an output.
        position_offset: q_offset - kv_offset, added to the mask's shift.
        out_dtype: element type of the output; None at construction means ``dtype``.
        num_sms: how many multiprocessors the kernel may use; None means all.
        clusters: whether a kernel may be launched as clusters of blocks.
        softcap: c > 0: scores s become c * tanh(s / c); 0 for none.
        lengths: which of ``params.DEVICE_LENGTHS`` the kernel reads on the device.
        rows_q, rows_kv: extents of the arrays along seqlen: the totals of packed sequences. None at
            construction means seqlen_q, seqlen_kv.
        unaligned: (tensor, reason) for each of q, k, v, out that breaks the 16-byte rule: base
            address and every stride a multiple of 16 bytes, last stride 1.
        no_tma: (tensor, reason) for each that TMA cannot address: the above, and also negative or
            zero strides and extents beyond its fields.
        no_ragged: (tensor, reason) for each that TMA cannot address for a general kernel.
        scaling: how q, k and v are scaled where they are 8-bit floats; None for other types.
    """

    batch: int
    seqlen_q: int
    seqlen_kv: int
    heads_q: int
    heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    dtype: DType
    mask: Mask = Mask()
    softmax_scale: float | None = None
    want_lse: bool = False
    position_offset: int = 0
    out_dtype: DType | None = None
    num_sms: int | None = None
    clusters: bool = True
    softcap: float = 0.0
    lengths: tuple[str, ...] = ()
    rows_q: int | None = None
    rows_kv: int | None = None
    unaligned: tuple[tuple[str, str], ...] = ()
    no_tma: tuple[tuple[str, str], ...] = ()
    no_ragged: tuple[tuple[str, str], ...] = ()
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if self.softmax_scale is None:
            object.__setattr__(self, "softmax_scale", self.head_dim_qk**-0.5)
        if self.out_dtype is None:
            object.__setattr__(self, "out_dtype", self.dtype)
        if self.rows_q is None:
            object.__setattr__(self, "rows_q", self.seqlen_q)
        if self.rows_kv is None:
            object.__setattr__(self, "rows_kv", self.seqlen_kv)

    @property
    def is_empty(self) -> bool:
        """Whether the output has no rows."""
        rows = self.rows_q if self.is_packed else self.batch * self.seqlen_q
        return rows == 0 or self.heads_q == 0

    @property
    def is_packed(self) -> bool:
        """Whether sequences lie one behind the other along one dimension."""
        return "cu_seqlens_q" in self.lengths

    @property
    def is_general(self) -> bool:
        """Whether it takes a general kernel: one that reads lengths on the device and caps
        scores."""
        return bool(self.lengths) or self.softcap != 0

    @property
    def group(self) -> int:
        """Query heads that share one key and value head (at least 1)."""
        return max(self.heads_q // self.heads_kv, 1) if self.heads_kv else 1

    @property
    def shift(self) -> int:
        """Position of query 0 on the axis of keys, as an unlimited integer."""
        aligned = self.seqlen_kv - self.seqlen_q if self.mask.align == "bottom_right" else 0
        return aligned + self.position_offset

    @property
    def mask_left(self) -> int:
        """The first visible diagonal j - i; -UNBOUNDED when it hides no key of any query. What the
        device adds to it (``lengths``) is left out."""
        left = self.mask.left
        if self.lengths:
            return -FAR if left is None else max(-FAR, min(FAR, self.position_offset - left))
        if left is None or self.seqlen_q - 1 + self.shift - left <= 0:
            return -UNBOUNDED
        return max(-UNBOUNDED, min(UNBOUNDED, self.shift - left))

    @property
    def mask_right(self) -> int:
        """The last visible diagonal j - i; UNBOUNDED when it hides no key of any query."""
        right = self.mask.right
        if self.lengths:
            return FAR if right is None else max(-FAR, min(FAR, self.position_offset + right))
        if right is None or self.shift + right >= self.seqlen_kv - 1:
            return UNBOUNDED
        return max(-UNBOUNDED, min(UNBOUNDED, self.shift + right))

    @property
    def mask_kind(self) -> str:
        """ "none", "causal" (a right bound only) or "window" (a left bound): which bounds may hide
        any key of this problem. One decoding query under a causal mask is "none"; general kernels
        have no kind "none", one with a bound that hides nothing does as well."""
        if self.mask_left > -UNBOUNDED if not self.lengths else self.mask.left is not None:
            return "window"
        if self.mask_right < UNBOUNDED if not self.lengths else self.mask.right is not None:
            return "causal"
        return "causal" if self.is_general else "none"

    def why_no_tma(self, tensor: str) -> str | None:
        """Why TMA cannot address this one of "q", "k", "v", "out"; None when it can."""
        return dict(self.no_ragged if self.is_general else self.no_tma).get(tensor)

    def why_unaligned(self, tensor: str) -> str | None:
        """Which part of the 16-byte rule this tensor breaks; None when it keeps it."""
        return dict(self.unaligned).get(tensor)


def as_int(name: str, value: object, expected: str = "int") -> int:
    """``value`` as a Python int, without rounding and without touching a device."""
    if isinstance(value, numpy.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, numpy.bool_)) or not isinstance(
        value, (numbers.Integral, numpy.integer)
    ):
        raise TypeError(f"{name}: expected {expected}, got {_describe(value)}")
    return int(value)


def as_float(name: str, value: object) -> float:
    """``value`` as a finite Python float; a scalar that lives on a device is a TypeError."""
    if isinstance(value, numpy.ndarray) and value.ndim == 0:
        value = value[()]
    if type(value).__module__ == "ml_dtypes" and isinstance(value, numpy.generic):
        value = value.astype(numpy.float64)  # bfloat16 and the like are no numpy.floating
    if isinstance(value, (bool, numpy.bool_)) or not isinstance(
        value, (numbers.Real, numpy.floating, numpy.integer)
    ):
        on_device = hasattr(value, "__dlpack__")
        why = "; reading a device scalar would stop the host" if on_device else ""
        raise TypeError(f"{name}: expected a number known to the host, got {_describe(value)}{why}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {number}")
    if abs(number) > 3.4028234663852886e38:
        raise ValueError(f"{name}: {number} does not fit float32")
    return number


def _describe(value: object) -> str:
    if isinstance(value, (bool, numpy.bool_)):
        return f"bool {value}"
    module = type(value).__module__.partition(".")[0]
    name = type(value).__qualname__
    return f"{name}" if module == "builtins" else f"{module}.{name}"


def make_problem(
    q: TensorView,
    k: TensorView,
    v: TensorView,
    *,
    mask: Mask = Mask(),
    softmax_scale: float | None = None,
    want_lse: bool = False,
    position_offset: int = 0,
    out: TensorView | None = None,
    num_sms: int | None = None,
    layout: str = "bshd",
    softcap: float = 0.0,
    lengths: tuple[str, ...] = (),
    packed: tuple[int, int, int] | None = None,
    out_dtype: DType | None = None,
    scaling: Scaling | None = None,
) -> Problem:
    """Validates views in [batch, seqlen, heads, head_dim] order and returns their Problem.

    Args:
        q, k, v: the inputs, dimensions in bshd order whatever the caller's layout.
        mask: visible keys.
        softmax_scale: None means head_dim_qk ** -0.5.
        want_lse: whether the log-sum-exp is wanted.
        position_offset: q_offset - kv_offset.
        out: the caller's output; None when we allocate a contiguous one.
        num_sms: limit on multiprocessors.
        layout: how the caller ordered dimensions; used to word messages only.
        softcap: 0 for none.
        lengths: arrays that the kernel reads on the device.
        packed: number of packed sequences, bounds of their queries and keys; None: not packed.
        out_dtype: element type of the output; None means q's.
        scaling: of 8-bit floats. The strides of a transposed v along tokens are 1 then.

    Raises:
        TypeError: dtypes or devices that do not go together.
        ValueError: shapes, strides or values that do not.
    """
    inputs = {"q": q, "k": k, "v": v}
    for name, view in inputs.items():
        _check_rank(name, view, layout)
    _check_devices(inputs if out is None else {**inputs, "out": out})
    _check_dtypes(q, k, v)
    _check_shapes(q, k, v, layout)
    stored = dict(inputs)
    if scaling is not None and scaling.v_slot:
        stored["v"] = v.permuted((0, 3, 2, 1))  # its rows are tokens of one channel
    for name, view in stored.items():
        _check_last_stride(name, view, layout)
    batch, seqlen_q, heads_q, head_dim_qk = q.shape
    _, seqlen_kv, heads_kv, head_dim_v = v.shape
    out_shape = (batch, seqlen_q, heads_q, head_dim_v)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    if out is not None:
        _check_out(out, out_shape, out_dtype, inputs, layout)
    planned_out = out or TensorView(
        0, out_shape, _own_strides(out_shape, layout), out_dtype, q.device
    )
    tensors = {**stored, "out": planned_out}
    rows_q, rows_kv = seqlen_q, seqlen_kv
    if packed is not None:
        batch, longest_q, longest_kv = packed
        seqlen_q, seqlen_kv = min(longest_q, rows_q), min(longest_kv, rows_kv)
    return Problem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
        dtype=q.dtype,
        mask=mask,
        softmax_scale=None if softmax_scale is None else as_float("softmax_scale", softmax_scale),
        want_lse=want_lse,
        position_offset=position_offset,
        out_dtype=out_dtype,
        num_sms=num_sms,
        softcap=softcap,
        lengths=lengths,
        rows_q=rows_q,
        rows_kv=rows_kv,
        unaligned=_reasons(tensors, alignment_fault),
        no_tma=_reasons(tensors, tma_fault),
        no_ragged=_reasons(tensors, ragged_fault) if lengths or softcap else (),
        scaling=scaling,
    )


def to_bshd(view: TensorView, layout: str) -> TensorView:
    """A 4-dimensional view with its dimensions in [batch, seqlen, heads, head_dim] order."""
    return view.permuted((0, 2, 1, 3)) if layout == "bhsd" and view.ndim == 4 else view


def alignment_fault(view: TensorView) -> str | None:
    """Which part of the 16-byte rule ``view`` breaks, in words; None when it keeps it."""
    if view.pointer % ALIGNMENT:
        return f"base address {view.pointer:#x} is not a multiple of {ALIGNMENT} bytes"
    for extent, stride, dimension in zip(view.shape, view.strides, _DIMENSIONS[:-1]):
        stride_bytes = stride * view.dtype.itemsize
        if extent > 1 and stride_bytes % ALIGNMENT:
            return f"{dimension} stride of {stride_bytes} bytes is not a multiple of {ALIGNMENT}"
    return None


def tma_fault(view: TensorView) -> str | None:
    """Why a tensor map cannot describe ``view``, in words; None when it can.

    The rules are cuTensorMapEncodeTiled's: strides are unsigned multiples of 16 below 2**40 bytes,
    extents at most 2**32. A zero stride (a broadcast dimension) is not documented and not used.
    """
    fault = alignment_fault(view)
    if fault is not None:
        return fault
    for extent, stride, dimension in zip(view.shape, view.strides, _DIMENSIONS[:-1]):
        stride_bytes = stride * view.dtype.itemsize
        if extent > 1 and not 0 < stride_bytes < 1 << 40:
            return f"{dimension} stride of {stride_bytes} bytes is not in (0, 2**40)"
    return None


def ragged_fault(view: TensorView) -> str | None:
    """Why no ragged map (Note [Ragged maps] in ``kernels_cu/attn/ragged.cuh``) can describe
    ``view``, in words; None when one can."""
    fault = tma_fault(view)
    if fault is not None:
        return fault
    by_row, batch_rows = ragged_strides(view)
    if batch_rows is None:
        return f"batch stride is not a multiple of the seqlen stride of {by_row} bytes"
    if by_row >= 1 << 34:
        return f"seqlen stride of {by_row} bytes is not below 2**34"
    if (view.shape[0] - 1) * batch_rows + 2 * view.shape[1] >= 1 << 31:
        return "batch and seqlen reach beyond 2**31 rows"
    return None


def ragged_strides(view: TensorView) -> tuple[int, int | None]:
    """Bytes from row to row, and how many rows from one batch entry to the next; None for a
    fraction."""
    batch, seqlen = view.shape[:2]
    by_batch, by_row = (stride * view.dtype.itemsize for stride in view.strides[:2])
    if seqlen <= 1:
        row_bytes = -(-view.shape[3] * view.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        by_row = by_batch if batch > 1 else row_bytes
    if batch <= 1:
        return by_row, 0
    return by_row, None if by_batch % by_row else by_batch // by_row


_MAX_OVERLAP_WORK = 100_000  # candidates that NumPy tries before it gives up

_DIMENSIONS = ("batch", "seqlen", "heads", "head_dim")


def _reasons(
    tensors: dict[str, TensorView], fault: Callable[[TensorView], str | None]
) -> tuple[tuple[str, str], ...]:
    found = ((name, fault(view)) for name, view in tensors.items() if view.size)
    return tuple((name, reason) for name, reason in found if reason is not None)


def _own_strides(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Strides, in bshd order, of the contiguous output we allocate in the caller's layout."""
    batch, seqlen, heads, head_dim = shape
    if layout == "bhsd":
        by_batch, by_head, by_seqlen, one = contiguous_strides((batch, heads, seqlen, head_dim))
        return by_batch, by_seqlen, by_head, one
    return contiguous_strides(shape)


def _in_layout(values: Sequence[object], layout: str) -> str:
    order = (0, 2, 1, 3) if layout == "bhsd" and len(values) == 4 else range(len(values))
    return "[" + ", ".join(str(values[axis]) for axis in order) + "]"


def _check_rank(name: str, view: TensorView, layout: str) -> None:
    if view.ndim != 4:
        raise ValueError(
            f"{name}: expected 4 dimensions {_in_layout(_DIMENSIONS, layout)}, got "
            f"{view.ndim}: {_in_layout(view.shape, 'bshd')}"
        )


def _check_devices(views: dict[str, TensorView]) -> None:
    devices: dict[Device, list[str]] = {}
    for name, view in views.items():
        devices.setdefault(view.device, []).append(name)
    if len(devices) > 1:
        places = "; ".join(f"{', '.join(names)} on {device}" for device, names in devices.items())
        raise TypeError(f"all arrays must be on one device, got {places}")


def _check_dtypes(q: TensorView, k: TensorView, v: TensorView) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype, got q {q.dtype}, k {k.dtype}, v {v.dtype}"
        )
    floats = (DType.float16, DType.bfloat16, DType.float32, DType.float64)
    if q.dtype not in (*floats, DType.float8_e4m3fn, DType.float8_e5m2):
        raise TypeError(
            f"q, k, v: expected bfloat16 or float16 (float32 and float64 for NumPy arrays), "
            f"got {q.dtype}"
        )


def _check_shapes(q: TensorView, k: TensorView, v: TensorView, layout: str) -> None:
    batch, seqlen_q, heads_q, head_dim = q.shape
    if head_dim == 0:
        raise ValueError(f"q: head_dim must be at least 1, got {_in_layout(q.shape, layout)}")

    def mismatch(name: str, got: TensorView, expected: Sequence[object], why: str) -> ValueError:
        other = "q" if name == "k" else "k"
        return ValueError(
            f"{name}: expected shape {_in_layout(expected, layout)} to match {other}, got "
            f"{_in_layout(got.shape, layout)}; {why}"
        )

    heads_kv = k.shape[2]
    expected_k = (batch, "?", heads_kv, head_dim)
    if k.shape[3] != head_dim:
        raise mismatch("k", k, expected_k, "head_dim of q and k must be equal")
    if k.shape[0] != batch:
        raise mismatch("k", k, expected_k, "batch of q and k must be equal")
    if heads_q % heads_kv if heads_kv else heads_q:
        why = "heads of q must be a multiple of the heads of k and v"
        raise mismatch("k", k, (batch, "?", f"a divisor of {heads_q}", head_dim), why)
    expected_v = (batch, k.shape[1], heads_kv, "?")
    for axis, label in ((0, "batch"), (1, "seqlen"), (2, "heads")):
        if v.shape[axis] != k.shape[axis]:
            raise mismatch("v", v, expected_v, f"{label} of k and v must be equal")
    if v.shape[3] == 0:
        raise ValueError(f"v: head_dim must be at least 1, got {_in_layout(v.shape, layout)}")
    for name, length in (("q", seqlen_q), ("k", k.shape[1])):
        if length > MAX_SEQLEN:
            raise ValueError(f"{name}: seqlen is at most 2**29, got {length}")


def _check_last_stride(name: str, view: TensorView, layout: str) -> None:
    if view.device.kind is DeviceKind.cpu:
        return  # NumPy reads any strides
    if view.size and view.shape[-1] > 1 and view.strides[-1] != 1:
        raise ValueError(
            f"{name}: the last dimension must be contiguous (stride 1), got strides "
            f"{_in_layout(view.strides, layout)} in elements; pass a contiguous copy or name the "
            "right layout"
        )


def _check_out(
    out: TensorView,
    shape: tuple[int, ...],
    dtype: DType,
    inputs: dict[str, TensorView],
    layout: str,
) -> None:
    _check_rank("out", out, layout)
    if out.shape != shape:
        raise ValueError(
            f"out: expected shape {_in_layout(shape, layout)}, got {_in_layout(out.shape, layout)}"
        )
    if out.dtype != dtype:
        whose = "the dtype of q" if inputs["q"].dtype == dtype else "the out_dtype"
        raise TypeError(f"out: expected {dtype}, {whose}, got {out.dtype}")
    check_writable("out", out, inputs, layout)


def check_writable(
    name: str, written: TensorView, others: dict[str, TensorView], layout: str
) -> None:
    """Raises unless a kernel can write to ``written``, a view in bshd order of an array of the
    caller's, while it works with ``others``."""
    if written.readonly:
        raise ValueError(f"{name}: the array is read-only")
    _check_last_stride(name, written, layout)
    if _overlaps_itself(written):
        raise ValueError(
            f"{name}: elements share memory, strides {_in_layout(written.strides, layout)} for "
            f"shape {_in_layout(written.shape, layout)}"
        )
    for other, view in others.items():
        if _overlap(written, view):
            raise ValueError(f"{name}: shares memory with {other}; attention cannot work in place")


def _overlaps_itself(view: TensorView) -> bool:
    """Whether two elements may share an address: exact for every layout made by slicing,
    transposing and broadcasting."""
    if view.size == 0:
        return False
    reach = 0
    dimensions = sorted((abs(s), n) for n, s in zip(view.shape, view.strides) if n > 1)
    for stride, extent in dimensions:
        if stride <= reach:
            return True
        reach += (extent - 1) * stride
    return False


def _overlap(first: TensorView, second: TensorView) -> bool:
    """Whether two views have an element in common; interleaved slices of one buffer do not."""
    if first.device != second.device or not first.size or not second.size:
        return False
    low_1, high_1 = first.byte_range()
    low_2, high_2 = second.byte_range()
    if high_1 <= low_2 or high_2 <= low_1:
        return False
    try:
        one, other = (numpy.asarray(_Addresses(view)) for view in (first, second))
        return numpy.shares_memory(one, other, max_work=_MAX_OVERLAP_WORK)  # type: ignore[arg-type]
    except numpy.exceptions.TooHardError:
        return True


class _Addresses:
    """Lets NumPy reason about addresses; the memory itself is never read."""

    def __init__(self, view: TensorView) -> None:
        itemsize = view.dtype.itemsize
        self.__array_interface__ = {
            "data": (view.pointer, True),
            "shape": view.shape,
            "strides": tuple(stride * itemsize for stride in view.strides),
            "typestr": f"|V{itemsize}",
            "version": 3,
        }
