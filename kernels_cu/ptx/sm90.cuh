// Instructions from sm_90 on, shared by Hopper and Blackwell: mbarrier, TMA, clusters, proxy
// fences, stmatrix, elect, setmaxnreg, programmatic dependent launch.
// Sources: PTX ISA 8.x/9.x, sections "Parallel Synchronization and Communication Instructions:
// mbarrier" and "Data Movement and Conversion Instructions: cp.async.bulk.tensor".
#pragma once
#include "types.cuh"

namespace cf::ptx {

// --- mbarrier -----------------------------------------------------------------------------------

// A phase completes when `count` arrivals and all announced bytes have come.
CF_DEVICE void mbarrier_init(saddr bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
// Makes initialised barriers visible to the cluster and to the async proxy; then synchronise.
CF_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
CF_DEVICE void mbarrier_arrive(saddr bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// One arrival that also announces `bytes` of asynchronous copies.
CF_DEVICE void mbarrier_arrive_expect_tx(saddr bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
// Arrives on the barrier of another CTA of the cluster (address from `map_to_cta`). The default
// form: `.release.cluster` would hold the thread for 313 clocks (H200, measured) and is only needed
// to hand over data written by ordinary stores.
CF_DEVICE void mbarrier_arrive_remote(saddr cluster_bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_bar) : "memory");
}
CF_DEVICE bool mbarrier_try_wait(saddr bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}
// Waits until the phase of the given parity has completed. A C++ loop: an asm-internal label loop
// beside 64-bit descriptors makes ptxas spill (measured on the backward loop).
CF_DEVICE void mbarrier_wait(saddr bar, uint32_t parity) {
  while (!mbarrier_try_wait(bar, parity)) {
  }
}

// --- proxies ------------------------------------------------------------------------------------

// Ordinary shared-memory stores of this thread become visible to TMA, wgmma and tcgen05.
CF_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- TMA ----------------------------------------------------------------------------------------

// L2 eviction priorities (createpolicy encodings).
inline constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
inline constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

CF_DEVICE void tma_prefetch_descriptor(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Loads one box at coordinates {c0 (fastest), c1, c2, c3}; `bar` receives the full box's bytes,
// also where the box overhangs the tensor (zero filled).
CF_DEVICE void tma_load_4d(saddr dst, const CUtensorMap* map, saddr bar, int c0, int c1, int c2,
                           int c3, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}
CF_DEVICE void tma_load_5d(saddr dst, const CUtensorMap* map, saddr bar, int c0, int c1, int c2,
                           int c3, int c4, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}
// The same box to the same offset in every CTA of `cta_mask`, counting on each one's barrier.
CF_DEVICE void tma_load_4d_multicast(saddr dst, const CUtensorMap* map, saddr bar, int c0, int c1,
                                     int c2, int c3, uint16_t cta_mask, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(cta_mask), "l"(policy)
      : "memory");
}
CF_DEVICE void tma_load_5d_multicast(saddr dst, const CUtensorMap* map, saddr bar, int c0, int c1,
                                     int c2, int c3, int c4, uint16_t cta_mask, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;" ::"r"(
          dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(cta_mask), "l"(policy)
      : "memory");
}
CF_DEVICE void tma_store_4d(const CUtensorMap* map, saddr src, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               ::"l"(map),
               "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
CF_DEVICE void tma_store_5d(const CUtensorMap* map, saddr src, int c0, int c1, int c2, int c3,
                            int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(map),
      "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
// Adds a box of floats (or 16-bit floats: the map's type) into global memory.
CF_DEVICE void tma_reduce_add_4d(const CUtensorMap* map, saddr src, int c0, int c1, int c2,
                                 int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group"
      " [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
CF_DEVICE void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// At most kPending of this thread's groups have not yet read their shared memory.
template <int kPending>
CF_DEVICE void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// At most kPending of this thread's groups have not yet completed.
template <int kPending>
CF_DEVICE void tma_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- clusters -----------------------------------------------------------------------------------

CF_DEVICE uint32_t cluster_cta_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// The address of the same shared-memory offset in CTA `rank` of the cluster.
CF_DEVICE saddr map_to_cta(saddr a, uint32_t rank) {
  saddr r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank));
  return r;
}
// Stores a word into the shared memory of another CTA of the cluster and counts its 4 bytes on a
// barrier there (both addresses from `map_to_cta`); who waits for that barrier sees the word. (PTX
// ISA: st.async.)
CF_DEVICE void store_async_32(saddr cluster_dst, uint32_t value, saddr cluster_bar) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          cluster_dst),
      "r"(value), "r"(cluster_bar)
      : "memory");
}
CF_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
CF_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
CF_DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// --- warp and register control ------------------------------------------------------------------

// True in exactly one lane of the (converged) warp.
CF_DEVICE bool elect_one() {
  uint32_t chosen;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(chosen));
  return chosen != 0;
}
// Registers per thread of this warpgroup; every warp of it must execute the same one.
template <int kRegisters>
CF_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
CF_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// --- matrix stores (lane l gives the row address of matrix l / 8, row l % 8) --------------------

CF_DEVICE void stmatrix_x4(saddr a, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}
CF_DEVICE void stmatrix_x4_trans(saddr a, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// --- programmatic dependent launch --------------------------------------------------------------

CF_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
CF_DEVICE void grid_dependency_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace cf::ptx
