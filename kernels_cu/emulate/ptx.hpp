// The emulated twins of ptx/common.cuh, sm80.cuh, sm90.cuh, wgmma*.cuh and sm100.cuh: the same
// names, template parameters and argument order, then the caller's source position. A twin only
// forwards to runtime.hpp; an instruction that the target does not have fails when it is executed.
#pragma once
#include "emulate/runtime.hpp"

#ifndef CF_ARCH
#error "the host build names its target: -DCF_ARCH=80, 90 or 100"
#endif
#ifndef CF_MUTANT
#define CF_MUTANT 0
#endif

#define CF_DEVICE inline
#define CF_NOINLINE __attribute__((noinline)) inline
#define CF_UNROLL
#define CF_NO_UNROLL
#define CF_PARAM(T) const T
// Exports cf_emulate_<name>(request), the host's counterpart of a launch.
#define CF_KERNEL(name, Params, threads, min_blocks, cluster)                                      \
  static void cf_body_##name(const Params& params);                                                \
  extern "C" int cf_emulate_##name(const cf::emulate::LaunchRequest* request) {                    \
    const cf::emulate::KernelInfo kernel = {                                                       \
        #name,   threads,        min_blocks,                                                       \
        cluster, CF_ARCH,        sizeof(Params),                                                   \
        [](const void* params) { cf_body_##name(*static_cast<const Params*>(params)); }};          \
    return cf::emulate::launch(kernel, *request);                                                  \
  }                                                                                                \
  static void cf_body_##name(const Params& params)

#define CF_WHERE ::cf::emulate::Where where = ::cf::emulate::Where::here()

namespace cf::ptx {

inline constexpr int kArchitecture = CF_ARCH;
inline constexpr int kMutant = CF_MUTANT;

// --- common.cuh ----------------------------------------------------------------------------------

CF_DEVICE int tid() { return emulate::current->tid; }
CF_DEVICE int lane() { return emulate::current->lane; }
CF_DEVICE int warp() { return emulate::current->warp; }
CF_DEVICE int cta_idx() { return emulate::current->cta; }
CF_DEVICE int num_ctas() { return emulate::grid_size; }
CF_DEVICE int warp_uniform(int x, CF_WHERE) { return emulate::warp_uniform(x, where); }

CF_DEVICE saddr smem_base() {
  return emulate::kSharedBase |
         static_cast<saddr>(emulate::current->cta_rank) << emulate::kSharedRankShift;
}
template <class T>
CF_DEVICE T emulated_load(saddr a, emulate::Where where) {
  T v;
  emulate::shared_load(&v, a, sizeof v, where);
  return v;
}
CF_DEVICE uint32_t lds32(saddr a, CF_WHERE) { return emulated_load<uint32_t>(a, where); }
CF_DEVICE void sts32(saddr a, uint32_t v, CF_WHERE) { emulate::shared_store(a, &v, 4, where); }
CF_DEVICE float lds_f32(saddr a, CF_WHERE) { return emulated_load<float>(a, where); }
CF_DEVICE void sts_f32(saddr a, float v, CF_WHERE) { emulate::shared_store(a, &v, 4, where); }
CF_DEVICE u32x2 lds64(saddr a, CF_WHERE) { return emulated_load<u32x2>(a, where); }
CF_DEVICE u32x4 lds128(saddr a, CF_WHERE) { return emulated_load<u32x4>(a, where); }
CF_DEVICE void sts128(saddr a, u32x4 v, CF_WHERE) { emulate::shared_store(a, &v, 16, where); }

template <class T>
CF_DEVICE T emulated_global_load(const void* p, emulate::Where where) {
  T v;
  emulate::global_load(&v, p, sizeof v, where);
  return v;
}
CF_DEVICE uint32_t ldg32(const void* p, CF_WHERE) {
  return emulated_global_load<uint32_t>(p, where);
}
CF_DEVICE u32x4 ldg128(const void* p, CF_WHERE) { return emulated_global_load<u32x4>(p, where); }
CF_DEVICE void stg32(void* p, uint32_t v, CF_WHERE) { emulate::global_store(p, &v, 4, where); }
CF_DEVICE void stg_f32(float* p, float v, CF_WHERE) { emulate::global_store(p, &v, 4, where); }
CF_DEVICE void red_add_f32(float* p, float v, CF_WHERE) {
  emulate::global_atomic(emulate::Atomic::kAddF32, p, __builtin_bit_cast(uint32_t, v), where);
}
CF_DEVICE int ldg_acquire(const int32_t* p, CF_WHERE) {
  int v;
  emulate::global_load_acquire(&v, p, sizeof v, where);
  return v;
}
CF_DEVICE void red_add_release(int32_t* p, int v, CF_WHERE) {
  emulate::global_atomic_release(emulate::Atomic::kAddU32, p, static_cast<uint32_t>(v), where);
}
CF_DEVICE int atomic_add(int32_t* p, int v, CF_WHERE) {
  return static_cast<int>(emulate::global_atomic(emulate::Atomic::kAddU32, p,
                                                 static_cast<uint32_t>(v), where));
}
CF_DEVICE void stg128(void* p, u32x4 v, CF_WHERE) { emulate::global_store(p, &v, 16, where); }

CF_DEVICE uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
CF_DEVICE float bits_float(uint32_t x) { return __builtin_bit_cast(float, x); }

CF_DEVICE float shfl_xor(float v, int mask, CF_WHERE) {
  return bits_float(emulate::shuffle(emulate::Shuffle::kXor, float_bits(v), mask, where));
}
CF_DEVICE uint32_t shfl_xor(uint32_t v, int mask, CF_WHERE) {
  return emulate::shuffle(emulate::Shuffle::kXor, v, mask, where);
}
CF_DEVICE uint32_t shfl_idx(uint32_t v, int source_lane, CF_WHERE) {
  return emulate::shuffle(emulate::Shuffle::kIndex, v, source_lane, where);
}
CF_DEVICE uint32_t redux_max(uint32_t v, CF_WHERE) {
  for (int mask = 1; mask < 32; mask *= 2) {
    const uint32_t other = emulate::shuffle(emulate::Shuffle::kXor, v, mask, where);
    if (other > v) v = other;
  }
  return v;
}
CF_DEVICE bool vote_any(bool p, CF_WHERE) { return emulate::vote_ballot(p, where) != 0; }
CF_DEVICE bool vote_all(bool p, CF_WHERE) { return emulate::vote_ballot(p, where) == 0xffffffffu; }
CF_DEVICE uint32_t vote_ballot(bool p, CF_WHERE) { return emulate::vote_ballot(p, where); }
CF_DEVICE void warp_sync(CF_WHERE) { emulate::warp_sync(0xffffffffu, where); }

CF_DEVICE void cta_sync(CF_WHERE) { emulate::barrier_sync(0, 0, where); }
CF_DEVICE void named_barrier_sync(int id, int threads, CF_WHERE) {
  emulate::barrier_sync(id, threads, where);
}
CF_DEVICE void named_barrier_arrive(int id, int threads, CF_WHERE) {
  emulate::barrier_arrive(id, threads, where);
}

// The host's maths is within 1 ulp; the device's ex2 and lg2 are approximate (2 ulp, 2^-22), and
// its ex2 and rcp flush denormals.
inline constexpr float kInfinity = __builtin_huge_valf();
CF_DEVICE float ex2(float x) { return __builtin_exp2f(x); }
CF_DEVICE float lg2(float x) { return __builtin_log2f(x); }
CF_DEVICE float rcp(float x) { return 1.0f / x; }
CF_DEVICE float opaque(float x) { return x; }
CF_DEVICE float fmax(float a, float b) { return __builtin_fmaxf(a, b); }
CF_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
CF_DEVICE float mul(float a, float b) { return a * b; }
CF_DEVICE float fabs(float a) { return __builtin_fabsf(a); }

CF_DEVICE uint32_t emulated_bf16(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;  // the one NaN that cvt makes
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
CF_DEVICE uint32_t emulated_f16(float x) {
  if (x != x) return 0x7fffu;
  return __builtin_bit_cast(uint16_t, static_cast<_Float16>(x));
}
template <class Element>
CF_DEVICE uint32_t pack2(float low, float high);
template <>
CF_DEVICE uint32_t pack2<bf16_t>(float low, float high) {
  return emulated_bf16(low) | emulated_bf16(high) << 16;
}
template <>
CF_DEVICE uint32_t pack2<f16_t>(float low, float high) {
  return emulated_f16(low) | emulated_f16(high) << 16;
}

template <class Element>
CF_DEVICE void unpack2(float& low, float& high, uint32_t pair);
template <>
CF_DEVICE void unpack2<bf16_t>(float& low, float& high, uint32_t pair) {
  low = bits_float(pair << 16);
  high = bits_float(pair & 0xffff0000u);
}
template <>
CF_DEVICE void unpack2<f16_t>(float& low, float& high, uint32_t pair) {
  low = static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(pair)));
  high = static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(pair >> 16)));
}

