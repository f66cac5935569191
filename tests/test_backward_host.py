"""The backward pass of the CPU path, through the public API and below it, held against float64."""

from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cupyflash
from cupyflash import host, reference
from tests import cases, paths
from tests.cases import DTYPES, EMULATED, Case


def grads_of(case: Case, **more: Any) -> Any:
    return paths.run_backward(paths.NUMPY, case, **more)


@pytest.mark.parametrize("case", cases.FORWARD, ids=str)
def test_case(case: Case) -> None:
    comparison = case.expected_grads.compare(*grads_of(case))
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize("case", cases.tagged_general(EMULATED), ids=str)
def test_general_case(case: cases.GeneralCase) -> None:
    problem = case.grads_problem(paths.run_general_backward(paths.NUMPY, case))
    assert problem is None, problem


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["full", "causal", "window", "heads", "value_dim"])
def test_wide_types(dtype: str, kind: str) -> None:
    fields: dict[str, Any] = {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (40, 3)},
        "heads": {"heads_q": 4, "heads_kv": 2, "causal": True},
        "value_dim": {"head_dim": 48, "head_dim_v": 80},
    }[kind]
    case = Case(f"backward_{dtype}_{kind}", 200, 330, batch=2, dtype=dtype, **fields)
    comparison = case.expected_grads.compare(*grads_of(case))
    assert comparison.ok, comparison.problem


SOME = Case("backward_some", 700, 900, batch=2, heads_q=4, heads_kv=2, causal=True)


def test_the_same_bits_every_time() -> None:
    expected = grads_of(SOME)
    for _ in range(5):
        for grad, same in zip(grads_of(SOME), expected):
            np.testing.assert_array_equal(grad, same)


def arrays_of(case: Case) -> tuple[Any, ...]:
    (dout, _), (out, lse) = case.gradients, case.forward_results
    return (dout.array, *(x.array for x in case.inputs), out.array, lse)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_delta_given_and_gradients_added(dtype: str) -> None:
    """Two sets of keys, each with the lse and delta of all, into float arrays that hold ones."""
    case = Case(f"backward_parts_{dtype}", 130, 200, heads_q=4, heads_kv=2, dtype=dtype)
    dout, q, k, v, out, lse = arrays_of(case)
    wide = np.float64 if dtype == "float64" else np.float32
    delta = np.einsum("bshd,bshd->bhs", dout.astype(wide), out.astype(wide)) - case.gradients[1]
    grads = [np.ones(x.shape, wide) for x in (q, k, v)]
    dq, dk, dv = grads
    for keys in (slice(0, 70), slice(70, 200)):
        cupyflash.attention_backward(
            *(dout, q, k[:, keys], v[:, keys], None, lse),
            delta=delta.astype(wide),
            accumulate=True,
            dq=dq,
            dk=dk[:, keys],
            dv=dv[:, keys],
        )
    comparison = case.expected_grads.compare(*(x - 1 for x in grads))
    assert comparison.ok, comparison.problem


def test_the_gradient_of_a_sum_is_a_broadcast() -> None:
    """Public case B14: one key, so that out = v and dv = 1 for each query that sees it."""
    x = np.random.default_rng(0).standard_normal((1, 1, 2, 8)).astype(np.float32)
    out, lse = cupyflash.attention(x, x, x, return_lse=True)
    dout = np.broadcast_to(np.float32(1), out.shape)
    dq, dk, dv = cupyflash.attention_backward(dout, x, x, x, out, lse)
    np.testing.assert_allclose(dv, 1, rtol=1e-6)
    np.testing.assert_allclose(dq, 0, atol=1e-6)
    np.testing.assert_allclose(dk, 0, atol=1e-6)


