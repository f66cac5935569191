"""The NumPy path on the common list of cases, and what only it can do."""

from __future__ import annotations

import dataclasses
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from cupyflash import host, reference
from tests import cases


def random(*shape: int, dtype=np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def attention(q, k, v, *, softmax_scale: float | None = None, **options):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return host.attention(q, k, v, softmax_scale=scale, **options)


def attention_varlen(q, k, v, cu_q, cu_kv, **options):
    return host.attention_varlen(q, k, v, cu_q, cu_kv, softmax_scale=q.shape[-1] ** -0.5, **options)


@pytest.mark.parametrize("case", cases.FORWARD, ids=str)
def test_case(case: cases.Case) -> None:
    q, k, v = (x.bshd for x in case.inputs)
    placed = case.nan_output()
    out, lse = attention(q, k, v, out=placed.bshd, want_lse=True, **case.bounds)
    comparison = case.compare(out, lse)
    assert comparison.ok, comparison.problem
    placed.buffer[placed.index] = np.nan
    assert np.isnan(placed.buffer.astype(np.float32)).all(), "wrote outside of the output"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "case", [c for c in cases.tagged(cases.EMULATED) if c.head_dim == 64], ids=str
)
def test_case_in_wider_types(case: cases.Case, dtype: str) -> None:
    case = dataclasses.replace(case, dtype=dtype)
    q, k, v = (x.bshd for x in case.inputs)
    out, lse = attention(q, k, v, want_lse=True, **case.bounds)
    assert out.dtype == q.dtype
    assert lse is not None and lse.dtype == q.dtype
    comparison = case.compare(out, lse)
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 50, 700])
def test_softcap(dtype: np.dtype, seqlen_q: int) -> None:
    q, k, v = (random(1, s, 2, 32, dtype=dtype, seed=s) for s in (seqlen_q, 600, 601))
    v = v[:, :600]
    options = {"right": 0, "shift": 600 - seqlen_q, "softcap": 2.0, "softmax_scale": 0.9}
    out, lse = attention(q, k, v, want_lse=True, **options)
    comparison = reference.compare(out, lse, q, k, v, **options)
    assert comparison.ok, comparison.problem
    without, _ = attention(q, k, v, **{**options, "softcap": 0.0})
    assert not np.array_equal(out, without)


def test_negative_and_zero_scale() -> None:
    q, k, v = (random(1, 80, 1, 16, seed=s) for s in range(3))
    for scale in (-0.4, 0.0):
        out, lse = attention(q, k, v, want_lse=True, softmax_scale=scale)
        comparison = reference.compare(out, lse, q, k, v, softmax_scale=scale)
        assert comparison.ok, comparison.problem


def test_the_mask_may_differ_between_batch_entries() -> None:
    q, k, v = (random(3, 50, 2, 16, seed=s) for s in range(3))
    shifts = np.array([0, 10, -60])
    out, lse = attention(q, k, v, right=0, shift=shifts, want_lse=True)
    for b, shift in enumerate(shifts):
        at = slice(b, b + 1)
        one, one_lse = attention(q[at], k[at], v[at], right=0, shift=shift, want_lse=True)
        np.testing.assert_array_equal(out[at], one)
        np.testing.assert_array_equal(lse[at], one_lse)


