// Which tiles a CTA (or a cluster of CTAs, on neighbouring query blocks) works on, and in which
// order.
//
// Tiles are numbered so that (batch, head) pairs come in sections whose keys and values fit in the
// L2 cache together; within a section the query blocks run from the longest to the shortest (under
// a right-bounded mask: last block first) with the heads innermost, so that CTAs that run at the
// same time share keys and values, and the tail is short.
#pragma once
#include "params.cuh"
#include "ptx/ptx.cuh"
#include "tile/math.cuh"

namespace cf {

struct WorkTile {
  int m_block;  // in units of one scheduling slot's query rows (all CTAs of a cluster together)
  int head_q, head_kv, batch;
};

template <class Mask>
CF_DEVICE WorkTile decode_tile(const ForwardParams& params, int tile) {
  const int per_section = params.section_heads * params.num_m_blocks;
  const int section = tile / per_section;
  const int first_head = section * params.section_heads;
  const int heads = min(params.section_heads, params.batch * params.heads_q - first_head);
  const int rest = tile - section * per_section;
  const int row = rest / heads;
  const int flat_head = first_head + rest - row * heads;
  WorkTile work;
  work.m_block = Mask::kHasRight ? params.num_m_blocks - 1 - row : row;
  work.batch = flat_head / params.heads_q;
  work.head_q = flat_head - work.batch * params.heads_q;
  work.head_kv = work.head_q / params.group;
  return work;
}

// A scheduler walks this slot's tiles; its state is one integer. `slot` of `slots` is this CTA of
// the grid (or this cluster). Usage:
//   for (Scheduler s; s.valid(params, slot, slots); s.next()) ... s.tile(slot, slots) ...

// One tile a slot: the hardware starts the next CTA where one ends.
struct SingleTile {
  int step = 0;
  CF_DEVICE int tile(int slot, int slots) const { return slot; }
  CF_DEVICE bool valid(const ForwardParams& params, int slot, int slots) const {
    return step == 0 && slot < params.num_tiles;
  }
  CF_DEVICE void next() { step = 1; }
};

// As many slots as the device holds; each takes one tile of every wave, from the front of even
// waves and from the back of odd ones, so that no slot always gets the longer tiles of a descending
// order.
struct PersistentStatic {
  int step = 0;  // wave
  // No overflow: num_tiles plus one wave stays below 2^31 (the host checks).
  CF_DEVICE int tile(int slot, int slots) const {
    return step * slots + ((step & 1) != 0 ? slots - 1 - slot : slot);
  }
  CF_DEVICE bool valid(const ForwardParams& params, int slot, int slots) const {
    return tile(slot, slots) < params.num_tiles;
  }
  CF_DEVICE void next() { ++step; }
};

}  // namespace cf
