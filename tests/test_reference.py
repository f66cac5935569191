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
