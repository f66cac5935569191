"""Exact attention in float64: the definition of correct that every other path is tested against.

Arrays are NumPy arrays of any floating type, shaped [batch, seqlen, heads, head_dim]. Everything is
computed row by row in float64, without tiles, without an online softmax and without a single trick,
so that this file can be checked by reading it. It imports NumPy and nothing else.

What it defines, for query row i and key j of one (batch, head):

    s_ij  = softmax_scale * <q_i, k_j>;  with softcap c > 0:  s_ij = c * tanh(s_ij / c)
    p_ij  = exp(s_ij - lse_i)   for the keys that row i may see,  0 for every other key
    lse_i = log(sum over the visible j of exp(s_ij))
    out_i = sum over the visible j of p_ij * v_j

Key j is visible to row i iff ``i + shift - left <= j <= i + shift + right``; a bound that is None
does not exist. Three consequences are part of the contract:

* A row that sees no key has ``out = 0`` and ``lse = -inf``. So has a row whose visible scores are
  all -inf: both are a sum over nothing.
* A hidden key contributes nothing, whatever its K and V hold: there is no 0 * NaN.
* A visible NaN, or a visible score of +inf, makes the whole row NaN, and its lse too.

The gradients, from those of the loss with respect to out (dout) and to lse (dlse, zero if absent):

    delta_i = <dout_i, out_i> - dlse_i
    dv_j    = sum over i of p_ij * dout_i
    ds_ij   = p_ij * (<dout_i, v_j> - delta_i);  with a softcap:  * (1 - (s_ij / c)^2)
    dq_i    = softmax_scale * sum over j of ds_ij * k_j
    dk_j    = softmax_scale * sum over i of ds_ij * q_i

Each sum is over the visible pairs; those for dk and dv are over all query heads of the group too.
Hence the same consequences:

* A row that sees no key, or only scores of -inf, has ``dq = 0`` and adds nothing to dk and dv,
  whatever its q and dout hold. A key that no row sees has ``dk = dv = 0``.
* A hidden pair contributes nothing, whatever q, dout, k and v hold: there is no 0 * NaN.
* A row with a NaN in lse makes dk and dv of all keys that it sees NaN, and its own dq.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Comparison",
    "Expectation",
    "GradComparison",
    "GradExpectation",
    "attention",
    "attention_backward",
    "compare",
    "expect",
    "expect_backward",
    "largest_distance",
    "largest_magnitude",
    "merge",
    "mismatch",
    "rounded_attention",
    "rounded_attention_backward",
    "times_visible",
    "unit_roundoff",
    "visible_keys",
]

# Rows handled at a time: bounds the memory to a few hundred MB at 120,000 keys, 1 GB for gradients.
_ROWS = 128


def visible_keys(
    rows: NDArray[np.int64], seqlen_kv: int, left: int | None, right: int | None, shift: int
) -> NDArray[np.bool_]:
    """Which keys each query row may see.

    Args:
        rows: query indices, shape [rows].
        seqlen_kv: number of keys.
        left: keys visible before the diagonal, inclusive count; None for all of them.
        right: keys visible after the diagonal, inclusive count; None for all of them.
        shift: the key on the diagonal of row i is i + shift.

    Returns:
        A boolean array [rows, seqlen_kv].
    """
    distance = np.arange(seqlen_kv)[None, :] - (rows[:, None] + int(shift))
    visible = np.ones(distance.shape, bool)
    if left is not None:
        visible &= distance >= -int(left)
    if right is not None:
        visible &= distance <= int(right)
    return visible


def attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    left: int | None = None,
    right: int | None = None,
    shift: int = 0,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    rows: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Attention as this module's docstring defines it.

    Args:
        q: queries [batch, seqlen_q, heads_q, head_dim_qk].
        k: keys [batch, seqlen_kv, heads_kv, head_dim_qk]; heads_q is a multiple of heads_kv, and
            query head h reads key head h // (heads_q // heads_kv).
        v: values [batch, seqlen_kv, heads_kv, head_dim_v].
        left, right, shift: the mask, see :func:`visible_keys`.
        softmax_scale: factor on the scores; None is head_dim_qk ** -0.5.
        softcap: bound on the scores through tanh; 0 is no bound.
        rows: where q holds only some of the queries, the index of each for the mask [seqlen_q].

    Returns:
        out [batch, seqlen_q, heads_q, head_dim_v] and lse [batch, heads_q, seqlen_q], float64.
    """
    options = _Options(left, right, shift, softmax_scale, softcap, rows)
    return _attention(q, k, v, options, np.float64, None)