CF_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = selector >> 4 * i & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (choice & 7)) & 0xff;
    if ((choice & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;  // its sign, eight times
    result |= byte << 8 * i;
  }
  return result;
}
// By the spacing of e4m3 numbers: 2^-9 below 2^-6, an eighth of the power of two from there on.
CF_DEVICE uint32_t emulated_e4m3(float x) {
  if (x != x) return 0x7f;
  const uint32_t sign = float_bits(x) >> 24 & 0x80;
  const float magnitude = __builtin_fminf(__builtin_fabsf(x), 448.0f);
  int exponent = static_cast<int>(float_bits(magnitude) >> 23) - 127;
  if (exponent < -6) exponent = -6;
  const float steps = __builtin_rintf(__builtin_ldexpf(magnitude, 3 - exponent));  // 0 to 16
  return sign | static_cast<uint32_t>((exponent + 6) * 8 + static_cast<int>(steps));
}
CF_DEVICE uint32_t pack4_e4m3(float v0, float v1, float v2, float v3) {
  return emulated_e4m3(v0) | emulated_e4m3(v1) << 8 | emulated_e4m3(v2) << 16 |
         emulated_e4m3(v3) << 24;
}

CF_DEVICE void trap(CF_WHERE) { emulate::trap(where); }

// --- sm80.cuh ------------------------------------------------------------------------------------

