// Forward attention of 8-bit floats (e4m3) for Hopper (sm_90a): out = softmax(q k^T * scale + mask)
// v in bfloat16 or float16, and the log-sum-exp. Queries, keys and values carry scales: one for
// all, of a head, of blocks of 64 or 128 tokens, of queries also one each.
//
// Algorithm: FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608), as forward.cuh has it. What is
// different:
//
//   Values come transposed, [head_dim][keys], because products of 8-bit floats sum along both
//   operands; with the keys of each sixteen in the order in which a thread holds its probabilities,
//   so that these are packed without a shuffle (Note [The order of transposed tokens] in
//   cupyflash/fp8.py). The idea is FlashAttention-3's.
//
//   Scales cost nothing for each element. Those of q and k go into the exponent's factor. With that
//   of v, p is 2^(s c + log2(v_scale) - reference), so that a block's probabilities are as large as
//   what they do to the output; its share of the row sum is divided by v_scale.
//
//   Probabilities are 8-bit floats too: the reference leaves the largest near 2^kOffset, below
//   which e4m3 has its range, and moves only once a row has grown by 2^kGrowth.
//
//   kTwoLevel: the matrix units add with fewer bits than float32 has (14 or so, relative to the
//   largest product; DeepSeek-V3 technical report, arXiv 2412.19437), which shows where thousands
//   of keys have values of one sign. A block's product then starts from zero and is added to the
//   output by the other units, in the multiplication that rescales it anyway.
//
// Roles, shared memory and pipeline are those of forward.cuh, with the output in a buffer of its
// own; beside each stage of K lie the scales of its block, written by the producer's thread before
// it announces the load. Without kOverlap a warpgroup waits for both of its products before its
// softmax, which saves the registers of the probabilities: three warpgroups then fit at head
// dimension 128.
#pragma once
#include "attn/blocks.cuh"
#include "attn/ragged.cuh"
#include "attn/softcap.cuh"
#include "attn/softmax.cuh"
#include "params.cuh"
#include "ptx/ptx.cuh"
#include "sm90/forward_tiles.cuh"
#include "tile/byte_layout.cuh"
#include "tile/layout.cuh"
#include "tile/math.cuh"
#include "tile/pipeline.cuh"

namespace cf::sm90 {

// Keys that share a scale, at least; a block of keys is two such groups.
inline constexpr int kScaleGroup = 64;

template <class Config>
struct ForwardLayout {
  using QkTile = ByteTile<Config::kHeadDimQk>;
  using VTile = ByteTile<Config::kBlockN>;  // [head_dim_v][kBlockN]
  using OutTile = Tile<Config::kHeadDimV>;
  static constexpr int kWarpgroups = Config::kConsumerWarpgroups;
  static constexpr int kCluster = Config::kCluster;
  static constexpr int kThreads = (1 + kWarpgroups) * kWarpgroupThreads;
  static constexpr bool kQuantized = true;
  static_assert(Config::kBlockM == kWarpgroups * kWarpgroupRows);
  static_assert(Config::kBlockN == 2 * kScaleGroup);
  static_assert(kCluster == 1 || kCluster == 2);
  static_assert(!Config::kPairHeads || kCluster == 2);
  static_assert(!Config::kTwoLevel || !Config::kOverlap);

  // Bytes of one warpgroup's query and output tile, and of one stage of keys and values.
  static constexpr int kQBytes = QkTile::bytes(kWarpgroupRows);
  static constexpr int kOutBytes = OutTile::bytes(kWarpgroupRows);
  static constexpr int kKBytes = QkTile::bytes(Config::kBlockN);
  static constexpr int kVBytes = VTile::bytes(Config::kHeadDimV);
  static_assert(kQBytes % 1024 == 0 && kKBytes % 1024 == 0 && kVBytes % 1024 == 0);

  static constexpr int kQ = 0;
  static constexpr int kK = kQ + Config::kQStages * kWarpgroups * kQBytes;
  static constexpr int kV = kK + Config::kStages * kKBytes;
  static constexpr int kOut = kV + Config::kStages * kVBytes;
  static constexpr int kScales = kOut + kWarpgroups * kOutBytes;  // [stage] BlockScales
  static constexpr int kScaleBytes = 32;
  static constexpr int kTiles = kScales + Config::kStages * kScaleBytes;
  static constexpr int kTileSlots = Config::kTileSlots;
  static constexpr int kTileBytes = 64;
  static constexpr int kTickets = kTiles + kTileSlots * kTileBytes;  // [2], in the second CTA
  static constexpr int kBarriers = kTickets + 16;

