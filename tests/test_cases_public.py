"""Public bug reports about software of this kind, as small inputs whose right answer is known.

The label of each report (B01 and so on; ``public_reports.md``) is in the docstring. A report
that is about arithmetic runs on every path: NumPy, the three kernel families under the
emulator, and CuPy where there is a GPU. What concerns GPUs alone is marked gpu; what a family
has no kernel for must raise UnsupportedError.
"""

from __future__ import annotations

import fractions
import gc
import inspect
import math
import os
import subprocess
import sys
import textwrap
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cupyflash
from cupyflash import reference
from tests import paths
from tests.cases import Case
from tests.paths import EVERY_PATH, NUMPY, Path, every_path, numpy_and_gpu


def attend(
    path: Path, q: NDArray, k: NDArray, v: NDArray, **options: Any
) -> tuple[NDArray, NDArray]:
    """The public call on a path; out and lse as float64 NumPy arrays."""
    out, lse = cupyflash.attention(*map(path.array, (q, k, v)), return_lse=True, **options)
    return path.numpy(out).astype(np.float64), path.numpy(lse).astype(np.float64)


def zeros(
    seqlen: int, heads: int = 1, head_dim: int = 64, batch: int = 1, dtype: Any = None
) -> NDArray:
    return np.zeros((batch, seqlen, heads, head_dim), dtype or ml_dtypes.bfloat16)


def constant_rows(values: Any, heads: int = 1, head_dim: int = 64, dtype: Any = None) -> NDArray:
    """v[j] = values[j] in every head and column."""
    values = np.asarray(values, np.float64)[None, :, None, None]
    return np.ascontiguousarray(
        np.broadcast_to(values, (1, values.shape[1], heads, head_dim))
    ).astype(dtype or ml_dtypes.bfloat16)


