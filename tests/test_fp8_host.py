"""Attention of 8-bit floats: the CPU path and the reference that rounds probabilities."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import fp8, reference, reference_fp8
from cupyflash.params import SCALES
from cupyflash.reference_fp8 import Scaled
from tests import cases, paths
from tests.cases import Fp8Case
from tests.test_api_errors import FLIPPED, OPTIONS, REFUSED_ON_CPU, TOGETHER_WITH, column

E4M3 = ml_dtypes.float8_e4m3fn


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(E4M3)


def scaled(x: np.ndarray, scale: Any = 1.0) -> Scaled:
    """[batch, seqlen, heads, head_dim] with what broadcasts to [batch, seqlen, heads]."""
    scales = np.broadcast_to(np.asarray(scale, np.float32), x.shape[:3])
    return Scaled(x.astype(np.float32), scales)


@pytest.mark.parametrize("case", cases.FP8, ids=str)
def test_case(case: Fp8Case) -> None:
    """The CPU rounds no probabilities, so it is held to one rounding of the output, not to what
    e4m3 costs."""
    exact = []
    for b in range(case.of.batch):
        operands = [(x.numbers * x.scales[..., None]).astype(np.float32) for x in case.scaled_of(b)]
        expected = reference.expect(*operands, **case.of.bounds_of(b))
        rounding = reference.unit_roundoff(cases.DTYPES[case.out_dtype])
        bound = expected.bound + 2 * rounding * reference.largest_magnitude(expected.out)
        exact.append(dataclasses.replace(expected, bound=bound))
    for given_output in (False, True):
        out, lse = paths.run_fp8(paths.NUMPY, case, given_output)
        assert out.dtype == cases.DTYPES[case.out_dtype] and lse.dtype == np.float32
        assert case.of.problem_with(out, lse, not given_output, tuple(exact)) is None
        assert case.problem_with(out, lse, cleared=not given_output) is None


@pytest.mark.parametrize("case", cases.FP8, ids=str)
def test_what_rounding_probabilities_costs(case: Fp8Case) -> None:
    """Blocks of 64 keys and another offset are another kernel: right, by the tolerance that blocks
    of 128 give; and e4m3 does not cost more than its three bits of fraction can."""
    for b, expected in enumerate(case.expectations):
        q, k, v = case.scaled_of(b)
        out, lse = reference_fp8.rounded_attention(
            q, k, v, block=64, max_offset=7.75, **case.of.bounds_of(b)
        )
        comparison = expected.compare(out, lse)
        assert comparison.ok, comparison.problem
        # Weights are off by 2^-4 of themselves, or 2^-10 in units of 2^-7.5 of the largest.
        sizes = reference.largest_magnitude(v.values)
        assert expected.bound <= 2 * sizes * (2.0**-4 + k.numbers.shape[1] * 2.0**-17.5 + 2.0**-7)


WRONG = {
    "scale_of_another_block_of_k": lambda q, k, v: (q, _rolled(k), v),
    "scale_of_another_block_of_v": lambda q, k, v: (q, k, _rolled(v)),
    "scale_of_another_token_of_q": lambda q, k, v: (_rolled(q, 1), k, v),
    "tokens_of_v_in_another_order": lambda q, k, v: (q, k, _reordered(v)),
}


def _rolled(x: Scaled, tokens: int = 64) -> Scaled:
    return Scaled(x.numbers, np.roll(x.scales, tokens, axis=1))


def _reordered(x: Scaled) -> Scaled:
    whole = x.numbers.shape[1] // 16 * 16
    order = np.arange(x.numbers.shape[1])
    order[:whole] = order[:whole].reshape(-1, 16)[:, list(fp8.MMA_ORDER)].reshape(-1)
    return Scaled(x.numbers[:, order], x.scales)


@pytest.mark.parametrize("wrong", WRONG)
def test_the_tolerance_catches(wrong: str) -> None:
    """Errors that a kernel would make, on data with blocks of different size."""
    sizes = np.repeat([1.0, 4.0, 0.25, 2.0], 64)[None, :, None, None]
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 256, 1, 64)) * sizes for _ in range(3))
    blocks = {"q": (1, None), "k": (64, None), "v": (64, None)}
    operands = []
    for role, x in (("q", q), ("k", k), ("v", v)):
        quantized = cupyflash.quantize(x.astype(np.float32), role, block=blocks[role])
        stored = fp8.Stored(
            quantized.data, quantized.scale, fp8.arrangement_of(quantized, None), role == "v"
        )
        (rows,) = fp8.sequences(stored.arrangement, None)
        operands.append(Scaled(stored.numbers(rows)[None], stored.scales(rows)[None]))
    expected = reference_fp8.expect(*operands, out_dtype=cases.DTYPES["bfloat16"])
    right, lse = reference_fp8.rounded_attention(*operands)
    assert expected.compare(right, lse).ok
    out, _ = reference_fp8.rounded_attention(*WRONG[wrong](*operands))
    assert not expected.compare(out, None).ok


def test_clipped_probabilities_are_caught() -> None:
    """B46: probabilities scaled up before their conversion against a maximum that is stale. Two
    blocks of keys, the second scores 2.703 natural units more: a row keeps the reference of the
    first block, so that its weights are 448 in place of 2^8 * exp(2.703)."""
    q = np.zeros((1, 1, 1, 64), np.float32)
    k, v = np.zeros((1, 256, 1, 64), np.float32), np.zeros((1, 256, 1, 64), np.float32)
    q[..., 0] = k[:, 128:, :, 0] = v[:, 128:] = 1
    operands = [scaled(x) for x in (q, k, v)]
    expected = reference_fp8.expect(
        *operands, out_dtype=cases.DTYPES["bfloat16"], softmax_scale=2.703
    )
    right = 1 / (1 + math.exp(-2.703))
    assert expected.out[0, 0, 0, 0] == pytest.approx(right)
    out, lse = reference_fp8.rounded_attention(*operands, softmax_scale=2.703)
    assert expected.compare(out, lse).ok and abs(out[0, 0, 0, 0] - 0.9372) < 0.03
    clipped = 448 / (256 * (1 + math.exp(2.703)))
    assert not expected.compare(np.full_like(out, clipped), lse).ok
    on_cpu = cupyflash.attention(*(x.astype(E4M3) for x in (q, k, v)), softmax_scale=2.703)
    assert abs(float(on_cpu[0, 0, 0, 0]) - right) < 2.0**-8


# --- public bug reports ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dense", "packed", "broadcast", "reference"])
def test_scales_of_heads_reach_the_result(how: str) -> None:
    """B44: scales of heads were accepted and not passed on."""
    q, k, v = (np.zeros((1, s, 2, 64), E4M3) for s in (1, 2, 2))
    q[..., 0] = k[:, 0, :, 0] = v[:, 0] = 1
    k_scale, v_scale = np.array([[1, 3]], np.float32), np.array([[1, 2]], np.float32)
    expected, expected_lse = (0.731059, 1.905149), (1.313262, 3.048587)
    if how == "reference":
        operands = scaled(q), scaled(k, k_scale[:, None]), scaled(v, v_scale[:, None])
        out, lse = reference_fp8.rounded_attention(*operands, softmax_scale=1.0)
        np.testing.assert_allclose(out[0, 0, :, 0], expected, rtol=2.0**-4)
        np.testing.assert_allclose(lse[0, :, 0], expected_lse, rtol=1e-5)
        return
    options: dict[str, Any] = {"q_scale": np.float32(1), "softmax_scale": 1, "return_lse": True}
    options |= {"k_scale": k_scale, "v_scale": v_scale, "out_dtype": "float16"}
    if how == "packed":
        starts = {"cu_seqlens_q": np.array([0, 1]), "cu_seqlens_kv": np.array([0, 2])}
        out, lse = cupyflash.attention(q[0], k[0], v[0], **starts, **options)
        out, lse = out[None], lse[None]
    elif how == "broadcast":
        q, k, v = (np.broadcast_to(x, (3, *x.shape[1:])) for x in (q, k, v))
        for name in ("k_scale", "v_scale"):
            options[name] = np.broadcast_to(options[name], (3, 2))
        out, lse = cupyflash.attention(q, k, v, **options)
    else:
        out, lse = cupyflash.attention(q, k, v, **options)
    for b in range(len(out)):
        np.testing.assert_allclose(out[b, 0, :, 0].astype(float), expected, rtol=2.0**-11)
        np.testing.assert_allclose(lse[b, :, 0], expected_lse, rtol=1e-5)


@pytest.mark.parametrize("seqlen", [4096, 32768, 131072])
def test_long_contexts_keep_a_constant_value(seqlen: int) -> None:
    """B47: accumulators that keep fewer bits than float32. V is 0.1015625, exact in e4m3."""
    q, k = np.zeros((1, 1, 1, 16), E4M3), np.zeros((1, seqlen, 1, 16), E4M3)
    v = np.full((1, seqlen, 1, 16), 0.1015625, E4M3)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, out_dtype="float16")
    assert (out == np.float16(0.1015625)).all()
    assert lse[0, 0, 0] == pytest.approx(math.log(seqlen), rel=1e-6)
    operands = [scaled(x) for x in (q, k, v)]
    rounded, rounded_lse = reference_fp8.rounded_attention(*operands)
    np.testing.assert_allclose(rounded, 0.1015625, rtol=1e-6)
    expected = reference_fp8.expect(*operands, out_dtype=np.dtype(np.float16), offsets=(8.0,))
    assert expected.bound < 0.01 * 0.1015625
    assert expected.compare(rounded, rounded_lse).ok
    truncated = np.full_like(rounded, 0.096)
    if seqlen == 131072:
        assert not expected.compare(truncated, None).ok, "a 13-bit accumulator"


def test_the_error_does_not_grow_with_the_context() -> None:
    """B46, B47: random V with mean 0.1."""
    errors = []
    for seqlen in (1024, 16384):
        rng = np.random.default_rng(seqlen)
        q, k, v = (rng.standard_normal((1, s, 1, 64)).astype(E4M3) for s in (8, seqlen, seqlen))
        operands = scaled(q), scaled(k), scaled((v.astype(np.float32) * 0.5 + 0.1).astype(E4M3))
        out, _ = reference_fp8.attention(*operands)
        rounded, _ = reference_fp8.rounded_attention(*operands)
        errors.append(np.sqrt(((rounded - out) ** 2).mean()))
    assert errors[1] < errors[0] < 0.01


# --- the output, other libraries, memory ----------------------------------------------------------


def test_an_output_of_8_bit_floats() -> None:
    """Numbers of out / out_scale, saturated; an infinity is the largest number, as in quantize."""
    q, k, v = (numbers(2, s, 2, 32, seed=s) for s in (40, 60, 61))
    v = v[:, :60]
    wide = cupyflash.attention(q, k, v, v_scale=np.float32(3), out_dtype="float16")
    for scale in (np.float32(0.25), np.array(2.0**-9, np.float32), 0.001):
        out = cupyflash.attention(q, k, v, v_scale=np.float32(3), out_dtype=E4M3, out_scale=scale)
        assert out.dtype == E4M3
        expected = np.clip(wide.astype(np.float32) / np.float32(scale), -448, 448)
        np.testing.assert_allclose(out.astype(np.float32), expected, rtol=2.0**-3, atol=2.0**-9)
        given = np.zeros_like(out)
        assert cupyflash.attention(q, k, v, v_scale=3.0, out=given, out_scale=scale) is given
        np.testing.assert_array_equal(given.view(np.uint8), out.view(np.uint8))
    plain = cupyflash.attention(q, k, v, out_dtype="float8_e4m3fn")
    unit = cupyflash.attention(q, k, v, out_dtype="float8_e4m3fn", out_scale=1.0)
    np.testing.assert_array_equal(plain.view(np.uint8), unit.view(np.uint8))


def test_layouts_and_strides_of_plain_arrays() -> None:
    q, k, v = (numbers(2, 50, 4, 32, seed=s) for s in range(3))
    scales = {"k_scale": np.array([[1, 2, 3, 4], [0.5, 1, 1, 2]], np.float32)}
    expected = cupyflash.attention(q, k, v, causal=True, **scales)
    other = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    out = cupyflash.attention(*other, causal=True, layout="bhsd", **scales)
    np.testing.assert_array_equal(out.transpose(0, 2, 1, 3), expected)
    spread = [np.repeat(x, 2, axis=-1)[..., ::2] for x in (q, k, v)]
    np.testing.assert_array_equal(cupyflash.attention(*spread, causal=True, **scales), expected)


def test_nan_in_one_token_reaches_only_those_who_see_it() -> None:
    q, k, v = (numbers(1, 40, 1, 32, seed=s) for s in range(3))
    v[0, 20, 0, 3] = np.nan
    out = cupyflash.attention(q, k, v, causal=True).astype(np.float32)
    assert np.isnan(out[0, 20:, 0, 3]).all() and np.isfinite(out[0, :20]).all()
    assert np.isfinite(np.delete(out, 3, axis=-1)).all()


def test_a_rotation_changes_nothing_but_rounding() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 256, 1, 64)).astype(np.float32) for _ in range(3))
    exact = cupyflash.attention(q, k, v)
    outs = []
    for seed in (None, 3):
        q_, k_ = (cupyflash.quantize(x, n, hadamard_seed=seed) for n, x in (("q", q), ("k", k)))
        outs.append(cupyflash.attention(q_, k_, cupyflash.quantize(v, "v"), out_dtype="float16"))
        error = outs[-1].astype(np.float32) - exact
        assert np.sqrt((error**2).mean()) < 0.05 * np.sqrt((exact**2).mean())
    assert not np.array_equal(*outs)


def test_memory_does_not_grow_with_the_batch() -> None:
    """A head at a time: nothing of the size of all operands as floats."""

    def peak(batch: int) -> int:
        q, k, v = (np.zeros((batch, 2048, 2, 128), E4M3) for _ in range(3))
        out = np.empty(q.shape, np.float16)
        cupyflash.attention(q, k, v, out=out, causal=True)
        tracemalloc.start()
        cupyflash.attention(q, k, v, out=out, causal=True)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(6) < peak(1) * 1.2


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (numbers(1, 30, 2, 32, seed=s) for s in range(3))
    tensors = [torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) for x in (q, k, v)]
    scale = np.array([[2, 0.5]], np.float32)
    expected = cupyflash.attention(q, k, v, k_scale=scale)
    out = cupyflash.attention(*tensors, k_scale=torch.from_numpy(scale))
    assert out.dtype is torch.bfloat16
    np.testing.assert_array_equal(out.float().numpy(), expected.astype(np.float32))
    bits = cupyflash.attention(
        *tensors, k_scale=torch.from_numpy(scale), out_dtype=tensors[0].dtype
    )
    assert bits.dtype is torch.float8_e4m3fn
    floats = [x.float() for x in tensors]
    made = [cupyflash.quantize(x, role) for x, role in zip(floats, "qkv")]
    same = [cupyflash.quantize(x.astype(np.float32), role) for x, role in zip((q, k, v), "qkv")]
    out = cupyflash.attention(*made, causal=True)
    assert isinstance(out, torch.Tensor)
    np.testing.assert_array_equal(
        out.float().numpy(), cupyflash.attention(*same, causal=True).astype(np.float32)
    )


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = (numbers(1, 30, 2, 32, seed=s) for s in range(3))
    scale = np.array([[2, 0.5]], np.float32)
    expected = cupyflash.attention(q, k, v, k_scale=scale)
    arrays = [jax.numpy.asarray(x) for x in (q, k, v)]
    out = cupyflash.attention(*arrays, k_scale=jax.numpy.asarray(scale))
    assert isinstance(out, jax.Array) and out.dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(np.asarray(out), expected)
    made = [cupyflash.quantize(x.astype(jax.numpy.float32), role) for role, x in zip("qkv", arrays)]
    same = [cupyflash.quantize(x.astype(np.float32), role) for role, x in zip("qkv", (q, k, v))]
    np.testing.assert_array_equal(
        np.asarray(cupyflash.attention(*made, causal=True)), cupyflash.attention(*same, causal=True)
    )


# --- what is refused ------------------------------------------------------------------------------


def quantized(**changes: Any) -> dict[str, Any]:
    x = np.ones((1, 40, 2, 32), np.float32)
    made = {role: cupyflash.quantize(x, role, block=(64, None)) for role in "qkv"}
    for name, fields in changes.items():
        made[name] = dataclasses.replace(made[name], **fields)
    return made


def plain(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {role: numbers(2, 40, 2, 32) for role in "qkv"}
    return given | changes


ONE = np.ones((), np.float32)
FLOATS = np.ones((2, 40, 2, 32), np.float32)
WIDE = cupyflash.quantize(FLOATS[:1], "q")
STARTS = np.array([0, 40])
REFUSED: dict[str, tuple[dict[str, Any], type, str]] = {
    "mixed": (
        quantized() | {"k": FLOATS[:1]},
        TypeError,
        "all of them Quantized or none, got q Quantized, k ndarray, v Quantized",
    ),
    "one_quantized": (plain(q=WIDE), TypeError, "all of them Quantized or none, got q Quantized"),
    "mixed_types": (plain(v=FLOATS), TypeError, "one dtype, got q float8_e4m3fn, .* v float32"),
    "e5m2": (
        {role: FLOATS.astype(ml_dtypes.float8_e5m2) for role in "qkv"},
        cupyflash.UnsupportedError,
        "float8_e5m2 is not served.* convert the arrays to float8_e4m3fn",
    ),
    "role": (
        quantized() | {"q": quantized()["k"]},
        ValueError,
        "q: expected a tensor quantized with the role 'q', got the role 'k'",
    ),
    "format": (quantized(v={"fmt": "mxfp8"}), cupyflash.UnsupportedError, "v: expected the format"),
    "seeds": (quantized(q={"hadamard_seed": 3}), ValueError, "one hadamard_seed, got 3 and None"),
    "rotated_v": (quantized(v={"hadamard_seed": 3}), ValueError, "v: expected no rotation"),
    "scale_of_quantized": (
        quantized() | {"k_scale": ONE},
        ValueError,
        "k_scale: k is quantized and has scales of its own",
    ),
    "layout": (quantized() | {"layout": "bhsd"}, ValueError, 'layout: .* "bshd"'),
    "packed_arrays": (
        quantized() | {"cu_seqlens_q": STARTS, "cu_seqlens_kv": STARTS},
        ValueError,
        "q: quantized as sequences that are not packed, expected no cu_seqlens",
    ),
    "not_packed": (
        quantized(q={"shape": (40, 2, 32)}),
        ValueError,
        "q: quantized as packed sequences, expected cu_seqlens_q and cu_seqlens_kv",
    ),
    "data": (
        quantized(k={"data": np.zeros((1, 40, 2, 16), np.uint8)}),
        ValueError,
        r"k: data: expected shape \[1, 40, 2, 32\] for a tensor of shape \[1, 40, 2, 32\]",
    ),
    "data_of_v": (
        quantized(v={"data": np.zeros((1, 40, 2, 32), np.uint8)}),
        ValueError,
        r"v: data: expected shape \[1, 2, 32, 64\]",
    ),
    "data_type": (
        quantized(k={"data": np.zeros((1, 40, 2, 32), np.float16)}),
        TypeError,
        "k: data: expected uint8 or float8_e4m3fn, got float16",
    ),
    "scale_of_blocks": (
        quantized(k={"scale": np.ones((1, 2), np.float32)}),
        ValueError,
        r"k_scale: expected shape \[1, 2, 1\], got \[1, 2\]",
    ),
    "shapes": (
        quantized() | {"k": cupyflash.quantize(FLOATS[:1, :, :, :24], "k", block=(64, None))},
        ValueError,
        "k: expected shape .* head_dim of q and k must be equal",
    ),
    "scale_shape": (
        plain(v_scale=np.ones((2, 3), np.float32)),
        ValueError,
        r"v_scale: expected shape \[\] or \[2, 2\], got \[2, 3\]",
    ),
    "scale_type": (plain(q_scale=np.ones((), np.float64)), TypeError, "q_scale: expected float32"),
    "scale_nan": (plain(q_scale=float("nan")), ValueError, "q_scale: expected a finite number"),
    "scale_no_array": (plain(q_scale="2"), TypeError, "q_scale: expected an array"),
    "scale_of_floats": (
        dict.fromkeys("qkv", FLOATS) | {"k_scale": ONE},
        TypeError,
        "k_scale: scales belong to fp8 arrays, got q of float32",
    ),
    "head_dim": (
        {role: numbers(1, 40, 2, 24) for role in "qkv"},
        cupyflash.UnsupportedError,
        "q and k: head_dim of float8_e4m3fn arrays must be a multiple of 16, got 24",
    ),
    "out_dtype": (
        plain(out_dtype="float32"),
        TypeError,
        r"out_dtype: expected bfloat16 \(the default\), float16, float8_e4m3fn for q",
    ),
    "out": (plain(out=np.empty_like(FLOATS)), TypeError, "out: expected bfloat16 .* got float32"),
    "out_and_out_dtype": (
        plain(out=np.empty(FLOATS.shape, np.float16), out_dtype="bfloat16"),
        TypeError,
        "out: expected bfloat16, the out_dtype, got float16",
    ),
    "out_scale": (
        plain(out_scale=ONE),
        ValueError,
        "out_scale: scales an output of float8_e4m3fn, this one is bfloat16",
    ),
    "out_scale_shape": (
        plain(out_scale=np.ones(2, np.float32), out_dtype=E4M3),
        ValueError,
        r"out_scale: expected shape \[\], got \[2\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    arguments, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        cupyflash.attention(**arguments)


def test_explain_says_how_operands_are_scaled() -> None:
    text = cupyflash.explain(**quantized())
    assert "out bfloat16, scales: q 64 tokens, k 64 tokens, v 64 tokens" in text
    assert "v transposed in slots of 64" in text
    text = cupyflash.explain(**plain(k_scale=ONE, out_dtype=E4M3, out_scale=ONE))
    assert "out float8_e4m3fn, scales: q none, k tensor, v none, out scaled" in text


@pytest.mark.parametrize("case", cases.tagged_fp8(cases.RACE), ids=str)
@pytest.mark.parametrize(("target", "family"), [("sm_80", "sm80"), ("sm_100f", "sm100")])
def test_devices_without_a_kernel_say_so(case: Fp8Case, target: str, family: str) -> None:
    """Up to the choice of a kernel an emulated device is as a GPU."""
    path = paths.EmulatedPath(target)
    words = f"{family} .*: fp8: has no fp8 kernel yet"
    for given_output in (False, True):
        with pytest.raises(cupyflash.UnsupportedError, match=words):
            paths.run_fp8(path, case, given_output)


# --- every option ---------------------------------------------------------------------------------

WITH_SCALES = {**TOGETHER_WITH, "out_scale": {"out_dtype": "float8_e4m3fn"}}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_no_option_is_ignored(name: str) -> None:
    """B65, for 8-bit floats: every option changes the result or is refused by name."""
    q, k, v = (x.astype(E4M3) for x in column())
    value, more = FLIPPED[name], WITH_SCALES.get(name, {})
    if name == "align":
        q = q[:, :4]
    if name == "out":
        given = np.zeros(q.shape, np.float16)
        assert cupyflash.attention(q, k, v, out=given) is given and given.any()
        return
    packed = "cu_seqlens" in name or "max_seqlen" in name
    arrays = [x[0] if packed else x for x in (q, k, v)]
    starts = name.startswith("cu_seqlens")
    plain = cupyflash.attention(q, k, v)[0] if starts else cupyflash.attention(*arrays, **more)
    try:
        changed = cupyflash.attention(*arrays, **more, **{name: value})
    except (cupyflash.UnsupportedError, TypeError, ValueError) as error:
        assert name in str(error) and name in REFUSED_ON_CPU - set(SCALES)
        return
    if name == "return_lse":
        changed, lse = changed
        assert lse.shape == (1, 1, q.shape[1])
        return
    assert not np.array_equal(plain.astype(np.float32), changed.astype(np.float32))


def test_lse_is_a_natural_logarithm() -> None:
    """B26: ln 4 on every path, here whatever the scales."""
    q, k, v = (np.zeros((1, s, 1, 64), np.float32) for s in (3, 4, 4))
    made = [cupyflash.quantize(x, role) for role, x in (("q", q), ("k", k), ("v", v))]
    for operands in (made, [x.astype(E4M3) for x in (q, k, v)]):
        _, lse = cupyflash.attention(*operands, return_lse=True)
        np.testing.assert_allclose(lse, math.log(4), rtol=1e-6)
    _, lse = reference_fp8.rounded_attention(*(scaled(x) for x in (q, k, v)))
    np.testing.assert_allclose(lse, math.log(4), rtol=1e-6)
