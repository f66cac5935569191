// Hopper's warpgroup matrix multiply, D[64][N] += A[64][16] B[N][16]^T with float32 accumulators.
//
// Operand forms (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate"):
//   wgmma_ss  A and B from shared memory; wgmma_rs  A from registers, B from shared memory.
// A matrix descriptor is split: the low word (start address, leading byte offset) is a register,
// the high word (stride byte offset, swizzle) a template value. 64-bit descriptors in registers
// would have to be moved to uniform registers one by one.
//
// Fragments, for warp w of the warpgroup, g = lane / 4, q = lane % 4:
//   D: d[4 j + e] is row 16 w + g + 8 (e / 2), column 8 j + 2 q + e % 2.
//   A: a[0] row g, k = 2q, 2q+1; a[1] row g + 8, same k; a[2] row g, k = 8 + 2q, ...; a[3] row g +
//   8.
//
// The asm statements carry no memory clobber: wgmma_fence, wgmma_commit and wgmma_wait do.
#pragma once
#include "types.cuh"

namespace cf::ptx {

// Before the first wgmma of a batch, and whenever registers it reads or adds to were just written.
CF_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
CF_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
CF_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Pins accumulators at this point of the program: asm volatile with a memory clobber does not order
// plain register reads, so a wait needs this after it (and a batch before it).
template <int kCount>
CF_DEVICE void wgmma_pin(float (&d)[kCount]) {
  CF_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Specialised for every N below.
template <int kN>
struct Wgmma;

// Cumulative operand lists for 8, 16, ... 128 accumulators.
#define CF_LIST_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define CF_LIST_16 CF_LIST_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define CF_LIST_24 CF_LIST_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define CF_LIST_32 CF_LIST_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define CF_LIST_40 CF_LIST_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define CF_LIST_48 CF_LIST_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define CF_LIST_56 CF_LIST_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define CF_LIST_64 CF_LIST_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define CF_LIST_72 CF_LIST_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define CF_LIST_80 CF_LIST_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define CF_LIST_88 CF_LIST_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define CF_LIST_96 CF_LIST_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define CF_LIST_104 CF_LIST_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define CF_LIST_112 CF_LIST_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define CF_LIST_120 CF_LIST_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define CF_LIST_128 CF_LIST_120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define CF_D8(i)                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define CF_OPERANDS_8() CF_D8(0)
#define CF_OPERANDS_16() CF_OPERANDS_8(), CF_D8(8)
#define CF_OPERANDS_24() CF_OPERANDS_16(), CF_D8(16)
#define CF_OPERANDS_32() CF_OPERANDS_24(), CF_D8(24)
#define CF_OPERANDS_40() CF_OPERANDS_32(), CF_D8(32)
#define CF_OPERANDS_48() CF_OPERANDS_40(), CF_D8(40)
#define CF_OPERANDS_56() CF_OPERANDS_48(), CF_D8(48)
#define CF_OPERANDS_64() CF_OPERANDS_56(), CF_D8(56)
#define CF_OPERANDS_72() CF_OPERANDS_64(), CF_D8(64)
#define CF_OPERANDS_80() CF_OPERANDS_72(), CF_D8(72)
#define CF_OPERANDS_88() CF_OPERANDS_80(), CF_D8(80)
#define CF_OPERANDS_96() CF_OPERANDS_88(), CF_D8(88)
#define CF_OPERANDS_104() CF_OPERANDS_96(), CF_D8(96)
#define CF_OPERANDS_112() CF_OPERANDS_104(), CF_D8(104)
#define CF_OPERANDS_120() CF_OPERANDS_112(), CF_D8(112)
#define CF_OPERANDS_128() CF_OPERANDS_120(), CF_D8(120)

// One statement for each form and type. `A` to `H` are the operand numbers after the accumulators.
#define CF_WGMMA_SS(N, R, TYPES, A, B, C, D, E, F)                                           \
  asm volatile(                                                                              \
      "{\n.reg .pred p;\n.reg .b64 da, db;\n"                                                \
      "mov.b64 da, {%" #A ", %" #D "};\nmov.b64 db, {%" #B ", %" #E "};\n"                   \
      "setp.ne.b32 p, %" #C ", 0;\n"                                                         \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" CF_LIST_##R               \
      "}, da, db, p, 1, 1, 0, %" #F ";\n}"                                                   \
      : CF_OPERANDS_##R()                                                                    \
      : "r"(a_low), "r"(b_low), "r"(static_cast<int>(accumulate)), "n"(kHighA), "n"(kHighB), \
        "n"(kMnMajorB))
#define CF_WGMMA_RS(N, R, TYPES, A, B, C, D, E, F, G, H)                                           \
  asm volatile(                                                                                    \
      "{\n.reg .pred p;\n.reg .b64 db;\n"                                                          \
      "mov.b64 db, {%" #E ", %" #G "};\n"                                                          \
      "setp.ne.b32 p, %" #F ", 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" CF_LIST_##R                     \
      "}, {%" #A ",%" #B ",%" #C ",%" #D "}, db, p, 1, 1, %" #H ";\n}"                             \
      : CF_OPERANDS_##R()                                                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(static_cast<int>(accumulate)), \
        "n"(kHighB), "n"(kMnMajorB))
#define CF_WGMMA(N, R, A, B, C, D, E, F, G, H)                                                     \
  template <>                                                                                      \
  struct Wgmma<N> {                                                                                \
    template <class Element, uint32_t kHighA, uint32_t kHighB, int kMnMajorB>                      \
    CF_DEVICE static void ss(float (&d)[N / 2], uint32_t a_low, uint32_t b_low, bool accumulate) { \
      if constexpr (is_same<Element, bf16_t>)                                                      \
        CF_WGMMA_SS(N, R, "bf16.bf16", A, B, C, D, E, F);                                          \
      else                                                                                         \
        CF_WGMMA_SS(N, R, "f16.f16", A, B, C, D, E, F);                                            \
    }                                                                                              \
    template <class Element, uint32_t kHighB, int kMnMajorB>                                       \
    CF_DEVICE static void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b_low,            \
                             bool accumulate) {                                                    \
      if constexpr (is_same<Element, bf16_t>)                                                      \
        CF_WGMMA_RS(N, R, "bf16.bf16", A, B, C, D, E, F, G, H);                                    \
      else                                                                                         \
        CF_WGMMA_RS(N, R, "f16.f16", A, B, C, D, E, F, G, H);                                      \
    }                                                                                              \
  }

CF_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14, 15);
CF_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22, 23);
CF_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30, 31);
CF_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38, 39);
CF_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46, 47);
CF_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54, 55);
CF_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62, 63);
CF_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70, 71);
CF_WGMMA(144, 72, 72, 73, 74, 75, 76, 77, 78, 79);
CF_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86, 87);
CF_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94, 95);
CF_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102, 103);
CF_WGMMA(208, 104, 104, 105, 106, 107, 108, 109, 110, 111);
CF_WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118, 119);
CF_WGMMA(240, 120, 120, 121, 122, 123, 124, 125, 126, 127);
CF_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134, 135);

template <class Element, int kN, uint32_t kHighA, uint32_t kHighB, int kMnMajorB>
CF_DEVICE void wgmma_ss(float (&d)[kN / 2], uint32_t a_low, uint32_t b_low, bool accumulate) {
  Wgmma<kN>::template ss<Element, kHighA, kHighB, kMnMajorB>(d, a_low, b_low, accumulate);
}
template <class Element, int kN, uint32_t kHighB, int kMnMajorB>
CF_DEVICE void wgmma_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint32_t b_low,
                        bool accumulate) {
  Wgmma<kN>::template rs<Element, kHighB, kMnMajorB>(d, a, b_low, accumulate);
}

}  // namespace cf::ptx
