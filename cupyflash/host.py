"""The CPU path: exact attention for NumPy arrays, by a tiled online softmax over BLAS.

Served because the caller passed NumPy arrays; an array on a GPU never comes here. The algorithm is
FlashAttention's (Dao et al. 2022, arXiv:2205.14135; the running maximum and sum are those of
Milakov and Gimelshein 2018, arXiv:1805.02867): the scores exist only as tiles of 512 KiB that stay
in a core's L2 cache, so that the memory used beyond the arguments is O(seqlen) per thread.

One task is a range of query rows of some (batch, head_kv) pairs. The query heads that share a
head_kv are stacked into the rows of one matrix product, and short sequences are stacked over batch
and heads, so that neither many query heads nor a batch of tiny sequences costs a Python loop each.
Tasks run on a thread pool: NumPy and BLAS release the interpreter lock while they work.

The backward pass is cut into the same tasks and walks the same tiles, recomputing the scores in
each (FlashAttention-2, Dao 2023, arXiv:2307.08691). A task owns dq of its rows and adds up dk and
dv for itself; tasks that share keys have their sums added in a fixed order (Note [Order of sums]).

float16 and bfloat16 are computed in float32, float32 in float32, float64 in float64.
What the results mean for masked rows, NaN and infinities is defined in ``reference.py``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "cumulative_lengths",
    "merge",
    "used_lengths",
]

_Item = TypeVar("_Item")

# Note [Host tile sizes]: a tile of 256 x 512 float32 scores is 512 KiB; with a block of K and V
# and the accumulator it fits the 1 MiB L2 of a server core, and its calls of NumPy and BLAS are
# long enough to hide what a call costs. Measured on 2 cores of an AMD EPYC (Zen 4), batch 1, 8
# heads, 4096 keys, head_dim 64, float32, full / causal: 256 x 512 0.28 / 0.18 s, 512 x 256 0.29 /
# 0.18, 128 x 512 0.31 / 0.18, 256 x 256 0.32 / 0.18, 64 x 512 0.38 / 0.24, 128 x 128 0.55 / 0.31;
# 2026-11-29. The backward pass keeps two such tiles, and the same sizes serve it well. The same
# shape on 2 cores of an Intel Xeon with 2 MiB of L2 each: 256 x 512 0.59 / 0.35 s, 512 x 256 0.58 /
# 0.36, 128 x 1024 0.64 / 0.40, 256 x 256 0.63 / 0.37, 64 x 2048 0.75 / 0.50, 512 x 512 0.56 / 0.35
# (the forward: 0.30 / 0.19); 2026-12-06.
_TILE_ROWS = 256
_TILE_BYTES = 512 * 1024
_MIN_KEYS = 64
_MAX_KEYS = 2048
# More tasks than threads, so that the unequal work of a causal mask evens out.
_TASKS_PER_THREAD = 4
# Fewer scores than this take less time than it takes to start threads.
_SCORES_WORTH_A_THREAD = 1 << 18
# Into how many tasks a backward pass is cut: never more for more threads, see Note [Order of sums].
_GRAD_TASKS = 32


def attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    softmax_scale: float,
    left: int | None = None,
    right: int | None = None,
    shift: int | ArrayLike = 0,
    softcap: float = 0.0,
    want_lse: bool = False,
    out: NDArray | None = None,
    seqused_q: ArrayLike | None = None,
    seqused_kv: ArrayLike | None = None,
) -> tuple[NDArray, NDArray | None]:
    """Attention of dense NumPy arrays; any strides.

    Key j is visible to query row i iff ``i + shift - left <= j <= i + shift + right``.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim_qk]; float16, bfloat16, float32 or float64.
        k: [batch, seqlen_kv, heads_kv, head_dim_qk], heads_q a multiple of heads_kv.
        v: [batch, seqlen_kv, heads_kv, head_dim_v].
        left, right: mask bounds in keys, None for no bound.
        shift: the key on the diagonal of row i is i + shift; an int or one per batch entry.
        softmax_scale: factor on the scores.
        softcap: c > 0 turns every score s into c * tanh(s / c).
        want_lse: whether to return the log-sum-exp.
        out: where to write the output, [batch, seqlen_q, heads_q, head_dim_v], q's dtype.
        seqused_q, seqused_kv: lengths in use of each batch entry, [batch].

    Returns:
        out, and lse or None. lse is the natural log-sum-exp [batch, heads_q, seqlen_q], float32
        (float64 for float64 input). Rows at or past seqused_q are 0 in an output allocated here,
        untouched in the caller's, and -inf in lse.
    """
    batch, seqlen_q, heads_q, _ = q.shape
    lengths = seqused_q is not None or seqused_kv is not None
    out, lse = _outputs(q, v, (batch, heads_q, seqlen_q), out, want_lse, padded=lengths)
    parts = _dense_parts(batch, seqlen_q, k.shape[1], shift, seqused_q, seqused_kv)
    problems = [_problem(part, q, k, v, out, lse, left, right) for part in parts]
    _run(problems, softmax_scale, softcap)
    return out, lse


def attention_varlen(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    *,
    softmax_scale: float,
    left: int | None = None,
    right: int | None = None,
    shift: int | ArrayLike = 0,
    softcap: float = 0.0,
    want_lse: bool = False,
    out: NDArray | None = None,
    seqused_q: ArrayLike | None = None,
    seqused_kv: ArrayLike | None = None,
) -> tuple[NDArray, NDArray | None]:
    """Attention of packed sequences: sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1].

    Args:
        q: [total_q, heads_q, head_dim_qk].
        k: [total_kv, heads_kv, head_dim_qk].
        v: [total_kv, heads_kv, head_dim_v].
        cu_seqlens_q, cu_seqlens_kv: cumulative lengths [batch + 1], starting at 0.
        shift: an int or one per sequence, see :func:`attention`.
        seqused_q, seqused_kv: lengths in use of each sequence, [batch].
        left, right, softmax_scale, softcap, want_lse, out: as in :func:`attention`.

    Returns:
        out [total_q, heads_q, head_dim_v], and lse [heads_q, total_q] or None. Rows that belong to
        no sequence are 0 in an output allocated here, untouched in the caller's, -inf in lse.

    Raises:
        ValueError: cumulative lengths that do not start at 0, decrease, or end past the array.
    """
    total_q, heads_q, _ = q.shape
    parts = _packed_parts(
        total_q, k.shape[0], cu_seqlens_q, cu_seqlens_kv, shift, seqused_q, seqused_kv
    )
    out, lse = _outputs(q, v, (heads_q, total_q), out, want_lse, padded=True)
    problems = [_problem(part, q, k, v, out, lse, left, right) for part in parts]
    _run(problems, softmax_scale, softcap)
    return out, lse


def attention_backward(
    dout: NDArray,
    q: NDArray,
    k: NDArray,
    v: NDArray,
    out: NDArray | None,
    lse: NDArray,
    *,
    dq: NDArray,
    dk: NDArray,
    dv: NDArray,
    softmax_scale: float,
    left: int | None = None,
    right: int | None = None,
    shift: int | ArrayLike = 0,
    softcap: float = 0.0,
    dlse: NDArray | None = None,
    delta: NDArray | None = None,
    accumulate: bool = False,
    clear: bool = True,
    seqused_q: ArrayLike | None = None,
    seqused_kv: ArrayLike | None = None,
) -> None:
    """Gradients of :func:`attention`, written to dq, dk and dv; any strides.

    The sums are those of ``reference.py``, with p_ij = exp(s_ij - lse_i) for the lse given. A row
    whose lse is -inf contributes nothing, whatever q, dout and out hold there. Repeated calls agree
    bit for bit, on any number of threads.

    Args:
        dout: gradient with respect to out, [batch, seqlen_q, heads_q, head_dim_v].
        q, k, v: as in :func:`attention`.
        out, lse: its results; out may be None where delta is given.
        dq, dk, dv: where to write, shaped as q, k and v; their dtype, float32 or float64.
        softmax_scale, left, right, shift, softcap: as in :func:`attention`.
        dlse: gradient with respect to lse, [batch, heads_q, seqlen_q]; None is zero.
        delta: rowsum(dout * out) - dlse where it is known, [batch, heads_q, seqlen_q].
        accumulate: adds the gradients, rounded once, to what dq, dk and dv hold.
        clear: whether to set the gradients of rows at or past seqused_q and seqused_kv to 0. With
            ``accumulate`` they are untouched in any case.
        seqused_q, seqused_kv: lengths in use of each batch entry, [batch].

    Raises:
        ValueError: neither out nor delta, or delta and dlse; lengths beyond those of the arrays.
    """
    batch, seqlen_q = q.shape[:2]
    parts = _dense_parts(batch, seqlen_q, k.shape[1], shift, seqused_q, seqused_kv)
    arrays = _GradArrays(dout, q, k, v, out, lse, dlse, delta, dq, dk, dv)
    _run_backward(arrays, parts, left, right, softmax_scale, softcap, accumulate, clear)


def attention_varlen_backward(
    dout: NDArray,
    q: NDArray,
    k: NDArray,
    v: NDArray,
    out: NDArray | None,
    lse: NDArray,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    *,
    dq: NDArray,
    dk: NDArray,
    dv: NDArray,
    softmax_scale: float,
    left: int | None = None,
    right: int | None = None,
    shift: int | ArrayLike = 0,
    softcap: float = 0.0,
    dlse: NDArray | None = None,
    delta: NDArray | None = None,
    accumulate: bool = False,
    clear: bool = True,
    seqused_q: ArrayLike | None = None,
    seqused_kv: ArrayLike | None = None,
) -> None:
    """Gradients of :func:`attention_varlen`, written to dq, dk and dv.

    Args:
        dout: gradient with respect to out, [total_q, heads_q, head_dim_v].
        q, k, v, cu_seqlens_q, cu_seqlens_kv: as in :func:`attention_varlen`.
        out, lse: its results; out may be None where delta is given.
        dlse, delta: [heads_q, total_q].
        clear: whether to set the gradients of rows that belong to no sequence to 0.
        dq, dk, dv, softmax_scale, left, right, shift, softcap, accumulate, seqused_q, seqused_kv:
            as in :func:`attention_backward`.

    Raises:
        ValueError: as :func:`attention_varlen` and :func:`attention_backward`.
    """
    parts = _packed_parts(
        q.shape[0], k.shape[0], cu_seqlens_q, cu_seqlens_kv, shift, seqused_q, seqused_kv
    )
    arrays = _GradArrays(dout, q, k, v, out, lse, dlse, delta, dq, dk, dv)
    _run_backward(arrays, parts, left, right, softmax_scale, softcap, accumulate, clear)


def merge(outs: Sequence[NDArray], lses: Sequence[NDArray]) -> tuple[NDArray, NDArray]:
    """The attention over the union of disjoint key sets, from the attention over each of them.

    lse = log(sum_p exp(lse_p)) and out = sum_p exp(lse_p - lse) * out_p; a part with lse_p = -inf
    counts for nothing, and where every part has it, out is 0.

    Args:
        outs: parts [batch, seqlen, heads, head_dim] or packed [total, heads, head_dim].
        lses: natural log-sum-exps [batch, heads, seqlen] or [heads, total].

    Returns:
        out in the parts' dtype, and lse in float32 (float64 if the parts' lse are float64).
    """
    working = np.float64 if lses[0].dtype == np.float64 else np.float32
    logs = np.stack([np.asarray(lse, np.float64) for lse in lses])
    top = logs.max(axis=0)
    anchor = np.where(top == -np.inf, 0, top)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = anchor + np.log(np.exp(logs - anchor).sum(axis=0))
        weights = np.exp(logs - np.where(top == -np.inf, 0, lse)).astype(working)
    merged = np.zeros(outs[0].shape, working)
    for part, weight in zip(outs, weights, strict=True):
        weight = np.swapaxes(weight, -1, -2)[..., None]
        merged += np.where(weight == 0, 0, weight * part.astype(working))
    return merged.astype(outs[0].dtype), lse.astype(working)


# -- arguments -------------------------------------------------------------------------------------


def _working_type(dtype: np.dtype) -> type:
    return np.float64 if dtype == np.float64 else np.float32


def _outputs(
    q: NDArray,
    v: NDArray,
    lse_shape: tuple[int, ...],
    out: NDArray | None,
    want_lse: bool,
    padded: bool,
) -> tuple[NDArray, NDArray | None]:
    """Allocate what the caller did not give; padded says that some rows may not be computed."""
    if out is None:
        out = (np.zeros if padded else np.empty)((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse: NDArray | None = None
    if want_lse:
        lse = np.full(lse_shape, -np.inf, _working_type(q.dtype))
    return out, lse


def used_lengths(
    name: str, lengths: ArrayLike | None, batch: int, limit: int | NDArray[np.int64]
) -> NDArray[np.int64]:
    """Lengths in use of each sequence: ``lengths``, a ValueError beyond a limit, or the limits."""
    limits = np.broadcast_to(np.asarray(limit, np.int64), (batch,))
    if lengths is None:
        return limits
    used = np.asarray(lengths).astype(np.int64)
    if used.shape != (batch,):
        raise ValueError(f"{name}: expected shape [{batch}], got {list(used.shape)}")
    if (used < 0).any() or (used > limits).any():
        raise ValueError(f"{name}: lengths must be between 0 and those of the arrays, got {used}")
    return used


def cumulative_lengths(name: str, starts: ArrayLike, total: int) -> NDArray[np.int64]:
    """Where packed sequences start and end; a ValueError if they cannot in so many rows."""
    starts = np.asarray(starts).astype(np.int64)
    if starts.ndim != 1 or len(starts) == 0:
        raise ValueError(f"{name}: expected shape [batch + 1], got {list(starts.shape)}")
    if starts[0] != 0:
        raise ValueError(f"{name}: must start at 0, got {starts[0]}")
    if (np.diff(starts) < 0).any():
        raise ValueError(f"{name}: must not decrease, got {starts}")
    if starts[-1] > total:
        raise ValueError(f"{name}: ends at {starts[-1]}, past the array's {total} rows")
    return starts


def _joined(
    starts_q: NDArray[np.int64],
    starts_kv: NDArray[np.int64],
    used_q: NDArray[np.int64],
    used_kv: NDArray[np.int64],
    shifts: NDArray[np.int64],
) -> Iterator[tuple[int, int]]:
    """(first, count) of neighbouring sequences of the same lengths: they lie like a dense batch."""
    batch = len(used_q)
    packed = (np.diff(starts_q) == used_q) & (np.diff(starts_kv) == used_kv)
    kind = np.stack([used_q, used_kv, shifts])
    joined = packed[1:] & packed[:-1] & (kind[:, 1:] == kind[:, :-1]).all(axis=0)
    begins = [0, *(np.flatnonzero(~joined) + 1), batch]
    for first, end in itertools.pairwise(begins):
        if end > first:
            yield int(first), int(end - first)


@dataclass(frozen=True)
class _Part:
    """Neighbouring sequences of equal lengths under one mask, and how to view their rows.

    Attributes:
        packed: whether arrays are [total, ...]; otherwise [batch, seqlen, ...].
        first_q, first_kv: packed: the first row of the first sequence; otherwise its batch entry.
        count: number of sequences.
        seqlen_q, seqlen_kv: rows in use of each.
        shift: the key on the diagonal of row i is i + shift.
    """

    packed: bool
    first_q: int
    first_kv: int
    count: int
    seqlen_q: int
    seqlen_kv: int
    shift: int

    def queries(self, x: NDArray) -> NDArray:
        """View rows of queries as [count, seqlen_q, heads, head_dim]."""
        return self._view(x, self.first_q, self.seqlen_q)

    def keys(self, x: NDArray) -> NDArray:
        """View rows of keys as [count, seqlen_kv, heads, head_dim]."""
        return self._view(x, self.first_kv, self.seqlen_kv)

    def row_values(self, x: NDArray) -> NDArray:
        """View numbers of queries, [heads, total] or [batch, heads, seqlen], as [count, heads,
        seqlen_q]."""
        return self.queries(np.swapaxes(x, -1, -2)).transpose(0, 2, 1)

    def _view(self, x: NDArray, first: int, length: int) -> NDArray:
        if not self.packed:
            return x[first : first + self.count, :length]
        rows = x[first : first + self.count * length]
        return rows.reshape(self.count, length, *x.shape[1:])


def _dense_parts(
    batch: int,
    seqlen_q: int,
    seqlen_kv: int,
    shift: int | ArrayLike,
    seqused_q: ArrayLike | None,
    seqused_kv: ArrayLike | None,
) -> list[_Part]:
    """The parts of arrays [batch, seqlen, ...]: one if all sequences are alike."""
    shifts = np.broadcast_to(np.asarray(shift, np.int64), (batch,))
    if seqused_q is None and seqused_kv is None and (shifts == shifts[:1]).all():
        same = int(shifts[0]) if batch else 0
        return [_Part(False, 0, 0, batch, seqlen_q, seqlen_kv, same)]
    used_q = used_lengths("seqused_q", seqused_q, batch, seqlen_q)
    used_kv = used_lengths("seqused_kv", seqused_kv, batch, seqlen_kv)
    return [
        _Part(False, b, b, 1, int(used_q[b]), int(used_kv[b]), int(shifts[b])) for b in range(batch)
    ]


def _packed_parts(
    total_q: int,
    total_kv: int,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_kv: ArrayLike,
    shift: int | ArrayLike,
    seqused_q: ArrayLike | None,
    seqused_kv: ArrayLike | None,
) -> list[_Part]:
    """The parts of arrays [total, ...]: one for each run of sequences that are alike."""
    starts_q = cumulative_lengths("cu_seqlens_q", cu_seqlens_q, total_q)
    starts_kv = cumulative_lengths("cu_seqlens_kv", cu_seqlens_kv, total_kv)
    batch = len(starts_q) - 1
    if len(starts_kv) != len(starts_q):
        raise ValueError(
            f"cu_seqlens_kv: {len(starts_kv)} entries, but cu_seqlens_q has {len(starts_q)}"
        )
    shifts = np.broadcast_to(np.asarray(shift, np.int64), (batch,))
    used_q = used_lengths("seqused_q", seqused_q, batch, np.diff(starts_q))
    used_kv = used_lengths("seqused_kv", seqused_kv, batch, np.diff(starts_kv))
    return [
        _Part(
            True,
            int(starts_q[first]),
            int(starts_kv[first]),
            count,
            int(used_q[first]),
            int(used_kv[first]),
            int(shifts[first]),
        )
        for first, count in _joined(starts_q, starts_kv, used_q, used_kv, shifts)
    ]


# -- splitting into tasks --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Problem:
    """A batch of sequences of equal length under one mask; arrays are views of the caller's."""

    q: NDArray  # [batch, seqlen_q, heads_q, head_dim_qk]
    k: NDArray  # [batch, seqlen_kv, heads_kv, head_dim_qk]
    v: NDArray  # [batch, seqlen_kv, heads_kv, head_dim_v]
    out: NDArray  # [batch, seqlen_q, heads_q, head_dim_v]
    lse: NDArray | None  # [batch, heads_q, seqlen_q]
    left: int | None
    right: int | None
    shift: int


