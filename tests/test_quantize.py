"""quantize on every path: its definition, NumPy, the kernel on the emulator, CuPy.

The definition (``fp8.py``) is held against float64 and against another rounding to e4m3, that of
ml_dtypes; every other path must make the same bits. Whatever lies between the rows of strided
inputs is NaN.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import cupyflash
from cupyflash import emulate, fp8, select, tuning
from cupyflash.errors import EmulationError
from cupyflash.fp8 import MMA_ORDER, ROW_PAIR_ORDER, Quantized
from cupyflash.params import QUANTIZE, QUANTIZE_STAGES
from tests.emulator import harness
from tests.paths import CUPY, EVERY_PATH, NUMPY, SCHEDULES, TARGETS, EmulatedPath, Path, emulated
from tests.test_launch import FakeArray, fake_cupy, library_path, stub, stub_path  # noqa: F401

DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
}
BLOCKS = (None, (None, None), (64, None), (128, None), (1, None))
PACKED = (0, 70, 70, 71, 199, 327)  # an empty sequence, one of a token, one of a whole block


@dataclass(frozen=True)
class Case:
    """A tensor to quantize.

    Attributes:
        shape: in the order of bshd; packed if ``starts`` is there.
        role, block, seed, for_backward, starts: arguments of ``quantize``.
        placed: "dense"; "bhsd" (heads before seqlen in memory, and layout="bhsd"); "padded" (rows
            apart by 16 bytes); "heads" (every other head of twice as many).
    """

    shape: tuple[int, ...]
    role: str = "q"
    block: fp8.Block = (128, None)
    seed: int | None = None
    for_backward: bool = False
    starts: tuple[int, ...] | None = None
    placed: str = "dense"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        block = "tensor" if self.block is None else f"{self.block[0] or 'head'}"
        words = ["x".join(map(str, self.shape)), self.role, block]
        words += ["rotated"] * (self.seed is not None) + ["backward"] * self.for_backward
        words += ["packed"] * (self.starts is not None)
        words += [word for word in (self.placed, self.dtype) if word not in ("dense", "bfloat16")]
        return "-".join(words)

    @property
    def values(self) -> NDArray:
        """The tensor: normal numbers, with magnitudes that differ between heads, channels and
        tokens, and a zero block, a NaN and infinities in it."""
        rng = np.random.default_rng(len(str(self)))
        *_, seqlen, heads, head_dim = self.shape
        x = rng.standard_normal(self.shape)
        x *= np.exp(rng.standard_normal((heads, head_dim)))
        x *= np.exp2(np.arange(seqlen) // 16 % 7).reshape(-1, 1, 1)
        if seqlen > 65:
            x[..., :64, 0, :] = 0
            x[..., 65, 0, 3], x[..., 64, -1, 0] = np.nan, np.inf
        if seqlen > 130:
            x[..., 128:130, 0, 1] = np.inf, -np.inf
        return x.astype(DTYPES[self.dtype])

    @property
    def options(self) -> dict[str, Any]:
        return {
            "block": self.block,
            "hadamard_seed": self.seed,
            "for_backward": self.for_backward,
            "layout": "bhsd" if self.placed == "bhsd" else "bshd",
        }

    def expected(self) -> Quantized:
        starts = None if self.starts is None else np.array(self.starts)
        return fp8.quantize(
            *(self.values, self.role, self.block, self.seed, self.for_backward, starts)
        )

    def run(self, path: Path) -> Quantized:
        """The public call, and its arrays as NumPy arrays."""
        starts = None
        if self.starts is not None:
            starts = path.array(np.array(self.starts, np.int32))
        x = self._place(path)
        made = cupyflash.quantize(x, self.role, cu_seqlens=starts, **self.options)
        assert type(made.data) is type(made.scale) is type(x)
        given = {name: getattr(made, name) for name in ("data", "scale", "data_t")}
        return dataclasses.replace(
            made, **{name: None if y is None else path.numpy(y) for name, y in given.items()}
        )

    def _place(self, path: Path) -> Any:
        x = self.values
        if self.placed == "bhsd":
            return path.array(np.ascontiguousarray(x.transpose(0, 2, 1, 3)))
        if self.placed == "padded":
            buffer = np.full((*x.shape[:-1], x.shape[-1] + 8), np.nan, x.dtype)
            buffer[..., : x.shape[-1]] = x
            return path.array(buffer)[..., : x.shape[-1]]
        if self.placed == "heads":
            buffer = np.full((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1]), np.nan, x.dtype)
            buffer[..., ::2, :] = x
            return path.array(buffer)[..., ::2, :]
        return path.array(x)


def assert_same(made: Quantized, expected: Quantized) -> None:
    """To the bit."""
    for field in dataclasses.fields(Quantized):
        one, other = getattr(made, field.name), getattr(expected, field.name)
        if not isinstance(other, np.ndarray):
            assert one == other, field.name
            continue
        assert one.dtype == other.dtype and one.shape == other.shape, field.name
        bits = [np.atleast_1d(array).view(np.uint8) for array in (one, other)]
        np.testing.assert_array_equal(*bits, field.name)


# --- rounding -------------------------------------------------------------------------------------


def test_rounding_to_e4m3() -> None:
    """Every bfloat16, float32 numbers of any bits, and every tie between neighbours."""
    rng = np.random.default_rng(0)
    numbers = fp8.widen_e4m3(np.arange(0x7F, dtype=np.uint8))
    ties = (numbers[1:] + numbers[:-1]) / 2
    values = np.concatenate(
        [
            (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32),
            rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32),
            *(sign * x for sign in (1, -1) for x in (numbers, ties)),
            *(np.nextafter(ties, np.float32(end)) for end in (-1000, 1000)),
        ]
    ).astype(np.float32)
    bits = fp8.round_e4m3(values)
    is_nan = np.isnan(values)
    assert (bits[is_nan] == 0x7F).all()
    saturated = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(bits[~is_nan], saturated.view(np.uint8)[~is_nan])


def test_values_of_e4m3() -> None:
    bits = np.arange(256, dtype=np.uint8)
    expected = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(fp8.widen_e4m3(bits), expected)


# --- scales and numbers, against float64 ----------------------------------------------------------


def amax_of_rows(x: NDArray, case: Case) -> NDArray:
    """Of the block that each row is in, [batch, seqlen, heads], by loops; 0 behind the last."""
    wide = np.where(np.isfinite(x), np.abs(x), 0).max(-1)
    starts = case.starts or (0, x.shape[1])
    result = np.zeros_like(wide)
    for batch in range(x.shape[0]):
        for first, end in zip(starts, starts[1:]):
            step = end - first if case.block is None else case.block[0] or end - first
            for begin in range(first, end, max(step, 1)):
                rows = slice(begin, min(begin + step, end))
                result[batch, rows] = wide[batch, rows].max(0)
    return np.full_like(wide, result.max()) if case.block is None else result


DEFINED = [
    *(Case((2, 200, 3, 48), block=block, dtype="float32") for block in BLOCKS),
    *(Case((327, 2, 64), block=block, starts=PACKED, dtype="float16") for block in BLOCKS),
    *(Case((1, 150, 2, 20), role, dtype=d) for role in ("k", "v", "dout") for d in DTYPES),
    *(Case((1, 3, 2, 32), role, (64, None), dtype="float64") for role in ("k", "v")),
    Case((400, 2, 24), "v", (64, None), starts=(0, 0, 129, 300), dtype="float64"),
    Case((400, 1, 24), "v", None, starts=(0, 1, 129, 300), for_backward=True),
    Case((2, 140, 2, 40), "v", (None, None), placed="bhsd"),
]


@pytest.mark.parametrize("case", DEFINED, ids=str)
def test_the_definition(case: Case) -> None:
    """Scales are amax / 448, and every number is the nearest one, up to float32's own rounding."""
    made = case.run(NUMPY)
    assert_same(made, case.expected())
    given = case.values.astype(np.float32).astype(np.float64)
    x = given if case.starts is None else given[None]
    amax = amax_of_rows(x, case)
    scale = np.where(amax == 0, 1, amax / 448)[..., None]
    back = made.dequantize(case.starts).astype(np.float64).reshape(x.shape)
    used = slice(0, None if case.starts is None else case.starts[-1])
    assert not back[:, slice(case.starts[-1], None) if case.starts else slice(0, 0)].any()
    x, scale, back = x[:, used], scale[:, used], back[:, used]
    saturated = np.clip(x, -448 * scale, 448 * scale)
    np.testing.assert_array_equal(np.isnan(back), np.isnan(x))
    spacing = scale * np.exp2(
        np.maximum(np.floor(np.log2(np.abs(saturated / scale) + 1e-9)), -6) - 3
    )
    with np.errstate(invalid="ignore"):
        off = np.abs(back - saturated) > spacing / 2 * (1 + 1e-5) + 1e-6 * np.abs(saturated)
    assert not off.any()