def rounded_attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    left: int | None = None,
    right: int | None = None,
    shift: int = 0,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    rows: NDArray[np.int64] | None = None,
) -> tuple[NDArray, NDArray[np.float32]]:
    """The same attention as a plain framework computes it in the input's own precision.

    Scores and softmax are float32 (float64 for float64 input), the probabilities are rounded to the
    input's type before they meet V, and the output is rounded to the input's type. Its distance
    from :func:`attention` is what the input's precision costs; a fused kernel is right when it does
    not do much worse, see :func:`expect`.

    Args: as :func:`attention`.

    Returns:
        out in q's dtype and lse, shaped as :func:`attention` returns them.
    """
    options = _Options(left, right, shift, softmax_scale, softcap, rows)
    out, lse = _attention(q, k, v, options, _working_type(q.dtype), q.dtype)
    return out.astype(q.dtype), lse


@dataclass(frozen=True, eq=False)
class _Options:
    """The keyword arguments of :func:`attention`."""

    left: int | None = None
    right: int | None = None
    shift: int = 0
    softmax_scale: float | None = None
    softcap: float = 0.0
    rows: NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class _Block:
    """Some query rows of a head and all keys that there are, in the type to compute in."""

    rows: tuple[int, slice, int]  # where the rows lie in [batch, seqlen_q, heads_q, ...]
    row_values: tuple[int, int, slice]  # and in [batch, heads_q, seqlen_q]
    all_keys: tuple[int, slice, int]  # where the keys lie in [batch, seqlen_kv, heads_kv, ...]
    queries: NDArray  # [rows, head_dim_qk]
    keys: NDArray  # [seqlen_kv, head_dim_qk]
    values: NDArray  # [seqlen_kv, head_dim_v]
    scores: NDArray  # [rows, seqlen_kv], of all pairs
    visible: NDArray[np.bool_]  # [rows, seqlen_kv]


