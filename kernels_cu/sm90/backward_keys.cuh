// Backward attention for Hopper (sm_90a), head dimensions above 128: dk and dv. dq is the work of
// backward_queries.cuh.
//
// The products of backward.cuh with another division of labour. At these widths the sums dk and dv
// of 64 keys fill half of an SM's registers, and a step of 64 keys would add as much to dq as an SM
// can reduce into the L2 cache (24 bytes a clock, measured on an H200). So dq is computed by a
// kernel of its own, which recomputes S and dP: 7 products in place of 5, none of them scattered,
// in an order that is always the same. The warpgroups of this kernel share 64 keys and differ in
// what they do with them, so that each holds one gradient whole:
//
//   warpgroup 1   S^T = K Q^T     P^T = exp2(S^T c - lse)        dV += P^T dO
//   warpgroup 2   dP^T = V dO^T   dS^T = P^T (dP^T - delta)      dK += dS^T Q
//
// P^T reaches the second in 16 bits, thread to thread (both hold the same accumulators), with the
// slope of the soft cap in it if there is one. Algorithm: FlashAttention-2 and -3 (Dao 2023, arXiv
// 2307.08691; Shah et al. 2024, arXiv 2407.08608).
//
// Roles (registers per thread after setmaxnreg):
//   warpgroup 0     warp 0, producer: one thread issues every load                          24
//                   warp 2, scheduler: deals out tiles; writes the gradients of keys that no
//                   query sees and of rows of no sequence
//   warpgroups 1-2  consumers                                                                240
//
// Shared memory, in order (BackwardLayout; 128-byte swizzled tiles):
//   K       [64][head_dim_qk]           later dk
//   V       [64][head_dim_v]            later dv
//   Q       [stages][kBlockM][head_dim_qk]
//   dO      [stages][kBlockM][head_dim_v]
//   weights [2][kBlockM / 16 * 128] times 16 bytes: P^T as the threads hold it
//   rows    [stages][2][kBlockM] floats: lse (with Q), delta (with dO)
//   tiles   [kTileSlots][16] words, from the scheduler to the others   (TileSlot)
//   barriers
//
// Pipeline, step i. Each warpgroup leaves its two products to the tensor cores and comes back when
// both are done; meanwhile they belong to the other.
//   1: wait S_i (and dV_(i-1): its slot is free);  exp2;  hand P over;  issue dV_i, S_(i+1)
//   2: wait dP_i (and dK_(i-1));  wait P;  dS;  issue dK_i, dP_(i+1)
#pragma once
#include "attn/query_blocks.cuh"
#include "attn/ragged.cuh"
#include "attn/softcap.cuh"
#include "backward_params.cuh"
#include "ptx/ptx.cuh"
#include "sm90/backward_tiles.cuh"
#include "tile/layout.cuh"
#include "tile/pipeline.cuh"

namespace cf::sm90 {

template <class Config>
struct BackwardLayout {
  using QkTile = Tile<Config::kHeadDimQk>;
  using VTile = Tile<Config::kHeadDimV>;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kThreads = (1 + kConsumers) * kWarpgroupThreads;
  static_assert(kBlockN == kWarpgroupRows && kBlockM % 16 == 0);

  static constexpr int kKBytes = QkTile::bytes(kBlockN), kVBytes = VTile::bytes(kBlockN);
  static constexpr int kQBytes = QkTile::bytes(kBlockM), kDoutBytes = VTile::bytes(kBlockM);
  static constexpr int kWeightBytes = kBlockM * kBlockN * 2;
  static constexpr int kWeightSlots = 2;
  static constexpr int kRowBytes = kBlockM * 4;
  static_assert(kQBytes % 1024 == 0 && kDoutBytes % 1024 == 0);

  static constexpr int kK = 0;
  static constexpr int kV = kK + kKBytes;
  static constexpr int kQ = kV + kVBytes;
  static constexpr int kDout = kQ + Config::kStages * kQBytes;
  static constexpr int kWeights = kDout + Config::kStages * kDoutBytes;
  static constexpr int kRows = kWeights + kWeightSlots * kWeightBytes;
  static constexpr int kTileSlots = 2;
  static constexpr int kTileBytes = 64;
  static constexpr int kTiles = kRows + Config::kStages * 2 * kRowBytes;
  static constexpr int kBarriers = kTiles + kTileSlots * kTileBytes;