  // mbarriers, as in forward.cuh.
  static constexpr int kQFull = kBarriers;  // [q stage][warpgroup]
  static constexpr int kQEmpty = kQFull + 8 * Config::kQStages * kWarpgroups;
  static constexpr int kKFull = kQEmpty + 8 * Config::kQStages * kWarpgroups;  // [stage]
  static constexpr int kKEmpty = kKFull + 8 * Config::kStages;
  static constexpr int kVFull = kKEmpty + 8 * Config::kStages;
  static constexpr int kVEmpty = kVFull + 8 * Config::kStages;
  static constexpr int kTileFull = kVEmpty + 8 * Config::kStages;  // [tile slot]
  static constexpr int kTileEmpty = kTileFull + 8 * kTileSlots;
  static constexpr int kTicketFull = kTileEmpty + 8 * kTileSlots;  // [2]
  static constexpr int kTicketEmpty = kTicketFull + 8 * 2;
  static constexpr int kBytes = kTicketEmpty + 8 * 2;
  static_assert(kBytes <= 232448, "Hopper has 227 KB of shared memory a CTA");

  static constexpr int kQEmptyArrivals = kWarpsPerWarpgroup;
  static constexpr int kKEmptyArrivals = kCluster * kWarpgroups * kWarpsPerWarpgroup;
  static constexpr int kVEmptyArrivals = kCluster * kWarpgroups;
  static constexpr int kTileEmptyArrivals = 1 + kWarpgroups;
};

// --- scales -------------------------------------------------------------------------------------

// Of token `token` of a sequence, as ForwardParams says.
CF_DEVICE float scale_of(const float* scales, int64_t stride_batch, int64_t stride_head,
                         int64_t stride_block, int tokens_log2, int sequence_index, int head,
                         int first, int token) {
  if (scales == nullptr) return 1.0f;
  const int64_t offset = sequence_index * stride_batch + head * stride_head +
                         (first + (token >> tokens_log2)) * stride_block;
  return ptx::bits_float(ptx::ldg32(scales + offset));
}

// The scales of the two groups of a block of keys: of k, and of v as its logarithm and its inverse.
template <class Config>
struct BlockScales {
  using Layout = ForwardLayout<Config>;
  float k[2], v_log2[2], v_inverse[2];

  CF_DEVICE static saddr place(saddr smem, int stage) {
    return smem + static_cast<uint32_t>(Layout::kScales + stage * Layout::kScaleBytes);
  }
  // Where packed blocks of 2^log2 tokens of a sequence start; rows_begin: its first row.
  CF_DEVICE static int first_block(const ForwardParams& params, int rows_begin, int log2,
                                   int sequence_index) {
    if (Config::kGeneral == 0 || params.cu_seqlens_kv == nullptr) return 0;
    return (rows_begin >> log2) + sequence_index;
  }
  // The column of a sequence's first value.
  CF_DEVICE static int first_value(const ForwardParams& params, int rows_begin,
                                   int sequence_index) {
    const int log2 = params.v_slot_log2;
    return first_block(params, rows_begin, log2, sequence_index) << log2;
  }
  // By one thread, whose arrival on the keys' barrier hands them over.
  CF_DEVICE static void write(const ForwardParams& params, saddr smem, int stage, int kv_start,
                              int head_kv, const TileRows<Config::kGeneral != 0>& rows,
                              int sequence_index) {
    const int seqlen_kv = Config::kGeneral != 0 ? rows.length : params.seqlen_kv;
    float k[2], v[2];
    CF_UNROLL
    for (int group = 0; group < 2; ++group) {
      // A group behind the last key has no scale, and no visible key either.
      const int token = max(min(kv_start + group * kScaleGroup, seqlen_kv - 1), 0);
      k[group] = scale_of(
          params.k_scale, params.k_scale_stride_batch, params.k_scale_stride_head,
          params.k_scale_stride_block, params.k_scale_tokens_log2, sequence_index, head_kv,
          first_block(params, rows.begin, params.k_scale_tokens_log2, sequence_index), token);
      v[group] = scale_of(
          params.v_scale, params.v_scale_stride_batch, params.v_scale_stride_head,
          params.v_scale_stride_block, params.v_scale_tokens_log2, sequence_index, head_kv,
          first_block(params, rows.begin, params.v_scale_tokens_log2, sequence_index), token);
    }
    const auto bits = [](float x) { return ptx::float_bits(x); };
    ptx::sts128(place(smem, stage), {bits(k[0]), bits(k[1]), bits(ptx::lg2(v[0])),
                                     bits(ptx::lg2(v[1]))});
    ptx::sts32(place(smem, stage) + 16, bits(1.0f / v[0]));
    ptx::sts32(place(smem, stage) + 20, bits(1.0f / v[1]));
  }
  CF_DEVICE void read(saddr smem, int stage) {
    const u32x4 four = ptx::lds128(place(smem, stage));
    const u32x2 two = ptx::lds64(place(smem, stage) + 16);
    k[0] = ptx::bits_float(four.x);
    k[1] = ptx::bits_float(four.y);
    v_log2[0] = ptx::bits_float(four.z);
    v_log2[1] = ptx::bits_float(four.w);
    v_inverse[0] = ptx::bits_float(two.x);
    v_inverse[1] = ptx::bits_float(two.y);
  }
};

// --- softmax ------------------------------------------------------------------------------------

// Online softmax over accumulator fragments, for 8-bit probabilities: attn/softmax.cuh with a scale
// for each group of keys. Terms are 2^(s factor + v_log2 - reference + kOffset), at most
// 2^(kOffset + kGrowth), just below 448, the largest number of e4m3. A row that has seen nothing
// has reference -inf; then 0 stands for it, and every term is exp2(-inf) = 0.
struct ByteSoftmax {
  static constexpr float kOffset = 6.0f;
  static constexpr float kGrowth = 2.75f;

