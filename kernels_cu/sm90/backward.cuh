// Backward attention for Hopper (sm_90a): dq, dk and dv from dout, by recomputing the probabilities
// from the log-sum-exp. Head dimensions up to 128; wider ones: backward_keys.cuh.
//
// Algorithm: FlashAttention-2 and -3 (Dao 2023, arXiv 2307.08691; Shah et al. 2024, arXiv
// 2407.08608): a CTA owns a block of keys of one key head and walks the blocks of queries that see
// it, of every query head of the group; dk and dv stay in registers, dq is summed in global memory.
// With transposed scores the weights are, packed in registers, the A operands of the products that
// they enter; only dS goes through shared memory, for dq. Written from the papers and the PTX ISA;
// docs/kernels/backward.md has the design.
//
// Products of a step, kBlockM queries times kBlockN keys (two consumer warpgroups of 64 keys each):
//   S^T = K Q^T       dP^T = V dO^T       from shared memory
//   P^T = exp2(S^T c - lse)               dS^T = P^T (dP^T - delta)
//   dV += P^T dO      dK += dS^T Q        P^T and dS^T from registers
//   dQ  = dS K                            dS from shared memory; each warpgroup a part:
//     kBlockM = 64    its share of the columns of dQ
//     kBlockM = 128   its 64 rows
//     kDqTransposed   dQ^T = K^T dS^T, its 64 columns of dQ: any kBlockM (80)
//
// Roles (registers per thread after setmaxnreg):
//   warpgroup 0     warp 0, producer: one thread issues every load                          24
//                   warp 1, writer: adds the consumers' parts of dQ to global memory
//                   warp 2, scheduler: deals out tiles; writes the gradients of keys that no
//                   query sees and of rows of no sequence
//   warpgroups 1-2  consumers                                                                240
//
// Shared memory, in order (BackwardLayout; 128-byte swizzled tiles, 64-byte at head_dim 96):
//   K    [kBlockN][head_dim_qk]           later dk
//   V    [kBlockN][head_dim_v]            later dv
//   Q    [stages][kBlockM][head_dim_qk]
//   dO   [stages][kBlockM][head_dim_v]
//   dS   [2][kBlockM][kBlockN]
//   dQ   [2 warpgroups][kBlockM * head_dim_qk / 2] floats, in the order of DqOrder
//   rows [stages][2][kBlockM] floats: lse (with Q), delta (with dO)
//   tiles [kTileSlots][16] words, from the scheduler to the others   (TileSlot)
//   barriers
//
// Pipeline of a consumer warpgroup, step by step:
//   issue S^T, dP^T;  wait S;  exp2;  wait dP;  dS;  dS to shared memory
//   issue dV;  all consumers meet;  issue dQ;  wait dV;  issue dK
//   wait dQ, to shared memory;  wait dK (Q and dO free)
// Between two tiles nothing overlaps in the consumers but the other warpgroup; the producer loads
// ahead as far as its rings reach.
#pragma once
#include "attn/query_blocks.cuh"
#include "attn/query_slots.cuh"
#include "attn/ragged.cuh"
#include "attn/softcap.cuh"
#include "backward_params.cuh"
#include "ptx/ptx.cuh"
#include "sm90/backward_sums.cuh"
#include "sm90/backward_tiles.cuh"
#include "tile/layout.cuh"
#include "tile/pipeline.cuh"

namespace cf::sm90 {

template <class Config>
struct BackwardLayout {
  using QkTile = Tile<Config::kHeadDimQk>;
  using VTile = Tile<Config::kHeadDimV>;
  using ScoreTile = Tile<Config::kBlockN>;  // dS: [kBlockM][kBlockN]
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
  static_assert(kBlockN == kConsumers * kWarpgroupRows);
  static_assert(kBlockM % 16 == 0 && kBlockM <= 128);
  static_assert(Config::kHeadDimQk <= 128 && Config::kHeadDimV <= 128);

