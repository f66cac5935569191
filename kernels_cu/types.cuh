// Integer names, storage types and addresses shared by every kernel. No CUDA header and no standard
// header is included: NVRTC ships none, and the host build must agree with the device build.
#pragma once

namespace cf {

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

// Shared-memory address (shared::cta window; shared::cluster once mapped) and tensor-memory
// address.
using saddr = uint32_t;
using taddr = uint32_t;

// 16-bit and 8-bit floats are raw bits: arithmetic happens in float32 registers.
struct bf16_t {
  uint16_t bits;
};
struct f16_t {
  uint16_t bits;
};
struct e4m3_t {
  uint8_t bits;
};

struct alignas(8) u32x2 {
  uint32_t x, y;
};
struct alignas(16) u32x4 {
  uint32_t x, y, z, w;
};

// The driver's 128-byte opaque tensor map (cuTensorMapEncodeTiled).
struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};

template <class A, class B>
inline constexpr bool is_same = false;
template <class A>
inline constexpr bool is_same<A, A> = true;

}  // namespace cf
