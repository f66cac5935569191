// Forward attention for Hopper (sm_90a): out = softmax(q k^T * scale + mask) v, and the
// log-sum-exp.
//
// Algorithm: FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608): TMA loads by a producer warp,
// wgmma with the probabilities as register operand, softmax of one warpgroup under the products of
// the others (ping-pong) and of its own next block (overlap). Written from the paper and the PTX
// ISA; what this chip does is measured in docs/kernels/sm90_forward.md.
//
// Roles (registers per thread after setmaxnreg, with 2 or 3 consumer warpgroups):
//   warpgroup 0      warp 0, producer: one thread issues every TMA load        40 or 32
//                    warp 1, scheduler: deals out tiles, writes those in which
//                    no query sees a key and the rows of no sequence
//   warpgroup 1...   consumers: 64 query rows each                             232 or 160
//
// Shared memory, in order (ForwardLayout; 128-byte swizzled tiles, 64-byte at head_dim 96):
//   Q    [q stages][consumer warpgroups][64][head_dim_qk]   also the output tile unless kOutBuffer
//   K    [stages][kBlockN][head_dim_qk]
//   V    [stages][kBlockN][head_dim_v]
//   out  [consumer warpgroups][64][head_dim_v]              only with kOutBuffer
//   tiles [kTileSlots][12] words, from the scheduler to the others   (TileSlot)
//   tickets [2] words, from the first CTA's scheduler to the second's
//   barriers
//
// Pipeline of a consumer warpgroup over its stream of key blocks j (right to left, tile after
// tile):
//   issue S = Q K_j;  issue O += P V_{j-1};  wait S;  softmax(S);  wait O;  P = S;  rescale O
// With kOutBuffer the stream runs on across tiles: the first block of a tile is scored while the
// last product of the previous tile runs, whose output is then written under the next block's
// products. Without it (large heads) the pipeline drains at every tile's end, since the output tile
// reuses Q.
//
// With kCluster = 2 the CTAs of a pair work on neighbouring query blocks, or (kPairHeads) on the
// same block of two query heads that share their keys, and each loads half of every K and V block
// into both (TMA multicast), which halves the L2 reads.
//
// General kernels (kGeneral) read lengths on the device. Their tensor maps have one dimension more,
// so that rows beyond a sequence are out of bounds for TMA, in loads and in stores
// (attn/ragged.cuh): nothing else in this file distinguishes packed sequences.
#pragma once
#include "attn/blocks.cuh"
#include "attn/ragged.cuh"
#include "attn/softcap.cuh"
#include "attn/softmax.cuh"
#include "params.cuh"
#include "ptx/ptx.cuh"
#include "sm90/forward_tiles.cuh"
#include "tile/layout.cuh"
#include "tile/pipeline.cuh"

namespace cf::sm90 {

template <class Config>
struct ForwardLayout {
  using QkTile = Tile<Config::kHeadDimQk>;
  using VTile = Tile<Config::kHeadDimV>;
  static constexpr int kWarpgroups = Config::kConsumerWarpgroups;
  static constexpr int kCluster = Config::kCluster;
  static constexpr int kThreads = (1 + kWarpgroups) * kWarpgroupThreads;
  static constexpr bool kQuantized = false;
  static_assert(Config::kBlockM == kWarpgroups * kWarpgroupRows);
  static_assert(Config::kBlockN % 16 == 0 && Config::kBlockN <= 256);
  static_assert(kCluster == 1 || kCluster == 2);
  static_assert(!Config::kPairHeads || kCluster == 2);

  // Bytes of one warpgroup's query and output tile, and of one stage of keys and values.
  static constexpr int kQBytes = QkTile::bytes(kWarpgroupRows);
  static constexpr int kOutBytes = VTile::bytes(kWarpgroupRows);
  static constexpr int kKBytes = QkTile::bytes(Config::kBlockN);
  static constexpr int kVBytes = VTile::bytes(Config::kBlockN);
  static_assert(kQBytes % 1024 == 0 && kKBytes % 1024 == 0 && kVBytes % 1024 == 0);
  static_assert(Config::kOutBuffer || (kOutBytes <= kQBytes && Config::kQStages == 1));

