// Backward attention for Hopper (sm_90a) over 8-bit floats: all five products multiply e4m3 numbers
// and add in float32; gradients come out in 16 bits or float32. head_dim up to 128.
//
// Algorithm: that of backward.cuh, on quantized q, k, v and dout (scales for blocks of tokens).
// cupyflash/fp8_gradients.py defines it to the rounding and has the reasons of its factors, Notes
// [Scales inside weights] and [Exponents of weights]; docs/kernels/backward_fp8.md the errors.
// 8-bit operands lie along what is summed over, so each of q, k and dout is there twice, the second
// time transposed, with its tokens in the order in which the other operand comes to hold them.
//
// Products of a step, kBlockM queries times 128 keys (two consumer warpgroups of 64 keys each):
//   S^T = K Q^T      dP^T = V dO^T                                  from shared memory
//   P   = exp2(S c k q - row_lse + t)                               largest of a warp: 8 to 448
//   dS  = P (dP v q 2^(u-t) - row_delta 2^(u-t))                    largest of the CTA: 8 to 448
//   dV += P^T dO     dK += dS^T Q      P^T, dS^T from registers, dO^T and Q^T from shared memory
//   dQ  = dS K       dS and K^T from shared memory; each warpgroup half of its columns (kBlockM =
//                    64) or 64 of its rows (128); times k / q 2^-u where it is handed over
// q, k, v: scales of a block; row_lse and row_delta contain those of dout (backward_delta_fp8).
//
// Note [Trying an exponent]
// u must suit all 128 keys, so all consumers have to know the largest dS before one of them rounds
// its own. Another meeting in every step would be waited for in every step. Instead each warp
// leaves its largest where the others find it, rounds with u as it was, and looks at all eight
// behind the meeting that dS in shared memory needs anyway. They rarely ask for another u; then dS,
// which is still in registers, is multiplied, rounded and written once more, and all meet again.
//
// Roles (registers per thread after setmaxnreg):
//   warpgroup 0     warp 0, producer: one thread issues every load                          24
//                   warp 1, writer: adds the consumers' parts of dQ to global memory
//                   warp 2, scheduler: deals out tiles; writes the gradients of keys that no
//                   query sees
//   warpgroups 1-2  consumers                                                                240
//
// Shared memory, in order (BackwardLayout; bytes of head_dim 64, 128; rows of 64 bytes have 64-byte
// swizzle, others 128):
//   K      [kBlockN][head_dim]             8 K, 16 K; with K^T later dk
//   K^T    [head_dim][kBlockN]             8 K, 16 K
//   V      [kBlockN][head_dim]             8 K, 16 K; with dS later dv
//   dS     [2][kBlockM][kBlockN]           32 K, 16 K
//   Q      [stages][kBlockM][head_dim]     8 K a stage
//   Q^T    [stages][head_dim][kBlockM]     8 K a stage
//   dO     [stages][kBlockM][head_dim]     8 K a stage
//   dO^T   [stages][head_dim][kBlockM]     8 K a stage
//   dQ     [2 warpgroups][kBlockM * head_dim / 2] floats, in the order of DqOrder: 32 K
//   rows   [stages][2][kBlockM] floats: row_lse (with Q), row_delta (with dO)
//   scales [stages][4] floats: of q, its inverse, nothing, nothing (with Q)
//   tops   [2][8] floats: the largest dS of each consumer warp
//   tiles  [kTileSlots][16] words, from the scheduler to the others   (TileSlot)
//   barriers
//
// Pipeline of a consumer warpgroup, step by step:
//   issue S^T, dP^T;  wait S;  exp2, t;  wait dP;  dS;  dS to shared memory
//   issue dV;  all consumers meet;  u;  issue dQ;  wait dV;  issue dK
//   wait dQ, to shared memory;  wait dK (Q and dO free)
#pragma once
#include "attn/query_blocks.cuh"
#include "attn/query_slots.cuh"
#include "attn/ragged.cuh"
#include "backward_fp8_params.cuh"
#include "ptx/ptx.cuh"
#include "sm90/backward_sums.cuh"
#include "sm90/backward_tiles.cuh"
#include "tile/layout.cuh"
#include "tile/pipeline.cuh"

