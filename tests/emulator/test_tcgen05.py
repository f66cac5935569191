"""Tensor memory and tcgen05: products against NumPy, and hazards that must be reported."""

from __future__ import annotations

import shutil

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.harness import MODES, Hazard, Kernel, Launch, check_hazard, run

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++"),
]

# D[128, 64] = A[128, 64] B[64, 64]^T, twice. A and B come by TMA; warp 4 loads and multiplies,
# warps 0 to 3 read tensor memory. The second product takes A from tensor memory, where warps 0 to 3
# put the first product, rounded to bfloat16.
PRODUCT = """
  const saddr a = smem_base(), b = a + 16384, full = b + 8192, done = full + 8, ready = full + 16;
  const saddr slot = full + 24;
  if (tid() == 0) {{
    mbarrier_init(full, 1);
    mbarrier_init(done, 1);
    mbarrier_init(ready, 128);
    fence_mbarrier_init();
  }}
  if (warp() == 4) {{ {alloc} tcgen05_relinquish_alloc_permit(); }}
  {first_fence_before}
  cta_sync();
  tcgen05_fence_after();
  const taddr d = lds32(slot), p = d + 64;
  constexpr uint32_t kHigh = 0x40000000 | 0x4000 | 64;
  if (warp() == 4) {{
    if (elect_one()) {{
      mbarrier_arrive_expect_tx(full, 16384 + 8192);
      tma_load_4d(a, &params.a_map, full, 0, 0, 0, 0, kEvictNormal);
      tma_load_4d(b, &params.b_map, full, 0, 0, 0, 0, kEvictNormal);
      {wait_full}
      constexpr uint32_t kForm = {form};
      for (int k = 0; k < 4; ++k)
        tcgen05_mma_ss<kForm, kHigh, kHigh>(d, (a >> 4) + 2 * k, (b >> 4) + 2 * k, k > 0);
      {commit}
      {wait_ready}
      {fence_after}
      for (int k = 0; k < 4; ++k)
        tcgen05_mma_ts<kForm, kHigh>(d, p + 8 * k, (b >> 4) + 2 * k, k > 0);
      tcgen05_commit(done);
    }}
  }} else {{
    const taddr lanes = uint32_t(warp() % 4 * 32) << 16;
    {wait_done}
    {fence_after_done}
    float s[2][32];
    for (int i = 0; i < 2; ++i) tcgen05_ld<32>(s[i], lanes + d + 32 * i);
    {wait_load}
    uint32_t packed[32];
    for (int i = 0; i < 32; ++i)
      packed[i] = pack2<bf16_t>(s[i / 16][2 * i % 32], s[i / 16][2 * i % 32 + 1]);
    {store}
    {wait_store}
    {fence_before}
    mbarrier_arrive(ready);
    {wait_again}
    tcgen05_fence_after();
    for (int i = 0; i < 2; ++i) tcgen05_ld<32>(s[i], lanes + d + 32 * i);
    tcgen05_wait_ld();
    for (int i = 0; i < 64; ++i) stg_f32(params.out + 64 * tid() + i, s[i / 32][i % 32]);
    {last_fence_before}
  }}
  cta_sync();
  tcgen05_fence_after();
  {dealloc}
"""
GOOD = {
    "alloc": "tcgen05_alloc<128>(slot);",
    "first_fence_before": "tcgen05_fence_before();",
    "wait_full": "mbarrier_wait(full, 0);",
    "form": "tcgen05_instruction_descriptor<bf16_t>(128, 64, false)",
    "commit": "tcgen05_commit(done);",
    "wait_ready": "mbarrier_wait(ready, 0);",
    "fence_after": "tcgen05_fence_after();",
    "wait_done": "mbarrier_wait(done, 0);",
    "fence_after_done": "tcgen05_fence_after();",
    "wait_load": "tcgen05_wait_ld();",
    "store": "tcgen05_st<32>(lanes + p, packed);",
    "wait_store": "tcgen05_wait_st();",
    "fence_before": "tcgen05_fence_before();",
    "wait_again": "mbarrier_wait(done, 1);",
    "last_fence_before": "tcgen05_fence_before();",
    "dealloc": "if (warp() == 4) tcgen05_dealloc<128>(d);",
}
RNG = np.random.default_rng(0)
A, B = (RNG.integers(-2, 3, (n, 64)).astype(ml_dtypes.bfloat16) for n in (128, 64))
FIRST = (A.astype(np.float32) @ B.astype(np.float32).T).astype(ml_dtypes.bfloat16)
EXPECTED = FIRST.astype(np.float32) @ B.astype(np.float32).T
LAUNCH = Launch(
    a=A.reshape(1, 1, 128, 64),
    b=B.reshape(1, 1, 64, 64),
    out=np.full((128, 64), np.nan, np.float32),
    boxes={"a": ((64, 128, 1, 1), 128), "b": ((64, 64, 1, 1), 128)},
)


