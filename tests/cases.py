"""The list of forward cases: every path that computes attention is tested on these, and only here
is a new one added.

A case is data: shapes, element type, mask, how the arrays lie in memory and what fills them. It
knows its inputs (NumPy, seeded by its name), the keyword arguments of the public call and what
those mean as mask bounds. Cases tagged EMULATED are small enough for the CPU emulator; those also
tagged WRAP are still large enough to wrap every ring of a kernel (``test_forward_emulated.py``).
"""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupyflash import Quantized, fp8, quantize, reference, reference_fp8
from cupyflash.reference_fp8 import Scaled

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

EMULATED = "emulated"
"""Runs on the emulator, in every schedule."""

RACE = "race"
"""Small enough for the emulator's race detector too."""

WRAP = "wrap"
"""At least 2 * stages + 1 blocks of keys and, for one persistent CTA, at least five work tiles:
every ring of a kernel wraps, that of the queries too."""


@dataclass(frozen=True)
class Placed:
    """An array inside a larger one that holds NaN everywhere else.

    Attributes:
        buffer: what to copy to a device.
        seqlen, head_dim: how much of it, from the front, is the array.
        layout: order of the buffer's dimensions, bshd or bhsd.
    """

    buffer: NDArray
    seqlen: int
    head_dim: int
    layout: str

    @property
    def index(self) -> tuple[slice, ...]:
        """Index that takes the array out of the buffer, on whatever device the buffer lives."""
        rows, everything = slice(0, self.seqlen), slice(None)
        middle = (rows, everything) if self.layout == "bshd" else (everything, rows)
        return (everything, *middle, slice(0, self.head_dim))

    @property
    def array(self) -> NDArray:
        """The array itself, as a view of the buffer, in the case's layout."""
        return self.buffer[self.index]

    @property
    def bshd(self) -> NDArray:
        """The same view as [batch, seqlen, heads, head_dim]."""
        return self.array if self.layout == "bshd" else self.array.transpose(0, 2, 1, 3)


@dataclass(frozen=True)
class Case:
    """One forward problem. See the module's docstring.

    Attributes:
        data: "normal"; "outliers" (a few channels and tokens 20 times larger); "large" (scores of
            several hundred); "constant" (q = k = 0: out is the mean of the visible values);
            "structured" (a constant per head plus one token in 32 scaled by 20); "dominant" (one
            key takes nearly all the weight); "negative" (every score far below zero); "rising" and
            "falling" (scores change steadily along the keys, by about 80 in all); "jump" and "drop"
            (the last, or the first, quarter of the keys scores 400 above the rest: exp overflows
            against the maximum of the others). Kernels walk the keys in either direction.
        padded: rows and columns of NaN between what belongs to the arrays.
        tags: EMULATED, RACE, WRAP.
    """

    name: str
    seqlen_q: int
    seqlen_kv: int
    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    align: str = "bottom_right"
    softmax_scale: float | None = None
    layout: str = "bshd"
    padded: bool = False
    data: str = "normal"
    tags: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Shape of the output, [batch, seqlen_q, heads_q, head_dim_v]."""
        return (self.batch, self.seqlen_q, self.heads_q, self.value_dim)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``cupyflash.attention`` that differ from its defaults."""
        options: dict[str, Any] = {}
        if self.causal:
            options["causal"] = True
        if self.window is not None:
            options["window"] = self.window
        if self.align != "bottom_right":
            options["align"] = self.align
        if self.softmax_scale is not None:
            options["softmax_scale"] = self.softmax_scale
        if self.layout != "bshd":
            options["layout"] = self.layout
        return options

    @property
    def bounds(self) -> dict[str, Any]:
        """The same in the terms of reference.py and host.py: left, right, shift, softmax_scale."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        shift = self.seqlen_kv - self.seqlen_q if self.align == "bottom_right" else 0
        return {"left": left, "right": right, "shift": shift, "softmax_scale": self.softmax_scale}

    @cached_property
    def inputs(self) -> tuple[Placed, Placed, Placed]:
        """q, k and v, the same in every process."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        q = rng.standard_normal((self.batch, self.seqlen_q, self.heads_q, self.head_dim))
        k = rng.standard_normal((self.batch, self.seqlen_kv, self.heads_kv, self.head_dim))
        v = rng.standard_normal((self.batch, self.seqlen_kv, self.heads_kv, self.value_dim))
        q, k, v = _fill(self.data, rng, q, k, v)
        return self.place(q), self.place(k), self.place(v)

    def place(self, x: NDArray) -> Placed:
        """Round [batch, seqlen, heads, head_dim] to the dtype and put it where the case says."""
        dtype = DTYPES[self.dtype]
        more_rows, more_columns = (3, 8) if self.padded else (0, 0)
        batch, seqlen, heads, head_dim = x.shape
        if self.layout == "bhsd":
            x = x.transpose(0, 2, 1, 3)
            shape = (batch, heads, seqlen + more_rows, head_dim + more_columns)
        else:
            shape = (batch, seqlen + more_rows, heads, head_dim + more_columns)
        placed = Placed(np.full(shape, np.nan, dtype), seqlen, head_dim, self.layout)
        placed.buffer[placed.index] = x.astype(dtype)
        return placed

    def nan_output(self) -> Placed:
        """An output full of NaN, placed as the inputs are."""
        return self.place(np.full(self.out_shape, np.nan))

    @cached_property
    def expected(self) -> reference.Expectation:
        """What any path must give for the inputs."""
        q, k, v = (x.bshd for x in self.inputs)
        return reference.expect(q, k, v, **self.bounds)

    def compare(self, out: NDArray, lse: NDArray | None) -> reference.Comparison:
        """Hold a result [batch, seqlen_q, heads_q, head_dim_v] against the reference."""
        return self.expected.compare(out, lse)

    @cached_property
    def gradients(self) -> tuple[Placed, NDArray]:
        """Gradients of a loss with respect to out and lse, for the backward pass; normal, and NaN
        in the rows of out that see no key: what they hold must not matter."""
        rng = np.random.default_rng(zlib.crc32(f"{self.name} backward".encode()))
        dlse = 0.1 * rng.standard_normal(self.expected.lse.shape)
        dout = rng.standard_normal(self.out_shape)
        dout[np.isneginf(self.expected.lse.transpose(0, 2, 1))] = np.nan
        return self.place(dout), dlse.astype(self.row_dtype)

    @property
    def row_dtype(self) -> type:
        """Of lse and dlse."""
        return np.float64 if self.dtype == "float64" else np.float32

    @cached_property
    def forward_results(self) -> tuple[Placed, NDArray]:
        """out and lse as a right forward gives them."""
        return self.place(self.expected.out), self.expected.lse.astype(self.row_dtype)

    @cached_property
    def expected_grads(self) -> reference.GradExpectation:
        """What any path must give for the inputs and ``gradients``."""
        dout, dlse = self.gradients
        q, k, v = (x.bshd for x in self.inputs)
        return reference.expect_backward(dout.bshd, q, k, v, dlse=dlse, **self.bounds)