def test_scales_lie_where_kernels_look() -> None:
    """Packed: block i of sequence b at cu_seqlens[b] // tokens + b + i, ones in between."""
    x = np.ones((327, 1, 16), np.float32)
    x *= np.arange(1, 328, dtype=np.float32).reshape(-1, 1, 1)
    for block, tokens in (((64, None), 64), ((128, None), 128), ((1, None), 1)):
        scale = cupyflash.quantize(x, "q", block=block, cu_seqlens=np.array(PACKED)).scale
        assert scale.shape == (1, 327 // tokens + 5)
        expected = np.ones_like(scale)
        for b, (first, end) in enumerate(zip(PACKED, PACKED[1:])):
            for i, begin in enumerate(range(first, end, tokens)):
                top = min(begin + tokens, end)
                expected[0, first // tokens + b + i] = np.float32(top) / np.float32(448)
        np.testing.assert_array_equal(scale, expected)


@pytest.mark.parametrize("block", [None, (None, None), (64, None), (1, None)])
def test_numbers_of_e4m3_are_kept(block: Any) -> None:
    """A tensor of e4m3 numbers times a power of two, 448 among those of each block."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 256, (2, 100, 2, 32), dtype=np.uint8)
    bits[..., 5] = 0x7E
    bits[(bits & 0x7F) == 0x7F] = 0x20
    for power in (-20, 0, 7):
        x = np.ldexp(fp8.widen_e4m3(bits), power)
        made = cupyflash.quantize(x, "q", block=block)
        np.testing.assert_array_equal(made.data, bits)
        np.testing.assert_array_equal(made.scale, 2.0**power)
        np.testing.assert_array_equal(made.dequantize(), x)


def test_special_values() -> None:
    x = np.zeros((1, 256, 1, 16), np.float32)
    x[0, 130, 0, :6] = np.nan, np.inf, -np.inf, 2, -0.0, -1
    made = cupyflash.quantize(x, "q")
    np.testing.assert_array_equal(made.scale, np.array([[[1, 2 / 448]]], np.float32))
    assert made.data[0, 130, 0, :6].tolist() == [0x7F, 0x7E, 0xFE, 0x7E, 0x80, 0xF6]
    x[0, 130, 0, 3:] = 0
    only_special = cupyflash.quantize(x, "q")
    np.testing.assert_array_equal(only_special.scale, 1)
    assert only_special.data[0, 130, 0, :6].tolist() == [0x7F, 0x7E, 0xFE, 0, 0, 0]


@pytest.mark.parametrize("magnitude", [1e-45, 1e-42, 2.0**-126, 1e-36, 1e30, 3.4e38])
def test_extreme_magnitudes(magnitude: float) -> None:
    """Scales stay normal numbers with a finite inverse; the largest float32 does not overflow."""
    x = np.full((1, 4, 1, 16), magnitude, np.float32)
    x[..., 1] /= 2
    made = cupyflash.quantize(x, "k")
    assert np.isfinite(made.scale).all() and (made.scale >= 2.0**-126).all()
    np.testing.assert_allclose(made.dequantize(), x, rtol=2**-4, atol=2.0**-136)


# --- rotation -------------------------------------------------------------------------------------


def test_signs_are_those_of_splitmix64() -> None:
    """Its first outputs for the seed 0 are e220a839.., 6e789e6a.., 06c45d18.., f88bb8a8.., 1b39..
    in hexadecimal."""
    assert fp8.negated_channels(0, 5) == 0b01001
    assert fp8.negated_channels(0, 64) >> 5 != 0
    assert fp8.negated_channels(1, 64) != fp8.negated_channels(2, 64)


@pytest.mark.parametrize(
    ("head_dim", "width"), [(1, 1), (24, 8), (64, 64), (96, 32), (128, 128), (192, 64), (256, 256)]
)
def test_rotation_is_orthogonal(head_dim: int, width: int) -> None:
    matrix = fp8.rotate(np.eye(head_dim, dtype=np.float32), 7).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-6)
    assert ((matrix != 0).sum(0) == width).all()
    np.testing.assert_allclose(np.abs(matrix[matrix != 0]), width**-0.5, rtol=1e-6)
    x = np.random.default_rng(2).standard_normal((3, head_dim)).astype(np.float32)
    np.testing.assert_allclose(fp8.rotate(x, 7), x @ matrix, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(fp8.rotate_back(fp8.rotate(x, 7), 7), x, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_rotation_keeps_scores(head_dim: int) -> None:
    """q . k before and after, in float64; and with a large channel its error shrinks."""
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal((1, 64, 1, head_dim)) for _ in range(2))
    q[..., 1] *= 60
    k[..., 1] *= 60
    q, k = (x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (q, k))
    exact = q[0, :, 0].astype(np.float64) @ k[0, :, 0].astype(np.float64).T
    rotated = [fp8.rotate(x, 11)[0, :, 0].astype(np.float64) for x in (q, k)]
    np.testing.assert_allclose(rotated[0] @ rotated[1].T, exact, atol=2e-6 * np.abs(exact).max())
    errors = {}
    for seed in (None, 11):
        made = [cupyflash.quantize(x, role, hadamard_seed=seed) for x, role in ((q, "q"), (k, "k"))]
        seen = [x.dequantize(rotated=True)[0, :, 0].astype(np.float64) for x in made]
        errors[seed] = np.sqrt(np.mean((seen[0] @ seen[1].T - exact) ** 2))
        np.testing.assert_allclose(made[0].dequantize(), q, atol=0.1 * np.abs(q).max())
    assert errors[11] < errors[None]


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_other_libraries_on_the_cpu(library: str) -> None:
    module = pytest.importorskip(library)
    case = Case((1, 150, 2, 32), "v", None, for_backward=True, dtype="float16")
    x = case.values
    given = module.from_numpy(x) if library == "torch" else module.numpy.asarray(x)
    made = cupyflash.quantize(given, "v", block=None, for_backward=True)
    arrays = {name: getattr(made, name) for name in ("data", "scale", "data_t")}
    assert all(isinstance(array, type(given)) for array in arrays.values())
    host = {name: np.asarray(array) for name, array in arrays.items()}
    assert_same(dataclasses.replace(made, **host), case.expected())


# --- the order of transposed tokens ---------------------------------------------------------------


def accumulators(matrix: NDArray) -> NDArray:
    """What each thread holds of a [64, n] product of wgmma: [128 threads, n / 2]: of every eight
    columns (row, c), (row, c + 1), (row + 8, c), (row + 8, c + 1)."""
    thread = np.arange(128)
    row = thread // 32 * 16 + thread % 32 // 4
    held = []
    for eight in range(matrix.shape[1] // 8):
        column = 8 * eight + 2 * (thread % 4)
        for r, c in ((0, 0), (0, 1), (8, 0), (8, 1)):
            held.append(matrix[row + r, column + c])
    return np.stack(held, 1)


def operand_a(registers: NDArray) -> NDArray:
    """The [64, 32] matrix A of m64nNk32 that the threads hold: [128 threads, 4 registers, 4]."""
    matrix = np.full((64, 32), np.nan)
    thread = np.arange(128)
    row = thread // 32 * 16 + thread % 32 // 4
    for register, (r, k) in enumerate(((0, 0), (8, 0), (0, 16), (8, 16))):
        for byte in range(4):
            matrix[row + r, k + 4 * (thread % 4) + byte] = registers[:, register, byte]
    return matrix


def packed_as_held(held: NDArray) -> NDArray:
    """Accumulators of 32 columns in four registers, in the order in which they are held."""
    groups = held.reshape(128, 4, 2, 2)  # of eight columns, row or row + 8, column
    registers = [groups[:, 2 * half : 2 * half + 2, r] for half in (0, 1) for r in (0, 1)]
    return np.stack([x.reshape(128, 4) for x in registers], 1)


def test_probabilities_meet_their_values() -> None:
    """P V with P straight from the accumulators and V as it is stored."""
    rng = np.random.default_rng(4)
    p = rng.integers(0, 8, (64, 128)).astype(np.float64)
    v = rng.integers(-8, 9, (1, 128, 1, 32)).astype(np.float32)
    v[0, 0, 0, 0] = 448  # the scale is 1, and small integers are numbers of e4m3
    stored = fp8.widen_e4m3(cupyflash.quantize(v, "v").data[0, 0]).astype(np.float64)
    product = np.zeros((64, 32))
    for step in range(4):
        columns = slice(32 * step, 32 * step + 32)
        a = operand_a(packed_as_held(accumulators(p[:, columns])))
        product += a @ stored[:, columns].T
    np.testing.assert_array_equal(product, p @ v[0, :, 0])


def test_gradients_of_scores_meet_their_keys() -> None:
    """dS K with dS^T in accumulators, rows n and n + 8 written as one 16-bit element by stmatrix
    with .trans, and K transposed as it is stored."""
    rng = np.random.default_rng(5)
    ds = rng.integers(-8, 9, (64, 64)).astype(np.float64)  # [query, key]
    k = rng.integers(-8, 9, (1, 64, 1, 16)).astype(np.float32)
    k[0, 0, 0, 0] = 448
    made = cupyflash.quantize(k, "k", for_backward=True)
    stored = fp8.widen_e4m3(made.data_t[0, 0]).astype(np.float64)[:, :64]
    held = accumulators(ds.T).reshape(128, 8, 2, 2)  # of eight queries, key n or n + 8, query
    rows = np.full((64, 64), np.nan)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for eight in range(8):
            for column in range(2):
                # Lane 4 i + j / 2 has (i, j) of an 8 x 8 matrix, which .trans writes to (j, i).
                query, pair = 8 * eight + 2 * (lane % 4) + column, lane // 4
                place = 16 * warp + 2 * pair
                rows[query, place : place + 2] = held[thread, eight, :, column]
    np.testing.assert_array_equal(rows @ stored.T, ds @ k[0, :, 0])


# A warpgroup: S[64, 128] = Q K^T and O[64, 32] = S V with 8-bit operands, S packed as it is held.
PRODUCTS = """
  const saddr q = smem_base(), k = q + 8192, v = k + 16384;  // rows of 128 bytes, 128-byte swizzle
  const auto fill = [&](saddr tile, const void* source, int rows) {
    for (int i = tid(); i < 32 * rows; i += 128) {
      const uint32_t offset = 4 * i;
      sts32(tile + (offset ^ (offset >> 3 & 0x70)), static_cast<const uint32_t*>(source)[i]);
    }
  };
  fill(q, params.a, 192);  // and k
  fill(v, params.b, 32);
  fence_proxy_async();
  cta_sync();
  constexpr uint32_t kHigh = 0x40000040, kLow = 0x10000;
  float s[64], o[16];
  wgmma_fence();
  for (int step = 0; step < 4; ++step) {
    wgmma_ss<e4m3_t, 128, kHigh, kHigh, 0>(s, (q >> 4 | kLow) + 2 * step,
                                           (k >> 4 | kLow) + 2 * step, step > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  uint32_t p[4][4];
  for (int step = 0; step < 4; ++step) {
    for (int i = 0; i < 4; ++i) {
      const float* held = s + 16 * step + i / 2 * 8 + i % 2 * 2;
      p[step][i] = pack4_e4m3(held[0], held[1], held[4], held[5]);
    }
  }
  wgmma_fence();
  for (int step = 0; step < 4; ++step) {
    wgmma_rs<e4m3_t, 32, kHigh, 0>(o, p[step], (v >> 4 | kLow) + 2 * step, step > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  const int row = tid() / 32 * 16 + tid() % 32 / 4;
  for (int i = 0; i < 16; ++i)
    stg_f32(params.out + 32 * (row + i / 2 % 2 * 8) + i / 4 * 8 + tid() % 4 * 2 + i % 2, o[i]);
"""


@pytest.mark.parametrize("target", [pytest.param("sm_90a", marks=emulated)])
def test_two_products_on_the_emulator(target: str) -> None:
    """Whose fragments are those of a GPU, for 16-bit numbers: tests/conformance."""
    rng = np.random.default_rng(6)
    q, k = np.zeros((1, 64, 1, 128), np.float32), np.zeros((1, 128, 1, 128), np.float32)
    q[0, np.arange(64), 0, rng.integers(0, 100, 64)] = 1
    k[..., :100] = rng.integers(-8, 9, (1, 128, 1, 100))
    v = rng.integers(-8, 9, (1, 128, 1, 32)).astype(np.float32)
    q[0, 0, 0, 126] = k[0, 0, 0, 127] = v[0, 0, 0, 0] = 448  # all scales are 1
    made = [cupyflash.quantize(x, role) for x, role in ((q, "q"), (k, "k"), (v, "v"))]
    assert all((x.scale == 1).all() for x in made)
    rows = np.concatenate([x.data.reshape(-1, 128) for x in made[:2]])
    kernel = harness.Kernel(PRODUCTS, target, threads=128, shared_bytes=28672)
    launch = harness.Launch(rows, made[2].data[0, 0], np.full((64, 32), np.nan, np.float32))
    out, _ = harness.run(kernel, launch)
    np.testing.assert_array_equal(out, q[0, :, 0] @ k[0, :, 0].T @ v[0, :, 0])


@pytest.mark.parametrize("role", fp8.ROLES)
@pytest.mark.parametrize("starts", [None, PACKED])
def test_the_other_way_round(role: str, starts: Any) -> None:
    """data and data_t hold the same numbers; slots are filled up with zeros."""
    case = Case((327, 2, 24), role, (64, None), for_backward=True, starts=starts)
    if starts is None:
        case = dataclasses.replace(case, shape=(2, 327, 2, 24))
    made = case.run(NUMPY)
    natural, transposed = made.data, made.data_t
    if role == "v":
        natural, transposed = transposed, natural
    order = ROW_PAIR_ORDER if role == "k" else MMA_ORDER
    assert sorted(order) == list(range(16))
    slots = 327 // 64 + 5 if starts else 6
    assert transposed.shape == (*(() if starts else (2,)), 2, 32, 64 * slots)
    in_order = np.zeros_like(transposed)
    sixteens = transposed.reshape(*transposed.shape[:-1], -1, 16)
    in_order.reshape(sixteens.shape)[..., list(order)] = sixteens
    for batch in range(1 if starts else 2):
        rest = in_order.copy() if starts else in_order[batch].copy()
        rows = natural if starts else natural[batch]
        for b, (first, end) in enumerate(zip(PACKED, PACKED[1:]) if starts else [(0, 327)]):
            begin = (first // 64 + b) * 64
            part = rest[:, :, begin : begin + end - first]
            np.testing.assert_array_equal(part, rows[first:end].transpose(1, 2, 0))
            part[...] = 0
        assert not rest.any()


# --- what is given and what is refused ------------------------------------------------------------


@pytest.mark.parametrize("placed", ["bhsd", "padded", "heads"])
def test_strides_do_not_matter(placed: str) -> None:
    case = Case((2, 100, 2, 40), "v", for_backward=True, placed=placed)
    assert_same(case.run(NUMPY), case.expected())


@pytest.mark.parametrize("shape", [(0, 5, 2, 16), (2, 0, 2, 16), (2, 5, 0, 16)])
@pytest.mark.parametrize("block", [None, (None, None), (64, None)])
def test_empty_tensors(shape: tuple[int, ...], block: Any) -> None:
    for role in ("q", "v"):
        made = Case(shape, role, block, for_backward=True).run(NUMPY)
        assert made.data.size == made.data_t.size == 0
        assert (made.scale == 1).all()
        assert made.dequantize().shape == shape


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"role": "o"}, ValueError, "role: expected one of q, k, v, dout"),
        ({"fmt": "e5m2"}, cupyflash.UnsupportedError, "fmt: "),
        ({"block": 128}, TypeError, "block: expected None or"),
        ({"block": (128.0, None)}, TypeError, "block: expected counts"),
        ({"block": (0, None)}, ValueError, "block: expected counts of at least 1"),
        ({"block": (1, 32)}, cupyflash.UnsupportedError, "MXFP8"),
        ({"block": (32, None)}, cupyflash.UnsupportedError, "expected 64, 128 or None"),
        ({"role": "k", "block": (1, None)}, cupyflash.UnsupportedError, "1 for the role q"),
        ({"hadamard_seed": 1.5}, TypeError, "hadamard_seed: expected int or None"),
        ({"hadamard_seed": -1}, ValueError, "hadamard_seed: expected 0 to"),
        ({"role": "v", "hadamard_seed": 1}, ValueError, "rotates q and k"),
        ({"for_backward": 1}, TypeError, "for_backward: expected a bool"),
        ({"layout": "sbhd"}, ValueError, "layout: expected one of"),
        ({"x": np.zeros((2, 3, 4), np.float32)}, ValueError, "x: expected .batch, seqlen"),
        ({"x": np.zeros((1, 2, 3, 4), np.int32)}, TypeError, "x: expected floating-point"),
        ({"x": np.zeros((1, 2, 3, 0), np.float32)}, ValueError, "head_dim of at least 1"),
        ({"x": [[1.0]]}, TypeError, "x: expected an array"),
        ({"cu_seqlens": np.array([0, 2])}, ValueError, "x: expected .total, heads"),
    ],
)
def test_what_is_refused(options: Any, error: type[Exception], words: str) -> None:
    arguments = {"x": np.zeros((1, 2, 3, 4), np.float32), "role": "q"} | options
    with pytest.raises(error, match=words):
        cupyflash.quantize(**arguments)


@pytest.mark.parametrize(
    ("starts", "error", "words"),
    [
        ([0], ValueError, "at least one sequence"),
        ([1, 4], ValueError, "0 first"),
        ([0, 3, 2], ValueError, "no decrease"),
        ([0, 7], ValueError, "at most 6"),
        ([[0, 6]], ValueError, "expected shape"),
        ([0.0, 6.0], TypeError, "expected integers, got float64"),
    ],
)
def test_starts_that_are_refused(starts: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"cu_seqlens: .*{words}"):
        cupyflash.quantize(np.zeros((6, 1, 16), np.float32), "q", cu_seqlens=np.array(starts))
    packed = cupyflash.quantize(np.zeros((6, 1, 16)), "q", cu_seqlens=np.array([0, 6]))
    with pytest.raises(ValueError, match="expected cu_seqlens of the packed"):
        packed.dequantize()


def test_a_layout_of_packed_sequences() -> None:
    x = np.zeros((6, 1, 16), np.float32)
    with pytest.raises(ValueError, match="layout: packed"):
        cupyflash.quantize(x, "q", cu_seqlens=np.array([0, 6]), layout="bhsd")
    dense = cupyflash.quantize(x[None], "q")
    with pytest.raises(ValueError, match="expected no cu_seqlens"):
        dense.dequantize([0, 6])
    with pytest.raises(TypeError, match="data: expected a NumPy array"):
        dataclasses.replace(dense, data=[1]).dequantize()


# --- the kernel -----------------------------------------------------------------------------------

EMULATED_CASES = [
    Case((1, 150, 2, 64), for_backward=True),
    Case((1, 150, 2, 64), "k", (64, None), seed=1, for_backward=True),
    Case((2, 70, 1, 8), "v", (64, None), for_backward=True),
    Case((1, 140, 2, 40), "k", (None, None), seed=2),
    Case((1, 66, 1, 72), "dout", (64, None), for_backward=True),
    Case((1, 130, 2, 96), "q", (1, None), seed=3, for_backward=True),
    Case((1, 130, 1, 128), "v", (128, None)),
    Case((1, 70, 1, 192), "k", None, seed=4),
    Case((1, 130, 1, 256), "v", (128, None), for_backward=True),
    Case((1, 129, 1, 256), "q", (1, None), seed=5, for_backward=True),
    Case((327, 2, 32), "v", (64, None), starts=PACKED, for_backward=True),
    Case((400, 1, 48), "q", (1, None), starts=PACKED),
    Case((400, 2, 16), "v", (None, None), starts=PACKED),
    Case((400, 1, 16), "k", None, starts=(0, 0, 400, 400), seed=6, for_backward=True),
    Case((2, 70, 2, 24), "v", (64, None), placed="bhsd"),
    Case((1, 70, 2, 40), "q", (64, None), placed="padded"),
    Case((1, 70, 2, 32), "k", None, placed="heads", for_backward=True),
    Case((1, 140, 2, 32), "v", (None, None), dtype="float16"),
    Case((1, 70, 1, 64), "q", (1, None), seed=7, dtype="float16"),
]


def check_all(path: Path, cases: list[Case]) -> None:
    for case in cases:
        try:
            assert_same(case.run(path), case.expected())
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("target", [pytest.param("sm_90a", marks=emulated)])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_emulated(target: str, schedule: str, seed: int) -> None:
    options = {"schedule": schedule, "seed": seed, "race": "global", "window": 1 + seed}
    check_all(EmulatedPath(target, options), EMULATED_CASES)


@pytest.mark.parametrize("target", [pytest.param(t, marks=emulated) for t in ("sm_80", "sm_100f")])
def test_emulated_elsewhere(target: str) -> None:
    plain = [case for case in EMULATED_CASES if case.seed is None and case.shape[-1] < 256]
    check_all(EmulatedPath(target), [case for case in plain if case.dtype == "bfloat16"])


@pytest.mark.parametrize("guard", ["before", "after"])
@pytest.mark.parametrize("target", [pytest.param("sm_90a", marks=emulated)])
def test_nothing_is_read_or_written_beside_the_arrays(target: str, guard: str) -> None:
    path = EmulatedPath(target, {"guard": guard, "sanitize": True})
    check_all(path, EMULATED_CASES)
    # Starts that are none are clamped.
    for starts in ((0, 1000, 100), (-5, 70), (90, 20, 100)):
        case = Case((100, 1, 32), "v", (64, None), starts=starts, for_backward=True)
        assert case.run(path).data.shape == (1, 32, 64 * (100 // 64 + len(starts) - 1))


@pytest.mark.parametrize("mutant", [1, 2, 3])
@pytest.mark.parametrize("target", [pytest.param("sm_90a", marks=emulated)])
def test_every_barrier_is_needed(target: str, mutant: int) -> None:
    case = Case((1, 140, 2, 32), "q", (1, None), for_backward=True)
    with pytest.raises(EmulationError, match="race on shared memory"):
        case.run(EmulatedPath(target, {"mutant": mutant, "race": True}))


@pytest.mark.parametrize("target", [pytest.param("sm_90a", marks=emulated)])
def test_the_wrappers(target: str) -> None:
    """pack4_e4m3 of every bfloat16 and of what lies half way between two, and prmt."""
    bits = np.arange(2**16, dtype=np.uint32) << 16
    values = np.concatenate([bits, bits | 0x8000]).view(np.float32)
    kernel = harness.Kernel(
        """
  for (int i = tid(); i < params.size; i += 32) {
    const u32x4 v = ldg128(static_cast<const float*>(params.a) + 4 * i);
    stg32(params.out + i, pack4_e4m3(bits_float(v.x), bits_float(v.y), bits_float(v.z),
                                     bits_float(v.w)));
  }
  if (tid() == 0) {
    stg32(params.out + params.size, prmt(0x33221100u, 0xf7e6d5c4u, 0x6250u));
    stg32(params.out + params.size + 1, prmt(0x33221100u, 0xf7e6d5c4u, 0xf074u));
  }
""",
        target,
    )
    size = values.size // 4
    out, _ = harness.run(
        kernel, harness.Launch(a=values, out=np.zeros(size + 4, np.float32), size=size)
    )
    np.testing.assert_array_equal(out[:size].view(np.uint8), fp8.round_e4m3(values))
    assert [hex(x) for x in out[size : size + 2].view(np.uint32)] == ["0xe622d500", "0xff00f7c4"]


@pytest.mark.parametrize("target", [*TARGETS, "sm_120"])
def test_no_spills(target: str) -> None:
    from cupyflash import nvrtc, source

    if nvrtc.installed_version() is None:
        pytest.skip("no NVRTC")
    for dtype in tuning.QUANTIZE_DTYPES:
        for pieces, rotate in tuning.QUANTIZE_BLOCKS:
            spec = select.quantize_spec(dtype, target, pieces, rotate)
            compiled = nvrtc.compile(source.translation_unit(spec))
            assert compiled.spill_bytes == compiled.stack_bytes == 0, spec.name
            assert compiled.registers <= 65536 // (spec.threads * spec.min_blocks), spec.name


def test_a_wheel_carries_the_quantizations() -> None:
    from aot import recipes

    for target in recipes.RECIPES["core"]:
        carried = [spec for spec in recipes.specs("core", (target,)) if spec.kernel == "quantize"]
        assert len(carried) == len(tuning.QUANTIZE_BLOCKS) * len(tuning.QUANTIZE_DTYPES)


def test_launches_on_a_gpu(stub: Any, fake_cupy: Any) -> None:  # noqa: F811
    """On CuPy's current stream, with addresses and strides of x and of what is made."""
    stub.log.params_bytes = QUANTIZE.size
    fake_cupy.cuda.streams[0] = 0x55
    x = FakeArray((2, 300, 3, 128), ml_dtypes.bfloat16)
    made = cupyflash.quantize(x, "k", hadamard_seed=0, for_backward=True)
    assert made.data.shape == (2, 300, 3, 128) and made.data_t.shape == (2, 3, 128, 384)
    assert made.data.dtype == made.data_t.dtype == np.uint8 and made.scale.shape == (2, 3, 3)
    assert stub.log.launches == 1 and stub.log.stream == 0x55
    assert tuple(stub.log.grid) == (18, 1, 1) and tuple(stub.log.block) == (256, 1, 1)
    assert stub.log.shared_bytes == tuning.quantize_bytes(4)
    values = QUANTIZE.unpack(bytes(stub.log.params))
    assert values["x"] == x.data.ptr and values["x_stride_seqlen"] == 3 * 128
    for name in ("data", "data_t", "scale"):
        assert values[name] == getattr(made, name).data.ptr
    assert (values["data_stride_head"], values["data_t_stride_channel"]) == (128, 384)
    assert (values["scale_stride_batch"], values["scale_stride_head"]) == (9, 3)
    # Of the first five channels 0 and 3 are negated.
    assert (
        values["negated[0]"] & 0b111 << 29 | values["negated[0]"] & 0b111 << 13 == 1 << 30 | 1 << 15
    )
    assert values["rotation_width"] == 128
    assert values["row_pairs"] == 1 and values["tops"] == 0

    made = cupyflash.quantize(x, "v", block=(None, None))
    assert stub.log.launches == 4 and made.scale.shape == (2, 3) and made.data_t is None
    values = QUANTIZE.unpack(bytes(stub.log.params))
    assert values["stage"] == QUANTIZE_STAGES.index("convert")
    assert values["data"] == 0 and values["data_t"] == made.data.data.ptr and values["tops"]


def test_a_cold_kernel_inside_a_capture(stub: Any, fake_cupy: Any) -> None:  # noqa: F811
    x = FakeArray((1, 2, 3, 8), np.float16)
    fake_cupy.cuda.streams[0] = stub.log.capturing_stream = 0x66
    with pytest.raises(RuntimeError, match=r"captured.*call quantize once before"):
        cupyflash.quantize(x, "q")
    assert stub.log.launches == 0


def test_a_gpu_without_kernels(fake_cupy: Any, monkeypatch: Any) -> None:  # noqa: F811
    from tests.test_launch import H200

    old = dataclasses.replace(H200, capability=(7, 5))
    monkeypatch.setattr("cupyflash.quantizing.CudaBackend", lambda _: type("B", (), {"info": old}))
    with pytest.raises(cupyflash.UnsupportedError, match="needs compute capability 8.0"):
        cupyflash.quantize(FakeArray((1, 2, 3, 8), np.float16), "q")


every_device = pytest.mark.parametrize("path", [EVERY_PATH[2], EVERY_PATH[-1]], ids=str)


@every_device
def test_empty_tensors_on_a_device(path: Path) -> None:
    for shape in ((0, 5, 2, 16), (2, 0, 2, 16), (2, 5, 0, 16)):
        check_all(path, [Case(shape, "v", block) for block in (None, (None, None), (64, None))])


@every_device
def test_what_the_kernel_does_not_take(path: Path, monkeypatch: Any) -> None:
    def refused(x: NDArray, words: str, kind: type[Exception], starts: Any = None) -> None:
        with pytest.raises(kind, match=words):
            cupyflash.quantize(
                *(x if not isinstance(x, np.ndarray) else path.array(x), "v"),
                cu_seqlens=None if starts is None else path.array(starts),
            )

    unsupported = cupyflash.UnsupportedError
    refused(np.zeros((1, 2, 1, 16), np.float32), "float32 has no GPU kernel", unsupported)
    for head_dim in (20, 264):
        refused(np.zeros((1, 2, 1, head_dim), np.float16), f"got {head_dim}", unsupported)
    wide = path.array(np.zeros((1, 4, 2, 32), np.float16))
    refused(wide[..., ::2], "last dimension must be contiguous", ValueError)
    refused(wide[..., 4:20], "not a multiple of 16 bytes", ValueError)
    x = np.zeros((6, 1, 16), np.float16)
    refused(x, "expected int32 on a GPU, got int64", TypeError, np.array([0, 6]))
    monkeypatch.setenv("CUPYFLASH_CHECK", "1")
    refused(x, "no decrease and at most 6", ValueError, np.array([0, 7], np.int32))


@pytest.mark.parametrize("target", [pytest.param("sm_90a", marks=emulated)])
def test_arrays_lie_on_one_device(target: str) -> None:
    x = emulate.device(target, num_sms=2).array(np.zeros((6, 1, 16), np.float16))
    starts = emulate.device(target, num_sms=3).array(np.array([0, 6], np.int32))
    with pytest.raises(TypeError, match="cu_seqlens: expected an array on emulated"):
        cupyflash.quantize(x, "v", cu_seqlens=starts)


# --- a GPU ----------------------------------------------------------------------------------------

LARGE_CASES = [
    *(Case((2, 4096, 8, head_dim), "v", for_backward=True) for head_dim in (64, 128, 256)),
    *(Case((2, 4096, 8, 128), "q", block, seed=8) for block in ((1, None), (64, None))),
    Case((2, 4096, 8, 192), "k", None, seed=9, for_backward=True),
    Case((9000, 4, 96), "v", (None, None), starts=(0, 4000, 4001, 8999), for_backward=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*EMULATED_CASES, *LARGE_CASES], ids=str)
def test_gpu(case: Case, poisoned_pool: Any) -> None:
    check_all(CUPY, [case])


@pytest.mark.gpu
def test_the_wrapper_on_a_gpu(poisoned_pool: Any) -> None:
    """Every bfloat16, under a scale of 1: 448 is the largest of those that are not larger."""
    bits = np.arange(2**16, dtype=np.uint16)
    x = bits.view(ml_dtypes.bfloat16).copy()
    x[np.abs(x.astype(np.float32)) > 448] = 448
    made = cupyflash.quantize(CUPY.array(x.reshape(1, 256, 1, 256)), "q", block=None)
    assert made.scale.get() == 1
    expected = fp8.round_e4m3(x.astype(np.float32))
    np.testing.assert_array_equal(made.data.get().reshape(-1), expected)


@pytest.mark.gpu
def test_cuda_graph(cupy: Any) -> None:
    case = Case((1, 256, 4, 64), "v", (None, None))
    x = cupy.asarray(case.values)
    cupyflash.quantize(x, "v", block=case.block)
    x[...] = 0
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        made = cupyflash.quantize(x, "v", block=case.block)
        graph = stream.end_capture()
        x.set(case.values)
        graph.launch(stream)
        stream.synchronize()
    host = dataclasses.replace(made, data=made.data.get(), scale=made.scale.get())
    assert_same(host, case.expected())


@pytest.mark.gpu
def test_torch(cupy: Any) -> None:
    torch = pytest.importorskip("torch")
    case = Case((2, 200, 2, 64), dtype="float16")
    made = cupyflash.quantize(torch.from_numpy(case.values).cuda(), "q")
    assert made.data.dtype == torch.uint8 and made.data.is_cuda
    host = {name: getattr(made, name).cpu().numpy() for name in ("data", "scale")}
    assert_same(dataclasses.replace(made, **host), case.expected())