def test_rows_without_keys_hide_what_they_hold() -> None:
    q = np.ones((1, 6, 1, 8), np.float32)
    k = np.ones((1, 2, 1, 8), np.float32)
    out, lse = cupyflash.attention(q, k, k, causal=True, return_lse=True)
    assert np.isneginf(lse[0, 0, :4]).all()
    dout = np.ones_like(out)
    expected = cupyflash.attention_backward(dout, q, k, k, out, lse, causal=True)
    for array in (dout, out, q):
        array[0, :4] = np.nan
    grads = cupyflash.attention_backward(dout, q, k, k, out, lse, causal=True)
    for grad, same in zip(grads, expected):
        np.testing.assert_array_equal(grad, same)
    assert not grads.dq[0, :4].any()


def test_the_gradient_of_lse_alone() -> None:
    """Public case B28: with q = 0, dq is the mean of the keys times the scale and dk, dv are 0."""
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 1, 10, 1, 16))
    q = np.zeros((1, 3, 1, 16))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    dlse = np.ones_like(lse)
    grads = cupyflash.attention_backward(np.zeros_like(out), q, k, v, out, lse, dlse=dlse)
    mean = np.broadcast_to(k.mean(axis=1, keepdims=True) / 4, q.shape)
    np.testing.assert_allclose(grads.dq, mean, rtol=1e-12, atol=1e-15)
    assert not grads.dk.any() and not grads.dv.any()


def test_a_batch_is_its_entries() -> None:
    """Public case B50: head_dim 256, batch 2, data that is not normal."""
    case = Case("backward_batch", 300, 300, batch=2, heads_q=2, head_dim=256, data="structured",
                causal=True)  # fmt: skip
    dout, q, k, v, out, lse = arrays_of(case)
    both = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    for b in range(2):
        one = slice(b, b + 1)
        alone = cupyflash.attention_backward(
            *(x[one] for x in (dout, q, k, v, out, lse)), causal=True
        )
        for grad, same in zip(both, alone):
            bound = 2 * reference.unit_roundoff(DTYPES["bfloat16"]) * np.abs(same).max()
            difference = grad[one].astype(np.float64) - same.astype(np.float64)
            assert np.abs(difference).max() <= bound


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"dlse": True, "delta": True}, ValueError, "one of them"),
        ({"accumulate": True}, ValueError, "expected dq, dk and dv"),
        ({"dout_scale": 1.0}, cupyflash.UnsupportedError, "dout_scale"),
        ({"deterministic": 1}, TypeError, "deterministic"),
        ({"return_lse": True}, TypeError, "return"),
        ({"nonsense": 1}, TypeError, "nonsense"),
        ({"out": None}, TypeError, "delta"),
        ({"lse": np.zeros((1, 1, 3), np.float32)}, ValueError, "lse: expected shape"),
        ({"lse": np.zeros((1, 1, 4), np.float16)}, TypeError, "lse: expected float32"),
        ({"dout": np.zeros((1, 4, 1, 8), np.float64)}, TypeError, "dout: expected float32"),
        ({"dq": np.zeros((1, 4, 1, 8), np.float16)}, TypeError, "dq, dk, dv"),
        ({"dv": np.zeros((1, 1, 1, 8), np.float32)}, ValueError, "dv: expected shape"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type, words: str) -> None:
    x = np.zeros((1, 4, 1, 8), np.float32)
    rows = np.zeros((1, 1, 4), np.float32)
    arguments: dict[str, Any] = {"dout": x, "q": x, "k": x, "v": x, "out": x, "lse": rows}
    for name, value in change.items():
        arguments[name] = rows if value is True and name in ("dlse", "delta") else value
    with pytest.raises(error, match=words):
        cupyflash.attention_backward(**arguments)


def test_gradients_in_the_place_of_inputs_are_refused() -> None:
    x = np.zeros((1, 4, 1, 8), np.float32)
    k = x.copy()
    with pytest.raises(ValueError, match="dk: shares memory with k"):
        cupyflash.attention_backward(x, x, k, x, x, np.zeros((1, 1, 4), np.float32), dk=k)


# -- below the public API --------------------------------------------------------------------------


