// Before the main kernel of a backward pass: what it needs to know of each query, and zeros to add
// dq up in.
//
//   row_lse    lse in units of log2; +inf, which makes every weight 0, for queries without keys
//              (lse = -inf) and for rows of a slot that are no queries
//   row_delta  delta = rowsum(dout * out) - dlse, or the caller's (Dao et al. 2022, arXiv
//              2205.14135, appendix B.4); 0 for the same rows
//   dq_sums, dq_turns, the tile counter of a kernel with turns: zeros
//   dout       copied from dout_given where the main kernel cannot address it there (copy_dout)
//
// CTAs stride over the slots (Note [Query slots]) of all query heads; sixteen lanes of a warp share
// a row. No shared memory, no barrier; the lanes of a warp stay together for its shuffles.
#pragma once
#include "any/pieces.cuh"
#include "attn/query_rows.cuh"
#include "backward_params.cuh"
#include "ptx/ptx.cuh"

namespace cf::any {

inline constexpr float kLog2OfE = 1.44269504088896341f;
inline constexpr int kRowLanesLog2 = 4;

// A row of out and dout: rowsum(dout * out) of the lanes' columns, dout copied on the way.
template <class Element, bool kVectors>
CF_DEVICE float dot_row(const BackwardParams& params, const Lanes& lanes, int batch, int row,
                        int head) {
  using Elements = Piece<Element, kVectors>;
  const auto* given = static_cast<const Element*>(params.dout_given) +
                      batch * params.dout_given_stride_batch +
                      row * params.dout_given_stride_seqlen + head * params.dout_given_stride_head;
  const auto* out = static_cast<const Element*>(params.out) + batch * params.out_stride_batch +
                    row * params.out_stride_seqlen + head * params.out_stride_head;
  auto* copy = static_cast<Element*>(const_cast<void*>(params.dout)) +
               batch * params.dout_stride_batch + row * params.dout_stride_seqlen +
               head * params.dout_stride_head;
  const bool needs_dot = params.delta == nullptr;
  float sum = 0.0f;
  if (!needs_dot && params.copy_dout == 0) return sum;
  CF_NO_UNROLL
  for (int column = lanes.rank() * Elements::kCount; column < params.head_dim_v;
       column += lanes.count() * Elements::kCount) {
    Elements gradient;
    gradient.load(given + column * params.dout_given_stride_dim);
    if (params.copy_dout != 0) gradient.store(copy + column);
    if (!needs_dot) continue;
    Elements value;
    value.load(out + column);
    float a[Elements::kCount], b[Elements::kCount];
    gradient.widen(a);
    value.widen(b);
    CF_UNROLL
    for (int i = 0; i < Elements::kCount; ++i) sum = ptx::fma(a[i], b[i], sum);
  }
  return sum;
}

template <class Config, bool kVectors>
CF_DEVICE void prepare_slots(const BackwardParams& params) {
  constexpr int kWarps = Config::kThreads / 32;
  const Lanes lanes{kRowLanesLog2};
  const int rows_at_once = 32 >> kRowLanesLog2;
  const int block_m = params.block_m;
  const int slots = params.heads_q * params.num_slots;
  const int slot_floats = block_m * params.width_qk;  // a multiple of 4
  if (params.dq_turns != nullptr && ptx::cta_idx() == 0 && ptx::tid() == 0) {
    ptx::stg32(params.tile_counter, 0);
  }
  CF_NO_UNROLL
  for (int flat = ptx::cta_idx(); flat < slots; flat += ptx::num_ctas()) {
    const int head = flat / params.num_slots;
    const SlotRows rows(params, flat - head * params.num_slots, block_m);
    float* sums = params.dq_sums + static_cast<int64_t>(flat) * slot_floats;
    const int sum_floats = params.dq_sums != nullptr ? slot_floats : 0;
    CF_NO_UNROLL
    for (int i = 4 * ptx::tid(); i < sum_floats; i += 4 * Config::kThreads) {
      ptx::stg128(sums + i, u32x4{0, 0, 0, 0});
    }
    if (params.dq_turns != nullptr && ptx::tid() == 0) ptx::stg32(params.dq_turns + flat, 0);
    CF_NO_UNROLL
    for (int first = ptx::warp() * rows_at_once; first < block_m; first += kWarps * rows_at_once) {
      const int row = first + lanes.row();
      const bool exists = row < rows.count;
      float dot = 0.0f;
      if (exists) {
        dot = dot_row<typename Config::Element, kVectors>(params, lanes, rows.array_batch,
                                                          rows.begin + row, head);
      }
      dot = lanes.sum(dot);
      if (lanes.rank() != 0 || row >= block_m) continue;
      float lse = ptx::kInfinity, delta = 0.0f;
      if (exists) {
        const int position = rows.begin + row;
        const auto at = [&](int64_t by_batch, int64_t by_head, int64_t by_row) {
          return rows.array_batch * by_batch + head * by_head + position * by_row;
        };
        const float given = ptx::bits_float(ptx::ldg32(
            params.lse +
            at(params.lse_stride_batch, params.lse_stride_head, params.lse_stride_seqlen)));
        if (given != -ptx::kInfinity) {
          lse = given * kLog2OfE;
          delta = dot;
          if (params.delta != nullptr) {
            delta = ptx::bits_float(ptx::ldg32(
                params.delta + at(params.delta_stride_batch, params.delta_stride_head,
                                  params.delta_stride_seqlen)));
          }
          if (params.dlse != nullptr) {
            delta -= ptx::bits_float(ptx::ldg32(
                params.dlse + at(params.dlse_stride_batch, params.dlse_stride_head,
                                 params.dlse_stride_seqlen)));
          }
        }
      }
      const int64_t place = static_cast<int64_t>(flat) * block_m + row;
      ptx::stg_f32(params.row_lse + place, lse);
      ptx::stg_f32(params.row_delta + place, delta);
    }
  }
}

// The body of the kernel.
template <class Config>
CF_DEVICE void backward_delta(const BackwardParams& params) {
  if (params.vectors != 0) {
    prepare_slots<Config, true>(params);
  } else {
    prepare_slots<Config, false>(params);
  }
}

}  // namespace cf::any