def random(*shape: int, dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> NDArray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# -- masks -----------------------------------------------------------------------------------------


@every_path
def test_causal_rows_without_a_key(path: Path) -> None:
    """B01: with more queries than keys, the first rows see nothing: 0 and -inf, never NaN."""
    out, lse = attend(path, zeros(5), zeros(2), constant_rows([1, 3]), causal=True)
    for column in range(64):
        np.testing.assert_array_equal(out[0, :, 0, column], [0, 0, 0, 1, 2])
    np.testing.assert_allclose(lse[0, 0], [-np.inf] * 3 + [0, math.log(2)], atol=1e-3)

    v = constant_rows(np.arange(1, 41))
    out, lse = attend(path, zeros(300), zeros(40), v, causal=True)
    assert (out[0, :260] == 0).all() and (lse[0, 0, :260] == -np.inf).all()
    np.testing.assert_allclose(out[0, 260:, 0, 0], 1 + np.arange(40) / 2, rtol=2e-2)
    v[:] = np.nan  # a row that sees no key sees no NaN, though its tile does
    poisoned, _ = attend(path, zeros(300), zeros(40), v, causal=True)
    assert (poisoned[0, :260] == 0).all() and np.isnan(poisoned[0, 260:]).all()
    np.testing.assert_allclose(lse[0, 0, 260:], np.log(np.arange(1, 41)), atol=1e-3)


@every_path
def test_causal_is_aligned_to_the_last_query_and_key(path: Path) -> None:
    """B02: a decoding query sees every key; the other alignment is an option with a name."""
    v = constant_rows(range(5))
    out, lse = attend(path, zeros(1), zeros(5), v, causal=True)
    np.testing.assert_allclose(out[0, :, 0, 0], [2.0], rtol=1e-2)
    np.testing.assert_allclose(lse[0, 0], [math.log(5)], atol=1e-3)
    out, lse = attend(path, zeros(2), zeros(5), v, causal=True)
    np.testing.assert_allclose(out[0, :, 0, 0], [1.5, 2.0], rtol=1e-2)
    np.testing.assert_allclose(lse[0, 0], np.log([4, 5]), atol=1e-3)
    out, lse = attend(path, zeros(2), zeros(5), v, causal=True, align="top_left")
    np.testing.assert_allclose(out[0, :, 0, 0], [0, 0.5], rtol=1e-2)
    np.testing.assert_allclose(lse[0, 0], np.log([1, 2]), atol=1e-3)


@every_path
def test_window_bounds_are_inclusive(path: Path) -> None:
    """B04: window=(2, 0) is the current key and two before it."""
    out, lse = attend(path, zeros(6), zeros(6), constant_rows(range(6)), causal=True, window=(2, 0))
    np.testing.assert_allclose(out[0, :, 0, 0], [0, 0.5, 1, 2, 3, 4], atol=1e-6, rtol=1e-2)
    np.testing.assert_allclose(np.exp(lse[0, 0]), [1, 2, 3, 3, 3, 3], rtol=1e-3)


@every_path
def test_no_bound_and_a_bound_of_zero_are_different(path: Path) -> None:
    """B05: causal, causal with an unbounded window and window=(None, 0) are one mask; (0, 0) is
    not "no window" but "the own key only"."""
    q, k, v = (random(1, 200, 1, 64, seed=seed) for seed in range(3))
    first, first_lse = attend(path, q, k, v, causal=True)
    assert first.any()
    for options in ({"causal": True, "window": (None, None)}, {"window": (None, 0)}):
        out, lse = attend(path, q, k, v, **options)
        np.testing.assert_array_equal(out, first)
        np.testing.assert_array_equal(lse, first_lse)
    out, lse = attend(path, q, k, v, window=(0, 0))
    np.testing.assert_array_equal(out, v.astype(np.float64))
    scores = (q.astype(np.float64) * k.astype(np.float64)).sum(-1)[0, :, 0] / 8
    np.testing.assert_allclose(lse[0, 0], scores, atol=1e-3)


@every_path
def test_a_negative_window_is_refused(path: Path) -> None:
    """B05: -1 is how other libraries spell "no limit"; here it is None, and -1 says so."""
    x = path.array(random(1, 8, 1, 64))
    for window in ((-1, 0), (0, -1), (-1, -1)):
        with pytest.raises(ValueError, match="None"):
            cupyflash.attention(x, x, x, window=window)


@every_path
def test_both_sides_of_a_window_count(path: Path) -> None:
    """B65: the right bound of a window was accepted and ignored."""
    out, _ = attend(path, zeros(6), zeros(6), constant_rows(range(6)), window=(1, 1))
    np.testing.assert_allclose(out[0, :, 0, 0], [0.5, 1, 2, 3, 4, 4.5], rtol=1e-2)


# -- sizes and index widths ------------------------------------------------------------------------


@numpy_and_gpu
@pytest.mark.parametrize("heads", [False, True])
def test_65536_in_the_batch_or_in_the_heads(path: Path, heads: bool) -> None:
    """B10: the batch, or batch x heads, was put on a grid axis limited to 65,535."""
    batch = 65536
    x = np.zeros((batch, 4, 1, 64), np.float16)
    v = np.empty_like(x)
    v[:] = (np.arange(batch) % 251)[:, None, None, None]
    arrays = (x, x, v)
    if heads:
        arrays = tuple(y[:, :, 0].transpose(1, 0, 2)[None] for y in arrays)
    out, _ = attend(path, *(np.ascontiguousarray(y) for y in arrays))
    last = out[0, :, -1] if heads else out[-1, :, 0]
    np.testing.assert_array_equal(last, 65535 % 251)
    every = out[0, 0, :, 0] if heads else out[:, 0, 0, 0]
    np.testing.assert_array_equal(every, np.arange(batch) % 251)


@pytest.mark.gpu
@pytest.mark.parametrize("wide", ["q", "k", "v", "out"])
def test_offsets_beyond_32_bits(cupy: Any, wide: str) -> None:
    """B11: row index times outer stride in 32 bits; row 2048 starts at element 2**31 here."""
    rows, stride = 2112, 1 << 20
    arrays = {
        name: cupy.asarray(random(1, rows, 4, 64, seed=seed)) for seed, name in enumerate("qkv")
    }
    expected = cupyflash.attention(*arrays.values(), causal=True)
    buffer = cupy.empty((1, rows, stride // 64, 64), ml_dtypes.bfloat16)  # 4.4 GB
    view = buffer[:, :, :4]
    if wide == "out":
        out = cupyflash.attention(*arrays.values(), causal=True, out=view)
    else:
        view[...] = arrays[wide]
        out = cupyflash.attention(*{**arrays, wide: view}.values(), causal=True)
    np.testing.assert_array_equal(out.get(), expected.get())


@numpy_and_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seqlen", [33_728, 65_537, 131_073])
def test_sequences_beyond_16_bits(path: Path, seqlen: int, head_dim: int) -> None:
    """B13: a 16-bit index made everything past 32,768 NaN."""
    short = seqlen if path is paths.CUPY else 70  # the full square takes the CPU minutes
    for seqlen_q, seqlen_kv in {(short, seqlen), (seqlen, short)}:
        q = zeros(seqlen_q, head_dim=head_dim, dtype=np.float16)
        k = zeros(seqlen_kv, head_dim=head_dim, dtype=np.float16)
        out, lse = attend(path, q, k, k)
        assert (out == 0).all()
        np.testing.assert_allclose(lse, math.log(seqlen_kv), atol=1e-3)


# -- strides and alignment -------------------------------------------------------------------------


def same_or_refused(
    path: Path, expected: NDArray, arrays: list[Any], message: str, **options
) -> None:
    """Odd memory is either computed right or refused with a message that names the rule."""
    try:
        out = cupyflash.attention(*arrays, **options)
    except (ValueError, cupyflash.UnsupportedError) as error:
        assert path is not NUMPY, error
        assert message in str(error), error
    else:
        np.testing.assert_allclose(
            path.numpy(out).astype(np.float64), expected, rtol=1e-2, atol=1e-2
        )


on_arrays_with_views = numpy_and_gpu


@on_arrays_with_views
def test_broadcast_inputs(path: Path) -> None:
    """B14: strides of zero, as a broadcast has them, are not a dense array."""
    q, k = random(1, 70, 1, 64, dtype=np.float16), random(1, 1, 1, 64, dtype=np.float16, seed=1)
    v = random(1, 90, 4, 64, dtype=np.float16, seed=2)
    wide_q = np.broadcast_to(q, (1, 70, 4, 64))
    wide_k = np.broadcast_to(k, (1, 90, 4, 64))
    expected, _ = attend(path, wide_q.copy(), wide_k.copy(), v)
    module = np if path is NUMPY else __import__("cupy")
    arrays = [
        module.broadcast_to(path.array(q), wide_q.shape),
        module.broadcast_to(path.array(k), wide_k.shape),
        path.array(v),
    ]
    same_or_refused(path, expected, arrays, "stride")


@on_arrays_with_views
def test_slices_of_a_concatenated_buffer(path: Path) -> None:
    """B14, B17: rows of H * D + 17 elements keep neither a dense stride nor 16 bytes."""
    seqlen, heads, head_dim = 96, 2, 64
    q, k, v = (random(1, seqlen, heads, head_dim, seed=seed) for seed in range(3))
    expected, _ = attend(path, q, k, v)
    buffer = np.full((1, seqlen, heads * head_dim + 17), np.nan, ml_dtypes.bfloat16)
    buffer[..., : heads * head_dim] = k.reshape(1, seqlen, -1)
    view = path.array(buffer)[..., : heads * head_dim].reshape(1, seqlen, heads, head_dim)
    same_or_refused(path, expected, [path.array(q), view, path.array(v)], "16")


@on_arrays_with_views
def test_reversed_transposed_and_fortran_order(path: Path) -> None:
    """B16: a kernel that gets a base pointer only reads such views as if they were dense."""
    q, k, v = (random(1, 96, 2, 64, seed=seed) for seed in range(3))
    module = np if path is NUMPY else __import__("cupy")
    q_dev, k_dev, v_dev = (path.array(x) for x in (q, k, v))
    expected, _ = attend(path, q, k[:, ::-1].copy(), v)
    same_or_refused(path, expected, [q_dev, k_dev[:, ::-1], v_dev], "stride")
    expected, _ = attend(path, q, k, v)
    same_or_refused(path, expected, [module.asfortranarray(q_dev), k_dev, v_dev], "stride")
    heads_first = [x.transpose(0, 2, 1, 3) for x in (q_dev, k_dev, v_dev)]
    out = cupyflash.attention(*heads_first, layout="bhsd")
    np.testing.assert_array_equal(path.numpy(out).transpose(0, 2, 1, 3).astype(float), expected)


@on_arrays_with_views
def test_addresses_that_break_the_16_byte_rule(path: Path) -> None:
    """B17: a base shifted by one element, and rows of 65 elements."""
    seqlen = 80
    q, k, v = (random(1, seqlen, 1, 64, seed=seed) for seed in range(3))
    expected, _ = attend(path, q, k, v)
    rest = [path.array(k), path.array(v)]
    shifted = path.array(np.concatenate([np.full(1, np.nan, q.dtype), q.ravel()]))
    same_or_refused(path, expected, [shifted[1:].reshape(q.shape), *rest], "16")
    rows = np.full((1, seqlen, 1, 65), np.nan, q.dtype)
    rows[..., :64] = q
    same_or_refused(path, expected, [path.array(rows)[..., :64], *rest], "16")


# -- head dimensions -------------------------------------------------------------------------------


@every_path
def test_head_dim_36_keeps_its_own_scale(path: Path) -> None:
    """B19: whoever pads the head dimension must keep the scale of the unpadded one."""
    q = np.ones((1, 1, 1, 36), np.float16)
    k = np.concatenate([q, q * 0], axis=1)
    try:
        out, _ = attend(path, q, k, constant_rows([1, 0], head_dim=36, dtype=np.float16))
    except cupyflash.UnsupportedError as error:
        assert path is not NUMPY and "multiple of 8" in str(error)
    else:
        np.testing.assert_allclose(out, 0.99753, atol=5e-4)


@pytest.mark.parametrize("dims", [(128, 96), (128, 80), (192, 128), (64, 128)], ids=str)
@on_arrays_with_views
def test_values_of_another_width(path: Path, dims: tuple[int, int]) -> None:
    """B20: a size computed from one head dimension was used for the other."""
    case = Case(
        f"widths_{dims}", 300, 300, batch=2, heads_q=2, head_dim=dims[0], head_dim_v=dims[1]
    )
    try:
        out, lse = paths.run(path, case)
    except cupyflash.UnsupportedError as error:
        assert path is not NUMPY and "head_dim" in str(error)
    else:
        assert out.shape == (2, 300, 2, dims[1])
        comparison = case.compare(out, lse)
        assert comparison.ok, comparison.problem


@every_path
@pytest.mark.parametrize("head_dim", [72, 128])
def test_the_last_column_counts(path: Path, head_dim: int) -> None:
    """B22: only the first 64 columns were used."""
    q, k = zeros(1, head_dim=head_dim), zeros(3, head_dim=head_dim)
    q[..., -1] = 8
    k[0, :, 0, -1] = range(3)
    v = constant_rows(range(3), head_dim=head_dim)
    out, lse = attend(path, q, k, v, softmax_scale=1.0)
    np.testing.assert_allclose(out, 1.99966, atol=1e-2)
    np.testing.assert_allclose(lse, 16.00034, atol=1e-3)


@pytest.mark.parametrize("path", EVERY_PATH[1:], ids=str)
def test_an_unsupported_head_dim_lists_what_there_is(path: Path) -> None:
    """B22: never accept a size and compute something else."""
    x = path.array(random(1, 8, 1, 264))
    with pytest.raises(cupyflash.UnsupportedError, match="256|128") as caught:
        cupyflash.attention(x, x, x)
    assert caught.value.rejections


# -- NaN, infinity, large numbers ------------------------------------------------------------------


@every_path
@pytest.mark.parametrize("poisoned", ["k", "v", "kv"])
def test_slots_past_the_end_of_the_keys(path: Path, poisoned: str) -> None:
    """B23, dense: what lies in memory behind the last key of a batch entry never counts."""
    case = Case("cache_slots", 3, 45, batch=2, heads_q=2, padded=True)
    q, k, v = case.inputs
    for name, placed in (("k", k), ("v", v)):
        if name not in poisoned:
            nan = np.isnan(placed.buffer.astype(np.float32))
            placed.buffer[nan] = 0
    out, lse = paths.run(path, case)
    comparison = case.compare(out, lse)
    assert comparison.ok, comparison.problem


@every_path
def test_a_nan_stays_in_its_own_head_and_batch_entry(path: Path) -> None:
    """B23: NaN in one sequence must not reach its neighbours."""
    q, k, v = (random(2, 100, 2, 64, seed=seed) for seed in range(3))
    clean, _ = attend(path, q, k, v)
    k[0, 30, 1] = np.nan
    v[1, 99, 0] = np.nan
    out, _ = attend(path, q, k, v)
    assert np.isnan(out[0, :, 1]).all() and np.isnan(out[1, :, 0]).all()
    np.testing.assert_array_equal(out[0, :, 0], clean[0, :, 0])
    np.testing.assert_array_equal(out[1, :, 1], clean[1, :, 1])


@every_path
@pytest.mark.parametrize("causal", [False, True])
def test_special_values_stay_in_their_rows(path: Path, causal: bool) -> None:
    """B23, B25: NaN and infinite scores reach the rows that see them, no others."""
    q, k, v = (random(1, 300, 2, 64, seed=seed) for seed in range(3))
    q[0, 3, 0] = np.nan
    q[0, 70, 0, 5] = np.inf  # scores of either infinity
    q[0, 140, 0] = np.inf  # scores that are inf - inf
    q[0, 200, 1, 5] = -np.inf
    k[0, :, 1, 5] = np.abs(k[0, :, 1, 5])  # row 200 of head 1: every score is -inf
    if not causal:
        k[0, 299, 0, 0] = np.nan  # seen by all rows of head 0
    v[0, 0, 1, 9] = np.inf  # seen by all rows of head 1
    bounds = {"right": 0} if causal else {}
    out, lse = attend(path, q, k, v, causal=causal)
    comparison = reference.compare(out, lse, q, k, v, **bounds)
    assert comparison.ok, comparison.problem


@every_path
@pytest.mark.parametrize("seqlen_kv", [1, 2])
def test_very_large_finite_inputs(path: Path, seqlen_kv: int) -> None:
    """B25: max * scale and score * scale were rounded differently, and the difference exploded."""
    x = np.full((1, seqlen_kv, 1, 64), 133120, ml_dtypes.bfloat16)
    out, lse = attend(path, x[:, :1], x, x)
    np.testing.assert_array_equal(out, 133120)
    np.testing.assert_allclose(lse, 1.417674752e11, rtol=1e-6)


@every_path
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("crossing", range(4))
def test_maxima_that_cross_two_to_the_23(path: Path, sign: int, crossing: int) -> None:
    """Scores of 2^23 in units of log2: kernels change their reference there, between blocks."""
    score = 90848.0
    q, k = np.zeros((1, 1, 1, 64), np.float16), np.zeros((1, 512, 1, 64), np.float16)
    q[..., :3] = 1
    k[..., 0], k[..., 1] = sign * 60000, sign * (score - 60000)
    k[:, :256, :, 2] = 1 / 64  # these weigh e times as much as the others, and come later
    v = constant_rows([1] * 256 + [0] * 256, dtype=np.float16)
    scale = (2.0**23 - sign * (0.2 + 0.3 * crossing)) / score * math.log(2)
    out, _ = attend(path, q, k, v, softmax_scale=float(np.float32(scale)))
    np.testing.assert_allclose(out, 1 / (1 + math.exp(-scale / 64)), atol=2e-3)


# -- log-sum-exp, merging --------------------------------------------------------------------------


@every_path
def test_lse_is_a_natural_logarithm(path: Path) -> None:
    """B26: one backend returned base 2, another base e."""
    _, lse = attend(path, zeros(3), zeros(4), zeros(4))
    assert lse.shape == (1, 1, 3)
    np.testing.assert_allclose(lse, math.log(4), atol=1e-3)


def test_merging_partial_results() -> None:
    """B26: keys 0 to 63 with v = 1, keys 64 to 79 with v = 0; a mix-up of bases gives 0.8808."""
    q = zeros(1, dtype=np.float32)
    k, v = zeros(80, dtype=np.float32), constant_rows([1] * 64 + [0] * 16, dtype=np.float32)
    parts = [
        cupyflash.attention(q, k[:, at], v[:, at], return_lse=True)
        for at in (slice(0, 64), slice(64, 80))
    ]
    out, lse = cupyflash.merge([p[0] for p in parts], [p[1] for p in parts], return_lse=True)
    np.testing.assert_allclose(out, 0.8, rtol=1e-6)
    np.testing.assert_allclose(lse, 4.382027, rtol=1e-6)
    alone = cupyflash.merge([p[0] for p in parts], [p[1] for p in parts])
    np.testing.assert_array_equal(alone, out)


# -- heads -----------------------------------------------------------------------------------------


@every_path
@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "seqlen_q"), [(6, 2, 5), (48, 2, 1), (80, 4, 2), (5, 5, 3), (71, 1, 1)]
)
def test_query_heads_share_in_groups(
    path: Path, heads_q: int, heads_kv: int, seqlen_q: int
) -> None:
    """B31: query head h reads key head h // group; interleaving is right only by accident."""
    v = np.empty((1, 9, heads_kv, 64), ml_dtypes.bfloat16)
    v[:] = np.arange(heads_kv)[None, None, :, None]
    out, _ = attend(path, zeros(seqlen_q, heads_q), zeros(9, heads_kv), v)
    expected = np.arange(heads_q) * heads_kv // heads_q
    for row in range(seqlen_q):
        np.testing.assert_array_equal(out[0, row, :, 0], expected)


@every_path
def test_query_heads_that_do_not_divide_are_refused(path: Path) -> None:
    """B31: no guessing."""
    q, k = path.array(random(1, 4, 5, 64)), path.array(random(1, 4, 2, 64))
    with pytest.raises(ValueError, match="heads"):
        cupyflash.attention(q, k, k)


# -- dtypes and other libraries' arrays ------------------------------------------------------------


@every_path
def test_untagged_bytes_and_mixed_types_are_refused(path: Path) -> None:
    """B58: bf16 passed as raw bytes lost its type; mixed types were reinterpreted."""
    x = random(1, 4, 1, 64)
    for untyped in (np.uint16, np.int16):
        raw = path.array(x.view(untyped))
        with pytest.raises(TypeError, match="int16"):
            cupyflash.attention(raw, raw, raw)
    with pytest.raises(TypeError, match="(?s)bfloat16.*float16|float16.*bfloat16"):
        cupyflash.attention(path.array(x), path.array(x.astype(np.float16)), path.array(x))


def test_torch_and_jax_arrays_on_the_cpu_come_back_as_their_own() -> None:
    """B58: bf16 from other libraries, in and out, without a detour over another type."""
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    x = random(1, 40, 2, 64)
    expected = cupyflash.attention(x, x, x)
    tensor = torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
    out = cupyflash.attention(tensor, tensor, tensor)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
    np.testing.assert_array_equal(out.float().numpy(), expected.astype(np.float32))
    array = jnp.asarray(x)
    out = cupyflash.attention(array, array, array)
    assert isinstance(out, type(array)) and out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out), expected)