def _blocks(
    q: NDArray, k: NDArray, v: NDArray, options: _Options, working: type
) -> Iterator[_Block]:
    """All query rows; none if there are no keys."""
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_kv, heads_kv = k.shape[1], k.shape[2]
    if seqlen_kv == 0:
        return
    rows = np.arange(seqlen_q) if options.rows is None else options.rows
    scale, cap = _scale(q, options, working), working(options.softcap)
    for b, h in np.ndindex(batch, heads_q):
        all_keys = (b, slice(None), h // (heads_q // heads_kv))
        keys: NDArray = k[all_keys].astype(working)
        values: NDArray = v[all_keys].astype(working)
        for start in range(0, seqlen_q, _ROWS):
            at = slice(start, min(start + _ROWS, seqlen_q))
            queries: NDArray = q[b, at, h].astype(working)
            scores = (queries @ keys.T) * scale
            if cap:
                scores = cap * np.tanh(scores / cap)
            visible = visible_keys(rows[at], seqlen_kv, options.left, options.right, options.shift)
            yield _Block((b, at, h), (b, h, at), all_keys, queries, keys, values, scores, visible)


def _scale(q: NDArray, options: _Options, working: type) -> Any:
    """softmax_scale in the type to compute in."""
    default = q.shape[3] ** -0.5
    return working(default if options.softmax_scale is None else options.softmax_scale)


def _working_type(dtype: np.dtype) -> type:
    """What a plain framework computes scores in."""
    return np.float64 if dtype == np.float64 else np.float32


def _attention(
    q: NDArray,
    k: NDArray,
    v: NDArray,
    options: _Options,
    working: type,
    rounding: np.dtype | None,
) -> tuple[NDArray, NDArray]:
    """Attention computed in the type ``working``; probabilities rounded to ``rounding``, if any."""
    batch, seqlen_q, heads_q, _ = q.shape
    out: NDArray = np.zeros((batch, seqlen_q, heads_q, v.shape[3]), working)
    lse: NDArray = np.full((batch, heads_q, seqlen_q), -np.inf, working)
    with np.errstate(all="ignore"):
        for block in _blocks(q, k, v, options, working):
            p, row_lse = _softmax(block.scores, block.visible)
            row_out = times_visible(_rounded(p, rounding), block.visible, block.values)
            out[block.rows] = np.where(row_lse[:, None] == -np.inf, 0, row_out)
            lse[block.row_values] = row_lse
    return out, lse


def _softmax(scores: NDArray, visible: NDArray[np.bool_]) -> tuple[NDArray, NDArray]:
    """Probabilities, 0 at hidden keys and in rows that see nothing, and the log-sum-exp of rows."""
    scores = np.where(visible, scores, -np.inf)
    row_max = scores.max(axis=1, keepdims=True)
    empty = row_max == -np.inf
    weights = np.exp(scores - np.where(empty, 0, row_max))
    row_sum = weights.sum(axis=1, keepdims=True)
    lse = (row_max + np.log(row_sum))[:, 0]
    return np.where(visible, weights / np.where(empty, 1, row_sum), 0), lse


def _rounded(x: NDArray, rounding: np.dtype | None) -> NDArray:
    """x as it is after a visit to the type ``rounding``, if any."""
    return x if rounding is None else x.astype(rounding).astype(x.dtype)


def times_visible(probabilities: NDArray, visible: NDArray[np.bool_], values: NDArray) -> NDArray:
    """probabilities @ values where a hidden key counts for nothing, even if its value is NaN."""
    special = np.flatnonzero(~np.isfinite(values).all(axis=1))
    finite = values.copy()
    finite[special] = 0
    out = probabilities @ finite
    for j in special:
        rows = visible[:, j]
        out[rows] += probabilities[rows, j, None] * values[j]
    return out


def merge(
    outs: list[NDArray], lses: list[NDArray]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The attention over the union of disjoint key sets, from the attention over each of them.

    lse = log(sum_p exp(lse_p)) and out = sum_p exp(lse_p - lse) * out_p. A part that saw no key
    (lse_p = -inf) counts for nothing; where no part saw one, out is 0 and lse is -inf.

    Args:
        outs: parts [batch, seqlen, heads, head_dim] or packed [total, heads, head_dim].
        lses: their natural log-sum-exps [batch, heads, seqlen] or [heads, total].

    Returns:
        The merged out and lse, float64.
    """
    logs = np.stack([np.asarray(lse, np.float64) for lse in lses])
    row_max = logs.max(axis=0)
    anchor = np.where(row_max == -np.inf, 0, row_max)
    with np.errstate(divide="ignore"):
        lse = anchor + np.log(np.exp(logs - anchor).sum(axis=0))
    out = np.zeros(outs[0].shape, np.float64)
    for part, log in zip(outs, logs, strict=True):
        weight = np.swapaxes(np.exp(log - np.where(row_max == -np.inf, 0, lse)), -1, -2)[..., None]
        out += np.where(weight == 0, 0, weight * np.asarray(part, np.float64))
    return out, lse


# -- gradients -------------------------------------------------------------------------------------


def attention_backward(
    dout: NDArray,
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    dlse: NDArray | None = None,
    left: int | None = None,
    right: int | None = None,
    shift: int = 0,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    rows: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The gradients of :func:`attention` as this module's docstring defines them.

    Args:
        dout: gradient with respect to out, [batch, seqlen_q, heads_q, head_dim_v].
        q, k, v: the inputs of :func:`attention`.
        dlse: gradient with respect to lse, [batch, heads_q, seqlen_q]; None is zero.
        left, right, shift, softmax_scale, softcap, rows: as in :func:`attention`; with ``rows``,
            dk and dv are sums over these rows only.

    Returns:
        dq, dk and dv, shaped as q, k and v, float64.
    """
    options = _Options(left, right, shift, softmax_scale, softcap, rows)
    return _attention_backward(dout, q, k, v, dlse, options, np.float64, None)


def rounded_attention_backward(
    dout: NDArray,
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    dlse: NDArray | None = None,
    left: int | None = None,
    right: int | None = None,
    shift: int = 0,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    rows: NDArray[np.int64] | None = None,
) -> tuple[NDArray, NDArray, NDArray]:
    """The same gradients as a plain framework computes them in the input's own precision.

    Scores, softmax, delta and ds are float32 (float64 for float64 input). The output that delta is
    made of, p where it meets dout, and ds where it meets q and k are rounded to the input's type,
    and so are the gradients in the end.

    Args: as :func:`attention_backward`.

    Returns:
        dq, dk and dv in q's dtype.
    """
    options = _Options(left, right, shift, softmax_scale, softcap, rows)
    working = _working_type(q.dtype)
    dq, dk, dv = _attention_backward(dout, q, k, v, dlse, options, working, q.dtype)
    with np.errstate(over="ignore"):
        return dq.astype(q.dtype), dk.astype(q.dtype), dv.astype(q.dtype)


def _attention_backward(
    dout: NDArray,
    q: NDArray,
    k: NDArray,
    v: NDArray,
    dlse: NDArray | None,
    options: _Options,
    working: type,
    rounding: np.dtype | None,
) -> tuple[NDArray, NDArray, NDArray]:
    """Gradients computed in the type ``working``; out, p and ds rounded to ``rounding``, if any."""
    dq: NDArray = np.zeros(q.shape, working)
    dk: NDArray = np.zeros(k.shape, working)
    dv: NDArray = np.zeros(v.shape, working)
    scale = _scale(q, options, working)
    with np.errstate(all="ignore"):
        for block in _blocks(q, k, v, options, working):
            p, row_lse = _softmax(block.scores, block.visible)
            # A row of nothing but -inf contributes no more than one that sees nothing.
            visible = block.visible & (row_lse != -np.inf)[:, None]
            p_rounded = _rounded(p, rounding)
            row_out = _rounded(times_visible(p_rounded, visible, block.values), rounding)

            d_out: NDArray = dout[block.rows].astype(working)
            delta = (d_out * row_out).sum(axis=1)
            if dlse is not None:
                delta = delta - dlse[block.row_values].astype(working)
            ds = p * (d_out @ block.values.T - delta[:, None])
            if options.softcap:
                ds *= 1 - (block.scores / working(options.softcap)) ** 2
            ds = _rounded(np.where(visible, ds, 0), rounding)

            dq[block.rows] = scale * times_visible(ds, visible, block.keys)
            dk[block.all_keys] += scale * times_visible(ds.T, visible.T, block.queries)
            dv[block.all_keys] += times_visible(p_rounded.T, visible.T, d_out)
    return dq, dk, dv


# -- comparing a result with the reference ---------------------------------------------------------


def unit_roundoff(dtype: np.dtype) -> float:
    """Largest relative error of rounding to dtype: 2**-11 for float16, 2**-8 for bfloat16."""
    if np.dtype(dtype).name == "bfloat16":
        return 2.0**-8
    return float(np.finfo(dtype).eps) / 2


@dataclass(frozen=True)
class Comparison:
    """How far a result is from the reference, and how far it may be.

    Attributes:
        error: largest absolute difference in out.
        bound: what error may be, see :func:`expect`.
        lse_error: largest absolute difference in lse, 0 when there was none to compare.
        lse_bound: what lse_error may be.
        problem: what is wrong, or None.
    """

    error: float
    bound: float
    lse_error: float
    lse_bound: float
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, eq=False)
class Expectation:
    """The right result of one problem, and how far another may be from it.

    Attributes:
        out, lse: as :func:`attention` returns them.
        bound, lse_bound: largest absolute difference allowed.
    """

    out: NDArray[np.float64]
    lse: NDArray[np.float64]
    bound: float
    lse_bound: float

    def compare(self, out: NDArray, lse: NDArray | None) -> Comparison:
        """Hold a result against it. NaN and infinities must be where they should; only then are
        magnitudes compared. lse may be None."""
        problem = mismatch("out", out, self.out, self.bound)
        if problem is None and lse is not None:
            problem = mismatch("lse", lse, self.lse, self.lse_bound)
        return Comparison(
            largest_distance(out, self.out),
            self.bound,
            0.0 if lse is None else largest_distance(lse, self.lse),
            self.lse_bound,
            problem,
        )


def expect(q: NDArray, k: NDArray, v: NDArray, **options: Any) -> Expectation:
    """The right result of a problem, with a tolerance made for these very inputs.

    The bound on out is twice the error of :func:`rounded_attention` plus a floor: two roundings of
    the largest output for 16-bit types, because a kernel may round a probability and the output
    where the plain computation happens to be exact; 64 roundings of the largest value for float32
    and float64, where the order of the additions decides. The bound on lse is twice that error +
    1e-4 (the hardware's exp2 and log2 are approximate) + 16 float32 roundings of the largest lse:
    tensor cores truncate when they add (an H200 was off by 4.6e-4 at 434, float16, head_dim 256).

    Args:
        q, k, v: the inputs.
        options: the keyword arguments of :func:`attention`.
    """
    out, lse = attention(q, k, v, **options)
    rounded, rounded_lse = rounded_attention(q, k, v, **options)
    if np.dtype(q.dtype).itemsize == 2:
        floor = 2 * unit_roundoff(q.dtype) * largest_magnitude(out)
    else:
        floor = 64 * unit_roundoff(q.dtype) * largest_magnitude(v)
    lse_floor = 1e-4 + 16 * 2.0**-24 * largest_magnitude(lse)
    return Expectation(
        out,
        lse,
        2 * largest_distance(rounded, out) + floor,
        2 * largest_distance(rounded_lse, lse) + lse_floor,
    )


def compare(
    out: NDArray, lse: NDArray | None, q: NDArray, k: NDArray, v: NDArray, **options: Any
) -> Comparison:
    """Hold a result against the reference: ``expect(q, k, v, **options).compare(out, lse)``."""
    return expect(q, k, v, **options).compare(out, lse)


@dataclass(frozen=True)
class GradComparison:
    """How far gradients are from the reference, and how far they may be.

    Attributes:
        errors: largest absolute difference in dq, dk and dv.
        bounds: what each may be, see :func:`expect_backward`.
        problem: what is wrong, or None.
    """

    errors: tuple[float, float, float]
    bounds: tuple[float, float, float]
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, eq=False)
class GradExpectation:
    """The right gradients of one problem, and how far others may be from them.

    Attributes:
        dq, dk, dv: as :func:`attention_backward` returns them.
        bounds: largest absolute difference allowed in each.
    """

    dq: NDArray[np.float64]
    dk: NDArray[np.float64]
    dv: NDArray[np.float64]
    bounds: tuple[float, float, float]

    def compare(self, dq: NDArray, dk: NDArray, dv: NDArray) -> GradComparison:
        """Hold gradients against it. NaN and infinities must be where they should; only then are
        magnitudes compared."""
        actual, expected = (dq, dk, dv), (self.dq, self.dk, self.dv)
        problems = map(mismatch, ("dq", "dk", "dv"), actual, expected, self.bounds)
        error_q, error_k, error_v = map(largest_distance, actual, expected)
        return GradComparison(
            (error_q, error_k, error_v),
            self.bounds,
            next((problem for problem in problems if problem is not None), None),
        )


