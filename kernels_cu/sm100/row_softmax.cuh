// Online softmax of one row of scores held by one thread: tcgen05.ld gives a thread a whole row of
// an accumulator, so no maximum and no sum crosses lanes. The fragment form is attn/softmax.cuh,
// whose notes hold here too.
#pragma once
#include "attn/mask.cuh"
#include "attn/softmax.cuh"
#include "ptx/ptx.cuh"

namespace cf::sm100 {

// The reference of a row follows its maximum only when that has grown by more than 2^8: up to there
// p <= 256, and the sums stay far from the limits of float32 (and p from those of f16).
// FlashAttention-4, "lazy rescaling".
inline constexpr float kLazyRescaleLog2 = 8.0f;

// Note [Exponentials on the FMA units]
// An SM computes 16 exp2 a clock beside 128 multiply-adds, and at head_dim 128 the exponentials of
// a tile take as long as its products. So 4 of every kExp2Period exponentials are computed as a
// polynomial: x = n + f with n = floor(x), exp2(f) by Horner's rule, n added to the exponent. Not
// in the first and the last piece of a row, where the MUFU has loads and stores to hide under. The
// share, an eighth overall, is FlashAttention-4's for causal attention; to be tuned on a device.
inline constexpr int kExp2Period = 16;
inline constexpr int kExp2Emulated = 4;
CF_DEVICE constexpr bool emulates_exp2(int column, int columns, int piece_columns) {
  return column >= piece_columns && column < columns - piece_columns &&
         column % kExp2Period < kExp2Emulated;
}

// Two exponentials, x and y at most 2^8. Minimax polynomials on [0, 1) with value 1 at 0; relative
// error 8.6e-5 (degree 3), an eighth of bf16's half step, and 2.9e-6 (degree 4) for f16. -inf, like
// everything below -127, gives 0 exactly.
template <class Element>
CF_DEVICE void exp2_emulated(float& x, float& y) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: the last bit of the sum is worth 1
  constexpr bool kFine = is_same<Element, f16_t>;
  constexpr float kCoefficients[5] = {1.0f, kFine ? 0.69304484f : 0.69511682f,
                                      kFine ? 0.24128023f : 0.22764474f,
                                      kFine ? 0.05224243f : 0.07706728f, 0.01342671f};
  constexpr int kDegree = kFine ? 4 : 3;
  const float a = ptx::fmax(x, -127.0f), b = ptx::fmax(y, -127.0f);
  float a_sum, b_sum, a_floor, b_floor, a_rest, b_rest;
  ptx::add2_down(a_sum, b_sum, a, b, kRound, kRound);  // floor(x) in the low bits
  ptx::add2(a_floor, b_floor, a_sum, b_sum, -kRound, -kRound);
  ptx::add2(a_rest, b_rest, a, b, -a_floor, -b_floor);
  float p = kCoefficients[kDegree], q = p;
  CF_UNROLL
  for (int i = kDegree - 1; i >= 0; --i) {
    ptx::fma2(p, q, p, q, a_rest, b_rest, kCoefficients[i], kCoefficients[i]);
  }
  x = ptx::bits_float(ptx::float_bits(p) + (ptx::float_bits(a_sum) << 23));
  y = ptx::bits_float(ptx::float_bits(q) + (ptx::float_bits(b_sum) << 23));
}

// Bits [0, count) set; count below 0 counts as 0, beyond 32 as 32.
CF_DEVICE uint32_t low_bits(int count) {
  const int n = max(0, min(count, 32));
  return static_cast<uint32_t>((1ull << n) - 1);
}

// Masks a row of scores: element i is key kv_start + i. Visible keys are bits of one word for every
// 32 columns: the compiler turns its bits into predicates eight at a time (R2P), where comparing
// each column would double the work.
template <class Mask, class Sequence, int kCount>
CF_DEVICE void mask_row(const Sequence& sequence, float (&s)[kCount], int query, int kv_start) {
  const KeyRange range = visible_keys<Mask>(sequence, query);
  const int first = range.first - kv_start, end = range.end - kv_start;
  CF_UNROLL
  for (int word = 0; word < kCount / 32; ++word) {
    uint32_t visible = low_bits(end - 32 * word);
    if constexpr (Mask::kHasLeft) visible &= ~low_bits(first - 32 * word);
    CF_UNROLL
    for (int i = 0; i < 32; ++i) {
      float& score = s[32 * word + i];
      score = (visible >> i & 1u) != 0 ? score : -ptx::kInfinity;
    }
  }
}

