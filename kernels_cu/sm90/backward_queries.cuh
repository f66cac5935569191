// Backward attention for Hopper (sm_90a), head dimensions above 128: dq. dk and dv are the work of
// backward_keys.cuh, which says why there are two kernels.
//
// A CTA owns 128 queries of a head and walks the blocks of keys that they see, as the forward does;
// dq stays in registers, so nothing is added up in global memory and the result is the same every
// time:
//   S = Q K^T     P = exp2(S c - lse)     dP = dO V^T     dS = P (dP - delta)     dQ += dS K
// dS is, packed in registers, the A operand of the last product. Algorithm: FlashAttention-2 (Dao
// 2023, arXiv 2307.08691), with the loops exchanged.
//
// Roles (registers per thread after setmaxnreg):
//   warpgroup 0     warp 0, producer: one thread issues every load                          24
//                   warp 1: writes dq of queries without keys and of rows of no sequence
//   warpgroups 1-2  consumers: 64 queries each                                               240
//
// Shared memory, in order (QueriesLayout; 128-byte swizzled tiles):
//   Q    [2 warpgroups][64][head_dim_qk]       later dq
//   dO   [2 warpgroups][64][head_dim_v]
//   K    [stages][kBlockN][head_dim_qk]
//   V    [kValueStages][kBlockN][head_dim_v]
//   barriers
//
// Pipeline of a consumer warpgroup, block by block:
//   issue S, dP;  wait S;  exp2;  wait dP (V free);  dS;  issue dQ;  wait dQ (K free)
// The other warpgroup's products fill the tensor cores meanwhile.
#pragma once
#include "attn/blocks.cuh"
#include "attn/grad_padding.cuh"
#include "attn/mask.cuh"
#include "attn/query_blocks.cuh"
#include "attn/query_slots.cuh"
#include "attn/ragged.cuh"
#include "attn/softcap.cuh"
#include "backward_params.cuh"
#include "ptx/ptx.cuh"
#include "sm90/backward_tiles.cuh"
#include "tile/layout.cuh"
#include "tile/pipeline.cuh"

namespace cf::sm90 {

template <class Config>
struct QueriesLayout {
  using QkTile = Tile<Config::kHeadDimQk>;
  using VTile = Tile<Config::kHeadDimV>;
  static constexpr int kBlockN = Config::kBlockN;
  static_assert(Config::kBlockM == kConsumers * kWarpgroupRows);
  static_assert(kBlockN % 16 == 0);

  static constexpr int kQBytes = QkTile::bytes(kWarpgroupRows);     // of a warpgroup
  static constexpr int kDoutBytes = VTile::bytes(kWarpgroupRows);
  static constexpr int kKBytes = QkTile::bytes(kBlockN), kVBytes = VTile::bytes(kBlockN);
  static constexpr int kStages = Config::kStages, kValueStages = Config::kValueStages;
  static_assert(kKBytes % 1024 == 0 && kVBytes % 1024 == 0);

  static constexpr int kQ = 0;
  static constexpr int kDout = kQ + kConsumers * kQBytes;
  static constexpr int kK = kDout + kConsumers * kDoutBytes;
  static constexpr int kV = kK + kStages * kKBytes;
  static constexpr int kBarriers = kV + kValueStages * kVBytes;

  // mbarriers. Full: one arrival, of the producer, with the bytes of the load. Empty: one thread of
  // each consumer warpgroup.
  static constexpr int kQFull = kBarriers;  // Q and dO of both warpgroups
  static constexpr int kKFull = kQFull + 8;  // [stage]
  static constexpr int kKEmpty = kKFull + 8 * kStages;
  static constexpr int kVFull = kKEmpty + 8 * kStages;  // [value stage]
  static constexpr int kVEmpty = kVFull + 8 * kValueStages;
  static constexpr int kBytes = kVEmpty + 8 * kValueStages;
  static_assert(kBytes <= 232448, "Hopper has 227 KB of shared memory a CTA");
};

// The tile of this CTA, as every role works it out.
template <class Config>
struct QueryWork {
  using Mask = typename Config::Mask;
  static constexpr bool kGeneral = Config::kGeneral != 0;
  using Sequence = typename SequenceOf<kGeneral, BackwardParams>::Type;
  using Blocks = KvBlocks<Mask, Config::kBlockN>;

  QueryTile tile;
  int query_begin, head_kv, array_batch;