  float reference[2];
  float row_sum[2];  // this thread's share, relative to the reference, of terms less v_log2

  CF_DEVICE void reset() {
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      reference[r] = -ptx::kInfinity;
      row_sum[r] = 0.0f;
    }
  }
  // Replaces the scores of a block by terms. factor: of rows g and g + 8 (in units of log2), the
  // softmax scale included. True: what was accumulated before must be multiplied by `correction`
  // (uniform across the warp).
  template <int kCount, class Scales>
  CF_DEVICE bool update(float (&s)[kCount], const float (&factor)[2][2], const Scales& scales,
                        float (&correction)[2]) {
    constexpr int kGroupBlocks = kScaleGroup / 8;  // of 8 columns
    static_assert(kCount == 2 * kGroupBlocks * 4);
    float top[2];
    bool grown = false;
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      float of_group[2];
      CF_UNROLL
      for (int group = 0; group < 2; ++group) {
        const int first = group * kGroupBlocks;
        float a = s[4 * first + 2 * r], b = s[4 * first + 2 * r + 1];
        CF_UNROLL
        for (int j = first + 1; j < first + kGroupBlocks; ++j) {
          a = ptx::fmax(a, s[4 * j + 2 * r]);
          b = ptx::fmax(b, s[4 * j + 2 * r + 1]);
        }
        of_group[group] = ptx::fma(ptx::fmax(a, b), factor[r][group], scales.v_log2[group]);
      }
      top[r] = row_reduce_max(ptx::fmax(of_group[0], of_group[1]));
      grown = grown || top[r] > reference[r] + kGrowth;
    }
    const bool rescale = ptx::vote_any(grown);
    if (rescale) {
      CF_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float next = ptx::fmax(reference[r], top[r]);
        correction[r] = reference[r] == -ptx::kInfinity ? 0.0f : ptx::ex2(reference[r] - next);
        reference[r] = next;
        row_sum[r] *= correction[r];
      }
    }
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float origin = reference[r] == -ptx::kInfinity ? 0.0f : reference[r];
      CF_UNROLL
      for (int group = 0; group < 2; ++group) {
        const float shift = scales.v_log2[group] - origin + kOffset;
        float sum = 0.0f;
        CF_UNROLL
        for (int j = group * kGroupBlocks; j < (group + 1) * kGroupBlocks; ++j) {
          CF_UNROLL
          for (int e = 0; e < 2; ++e) {
            float& x = s[4 * j + 2 * r + e];
            x = ptx::ex2(ptx::fma(x, factor[r][group], shift));
            sum += x;
          }
        }
        row_sum[r] = ptx::fma(sum, scales.v_inverse[group], row_sum[r]);
      }
    }
    return rescale;
  }
  // After the last block: the factor of each row's output, and its log-sum-exp. A row without keys
  // gives 0 and -inf.
  CF_DEVICE void finish(float (&factor)[2], float (&lse)[2]) {
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      row_sum[r] = row_reduce_sum(row_sum[r]);
      const bool empty = row_sum[r] == 0.0f;  // NaN is not empty
      factor[r] = empty ? 0.0f : 1.0f / row_sum[r];
      lse[r] = empty ? -ptx::kInfinity
                     : (reference[r] - kOffset + ptx::lg2(row_sum[r])) * kLn2;
    }
  }
};