def expect_backward(
    dout: NDArray,
    q: NDArray,
    k: NDArray,
    v: NDArray,
    *,
    dlse: NDArray | None = None,
    **options: Any,
) -> GradExpectation:
    """The right gradients of a problem, with tolerances made for these very inputs.

    The bound on a gradient is twice the error of :func:`rounded_attention_backward` plus, for
    16-bit types, two roundings of the largest value, because a kernel may round where the plain
    computation happens to be exact, plus the largest error that float32 (float64 for float64 input)
    may make where the plain computation makes none, see ``_working_errors``.

    Args:
        dout: gradient with respect to out.
        q, k, v: the inputs of :func:`attention`.
        dlse: gradient with respect to lse, or None.
        options: the other keyword arguments of :func:`attention_backward`.
    """
    exact = attention_backward(dout, q, k, v, dlse=dlse, **options)
    rounded = rounded_attention_backward(dout, q, k, v, dlse=dlse, **options)
    errors = _working_errors(dout, q, k, v, dlse, _Options(**options))
    roundings = 2 * unit_roundoff(q.dtype) if np.dtype(q.dtype).itemsize == 2 else 0.0
    bound_q, bound_k, bound_v = (
        2 * largest_distance(plain, right)
        + roundings * largest_magnitude(right)
        + largest_magnitude(error)
        for plain, right, error in zip(rounded, exact, errors, strict=True)
    )
    return GradExpectation(*exact, (bound_q, bound_k, bound_v))