def random(*shape: int, dtype: Any = np.float32, seed: int = 0) -> NDArray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def inputs_of(
    batch: int = 2,
    seqlen_q: int = 90,
    seqlen_kv: int = 110,
    heads_q: int = 4,
    heads_kv: int = 2,
    head_dim: int = 16,
    head_dim_v: int = 24,
    dtype: Any = np.float32,
) -> tuple[NDArray, ...]:
    """dout, q, k and v."""
    return (
        random(batch, seqlen_q, heads_q, head_dim_v, dtype=dtype, seed=1),
        random(batch, seqlen_q, heads_q, head_dim, dtype=dtype, seed=2),
        random(batch, seqlen_kv, heads_kv, head_dim, dtype=dtype, seed=3),
        random(batch, seqlen_kv, heads_kv, head_dim_v, dtype=dtype, seed=4),
    )


def forward(q: NDArray, k: NDArray, v: NDArray, **options: Any) -> tuple[NDArray, NDArray]:
    options = {"softmax_scale": q.shape[-1] ** -0.5, **options}
    out, lse = host.attention(q, k, v, want_lse=True, **options)
    assert lse is not None
    return out, lse


def backward(
    dout: NDArray,
    q: NDArray,
    k: NDArray,
    v: NDArray,
    out: NDArray | None,
    lse: NDArray,
    *,
    dtype: Any = None,
    fill: float = np.nan,
    **options: Any,
) -> tuple[NDArray, NDArray, NDArray]:
    """dq, dk and dv in arrays of a dtype (that of q), which held ``fill`` before."""
    dq, dk, dv = (np.full(x.shape, fill, dtype or q.dtype) for x in (q, k, v))
    options = {"softmax_scale": q.shape[-1] ** -0.5, **options}
    host.attention_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **options)
    return dq, dk, dv


def check(grads: tuple[NDArray, ...], *inputs: NDArray, **options: Any) -> None:
    dq, dk, dv = grads
    comparison = reference.expect_backward(*inputs, **options).compare(dq, dk, dv)
    assert comparison.ok, comparison.problem


def assert_same(grads: tuple[NDArray, ...], expected: tuple[NDArray, ...]) -> None:
    for grad, same in zip(grads, expected, strict=True):
        np.testing.assert_array_equal(grad, same)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 50, 700])
def test_softcap(dtype: np.dtype, seqlen_q: int) -> None:
    inputs = inputs_of(1, seqlen_q, 600, dtype=dtype)
    options = {"right": 0, "shift": 600 - seqlen_q, "softcap": 2.0, "softmax_scale": 0.9}
    out, lse = forward(*inputs[1:], **options)
    dlse = random(*lse.shape, dtype=lse.dtype)
    grads = backward(*inputs, out, lse, dlse=dlse, **options)
    check(grads, *inputs, dlse=dlse, **options)


@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_negative_and_zero_scale(scale: float) -> None:
    inputs = inputs_of()
    grads = backward(*inputs, *forward(*inputs[1:], softmax_scale=scale), softmax_scale=scale)
    check(grads, *inputs, softmax_scale=scale)
    assert (grads[0] == 0).all() == (scale == 0)


def test_the_mask_may_differ_between_batch_entries() -> None:
    inputs = inputs_of(3, 50, 50)
    shifts = np.array([0, 10, -60])
    out, lse = forward(*inputs[1:], right=0, shift=shifts)
    grads = backward(*inputs, out, lse, right=0, shift=shifts)
    for b, shift in enumerate(shifts):
        at = slice(b, b + 1)
        check(tuple(x[at] for x in grads), *(x[at] for x in inputs), right=0, shift=shift)
    assert all((grad[2] == 0).all() for grad in grads)


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("accumulate", [False, True])
def test_rows_and_keys_beyond_the_used_lengths(accumulate: bool, clear: bool) -> None:
    used_q, used_kv = [5, 0, 70], [33, 9, 0]
    lengths = {"seqused_q": used_q, "seqused_kv": np.array(used_kv, np.int32)}
    dout, q, k, v = inputs_of(3, 70, 80)
    out, lse = forward(q, k, v, **lengths)
    for b in range(3):
        for x, used in ((dout, used_q), (q, used_q), (out, used_q), (k, used_kv), (v, used_kv)):
            x[b, used[b] :] = np.nan
        lse[b, :, used_q[b] :] = np.nan
    grads = backward(dout, q, k, v, out, lse, fill=7, accumulate=accumulate, clear=clear, **lengths)
    before = 7 if accumulate else 0
    beyond = 7 if accumulate or not clear else 0
    for b in range(3):
        rows, keys = slice(0, used_q[b]), slice(0, used_kv[b])
        inputs = [x[b : b + 1, at] for x, at in zip((dout, q, k, v), (rows, rows, keys, keys))]
        used = [x[b : b + 1, at] - before for x, at in zip(grads, (rows, keys, keys))]
        expected = reference.expect_backward(*inputs)
        for name, grad, right in zip(
            ("dq", "dk", "dv"), used, (expected.dq, expected.dk, expected.dv)
        ):
            bound = 1e-5 if accumulate else 2e-6  # in sums of 7 and more
            problem = reference.mismatch(name, grad, right, bound)
            assert problem is None, problem
        for grad, used_rows in zip(grads, (rows, keys, keys)):
            assert (grad[b, used_rows.stop :] == beyond).all()


