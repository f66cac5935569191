// Forward attention for data-centre Blackwell (sm_100f): out = softmax(q k^T * scale + mask) v, and
// the log-sum-exp.
//
// Algorithm: FlashAttention-4 (arXiv 2603.05451): scores and output live in tensor memory, one
// thread issues every product, two tiles of 128 queries take turns at the tensor core so that the
// softmax of one runs under the products of the other, a separate warpgroup rescales the output,
// and only when the maximum has grown by more than 2^8. Written from the paper's description and
// the PTX ISA; the whole story is docs/kernels/sm100_forward.md. Never run on a GPU: checked by
// ptxas and by the emulator.
//
// A work tile is 256 queries of one head: two stages of 128 rows that share every key block.
//
// Roles (512 threads; registers per thread after setmaxnreg, together the SM's 512 x 128):
//   warps 0-3    softmax of stage 0: one query row a thread                       184
//   warps 4-7    softmax of stage 1                                               184
//   warps 8-11   correction: rescales O, final scale, output through shared memory 88
//   warp 12      one thread issues every matrix product; allocates tensor memory   56
//   warp 13      one thread issues every TMA load                                  56
//   warp 14      writes tiles in which no query sees a key, and rows of no sequence 56
//   warp 15      idle                                                              56
//
// Tensor memory (128 lanes x 512 columns, all allocated; lane = query row of a stage), for 128:
//   S0 [0, 128)   S1 [128, 256)   O0 [256, 384)   O1 [384, 512)         (64: O0 [256, 320), ...)
//   P_s, two 16-bit values a column, overlays the upper half of S_s: [64, 128) and [192, 256).
//
// Shared memory, in order (ForwardLayout; 128-byte swizzled tiles):
//   Q    [stage][128][head_dim_qk]
//   out  [stage][128][head_dim_v]
//   ring [kStages][kBlockN][head_dim]   K and V tiles alternate: K_0, V_0, K_1, V_1, ...
//   rescale factors and row sums, [stage][128] floats each; barriers; the tensor-memory address
//
// Order of the products (the products of all tiles of a CTA form one sequence; K_{j+1} is the first
// block of the next tile after the last block of this one):
//   S0 = Q0 K_0^T, S1 = Q1 K_0^T;  then for every block j, for s = 0, 1:  O_s += P_s V_j,
//   S_s = Q_s K_{j+1}^T
//
// General kernels (kGeneral) read lengths on the device, every role for itself. Their tensor maps
// have one dimension more, so that rows beyond a sequence are out of bounds for TMA, in loads and
// in stores (attn/ragged.cuh).
#pragma once
#include "attn/blocks.cuh"
#include "attn/mask.cuh"
#include "attn/padding.cuh"
#include "attn/ragged.cuh"
#include "attn/scheduler.cuh"
#include "attn/sequence.cuh"
#include "attn/softcap.cuh"
#include "params.cuh"
#include "ptx/ptx.cuh"
#include "sm100/row_softmax.cuh"
#include "tile/layout.cuh"
#include "tile/pipeline.cuh"

namespace cf::sm100 {

inline constexpr int kQueryStages = 2;
inline constexpr int kStageRows = 128;  // lanes of tensor memory
inline constexpr int kWarpsPerGroup = 4;
inline constexpr int kGroupThreads = 128;

// Warps of each role; warpgroup-aligned where registers move (setmaxnreg) and where tensor memory
// is touched (a warp reaches the 32 lanes of its number modulo 4).
inline constexpr int kCorrectionWarp = kQueryStages * kWarpsPerGroup;
inline constexpr int kProductWarp = kCorrectionWarp + kWarpsPerGroup;
inline constexpr int kLoadWarp = kProductWarp + 1;
inline constexpr int kEmptyWarp = kLoadWarp + 1;

inline constexpr int kSoftmaxRegisters = 184;
inline constexpr int kCorrectionRegisters = 88;
inline constexpr int kOtherRegisters = 56;
static_assert(2 * kSoftmaxRegisters + kCorrectionRegisters + kOtherRegisters <= 512);

// Named barriers (0 is the CTA's).
inline constexpr int kRescaleBarrier = 1;  // + 4 stage + warp: that softmax warp -> correction warp
inline constexpr int kOutBarrier = kRescaleBarrier + kQueryStages * kWarpsPerGroup;  // correction

// Tensor memory.
inline constexpr int kTmemColumns = 512;
inline constexpr int kPieceColumns = 32;  // of one tcgen05.ld or tcgen05.st

// One synchronisation taken out each (ptx::kMutant): the emulator must catch every one.
enum ForwardMutant {
  kNoQFullWait = 1,
  kNoQEmptyWait,
  kNoKvFullWait,
  kNoKvEmptyWait,
  kNoScoresFullWait,
  kNoProbabilitiesWait,
  kNoLastProbabilitiesWait,
  kNoOutFullWait,
  kNoSumsFullWait,
  kNoSumsEmptyWait,
  kNoRescaleBarrier,
  kNoScoresLoadWait,
  kNoProbabilitiesStoreWait,
  kNoLastProbabilitiesStoreWait,
  kNoRescaleLoadWait,
  kNoRescaleStoreWait,
  kNoOutLoadWait,
  kNoScoresFenceAfter,
  kNoRescaleFenceAfter,
  kNoProbabilitiesFenceBefore,
  kNoProbabilitiesFenceAfter,
  kNoLastProbabilitiesFenceBefore,
  kNoLastProbabilitiesFenceAfter,
  kNoOutFenceAfter,
  kNoOutReleaseFenceBefore,
  kNoStoreReadWait,
  kNoStagingFreeBarrier,
  kNoStagingFullBarrier,
  kNoProxyFence,
  kNoStoreWait,
  kNoArrivalWarpSync,
  kNoInitFence,
  kNoFirstBarrier,
  kNoFinalBarrier,
  kNoFinalFenceAfter,
  kMutantEnd,
};
inline constexpr int kForwardMutants = kMutantEnd - 1;
template <ForwardMutant kId>
inline constexpr bool kKept = ptx::kMutant != kId;

template <class Config>
struct ForwardLayout {
  using QkTile = Tile<Config::kHeadDimQk>;
  using VTile = Tile<Config::kHeadDimV>;
  static_assert(Config::kBlockM == kQueryStages * kStageRows);
  static_assert(Config::kBlockN == 128, "P's last quarter is two products of 16 keys");
  static_assert(QkTile::kSpan == 128 && VTile::kSpan == 128);
  static_assert(Config::kStages >= 2, "V of a block and K of the next are in use together");