def product(**changes: str) -> Kernel:
    body = PRODUCT.format(**{**GOOD, **changes})
    return Kernel(body, "sm_100f", threads=160, shared_bytes=16384 + 8192 + 64)


def hazard(name: str, message: str, **changes: str) -> Hazard:
    return Hazard(name, product(**changes), message, LAUNCH)


# One warp owns all of tensor memory.
def alone(body: str, columns: int = 32) -> Kernel:
    return Kernel(
        f"tcgen05_alloc<{columns}>(smem_base()); warp_sync(); tcgen05_fence_after();"
        f" const taddr d = lds32(smem_base()); float s[32] = {{}}; {body}"
        f" tcgen05_dealloc<{columns}>(d);",
        "sm_100f",
    )


TMEM_RACE = "race on tensor memory"
HAZARDS = [
    hazard("operands_not_awaited", "race on shared memory|nobody has waited", wait_full=""),
    hazard("no_commit", "deadlock", commit=""),
    hazard("product_not_awaited", TMEM_RACE + "|in flight", wait_done=""),
    hazard("fence_after_missing_before_load", TMEM_RACE, fence_after_done=""),
    hazard(
        "scores_load_not_awaited",
        "tcgen05.ld or tcgen05.st that no wait|race|not been waited",
        wait_load="",
        wait_store="",
    ),
    hazard("store_not_awaited", TMEM_RACE + "|not been waited for|no wait", wait_store=""),
    hazard("fence_before_missing", TMEM_RACE, fence_before=""),
    hazard("fence_after_missing_before_product", TMEM_RACE, fence_after=""),
    hazard("probabilities_not_awaited", TMEM_RACE, wait_ready=""),
    hazard("second_product_not_awaited", TMEM_RACE + "|in flight", wait_again=""),
    hazard("dealloc_races_with_loads", TMEM_RACE, last_fence_before=""),
    hazard("no_dealloc", "exits without tcgen05.dealloc", dealloc=""),
    hazard(
        "dealloc_twice",
        "column 0 is not allocated",
        dealloc="if (warp() == 4) { tcgen05_dealloc<128>(d); tcgen05_dealloc<128>(d); }",
    ),
    hazard(
        "no_alloc",
        "tensor memory column|columns",
        alloc="if (lane() == 0) sts32(slot, 0);",
        dealloc="",
    ),
    hazard(
        "too_few_columns",
        "column 64 is not allocated",
        alloc="tcgen05_alloc<64>(slot);",
        dealloc="if (warp() == 4) tcgen05_dealloc<64>(d);",
    ),
    hazard(
        "no_such_shape",
        "M 192 and N 64 do not exist",
        form="tcgen05_instruction_descriptor<bf16_t>(192, 64, false)",
    ),
    Hazard(
        "descriptor_version",
        Kernel(
            product().body.replace("| 0x4000 |", "|"), "sm_100f", threads=160, shared_bytes=24640
        ),
        "the version field is 0, not 1",
        LAUNCH,
    ),
    Hazard(
        "columns_not_a_power_of_two",
        Kernel("tcgen05_alloc<96>(smem_base());", "sm_100f"),
        "a power of two from 32 to 512",
    ),
    Hazard(
        "alloc_after_relinquish",
        Kernel("tcgen05_relinquish_alloc_permit(); tcgen05_alloc<32>(smem_base());", "sm_100f"),
        "after tcgen05.relinquish_alloc_permit",
    ),
    Hazard(
        "lanes_of_another_warp",
        alone("tcgen05_ld<32>(s, d + (32 << 16));"),
        "warp 0 may access tensor memory lanes 0 to 31, the address names lane 32",
    ),
    Hazard(
        "columns_beyond_the_end", alone("tcgen05_ld<32>(s, d + 496);", 512), "columns 496 to 527"
    ),
    Hazard(
        "store_over_a_load",
        alone(
            "tcgen05_ld<32>(s, d); float z[32] = {}; tcgen05_st<32>(d, z); tcgen05_wait_st();"
            " tcgen05_wait_ld();"
        ),
        r"tcgen05.st over columns whose tcgen05.ld has not been waited for \(issued at test.cpp",
    ),
    Hazard(
        "load_not_awaited_at_exit",
        alone("tcgen05_ld<32>(s, d);"),
        "tcgen05.ld or tcgen05.st that no wait has covered",
    ),
    Hazard("on_sm90", Kernel("tcgen05_fence_after();", "sm_90a"), "does not exist on sm_90"),
    Hazard("on_sm120", Kernel("tcgen05_fence_after();", "sm_120"), "does not exist on sm_120"),
]