  // mbarriers. Full: one arrival, of the producer, with the bytes of the load. Empty: one thread of
  // each consumer warpgroup.
  static constexpr int kKFull = kBarriers;
  static constexpr int kVFull = kKFull + 8;
  static constexpr int kKvEmpty = kVFull + 8;  // dk and dv have been stored
  static constexpr int kQFull = kKvEmpty + 8;  // [stage]
  static constexpr int kQEmpty = kQFull + 8 * Config::kStages;  // Q and dO have been read
  static constexpr int kDoutFull = kQEmpty + 8 * Config::kStages;
  // Weights have been written, have been read: the warps of a warpgroup.
  static constexpr int kWeightsFull = kDoutFull + 8 * Config::kStages;  // [weight slot]
  static constexpr int kWeightsEmpty = kWeightsFull + 8 * kWeightSlots;
  // A tile is described (the scheduler), no longer needed (producer, consumer warpgroups).
  static constexpr int kTileFull = kWeightsEmpty + 8 * kWeightSlots;  // [tile slot]
  static constexpr int kTileEmpty = kTileFull + 8 * kTileSlots;
  static constexpr int kBytes = kTileEmpty + 8 * kTileSlots;
  static_assert(kBytes <= 232448, "Hopper has 227 KB of shared memory a CTA");

  static constexpr int kTileEmptyArrivals = 1 + kConsumers;
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
  for (int i = 0; i < Layout::kWeightSlots; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kWeightsFull, i), kWarpgroupThreads / 32);
    ptx::mbarrier_init(barrier_at(smem + Layout::kWeightsEmpty, i), kWarpgroupThreads / 32);
  }
  for (int i = 0; i < Layout::kTileSlots; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kTileFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kTileEmpty, i), Layout::kTileEmptyArrivals);
  }
  ptx::fence_mbarrier_init();
}

// What both consumers are made of. kForKeys: the second, which makes dk.
template <class Config, bool kForKeys>
struct Consumer {
  using Layout = BackwardLayout<Config>;
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using QkTile = typename Layout::QkTile;
  using VTile = typename Layout::VTile;
  using GradTile = Tile<kForKeys ? Config::kHeadDimQk : Config::kHeadDimV>;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kStepsM = kBlockM / 16;
  static constexpr bool kGeneral = Config::kGeneral != 0;
  static constexpr bool kBounded = Mask::kHasLeft || Mask::kHasRight;

  using Scores = float[kBlockM / 2];             // [64 keys, kBlockM]
  using Packed = uint32_t[kStepsM][4];           // the same in pairs, as A operands
  using Grad = float[GradTile::kColumns / 2];    // [64 keys, head_dim of the gradient]

  const BackwardParams& params;
  const saddr smem;
  const bool leader;  // one thread of the warpgroup
  RingPlace<1> kv_place;
  RingPlace<Config::kStages> place;
  RingPlace<Layout::kWeightSlots> weight_place;
  TileStream<Config> stream;

  CF_DEVICE Consumer(const BackwardParams& params, saddr smem)
      : params(params),
        smem(smem),
        leader(ptx::tid() % kWarpgroupThreads == 0),
        stream{smem, {}} {}