def test_rows_and_keys_beyond_the_used_lengths() -> None:
    used_q, used_kv = [5, 0, 70], [33, 9, 0]
    q, k, v = (random(3, s, 2, 16, seed=s) for s in (70, 81, 80))
    k = k[:, :80]
    for b in range(3):
        q[b, used_q[b] :] = np.nan
        k[b, used_kv[b] :] = np.nan
        v[b, used_kv[b] :] = np.nan
    lengths = {"seqused_q": used_q, "seqused_kv": np.array(used_kv, np.int32)}
    out, lse = attention(q, k, v, want_lse=True, **lengths)
    given = np.full_like(out, 7)
    attention(q, k, v, out=given, **lengths)
    for b in range(3):
        rows, keys = slice(0, used_q[b]), slice(0, used_kv[b])
        inputs = q[b : b + 1, rows], k[b : b + 1, keys], v[b : b + 1, keys]
        comparison = reference.compare(out[b : b + 1, rows], lse[b : b + 1, :, rows], *inputs)
        assert comparison.ok, comparison.problem
        assert (out[b, used_q[b] :] == 0).all()
        assert (lse[b, :, used_q[b] :] == -np.inf).all()
        np.testing.assert_array_equal(given[b, rows], out[b, rows])
        assert (given[b, used_q[b] :] == 7).all(), "touched rows that nothing was asked about"


@pytest.mark.parametrize(
    "lengths", [[1743, 1559], [1, 4096, 3], [129, 0, 127], [128] * 7 + [1], [0, 0], []], ids=str
)
def test_packed_sequences_equal_separate_ones(lengths: list[int]) -> None:
    starts = np.cumsum([0, *lengths])
    q, k, v = (random(starts[-1] + 5, 2, 16, seed=s) for s in range(3))
    for x in (q, k, v):
        x[starts[-1] :] = np.nan
    out, lse = attention_varlen(q, k, v, starts, starts, right=0, want_lse=True)
    for begin, end in zip(starts, starts[1:], strict=False):
        at = (None, slice(begin, end))
        one, one_lse = attention(q[at], k[at], v[at], right=0, want_lse=True)
        np.testing.assert_array_equal(out[begin:end], one[0])
        np.testing.assert_array_equal(lse[:, begin:end], one_lse[0])
    assert (out[starts[-1] :] == 0).all() and (lse[:, starts[-1] :] == -np.inf).all()


@pytest.mark.parametrize(
    ("cu_q", "cu_kv", "message"),
    [
        ([1, 10], [0, 10], "cu_seqlens_q: must start at 0"),
        ([0, 10], [0, 6, 4], "cu_seqlens_kv: must not decrease"),
        ([0, 11], [0, 10], "cu_seqlens_q: ends at 11"),
        ([0, 5, 10], [0, 10], "cu_seqlens_kv: 2 entries"),
        ([[0, 10]], [0, 10], "cu_seqlens_q: expected shape"),
    ],
)
def test_bad_cumulative_lengths_are_refused(cu_q, cu_kv, message) -> None:
    x = random(10, 1, 8)
    with pytest.raises(ValueError, match=message):
        attention_varlen(x, x, x, cu_q, cu_kv)


def test_hidden_nan_never_reaches_a_row_and_visible_nan_does() -> None:
    q, k, v = (random(2, s, 4, 16, seed=s) for s in (90, 91, 92))
    k, v = k[:, :90, :2].copy(), v[:, :90, :2].copy()
    k[0, 50, 1] = np.nan
    v[1, 60, 0, 3] = np.inf
    v[0, 70] = np.nan
    out, lse = attention(q, k, v, left=30, right=0, want_lse=True)
    comparison = reference.compare(out, lse, q, k, v, left=30, right=0)
    assert comparison.ok, comparison.problem
    assert np.isfinite(out[0, :50]).all() and np.isnan(out[0, 70]).all()


def test_large_finite_scores_are_exact() -> None:
    for seqlen_kv in (1, 2):
        x = np.full((1, seqlen_kv, 1, 64), 133120, ml_dtypes.bfloat16)
        out, lse = attention(x[:, :1], x, x, want_lse=True)
        assert (out == 133120).all()
        np.testing.assert_allclose(lse, 1.417674752e11, rtol=1e-6)