  CF_DEVICE explicit QueryWork(const BackwardParams& params)
      : tile(decode_query_tile<kGeneral, Mask, Config::kBlockM>(params, ptx::cta_idx())),
        query_begin(tile.m_block * Config::kBlockM),
        head_kv(tile.head_q / params.group),
        // Packed sequences share one batch of the arrays.
        array_batch(params.cu_seqlens_q != nullptr ? 0 : tile.batch) {}
  CF_DEVICE Sequence sequence(const BackwardParams& params) const { return {params, tile.batch}; }
  CF_DEVICE Blocks blocks(const Sequence& sequence) const {
    return {sequence, query_begin, Config::kBlockM};
  }
  // Whether there are queries and keys to be multiplied.
  CF_DEVICE int count(const Sequence& sequence) const {
    if (tile.m_block < 0 || query_begin >= sequence.seqlen_q()) return 0;
    return max(ptx::warp_uniform(blocks(sequence).count), 0);
  }
};

template <class Config>
CF_DEVICE void initialize_barriers(saddr smem) {
  using Layout = QueriesLayout<Config>;
  ptx::mbarrier_init(smem + Layout::kQFull, 1);
  for (int i = 0; i < Layout::kStages; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kKFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kKEmpty, i), kConsumers);
  }
  for (int i = 0; i < Layout::kValueStages; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kVFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kVEmpty, i), kConsumers);
  }
  ptx::fence_mbarrier_init();
}

// --- producer -----------------------------------------------------------------------------------

// One warp: the queries and output gradients, then keys and values block by block.
template <class Config>
struct QueryProducer {
  using Layout = QueriesLayout<Config>;
  using QkTile = typename Layout::QkTile;
  using VTile = typename Layout::VTile;
  static constexpr bool kGeneral = Config::kGeneral != 0;

  const BackwardParams& params;
  const saddr smem;
  RingPlace<Layout::kStages> k_place;
  RingPlace<Layout::kValueStages> v_place;

  template <class Tile>
  CF_DEVICE void load(saddr dst, saddr full, const CUtensorMap* map, int batch_rows,
                      const TileRows<kGeneral>& rows, int tile_rows, int row, int head,
                      uint64_t policy) const {
    CF_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      rows.load(dst + c * Tile::chunk_bytes(tile_rows), map, full, c * Tile::kChunk, row, head,
                batch_rows, policy);
    }
  }
  CF_DEVICE void run() {
    const QueryWork<Config> work(params);
    const auto sequence = work.sequence(params);
    const int count = work.count(sequence);
    const auto blocks = work.blocks(sequence);
    const bool elected = ptx::elect_one();
    const TileRows<kGeneral> rows_q{sequence.q_begin(), sequence.seqlen_q(), work.array_batch};
    const TileRows<kGeneral> rows_kv{sequence.kv_begin(), sequence.seqlen_kv(),
                                     params.cu_seqlens_kv != nullptr ? 0 : work.tile.batch};
    CF_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      const int key = blocks.at(i).start;
      if constexpr (kKept<kNoKEmptyWait>) {
        await_as_warp(barrier_at(smem + Layout::kKEmpty, k_place.stage), k_place.phase ^ 1);
      }
      if (elected) {
        if (i == 0) {
          const saddr full = smem + Layout::kQFull;
          ptx::mbarrier_arrive_expect_tx(full,
                                         kConsumers * (Layout::kQBytes + Layout::kDoutBytes));
          CF_UNROLL
          for (int w = 0; w < kConsumers; ++w) {
            const int row = work.query_begin + w * kWarpgroupRows;
            load<QkTile>(smem + Layout::kQ + w * Layout::kQBytes, full, &params.q_map,
                         params.q_batch_rows, rows_q, kWarpgroupRows, row, work.tile.head_q,
                         ptx::kEvictFirst);
            load<VTile>(smem + Layout::kDout + w * Layout::kDoutBytes, full, &params.dout_map,
                        params.dout_batch_rows, rows_q, kWarpgroupRows, row, work.tile.head_q,
                        ptx::kEvictFirst);
          }
        }
        const saddr full = barrier_at(smem + Layout::kKFull, k_place.stage);
        ptx::mbarrier_arrive_expect_tx(full, Layout::kKBytes);
        load<QkTile>(smem + Layout::kK + k_place.stage * Layout::kKBytes, full, &params.k_map,
                     params.k_batch_rows, rows_kv, Config::kBlockN, key, work.head_kv,
                     ptx::kEvictLast);
      }
      k_place.advance();
      if constexpr (kKept<kNoVEmptyWait>) {
        await_as_warp(barrier_at(smem + Layout::kVEmpty, v_place.stage), v_place.phase ^ 1);
      }
      if (elected) {
        const saddr full = barrier_at(smem + Layout::kVFull, v_place.stage);
        ptx::mbarrier_arrive_expect_tx(full, Layout::kVBytes);
        load<VTile>(smem + Layout::kV + v_place.stage * Layout::kVBytes, full, &params.v_map,
                    params.v_batch_rows, rows_kv, Config::kBlockN, key, work.head_kv,
                    ptx::kEvictLast);
      }
      v_place.advance();
    }
  }
};

