"""Clusters: remote barriers, multicast, copies between CTAs, two-CTA loads."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.emulator.harness import MODES, Hazard, Kernel, Launch, check_hazard, run

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++"),
]

NUMBERS = np.arange(4096, dtype=np.float32)

# Each CTA of a pair loads half of every 16 x 32 tile and multicasts it to both; a warp of each sums
# the columns. A stage is reused when both CTAs have read it.
MULTICAST = """
  const saddr ring = smem_base(), full = ring + 4096, empty = full + 16;
  const int rank = int(cluster_cta_rank());
  if (tid() == 0) {{
    for (int i = 0; i < 2; ++i) {{
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, {empty_count});
    }}
    fence_mbarrier_init();
  }}
  {first_sync}
  if (warp() == 0) {{
    if (elect_one()) {{
      for (int i = 0; i < params.size; ++i) {{
        const saddr bar = full + 8 * (i % 2);
        mbarrier_wait(empty + 8 * (i % 2), (i / 2 & 1) ^ 1);
        mbarrier_arrive_expect_tx(bar, {bytes});
        tma_load_4d_multicast(ring + 2048 * (i % 2) + 1024 * rank, &params.a_map, bar, 0,
                              16 * i + 8 * rank, 0, 0, {mask}, kEvictNormal);
      }}
    }}
  }} else {{
    for (int i = 0; i < params.size; ++i) {{
      mbarrier_wait(full + 8 * (i % 2), i / 2 & 1);
      float sum = 0.0f;
      for (int row = 0; row < 16; ++row)
        sum += lds_f32(ring + 2048 * (i % 2) + 128 * row + 4 * lane());
      for (int to = 0; to < 2; ++to) {{ {release} }}
      stg_f32(params.out + 32 * (params.size * rank + i) + lane(), sum);
    }}
  }}
  {last_sync}
"""
GOOD = {
    "empty_count": "64",
    "first_sync": "cluster_sync();",
    "bytes": "2048",
    "mask": "3",
    "release": "mbarrier_arrive_remote(map_to_cta(empty + 8 * (i % 2), to));",
    "last_sync": "cluster_sync();",
}
LAUNCH = Launch(a=NUMBERS[:2560].reshape(1, 1, 80, 32), boxes={"a": ((32, 8, 1, 1), 0)}, size=5)
EXPECTED = np.tile(NUMBERS[:2560].reshape(5, 16, 32).sum(axis=1), (2, 1))


def multicast(**changes: str) -> Kernel:
    body = MULTICAST.format(**{**GOOD, **changes})
    return Kernel(body, "sm_90a", threads=64, cluster=2, grid=2, shared_bytes=4128)


# The CTAs of a pair exchange rows of 32 words.
EXCHANGE = """
  const saddr note = smem_base(), inbox = note + 128, bar = note + 256;
  const uint32_t rank = cluster_cta_rank();
  const emulate::Where here = emulate::Where::here();
  if (tid() == 0) {{ mbarrier_init(bar, 1); fence_mbarrier_init(); }}
  sts_f32(note + 4 * lane(), float(100 * rank + lane()));
  {fence}
  {sync}
  if (tid() == 0) {{
    mbarrier_arrive_expect_tx(bar, 128);
    emulate::bulk_copy_to_cta(map_to_cta(inbox, rank ^ 1), note, 128, {signal}, here);
  }}
  {wait}
  stg_f32(params.out + 32 * rank + lane(), lds_f32(inbox + 4 * lane()));
  {last}