  static constexpr int kKBytes = QkTile::bytes(kBlockN), kVBytes = VTile::bytes(kBlockN);
  static constexpr int kQBytes = QkTile::bytes(kBlockM), kDoutBytes = VTile::bytes(kBlockM);
  static constexpr int kScoreBytes = ScoreTile::bytes(kBlockM);
  static constexpr int kScoreStages = 2;
  static constexpr int kSumBytes = kBlockM * Config::kHeadDimQk * 4;
  static constexpr int kRowBytes = kBlockM * 4;
  static_assert(kQBytes % 1024 == 0 && kDoutBytes % 1024 == 0 && kScoreBytes % 1024 == 0);

  // The parts of dQ that the warpgroups compute, 64 rows each: of dQ (kBlockM = 128), of dQ^T
  // (kTransposed), or all rows and a share of the columns. Head dimension 96 is three chunks of 32
  // columns, of which the first warpgroup takes two.
  static constexpr bool kTransposed = Config::kDqTransposed != 0;
  static constexpr bool kByRows = !kTransposed && kBlockM == 128;
  static constexpr int kWidthQk = Config::kHeadDimQk;
  static constexpr int kPartColumns =  // of the first warpgroup
      kTransposed ? kBlockM : kByRows ? kWidthQk : kWidthQk == 96 ? 64 : kWidthQk / 2;
  static constexpr int kLastColumns =  // of the second
      kTransposed || kByRows ? kPartColumns : kWidthQk - kPartColumns;
  static_assert(kTransposed ? kWidthQk == 128 : kByRows || kBlockM == kWarpgroupRows);
  static constexpr int kPartBytes = kWarpgroupRows * kPartColumns * 4;
  CF_DEVICE static constexpr int part_bytes(int w) {
    return w == 0 ? kPartBytes : kSumBytes - kPartBytes;
  }

  static constexpr int kK = 0;
  static constexpr int kV = kK + kKBytes;
  static constexpr int kQ = kV + kVBytes;
  static constexpr int kDout = kQ + Config::kStages * kQBytes;
  static constexpr int kScores = kDout + Config::kStages * kDoutBytes;
  static constexpr int kSums = kScores + kScoreStages * kScoreBytes;
  static constexpr int kRows = kSums + kSumBytes;
  static constexpr int kTileSlots = 2;
  static constexpr int kTileBytes = 64;
  static constexpr int kTiles = kRows + Config::kStages * 2 * kRowBytes;
  static constexpr int kBarriers = kTiles + kTileSlots * kTileBytes;

  // mbarriers. Full: one arrival, of the producer, with the bytes of the load. Empty: one thread of
  // each consumer warpgroup.
  static constexpr int kKFull = kBarriers;
  static constexpr int kVFull = kKFull + 8;
  static constexpr int kKvEmpty = kVFull + 8;   // dk and dv have been stored
  static constexpr int kQFull = kKvEmpty + 8;   // [stage]
  static constexpr int kQEmpty = kQFull + 8 * Config::kStages;  // dO has been read before Q
  static constexpr int kDoutFull = kQEmpty + 8 * Config::kStages;
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

// --- consumers ----------------------------------------------------------------------------------

template <class Config>
struct Consumer {
  using Layout = BackwardLayout<Config>;
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using QkTile = typename Layout::QkTile;
  using VTile = typename Layout::VTile;
  using ScoreTile = typename Layout::ScoreTile;
  using QkDescriptor = Descriptor<QkTile>;
  using VDescriptor = Descriptor<VTile>;
  using ScoreDescriptor = Descriptor<ScoreTile>;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kWidthQk = Config::kHeadDimQk, kWidthV = Config::kHeadDimV;
  static constexpr int kStepsM = kBlockM / 16;  // of products over queries
  static constexpr int kStepsN = kBlockN / 16;  // over keys
  static constexpr bool kTransposed = Layout::kTransposed, kByRows = Layout::kByRows;
  static constexpr bool kGeneral = Config::kGeneral != 0;

  using Scores = float[kBlockM / 2];         // [64 keys, kBlockM] of the warpgroup
  using Packed = uint32_t[kStepsM][4];       // the same in pairs, as A operands
  using GradK = float[kWidthQk / 2];         // [64 keys, head_dim_qk]
  using GradV = float[kWidthV / 2];          // [64 keys, head_dim_v]