@pytest.mark.parametrize("hazard", HAZARDS, ids=str)
def test_hazard(hazard: Hazard) -> None:
    check_hazard(hazard)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_products(schedule: str, seed: int, window: int) -> None:
    kernel = Kernel(product().body, "sm_100f", threads=160, shared_bytes=16384 + 8192 + 64, grid=2)
    out, report = run(kernel, LAUNCH, schedule=schedule, seed=seed, window=window)
    np.testing.assert_array_equal(out, EXPECTED)
    assert report.mma == 2 * 8


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_registers_are_nan_until_the_wait(schedule: str) -> None:
    body = product(wait_load="", wait_store="tcgen05_wait_ld(); tcgen05_wait_st();").body
    kernel = Kernel(body, "sm_100f", threads=160, shared_bytes=24640)
    out, _ = run(kernel, LAUNCH, schedule=schedule, race=False)
    assert np.isnan(out).any()


# D[m, n] = A[m, 32] B[n, 32]^T over `ctas` CTAs, each holding its rows of A and of B; operands are
# written to shared memory by threads, without swizzle, K-major or MN-major.
SHAPES = """
  constexpr int kM = {m}, kN = {n}, kCtas = {ctas};
  constexpr bool kMnMajorB = {mn_major};
  constexpr int kRows = kM / kCtas, kColumns = kN / kCtas;
  const int rank = kCtas == 2 ? int(cluster_cta_rank()) : 0;
  const saddr a = smem_base(), b = a + 128 * 64, done = b + 256 * 64, slot = done + 8;
  const emulate::Where here = emulate::Where::here();
  if (tid() == 0) {{ mbarrier_init(done, 1); fence_mbarrier_init(); }}
  if (warp() == 0) emulate::tcgen05_alloc(slot, 256, kCtas, here);
  // Without swizzle: 8 rows of 16 bytes are a core matrix of 128 bytes. Here the 4 core matrices
  // along K are adjacent.
  const uint32_t* a_words = static_cast<const uint32_t*>(params.a) + rank * kRows * 16;
  const uint32_t* b_words = static_cast<const uint32_t*>(params.b) + rank * kColumns * 16;
  for (int i = tid(); i < kRows * 16; i += 128) {{
    const int row = i / 16, word = i % 16;
    sts32(a + row / 8 * 512 + word / 4 * 128 + row % 8 * 16 + word % 4 * 4, a_words[i]);
  }}
  for (int i = tid(); i < kColumns * 16; i += 128) {{
    const int row = i / 16, word = i % 16;
    if constexpr (!kMnMajorB) {{
      sts32(b + row / 8 * 512 + word / 4 * 128 + row % 8 * 16 + word % 4 * 4, b_words[i]);
    }} else if (row % 2 == 0) {{
      // Core matrices of 8 k by 8 n; those along N are 512 bytes apart, along K 128.
      const uint32_t x = b_words[i], y = b_words[i + 16];
      const saddr at = b + row / 8 * 512 + word / 4 * 128 + word % 4 * 32 + row % 8 * 2;
      sts32(at, (x & 0xffff) | y << 16);
      sts32(at + 16, x >> 16 | (y & 0xffff0000));
    }}
  }}
  fence_proxy_async();
  tcgen05_fence_before();
  if constexpr (kCtas == 2) cluster_sync(); else cta_sync();
  tcgen05_fence_after();
  const taddr d = lds32(slot);
  if (tid() == 0 && rank == 0) {{
    const uint32_t form = tcgen05_instruction_descriptor<bf16_t>(kM, kN, kMnMajorB);
    // Bytes >> 4 from a core matrix to the next along K, and to the next 8 rows. MN-major exchanges
    // what the two fields mean.
    const uint64_t k_major = uint64_t(1) << 46 | uint64_t(512 / 16) << 32 | 128 / 16 << 16;
    for (int k = 0; k < 2; ++k) {{
      emulate::tcgen05_mma({{d, false, 0, k_major | (a + 256 * k) >> 4,
                            k_major | ((b & 0xffffff) + 256 * k) >> 4, form, k > 0, false, kCtas}},
                           here);
    }}
    emulate::tcgen05_commit(done, kCtas, kCtas == 2 ? 3 : 0, here);
  }}
  mbarrier_wait(done, 0);
  tcgen05_fence_after();
  // Everything: [cta][lane][column].
  for (int column = 0; column < 256; column += 32) {{
    float s[32];
    tcgen05_ld<32>(s, d + (uint32_t(warp() * 32) << 16) + column);
    tcgen05_wait_ld();
    for (int i = 0; i < 32; ++i)
      stg_f32(params.out + (rank * 128 + tid()) * 256 + column + i, s[i]);
  }}
  tcgen05_fence_before();
  if constexpr (kCtas == 2) cluster_sync(); else cta_sync();
  tcgen05_fence_after();
  if (warp() == 0) emulate::tcgen05_dealloc(d, 256, kCtas, here);
"""


