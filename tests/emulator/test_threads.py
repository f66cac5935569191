"""Threads, ordinary memory and barriers: what is wrong must be reported, what is right must not."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from cupyflash import emulate
from cupyflash.errors import EmulationError
from tests.emulator.harness import (
    MODES,
    PARAMS_BYTES,
    Hazard,
    Kernel,
    Launch,
    check_hazard,
    run,
)

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++"),
]

# Thread t writes word t and reads the word of the thread 32 places on, `rounds` times.
EXCHANGE = """
  const saddr mine = smem_base() + 4 * tid(), other = smem_base() + 4 * ((tid() + 32) % 64);
  for (int i = 0; i < 3; ++i) {{
    sts32(mine, tid() + i);
    {before_read}
    const uint32_t value = lds32(other);
    {after_read}
    if (i == 2) stg_f32(params.out + tid(), float(value));
  }}
"""
SYNC = "cta_sync();"

HAZARDS = [
    Hazard(
        "atomic_out_of_bounds",
        Kernel("atomic_add(reinterpret_cast<int32_t*>(params.out) + 1024, 1);"),
        "global atomic",
    ),
    Hazard(
        "atomic_misaligned",
        Kernel(
            "atomic_add(reinterpret_cast<int32_t*>(reinterpret_cast<char*>(params.out) + 2), 1);"
        ),
        "global atomic.*not a multiple of 4",
    ),
    Hazard(
        "read_before_write",
        Kernel(EXCHANGE.format(before_read="", after_read=SYNC), threads=64),
        r"race on shared memory(.|\n)*(write at|read  at) test.cpp:\d+ by cta 0",
    ),
    Hazard(
        "write_before_read_is_over",
        Kernel(EXCHANGE.format(before_read=SYNC, after_read=""), threads=64),
        r"race on shared memory(.|\n)*read  at test.cpp:\d+",
    ),
    Hazard(
        "two_writers",
        Kernel("sts32(smem_base(), tid());", threads=64),
        r"race on shared memory at 0x0 of cta 0(.|\n)*write at(.|\n)*write at",
    ),
    Hazard(
        "warp_exchange_without_warp_sync",
        Kernel("sts32(smem_base() + 4 * lane(), 1); lds32(smem_base() + 4 * (31 - lane()));"),
        "race on shared memory",
    ),
    Hazard(
        "shuffles_order_nothing",
        Kernel(
            "sts32(smem_base() + 4 * lane(), 1); shfl_xor(1u, 1);"
            " lds32(smem_base() + 4 * (31 - lane()));"
        ),
        "race on shared memory",
    ),
    Hazard(
        "shared_memory_out_of_bounds",
        Kernel("lds32(smem_base() + 4096);"),
        r"shared memory out of bounds: 4 bytes at offset 4096 of 4096(.|\n)*test.cpp:\d+",
    ),
    Hazard(
        "shared_memory_below_its_start",
        Kernel("sts32(smem_base() - 4, 0);"),
        "out of bounds: 4 bytes at offset -4",
    ),
    Hazard("shared_misaligned", Kernel("lds128(smem_base() + 4);"), "not a multiple of 16"),
    Hazard(
        "global_past_the_end",
        Kernel("stg_f32(params.out + 1024 + tid(), 1.0f);"),
        r"\d+ bytes past the end of float32\[1024\]",
    ),
    Hazard(
        "global_before_the_start",
        Kernel("if (tid() == 3) *const_cast<volatile float*>(params.out - 64) = 1.0f;"),
        r"256 bytes before float32\[1024\]",
    ),
    Hazard("global_misaligned", Kernel("ldg128(params.out + 1);"), "not a multiple of 16"),
    Hazard(
        "no_such_array",
        Kernel("ldg32(reinterpret_cast<const void*>(uint64_t(64)));"),
        "belongs to no array",
    ),
    Hazard(
        "divergent_collective",
        Kernel("if (lane() < 16) warp_sync(); else vote_any(true);"),
        r"divergent collective: .*(warp_sync|vote)",
    ),
    Hazard(
        "collective_by_half_a_warp",
        Kernel("if (lane() < 16) shfl_xor(1u, 1);"),
        r"deadlock(.|\n)*warp  0  shuffle +test.cpp:\d+ .*x16",
    ),
    Hazard(
        "barrier_not_reached_by_all",
        Kernel("if (warp() == 0) cta_sync();", threads=64),
        r"deadlock(.|\n)*cta_sync .*barrier 0 of 64 threads",
    ),
    Hazard(
        "warp_uniform_is_not",
        Kernel("warp_uniform(lane() / 31);"),
        "warp_uniform: lane 0 has 0, lane 31 has 1",
    ),
    Hazard(
        "named_barrier_counts_differ",
        Kernel("named_barrier_sync(1, warp() == 0 ? 64 : 96);", threads=96),
        "barrier 1: this thread expects (64|96) threads, earlier arrivals (64|96)",
    ),
    Hazard(
        "named_barrier_id_shared",
        Kernel("named_barrier_arrive(2, 64); named_barrier_arrive(2, 64);", threads=32),
        "barrier 2 of 64 threads in a CTA of 32",
    ),
    Hazard(
        "named_barrier_lapped",
        Kernel(
            "if (warp() == 0) { named_barrier_arrive(2, 64); named_barrier_arrive(2, 64); }"
            " else { for (int i = 0; i < 99; ++i) vote_any(true);"
            " named_barrier_sync(2, 64); named_barrier_sync(2, 64); }",
            threads=64,
        ),
        "arrives twice before the barrier has completed",
        schedules=(("early", 0), ("late", 0)),
    ),
    Hazard(
        "spin_on_a_plain_load",
        Kernel("while (*static_cast<volatile float*>(params.out) != 1.0f) {}"),
        "without calling any wrapper",
        schedules=(("early", 0),),
    ),
    Hazard(
        "spin_that_never_ends",
        Kernel(
            "uint32_t flag = 0; while (flag != 1)"
            " emulate::global_load_acquire(&flag, params.out, 4, emulate::Where::here());"
        ),
        r"deadlock(.|\n)*acquire load",
    ),
    Hazard(
        "endless_loop",
        Kernel("for (;;) vote_any(true);"),
        "time limit of 1 s passed",
        schedules=(("early", 0),),
        options={"time_limit": 1.0},
    ),
    Hazard(
        "stack_overflow",
        Kernel(
            "stg_f32(params.out, deep(params.size));",
            functions="""
