"""cp.async, mbarriers, TMA and bulk stores: hazards that must be reported, and correct uses."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from cupyflash import emulate
from cupyflash.errors import EmulationError
from tests.emulator.harness import MODES, Hazard, Kernel, Launch, check_hazard, run

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++"),
]

NUMBERS = np.arange(4096, dtype=np.float32)

# Four rounds of a double-buffered cp.async pipeline: each thread loads 16 bytes, reads its
# neighbour's.
CP_ASYNC = """
  const auto load = [&](int round) {{
    cp_async_16(smem_base() + 512 * (round % 2) + 16 * lane(),
                static_cast<const float*>(params.a) + 128 * round + 4 * lane(),
                lane() < 31 ? 16 : 8);
  }};
  load(0);
  {commit}
  for (int round = 0; round < 4; ++round) {{
    if (round < 3) load(round + 1);
    {commit}
    {wait}
    {sync_full}
    stg_f32(params.out + 32 * round + lane(),
            lds_f32(smem_base() + 512 * (round % 2) + 16 * (31 - lane()) + 8));
    {sync_empty}
  }}
  {final_wait}
"""
GOOD_CP_ASYNC = {
    "commit": "cp_async_commit();",
    "wait": "cp_async_wait<1>();",
    "sync_full": "cta_sync();",
    "sync_empty": "cta_sync();",
    "final_wait": "",
}
CP_ASYNC_EXPECTED = np.where(
    np.arange(32) == 0, 0, 128 * np.arange(4)[:, None] + 4 * (31 - np.arange(32)) + 2
)


def cp_async(**changes: str) -> Kernel:
    return Kernel(CP_ASYNC.format(**{**GOOD_CP_ASYNC, **changes}))


# A ring of two stages of 2 KiB: warp 0 loads 16 x 32 floats a round by TMA, warp 1 sums columns.
RING = """
  const saddr ring = smem_base(), full = ring + 4096, empty = full + 16;
  const int rounds = params.size;
  if (tid() == 0) {{
    for (int i = 0; i < 2; ++i) {{
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, {empty_count});
    }}
    {fence_init}
  }}
  {sync}
  if (warp() == 0) {{
    if (elect_one()) {{
      for (int i = 0; i < rounds; ++i) {{
        {wait_empty}
        mbarrier_arrive_expect_tx(full + 8 * (i % 2), {bytes});
        tma_load_4d(ring + 2048 * (i % 2), &params.a_map, full + 8 * (i % 2), 0, 16 * i, 0, 0,
                    kEvictNormal);
      }}
    }}
  }} else {{
    for (int i = 0; i < rounds; ++i) {{
      {wait_full}
      float sum = 0.0f;
      for (int row = 0; row < 16; ++row) {{
        const uint32_t offset = 128 * row + 4 * lane();
        sum += lds_f32(ring + 2048 * (i % 2) + (offset ^ (offset >> 3 & 0x70)));
        {inside}
      }}
      {arrive_empty}
      stg_f32(params.out + 32 * i + lane(), sum);
    }}
  }}
"""
GOOD_RING = {
    "empty_count": "32",
    "fence_init": "fence_mbarrier_init();",
    "sync": "cta_sync();",
    "wait_empty": "mbarrier_wait(empty + 8 * (i % 2), (i / 2 & 1) ^ 1);",
    "bytes": "2048",
    "wait_full": "mbarrier_wait(full + 8 * (i % 2), i / 2 & 1);",
    "inside": "",
    "arrive_empty": "mbarrier_arrive(empty + 8 * (i % 2));",
}
RING_LAUNCH = Launch(
    a=NUMBERS[:2560].reshape(1, 1, 80, 32), boxes={"a": ((32, 16, 1, 1), 128)}, size=5
)
RING_EXPECTED = NUMBERS[:2560].reshape(5, 16, 32).sum(axis=1)


def ring(**changes: str) -> Kernel:
    body = RING.format(**{**GOOD_RING, **changes})
    return Kernel(body, "sm_90a", threads=64, shared_bytes=4096 + 32)


# A tile of 16 x 32 floats per round, written by all threads and stored by TMA.
STORE = """
  const saddr tile = smem_base();
  for (int i = 0; i < 3; ++i) {{
    for (int row = warp(); row < 16; row += 2)
      sts_f32(tile + 128 * row + 4 * lane(), float(512 * i + 32 * row + lane()));
    {fence}
    {sync}
    if (tid() == 0) {{
      tma_store_4d(&params.out_map, tile, 0, 16 * i, 0, 0);
      {commit}
      {wait}
    }}
    {sync_reuse}
  }}