def _problem(
    part: _Part,
    q: NDArray,
    k: NDArray,
    v: NDArray,
    out: NDArray,
    lse: NDArray | None,
    left: int | None,
    right: int | None,
) -> _Problem:
    """A part of the arrays of a call."""
    return _Problem(
        part.queries(q),
        part.keys(k),
        part.keys(v),
        part.queries(out),
        None if lse is None else part.row_values(lse),
        left,
        right,
        part.shift,
    )


@dataclass(frozen=True)
class _Span:
    """Query rows [row_begin, row_end) of some sequences and kv heads, how they are tiled, and
    which keys they see."""

    at: tuple[slice, slice]  # of [batch, heads_kv, ...]
    row_begin: int
    row_end: int
    tile_rows: int
    tile_keys: int
    seqlen_kv: int
    left: int | None
    right: int | None
    shift: int

    @property
    def rows(self) -> slice:
        return slice(self.row_begin, self.row_end)

    def tiles(self) -> Iterator[slice]:
        """The rows, a tile at a time."""
        for begin in range(self.row_begin, self.row_end, self.tile_rows):
            yield slice(begin, min(begin + self.tile_rows, self.row_end))

    def blocks(self, rows: slice) -> Iterator[tuple[int, int]]:
        """The keys that any of the rows sees, [begin, end) of a block at a time."""
        first, last = _key_range(self, rows)
        for begin in range(first, last, self.tile_keys):
            yield begin, min(begin + self.tile_keys, last)


