// Wrappers that no conformance case covers yet. tests/conformance holds the emulator against a GPU
// for those of the other files; each of these moves there with its case.
#pragma once

namespace cf::ptx {

CF_DEVICE u32x2 lds64(saddr a) {
  u32x2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
  return v;
}

// Adds in place, in any order with others (PTX ISA: red.global.add.f32).
CF_DEVICE void red_add_f32(float* p, float v) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory");
}
// A counter that hands over what other threads of the GPU wrote before they released it (PTX ISA:
// ld.acquire, red.release).
CF_DEVICE int ldg_acquire(const int32_t* p) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
CF_DEVICE void red_add_release(int32_t* p, int v) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// The two halves of a pair, exactly.
template <class Element>
CF_DEVICE void unpack2(float& low, float& high, uint32_t pair);
template <>
CF_DEVICE void unpack2<bf16_t>(float& low, float& high, uint32_t pair) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
}
template <>
CF_DEVICE void unpack2<f16_t>(float& low, float& high, uint32_t pair) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}

// Byte i of the result is byte s of the eight of a (0 to 3) and b (4 to 7), where s is in bits 4 i
// to 4 i + 2 of the selector; bit 4 i + 3 asks for its sign in all bits. (PTX ISA: prmt.)
CF_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// Four e4m3 numbers, the first in the lowest byte: rounded to nearest even, saturated, NaN 0x7f.
// (PTX ISA: cvt.rn.satfinite.e4m3x2.f32, which comes with compute capability 8.9.)
CF_DEVICE uint32_t pack4_e4m3(float v0, float v1, float v2, float v3) {
  uint32_t r;
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\nmov.b32 %0, {l, h};\n}"
      : "=r"(r)
      : "f"(v0), "f"(v1), "f"(v2), "f"(v3));
#else
  const float values[4] = {v0, v1, v2, v3};
  r = 0;
  CF_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = __float_as_uint(values[i]), magnitude = bits & 0x7fffffffu;
    const uint32_t clipped = ::min(magnitude, 0x43e00000u);  // 448
    // Below 2^-6 numbers are multiples of 2^-9, and so are those of float32 from 2^14 on.
    const uint32_t small = __float_as_uint(__uint_as_float(clipped) + 16384.0f) - 0x46800000u;
    const uint32_t large = ((clipped + 0x7ffffu + (clipped >> 20 & 1)) >> 20) - (120u << 3);
    uint32_t number = clipped < 0x3c800000u ? small : large;
    number |= bits >> 24 & 0x80u;
    if (magnitude > 0x7f800000u) number = 0x7fu;
    r |= number << 8 * i;
  }
#endif
  return r;
}

// The largest of the warp's, to all lanes. Of floats without sign the bits are in order. (PTX ISA:
// redux.sync.)
CF_DEVICE uint32_t redux_max(uint32_t v) {
  uint32_t r;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
  return r;
}

#if __CUDA_ARCH__ >= 900
// Contiguous bytes, a multiple of 16 as both addresses are; `bar` receives them. (PTX ISA:
// cp.async.bulk.)
CF_DEVICE void bulk_load(saddr dst, const void* src, uint32_t bytes, saddr bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
// Adds floats, contiguous and 16-byte aligned on both sides, into global memory. (PTX ISA:
// cp.reduce.async.bulk.)
CF_DEVICE void bulk_reduce_add_f32(float* dst, saddr src, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
      "r"(src), "r"(bytes)
      : "memory");
}
#endif

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
// D[64][80] += A B where A lies transposed, [16][64], and B along its columns: what dq needs where
// it is computed transposed. (PTX ISA: wgmma.mma_async.)
template <class Element, int kN, uint32_t kHighA, uint32_t kHighB>
CF_DEVICE void wgmma_ss_transposed(float (&d)[kN / 2], uint32_t a_low, uint32_t b_low,
                                   bool accumulate) {
  static_assert(kN == 80, "the one width that is in use");
#define CF_D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CF_TRANSPOSED(TYPES)                                                                   \
  asm volatile(                                                                                \
      "{\n.reg .pred p;\n.reg .b64 da, db;\nmov.b64 da, {%40, %43};\nmov.b64 db, {%41, %44};\n" \
      "setp.ne.b32 p, %42, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n80k16.f32." TYPES                                      \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "  \
      "%36, %37, %38, %39}, da, db, p, 1, 1, 1, 0;\n}"                                         \
      : CF_D(0), CF_D(4), CF_D(8), CF_D(12), CF_D(16), CF_D(20), CF_D(24), CF_D(28), CF_D(32), \
        CF_D(36)                                                                               \
      : "r"(a_low), "r"(b_low), "r"(static_cast<int>(accumulate)), "n"(kHighA), "n"(kHighB))
  if constexpr (is_same<Element, bf16_t>) {
    CF_TRANSPOSED("bf16.bf16");
  } else {
    CF_TRANSPOSED("f16.f16");
  }
#undef CF_TRANSPOSED
#undef CF_D
}
#endif

}  // namespace cf::ptx
