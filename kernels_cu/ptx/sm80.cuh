// Instructions from sm_80 on: cp.async, ldmatrix and mma.sync, the tools of the sm80 kernel family.
// They exist on every later architecture too.
// Sources: PTX ISA 8.x/9.x, sections "Data Movement and Conversion Instructions: cp.async",
// "Warp-level matrix load instruction: ldmatrix" and "Multiply-and-Accumulate Instruction: mma".
#pragma once
#include "types.cuh"

namespace cf::ptx {

// --- cp.async (PTX ISA: cp.async, cp.async.commit_group, cp.async.wait_group, cp.async.wait_all) -

// Copies `source_bytes` (0 to 16) from global to shared memory past L1 and fills the rest of the 16
// destination bytes with zeros. Both addresses are 16-byte aligned, and `src` must be a mapped
// address even where source_bytes is 0. Asynchronous: done once its group has been waited for, and
// then visible to this thread alone; a barrier makes it visible to the others.
CF_DEVICE void cp_async_16(saddr dst, const void* src, int source_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(source_bytes)
               : "memory");
}
// Closes this thread's group of copies; a group may be empty.
CF_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// At most kPending of this thread's newest groups are still in flight.
template <int kPending>
CF_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// All copies of this thread are done, committed or not.
CF_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// --- ldmatrix -----------------------------------------------------------------------------------
//
// Loads 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8
// (16-byte aligned; x2 reads the addresses of lanes 0-15, x1 of lanes 0-7). r[i] of lane l holds
// elements (l / 4, 2 * (l % 4) + {0, 1}) of matrix i, of its transpose for `_trans`.

CF_DEVICE void ldmatrix_x1(uint32_t (&r)[1], saddr a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(r[0])
               : "r"(a)
               : "memory");
}
CF_DEVICE void ldmatrix_x2(uint32_t (&r)[2], saddr a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(a)
               : "memory");
}
CF_DEVICE void ldmatrix_x4(uint32_t (&r)[4], saddr a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
CF_DEVICE void ldmatrix_x1_trans(uint32_t (&r)[1], saddr a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(r[0])
               : "r"(a)
               : "memory");
}
CF_DEVICE void ldmatrix_x2_trans(uint32_t (&r)[2], saddr a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(a)
               : "memory");
}
CF_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], saddr a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}

// --- mma.sync (m16n8k16, 16-bit operands, float32 accumulators) --------------------------------
//
// d[16, 8] += a[16, 16] * b[16, 8]. With g = l / 4 and q = l % 4, lane l holds
//   a[0..3]: rows g, g + 8, g, g + 8; columns 2q + {0, 1} (a[0], a[1]) and 2q + 8 + {0, 1} (a[2],
//   a[3]) b0, b1:  rows 2q + {0, 1} and 2q + 8 + {0, 1} of column g
//   d[0..3]: row g columns 2q, 2q + 1, then row g + 8, the same columns
// `d` points to four registers of a local array, with an index known at compile time.

template <class Element>
CF_DEVICE void mma_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
CF_DEVICE void mma_m16n8k16<bf16_t>(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
CF_DEVICE void mma_m16n8k16<f16_t>(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace cf::ptx