@dataclass(frozen=True, eq=False)
class _Task:
    """A span of a problem, as views."""

    span: _Span
    q: NDArray  # [batch, heads_kv, group, seqlen_q, head_dim_qk]
    k: NDArray  # [batch, heads_kv, seqlen_kv, head_dim_qk]
    v: NDArray  # [batch, heads_kv, seqlen_kv, head_dim_v]
    out: NDArray  # [batch, heads_kv, group, seqlen_q, head_dim_v]
    lse: NDArray | None  # [batch, heads_kv, group, seqlen_q]


def _split_heads(x: NDArray, heads_kv: int) -> NDArray:
    """View [batch, seqlen, heads_q, head_dim] as [batch, heads_kv, group, seqlen, head_dim]."""
    batch, seqlen, heads, head_dim = x.shape
    stride_batch, stride_seqlen, stride_head, stride_dim = x.strides
    group = heads // heads_kv
    return np.lib.stride_tricks.as_strided(
        x,
        (batch, heads_kv, group, seqlen, head_dim),
        (stride_batch, group * stride_head, stride_head, stride_seqlen, stride_dim),
    )


def _split_row_values(x: NDArray, heads_kv: int) -> NDArray:
    """View [batch, heads_q, seqlen] as [batch, heads_kv, group, seqlen]."""
    return _split_heads(x.transpose(0, 2, 1)[..., None], heads_kv)[..., 0]


