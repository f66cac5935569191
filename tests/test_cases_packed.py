"""Public bug reports about packed sequences and used lengths, as in test_cases_public.py."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cupyflash
from cupyflash import reference
from tests.paths import NUMPY, Path, every_path, numpy_and_gpu


def random(*shape: int, seed: int = 0) -> NDArray:
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


def lengths(path: Path, values: Any) -> Any:
    return path.array(np.asarray(values, np.int32))


def attend(path: Path, q: NDArray, k: NDArray, v: NDArray, **options: Any) -> tuple[Any, Any]:
    """The public call on a path; arrays of lengths among the options are int lists."""
    options = {name: lengths(path, x) if isinstance(x, list) else x for name, x in options.items()}
    out, lse = cupyflash.attention(*map(path.array, (q, k, v)), return_lse=True, **options)
    return path.numpy(out), path.numpy(lse)


@every_path
@pytest.mark.parametrize("used", [[5, 0, 3], [0, 0, 0]], ids=str)
def test_sequences_of_length_zero_are_written(path: Path, used: list[int]) -> None:
    """B07: a cache length of 0 left its row of the output unwritten."""
    q, k, v = (random(3, s, h, 128, seed=h) for s, h in ((1, 8), (16, 2), (16, 2)))
    out = path.array(np.full(q.shape, np.nan, q.dtype))
    _, lse = attend(path, q, k, v, out=out, seqused_kv=used)
    values = path.numpy(out)
    for b, length in enumerate(used):
        at = slice(b, b + 1)
        comparison = reference.compare(values[at], lse[at], q[at], k[at, :length], v[at, :length])
        assert comparison.ok, comparison.problem


@every_path
def test_packed_sequences_some_without_queries(path: Path) -> None:
    """B08: a shortcut for max_seqlen_q = 1 broke when a sequence has no query."""
    q = np.zeros((2, 9, 64), ml_dtypes.bfloat16)
    k = np.zeros((8, 3, 64), ml_dtypes.bfloat16)
    v = np.broadcast_to(np.arange(8)[:, None, None], k.shape).astype(k.dtype)
    out, lse = attend(
        *(path, q, k, v),
        causal=True,
        max_seqlen_q=1,
        max_seqlen_kv=5,
        cu_seqlens_q=[0, 1, 1, 2],
        cu_seqlens_kv=[0, 3, 3, 8],
    )
    assert out.shape == (2, 9, 64)
    np.testing.assert_array_equal(out[0].astype(float), 1.0)
    np.testing.assert_array_equal(out[1].astype(float), 5.0)
    np.testing.assert_allclose(lse, [[math.log(3), math.log(5)]] * 9, atol=1e-3)


@every_path
def test_rows_past_the_last_packed_sequence(path: Path) -> None:
    """B32: rows of the buffers that no sequence owns."""
    q, k, v = (random(160, 2, 64, seed=seed) for seed in range(3))
    for x in (q, k, v):
        x[131:] = np.nan
    options = {"cu_seqlens_q": [0, 50, 131], "cu_seqlens_kv": [0, 50, 131]}
    out, lse = attend(path, q, k, v, **options)
    assert (out[131:] == 0).all() and (lse[:, 131:] == -np.inf).all()
    assert np.isfinite(out.astype(float)).all()
    given = path.array(np.full_like(out, 3))
    attend(path, q, k, v, out=given, **options)
    values = path.numpy(given)
    assert (values[131:] == 3).all() and np.array_equal(values[:131], out[:131])


@every_path
def test_a_max_seqlen_that_is_too_small(path: Path) -> None:
    """B34: it left rows uncomputed. Here it is refused on the CPU and but a hint on a GPU."""
    q, k, v = (random(300, 1, 64, seed=seed) for seed in range(3))
    out = path.array(np.full(q.shape, np.nan, q.dtype))
    options = {"cu_seqlens_q": [0, 40, 300], "cu_seqlens_kv": [0, 40, 300]}
    try:
        attend(path, q, k, v, max_seqlen_q=128, max_seqlen_kv=128, out=out, **options)
    except ValueError:
        assert path is NUMPY
        return
    values = path.numpy(out)
    for begin, end in ((0, 40), (40, 300)):
        at = (None, slice(begin, end))
        comparison = reference.compare(values[at], None, q[at], k[at], v[at])
        assert comparison.ok, comparison.problem


@pytest.mark.parametrize("wrong", [[0, 60, 40], [1, 40, 300], [0, 40, 301]], ids=str)
def test_wrong_packed_lengths_are_refused(wrong: list[int]) -> None:
    """B34: lengths that decrease, do not start at 0, or end past the array."""
    q, k, v = (random(300, 1, 64, seed=seed) for seed in range(3))
    with pytest.raises(ValueError, match="cu_seqlens"):
        attend(NUMPY, q, k, v, cu_seqlens_q=wrong, cu_seqlens_kv=[0, 40, 300])


@numpy_and_gpu
@pytest.mark.parametrize(
    "used", [[1743, 1559], [1, 4096, 3], [129, 0, 127], [128] * 7 + [1]], ids=str
)
def test_packed_causal_sequences_of_different_lengths(path: Path, used: list[int]) -> None:
    """B35: a short sequence beside a long one hung."""
    starts = np.cumsum([0, *used])
    q, k, v = (random(starts[-1], 1, 128, seed=seed) for seed in range(3))
    options = {"cu_seqlens_q": starts.tolist(), "cu_seqlens_kv": starts.tolist()}
    out, _ = attend(path, q, k, v, causal=True, **options)
    for begin, end in zip(starts, starts[1:], strict=False):
        at = (None, slice(begin, end))
        one, _ = attend(path, q[at], k[at], v[at], causal=True)
        np.testing.assert_allclose(
            out[begin:end].astype(float), one[0].astype(float), atol=1e-2, rtol=1e-2
        )


@numpy_and_gpu
def test_80000_packed_sequences(path: Path) -> None:
    """B10: the number of sequences was put on a grid axis limited to 65,535."""
    count, length = 80_000, 16
    starts = np.arange(count + 1) * length
    x = np.zeros((count * length, 1, 8), np.float16)
    v = np.empty_like(x)
    v[:] = np.repeat(np.arange(count) % 251, length)[:, None, None]
    out, _ = attend(path, x, x, v, cu_seqlens_q=starts.tolist(), cu_seqlens_kv=starts.tolist())
    np.testing.assert_array_equal(out, v)


@pytest.mark.gpu
@pytest.mark.parametrize("wide", ["q", "k", "v", "out"])
def test_offsets_beyond_32_bits_in_packed_arrays(cupy: Any, wide: str) -> None:
    """B11: row index times stride in 32 bits; row 2048 starts at element 2**31 here."""
    rows, stride = 2112, 1 << 20
    starts = cupy.asarray([0, 1024, 2048, rows], dtype=cupy.int32)
    options = {"causal": True, "cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    arrays = {name: cupy.asarray(random(rows, 4, 64, seed=seed)) for seed, name in enumerate("qkv")}
    expected = cupyflash.attention(*arrays.values(), **options)
    buffer = cupy.empty((rows, stride // 64, 64), ml_dtypes.bfloat16)  # 4.4 GB
    view = buffer[:, :4]
    if wide == "out":
        out = cupyflash.attention(*arrays.values(), out=view, **options)
    else:
        view[...] = arrays[wide]
        out = cupyflash.attention(*{**arrays, wide: view}.values(), **options)
    np.testing.assert_array_equal(out.get(), expected.get())


@every_path
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("poisoned", ["k", "v", "kv"])
def test_slots_past_the_used_length(path: Path, poison: float, poisoned: str) -> None:
    """B23: a masked probability is 0, but 0 * NaN is not."""
    q = np.full((2, 1, 1, 64), 0.5, np.float16)
    k, v = np.zeros((2, 128, 1, 64), np.float16), np.ones((2, 128, 1, 64), np.float16)
    for b, length in enumerate((1, 3)):
        if "k" in poisoned:
            k[b, length:] = poison
        if "v" in poisoned:
            v[b, length:] = poison
    out, lse = attend(path, q, k, v, seqused_kv=[1, 3])
    np.testing.assert_array_equal(out.astype(float), 1.0)
    np.testing.assert_allclose(lse[:, 0, 0], np.log([1, 3]), atol=1e-3)


@every_path
def test_a_sequence_of_nan_beside_another(path: Path) -> None:
    """B23: the last tile of a packed sequence reaches into the next one."""
    q, k, v = (random(100, 1, 64, seed=seed) for seed in range(3))
    for x in (k, v):
        x[45:] = np.nan
    options = {"cu_seqlens_q": [0, 45, 100], "cu_seqlens_kv": [0, 45, 100]}
    out, lse = attend(path, q, k, v, **options)
    at = (None, slice(0, 45))
    comparison = reference.compare(out[at], lse[None, :, :45], q[at], k[at], v[at])
    assert comparison.ok, comparison.problem
    assert np.isnan(out[45:].astype(float)).all()


@every_path
def test_lse_is_a_natural_logarithm_when_packed(path: Path) -> None:
    """B26, packed."""
    x = np.zeros((4, 1, 64), ml_dtypes.bfloat16)
    _, lse = attend(path, x, x, x, cu_seqlens_q=[0, 4], cu_seqlens_kv=[0, 4])
    np.testing.assert_allclose(lse, np.full((1, 4), math.log(4)), atol=1e-3)


@every_path
def test_keys_past_the_used_length_have_no_weight(path: Path) -> None:
    """B65: key lengths [24, 125] of 128."""
    q, k, v = (random(2, 128, 1, 64, seed=seed) for seed in range(3))
    out, _ = attend(path, q, k, v, seqused_kv=[24, 125])
    for b, length in enumerate((24, 125)):
        at = slice(b, b + 1)
        assert reference.compare(out[at], None, q[at], k[at, :length], v[at, :length]).ok


@pytest.mark.gpu
def test_a_replayed_graph_reads_the_lengths_of_now(cupy: Any) -> None:
    """B56: lengths were baked into a captured graph."""
    q, k, v = (cupy.asarray(random(2, s, 2, 64, seed=s + 1)) for s in (1, 1024, 1023))
    v = cupy.concatenate([v, v[:, :1]], axis=1)
    used = cupy.asarray([17, 40], dtype=cupy.int32)
    out = cupy.empty_like(q)
    cupyflash.attention(q, k, v, seqused_kv=used, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cupyflash.attention(q, k, v, seqused_kv=used, out=out)
        graph = stream.end_capture()
    for now in ([17, 40], [1000, 1], [0, 0], [1024, 1024]):
        used.set(np.asarray(now, np.int32))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for b, length in enumerate(now):
            at = slice(b, b + 1)
            arrays = (q[at].get(), k[at, :length].get(), v[at, :length].get())
            comparison = reference.compare(out[at].get(), None, *arrays)
            assert comparison.ok, comparison.problem
