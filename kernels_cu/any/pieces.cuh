// Rows of memory, shared by neighbouring lanes of a warp that hold a piece of them each.
#pragma once
#include "ptx/ptx.cuh"

namespace cf::any {

// Neighbouring elements of a row, in registers: 16 bytes, or one element. A single 16-bit element
// is read and written by plain C++: of that the emulator sees only what hits a guard page.
template <class Element, bool kVectors>
struct Piece {
  static constexpr int kElementBytes = static_cast<int>(sizeof(Element));
  static constexpr int kCount = kVectors ? 16 / kElementBytes : 1;
  static constexpr int kWords = kVectors ? 4 : 1;
  static constexpr bool kHalves = kElementBytes == 2;
  uint32_t words[kWords];

  CF_DEVICE void clear() {
    CF_UNROLL
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }

  CF_DEVICE void load(const Element* gmem) {
    if constexpr (kVectors) {
      const u32x4 v = ptx::ldg128(gmem);
      words[0] = v.x;
      words[1] = v.y;
      words[2] = v.z;
      words[3] = v.w;
    } else if constexpr (kHalves) {
      words[0] = gmem->bits;
    } else {
      words[0] = ptx::ldg32(gmem);
    }
  }

  CF_DEVICE void store(Element* gmem) const {
    if constexpr (kVectors) {
      ptx::stg128(gmem, {words[0], words[1], words[2], words[3]});
    } else if constexpr (kHalves) {
      gmem->bits = static_cast<uint16_t>(words[0]);
    } else {
      ptx::stg32(gmem, words[0]);
    }
  }

  CF_DEVICE void round(const float (&values)[kCount]) {
    CF_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if constexpr (!kHalves) {
        words[i] = ptx::float_bits(values[i]);
      } else if constexpr (kVectors) {
        words[i] = ptx::pack2<Element>(values[2 * i], values[2 * i + 1]);
      } else {
        words[i] = ptx::pack2<Element>(values[i], 0.0f);
      }
    }
  }

  CF_DEVICE void widen(float (&values)[kCount]) const {
    CF_UNROLL
    for (int i = 0; i < kWords; ++i) {
      if constexpr (!kHalves) {
        values[i] = ptx::bits_float(words[i]);
      } else {
        float low, high;
        ptx::unpack2<Element>(low, high, words[i]);
        values[kVectors ? 2 * i : i] = low;
        if constexpr (kVectors) values[2 * i + 1] = high;
      }
    }
  }
};

// The lanes that share a row.
struct Lanes {
  int log2;
  CF_DEVICE int count() const { return 1 << log2; }
  CF_DEVICE int rank() const { return ptx::lane() & (count() - 1); }  // of this lane
  CF_DEVICE int row() const { return ptx::lane() >> log2; }           // of the warp's
  CF_DEVICE int first() const { return row() << log2; }

  CF_DEVICE float max(float x) const {
    CF_NO_UNROLL
    for (int step = 1; step < count(); step <<= 1) x = ptx::fmax(x, ptx::shfl_xor(x, step));
    return x;
  }
  CF_DEVICE float sum(float x) const {
    CF_NO_UNROLL
    for (int step = 1; step < count(); step <<= 1) x += ptx::shfl_xor(x, step);
    return x;
  }
};

}  // namespace cf::any
