// Soft-capped scores: softcap * tanh(s * softmax_scale / softcap), as Gemma 2 uses them (Gemma Team
// 2024, arXiv 2408.00118).
//
// tanh.approx is good to 2^-11, not to the 2^-8 of a bfloat16 probability once it is multiplied by
// a cap of 50; this one is within 2^-20 of the result for every x: the exponential where it is
// large, the series (rest below 2^-21) where 1 - 2 / (1 + e) would cancel.
#pragma once
#include "params.cuh"
#include "ptx/ptx.cuh"
#include "tile/math.cuh"

namespace cf {

CF_DEVICE float capped(float x, float softcap) {
  constexpr float kTwoLog2E = 2.885390081777927f;
  constexpr float kSmall = 0.25f;
  const float y = ptx::mul(x, x);
  float series = ptx::fma(y, 62.0f / 2835, -17.0f / 315);
  series = ptx::fma(y, series, 2.0f / 15);
  series = ptx::fma(y, series, -1.0f / 3);
  series = ptx::fma(ptx::mul(x, y), series, x);
  const float e = ptx::ex2(ptx::mul(x, kTwoLog2E));  // 0 and inf give -1 and 1
  const float ratio = ptx::fma(-2.0f, ptx::rcp(1.0f + e), 1.0f);
  return ptx::mul(softcap, ptx::fabs(x) < kSmall ? series : ratio);
}

// In place, before the mask, if scores are capped at all. In pieces, each behind a test of its own
// that the compiler cannot know to be the same for all pieces and blocks: it would make two loops
// of one, or work on all scores at once, and spill (up to 736 bytes, NVRTC 13.5).
template <class Params, int kCount>
CF_DEVICE void cap_scores(const Params& params, float (&s)[kCount]) {
  constexpr int kPiece = 16;
  const float slope = params.softcap_slope;
  CF_UNROLL
  for (int begin = 0; begin < kCount; begin += kPiece) {
    const float softcap = ptx::opaque(params.softcap);
    if (softcap == 0.0f) continue;
    CF_UNROLL
    for (int i = begin; i < min(begin + kPiece, kCount); ++i) {
      s[i] = capped(ptx::mul(s[i], slope), softcap);
    }
  }
}

}  // namespace cf