CF_DEVICE void cp_async_16(saddr dst, const void* src, int source_bytes, CF_WHERE) {
  emulate::cp_async(dst, src, 16, source_bytes, where);
}
CF_DEVICE void cp_async_commit(CF_WHERE) { emulate::cp_async_commit(where); }
template <int kPending>
CF_DEVICE void cp_async_wait(CF_WHERE) {
  emulate::cp_async_wait(kPending, where);
}
CF_DEVICE void cp_async_wait_all(CF_WHERE) { emulate::cp_async_wait(-1, where); }

CF_DEVICE void ldmatrix_x1(uint32_t (&r)[1], saddr a, CF_WHERE) {
  emulate::ldmatrix(r, 1, false, a, where);
}
CF_DEVICE void ldmatrix_x2(uint32_t (&r)[2], saddr a, CF_WHERE) {
  emulate::ldmatrix(r, 2, false, a, where);
}
CF_DEVICE void ldmatrix_x4(uint32_t (&r)[4], saddr a, CF_WHERE) {
  emulate::ldmatrix(r, 4, false, a, where);
}
CF_DEVICE void ldmatrix_x1_trans(uint32_t (&r)[1], saddr a, CF_WHERE) {
  emulate::ldmatrix(r, 1, true, a, where);
}
CF_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], saddr a, CF_WHERE) {
  emulate::ldmatrix(r, 2, true, a, where);
}
CF_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], saddr a, CF_WHERE) {
  emulate::ldmatrix(r, 4, true, a, where);
}
template <class Element>
CF_DEVICE void mma_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1, CF_WHERE) {
  const uint32_t b[2] = {b0, b1};
  emulate::mma_m16n8k16(emulate::kFormatOf<Element>, d, a, b, where);
}