"""
GOOD_STORE = {
    "fence": "fence_proxy_async();",
    "sync": "cta_sync();",
    "commit": "tma_commit();",
    "wait": "tma_wait_read<0>();",
    "sync_reuse": "cta_sync();",
}
STORE_LAUNCH = Launch(
    out=np.full((1, 1, 48, 32), np.nan, np.float32), boxes={"out": ((32, 16, 1, 1), 0)}
)


def store(**changes: str) -> Kernel:
    return Kernel(STORE.format(**{**GOOD_STORE, **changes}), "sm_90a", threads=64)


ONE_BARRIER = """
  const saddr bar = smem_base();
  if (tid() == 0) {{ mbarrier_init(bar, {count}); fence_mbarrier_init(); }}
  cta_sync();
  {body}
"""


def barrier(body: str, count: int = 1, threads: int = 32) -> Kernel:
    return Kernel(ONE_BARRIER.format(count=count, body=body), "sm_90a", threads=threads)


def one_load(map_launch: Launch, name: str, message: str) -> Hazard:
    """A single load through a map that breaks a rule."""
    body = """
  const saddr bar = smem_base() + 8192;
  if (tid() == 0) {
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(bar, 2048);
    tma_load_4d(smem_base(), &params.a_map, bar, 0, 0, 0, 0, kEvictNormal);
    mbarrier_wait(bar, 0);
  }