__attribute__((noinline)) float deep(int n) {
  volatile char pad[4096];
  pad[0] = char(n);
  return n == 0 ? pad[0] : deep(n - 1) + pad[0];
}""",
        ),
        "stack overflow of a thread",
        Launch(size=1000),
    ),
    Hazard(
        "integer_division_by_zero",
        Kernel("stg_f32(params.out, float(7 / params.size));"),
        "an integer division by zero",
    ),
    Hazard(
        "undefined_shift",
        Kernel("stg_f32(params.out, float(1 << (params.size + 32)));", sanitize=True),
        r"undefined behaviour of the kernel(.|\n)*in .*test.cpp:\d+",
    ),
    Hazard(
        "index_beyond_a_register_array",
        Kernel(
            "float r[4] = {}; r[params.size] = 1.0f; stg_f32(params.out, r[0] + r[3]);",
            sanitize=True,
        ),
        "undefined behaviour of the kernel",
        Launch(size=4),
    ),
    Hazard("trap", Kernel("if (tid() == 5) trap();"), r"the kernel trapped(.|\n)*lane 5"),
    Hazard(
        "grid_barrier_beyond_the_resident_ctas",
        Kernel(
            """
  const emulate::Where here = emulate::Where::here();
  if (cta_idx() == 1) {
    const float one = 1.0f;
    emulate::global_store_release(params.out, &one, 4, here);
  } else {
    float flag = 0.0f;
    while (flag != 1.0f) emulate::global_load_acquire(&flag, params.out, 4, here);
  }""",
            grid=2,
        ),
        r"deadlock(.|\n)*cta    0 .*acquire load",
    ),
    Hazard(
        "race_on_global_memory",
        Kernel("stg_f32(params.out, 1.0f);", threads=64),
        "race on global memory",
        race="global",
    ),
    Hazard("elect_on_sm80", Kernel("elect_one();"), r"elect.sync does not exist on sm_80"),
]


@pytest.mark.parametrize("hazard", HAZARDS, ids=str)
def test_hazard(hazard: Hazard) -> None:
    check_hazard(hazard)


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_exchange(schedule: str, seed: int) -> None:
    kernel = Kernel(EXCHANGE.format(before_read=SYNC, after_read=SYNC), threads=64)
    out, report = run(kernel, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:64], (np.arange(64) + 32) % 64 + 2)
    assert np.isnan(out[64:]).all()
    assert report.switches > 0


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_exchange_inside_a_warp(schedule: str, seed: int) -> None:
    kernel = Kernel(
        "sts32(smem_base() + 4 * lane(), lane()); warp_sync();"
        " stg_f32(params.out + lane(), float(lds32(smem_base() + 4 * (31 - lane()))));"
    )
    out, _ = run(kernel, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:32], np.arange(32)[::-1])


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_named_barriers_hand_over_in_turn(schedule: str, seed: int) -> None:
    kernel = Kernel(
        """
  const saddr word = smem_base() + 4 * lane();
  for (int i = 0; i < 5; ++i) {
    if (warp() == 0) {
      if (i > 0) named_barrier_sync(2, 64);
      sts32(word, lane() + i);
      named_barrier_arrive(1, 64);
    } else {
      named_barrier_sync(1, 64);
      stg_f32(params.out + 32 * i + lane(), float(lds32(word)));
      if (i < 4) named_barrier_arrive(2, 64);
    }
  }""",
        threads=64,
    )
    out, _ = run(kernel, schedule=schedule, seed=seed)
    expected = np.arange(32) + np.arange(5)[:, None]
    np.testing.assert_array_equal(out[:160].reshape(5, 32), expected)


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_flags_in_global_memory(schedule: str, seed: int) -> None:
    """A later CTA waits for an earlier one; the release and acquire order the data."""
    kernel = Kernel(
        """
  const emulate::Where here = emulate::Where::here();
  float flag = 0.0f;
  if (cta_idx() == 0) {
    stg_f32(params.out + 1 + tid(), float(tid()));
    cta_sync();
    flag = 1.0f;
    if (tid() == 0) emulate::global_store_release(params.out, &flag, 4, here);
  } else {
    while (flag != 1.0f) emulate::global_load_acquire(&flag, params.out, 4, here);
    stg_f32(params.out + 101 + tid(), 2 * bits_float(ldg32(params.out + 1 + tid())));
  }""",
        grid=2,
    )
    for window in (1, 2):
        out, _ = run(kernel, schedule=schedule, seed=seed, race="global", window=window)
        np.testing.assert_array_equal(out[101:133], 2 * np.arange(32))


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_every_claim_is_another(schedule: str, seed: int, window: int) -> None:
    """atomic_add returns what was there before, to one thread of the grid each."""
    kernel = Kernel(
        """
  int32_t* counter = reinterpret_cast<int32_t*>(params.out);
  for (int i = 0; i < 3; ++i) {
    const int claimed = atomic_add(counter, 2);
    stg32(counter + 1 + claimed / 2, uint32_t(64 * cta_idx() + tid()));
  }
  atomic_add(counter + 999, -1);""",
        threads=64,
        grid=4,
    )
    launch = Launch(out=np.full(1000, -1, np.int32))
    launch.out[[0, 999]] = 0
    out, _ = run(kernel, launch, schedule=schedule, seed=seed, window=window)
    assert out[0] == 2 * 3 * 256 and out[999] == -256
    np.testing.assert_array_equal(np.sort(out[1:769]), np.repeat(np.arange(256), 3))
    assert (out[769:999] == -1).all()


def test_a_launch_learns_nothing_from_the_one_before() -> None:
    """A release of an earlier launch, on the same address, orders nothing in this one."""
    kernel = Kernel(
        """
  const emulate::Where here = emulate::Where::here();
  float flag = 0.0f;
  if (cta_idx() == 0) {
    stg_f32(params.out + 1 + tid(), 1.0f);
    cta_sync();
    if (tid() == 0 && params.size == 1) emulate::global_store_release(params.out, &flag, 4, here);
  } else if (params.size == 0) {
    emulate::global_load_acquire(&flag, params.out, 4, here);
    stg_f32(params.out + 101 + tid(), bits_float(ldg32(params.out + 1 + tid())));
  }""",
        grid=2,
    ).build()
    out = emulate.device("sm_80").array(np.zeros(256, np.float32))

    def launch(size: int) -> None:
        params = bytearray(PARAMS_BYTES)
        params[400:408] = out.pointer.to_bytes(8, "little")
        params[408:412] = size.to_bytes(4, "little")
        emulate.run(kernel, 2, params, race="global", window=2)

    launch(1)
    with pytest.raises(EmulationError, match="race on global memory"):
        launch(0)


def test_shared_memory_starts_as_nan() -> None:
    kernel = Kernel("stg_f32(params.out + tid(), lds_f32(smem_base() + 4 * tid()));", grid=3)
    out, _ = run(kernel)
    assert np.isnan(out).all()


def test_warp_exchange_functions() -> None:
    kernel = Kernel(
        """
  stg_f32(params.out + lane(), shfl_xor(float(lane()), 5));
  stg_f32(params.out + 32 + lane(), float(shfl_idx(uint32_t(lane()), lane() / 2)));
  stg_f32(params.out + 64 + lane(), float(vote_ballot(lane() % 3 == 0)));
  stg_f32(params.out + 96 + lane(), float(vote_any(lane() == 7)) + 2 * float(vote_all(lane() > 0)));