// --- sm90.cuh ------------------------------------------------------------------------------------

CF_DEVICE void mbarrier_init(saddr bar, int count, CF_WHERE) {
  emulate::mbarrier_init(bar, count, where);
}
CF_DEVICE void fence_mbarrier_init(CF_WHERE) { emulate::mbarrier_fence_init(where); }
CF_DEVICE void mbarrier_arrive(saddr bar, CF_WHERE) { emulate::mbarrier_arrive(bar, 1, 0, where); }
CF_DEVICE void mbarrier_arrive_expect_tx(saddr bar, uint32_t bytes, CF_WHERE) {
  emulate::mbarrier_arrive(bar, 1, bytes, where);
}
CF_DEVICE void mbarrier_arrive_remote(saddr cluster_bar, CF_WHERE) {
  emulate::mbarrier_arrive(cluster_bar, 1, 0, where);
}
CF_DEVICE bool mbarrier_try_wait(saddr bar, uint32_t parity, CF_WHERE) {
  return emulate::mbarrier_try_wait(bar, parity, where);
}
CF_DEVICE void mbarrier_wait(saddr bar, uint32_t parity, CF_WHERE) {
  emulate::mbarrier_wait(bar, parity, where);
}
CF_DEVICE void fence_proxy_async(CF_WHERE) { emulate::fence_proxy_async(where); }

inline constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
inline constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

CF_DEVICE void tma_prefetch_descriptor(const CUtensorMap* map, CF_WHERE) {
  emulate::tma_prefetch(map, where);
}
CF_DEVICE void tma_load_4d(saddr dst, const CUtensorMap* map, saddr bar, int c0, int c1, int c2,
                           int c3, uint64_t, CF_WHERE) {
  emulate::tma_load(dst, map, bar, 4, {{c0, c1, c2, c3}}, 0, false, where);
}
CF_DEVICE void tma_load_4d_multicast(saddr dst, const CUtensorMap* map, saddr bar, int c0, int c1,
                                     int c2, int c3, uint16_t cta_mask, uint64_t, CF_WHERE) {
  emulate::tma_load(dst, map, bar, 4, {{c0, c1, c2, c3}}, cta_mask, false, where);
}
CF_DEVICE void tma_load_5d(saddr dst, const CUtensorMap* map, saddr bar, int c0, int c1, int c2,
                           int c3, int c4, uint64_t, CF_WHERE) {
  emulate::tma_load(dst, map, bar, 5, {{c0, c1, c2, c3, c4}}, 0, false, where);
}
CF_DEVICE void tma_load_5d_multicast(saddr dst, const CUtensorMap* map, saddr bar, int c0, int c1,
                                     int c2, int c3, int c4, uint16_t cta_mask, uint64_t,
                                     CF_WHERE) {
  emulate::tma_load(dst, map, bar, 5, {{c0, c1, c2, c3, c4}}, cta_mask, false, where);
}
CF_DEVICE void tma_store_5d(const CUtensorMap* map, saddr src, int c0, int c1, int c2, int c3,
                            int c4, CF_WHERE) {
  emulate::tma_store(map, src, 5, {{c0, c1, c2, c3, c4}}, false, where);
}
CF_DEVICE void tma_store_4d(const CUtensorMap* map, saddr src, int c0, int c1, int c2, int c3,
                            CF_WHERE) {
  emulate::tma_store(map, src, 4, {{c0, c1, c2, c3}}, false, where);
}
CF_DEVICE void tma_reduce_add_4d(const CUtensorMap* map, saddr src, int c0, int c1, int c2, int c3,
                                 CF_WHERE) {
  emulate::tma_store(map, src, 4, {{c0, c1, c2, c3}}, true, where);
}
CF_DEVICE void bulk_load(saddr dst, const void* src, uint32_t bytes, saddr bar, CF_WHERE) {
  emulate::bulk_load(dst, src, bytes, bar, 0, where);
}
CF_DEVICE void bulk_reduce_add_f32(float* dst, saddr src, uint32_t bytes, CF_WHERE) {
  emulate::bulk_store(dst, src, bytes, true, where);
}
CF_DEVICE void tma_commit(CF_WHERE) { emulate::bulk_commit(where); }
template <int kPending>
CF_DEVICE void tma_wait_read(CF_WHERE) {
  emulate::bulk_wait(kPending, true, where);
}
template <int kPending>
CF_DEVICE void tma_wait(CF_WHERE) {
  emulate::bulk_wait(kPending, false, where);
}