def _spans(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    left: int | None,
    right: int | None,
    shift: int,
    num_spans: int,
) -> Iterator[_Span]:
    """Cut a problem into at least num_spans spans where it is large enough; longest rows first."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    seqlen_kv, heads_kv = k.shape[1], k.shape[2]
    if 0 in (batch, seqlen_q, heads_q):
        return
    group = heads_q // heads_kv
    budget = _TILE_BYTES // np.dtype(_working_type(q.dtype)).itemsize
    tile_rows = min(seqlen_q, max(16, _TILE_ROWS // group))
    tile_keys = min(max(_MIN_KEYS, budget // (tile_rows * group)), _MAX_KEYS, max(1, seqlen_kv))
    # As many (batch, head_kv) pairs at once as keep a tile, and its block of K and V, in budget.
    widest = max(tile_rows * group, head_dim + v.shape[3])
    pairs = max(1, budget // (widest * tile_keys)) if tile_rows == seqlen_q else 1
    pairs = min(pairs, max(1, batch * heads_kv // num_spans))
    heads_step = min(pairs, heads_kv)
    batch_step = max(1, pairs // heads_kv)

    num_chunks = math.ceil(batch / batch_step) * math.ceil(heads_kv / heads_step)
    num_tiles = math.ceil(seqlen_q / tile_rows)
    tiles_per_span = math.ceil(num_tiles / max(1, math.ceil(num_spans / num_chunks)))
    rows_step = tiles_per_span * tile_rows
    for row_begin in reversed(range(0, seqlen_q, rows_step)):
        for b in range(0, batch, batch_step):
            for h in range(0, heads_kv, heads_step):
                yield _Span(
                    (slice(b, b + batch_step), slice(h, h + heads_step)),
                    row_begin,
                    min(row_begin + rows_step, seqlen_q),
                    tile_rows,
                    tile_keys,
                    seqlen_kv,
                    left,
                    right,
                    shift,
                )


def _tasks(problem: _Problem, num_tasks: int) -> Iterator[_Task]:
    """Cut a problem into at least num_tasks tasks where it is large enough."""
    q, k, v, lse = problem.q, problem.k, problem.v, problem.lse
    heads_kv = k.shape[2]
    for span in _spans(q, k, v, problem.left, problem.right, problem.shift, num_tasks):
        yield _Task(
            span,
            _split_heads(q, heads_kv)[span.at],
            k.transpose(0, 2, 1, 3)[span.at],
            v.transpose(0, 2, 1, 3)[span.at],
            _split_heads(problem.out, heads_kv)[span.at],
            None if lse is None else _split_row_values(lse, heads_kv)[span.at],
        )


def _run(problems: Sequence[_Problem], softmax_scale: float, softcap: float) -> None:
    """Compute every problem, on as many threads as BLAS would have used."""
    threads = min(_num_threads(), _worthwhile_threads((p.q, p.k) for p in problems))
    wanted = max(1, threads * _TASKS_PER_THREAD // max(1, len(problems)))
    tasks = [task for problem in problems for task in _tasks(problem, wanted)]
    _run_tasks(lambda task: _attend(task, softmax_scale, softcap), tasks, threads)


def _worthwhile_threads(inputs: Iterable[tuple[NDArray, NDArray]]) -> int:
    """How many threads have enough to do with the q and k of some problems."""
    scores = sum(q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1] for q, k in inputs)
    return max(1, scores // _SCORES_WORTH_A_THREAD)


def _run_tasks(compute: Callable[[_Item], None], tasks: Sequence[_Item], threads: int) -> None:
    """Call compute for every task, in this order where there is one thread."""
    if threads == 1 or len(tasks) <= 1:
        for task in tasks:
            compute(task)
        return
    with (
        _single_threaded_blas(),
        ThreadPoolExecutor(min(threads, len(tasks)), "cupyflash-host") as pool,
    ):
        for _ in pool.map(compute, tasks):
            pass


# -- the computation -------------------------------------------------------------------------------


def _attend(task: _Task, softmax_scale: float, softcap: float) -> None:
    """Compute one task, tile of rows by tile of rows."""
    working = _working_type(task.q.dtype)
    span = task.span
    keys, values = np.swapaxes(task.k, -1, -2), task.v
    if span.row_end - span.row_begin > span.tile_rows:
        # Read more than once: convert once, and lay K out as the right operand BLAS likes best.
        keys = np.ascontiguousarray(keys, working)
        values = np.asarray(values, working)
    scores: NDArray = np.empty(
        math.prod(task.q.shape[:3]) * span.tile_rows * span.tile_keys, working
    )
    # Infinities and NaN in the input are the caller's: they flow through without a warning.
    with np.errstate(all="ignore"):
        for rows in span.tiles():
            _attend_rows(task, rows, keys, values, scores, softmax_scale, softcap)


def _attend_rows(
    task: _Task,
    rows: slice,
    keys: NDArray,  # [batch, heads_kv, head_dim_qk, seqlen_kv]
    values: NDArray,  # [batch, heads_kv, seqlen_kv, head_dim_v]
    scores_buffer: NDArray,
    softmax_scale: float,
    softcap: float,
) -> None:
    """The online softmax of one tile of rows over all the blocks of keys that they see."""
    working = scores_buffer.dtype
    batch, heads_kv, group = task.q.shape[:3]
    num_rows = rows.stop - rows.start
    stacked = (batch, heads_kv, group * num_rows)
    # The scale goes into Q; under a softcap the tanh wants scores in units of the cap.
    factor = working.type(softmax_scale / softcap if softcap else softmax_scale)
    q = task.q[:, :, :, rows].astype(working) * factor
    q = q.reshape(*stacked, q.shape[-1])

    acc = np.zeros((*stacked, values.shape[-1]), working)
    row_max = np.full((*stacked, 1), -np.inf, working)
    row_sum = np.zeros((*stacked, 1), working)
    ones = np.ones((task.span.tile_keys, 1), working)
    for begin, end in task.span.blocks(rows):
        shape = (*stacked, end - begin)
        scores = scores_buffer[: math.prod(shape)].reshape(shape)
        np.matmul(q, np.asarray(keys[..., begin:end], working), out=scores)
        if softcap:
            np.tanh(scores, out=scores)
            scores *= working.type(softcap)
        hidden = _hidden(task.span, rows, begin, end)
        if hidden is not None:
            split = scores.reshape(batch, heads_kv, group, num_rows, end - begin)
            np.copyto(split, -np.inf, where=hidden)

        new_max = np.maximum(row_max, scores.max(axis=-1, keepdims=True))
        # A row without a key so far: -inf - -inf would be NaN, -inf - 0 is the -inf it should be.
        anchor = np.where(new_max == -np.inf, working.type(0), new_max)
        np.subtract(scores, anchor, out=scores)
        np.exp(scores, out=scores)
        rescale = np.exp(row_max - anchor)
        row_max = new_max
        row_sum *= rescale
        row_sum += scores @ ones[begin - end :]
        acc *= rescale
        _add_product(acc, scores, np.asarray(values[..., begin:end, :], working), hidden)

    empty = row_sum == 0
    np.divide(acc, np.where(empty, working.type(1), row_sum), out=acc)
    np.copyto(acc, 0, where=empty)
    task.out[:, :, :, rows] = acc.reshape(batch, heads_kv, group, num_rows, -1)
    if task.lse is not None:
        lse = row_max + np.log(row_sum)
        task.lse[:, :, :, rows] = lse.reshape(batch, heads_kv, group, num_rows)


def _key_range(span: _Span, rows: slice) -> tuple[int, int]:
    """The keys that any of the rows sees: blocks outside of it are never touched."""
    first, last = 0, span.seqlen_kv
    if span.left is not None:
        first = max(first, rows.start + span.shift - span.left)
    if span.right is not None:
        last = min(last, rows.stop + span.shift + span.right)
    return first, last


def _hidden(span: _Span, rows: slice, begin: int, end: int) -> NDArray[np.bool_] | None:
    """Which (row, key) of a tile the mask hides, [rows, keys]; None if it hides nothing."""
    cut_right = span.right is not None and end - 1 > rows.start + span.shift + span.right
    cut_left = span.left is not None and begin < rows.stop - 1 + span.shift - span.left
    if not cut_right and not cut_left:
        return None
    keys = np.arange(begin, end)
    diagonal = np.arange(rows.start + span.shift, rows.stop + span.shift)[:, None]
    hidden = np.zeros((len(diagonal), len(keys)), bool)
    if cut_right:
        hidden |= keys > diagonal + span.right
    if cut_left:
        hidden |= keys < diagonal - span.left
    return hidden


def _add_product(
    acc: NDArray, weights: NDArray, values: NDArray, hidden: NDArray[np.bool_] | None
) -> None:
    """acc += weights @ values, where a hidden key counts for nothing even if its value is NaN."""
    if hidden is None or np.isfinite(values).all():
        acc += weights @ values
        return
    special = ~np.isfinite(values).all(axis=-1)
    acc += weights @ np.where(special[..., None], 0, values)
    group = weights.shape[2] // hidden.shape[0]
    for b, h, j in np.argwhere(special):
        rows = np.tile(~hidden[:, j], group)
        acc[b, h, rows] += weights[b, h, rows, j, None] * values[b, h, j]


# -- the gradients ---------------------------------------------------------------------------------

# Note [Order of sums]: additions in another order round differently, so that the order must not
# depend on which thread is done first, nor on how many there are. dq of a row is added up by one
# task over blocks of keys from left to right. dk and dv of a key are added up by a task over its
# tiles of rows, and the sums of the tasks that share (batch, head_kv) pairs in the order of the
# list of tasks: `_KeySums` holds back what comes early. How a problem is cut depends on its shape
# only, and BLAS computes every product on one thread.


@dataclass(frozen=True, eq=False)
class _GradArrays:
    """The arrays of a call, of a part of it, or of a task: views of the caller's.

    Those of a call lie dense or packed; those of a part are given here; those of a task are [batch,
    heads_kv, group, seqlen_q, head_dim] and [batch, heads_kv, group, seqlen_q] for queries, [batch,
    heads_kv, seqlen_kv, head_dim] for keys.
    """

    dout: NDArray  # [batch, seqlen_q, heads_q, head_dim_v]
    q: NDArray  # [batch, seqlen_q, heads_q, head_dim_qk]
    k: NDArray  # [batch, seqlen_kv, heads_kv, head_dim_qk]
    v: NDArray  # [batch, seqlen_kv, heads_kv, head_dim_v]
    out: NDArray | None  # as dout
    lse: NDArray  # [batch, heads_q, seqlen_q]
    dlse: NDArray | None  # as lse
    delta: NDArray | None  # as lse
    dq: NDArray  # as q
    dk: NDArray  # as k
    dv: NDArray  # as v

    def viewed(
        self,
        queries: Callable[[NDArray], NDArray],
        keys: Callable[[NDArray], NDArray],
        row_values: Callable[[NDArray], NDArray],
    ) -> _GradArrays:
        """The same arrays, each seen through the function for its kind."""
        return _GradArrays(
            queries(self.dout),
            queries(self.q),
            keys(self.k),
            keys(self.v),
            None if self.out is None else queries(self.out),
            row_values(self.lse),
            None if self.dlse is None else row_values(self.dlse),
            None if self.delta is None else row_values(self.delta),
            queries(self.dq),
            keys(self.dk),
            keys(self.dv),
        )


@dataclass(frozen=True, eq=False)
class _GradTask:
    """A span of a problem; ``place`` is its turn to add to the sums of its keys."""

    span: _Span
    arrays: _GradArrays
    sums: _KeySums
    place: int


class _KeySums:
    """dk and dv of some sequences and kv heads, added up from tasks: Note [Order of sums]."""

    def __init__(self, dk: NDArray, dv: NDArray, accumulate: bool) -> None:
        """
        Args:
            dk, dv: where to write in the end, [batch, heads_kv, seqlen_kv, head_dim].
            accumulate: whether to add to what is there.
        """
        self._grads = (dk, dv)
        self._accumulate = accumulate
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[int, NDArray, NDArray]] = {}
        self._next = 0
        self._totals: tuple[NDArray, NDArray] | None = None
        self._num_tasks = 0

    def register(self) -> int:
        """The place of one more task; after the first ``add`` there must be no more."""
        self._num_tasks += 1
        return self._num_tasks - 1

    def add(self, place: int, first_key: int, dk: NDArray, dv: NDArray) -> None:
        """Take over the sums of the task at ``place``, of the keys from first_key on."""
        with self._lock:
            self._waiting[place] = (first_key, dk, dv)
            while self._next in self._waiting:
                self._add_next(*self._waiting.pop(self._next))
                self._next += 1

    def _add_next(self, first_key: int, dk: NDArray, dv: NDArray) -> None:
        keys = slice(first_key, first_key + dk.shape[2])
        if self._num_tasks > 1:
            if self._totals is None:
                shapes = (grad.shape for grad in self._grads)
                total_k, total_v = (np.zeros(shape, dk.dtype) for shape in shapes)
                self._totals = (total_k, total_v)
            for total, part in zip(self._totals, (dk, dv)):
                total[:, :, keys] += part
            if self._next + 1 < self._num_tasks:
                return
            keys = slice(None)
            dk, dv = self._totals
        for grad, total in zip(self._grads, (dk, dv)):
            _store(grad[:, :, keys], total, self._accumulate)


def _store(grad: NDArray, sums: NDArray, accumulate: bool) -> None:
    """Write sums, or add them, rounded once."""
    grad[...] = grad + sums if accumulate else sums


def _grad_tasks(
    arrays: _GradArrays,
    left: int | None,
    right: int | None,
    shift: int,
    accumulate: bool,
    num_tasks: int,
) -> Iterator[_GradTask]:
    """Cut a problem into at least num_tasks tasks where it is large enough."""
    heads_kv = arrays.k.shape[2]
    split = arrays.viewed(
        lambda x: _split_heads(x, heads_kv),
        lambda x: x.transpose(0, 2, 1, 3),
        lambda x: _split_row_values(x, heads_kv),
    )
    sums: dict[tuple[int, int], _KeySums] = {}
    for span in _spans(arrays.q, arrays.k, arrays.v, left, right, shift, num_tasks):
        batch, heads = span.at
        chunk = (batch.start, heads.start)
        take = operator.itemgetter(span.at)
        views = split.viewed(take, take, take)
        if chunk not in sums:
            sums[chunk] = _KeySums(views.dk, views.dv, accumulate)
        yield _GradTask(span, views, sums[chunk], sums[chunk].register())


def _run_backward(
    arrays: _GradArrays,
    parts: Sequence[_Part],
    left: int | None,
    right: int | None,
    softmax_scale: float,
    softcap: float,
    accumulate: bool,
    clear: bool,
) -> None:
    """Compute the gradients of every part."""
    if arrays.delta is None and arrays.out is None:
        raise ValueError("out: expected an array, or delta in its place, got neither")
    if arrays.delta is not None and arrays.dlse is not None:
        raise ValueError("delta and dlse: delta contains dlse already, expected one of them")
    views = [arrays.viewed(part.queries, part.keys, part.row_values) for part in parts]
    if not accumulate:
        for own in [arrays] if clear else views:
            for grad in (own.dq, own.dk, own.dv):
                grad[...] = 0
    worthwhile = _worthwhile_threads((x.q, x.k) for x in views)
    wanted = max(1, min(worthwhile, _GRAD_TASKS) // max(1, len(parts)))
    tasks = [
        task
        for view, part in zip(views, parts, strict=True)
        for task in _grad_tasks(view, left, right, part.shift, accumulate, wanted)
    ]
    threads = min(_num_threads(), worthwhile)
    with _single_threaded_blas():
        _run_tasks(
            lambda task: _backpropagate(task, softmax_scale, softcap, accumulate), tasks, threads
        )


def _backpropagate(task: _GradTask, softmax_scale: float, softcap: float, accumulate: bool) -> None:
    """Compute one task, tile of rows by tile of rows."""
    span, arrays = task.span, task.arrays
    working = _working_type(arrays.q.dtype)
    factor = softmax_scale / softcap if softcap else softmax_scale
    first, last = _key_range(span, span.rows)
    seen = slice(first, max(first, last))
    num_pairs = math.prod(arrays.q.shape[:3]) * span.tile_rows * span.tile_keys
    tiles: NDArray = np.empty((3 if softcap else 2, num_pairs), working)
    # Infinities and NaN in the input are the caller's: they flow through without a warning.
    with np.errstate(all="ignore"):
        keys: NDArray = np.ascontiguousarray(arrays.k[:, :, seen], working)
        values: NDArray = np.ascontiguousarray(arrays.v[:, :, seen], working)
        dk, dv = np.zeros_like(keys), np.zeros_like(values)
        for at in span.tiles():
            rows = _grad_rows(arrays, at, factor)
            for begin, end in span.blocks(at):
                block = slice(begin - first, end - first)
                k, v, own_dk, own_dv = (x[:, :, block] for x in (keys, values, dk, dv))
                hidden = _hidden(span, at, begin, end)
                _add_block(rows, k, v, own_dk, own_dv, hidden, tiles, softcap)
            np.multiply(rows.dq, working(softmax_scale), out=rows.dq)
            if rows.dead is not None:
                np.copyto(rows.dq, 0, where=rows.dead)
            grad = arrays.dq[:, :, :, at]
            _store(grad, rows.dq.reshape(grad.shape), accumulate)
        if softcap:
            dk *= working(softcap)  # the rows of q were scaled in units of the cap
        task.sums.add(task.place, first, dk, dv)


@dataclass(frozen=True, eq=False)
class _GradRows:
    """A tile of rows in working precision; the query heads of a group are stacked."""

    q: NDArray  # [batch, heads_kv, group * rows, head_dim_qk], times a factor
    dout: NDArray  # [batch, heads_kv, group * rows, head_dim_v]
    lse: NDArray  # [batch, heads_kv, group * rows, 1]
    delta: NDArray  # [batch, heads_kv, group * rows, 1]
    dq: NDArray  # as q: the sum over the blocks so far, without the softmax scale
    dead: NDArray[np.bool_] | None  # as lse: lse is -inf; None if it is in no row


def _grad_rows(arrays: _GradArrays, at: slice, factor: float) -> _GradRows:
    """The rows ``at`` of the arrays of a task."""
    working = _working_type(arrays.q.dtype)
    stacked = (*arrays.q.shape[:2], arrays.q.shape[2] * (at.stop - at.start))

    def rows(x: NDArray) -> NDArray:
        x = x[:, :, :, at].astype(working)
        return x.reshape(*stacked, x.shape[4] if x.ndim == 5 else 1)

    q, dout, lse = rows(arrays.q) * working(factor), rows(arrays.dout), rows(arrays.lse)
    if arrays.delta is not None:
        delta = rows(arrays.delta)
    else:
        assert arrays.out is not None  # _run_backward
        delta = (dout * rows(arrays.out)).sum(axis=-1, keepdims=True)
        if arrays.dlse is not None:
            delta -= rows(arrays.dlse)
    dead = lse == -np.inf
    if dead.any():
        for x in (q, dout, delta):
            np.copyto(x, 0, where=dead)
    return _GradRows(q, dout, lse, delta, np.zeros_like(q), dead if dead.any() else None)


def _add_block(
    rows: _GradRows,
    k: NDArray,  # [batch, heads_kv, keys, head_dim_qk]
    v: NDArray,  # [batch, heads_kv, keys, head_dim_v]
    dk: NDArray,  # as k
    dv: NDArray,  # as v
    hidden: NDArray[np.bool_] | None,  # [rows, keys]
    tiles: NDArray,  # two, with a softcap three buffers for all pairs
    softcap: float,
) -> None:
    """Add what the pairs of a tile of rows and a block of keys contribute to dq, dk and dv."""
    shape = (*rows.q.shape[:3], k.shape[2])
    p, ds, *slopes = (tile[: math.prod(shape)].reshape(shape) for tile in tiles)

    np.matmul(rows.q, np.swapaxes(k, -1, -2), out=p)
    if softcap:
        slope = slopes[0]  # of the tanh
        np.tanh(p, out=p)
        np.multiply(p, p, out=slope)
        np.subtract(1, slope, out=slope)
        p *= p.dtype.type(softcap)
    p -= rows.lse
    np.exp(p, out=p)
    _clear(p, hidden, rows.dead)

    np.matmul(rows.dout, np.swapaxes(v, -1, -2), out=ds)
    ds -= rows.delta
    ds *= p
    if softcap:
        ds *= slope
    _clear(ds, hidden, rows.dead)

    hidden_by_key = None
    if hidden is not None:
        hidden_by_key = np.tile(hidden, (shape[2] // len(hidden), 1)).T
    _add_product(dv, np.swapaxes(p, -1, -2), rows.dout, hidden_by_key)
    _add_product(dk, np.swapaxes(ds, -1, -2), rows.q, hidden_by_key)
    _add_product(rows.dq, ds, k, hidden)


def _clear(
    pairs: NDArray, hidden: NDArray[np.bool_] | None, dead: NDArray[np.bool_] | None
) -> None:
    """Set what must contribute nothing to 0, whatever it is now."""
    if hidden is not None:
        batch, heads_kv = pairs.shape[:2]
        np.copyto(pairs.reshape(batch, heads_kv, -1, *hidden.shape), 0, where=hidden)
    if dead is not None:
        np.copyto(pairs, 0, where=dead)


# -- threads ---------------------------------------------------------------------------------------

# Note [One BLAS thread per worker]: the softmax between the two products is half of the time and
# NumPy runs it on the calling thread, so parallelism has to come from threads of ours. OpenBLAS's
# own threads must then stand back: its pool serves one caller at a time, and the workers queue for
# it (0.60 s instead of 0.30 s for the shape of Note [Host tile sizes]). The setting is
# process-wide, hence counted, and restored when the last worker has left.
_blas_lock = threading.Lock()
_blas_users = 0
_blas_threads_before = 0


@functools.cache
def _blas_function(verb: str) -> Callable[..., int] | None:
    """OpenBLAS's {get,set}_num_threads inside whatever library NumPy itself is linked to."""
    for module in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        try:
            spec = importlib.util.find_spec(module)
            library = ctypes.CDLL(spec.origin) if spec is not None and spec.origin else None
        except (ImportError, OSError):
            continue
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", ""):
                function = getattr(library, f"{prefix}_{verb}_num_threads{suffix}", None)
                if function is not None:
                    return function
    return None


def _num_threads() -> int:
    """As many threads as BLAS would use (the user's own limit), else one per core we may run on."""
    get = _blas_function("get")
    if get is not None and _blas_users == 0:
        return max(1, int(get()))
    if _blas_users:
        return max(1, _blas_threads_before)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _single_threaded_blas() -> Iterator[None]:
    """Hold OpenBLAS to one thread per caller. See Note [One BLAS thread per worker]."""
    global _blas_users, _blas_threads_before
    get, put = _blas_function("get"), _blas_function("set")
    if get is None or put is None:
        yield
        return
    with _blas_lock:
        if _blas_users == 0:
            _blas_threads_before = int(get())
            put(1)
        _blas_users += 1
    try:
        yield
    finally:
        with _blas_lock:
            _blas_users -= 1
            if _blas_users == 0:
                put(_blas_threads_before)