  CF_DEVICE saddr q_tile() const { return smem + Layout::kQ + place.stage * Layout::kQBytes; }
  CF_DEVICE saddr dout_tile() const {
    return smem + Layout::kDout + place.stage * Layout::kDoutBytes;
  }
  CF_DEVICE saddr rows(int which) const {
    return smem + static_cast<uint32_t>(Layout::kRows +
                                        (2 * place.stage + which) * Layout::kRowBytes);
  }
  CF_DEVICE saddr weights() const {  // this thread's
    return smem + static_cast<uint32_t>(Layout::kWeights +
                                        weight_place.stage * Layout::kWeightBytes +
                                        16 * (ptx::tid() % kWarpgroupThreads));
  }
  CF_DEVICE void await_queries() const {
    if constexpr (kKept<kNoQFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kQFull, place.stage), place.phase);
    }
  }
  CF_DEVICE void await_dout() const {
    if constexpr (kKept<kNoDoutFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kDoutFull, place.stage), place.phase);
    }
  }
  // The slot before `place` has been read by this warpgroup.
  CF_DEVICE void release(int stage) const {
    if (leader) ptx::mbarrier_arrive(barrier_at(smem + Layout::kQEmpty, stage));
  }
  CF_DEVICE static bool is_partial(const TileSlot<Config>& tile, int m_block) {
    return ptx::warp_uniform(m_block < tile.full_begin() || m_block >= tile.full_end()) != 0;
  }
  CF_DEVICE int first_key(const TileSlot<Config>& tile) const {
    return tile.key_begin() + 16 * (ptx::warp() % 4) + ptx::lane() / 4;
  }
  template <int kCount>
  CF_DEVICE void mask(float (&s)[kCount], const TileSlot<Config>& tile, int query_begin) const {
    const int key = first_key(tile);
    mask_transposed<Mask>(tile.sequence(params), s, {key, key + 8}, query_begin, 0.0f);
  }

  // --- the first product of the step at `place`, and what it leads to

  CF_DEVICE void issue_first(Scores& s, const TileSlot<Config>& tile, int m_block) const {
    if (kBounded && is_partial(tile, m_block)) {
      clear_rows_without_keys<Config>(tile.sequence(params), m_block * kBlockM, q_tile(),
                                      dout_tile(), [&] {
                                        await_queries();
                                        await_dout();
                                      });
    }
    if constexpr (kForKeys) {
      await_dout();
      issue_outer<Element, VTile, kBlockN, kBlockM>(s, smem + Layout::kV, dout_tile());
    } else {
      await_queries();
      issue_outer<Element, QkTile, kBlockN, kBlockM>(s, smem + Layout::kK, q_tile());
    }
  }
  // S^T to P^T, handed over.
  CF_DEVICE void weigh(Packed& packed, Scores& s, const TileSlot<Config>& tile, int m_block) {
    const int query_begin = m_block * kBlockM;
    const bool capped = kGeneral && params.softcap != 0.0f;
    const float scale = params.softmax_scale_log2;
    if (capped) cap_scores(params, s);
    const bool partial = kBounded && is_partial(tile, m_block);
    if (capped) {
      hand_over_capped(packed, s, tile, query_begin, partial);
      return;
    }
    CF_UNROLL
    for (int j = 0; j < kBlockM / 8; ++j) {
      float lse[2];
      read_row_pair(lse, rows(0), j);
      CF_UNROLL
      for (int e = 0; e < 4; ++e) {
        s[4 * j + e] = ptx::ex2(ptx::fma(s[4 * j + e], scale, -lse[e & 1]));
      }
    }
    if (partial) mask(s, tile, query_begin);
    pack_operand<Element>(packed, s);
    await_weight_slot();
    CF_UNROLL
    for (int step = 0; step < kStepsM; ++step) {
      ptx::sts128(weights() + 16 * kWarpgroupThreads * step,
                  {packed[step][0], packed[step][1], packed[step][2], packed[step][3]});
    }
    publish_weights();
  }
  // Capped scores: what is handed over has the slope of the cap in it, 1 - tanh^2.
  CF_DEVICE void hand_over_capped(Packed& packed, const Scores& s, const TileSlot<Config>& tile,
                                  int query_begin, bool partial) {
    const float inverse = ptx::rcp(params.softcap);
    await_weight_slot();
    CF_UNROLL
    for (int step = 0; step < kStepsM; ++step) {
      float p[8], sloped[8];
      CF_UNROLL
      for (int half = 0; half < 2; ++half) {
        float lse[2];
        read_row_pair(lse, rows(0), 2 * step + half);
        CF_UNROLL
        for (int e = 0; e < 4; ++e) {
          const float capped = s[8 * step + 4 * half + e];
          const float tanh = ptx::mul(capped, inverse);
          p[4 * half + e] = ptx::ex2(ptx::fma(capped, params.softmax_scale_log2, -lse[e & 1]));
          sloped[4 * half + e] = ptx::mul(p[4 * half + e], ptx::fma(-tanh, tanh, 1.0f));
        }
      }
      if (partial) {
        mask(p, tile, query_begin + 16 * step);
        mask(sloped, tile, query_begin + 16 * step);
      }
      uint32_t given[4];
      CF_UNROLL
      for (int i = 0; i < 4; ++i) {
        packed[step][i] = ptx::pack2<Element>(p[2 * i], p[2 * i + 1]);
        given[i] = ptx::pack2<Element>(sloped[2 * i], sloped[2 * i + 1]);
      }
      ptx::sts128(weights() + 16 * kWarpgroupThreads * step,
                  {given[0], given[1], given[2], given[3]});
    }
    publish_weights();
  }
  CF_DEVICE void await_weight_slot() const {
    if constexpr (kKept<kNoWeightsEmptyWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kWeightsEmpty, weight_place.stage),
                         weight_place.phase ^ 1);
    }
  }
  CF_DEVICE void publish_weights() {
    ptx::warp_sync();
    if (ptx::lane() == 0) {
      ptx::mbarrier_arrive(barrier_at(smem + Layout::kWeightsFull, weight_place.stage));
    }
    weight_place.advance();
  }
  // dP^T to dS^T with the weights that the first warpgroup hands over.
  CF_DEVICE void differentiate(Packed& packed, Scores& dp, const TileSlot<Config>& tile,
                               int m_block) {
    if constexpr (kKept<kNoWeightsFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kWeightsFull, weight_place.stage),
                         weight_place.phase);
    }
    CF_UNROLL
    for (int step = 0; step < kStepsM; ++step) {
      const u32x4 given = ptx::lds128(weights() + 16 * kWarpgroupThreads * step);
      const uint32_t pairs[4] = {given.x, given.y, given.z, given.w};
      CF_UNROLL
      for (int half = 0; half < 2; ++half) {
        float delta[2];
        read_row_pair(delta, rows(1), 2 * step + half);
        CF_UNROLL
        for (int pair = 0; pair < 2; ++pair) {
          float low, high;
          ptx::unpack2<Element>(low, high, pairs[2 * half + pair]);
          const int i = 8 * step + 4 * half + 2 * pair;
          dp[i] = low * (dp[i] - delta[0]);
          dp[i + 1] = high * (dp[i + 1] - delta[1]);
        }
      }
    }
    ptx::warp_sync();
    if (ptx::lane() == 0) {
      ptx::mbarrier_arrive(barrier_at(smem + Layout::kWeightsEmpty, weight_place.stage));
    }
    weight_place.advance();
    // Weights of 0 would do but for NaN in what they hide.
    if (kBounded && is_partial(tile, m_block)) mask(dp, tile, m_block * kBlockM);
    pack_operand<Element>(packed, dp);
  }

  // --- a tile

  // From the first product of a step, under way, to the second and the first of the next step, of
  // query block `next_block`.
  template <bool kLast>
  CF_DEVICE void step(Grad& grad, Scores& s, const TileSlot<Config>& tile, int m_block,
                      int next_block, bool accumulate) {
    Packed packed;
    await_products<0>(s);
    ptx::wgmma_pin(grad);
    if (accumulate) {
      release(place.stage == 0 ? Config::kStages - 1 : place.stage - 1);
    }
    if constexpr (kForKeys) {
      differentiate(packed, s, tile, m_block);
      await_queries();
      issue_inner<Element, QkTile>(grad, packed, q_tile(), accumulate);
    } else {
      weigh(packed, s, tile, m_block);
      await_dout();
      issue_inner<Element, VTile>(grad, packed, dout_tile(), accumulate);
    }
    place.advance();
    if constexpr (!kLast) issue_first(s, tile, next_block);
  }
  CF_DEVICE void run() {
    Grad grad;
    for (;;) {
      const TileSlot<Config> tile = stream.await();
      if (ptx::warp_uniform(tile.count()) < 0) break;
      if constexpr (kForKeys) {
        if constexpr (kKept<kNoVFullWait>) {
          ptx::mbarrier_wait(smem + Layout::kVFull, kv_place.phase);
        }
      } else if constexpr (kKept<kNoKFullWait>) {
        ptx::mbarrier_wait(smem + Layout::kKFull, kv_place.phase);
      }
      Scores s;
      bool accumulate = false;
      QuerySteps steps = steps_of(params, tile);
      issue_first(s, tile, steps.m_block);
      CF_NO_UNROLL
      while (steps.left > 1) {
        const int m_block = steps.m_block;
        steps.advance();
        step<false>(grad, s, tile, m_block, steps.m_block, accumulate);
        accumulate = true;
      }
      step<true>(grad, s, tile, steps.m_block, 0, accumulate);
      await_products<0>(grad);
      release(place.stage == 0 ? Config::kStages - 1 : place.stage - 1);
      write_grad_tile(grad, tile);
      kv_place.advance();
      stream.place.advance();
    }
    if (leader) ptx::tma_wait<0>();
  }

  // dk or dv: 16-bit ones through shared memory, in the place of K or V, and by TMA; others
  // straight from registers.
  CF_DEVICE void write_grad_tile(Grad& grad, const TileSlot<Config>& tile) const {
    if constexpr (kForKeys) {
      CF_UNROLL
      for (int i = 0; i < GradTile::kColumns / 2; ++i) grad[i] *= params.grad_scale;
    }
    const bool direct = params.float_grads != 0 || params.accumulate != 0;
    const saddr staged = smem + (kForKeys ? Layout::kK : Layout::kV);
    // Each gradient takes the place of what the other warpgroup has read.
    if constexpr (kKept<kNoOutputBarrier>) {
      ptx::named_barrier_sync(kScoresBarrier, kConsumerThreads);
    }
    const auto sequence = tile.sequence(params);
    if (direct) {
      const int key = first_key(tile);
      const int64_t batch_stride = kForKeys ? params.dk_stride_batch : params.dv_stride_batch;
      const int64_t row_stride = kForKeys ? params.dk_stride_seqlen : params.dv_stride_seqlen;
      const int64_t head_stride = kForKeys ? params.dk_stride_head : params.dv_stride_head;
      write_grad<Element, GradTile::kColumns>(
          params, grad, kForKeys ? params.dk : params.dv,
          tile.batch() * batch_stride + tile.head_kv() * head_stride +
              (sequence.kv_begin() + key) * row_stride,
          row_stride, sequence.seqlen_kv() - key,
          kForKeys ? params.head_dim_qk : params.head_dim_v);
    } else {
      stage_grad<Element, GradTile, kBlockN>(staged, 0, grad);
      if constexpr (kKept<kNoOutputFence>) ptx::fence_proxy_async();
    }
    // Everything this warpgroup had to write, and read of the tile but by its leader.
    ptx::named_barrier_sync(kEpilogueBarrier + (kForKeys ? 1 : 0), kWarpgroupThreads);
    if (!leader) return;
    if (!direct) {
      const TileRows<kGeneral> rows{sequence.kv_begin(), sequence.seqlen_kv(), tile.batch()};
      store_grad<GradTile, kBlockN>(kForKeys ? &params.dk_map : &params.dv_map, staged, 0, rows,
                                    tile.key_begin(), tile.head_kv(), params.rows_kv);
      ptx::tma_commit();
      if constexpr (kKept<kNoOutputReadWait>) ptx::tma_wait_read<0>();
    }
    stream.release();
    ptx::mbarrier_arrive(smem + Layout::kKvEmpty);
  }
};

template <class Config>
CF_DEVICE void backward_keys(const BackwardParams& params) {
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
    } else if (warp == 2) {
      Scheduler<Config>{params, {smem, {}}}.run();
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    if (warpgroup == 1) {
      Consumer<Config, false>(params, smem).run();
    } else {
      Consumer<Config, true>(params, smem).run();
    }
  }
}

}  // namespace cf::sm90
