// Instructions of Blackwell data-centre GPUs (sm_100a, sm_100f): tensor memory, the tcgen05 matrix
// multiply, three-input maximum and packed float32 arithmetic.
// Sources: PTX ISA 8.6 to 9.x, "TensorCore 5th Generation Family Instructions"; bit fields of the
// descriptors as in CUTLASS's cute/arch/mma_sm100_desc.hpp.
//
// Tensor memory: 128 lanes x 512 columns of 32 bits; address = lane << 16 | column. Warp w of a
// warpgroup reaches lanes 32 (w % 4) to 32 (w % 4) + 31 only.
//
// Order. mma and commit of one thread run in order among themselves; ld and st of a thread do not
// order with them. Work handed from thread to thread needs, in this order: tcgen05_wait_ld or
// tcgen05_wait_st; tcgen05_fence_before; any barrier; tcgen05_fence_after. tcgen05_commit contains
// its fence_before and covers all earlier tcgen05 work of the thread that issues it.
#pragma once
#include "types.cuh"

namespace cf::ptx {

// --- tensor memory (tcgen05.alloc, .dealloc, .relinquish_alloc_permit; by one whole warp) --------

// Writes the address of kColumns columns (a power of two, 32 to 512) to shared memory at `dst`;
// blocks while another CTA of the SM holds them.
template <int kColumns>
CF_DEVICE void tcgen05_alloc(saddr dst) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(dst),
               "n"(kColumns)
               : "memory");
}
// This CTA will allocate no more: CTAs waiting to allocate may go on.
CF_DEVICE void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}
template <int kColumns>
CF_DEVICE void tcgen05_dealloc(taddr base) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(base), "n"(kColumns));
}

// --- order between threads (tcgen05.fence, tcgen05.wait) -----------------------------------------

CF_DEVICE void tcgen05_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
CF_DEVICE void tcgen05_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}
// Registers of earlier loads of this warp are valid, earlier stores have landed.
CF_DEVICE void tcgen05_wait_ld() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
CF_DEVICE void tcgen05_wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }
// Pins loaded registers behind tcgen05_wait_ld: asm volatile with a memory clobber does not order
// plain register reads.
template <int kCount>
CF_DEVICE void tcgen05_pin(float (&d)[kCount]) {
  CF_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// --- matrix multiply (tcgen05.mma.cta_group::1.kind::f16) ----------------------------------------

// Instruction descriptor, D[M][N] float32 = A[M][16] B[N][16]^T of bf16 or f16: bits 4-5 D format
// (1 = f32), 7-9 A and 10-12 B format (0 = f16, 1 = bf16), 15 and 16 major-ness of A and B
// (1 = MN-major, transposed in shared memory), 17-22 N / 8, 24-28 M / 16.
// M is 64 (N a multiple of 8) or 128 (N a multiple of 16), N at most 256.
template <class Element>
CF_DEVICE constexpr uint32_t tcgen05_instruction_descriptor(int m, int n, bool mn_major_b,
                                                            bool mn_major_a = false) {
  const uint32_t format = is_same<Element, bf16_t> ? 1u : 0u;
  return 1u << 4 | format << 7 | format << 10 | (mn_major_a ? 1u : 0u) << 15 |
         (mn_major_b ? 1u : 0u) << 16 |
         static_cast<uint32_t>(n / 8) << 17 | static_cast<uint32_t>(m / 16) << 24;
}

// D[tmem] (+)= A[shared] B[shared]^T. A shared-memory matrix descriptor is split: the low word
// (start address >> 4 in bits 0-13, leading byte offset >> 4 in bits 16-29) is a register, the high
// word (stride byte offset >> 4 in bits 0-13, version 1 in bits 14-15, swizzle in bits 29-31:
// 2 = 128 B, 4 = 64 B, 6 = 32 B) a template value.
template <uint32_t kInstruction, uint32_t kHighA, uint32_t kHighB>
CF_DEVICE void tcgen05_mma_ss(taddr d, uint32_t a_low, uint32_t b_low, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 da, db;\n"
      "mov.b64 da, {%1, %5};\nmov.b64 db, {%2, %6};\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], da, db, %3, p;\n}" ::"r"(d),
      "r"(a_low), "r"(b_low), "r"(kInstruction), "r"(static_cast<int>(accumulate)), "n"(kHighA),
      "n"(kHighB)
      : "memory");
}
// D[tmem] (+)= A[tmem] B[shared]^T. A: row = lane, two 16-bit values a column, the lower k below.
template <uint32_t kInstruction, uint32_t kHighB>
CF_DEVICE void tcgen05_mma_ts(taddr d, taddr a, uint32_t b_low, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 db;\n"
      "mov.b64 db, {%2, %5};\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], db, %3, p;\n}" ::"r"(d),
      "r"(a), "r"(b_low), "r"(kInstruction), "r"(static_cast<int>(accumulate)), "n"(kHighB)
      : "memory");
}
// One arrival on `bar` when all earlier tcgen05 work of this thread has completed.
CF_DEVICE void tcgen05_commit(saddr bar) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   bar)
               : "memory");
}

