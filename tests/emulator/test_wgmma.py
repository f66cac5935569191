"""wgmma and the registers of warpgroups: what is wrong must be reported, what is right must not.

Whether products and layouts are right is the conformance suite's business; this is about order.
"""

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

# D[64, 64] = A[64, 128] B[64, 128]^T in two halves of K. A warpgroup writes A and B to shared
# memory as two tiles of 64 x 64 with 128-byte swizzle; A comes from there or from registers.
PRODUCT = """
  const saddr a = smem_base(), b = a + 16384;
  const uint32_t* sources[2] = {{static_cast<const uint32_t*>(params.a),
                                static_cast<const uint32_t*>(params.b)}};
  const int t = tid() % 128;
  for (int which = 0; which < 2; ++which) {{
    for (int i = t; i < 4096; i += 128) {{
      const int row = i / 64, column = i % 64;
      const uint32_t offset = 8192 * (column / 32) + 128 * row + 4 * (column % 32);
      sts32(a + 16384 * which + (offset ^ (offset >> 3 & 0x70)), sources[which][i]);
    }}
  }}
  {proxy_fence}
  {sync}
  constexpr uint32_t kHigh = 0x40000040;
  float d[32];
  uint32_t fragments[8][4];
  for (int k = 0; k < 8; ++k)
    for (int i = 0; i < 4; ++i)
      fragments[k][i] = sources[0][(t / 32 * 16 + t % 32 / 4 + i % 2 * 8) * 64 + 8 * k + t % 4 +
                                   i / 2 * 4];
  const auto issue = [&](int half) {{
    for (int k = 0; k < 4; ++k) {{
      const uint32_t step = 2 * k + 512 * half + 0x10000;
      if (params.size == 0)
        wgmma_ss<bf16_t, 64, kHigh, kHigh, 0>(d, (a >> 4) + step, (b >> 4) + step, half + k > 0);
      else
        wgmma_rs<bf16_t, 64, kHigh, 0>(d, fragments[4 * half + k], (b >> 4) + step, half + k > 0);
    }}
  }};
  {fence}
  issue(0);
  {commit}
  issue(1);
  {last_commit}
  {before_wait}
  {wait}
  for (int i = 0; i < 32; ++i)
    stg_f32(params.out + 64 * (t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) + i / 4 * 8 + t % 4 * 2 +
            i % 2, d[i]);
"""
GOOD = {
    "proxy_fence": "fence_proxy_async();",
    "sync": "cta_sync();",
    "fence": "wgmma_fence();",
    "commit": "wgmma_commit();",
    "last_commit": "wgmma_commit();",
    "before_wait": "",
    "wait": "wgmma_wait<0>();",
}
RNG = np.random.default_rng(0)
A, B = (RNG.integers(-4, 5, (64, 128)).astype(ml_dtypes.bfloat16) for _ in range(2))
EXPECTED = A.astype(np.float32) @ B.astype(np.float32).T


def product(**changes: str) -> Kernel:
    body = PRODUCT.format(**{**GOOD, **changes})
    return Kernel(body, "sm_90a", threads=128, shared_bytes=32768)


def launch(registers: bool = False) -> Launch:
    return Launch(a=A, b=B, out=np.full((64, 64), np.nan, np.float32), size=int(registers))


def registers(body: str) -> Kernel:
    return Kernel(body, "sm_90a", threads=384)