namespace cf::sm90 {

// Mutants of this kernel alone, behind those that it shares (backward_tiles.cuh).
inline constexpr BackwardMutant kNoRetryFence = static_cast<BackwardMutant>(kBackwardMutants + 1);
inline constexpr BackwardMutant kNoRetryBarrier =
    static_cast<BackwardMutant>(kBackwardMutants + 2);

// Shared-memory tile of 8-bit elements, [rows][kColumns]: as one of half as many of 16 bits, with
// steps of a product of 32 elements where those have 16.
template <int kColumns>
using ByteTile = Tile<kColumns / 2>;
inline constexpr int kStepElements = 32;

template <class Config>
struct BackwardLayout {
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kWidth = Config::kHeadDimQk;
  using HeadTile = ByteTile<kWidth>;    // Q, dO: [kBlockM][head_dim]; K, V: [kBlockN][head_dim]
  using QueryTile = ByteTile<kBlockM>;  // Q^T, dO^T: [head_dim][kBlockM]
  using KeyTile = ByteTile<kBlockN>;    // K^T: [head_dim][kBlockN]; dS: [kBlockM][kBlockN]
  using GradTile = Tile<kWidth>;        // dk, dv: [kBlockN][head_dim], 16 bits
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
  static_assert(kBlockN == kConsumers * kWarpgroupRows);
  static_assert(kBlockM == 64 || kBlockM == 128);
  static_assert(kWidth == Config::kHeadDimV && (kWidth == 64 || kWidth == 128));
  static_assert(Config::kGeneral == 0, "lengths on the device: not yet");

  static constexpr int kKeyBytes = HeadTile::bytes(kBlockN);  // K, K^T, V each
  static constexpr int kQueryBytes = HeadTile::bytes(kBlockM);  // Q, Q^T, dO, dO^T of a stage each
  static constexpr int kScoreBytes = KeyTile::bytes(kBlockM);
  static constexpr int kScoreStages = 2;
  static constexpr int kGradBytes = GradTile::bytes(kBlockN);
  static_assert(kGradBytes <= 2 * kKeyBytes, "dk takes the place of K and K^T");
  static_assert(kGradBytes <= kKeyBytes + kScoreStages * kScoreBytes, "dv that of V and dS");
  static constexpr int kSumBytes = kBlockM * kWidth * 4;
  static constexpr int kRowBytes = kBlockM * 4;
  static constexpr int kScaleBytes = 16;

  // The parts of dQ that the warpgroups compute: 64 rows, or all rows and half of the columns.
  static constexpr bool kByRows = kBlockM == 128;
  static constexpr int kPartColumns = kByRows ? kWidth : kWidth / 2;
  static constexpr int kPartBytes = kSumBytes / kConsumers;
  CF_DEVICE static constexpr int part_bytes(int) { return kPartBytes; }

  static constexpr int kK = 0;
  static constexpr int kKTransposed = kK + kKeyBytes;
  static constexpr int kV = kKTransposed + kKeyBytes;
  static constexpr int kScores = kV + kKeyBytes;
  static constexpr int kQ = kScores + kScoreStages * kScoreBytes;
  static constexpr int kQTransposed = kQ + Config::kStages * kQueryBytes;
  static constexpr int kDout = kQTransposed + Config::kStages * kQueryBytes;
  static constexpr int kDoutTransposed = kDout + Config::kStages * kQueryBytes;
  static constexpr int kSums = kDoutTransposed + Config::kStages * kQueryBytes;
  static constexpr int kRows = kSums + kSumBytes;
  static constexpr int kScales = kRows + Config::kStages * 2 * kRowBytes;
  static constexpr int kConsumerWarps = kConsumerThreads / 32;
  static constexpr int kTopBytes = kConsumerWarps * 4;
  static constexpr int kTops = kScales + Config::kStages * kScaleBytes;
  static constexpr int kTileSlots = 2;
  static constexpr int kTileBytes = 64;
  static constexpr int kTiles = kTops + kScoreStages * kTopBytes;
  static constexpr int kBarriers = kTiles + kTileSlots * kTileBytes;

  // mbarriers. Full: one arrival, of the producer, with the bytes of the load. Empty: one thread of
  // each consumer warpgroup.
  static constexpr int kKFull = kBarriers;      // K and K^T
  static constexpr int kVFull = kKFull + 8;
  static constexpr int kKvEmpty = kVFull + 8;   // dk and dv have been stored
  static constexpr int kQFull = kKvEmpty + 8;   // [stage]: Q, Q^T, row_lse, scales
  static constexpr int kQEmpty = kQFull + 8 * Config::kStages;  // dO has been read before Q
  static constexpr int kDoutFull = kQEmpty + 8 * Config::kStages;  // dO, dO^T, row_delta
  // A warpgroup's part of dQ lies in shared memory (its warps arrive), has been read (the writer).
  static constexpr int kSumsFull = kDoutFull + 8 * Config::kStages;  // [warpgroup]
  static constexpr int kSumsEmpty = kSumsFull + 8 * kConsumers;
  // A tile is described (the scheduler), no longer needed (producer, writer, consumer warpgroups).
  static constexpr int kTileFull = kSumsEmpty + 8 * kConsumers;  // [tile slot]
  static constexpr int kTileEmpty = kTileFull + 8 * kTileSlots;
  static constexpr int kBytes = kTileEmpty + 8 * kTileSlots;
  static_assert(kBytes <= 232448, "Hopper has 227 KB of shared memory a CTA");

