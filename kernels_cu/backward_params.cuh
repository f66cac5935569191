// The launch parameters of the three kernels of a backward pass: one packed struct for all,
// mirrored field by field by cupyflash/params.py.
//
//   backward_delta    delta = rowsum(dout * out) - dlse and lse in units of log2, by tiles of
//                     queries; sets dq_sums and dq_turns to zero
//   backward          dk and dv; adds up dq in dq_sums
//   backward_convert  dq from dq_sums
// or, for wide heads on Hopper, backward_delta, backward_keys (dk and dv) and backward_queries
// (dq), without sums in global memory.
//
// Note [Query slots]
// What is kept of queries between the kernels lies in slots of block_m rows, so that a tile of
// queries is a slot, whole and aligned, also where sequences are packed: attn/query_slots.cuh.
#pragma once
#include "params.cuh"
#include "types.cuh"

namespace cf {

struct BackwardParams {
  // Tensor maps; zero for the sm80 family, and for arrays without elements. Rank 4, dims {head_dim,
  // seqlen, heads, batch}; of general kernels rank 5: attn/ragged.cuh. dq, dk and dv: 16-bit
  // gradients only; dq: only where it is computed by a kernel of its own.
  CUtensorMap q_map, k_map, v_map, dout_map, dq_map, dk_map, dv_map;

  // Where sequences are packed, the dimensions batch and seqlen are one: [total, heads, head_dim].
  const void* q;            // [batch, seqlen_q, heads_q, head_dim_qk]
  const void* k;            // [batch, seqlen_kv, heads_kv, head_dim_qk]
  const void* v;            // [batch, seqlen_kv, heads_kv, head_dim_v]
  const void* out;          // [batch, seqlen_q, heads_q, head_dim_v]; null: delta is given
  const void* dout;         // [batch, seqlen_q, heads_q, head_dim_v], 16-byte aligned rows
  const void* dout_given;   // the caller's, of any strides: dout, or copied to dout by
                            // backward_delta (copy_dout)
  const float* lse;         // [batch, heads_q, seqlen_q]
  const float* dlse;        // [batch, heads_q, seqlen_q] or null
  const float* delta;       // [batch, heads_q, seqlen_q], or null: computed from out and dout
  void* dq;                 // [batch, seqlen_q, heads_q, head_dim_qk]
  void* dk;                 // [batch, seqlen_kv, heads_kv, head_dim_qk]
  void* dv;                 // [batch, seqlen_kv, heads_kv, head_dim_v]

  // Workspace. Note [Query slots].
  float* row_lse;           // [heads_q, num_slots * block_m], log2; +inf: the row has no weights
  float* row_delta;         // [heads_q, num_slots * block_m]
  float* dq_sums;           // [heads_q, num_slots, block_m * width_qk], in the order of DqOrder;
                            // null: there are none
  int32_t* dq_turns;        // [heads_q, num_slots], how many key blocks have been added;
                            // null: they are added in any order

  // Read by general kernels only; null where absent.
  const int32_t* cu_seqlens_q;   // [batch + 1], first row of each packed sequence
  const int32_t* cu_seqlens_kv;  // [batch + 1]
  const int32_t* seqused_q;      // [batch], how many leading rows of a sequence count
  const int32_t* seqused_kv;     // [batch]
  const int32_t* q_offset;       // [batch], added to the shift
  const int32_t* kv_offset;      // [batch], subtracted from it

  // Next tile to be dealt out, 0 between launches; null: tiles are dealt out by position. Part of
  // the workspace where there are turns: set to 0 by backward_delta.
  int32_t* tile_counter;

  // Strides in elements; the head_dim stride is 1, but for dout_given.
  int64_t q_stride_batch, q_stride_seqlen, q_stride_head;
  int64_t k_stride_batch, k_stride_seqlen, k_stride_head;
  int64_t v_stride_batch, v_stride_seqlen, v_stride_head;
  int64_t out_stride_batch, out_stride_seqlen, out_stride_head;
  int64_t dout_stride_batch, dout_stride_seqlen, dout_stride_head;
  int64_t dout_given_stride_batch, dout_given_stride_seqlen, dout_given_stride_head;
  int64_t dout_given_stride_dim;
  int64_t dq_stride_batch, dq_stride_seqlen, dq_stride_head;
  int64_t dk_stride_batch, dk_stride_seqlen, dk_stride_head;
  int64_t dv_stride_batch, dv_stride_seqlen, dv_stride_head;
  int64_t lse_stride_batch, lse_stride_head, lse_stride_seqlen;
  int64_t dlse_stride_batch, dlse_stride_head, dlse_stride_seqlen;
  int64_t delta_stride_batch, delta_stride_head, delta_stride_seqlen;

  // As in ForwardParams: key j is visible to query i iff mask_left <= j - i <= mask_right.
  int64_t mask_left, mask_right;

  int32_t batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim_qk, head_dim_v;
  int32_t group;  // heads_q / heads_kv

  int32_t rows_q, rows_kv;  // extents of the arrays along seqlen: totals of packed sequences

  // Rows of the array from one batch entry to the next (Note [Ragged maps] in attn/ragged.cuh).
  int32_t q_batch_rows, k_batch_rows, v_batch_rows, dout_batch_rows;
  int32_t bottom_right;

  int32_t block_m;        // queries of a tile: rows of a slot
  int32_t width_qk;       // padded head_dim_qk: columns of dq_sums
  int32_t num_m_blocks;   // ceil(seqlen_q / block_m); packed: unused
  int32_t num_slots;      // num_m_blocks * batch; packed: rows_q / block_m + batch
  int32_t num_n_blocks;   // ceil(seqlen_kv / kBlockN); packed: rows_kv / kBlockN + batch
  int32_t num_tiles;      // num_n_blocks * heads_kv (* batch, unless packed)
  int32_t section_heads;  // (batch, head_kv) pairs (packed: heads_kv) that are scheduled together

  // The same of backward_queries: tiles of its kBlockM queries of a query head.
  int32_t num_query_blocks;     // ceil(seqlen_q / kBlockM); packed: rows_q / kBlockM + batch
  int32_t num_query_tiles;      // num_query_blocks * heads_q (* batch, unless packed)
  int32_t query_section_heads;  // (batch, head_q) pairs that are scheduled together

  int32_t float_grads;  // dq, dk, dv are float32, not 16-bit
  int32_t accumulate;   // and what is in them is added to
  int32_t clear_grads;  // rows of dq, dk and dv that belong to no sequence are set to 0
  int32_t copy_dout;    // backward_delta copies dout_given to dout
  int32_t vectors;      // out and dout_given can be read 16 bytes at a time

  float softmax_scale;       // as in ForwardParams: 1 where scores are capped
  float softmax_scale_log2;
  float softcap;
  float softcap_slope;
  float grad_scale;          // the caller's softmax_scale: factor on dq and dk
};

}  // namespace cf
