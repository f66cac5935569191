// Online softmax over accumulator fragments (mma.sync and wgmma share the layout): a thread holds
// two rows, g and g + 8 of its warp's 16, and a row lies in the four lanes of equal g.
// Milakov and Gimelshein 2018 (arXiv 1805.02867); Dao et al. 2022 (arXiv 2205.14135).
//
// Note [The reference of a row]
// Probabilities are exp2(s * scale - reference). Every term of a row uses the same reference, so
// that its choice cancels in out = sum(p v) / sum(p): it only has to keep the terms in range. It
// starts as round(max * scale) of the first keys seen and moves when it must:
//   lazily   where the maximum is known, only once it has grown by more than kLazyGrowth: terms up
//            to 2^8 are as exact as terms up to 1 in 16-bit floats, and most rescalings go away.
//   freely   (kMaxFree; bfloat16 terms have float32's range) blocks do not look for the maximum at
//            all: only the row sums are tested, and a block after which one has passed kSumLimit
//            (or is inf, or NaN) is undone and repeated with its maximum.
//
// Note [Large references]
// Where |max * scale| >= 2^23 the rounding of the reference itself grows to whole powers of two and
// all terms could overflow or vanish together. The terms of such a row are (s - max) * scale
// instead, exactly: it keeps the maximum itself, as its `origin`, and is never lazy. A row that
// crosses the line moves from the rounded product to the exact one, or back, in one fused step:
// there the rounding is worth up to a third of a term.
//
// Note [Rows that see nothing]
// Masked scores are -inf. A row without a visible key so far has max = -inf; its reference is then
// 0, so that every p is exp2(-inf) = 0 and no inf - inf arises.
#pragma once
#include "ptx/ptx.cuh"

namespace cf {

inline constexpr float kLargeReference = 8388608.0f;  // 2^23: float32 steps of 1
inline constexpr float kLazyGrowth = 8.0f;            // log2 units
// 2^24: terms p v stay far from float32's end whatever v is in practice, and flat rows stay below
// it up to tens of millions of keys.
inline constexpr float kSumLimit = 16777216.0f;
inline constexpr float kLn2 = 0.693147180559945309f;

CF_DEVICE float row_reduce_max(float x) {
  x = ptx::fmax(x, ptx::shfl_xor(x, 1));
  return ptx::fmax(x, ptx::shfl_xor(x, 2));
}
CF_DEVICE float row_reduce_sum(float x) {
  x += ptx::shfl_xor(x, 1);
  return x + ptx::shfl_xor(x, 2);
}

template <bool kMaxFree>
struct OnlineSoftmax {
  // The maximum (raw scores) that the reference stands for; -inf: no key seen yet.
  float row_max[2];
  // This thread's share of the sum of terms, relative to the reference.
  float row_sum[2];
  const float scale_log2;  // softmax_scale * log2(e)
  bool settled;            // every row of the warp has an ordinary reference (kMaxFree)

  CF_DEVICE explicit OnlineSoftmax(float scale) : scale_log2(scale) { reset(); }
  CF_DEVICE void reset() {
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      row_max[r] = -ptx::kInfinity;
      row_sum[r] = 0.0f;
    }
    settled = false;
  }

  CF_DEVICE float reference_of(float maximum) const {
    return maximum == -ptx::kInfinity ? 0.0f : ptx::mul(maximum, scale_log2);
  }
  // Note [Large references]; 0: none.
  CF_DEVICE float origin_of(float maximum) const {
    return ptx::fabs(reference_of(maximum)) < kLargeReference ? 0.0f : maximum;
  }

