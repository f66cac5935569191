"""The number and order of tiles, against the rules that the kernels rely on."""

from __future__ import annotations

import dataclasses

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


def order(plan: schedule.TilePlan, heads: int, slots: int) -> list[list[tuple[int, int]]]:
    """Tiles (m_block, head) of every slot, as attn/scheduler.cuh deals them."""
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(slots)]
    for slot in range(slots):
        wave = 0
        while True:
            tile = wave * slots + (slots - 1 - slot if wave % 2 else slot)
            if tile >= plan.num_tiles:
                break
            section, rest = divmod(tile, plan.section_heads * plan.num_m_blocks)
            here = min(plan.section_heads, heads - section * plan.section_heads)
            row, head = divmod(rest, here)
            dealt[slot].append((plan.num_m_blocks - 1 - row, section * plan.section_heads + head))
            wave += 1
    return dealt


@pytest.mark.parametrize(
    "seqlen, batch, bound", [(16384, 1, 0.99), (4096, 4, 0.95), (1024, 16, 0.9)]
)
def test_causal_work_falls_evenly(seqlen, batch, bound):
    causal = problem(
        seqlen_q=seqlen, seqlen_kv=seqlen, batch=batch, mask=Mask(right=0, align="bottom_right")
    )
    plan = schedule.plan_tiles(causal, spec("causal"), H200)
    dealt = order(plan, 16 * batch, 132)
    assert sorted(tile for slot in dealt for tile in slot) == sorted(
        (m, head) for m in range(plan.num_m_blocks) for head in range(16 * batch)
    )
    work = [sum(m + 1 + 2 for m, _ in slot) for slot in dealt]  # block_m == block_n
    assert sum(work) / 132 / max(work) >= bound


def test_without_a_mask_sections_fit_the_l2_cache():
    full = problem(batch=4, heads_q=32, heads_kv=8)
    kv_bytes = 16384 * 2 * 128 * 2
    plan = schedule.plan_tiles(full, spec("none"), H200)
    assert plan.section_heads % 4 == 0
    assert plan.section_heads // 4 * kv_bytes <= H200.l2_bytes
    huge = problem(seqlen_kv=1 << 22, heads_q=8, heads_kv=2)
    assert schedule.plan_tiles(huge, spec("none"), H200).section_heads == 4


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
