// Which keys a query sees. A mask kind is a nested type of Config; its bounds belong to the
// sequence (attn/sequence.cuh).
//
//   NoMask      only the end of the keys
//   CausalMask  a right bound: causal in either alignment, or a window open to the left
//   WindowMask  a right and a left bound, either of which may be unbounded
#pragma once
#include "attn/sequence.cuh"
#include "params.cuh"
#include "ptx/ptx.cuh"
#include "tile/math.cuh"

namespace cf {

struct NoMask {
  static constexpr bool kHasRight = false, kHasLeft = false;
};
struct CausalMask {
  static constexpr bool kHasRight = true, kHasLeft = false;
};
struct WindowMask {
  static constexpr bool kHasRight = true, kHasLeft = true;
};

// The keys [first, end) that query `query` may see; end <= first: none.
struct KeyRange {
  int first, end;
};
// Sums stay within int32: |left|, |right| <= 2^30 and positions < 2^30 (the host checks).
template <class Mask, class Sequence>
CF_DEVICE KeyRange visible_keys(const Sequence& sequence, int query) {
  KeyRange range{0, sequence.seqlen_kv()};
  if constexpr (Mask::kHasRight) range.end = min(range.end, query + sequence.right() + 1);
  if constexpr (Mask::kHasLeft) range.first = max(range.first, query + sequence.left());
  return range;
}

// Masks an accumulator fragment of scores: row_query[r] is the query of fragment row g + 8 r, and
// element 4 j + e lies at key kv_start + 8 j + 2 (lane % 4) + e % 2 of row e / 2. What is not
// visible becomes `masked`.
template <class Mask, class Sequence, int kCount>
CF_DEVICE void mask_fragment(const Sequence& sequence, float (&s)[kCount],
                             const int (&row_query)[2], int kv_start,
                             float masked = -ptx::kInfinity) {
  const int column = kv_start + 2 * (ptx::lane() & 3);
  CF_UNROLL
  for (int row = 0; row < 2; ++row) {
    const KeyRange range = visible_keys<Mask>(sequence, row_query[row]);
    const int first = range.first - column, end = range.end - column;
    CF_UNROLL
    for (int j = 0; j < kCount / 4; ++j) {
      CF_UNROLL
      for (int e = 0; e < 2; ++e) {
        bool visible = 8 * j + e < end;
        if constexpr (Mask::kHasLeft) visible = visible && 8 * j + e >= first;
        float& score = s[4 * j + 2 * row + e];
        score = visible ? score : masked;
      }
    }
  }
}

}  // namespace cf