  // The reference of a tile's first block from a quarter of its columns: any value near the maximum
  // will do. Sets `settled` if every row of the warp has found one.
  template <int kCount>
  CF_DEVICE void sample(const float (&s)[kCount]) {
    if constexpr (!kMaxFree) return;
    bool found = true;
    float maximum[2];
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      float a = s[2 * r], b = s[2 * r + 1];
      CF_UNROLL
      for (int j = 4; j < kCount / 4; j += 4) {
        a = ptx::fmax(a, s[4 * j + 2 * r]);
        b = ptx::fmax(b, s[4 * j + 2 * r + 1]);
      }
      maximum[r] = row_reduce_max(ptx::fmax(a, b));
      found = found && ptx::fabs(ptx::mul(maximum[r], scale_log2)) < kLargeReference;
    }
    settled = ptx::vote_all(found);
    CF_UNROLL
    for (int r = 0; r < 2; ++r) row_max[r] = settled ? maximum[r] : -ptx::kInfinity;
  }

  // The block's terms without looking for its maximum. False: undone, a sum left its range and the
  // scores are spent; recompute them and call `update`.
  template <int kCount>
  CF_DEVICE bool update_freely(float (&s)[kCount]) {
    const float before[2] = {row_sum[0], row_sum[1]};
    const float reference[2] = {reference_of(row_max[0]), reference_of(row_max[1])};
    exponentiate(s, reference);
    const bool out_of_range = !(row_sum[0] < kSumLimit) || !(row_sum[1] < kSumLimit);
    if (!ptx::vote_any(out_of_range)) return true;
    row_sum[0] = before[0];
    row_sum[1] = before[1];
    return false;
  }

  // Replaces the scores of a block by terms. True: what was accumulated before must be multiplied
  // by `correction` (uniform across the warp).
  template <int kCount>
  CF_DEVICE bool update(float (&s)[kCount], float (&correction)[2]) {
    float previous[2], reference[2], growth[2];
    bool large = false, grown = false;
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      previous[r] = row_max[r];
      // Two chains a row shorten the dependence.
      float a = s[2 * r], b = s[2 * r + 1];
      CF_UNROLL
      for (int j = 1; j < kCount / 4; ++j) {
        a = ptx::fmax(a, s[4 * j + 2 * r]);
        b = ptx::fmax(b, s[4 * j + 2 * r + 1]);
      }
      row_max[r] = ptx::fmax(row_max[r], row_reduce_max(ptx::fmax(a, b)));
      reference[r] = reference_of(row_max[r]);
      // mul, not a contracted multiply-subtract: exactly 0 where the maximum stands.
      const float old_reference = ptx::mul(previous[r], scale_log2);
      growth[r] = old_reference - reference[r];
      grown = grown || -growth[r] > kLazyGrowth;
      // A maximum only grows: what was large and is not any more was below -kLargeReference.
      large = large || !(ptx::fabs(reference[r]) < kLargeReference) ||
              (old_reference <= -kLargeReference && previous[r] != -ptx::kInfinity);
    }
    bool rescale = ptx::vote_any(grown);
    const bool any_large = ptx::vote_any(large);
    if constexpr (kMaxFree) {
      settled = !ptx::vote_any(large || row_max[0] == -ptx::kInfinity ||
                               row_max[1] == -ptx::kInfinity);
    }
    if (any_large) {
      rescale = true;
      CF_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float origin = origin_of(row_max[r]), old_origin = origin_of(previous[r]);
        CF_UNROLL
        for (int j = 0; j < kCount / 4; ++j) {
          CF_UNROLL
          for (int e = 0; e < 2; ++e) s[4 * j + 2 * r + e] -= origin;
        }
        if (origin != 0.0f) reference[r] = 0.0f;
        const float old_reference = old_origin != 0.0f ? 0.0f : reference_of(previous[r]);
        growth[r] = previous[r] == -ptx::kInfinity
                        ? -ptx::kInfinity
                        : ptx::fma(old_origin - origin, scale_log2, old_reference - reference[r]);
      }
    } else if (!rescale) {
      CF_UNROLL
      for (int r = 0; r < 2; ++r) {
        row_max[r] = previous[r];
        reference[r] = reference_of(previous[r]);
      }
    }
    if (rescale) {
      CF_UNROLL
      for (int r = 0; r < 2; ++r) {
        correction[r] = ptx::ex2(growth[r]);
        row_sum[r] *= correction[r];
      }
    }
    exponentiate(s, reference);
    return rescale;
  }

  // After the last block: the factor of each row's output, and its log-sum-exp. A row without keys
  // gives 0 and -inf.
  CF_DEVICE void finish(float softmax_scale, float (&factor)[2], float (&lse)[2]) {
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      row_sum[r] = row_reduce_sum(row_sum[r]);
      const bool empty = row_sum[r] == 0.0f;  // NaN is not empty
      factor[r] = empty ? 0.0f : 1.0f / row_sum[r];
      lse[r] = empty ? -ptx::kInfinity
                     : ptx::fma(row_max[r], softmax_scale, ptx::lg2(row_sum[r]) * kLn2);
    }
  }

 private:
  template <int kCount>
  CF_DEVICE void exponentiate(float (&s)[kCount], const float (&reference)[2]) {
    CF_UNROLL
    for (int j = 0; j < kCount / 4; ++j) {
      CF_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float p = ptx::ex2(ptx::fma(s[4 * j + e], scale_log2, -reference[e >> 1]));
        s[4 * j + e] = p;
        row_sum[e >> 1] += p;
      }
    }
  }
};

}  // namespace cf