  static constexpr int kQBytes = QkTile::bytes(kStageRows);
  static constexpr int kOutBytes = VTile::bytes(kStageRows);
  static constexpr int kKBytes = QkTile::bytes(Config::kBlockN);
  static constexpr int kVBytes = VTile::bytes(Config::kBlockN);
  static constexpr int kSlotBytes = kKBytes > kVBytes ? kKBytes : kVBytes;

  static constexpr int kQ = 0;
  static constexpr int kOut = kQ + kQueryStages * kQBytes;
  static constexpr int kRing = kOut + kQueryStages * kOutBytes;
  // Row statistics, [stage][row] floats: the factor of O of the present block; the sum of the tile.
  static constexpr int kRescale = kRing + Config::kStages * kSlotBytes;
  static constexpr int kSums = kRescale + kQueryStages * kStageRows * 4;

  // mbarriers. Each is named for the event that completes a phase; who arrives, how many.
  static constexpr int kQFull = kSums + kQueryStages * kStageRows * 4;  // [stage] TMA, 1 and bytes
  static constexpr int kQEmpty = kQFull + 8 * kQueryStages;             // [stage] commit, 1
  static constexpr int kKvFull = kQEmpty + 8 * kQueryStages;            // [slot] TMA, 1 and bytes
  static constexpr int kKvEmpty = kKvFull + 8 * Config::kStages;        // [slot] commit, 1
  // S_s is written, hence all products issued before it are done, P_s V of the last block included.
  static constexpr int kScoresFull = kKvEmpty + 8 * Config::kStages;  // [stage] commit, 1
  // Three quarters of P_s are written and O_s is rescaled (or, for the first block, read out).
  static constexpr int kProbabilities = kScoresFull + 8 * kQueryStages;  // [stage] 4 + 4 warps
  static constexpr int kLastProbabilities = kProbabilities + 8 * kQueryStages;  // [stage] 4 warps
  static constexpr int kOutFull = kLastProbabilities + 8 * kQueryStages;  // [stage] commit, 1
  static constexpr int kSumsFull = kOutFull + 8 * kQueryStages;           // [stage] 4 warps
  static constexpr int kSumsEmpty = kSumsFull + 8 * kQueryStages;         // [stage] 4 warps
  static constexpr int kTmemAddress = kSumsEmpty + 8 * kQueryStages;
  static constexpr int kBytes = kTmemAddress + 16;
  static_assert(kBytes <= 232448, "a CTA may have 227 KB of shared memory");

  // Tensor-memory columns.
  static constexpr int kScoreColumn = 0;  // + stage * kBlockN
  static constexpr int kOutColumn = kQueryStages * Config::kBlockN;  // + stage * kHeadDimV
  static_assert(kOutColumn + kQueryStages * Config::kHeadDimV <= kTmemColumns);
  static constexpr int kProbabilityColumn = Config::kBlockN / 2;  // of S: its upper half
};

// Descriptor high word of tcgen05: stride = 8 rows, version 1, swizzle 128 bytes (ptx/sm100.cuh).
// The low words are those of tile/layout.cuh.
template <class Tile>
inline constexpr uint32_t kDescriptorHigh = static_cast<uint32_t>(8 * Tile::kSpan / 16) |
                                            1u << 14 | 2u << 29;

// The work tiles of this CTA. Every role walks the same ones:
//   for (CtaTiles<Config> tiles(params); tiles.valid(); tiles.next()) {
//     const WorkTile tile = tiles.tile();
//     if (!exists<Config>(tile)) continue;
template <class Config>
struct CtaTiles {
  const ForwardParams& params;
  typename Config::Scheduler scheduler;