  const BackwardParams& params;
  const saddr smem;
  const int warpgroup;  // 0 is the first consumer
  const bool leader;    // one thread of the warpgroup
  RingPlace<1> kv_place, sums_place;
  RingPlace<Config::kStages> place;
  RingPlace<Layout::kScoreStages> score_place;
  TileStream<Config> stream;

  CF_DEVICE Consumer(const BackwardParams& params, saddr smem, int warpgroup)
      : params(params),
        smem(smem),
        warpgroup(warpgroup),
        leader(ptx::tid() % kWarpgroupThreads == 0),
        stream{smem, {}} {}

  // --- products

  CF_DEVICE saddr q_tile() const { return smem + Layout::kQ + place.stage * Layout::kQBytes; }
  CF_DEVICE saddr dout_tile() const {
    return smem + Layout::kDout + place.stage * Layout::kDoutBytes;
  }
  CF_DEVICE saddr score_tile() const {
    return smem + Layout::kScores + score_place.stage * Layout::kScoreBytes;
  }

  // S^T = K Q^T or dP^T = V dO^T: this warpgroup's 64 keys.
  template <class Tile>
  CF_DEVICE void issue_scores(Scores& s, saddr a_tile, saddr b_tile) const {
    issue_outer<Element, Tile, kBlockN, kBlockM>(
        s, a_tile + warpgroup * Tile::chunk_bytes(kWarpgroupRows), b_tile);
  }
  // This warpgroup's part of dQ = dS K; one commit group.
  template <int kColumns>
  CF_DEVICE void issue_sums(float (&sums)[kColumns / 2]) const {
    ptx::wgmma_pin(sums);
    ptx::wgmma_fence();
    // Columns of K that the part is made of, and rows of dS.
    constexpr int kChunks = Layout::kPartColumns / QkTile::kChunk;
    const int first_chunk = kByRows ? 0 : kTransposed ? warpgroup : warpgroup * kChunks;
    const uint32_t k = QkDescriptor::mn_major(
        smem + Layout::kK + first_chunk * QkTile::chunk_bytes(kBlockN), kBlockN);
    const uint32_t scores = ScoreDescriptor::k_major(
        score_tile() + (kByRows ? warpgroup * ScoreTile::chunk_bytes(kWarpgroupRows) : 0));
    CF_UNROLL
    for (int step = 0; step < kStepsN; ++step) {
      const uint32_t k_step = k + QkDescriptor::mn_step(step);
      const uint32_t score_step = scores + ScoreDescriptor::k_step(kBlockM, step);
      if constexpr (kTransposed) {
        ptx::wgmma_ss_transposed<Element, kColumns, QkDescriptor::kHigh, ScoreDescriptor::kHigh>(
            sums, k_step, score_step, step > 0);
      } else {
        ptx::wgmma_ss<Element, kColumns, ScoreDescriptor::kHigh, QkDescriptor::kHigh, 1>(
            sums, score_step, k_step, step > 0);
      }
    }
    ptx::wgmma_commit();
  }

  // --- weights