def _working_errors(
    dout: NDArray,
    q: NDArray,
    k: NDArray,
    v: NDArray,
    dlse: NDArray | None,
    options: _Options,
) -> tuple[NDArray, NDArray, NDArray]:
    """How far dq, dk and dv may be off because they are computed in float32 (float64).

    Two errors matter. p_ij = exp(s_ij - lse_i) turns the error of s and lse, 16 roundings of their
    size (:func:`expect`), into one relative to p. And <dout_i, v_j> - delta_i may cancel: each side
    is off by 16 roundings of what it would be if all its terms were positive.
    """
    working = _working_type(q.dtype)
    dq: NDArray = np.zeros(q.shape, working)
    dk: NDArray = np.zeros(k.shape, working)
    dv: NDArray = np.zeros(v.shape, working)
    unit = working(16 * unit_roundoff(np.dtype(working)))
    scale = abs(_scale(q, options, working))
    with np.errstate(all="ignore"):
        for block in _blocks(q, k, v, options, working):
            p, row_lse = _softmax(block.scores, block.visible)
            visible = block.visible & (row_lse != -np.inf)[:, None]
            # Rows that see nothing have no part in the sums, whatever they hold.
            empty = ~visible.any(axis=1)[:, None]
            d_out: NDArray = np.where(empty, 0, dout[block.rows].astype(working))
            queries = np.where(empty, 0, block.queries)
            dp = d_out @ block.values.T
            delta = (p * dp).sum(axis=1)
            if dlse is not None:
                delta = delta - dlse[block.row_values].astype(working)
            terms = np.abs(d_out) @ np.abs(block.values).T + np.abs(delta)[:, None]
            p_error = unit * p * (1 + np.abs(row_lse))[:, None]
            ds_error = p_error * np.abs(dp - delta[:, None]) + unit * p * terms
            if options.softcap:
                ds_error *= 1 - (block.scores / working(options.softcap)) ** 2
            p_error, ds_error = (np.where(visible, x, 0) for x in (p_error, ds_error))

            dq[block.rows] = scale * (ds_error @ np.abs(block.keys))
            dk[block.all_keys] += scale * (ds_error.T @ np.abs(queries))
            dv[block.all_keys] += p_error.T @ np.abs(d_out)
    return dq, dk, dv