  static constexpr int kQ = 0;
  static constexpr int kK = kQ + Config::kQStages * kWarpgroups * kQBytes;
  static constexpr int kV = kK + Config::kStages * kKBytes;
  static constexpr int kVEnd = kV + Config::kStages * kVBytes;
  static constexpr int kOut = Config::kOutBuffer ? kVEnd : kQ;
  static constexpr int kOutStride = Config::kOutBuffer ? kOutBytes : kQBytes;
  static constexpr int kTiles = Config::kOutBuffer ? kVEnd + kWarpgroups * kOutBytes : kVEnd;
  static constexpr int kTileSlots = Config::kTileSlots;
  static constexpr int kTileBytes = 48;
  static constexpr int kTickets = kTiles + kTileSlots * kTileBytes;  // [2], in the second CTA
  static constexpr int kBarriers = kTickets + 16;

  // mbarriers. Full: one arrival, of the producer, with the bytes of the load. Empty: every
  // consumer warp that has done with the buffer, K and V also those of the other CTA of a cluster,
  // which writes into it; V and an output tile in place of Q are released by one thread a
  // warpgroup.
  static constexpr int kQFull = kBarriers;  // [q stage][warpgroup] query tile loaded
  static constexpr int kQEmpty = kQFull + 8 * Config::kQStages * kWarpgroups;
  static constexpr int kKFull = kQEmpty + 8 * Config::kQStages * kWarpgroups;  // [stage]
  static constexpr int kKEmpty = kKFull + 8 * Config::kStages;
  static constexpr int kVFull = kKEmpty + 8 * Config::kStages;
  static constexpr int kVEmpty = kVFull + 8 * Config::kStages;
  // A tile is described (the scheduler arrives), and no longer needed (the producer warp and one
  // thread of each consumer warpgroup).
  static constexpr int kTileFull = kVEmpty + 8 * Config::kStages;  // [tile slot]
  static constexpr int kTileEmpty = kTileFull + 8 * kTileSlots;
  // The tile that the first CTA of a cluster claimed has come (in the second), has been read (in
  // the first).
  static constexpr int kTicketFull = kTileEmpty + 8 * kTileSlots;  // [2]
  static constexpr int kTicketEmpty = kTicketFull + 8 * 2;
  static constexpr int kBytes = kTicketEmpty + 8 * 2;
  static_assert(kBytes <= 232448, "Hopper has 227 KB of shared memory a CTA");

  static constexpr int kQEmptyArrivals = Config::kOutBuffer ? kWarpsPerWarpgroup : 1;
  static constexpr int kKEmptyArrivals = kCluster * kWarpgroups * kWarpsPerWarpgroup;
  static constexpr int kVEmptyArrivals = kCluster * kWarpgroups;
  static constexpr int kTileEmptyArrivals = 1 + kWarpgroups;
};

// --- consumers ----------------------------------------------------------------------------------

template <class Config>
struct Consumer {
  using Layout = ForwardLayout<Config>;
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using QkTile = typename Layout::QkTile;
  using VTile = typename Layout::VTile;
  using QkDescriptor = Descriptor<QkTile>;
  using VDescriptor = Descriptor<VTile>;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kStepsQk = Config::kHeadDimQk / 16;
  static constexpr int kStepsV = kBlockN / 16;

  using Scores = float[kBlockN / 2];            // [64, kBlockN] of the warpgroup
  using Probabilities = uint32_t[kStepsV][4];   // [64, kBlockN], packed pairs
  using Output = float[Config::kHeadDimV / 2];  // [64, head_dim_v]

