// Instructions of every architecture: identities, shared and global memory, warp exchange, CTA and
// named barriers, approximate maths and conversions. PTX ISA sections are named at each wrapper.
#pragma once
#include "types.cuh"

namespace cf::ptx {

// --- identities -------------------------------------------------------------------------------

CF_DEVICE int tid() { return static_cast<int>(threadIdx.x); }
CF_DEVICE int lane() { return static_cast<int>(threadIdx.x & 31); }
CF_DEVICE int warp() { return static_cast<int>(threadIdx.x >> 5); }
CF_DEVICE int cta_idx() { return static_cast<int>(blockIdx.x); }
CF_DEVICE int num_ctas() { return static_cast<int>(gridDim.x); }

// The value of lane 0, known to the compiler as uniform across the warp (all lanes must agree).
CF_DEVICE int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// --- shared memory (PTX ISA: ld.shared, st.shared) -----------------------------------------------

extern __shared__ __align__(1024) uint8_t cf_dynamic_shared[];

// First byte of dynamic shared memory; 1024-byte aligned (swizzle atoms need it).
CF_DEVICE saddr smem_base() {
  return static_cast<saddr>(__cvta_generic_to_shared(cf_dynamic_shared));
}

CF_DEVICE uint32_t lds32(saddr a) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
CF_DEVICE void sts32(saddr a, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(v) : "memory");
}
CF_DEVICE float lds_f32(saddr a) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory");
  return v;
}
CF_DEVICE void sts_f32(saddr a, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory");
}
CF_DEVICE u32x4 lds128(saddr a) {
  u32x4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(a)
               : "memory");
  return v;
}
CF_DEVICE void sts128(saddr a, u32x4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// --- global memory (PTX ISA: ld.global, st.global) ----------------------------------------------

CF_DEVICE uint32_t ldg32(const void* p) {
  uint32_t v;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
CF_DEVICE u32x4 ldg128(const void* p) {
  u32x4 v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
CF_DEVICE void stg32(void* p, uint32_t v) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
CF_DEVICE void stg_f32(float* p, float v) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory");
}
CF_DEVICE void stg128(void* p, u32x4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Returns the value before (PTX ISA: atom.global.add).
CF_DEVICE int atomic_add(int32_t* p, int v) {
  int before;
  asm volatile("atom.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}

// --- warp (PTX ISA: shfl.sync, vote.sync, bar.warp.sync) ----------------------------------------

CF_DEVICE float shfl_xor(float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
CF_DEVICE uint32_t shfl_xor(uint32_t v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
CF_DEVICE uint32_t shfl_idx(uint32_t v, int source_lane) {
  return __shfl_sync(0xffffffffu, v, source_lane);
}
CF_DEVICE bool vote_any(bool p) { return __any_sync(0xffffffffu, p); }
CF_DEVICE bool vote_all(bool p) { return __all_sync(0xffffffffu, p); }
CF_DEVICE uint32_t vote_ballot(bool p) { return __ballot_sync(0xffffffffu, p); }
CF_DEVICE void warp_sync() { __syncwarp(); }

// --- barriers (PTX ISA: barrier{.cta}) ----------------------------------------------------------

CF_DEVICE void cta_sync() { asm volatile("bar.sync 0;" ::: "memory"); }
// Named barrier `id` (1 to 15) of `threads` arrivals, a multiple of 32.
CF_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
CF_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- maths: ex2 and lg2 within 2 ulp and 2^-22 (PTX ISA: ex2.approx, lg2.approx) ----------------

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7F800000u);

CF_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
CF_DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
CF_DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// x, but the compiler cannot know that.
CF_DEVICE float opaque(float x) {
  float y;
  asm volatile("mov.b32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
CF_DEVICE float fmax(float a, float b) { return ::fmaxf(a, b); }
CF_DEVICE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
// Rounded once, never contracted with a following addition.
CF_DEVICE float mul(float a, float b) { return ::__fmul_rn(a, b); }
CF_DEVICE float fabs(float a) { return ::fabsf(a); }

// --- conversions (PTX ISA: cvt.rn.bf16x2.f32: the first source is the upper half) ---------------

template <class Element>
CF_DEVICE uint32_t pack2(float low, float high);
template <>
CF_DEVICE uint32_t pack2<bf16_t>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <>
CF_DEVICE uint32_t pack2<f16_t>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

CF_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
CF_DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }

CF_DEVICE void trap() { asm volatile("trap;"); }

}  // namespace cf::ptx