  static constexpr int kTileEmptyArrivals = 2 + kConsumers;
};

template <class Config>
CF_DEVICE void initialize_barriers(saddr smem) {
  using Layout = BackwardLayout<Config>;
  ptx::mbarrier_init(smem + Layout::kKFull, 1);
  ptx::mbarrier_init(smem + Layout::kVFull, 1);
  ptx::mbarrier_init(smem + Layout::kKvEmpty, kConsumers);
  for (int i = 0; i < Config::kStages; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kQFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kQEmpty, i), kConsumers);
    ptx::mbarrier_init(barrier_at(smem + Layout::kDoutFull, i), 1);
  }
  for (int i = 0; i < kConsumers; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kSumsFull, i), kWarpgroupThreads / 32);
    ptx::mbarrier_init(barrier_at(smem + Layout::kSumsEmpty, i), 1);
  }
  for (int i = 0; i < Layout::kTileSlots; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kTileFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kTileEmpty, i), Layout::kTileEmptyArrivals);
  }
  ptx::fence_mbarrier_init();
}

// --- producer -----------------------------------------------------------------------------------

// One warp: keys and values of every tile, queries and output gradients of every step, as they are
// and transposed, each with its rows of row_lse or row_delta.
template <class Config>
struct ProducerFp8 {
  using Layout = BackwardLayout<Config>;
  using Rows = TileRows<false>;
  static constexpr int kBlockM = Config::kBlockM;

  const BackwardFp8Params& params;
  const saddr smem;
  const bool elected;  // the whole warp walks the stream (its state is uniform), one thread issues
  TileStream<Config> stream;
  RingPlace<1> kv_place;
  RingPlace<Config::kStages> place;

  // One box holds all columns: none has more than the 128 bytes of a swizzle span.
  CF_DEVICE void load(int dst, saddr full, const CUtensorMap& map, int batch, int head, int row,
                      uint64_t policy) const {
    Rows{0, 0, batch}.load(smem + static_cast<uint32_t>(dst), &map, full, 0, row, head, 0, policy);
  }
  CF_DEVICE void load_transposed(int dst, saddr full, const CUtensorMap& map, int batch, int head,
                                 int token, uint64_t policy) const {
    Rows{0, 0, batch}.load(smem + static_cast<uint32_t>(dst), &map, full, token, 0, head, 0,
                           policy);
  }
  CF_DEVICE void load_keys(const TileSlot<Config>& tile, int batch) {
    if constexpr (kKept<kNoKvEmptyWait>) {
      await_as_warp(smem + Layout::kKvEmpty, kv_place.phase ^ 1);
    }
    if (!elected) return;
    const saddr full = smem + Layout::kKFull;
    const int head = tile.head_kv(), key = tile.key_begin();
    ptx::mbarrier_arrive_expect_tx(full, 2 * Layout::kKeyBytes);
    load(Layout::kK, full, params.base.k_map, batch, head, key, ptx::kEvictFirst);
    load_transposed(Layout::kKTransposed, full, params.k_t_map, batch, head, key,
                    ptx::kEvictFirst);
  }
  CF_DEVICE void load_values(const TileSlot<Config>& tile, int batch) {
    if (elected) {
      const saddr full = smem + Layout::kVFull;
      ptx::mbarrier_arrive_expect_tx(full, Layout::kKeyBytes);
      load(Layout::kV, full, params.base.v_map, batch, tile.head_kv(), tile.key_begin(),
           ptx::kEvictFirst);
    }
    kv_place.advance();
  }
  CF_DEVICE saddr rows_smem(int which) const {
    return smem + static_cast<uint32_t>(Layout::kRows +
                                        (2 * place.stage + which) * Layout::kRowBytes);
  }
  CF_DEVICE void load_queries(const QuerySteps& step, int batch, int64_t slot) {
    const saddr full = barrier_at(smem + Layout::kQFull, place.stage);
    if constexpr (kKept<kNoQEmptyWait>) {
      await_as_warp(barrier_at(smem + Layout::kQEmpty, place.stage), place.phase ^ 1);
    }
    if (!elected) return;
    ptx::mbarrier_arrive_expect_tx(
        full, 2 * Layout::kQueryBytes + Layout::kRowBytes + Layout::kScaleBytes);
    const int offset = place.stage * Layout::kQueryBytes, query = step.m_block * kBlockM;
    load(Layout::kQ + offset, full, params.base.q_map, batch, step.head, query, ptx::kEvictLast);
    ptx::bulk_load(rows_smem(0), params.base.row_lse + slot * kBlockM, Layout::kRowBytes, full);
    ptx::bulk_load(
        smem + static_cast<uint32_t>(Layout::kScales + place.stage * Layout::kScaleBytes),
        params.slot_scales + 4 * slot, Layout::kScaleBytes, full);
    load_transposed(Layout::kQTransposed + offset, full, params.q_t_map, batch, step.head, query,
                    ptx::kEvictLast);
  }
  // Behind load_queries, which has waited until the slot of both is free.
  CF_DEVICE void load_dout(const QuerySteps& step, int batch, int64_t slot) {
    if (!elected) return;
    const saddr full = barrier_at(smem + Layout::kDoutFull, place.stage);
    ptx::mbarrier_arrive_expect_tx(full, 2 * Layout::kQueryBytes + Layout::kRowBytes);
    const int offset = place.stage * Layout::kQueryBytes, query = step.m_block * kBlockM;
    load(Layout::kDout + offset, full, params.base.dout_map, batch, step.head, query,
         ptx::kEvictLast);
    ptx::bulk_load(rows_smem(1), params.base.row_delta + slot * kBlockM, Layout::kRowBytes, full);
    load_transposed(Layout::kDoutTransposed + offset, full, params.dout_t_map, batch, step.head,
                    query, ptx::kEvictLast);
  }