  CF_DEVICE explicit CtaTiles(const ForwardParams& launch) : params(launch) {}
  CF_DEVICE bool valid() const {
    return scheduler.valid(params, ptx::cta_idx(), ptx::num_ctas());
  }
  CF_DEVICE void next() { scheduler.next(); }
  CF_DEVICE WorkTile tile() const {
    return decode<Config, typename Config::Mask>(
        params, scheduler.tile(ptx::cta_idx(), ptx::num_ctas()), params.heads_q, Config::kBlockM);
  }
};

// Packed sequences own more tiles than they need (attn/scheduler.cuh).
template <class Config>
CF_DEVICE bool exists(const WorkTile& tile) {
  return Config::kGeneral == 0 || tile.m_block >= 0;
}

template <class Config>
using Blocks = KvBlocks<typename Config::Mask, Config::kBlockN>;

// A tile and its sequence.
template <class Config>
struct Work {
  static constexpr bool kGeneral = Config::kGeneral != 0;

  typename SequenceOf<kGeneral>::Type sequence;
  int query_begin;  // within the sequence
  int head;         // of the queries
  int batch;        // of the arrays; packed sequences share one

  CF_DEVICE Work(const ForwardParams& params, const WorkTile& tile)
      : sequence{params, tile.batch},
        query_begin(tile.m_block * Config::kBlockM),
        head(tile.head),
        batch(tile.batch) {
    if constexpr (kGeneral) {
      if (params.cu_seqlens_q != nullptr) batch = 0;
    }
  }

  // The blocks that the tile visits; partial where one of queries [begin, begin + rows) is masked.
  CF_DEVICE Blocks<Config> blocks(int begin, int rows) const {
    Blocks<Config> found(sequence, query_begin, Config::kBlockM, begin, rows);
    if constexpr (kGeneral) {  // seqused_q may end before the tile
      if (query_begin >= sequence.seqlen_q()) found.count = 0;
    }
    return found;
  }
  CF_DEVICE Blocks<Config> blocks() const { return blocks(query_begin, Config::kBlockM); }

  CF_DEVICE TileRows<kGeneral> query_rows() const {
    return {sequence.q_begin(), sequence.seqlen_q(), batch};
  }
  CF_DEVICE TileRows<kGeneral> key_rows() const {
    return {sequence.kv_begin(), sequence.seqlen_kv(), batch};
  }
};

// All lanes' work so far is handed over by one arrival of the warp. Whatever a whole warp waits for
// in this file comes again only after a later arrival of that warp, so that no lane is left behind
// in a wait while the barrier goes on to a phase of the same parity.
CF_DEVICE void arrive_warp(saddr bar) {
  if constexpr (kKept<kNoArrivalWarpSync>) ptx::warp_sync();
  if (ptx::lane() == 0) ptx::mbarrier_arrive(bar);
}

// --- loads (one thread) --------------------------------------------------------------------------

template <class Tile, bool kGeneral>
CF_DEVICE void load_tile(saddr dst, const CUtensorMap* map, saddr full, int box_rows,
                         const TileRows<kGeneral>& rows, int row_begin, int head, int batch_rows,
                         uint64_t policy) {
  ptx::mbarrier_arrive_expect_tx(full, static_cast<uint32_t>(Tile::bytes(box_rows)));
  CF_UNROLL
  for (int c = 0; c < Tile::kChunks; ++c) {
    rows.load(dst + c * Tile::chunk_bytes(box_rows), map, full, c * Tile::kChunk, row_begin, head,
              batch_rows, policy);
  }
}

// Loads a K or V tile into the next slot of the ring, once that is free.
template <class Config, class Tile, bool kGeneral>
CF_DEVICE void load_slot(RingPlace<Config::kStages>& place, saddr smem, const CUtensorMap* map,
                         const TileRows<kGeneral>& rows, int kv_start, int head_kv,
                         int batch_rows) {
  using Layout = ForwardLayout<Config>;
  if constexpr (kKept<kNoKvEmptyWait>) {
    ptx::mbarrier_wait(barrier_at(smem + Layout::kKvEmpty, place.stage), place.phase ^ 1);
  }
  load_tile<Tile>(smem + Layout::kRing + place.stage * Layout::kSlotBytes, map,
                  barrier_at(smem + Layout::kKvFull, place.stage), Config::kBlockN, rows, kv_start,
                  head_kv, batch_rows, ptx::kEvictLast);
  place.advance();
}

// Keeps the ring filled with K_0, V_0, K_1, V_1, ... of one tile after the other, and loads Q as
// soon as the products of the tile before have read it.
template <class Config>
CF_DEVICE void load_operands(const ForwardParams& params, saddr smem) {
  using Layout = ForwardLayout<Config>;
  RingPlace<Config::kStages> place;
  uint32_t q_phase = 0;
  for (CtaTiles<Config> tiles(params); tiles.valid(); tiles.next()) {
    const WorkTile tile = tiles.tile();
    if (!exists<Config>(tile)) continue;
    const Work<Config> work(params, tile);
    const Blocks<Config> blocks = work.blocks();
    const auto keys = work.key_rows();
    const int head_kv = work.head / params.group;
    CF_NO_UNROLL
    for (int j = 0; j < blocks.count; ++j) {
      load_slot<Config, typename Layout::QkTile>(place, smem, &params.k_map, keys,
                                                 blocks.at(j).start, head_kv,
                                                 params.k_batch_rows);
      if (j == 0) {
        CF_UNROLL
        for (int s = 0; s < kQueryStages; ++s) {
          if constexpr (kKept<kNoQEmptyWait>) {
            ptx::mbarrier_wait(barrier_at(smem + Layout::kQEmpty, s), q_phase ^ 1);
          }
          load_tile<typename Layout::QkTile>(smem + Layout::kQ + s * Layout::kQBytes, &params.q_map,
                                             barrier_at(smem + Layout::kQFull, s), kStageRows,
                                             work.query_rows(),
                                             work.query_begin + s * kStageRows, work.head,
                                             params.q_batch_rows, ptx::kEvictFirst);
        }
        q_phase ^= 1;
      }
      load_slot<Config, typename Layout::VTile>(place, smem, &params.v_map, keys,
                                                blocks.at(j).start, head_kv,
                                                params.v_batch_rows);
    }
  }
}

// --- products (one thread) -----------------------------------------------------------------------

// Walks over the key blocks of all tiles of this CTA as one sequence.
template <class Config>
struct BlockWalk {
  CtaTiles<Config> tiles;
  int index = 0, count = 0;  // of the present tile

