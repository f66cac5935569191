"""The tiles of a launch: how many, on how many blocks, in which order.

``kernels_cu/attn/scheduler.cuh`` numbers tiles by sections of (batch, head) pairs; here the size of
a section is chosen. Under a right-bounded mask the tiles of a section run from long to short.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy

from cupyflash.problem import DeviceInfo, Problem
from cupyflash.select import KernelSpec
from cupyflash.tuning import FAMILIES

# Query heads that share the device at least: blocks that read the same keys at the same time read
# them from the L2 cache once, but fewer heads make the waves of tiles uneven.
_LEAST_HEADS = {"none": 4, "causal": 8, "window": 8}

# Tiles of the last section for each block: enough that short ones fill the gaps of long ones.
_TAIL_WAVES = 4

# Half of the L2 cache for the keys and values of the heads of a packed sequence that are worked on
# together.
_L2_SHARE_OF_KV = 0.5


@dataclass(frozen=True)
class TilePlan:
    """The scheduling part of a launch.

    Attributes:
        num_m_blocks: tiles along the queries of one head (the blocks of a cluster share a tile);
            of packed sequences, of all of them.
        num_tiles: of all heads and batches.
        num_blocks: the grid.
        section_heads: (batch, head) pairs scheduled together, in units of a tile's heads.
        tail_heads: pairs in the last section.
        section_rows: keys of the heads of a packed sequence that are scheduled together.
        dynamic: whether blocks claim tiles as they get done.
    """

    num_m_blocks: int
    num_tiles: int
    num_blocks: int
    section_heads: int
    section_rows: int
    tail_heads: int
    dynamic: bool


@functools.lru_cache(maxsize=1024)
def plan_tiles(problem: Problem, spec: KernelSpec, device: DeviceInfo) -> TilePlan:
    """Counts and orders the tiles of ``problem`` for a kernel on a device.

    ``problem.num_sms`` is for persistent kernels; ``select`` gives it no other.
    """
    persistent = spec.scheduler == "persistent"
    num_m_blocks = spec.m_blocks(problem)
    heads = problem.heads_q // spec.slot_heads
    all_heads = heads if problem.is_packed else heads * problem.batch
    num_tiles = num_m_blocks * all_heads
    num_sms = min(problem.num_sms or device.num_sms, device.num_sms)
    resident = max(num_sms * spec.min_blocks // spec.cluster, 1)
    slots = min(resident, num_tiles) if persistent else num_tiles
    section = max(_LEAST_HEADS[spec.mask], -(-resident // max(num_m_blocks, 1)))
    # section * num_m_blocks is a 32-bit product in the kernel.
    section = max(min(section, all_heads, (2**31 - 1) // max(num_m_blocks, 1)), 1)
    dynamic = persistent and FAMILIES[spec.family].claims_tiles and slots < num_tiles
    tail = section
    if dynamic and spec.mask != "none":
        tail = max(-(-_TAIL_WAVES * slots // num_m_blocks), section)
    tail = min(all_heads, tail)
    tail += (all_heads - tail) % section
    row_bytes = (problem.head_dim_qk + problem.head_dim_v) * problem.dtype.itemsize
    return TilePlan(
        num_m_blocks=num_m_blocks,
        num_tiles=num_tiles,
        num_blocks=max(slots, 1) * spec.cluster,
        section_heads=section,
        section_rows=int(device.l2_bytes * _L2_SHARE_OF_KV) // row_bytes,
        tail_heads=tail,
        dynamic=dynamic,
    )


def blocks_visited(problem: Problem, spec: KernelSpec) -> tuple[int, int]:
    """Key blocks that all tiles of ``problem`` visit (``attn/blocks.cuh``), and all there are.

    ``problem`` has no lengths that only the device knows.
    """
    rows = spec.slot_rows
    begin = numpy.arange(-(-problem.seqlen_q // rows), dtype=numpy.int64) * rows
    last = numpy.minimum(begin + rows, problem.seqlen_q) - 1
    end = numpy.minimum(problem.seqlen_kv, last + problem.mask_right + 1)
    first = numpy.maximum(0, begin + problem.mask_left)
    visited = numpy.where(end > first, -(-end // spec.block_n) - first // spec.block_n, 0)
    tiles = problem.heads_q * problem.batch * spec.cluster // spec.slot_heads
    all_blocks = -(-problem.seqlen_kv // spec.block_n) * len(begin)
    return int(visited.sum()) * tiles, all_blocks * tiles


def describe_work(problem: Problem, spec: KernelSpec) -> str:
    """In words, for ``explain``."""
    if problem.lengths:
        return f"known on the device only, by {', '.join(problem.lengths)}"
    visited, total = blocks_visited(problem, spec)
    share = 100 * visited / total if total else 100
    return f"{visited} of {total} key blocks visited ({share:.3g} %)"
