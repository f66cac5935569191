// dq on its way out of a backward kernel for Hopper that adds it up in global memory: consumers
// hand their parts over in shared memory, one warp adds them by bulk reductions. backward.cuh has
// the pipeline; a kernel's BackwardLayout says where the parts lie and which warpgroup has which.
#pragma once
#include "attn/query_blocks.cuh"
#include "backward_params.cuh"
#include "ptx/ptx.cuh"
#include "sm90/backward_tiles.cuh"
#include "tile/pipeline.cuh"

namespace cf::sm90 {

// This warpgroup's part of dQ to the writer, in the order of DqOrder: units of its accumulators.
template <class Config, int kColumns>
CF_DEVICE void hand_over_sums(saddr smem, int warpgroup, const RingPlace<1>& place,
                              const float (&sums)[kColumns / 2]) {
  using Layout = BackwardLayout<Config>;
  if constexpr (kKept<kNoSumsEmptyWait>) {
    ptx::mbarrier_wait(barrier_at(smem + Layout::kSumsEmpty, warpgroup), place.phase ^ 1);
  }
  const saddr part = smem + static_cast<uint32_t>(Layout::kSums + warpgroup * Layout::kPartBytes +
                                                  16 * (ptx::tid() % kWarpgroupThreads));
  CF_UNROLL
  for (int i = 0; i < kColumns / 8; ++i) {
    ptx::sts128(part + 16 * kWarpgroupThreads * i,
                {ptx::float_bits(sums[4 * i]), ptx::float_bits(sums[4 * i + 1]),
                 ptx::float_bits(sums[4 * i + 2]), ptx::float_bits(sums[4 * i + 3])});
  }
  if constexpr (kKept<kNoSumsFence>) ptx::fence_proxy_async();
  ptx::warp_sync();
  if (ptx::lane() == 0) ptx::mbarrier_arrive(barrier_at(smem + Layout::kSumsFull, warpgroup));
}

// One warp: adds each warpgroup's part of dQ to its slot, a bulk reduction each. With turns, waits
// for this key block's, and passes it on once both parts have been added.
template <class Config>
struct Writer {
  using Layout = BackwardLayout<Config>;

  const BackwardParams& params;
  const saddr smem;
  TileStream<Config> stream;
  RingPlace<1> place;  // of both parts

  CF_DEVICE saddr part(int w) const {
    return smem + static_cast<uint32_t>(Layout::kSums + w * Layout::kPartBytes);
  }
  CF_DEVICE void release(int w) const {
    ptx::mbarrier_arrive(barrier_at(smem + Layout::kSumsEmpty, w));
  }

  CF_DEVICE void run() {
    for (;;) {
      const TileSlot<Config> tile = stream.await();
      const int count = ptx::warp_uniform(tile.count());
      if (count < 0) break;
      // The slot of the tile's first query block, of the query head at hand.
      int slot = ptx::warp_uniform(tile.head_kv()) * params.group * params.num_slots +
                 ptx::warp_uniform(tile.first_slot()) + ptx::warp_uniform(tile.first());
      CF_NO_UNROLL
      for (int head = 0; head < params.group; ++head, slot += params.num_slots) {
        int block = ptx::warp_uniform(tile.start());
        CF_NO_UNROLL
        for (int left = count; left > 0; --left) {
          add(slot + block, block, tile);
          place.advance();
          if (++block == count) block = 0;
        }
      }
      ptx::warp_sync();  // all lanes have read the tile
      if (ptx::lane() == 0) stream.release();
      stream.place.advance();
    }
    if (ptx::lane() == 0) ptx::tma_wait<0>();
  }
  // Both parts to a slot, that of the tile's query block `block`.
  CF_DEVICE void add(int slot, int block, const TileSlot<Config>& tile) const {
    const bool elected = ptx::lane() == 0;
    if (elected && params.dq_turns != nullptr) {
      const int turn = turn_of<typename Config::Mask, Config::kBlockM, Config::kBlockN>(
          tile.sequence(params), tile.first() + block, tile.key_begin() / Config::kBlockN);
      while (ptx::ldg_acquire(params.dq_turns + slot) != turn) {
      }
    }
    CF_UNROLL
    for (int w = 0; w < kConsumers; ++w) {
      if constexpr (kKept<kNoSumsFullWait>) {
        await_as_warp(barrier_at(smem + Layout::kSumsFull, w), place.phase);
      }
      if (!elected) continue;
      constexpr int kSlotFloats = Config::kBlockM * Config::kHeadDimQk;
      const int64_t offset =
          static_cast<int64_t>(slot) * kSlotFloats + w * (Layout::kPartBytes / 4);
      ptx::bulk_reduce_add_f32(params.dq_sums + offset, part(w),
                               static_cast<uint32_t>(Layout::part_bytes(w)));
      ptx::tma_commit();
      if constexpr (!kKept<kEarlySumsRelease>) release(w);
    }
    if (!elected) return;
    if (params.dq_turns != nullptr) {
      ptx::tma_wait<0>();
      ptx::red_add_release(params.dq_turns + slot, 1);
    }
    if constexpr (kKept<kEarlySumsRelease>) {
      ptx::tma_wait_read<1>();
      release(0);
      ptx::tma_wait_read<0>();
      release(1);
    }
  }
};

}  // namespace cf::sm90