"""
GOOD_EXCHANGE = {
    "fence": "fence_proxy_async();",
    "sync": "cluster_sync();",
    "signal": "map_to_cta(bar, rank ^ 1)",
    "wait": "mbarrier_wait(bar, 0);",
    "last": "cluster_sync();",
}


def exchange(**changes: str) -> Kernel:
    body = EXCHANGE.format(**{**GOOD_EXCHANGE, **changes})
    return Kernel(body, "sm_90a", cluster=2, grid=4)


# The CTAs of a pair send each other a word for every lane, `rounds` times, through one inbox.
WORDS = """
  const saddr inbox = smem_base(), full = inbox + 128, empty = full + 8;
  const uint32_t rank = cluster_cta_rank();
  if (tid() == 0) {{
    mbarrier_init(full, 1);
    mbarrier_init(empty, 32);
    fence_mbarrier_init();
  }}
  cluster_sync();
  for (int round = 0; round < {rounds}; ++round) {{
    {wait_empty}
    if (tid() == 0) mbarrier_arrive_expect_tx(full, {bytes});
    store_async_32(map_to_cta(inbox + 4 * lane(), rank ^ 1) + {shift},
                   uint32_t(1000 * round + 100 * rank + lane()), {signal});
    {early}
    {wait_full}
    const float got = float(lds32(inbox + 4 * lane()));
    {late}
    stg_f32(params.out + 32 * (2 * round + rank) + lane(), got);
    mbarrier_arrive_remote(map_to_cta(empty, rank ^ 1));
  }}
  cluster_sync();