@pytest.mark.gpu
def test_torch_and_jax_arrays_on_a_gpu(cupy: Any) -> None:
    """B58, B59 on a GPU: bf16 in and out, lifetimes in either order, a thousand times."""
    torch = pytest.importorskip("torch")
    x = random(1, 40, 2, 64)
    expected = cupyflash.attention(cupy.asarray(x), cupy.asarray(x), cupy.asarray(x)).get()
    tensor = torch.from_numpy(x.astype(np.float32)).to("cuda", torch.bfloat16)
    for i in range(1000):
        q, k, v = tensor.clone(), tensor.clone(), tensor.clone()
        out = cupyflash.attention(q, k, v)
        del q, k, v
        if i % 200 == 0:
            gc.collect()
            assert out.dtype == torch.bfloat16 and out.is_cuda
            np.testing.assert_array_equal(out.float().cpu().numpy(), expected.astype(np.float32))
    capsule_owner = cupy.from_dlpack(tensor)
    out = cupyflash.attention(capsule_owner, capsule_owner, capsule_owner)
    np.testing.assert_array_equal(out.get(), expected)


def test_a_tensor_that_requires_grad_is_recorded() -> None:
    """B59: export of such a tensor fails somewhere deep inside DLPack."""
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.zeros(1, 4, 1, 64))
    plain = torch.zeros(1, 4, 1, 64)
    assert cupyflash.attention(weight, plain, plain).requires_grad
    with torch.no_grad():
        assert not cupyflash.attention(weight, plain, plain).any()