  CF_DEVICE void run() {
    for (;;) {
      const TileSlot<Config> tile = stream.await();
      if (ptx::warp_uniform(tile.count()) < 0) break;
      const int batch = ptx::warp_uniform(tile.batch());
      const int first_slot = ptx::warp_uniform(tile.first_slot());
      bool first = true;
      CF_NO_UNROLL
      for (QuerySteps step = steps_of(params.base, tile); step.left > 0; step.advance()) {
        const int64_t slot =
            static_cast<int64_t>(step.head) * params.base.num_slots + first_slot + step.m_block;
        if (first) load_keys(tile, batch);
        load_queries(step, batch, slot);
        if (first) load_values(tile, batch);
        load_dout(step, batch, slot);
        place.advance();
        first = false;
      }
      ptx::warp_sync();  // all lanes have read the tile
      if (ptx::lane() == 0) stream.release();
      stream.place.advance();
    }
  }
};

// --- exponents ----------------------------------------------------------------------------------

// Note [Exponents of weights] in cupyflash/fp8_gradients.py, whose numbers these are.
inline constexpr float kLowTop = 8.0f, kHighTop = 448.0f;
inline constexpr int kTargetExponent = 6;
inline constexpr int kLeastExponent = -32, kMostExponent = 94;
inline constexpr int kExponentBias = 127, kFractionBits = 23;

// 2^exponent, of -126 to 127.
CF_DEVICE float power_of_two(int exponent) {
  return ptx::bits_float(static_cast<uint32_t>(exponent + kExponentBias) << kFractionBits);
}
// What is added to an exponent under which the largest magnitude of a block has these bits.
CF_DEVICE int growth_of(uint32_t top, int exponent) {
  if (top >= __builtin_bit_cast(uint32_t, kLowTop) &&
      top <= __builtin_bit_cast(uint32_t, kHighTop)) {
    return 0;
  }
  if (top == 0) return 0;
  const int wanted =
      kTargetExponent + kExponentBias - static_cast<int>(top >> kFractionBits) + exponent;
  return max(min(wanted, kMostExponent), kLeastExponent) - exponent;
}
// The bits of the largest magnitude of the warp's values.
template <int kCount>
CF_DEVICE uint32_t top_of_warp(const float (&values)[kCount]) {
  constexpr int kChains = 4;
  float top[kChains] = {0.0f, 0.0f, 0.0f, 0.0f};
  CF_UNROLL
  for (int i = 0; i < kCount; ++i) {
    top[i % kChains] = ptx::fmax(top[i % kChains], ptx::fabs(values[i]));
  }
  return ptx::redux_max(
      ptx::float_bits(ptx::fmax(ptx::fmax(top[0], top[1]), ptx::fmax(top[2], top[3]))));
}
template <int kCount>
CF_DEVICE void multiply_all(float (&values)[kCount], float factor) {
  CF_UNROLL
  for (int i = 0; i < kCount; ++i) values[i] = ptx::mul(values[i], factor);
}

// --- products of 8-bit floats -------------------------------------------------------------------

