// Attention over a union of disjoint sets of keys from attention over each, all parts in one pass:
//   lse = log sum_p exp(lse_p),  out = sum_p exp(lse_p - lse) out_p
// (the softmax of Milakov and Gimelshein 2018, arXiv 1805.02867, one level up; the combination of
// splits in Flash-Decoding, Dao et al. 2023). A part of weight 0, lse_p = -inf above all, is not
// read: its out may be NaN. Where every part has -inf, out is 0 and lse is -inf. A NaN among the
// lse_p makes out and lse NaN.
//
// A row is a (batch, seqlen, head). It belongs to 8, 16 or 32 neighbouring lanes of a warp, as many
// as cover its head_dim with twice 16 bytes each if 32 can (fewer lanes a row, fewer instructions:
// what is done once a row costs as much as several vectors). A warp works on 4, 2 or 1 rows at a
// time and CTAs stride over the rows. No shared memory, no barrier; all lanes of a warp stay
// together, for its shuffles: those behind the last row compute it once more and do not write.
//
//   weights: lane j of a row reads lse_p of the parts p = j, j + lanes, ... and keeps their weights
//            in registers; maximum and sum go round by shuffles.
//   sums:    a lane adds up its columns in float32, kAhead parts in flight at a time.
//
// Where a row cannot be read 16 bytes at a time (an odd head_dim, say), lanes take one element at a
// time: the same code with one element in place of a vector.
#pragma once
#include "any/params.cuh"
#include "any/pieces.cuh"
#include "ptx/ptx.cuh"

namespace cf::any {

inline constexpr float kLn2 = 0.693147180559945309f;
inline constexpr float kLog2e = 1.44269504088896341f;
inline constexpr int kMinLanes = 8;
inline constexpr int kSlots = kMaxMergeParts / kMinLanes;  // weights that a lane holds
inline constexpr int kAhead = 4;

// Note [Half without conversions]
// A float16 whose exponent and fraction are moved to those of a float32 reads as 2^-112 times its
// value, subnormals included (products of these are not flushed). The weights carry the 2^112.
// Infinity and NaN have exponent 31 and need that of a float32's, so vectors are first looked
// through for them, two elements at a time.
template <class Element>
inline constexpr float kUnit = 1.0f;
template <>
inline constexpr float kUnit<f16_t> = 0x1p112f;

// The element at the upper end of `bits`; what lies below it is passed over.
template <class Element, bool kFinite>
CF_DEVICE float widen(uint32_t bits) {
  if constexpr (is_same<Element, f16_t>) {
    // The sign comes along in four copies, of which one stays.
    const uint32_t moved = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 3) & 0x8fffe000u;
    const bool special = !kFinite && (bits & 0x7c000000u) == 0x7c000000u;
    return ptx::bits_float(special ? moved | 0x70000000u : moved);
  } else {
    return ptx::bits_float(is_same<Element, bf16_t> ? bits & 0xffff0000u : bits);
  }
}

// sums += weight * piece, in units of 1 / kUnit
template <bool kFinite, class Element, bool kVectors, int kCount>
CF_DEVICE void add_elements(float (&sums)[kCount], const Piece<Element, kVectors>& piece,
                            float weight) {
  constexpr bool kHalves = Piece<Element, kVectors>::kHalves;
  CF_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const bool lower = kHalves && i % 2 == 0;
    const uint32_t word = piece.words[kHalves ? i / 2 : i];
    sums[i] = ptx::fma(weight, widen<Element, kFinite>(lower ? word << 16 : word), sums[i]);
  }
}
template <class Element, bool kVectors, int kCount>
CF_DEVICE void add_weighted(float (&sums)[kCount], const Piece<Element, kVectors>& piece,
                            float weight) {
  bool finite = true;
  if constexpr (is_same<Element, f16_t>) {
    uint32_t carries = 0;  // out of the exponents
    CF_UNROLL
    for (int i = 0; i < piece.kWords; ++i) carries |= (piece.words[i] & 0x7c007c00u) + 0x04000400u;
    finite = (carries & 0x80008000u) == 0;
  }
  if (finite) {
    add_elements<true>(sums, piece, weight);
  } else {
    add_elements<false>(sums, piece, weight);
  }
}

// Where in the arrays a row lies. Never negative, and unsigned, which saves half of a product with
// a 64-bit stride.
struct Row {
  uint32_t batch, position, head;

  CF_DEVICE Row(const MergeParams& params, int row) {
    const uint32_t heads = static_cast<uint32_t>(params.heads);
    const uint32_t seqlen = static_cast<uint32_t>(params.seqlen);
    const uint32_t token = static_cast<uint32_t>(row) / heads;
    head = static_cast<uint32_t>(row) - token * heads;
    batch = token / seqlen;
    position = token - batch * seqlen;
  }