  // The blocks of a tile as one warpgroup sees them: the first ones, right of all that its own 64
  // rows may see, it only gives back. No more than the rings hold, and none where its rows see
  // nothing at all: those compute zeros.
  struct WarpgroupBlocks {
    KvBlocks<Mask, kBlockN> blocks;
    int end, skipped;
    template <class Sequence>
    CF_DEVICE WarpgroupBlocks(const Sequence& sequence, int end, int count, int row_begin)
        : blocks(sequence, row_begin, kWarpgroupRows),
          end(end),
          skipped(Mask::kHasRight && blocks.count > 0
                      // Rows past the last query could see keys that the tile does not visit.
                      ? max(min(min(end - blocks.end, Config::kStages), count - 1), 0)
                      : 0) {
      // Uniform, and known to be: the stream's places in the rings depend on them.
      if constexpr (Mask::kHasRight) {
        skipped = ptx::warp_uniform(skipped);
        blocks.full_end = ptx::warp_uniform(blocks.full_end);
      }
      if constexpr (Mask::kHasLeft) blocks.full_begin = ptx::warp_uniform(blocks.full_begin);
    }
    CF_DEVICE KvBlock at(int i) const {
      const int n = end - 1 - i;
      return {n * kBlockN, n < blocks.full_begin || n >= blocks.full_end};
    }
  };

  const ForwardParams& params;
  const saddr smem;
  const int warpgroup;  // 0 is the first consumer
  const bool leader;    // one thread of the warpgroup: releases V, stores the output
  RingPlace<Config::kStages> k_place, v_place;
  RingPlace<Config::kQStages> q_place;
  TileStream<Config> stream;
  // bfloat16 terms have the range to go without the maximum (attn/softmax.cuh).
  OnlineSoftmax<is_same<Element, bf16_t>> softmax;

  CF_DEVICE Consumer(const ForwardParams& params, saddr smem, int warpgroup)
      : params(params),
        smem(smem),
        warpgroup(warpgroup),
        leader(ptx::tid() % kWarpgroupThreads == 0),
        stream{smem, {}},
        softmax(params.softmax_scale_log2) {}

  // --- hand-overs