"""
    return Hazard(name, Kernel(body, "sm_90a", shared_bytes=8200), message, map_launch)


def map_over(array: np.ndarray, box: tuple[int, ...], swizzle: int = 0) -> Launch:
    return Launch(a=array, boxes={"a": (box, swizzle)})


RACE = "race on shared memory"
HAZARDS = [
    # cp.async
    Hazard(
        "cp_async_never_waited",
        cp_async(wait=""),
        RACE + "|4 cp.async that no wait has covered",
        Launch(a=NUMBERS),
    ),
    Hazard(
        "cp_async_left_at_exit",
        cp_async(wait="cp_async_wait<4>();"),
        "3 cp.async that no wait has covered",
        Launch(a=NUMBERS),
        race=False,
    ),
    Hazard("cp_async_wait_too_weak", cp_async(wait="cp_async_wait<2>();"), RACE, Launch(a=NUMBERS)),
    Hazard("cp_async_no_barrier", cp_async(sync_full=""), RACE, Launch(a=NUMBERS)),
    Hazard("cp_async_refill_too_early", cp_async(sync_empty=""), RACE, Launch(a=NUMBERS)),
    Hazard(
        "cp_async_not_committed",
        cp_async(commit=""),
        "cp.async that no wait|" + RACE,
        Launch(a=NUMBERS),
    ),
    Hazard(
        "cp_async_misaligned",
        Kernel("cp_async_16(smem_base() + 8, params.a, 16);"),
        "cp_async destination: address .* is not a multiple of 16",
        Launch(a=NUMBERS),
    ),
    # mbarriers
    Hazard(
        "mbarrier_not_initialised",
        Kernel("mbarrier_wait(smem_base(), 0);", "sm_90a"),
        "no mbarrier has been initialised at 0x400",
    ),
    Hazard(
        "mbarrier_used_before_init_is_known",
        Kernel(
            "if (tid() == 0) { mbarrier_init(smem_base(), 32); fence_mbarrier_init(); }"
            " for (int i = 0; i < 9; ++i) vote_any(true); mbarrier_arrive(smem_base());"
            " mbarrier_wait(smem_base(), 0);",
            "sm_90a",
        ),
        "race on an mbarrier",
    ),
    Hazard(
        "mbarrier_arrivals_missing",
        barrier("if (tid() < 31) mbarrier_arrive(bar); mbarrier_wait(bar, 0);", 32),
        r"deadlock(.|\n)*mbarrier_wait .*barrier 0x400 parity 0: phase 0, 1 of 32 arrivals missing",
    ),
    Hazard(
        "mbarrier_too_many_arrivals",
        barrier(
            "mbarrier_expect(bar); for (int i = 0; i < 3; ++i) mbarrier_arrive(bar);".replace(
                "mbarrier_expect(bar);", "if (tid() == 0) mbarrier_arrive_expect_tx(bar, 16);"
            ),
            2,
        ),
        "1 arrivals where 0 of 2 are missing",
    ),
    Hazard(
        "mbarrier_wrong_parity",
        barrier("mbarrier_arrive(bar); mbarrier_wait(bar, 1); mbarrier_wait(bar, 1);", 32),
        "deadlock",
        schedules=(("early", 0), ("late", 0)),
        options={"time_limit": 20},
    ),
    Hazard(
        "mbarrier_overwritten",
        barrier("if (tid() == 1) sts32(bar + 4, 0);"),
        "an ordinary write hits the live mbarrier at 0x400",
    ),
    Hazard(
        "mbarrier_initialised_again",
        barrier("if (tid() == 0) mbarrier_init(bar, 1);"),
        "initialised again while in use",
    ),
    Hazard("mbarrier_count", barrier("", 0), "mbarrier_init with a count of 0"),
    Hazard("mbarrier_misaligned", barrier("mbarrier_wait(bar + 4, 0);"), "not a multiple of 8"),
    # TMA loads
    Hazard(
        "tma_read_without_wait", ring(wait_full=""), RACE + "|deadlock|arrivals where", RING_LAUNCH
    ),
    Hazard(
        "tma_left_at_exit",
        Kernel(
            RING.format(**GOOD_RING).replace("i < rounds", "i < rounds - (warp() ? 1 : 0)"),
            "sm_90a",
            threads=64,
            shared_bytes=4128,
        ),
        "exits with copies into its shared memory that nobody has waited for"
        "|ends with a TMA load in flight|after that CTA has exited",
        RING_LAUNCH,
        race=False,
    ),
    Hazard(
        "tma_refill_too_early",
        ring(wait_empty="", wait_full="mbarrier_wait(full + 8 * (i % 2), i / 2 & 1);"),
        RACE + "|arrivals where|deadlock",
        RING_LAUNCH,
    ),
    Hazard(
        "tma_released_too_early",
        ring(
            arrive_empty="",
            inside="if (row == 3) mbarrier_arrive(empty + 8 * (i % 2));",
        ),
        RACE,
        RING_LAUNCH,
    ),
    Hazard(
        "tma_released_by_one_lane",
        ring(
            empty_count="1",
            arrive_empty="if (lane() == 7) mbarrier_arrive(empty + 8 * (i % 2));",
        ),
        RACE,
        RING_LAUNCH,
    ),
    Hazard(
        "tma_too_few_bytes_announced",
        ring(bytes="1024"),
        "deadlock|overflow|nobody|race",
        RING_LAUNCH,
    ),
    Hazard(
        "tma_too_many_bytes_announced",
        ring(bytes="4096"),
        r"deadlock(.|\n)*2048 bytes missing",
        RING_LAUNCH,
    ),
    Hazard(
        "tma_barrier_not_fenced",
        ring(fence_init=""),
        "not followed by fence_mbarrier_init",
        RING_LAUNCH,
    ),
    Hazard(
        "tma_barrier_not_synchronised",
        ring(sync=""),
        "race on an mbarrier|no mbarrier has been initialised",
        RING_LAUNCH,
    ),
    Hazard(
        "tma_destination_misaligned",
        Kernel(
            "const saddr bar = smem_base();"
            " if (tid() == 0) { mbarrier_init(bar, 1); fence_mbarrier_init();"
            " tma_load_4d(bar + 64, &params.a_map, bar, 0, 0, 0, 0, kEvictNormal); }",
            "sm_90a",
        ),
        "TMA destination: address .* is not a multiple of 128",
        RING_LAUNCH,
    ),
    Hazard(
        "tma_swizzled_out_of_bounds",
        Kernel(
            "const saddr bar = smem_base();"
            " if (tid() == 0) { mbarrier_init(bar, 1); fence_mbarrier_init();"
            " mbarrier_arrive_expect_tx(bar, 64);"
            " tma_load_4d(bar + 512, &params.a_map, bar, 0, 0, 0, 0, kEvictNormal);"
            " mbarrier_wait(bar, 0); }",
            "sm_90a",
            shared_bytes=576,
        ),
        "shared memory out of bounds: 16 bytes at offset 576 of 576",
        map_over(NUMBERS.reshape(1, 1, 64, 64), (16, 1, 1, 1), 128),
    ),
    Hazard(
        "bulk_store_of_another_cta",
        Kernel(
            "if (cta_idx() == 0 && tid() == 0) emulate::bulk_store(params.out,"
            " map_to_cta(smem_base(), 1), 512, false, emulate::Where::here());"
            " cluster_sync();",
            "sm_90a",
            cluster=2,
            grid=2,
        ),
        "a bulk store from another CTA's shared memory",
    ),
    Hazard(
        "tma_on_sm80",
        Kernel("tma_prefetch_descriptor(&params.a_map);"),
        "TMA does not exist on sm_80",
        RING_LAUNCH,
    ),
    # Tensor maps
    one_load(Launch(), "map_not_encoded", "the tensor map has not been encoded"),
    one_load(
        map_over(NUMBERS[: 16 * 33].reshape(1, 1, 16, 33), (32, 16, 1, 1)),
        "map_stride",
        "the stride of dimension 1 is 132 bytes",
    ),
    one_load(
        map_over(NUMBERS.reshape(1, 1, 8, 512), (512, 1, 1, 1)), "map_box", r"box\[0\] is 512"
    ),
    one_load(
        map_over(NUMBERS.reshape(1, 1, 64, 64), (64, 8, 1, 1), 128),
        "map_swizzle",
        "inner box of 256 bytes exceeds the swizzle span of 128",
    ),
    one_load(
        map_over(NUMBERS.reshape(1, 1, 64, 64), (6, 8, 1, 1)),
        "map_inner_box",
        "inner box of 24 bytes, not a multiple of 16",
    ),
    one_load(
        map_over(NUMBERS.reshape(1, 64, 64), (32, 16, 1)), "map_rank", "a 4d TMA load .* rank 3"
    ),
    # TMA stores
    Hazard("store_not_committed", store(commit=""), "tma_wait_read is missing|race", STORE_LAUNCH),
    Hazard(
        "store_read_not_awaited", store(wait=""), RACE + "|tma_wait_read is missing", STORE_LAUNCH
    ),
    Hazard("store_of_unwritten_rows", store(sync=""), RACE, STORE_LAUNCH),
    Hazard("store_reuse_not_synchronised", store(sync_reuse=""), RACE, STORE_LAUNCH),
    Hazard(
        "store_left_at_exit",
        store(wait="if (i < 2) tma_wait_read<0>();"),
        r"exits while a bulk store issued at test.cpp:\d+ may still read",
        STORE_LAUNCH,
    ),
]


@pytest.mark.parametrize("hazard", HAZARDS, ids=str)
def test_hazard(hazard: Hazard) -> None:
    check_hazard(hazard)


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_cp_async_pipeline(schedule: str, seed: int) -> None:
    out, report = run(cp_async(), Launch(a=NUMBERS), schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:128].reshape(4, 32), CP_ASYNC_EXPECTED)
    assert report.bytes_to_shared == 4 * 512


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_cp_async_wait_all_needs_no_commit(schedule: str, seed: int) -> None:
    kernel = cp_async(commit="", wait="cp_async_wait_all();")
    out, _ = run(kernel, Launch(a=NUMBERS), schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:128].reshape(4, 32), CP_ASYNC_EXPECTED)


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_a_wait_after_an_asynchronous_arrival(schedule: str, seed: int) -> None:
    """The second copy is in no group: the mbarrier answers for it, and the wait for the first."""
    kernel = Kernel(
        """
  const saddr bar = smem_base(), first = bar + 1024 + 16 * lane(), second = first + 512;
  const float* row = static_cast<const float*>(params.a) + 4 * lane();
  if (tid() == 0) mbarrier_init(bar, 32);
  cta_sync();
  cp_async_16(first, row, 16);
  cp_async_commit();
  cp_async_16(second, row + 128, 16);
  emulate::cp_async_mbarrier_arrive(bar, true, emulate::Where::here());
  cp_async_wait<0>();
  mbarrier_wait(bar, 0);
  stg_f32(params.out + lane(), lds_f32(first) + lds_f32(second));"""
    )
    out, _ = run(kernel, Launch(a=NUMBERS), schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:32], 2 * 4 * np.arange(32) + 128)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_tma_ring(schedule: str, seed: int, window: int) -> None:
    kernel = Kernel(ring().body, "sm_90a", threads=64, shared_bytes=4128, grid=4)
    out, report = run(kernel, RING_LAUNCH, schedule=schedule, seed=seed, window=window)
    np.testing.assert_array_equal(out[:160].reshape(5, 32), RING_EXPECTED)
    assert report.bytes_to_shared == 4 * 5 * 2048


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_tma_ring_by_try_wait(schedule: str, seed: int) -> None:
    loop = "while (!mbarrier_try_wait({}, {})) {{}}"
    kernel = ring(
        wait_empty=loop.format("empty + 8 * (i % 2)", "(i / 2 & 1) ^ 1"),
        wait_full=loop.format("full + 8 * (i % 2)", "i / 2 & 1"),
    )
    out, _ = run(kernel, RING_LAUNCH, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:160].reshape(5, 32), RING_EXPECTED)


def test_a_try_wait_that_never_succeeds_is_a_deadlock() -> None:
    kernel = barrier("while (!mbarrier_try_wait(bar, 0)) {}")
    for schedule in ("early", "late"):
        with pytest.raises(emulate.EmulationError, match=r"deadlock(.|\n)*mbarrier_try_wait"):
            run(kernel, schedule=schedule)


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_tma_store(schedule: str, seed: int) -> None:
    out, _ = run(store(), STORE_LAUNCH, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out.ravel(), np.arange(1536))


@pytest.mark.parametrize("schedule", ["early", "late"])
def test_a_store_without_proxy_fence_writes_stale_bytes(schedule: str) -> None:
    out, _ = run(store(fence=""), STORE_LAUNCH, schedule=schedule)
    assert np.isnan(out).all()


def test_late_schedule_shows_a_missing_cp_async_wait() -> None:
    kernel = cp_async(wait="cp_async_wait<1>();", final_wait="cp_async_wait_all();").body
    kernel = kernel.replace("cp_async_wait<1>();", "cp_async_wait<2>();")
    out, _ = run(Kernel(kernel), Launch(a=NUMBERS), schedule="late", race=False)
    assert not np.array_equal(out[:128].reshape(4, 32), CP_ASYNC_EXPECTED)


@pytest.mark.parametrize(("schedule", "seed"), MODES)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_boxes_that_overhang(schedule: str, seed: int, swizzle: int) -> None:
    """Load, unswizzle, add one, store: only what lies inside the tensor is read and written."""
    columns = swizzle // 4 or 8
    kernel = Kernel(
        """
  const saddr tile = smem_base(), bar = tile + 4096;
  if (tid() == 0) {
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(bar, 8 * 4 * params.size);
    tma_load_4d(tile, &params.a_map, bar, -3, 5, 1, 0, kEvictNormal);
  }
  cta_sync();
  mbarrier_wait(bar, 0);
  for (int i = tid(); i < 8 * params.size; i += 32) {
    const uint32_t mask = params.size == 32 ? 0x70 : params.size == 16 ? 0x30 : 0x10;
    const uint32_t address = tile + 4 * i;
    const saddr at = params.b == nullptr ? address : address ^ (address >> 3 & mask);
    sts_f32(at, lds_f32(at) + float(i + 1));
  }
  fence_proxy_async();
  cta_sync();
  if (tid() == 0) {
    tma_store_4d(&params.out_map, tile, 2, 5, 1, 0);
    tma_commit();
    tma_wait<0>();
  }""",
        "sm_90a",
        shared_bytes=4104,
    )
    source = np.random.default_rng(0).standard_normal((2, 3, 9, 8)).astype(np.float32)
    box = ((columns, 8, 1, 1), swizzle)
    launch = Launch(
        a=source,
        b=np.zeros(1, np.float32) if swizzle else None,
        out=np.full_like(source, np.nan),
        boxes={"a": box, "out": box},
        size=columns,
    )
    out, report = run(kernel, launch, schedule=schedule, seed=seed)
    expected = np.full_like(source, np.nan)
    added = (np.arange(8 * columns) + 1).reshape(8, columns).astype(np.float32)
    loaded = np.zeros((4, 6), np.float32)
    loaded[:, 3:] = source[0, 1, 5:, :3]
    expected[0, 1, 5:, 2:] = loaded + added[:4, :6]
    np.testing.assert_array_equal(out, expected)
    assert report.bytes_to_shared == 32 * columns


FIVE = """
  const saddr tile = smem_base(), bar = tile + 1024;
  if (tid() == 0) {{
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(bar, 1024);
    tma_load_5d(tile, &params.a_map, bar, {load}, kEvictNormal);
  }}
  cta_sync();
  {wait}
  for (int i = tid(); i < 256; i += 32) sts_f32(tile + 4 * i, lds_f32(tile + 4 * i) + 0.5f);
  {fence}
  cta_sync();
  if (tid() == 0) {{
    tma_store_5d(&params.out_map, tile, {store});
    tma_commit();
    tma_wait<0>();
  }}
