// Rows of gradients that no product reaches because they belong to no sequence: attn/padding.cuh of
// the backward pass.
#pragma once
#include "attn/grads.cuh"
#include "attn/sequence.cuh"
#include "backward_params.cuh"
#include "ptx/ptx.cuh"
#include "tile/math.cuh"

namespace cf {

// CTAs that look for rows of no sequence, at most: where there are more, most would look in vain.
inline constexpr int kGradPaddingWorkers = 256;

// Calls `clear(batch, head, begin, end)` (batch: of the arrays) for the rows beyond what is used of
// each sequence, and behind the last packed one, of queries or of keys. Called by one warp of each
// of `workers` CTAs, which share the work: by sequence where there are many, by head where there
// are few.
template <bool kQueries, class Clear>
CF_DEVICE void for_padding(const BackwardParams& params, int worker, int workers,
                           const Clear& clear) {
  const int32_t* starts = kQueries ? params.cu_seqlens_q : params.cu_seqlens_kv;
  const int all_rows = kQueries ? params.rows_q : params.rows_kv;
  const int heads = kQueries ? params.heads_q : params.heads_kv;
  const bool packed = starts != nullptr;
  const int sequences = max(params.batch, packed ? 1 : 0);  // without any, all rows are padding
  const bool by_head = sequences < workers;
  CF_NO_UNROLL
  for (int first = by_head ? 0 : 32 * worker; first < sequences;
       first += by_head ? 32 : 32 * workers) {
    const int own = first + ptx::lane();
    int begin = 0, end = 0;
    if (own < params.batch) {
      const DeviceSequence sequence(params, own);
      begin = kQueries ? sequence.q_begin() + sequence.seqlen_q()
                       : sequence.kv_begin() + sequence.seqlen_kv();
      end = all_rows;
      if (packed && own + 1 < params.batch) {
        end = clamp(read_or(starts, own + 1, 0), begin, all_rows);
      }
    } else if (own == 0) {
      end = all_rows;
    }
    uint32_t padded = ptx::vote_ballot(begin < end);
    CF_NO_UNROLL
    for (int lane = 0; padded != 0; ++lane, padded >>= 1) {
      if ((padded & 1) == 0) continue;
      const int from = static_cast<int>(ptx::shfl_idx(static_cast<uint32_t>(begin), lane));
      const int to = static_cast<int>(ptx::shfl_idx(static_cast<uint32_t>(end), lane));
      CF_NO_UNROLL
      for (int head = by_head ? worker : 0; head < heads; head += by_head ? workers : 1) {
        clear(packed ? 0 : first + lane, head, from, to);
      }
    }
  }
}

// Zeros in the rows of dk and dv that belong to no sequence, if params.clear_grads.
template <class Element>
CF_DEVICE void write_grad_padding(const BackwardParams& params, int worker, int workers) {
  if (params.clear_grads == 0) return;
  for_padding<false>(params, worker, workers, [&](int batch, int head, int begin, int end) {
    write_zero_grads<Element>(params, batch, head, begin, end);
  });
}
// The same in dq.
template <class Element>
CF_DEVICE void write_query_padding(const BackwardParams& params, int worker, int workers) {
  if (params.clear_grads == 0) return;
  for_padding<true>(params, worker, workers, [&](int batch, int head, int begin, int end) {
    write_zero_rows<Element>(params, params.dq, params.dq_stride_batch, params.dq_stride_seqlen,
                             params.dq_stride_head, params.head_dim_qk, batch, head, begin, end);
  });
}

}  // namespace cf