  // Of the rows of the step at `place`, this thread's in columns 8 j, 8 j + 1 further on.
  CF_DEVICE void read_rows(float (&values)[2], int which, int j) const {
    read_row_pair(values,
                  smem + static_cast<uint32_t>(Layout::kRows +
                                               (2 * place.stage + which) * Layout::kRowBytes),
                  j);
  }
  CF_DEVICE int first_key(const TileSlot<Config>& tile) const {
    return tile.key_begin() + warpgroup * kWarpgroupRows + 16 * (ptx::warp() % 4) +
           ptx::lane() / 4;
  }
  template <int kCount>
  CF_DEVICE void mask(float (&s)[kCount], const TileSlot<Config>& tile, int query_begin) const {
    const int key = first_key(tile);
    mask_transposed<Mask>(tile.sequence(params), s, {key, key + 8}, query_begin, 0.0f);
  }
  // The same where keys behind the last one are all that is masked. Their weights, as large as they
  // may be, reach rows of dv only that are not written; dS is summed over keys.
  CF_DEVICE void drop_absent_keys(Packed& ds, const TileSlot<Config>& tile) const {
    const int keys = tile.sequence(params).seqlen_kv() - first_key(tile);
    CF_UNROLL
    for (int step = 0; step < kStepsM; ++step) {
      CF_UNROLL
      for (int i = 0; i < 4; ++i) ds[step][i] = 8 * (i & 1) < keys ? ds[step][i] : 0;
    }
  }
  // S^T to P^T.
  CF_DEVICE void exponentiate(Scores& s) const {
    const float scale = params.softmax_scale_log2;
    CF_UNROLL
    for (int j = 0; j < kBlockM / 8; ++j) {
      float lse[2];
      read_rows(lse, 0, j);
      CF_UNROLL
      for (int e = 0; e < 4; ++e) {
        s[4 * j + e] = ptx::ex2(ptx::fma(s[4 * j + e], scale, -lse[e & 1]));
      }
    }
  }
  // Capped S^T and dP^T to P^T, packed, and dS^T, in pieces of 16 queries. capped = softcap tanh(x)
  // has the slope 1 - (capped / softcap)^2.
  CF_DEVICE void weigh_capped(Packed& packed, Scores& dp, const Scores& s,
                              const TileSlot<Config>& tile, int query_begin, bool partial) const {
    const float inverse = ptx::rcp(params.softcap);
    CF_UNROLL
    for (int step = 0; step < kStepsM; ++step) {
      float p[8];
      CF_UNROLL
      for (int half = 0; half < 2; ++half) {
        float lse[2], delta[2];
        read_rows(lse, 0, 2 * step + half);
        read_rows(delta, 1, 2 * step + half);
        CF_UNROLL
        for (int e = 0; e < 4; ++e) {
          const int i = 8 * step + 4 * half + e;
          const float tanh = ptx::mul(s[i], inverse);
          const float weight = ptx::ex2(ptx::fma(s[i], params.softmax_scale_log2, -lse[e & 1]));
          p[4 * half + e] = weight;
          dp[i] = ptx::mul(weight, ptx::fma(-tanh, tanh, 1.0f)) * (dp[i] - delta[e & 1]);
        }
      }
      if (partial) mask(p, tile, query_begin + 16 * step);
      CF_UNROLL
      for (int i = 0; i < 4; ++i) packed[step][i] = ptx::pack2<Element>(p[2 * i], p[2 * i + 1]);
    }
  }
  // dP^T to dS^T.
  CF_DEVICE void differentiate(Scores& dp, const Scores& p) const {
    CF_UNROLL
    for (int j = 0; j < kBlockM / 8; ++j) {
      float delta[2];
      read_rows(delta, 1, j);
      CF_UNROLL
      for (int e = 0; e < 4; ++e) dp[4 * j + e] = p[4 * j + e] * (dp[4 * j + e] - delta[e & 1]);
    }
  }
  // dS^T in registers to dS in shared memory, where a row is a query.
  CF_DEVICE void store_scores(const Packed& ds) const {
    const int lane = ptx::lane();
    // Matrices of a step: {keys 0-7, keys 8-15} of queries 0-7, then of queries 8-15.
    const int query = (lane & 7) + (lane >> 4) * 8;
    const int key = warpgroup * kWarpgroupRows + 16 * (ptx::warp() % 4);
    const int granule = key / 8 + ((lane >> 3) & 1);
    CF_UNROLL
    for (int step = 0; step < kStepsM; ++step) {
      ptx::stmatrix_x4_trans(
          score_tile() + ScoreTile::granule_offset(kBlockM, 16 * step + query, granule),
          ds[step][0], ds[step][1], ds[step][2], ds[step][3]);
    }
  }

  // --- a tile

  // From dS in shared memory on: the products that end a step.
  template <int kColumns>
  CF_DEVICE void finish_step(GradK& dk, GradV& dv, const Packed& ds, bool accumulate) {
    float sums[kColumns / 2];
    issue_sums<kColumns>(sums);
    await_products<1>(dv);
    issue_inner<Element, QkTile>(dk, ds, q_tile(), accumulate);
    await_products<1>(sums);
    hand_over_sums<Config, kColumns>(smem, warpgroup, sums_place, sums);
    sums_place.advance();
    if constexpr (!kKept<kEarlyQRelease>) release_q();
    await_products<0>(dk);
    if constexpr (kKept<kEarlyQRelease>) release_q();
  }
  CF_DEVICE void release_q() const {
    if (leader) ptx::mbarrier_arrive(barrier_at(smem + Layout::kQEmpty, place.stage));
  }

