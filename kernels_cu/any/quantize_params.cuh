// The launch parameters of the quantization: mirrored member by member by cupyflash/params.py; the
// translation unit asserts every offset (source.py).
#pragma once
#include "types.cuh"

namespace cf {

inline constexpr int kMaxPieces = 16;  // of 16 channels, of a token

// What a launch does: one pass over x, or for scales of whole sequences three launches.
enum QuantizeStage : int32_t {
  kWholeStage,    // amax, scale and numbers of every tile
  kTopsStage,     // tops: the amax of every tile
  kReduceStage,   // scale, from tops
  kConvertStage,  // numbers, from scale
};

// What shares a scale (Arrangement.kind of cupyflash/fp8.py).
enum ScaleKind : int32_t { kTensorScale, kHeadScale, kBlockScale, kTokenScale };

// Packed sequences are a batch of one. Strides in elements; those of the last dimensions are 1,
// those of seqlen fit 32 bits.
struct QuantizeParams {
  const void* x;  // [batch, rows, heads, head_dim]
  void* data;     // e4m3 [batch, rows, heads, 16 pieces], or null: not wanted
  void* data_t;   // e4m3 [batch, heads, 16 pieces, num_slots * slot], or null
  float* scale;   // [], [sequences, heads], [batch, heads, num_slots] or [batch, heads, tokens]
  float* tops;    // [batch, num_slots, heads], or null: one pass is enough
  const int32_t* cu_seqlens;  // [sequences + 1], or null: sequences are not packed
  int64_t x_stride_batch, x_stride_seqlen, x_stride_head;
  int64_t data_stride_batch, data_stride_seqlen, data_stride_head;
  int64_t data_t_stride_batch, data_t_stride_head, data_t_stride_channel;
  int64_t scale_stride_batch, scale_stride_head;

  int32_t sequences;   // batch, where they are not packed
  int32_t rows;        // tokens of a batch entry, or of all packed sequences
  int32_t heads, head_dim;
  int32_t pieces;      // of 16 channels, of a row of data
  int32_t reciprocal;  // 2^16 / pieces, rounded up
  int32_t slot_log2;   // tokens of a slot: 64 or 128
  int32_t num_slots;   // of a batch entry, or of all packed sequences
  int32_t num_tiles;   // batch * num_slots * heads
  int32_t stage;       // QuantizeStage
  int32_t kind;        // ScaleKind
  int32_t row_pairs;   // data_t has tokens in the order 0 8 1 9 ..., not 0 1 8 9 ...

  int32_t rotation_width;  // channels that a rotation mixes; 0: no rotation
  // Of each piece, bits 15 - i and 31 - i: whether the rotation negates channels 2 i and 2 i + 1.
  int32_t negated[kMaxPieces];
  float rotation_factor;
};

}  // namespace cf
