"""The list of forward cases: every path that computes attention is tested on these, and only here
is a new one added.

A case is data: shapes, element type, mask, how the arrays lie in memory and what fills them. It
knows its inputs (NumPy, seeded by its name), the keyword arguments of the public call and what
those mean as mask bounds. Cases tagged EMULATED are small enough for the CPU emulator; those also
tagged WRAP are still large enough to wrap every ring of a kernel (``test_forward_emulated.py``).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cupyflash import reference

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


def tagged(*tags: str) -> tuple[Case, ...]:
    """The cases that carry every one of these tags."""
    return tuple(case for case in FORWARD if case.tags.issuperset(tags))


_names = [case.name for case in FORWARD]
if len(set(_names)) != len(_names):
    raise ValueError("two forward cases share a name")