  CF_DEVICE explicit BlockWalk(const ForwardParams& params) : tiles(params) { next_tile(); }
  CF_DEVICE bool valid() const { return count > 0; }
  CF_DEVICE bool first() const { return index == 0; }
  CF_DEVICE bool last() const { return index + 1 == count; }
  CF_DEVICE void advance() {
    if (++index >= count) next_tile();
  }
  // Tiles that see no key have no products.
  CF_DEVICE void next_tile() {
    index = count = 0;
    for (; count == 0 && tiles.valid(); tiles.next()) {
      const WorkTile tile = tiles.tile();
      if (!exists<Config>(tile)) continue;
      count = Work<Config>(tiles.params, tile).blocks().count;
    }
  }
};

// Issues every matrix product. One thread's products and commits run in order, which gives most of
// the guarantees that the other roles rely on.
template <class Config>
struct Products {
  using Layout = ForwardLayout<Config>;
  using Element = typename Config::Element;
  using QkDescriptor = Descriptor<typename Layout::QkTile>;
  using VDescriptor = Descriptor<typename Layout::VTile>;
  static constexpr uint32_t kScoreInstruction =
      ptx::tcgen05_instruction_descriptor<Element>(kStageRows, Config::kBlockN, false);
  static constexpr uint32_t kOutInstruction =
      ptx::tcgen05_instruction_descriptor<Element>(kStageRows, Config::kHeadDimV, true);
  static constexpr int kStepKeys = 16;
  static constexpr int kSteps = Config::kBlockN / kStepKeys;  // of P V
  static constexpr int kEarlySteps = kSteps * 3 / 4;          // before the last quarter of P

  saddr smem;
  taddr tmem;
  RingPlace<Config::kStages> place;
  uint32_t q_phase = 0;
  uint32_t block_phase = 0;