CF_DEVICE uint32_t cluster_cta_rank() {
  return static_cast<uint32_t>(emulate::current->cta_rank);
}
CF_DEVICE saddr map_to_cta(saddr a, uint32_t rank, CF_WHERE) {
  return emulate::map_to_cta(a, rank, where);
}
CF_DEVICE void store_async_32(saddr cluster_dst, uint32_t value, saddr cluster_bar, CF_WHERE) {
  emulate::store_async(cluster_dst, value, cluster_bar, where);
}
CF_DEVICE void cluster_arrive(CF_WHERE) { emulate::cluster_arrive(where); }
CF_DEVICE void cluster_wait(CF_WHERE) { emulate::cluster_wait(where); }
CF_DEVICE void cluster_sync(CF_WHERE) {
  emulate::cluster_arrive(where);
  emulate::cluster_wait(where);
}

CF_DEVICE bool elect_one(CF_WHERE) { return emulate::elect_one(where); }
template <int kRegisters>
CF_DEVICE void setmaxnreg_inc(CF_WHERE) {
  emulate::setmaxnreg(kRegisters, true, where);
}
template <int kRegisters>
CF_DEVICE void setmaxnreg_dec(CF_WHERE) {
  emulate::setmaxnreg(kRegisters, false, where);
}

CF_DEVICE void stmatrix_x4(saddr a, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3, CF_WHERE) {
  const uint32_t r[4] = {r0, r1, r2, r3};
  emulate::stmatrix(r, 4, false, a, where);
}
CF_DEVICE void stmatrix_x4_trans(saddr a, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3,
                                 CF_WHERE) {
  const uint32_t r[4] = {r0, r1, r2, r3};
  emulate::stmatrix(r, 4, true, a, where);
}

// The emulator runs one grid at a time.
CF_DEVICE void grid_dependency_wait() {}
CF_DEVICE void grid_dependency_launch() {}

// --- wgmma.cuh -----------------------------------------------------------------------------------

CF_DEVICE void wgmma_fence(CF_WHERE) { emulate::wgmma_fence(where); }
CF_DEVICE void wgmma_commit(CF_WHERE) { emulate::wgmma_commit(where); }
template <int kPending>
CF_DEVICE void wgmma_wait(CF_WHERE) {
  emulate::wgmma_wait(kPending, where);
}
template <int kCount>
CF_DEVICE void wgmma_pin(float (&)[kCount]) {}