// --- consumers ----------------------------------------------------------------------------------

template <class Config>
struct Consumer {
  using Layout = ForwardLayout<Config>;
  using Element = typename Config::Element;  // of the output
  using Mask = typename Config::Mask;
  using QkDescriptor = ByteDescriptor<typename Layout::QkTile>;
  using VDescriptor = ByteDescriptor<typename Layout::VTile>;
  using OutTile = typename Layout::OutTile;
  static constexpr int kBlockN = Config::kBlockN, kHeadDimV = Config::kHeadDimV;
  static constexpr int kStepsQk = Config::kHeadDimQk / 32;
  static constexpr int kStepsV = kBlockN / 32;
  static constexpr bool kTwoLevel = Config::kTwoLevel != 0;
  static constexpr bool kGeneral = Config::kGeneral != 0;

  using Scores = float[kBlockN / 2];           // [64, kBlockN] of the warpgroup
  using Probabilities = uint32_t[kStepsV][4];  // [64, kBlockN], four a register
  using Output = float[kHeadDimV / 2];         // [64, head_dim_v]

  const ForwardParams& params;
  const saddr smem;
  const int warpgroup;  // 0 is the first consumer
  const bool leader;    // one thread of the warpgroup: releases V, stores the output
  RingPlace<Config::kStages> k_place, v_place;
  RingPlace<Config::kQStages> q_place;
  TileStream<Config> stream;
  ByteSoftmax softmax;

  CF_DEVICE Consumer(const ForwardParams& params, saddr smem, int warpgroup)
      : params(params),
        smem(smem),
        warpgroup(warpgroup),
        leader(ptx::tid() % kWarpgroupThreads == 0),
        stream{smem, {}} {}

  // --- hand-overs, as in forward.cuh

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
  // K's scales have been read by every lane.
  CF_DEVICE void release_k() {
    ptx::warp_sync();
    if (ptx::lane() == 0) arrive_in_cluster(barrier_at(smem + Layout::kKEmpty, k_place.stage));
  }
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
  CF_DEVICE void release_q(bool last) {
    if (!last) return;
    if (ptx::lane() == 0) ptx::mbarrier_arrive(barrier_at(smem + Layout::kQEmpty, q_buffer()));
    q_place.advance();
  }

  // --- products

  // S = Q K^T of the stage at k_place; one commit group.
  CF_DEVICE void issue_scores(Scores& s) {
    const uint32_t q =
        QkDescriptor::k_major(smem + Layout::kQ + q_buffer() * Layout::kQBytes);
    const uint32_t k = QkDescriptor::k_major(smem + Layout::kK + k_place.stage * Layout::kKBytes);
    ptx::wgmma_pin(s);
    ptx::wgmma_fence();
    CF_UNROLL
    for (int step = 0; step < kStepsQk; ++step) {
      ptx::wgmma_e4m3_ss<kBlockN, QkDescriptor::kHigh, QkDescriptor::kHigh>(
          s, q + QkDescriptor::k_step(kWarpgroupRows, step),
          k + QkDescriptor::k_step(kBlockN, step), step > 0);
    }
    ptx::wgmma_commit();
  }
  // O (+)= P V of the stage at v_place; one commit group.
  CF_DEVICE void issue_values(Output& o, const Probabilities& p, bool accumulate) {
    const uint32_t v = VDescriptor::k_major(smem + Layout::kV + v_place.stage * Layout::kVBytes);
    ptx::wgmma_pin(o);
    ptx::wgmma_fence();
    CF_UNROLL
    for (int step = 0; step < kStepsV; ++step) {
      ptx::wgmma_e4m3_rs<kHeadDimV, VDescriptor::kHigh>(
          o, p[step], v + VDescriptor::k_step(kHeadDimV, step), accumulate || step > 0);
    }
    ptx::wgmma_commit();
  }
  template <int kPending, int kCount>
  CF_DEVICE static void await_products(float (&result)[kCount]) {
    if constexpr (kKept<kNoProductWait>) ptx::wgmma_wait<kPending>();
    ptx::wgmma_pin(result);
  }