@pytest.mark.parametrize(
    "lengths", [[743, 559], [1, 1096, 3], [129, 0, 127], [128] * 7 + [1], [0, 0], []], ids=str
)
def test_packed_sequences_equal_separate_ones(lengths: list[int]) -> None:
    starts = np.cumsum([0, *lengths])
    dout, q, k, v = (random(starts[-1] + 5, 2, 16, seed=s) for s in range(4))
    for x in (dout, q, k, v):
        x[starts[-1] :] = np.nan
    options: dict[str, Any] = {"right": 0, "softmax_scale": 0.3, "softcap": 4.0}
    out, lse = host.attention_varlen(q, k, v, starts, starts, want_lse=True, **options)
    assert lse is not None
    dlse = random(*lse.shape, seed=9)
    grads = [np.full_like(x, np.nan) for x in (q, k, v)]
    host.attention_varlen_backward(
        *(dout, q, k, v, out, lse, starts, starts),
        **dict(zip(("dq", "dk", "dv"), grads)),
        dlse=dlse,
        **options,
    )
    for begin, end in zip(starts, starts[1:], strict=False):
        at, by_row = (None, slice(begin, end)), (None, slice(None), slice(begin, end))
        separate = [x[at] for x in (dout, q, k, v)]
        one = backward(*separate, out[at], lse[by_row], dlse=dlse[by_row], **options)
        check(one, *separate, dlse=dlse[by_row], **options)
        for grad, same in zip(grads, one, strict=True):
            np.testing.assert_allclose(grad[begin:end], same[0], rtol=0, atol=2e-5)
    assert all((grad[starts[-1] :] == 0).all() for grad in grads)


@pytest.mark.parametrize("grad_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_gradients_of_another_type(dtype: np.dtype, grad_dtype: type) -> None:
    inputs = inputs_of(dtype=dtype)
    results = forward(*inputs[1:], right=0, shift=20)
    grads = backward(*inputs, *results, dtype=grad_dtype, right=0, shift=20)
    own = backward(*inputs, *results, right=0, shift=20)
    check(own, *inputs, right=0, shift=20)
    # and rounding the wider of both gives the other
    if np.dtype(grad_dtype).itemsize >= dtype.itemsize:
        check(grads, *inputs, right=0, shift=20)
        assert_same(tuple(grad.astype(dtype) for grad in grads), own)
    else:
        assert_same(grads, tuple(grad.astype(grad_dtype) for grad in own))


@pytest.mark.parametrize("grad_dtype", ["own", np.float32, np.float64])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_accumulating_rounds_once(dtype: np.dtype, grad_dtype: Any) -> None:
    grad_dtype = dtype if grad_dtype == "own" else np.dtype(grad_dtype)
    inputs = inputs_of(dtype=dtype)
    results = forward(*inputs[1:])
    # 1/3 is none of the types' own, and its ulp is that of the gradients or more
    grads = backward(*inputs, *results, dtype=grad_dtype, fill=1 / 3, accumulate=True)
    alone = backward(*inputs, *results, dtype=np.float64)
    for grad, sums in zip(grads, alone, strict=True):
        before = np.asarray(1 / 3).astype(grad_dtype).astype(np.float64)
        exact = before + sums
        unit = reference.unit_roundoff(grad_dtype)
        wide = 2.0**-53 if np.float64 in (dtype, grad_dtype) else 2.0**-24
        error = np.abs(grad.astype(np.float64) - exact)
        assert (error <= unit * np.abs(exact) + wide * (np.abs(exact) + 1)).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_delta_in_place_of_out(dtype: Any) -> None:
    dout, q, k, v = inputs_of(dtype=dtype)
    out, lse = forward(q, k, v, right=0, shift=20)
    dlse = random(*lse.shape)
    expected = backward(dout, q, k, v, out, lse, dlse=dlse, right=0, shift=20)
    dots = (dout.astype(np.float32) * out.astype(np.float32)).sum(axis=-1)
    delta = dots.transpose(0, 2, 1) - dlse
    grads = backward(dout, q, k, v, None, lse, delta=delta, right=0, shift=20)
    for grad, same in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad.astype(np.float32), same.astype(np.float32), atol=1e-6)