// --- loads and stores (tcgen05.ld, tcgen05.st, shape 32x32b) -------------------------------------
//
// Thread l of a warp holds row (lane of tensor memory) l of the warp's 32 and kCount consecutive
// columns from `a`, which carries the warp's first lane in bits 16 and up. kCount is 16 or 32.

#define CF_TMEM_LIST_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define CF_TMEM_LIST_32                                                                     \
  CF_TMEM_LIST_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define CF_TMEM_8(C, i)                                                                       \
  C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3]), C(d[i + 4]), C(d[i + 5]), C(d[i + 6]), C(d[i + 7])
#define CF_TMEM_16(C) CF_TMEM_8(C, 0), CF_TMEM_8(C, 8)
#define CF_TMEM_32(C) CF_TMEM_16(C), CF_TMEM_8(C, 16), CF_TMEM_8(C, 24)

// The registers may be used after tcgen05_wait_ld and tcgen05_pin.
template <int kCount>
CF_DEVICE void tcgen05_ld(float* d, taddr a) {
  static_assert(kCount == 16 || kCount == 32);
  if constexpr (kCount == 16) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x16.b32 {" CF_TMEM_LIST_16 "}, [%16];"
                 : CF_TMEM_16("=f")
                 : "r"(a));
  } else {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {" CF_TMEM_LIST_32 "}, [%32];"
                 : CF_TMEM_32("=f")
                 : "r"(a));
  }
}
template <int kCount>
CF_DEVICE void tcgen05_st(taddr a, const uint32_t* d) {
  static_assert(kCount == 16 || kCount == 32);
  if constexpr (kCount == 16) {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x16.b32 [%16], {" CF_TMEM_LIST_16 "};" ::
                     CF_TMEM_16("r"),
                 "r"(a)
                 : "memory");
  } else {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], {" CF_TMEM_LIST_32 "};" ::
                     CF_TMEM_32("r"),
                 "r"(a)
                 : "memory");
  }
}
template <int kCount>
CF_DEVICE void tcgen05_st(taddr a, const float* d) {
  static_assert(kCount == 16 || kCount == 32);
  if constexpr (kCount == 16) {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x16.b32 [%16], {" CF_TMEM_LIST_16 "};" ::
                     CF_TMEM_16("f"),
                 "r"(a)
                 : "memory");
  } else {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], {" CF_TMEM_LIST_32 "};" ::
                     CF_TMEM_32("f"),
                 "r"(a)
                 : "memory");
  }
}

#undef CF_TMEM_LIST_16
#undef CF_TMEM_LIST_32
#undef CF_TMEM_8
#undef CF_TMEM_16
#undef CF_TMEM_32

// --- maths (PTX ISA: max with three inputs, fma/mul/add.f32x2) -----------------------------------

// NaN if any of the three is (ptx::fmax prefers numbers).
CF_DEVICE float fmax3_nan(float a, float b, float c) {
  float r;
  asm("max.NaN.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}

// Two float32 operations in one issue slot; rounded to nearest, denormals kept.
#define CF_F32X2_BINARY(name, instruction)                                                 \
  CF_DEVICE void name(float& d0, float& d1, float a0, float a1, float b0, float b1) {      \
    asm("{\n.reg .b64 a, b, d;\n"                                                          \
        "mov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\n" instruction                         \
        " d, a, b;\nmov.b64 {%0, %1}, d;\n}"                                               \
        : "=f"(d0), "=f"(d1)                                                               \
        : "f"(a0), "f"(a1), "f"(b0), "f"(b1));                                             \
  }
CF_F32X2_BINARY(add2, "add.rn.f32x2")       // d = a + b
CF_F32X2_BINARY(mul2, "mul.rn.f32x2")       // d = a * b
CF_F32X2_BINARY(add2_down, "add.rm.f32x2")  // d = a + b, rounded towards minus infinity
#undef CF_F32X2_BINARY

// d = a * b + c
CF_DEVICE void fma2(float& d0, float& d1, float a0, float a1, float b0, float b1, float c0,
                    float c1) {
  asm("{\n.reg .b64 a, b, c, d;\n"
      "mov.b64 a, {%2, %3};\nmov.b64 b, {%4, %5};\nmov.b64 c, {%6, %7};\n"
      "fma.rn.f32x2 d, a, b, c;\nmov.b64 {%0, %1}, d;\n}"
      : "=f"(d0), "=f"(d1)
      : "f"(a0), "f"(a1), "f"(b0), "f"(b1), "f"(c0), "f"(c1));
}

}  // namespace cf::ptx
