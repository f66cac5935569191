"""The CPU path: exact attention for NumPy arrays, by a tiled online softmax over BLAS.

Served because the caller passed NumPy arrays; an array on a GPU never comes here. The algorithm is
FlashAttention's (Dao et al. 2022, arXiv:2205.14135; the running maximum and sum are those of
Milakov and Gimelshein 2018, arXiv:1805.02867): the scores exist only as tiles of 512 KiB that stay
in a core's L2 cache, so that the memory used beyond the arguments is O(seqlen) per thread.

One task is a range of query rows of some (batch, head_kv) pairs. The query heads that share a
head_kv are stacked into the rows of one matrix product, and short sequences are stacked over batch
and heads, so that neither many query heads nor a batch of tiny sequences costs a Python loop each.
Tasks run on a thread pool: NumPy and BLAS release the interpreter lock while they work.

float16 and bfloat16 are computed in float32, float32 in float32, float64 in float64.
What the results mean for masked rows, NaN and infinities is defined in ``reference.py``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["attention", "attention_varlen", "merge"]

# Note [Host tile sizes]: a tile of 256 x 512 float32 scores is 512 KiB; with a block of K and V
# and the accumulator it fits the 1 MiB L2 of a server core, and its calls of NumPy and BLAS are
# long enough to hide what a call costs. Measured on 2 cores of an AMD EPYC (Zen 4), batch 1, 8
# heads, 4096 keys, head_dim 64, float32, full / causal: 256 x 512 0.28 / 0.18 s, 512 x 256 0.29 /
# 0.18, 128 x 512 0.31 / 0.18, 256 x 256 0.32 / 0.18, 64 x 512 0.38 / 0.24, 128 x 128 0.55 / 0.31;
# 2026-11-29.
_TILE_ROWS = 256
_TILE_BYTES = 512 * 1024
_MIN_KEYS = 64
_MAX_KEYS = 2048
# More tasks than threads, so that the unequal work of a causal mask evens out.
_TASKS_PER_THREAD = 4
# Fewer scores than this take less time than it takes to start threads.
_SCORES_WORTH_A_THREAD = 1 << 18


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
    shifts = np.broadcast_to(np.asarray(shift, np.int64), (batch,))
    if not lengths and (shifts == shifts[:1]).all():
        shift = int(shifts[0]) if batch else 0
        problems = [_Problem(q, k, v, out, lse, left, right, shift)]
    else:
        used_q = _lengths("seqused_q", seqused_q, batch, seqlen_q)
        used_kv = _lengths("seqused_kv", seqused_kv, batch, k.shape[1])
        problems = [
            _Problem(
                q[b : b + 1, : used_q[b]],
                k[b : b + 1, : used_kv[b]],
                v[b : b + 1, : used_kv[b]],
                out[b : b + 1, : used_q[b]],
                None if lse is None else lse[b : b + 1, :, : used_q[b]],
                left,
                right,
                int(shifts[b]),
            )
            for b in range(batch)
        ]
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
    starts_q = _cumulative("cu_seqlens_q", cu_seqlens_q, total_q)
    starts_kv = _cumulative("cu_seqlens_kv", cu_seqlens_kv, k.shape[0])
    batch = len(starts_q) - 1
    if len(starts_kv) != len(starts_q):
        raise ValueError(
            f"cu_seqlens_kv: {len(starts_kv)} entries, but cu_seqlens_q has {len(starts_q)}"
        )
    out, lse = _outputs(q, v, (heads_q, total_q), out, want_lse, padded=True)
    shifts = np.broadcast_to(np.asarray(shift, np.int64), (batch,))
    used_q = _lengths("seqused_q", seqused_q, batch, np.diff(starts_q))
    used_kv = _lengths("seqused_kv", seqused_kv, batch, np.diff(starts_kv))
    problems = []
    for first, count in _runs(starts_q, starts_kv, used_q, used_kv, shifts):
        begin_q, begin_kv = int(starts_q[first]), int(starts_kv[first])
        problems.append(
            _Problem(
                _unpack(q, begin_q, count, int(used_q[first])),
                _unpack(k, begin_kv, count, int(used_kv[first])),
                _unpack(v, begin_kv, count, int(used_kv[first])),
                _unpack(out, begin_q, count, int(used_q[first])),
                None
                if lse is None
                else _unpack(lse.T, begin_q, count, int(used_q[first])).transpose(0, 2, 1),
                left,
                right,
                int(shifts[first]),
            )
        )
    _run(problems, softmax_scale, softcap)
    return out, lse


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


def _lengths(
    name: str, lengths: ArrayLike | None, batch: int, limit: int | NDArray[np.int64]
) -> NDArray[np.int64]:
    limits = np.broadcast_to(np.asarray(limit, np.int64), (batch,))
    if lengths is None:
        return limits
    used = np.asarray(lengths).astype(np.int64)
    if used.shape != (batch,):
        raise ValueError(f"{name}: expected shape [{batch}], got {list(used.shape)}")
    if (used < 0).any() or (used > limits).any():
        raise ValueError(f"{name}: lengths must be between 0 and those of the arrays, got {used}")
    return used


def _cumulative(name: str, starts: ArrayLike, total: int) -> NDArray[np.int64]:
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


def _runs(
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


def _unpack(x: NDArray, begin: int, count: int, length: int) -> NDArray:
    """View rows of [total, ...] as [count, length, ...]."""
    return x[begin : begin + count * length].reshape(count, length, *x.shape[1:])


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


@dataclass(frozen=True, eq=False)
class _Task:
    """Query rows [row_begin, row_end) of some sequences and kv heads, as views of a problem."""

    q: NDArray  # [batch, heads_kv, group, seqlen_q, head_dim_qk]
    k: NDArray  # [batch, heads_kv, seqlen_kv, head_dim_qk]
    v: NDArray  # [batch, heads_kv, seqlen_kv, head_dim_v]
    out: NDArray  # [batch, heads_kv, group, seqlen_q, head_dim_v]
    lse: NDArray | None  # [batch, heads_kv, group, seqlen_q]
    row_begin: int
    row_end: int
    tile_rows: int
    tile_keys: int
    left: int | None
    right: int | None
    shift: int


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


def _tasks(problem: _Problem, num_tasks: int) -> Iterator[_Task]:
    """Cut a problem into at least num_tasks tasks where it is large enough; longest rows first."""
    batch, seqlen_q, heads_q, head_dim = problem.q.shape
    seqlen_kv, heads_kv = problem.k.shape[1], problem.k.shape[2]
    if 0 in (batch, seqlen_q, heads_q):
        return
    group = heads_q // heads_kv
    budget = _TILE_BYTES // np.dtype(_working_type(problem.q.dtype)).itemsize
    tile_rows = min(seqlen_q, max(16, _TILE_ROWS // group))
    tile_keys = min(max(_MIN_KEYS, budget // (tile_rows * group)), _MAX_KEYS, max(1, seqlen_kv))
    # As many (batch, head_kv) pairs at once as keep a tile, and its block of K and V, in budget.
    widest = max(tile_rows * group, head_dim + problem.v.shape[3])
    pairs = max(1, budget // (widest * tile_keys)) if tile_rows == seqlen_q else 1
    pairs = min(pairs, max(1, batch * heads_kv // num_tasks))
    heads_step = min(pairs, heads_kv)
    batch_step = max(1, pairs // heads_kv)

    num_chunks = math.ceil(batch / batch_step) * math.ceil(heads_kv / heads_step)
    num_tiles = math.ceil(seqlen_q / tile_rows)
    tiles_per_task = math.ceil(num_tiles / max(1, math.ceil(num_tasks / num_chunks)))
    rows_step = tiles_per_task * tile_rows

    q = _split_heads(problem.q, heads_kv)
    out = _split_heads(problem.out, heads_kv)
    k = problem.k.transpose(0, 2, 1, 3)
    v = problem.v.transpose(0, 2, 1, 3)
    lse = problem.lse
    if lse is not None:
        lse = _split_heads(lse.transpose(0, 2, 1)[..., None], heads_kv)[..., 0]
    for row_begin in reversed(range(0, seqlen_q, rows_step)):
        for b in range(0, batch, batch_step):
            for h in range(0, heads_kv, heads_step):
                at = (slice(b, b + batch_step), slice(h, h + heads_step))
                yield _Task(
                    q[at],
                    k[at],
                    v[at],
                    out[at],
                    None if lse is None else lse[at],
                    row_begin,
                    min(row_begin + rows_step, seqlen_q),
                    tile_rows,
                    tile_keys,
                    problem.left,
                    problem.right,
                    problem.shift,
                )


def _run(problems: Sequence[_Problem], softmax_scale: float, softcap: float) -> None:
    """Compute every problem, on as many threads as BLAS would have used."""
    scores = sum(p.q.shape[0] * p.q.shape[2] * p.q.shape[1] * p.k.shape[1] for p in problems)
    threads = min(_num_threads(), max(1, scores // _SCORES_WORTH_A_THREAD))
    wanted = max(1, threads * _TASKS_PER_THREAD // max(1, len(problems)))
    tasks = [task for problem in problems for task in _tasks(problem, wanted)]
    if not tasks:
        return
    if threads == 1 or len(tasks) == 1:
        for task in tasks:
            _attend(task, softmax_scale, softcap)
        return
    with (
        _single_threaded_blas(),
        ThreadPoolExecutor(min(threads, len(tasks)), "cupyflash-host") as pool,
    ):
        for _ in pool.map(lambda task: _attend(task, softmax_scale, softcap), tasks):
            pass


# -- the computation -------------------------------------------------------------------------------


def _attend(task: _Task, softmax_scale: float, softcap: float) -> None:
    """Compute one task, tile of rows by tile of rows."""
    working = _working_type(task.q.dtype)
    keys, values = np.swapaxes(task.k, -1, -2), task.v
    if task.row_end - task.row_begin > task.tile_rows:
        # Read more than once: convert once, and lay K out as the right operand BLAS likes best.
        keys = np.ascontiguousarray(keys, working)
        values = np.asarray(values, working)
    scores: NDArray = np.empty(
        math.prod(task.q.shape[:3]) * task.tile_rows * task.tile_keys, working
    )
    # Infinities and NaN in the input are the caller's: they flow through without a warning.
    with np.errstate(all="ignore"):
        for begin in range(task.row_begin, task.row_end, task.tile_rows):
            rows = slice(begin, min(begin + task.tile_rows, task.row_end))
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
    ones = np.ones((task.tile_keys, 1), working)
    first, last = _key_range(task, rows)
    for begin in range(first, last, task.tile_keys):
        end = min(begin + task.tile_keys, last)
        shape = (*stacked, end - begin)
        scores = scores_buffer[: math.prod(shape)].reshape(shape)
        np.matmul(q, np.asarray(keys[..., begin:end], working), out=scores)
        if softcap:
            np.tanh(scores, out=scores)
            scores *= working.type(softcap)
        hidden = _hidden(task, rows, begin, end)
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


def _key_range(task: _Task, rows: slice) -> tuple[int, int]:
    """The keys that any of the rows sees: blocks outside of it are never touched."""
    first, last = 0, task.k.shape[2]
    if task.left is not None:
        first = max(first, rows.start + task.shift - task.left)
    if task.right is not None:
        last = min(last, rows.stop + task.shift + task.right)
    return first, last


def _hidden(task: _Task, rows: slice, begin: int, end: int) -> NDArray[np.bool_] | None:
    """Which (row, key) of a tile the mask hides, [rows, keys]; None if it hides nothing."""
    cut_right = task.right is not None and end - 1 > rows.start + task.shift + task.right
    cut_left = task.left is not None and begin < rows.stop - 1 + task.shift - task.left
    if not cut_right and not cut_left:
        return None
    keys = np.arange(begin, end)
    diagonal = np.arange(rows.start + task.shift, rows.stop + task.shift)[:, None]
    hidden = np.zeros((len(diagonal), len(keys)), bool)
    if cut_right:
        hidden |= keys > diagonal + task.right
    if cut_left:
        hidden |= keys < diagonal - task.left
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
