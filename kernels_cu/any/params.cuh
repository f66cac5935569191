// The launch parameters of the merge: mirrored member by member by cupyflash/params.py; the
// translation unit asserts every offset (source.py).
#pragma once
#include "types.cuh"

namespace cf {

inline constexpr int kMaxMergeParts = 32;

// Attention over one set of keys. Strides in elements; the head_dim stride is 1.
struct MergePart {
  const void* out;   // [batch, seqlen, heads, head_dim]
  const float* lse;  // [batch, heads, seqlen]
  int64_t out_stride_batch, out_stride_seqlen, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head, lse_stride_seqlen;
};

// Packed arrays are a batch of one.
struct MergeParams {
  void* out;   // [batch, seqlen, heads, head_dim]
  float* lse;  // [batch, heads, seqlen], or null: not wanted
  int64_t out_stride_batch, out_stride_seqlen, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head, lse_stride_seqlen;

  int32_t seqlen, heads, head_dim;
  int32_t num_rows;    // batch * seqlen * heads
  int32_t num_parts;   // at least 1
  int32_t lanes_log2;  // lanes of a warp that share a row: 8, 16 or 32
  int32_t vectors;     // every row of every out starts and ends at a multiple of 16 bytes

  MergePart parts[kMaxMergeParts];
};

}  // namespace cf