template <class Element, int kN, uint32_t kHighA, uint32_t kHighB, int kMnMajorB>
CF_DEVICE void wgmma_ss(float (&d)[kN / 2], uint32_t a_low, uint32_t b_low, bool accumulate,
                        CF_WHERE) {
  static constexpr emulate::WgmmaForm kForm = {kN, emulate::kFormatOf<Element>, false, false,
                                               kMnMajorB != 0};
  emulate::wgmma(kForm, d, nullptr, static_cast<uint64_t>(kHighA) << 32 | a_low,
                 static_cast<uint64_t>(kHighB) << 32 | b_low, accumulate, where);
}
template <class Element, int kN, uint32_t kHighA, uint32_t kHighB>
CF_DEVICE void wgmma_ss_transposed(float (&d)[kN / 2], uint32_t a_low, uint32_t b_low,
                                   bool accumulate, CF_WHERE) {
  static constexpr emulate::WgmmaForm kForm = {kN, emulate::kFormatOf<Element>, false, true, false};
  emulate::wgmma(kForm, d, nullptr, static_cast<uint64_t>(kHighA) << 32 | a_low,
                 static_cast<uint64_t>(kHighB) << 32 | b_low, accumulate, where);
}
template <class Element, int kN, uint32_t kHighB, int kMnMajorB>
CF_DEVICE void wgmma_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint32_t b_low,
                        bool accumulate, CF_WHERE) {
  static constexpr emulate::WgmmaForm kForm = {kN, emulate::kFormatOf<Element>, true, false,
                                               kMnMajorB != 0};
  emulate::wgmma(kForm, d, a, 0, static_cast<uint64_t>(kHighB) << 32 | b_low, accumulate, where);
}

// --- wgmma_e4m3.cuh ------------------------------------------------------------------------------

template <int kN, uint32_t kHighA, uint32_t kHighB>
CF_DEVICE void wgmma_e4m3_ss(float (&d)[kN / 2], uint32_t a_low, uint32_t b_low, bool accumulate,
                             CF_WHERE) {
  static constexpr emulate::WgmmaForm kForm = {kN, emulate::Format::kE4m3, false, false, false};
  emulate::wgmma(kForm, d, nullptr, static_cast<uint64_t>(kHighA) << 32 | a_low,
                 static_cast<uint64_t>(kHighB) << 32 | b_low, accumulate, where);
}
template <int kN, uint32_t kHighB>
CF_DEVICE void wgmma_e4m3_rs(float (&d)[kN / 2], const uint32_t (&a)[4], uint32_t b_low,
                             bool accumulate, CF_WHERE) {
  static constexpr emulate::WgmmaForm kForm = {kN, emulate::Format::kE4m3, true, false, false};
  emulate::wgmma(kForm, d, a, 0, static_cast<uint64_t>(kHighB) << 32 | b_low, accumulate, where);
}

// --- sm100.cuh -----------------------------------------------------------------------------------

template <int kColumns>
CF_DEVICE void tcgen05_alloc(saddr dst, CF_WHERE) {
  emulate::tcgen05_alloc(dst, kColumns, 1, where);
}
CF_DEVICE void tcgen05_relinquish_alloc_permit(CF_WHERE) { emulate::tcgen05_relinquish(1, where); }
template <int kColumns>
CF_DEVICE void tcgen05_dealloc(taddr base, CF_WHERE) {
  emulate::tcgen05_dealloc(base, kColumns, 1, where);
}
CF_DEVICE void tcgen05_fence_before(CF_WHERE) { emulate::tcgen05_fence_before(where); }
CF_DEVICE void tcgen05_fence_after(CF_WHERE) { emulate::tcgen05_fence_after(where); }
CF_DEVICE void tcgen05_wait_ld(CF_WHERE) { emulate::tcgen05_wait_load(where); }
CF_DEVICE void tcgen05_wait_st(CF_WHERE) { emulate::tcgen05_wait_store(where); }
template <int kCount>
CF_DEVICE void tcgen05_pin(float (&)[kCount]) {}

