"""The number and order of tiles, against the rules that the kernels rely on."""

from __future__ import annotations

import dataclasses
import random

import pytest

from cupyflash import schedule, tuning
from cupyflash.problem import DeviceInfo, Mask, Problem
from cupyflash.select import spec_for
from cupyflash.tensor import DType

H200 = DeviceInfo("NVIDIA H200", (9, 0), 132, 232448, 60 << 20)
SM90 = tuning.FAMILIES["sm90"]


def problem(**changes) -> Problem:
    values = dict(
        batch=1,
        seqlen_q=16384,
        seqlen_kv=16384,
        heads_q=16,
        heads_kv=16,
        head_dim_qk=128,
        head_dim_v=128,
        dtype=DType.bfloat16,
        mask=Mask(),
    )
    values.update(changes)
    return Problem(**values)


def spec(mask: str, cluster: int = 1, scheduler: str = "persistent"):
    tile = next(tile for tile in SM90.tiles if tile.head_dim_qk == 128)
    tile = dataclasses.replace(tile, cluster=cluster, scheduler=scheduler)
    return spec_for(SM90, tile, "sm_90a", DType.bfloat16, mask)


def order(plan: schedule.TilePlan, heads: int) -> list[tuple[int, int]]:
    """Tiles (m_block, head) in the order of their numbers, as attn/scheduler.cuh decodes them."""
    tiles = []
    first = 0
    while first < heads:
        here = plan.section_heads if first < heads - plan.tail_heads else plan.tail_heads
        for row in range(plan.num_m_blocks):
            tiles += [(plan.num_m_blocks - 1 - row, first + head) for head in range(here)]
        first += here
    return tiles


@pytest.mark.parametrize(
    "seqlen, batch, bound", [(16384, 1, 0.99), (4096, 4, 0.98), (1024, 16, 0.97)]
)
def test_causal_work_falls_evenly(seqlen, batch, bound):
    """Blocks claim the next tile as they get done: here in as many clocks as it has key blocks."""
    causal = problem(seqlen_q=seqlen, seqlen_kv=seqlen, batch=batch, mask=Mask(right=0))
    plan = schedule.plan_tiles(causal, spec("causal"), H200)
    assert plan.dynamic and (16 * batch - plan.tail_heads) % plan.section_heads == 0
    tiles = order(plan, 16 * batch)
    assert len(tiles) == plan.num_tiles
    assert set(tiles) == {(m, h) for m in range(plan.num_m_blocks) for h in range(16 * batch)}
    busy = [0.0] * 132
    for m_block, _ in tiles:
        first = busy.index(min(busy))
        busy[first] += m_block + 1 + 2  # block_m == block_n; two blocks' time for each tile
    assert sum(busy) / 132 / max(busy) >= bound


def test_as_many_heads_at_a_time_as_fill_the_device():
    assert schedule.plan_tiles(problem(), spec("none"), H200).section_heads == 4
    short = problem(seqlen_q=1024, seqlen_kv=1024, batch=16)
    assert schedule.plan_tiles(short, spec("none"), H200).section_heads == 17  # 8 tiles a head
    assert schedule.plan_tiles(problem(heads_q=2), spec("none"), H200).section_heads == 2


def test_packed_sequences_own_enough_query_blocks():
    """Block numbers of packed sequences, as attn/scheduler.cuh finds them."""
    rng = random.Random(0)
    for rows in (64, 128, 192):
        lengths = [rng.choice((0, 1, rows - 1, rows, rows + 1, 1000)) for _ in range(200)]
        starts = [sum(lengths[:b]) for b in range(201)]
        slots = [start // rows + b for b, start in enumerate(starts)]
        assert all(
            next_slot - slot >= -(-length // rows)
            for length, slot, next_slot in zip(lengths, slots, slots[1:])
        )
        assert slots[-1] <= starts[-1] // rows + 200


def test_a_section_of_tiles_fits_32_bits():
    long = problem(seqlen_q=1 << 29, seqlen_kv=1, heads_q=4096, heads_kv=1)
    plan = schedule.plan_tiles(long, spec("none"), H200)
    assert plan.section_heads * plan.num_m_blocks < 2**31


def test_the_blocks_of_a_cluster_share_a_tile():
    plan = schedule.plan_tiles(problem(seqlen_q=300), spec("none", cluster=2), H200)
    assert (plan.num_m_blocks, plan.num_tiles, plan.num_blocks) == (2, 32, 64)
    plan = schedule.plan_tiles(problem(), spec("none", cluster=2), H200)
    assert plan.num_blocks == 132


def test_a_persistent_grid_can_be_limited():
    assert schedule.plan_tiles(problem(num_sms=8), spec("none"), H200).num_blocks == 8


def test_work_is_the_blocks_that_a_mask_leaves():
    full, causal = problem(), problem(mask=Mask(right=0))
    window = problem(mask=Mask(left=1024, right=0))
    assert schedule.blocks_visited(full, spec("none")) == (16 * 128 * 128, 16 * 128 * 128)
    assert schedule.blocks_visited(causal, spec("causal"))[0] == 16 * 128 * 129 // 2
    assert schedule.blocks_visited(window, spec("window"))[0] == 16 * (128 * 9 - 36)
    pairs = schedule.blocks_visited(causal, spec("causal", cluster=2))[0]
    assert pairs == 16 * sum(2 * (2 * m + 2) for m in range(64)), "both visit what either needs"
