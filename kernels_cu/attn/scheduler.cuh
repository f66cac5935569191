// Which tiles there are, and in which order a CTA (or a cluster of CTAs that share keys) works on
// them.
//
// Tiles are numbered so that (batch, head) pairs come in sections whose keys and values fit in the
// L2 cache together; within a section the query blocks run from the longest to the shortest (under
// a right-bounded mask: last block first) with the heads innermost, so that CTAs that run at the
// same time share keys and values. The last section is larger: all its long tiles come before all
// its short ones, so that the CTAs end together.
//
// Packed sequences come one after the other. Sequence b owns the query blocks (slots, some of them
// empty) from cu_seqlens_q[b] / rows + b up to the same of b + 1: at least as many as it needs, a
// sum that no prefix scan is needed for, and total / rows + batch in all, which the host knows.
#pragma once
#include "attn/sequence.cuh"
#include "params.cuh"
#include "ptx/ptx.cuh"
#include "tile/math.cuh"

namespace cf {

struct WorkTile {
  int m_block;  // in units of one scheduling slot's query rows; -1: there is no such tile
  int head;     // in units of the heads that a slot works on together
  int batch;
};

// Tile `tile` of sequences that are not packed. `heads`: of one sequence, in a slot's units.
template <class Mask>
CF_DEVICE WorkTile decode_tile(const ForwardParams& params, int tile, int heads) {
  const int tail_head = params.batch * heads - params.tail_heads;  // a multiple of section_heads
  int first_head = tail_head, section_heads = params.tail_heads;
  if (tile < tail_head * params.num_m_blocks) {
    section_heads = params.section_heads;
    first_head = tile / (section_heads * params.num_m_blocks) * section_heads;
  }
  const int rest = tile - first_head * params.num_m_blocks;
  const int row = rest / section_heads;
  const int flat_head = first_head + rest - row * section_heads;
  WorkTile work;
  work.m_block = Mask::kHasRight ? params.num_m_blocks - 1 - row : row;
  work.batch = flat_head / heads;
  work.head = flat_head - work.batch * heads;
  return work;
}

// The first query block of packed sequence `batch`, of `rows` queries each.
CF_DEVICE int first_slot(const int32_t* starts, int total, int batch, int rows) {
  return clamp(read_or(starts, batch, 0), 0, total) / rows + batch;
}
CF_DEVICE int first_slot(const ForwardParams& params, int batch, int rows) {
  return first_slot(params.cu_seqlens_q, params.rows_q, batch, rows);
}

// Tile `tile` of packed sequences, of `rows` queries.
template <class Mask>
CF_DEVICE WorkTile decode_packed_tile(const ForwardParams& params, int tile, int heads, int rows) {
  const int slot = tile / heads;
  int low = 0, high = params.batch;  // first_slot(low) <= slot < first_slot(high)
  // The first test is for starts that are not those of a packing.
  if (high == 0 || slot < first_slot(params, 0, rows) || slot >= first_slot(params, high, rows)) {
    return {-1, 0, 0};
  }
  while (high - low > 1) {
    const int middle = (low + high) >> 1;
    if (first_slot(params, middle, rows) <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const DeviceSequence sequence(params, low);
  const int first = first_slot(params, low, rows);
  const int slots = first_slot(params, low + 1, rows) - first;
  const int needed = ceil_div(sequence.seqlen_q(), rows);
  const int group =
      params.group * heads >= params.heads_q ? params.group * heads / params.heads_q : 1;
  const int fitting = max(params.section_rows / max(sequence.seqlen_kv(), 1), 1) * group;
  const int section_heads = min(fitting, heads);
  const int per_section = section_heads * slots;
  const int rest_of_sequence = tile - first * heads;
  const int section = rest_of_sequence / per_section;
  const int first_head = section * section_heads;
  const int here = min(section_heads, heads - first_head);
  const int rest = rest_of_sequence - section * per_section;
  const int row = rest / here;
  WorkTile work;
  work.m_block = row >= needed ? -1 : Mask::kHasRight ? needed - 1 - row : row;
  work.batch = low;
  work.head = first_head + rest - row * here;
  return work;
}

// Tile `tile` of sequences packed or not: only a general kernel is ever given packed ones, and all
// of a launch are of one kind.
template <class Config, class Mask>
CF_DEVICE WorkTile decode(const ForwardParams& params, int tile, int heads, int rows) {
  if constexpr (Config::kGeneral != 0) {
    if (params.cu_seqlens_q != nullptr) {
      return decode_packed_tile<Mask>(params, tile, heads, rows);
    }
  }
  return decode_tile<Mask>(params, tile, heads);
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