  // --- the blocks of a tile as one warpgroup sees them: forward.cuh

  struct WarpgroupBlocks {
    KvBlocks<Mask, kBlockN> blocks;
    int end, skipped;
    template <class Sequence>
    CF_DEVICE WarpgroupBlocks(const Sequence& sequence, int end, int count, int row_begin)
        : blocks(sequence, row_begin, kWarpgroupRows),
          end(end),
          skipped(Mask::kHasRight && blocks.count > 0
                      ? max(min(min(end - blocks.end, Config::kStages), count - 1), 0)
                      : 0) {
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

  // --- softmax

  // Scores of a block to terms; then K is given back. True: what is accumulated of this tile must
  // be multiplied by `correction`. q_factor: the scales of this thread's rows, with the softmax's.
  template <bool kFirst>
  CF_DEVICE bool take_block(Scores& s, float (&correction)[2], const float (&q_factor)[2],
                            const KvBlock& block, const TileSlot<Config>& tile) {
    constexpr bool kMayBePartial = kFirst || Mask::kHasRight || Mask::kHasLeft;
    const bool partial = kMayBePartial && block.partial;
    BlockScales<Config> scales;
    scales.read(smem, k_place.stage);
    float factor[2][2];
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      CF_UNROLL
      for (int group = 0; group < 2; ++group) factor[r][group] = q_factor[r] * scales.k[group];
    }
    release_k();
    if constexpr (kGeneral) cap(s, factor);
    if (partial) mask(s, block, tile);
    return softmax.update(s, factor, scales, correction);
  }
  // Capped scores are those of the true values: then only the softmax's factor is left.
  CF_DEVICE void cap(Scores& s, float (&factor)[2][2]) {
    if (params.softcap == 0.0f) return;
    CF_UNROLL
    for (int i = 0; i < kBlockN / 2; ++i) s[i] *= factor[i >> 1 & 1][i / (kBlockN / 4)];
    cap_scores(params, s);
    CF_UNROLL
    for (int r = 0; r < 2; ++r) factor[r][0] = factor[r][1] = params.softmax_scale_log2;
  }
  CF_DEVICE void mask(Scores& s, const KvBlock& block, const TileSlot<Config>& tile) {
    const int row = first_row(tile);
    const int row_query[2] = {row, row + 8};
    mask_fragment<Mask>(tile.sequence(params), s, row_query, block.start);
  }
  CF_DEVICE void read_query_scales(float (&q_factor)[2], const TileSlot<Config>& tile) const {
    const auto sequence = tile.sequence(params);
    const int log2 = params.q_scale_tokens_log2, index = tile.sequence_index();
    const bool packed = kGeneral && params.cu_seqlens_q != nullptr;
    const int first = packed ? (sequence.q_begin() >> log2) + index : 0;
    const float scale =
        kGeneral && params.softcap != 0.0f ? 1.0f : params.softmax_scale_log2;
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int token = min(first_row(tile) + 8 * r, sequence.seqlen_q() - 1);
      q_factor[r] = scale * scale_of(params.q_scale, params.q_scale_stride_batch,
                                     params.q_scale_stride_head, params.q_scale_stride_block, log2,
                                     index, tile.head_q(), first, token);
    }
  }
  CF_DEVICE static void pack(Probabilities& p, const Scores& s) {
    CF_UNROLL
    for (int step = 0; step < kStepsV; ++step) {
      CF_UNROLL
      for (int i = 0; i < 4; ++i) {  // rows g and g + 8, then the other sixteen keys
        const float* held = s + 16 * step + 8 * (i / 2) + 2 * (i % 2);
        p[step][i] = ptx::pack4_e4m3(held[0], held[1], held[4], held[5]);
      }
    }
  }
  CF_DEVICE static void scale_rows(Output& o, const float (&factor)[2]) {
    CF_UNROLL
    for (int i = 0; i < kHeadDimV / 2; ++i) o[i] *= factor[(i >> 1) & 1];
  }