// One warp: dq of this CTA's queries if they see no key, and its share of rows of no sequence.
template <class Config>
CF_DEVICE void write_other_queries(const BackwardParams& params) {
  using Element = typename Config::Element;
  const QueryWork<Config> work(params);
  const auto sequence = work.sequence(params);
  if (work.tile.m_block >= 0 && work.query_begin < sequence.seqlen_q() &&
      work.count(sequence) == 0) {
    const int end = min(work.query_begin + Config::kBlockM, sequence.seqlen_q());
    write_zero_rows<Element>(params, params.dq, params.dq_stride_batch, params.dq_stride_seqlen,
                             params.dq_stride_head, params.head_dim_qk, work.array_batch,
                             work.tile.head_q, sequence.q_begin() + work.query_begin,
                             sequence.q_begin() + end);
  }
  if constexpr (Config::kGeneral != 0) {
    if (ptx::cta_idx() < kGradPaddingWorkers) {
      write_query_padding<Element>(params, ptx::cta_idx(),
                                   min(ptx::num_ctas(), kGradPaddingWorkers));
    }
  }
}

// --- consumers ----------------------------------------------------------------------------------

template <class Config>
struct QueryConsumer {
  using Layout = QueriesLayout<Config>;
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using QkTile = typename Layout::QkTile;
  using VTile = typename Layout::VTile;
  static constexpr int kBlockN = Config::kBlockN, kWidthQk = Config::kHeadDimQk;
  static constexpr int kStepsN = kBlockN / 16;
  static constexpr bool kGeneral = Config::kGeneral != 0;

  using Scores = float[kBlockN / 2];     // [64 queries, kBlockN]
  using Packed = uint32_t[kStepsN][4];   // the same in pairs, as A operands
  using GradQ = float[kWidthQk / 2];     // [64 queries, head_dim_qk]

  const BackwardParams& params;
  const saddr smem;
  const int warpgroup;  // 0 is the first consumer
  const bool leader;    // one thread of the warpgroup
  RingPlace<Layout::kStages> k_place;
  RingPlace<Layout::kValueStages> v_place;

  CF_DEVICE saddr q_tile() const { return smem + Layout::kQ + warpgroup * Layout::kQBytes; }
  CF_DEVICE saddr dout_tile() const {
    return smem + Layout::kDout + warpgroup * Layout::kDoutBytes;
  }
  CF_DEVICE void release_k() const {
    if (leader) ptx::mbarrier_arrive(barrier_at(smem + Layout::kKEmpty, k_place.stage));
  }
  CF_DEVICE void release_v() const {
    if (leader) ptx::mbarrier_arrive(barrier_at(smem + Layout::kVEmpty, v_place.stage));
  }

  // S to P, with the slope of the soft cap in it if there is one.
  CF_DEVICE void weigh(Scores& s, const float (&lse)[2]) const {
    const float scale = params.softmax_scale_log2;
    if (kGeneral && params.softcap != 0.0f) {
      cap_scores(params, s);
      const float inverse = ptx::rcp(params.softcap);
      CF_UNROLL
      for (int i = 0; i < kBlockN / 2; ++i) {
        const float tanh = ptx::mul(s[i], inverse);
        const float weight = ptx::ex2(ptx::fma(s[i], scale, -lse[i >> 1 & 1]));
        s[i] = ptx::mul(weight, ptx::fma(-tanh, tanh, 1.0f));
      }
      return;
    }
    CF_UNROLL
    for (int i = 0; i < kBlockN / 2; ++i) {
      s[i] = ptx::ex2(ptx::fma(s[i], scale, -lse[i >> 1 & 1]));
    }
  }