  // The order of the warpgroups' products: each waits for its turn and passes it on once its own
  // are issued, so that one's softmax runs under another's products.
  CF_DEVICE void await_turn() {
    if constexpr (Config::kPingPong) {
      ptx::named_barrier_sync(kTurnBarrier + warpgroup, 2 * kWarpgroupThreads);
    }
  }
  CF_DEVICE void pass_turn() {
    if constexpr (Config::kPingPong && kKept<kNoTurnPass>) {
      const int next = warpgroup + 1 == Layout::kWarpgroups ? 0 : warpgroup + 1;
      ptx::named_barrier_arrive(kTurnBarrier + next, 2 * kWarpgroupThreads);
    }
  }
  CF_DEVICE int q_buffer() const { return q_place.stage * Layout::kWarpgroups + warpgroup; }
  CF_DEVICE void await_q() {
    if constexpr (kKept<kNoQFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kQFull, q_buffer()), q_place.phase);
    }
  }
  CF_DEVICE void await_k() {
    if constexpr (kKept<kNoKFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kKFull, k_place.stage), k_place.phase);
    }
  }
  CF_DEVICE void await_v() {
    if constexpr (kKept<kNoVFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kVFull, v_place.stage), v_place.phase);
    }
  }
  // An arrival on this CTA's barrier and on the same one of the other CTA of a cluster.
  CF_DEVICE static void arrive_in_cluster(saddr barrier) {
    if constexpr (Config::kCluster == 1 || !kKept<kOwnReleaseOnly>) {
      ptx::mbarrier_arrive(barrier);
    } else {
      CF_UNROLL
      for (int rank = 0; rank < Config::kCluster; ++rank) {
        ptx::mbarrier_arrive_remote(ptx::map_to_cta(barrier, rank));
      }
    }
  }
  // K (and Q) may be read again by a warp that repeats its scores, so every warp releases them.
  CF_DEVICE void release_k() {
    if (ptx::lane() == 0) arrive_in_cluster(barrier_at(smem + Layout::kKEmpty, k_place.stage));
  }
  // A block that this warpgroup does not need: its turn is passed on and its stage given back.
  // Another warpgroup of this CTA needs the block and waits for its bytes; with pairs of query
  // blocks under a mask there need be none.
  static_assert(Config::kCluster == 1 || Config::kPairHeads || !Mask::kHasRight);
  CF_DEVICE void skip_k() {
    await_turn();
    pass_turn();
    release_k();
    k_place.advance();
  }
  CF_DEVICE void release_v() {
    if (leader) arrive_in_cluster(barrier_at(smem + Layout::kVEmpty, v_place.stage));
    v_place.advance();
  }
  // After a tile's last block; an output tile in Q's place is released by `store`.
  CF_DEVICE void release_q(bool last) {
    if constexpr (Config::kOutBuffer) {
      if (!last) return;
      if (ptx::lane() == 0) ptx::mbarrier_arrive(barrier_at(smem + Layout::kQEmpty, q_buffer()));
      q_place.advance();
    }
  }

  // --- products

  CF_DEVICE saddr q_tile() const { return smem + Layout::kQ + q_buffer() * Layout::kQBytes; }
  CF_DEVICE saddr k_tile() const { return smem + Layout::kK + k_place.stage * Layout::kKBytes; }
  CF_DEVICE saddr v_tile() const { return smem + Layout::kV + v_place.stage * Layout::kVBytes; }

  // S = Q K^T of the stage at k_place; one commit group.
  CF_DEVICE void issue_scores(Scores& s) {
    const uint32_t q = QkDescriptor::k_major(q_tile());
    const uint32_t k = QkDescriptor::k_major(k_tile());
    ptx::wgmma_pin(s);
    ptx::wgmma_fence();
    CF_UNROLL
    for (int step = 0; step < kStepsQk; ++step) {
      ptx::wgmma_ss<Element, kBlockN, QkDescriptor::kHigh, QkDescriptor::kHigh, 0>(
          s, q + QkDescriptor::k_step(kWarpgroupRows, step),
          k + QkDescriptor::k_step(kBlockN, step), step > 0);
    }
    ptx::wgmma_commit();
  }
  // O (+)= P V of the stage at v_place; one commit group.
  CF_DEVICE void issue_values(Output& o, const Probabilities& p, bool accumulate) {
    const uint32_t v = VDescriptor::mn_major(v_tile(), kBlockN);
    ptx::wgmma_pin(o);
    ptx::wgmma_fence();
    CF_UNROLL
    for (int step = 0; step < kStepsV; ++step) {
      ptx::wgmma_rs<Element, Config::kHeadDimV, VDescriptor::kHigh, 1>(
          o, p[step], v + VDescriptor::mn_step(step), accumulate || step > 0);
    }
    ptx::wgmma_commit();
  }
  // Waits until at most kPending groups of products are under way; `result` is then complete.
  template <int kPending, int kCount>
  CF_DEVICE static void await_products(float (&result)[kCount]) {
    if constexpr (kKept<kNoProductWait>) ptx::wgmma_wait<kPending>();
    ptx::wgmma_pin(result);
  }

  // This warp's 16 rows of S once more, without the warpgroup: mma.sync from the same tiles, whose
  // accumulators lie as wgmma's do. Rare (Note [The reference of a row]), so it is kept small.
  CF_DEVICE void repeat_scores(Scores& s) {
    const int lane = ptx::lane();
    const int q_row = 16 * (ptx::warp() % kWarpsPerWarpgroup) + (lane & 15);
    const int k_row = (lane & 7) + ((lane >> 4) << 3);
    CF_UNROLL
    for (int i = 0; i < kBlockN / 2; ++i) s[i] = 0.0f;
    CF_NO_UNROLL
    for (int step = 0; step < kStepsQk; ++step) {
      uint32_t a[4];
      ptx::ldmatrix_x4(
          a, q_tile() + QkTile::granule_offset(kWarpgroupRows, q_row, 2 * step + (lane >> 4)));
      CF_UNROLL
      for (int n = 0; n < kBlockN / 16; ++n) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, k_tile() + QkTile::granule_offset(kBlockN, 16 * n + k_row,
                                                              2 * step + ((lane >> 3) & 1)));
        ptx::mma_m16n8k16<Element>(s + 8 * n, a, b[0], b[1]);
        ptx::mma_m16n8k16<Element>(s + 8 * n + 4, a, b[2], b[3]);
      }
    }
    ptx::warp_sync();  // all lanes have read K and Q before lane 0 gives them back
  }

  // --- softmax

  // Scores of a block to terms; then K is given back. True: what O holds of this tile must be
  // multiplied by `correction`. kFirst: the tile's first block.
  template <bool kFirst>
  CF_DEVICE bool take_block(Scores& s, float (&correction)[2], const KvBlock& block,
                            const TileSlot<Config>& tile) {
    // Without a mask only the end of the keys cuts a block, the one that comes first.
    constexpr bool kMayBePartial = kFirst || Mask::kHasRight || Mask::kHasLeft;
    const bool partial = kMayBePartial && block.partial;
    if constexpr (!kKept<kEarlyKRelease>) release_k();
    cap(s);
    if (partial) mask(s, block, tile);
    bool rescale = false;
    bool done = false;
    if constexpr (kFirst) softmax.sample(s);
    if (softmax.settled) {
      done = softmax.update_freely(s);
      if (!done) {
        repeat_scores(s);
        cap(s);
        if (partial) mask(s, block, tile);
      }
    }
    if (!done) rescale = softmax.update(s, correction);
    if constexpr (kKept<kEarlyKRelease>) release_k();
    return rescale;
  }
  CF_DEVICE void cap(Scores& s) {
    if constexpr (Config::kGeneral != 0) cap_scores(params, s);
  }
  CF_DEVICE void mask(Scores& s, const KvBlock& block, const TileSlot<Config>& tile) {
    const int row = row_begin_of(tile) + 16 * (ptx::warp() % kWarpsPerWarpgroup) + ptx::lane() / 4;
    const int row_query[2] = {row, row + 8};
    mask_fragment<Mask>(tile.sequence(params), s, row_query, block.start);
  }
  CF_DEVICE static void pack(Probabilities& p, const Scores& s) {
    CF_UNROLL
    for (int i = 0; i < kBlockN / 4; ++i) {
      p[i / 4][i % 4] = ptx::pack2<Element>(s[2 * i], s[2 * i + 1]);
    }
  }
  CF_DEVICE static void scale_rows(Output& o, const float (&factor)[2]) {
    CF_UNROLL
    for (int i = 0; i < Config::kHeadDimV / 2; ++i) o[i] *= factor[(i >> 1) & 1];
  }

  // --- the stream of blocks

  CF_DEVICE void run() {
    if constexpr (Config::kPingPong) {  // the first warpgroup starts
      if (warpgroup == Layout::kWarpgroups - 1) pass_turn();
    }
    Scores s;
    Probabilities p;
    Output o;
    float correction[2];
    // Blocks of the tile before whose output O is, the last of which still waits in P for its
    // product with V (which adds to O unless it was the only one); 0: nothing is pending.
    int pending = 0;
    int done = 0;  // the place of that tile in the stream
    for (;;) {
      const TileSlot<Config> tile = stream.await();
      const int count = ptx::warp_uniform(tile.count());
      if (count < 0) break;
      const WarpgroupBlocks own(tile.sequence(params), ptx::warp_uniform(tile.end()), count,
                                row_begin_of(tile));

      // The first block, beside the last product of the tile before.
      for (int i = 0; i < own.skipped; ++i) skip_k();
      await_q();
      await_k();
      await_turn();
      issue_scores(s);
      if (pending > 0) {
        await_v();
        issue_values(o, p, pending > 1);
      } else {
        ptx::wgmma_commit();  // as many groups either way
      }
      pass_turn();
      if constexpr (!kKept<kEarlyQRelease>) release_q(own.skipped + 1 == count);
      await_products<1>(s);
      float factor[2];
      if (pending > 0) finish_rows(factor, done);
      softmax.reset();
      take_block<true>(s, correction, own.at(own.skipped), tile);
      if constexpr (kKept<kEarlyQRelease>) release_q(own.skipped + 1 == count);
      await_products<0>(o);
      if (pending > 0) {
        release_v();
        store(o, factor, done);
      }
      for (int i = 0; i < own.skipped; ++i) release_v();
      pack(p, s);
      k_place.advance();
      done = stream.place.stage;
      stream.place.advance();

      CF_NO_UNROLL
      for (int i = own.skipped + 1; i < count; ++i) {
        await_k();
        await_turn();
        issue_scores(s);
        await_v();
        issue_values(o, p, i > own.skipped + 1);
        pass_turn();
        if constexpr (!kKept<kEarlyQRelease>) release_q(i + 1 == count);
        await_products<1>(s);
        const bool rescale = take_block<false>(s, correction, own.at(i), tile);
        if constexpr (kKept<kEarlyQRelease>) release_q(i + 1 == count);
        if constexpr (!kKept<kEarlyVRelease>) release_v();
        await_products<0>(o);
        if constexpr (kKept<kEarlyVRelease>) release_v();
        pack(p, s);  // the product of the previous P has read its registers
        if (rescale) scale_rows(o, correction);
        k_place.advance();
      }
      pending = count - own.skipped;
      if constexpr (!Config::kOutBuffer) {  // the output tile needs Q's buffer
        last_product(o, p, pending > 1);
        finish(o, done);
        pending = 0;
      }
    }
    if (pending > 0) {
      last_product(o, p, pending > 1);
      finish(o, done);
    }
    if constexpr (Config::kPingPong) {  // takes the turn nobody will use
      if (warpgroup == 0) await_turn();
    }
    if (leader) ptx::tma_wait<0>();
  }
  CF_DEVICE void last_product(Output& o, const Probabilities& p, bool accumulate) {
    await_v();
    issue_values(o, p, accumulate);
    await_products<0>(o);
    release_v();
  }
  // First row of this warpgroup, within the sequence.
  CF_DEVICE int row_begin_of(const TileSlot<Config>& tile) const {
    return tile.query_begin() + warpgroup * kWarpgroupRows;
  }
  // After the last read of a tile's description by any thread of the warpgroup.
  CF_DEVICE void release_tile(int stage) const {
    ptx::mbarrier_arrive(barrier_at(smem + Layout::kTileEmpty, stage));
  }

  // --- epilogue

  // The factors of a finished tile's output; writes its rows of lse.
  CF_DEVICE void finish_rows(float (&factor)[2], int stage) {
    if constexpr (!kKept<kEarlyTileRelease>) {
      if (leader) release_tile(stage);
    }
    const TileSlot<Config> tile = stream.slot(stage);
    float lse[2];
    softmax.finish(params.softmax_scale, factor, lse);
    if (params.lse == nullptr || ptx::lane() % 4 != 0) return;
    const auto sequence = tile.sequence(params);
    float* lse_gmem = params.lse + tile.batch() * params.lse_stride_batch +
                      tile.head_q() * params.lse_stride_head + sequence.q_begin();
    const int row =
        row_begin_of(tile) + 16 * (ptx::warp() % kWarpsPerWarpgroup) + ptx::lane() / 4;
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r < sequence.seqlen_q()) ptx::stg_f32(lse_gmem + row + 8 * r, lse[r]);
    }
  }
  CF_DEVICE void finish(Output& o, int stage) {
    float factor[2];
    finish_rows(factor, stage);
    store(o, factor, stage);
  }

  // O / row_sum to shared memory, then one TMA store of the warpgroup's 64 rows; the map clips rows
  // and columns beyond the tensor. A row without keys has factor 0 and gives zeros whatever O
  // holds.
  CF_DEVICE void store(Output& o, const float (&factor)[2], int stage) {
    const saddr out_smem = smem + Layout::kOut + warpgroup * Layout::kOutStride;
    if constexpr (Config::kOutBuffer) {  // the previous tile's store has read the buffer
      if constexpr (kKept<kNoStoreReadWait>) {
        if (leader) ptx::tma_wait_read<0>();
      }
      ptx::named_barrier_sync(kEpilogueBarrier + warpgroup, kWarpgroupThreads);
    }
    const int lane = ptx::lane();
    const int row = 16 * (ptx::warp() % kWarpsPerWarpgroup) + (lane & 15);
    if (ptx::vote_any(factor[0] == 0.0f || factor[1] == 0.0f)) {
      CF_UNROLL
      for (int i = 0; i < Config::kHeadDimV / 2; ++i) {
        if (factor[(i >> 1) & 1] == 0.0f) o[i] = 0.0f;
      }
    }
    auto value = [&](int i) { return o[i] * factor[(i >> 1) & 1]; };
    CF_UNROLL
    for (int j = 0; j < Config::kHeadDimV / 16; ++j) {
      uint32_t r[4];
      CF_UNROLL
      for (int m = 0; m < 4; ++m) {
        r[m] = ptx::pack2<Element>(value(8 * j + 2 * m), value(8 * j + 2 * m + 1));
      }
      ptx::stmatrix_x4(
          out_smem + VTile::granule_offset(kWarpgroupRows, row, 2 * j + (lane >> 4)), r[0], r[1],
          r[2], r[3]);
    }
    if constexpr (kKept<kNoProxyFence>) ptx::fence_proxy_async();
    if constexpr (kKept<kNoEpilogueBarrier>) {
      ptx::named_barrier_sync(kEpilogueBarrier + warpgroup, kWarpgroupThreads);
    }
    if (leader) {
      const TileSlot<Config> tile = stream.slot(stage);
      const auto sequence = tile.sequence(params);
      const int row_begin = row_begin_of(tile);
      if (row_begin < sequence.seqlen_q()) {
        const TileRows<Config::kGeneral != 0> rows{sequence.q_begin(), sequence.seqlen_q(),
                                                   tile.batch()};
        const int head_q = tile.head_q();
        CF_UNROLL
        for (int c = 0; c < VTile::kChunks; ++c) {
          rows.store(&params.out_map, out_smem + c * VTile::chunk_bytes(kWarpgroupRows),
                     c * VTile::kChunk, row_begin, head_q, params.rows_q);
        }
        ptx::tma_commit();
      }
      if constexpr (kKept<kEarlyTileRelease>) release_tile(stage);
    }
    if constexpr (!Config::kOutBuffer) {  // the next Q comes once the store has read its buffer
      if (leader) {
        if constexpr (kKept<kNoStoreReadWait>) ptx::tma_wait_read<0>();
        ptx::mbarrier_arrive(barrier_at(smem + Layout::kQEmpty, q_buffer()));
      }
      q_place.advance();
    }
  }
};