template <int kCount>
CF_DEVICE float row_max(const float (&s)[kCount], float start) {
  constexpr int kChains = 4;  // shorten the dependence
  float m[kChains];
  CF_UNROLL
  for (int c = 0; c < kChains; ++c) m[c] = ptx::fmax3_nan(start, s[2 * c], s[2 * c + 1]);
  CF_UNROLL
  for (int i = 2 * kChains; i < kCount; i += 2 * kChains) {
    CF_UNROLL
    for (int c = 0; c < kChains; ++c) m[c] = ptx::fmax3_nan(m[c], s[i + 2 * c], s[i + 2 * c + 1]);
  }
  return ptx::fmax3_nan(ptx::fmax3_nan(m[0], m[1], m[2]), m[3], m[3]);
}

template <int kCount>
CF_DEVICE float row_sum(const float (&p)[kCount]) {
  constexpr int kChains = 4;
  float sum[2 * kChains];
  CF_UNROLL
  for (int c = 0; c < 2 * kChains; ++c) sum[c] = p[c];
  CF_UNROLL
  for (int i = 2 * kChains; i < kCount; i += 2 * kChains) {
    CF_UNROLL
    for (int c = 0; c < 2 * kChains; c += 2) {
      ptx::add2(sum[c], sum[c + 1], sum[c], sum[c + 1], p[i + c], p[i + c + 1]);
    }
  }
  ptx::add2(sum[0], sum[1], sum[0], sum[1], sum[2], sum[3]);
  ptx::add2(sum[4], sum[5], sum[4], sum[5], sum[6], sum[7]);
  return (sum[0] + sum[4]) + (sum[1] + sum[5]);
}

// Online softmax of one row. Note [The reference of a row] and Note [Rows that see nothing] of
// attn/softmax.cuh hold here too; the reference is kept as the pair (origin, reference) of
//   p = exp2((s - origin) * scale_log2 - reference),
// with origin = 0 while |max * scale_log2| < 2^23, and reference = 0 from there on. It may lag
// after the row's maximum (kLazyRescaleLog2), and what is accumulated always refers to the same
// pair. A NaN among the scores makes the maximum NaN (ptx::fmax3_nan), and with it the row.
struct RowSoftmax {
  float scale_log2;
  float max = -ptx::kInfinity;
  float origin = 0.0f;
  float reference = 0.0f;
  float sum = 0.0f;

  // Takes in the maximum so far; returns the factor that what was accumulated is to be multiplied
  // by.
  CF_DEVICE float raise(float new_max) {
    // False for NaN: a NaN maximum, or nothing visible so far (inf - inf).
    if ((new_max - max) * scale_log2 <= kLazyRescaleLog2) return 1.0f;
    const bool fresh = max == -ptx::kInfinity;
    const bool empty = new_max == -ptx::kInfinity;
    const float product = ptx::mul(new_max, scale_log2);
    const bool large = !(ptx::fabs(product) < kLargeReference) && !empty;
    const float new_origin = large ? new_max : 0.0f;
    const float new_reference = large || empty ? 0.0f : product;
    const float factor =
        ptx::ex2(ptx::fma(origin - new_origin, scale_log2, reference - new_reference));
    max = new_max;
    origin = new_origin;
    reference = new_reference;
    return fresh ? 1.0f : factor;  // nothing accumulated: zeros
  }

  // Replaces the scores by s - origin, where any row of the warp has an origin.
  template <int kCount>
  CF_DEVICE void subtract_origin(float (&s)[kCount]) const {
    if (!ptx::vote_any(origin != 0.0f)) return;
    CF_UNROLL
    for (int i = 0; i < kCount; i += 2) {
      ptx::add2(s[i], s[i + 1], s[i], s[i + 1], -origin, -origin);
    }
  }

  // p of two scores less the origin.
  template <class Element>
  CF_DEVICE void exponentials(float& x, float& y, bool emulated) const {
    ptx::fma2(x, y, x, y, scale_log2, scale_log2, -reference, -reference);
    if (emulated) {
      exp2_emulated<Element>(x, y);
    } else {
      x = ptx::ex2(x);
      y = ptx::ex2(y);
    }
  }

  // Natural log of the sum of exp(score * softmax_scale).
  CF_DEVICE float log_sum_exp(float softmax_scale) const {
    if (max == -ptx::kInfinity) return -ptx::kInfinity;
    return ptx::fma(origin, softmax_scale, (reference + ptx::lg2(sum)) * kLn2);
  }
};

}  // namespace cf::sm100