"""
GOOD_FIVE = {
    "load": "8, 6, 1, 2, 1",
    "wait": "mbarrier_wait(bar, 0);",
    "fence": "fence_proxy_async();",
    "store": "24, 2, 0, 1, 1",
}


def five(**changes: str) -> Kernel:
    return Kernel(FIVE.format(**{**GOOD_FIVE, **changes}), "sm_90a", shared_bytes=1032)


FIVE_LAUNCH = Launch(
    a=NUMBERS[:3840].reshape(2, 3, 2, 10, 32),
    out=np.full((2, 3, 2, 10, 32), np.nan, np.float32),
    boxes=dict.fromkeys(("a", "out"), ((32, 4, 2, 1, 1), 0)),
)


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_boxes_of_five_dimensions(schedule: str, seed: int) -> None:
    """From and to another place in each dimension, across both edges of some."""
    out, report = run(five(), FIVE_LAUNCH, schedule=schedule, seed=seed)
    box = np.zeros((2, 4, 32), np.float32)
    assert FIVE_LAUNCH.a is not None
    box[:1, :, :24] = FIVE_LAUNCH.a[1, 2, 1:2, 6:, 8:]  # slices, rows, columns; the rest is outside
    expected = np.full_like(FIVE_LAUNCH.out, np.nan)
    expected[1, 1, :, 2:6, 24:] = box[:, :, :8] + 0.5
    np.testing.assert_array_equal(out, expected)
    assert report.bytes_to_shared == 1024


@pytest.mark.parametrize(
    "hazard",
    [
        Hazard("five_not_awaited", five(wait=""), RACE + "|load in flight", FIVE_LAUNCH),
        Hazard(
            "five_before_the_tensor",
            five(store="0, 0, 0, -1, 0"),
            "begins before the tensor",
            FIVE_LAUNCH,
        ),
        Hazard(
            "five_of_four",
            five(),
            "a 5d TMA load .* rank 4",
            map_over(NUMBERS.reshape(2, 2, 32, 32), (32, 8, 1, 1)),
        ),
        Hazard(
            "five_misaligned_stride",
            five(),
            "the stride of dimension 1 is 132 bytes",
            map_over(NUMBERS[: 2 * 33].reshape(1, 1, 1, 2, 33), (32, 2, 1, 1, 1)),
        ),
    ],
    ids=str,
)
def test_hazard_of_five_dimensions(hazard: Hazard) -> None:
    check_hazard(hazard)


def test_a_store_of_five_dimensions_without_proxy_fence_writes_what_was_loaded() -> None:
    out, _ = run(five(fence=""), FIVE_LAUNCH, schedule="late")
    assert not np.isin(out[~np.isnan(out)] % 1, 0.5).any()


@pytest.mark.parametrize(("schedule", "seed"), MODES)
@pytest.mark.parametrize(
    ("begin", "length", "row"),
    [(3, 12, 0), (3, 12, 8), (3, 12, 4), (0, 20, 16), (19, 1, 0), (5, 0, 0)],
)
def test_ragged_boxes_end_with_their_sequence(
    schedule: str, seed: int, begin: int, length: int, row: int
) -> None:
    """Note [Ragged maps] of attn/ragged.cuh: 8 rows from row `row` of a sequence, or as many as it
    has; those of the sequence behind it are neither read nor written."""
    at = f"0, 20 - {length} + {row}, {begin} + {length}, 1, 1"
    load_at = f"0, (1 << 30) - {length} + {row}, 1, 1 << 30, {begin} + {length} + 2 * 20"
    launch = Launch(
        a=NUMBERS[:2560].reshape(2, 2, 20, 32),
        out=np.full((2, 2, 20, 32), -1, np.float32),
        boxes=dict.fromkeys(("a", "out"), ((32, 8, 1, 1, 1), 0)),
        ragged=True,
    )
    out, _ = run(five(load=load_at, store=at), launch, schedule=schedule, seed=seed)
    count = max(min(8, length - row), 0)
    expected = np.full_like(launch.out, -1)
    assert launch.a is not None
    place = (1, 1, slice(begin + row, begin + row + count))
    expected[place] = launch.a[place] + 0.5
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_ragged_loads_fill_with_zeros(schedule: str, seed: int) -> None:
    """Rows 4 to 12 of a sequence of 7: three of them, stored where there is room for all."""
    at = "0, (1 << 30) - 7 + 4, 1, 1 << 30, 5 + 7 + 2 * 20"
    kernel = five(load=at, store="0, 0, 20, 0, 0")
    launch = Launch(
        a=NUMBERS[:2560].reshape(2, 2, 20, 32),
        out=np.full((2, 2, 20, 32), -1, np.float32),
        boxes=dict.fromkeys(("a", "out"), ((32, 8, 1, 1, 1), 0)),
        ragged=True,
    )
    out, _ = run(kernel, launch, schedule=schedule, seed=seed)
    expected = np.full((8, 32), 0.5, np.float32)
    assert launch.a is not None
    expected[:3] += launch.a[1, 1, 9:12]
    np.testing.assert_array_equal(out[0, 0, :8], expected)
    assert (out[0, 0, 8:] == -1).all() and (out[0, 1] == -1).all() and (out[1] == -1).all()


@pytest.mark.parametrize("operation", ["tma_store_4d", "tma_reduce_add_4d"])
@pytest.mark.parametrize("at", ["-8, 0", "0, -1"])
def test_a_store_may_not_begin_before_the_tensor(operation: str, at: str) -> None:
    """An H200 stops with an illegal instruction; a load may, and reads zeros there."""
    body = STORE.format(**GOOD_STORE).replace(
        "tma_store_4d(&params.out_map, tile, 0, 16 * i,",
        f"{operation}(&params.out_map, tile, {at},",
    )
    launch = Launch(out=np.ones((1, 1, 16, 32), np.float32), boxes={"out": ((32, 16, 1, 1), 0)})
    with pytest.raises(EmulationError, match="begins before the tensor"):
        run(Kernel(body, "sm_90a", threads=64), launch)


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_reduce_add(schedule: str, seed: int) -> None:
    body = STORE.format(**GOOD_STORE).replace(
        "tma_store_4d(&params.out_map, tile, 0, 16 * i,",
        "tma_reduce_add_4d(&params.out_map, tile, 0, 0,",
    )
    launch = Launch(out=np.ones((1, 1, 16, 32), np.float32), boxes={"out": ((32, 16, 1, 1), 0)})
    out, _ = run(Kernel(body, "sm_90a", threads=64), launch, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out.ravel(), 3 * np.arange(512) + 1 + 512 * 3)


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_bulk_copies(schedule: str, seed: int) -> None:
    """Untyped copies of rows, in and out, and a reduction."""
    kernel = Kernel(
        """
  const saddr row = smem_base(), bar = row + 1024;
  const emulate::Where here = emulate::Where::here();
  if (tid() == 0) {
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(bar, 512);
    emulate::bulk_load(row, params.a, 512, bar, 0, here);
    mbarrier_wait(bar, 0);
    emulate::bulk_store(params.out, row, 512, false, here);
    tma_commit();
    tma_wait<0>();
    emulate::bulk_store(params.out, row, 256, true, here);
    tma_commit();
    tma_wait<0>();
  }""",
        "sm_90a",
    )
    out, _ = run(kernel, Launch(a=NUMBERS[:128].copy()), schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:64], 2 * NUMBERS[:64])
    np.testing.assert_array_equal(out[64:128], NUMBERS[64:128])
    assert np.isnan(out[128:]).all()