  // lse or delta of this thread's two rows; `absent` for rows that are no queries.
  template <class Sequence>
  CF_DEVICE void read_rows(float (&values)[2], const float* rows, const QueryWork<Config>& work,
                           const Sequence& sequence, int query, float absent) const {
    const int slot = query_slot(params, work.tile.batch, 0, params.block_m);
    const int64_t first =
        (static_cast<int64_t>(work.tile.head_q) * params.num_slots + slot) * params.block_m;
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int row = query + 8 * r;
      values[r] = absent;
      if (row < sequence.seqlen_q()) {
        values[r] = ptx::bits_float(ptx::ldg32(rows + first + row));
      }
    }
  }

  template <class Sequence>
  CF_DEVICE void step(GradQ& dq, const Sequence& sequence, const KvBlock& block,
                      const int (&row_query)[2], const float (&lse)[2], const float (&delta)[2],
                      bool accumulate) {
    Scores s, dp;
    const saddr k = smem + Layout::kK + k_place.stage * Layout::kKBytes;
    if constexpr (kKept<kNoKFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kKFull, k_place.stage), k_place.phase);
    }
    issue_outer<Element, QkTile, kWarpgroupRows, kBlockN>(s, q_tile(), k);
    if constexpr (kKept<kNoVFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kVFull, v_place.stage), v_place.phase);
    }
    issue_outer<Element, VTile, kWarpgroupRows, kBlockN>(
        dp, dout_tile(), smem + Layout::kV + v_place.stage * Layout::kVBytes);
    await_products<1>(s);
    if constexpr (!kKept<kEarlyVRelease>) release_v();
    weigh(s, lse);
    await_products<0>(dp);
    if constexpr (kKept<kEarlyVRelease>) release_v();
    v_place.advance();
    CF_UNROLL
    for (int i = 0; i < kBlockN / 2; ++i) dp[i] = s[i] * (dp[i] - delta[i >> 1 & 1]);
    if (block.partial) mask_fragment<Mask>(sequence, dp, row_query, block.start, 0.0f);
    Packed packed;
    pack_operand<Element>(packed, dp);
    issue_inner<Element, QkTile>(dq, packed, k, accumulate);
    if constexpr (!kKept<kEarlyKRelease>) release_k();
    await_products<0>(dq);
    if constexpr (kKept<kEarlyKRelease>) release_k();
    k_place.advance();
  }

  CF_DEVICE void run() {
    const QueryWork<Config> work(params);
    const auto sequence = work.sequence(params);
    const int count = work.count(sequence);
    if (count == 0) return;
    const auto blocks = work.blocks(sequence);
    const int query = work.query_begin + warpgroup * kWarpgroupRows + 16 * (ptx::warp() % 4) +
                      ptx::lane() / 4;
    const int row_query[2] = {query, query + 8};
    float lse[2], delta[2];
    read_rows(lse, params.row_lse, work, sequence, query, ptx::kInfinity);
    read_rows(delta, params.row_delta, work, sequence, query, 0.0f);
    if constexpr (kKept<kNoQFullWait>) ptx::mbarrier_wait(smem + Layout::kQFull, 0);
    GradQ dq;
    CF_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      step(dq, sequence, blocks.at(i), row_query, lse, delta, i > 0);
    }
    CF_UNROLL
    for (int i = 0; i < kWidthQk / 2; ++i) dq[i] *= params.grad_scale;
    if (params.float_grads != 0 || params.accumulate != 0) {
      write_grad<Element, kWidthQk>(
          params, dq, params.dq,
          work.array_batch * params.dq_stride_batch + work.tile.head_q * params.dq_stride_head +
              (sequence.q_begin() + query) * params.dq_stride_seqlen,
          params.dq_stride_seqlen, sequence.seqlen_q() - query, params.head_dim_qk);
      return;
    }
    // Only this warpgroup has read its queries.
    stage_grad<Element, QkTile, kWarpgroupRows>(q_tile(), 0, dq);
    if constexpr (kKept<kNoOutputFence>) ptx::fence_proxy_async();
    if constexpr (kKept<kNoEpilogueBarrier>) {
      ptx::named_barrier_sync(kEpilogueBarrier + warpgroup, kWarpgroupThreads);
    }
    const int row = work.query_begin + warpgroup * kWarpgroupRows;
    if (!leader || row >= sequence.seqlen_q()) return;
    const TileRows<kGeneral> rows{sequence.q_begin(), sequence.seqlen_q(), work.array_batch};
    store_grad<QkTile, kWarpgroupRows>(&params.dq_map, q_tile(), 0, rows, row, work.tile.head_q,
                                       params.rows_q);
    ptx::tma_commit();
    ptx::tma_wait<0>();
  }
};

template <class Config>
CF_DEVICE void backward_queries(const BackwardParams& params) {
  static_assert(ptx::kArchitecture == 90);
  const saddr smem = ptx::smem_base();
  const int warpgroup = ptx::warp_uniform(ptx::tid() / kWarpgroupThreads);
  if (ptx::tid() == 0) initialize_barriers<Config>(smem);
  ptx::cta_sync();
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<24>();
    const int warp = ptx::warp_uniform(ptx::warp());
    if (warp == 0) {
      QueryProducer<Config>{params, smem, {}, {}}.run();
    } else if (warp == 1) {
      write_other_queries<Config>(params);
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    QueryConsumer<Config>{params, smem, warpgroup - 1, ptx::tid() % kWarpgroupThreads == 0, {}, {}}
        .run();
  }
}

}  // namespace cf::sm90