// D[64, kN] = A B^T: 64 rows of A from a tile of kRowsA, kN of B from one of kRowsB, both along
// their columns; one commit group.
template <class Tile, int kRowsA, int kRowsB, int kN>
CF_DEVICE void issue_outer_fp8(float (&d)[kN / 2], saddr a_rows, saddr b_rows) {
  using Operand = Descriptor<Tile>;
  const uint32_t a = Operand::k_major(a_rows), b = Operand::k_major(b_rows);
  ptx::wgmma_pin(d);
  ptx::wgmma_fence();
  CF_UNROLL
  for (int step = 0; step < 2 * Tile::kColumns / kStepElements; ++step) {
    ptx::wgmma_e4m3_ss<kN, Operand::kHigh, Operand::kHigh>(
        d, a + Operand::k_step(kRowsA, step), b + Operand::k_step(kRowsB, step), step > 0);
  }
  ptx::wgmma_commit();
}
// D[64, kN] += A B^T: A [64, 32 kSteps] from registers, B a tile of kN rows along its columns; one
// commit group.
template <class Tile, int kN, int kSteps>
CF_DEVICE void issue_inner_fp8(float (&d)[kN / 2], const uint32_t (&a)[kSteps][4], saddr b_tile) {
  using Operand = Descriptor<Tile>;
  const uint32_t b = Operand::k_major(b_tile);
  ptx::wgmma_pin(d);
  ptx::wgmma_fence();
  CF_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    ptx::wgmma_e4m3_rs<kN, Operand::kHigh>(d, a[step], b + Operand::k_step(kN, step), true);
  }
  ptx::wgmma_commit();
}
// Accumulators rounded, as A operands: what a thread holds of sixteen columns, in that order (Note
// [The order of transposed tokens] in cupyflash/fp8.py).
template <int kSteps>
CF_DEVICE void pack_operand_fp8(uint32_t (&packed)[kSteps][4], const float (&s)[16 * kSteps]) {
  CF_UNROLL
  for (int i = 0; i < 4 * kSteps; ++i) {
    const int first = i / 2 * 8 + i % 2 * 2;
    packed[i / 4][i % 4] = ptx::pack4_e4m3(s[first], s[first + 1], s[first + 4], s[first + 5]);
  }
}

// --- consumers ----------------------------------------------------------------------------------

template <class Config>
struct ConsumerFp8 {
  using Layout = BackwardLayout<Config>;
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using HeadTile = typename Layout::HeadTile;
  using QueryTile = typename Layout::QueryTile;
  using KeyTile = typename Layout::KeyTile;
  using GradTile = typename Layout::GradTile;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kWidth = Layout::kWidth;
  static constexpr int kSteps = kBlockM / kStepElements;  // of products over queries

  using Scores = float[kBlockM / 2];    // [64 keys, kBlockM] of the warpgroup
  using Packed = uint32_t[kSteps][4];   // the same rounded, as A operands
  using Grad = float[kWidth / 2];       // [64 keys, head_dim]

  const BackwardFp8Params& params;
  const saddr smem;
  const int warpgroup;  // 0 is the first consumer
  const bool leader;    // one thread of the warpgroup
  RingPlace<1> kv_place, sums_place;
  RingPlace<Config::kStages> place;
  RingPlace<Layout::kScoreStages> score_place;
  TileStream<Config> stream;
  float k_scale = 0.0f, v_scale = 0.0f;  // of the tile
  int t = 0, u = 0;                      // exponents: of the warp's keys, of all

  CF_DEVICE ConsumerFp8(const BackwardFp8Params& params, saddr smem, int warpgroup)
      : params(params),
        smem(smem),
        warpgroup(warpgroup),
        leader(ptx::tid() % kWarpgroupThreads == 0),
        stream{smem, {}} {}

  // --- places

  CF_DEVICE saddr stage_at(int ring) const {
    return smem + static_cast<uint32_t>(ring + place.stage * Layout::kQueryBytes);
  }
  CF_DEVICE saddr score_tile() const {
    return smem + Layout::kScores + score_place.stage * Layout::kScoreBytes;
  }
  CF_DEVICE saddr tops() const {
    return smem + Layout::kTops + score_place.stage * Layout::kTopBytes;
  }
  CF_DEVICE int first_key(const TileSlot<Config>& tile) const {
    return tile.key_begin() + warpgroup * kWarpgroupRows + 16 * (ptx::warp() % 4) +
           ptx::lane() / 4;
  }
  CF_DEVICE void read_rows(float (&values)[2], int which, int j) const {
    read_row_pair(values,
                  smem + static_cast<uint32_t>(Layout::kRows +
                                               (2 * place.stage + which) * Layout::kRowBytes),
                  j);
  }

  // --- weights