template <class Element>
CF_DEVICE constexpr uint32_t tcgen05_instruction_descriptor(int m, int n, bool mn_major_b,
                                                            bool mn_major_a = false) {
  const uint32_t format = is_same<Element, bf16_t> ? 1u : 0u;
  return 1u << 4 | format << 7 | format << 10 | (mn_major_a ? 1u : 0u) << 15 |
         (mn_major_b ? 1u : 0u) << 16 |
         static_cast<uint32_t>(n / 8) << 17 | static_cast<uint32_t>(m / 16) << 24;
}
template <uint32_t kInstruction, uint32_t kHighA, uint32_t kHighB>
CF_DEVICE void tcgen05_mma_ss(taddr d, uint32_t a_low, uint32_t b_low, bool accumulate, CF_WHERE) {
  emulate::tcgen05_mma({d, false, 0, static_cast<uint64_t>(kHighA) << 32 | a_low,
                        static_cast<uint64_t>(kHighB) << 32 | b_low, kInstruction, accumulate,
                        false, 1},
                       where);
}
template <uint32_t kInstruction, uint32_t kHighB>
CF_DEVICE void tcgen05_mma_ts(taddr d, taddr a, uint32_t b_low, bool accumulate, CF_WHERE) {
  emulate::tcgen05_mma({d, true, a, 0, static_cast<uint64_t>(kHighB) << 32 | b_low, kInstruction,
                        accumulate, false, 1},
                       where);
}
CF_DEVICE void tcgen05_commit(saddr bar, CF_WHERE) { emulate::tcgen05_commit(bar, 1, 0, where); }

template <int kCount>
CF_DEVICE void tcgen05_ld(float* d, taddr a, CF_WHERE) {
  static_assert(kCount == 16 || kCount == 32);
  emulate::tcgen05_load({32, 32}, kCount, reinterpret_cast<uint32_t*>(d), kCount, a, where);
}
template <int kCount>
CF_DEVICE void tcgen05_st(taddr a, const uint32_t* d, CF_WHERE) {
  static_assert(kCount == 16 || kCount == 32);
  emulate::tcgen05_store({32, 32}, kCount, a, d, kCount, where);
}
template <int kCount>
CF_DEVICE void tcgen05_st(taddr a, const float* d, CF_WHERE) {
  static_assert(kCount == 16 || kCount == 32);
  emulate::tcgen05_store({32, 32}, kCount, a, reinterpret_cast<const uint32_t*>(d), kCount, where);
}

// NaN if any of the three is (ptx::fmax prefers numbers).
CF_DEVICE float fmax3_nan(float a, float b, float c) {
  if (a != a || b != b || c != c) return __builtin_nanf("");
  return fmax(fmax(a, b), c);
}
CF_DEVICE void add2(float& d0, float& d1, float a0, float a1, float b0, float b1) {
  d0 = a0 + b0;
  d1 = a1 + b1;
}
CF_DEVICE void mul2(float& d0, float& d1, float a0, float a1, float b0, float b1) {
  d0 = a0 * b0;
  d1 = a1 * b1;
}
// Knuth's two-sum: `error` is exactly a + b - nearest.
CF_DEVICE float emulated_add_down(float a, float b) {
  const float nearest = a + b, part = nearest - a;
  const float error = (a - (nearest - part)) + (b - part);
  return error < 0.0f ? __builtin_nextafterf(nearest, -__builtin_huge_valf()) : nearest;
}
CF_DEVICE void add2_down(float& d0, float& d1, float a0, float a1, float b0, float b1) {
  const float low = emulated_add_down(a0, b0), high = emulated_add_down(a1, b1);
  d0 = low;
  d1 = high;
}
CF_DEVICE void fma2(float& d0, float& d1, float a0, float a1, float b0, float b1, float c0,
                    float c1) {
  const float low = fma(a0, b0, c0), high = fma(a1, b1, c1);
  d0 = low;
  d1 = high;
}

}  // namespace cf::ptx