// --- kernel -------------------------------------------------------------------------------------

template <class Config>
CF_DEVICE void forward(const ForwardParams& params) {
  using Layout = ForwardLayout<Config>;
  static_assert(ptx::kArchitecture == 90);
  static_assert(Layout::kWarpgroups == 2 || Layout::kWarpgroups == 3);
  constexpr bool kThree = Layout::kWarpgroups == 3;
  const saddr smem = ptx::smem_base();
  const int warpgroup = ptx::warp_uniform(ptx::tid() / kWarpgroupThreads);
  if (ptx::tid() == 0) initialize_barriers<Config>(smem);
  if constexpr (Config::kCluster > 1) {
    ptx::cluster_sync();
  } else {
    ptx::cta_sync();
  }
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kThree ? 32 : 40>();
    const int warp = ptx::warp_uniform(ptx::warp());
    if (warp == 0) {
      Producer<Config>{params, smem, ptx::elect_one(), {smem, {}}, {}, {}, {}}.run();
    } else if (warp == 1) {
      Scheduler<Config>{params, {smem, {}}, {}}.run();
    }
  } else {
    ptx::setmaxnreg_inc<kThree ? 160 : 232>();
    Consumer<Config>(params, smem, warpgroup - 1).run();
  }
  // Nobody leaves while the other CTA may still signal it.
  if constexpr (Config::kCluster > 1 && kKept<kNoExitSync>) {
    ptx::warp_sync();
    ptx::cluster_sync();
  }
}

}  // namespace cf::sm90