def test_neither_or_both_of_what_makes_delta_are_refused() -> None:
    inputs = inputs_of()
    out, lse = forward(*inputs[1:])
    with pytest.raises(ValueError, match="out: expected an array, or delta"):
        backward(*inputs, None, lse)
    with pytest.raises(ValueError, match="delta contains dlse already"):
        backward(*inputs, out, lse, dlse=lse, delta=lse)


def test_any_strides_and_nothing_written_outside() -> None:
    dout, q, k, v = inputs_of(head_dim_v=16)
    out, lse = forward(q, k, v, right=0)
    expected = backward(dout, q, k, v, out, lse, right=0)
    odd = [np.asfortranarray(x) for x in (dout, q)]
    odd += [x[:, ::-1, :, ::-1].copy()[:, ::-1, :, ::-1] for x in (k, v)]
    out, lse = np.asfortranarray(out), np.asfortranarray(lse)
    spaced = [np.full((2, x.shape[1] + 3, x.shape[2], 20), np.nan) for x in (q, k, v)]
    grads = tuple(x[:, 1:-2, :, 2:18] for x in spaced)
    dq, dk, dv = grads
    host.attention_backward(
        *odd, out, lse, dq=dq, dk=dk, dv=dv, softmax_scale=0.25, right=0, accumulate=False
    )
    for grad, same in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, same, rtol=0, atol=2e-6)
        grad[...] = np.nan
    assert all(np.isnan(x).all() for x in spaced)


def test_a_broadcast_gradient_of_the_output() -> None:
    _, q, k, v = inputs_of()
    out, lse = forward(q, k, v, right=0)
    for one in (np.float32(1), random(1, 1, 1, 24), random(2, 1, 4, 1)):
        dout = np.broadcast_to(one, out.shape)
        assert 0 in dout.strides
        grads = backward(dout, q, k, v, out, lse, right=0)
        assert_same(grads, backward(dout.copy(), q, k, v, out, lse, right=0))
        check(grads, dout, q, k, v, right=0)
    dlse = np.broadcast_to(np.float32(0.5), lse.shape)
    grads = backward(dout, q, k, v, out, lse, dlse=dlse, right=0)
    check(grads, dout, q, k, v, dlse=dlse, right=0)