  // --- the stream of blocks

  // The output of a tile so far. With kTwoLevel, of the blocks before the last, whose product is in
  // `block`, and how much the former are to be multiplied by before it is added.
  struct Accumulator {
    Output o;
    float block[kTwoLevel ? kHeadDimV / 2 : 1];
    float carry[2];
  };

  CF_DEVICE void issue_last(Accumulator& sum, const Probabilities& p, bool accumulate) {
    if constexpr (kTwoLevel) {
      issue_values(sum.block, p, false);
    } else {
      issue_values(sum.o, p, accumulate);
    }
  }
  // After its wait; first: nothing was accumulated before.
  CF_DEVICE static void take_product(Accumulator& sum, bool first) {
    if constexpr (kTwoLevel) {
      ptx::wgmma_pin(sum.block);
      CF_UNROLL
      for (int i = 0; i < kHeadDimV / 2; ++i) {
        const float added = ptx::fma(sum.o[i], sum.carry[(i >> 1) & 1], sum.block[i]);
        sum.o[i] = first ? sum.block[i] : added;
      }
    } else {
      ptx::wgmma_pin(sum.o);
    }
  }
  // What is accumulated becomes relative to the reference after a block.
  CF_DEVICE static void correct(Accumulator& sum, bool rescale, const float (&correction)[2]) {
    if constexpr (kTwoLevel) {
      CF_UNROLL
      for (int r = 0; r < 2; ++r) sum.carry[r] = rescale ? correction[r] : 1.0f;
    } else {
      if (rescale) scale_rows(sum.o, correction);
    }
  }

  CF_DEVICE void run() {
    if constexpr (Config::kPingPong) {  // the first warpgroup starts
      if (warpgroup == Layout::kWarpgroups - 1) pass_turn();
    }
    Scores s;
    Probabilities p;
    Accumulator sum;
    float q_factor[2];
    // As in forward.cuh: blocks of the tile before, the last of which still waits in P; 0: none.
    int pending = 0;
    int done = 0;  // the place of that tile in the stream
    for (;;) {
      const TileSlot<Config> tile = stream.await();
      const int count = ptx::warp_uniform(tile.count());
      if (count < 0) break;
      const WarpgroupBlocks own(tile.sequence(params), ptx::warp_uniform(tile.end()), count,
                                row_begin_of(tile));
      for (int i = 0; i < own.skipped; ++i) skip_k();
      await_q();
      if constexpr (Config::kOverlap) {
        first_beside_product(sum, s, p, q_factor, own, count, tile, pending, done);
      } else {
        first_behind_product(sum, s, p, q_factor, own, count, tile, pending, done);
      }
      done = stream.place.stage;
      stream.place.advance();
      CF_NO_UNROLL
      for (int i = own.skipped + 1; i < count; ++i) {
        const bool first = i == own.skipped + 1;  // to be added to the output
        if constexpr (Config::kOverlap) {
          next_beside_product(sum, s, p, q_factor, own.at(i), tile, first, i + 1 == count);
        } else {
          next_behind_product(sum, s, p, q_factor, own.at(i), tile, first, i + 1 == count);
        }
      }
      pending = count - own.skipped;
    }
    if (pending > 0) {
      await_v();
      issue_last(sum, p, pending > 1);
      await_products<0>(s);
      float factor[2];
      finish_rows(factor, done);
      finish_product(sum, factor, pending, done);
    }
    if constexpr (Config::kPingPong) {  // takes the turn nobody will use
      if (warpgroup == 0) await_turn();
    }
    if (leader) ptx::tma_wait<0>();
  }