def test_a_read_only_output_is_refused_and_unchanged() -> None:
    """B59: JAX arrays and broadcast views must not be written to."""
    x = random(1, 4, 1, 64, dtype=np.float32)
    out = np.full(x.shape, 7, np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out.*read-only"):
        cupyflash.attention(x, x, x, out=out)
    assert (out == 7).all()
    jnp = pytest.importorskip("jax.numpy")
    given = jnp.full(x.shape, 7, jnp.float32)
    with pytest.raises((ValueError, TypeError), match="out"):
        cupyflash.attention(*(jnp.asarray(x),) * 3, out=given)
    assert (np.asarray(given) == 7).all()


@pytest.mark.gpu
def test_arrays_on_the_host_and_on_the_gpu_do_not_mix(cupy: Any) -> None:
    """B55, B58: a clear error instead of a crash."""
    x = random(1, 4, 1, 64)
    with pytest.raises(TypeError, match="one library and on one device"):
        cupyflash.attention(cupy.asarray(x), x, x)


# -- import, fork, home directory ------------------------------------------------------------------


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_import_touches_neither_gpu_nor_files(tmp_path: Any) -> None:
    """B61: import made a CUDA context, or wrote to the home directory."""
    code = """
        import sys, cupyflash
        heavy = ("cupy", "torch", "jax", "cuda.pathfinder")
        loaded = [name for name in heavy if name in sys.modules]
        assert not loaded, loaded
        maps = open("/proc/self/maps").read()
        assert "libcuda.so" not in maps and "libnvrtc" not in maps
    """
    result = run_python(
        code, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache"), CUDA_VISIBLE_DEVICES=""
    )
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.iterdir())
    result = run_python("import cupyflash", HOME="/nonexistent", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr


def test_numpy_path_after_fork_and_without_a_home() -> None:
    """B61: import in the parent, call in the child."""
    code = """
        import os, sys
        import numpy as np
        import cupyflash
        x = np.ones((2, 600, 4, 64), np.float32)
        cupyflash.attention(x, x, x)
        child = os.fork()
        if child == 0:
            ok = np.allclose(cupyflash.attention(x, x, x, causal=True), 1)
            os._exit(0 if ok else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    result = run_python(code, HOME="/nonexistent", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr


# -- arguments -------------------------------------------------------------------------------------


@every_path
def test_every_kind_of_number_is_the_same_scale(path: Path) -> None:
    """B64: a Python float arrived as a double where the kernel wanted a float."""
    q, k, v = (random(1, s, 1, 64, seed=s) for s in (1, 30, 31))
    v = v[:, :30]
    expected, expected_lse = attend(path, q, k, v, softmax_scale=0.125)
    scales = (
        np.float32(0.125),
        np.float64(0.125),
        np.float16(0.125),
        np.array(0.125),
        fractions.Fraction(1, 8),
    )
    for scale in scales:
        out, lse = attend(path, q, k, v, softmax_scale=scale)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)
    _, lse = attend(path, q, k[:, :1], v[:, :1], softmax_scale=1)
    score = float((q.astype(float) * k[:, :1].astype(float)).sum())
    np.testing.assert_allclose(lse, score, rtol=1e-4, atol=1e-3)


@every_path
def test_numbers_that_make_no_sense_are_refused(path: Path) -> None:
    """B64: NaN scales, flags as counts, counts that do not fit."""
    x = path.array(random(1, 4, 1, 64))
    for scale in (math.nan, math.inf, 1e300):
        with pytest.raises(ValueError, match="softmax_scale"):
            cupyflash.attention(x, x, x, softmax_scale=scale)
    for scale in (True, "0.1", 1j):
        with pytest.raises(TypeError, match="softmax_scale"):
            cupyflash.attention(x, x, x, softmax_scale=scale)
    with pytest.raises(ValueError, match="window"):
        cupyflash.attention(x, x, x, window=(2**31, 0))
    for window in ((True, 0), (1.5, 0), 3):
        with pytest.raises(TypeError, match="window"):
            cupyflash.attention(x, x, x, window=window)
    with pytest.raises(TypeError, match="causal"):
        cupyflash.attention(x, x, x, causal=1)
    out, _ = attend(path, *(random(1, 6, 1, 64),) * 3, window=(np.int64(1), np.int32(0)))
    assert np.isfinite(out).all()


@pytest.mark.gpu
def test_a_scale_on_the_device_is_refused(cupy: Any) -> None:
    """B64: reading it would stop the host."""
    x = cupy.asarray(random(1, 4, 1, 64))
    with pytest.raises(TypeError, match="softmax_scale"):
        cupyflash.attention(x, x, x, softmax_scale=cupy.array(0.125))


# For each optional argument, a value that must change the result.
FLIPS: dict[str, Any] = {
    "causal": True,
    "align": "top_left",
    "window": (3, 1),
    "softmax_scale": 0.5,
    "softcap": 0.5,
    "q_offset": 3,
    "kv_offset": 2,
    "seqused_q": np.array([5], np.int32),
    "seqused_kv": np.array([6], np.int32),
    "q_scale": np.array(2.0, np.float32),
    "k_scale": np.array(2.0, np.float32),
    "v_scale": np.array(2.0, np.float32),
    "out_dtype": np.float32,
    "out_scale": np.array(2.0, np.float32),
}


# Arguments with tests of their own, because a flip needs other arrays or changes no value.
TESTED_ELSEWHERE = {
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "max_seqlen_q",
    "max_seqlen_kv",
    "layout",
    "out",
    "return_lse",
    "num_sms",
    "stream",
}


def test_every_argument_is_flipped() -> None:
    """B65: an argument that is added to the function must be added to a test."""
    parameters = inspect.signature(cupyflash.attention).parameters
    assert set(parameters) - {"q", "k", "v"} == FLIPS.keys() | TESTED_ELSEWHERE


@every_path
def test_arguments_that_do_not_apply_are_refused(path: Path) -> None:
    """B65: packed lengths beside dense arrays, streams and SM counts where there are none."""
    x = path.array(random(1, 8, 1, 64))
    starts = path.array(np.array([0, 8], np.int32))
    refused = (ValueError, TypeError, NotImplementedError)
    for options in ({"max_seqlen_q": 8}, {"cu_seqlens_q": starts}, {"cu_seqlens_kv": starts}):
        with pytest.raises(refused, match="seqlen"):
            cupyflash.attention(x, x, x, **options)
    with pytest.raises(ValueError, match="layout"):
        cupyflash.attention(x, x, x, layout="sbhd")
    if path is not paths.CUPY:
        with pytest.raises(refused, match="stream"):
            cupyflash.attention(x, x, x, stream=1)
    for num_sms in (0, -1):
        with pytest.raises(ValueError, match="num_sms"):
            cupyflash.attention(x, x, x, num_sms=num_sms)


@every_path
@pytest.mark.parametrize("argument", FLIPS)
def test_no_argument_is_ignored(path: Path, argument: str) -> None:
    """B65: arguments were accepted and ignored. Each changes the result or is refused by name."""
    q, k, v = (random(1, s, 1, 64, seed=s) for s in (8, 20, 21))
    q = q * np.asarray(2, q.dtype)
    v = v[:, :20]
    base: dict[str, Any] = {}
    if argument in ("align", "q_offset", "kv_offset"):
        base["causal"] = True
    value = FLIPS[argument]
    if isinstance(value, np.ndarray):
        value = path.array(value)
    plain = cupyflash.attention(*map(path.array, (q, k, v)), **base)
    try:
        changed = cupyflash.attention(*map(path.array, (q, k, v)), **base, **{argument: value})
    except NotImplementedError as error:
        assert argument in str(error), error
    except TypeError as error:
        # A type that cannot be: scales without fp8, a NumPy dtype where none is wanted.
        assert argument in str(error), error
    else:
        plain, changed = path.numpy(plain), path.numpy(changed)
        assert plain.dtype != changed.dtype or not np.array_equal(plain, changed)


@every_path
def test_shapes_that_do_not_match_are_refused(path: Path) -> None:
    """B65: never computed on the smaller of the two."""
    q = random(2, 8, 4, 64)
    for k_shape, v_shape in (
        ((2, 9, 4, 64), (2, 10, 4, 64)),  # keys and values
        ((1, 9, 4, 64), (1, 9, 4, 64)),  # batch
        ((2, 9, 4, 56), (2, 9, 4, 64)),  # head_dim
        ((2, 9, 2, 64), (2, 9, 4, 64)),  # heads of k and v
        ((2, 9, 64), (2, 9, 64)),  # rank
    ):
        with pytest.raises(ValueError, match=r"\b[kv]: "):
            cupyflash.attention(
                path.array(q), path.array(random(*k_shape)), path.array(random(*v_shape))
            )


@every_path
def test_outputs_that_do_not_fit_are_refused_unchanged(path: Path) -> None:
    """B65: nothing half-written."""
    x = random(1, 8, 2, 64)
    for wrong in (random(1, 8, 2, 32), random(1, 9, 2, 64)):
        out = path.array(wrong)
        with pytest.raises(ValueError, match="out"):
            cupyflash.attention(*(path.array(x),) * 3, out=out)
        np.testing.assert_array_equal(path.numpy(out), wrong)
    wrong = x.astype(np.float16)
    out = path.array(wrong)
    with pytest.raises(TypeError, match="out"):
        cupyflash.attention(*(path.array(x),) * 3, out=out)
    np.testing.assert_array_equal(path.numpy(out), wrong)


# -- kernels that are reused -----------------------------------------------------------------------


MIXED = (
    {},
    {"dtype": "float16"},
    {"causal": True},
    {"window": (40, 3)},
    {"softmax_scale": 0.1},
    {"softmax_scale": 0.2},
    {"padded": True},
    {"layout": "bhsd"},
    {"head_dim": 128},
    {"head_dim": 72},
    {"heads_q": 4},
)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 1])
def test_one_process_many_configurations(poisoned_pool: Any, seed: int) -> None:
    """B62: the cache's key missed something, and a later call ran an earlier call's kernel."""
    cases = [
        Case(f"mixed_{i}", 200, 300, **{"heads_q": 2, **fields}) for i, fields in enumerate(MIXED)
    ] * 2
    for index in np.random.default_rng(seed).permutation(len(cases)):
        case = cases[index]
        out, lse = paths.run(paths.CUPY, case)
        comparison = case.compare(out, lse)
        assert comparison.ok, f"{case}: {comparison.problem}"


def test_a_kernel_is_chosen_by_kind_not_by_length() -> None:
    """B68: no compilation when only lengths change."""
    from cupyflash import select
    from cupyflash.problem import DeviceInfo, Mask, Problem
    from cupyflash.tensor import DType

    device = DeviceInfo("any", (9, 0), 132, 227 * 1024, 50 << 20)
    chosen = set()
    for seqlen_kv in range(1, 5000, 7):
        problem = Problem(1, 1000, seqlen_kv, 8, 8, 128, 128, DType.bfloat16, Mask(right=0))
        chosen.add(select.select(problem, device).spec)
    assert len({spec.mask for spec in chosen}) == len(chosen) <= 2


@pytest.mark.gpu
def test_every_use_of_the_same_kernel_gives_the_same_bits(poisoned_pool: Any) -> None:
    """B52: counters in scratch memory were not reset, and the second use hung or was wrong."""
    cases = [
        Case(f"reuse_{i}", 260, 700, **{"heads_q": 2, **fields}) for i, fields in enumerate(MIXED)
    ]
    first = [paths.run(paths.CUPY, case)[0] for case in cases]
    x = poisoned_pool.asarray(random(1, 4, 1, 64))
    with pytest.raises(ValueError):
        cupyflash.attention(x, x, x, softmax_scale=math.nan)
    for _ in range(3):
        for case, expected in reversed(list(zip(cases, first, strict=True))):
            np.testing.assert_array_equal(paths.run(paths.CUPY, case)[0], expected)


# -- streams, graphs, devices ----------------------------------------------------------------------


@pytest.mark.gpu
def test_runs_on_the_current_stream_and_on_a_given_one(cupy: Any) -> None:
    """B55: the kernel ran on another stream than the data."""
    x = random(1, 2000, 8, 128)
    expected = cupyflash.attention(*(cupy.asarray(x),) * 3).get()
    big = cupy.ones((6000, 6000), cupy.float32)
    for given in (False, True):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            q = cupy.zeros(x.shape, ml_dtypes.bfloat16)
            for _ in range(3):
                big = big @ big  # keeps the stream busy, so that a wrong order shows
            q[...] = cupy.asarray(x)
            if not given:
                out = cupyflash.attention(q, q, q)
        if given:
            out = cupyflash.attention(q, q, q, stream=stream)
        stream.synchronize()
        np.testing.assert_array_equal(out.get(), expected)


@pytest.mark.gpu
def test_cuda_graph_capture_and_replay(cupy: Any) -> None:
    """B56: a graph froze values read on the host. New data in the same arrays must count."""
    q, k, v = (cupy.asarray(random(1, 300, 2, 128, seed=seed)) for seed in range(3))
    out = cupy.full(q.shape, np.nan, q.dtype)
    cupyflash.attention(q, k, v, causal=True, out=out)  # compiled and loaded before the capture
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cupyflash.attention(q, k, v, causal=True, out=out)
        graph = stream.end_capture()
    for seed in range(3, 9, 3):
        for array, offset in ((q, 0), (k, 1), (v, 2)):
            array[...] = cupy.asarray(random(*array.shape, seed=seed + offset))
        out[...] = np.nan
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        eager = cupyflash.attention(q, k, v, causal=True)
        np.testing.assert_array_equal(out.get(), eager.get())


@pytest.mark.gpu
def test_a_first_call_inside_a_capture_leaves_the_stream_usable(cupy: Any) -> None:
    """B56: compiling and loading inside a capture either works or says what to do."""
    code = """
        import cupy, ml_dtypes, cupyflash
        x = cupy.ones((1, 64, 1, 64), ml_dtypes.bfloat16)
        out = cupy.empty_like(x)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                cupyflash.attention(x, x, x, out=out)
            except RuntimeError as error:
                print("refused:", error)
                captured = False
            else:
                captured = True
            try:
                graph = stream.end_capture()
            except Exception as error:
                graph = None
                assert not captured, error
            if captured:
                graph.launch(stream)
            else:
                cupyflash.attention(x, x, x, out=out)
            stream.synchronize()
        assert (out.astype(cupy.float32) == 1).all()
    """
    result = run_python(code)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.gpu
def test_the_current_device_is_left_alone(cupy: Any) -> None:
    """B55: current device and stream are what they were before the call."""
    x = cupy.asarray(random(1, 64, 1, 64))
    before = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream()
    cupyflash.attention(x, x, x)
    assert (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream()) == before


@pytest.mark.two_gpus
def test_two_gpus_in_turn_and_from_threads(cupy: Any) -> None:
    """B55: a kernel handle of one GPU was used on another."""
    x = random(1, 300, 2, 128)
    arrays = []
    for device in (0, 1):
        with cupy.cuda.Device(device):
            arrays.append(cupy.asarray(x))
    expected = cupyflash.attention(*(arrays[0],) * 3).get()
    for device in (1, 0, 1):
        out = cupyflash.attention(*(arrays[device],) * 3)  # device 0 is current throughout
        assert out.data.device_id == device and cupy.cuda.runtime.getDevice() == 0
        np.testing.assert_array_equal(out.get(), expected)
    with pytest.raises((TypeError, ValueError), match="device"):
        cupyflash.attention(arrays[0], arrays[1], arrays[1])

    wrong: list[int] = []

    def call(device: int) -> None:
        with cupy.cuda.Device(device):
            for i in range(250):
                out = cupyflash.attention(*(arrays[device],) * 3)
                if i % 50 == 0 and not np.array_equal(out.get(), expected):
                    wrong.append(device)

    threads = [threading.Thread(target=call, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
