// The launch parameters of a backward pass over 8-bit floats: those of the 16-bit one and what
// quantized tensors have more, mirrored by cupyflash/params.py.
//
//   backward_delta_fp8  what the main kernel needs to know of each query and of each slot; sets
//                       dq_sums and dq_turns to zero
//   backward_fp8        dk and dv; adds up dq in dq_sums
//   backward_convert    dq from dq_sums; it gets `base` alone
//
// In `base` q, k, v and dout are e4m3, all with tokens before channels (data of "q", "k", "dout",
// data_t of "v"); out and the gradients are 16-bit (gradients: or float32).
#pragma once
#include "backward_params.cuh"
#include "ptx/ptx.cuh"
#include "types.cuh"

namespace cf {

// Where the scale of a token lies: at batch, head, token / tokens of a block. Strides of dimensions
// that scales do not have are 0.
struct ScaleStrides {
  int64_t batch, head, block;
  int64_t tokens_log2;
};

struct BackwardFp8Params {
  // Rank 4, dims {tokens, channels, heads, batch}, tokens of sixteen in the order that fp8.py says.
  CUtensorMap q_t_map, k_t_map, dout_t_map;

  const void* q_t;     // e4m3 [batch, heads_q, head_dim, tokens]
  const void* k_t;     // e4m3 [batch, heads_kv, head_dim, tokens]
  const void* dout_t;  // e4m3 [batch, heads_q, head_dim, tokens]
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
  const float* dout_scale;
  float* slot_scales;  // [heads_q, num_slots, 4]: scale of q, its inverse, nothing, nothing
  ScaleStrides q_scales, k_scales, v_scales, dout_scales;

  BackwardParams base;
};

// The scale of token `token` of a sequence.
CF_DEVICE float scale_at(const float* scale, const ScaleStrides& strides, int batch, int head,
                         int token) {
  const int block = token >> static_cast<int>(strides.tokens_log2);
  return ptx::bits_float(ptx::ldg32(scale + batch * strides.batch + head * strides.head +
                                    block * strides.block));
}

}  // namespace cf