  // With kOverlap: a block's scores beside the product of the block before, which runs on under the
  // softmax. The first of a tile beside the last of the tile before.
  CF_DEVICE void first_beside_product(Accumulator& sum, Scores& s, Probabilities& p,
                                      float (&q_factor)[2], const WarpgroupBlocks& own, int count,
                                      const TileSlot<Config>& tile, int pending, int done) {
    float correction[2], factor[2];
    await_k();
    await_turn();
    issue_scores(s);
    if (pending > 0) {
      await_v();
      issue_last(sum, p, pending > 1);
    } else {
      ptx::wgmma_commit();  // as many groups either way
    }
    pass_turn();
    const bool last = own.skipped + 1 == count;
    if constexpr (!kKept<kEarlyQRelease>) release_q(last);
    read_query_scales(q_factor, tile);
    await_products<1>(s);
    if constexpr (kKept<kEarlyQRelease>) release_q(last);
    if (pending > 0) finish_rows(factor, done);
    softmax.reset();
    take_block<true>(s, correction, q_factor, own.at(own.skipped), tile);
    await_products<0>(s);
    finish_product(sum, factor, pending, done);
    for (int i = 0; i < own.skipped; ++i) release_v();
    pack(p, s);
    k_place.advance();
  }
  CF_DEVICE void next_beside_product(Accumulator& sum, Scores& s, Probabilities& p,
                                     const float (&q_factor)[2], const KvBlock& block,
                                     const TileSlot<Config>& tile, bool first, bool last) {
    float correction[2];
    await_k();
    await_turn();
    issue_scores(s);
    await_v();
    issue_last(sum, p, !first);
    pass_turn();
    if constexpr (!kKept<kEarlyQRelease>) release_q(last);
    if constexpr (!kKept<kEarlyVRelease>) release_v();
    await_products<1>(s);
    if constexpr (kKept<kEarlyQRelease>) release_q(last);
    const bool rescale = take_block<false>(s, correction, q_factor, block, tile);
    await_products<0>(s);
    take_product(sum, first);
    if constexpr (kKept<kEarlyVRelease>) release_v();
    pack(p, s);
    correct(sum, rescale, correction);
    k_place.advance();
  }