  CF_DEVICE saddr slot() const {
    return smem + Layout::kRing + place.stage * Layout::kSlotBytes;
  }
  CF_DEVICE saddr slot_empty() const {
    return barrier_at(smem + Layout::kKvEmpty, place.stage);
  }
  CF_DEVICE void wait_slot() const {
    if constexpr (kKept<kNoKvFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kKvFull, place.stage), place.phase);
    }
  }
  CF_DEVICE void wait_query(int s) const {
    if constexpr (kKept<kNoQFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kQFull, s), q_phase);
    }
  }

  // S_s = Q_s K^T with K in `k_slot`.
  CF_DEVICE void issue_scores(int s, saddr k_slot) const {
    const uint32_t q = QkDescriptor::k_major(smem + Layout::kQ + s * Layout::kQBytes);
    const uint32_t k = QkDescriptor::k_major(k_slot);
    CF_UNROLL
    for (int i = 0; i < Config::kHeadDimQk / 16; ++i) {
      ptx::tcgen05_mma_ss<kScoreInstruction, kDescriptorHigh<typename Layout::QkTile>,
                          kDescriptorHigh<typename Layout::QkTile>>(
          tmem + Layout::kScoreColumn + s * Config::kBlockN,
          q + QkDescriptor::k_step(kStageRows, i), k + QkDescriptor::k_step(Config::kBlockN, i),
          i > 0);
    }
    ptx::tcgen05_commit(barrier_at(smem + Layout::kScoresFull, s));
  }

  // O_s (+)= P_s V, `first`: overwrites. The last quarter of P may come while the others multiply.
  CF_DEVICE void issue_out(int s, saddr v_slot, bool first) const {
    const taddr out = tmem + Layout::kOutColumn + s * Config::kHeadDimV;
    const taddr p = tmem + Layout::kScoreColumn + s * Config::kBlockN + Layout::kProbabilityColumn;
    const uint32_t v = VDescriptor::mn_major(v_slot, Config::kBlockN);
    if constexpr (kKept<kNoProbabilitiesWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kProbabilities, s), block_phase);
    }
    if constexpr (kKept<kNoProbabilitiesFenceAfter>) ptx::tcgen05_fence_after();
    CF_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      if (i == kEarlySteps) {
        if constexpr (kKept<kNoLastProbabilitiesWait>) {
          ptx::mbarrier_wait(barrier_at(smem + Layout::kLastProbabilities, s), block_phase);
        }
        if constexpr (kKept<kNoLastProbabilitiesFenceAfter>) ptx::tcgen05_fence_after();
      }
      ptx::tcgen05_mma_ts<kOutInstruction, kDescriptorHigh<typename Layout::VTile>>(
          out, p + i * kStepKeys / 2, v + VDescriptor::mn_step(i), !first || i > 0);
    }
  }

  CF_DEVICE void run(const ForwardParams& params) {
    BlockWalk<Config> next(params);
    bool current = false, current_first = false, current_last = false;
    while (current || next.valid()) {
      saddr v_slot = 0, v_empty = 0;
      if (current) {
        wait_slot();
        v_slot = slot();
        v_empty = slot_empty();
        place.advance();
      }
      CF_UNROLL
      for (int s = 0; s < kQueryStages; ++s) {
        if (current) {
          issue_out(s, v_slot, current_first);
          if (s == kQueryStages - 1) ptx::tcgen05_commit(v_empty);
          if (current_last) ptx::tcgen05_commit(barrier_at(smem + Layout::kOutFull, s));
        }
        // S_s is free: the product just issued reads P_s, which was made from it.
        if (next.valid()) {
          if (s == 0) wait_slot();
          if (next.first()) wait_query(s);
          issue_scores(s, slot());
          if (next.last()) ptx::tcgen05_commit(barrier_at(smem + Layout::kQEmpty, s));
          if (s == kQueryStages - 1) ptx::tcgen05_commit(slot_empty());
        }
      }
      if (current) block_phase ^= 1;
      if (next.valid()) {
        place.advance();
        if (next.first()) q_phase ^= 1;
      }
      current = next.valid();
      current_first = next.first();
      current_last = next.last();
      next.advance();
    }
  }
};

// --- softmax (one thread a query row) ------------------------------------------------------------

