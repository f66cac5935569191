// Before the main kernel of a backward pass over 8-bit floats: backward_delta.cuh for dout that is
// e4m3 with scales, and with the scales of queries made part of what each row has anyway.
//
//   row_lse      lse in units of log2, less log2 of the scale of dout; +inf, which makes every
//                weight 0, for queries without keys (lse = -inf) and for rows that are no queries
//   row_delta    delta * scale of q / scale of dout; 0 for the same rows
//   slot_scales  of each slot of queries the scale of q and its inverse
//   dq_sums, dq_turns, the tile counter of a kernel with turns: zeros
//
// delta is the caller's, or rowsum(dout * out) - dlse of the dequantized dout. A scale serves whole
// slots (Note [Query slots]): its block of tokens is no smaller.
//
// CTAs stride over the slots of all query heads; eight lanes of a warp share a row, sixteen columns
// at a time. No shared memory, no barrier.
#pragma once
#include "any/pieces.cuh"
#include "attn/query_rows.cuh"
#include "backward_fp8_params.cuh"
#include "ptx/ptx.cuh"

namespace cf::any {

inline constexpr float kLog2OfE = 1.44269504088896341f;
inline constexpr int kRowLanesLog2 = 3;
inline constexpr int kRowColumns = 16;  // of a lane at a time: 16 bytes of dout, 32 of out

// Exactly. The fraction and exponent of e4m3 are those of a float32 whose exponent is 120 less.
CF_DEVICE float widen_e4m3(uint32_t bits) {
  constexpr float kBias = 0x1p120f;
  const uint32_t magnitude = bits & 0x7fu;
  const float value = ptx::mul(ptx::bits_float(magnitude << 20), kBias);
  const float number = magnitude == 0x7fu ? ptx::bits_float(0x7fffffffu) : value;
  return (bits & 0x80u) != 0 ? -number : number;
}

// Of a row, rowsum(dout * out) of this lane's columns, dout without its scale.
template <class Element>
CF_DEVICE float dot_row_fp8(const BackwardParams& params, const Lanes& lanes, int batch, int row,
                            int head) {
  const auto* dout = static_cast<const uint8_t*>(params.dout) + batch * params.dout_stride_batch +
                     row * params.dout_stride_seqlen + head * params.dout_stride_head;
  const auto* out = static_cast<const Element*>(params.out) + batch * params.out_stride_batch +
                    row * params.out_stride_seqlen + head * params.out_stride_head;
  float sum = 0.0f;
  CF_NO_UNROLL
  for (int column = lanes.rank() * kRowColumns; column < params.head_dim_v;
       column += lanes.count() * kRowColumns) {
    const u32x4 numbers = ptx::ldg128(dout + column);
    const uint32_t words[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
    CF_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (column + 8 * half >= params.head_dim_v) break;
      Piece<Element, true> piece;
      piece.load(out + column + 8 * half);
      float values[8];
      piece.widen(values);
      CF_UNROLL
      for (int i = 0; i < 8; ++i) {
        sum = ptx::fma(widen_e4m3(words[2 * half + i / 4] >> 8 * (i % 4)), values[i], sum);
      }
    }
  }
  return sum;
}

template <class Config>
CF_DEVICE void prepare_slot_fp8(const BackwardFp8Params& params, int flat) {
  constexpr int kWarps = Config::kThreads / 32;
  const BackwardParams& base = params.base;
  const Lanes lanes{kRowLanesLog2};
  const int block_m = base.block_m;
  const int head = flat / base.num_slots;
  const SlotRows rows(base, flat - head * base.num_slots, block_m);
  const float q_scale =
      scale_at(params.q_scale, params.q_scales, rows.array_batch, head, rows.begin);
  const float dout_scale =
      scale_at(params.dout_scale, params.dout_scales, rows.array_batch, head, rows.begin);
  if (ptx::tid() == 0) {
    ptx::stg128(params.slot_scales + 4 * static_cast<int64_t>(flat),
                {ptx::float_bits(q_scale), ptx::float_bits(1.0f / q_scale), 0, 0});
    if (base.dq_turns != nullptr) ptx::stg32(base.dq_turns + flat, 0);
  }
  const int slot_floats = block_m * base.width_qk;  // a multiple of 4
  float* sums = base.dq_sums + static_cast<int64_t>(flat) * slot_floats;
  CF_NO_UNROLL
  for (int i = 4 * ptx::tid(); i < slot_floats; i += 4 * Config::kThreads) {
    ptx::stg128(sums + i, u32x4{0, 0, 0, 0});
  }
  const float shift = ptx::lg2(dout_scale), factor = q_scale / dout_scale;
  const int rows_at_once = 32 >> kRowLanesLog2;
  CF_NO_UNROLL
  for (int first = ptx::warp() * rows_at_once; first < block_m; first += kWarps * rows_at_once) {
    const int row = first + lanes.row(), position = rows.begin + row;
    const bool exists = row < rows.count;
    float dot = 0.0f;
    if (exists && base.delta == nullptr) {
      dot = dot_row_fp8<typename Config::Element>(base, lanes, rows.array_batch, position, head);
    }
    dot = lanes.sum(dot) * dout_scale;
    if (lanes.rank() != 0 || row >= block_m) continue;
    float lse = ptx::kInfinity, delta = 0.0f;
    if (exists) {
      const auto read = [&](const float* p, int64_t by_batch, int64_t by_head, int64_t by_row) {
        return ptx::bits_float(ptx::ldg32(p + rows.array_batch * by_batch + head * by_head +
                                          position * by_row));
      };
      const float given =
          read(base.lse, base.lse_stride_batch, base.lse_stride_head, base.lse_stride_seqlen);
      if (given != -ptx::kInfinity) {
        lse = ptx::mul(given, kLog2OfE) - shift;
        delta = dot;
        if (base.delta != nullptr) {
          delta = read(base.delta, base.delta_stride_batch, base.delta_stride_head,
                       base.delta_stride_seqlen);
        }
        if (base.dlse != nullptr) {
          delta -= read(base.dlse, base.dlse_stride_batch, base.dlse_stride_head,
                        base.dlse_stride_seqlen);
        }
        delta = ptx::mul(delta, factor);
      }
    }
    const int64_t place = static_cast<int64_t>(flat) * block_m + row;
    ptx::stg_f32(base.row_lse + place, lse);
    ptx::stg_f32(base.row_delta + place, delta);
  }
}

// The body of the kernel.
template <class Config>
CF_DEVICE void backward_delta_fp8(const BackwardFp8Params& params) {
  const BackwardParams& base = params.base;
  if (base.dq_turns != nullptr && ptx::cta_idx() == 0 && ptx::tid() == 0) {
    ptx::stg32(base.tile_counter, 0);
  }
  CF_NO_UNROLL
  for (int flat = ptx::cta_idx(); flat < base.heads_q * base.num_slots; flat += ptx::num_ctas()) {
    prepare_slot_fp8<Config>(params, flat);
  }
}

}  // namespace cf::any