  // Without: the product of the block before, and then, when its probabilities are no longer
  // needed, the scores.
  CF_DEVICE void first_behind_product(Accumulator& sum, Scores& s, Probabilities& p,
                                      float (&q_factor)[2], const WarpgroupBlocks& own, int count,
                                      const TileSlot<Config>& tile, int pending, int done) {
    float correction[2];
    await_k();
    if (pending > 0) await_v();
    await_turn();
    if (pending > 0) {
      issue_last(sum, p, pending > 1);
      if constexpr (kKept<kNoProductWait>) ptx::wgmma_wait<0>();
      take_product(sum, pending == 1);
    }
    issue_scores(s);
    pass_turn();
    const bool last = own.skipped + 1 == count;
    if constexpr (!kKept<kEarlyQRelease>) release_q(last);
    if (pending > 0) {
      float factor[2];
      finish_rows(factor, done);
      release_v();
      store(sum.o, factor, done);
    }
    read_query_scales(q_factor, tile);
    await_products<0>(s);
    if constexpr (kKept<kEarlyQRelease>) release_q(last);
    softmax.reset();
    take_block<true>(s, correction, q_factor, own.at(own.skipped), tile);
    for (int i = 0; i < own.skipped; ++i) release_v();
    pack(p, s);
    k_place.advance();
  }
  CF_DEVICE void next_behind_product(Accumulator& sum, Scores& s, Probabilities& p,
                                     const float (&q_factor)[2], const KvBlock& block,
                                     const TileSlot<Config>& tile, bool first, bool last) {
    float correction[2];
    await_k();
    await_v();
    await_turn();
    issue_last(sum, p, !first);
    if constexpr (!kKept<kEarlyVRelease>) release_v();
    if constexpr (kKept<kNoProductWait>) ptx::wgmma_wait<0>();
    take_product(sum, first);
    issue_scores(s);
    pass_turn();
    if constexpr (kKept<kEarlyVRelease>) release_v();
    if constexpr (!kKept<kEarlyQRelease>) release_q(last);
    await_products<0>(s);
    if constexpr (kKept<kEarlyQRelease>) release_q(last);
    const bool rescale = take_block<false>(s, correction, q_factor, block, tile);
    pack(p, s);
    correct(sum, rescale, correction);
    k_place.advance();
  }
  // The last product of the tile at `stage`, if there is one, has been waited for: its output.
  CF_DEVICE void finish_product(Accumulator& sum, const float (&factor)[2], int pending,
                                int stage) {
    if (pending == 0) return;
    take_product(sum, pending == 1);
    release_v();
    store(sum.o, factor, stage);
  }
  // First row of this warpgroup, and of this thread, within the sequence.
  CF_DEVICE int row_begin_of(const TileSlot<Config>& tile) const {
    return tile.query_begin() + warpgroup * kWarpgroupRows;
  }
  CF_DEVICE int first_row(const TileSlot<Config>& tile) const {
    return row_begin_of(tile) + 16 * (ptx::warp() % kWarpsPerWarpgroup) + ptx::lane() / 4;
  }
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
    softmax.finish(factor, lse);
    if (params.lse == nullptr || ptx::lane() % 4 != 0) return;
    const auto sequence = tile.sequence(params);
    float* lse_gmem = params.lse + tile.batch() * params.lse_stride_batch +
                      tile.head_q() * params.lse_stride_head + sequence.q_begin();
    const int row = first_row(tile);
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r < sequence.seqlen_q()) ptx::stg_f32(lse_gmem + row + 8 * r, lse[r]);
    }
  }
  // O / row_sum to shared memory, then one TMA store of the warpgroup's 64 rows.
  CF_DEVICE void store(Output& o, const float (&factor)[2], int stage) {
    const saddr out_smem = smem + Layout::kOut + warpgroup * Layout::kOutBytes;
    // The previous tile's store has read the buffer.
    if constexpr (kKept<kNoStoreReadWait>) {
      if (leader) ptx::tma_wait_read<0>();
    }
    ptx::named_barrier_sync(kEpilogueBarrier + warpgroup, kWarpgroupThreads);
    const int lane = ptx::lane();
    const int row = 16 * (ptx::warp() % kWarpsPerWarpgroup) + (lane & 15);
    if (ptx::vote_any(factor[0] == 0.0f || factor[1] == 0.0f)) {
      CF_UNROLL
      for (int i = 0; i < kHeadDimV / 2; ++i) {
        if (factor[(i >> 1) & 1] == 0.0f) o[i] = 0.0f;
      }
    }
    auto value = [&](int i) { return o[i] * factor[(i >> 1) & 1]; };
    CF_UNROLL
    for (int j = 0; j < kHeadDimV / 16; ++j) {
      uint32_t r[4];
      CF_UNROLL
      for (int m = 0; m < 4; ++m) {
        r[m] = ptx::pack2<Element>(value(8 * j + 2 * m), value(8 * j + 2 * m + 1));
      }
      ptx::stmatrix_x4(
          out_smem + OutTile::granule_offset(kWarpgroupRows, row, 2 * j + (lane >> 4)), r[0],
          r[1], r[2], r[3]);
    }
    if constexpr (kKept<kNoProxyFence>) ptx::fence_proxy_async();
    if constexpr (kKept<kNoEpilogueBarrier>) {
      ptx::named_barrier_sync(kEpilogueBarrier + warpgroup, kWarpgroupThreads);
    }
    if (!leader) return;
    const TileSlot<Config> tile = stream.slot(stage);
    const auto sequence = tile.sequence(params);
    const int row_begin = row_begin_of(tile);
    if (row_begin < sequence.seqlen_q()) {
      const TileRows<kGeneral> rows{sequence.q_begin(), sequence.seqlen_q(), tile.batch()};
      CF_UNROLL
      for (int c = 0; c < OutTile::kChunks; ++c) {
        rows.store(&params.out_map, out_smem + c * OutTile::chunk_bytes(kWarpgroupRows),
                   c * OutTile::kChunk, row_begin, tile.head_q(), params.rows_q);
      }
      ptx::tma_commit();
    }
    if constexpr (kKept<kEarlyTileRelease>) release_tile(stage);
  }
};

// --- kernel -------------------------------------------------------------------------------------

template <class Config>
CF_DEVICE void forward_fp8(const ForwardParams& params) {
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
    ptx::setmaxnreg_dec<kThree ? 32 : 24>();
    const int warp = ptx::warp_uniform(ptx::warp());
    if (warp == 0) {
      Producer<Config>{params, smem, ptx::elect_one(), {smem, {}}, {}, {}, {}}.run();
    } else if (warp == 1) {
      Scheduler<Config>{params, {smem, {}}, {}}.run();
    }
  } else {
    ptx::setmaxnreg_inc<kThree ? 160 : 240>();
    Consumer<Config>(params, smem, warpgroup - 1).run();
  }
  if constexpr (Config::kCluster > 1 && kKept<kNoExitSync>) {
    ptx::warp_sync();
    ptx::cluster_sync();
  }
}

}  // namespace cf::sm90
