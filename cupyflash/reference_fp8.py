"""Attention of 8-bit floats: what is right, and what rounding the probabilities to e4m3 costs.

Two computations tell an error of the format from an error of a kernel:

* ``attention`` is exact: ``reference.attention`` of number * scale, in float64.
* ``rounded_attention`` is what a kernel computes at best. Scores are products of e4m3 numbers,
  summed without error, rounded to float32 and then scaled. Blocks of keys are visited in order
  with the online softmax in base 2: with m the largest score of a row so far,

      p_ij = exp2(s_ij - m_i + max_offset)                       in (0, 2^max_offset]
      l_i  = sum of p_ij,    out_i = sum of e4m3(p_ij) * v_j / l_i

  The row sum is of unrounded p, in float32. The product of a block with its values, scales
  included, is exact and rounded to float32 once; then it is added to the float32 accumulator
  (two-level accumulation). e4m3 numbers end at 2^-9, so weights below 2^(-10 - max_offset) of the
  largest are lost; an offset of 8 leaves the factor 1.75 below 448.

Like ``reference.py`` this is meant to be checked by reading, and is imported by tests only.

References: Jay Shah et al., FlashAttention-3, 2024, arXiv:2407.08608, section 3.3. DeepSeek-AI,
DeepSeek-V3 Technical Report, 2024, arXiv:2412.19437, section 3.3.2 (two-level accumulation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupyflash import fp8, reference

MAX_OFFSET = 8.0
_ROWS = 128
_LOG2_E = np.log2(np.e)


@dataclass(frozen=True, eq=False)
class Scaled:
    """An operand: value = number * scale.

    Attributes:
        numbers: of e4m3, as float32, [batch, seqlen, heads, head_dim].
        scales: of each token and head, float32, [batch, seqlen, heads].
    """

    numbers: NDArray[np.float32]
    scales: NDArray[np.float32]

    @property
    def values(self) -> NDArray[np.float64]:
        """number * scale, exactly."""
        return self.numbers.astype(np.float64) * self.scales[..., None].astype(np.float64)


def attention(
    q: Scaled, k: Scaled, v: Scaled, **options: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The right out and lse; options as for ``reference.attention``."""
    return reference.attention(q.values, k.values, v.values, **options)


def rounded_attention(
    q: Scaled,
    k: Scaled,
    v: Scaled,
    *,
    left: int | None = None,
    right: int | None = None,
    shift: int = 0,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    max_offset: float = MAX_OFFSET,
    block: int = 128,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The same with probabilities rounded to e4m3, see the module's docstring.

    Args:
        q, k, v: the operands.
        left, right, shift, softmax_scale, softcap: as for ``reference.attention``.
        max_offset: log2 of the largest p.
        block: keys between two roundings of the accumulator.

    Returns:
        out [batch, seqlen_q, heads_q, head_dim_v] and lse [batch, heads_q, seqlen_q], float32.
    """
    batch, seqlen_q, heads_q, head_dim = q.numbers.shape
    seqlen_kv, heads_kv = k.numbers.shape[1:3]
    scale = np.float32(head_dim**-0.5 if softmax_scale is None else softmax_scale)
    out = np.zeros((batch, seqlen_q, heads_q, v.numbers.shape[3]), np.float32)
    lse = np.full((batch, heads_q, seqlen_q), -np.inf, np.float32)
    for b, h in np.ndindex(batch, heads_q):
        one = (b, slice(None), h // (heads_q // heads_kv) if heads_kv else 0)
        if seqlen_kv == 0:
            continue
        keys, values = k.numbers[one].astype(np.float64), v.values[one]
        for start in range(0, seqlen_q, _ROWS):
            at = slice(start, min(start + _ROWS, seqlen_q))
            queries = q.numbers[b, at, h].astype(np.float64)
            visible = reference.visible_keys(
                np.arange(at.start, at.stop), seqlen_kv, left, right, shift
            )
            with np.errstate(all="ignore"):
                scores = (queries @ keys.T).astype(np.float32)
                scores = scores * (scale * q.scales[b, at, h])[:, None] * k.scales[one]
                if softcap:
                    scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
                scores = np.where(visible, scores * np.float32(_LOG2_E), np.float32(-np.inf))
                out[b, at, h], lse[b, h, at] = _rows(scores, visible, values, max_offset, block)
    return out, lse


def _rows(
    scores: NDArray[np.float32],
    visible: NDArray[np.bool_],
    values: NDArray[np.float64],
    max_offset: float,
    block: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The online softmax over scores in base 2, [rows, seqlen_kv]."""
    rows, seqlen_kv = scores.shape
    top = np.full(rows, -np.inf, np.float32)
    total = np.zeros(rows, np.float32)
    sums = np.zeros((rows, values.shape[1]), np.float32)
    for first in range(0, seqlen_kv, block):
        at = slice(first, first + block)
        new_top = np.maximum(top, scores[:, at].max(axis=1))
        anchor = np.where(new_top == -np.inf, np.float32(0), new_top)
        p = np.exp2(scores[:, at] - anchor[:, None] + np.float32(max_offset))
        rounded = fp8.widen_e4m3(fp8.round_e4m3(p)).astype(np.float64)
        product = reference.times_visible(rounded, visible[:, at], values[at])
        decay = np.exp2(top - anchor)
        total = total * decay + p.sum(axis=1)
        sums = sums * decay[:, None] + product.astype(np.float32)
        top = new_top
    empty = top == -np.inf
    out = np.where(empty[:, None], np.float32(0), sums / np.where(empty, 1, total)[:, None])
    lse = (top - np.float32(max_offset)) / np.float32(_LOG2_E) + np.log(total)
    return out, np.where(empty, np.float32(-np.inf), lse).astype(np.float32)


def expect(
    q: Scaled,
    k: Scaled,
    v: Scaled,
    *,
    out_dtype: np.dtype,
    offsets: tuple[float, ...] = (MAX_OFFSET, MAX_OFFSET - 0.5),
    **options: Any,
) -> reference.Expectation:
    """The right result of a problem, with a tolerance made for these very inputs.

    The bound on out is twice the error of :func:`rounded_attention` plus two roundings of the
    largest output to its type. The largest probability of a row is a power of two and not rounded
    where the reference of the exponents is the maximum; a kernel whose reference lags behind rounds
    it too. So the largest error of several offsets counts. The bound on lse is that of
    ``reference.expect``: probabilities enter it unrounded.

    Args:
        q, k, v: the operands.
        out_dtype: of the output that will be compared, a 16-bit type.
        offsets: ``max_offset`` of each computation; the first alone is for kernels that always
            subtract the maximum.
        options: the keyword arguments of :func:`attention`.
    """
    out, lse = attention(q, k, v, **options)
    found = [rounded_attention(q, k, v, max_offset=offset, **options) for offset in offsets]
    error, lse_error = (
        max(reference.largest_distance(result[which], right) for result in found)
        for which, right in enumerate((out, lse))
    )
    floor = 2 * reference.unit_roundoff(out_dtype) * reference.largest_magnitude(out)
    lse_floor = 1e-4 + 16 * 2.0**-24 * reference.largest_magnitude(lse)
    return reference.Expectation(out, lse, 2 * error + floor, 2 * lse_error + lse_floor)