  template <class Part>  // MergePart or MergeParams
  CF_DEVICE int64_t in_out(const Part& part) const {
    return batch * part.out_stride_batch + position * part.out_stride_seqlen +
           head * part.out_stride_head;
  }
  template <class Part>
  CF_DEVICE int64_t in_lse(const Part& part) const {
    return batch * part.lse_stride_batch + head * part.lse_stride_head +
           position * part.lse_stride_seqlen;
  }
};

// exp(lse_p - lse) * kUnit of the row's parts; lane j holds those of j, j + lanes, ...
struct Weights {
  float held[kSlots];

  // Returns the row's lse.
  CF_DEVICE float find(const MergeParams& params, const Lanes& lanes, const Row& row, float unit) {
    float log[kSlots];
    float top = -ptx::kInfinity;
    CF_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      const int p = (slot << lanes.log2) + lanes.rank();
      log[slot] = -ptx::kInfinity;
      if (p < params.num_parts) {
        const MergePart& part = params.parts[p];
        log[slot] = ptx::bits_float(ptx::ldg32(part.lse + row.in_lse(part)));
      }
      top = ptx::fmax(top, log[slot]);  // passes NaN over: it comes back with the sum
    }
    top = lanes.max(top);
    const float anchor = top == -ptx::kInfinity ? 0.0f : top;  // -inf - -inf is NaN
    float sum = 0.0f;
    CF_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) {
      held[slot] = ptx::ex2((log[slot] - anchor) * kLog2e);
      sum += held[slot];
    }
    sum = lanes.sum(sum);
    const bool empty = sum == 0.0f;  // NaN is not empty
    const float factor = empty ? 0.0f : unit / sum;
    CF_UNROLL
    for (int slot = 0; slot < kSlots; ++slot) held[slot] *= factor;
    return empty ? -ptx::kInfinity : ptx::fma(ptx::lg2(sum), kLn2, anchor);
  }

  // Part p's, for all lanes of the row; p is the same in all lanes of the warp.
  CF_DEVICE float of(const Lanes& lanes, int p) const {
    const int slot = p >> lanes.log2;
    float weight = held[0];
    CF_UNROLL
    for (int i = 1; i < kSlots; ++i) weight = slot == i ? held[i] : weight;
    const int holder = lanes.first() + (p & (lanes.count() - 1));
    return ptx::bits_float(ptx::shfl_idx(ptx::float_bits(weight), holder));
  }
};

template <class Element, bool kVectors>
CF_DEVICE void merge_row(const MergeParams& params, const Lanes& lanes, int row_idx, bool write) {
  using Elements = Piece<Element, kVectors>;
  const Row row(params, row_idx);
  Weights weights;
  const float lse = weights.find(params, lanes, row, kUnit<Element>);
  if (params.lse != nullptr && write && lanes.rank() == 0) {
    ptx::stg_f32(params.lse + row.in_lse(params), lse);
  }
  Element* out = static_cast<Element*>(params.out) + row.in_out(params);  // [head_dim]
  CF_NO_UNROLL
  for (int begin = 0; begin < params.head_dim; begin += Elements::kCount << lanes.log2) {
    const int column = begin + lanes.rank() * Elements::kCount;
    const bool inside = column < params.head_dim;
    float sums[Elements::kCount];
    CF_UNROLL
    for (int i = 0; i < Elements::kCount; ++i) sums[i] = 0.0f;
    CF_NO_UNROLL
    for (int first = 0; first < params.num_parts; first += kAhead) {
      Elements pieces[kAhead];
      float weight[kAhead];
      CF_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        weight[i] = 0.0f;
        pieces[i].clear();
        if (first + i < params.num_parts) {
          const MergePart& part = params.parts[first + i];
          weight[i] = weights.of(lanes, first + i);
          if (inside && weight[i] != 0.0f) {
            pieces[i].load(static_cast<const Element*>(part.out) + row.in_out(part) + column);
          }
        }
      }
      CF_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        if (first + i < params.num_parts) add_weighted(sums, pieces[i], weight[i]);
      }
    }
    if (inside && write) {
      Elements rounded;
      rounded.round(sums);
      rounded.store(out + column);
    }
  }
}

template <class Config, bool kVectors>
CF_DEVICE void merge_rows(const MergeParams& params) {
  const Lanes lanes{params.lanes_log2};
  const int rows_of_warp = 32 >> lanes.log2;
  constexpr int kWarps = Config::kThreads / 32;
  const int step = ptx::num_ctas() * kWarps * rows_of_warp;
  int first = (ptx::cta_idx() * kWarps + ptx::warp()) * rows_of_warp;
  CF_NO_UNROLL
  for (; first < params.num_rows; first += step) {
    const int row = first + lanes.row();
    const bool exists = row < params.num_rows;
    merge_row<typename Config::Element, kVectors>(
        params, lanes, exists ? row : params.num_rows - 1, exists);
  }
}

// The body of the kernel.
template <class Config>
CF_DEVICE void merge(const MergeParams& params) {
  if (params.vectors != 0) {
    merge_rows<Config, true>(params);
  } else {
    merge_rows<Config, false>(params);
  }
}

}  // namespace cf::any