def _fill(
    data: str, rng: np.random.Generator, q: NDArray, k: NDArray, v: NDArray
) -> tuple[NDArray, NDArray, NDArray]:
    """Turn normal q, k, v into the kind of data that a case asks for."""
    if data == "normal":
        return q, k, v
    if data == "constant":
        return q * 0, k * 0, v
    if data == "outliers":
        for x in (q, k, v):
            x[..., ::17] *= 20
        q[:, ::29] *= 4
        return q, k, v
    if data == "large":
        return q * 16, k * 16, v
    if data == "structured":
        for x in (q, k):
            x += 8 * rng.standard_normal((1, 1, x.shape[2], 1))
            x[:, ::32] *= 20
        return q, k, v
    if data == "dominant":
        direction = rng.standard_normal(q.shape[3])
        q += direction
        k[:, k.shape[1] // 2] = 4 * direction
        return q, k, v
    if data == "negative":
        direction = rng.standard_normal(q.shape[3])
        return q * 0.5 + 3 * direction, k * 0.5 - 3 * direction, v
    if data in ("rising", "falling", "jump", "drop"):
        direction = rng.standard_normal(q.shape[3])
        direction /= np.linalg.norm(direction)
        place = np.arange(k.shape[1]) / max(1, k.shape[1])
        if data in ("falling", "drop"):
            place = place[::-1]
        height = 80 * place if data in ("rising", "falling") else 400 * (place >= 0.75)
        across = np.sqrt(q.shape[3])  # what the default softmax_scale takes away
        along = (height / 16 * across)[None, :, None, None]
        return q * 0.5 + 16 * direction, k * 0.5 + along * direction, v
    raise ValueError(f"data: {data!r}")


def _emulated(name: str, seqlen_q: int, seqlen_kv: int, *tags: str, **fields: Any) -> Case:
    return Case(name, seqlen_q, seqlen_kv, tags=frozenset((EMULATED, *tags)), **fields)


# Few distinct (dtype, padded head_dim, kind of mask): each is one more g++ build a family.
_EMULATED = (
    # -- bfloat16, head_dim 64, no mask
    _emulated("ring_wraps", 260, 700, WRAP, heads_q=3),
    _emulated("falling_ring_wraps", 260, 700, WRAP, heads_q=3, data="falling"),
    _emulated("one_tile", 64, 64, RACE),
    _emulated("ragged_tiles", 200, 333, RACE, padded=True),
    _emulated("one_key", 70, 1, RACE),
    _emulated("one_query", 1, 390, heads_q=4, heads_kv=2, padded=True),
    _emulated("no_keys", 5, 0, heads_q=2),
    _emulated("no_queries", 0, 5),
    _emulated("keys_end_one_past_a_block", 65, 129, batch=2, padded=True),
    _emulated("odd_group", 40, 150, heads_q=6, heads_kv=2, layout="bhsd", padded=True),
    _emulated("mqa", 33, 100, batch=2, heads_q=5),
    _emulated("mean_of_values", 64, 300, data="constant"),
    _emulated("outliers", 128, 300, data="outliers"),
    _emulated("large_scores", 64, 300, data="large"),
    _emulated("negative_scores", 64, 300, data="negative"),
    _emulated("rising_scores", 64, 600, data="rising"),
    _emulated("falling_scores", 300, 600, RACE, heads_q=2, data="falling"),
    _emulated("jump_in_scores", 64, 600, data="jump"),
    _emulated("drop_in_scores", 64, 600, data="drop"),
    _emulated("many_tiles_of_one_block", 600, 100, heads_q=2),
    _emulated("scale_given", 64, 100, softmax_scale=0.03),
    _emulated("head_dim_8", 70, 140, head_dim=8),
    _emulated("head_dim_40", 70, 140, head_dim=40, padded=True),
    # -- bfloat16, head_dim 64, causal
    _emulated("causal_ring_wraps", 400, 700, WRAP, heads_q=3, causal=True),
    _emulated("causal_falling_ring_wraps", 400, 700, WRAP, heads_q=3, causal=True, data="falling"),
    _emulated("causal_square", 200, 200, RACE, causal=True, padded=True),
    _emulated("causal_more_queries_than_keys", 300, 40, RACE, causal=True),
    _emulated("causal_more_keys_than_queries", 40, 300, causal=True, heads_q=2),
    _emulated("causal_top_left", 150, 300, causal=True, align="top_left"),
    _emulated("causal_top_left_more_queries", 300, 150, causal=True, align="top_left"),
    _emulated("right_bound_only", 150, 150, window=(None, 9)),
    _emulated("causal_dominant_key", 130, 260, causal=True, data="dominant"),
    _emulated("causal_long_ring_wraps", 400, 1700, WRAP, heads_q=3, causal=True),
    _emulated("causal_long", 200, 1600, RACE, causal=True, padded=True),
    _emulated("causal_pairs_ring_wrap", 400, 700, WRAP, heads_q=8, heads_kv=2, causal=True),
    _emulated("causal_pairs", 200, 300, RACE, heads_q=4, heads_kv=2, causal=True, padded=True),
    _emulated("causal_pairs_no_keys", 300, 40, RACE, heads_q=4, heads_kv=2, causal=True),
    # -- bfloat16, head_dim 64, window
    _emulated("window_ring_wraps", 400, 900, WRAP, heads_q=3, window=(650, 40)),
    _emulated("window_narrow", 300, 300, RACE, window=(3, 1), padded=True),
    _emulated("window_of_one", 140, 140, window=(0, 0)),
    _emulated("window_causal", 140, 300, causal=True, window=(70, None)),
    _emulated("window_left_only", 140, 300, window=(20, None)),
    _emulated("window_hides_whole_rows", 400, 60, window=(15, 15)),
    _emulated("window_top_left", 60, 400, window=(15, 15), align="top_left"),
    # -- other element types and widths
    _emulated(
        "f16_d128_causal", 260, 680, WRAP, dtype="float16", head_dim=128, heads_q=3, causal=True
    ),
    _emulated("f16_d104_causal", 40, 200, dtype="float16", head_dim=104, causal=True, padded=True),
    _emulated("f16_d128_jump", 40, 300, dtype="float16", head_dim=128, causal=True, data="jump"),
    _emulated("f16_d128_drop", 40, 300, dtype="float16", head_dim=128, causal=True, data="drop"),
    _emulated(
        "f16_d128_rising", 40, 300, dtype="float16", head_dim=128, causal=True, data="rising"
    ),
    _emulated(
        "f16_d128_falling", 40, 300, dtype="float16", head_dim=128, causal=True, data="falling"
    ),
    _emulated("d128", 140, 300, RACE, head_dim=128, heads_q=2),
    _emulated("d96", 140, 300, RACE, head_dim=96),
    _emulated("d72", 70, 200, head_dim=72, padded=True),
    _emulated("d192_causal", 140, 300, head_dim=192, causal=True),
    _emulated("d136_causal", 70, 200, head_dim=136, causal=True, padded=True),
    _emulated("f16_d256_ring_wraps", 260, 480, WRAP, dtype="float16", head_dim=256, heads_q=3),
    _emulated("f16_d256", 140, 300, dtype="float16", head_dim=256),
    _emulated("f16_d200", 70, 200, dtype="float16", head_dim=200, padded=True),
)

_HEAD_DIMS = tuple(
    Case(
        f"head_dim_{head_dim}_{kind}",
        210,
        331,
        batch=2,
        heads_q=3,
        head_dim=head_dim,
        # Alternate, so that either type meets every padded width with and without a mask.
        dtype="float16" if (head_dim // 8 + (kind == "causal")) % 2 else "bfloat16",
        causal=kind == "causal",
        padded=head_dim % 16 == 8,
    )
    for head_dim in range(8, 257, 8)
    for kind in ("full", "causal")
)

_LENGTHS = tuple(
    Case(
        f"lengths_{seqlen_q}_{seqlen_kv}_{kind}",
        seqlen_q,
        seqlen_kv,
        heads_q=2,
        heads_kv=1,
        dtype=dtype,
        causal=kind != "full",
        align="top_left" if kind == "top_left" else "bottom_right",
        head_dim=head_dim,
        padded=True,
    )
    for seqlen_q, seqlen_kv, head_dim, dtype in (
        (1, 1, 64, "bfloat16"),
        (1, 1023, 128, "float16"),
        (2, 4097, 128, "bfloat16"),
        (17, 64, 64, "float16"),
        (63, 65, 64, "bfloat16"),
        (128, 128, 128, "bfloat16"),
        (129, 127, 128, "float16"),
        (257, 1, 64, "bfloat16"),
        (513, 100, 96, "bfloat16"),
        (700, 701, 128, "bfloat16"),
        (1000, 1, 128, "float16"),
        (1025, 1537, 64, "float16"),
    )
    for kind in ("full", "causal", "top_left")
)

_WINDOWS = tuple(
    Case(
        f"window_{left}_{right}_{seqlen_q}_{seqlen_kv}",
        seqlen_q,
        seqlen_kv,
        heads_q=2,
        head_dim=head_dim,
        window=(left, right),
    )
    for seqlen_q, seqlen_kv, head_dim in ((400, 400, 128), (300, 700, 64), (600, 130, 128))
    for left, right in (
        (0, 0),
        (1, 0),
        (0, 1),
        (127, 0),
        (128, 128),
        (200, None),
        (None, 50),
        (1000, 1000),
    )
)

_HEADS = tuple(
    Case(
        f"heads_{heads_q}_{heads_kv}_{layout}",
        150,
        260,
        batch=2 if heads_q <= 16 else 1,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=128,
        causal=True,
        layout=layout,
    )
    for heads_q, heads_kv in ((1, 1), (4, 4), (6, 2), (8, 1), (16, 2), (15, 5), (7, 1), (71, 1))
    for layout in ("bshd", "bhsd")
)

_DATA = tuple(
    Case(
        f"data_{data}_{dtype}_{head_dim}",
        300,
        500,
        heads_q=2,
        head_dim=head_dim,
        dtype=dtype,
        causal=head_dim != 64,
        data=data,
    )
    for data in (
        "constant",
        "outliers",
        "large",
        "structured",
        "dominant",
        "negative",
        "rising",
        "falling",
        "jump",
        "drop",
    )
    for dtype in ("float16", "bfloat16")
    for head_dim in (64, 128, 256)
)

_OTHER = (
    Case("value_dim_smaller", 300, 300, batch=2, heads_q=2, head_dim=192, head_dim_v=128),
    Case("value_dim_smaller_causal", 300, 300, head_dim=192, head_dim_v=128, causal=True),
    Case("batch_many", 70, 90, batch=40, heads_q=4, heads_kv=2, causal=True),
    Case("empty_batch", 70, 90, batch=0),
    Case("two_thousand", 2048, 2048, heads_q=2, head_dim=128, causal=True),
)

FORWARD: tuple[Case, ...] = (
    *_EMULATED,
    *_HEAD_DIMS,
    *_LENGTHS,
    *_WINDOWS,
    *_HEADS,
    *_DATA,
    *_OTHER,
)


# --- general problems: lengths on the device, offsets of each sequence, capped scores -------------


@dataclass(frozen=True)
class GeneralCase:
    """One forward problem whose sequences differ.

    Attributes:
        lens_q, lens_kv: rows of each sequence in the arrays; all equal unless ``packed``.
        packed: whether the arrays are packed, with ``cu_seqlens_*``.
        used_q, used_kv: ``seqused_*``, or None. Rows past them are NaN.
        q_offset, kv_offset: one a sequence, one for all, or None.
        extra: packed rows behind the last sequence, NaN.
        hints: whether ``max_seqlen_*`` are given.
    """

    name: str
    lens_q: tuple[int, ...]
    lens_kv: tuple[int, ...]
    packed: bool = True
    used_q: tuple[int, ...] | None = None
    used_kv: tuple[int, ...] | None = None
    q_offset: tuple[int, ...] | int | None = None
    kv_offset: tuple[int, ...] | int | None = None
    heads_q: int = 2
    heads_kv: int = 1
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    align: str = "bottom_right"
    softcap: float = 0.0
    extra: int = 5
    hints: bool = False
    data: str = "normal"
    tags: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def batch(self) -> int:
        return len(self.lens_q)

    @property
    def _used(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.used_q or self.lens_q, self.used_kv or self.lens_kv

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments but for the arrays of lengths."""
        options: dict[str, Any] = {"causal": self.causal, "align": self.align}
        if self.window is not None:
            options["window"] = self.window
        if self.softcap:
            options["softcap"] = self.softcap
        for name in ("q_offset", "kv_offset"):
            if isinstance(getattr(self, name), int):
                options[name] = getattr(self, name)
        if self.packed and self.hints:
            options["max_seqlen_q"] = max(self.lens_q, default=0)
            options["max_seqlen_kv"] = max(self.lens_kv, default=0)
        return options

    @property
    def lengths(self) -> dict[str, NDArray]:
        """The arrays of lengths, int32."""
        found: dict[str, Any] = {}
        if self.packed:
            found["cu_seqlens_q"] = np.cumsum([0, *self.lens_q])
            found["cu_seqlens_kv"] = np.cumsum([0, *self.lens_kv])
        found["seqused_q"], found["seqused_kv"] = self.used_q, self.used_kv
        for name in ("q_offset", "kv_offset"):
            if isinstance(getattr(self, name), tuple):
                found[name] = getattr(self, name)
        return {name: np.array(x, np.int32) for name, x in found.items() if x is not None}

    @cached_property
    def inputs(self) -> tuple[NDArray, NDArray, NDArray]:
        """q, k and v; NaN in every row that belongs to no sequence."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        arrays = [
            self._rows(lens, heads, width, np.nan)
            for lens, heads, width in (
                (self.lens_q, self.heads_q, self.head_dim),
                (self.lens_kv, self.heads_kv, self.head_dim),
                (self.lens_kv, self.heads_kv, self.value_dim),
            )
        ]
        for b in range(self.batch):
            q, k, v = (self.sequence(x, which, b) for x, which in zip(arrays, (0, 1, 1)))
            values = _fill(self.data, rng, *(rng.standard_normal((1, *x.shape)) for x in (q, k, v)))
            for x, value in zip((q, k, v), values):
                x[...] = value[0]
        return arrays[0], arrays[1], arrays[2]

    def _rows(self, lens: tuple[int, ...], heads: int, width: int, fill: float) -> NDArray:
        total = sum(lens) + self.extra
        shape = (total,) if self.packed else (len(lens), max(lens, default=0))
        return np.full((*shape, heads, width), fill, DTYPES[self.dtype])

    def sequence(self, x: NDArray, which: int, b: int) -> NDArray:
        """The rows of a sequence that count: of queries (0) or of keys (1), rows first."""
        lens = (self.lens_q, self.lens_kv)[which]
        used = self._used[which][b]
        if self.packed:
            begin = sum(lens[:b])
            return x[begin : begin + used]
        return x[b, :used]

    def nan_output(self) -> NDArray:
        return self._rows(self.lens_q, self.heads_q, self.value_dim, np.nan)

    def _inputs_of(self, b: int) -> tuple[tuple[NDArray, NDArray, NDArray], dict[str, Any]]:
        """q, k and v of a sequence as a batch of one, and its mask in the reference's terms."""
        q, k, v = (self.sequence(x, which, b)[None] for x, which in zip(self.inputs, (0, 1, 1)))
        return (q, k, v), self.bounds_of(b)

    def bounds_of(self, b: int) -> dict[str, Any]:
        """The mask and the soft cap of a sequence in the reference's terms."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        used_q, used_kv = (used[b] for used in self._used)
        shift = used_kv - used_q if self.align == "bottom_right" else 0
        for offset, sign in ((self.q_offset, 1), (self.kv_offset, -1)):
            if offset is not None:
                shift += sign * (offset if isinstance(offset, int) else offset[b])
        return {"left": left, "right": right, "shift": shift, "softcap": self.softcap}

    @cached_property
    def _expected(self) -> tuple[reference.Expectation, ...]:
        found = []
        for b in range(self.batch):
            inputs, bounds = self._inputs_of(b)
            found.append(reference.expect(*inputs, **bounds))
        return tuple(found)

    @cached_property
    def forward_results(self) -> tuple[NDArray, NDArray]:
        """out, NaN in rows of no sequence, and lse, as a right forward gives them."""
        out = self.nan_output()
        by_row = np.full(out.shape[:-1], -np.inf, np.float32)
        for b, expected in enumerate(self._expected):
            self.sequence(out, 0, b)[...] = expected.out[0].astype(out.dtype)
            self.sequence(by_row, 0, b)[...] = expected.lse[0].T
        return out, np.ascontiguousarray(np.moveaxis(by_row, -1, -2))

    @cached_property
    def dout(self) -> NDArray:
        """Gradient of a loss with respect to out; NaN in rows of no sequence and in those that see
        no key."""
        rng = np.random.default_rng(zlib.crc32(f"{self.name} backward".encode()))
        dout = self.nan_output()
        for b in range(self.batch):
            rows = self.sequence(dout, 0, b)
            rows[...] = rng.standard_normal(rows.shape)
            rows[np.isneginf(self._expected[b].lse[0].T)] = np.nan
        return dout

    def grads_problem(self, grads: tuple[NDArray, NDArray, NDArray]) -> str | None:
        """What is wrong with dq, dk and dv, whose rows of no sequence must be 0, or None."""
        rest = [grad.astype(np.float32) for grad in grads]
        for b in range(self.batch):
            inputs, bounds = self._inputs_of(b)
            dout = self.sequence(self.dout, 0, b)[None]
            expected = reference.expect_backward(dout, *inputs, **bounds)
            own = [self.sequence(x, which, b) for x, which in zip(grads, (0, 1, 1))]
            comparison = expected.compare(*(x[None] for x in own))
            if not comparison.ok:
                return f"sequence {b}: {comparison.problem}"
            for x, which in zip(rest, (0, 1, 1)):
                self.sequence(x, which, b)[...] = 0
        if any((x != 0).any() for x in rest):
            return "gradients of rows of no sequence are not 0"
        return None

    def problem_with(
        self,
        out: NDArray,
        lse: NDArray,
        cleared: bool,
        expectations: tuple[reference.Expectation, ...] | None = None,
    ) -> str | None:
        """What is wrong with a result, or None.

        Args:
            out: as the call returned it.
            lse: [heads, total] or [batch, heads, seqlen].
            cleared: whether rows of no sequence must be 0; otherwise they must still be NaN.
            expectations: what each sequence must give; None: what the inputs give.
        """
        by_row = lse.T if self.packed else lse.transpose(0, 2, 1)
        rest_out, rest_lse = out.astype(np.float32), by_row.copy()
        for b, expected in enumerate(expectations or self._expected):
            rows = self.sequence(out, 0, b)[None]
            row_lse = self.sequence(by_row, 0, b)[None].transpose(0, 2, 1)
            comparison = expected.compare(rows, row_lse)
            if not comparison.ok:
                return f"sequence {b}: {comparison.problem}"
            self.sequence(rest_out, 0, b)[...] = 0 if cleared else np.nan
            self.sequence(rest_lse, 0, b)[...] = -np.inf
        if cleared and (rest_out != 0).any():
            return "rows of no sequence are not 0"
        if not cleared and not np.isnan(rest_out).all():
            return "rows of no sequence were written"
        return None if np.isneginf(rest_lse).all() else "lse of rows of no sequence is not -inf"


def _general(name: str, lens_q: Any, lens_kv: Any, *tags: str, **fields: Any) -> GeneralCase:
    return GeneralCase(name, tuple(lens_q), tuple(lens_kv), tags=frozenset(tags), **fields)


GENERAL: tuple[GeneralCase, ...] = (
    _general("packed", (100, 1, 0, 300), (300, 0, 5, 129), EMULATED, RACE),
    _general("packed_causal", (100, 1, 0, 70), (100, 1, 0, 170), EMULATED, RACE, causal=True),
    _general(
        "packed_causal_pairs", (130, 70), (130, 70), EMULATED, RACE,
        heads_q=4, heads_kv=2, causal=True, hints=True,
    ),
    _general("packed_ring_wraps", (300, 400), (900, 1000), EMULATED, heads_q=3, causal=True),
    _general("packed_nothing", (), (), EMULATED),
    _general("packed_no_extra_rows", (64, 128), (128, 64), EMULATED, extra=0),
    _general(
        "packed_used", (100, 5, 200), (300, 40, 129), EMULATED, RACE,
        causal=True, used_q=(90, 0, 128), used_kv=(256, 40, 1),
    ),
    _general(
        "padded_used", (150,) * 3, (260,) * 3, EMULATED, RACE,
        packed=False, used_q=(150, 0, 70), used_kv=(260, 33, 0),
    ),
    _general("padded_used_keys", (1,) * 4, (300,) * 4, EMULATED, packed=False,
             used_kv=(1, 300, 0, 129), heads_q=8, heads_kv=2, causal=True),
    _general("padded_used_queries", (150,) * 2, (60,) * 2, EMULATED, packed=False,
             used_q=(3, 129), causal=True),
    _general(
        "offsets", (100, 5, 200), (300, 40, 129), EMULATED,
        causal=True, align="top_left", q_offset=(3, 0, 50), kv_offset=(0, 2, 0),
    ),
    _general("offset_for_all", (70, 80), (70, 80), EMULATED, causal=True, q_offset=9, kv_offset=2),
    _general("far_offsets", (70, 80), (70, 80), EMULATED, causal=True, align="top_left",
             q_offset=(2**31 - 1, -(2**31)), kv_offset=(2**31 - 1, 0)),
    _general("packed_window", (100, 5, 200), (300, 40, 129), EMULATED, RACE, window=(30, 5)),
    _general("packed_window_open", (100, 200), (150, 100), EMULATED, window=(60, None)),
    _general("softcap", (100, 200), (100, 200), EMULATED, RACE, causal=True, softcap=2.0),
    _general("softcap_large_scores", (100,), (300,), EMULATED, softcap=30.0, data="large"),
    _general("softcap_very_large", (60,), (300,), EMULATED, softcap=1e6),
    _general("softcap_dense", (90,) * 2, (200,) * 2, EMULATED, packed=False, softcap=5.0),
    _general("packed_rising", (64, 300), (600, 300), EMULATED, RACE, data="rising", causal=True),
    _general("packed_f16_d128", (70, 200), (90, 260), EMULATED, head_dim=128, dtype="float16",
             causal=True, softcap=20.0),
    _general("packed_long", (1000, 3, 300, 1, 600), (1000, 3, 300, 900, 600), head_dim=128,
             heads_q=8, heads_kv=2, causal=True),
    _general("packed_many", tuple(n % 37 for n in range(150)), tuple(n % 41 for n in range(150)),
             causal=True),
    *(
        _general(f"packed_{head_dim}_{dtype}_{kind}", (150, 1, 333), (260, 77, 333),
                 head_dim=head_dim, dtype=dtype, causal=kind == "causal",
                 window=(100, 0) if kind == "window" else None,
                 heads_q=4, heads_kv=2, softcap=10.0 if head_dim % 3 else 0.0)
        for head_dim in (40, 64, 96, 128, 192, 256)
        for dtype in ("float16", "bfloat16")
        for kind in ("full", "causal", "window")
    ),
    _general("packed_value_dim", (150, 333), (260, 333), head_dim=192, head_dim_v=128,
             causal=True),
)  # fmt: skip


# --- 8-bit floats ---------------------------------------------------------------------------------

HEADS, TOKENS_128, TOKENS_64, TOKEN = (None, None), (128, None), (64, None), (1, None)
"""Blocks of ``quantize`` by what shares a scale; None is the whole tensor."""


@dataclass(frozen=True)
class Fp8Case:
    """A general case whose inputs are quantized, or given as plain e4m3 arrays.

    Attributes:
        of: the case; its inputs are what is quantized.
        blocks: of q, k and v.
        hadamard_seed: of q and k.
        plain: whether arrays of e4m3 numbers are given in place of ``Quantized``; of the blocks
            "tensor" and "head" are possible then, and 0 for no scale.
        out_dtype: of the output.
    """

    of: GeneralCase
    blocks: tuple[Any, Any, Any] = (TOKENS_128,) * 3
    hadamard_seed: int | None = None
    plain: bool = False
    out_dtype: str = "bfloat16"

    def __str__(self) -> str:
        return self.of.name

    @cached_property
    def quantized(self) -> tuple[Quantized, Quantized, Quantized]:
        """q, k and v as ``quantize`` makes them, NumPy arrays. Of plain arrays these are only a
        step on the way."""
        made = []
        for role, x, block in zip("qkv", self.of.inputs, self.blocks):
            starts = self.of.lengths.get("cu_seqlens_q" if role == "q" else "cu_seqlens_kv")
            seed = self.hadamard_seed if role in "qk" else None
            block = HEADS if block == 0 else block
            made.append(quantize(x, role, block=block, hadamard_seed=seed, cu_seqlens=starts))
        return made[0], made[1], made[2]

    @cached_property
    def _stored(self) -> tuple[fp8.Stored, fp8.Stored, fp8.Stored]:
        found = []
        for x, block in zip(self.quantized, self.blocks):
            arrangement = fp8.arrangement_of(x, self.of.batch if self.of.packed else None)
            data = x.data[None] if self.of.packed else x.data
            scale = x.scale if block != 0 else np.ones_like(x.scale)
            found.append(fp8.Stored(data, scale, arrangement, x.role == "v"))
        return found[0], found[1], found[2]

    @cached_property
    def operands(self) -> tuple[tuple[Any, Any, Any], dict[str, NDArray]]:
        """q, k and v as the public call takes them, and arrays of scales; NumPy arrays."""
        if not self.plain:
            return self.quantized, {}
        arrays, scales = [], {}
        for name, stored, block in zip("qkv", self._stored, self.blocks):
            batch, seqlen, heads, head_dim = stored.arrangement.shape
            data = np.full((batch, seqlen, heads, head_dim), 0x7F, np.uint8)  # NaN
            starts = self.of.lengths.get("cu_seqlens_q" if name == "q" else "cu_seqlens_kv")
            for rows in fp8.sequences(stored.arrangement, starts):
                numbers = fp8.round_e4m3(stored.numbers(rows))
                data[rows.batch, rows.first : rows.first + rows.length] = numbers
            data = data[0] if self.of.packed else data
            arrays.append(data.view(ml_dtypes.float8_e4m3fn))
            if block != 0:
                scales[f"{name}_scale"] = stored.scale
        return (arrays[0], arrays[1], arrays[2]), scales

    def scaled_of(self, b: int) -> tuple[Scaled, Scaled, Scaled]:
        """q, k and v of a sequence as the references take them, a batch of one."""
        found = []
        for which, stored in zip((0, 1, 1), self._stored):
            lengths = self.of.lengths
            starts = lengths.get(("cu_seqlens_q", "cu_seqlens_kv")[which])
            rows = list(fp8.sequences(stored.arrangement, starts))[b]
            used = lengths.get(("seqused_q", "seqused_kv")[which])
            if used is not None:
                rows = dataclasses.replace(rows, length=int(used[b]))
            found.append(Scaled(stored.numbers(rows)[None], stored.scales(rows)[None]))
        return found[0], found[1], found[2]

    @cached_property
    def expectations(self) -> tuple[reference.Expectation, ...]:
        """What any path must give for each sequence, with probabilities rounded to e4m3 or not."""
        dtype = DTYPES[self.out_dtype]
        return tuple(
            reference_fp8.expect(*self.scaled_of(b), out_dtype=dtype, **self.of.bounds_of(b))
            for b in range(self.of.batch)
        )

    def nan_output(self) -> NDArray:
        return self.of.nan_output().astype(DTYPES[self.out_dtype])

    def problem_with(self, out: NDArray, lse: NDArray, cleared: bool) -> str | None:
        """As ``GeneralCase.problem_with``."""
        return self.of.problem_with(out, lse, cleared, self.expectations)


def _fp8(name: str, lens_q: Any, lens_kv: Any, *tags: str, **fields: Any) -> Fp8Case:
    own = {field.name for field in dataclasses.fields(Fp8Case)}
    of = {key: value for key, value in fields.items() if key not in own}
    rest = {key: value for key, value in fields.items() if key in own}
    return Fp8Case(_general(f"fp8_{name}", lens_q, lens_kv, EMULATED, *tags, **of), **rest)


_DENSE: dict[str, Any] = {"packed": False, "extra": 0}

FP8: tuple[Fp8Case, ...] = (
    _fp8("ring_wraps", (260,), (700,), WRAP, **_DENSE, heads_q=3,
         blocks=(TOKEN, TOKENS_64, TOKENS_128)),
    _fp8("causal_ring_wraps", (400,), (1100,), WRAP, **_DENSE, heads_q=3, causal=True,
         blocks=(HEADS, TOKENS_128, TOKENS_64)),
    _fp8("packed_ring_wraps", (300, 400), (900, 1000), WRAP, heads_q=3, causal=True),
    _fp8("blocks", (200,) * 2, (300,) * 2, **_DENSE, heads_q=4, heads_kv=2),
    _fp8("blocks_of_64", (130,), (333,), **_DENSE, blocks=(TOKENS_64,) * 3),
    _fp8("tokens_of_q", (130,), (260,), RACE, **_DENSE, blocks=(TOKEN, TOKENS_64, TOKENS_128)),
    _fp8("heads", (70,) * 3, (200,) * 3, **_DENSE, blocks=(HEADS,) * 3, heads_q=6, heads_kv=2),
    _fp8("tensor", (70,) * 2, (200,) * 2, **_DENSE, blocks=(None,) * 3, causal=True),
    _fp8("mixed", (129,), (129,), **_DENSE, blocks=(None, TOKENS_128, HEADS), causal=True),
    _fp8("plain", (70,) * 2, (200,) * 2, RACE, **_DENSE, blocks=(HEADS, HEADS, HEADS), plain=True,
         heads_q=4, heads_kv=2, causal=True),
    _fp8("plain_tensor", (70,), (200,), **_DENSE, blocks=(None, HEADS, None), plain=True),
    _fp8("plain_without_scales", (70,), (200,), **_DENSE, blocks=(0, 0, 0), plain=True),
    _fp8("plain_packed", (70, 0, 33), (200, 5, 0), blocks=(HEADS, 0, HEADS), plain=True,
         causal=True),
    _fp8("causal", (200,), (200,), **_DENSE, causal=True, out_dtype="float16"),
    _fp8("causal_more_queries", (300,), (40,), RACE, **_DENSE, causal=True),
    _fp8("causal_top_left", (150,), (300,), **_DENSE, causal=True, align="top_left"),
    _fp8("window", (300,), (300,), RACE, **_DENSE,
         window=(60, 7), blocks=(TOKEN, TOKENS_64, TOKENS_64)),
    _fp8("softcap", (100,), (200,), **_DENSE, softcap=2.0),
    _fp8("no_keys", (5,), (0,), **_DENSE),
    _fp8("one_key", (70,), (1,), **_DENSE),
    _fp8("mqa", (33,) * 2, (100,) * 2, **_DENSE, heads_q=5),
    _fp8("rotated", (100,), (260,), **_DENSE, hadamard_seed=11, data="outliers"),
    _fp8("outliers", (100,), (260,), **_DENSE, data="outliers", blocks=(TOKEN, TOKENS_64, HEADS)),
    _fp8("structured", (100,), (260,), **_DENSE, data="structured"),
    _fp8("large_scores", (64,), (300,), **_DENSE, data="large"),
    _fp8("rising", (64,), (600,), **_DENSE, data="rising", blocks=(TOKENS_128, TOKENS_64, HEADS)),
    _fp8("falling", (64,), (600,), **_DENSE, data="falling"),
    _fp8("jump", (64,), (600,), **_DENSE, data="jump"),
    _fp8("drop", (64,), (600,), **_DENSE, data="drop"),
    _fp8("dominant", (130,), (260,), **_DENSE, data="dominant", causal=True),
    *(
        _fp8(f"head_dim_{head_dim}_{head_dim_v}_{kind}", (140,), (270,), **_DENSE,
             head_dim=head_dim, head_dim_v=head_dim_v, causal=kind == "causal",
             blocks=(TOKENS_128, TOKENS_64, TOKENS_128), heads_q=2)
        for head_dim, head_dim_v in
        ((96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (40, 72))
        for kind in ("full", "causal")
    ),
    _fp8("packed", (100, 1, 0, 130), (300, 0, 5, 129), RACE,
         blocks=(TOKEN, TOKENS_64, TOKENS_128)),
    _fp8("packed_causal", (100, 1, 0, 70), (100, 1, 0, 170), RACE, causal=True, heads_q=4,
         heads_kv=2),
    _fp8("packed_used", (100, 5, 200), (300, 40, 129), RACE, causal=True, used_q=(90, 0, 128),
         used_kv=(256, 40, 1), blocks=(TOKENS_64, TOKENS_128, TOKENS_64)),
    _fp8("packed_heads", (100, 5), (150, 40), window=(30, 5), blocks=(HEADS, None, HEADS)),
    _fp8("padded_used", (150,) * 3, (260,) * 3, packed=False, used_q=(150, 0, 70),
         used_kv=(260, 33, 0)),
    _fp8("offsets", (100, 5), (300, 40), causal=True, align="top_left", q_offset=(3, 0),
         kv_offset=(0, 2)),
)  # fmt: skip
"""Attention of 8-bit floats. Scale kinds, masks, groups, packed sequences, widths, and data that is
hard to scale. All are small enough for the emulator; RACE and WRAP as above."""


def tagged_general(*tags: str) -> tuple[GeneralCase, ...]:
    """The general cases that carry every one of these tags."""
    return tuple(case for case in GENERAL if case.tags.issuperset(tags))


def tagged_fp8(*tags: str) -> tuple[Fp8Case, ...]:
    """The cases of 8-bit floats that carry every one of these tags."""
    return tuple(case for case in FP8 if case.of.tags.issuperset(tags))


def tagged(*tags: str) -> tuple[Case, ...]:
    """The cases that carry every one of these tags."""
    return tuple(case for case in FORWARD if case.tags.issuperset(tags))


_names = [case.name for case in (*FORWARD, *GENERAL, *(case.of for case in FP8))]
if len(set(_names)) != len(_names):
    raise ValueError("two forward cases share a name")
