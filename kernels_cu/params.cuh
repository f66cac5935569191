// The launch parameters of every forward kernel: one packed struct, mirrored field by field by
// cupyflash/params.py. The translation unit asserts every offset (source.py), so a change here that
// Python has not seen does not compile.
#pragma once
#include "types.cuh"

namespace cf {

// A window bound of kUnbounded (2^30) sees everything on its side.
inline constexpr int kUnbounded = 1 << 30;

struct ForwardParams {
  // Tensor maps, rank 4, dims {head_dim, seqlen, heads, batch}; zero for the sm80 family, and for
  // k and v where seqlen_kv is 0.
  CUtensorMap q_map, k_map, v_map, out_map;

  const void* q;    // [batch, seqlen_q, heads_q, head_dim_qk]
  const void* k;    // [batch, seqlen_kv, heads_kv, head_dim_qk]
  const void* v;    // [batch, seqlen_kv, heads_kv, head_dim_v]
  void* out;        // [batch, seqlen_q, heads_q, head_dim_v]
  float* lse;       // [batch, heads_q, seqlen_q], or null: not wanted

  // Strides in elements; the head_dim stride is 1.
  int64_t q_stride_batch, q_stride_seqlen, q_stride_head;
  int64_t k_stride_batch, k_stride_seqlen, k_stride_head;
  int64_t v_stride_batch, v_stride_seqlen, v_stride_head;
  int64_t out_stride_batch, out_stride_seqlen, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head;

  int32_t batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim_qk, head_dim_v;
  int32_t group;  // heads_q / heads_kv

  // Key j is visible to query i iff i + shift - window_left <= j <= i + shift + window_right.
  int32_t window_left, window_right;
  int32_t shift;

  int32_t num_m_blocks;   // ceil(seqlen_q / kBlockM)
  int32_t num_tiles;      // num_m_blocks * heads_q * batch
  int32_t section_heads;  // (batch, head) pairs scheduled together so that their K and V stay in L2

  float softmax_scale;
  float softmax_scale_log2;  // softmax_scale * log2(e)
};

}  // namespace cf