HAZARDS = [
    Hazard("no_wait", product(wait=""), "wgmma that no wait has covered", launch()),
    Hazard("no_commit", product(last_commit=""), "wgmma that no wait has covered|race", launch()),
    Hazard(
        "no_fence",
        product(fence=""),
        r"wgmma without wgmma_fence since its registers were last the thread's own",
        launch(),
    ),
    Hazard("operands_not_synchronised", product(sync=""), "race on shared memory", launch()),
    Hazard(
        "operands_overwritten_before_the_wait",
        product(before_wait="sts32(b + 16 * t, 0);"),
        r"race on shared memory(.|\n)*wgmma of warpgroup 0",
        launch(),
    ),
    Hazard(
        "a_registers_changed_before_the_wait",
        product(before_wait="fragments[7][t % 4] ^= 1;"),
        "registers of the A operand of a wgmma changed",
        launch(registers=True),
        schedules=(("late", 0),),
    ),
    Hazard(
        "descriptors_differ",
        Kernel(
            "float d[4]; wgmma_fence();"
            " wgmma_ss<bf16_t, 8, 0x40000040, 0x40000040, 0>(d, 64, 64 + 8 * (tid() == 77), false);"
            " wgmma_commit(); wgmma_wait<0>();",
            "sm_90a",
            threads=128,
        ),
        "the descriptors differ across the warpgroup",
    ),
    Hazard(
        "operand_outside_shared_memory",
        Kernel(
            "float d[4]; wgmma_fence();"
            " wgmma_ss<bf16_t, 8, 0x40000040, 0x40000040, 0>(d, 64, 4000, false);"
            " wgmma_commit(); wgmma_wait<0>();",
            "sm_90a",
            threads=128,
        ),
        r"operand at shared offset \d+ lies outside 4096 bytes",
    ),
    Hazard(
        "three_warps_only",
        Kernel(
            "float d[4]; wgmma_fence(); if (warp() < 3) {"
            " wgmma_ss<bf16_t, 8, 0x40000040, 0x40000040, 0>(d, 64, 64, false);"
            " wgmma_commit(); wgmma_wait<0>(); }",
            "sm_90a",
            threads=128,
        ),
        r"deadlock(.|\n)*wgmma_wait",
    ),
    Hazard(
        "on_sm100",
        Kernel("wgmma_fence();", "sm_100f", threads=128),
        "wgmma.fence does not exist on sm_100",
    ),
    Hazard(
        "registers_of_nobody",
        registers("if (warp() / 4 == 0) setmaxnreg_dec<40>(); else setmaxnreg_inc<240>();"),
        r"deadlock(.|\n)*setmaxnreg.inc",
    ),
    Hazard(
        "registers_not_a_multiple_of_8",
        registers("setmaxnreg_dec<100>();"),
        "a multiple of 8 from 24 to 256",
    ),
    Hazard(
        "registers_by_one_warp",
        registers("if (warp() == 0) setmaxnreg_dec<40>();"),
        r"deadlock(.|\n)*setmaxnreg.dec",
    ),
    Hazard(
        "registers_increased_by_dec",
        registers("setmaxnreg_dec<240>();"),
        "setmaxnreg.dec to 240: the warpgroup holds 168",
    ),
]


@pytest.mark.parametrize("hazard", HAZARDS, ids=str)
def test_hazard(hazard: Hazard) -> None:
    check_hazard(hazard)


@pytest.mark.parametrize("a_in_registers", [False, True])
@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_product(schedule: str, seed: int, a_in_registers: bool) -> None:
    out, report = run(product(), launch(a_in_registers), schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out, EXPECTED)
    assert report.mma == 8


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_wait_for_all_but_one_group(schedule: str, seed: int) -> None:
    """With a second accumulator, wait<1> gives the first one back and leaves the second alone."""
    kernel = product(
        fence="float e[32]; wgmma_fence();",
        last_commit="wgmma_commit(); wgmma_ss<bf16_t, 64, kHigh, kHigh, 0>"
        "(e, (a >> 4) + 0x10000, (b >> 4) + 0x10000, false); wgmma_commit();",
        wait="wgmma_wait<1>(); for (int i = 0; i < 32; ++i) d[i] *= 2.0f; wgmma_wait<0>();"
        " for (int i = 0; i < 32; ++i) d[i] += e[i];",
    )
    out, _ = run(kernel, launch(), schedule=schedule, seed=seed)
    first = A[:, :16].astype(np.float32) @ B[:, :16].astype(np.float32).T
    np.testing.assert_array_equal(out, 2 * EXPECTED + first)


@pytest.mark.parametrize("schedule", ["early", "late", "random"])
def test_a_wait_that_is_too_weak_leaves_nan(schedule: str) -> None:
    kernel = product(wait="wgmma_wait<1>();").body + "  wgmma_wait<0>();"
    out, _ = run(
        Kernel(kernel, "sm_90a", threads=128, shared_bytes=32768), launch(), schedule=schedule
    )
    assert np.isnan(out).all()


@pytest.mark.parametrize("schedule", ["early", "late", "random"])
def test_a_missing_proxy_fence_leaves_nan(schedule: str) -> None:
    out, _ = run(product(proxy_fence=""), launch(), schedule=schedule, race=False)
    assert np.isnan(out).all()


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_registers_move_between_warpgroups(schedule: str, seed: int) -> None:
    kernel = registers(
        "if (warp() / 4 == 2) setmaxnreg_dec<24>(); else setmaxnreg_inc<240>();"
        " stg_f32(params.out + tid(), 1.0f);"
    )
    out, _ = run(kernel, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:384], 1)
