// The launch parameters of every forward kernel: one packed struct, mirrored field by field by
// cupyflash/params.py. The translation unit asserts every offset (source.py), so a change here that
// Python has not seen does not compile.
#pragma once
#include "types.cuh"

namespace cf {

// A diagonal of the mask that hides nothing: -kUnbounded on the left, kUnbounded on the right.
inline constexpr int kUnbounded = 1 << 30;

struct ForwardParams {
  // Tensor maps; zero for the sm80 family, and for k and v where there are no keys. Rank 4, dims
  // {head_dim, seqlen, heads, batch}; of general kernels rank 5: attn/ragged.cuh.
  CUtensorMap q_map, k_map, v_map, out_map;

  // Where sequences are packed, the dimensions batch and seqlen are one: [total, heads, head_dim].
  const void* q;    // [batch, seqlen_q, heads_q, head_dim_qk]
  const void* k;    // [batch, seqlen_kv, heads_kv, head_dim_qk]
  const void* v;    // [batch, seqlen_kv, heads_kv, head_dim_v]
  void* out;        // [batch, seqlen_q, heads_q, head_dim_v]
  float* lse;       // [batch, heads_q, seqlen_q], or null: not wanted

  // Read by general kernels only; null where absent.
  const int32_t* cu_seqlens_q;   // [batch + 1], first row of each packed sequence
  const int32_t* cu_seqlens_kv;  // [batch + 1]
  const int32_t* seqused_q;      // [batch], how many leading rows of a sequence count
  const int32_t* seqused_kv;     // [batch]
  const int32_t* q_offset;       // [batch], added to the shift
  const int32_t* kv_offset;      // [batch], subtracted from it

  // Next tile to be dealt out, 0 between launches; null: tiles are dealt out by position.
  int32_t* tile_counter;

  // Strides in elements; the head_dim stride is 1.
  int64_t q_stride_batch, q_stride_seqlen, q_stride_head;
  int64_t k_stride_batch, k_stride_seqlen, k_stride_head;
  int64_t v_stride_batch, v_stride_seqlen, v_stride_head;
  int64_t out_stride_batch, out_stride_seqlen, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head;

  // Key j is visible to query i iff mask_left <= j - i <= mask_right; within +-kUnbounded but for
  // general kernels, which add to both what they find on the device: the offsets and, if
  // bottom_right, seqlen_kv - seqlen_q.
  int64_t mask_left, mask_right;

  int32_t batch, seqlen_q, seqlen_kv, heads_q, heads_kv, head_dim_qk, head_dim_v;
  int32_t group;  // heads_q / heads_kv

  int32_t rows_q, rows_kv;  // extents of the arrays along seqlen: totals of packed sequences

  // Rows of the array from one batch entry to the next (Note [Ragged maps] in attn/ragged.cuh).
  int32_t q_batch_rows, k_batch_rows, v_batch_rows;
  int32_t bottom_right;

  int32_t num_m_blocks;   // ceil(seqlen_q / kBlockM); packed: unused
  int32_t num_tiles;      // num_m_blocks * heads_q * batch
  // Query heads (of all sequences; packed: of one) that are scheduled together so that their K and
  // V stay in L2. Packed: as many as have section_rows keys in all.
  int32_t section_heads;
  int32_t section_rows;
  int32_t tail_heads;  // the last section, (batch, head) pairs
  int32_t clear_out;  // rows of `out` that belong to no sequence are set to 0

  float softmax_scale;
  float softmax_scale_log2;  // softmax_scale * log2(e)

  // softcap > 0 (general kernels): scores s become softcap * tanh(s * softcap_slope), and the two
  // scales above are those of what comes out, 1 and log2(e).
  float softcap;
  float softcap_slope;  // softmax_scale / softcap

  // Of 8-bit floats only; zero otherwise. value = data * scale. A null scale is 1. That of token t
  // of sequence b and of a head of the operand is
  //   scale[b * stride_batch + head * stride_head + (first(b) + (t >> tokens_log2)) * stride_block]
  // with first(b) = (cu_seqlens[b] >> tokens_log2) + b where sequences are packed, otherwise 0;
  // strides along which the kind has one scale are 0.
  const float* q_scale;    // [], [batch, heads_q], or [batch, heads_q, blocks or tokens]
  const float* k_scale;    // [], [batch, heads_kv], or [batch, heads_kv, blocks]; packed: without
  const float* v_scale;    // the batch where there are blocks or tokens
  const float* out_scale;  // [], of an 8-bit out: data = value / scale, saturated
  // Row-major v has v_stride_dim 1. Transposed v is [batch, heads_kv, width, v_columns] (packed
  // without the batch), with the tokens of each sixteen in the order of fp8.MMA_ORDER: its
  // v_stride_seqlen is 1, v_stride_dim that from one channel to the next. Token t of sequence b is
  // in slot (cu_seqlens[b] >> v_slot_log2) + b + (t >> v_slot_log2) where sequences are packed.
  int64_t v_stride_dim;
  int64_t q_scale_stride_batch, q_scale_stride_head, q_scale_stride_block;
  int64_t k_scale_stride_batch, k_scale_stride_head, k_scale_stride_block;
  int64_t v_scale_stride_batch, v_scale_stride_head, v_scale_stride_block;
  // A ScaleKind (any/quantize_params.cuh), and log2 of the tokens of a block: 6, 7, otherwise 0.
  int32_t q_scale_kind, q_scale_tokens_log2;
  int32_t k_scale_kind, k_scale_tokens_log2;
  int32_t v_scale_kind, v_scale_tokens_log2;
  int32_t v_slot_log2;  // log2 of the tokens of a slot of transposed v, 6 or 7; 0: v is row-major
  int32_t v_columns;    // slot tokens of a head of transposed v: its extent along the tokens
};

}  // namespace cf
