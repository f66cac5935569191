// Tiny kernels, each around one wrapper of ptx/, that run on a GPU and on the emulator from this one
// source. suite.py lists the cases, generates their inputs and makes one kernel of them:
// `switch (params.which) { case 0: conformance::ldmatrix<1, false>(params); break; ... }`.
//
// A case writes what it sees, every register of every thread or the bytes of shared memory, to
// params.out. Operands of matrix products are small integers, so that sums are exact in any order.

namespace cf::conformance {

struct Params {
  CUtensorMap map;     // of `in` or of `out`, for the TMA cases
  const uint8_t* in;
  uint8_t* out;
  int32_t which;        // the case
  int32_t argument[8];  // TMA: coordinates, then bytes of the box
};

inline constexpr int kThreads = 128;
inline constexpr int kBarrierOffset = 96 * 1024;  // in dynamic shared memory, behind all data

CF_DEVICE uint32_t input(const Params& p, int word) { return ptx::ldg32(p.in + 4 * word); }
// Word `i` of this thread's results.
CF_DEVICE void output(const Params& p, int i, uint32_t value) {
  ptx::stg32(p.out + 4 * (i * kThreads + ptx::tid()), value);
}

CF_DEVICE void fill_shared(const Params& p, saddr base, int bytes) {
  for (int i = 16 * ptx::tid(); i < bytes; i += 16 * kThreads) {
    ptx::sts128(base + i, ptx::ldg128(p.in + i));
  }
  ptx::cta_sync();
}
CF_DEVICE void dump_shared(uint8_t* out, saddr base, int bytes) {
  ptx::cta_sync();
  for (int i = 16 * ptx::tid(); i < bytes; i += 16 * kThreads) {
    ptx::stg128(out + i, ptx::lds128(base + i));
  }
}
// A permutation of 128 rows of 16 bytes, one for each thread.
CF_DEVICE saddr scattered_row(saddr base) {
  return base + static_cast<uint32_t>((ptx::tid() * 37 + 11) % kThreads) * 16;
}

// --- matrix loads and stores --------------------------------------------------------------------

template <int kCount, bool kTranspose>
CF_DEVICE void ldmatrix(const Params& p) {
  const saddr base = ptx::smem_base();
  fill_shared(p, base, 16 * kThreads);
  uint32_t r[kCount];
  if constexpr (kTranspose) {
    if constexpr (kCount == 1) ptx::ldmatrix_x1_trans(r, scattered_row(base));
    if constexpr (kCount == 2) ptx::ldmatrix_x2_trans(r, scattered_row(base));
    if constexpr (kCount == 4) ptx::ldmatrix_x4_trans(r, scattered_row(base));
  } else {
    if constexpr (kCount == 1) ptx::ldmatrix_x1(r, scattered_row(base));
    if constexpr (kCount == 2) ptx::ldmatrix_x2(r, scattered_row(base));
    if constexpr (kCount == 4) ptx::ldmatrix_x4(r, scattered_row(base));
  }
  CF_UNROLL
  for (int i = 0; i < kCount; ++i) output(p, i, r[i]);
}

template <bool kTranspose>
CF_DEVICE void stmatrix(const Params& p) {
  const saddr base = ptx::smem_base();
  uint32_t r[4];
  CF_UNROLL
  for (int i = 0; i < 4; ++i) r[i] = input(p, i * kThreads + ptx::tid());
  if constexpr (kTranspose) {
    ptx::stmatrix_x4_trans(scattered_row(base), r[0], r[1], r[2], r[3]);
  } else {
    ptx::stmatrix_x4(scattered_row(base), r[0], r[1], r[2], r[3]);
  }
  dump_shared(p.out, base, 16 * kThreads);
}

// --- warp exchange ------------------------------------------------------------------------------

CF_DEVICE void shuffles(const Params& p) {
  const uint32_t mine = input(p, ptx::tid());
  CF_UNROLL
  for (int mask = 1; mask < 32; ++mask) {
    output(p, 2 * mask, ptx::shfl_xor(mine, mask));
    output(p, 2 * mask + 1, ptx::float_bits(ptx::shfl_xor(ptx::bits_float(mine), mask)));
  }
  CF_UNROLL
  for (int lane = 0; lane < 32; ++lane) output(p, 64 + lane, ptx::shfl_idx(mine, lane));
  output(p, 0, static_cast<uint32_t>(ptx::warp_uniform(ptx::warp() * 3 + 1)));
  output(p, 1, static_cast<uint32_t>(ptx::lane()));
}

CF_DEVICE void votes(const Params& p) {
  const uint32_t mine = input(p, ptx::tid());
  CF_UNROLL
  for (int bit = 0; bit < 8; ++bit) {
    // Bit 6 is set by no lane and bit 7 by all (suite.py).
    const bool set = (mine >> bit & 1) != 0;
    output(p, 3 * bit, ptx::vote_ballot(set));
    output(p, 3 * bit + 1, ptx::vote_any(set));
    output(p, 3 * bit + 2, ptx::vote_all(set));
  }
}

// --- conversions and approximate maths ----------------------------------------------------------

template <class Element>
CF_DEVICE void pack(const Params& p) {
  for (int i = 0; i < 64; ++i) {
    const int at = 2 * (i * kThreads + ptx::tid());
    output(p, i, ptx::pack2<Element>(ptx::bits_float(input(p, at)), ptx::bits_float(input(p, at + 1))));
  }
}

// Every bit of a float, NaNs and denormals too.
CF_DEVICE void opaque(const Params& p) {
  for (int i = 0; i < 128; ++i) {
    const float x = ptx::bits_float(input(p, i * kThreads + ptx::tid()));
    output(p, i, ptx::float_bits(ptx::opaque(x)));
  }
}

enum class Function { kEx2, kLg2, kRcp };
template <Function kFunction>
CF_DEVICE void approximate(const Params& p) {
  const float x = ptx::bits_float(input(p, ptx::tid()));
  float y = 0.0f;
  if constexpr (kFunction == Function::kEx2) y = ptx::ex2(x);
  if constexpr (kFunction == Function::kLg2) y = ptx::lg2(x);
  if constexpr (kFunction == Function::kRcp) y = ptx::rcp(x);
  output(p, 0, ptx::float_bits(y));
}

// --- warp matrix product ------------------------------------------------------------------------

template <class Element>
CF_DEVICE void mma(const Params& p) {
  uint32_t a[4];
  float d[4];
  CF_UNROLL
  for (int i = 0; i < 4; ++i) a[i] = input(p, i * kThreads + ptx::tid());
  const uint32_t b0 = input(p, 4 * kThreads + ptx::tid());
  const uint32_t b1 = input(p, 5 * kThreads + ptx::tid());
  CF_UNROLL
  for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(ptx::tid() % 7 - i);
  ptx::mma_m16n8k16<Element>(d, a, b0, b1);
  CF_UNROLL
  for (int i = 0; i < 4; ++i) output(p, i, ptx::float_bits(d[i]));
}

// --- asynchronous copies, barriers --------------------------------------------------------------

CF_DEVICE void cp_async(const Params& p) {
  const saddr base = ptx::smem_base();
  // 0 to 16 bytes, the rest of the 16 is zero filled.
  ptx::cp_async_16(scattered_row(base), p.in + 16 * ptx::tid(), ptx::tid() % 17);
  ptx::cp_async_commit();
  ptx::cp_async_16(scattered_row(base) + 16 * kThreads, p.in + 16 * (kThreads - 1 - ptx::tid()), 16);
  ptx::cp_async_commit();
  ptx::cp_async_commit();  // an empty group counts
  ptx::cp_async_wait<2>();
  const u32x4 first = ptx::lds128(scattered_row(base));
  output(p, 0, first.x);
  output(p, 1, first.w);
  ptx::cp_async_wait_all();
  dump_shared(p.out + 8 * kThreads, base, 32 * kThreads);
}

// A value handed from warp to warp in an order that only the barriers make.
CF_DEVICE void named_barriers(const Params& p) {
  const saddr cell = ptx::smem_base() + 4 * static_cast<uint32_t>(ptx::lane());
  const int warp = ptx::warp();
  constexpr int kPair = 64;
  uint32_t value = input(p, ptx::tid());
  if (warp != 0) {
    ptx::named_barrier_sync(warp, kPair);
    value = value * 31 + ptx::lds32(cell);
  }
  if (warp != 3) {
    ptx::sts32(cell, value);
    ptx::named_barrier_arrive(warp + 1, kPair);
  }
  output(p, 0, value);
}

// What one thread sees of a barrier: results of try_wait, 1 for true.
CF_DEVICE void mbarrier_sequence(const Params& p) {
  const saddr bar = ptx::smem_base();
  for (int i = 0; i < 24; ++i) output(p, i, 0);
  if (ptx::tid() == 0) {
    int i = 0;
    ptx::mbarrier_init(bar, 2);
    ptx::fence_mbarrier_init();
    output(p, i++, ptx::mbarrier_try_wait(bar, 1));  // the phase before the first counts as done
    output(p, i++, ptx::mbarrier_try_wait(bar, 0));
    ptx::mbarrier_arrive(bar);
    output(p, i++, ptx::mbarrier_try_wait(bar, 0));
    ptx::mbarrier_arrive(bar);
    output(p, i++, ptx::mbarrier_try_wait(bar, 0));  // both arrived
    output(p, i++, ptx::mbarrier_try_wait(bar, 1));  // the second phase is open
    ptx::mbarrier_arrive(bar);
    ptx::mbarrier_arrive(bar);
    output(p, i++, ptx::mbarrier_try_wait(bar, 1));
    output(p, i++, ptx::mbarrier_try_wait(bar, 0));  // the third is open
  }
}

// --- TMA ----------------------------------------------------------------------------------------

// Bytes that are not zero, for TMA to write over.
CF_DEVICE void taint_shared(saddr base, int bytes) {
  for (int i = 4 * ptx::tid(); i < bytes; i += 4 * kThreads) ptx::sts32(base + i, 0xA5A5A5A5u);
  ptx::fence_proxy_async();
}

// A map of `kRank` dimensions, coordinates from argument[0], bytes of a box in argument[kRank].
template <int kRank>
CF_DEVICE void tma_load(const Params& p) {
  const saddr base = ptx::smem_base(), bar = base + kBarrierOffset;
  const auto& at = p.argument;
  const int bytes = at[kRank];
  taint_shared(base, bytes);
  ptx::cta_sync();
  if (ptx::tid() == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(bar, static_cast<uint32_t>(bytes));
    if constexpr (kRank == 4) {
      ptx::tma_load_4d(base, &p.map, bar, at[0], at[1], at[2], at[3], ptx::kEvictNormal);
    } else {
      ptx::tma_load_5d(base, &p.map, bar, at[0], at[1], at[2], at[3], at[4], ptx::kEvictNormal);
    }
  }
  ptx::cta_sync();
  ptx::mbarrier_wait(bar, 0);
  dump_shared(p.out, base, bytes);
}

template <int kRank, bool kAdd>
CF_DEVICE void tma_store(const Params& p) {
  static_assert(kRank == 4 || !kAdd);
  const saddr base = ptx::smem_base();
  const auto& at = p.argument;
  fill_shared(p, base, at[kRank]);
  ptx::fence_proxy_async();
  ptx::cta_sync();
  if (ptx::tid() == 0) {
    if constexpr (kAdd) {
      ptx::tma_reduce_add_4d(&p.map, base, at[0], at[1], at[2], at[3]);
    } else if constexpr (kRank == 4) {
      ptx::tma_store_4d(&p.map, base, at[0], at[1], at[2], at[3]);
    } else {
      ptx::tma_store_5d(&p.map, base, at[0], at[1], at[2], at[3], at[4]);
    }
    ptx::tma_commit();
    ptx::tma_wait_read<0>();
    ptx::tma_wait<0>();
  }
}

// --- clusters of two CTAs -----------------------------------------------------------------------

// Each CTA loads its half of the rows for both (argument[kRank + 1] of them, in dimension 1), and
// CTA 1 arrives on a barrier of CTA 0.
template <int kRank>
CF_DEVICE void tma_multicast(const Params& p) {
  const saddr base = ptx::smem_base(), loaded = base + kBarrierOffset, joined = loaded + 8;
  const auto& at = p.argument;
  const int half = at[kRank];
  const uint32_t rank = ptx::cluster_cta_rank();
  taint_shared(base, 2 * half);
  if (ptx::tid() == 0) {
    ptx::mbarrier_init(loaded, 1);
    ptx::mbarrier_init(joined, 2);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(loaded, static_cast<uint32_t>(2 * half));
  }
  ptx::cluster_sync();
  if (ptx::tid() == 0) {
    const saddr target = base + rank * static_cast<uint32_t>(half);
    const int row = at[1] + static_cast<int>(rank) * at[kRank + 1];
    if constexpr (kRank == 4) {
      ptx::tma_load_4d_multicast(target, &p.map, loaded, at[0], row, at[2], at[3], 3,
                                 ptx::kEvictLast);
    } else {
      ptx::tma_load_5d_multicast(target, &p.map, loaded, at[0], row, at[2], at[3], at[4], 3,
                                 ptx::kEvictLast);
    }
    ptx::mbarrier_arrive_remote(ptx::map_to_cta(joined, 0));
  }
  ptx::mbarrier_wait(loaded, 0);
  if (rank == 0) ptx::mbarrier_wait(joined, 0);
  dump_shared(p.out + rank * static_cast<uint32_t>(2 * half), base, 2 * half);
  ptx::cluster_sync();
}

// Every thread sends two words, in two rounds, to the other CTA (argument[0] is 1) or to its own
// (0). The wait for their bytes is all that makes them visible.
CF_DEVICE void store_async(const Params& p) {
  constexpr int kRounds = 2, kBytes = 2 * 4 * kThreads;
  const saddr inbox = ptx::smem_base(), bar = inbox + kBarrierOffset;
  const uint32_t rank = ptx::cluster_cta_rank(), to = rank ^ static_cast<uint32_t>(p.argument[0]);
  const int place = (ptx::tid() * 37 + 11) % kThreads;
  if (ptx::tid() == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
  }
  for (int round = 0; round < kRounds; ++round) {
    if (ptx::tid() == 0) ptx::mbarrier_arrive_expect_tx(bar, kBytes);
    ptx::cluster_sync();  // announced, and the words of the last round have been read
    const int words = (static_cast<int>(rank) * kRounds + round) * 2 * kThreads;
    for (int i = 0; i < 2; ++i) {
      ptx::store_async_32(
          ptx::map_to_cta(inbox + static_cast<uint32_t>(4 * (i * kThreads + place)), to),
          input(p, words + i * kThreads + ptx::tid()), ptx::map_to_cta(bar, to));
    }
    ptx::mbarrier_wait(bar, static_cast<uint32_t>(round & 1));
    for (int i = 0; i < 2; ++i) {
      const int word = i * kThreads + ptx::tid();
      ptx::stg32(p.out + 4 * (words + word), ptx::lds32(inbox + static_cast<uint32_t>(4 * word)));
    }
  }
  ptx::cluster_sync();
}

// The output's first word counts: every thread of both CTAs adds argument[1] to it, argument[0]
// times, from argument[2]. Each value that an addition returned stands where it belongs in their
// order, behind the counters; one that came twice leaves a gap. The second word takes the input,
// any integers, and wraps around.
CF_DEVICE void atomic_add(const Params& p) {
  const int times = p.argument[0], step = p.argument[1], start = p.argument[2];
  int32_t* const counters = reinterpret_cast<int32_t*>(p.out);
  for (int i = 0; i < times; ++i) {
    const int before = ptx::atomic_add(counters, step);
    const int index = (before - start) / step;
    if (index >= 0 && index < 2 * kThreads * times) {
      ptx::stg32(p.out + 8 + 4 * index, static_cast<uint32_t>(before));
    }
    const int row = static_cast<int>(ptx::cluster_cta_rank()) * times + i;
    ptx::atomic_add(counters + 1, static_cast<int>(input(p, row * kThreads + ptx::tid())));
  }
}

// --- warpgroup matrix product -------------------------------------------------------------------

// Input [rows][Tile::kColumns] to a swizzled tile.
template <class Tile>
CF_DEVICE void fill_tile(const uint8_t* in, saddr base, int rows) {
  constexpr int kGranules = Tile::kColumns / 8;
  for (int i = ptx::tid(); i < rows * kGranules; i += kThreads) {
    const int row = i / kGranules, granule = i % kGranules;
    ptx::sts128(base + Tile::granule_offset(rows, row, granule), ptx::ldg128(in + 16 * i));
  }
}

template <int kN>
CF_DEVICE void output_accumulators(const Params& p, float (&d)[kN / 2]) {
  CF_UNROLL
  for (int i = 0; i < kN / 2; ++i) output(p, i, ptx::float_bits(d[i]));
}

template <int kN>
CF_DEVICE void start_accumulators(float (&d)[kN / 2]) {
  CF_UNROLL
  for (int i = 0; i < kN / 2; ++i) d[i] = static_cast<float>((ptx::tid() + i) % 5);
}

// D[64][kN] += A[64][kK] B[kN][kK]^T, both K-major in shared memory; input A, then B.
template <class Element, int kN, int kK>
CF_DEVICE void wgmma_k_major(const Params& p) {
  using Operand = Tile<kK>;
  const saddr a = ptx::smem_base(), b = a + 32 * 1024;
  fill_tile<Operand>(p.in, a, 64);
  fill_tile<Operand>(p.in + Operand::bytes(64), b, kN);
  ptx::fence_proxy_async();
  ptx::cta_sync();
  float d[kN / 2];
  start_accumulators<kN>(d);
  const uint32_t a_low = Descriptor<Operand>::k_major(a), b_low = Descriptor<Operand>::k_major(b);
  constexpr uint32_t kHigh = Descriptor<Operand>::kHigh;
  ptx::wgmma_pin(d);
  ptx::wgmma_fence();
  CF_UNROLL
  for (int k = 0; k < kK / 16; ++k) {
    ptx::wgmma_ss<Element, kN, kHigh, kHigh, 0>(d, a_low + Descriptor<Operand>::k_step(64, k),
                                                b_low + Descriptor<Operand>::k_step(kN, k), true);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(d);
  output_accumulators<kN>(p, d);
}

// D[64][kN] = A[64][kK] B[kK][kN], A in registers, B MN-major in shared memory; input A, then B.
template <class Element, int kN, int kK>
CF_DEVICE void wgmma_registers_mn_major(const Params& p) {
  using Operand = Tile<kN>;
  const saddr b = ptx::smem_base();
  fill_tile<Operand>(p.in + 64 * kK * 2, b, kK);
  ptx::fence_proxy_async();
  ptx::cta_sync();
  uint32_t a[kK / 16][4];
  const int row = 16 * ptx::warp() + ptx::lane() / 4, column = 2 * (ptx::lane() % 4);
  CF_UNROLL
  for (int k = 0; k < kK / 16; ++k) {
    CF_UNROLL
    for (int i = 0; i < 4; ++i) {
      a[k][i] = input(p, ((row + 8 * (i % 2)) * kK + 16 * k + column + 8 * (i / 2)) / 2);
    }
  }
  float d[kN / 2];
  start_accumulators<kN>(d);
  const uint32_t b_low = Descriptor<Operand>::mn_major(b, kK);
  ptx::wgmma_pin(d);
  ptx::wgmma_fence();
  CF_UNROLL
  for (int k = 0; k < kK / 16; ++k) {
    ptx::wgmma_rs<Element, kN, Descriptor<Operand>::kHigh, 1>(
        d, a[k], b_low + Descriptor<Operand>::mn_step(k), k != 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(d);
  output_accumulators<kN>(p, d);
}

// The same with A K-major in shared memory.
template <class Element, int kN, int kK>
CF_DEVICE void wgmma_mn_major(const Params& p) {
  using OperandA = Tile<kK>;
  using OperandB = Tile<kN>;
  const saddr a = ptx::smem_base(), b = a + 32 * 1024;
  fill_tile<OperandA>(p.in, a, 64);
  fill_tile<OperandB>(p.in + OperandA::bytes(64), b, kK);
  ptx::fence_proxy_async();
  ptx::cta_sync();
  float d[kN / 2];
  start_accumulators<kN>(d);
  const uint32_t a_low = Descriptor<OperandA>::k_major(a);
  const uint32_t b_low = Descriptor<OperandB>::mn_major(b, kK);
  ptx::wgmma_pin(d);
  ptx::wgmma_fence();
  CF_UNROLL
  for (int k = 0; k < kK / 16; ++k) {
    ptx::wgmma_ss<Element, kN, Descriptor<OperandA>::kHigh, Descriptor<OperandB>::kHigh, 1>(
        d, a_low + Descriptor<OperandA>::k_step(64, k), b_low + Descriptor<OperandB>::mn_step(k), k != 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin(d);
  output_accumulators<kN>(p, d);
}

}  // namespace cf::conformance