  CF_DEVICE void await_dout() const {
    if constexpr (kKept<kNoDoutFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kDoutFull, place.stage), place.phase);
    }
  }

  // Without a bound of the mask, all blocks of a tile are alike.
  static constexpr bool kBounded = Mask::kHasLeft || Mask::kHasRight;
  CF_DEVICE static bool is_partial(const TileSlot<Config>& tile, int m_block) {
    if constexpr (!kBounded) return ptx::warp_uniform(tile.full_begin() >= tile.full_end()) != 0;
    return ptx::warp_uniform(m_block < tile.full_begin() || m_block >= tile.full_end()) != 0;
  }

  CF_DEVICE void step(GradK& dk, GradV& dv, const TileSlot<Config>& tile, int m_block,
                      bool accumulate) {
    Scores s, dp;
    if constexpr (kKept<kNoQFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kQFull, place.stage), place.phase);
    }
    const bool partial = is_partial(tile, m_block);
    const int query_begin = m_block * kBlockM;
    if (kBounded && partial) {
      clear_rows_without_keys<Config>(tile.sequence(params), query_begin, q_tile(), dout_tile(),
                                      [&] { await_dout(); });
    }
    issue_scores<QkTile>(s, smem + Layout::kK, q_tile());
    await_dout();
    issue_scores<VTile>(dp, smem + Layout::kV, dout_tile());
    await_products<1>(s);
    const bool capped = kGeneral && params.softcap != 0.0f;
    Packed p, ds;
    if (capped) {
      cap_scores(params, s);
      await_products<0>(dp);
      weigh_capped(p, dp, s, tile, query_begin, partial);
    } else {
      exponentiate(s);
      if (kBounded && partial) mask(s, tile, query_begin);
      await_products<0>(dp);
      pack_operand<Element>(p, s);
      differentiate(dp, s);
    }
    // Weights of 0 would do but for NaN in what they hide.
    if (kBounded && partial) mask(dp, tile, query_begin);
    pack_operand<Element>(ds, dp);
    if (!kBounded && partial) drop_absent_keys(ds, tile);
    store_scores(ds);
    issue_inner<Element, VTile>(dv, p, dout_tile(), accumulate);
    if constexpr (kKept<kNoScoresFence>) ptx::fence_proxy_async();
    if constexpr (kKept<kNoScoresBarrier>) {
      ptx::named_barrier_sync(kScoresBarrier, kConsumerThreads);
    }
    if (Layout::kLastColumns == Layout::kPartColumns || warpgroup == 0) {
      finish_step<Layout::kPartColumns>(dk, dv, ds, accumulate);
    } else {
      finish_step<Layout::kLastColumns>(dk, dv, ds, accumulate);
    }
    place.advance();
    score_place.advance();
  }

  CF_DEVICE void run() {
    GradK dk;
    GradV dv;
    for (;;) {
      const TileSlot<Config> tile = stream.await();
      const int count = ptx::warp_uniform(tile.count());
      if (count < 0) break;
      if constexpr (kKept<kNoKFullWait>) {
        ptx::mbarrier_wait(smem + Layout::kKFull, kv_place.phase);
      }
      if constexpr (kKept<kNoVFullWait>) {
        ptx::mbarrier_wait(smem + Layout::kVFull, kv_place.phase);
      }
      bool accumulate = false;
      if constexpr (kBounded) {
        CF_NO_UNROLL
        for (QuerySteps steps = steps_of(params, tile); steps.left > 0; steps.advance()) {
          step(dk, dv, tile, steps.m_block, accumulate);
          accumulate = true;
        }
      } else {
        CF_NO_UNROLL
        for (int left = count * params.group; left > 0; --left) {
          step(dk, dv, tile, 0, accumulate);
          accumulate = true;
        }
      }
      write_grads(dk, dv, tile);
      kv_place.advance();
      stream.place.advance();
    }
    if (leader) ptx::tma_wait<0>();
  }

  // --- epilogue

  // dk and dv: 16-bit ones through shared memory, in the place of K and V, and by TMA; others
  // straight from registers.
  CF_DEVICE void write_grads(GradK& dk, GradV& dv, const TileSlot<Config>& tile) const {
    const float scale = params.grad_scale;
    CF_UNROLL
    for (int i = 0; i < kWidthQk / 2; ++i) dk[i] *= scale;
    const bool direct = params.float_grads != 0 || params.accumulate != 0;
    // Both warpgroups are done with K: each has waited for its part of the last dQ.
    if constexpr (kKept<kNoOutputBarrier>) {
      ptx::named_barrier_sync(kScoresBarrier, kConsumerThreads);
    }
    if (direct) {
      write_directly<kWidthQk>(dk, tile, params.dk, params.dk_stride_batch,
                               params.dk_stride_seqlen, params.dk_stride_head,
                               params.head_dim_qk);
      write_directly<kWidthV>(dv, tile, params.dv, params.dv_stride_batch,
                              params.dv_stride_seqlen, params.dv_stride_head, params.head_dim_v);
    } else {
      const int row = warpgroup * kWarpgroupRows;
      stage_grad<Element, QkTile, kBlockN>(smem + Layout::kK, row, dk);
      stage_grad<Element, VTile, kBlockN>(smem + Layout::kV, row, dv);
      if constexpr (kKept<kNoOutputFence>) ptx::fence_proxy_async();
    }
    // Everything this warpgroup had to write, and read of the tile but by its leader.
    ptx::named_barrier_sync(kEpilogueBarrier + warpgroup, kWarpgroupThreads);
    if (!leader) return;
    if (!direct) {
      store<QkTile>(&params.dk_map, smem + Layout::kK, tile);
      store<VTile>(&params.dv_map, smem + Layout::kV, tile);
      ptx::tma_commit();
      if constexpr (kKept<kNoOutputReadWait>) ptx::tma_wait_read<0>();
    }
    stream.release();
    ptx::mbarrier_arrive(smem + Layout::kKvEmpty);
  }
  template <class Tile>
  CF_DEVICE void store(const CUtensorMap* map, saddr tile_smem,
                       const TileSlot<Config>& tile) const {
    const auto sequence = tile.sequence(params);
    const int row = tile.key_begin() + warpgroup * kWarpgroupRows;
    if (row >= sequence.seqlen_kv()) return;
    const TileRows<kGeneral> rows{sequence.kv_begin(), sequence.seqlen_kv(), tile.batch()};
    store_grad<Tile, kBlockN>(map, tile_smem, warpgroup * kWarpgroupRows, rows, row,
                              tile.head_kv(), params.rows_kv);
  }
  template <int kWidth>
  CF_DEVICE void write_directly(const float (&grad)[kWidth / 2], const TileSlot<Config>& tile,
                                void* gmem, int64_t stride_batch, int64_t stride_seqlen,
                                int64_t stride_head, int head_dim) const {
    const auto sequence = tile.sequence(params);
    const int key = first_key(tile);
    const int64_t offset = tile.batch() * stride_batch + tile.head_kv() * stride_head +
                           (sequence.kv_begin() + key) * stride_seqlen;
    write_grad<Element, kWidth>(params, grad, gmem, offset, stride_seqlen,
                                sequence.seqlen_kv() - key, head_dim);
  }
};

// --- kernel -------------------------------------------------------------------------------------

template <class Config>
CF_DEVICE void backward(const BackwardParams& params) {
  static_assert(ptx::kArchitecture == 90);
  const saddr smem = ptx::smem_base();
  const int warpgroup = ptx::warp_uniform(ptx::tid() / kWarpgroupThreads);
  if (ptx::tid() == 0) initialize_barriers<Config>(smem);
  ptx::cta_sync();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<24>();
    const int warp = ptx::warp_uniform(ptx::warp());
    if (warp == 0) {
      Producer<Config>{params, smem, ptx::elect_one(), {smem, {}}, {}, {}}.run();
    } else if (warp == 1) {
      Writer<Config>{params, smem, {smem, {}}, {}}.run();
    } else if (warp == 2) {
      Scheduler<Config>{params, {smem, {}}}.run();
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    Consumer<Config>(params, smem, warpgroup - 1).run();
  }
}

}  // namespace cf::sm90