"""
GOOD_WORDS = {
    "rounds": "3",
    "wait_empty": "mbarrier_wait(empty, (round & 1) ^ 1);",
    "bytes": "128",
    "shift": "0",
    "signal": "map_to_cta(full, rank ^ 1)",
    "early": "",
    "wait_full": "mbarrier_wait(full, round & 1);",
    "late": "",
}
WORDS_EXPECTED = (
    1000 * np.arange(3)[:, None, None] + 100 * np.array([1, 0])[:, None] + np.arange(32)
).reshape(6, 32)


def words(**changes: str) -> Kernel:
    body = WORDS.format(**{**GOOD_WORDS, **changes})
    return Kernel(body, "sm_90a", cluster=2, grid=4)


def pair(body: str, grid: int = 2) -> Kernel:
    return Kernel(body, "sm_90a", cluster=2, grid=grid)


HAZARDS = [
    Hazard(
        "barriers_not_synchronised",
        multicast(first_sync="cta_sync();"),
        "race on an mbarrier|no mbarrier has been initialised",
        LAUNCH,
    ),
    Hazard(
        "stage_released_to_own_cta_only",
        multicast(
            empty_count="32", release="if (to == rank) mbarrier_arrive(empty + 8 * (i % 2));"
        ),
        "race on shared memory|deadlock|arrivals|overflow",
        LAUNCH,
    ),
    Hazard("multicast_to_one", multicast(mask="1 << rank"), "deadlock", LAUNCH),
    Hazard(
        "multicast_beyond_the_cluster",
        multicast(mask="7"),
        "multicast mask 0x7 in a cluster of 2",
        LAUNCH,
    ),
    Hazard(
        "half_of_the_bytes",
        multicast(bytes="1024"),
        "deadlock|race|nobody|arrivals|in flight",
        LAUNCH,
    ),
    Hazard("copy_signals_the_wrong_cta", exchange(signal="bar"), "race on shared memory"),
    Hazard("copy_not_awaited", exchange(wait=""), "race on shared memory|CTA in flight"),
    Hazard("copy_of_unwritten_words", exchange(sync=""), "race|no mbarrier"),
    Hazard("word_not_awaited", words(wait_full=""), "race on shared memory"),
    Hazard(
        "word_awaited_too_late",
        words(wait_full="", late=GOOD_WORDS["wait_full"], rounds="1"),
        "race on shared memory",
    ),
    Hazard(
        "word_awaited_by_one_lane",
        words(wait_full="if (lane() == 0) mbarrier_wait(full, round & 1);", rounds="1"),
        "race on shared memory",
        schedules=(("early", 0), ("late", 0)),
    ),
    Hazard(
        "word_counts_on_the_senders_barrier",
        words(signal="full"),
        "st.async: destination and mbarrier lie in different CTAs",
    ),
    Hazard(
        "word_counts_on_no_barrier",
        words(signal="map_to_cta(full + 16, rank ^ 1)"),
        "no mbarrier has been initialised",
    ),
    Hazard("word_misaligned", words(shift="2"), "st.async destination: address .* multiple of 4"),
    Hazard(
        "word_beyond_shared_memory",
        words(shift="4096"),
        r"shared memory out of bounds: 4 bytes at offset \d+ of 4096",
        schedules=(("early", 0), ("late", 0)),
    ),
    Hazard(
        "word_overwritten_before_it_is_read",
        words(wait_empty=""),
        "race on shared memory|overflow|arrivals",
    ),
    Hazard("more_words_announced", words(bytes="132"), r"deadlock(.|\n)*4 bytes missing"),
    Hazard("fewer_words_announced", words(bytes="124"), "deadlock|race|overflow|nobody|in flight"),
    Hazard(
        "word_left_at_exit",
        pair(
            "const saddr bar = smem_base() + 128;"
            " if (tid() == 0) { mbarrier_init(bar, 1); fence_mbarrier_init(); } cluster_sync();"
            " if (tid() == 0) store_async_32(map_to_cta(smem_base(), cluster_cta_rank() ^ 1), 1,"
            " map_to_cta(bar, cluster_cta_rank() ^ 1));"
        ),
        "nobody has waited for|in flight|after that CTA has exited",
    ),
    Hazard(
        "word_on_sm80",
        Kernel("store_async_32(smem_base(), 1, smem_base() + 8);", "sm_80"),
        "st.async does not exist on sm_80",
    ),
    Hazard(
        "peer_has_exited",
        pair(
            "if (cluster_cta_rank() == 1) { for (int i = 0; i < 99; ++i) vote_any(true);"
            " sts32(map_to_cta(smem_base(), 0), 1); }"
        ),
        r"shared memory of cta 0 \(rank 0\) is used after that CTA has exited",
        schedules=(("early", 0), ("late", 0)),
    ),
    Hazard("no_such_rank", pair("map_to_cta(smem_base(), 2);"), "rank 2 in a cluster of 2"),
    Hazard("arrive_without_wait", pair("cluster_arrive();"), "between cluster_arrive"),
    Hazard("arrive_twice", pair("cluster_arrive(); cluster_arrive();"), "cluster_arrive twice"),
    Hazard("wait_without_arrive", pair("cluster_wait();"), "cluster_wait without cluster_arrive"),
    Hazard(
        "barrier_of_one_cta",
        pair("if (cluster_cta_rank() == 0) cluster_sync();"),
        r"deadlock(.|\n)*cluster_wait",
    ),
    Hazard(
        "remote_barrier_not_fenced",
        pair(
            "if (tid() == 0) mbarrier_init(smem_base(), 1); cluster_sync();"
            " if (tid() == 0) mbarrier_arrive_remote(map_to_cta(smem_base(),"
            " cluster_cta_rank() ^ 1)); mbarrier_wait(smem_base(), 0); cluster_sync();"
        ),
        "of another CTA: its init was not followed by fence_mbarrier_init",
    ),
    Hazard("grid_not_a_multiple", pair("", grid=3), "no multiple of the cluster of 2"),
    Hazard("cluster_on_sm80", Kernel("", "sm_80", cluster=2, grid=2), "a cluster of 2 CTAs"),
]


@pytest.mark.parametrize("hazard", HAZARDS, ids=str)
def test_hazard(hazard: Hazard) -> None:
    check_hazard(hazard)


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_multicast_ring(schedule: str, seed: int) -> None:
    out, _ = run(multicast(), LAUNCH, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:320].reshape(10, 32), EXPECTED)


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_multicast_ring_of_five_dimensions(schedule: str, seed: int) -> None:
    """The same ring; every tile is a slice of the outermost dimension but one."""
    body = MULTICAST.format(**GOOD).replace("tma_load_4d_multicast", "tma_load_5d_multicast")
    body = body.replace("16 * i + 8 * rank, 0, 0,", "8 * rank, 0, i, 1,")
    kernel = Kernel(body, "sm_90a", threads=64, cluster=2, grid=2, shared_bytes=4128)
    other = np.full((5, 1, 16, 32), np.nan, np.float32)
    tiles = NUMBERS[:2560].reshape(5, 1, 16, 32)
    launch = Launch(a=np.stack([other, tiles]), boxes={"a": ((32, 8, 1, 1, 1), 0)}, size=5)
    out, report = run(kernel, launch, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:320].reshape(10, 32), EXPECTED)
    assert report.bytes_to_shared == 2 * 5 * 2048


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_words_to_the_peer(schedule: str, seed: int, window: int) -> None:
    out, _ = run(words(), schedule=schedule, seed=seed, window=window)
    np.testing.assert_array_equal(out[:192].reshape(6, 32), WORDS_EXPECTED)


def test_a_word_is_there_after_the_wait_and_may_not_be_before() -> None:
    """Without the race detector: what a read before the wait finds depends on the schedule."""
    kernel = words(wait_full="", late=GOOD_WORDS["wait_full"], rounds="1")
    early, _ = run(kernel, schedule="early", race=False)
    late, _ = run(kernel, schedule="late", race=False)
    assert not np.array_equal(late[:64].reshape(2, 32), WORDS_EXPECTED[:2])
    assert not np.array_equal(late[:64], early[:64])
    # A wait is enough: nothing else orders the two.
    for schedule in ("early", "late"):
        out, _ = run(words(rounds="1"), schedule=schedule, race=False)
        np.testing.assert_array_equal(out[:64].reshape(2, 32), WORDS_EXPECTED[:2])


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_the_bytes_of_a_word_may_be_counted_before_they_are_announced(
    schedule: str, seed: int
) -> None:
    kernel = words(
        early="for (int i = 0; i < 50; ++i) vote_any(true);"
        " if (tid() == 0) mbarrier_arrive_expect_tx(full, 128);"
    )
    body = kernel.body.replace("    if (tid() == 0) mbarrier_arrive_expect_tx(full, 128);\n", "", 1)
    assert body != kernel.body
    out, _ = run(Kernel(body, "sm_90a", cluster=2, grid=4), schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:192].reshape(6, 32), WORDS_EXPECTED)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_exchange(schedule: str, seed: int, window: int) -> None:
    out, _ = run(exchange(), schedule=schedule, seed=seed, window=window)
    np.testing.assert_array_equal(out[:32], 100 + np.arange(32))
    np.testing.assert_array_equal(out[32:64], np.arange(32))


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_stores_into_the_peer(schedule: str, seed: int) -> None:
    kernel = pair(
        "const uint32_t rank = cluster_cta_rank();"
        " sts_f32(map_to_cta(smem_base(), rank ^ 1) + 4 * lane(), float(100 * rank + lane()));"
        " cluster_sync();"
        " stg_f32(params.out + 32 * rank + lane(), lds_f32(smem_base() + 4 * lane()));"
    )
    out, _ = run(kernel, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:32], 100 + np.arange(32))
    np.testing.assert_array_equal(out[32:64], np.arange(32))


@pytest.mark.parametrize(("schedule", "seed"), MODES)
def test_two_cta_loads_count_on_the_leader(schedule: str, seed: int) -> None:
    """The .cta_group::2 form: both CTAs' bytes arrive at the barrier of the even one."""
    kernel = Kernel(
        """
  const saddr tile = smem_base(), full = tile + 1024, seen = full + 8;
  const uint32_t rank = cluster_cta_rank();
  const emulate::Where here = emulate::Where::here();
  if (tid() == 0) { mbarrier_init(full, 1); mbarrier_init(seen, 1); fence_mbarrier_init(); }
  cluster_sync();
  if (tid() == 0) {
    if (rank == 0) mbarrier_arrive_expect_tx(full, 2048);
    const saddr leaders = full & 0xfeffffff;
    emulate::tma_load(tile, &params.a_map, leaders, 4, {{0, int(8 * rank), 0, 0}}, 0, true, here);
    if (rank == 0) {
      mbarrier_wait(full, 0);
      for (int to = 0; to < 2; ++to) mbarrier_arrive_remote(map_to_cta(seen, to));
    }
  }
  mbarrier_wait(seen, 0);
  for (int row = 0; row < 8; ++row)
    stg_f32(params.out + 32 * (8 * rank + row) + lane(), lds_f32(tile + 128 * row + 4 * lane()));
  cluster_sync();
""",
        "sm_100f",
        cluster=2,
        grid=2,
    )
    out, _ = run(kernel, LAUNCH, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out[:512], NUMBERS[:512])
