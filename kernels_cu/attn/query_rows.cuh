// The slots of a backward pass one after another: which queries lie in each. For the kernels before
// and after the main one, which serve sequences of every kind.
#pragma once
#include "attn/query_slots.cuh"
#include "attn/scheduler.cuh"
#include "attn/sequence.cuh"
#include "backward_params.cuh"
#include "tile/math.cuh"

namespace cf {

// Rows [0, count) of a slot are queries of one sequence; they lie at `begin` on along seqlen.
struct SlotRows {
  int array_batch;  // index into the arrays: packed sequences share one batch
  int begin, count;

  CF_DEVICE SlotRows(const BackwardParams& params, int slot, int block_m)
      : array_batch(0), begin(0), count(0) {
    int batch = 0, m_block = 0;
    if (params.cu_seqlens_q == nullptr) {
      batch = slot / params.num_m_blocks;
      m_block = slot - batch * params.num_m_blocks;
      array_batch = batch;
    } else {
      const auto first = [&](int b) {
        return first_slot(params.cu_seqlens_q, params.rows_q, b, block_m);
      };
      int low = 0, high = params.batch;  // first(low) <= slot < first(high)
      if (high == 0 || slot < first(0) || slot >= first(high)) return;
      while (high - low > 1) {
        const int middle = (low + high) >> 1;
        (first(middle) <= slot ? low : high) = middle;
      }
      batch = low;
      m_block = slot - first(low);
    }
    const DeviceSequence sequence(params, batch);
    begin = sequence.q_begin() + m_block * block_m;
    count = clamp(sequence.seqlen_q() - m_block * block_m, 0, block_m);
  }
};

}  // namespace cf
