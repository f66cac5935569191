// Hopper's warpgroup matrix multiply of 8-bit floats (e4m3), D[64][N] += A[64][32] B[N][32]^T with
// float32 accumulators. (PTX ISA: wgmma.mma_async, .m64nNk32.f32.e4m3.e4m3.)
//
// Both operands lie along what is summed over (K-major): there is no transposed form. Descriptors
// are split as in wgmma.cuh, accumulators lie as there. A in registers, g = lane / 4, q = lane % 4:
// a[0] row g, k = 4 q to 4 q + 3, the first in the lowest byte; a[1] row g + 8, same k; a[2] and
// a[3] the same rows, k = 16 + 4 q to 19 + 4 q.
//
// No conformance case covers them yet.
#pragma once
#include "ptx/wgmma.cuh"

namespace cf::ptx {

// Specialised for every N below.
template <int kN>
struct WgmmaE4m3;

// One statement a form. `A` to `G` are the operand numbers after the accumulators.
#define CF_WGMMA_E4M3(N, R, A, B, C, D, E, F, G)                                                   \
  template <>                                                                                      \
  struct WgmmaE4m3<N> {                                                                            \
    template <uint32_t kHighA, uint32_t kHighB>                                                    \
    CF_DEVICE static void ss(float (&d)[N / 2], uint32_t a_low, uint32_t b_low, bool accumulate) { \
      asm volatile(                                                                                \
          "{\n.reg .pred p;\n.reg .b64 da, db;\n"                                                  \
          "mov.b64 da, {%" #A ", %" #D "};\nmov.b64 db, {%" #B ", %" #E "};\n"                     \
          "setp.ne.b32 p, %" #C ", 0;\n"                                                           \
          "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" CF_LIST_##R                 \
          "}, da, db, p, 1, 1;\n}"                                                                 \
          : CF_OPERANDS_##R()                                                                      \
          : "r"(a_low), "r"(b_low), "r"(static_cast<int>(accumulate)), "n"(kHighA), "n"(kHighB));  \
    }                                                                                              \
    template <uint32_t kHighB>                                                                     \
    CF_DEVICE static void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b_low,            \
                             bool accumulate) {                                                    \
      asm volatile(                                                                                \
          "{\n.reg .pred p;\n.reg .b64 db;\n"                                                      \
          "mov.b64 db, {%" #E ", %" #G "};\n"                                                      \
          "setp.ne.b32 p, %" #F ", 0;\n"                                                           \
          "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" CF_LIST_##R                 \
          "}, {%" #A ",%" #B ",%" #C ",%" #D "}, db, p, 1, 1;\n}"                                  \
          : CF_OPERANDS_##R()                                                                      \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low),                                \
            "r"(static_cast<int>(accumulate)), "n"(kHighB));                                       \
    }                                                                                              \
  }

CF_WGMMA_E4M3(16, 8, 8, 9, 10, 11, 12, 13, 14);
CF_WGMMA_E4M3(32, 16, 16, 17, 18, 19, 20, 21, 22);
CF_WGMMA_E4M3(48, 24, 24, 25, 26, 27, 28, 29, 30);
CF_WGMMA_E4M3(64, 32, 32, 33, 34, 35, 36, 37, 38);
CF_WGMMA_E4M3(80, 40, 40, 41, 42, 43, 44, 45, 46);
CF_WGMMA_E4M3(96, 48, 48, 49, 50, 51, 52, 53, 54);
CF_WGMMA_E4M3(112, 56, 56, 57, 58, 59, 60, 61, 62);
CF_WGMMA_E4M3(128, 64, 64, 65, 66, 67, 68, 69, 70);
CF_WGMMA_E4M3(144, 72, 72, 73, 74, 75, 76, 77, 78);
CF_WGMMA_E4M3(160, 80, 80, 81, 82, 83, 84, 85, 86);
CF_WGMMA_E4M3(176, 88, 88, 89, 90, 91, 92, 93, 94);
CF_WGMMA_E4M3(192, 96, 96, 97, 98, 99, 100, 101, 102);
CF_WGMMA_E4M3(208, 104, 104, 105, 106, 107, 108, 109, 110);
CF_WGMMA_E4M3(224, 112, 112, 113, 114, 115, 116, 117, 118);
CF_WGMMA_E4M3(240, 120, 120, 121, 122, 123, 124, 125, 126);
CF_WGMMA_E4M3(256, 128, 128, 129, 130, 131, 132, 133, 134);

template <int kN, uint32_t kHighA, uint32_t kHighB>
CF_DEVICE void wgmma_e4m3_ss(float (&d)[kN / 2], uint32_t a_low, uint32_t b_low, bool accumulate) {
  WgmmaE4m3<kN>::template ss<kHighA, kHighB>(d, a_low, b_low, accumulate);
}
template <int kN, uint32_t kHighB>
CF_DEVICE void wgmma_e4m3_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint32_t b_low,
                             bool accumulate) {
  WgmmaE4m3<kN>::template rs<kHighB>(d, a, b_low, accumulate);
}

}  // namespace cf::ptx
