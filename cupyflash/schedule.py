"""The tiles of a launch: how many, on how many blocks, in which order.

``kernels_cu/attn/scheduler.cuh`` numbers tiles by sections of (batch, head) pairs; here the size of
a section is chosen. A small section keeps the keys and values that are in use together in the L2
cache. Under a right-bounded mask the tiles of a section run from long to short, and a persistent
kernel deals them out in waves, from alternating ends: the size of a section then also decides how
evenly the work falls, which is simple enough to count (``_busiest``) and was worth 8 to 34 % on an
H200 (causal, 16,384 tokens, head_dim 128 and 256, 2026-11-29).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy

from cupyflash.problem import DeviceInfo, Problem
from cupyflash.select import KernelSpec

# Half of the L2 cache for the keys and values that one section of tiles shares; the other half is
# for queries, outputs and what other sections still hold.
_L2_SHARE_OF_KV = 0.5

# What a section beyond that share may cost before it is preferred for its balance: an estimate; the
# full mask lost 3 to 5 % at 16,384 tokens with one section (H200, 2026-11-29).
_L2_MISS_COST = 1.03

# Work of a tile besides its key blocks (first scores, last product, output), in key blocks.
_TILE_OVERHEAD = 2

_MAX_COUNTED_TILES = 1 << 17


@dataclass(frozen=True)
class TilePlan:
    """The scheduling part of a launch.

    Attributes:
        num_m_blocks: tiles along the queries of one head (a cluster's blocks share a tile).
        num_tiles: of all heads and batches.
        num_blocks: the grid.
        section_heads: (batch, query head) pairs scheduled together.
    """

    num_m_blocks: int
    num_tiles: int
    num_blocks: int
    section_heads: int


@functools.lru_cache(maxsize=1024)
def plan_tiles(problem: Problem, spec: KernelSpec, device: DeviceInfo) -> TilePlan:
    """Counts and orders the tiles of ``problem`` for a kernel on a device.

    ``problem.num_sms`` is for persistent kernels; ``select`` gives it no other.
    """
    rows = spec.block_m * spec.cluster
    num_m_blocks = -(-problem.seqlen_q // rows)
    num_tiles = num_m_blocks * problem.heads_q * problem.batch
    if spec.scheduler == "persistent":
        num_sms = min(problem.num_sms or device.num_sms, device.num_sms)
        slots = max(num_sms * spec.min_blocks // spec.cluster, 1)
    else:
        slots = num_tiles
    slots = min(slots, num_tiles)
    fitting = _fitting_heads(problem, device)
    if spec.scheduler == "persistent" and spec.mask != "none":
        heads = _balanced_heads(problem, spec, num_m_blocks, slots, fitting)
    else:
        heads = fitting
    # section * num_m_blocks is a 32-bit product in the kernel.
    heads = max(min(heads, (2**31 - 1) // max(num_m_blocks, 1)), 1)
    return TilePlan(num_m_blocks, num_tiles, slots * spec.cluster, heads)


def _fitting_heads(problem: Problem, device: DeviceInfo) -> int:
    """(batch, query head) pairs whose keys and values fit the L2 cache; whole groups that share a
    key head."""
    row_bytes = (problem.head_dim_qk + problem.head_dim_v) * problem.dtype.itemsize
    kv_bytes = max(problem.seqlen_kv * row_bytes, 1)
    kv_heads = max(int(device.l2_bytes * _L2_SHARE_OF_KV) // kv_bytes, 1)
    return min(kv_heads * problem.group, problem.batch * problem.heads_q)


def _blocks_visited(problem: Problem, spec: KernelSpec, num_m_blocks: int) -> numpy.ndarray:
    """Key blocks that each tile of a head visits, by its query block (``attn/blocks.cuh``)."""
    rows = spec.block_m * spec.cluster
    begin = numpy.arange(num_m_blocks, dtype=numpy.int64) * rows
    last = numpy.minimum(begin + rows, problem.seqlen_q) - 1
    end = numpy.minimum(problem.seqlen_kv, last + problem.shift + problem.window_right + 1)
    first = numpy.maximum(0, begin + problem.shift - problem.window_left)
    return numpy.where(end > first, -(-end // spec.block_n) - first // spec.block_n, 0)


def _balanced_heads(
    problem: Problem, spec: KernelSpec, num_m_blocks: int, slots: int, fitting: int
) -> int:
    """The section that ends first, by the count of key blocks on the busiest slot."""
    heads = problem.heads_q * problem.batch
    if num_m_blocks * heads > _MAX_COUNTED_TILES or slots <= 1:
        return fitting
    # The last query block comes first.
    work = _blocks_visited(problem, spec, num_m_blocks)[::-1] + _TILE_OVERHEAD
    sections = sorted({*(1 << n for n in range(heads.bit_length())), fitting, heads})
    costs = {
        section: _busiest(work, heads, section, slots)
        * (1.0 if section <= fitting else _L2_MISS_COST)
        for section in sections
        if section <= heads
    }
    return min(costs, key=lambda section: (costs[section], section))


def _busiest(work: numpy.ndarray, heads: int, section: int, slots: int) -> int:
    """Work of the slot that gets most, the tiles dealt out as ``PersistentStatic`` does."""
    order = [numpy.repeat(work, min(section, heads - first)) for first in range(0, heads, section)]
    tiles = numpy.concatenate(order)
    waves = -(-len(tiles) // slots)
    dealt = numpy.zeros((waves, slots), numpy.int64)
    dealt.reshape(-1)[: len(tiles)] = tiles
    # Odd waves are walked from the back: position p of the wave is tile slots - 1 - p.
    dealt[1::2] = dealt[1::2, ::-1]
    return int(dealt.sum(axis=0).max())