  CF_DEVICE void mask(Scores& s, const TileSlot<Config>& tile, int query_begin) const {
    const int key = first_key(tile);
    mask_transposed<Mask>(tile.sequence(params.base), s, {key, key + 8}, query_begin, 0.0f);
  }
  // S^T to P^T.
  CF_DEVICE void exponentiate(Scores& s, float q_scale) const {
    const float slope = ptx::mul(ptx::mul(params.base.softmax_scale_log2, k_scale), q_scale);
    const float exponent = static_cast<float>(t);
    CF_UNROLL
    for (int j = 0; j < kBlockM / 8; ++j) {
      float lse[2];
      read_rows(lse, 0, j);
      const float addend[2] = {exponent - lse[0], exponent - lse[1]};
      CF_UNROLL
      for (int e = 0; e < 4; ++e) {
        s[4 * j + e] = ptx::ex2(ptx::fma(s[4 * j + e], slope, addend[e & 1]));
      }
    }
  }
  // Another t where the weights ask for it.
  CF_DEVICE void fit_weights(Scores& weights, Grad& dv) {
    const int growth = ptx::warp_uniform(growth_of(top_of_warp(weights), t));
    if (growth == 0) return;
    const float factor = power_of_two(growth);
    multiply_all(weights, factor);
    multiply_all(dv, factor);
    t += growth;
  }
  // dP^T to dS^T.
  CF_DEVICE void differentiate(Scores& dp, const Scores& p, float q_scale) const {
    const float ahead = power_of_two(u - t);
    const float slope = ptx::mul(ptx::mul(v_scale, q_scale), ahead);
    CF_UNROLL
    for (int j = 0; j < kBlockM / 8; ++j) {
      float delta[2];
      read_rows(delta, 1, j);
      const float shift[2] = {-ptx::mul(delta[0], ahead), -ptx::mul(delta[1], ahead)};
      CF_UNROLL
      for (int e = 0; e < 4; ++e) {
        dp[4 * j + e] = ptx::mul(p[4 * j + e], ptx::fma(dp[4 * j + e], slope, shift[e & 1]));
      }
    }
  }
  // dS^T in registers to dS in shared memory, where a row is a query. Keys n and n + 8 of a query
  // make one 16-bit element, so that a matrix of 8 x 8 holds the warp's 16 keys of 8 queries.
  CF_DEVICE void store_scores(const Packed& ds) const {
    constexpr uint32_t kLows = 0x5140, kHighs = 0x7362;
    const int lane = ptx::lane();
    const int granule = warpgroup * (kWarpgroupRows / 16) + ptx::warp() % 4;
    CF_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t(&held)[4] = ds[step];
      ptx::stmatrix_x4_trans(
          score_tile() + KeyTile::granule_offset(kBlockM, kStepElements * step + lane, granule),
          ptx::prmt(held[0], held[1], kLows), ptx::prmt(held[0], held[1], kHighs),
          ptx::prmt(held[2], held[3], kLows), ptx::prmt(held[2], held[3], kHighs));
    }
  }
  // Another u where dS asks for it. Note [Trying an exponent]
  CF_DEVICE void fit_gradients(Packed& packed, Scores& ds, Grad& dk) {
    const u32x4 first = ptx::lds128(tops()), second = ptx::lds128(tops() + 16);
    const auto larger = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
    const uint32_t top = larger(larger(larger(first.x, first.y), larger(first.z, first.w)),
                                larger(larger(second.x, second.y), larger(second.z, second.w)));
    const int growth = ptx::warp_uniform(growth_of(top, u));
    if (growth == 0) return;
    const float factor = power_of_two(growth);
    multiply_all(ds, factor);
    multiply_all(dk, factor);
    u += growth;
    pack_operand_fp8(packed, ds);
    store_scores(packed);
    if constexpr (kKept<kNoRetryFence>) ptx::fence_proxy_async();
    if constexpr (kKept<kNoRetryBarrier>) {
      ptx::named_barrier_sync(kScoresBarrier, kConsumerThreads);
    }
  }

  // --- a tile

  // This warpgroup's part of dQ = dS K; one commit group.
  CF_DEVICE void issue_sums(float (&sums)[Layout::kPartColumns / 2]) const {
    constexpr int kPart = KeyTile::chunk_bytes(kWarpgroupRows);
    const saddr scores = score_tile() + (Layout::kByRows ? warpgroup * kPart : 0);
    const saddr keys = smem + Layout::kKTransposed + (Layout::kByRows ? 0 : warpgroup * kPart);
    issue_outer_fp8<KeyTile, kBlockM, kWidth, Layout::kPartColumns>(sums, scores, keys);
  }
  // Without a bound of the mask, all blocks of a tile are alike.
  static constexpr bool kBounded = Mask::kHasLeft || Mask::kHasRight;
  CF_DEVICE static bool is_partial(const TileSlot<Config>& tile, int m_block) {
    if constexpr (!kBounded) return ptx::warp_uniform(tile.full_begin() >= tile.full_end()) != 0;
    return ptx::warp_uniform(m_block < tile.full_begin() || m_block >= tile.full_end()) != 0;
  }
  CF_DEVICE void release_q() const {
    if (leader) ptx::mbarrier_arrive(barrier_at(smem + Layout::kQEmpty, place.stage));
  }

  CF_DEVICE void step(Grad& dk, Grad& dv, const TileSlot<Config>& tile, int m_block) {
    Scores s, dp;
    constexpr int kPart = HeadTile::chunk_bytes(kWarpgroupRows);
    if constexpr (kKept<kNoQFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kQFull, place.stage), place.phase);
    }
    const bool partial = is_partial(tile, m_block);
    issue_outer_fp8<HeadTile, kBlockN, kBlockM, kBlockM>(
        s, smem + Layout::kK + warpgroup * kPart, stage_at(Layout::kQ));
    if constexpr (kKept<kNoDoutFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kDoutFull, place.stage), place.phase);
    }
    issue_outer_fp8<HeadTile, kBlockN, kBlockM, kBlockM>(
        dp, smem + Layout::kV + warpgroup * kPart, stage_at(Layout::kDout));
    const u32x2 scales =
        ptx::lds64(smem + Layout::kScales + place.stage * Layout::kScaleBytes);
    const float q_scale = ptx::bits_float(scales.x), q_inverse = ptx::bits_float(scales.y);
    await_products<1>(s);
    exponentiate(s, q_scale);
    if (partial) mask(s, tile, m_block * kBlockM);
    fit_weights(s, dv);
    Packed p, ds;
    pack_operand_fp8(p, s);
    await_products<0>(dp);
    differentiate(dp, s, q_scale);
    // Weights of 0 would do but for NaN in what they hide.
    if (partial) mask(dp, tile, m_block * kBlockM);
    const uint32_t top = top_of_warp(dp);
    if (ptx::lane() == 0) {
      ptx::sts32(tops() + 4 * (warpgroup * (kWarpgroupThreads / 32) + ptx::warp() % 4), top);
    }
    pack_operand_fp8(ds, dp);
    store_scores(ds);
    issue_inner_fp8<QueryTile, kWidth>(dv, p, stage_at(Layout::kDoutTransposed));
    if constexpr (kKept<kNoScoresFence>) ptx::fence_proxy_async();
    if constexpr (kKept<kNoScoresBarrier>) {
      ptx::named_barrier_sync(kScoresBarrier, kConsumerThreads);
    }
    fit_gradients(ds, dp, dk);
    float sums[Layout::kPartColumns / 2];
    issue_sums(sums);
    await_products<1>(dv);
    issue_inner_fp8<QueryTile, kWidth>(dk, ds, stage_at(Layout::kQTransposed));
    await_products<1>(sums);
    multiply_all(sums, ptx::mul(ptx::mul(k_scale, q_inverse), power_of_two(-u)));
    hand_over_sums<Config, Layout::kPartColumns>(smem, warpgroup, sums_place, sums);
    sums_place.advance();
    if constexpr (!kKept<kEarlyQRelease>) release_q();
    await_products<0>(dk);
    if constexpr (kKept<kEarlyQRelease>) release_q();
    place.advance();
    score_place.advance();
  }

  CF_DEVICE void begin_tile(const TileSlot<Config>& tile) {
    const int batch = tile.batch(), head = tile.head_kv(), key = tile.key_begin();
    // Blocks of values may be those of a warpgroup, and behind the last key there is none.
    const int own_key = min(key + warpgroup * kWarpgroupRows, params.base.seqlen_kv - 1);
    k_scale = scale_at(params.k_scale, params.k_scales, batch, head, key);
    v_scale = scale_at(params.v_scale, params.v_scales, batch, head, own_key);
    t = u = 0;
    if constexpr (kKept<kNoKFullWait>) {
      ptx::mbarrier_wait(smem + Layout::kKFull, kv_place.phase);
    }
    if constexpr (kKept<kNoVFullWait>) {
      ptx::mbarrier_wait(smem + Layout::kVFull, kv_place.phase);
    }
  }

  CF_DEVICE void run() {
    for (;;) {
      const TileSlot<Config> tile = stream.await();
      const int count = ptx::warp_uniform(tile.count());
      if (count < 0) break;
      begin_tile(tile);
      Grad dk, dv;
      CF_UNROLL
      for (int i = 0; i < kWidth / 2; ++i) dk[i] = dv[i] = 0.0f;
      if constexpr (kBounded) {
        CF_NO_UNROLL
        for (QuerySteps steps = steps_of(params.base, tile); steps.left > 0; steps.advance()) {
          step(dk, dv, tile, steps.m_block);
        }
      } else {
        CF_NO_UNROLL
        for (int left = count * params.base.group; left > 0; --left) step(dk, dv, tile, 0);
      }
      write_grads(dk, dv, tile);
      kv_place.advance();
      stream.place.advance();
    }
    if (leader) ptx::tma_wait<0>();
  }

  // --- epilogue

  // dk and dv: 16-bit ones through shared memory, in the place of K, K^T, V and dS, and by TMA;
  // others straight from registers.
  CF_DEVICE void write_grads(Grad& dk, Grad& dv, const TileSlot<Config>& tile) const {
    const BackwardParams& base = params.base;
    multiply_all(dk, ptx::mul(base.grad_scale, power_of_two(-u)));
    multiply_all(dv, power_of_two(-t));
    const bool direct = base.float_grads != 0 || base.accumulate != 0;
    // Both warpgroups are done with K and dS: each has waited for its part of the last dQ.
    if constexpr (kKept<kNoOutputBarrier>) {
      ptx::named_barrier_sync(kScoresBarrier, kConsumerThreads);
    }
    if (direct) {
      write_directly(dk, tile, base.dk, base.dk_stride_batch, base.dk_stride_seqlen,
                     base.dk_stride_head);
      write_directly(dv, tile, base.dv, base.dv_stride_batch, base.dv_stride_seqlen,
                     base.dv_stride_head);
    } else {
      const int row = warpgroup * kWarpgroupRows;
      stage_grad<Element, GradTile, kBlockN>(smem + Layout::kK, row, dk);
      stage_grad<Element, GradTile, kBlockN>(smem + Layout::kV, row, dv);
      if constexpr (kKept<kNoOutputFence>) ptx::fence_proxy_async();
    }
    // Everything this warpgroup had to write, and read of the tile but by its leader.
    ptx::named_barrier_sync(kEpilogueBarrier + warpgroup, kWarpgroupThreads);
    if (!leader) return;
    if (!direct) {
      store(&base.dk_map, smem + Layout::kK, tile);
      store(&base.dv_map, smem + Layout::kV, tile);
      ptx::tma_commit();
      if constexpr (kKept<kNoOutputReadWait>) ptx::tma_wait_read<0>();
    }
    stream.release();
    ptx::mbarrier_arrive(smem + Layout::kKvEmpty);
  }
  CF_DEVICE void store(const CUtensorMap* map, saddr tile_smem,
                       const TileSlot<Config>& tile) const {
    const int row = tile.key_begin() + warpgroup * kWarpgroupRows;
    if (row >= params.base.seqlen_kv) return;
    store_grad<GradTile, kBlockN>(map, tile_smem, warpgroup * kWarpgroupRows,
                                  TileRows<false>{0, 0, tile.batch()}, row, tile.head_kv(),
                                  params.base.rows_kv);
  }
  CF_DEVICE void write_directly(const Grad& grad, const TileSlot<Config>& tile, void* gmem,
                                int64_t stride_batch, int64_t stride_seqlen,
                                int64_t stride_head) const {
    const int key = first_key(tile);
    const int64_t offset = tile.batch() * stride_batch + tile.head_kv() * stride_head +
                           key * stride_seqlen;
    write_grad<Element, kWidth>(params.base, grad, gmem, offset, stride_seqlen,
                                params.base.seqlen_kv - key, params.base.head_dim_qk);
  }
};

// --- kernel -------------------------------------------------------------------------------------

template <class Config>
CF_DEVICE void backward_fp8(const BackwardFp8Params& params) {
  static_assert(ptx::kArchitecture == 90);
  const saddr smem = ptx::smem_base();
  const int warpgroup = ptx::warp_uniform(ptx::tid() / kWarpgroupThreads);
  if (ptx::tid() == 0) initialize_barriers<Config>(smem);
  ptx::cta_sync();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<24>();
    const int warp = ptx::warp_uniform(ptx::warp());
    if (warp == 0) {
      ProducerFp8<Config>{params, smem, ptx::elect_one(), {smem, {}}, {}, {}}.run();
    } else if (warp == 1) {
      Writer<Config>{params.base, smem, {smem, {}}, {}}.run();
    } else if (warp == 2) {
      Scheduler<Config>{params.base, {smem, {}}}.run();
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    ConsumerFp8<Config>(params, smem, warpgroup - 1).run();
  }
}

}  // namespace cf::sm90
