// Rows of the output that no product reaches: tiles without keys, and what no sequence uses.
#pragma once
#include "attn/sequence.cuh"
#include "params.cuh"
#include "ptx/ptx.cuh"
#include "tile/math.cuh"

namespace cf {

// One warp: zeros in rows [begin, end) of a head's output if `clear`, -inf in its log-sum-exps.
// Rows count from the start of array batch `batch`.
template <class Element>
CF_DEVICE void write_empty_rows(const ForwardParams& params, int batch, int head, int begin,
                                int end, bool clear) {
  if (clear) {
    const int granules = params.head_dim_v / 8;  // of 16 bytes
    auto* out = static_cast<Element*>(params.out) + batch * params.out_stride_batch +
                head * params.out_stride_head;
    CF_NO_UNROLL
    for (int row = begin; row < end; ++row) {
      if (ptx::lane() < granules) {
        ptx::stg128(out + row * params.out_stride_seqlen + 8 * ptx::lane(), u32x4{0, 0, 0, 0});
      }
    }
  }
  if (params.lse == nullptr) return;
  float* lse = params.lse + batch * params.lse_stride_batch + head * params.lse_stride_head;
  CF_NO_UNROLL
  for (int row = begin + ptx::lane(); row < end; row += 32) {
    ptx::stg_f32(lse + row, -ptx::kInfinity);
  }
}

// Every row that belongs to no sequence: those beyond what is used of each, and those behind the
// last packed one. Called by one warp of each of `workers` CTAs, which share the work: by sequence
// where there are many, by head where there are few.
template <class Element>
CF_DEVICE void write_padding(const ForwardParams& params, int worker, int workers) {
  if (params.clear_out == 0 && params.lse == nullptr) return;
  const bool packed = params.cu_seqlens_q != nullptr;
  const int sequences = max(params.batch, packed ? 1 : 0);  // without any, all rows are padding
  const bool by_head = sequences < workers;
  CF_NO_UNROLL
  for (int first = by_head ? 0 : 32 * worker; first < sequences;
       first += by_head ? 32 : 32 * workers) {
    const int own = first + ptx::lane();
    int begin = 0, end = 0;
    if (own < params.batch) {
      const DeviceSequence sequence(params, own);
      begin = sequence.q_begin() + sequence.seqlen_q();
      end = params.rows_q;
      if (packed && own + 1 < params.batch) {
        end = clamp(read_or(params.cu_seqlens_q, own + 1, 0), begin, params.rows_q);
      }
    } else if (own == 0) {
      end = params.rows_q;
    }
    uint32_t padded = ptx::vote_ballot(begin < end);
    CF_NO_UNROLL
    for (int lane = 0; padded != 0; ++lane, padded >>= 1) {
      if ((padded & 1) == 0) continue;
      const int from = static_cast<int>(ptx::shfl_idx(static_cast<uint32_t>(begin), lane));
      const int to = static_cast<int>(ptx::shfl_idx(static_cast<uint32_t>(end), lane));
      CF_NO_UNROLL
      for (int head = by_head ? worker : 0; head < params.heads_q; head += by_head ? workers : 1) {
        write_empty_rows<Element>(params, packed ? 0 : first + lane, head, from, to,
                                  params.clear_out != 0);
      }
    }
  }
}

}  // namespace cf