// Makes P_s of stage s = `stage` from S_s, block after block, tells the correction warps by how
// much the reference moved, and writes the log-sum-exp.
template <class Config>
CF_DEVICE void softmax(const ForwardParams& params, saddr smem, taddr tmem, int stage) {
  using Layout = ForwardLayout<Config>;
  using Mask = typename Config::Mask;
  using Element = typename Config::Element;
  constexpr int kPieces = Config::kBlockN / kPieceColumns;
  const int warp = ptx::warp_uniform(ptx::warp()) % kWarpsPerGroup;
  const int row = warp * 32 + ptx::lane();
  const taddr scores = tmem + (static_cast<taddr>(warp * 32) << 16) + Layout::kScoreColumn +
                       stage * Config::kBlockN;
  const taddr probabilities = scores + Layout::kProbabilityColumn;
  const saddr rescale = smem + Layout::kRescale + 4 * (stage * kStageRows + row);
  const saddr sums = smem + Layout::kSums + 4 * (stage * kStageRows + row);
  const int rescale_barrier = kRescaleBarrier + stage * kWarpsPerGroup + warp;
  uint32_t block_phase = 0, tile_phase = 0;

  for (CtaTiles<Config> tiles(params); tiles.valid(); tiles.next()) {
    const WorkTile tile = tiles.tile();
    if (!exists<Config>(tile)) continue;
    const Work<Config> work(params, tile);
    const int stage_begin = work.query_begin + stage * kStageRows;
    const int query = stage_begin + row;
    const Blocks<Config> blocks = work.blocks(stage_begin, kStageRows);
    if (blocks.count == 0) continue;
    RowSoftmax state{params.softmax_scale_log2};

    CF_NO_UNROLL
    for (int j = 0; j < blocks.count; ++j) {
      const KvBlock block = blocks.at(j);
      float s[Config::kBlockN];
      if constexpr (kKept<kNoScoresFullWait>) {
        ptx::mbarrier_wait(barrier_at(smem + Layout::kScoresFull, stage), block_phase);
      }
      block_phase ^= 1;
      if constexpr (kKept<kNoScoresFenceAfter>) ptx::tcgen05_fence_after();
      CF_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        ptx::tcgen05_ld<kPieceColumns>(s + i * kPieceColumns, scores + i * kPieceColumns);
      }
      if constexpr (kKept<kNoScoresLoadWait>) ptx::tcgen05_wait_ld();
      ptx::tcgen05_pin(s);
      if constexpr (Config::kGeneral != 0) cap_scores(params, s);
      if (block.partial) mask_row<Mask>(work.sequence, s, query, block.start);

      const float factor = state.raise(row_max(s, state.max));
      if (j > 0) {
        // The slot is free: these scores were issued after the correction of the last block. O_s is
        // whole: S_s was issued after the last product into it (kScoresFull).
        ptx::sts_f32(rescale, factor);
        ptx::named_barrier_arrive(rescale_barrier, 64);
      }
      state.subtract_origin(s);
      CF_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        uint32_t p[kPieceColumns / 2];
        CF_UNROLL
        for (int i = 0; i < kPieceColumns; i += 2) {
          const int column = piece * kPieceColumns + i;
          state.template exponentials<Element>(
              s[column], s[column + 1], emulates_exp2(column, Config::kBlockN, kPieceColumns));
          p[i / 2] = ptx::pack2<Element>(s[column], s[column + 1]);
        }
        ptx::tcgen05_st<kPieceColumns / 2>(probabilities + piece * kPieceColumns / 2, p);
        if (piece == kPieces - 2) {
          if constexpr (kKept<kNoProbabilitiesStoreWait>) ptx::tcgen05_wait_st();
          if constexpr (kKept<kNoProbabilitiesFenceBefore>) ptx::tcgen05_fence_before();
          arrive_warp(barrier_at(smem + Layout::kProbabilities, stage));
        }
      }
      if constexpr (kKept<kNoLastProbabilitiesStoreWait>) ptx::tcgen05_wait_st();
      if constexpr (kKept<kNoLastProbabilitiesFenceBefore>) ptx::tcgen05_fence_before();
      arrive_warp(barrier_at(smem + Layout::kLastProbabilities, stage));
      // After the arrivals: the products need not wait for it.
      state.sum = ptx::fma(state.sum, factor, row_sum(s));
    }

    if constexpr (kKept<kNoSumsEmptyWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kSumsEmpty, stage), tile_phase ^ 1);
    }
    tile_phase ^= 1;
    ptx::sts_f32(sums, state.sum);
    arrive_warp(barrier_at(smem + Layout::kSumsFull, stage));
    if (params.lse != nullptr && query < work.sequence.seqlen_q()) {
      float* lse_gmem = params.lse + work.batch * params.lse_stride_batch +
                        work.head * params.lse_stride_head + work.sequence.q_begin();
      ptx::stg_f32(lse_gmem + query, state.log_sum_exp(params.softmax_scale));
    }
  }
}

// --- correction and output (a warpgroup; one row of each stage a thread) -------------------------

template <class Config>
struct Correction {
  using Layout = ForwardLayout<Config>;
  using VTile = typename Layout::VTile;
  static constexpr int kPieces = Config::kHeadDimV / kPieceColumns;

  saddr smem;
  taddr out_tmem;  // this warp's lanes of O_0
  int warp, row;

  CF_DEVICE taddr out_column(int s, int piece) const {
    return out_tmem + s * Config::kHeadDimV + piece * kPieceColumns;
  }

  // Rows of O_s are what the next product into it may find: rescaled, or read out.
  CF_DEVICE void release_out(int s) const {
    if constexpr (kKept<kNoOutReleaseFenceBefore>) ptx::tcgen05_fence_before();
    arrive_warp(barrier_at(smem + Layout::kProbabilities, s));
  }