"""
    )
    out, _ = run(kernel)
    lanes = np.arange(32)
    np.testing.assert_array_equal(out[:32], lanes ^ 5)
    np.testing.assert_array_equal(out[32:64], lanes // 2)
    ballot = sum(1 << lane for lane in range(32) if lane % 3 == 0)
    np.testing.assert_array_equal(out[64:96], np.float32(ballot))
    np.testing.assert_array_equal(out[96:128], 1)


def test_maths_and_conversions() -> None:
    values = np.array([1.0, -2.5, 3.14159, 65504.0, 1e-3, np.inf, np.nan, 0.0], np.float32)
    kernel = Kernel(
        """
  const float x = bits_float(ldg32(static_cast<const float*>(params.a) + tid() % 8));
  const float results[] = {ex2(x), lg2(x), rcp(x), bits_float(pack2<bf16_t>(x, 1.0f) << 16),
                           bits_float(pack2<f16_t>(x, 0.0f)), fmax(x, 1.0f), fma(x, 2.0f, 1.0f)};
  for (int i = 0; i < 7; ++i) stg_f32(params.out + 8 * i + tid() % 8, results[i]);
"""
    )
    out, _ = run(kernel, Launch(a=values), race=False)
    got = out[:56].reshape(7, 8)
    import ml_dtypes

    with np.errstate(all="ignore"):
        np.testing.assert_allclose(got[0], np.exp2(values), rtol=1e-6)
        np.testing.assert_allclose(got[1], np.log2(values), rtol=1e-6)
        np.testing.assert_allclose(got[2], 1 / values, rtol=1e-6)
        np.testing.assert_array_equal(got[3], values.astype(ml_dtypes.bfloat16).astype(np.float32))
        halves = got[4].view(np.uint32).astype(np.uint16).view(np.float16)
        np.testing.assert_array_equal(halves, values.astype(np.float16))
        np.testing.assert_array_equal(got[5], np.fmax(values, 1))
        np.testing.assert_array_equal(got[6], values * 2 + 1)


def test_a_launch_is_a_function_of_schedule_and_seed() -> None:
    kernel = Kernel(EXCHANGE.format(before_read=SYNC, after_read=SYNC), threads=64)
    switches = {
        seed: {run(kernel, schedule="random", seed=seed)[1].switches for _ in range(3)}
        for seed in range(4)
    }
    assert all(len(counts) == 1 for counts in switches.values())
    assert len(set.union(*switches.values())) > 1


def test_every_lane_can_be_elected() -> None:
    kernel = Kernel("if (elect_one()) stg_f32(params.out, float(lane()));", "sm_90a")
    elected = {run(kernel, schedule="random", seed=seed)[0][0] for seed in range(40)}
    assert len(elected) > 10
    assert run(kernel, schedule="late")[0][0] == 0


def test_a_report_names_the_chain_of_inlined_calls() -> None:
    kernel = Kernel(
        "outer();",
        functions="""
CF_DEVICE void inner(saddr at) { lds32(at); }
CF_DEVICE void outer() {
  inner(smem_base() + 4096);
}""",
    )
    with pytest.raises(
        emulate.EmulationError, match=r"in inner \(test.cpp:\d+\) < outer \(test.cpp:\d+\)$"
    ):
        run(kernel)


def test_the_launch_after_a_failure_is_clean() -> None:
    with pytest.raises(emulate.EmulationError):
        run(Kernel("lds32(smem_base() + 4096);"))
    out, _ = run(Kernel("stg_f32(params.out + tid(), 1.0f);"))
    np.testing.assert_array_equal(out[:32], 1)