def in_tensor_memory(d: np.ndarray, ctas: int) -> np.ndarray:
    """[cta][lane][column] of an accumulator, NaN elsewhere."""
    m, n = d.shape
    expected = np.full((2, 128, 256), np.nan, np.float32)
    if ctas == 1 and m == 128:
        expected[0, :, :n] = d
    elif ctas == 1:
        expected[0].reshape(4, 32, 256)[:, :16, :n] = d.reshape(4, 16, n)
    elif m == 256:
        expected[:, :, :n] = d.reshape(2, 128, n)
    else:
        halves = d.reshape(2, 64, 2, n // 2).transpose(0, 2, 1, 3)
        expected[:, :, : n // 2] = halves.reshape(2, 128, n // 2)
    return expected


@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "ctas"),
    [(128, 256, 1), (128, 16, 1), (64, 8, 1), (64, 256, 1), (256, 128, 2), (128, 96, 2)],
)
def test_shapes(m: int, n: int, ctas: int, mn_major: bool) -> None:
    rng = np.random.default_rng(m + n)
    a, b = (rng.integers(-4, 5, (rows, 32)).astype(ml_dtypes.bfloat16) for rows in (m, n))
    body = SHAPES.format(m=m, n=n, ctas=ctas, mn_major=str(mn_major).lower())
    kernel = Kernel(
        body, "sm_100f", threads=128, cluster=ctas, grid=ctas, shared_bytes=384 * 64 + 16
    )
    expected = in_tensor_memory(a.astype(np.float32) @ b.astype(np.float32).T, ctas)
    for schedule, seed in MODES:
        launch = Launch(a=a, b=b, out=np.full((2, 128, 256), np.nan, np.float32))
        out, _ = run(kernel, launch, schedule=schedule, seed=seed)
        np.testing.assert_array_equal(out, expected)


def test_packed_arithmetic() -> None:
    kernel = Kernel(
        """
  float d[8];
  add2(d[0], d[1], 1.0f, 2.0f, 3.0f, 4.0f);
  mul2(d[2], d[3], 1.5f, 2.0f, 3.0f, 4.0f);
  fma2(d[4], d[5], 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f);
  add2_down(d[6], d[7], 1.0f, 1.0f, -1e-30f, 1e-30f);
  for (int i = 0; i < 8; ++i) stg_f32(params.out + i, d[i]);
  stg_f32(params.out + 8, fmax3_nan(1.0f, 3.0f, 2.0f));
  stg_f32(params.out + 9, fmax3_nan(1.0f, bits_float(0x7fc00000), 2.0f));
""",
        "sm_100f",
    )
    out, _ = run(kernel, race=False)
    below_one = np.nextafter(np.float32(1), np.float32(0))
    np.testing.assert_array_equal(out[:9], [4, 6, 4.5, 8, 8, 14, below_one, 1, 3])
    assert np.isnan(out[9])
