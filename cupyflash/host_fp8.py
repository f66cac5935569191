"""The CPU path for 8-bit floats: exact attention of what numbers and scales say.

The operands of a few heads of one sequence at a time become float32 and go through ``host.py``, so
that memory beyond the arguments does not grow with the batch. Nothing is rounded that the operands
do not round: probabilities stay float32. ``reference_fp8.py`` says what a kernel adds to that.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cupyflash import fp8, host
from cupyflash.fp8 import Rows, Stored

# Heads are widened together as long as they fit this: enough work for all threads, and less than
# one head of a long sequence takes anyway (131,072 tokens of 128 channels: 64 MiB).
_STEP_BYTES = 1 << 24


def attention(
    q: Stored,
    k: Stored,
    v: Stored,
    starts: tuple[NDArray[np.int64], ...] = (),
    *,
    out: NDArray,
    softmax_scale: float,
    left: int | None = None,
    right: int | None = None,
    shift: int | ArrayLike = 0,
    softcap: float = 0.0,
    out_scale: float = 1.0,
    want_lse: bool = False,
    seqused_q: ArrayLike | None = None,
    seqused_kv: ArrayLike | None = None,
) -> NDArray[np.float32] | None:
    """Attention of 8-bit floats into ``out``.

    Args:
        q, k, v: in [batch, seqlen, heads, head_dim]; packed sequences are a batch of one.
        starts: (cu_seqlens_q, cu_seqlens_kv) of packed sequences, [batch + 1] each.
        out: where to write, [batch, seqlen_q, heads_q, head_dim_v], packed [total_q, heads_q,
            head_dim_v]: a 16-bit type, or e4m3 numbers of out / out_scale, saturated.
        left, right, shift, softmax_scale, softcap, want_lse, seqused_q, seqused_kv: as in
            ``host.attention``.
        out_scale: of e4m3 numbers.

    Returns:
        lse [batch, heads_q, seqlen_q], packed [heads_q, total_q], -inf in rows of no sequence, or
        None. Such rows of out are untouched.

    Raises:
        ValueError: lengths beyond those of the arrays.
    """
    batch, rows_q, heads_q, _ = q.arrangement.shape
    _, rows_kv, heads_kv, _ = k.arrangement.shape
    starts_q = starts_kv = None
    spans_q: int | NDArray = rows_q
    spans_kv: int | NDArray = rows_kv
    if starts:
        starts_q = host.cumulative_lengths("cu_seqlens_q", starts[0], rows_q)
        starts_kv = host.cumulative_lengths("cu_seqlens_kv", starts[1], rows_kv)
        spans_q, spans_kv = np.diff(starts_q), np.diff(starts_kv)
    count = q.arrangement.num_sequences
    used_q = host.used_lengths("seqused_q", seqused_q, count, spans_q)
    used_kv = host.used_lengths("seqused_kv", seqused_kv, count, spans_kv)
    shifts = np.broadcast_to(np.asarray(shift, np.int64), (count,))
    target = out[None] if starts else out
    lse = np.full((batch, heads_q, rows_q), -np.inf, np.float32)
    group = heads_q // heads_kv if heads_kv else 1
    places = zip(
        fp8.sequences(q.arrangement, starts_q),
        fp8.sequences(k.arrangement, starts_kv),
        fp8.sequences(v.arrangement, starts_kv),
    )
    for index, (of_q, of_k, of_v) in enumerate(places):
        queries = dataclasses.replace(of_q, length=int(used_q[index]))
        keys, values = (dataclasses.replace(x, length=int(used_kv[index])) for x in (of_k, of_v))
        at = slice(queries.first, queries.first + queries.length)
        step = _heads_at_a_time(q, v, queries, keys, group)
        for first in range(0, heads_kv, step):
            own_kv = slice(first, min(first + step, heads_kv))
            own_q = slice(own_kv.start * group, own_kv.stop * group)
            result, row_lse = host.attention(
                q.values(queries, own_q)[None],
                k.values(keys, own_kv)[None],
                v.values(values, own_kv)[None],
                softmax_scale=softmax_scale,
                left=left,
                right=right,
                shift=int(shifts[index]),
                softcap=softcap,
                want_lse=True,
            )
            _store(target[queries.batch, at, own_q], result[0], out_scale)
            assert row_lse is not None  # asked for
            lse[queries.batch, own_q, at] = row_lse[0]
    if not want_lse:
        return None
    return lse[0] if starts else lse


def _heads_at_a_time(q: Stored, v: Stored, queries: Rows, keys: Rows, group: int) -> int:
    """Of k and v; at least one."""
    head_dim_qk, head_dim_v = q.arrangement.shape[3], v.arrangement.shape[3]
    tokens = group * queries.length + keys.length
    return max(_STEP_BYTES // max(4 * tokens * (head_dim_qk + head_dim_v), 1), 1)


def _store(out: NDArray, values: NDArray[np.float32], out_scale: float) -> None:
    """Writes rounded values."""
    if out.dtype.itemsize > 1:
        with np.errstate(over="ignore"):
            out[...] = values.astype(out.dtype)
        return
    with np.errstate(all="ignore"):
        scaled = values / np.float32(out_scale)
    out.view(np.uint8)[...] = fp8.round_e4m3(scaled)