def largest_magnitude(x: NDArray) -> float:
    """Largest finite magnitude, 0 if there is none."""
    x = np.asarray(x).astype(np.float64)
    return float(np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0))


def largest_distance(actual: NDArray, expected: NDArray) -> float:
    """Largest |actual - expected| over the positions where both are finite."""
    if np.shape(actual) != expected.shape:
        return float("inf")
    actual = np.asarray(actual).astype(np.float64)
    finite = np.isfinite(actual) & np.isfinite(expected)
    return float(np.abs(np.where(finite, actual, 0) - np.where(finite, expected, 0)).max(initial=0))


def mismatch(name: str, actual: ArrayLike, expected: NDArray, bound: float) -> str | None:
    """Describe the first way in which actual is not expected to within bound; None if it is."""
    actual = np.asarray(actual)
    if actual.shape != expected.shape:
        return f"{name}: shape {actual.shape}, expected {expected.shape}"
    actual = actual.astype(np.float64)
    for what, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = test(actual) != test(expected)
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            return (
                f"{name}: {int(wrong.sum())} of {wrong.size} positions disagree about {what}, first"
                f" at {index}: got {actual[index]}, expected {expected[index]}"
            )
    with np.errstate(invalid="ignore"):
        distance = np.where(np.isfinite(expected), np.abs(actual - expected), 0)
    if distance.size and distance.max() > bound:
        index = tuple(int(i) for i in np.unravel_index(distance.argmax(), distance.shape))
        return (
            f"{name}: {int((distance > bound).sum())} of {distance.size} positions off by more than"
            f" {bound:.3g}, worst at {index}: got {actual[index]:.6g}, expected"
            f" {expected[index]:.6g}, error {distance[index]:.3g}"
        )
    return None
