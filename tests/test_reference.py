"""reference.py against results worked out by hand, and against a second way of computing them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from cupyflash import reference


def values_that_name_their_key(seqlen_kv: int, head_dim: int = 4) -> np.ndarray:
    """v[j] = j in every column, one batch and one head."""
    return np.broadcast_to(
        np.arange(float(seqlen_kv))[None, :, None, None], (1, seqlen_kv, 1, head_dim)
    )


def zeros(seqlen: int, head_dim: int = 4) -> np.ndarray:
    return np.zeros((1, seqlen, 1, head_dim))


def test_equal_scores_give_the_mean_of_v_and_the_log_of_the_count() -> None:
    out, lse = reference.attention(zeros(3), zeros(5), values_that_name_their_key(5))
    np.testing.assert_allclose(out, 2.0)
    np.testing.assert_allclose(lse, math.log(5))


def test_two_keys_worked_by_hand() -> None:
    q = np.full((1, 1, 1, 36), 1.0)
    k = np.zeros((1, 2, 1, 36))
    k[:, 0] = 1
    v = np.array([1.0, 0.0]).reshape(1, 2, 1, 1)
    out, lse = reference.attention(q, k, v)
    # score 36 / sqrt(36) = 6 against 0
    assert out[0, 0, 0, 0] == pytest.approx(1 / (1 + math.exp(-6)), rel=1e-14)
    assert lse[0, 0, 0] == pytest.approx(6 + math.log1p(math.exp(-6)), rel=1e-14)


def test_two_keys_with_a_softcap() -> None:
    q = np.full((1, 1, 1, 4), 1.0)
    k = np.stack([np.ones((1, 1, 4)), np.zeros((1, 1, 4))], axis=1)
    v = np.array([1.0, 0.0]).reshape(1, 2, 1, 1)
    out, _ = reference.attention(q, k, v, softcap=1.5)
    score = 1.5 * math.tanh(2 / 1.5)
    assert out[0, 0, 0, 0] == pytest.approx(1 / (1 + math.exp(-score)), rel=1e-14)


@pytest.mark.parametrize(
    ("left", "right", "shift", "expected"),
    [
        (None, None, 0, [[0, 1, 2, 3]] * 2),
        (None, 0, 0, [[0], [0, 1]]),
        (None, 0, 2, [[0, 1, 2], [0, 1, 2, 3]]),
        (1, 0, 2, [[1, 2], [2, 3]]),
        (0, 1, 0, [[0, 1], [1, 2]]),
        (0, None, 3, [[3], []]),
        (None, 0, -1, [[], [0]]),
    ],
)
def test_which_keys_are_visible(left, right, shift, expected) -> None:
    visible = reference.visible_keys(np.arange(2), 4, left, right, shift)
    assert [list(np.flatnonzero(row)) for row in visible] == expected


def test_a_row_without_a_key_is_zero_and_minus_infinity() -> None:
    out, lse = reference.attention(
        zeros(5), zeros(2), values_that_name_their_key(2) + 1, right=0, shift=-3
    )
    np.testing.assert_array_equal(out[0, :3], 0)
    np.testing.assert_array_equal(lse[0, 0, :3], -np.inf)
    np.testing.assert_allclose(out[0, 3:, 0, 0], [1, 1.5])


def test_no_keys_at_all() -> None:
    out, lse = reference.attention(zeros(3), zeros(0), values_that_name_their_key(0))
    np.testing.assert_array_equal(out, np.zeros((1, 3, 1, 4)))
    np.testing.assert_array_equal(lse, np.full((1, 1, 3), -np.inf))


def test_query_heads_are_grouped_not_interleaved() -> None:
    q, k = np.zeros((1, 2, 6, 4)), np.zeros((1, 3, 2, 4))
    v = np.broadcast_to(np.arange(2.0)[None, None, :, None], (1, 3, 2, 4))
    out, _ = reference.attention(q, k, v)
    assert list(out[0, 0, :, 0]) == [0, 0, 0, 1, 1, 1]


def test_a_hidden_key_counts_for_nothing_even_if_it_is_nan() -> None:
    k, v = zeros(6), values_that_name_their_key(6).copy()
    clean, clean_lse = reference.attention(zeros(6), k, v, right=0)
    k[:, 4:] = np.nan
    v[:, 4:] = np.inf
    out, lse = reference.attention(zeros(6), k, v, right=0)
    np.testing.assert_array_equal(out[:, :4], clean[:, :4])
    np.testing.assert_array_equal(lse[..., :4], clean_lse[..., :4])
    assert np.isnan(out[:, 4:]).all() and np.isnan(lse[..., 4:]).all()


def test_a_visible_nan_reaches_only_the_columns_or_rows_that_it_should() -> None:
    v = values_that_name_their_key(6).copy()
    v[0, 1, 0, 2] = np.nan
    out, lse = reference.attention(zeros(3), zeros(6), v)
    assert np.isnan(out[..., 2]).all() and np.isfinite(out[..., [0, 1, 3]]).all()
    assert np.isfinite(lse).all()


def test_against_explicit_sums() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s) for s in ((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5)))
    out, lse = reference.attention(q, k, v, left=3, right=2, shift=1, softmax_scale=0.7)
    for b, i, h in np.ndindex(2, 7, 4):
        total, weighted = 0.0, np.zeros(5)
        for j in range(9):
            if i + 1 - 3 <= j <= i + 1 + 2:
                weight = math.exp(0.7 * float(q[b, i, h] @ k[b, j, h // 2]))
                total += weight
                weighted += weight * v[b, j, h // 2]
        np.testing.assert_allclose(out[b, i, h], weighted / total, rtol=1e-12)
        np.testing.assert_allclose(lse[b, h, i], math.log(total), rtol=1e-12)


def test_some_rows_of_a_longer_problem() -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 30, 1, 8)) for _ in range(3))
    out, lse = reference.attention(q, k, v, right=0)
    rows = np.array([29, 0, 7])
    some, some_lse = reference.attention(q[:, rows], k, v, right=0, rows=rows)
    np.testing.assert_allclose(some, out[:, rows], rtol=1e-12)
    np.testing.assert_allclose(some_lse, lse[..., rows], rtol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_merging_parts_gives_the_whole(packed: bool) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, s, 3, 8)) for s in (11, 20, 20))
    whole, whole_lse = reference.attention(q, k, v)
    parts = [
        reference.attention(q, k[:, at], v[:, at])
        for at in (slice(0, 5), slice(5, 5), slice(5, 20))
    ]
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    if packed:
        outs, lses = [out[0] for out in outs], [lse[0] for lse in lses]
        whole, whole_lse = whole[0], whole_lse[0]
    out, lse = reference.merge(outs, lses)
    np.testing.assert_allclose(out, whole, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-12)


class TestCompare:
    """What counts as right: it must accept rounding and nothing else."""

    @staticmethod
    def inputs(dtype=ml_dtypes.bfloat16):
        rng = np.random.default_rng(2)
        return [rng.standard_normal((1, s, 2, 32)).astype(dtype) for s in (40, 60, 60)]

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
    def test_accepts_the_rounded_computation(self, dtype) -> None:
        q, k, v = self.inputs(dtype)
        out, lse = reference.rounded_attention(q, k, v, right=0, shift=20)
        assert out.dtype == dtype
        result = reference.compare(out, lse, q, k, v, right=0, shift=20)
        assert result.ok and result.error <= result.bound and result.lse_error <= result.lse_bound

    def test_rejects_a_mask_off_by_one(self) -> None:
        q, k, v = self.inputs()
        out, lse = reference.rounded_attention(q, k, v, right=1, shift=20)
        assert "positions off" in reference.compare(out, lse, q, k, v, right=0, shift=20).problem

    def test_rejects_a_lse_in_base_two(self) -> None:
        q, k, v = self.inputs()
        out, lse = reference.rounded_attention(q, k, v)
        assert "lse" in reference.compare(out, lse / np.log(2), q, k, v).problem

    def test_rejects_one_wrong_element(self) -> None:
        q, k, v = self.inputs()
        out, lse = reference.rounded_attention(q, k, v)
        out[0, 39, 1, 31] += np.asarray(0.1, out.dtype)
        assert "(0, 39, 1, 31)" in reference.compare(out, lse, q, k, v).problem

    def test_rejects_a_nan_left_in_a_masked_row(self) -> None:
        q, k, v = self.inputs()
        out, lse = reference.rounded_attention(q, k, v, right=0, shift=-10)
        out[0, 3] = np.nan
        assert "NaN" in reference.compare(out, lse, q, k, v, right=0, shift=-10).problem

    def test_rejects_a_finite_stand_in_for_minus_infinity(self) -> None:
        q, k, v = self.inputs()
        out, lse = reference.rounded_attention(q, k, v, right=0, shift=-10)
        lse[lse == -np.inf] = -1e30
        assert "-inf" in reference.compare(out, lse, q, k, v, right=0, shift=-10).problem

    def test_rejects_a_wrong_shape(self) -> None:
        q, k, v = self.inputs()
        out, lse = reference.rounded_attention(q, k, v)
        assert "shape" in reference.compare(out[:, 1:], lse, q, k, v).problem


# -- gradients -------------------------------------------------------------------------------------


def gradient_inputs(
    seqlen_q: int = 7, seqlen_kv: int = 9, dtype: type = np.float64
) -> tuple[np.ndarray, ...]:
    """dout, q, k, v and dlse; two query heads read a head of keys, head_dim_v is not head_dim."""
    rng = np.random.default_rng(4)
    q, k = rng.standard_normal((2, seqlen_q, 4, 8)), rng.standard_normal((2, seqlen_kv, 2, 8))
    v, dout = rng.standard_normal((2, seqlen_kv, 2, 5)), rng.standard_normal((2, seqlen_q, 4, 5))
    dlse = rng.standard_normal((2, 4, seqlen_q))
    return tuple(x.astype(dtype) for x in (dout, q, k, v, dlse))


@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"right": 0, "shift": 2},
        {"right": 0, "shift": 0},
        {"right": 0, "shift": -3},
        {"left": 2, "right": 1, "shift": 1},
        {"left": 0, "shift": 4},
        {"softcap": 0.8},
        {"softcap": 2.5, "right": 0, "shift": 2, "softmax_scale": 1.1},
        {"softmax_scale": -0.7},
        {"softmax_scale": 0.0},
    ],
    ids=str,
)
def test_gradients_are_slopes(options: dict, with_dlse: bool) -> None:
    dout, q, k, v, dlse = gradient_inputs()
    dlse = dlse if with_dlse else None
    grads = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)

    def loss(*inputs: np.ndarray) -> float:
        out, lse = reference.attention(*inputs, **options)
        value = float((dout * out).sum())
        if dlse is not None:  # a row without a key is constant
            value += float((dlse * np.where(lse == -np.inf, 0, lse)).sum())
        return value

    rng = np.random.default_rng(5)
    step = 1e-5
    for which, grad in enumerate(grads):
        assert grad.shape == (q, k, v)[which].shape and grad.dtype == np.float64
        for _ in range(3):
            direction = rng.standard_normal(grad.shape)
            moved = [[q, k, v], [q, k, v]]
            moved[0][which] = moved[0][which] + step * direction
            moved[1][which] = moved[1][which] - step * direction
            slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
            assert float((grad * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-7)


def test_gradients_against_explicit_sums() -> None:
    dout, q, k, v, dlse = gradient_inputs()
    options = {"left": 3, "right": 2, "shift": 1, "softmax_scale": 0.7}
    out, lse = reference.attention(q, k, v, **options)
    expected = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b, i, h in np.ndindex(2, 7, 4):
        delta = float(dout[b, i, h] @ out[b, i, h]) - dlse[b, h, i]
        for j in range(9):
            if i + 1 - 3 <= j <= i + 1 + 2:
                key, value = k[b, j, h // 2], v[b, j, h // 2]
                p = math.exp(0.7 * float(q[b, i, h] @ key) - lse[b, h, i])
                ds = p * (float(dout[b, i, h] @ value) - delta)
                expected[0][b, i, h] += 0.7 * ds * key
                expected[1][b, j, h // 2] += 0.7 * ds * q[b, i, h]
                expected[2][b, j, h // 2] += p * dout[b, i, h]
    grads = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    for grad, right in zip(grads, expected, strict=True):
        np.testing.assert_allclose(grad, right, rtol=1e-11, atol=1e-13)


def test_gradients_of_more_rows_than_are_handled_at_a_time() -> None:
    dout, q, k, v, dlse = gradient_inputs(300, 40)
    options = {"right": 0, "shift": -260}
    whole = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    sums = [np.zeros(x.shape) for x in (k, v)]
    for rows in (np.arange(0, 277), np.arange(299, 276, -1)):
        dq, dk, dv = reference.attention_backward(
            dout[:, rows], q[:, rows], k, v, dlse=dlse[..., rows], rows=rows, **options
        )
        np.testing.assert_allclose(dq, whole[0][:, rows], rtol=1e-10, atol=1e-13)
        sums[0] += dk
        sums[1] += dv
    np.testing.assert_allclose(sums[0], whole[1], rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(sums[1], whole[2], rtol=1e-10, atol=1e-13)


def test_a_row_without_a_key_and_a_key_without_a_row_have_no_gradient() -> None:
    dout, q, k, v, dlse = gradient_inputs()
    options = {"left": 1, "right": 0, "shift": -3}
    clean = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    for x in (dout, q):
        x[:, :3] = np.nan
    dlse[..., :3] = np.inf
    k[:, 4:] = np.nan
    v[:, 4:] = np.inf
    dq, dk, dv = grads = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    assert (dq[:, :3] == 0).all() and (dk[:, 4:] == 0).all() and (dv[:, 4:] == 0).all()
    for grad, right in zip(grads, clean, strict=True):
        np.testing.assert_array_equal(grad, right)


def test_a_row_of_scores_of_minus_infinity_contributes_nothing() -> None:
    dout, q, k, v, _ = gradient_inputs()
    q, dout = q[:, 2:3], dout[:, 2:3]
    q[...] = 1
    k[:, :3] = -np.inf
    dout[...] = np.nan
    options = {"right": 0, "shift": 2}
    assert (reference.attention(q, k, v, **options)[1] == -np.inf).all()
    dq, dk, dv = reference.attention_backward(dout, q, k, v, **options)
    assert (dq == 0).all() and (dk == 0).all() and (dv == 0).all()


def test_a_hidden_pair_contributes_nothing_to_gradients_and_a_visible_one_does() -> None:
    dout, q, k, v, _ = gradient_inputs(9, 9)
    clean = reference.attention_backward(dout[:, :6], q[:, :6], k, v, right=0)
    q[0, 6] = np.nan
    dout[0, 7, 1, 2] = np.nan
    k[1, 6:] = np.nan
    v[1, 7] = np.inf
    dq, dk, dv = reference.attention_backward(dout, q, k, v, right=0)
    np.testing.assert_allclose(dq[:, :6], clean[0], rtol=1e-12, atol=1e-14)
    # row 6 of the first entry sees keys 0 to 6, row 7 one more
    assert np.isnan(dq[0, 6]).all() and np.isnan(dk[0, :7]).all() and np.isnan(dv[0, :7]).all()
    assert np.isnan(dq[0, 7, 1]).all() and np.isfinite(dq[0, 7, [0, 2, 3]]).all()
    assert np.isnan(dk[0, 7, 0]).all() and np.isfinite(dk[0, 7, 1]).all()
    assert np.isnan(dv[0, 7, 0, 2]) and np.isfinite(dv[0, 7, 0, [0, 1, 3, 4]]).all()
    assert np.isfinite(dq[0, 8]).all() and np.isfinite(dk[0, 8]).all()
    # from row 6 of the second entry on, every row sees a NaN
    assert np.isnan(dq[1, 6:]).all() and np.isnan(dk[1]).all() and np.isnan(dv[1]).all()


@pytest.mark.parametrize("seqlens", [(3, 0), (0, 3), (0, 0)], ids=str)
def test_gradients_without_keys_or_queries(seqlens: tuple[int, int]) -> None:
    dout, q, k, v, dlse = gradient_inputs(*seqlens)
    for function in (reference.attention_backward, reference.rounded_attention_backward):
        grads = function(dout, q, k, v, dlse=dlse)
        for grad, x in zip(grads, (q, k, v), strict=True):
            assert grad.shape == x.shape and (grad == 0).all()


class TestCompareGradients:
    """What counts as right gradients: rounding and nothing else."""

    options = {"right": 0, "shift": 20}

    @staticmethod
    def inputs(dtype: type = ml_dtypes.bfloat16) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        *inputs, dlse = gradient_inputs(40, 60, dtype)
        return tuple(inputs), dlse.astype(np.float32)

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
    def test_accepts_the_rounded_computation(self, dtype: type) -> None:
        inputs, dlse = self.inputs(dtype)
        grads = reference.rounded_attention_backward(*inputs, dlse=dlse, **self.options)
        assert all(grad.dtype == dtype for grad in grads)
        expected = reference.expect_backward(*inputs, dlse=dlse, **self.options)
        result = expected.compare(*grads)
        assert result.ok
        assert all(e <= b for e, b in zip(result.errors, result.bounds, strict=True))
        largest = [np.abs(x).max() for x in (expected.dq, expected.dk, expected.dv)]
        assert all(b < 0.1 * x for b, x in zip(result.bounds, largest, strict=True))

    @pytest.mark.parametrize(
        "change",
        [
            {"right": 1},
            {"shift": 19},
            {"left": 20},
            {"softcap": 1.0},
            {"softmax_scale": 0.4},
            {"dlse": None},
        ],
        ids=str,
    )
    def test_rejects_another_problem(self, change: dict) -> None:
        inputs, dlse = self.inputs()
        given = {"dlse": dlse, **self.options}
        wrong = reference.rounded_attention_backward(*inputs, **{**given, **change})
        problem = reference.expect_backward(*inputs, **given).compare(*wrong).problem
        assert problem is not None and "positions off" in problem

    @pytest.mark.parametrize("which", range(3), ids=("dq", "dk", "dv"))
    def test_rejects_one_wrong_element_and_names_the_gradient(self, which: int) -> None:
        inputs, _ = self.inputs()
        grads = reference.rounded_attention_backward(*inputs)
        expected = reference.expect_backward(*inputs)
        grads[which][1, 39, 1, 3] += np.asarray(0.3, ml_dtypes.bfloat16)
        problem = expected.compare(*grads).problem
        assert problem is not None and problem.startswith(("dq", "dk", "dv")[which])
        assert "(1, 39, 1, 3)" in problem

    def test_rejects_a_nan_left_in_a_row_without_keys(self) -> None:
        inputs, _ = self.inputs()
        options = {"right": 0, "shift": -10}
        grads = reference.rounded_attention_backward(*inputs, **options)
        grads[0][0, 3] = np.nan
        problem = reference.expect_backward(*inputs, **options).compare(*grads).problem
        assert problem is not None and "dq" in problem and "NaN" in problem

    def test_rejects_a_wrong_shape(self) -> None:
        inputs, _ = self.inputs()
        dq, dk, dv = reference.rounded_attention_backward(*inputs)
        problem = reference.expect_backward(*inputs).compare(dq, dk[:, :, :1], dv).problem
        assert problem is not None and "dk: shape" in problem