@pytest.mark.parametrize("seqlens", [(30, 0), (0, 30), (0, 0)], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_no_keys_or_no_queries(seqlens: tuple[int, int], accumulate: bool) -> None:
    dout, q, k, v = inputs_of(2, *seqlens)
    lse = np.full((2, 4, seqlens[0]), -np.inf, np.float32)
    out = np.full_like(dout, np.nan)
    grads = backward(dout * np.nan, q, k, v, out, lse, fill=3, accumulate=accumulate)
    assert all((grad == (3 if accumulate else 0)).all() for grad in grads)


@pytest.mark.parametrize("group", [1, 2])
def test_rows_whose_lse_is_minus_infinity_contribute_nothing(group: int) -> None:
    """Whether the mask hides all their keys, or lse alone says so."""
    inputs = inputs_of(2, 300, 130, 2 * group)
    dout, q, k, v = inputs
    options = {"left": 50, "right": 0, "shift": -100}
    out, lse = forward(q, k, v, **options)
    assert np.isneginf(lse[..., :100]).all() and np.isneginf(lse[..., 280:]).all()
    dead = np.isneginf(lse)
    dead[:, 1, 120:290] = True
    lse[dead] = -np.inf
    by_row = dead.transpose(0, 2, 1)
    dout[by_row] = 0  # as good as no row, but for its dq
    expected = backward(dout, q, k, v, out * 0, np.where(dead, 0, lse), **options)
    for x, value in ((dout, np.nan), (q, np.inf), (out, np.nan)):
        x[by_row] = value
    out[~by_row] = 0
    dq, dk, dv = backward(dout, q, k, v, out, lse, **options)
    assert (dq[by_row] == 0).all()
    np.testing.assert_array_equal(dq[~by_row], expected[0][~by_row])
    assert_same((dk, dv), expected[1:])
    k[:, 60] = np.nan  # what a dead row sees does not come back to it
    v[:, 60] = np.inf
    dq, _, _ = backward(dout, q, k, v, out, lse, **options)
    assert (dq[by_row] == 0).all() and np.isnan(dq[:, 170, 0]).all()


def test_keys_that_no_row_sees_have_exact_zeros() -> None:
    inputs = inputs_of(1, 40, 900)
    inputs[2][:, 50:] = np.nan
    inputs[3][:, 50:] = np.inf
    out, lse = forward(*inputs[1:], right=0)
    dq, dk, dv = backward(*inputs, out, lse, right=0)
    check((dq, dk, dv), *inputs, right=0)
    assert (dk[:, 40:] == 0).all() and (dv[:, 40:] == 0).all() and dk[:, 39].all()


def test_hidden_nan_never_reaches_a_gradient_and_visible_nan_does() -> None:
    dout, q, k, v = inputs_of(2, 90, 90)
    k[0, 50, 1] = np.nan
    v[1, 60, 0, 3] = np.inf
    v[0, 70] = np.nan
    dout[1, 20, 3, 5] = np.nan
    q[1, 10, 0] = np.nan
    options = {"left": 30, "right": 0}
    out, lse = forward(q, k, v, **options)
    grads = backward(dout, q, k, v, out, lse, **options)
    check(grads, dout, q, k, v, **options)
    assert all(np.isnan(grad).any() and np.isfinite(grad).any() for grad in grads)


@pytest.mark.parametrize("heads", [(2, 2), (6, 1)], ids=str)
def test_the_same_bits_on_any_number_of_threads(
    heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the same keys lie in several tasks, whose sums come in any order."""
    inputs = inputs_of(1, 1300, 1200, *heads)
    options = {"left": 700, "right": 100, "softcap": 3.0}
    results = forward(*inputs[1:], **options)
    in_order = host._KeySums.add
    places = []

    def add(self: host._KeySums, place: int, *sums: Any) -> None:
        places.append(place)
        in_order(self, place, *sums)

    monkeypatch.setattr(host._KeySums, "add", add)
    expected = backward(*inputs, *results, **options)
    assert max(places) > 0, "no two tasks share keys"
    for threads in (1, 2, 2, 5, 5, 9):
        monkeypatch.setattr(host, "_num_threads", lambda threads=threads: threads)
        assert_same(backward(*inputs, *results, **options), expected)


@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_are_added_in_the_order_of_the_tasks(accumulate: bool) -> None:
    """1e8 + 1 is 1e8 in float32, so that the order shows."""
    parts = [np.full((1, 1, 2, 1), x, np.float32) for x in (1e8, 1, -1e8, 3)]
    results = []
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        dk, dv = np.full((2, 1, 1, 4, 1), 5, np.float32)
        sums = host._KeySums(dk, dv, accumulate)
        assert [sums.register() for _ in parts] == [0, 1, 2, 3]
        for place in order:
            sums.add(place, 1, parts[place], 2 * parts[place])
        results.append((dk, dv))
    for dk, dv in results:
        before = 5 if accumulate else 0
        np.testing.assert_array_equal(dk.ravel() - before, [0, 3, 3, 0])
        np.testing.assert_array_equal(dv.ravel() - before, [0, 6, 6, 0])


def test_blas_threads_are_restored_even_with_concurrent_calls_and_errors() -> None:
    get = host._blas_function("get")
    if get is None:
        pytest.skip("NumPy is not linked to OpenBLAS")
    before = get()
    inputs = inputs_of(1, 600, 600)
    results = forward(*inputs[1:])
    expected = backward(*inputs, *results)
    wrong: list[object] = []

    def call() -> None:
        for _ in range(3):
            grads = backward(*inputs, *results)
            if not all(np.array_equal(x, y) for x, y in zip(grads, expected)):
                wrong.append(grads)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    with pytest.raises(ValueError):
        backward(inputs[0][..., :3], *inputs[1:], *results)
    assert not wrong and get() == before


def test_memory_grows_with_the_length_not_with_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A thread has buffers of its own, and how many threads find work depends on the machine's load.
    monkeypatch.setattr(host, "_num_threads", lambda: 1)
    peaks = []
    for seqlen in (2048, 4096, 8192):
        x = random(1, seqlen, 1, 16)
        out, lse = forward(x, x, x, right=0)
        dq, dk, dv = (np.empty_like(x) for _ in range(3))
        tracemalloc.start()
        host.attention_backward(
            x, x, x, x, out, lse, dq=dq, dk=dk, dv=dv, softmax_scale=0.25, right=0
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    first, second = peaks[1] - peaks[0], peaks[2] - peaks[1]
    assert second < 3 * first + 100_000
    assert peaks[2] < 8192 * 8192, "a quarter of one head's float32 scores"


def test_inputs_may_be_read_only_and_stay_unchanged() -> None:
    inputs = inputs_of(1, 300, 300)
    out, lse = forward(*inputs[1:], right=0, softcap=3.0)
    lse[0, 0, 7] = -np.inf
    arrays = (*inputs, out, lse, random(*lse.shape))
    before = [x.copy() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    backward(*arrays[:6], dlse=arrays[6], right=0, softcap=3.0)
    backward(*arrays[:4], None, lse, delta=arrays[6], right=0, softcap=3.0)
    assert_same(arrays, tuple(before))


def test_many_short_sequences_are_not_one_python_loop_each() -> None:
    inputs = inputs_of(20_000, 4, 4, 1, 1, 8, 8)
    calls = []
    add_block = host._add_block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_add_block", lambda *x: (calls.append(1), add_block(*x)))
        grads = backward(*inputs, *forward(*inputs[1:]))
    assert 0 < len(calls) < 200
    at = slice(19_990, None)
    check(tuple(x[at] for x in grads), *(x[at] for x in inputs))


@pytest.mark.parametrize(
    ("cu_q", "cu_kv", "message"),
    [
        ([1, 10], [0, 10], "cu_seqlens_q: must start at 0"),
        ([0, 10], [0, 6, 4], "cu_seqlens_kv: must not decrease"),
        ([0, 11], [0, 10], "cu_seqlens_q: ends at 11"),
        ([0, 5, 10], [0, 10], "cu_seqlens_kv: 2 entries"),
    ],
)
def test_bad_cumulative_lengths_are_refused(cu_q: Any, cu_kv: Any, message: str) -> None:
    x, lse = random(10, 1, 8), random(1, 10)
    grads = {name: np.full_like(x, 7) for name in ("dq", "dk", "dv")}
    with pytest.raises(ValueError, match=message):
        host.attention_varlen_backward(x, x, x, x, x, lse, cu_q, cu_kv, softmax_scale=0.5, **grads)
    assert all((grad == 7).all() for grad in grads.values())