  // Multiplies O_s by the factor of each row, if any row of the warp needs it.
  CF_DEVICE void rescale(int s) const {
    if constexpr (kKept<kNoRescaleBarrier>) {
      ptx::named_barrier_sync(kRescaleBarrier + s * kWarpsPerGroup + warp, 64);
    }
    if constexpr (kKept<kNoRescaleFenceAfter>) ptx::tcgen05_fence_after();
    const float factor = ptx::lds_f32(smem + Layout::kRescale + 4 * (s * kStageRows + row));
    if (ptx::vote_any(factor != 1.0f)) {
      CF_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        float o[kPieceColumns];
        ptx::tcgen05_ld<kPieceColumns>(o, out_column(s, piece));
        if constexpr (kKept<kNoRescaleLoadWait>) ptx::tcgen05_wait_ld();
        ptx::tcgen05_pin(o);
        CF_UNROLL
        for (int i = 0; i < kPieceColumns; i += 2) {
          ptx::mul2(o[i], o[i + 1], o[i], o[i + 1], factor, factor);
        }
        ptx::tcgen05_st<kPieceColumns>(out_column(s, piece), o);
      }
      if constexpr (kKept<kNoRescaleStoreWait>) ptx::tcgen05_wait_st();
    }
    release_out(s);
  }

  // Columns [32 piece, + 32) of the thread's output row, to the swizzled tile.
  CF_DEVICE void stage_out(int s, int piece, const float (&o)[kPieceColumns]) const {
    CF_UNROLL
    for (int g = 0; g < kPieceColumns / 8; ++g) {
      u32x4 packed;
      packed.x = ptx::pack2<typename Config::Element>(o[8 * g], o[8 * g + 1]);
      packed.y = ptx::pack2<typename Config::Element>(o[8 * g + 2], o[8 * g + 3]);
      packed.z = ptx::pack2<typename Config::Element>(o[8 * g + 4], o[8 * g + 5]);
      packed.w = ptx::pack2<typename Config::Element>(o[8 * g + 6], o[8 * g + 7]);
      ptx::sts128(smem + Layout::kOut + s * Layout::kOutBytes +
                      VTile::granule_offset(kStageRows, row, piece * (kPieceColumns / 8) + g),
                  packed);
    }
  }

  // out = O_s / sum, rows without keys 0, through shared memory.
  CF_DEVICE void write_out(const ForwardParams& params, const Work<Config>& work, int s,
                           uint32_t tile_phase) const {
    // The store before the last one, of this stage, has read its tile.
    if (warp == 0 && ptx::lane() == 0) {
      if constexpr (kKept<kNoStoreReadWait>) ptx::tma_wait_read<kQueryStages - 1>();
    }
    if constexpr (kKept<kNoStagingFreeBarrier>) {
      ptx::named_barrier_sync(kOutBarrier, kGroupThreads);
    }
    if constexpr (kKept<kNoSumsFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kSumsFull, s), tile_phase);
    }
    const float sum = ptx::lds_f32(smem + Layout::kSums + 4 * (s * kStageRows + row));
    arrive_warp(barrier_at(smem + Layout::kSumsEmpty, s));
    const bool empty = sum == 0.0f;  // else p of the maximum is in it, about 1 or more
    const float factor = ptx::rcp(sum);
    if constexpr (kKept<kNoOutFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kOutFull, s), tile_phase);
    }
    if constexpr (kKept<kNoOutFenceAfter>) ptx::tcgen05_fence_after();
    CF_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      float o[kPieceColumns];
      ptx::tcgen05_ld<kPieceColumns>(o, out_column(s, piece));
      if constexpr (kKept<kNoOutLoadWait>) ptx::tcgen05_wait_ld();
      ptx::tcgen05_pin(o);
      if (piece == kPieces - 1) release_out(s);
      CF_UNROLL
      for (int i = 0; i < kPieceColumns; i += 2) {
        ptx::mul2(o[i], o[i + 1], o[i], o[i + 1], factor, factor);
      }
      if (ptx::vote_any(empty)) {
        CF_UNROLL
        for (int i = 0; i < kPieceColumns; ++i) o[i] = empty ? 0.0f : o[i];
      }
      stage_out(s, piece, o);
    }
    if constexpr (kKept<kNoProxyFence>) ptx::fence_proxy_async();
    if constexpr (kKept<kNoStagingFullBarrier>) {
      ptx::named_barrier_sync(kOutBarrier, kGroupThreads);
    }
    if (warp == 0 && ptx::lane() == 0) {
      // Rows past the sequence and columns past head_dim_v are clipped by the map.
      const auto rows = work.query_rows();
      CF_UNROLL
      for (int c = 0; c < VTile::kChunks; ++c) {
        rows.store(&params.out_map,
                   smem + Layout::kOut + s * Layout::kOutBytes + c * VTile::chunk_bytes(kStageRows),
                   c * VTile::kChunk, work.query_begin + s * kStageRows, work.head,
                   params.rows_q);
      }
      ptx::tma_commit();
    }
  }

  CF_DEVICE void run(const ForwardParams& params) const {
    uint32_t tile_phase = 0;
    // O is free for the first product. From then on reading it out frees it, so that one arrival is
    // left over at the end; nobody waits for it.
    CF_UNROLL
    for (int s = 0; s < kQueryStages; ++s) release_out(s);
    for (CtaTiles<Config> tiles(params); tiles.valid(); tiles.next()) {
      const WorkTile tile = tiles.tile();
      if (!exists<Config>(tile)) continue;
      const Work<Config> work(params, tile);
      const int count = work.blocks().count;
      if (count == 0) continue;
      CF_NO_UNROLL
      for (int j = 1; j < count; ++j) {
        CF_NO_UNROLL
        for (int s = 0; s < kQueryStages; ++s) rescale(s);
      }
      CF_NO_UNROLL
      for (int s = 0; s < kQueryStages; ++s) write_out(params, work, s, tile_phase);
      tile_phase ^= 1;
    }
    if (warp == 0 && ptx::lane() == 0) {
      if constexpr (kKept<kNoStoreWait>) ptx::tma_wait<0>();
    }
  }
};