def test_results_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (random(2, 700, 3, 32, seed=s) for s in range(3))
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(host, "_num_threads", lambda threads=threads: threads)
        results.append(attention(q, k, v, right=0, want_lse=True))
    for out, lse in results[1:]:
        np.testing.assert_allclose(out, results[0][0], rtol=0, atol=2e-6)
        np.testing.assert_allclose(lse, results[0][1], rtol=0, atol=2e-6)
    again = attention(q, k, v, right=0, want_lse=True)
    np.testing.assert_array_equal(again[0], results[-1][0])


def test_blas_threads_are_restored_even_with_concurrent_calls_and_errors() -> None:
    get = host._blas_function("get")
    if get is None:
        pytest.skip("NumPy is not linked to OpenBLAS")
    before = get()
    q, k, v = (random(1, 900, 4, 32, seed=s) for s in range(3))
    expected, _ = attention(q, k, v)
    wrong: list[object] = []

    def call() -> None:
        for _ in range(5):
            out, _ = attention(q, k, v)
            if np.abs(out - expected).max() > 1e-5:
                wrong.append(out)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    with pytest.raises(ValueError):
        attention(q, k, v[..., None])
    assert not wrong and get() == before


def test_memory_grows_with_the_length_not_with_its_square() -> None:
    peaks = []
    for seqlen in (2048, 4096, 8192):
        x = random(1, seqlen, 2, 32)
        out = np.empty_like(x)
        attention(x[:, :64], x, x)
        tracemalloc.start()
        attention(x, x, x, out=out)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    first, second = peaks[1] - peaks[0], peaks[2] - peaks[1]
    assert second < 3 * first + 100_000
    assert peaks[2] < 8192 * 8192, "a quarter of one head's float32 scores"


def test_any_strides() -> None:
    q, k, v = (random(2, 96, 2, 16, seed=s) for s in range(3))
    expected, _ = attention(q, k, v)
    kr = k[:, ::-1, :, ::-1].copy()[:, ::-1, :, ::-1]
    vf = np.asfortranarray(v)
    wide = np.full((2, 96, 2, 17), np.nan, np.float32)
    wide[..., 1:] = q
    out = np.full((2, 2, 16, 96), np.nan, np.float32).transpose(0, 3, 1, 2)
    attention(wide[..., 1:], kr, vf, out=out)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)
    one = np.broadcast_to(k[:, :1, :1], k.shape)
    broadcast, _ = attention(q, one, v)
    copied, _ = attention(q, one.copy(), v)
    np.testing.assert_allclose(broadcast, copied, rtol=0, atol=1e-6)


def test_inputs_may_be_read_only_and_stay_unchanged() -> None:
    q, k, v = (random(1, 300, 2, 16, seed=s) for s in range(3))
    before = q.copy(), k.copy(), v.copy()
    for x in (q, k, v):
        x.flags.writeable = False
    attention(q, k, v, right=0, softcap=3.0)
    for x, y in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_many_short_sequences_are_not_one_python_loop_each() -> None:
    q, k, v = (random(20_000, 4, 1, 8, seed=s) for s in range(3))
    out, lse = attention(q, k, v, want_lse=True)
    at = slice(19_990, None)
    comparison = reference.compare(out[at], lse[at], q[at], k[at], v[at])
    assert comparison.ok, comparison.problem


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_merge_equals_the_reference(dtype) -> None:
    q, k, v = (random(2, s, 3, 16, dtype=dtype, seed=s) for s in (20, 50, 51))
    v = v[:, :50]
    parts = [
        attention(q, k[:, at], v[:, at], want_lse=True)
        for at in (slice(0, 7), slice(7, 7), slice(7, 50))
    ]
    out, lse = host.merge([p[0] for p in parts], [p[1] for p in parts])
    assert out.dtype == dtype
    expected, expected_lse = reference.merge([p[0] for p in parts], [p[1] for p in parts])
    bound = 2 * reference.unit_roundoff(dtype) * np.abs(expected).max()
    assert reference.mismatch("out", out, expected, bound) is None
    assert reference.mismatch("lse", lse, expected_lse, 1e-6) is None