// --- what no product reaches (one warp) ----------------------------------------------------------

// Zeros and -inf for the tiles in which no query sees a key, which the other roles pass over, and
// for this CTA's share of the rows of no sequence.
template <class Config>
CF_DEVICE void write_empty(const ForwardParams& params) {
  using Element = typename Config::Element;
  for (CtaTiles<Config> tiles(params); tiles.valid(); tiles.next()) {
    const WorkTile tile = tiles.tile();
    if (!exists<Config>(tile)) continue;
    const Work<Config> work(params, tile);
    if (work.blocks().count > 0) continue;
    const int end = min(work.query_begin + Config::kBlockM, work.sequence.seqlen_q());
    write_empty_rows<Element>(params, work.batch, work.head,
                              work.sequence.q_begin() + work.query_begin,
                              work.sequence.q_begin() + end, true);
  }
  if constexpr (Config::kGeneral != 0) {
    write_padding<Element>(params, ptx::cta_idx(), ptx::num_ctas());
  }
}

// --- the kernel ----------------------------------------------------------------------------------

template <class Config>
CF_DEVICE void initialize_barriers(saddr smem) {
  using Layout = ForwardLayout<Config>;
  for (int s = 0; s < kQueryStages; ++s) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kQFull, s), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kQEmpty, s), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kScoresFull, s), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kProbabilities, s), 2 * kWarpsPerGroup);
    ptx::mbarrier_init(barrier_at(smem + Layout::kLastProbabilities, s), kWarpsPerGroup);
    ptx::mbarrier_init(barrier_at(smem + Layout::kOutFull, s), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kSumsFull, s), kWarpsPerGroup);
    ptx::mbarrier_init(barrier_at(smem + Layout::kSumsEmpty, s), kWarpsPerGroup);
  }
  for (int i = 0; i < Config::kStages; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kKvFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kKvEmpty, i), 1);
  }
  if constexpr (kKept<kNoInitFence>) ptx::fence_mbarrier_init();
}

template <class Config>
CF_DEVICE void forward(const ForwardParams& params) {
  using Layout = ForwardLayout<Config>;
  const saddr smem = ptx::smem_base();
  const int warp = ptx::warp_uniform(ptx::warp());

  if (warp == kProductWarp) {
    ptx::tcgen05_alloc<kTmemColumns>(smem + Layout::kTmemAddress);
    ptx::tcgen05_relinquish_alloc_permit();
  } else if (warp == kLoadWarp && ptx::elect_one()) {
    initialize_barriers<Config>(smem);
    ptx::tma_prefetch_descriptor(&params.out_map);
    if (params.rows_kv > 0) {  // else the maps of k and v are empty
      ptx::tma_prefetch_descriptor(&params.q_map);
      ptx::tma_prefetch_descriptor(&params.k_map);
      ptx::tma_prefetch_descriptor(&params.v_map);
    }
  }
  ptx::warp_sync();
  if constexpr (kKept<kNoFirstBarrier>) ptx::cta_sync();
  const taddr tmem = ptx::lds32(smem + Layout::kTmemAddress);

  if (warp < kCorrectionWarp) {
    ptx::setmaxnreg_inc<kSoftmaxRegisters>();
    softmax<Config>(params, smem, tmem, warp / kWarpsPerGroup);
  } else if (warp < kProductWarp) {
    ptx::setmaxnreg_dec<kCorrectionRegisters>();
    const int group_warp = warp - kCorrectionWarp;
    const taddr lanes = static_cast<taddr>(group_warp * 32) << 16;
    Correction<Config>{smem, tmem + lanes + Layout::kOutColumn, group_warp,
                       group_warp * 32 + ptx::lane()}
        .run(params);
  } else {
    ptx::setmaxnreg_dec<kOtherRegisters>();
    if (warp == kProductWarp) {
      if (ptx::elect_one()) Products<Config>{smem, tmem}.run(params);
    } else if (warp == kLoadWarp) {
      if (ptx::elect_one()) load_operands<Config>(params, smem);
    } else if (warp == kEmptyWarp) {
      write_empty<Config>(params);
    }
    ptx::warp_sync();
  }

  // Nobody touches tensor memory any more; the last accesses of every role were fenced.
  if constexpr (kKept<kNoFinalBarrier>) ptx::cta_sync();
  if constexpr (kKept<kNoFinalFenceAfter>) ptx::tcgen05_fence_after();
  if (warp == kProductWarp) ptx::tcgen05_dealloc<kTmemColumns>(tmem);
}

}  // namespace cf::sm100
