// Backward attention for data-centre Blackwell (sm_100f): dk and dv, and dq summed in global
// memory, by recomputing the probabilities from the log-sum-exp. Head dimensions up to 128.
//
// Algorithm: FlashAttention-2 and -4 (Dao 2023, arXiv 2307.08691; FlashAttention-4, arXiv
// 2603.05451), the plain form with one CTA: a CTA owns 128 keys of one key head and walks the
// blocks of 128 queries that see them, of every query head of the group. Scores are transposed, so
// that weights and their gradients, 16 bits each, are operands in tensor memory of the products
// that make dv and dk; dS goes through shared memory too, for dq. Written from the papers'
// description and the PTX ISA; docs/kernels/backward.md has the design. Never run on a GPU: checked
// by ptxas and by the emulator.
//
// Products of a step (rows of D are lanes of tensor memory):
//   S^T = K Q^T       dP^T = V dO^T       from shared memory
//   P^T = exp2(S^T c - lse)               dS^T = P^T (dP^T - delta)
//   dV += P^T dO      dK += dS^T Q        P^T and dS^T from tensor memory
//   dQ  = dS K                            dS from shared memory, read along its rows
//
// Roles (512 threads; registers per thread after setmaxnreg, together the SM's 512 x 128):
//   warps 0-3    dQ: from tensor memory through shared memory to the sums, by bulk reductions  88
//   warps 4-11   weights: one key a thread, half of the queries of a step each warpgroup;
//                at the end one gradient each                                                 160
//   warp 12      one thread issues every matrix product; allocates tensor memory               88
//   warp 13      one thread issues every load                                                  88
//   warp 14      rows of dk and dv of no sequence                                              88
//   warp 15      idle                                                                          88
//
// Tensor memory (128 lanes x 512 columns, all allocated; lane = key, of dQ = query):
//   S, P [0, 128)    dV [128, 256)    dP, dS, dQ [256, 384)    dK [384, 512)
//   P, two 16-bit values a column, overlays S, each half of the queries its own: [0, 32) and
//   [64, 96); dS likewise overlays dP. So no warp writes where another still reads. dQ overlays dP
//   and dS.
//
// Shared memory, in order (BackwardLayout; 128-byte swizzled tiles):
//   K       [128][head_dim_qk]            later dk
//   V       [128][head_dim_v]             later dv
//   Q       [kStages][128][head_dim_qk]
//   dO      [kDoutStages][128][head_dim_v]
//   dS      [128 keys][128 queries]
//   staging [2][128][32] floats           dQ on its way out
//   rows    [kStages][2][128] floats      lse and delta, with Q
//   barriers; the tensor-memory address
//
// Order of the products, step i (one thread's products run in order, which gives most of the
// guarantees that the other roles rely on):
//   S_0, dP_0, dV_0;  then for every i:  S_(i+1), dK_i, dQ_i, dP_(i+1), dV_(i+1)
#pragma once
#include "attn/grad_padding.cuh"
#include "attn/grads.cuh"
#include "attn/query_blocks.cuh"
#include "attn/query_slots.cuh"
#include "attn/ragged.cuh"
#include "attn/softcap.cuh"
#include "backward_params.cuh"
#include "ptx/ptx.cuh"
#include "sm100/row_softmax.cuh"
#include "tile/layout.cuh"
#include "tile/pipeline.cuh"

namespace cf::sm100 {

inline constexpr int kTileRows = 128;  // keys and queries of a step: lanes of tensor memory
inline constexpr int kGroupThreads = 128;
inline constexpr int kGroupWarps = 4;

// Warps of each role; warpgroup-aligned where registers move (setmaxnreg) and where tensor memory
// is touched (a warp reaches the 32 lanes of its number modulo 4).
inline constexpr int kSumsWarp = 0;
inline constexpr int kWeightsWarp = kSumsWarp + kGroupWarps;
inline constexpr int kHalves = 2;  // warpgroups that share the queries of a step
inline constexpr int kWeightsWarps = kHalves * kGroupWarps;
inline constexpr int kProductWarp = kWeightsWarp + kWeightsWarps;
inline constexpr int kLoadWarp = kProductWarp + 1;
inline constexpr int kPaddingWarp = kLoadWarp + 1;

inline constexpr int kSumsRegisters = 88;
inline constexpr int kWeightsRegisters = 160;
inline constexpr int kOtherRegisters = 88;
static_assert(kSumsRegisters + kHalves * kWeightsRegisters + kOtherRegisters <= 512);

// Named barriers (0 is the CTA's).
inline constexpr int kStagingBarrier = 1;  // the warps of dQ
inline constexpr int kOutputBarrier = 2;   // + half: a warpgroup's gradient is in shared memory

inline constexpr int kTmemColumns = 512;
inline constexpr int kPieceColumns = 32;  // of one tcgen05.ld

// One synchronisation taken out each (ptx::kMutant): the emulator must catch every one.
enum BackwardMutant {
  kNoKFullWait = 1,
  kNoVFullWait,
  kNoQFullWait,
  kNoQEmptyWait,
  kNoDoutFullWait,
  kNoDoutEmptyWait,
  kNoScoresFullWait,
  kNoScoresFenceAfter,
  kNoScoresLoadWait,
  kNoWeightsStoreWait,
  kNoWeightsFenceBefore,
  kNoWeightsFullWait,
  kNoWeightsFenceAfter,
  kNoProductsFullWait,
  kNoProductsFenceAfter,
  kNoProductsLoadWait,
  kNoGradsStoreWait,
  kNoGradsFenceBefore,
  kNoGradsProxyFence,
  kNoGradsFullWait,
  kNoGradsFenceAfter,
  kNoSumsFullWait,
  kNoSumsFenceAfter,
  kNoSumsLoadWait,
  kNoSumsFenceBefore,
  kNoSumsEmptyWait,
  kNoSumsEmptyFenceAfter,
  kNoStagingReadWait,
  kNoStagingFreeBarrier,
  kNoStagingProxyFence,
  kNoStagingFullBarrier,
  kNoTurnWait,
  kNoTurnAddedWait,
  kNoClearedProductsWait,
  kNoClearedProxyFence,
  kNoDoneWait,
  kNoDoneFenceAfter,
  kNoOutputLoadWait,
  kNoOutputProxyFence,
  kNoOutputBarrier,
  kNoStoreWait,
  kNoArrivalWarpSync,
  kNoInitFence,
  kNoFirstBarrier,
  kNoFinalBarrier,
  kNoFinalFenceAfter,
  kMutantEnd,
};
inline constexpr int kBackwardMutants = kMutantEnd - 1;
template <BackwardMutant kId>
inline constexpr bool kKept = ptx::kMutant != kId;

template <class Config>
struct BackwardLayout {
  using QkTile = Tile<Config::kHeadDimQk>;  // Q, K and dk
  using VTile = Tile<Config::kHeadDimV>;    // V, dO and dv
  using ScoreTile = Tile<kTileRows>;        // dS: [keys][queries]
  static_assert(Config::kBlockM == kTileRows && Config::kBlockN == kTileRows);
  static_assert(QkTile::kSpan == 128 && VTile::kSpan == 128);
  static_assert(Config::kHeadDimQk <= 128 && Config::kHeadDimV <= 128);

  static constexpr int kQkBytes = QkTile::bytes(kTileRows);
  static constexpr int kVBytes = VTile::bytes(kTileRows);
  static constexpr int kScoreBytes = ScoreTile::bytes(kTileRows);
  static constexpr int kStagingSlots = 2;
  static constexpr int kStagingBytes = kTileRows * kPieceColumns * 4;
  static constexpr int kRowBytes = kTileRows * 4;

  static constexpr int kK = 0;
  static constexpr int kV = kK + kQkBytes;
  static constexpr int kQ = kV + kVBytes;
  static constexpr int kDout = kQ + Config::kStages * kQkBytes;
  static constexpr int kScores = kDout + Config::kDoutStages * kVBytes;
  static constexpr int kStaging = kScores + kScoreBytes;
  static constexpr int kRows = kStaging + kStagingSlots * kStagingBytes;

  // mbarriers. Each is named for the event that completes a phase; who arrives, how many.
  static constexpr int kKFull = kRows + Config::kStages * 2 * kRowBytes;  // TMA, 1 and bytes
  static constexpr int kVFull = kKFull + 8;                        // TMA, 1 and bytes
  static constexpr int kQFull = kVFull + 8;                        // [stage] TMA, 1 and bytes
  static constexpr int kQEmpty = kQFull + 8 * Config::kStages;     // [stage] commit, 1
  static constexpr int kDoutFull = kQEmpty + 8 * Config::kStages;  // [stage] TMA, 1 and bytes
  static constexpr int kDoutEmpty = kDoutFull + 8 * Config::kDoutStages;   // [stage] commit, 1
  // S is written, hence all products issued before it are done, dV of the last step included.
  static constexpr int kScoresFull = kDoutEmpty + 8 * Config::kDoutStages;  // commit, 1
  // dP is written, hence dQ of the last step too, which has read dS.
  static constexpr int kProductsFull = kScoresFull + 8;     // commit, 1
  static constexpr int kWeightsFull = kProductsFull + 8;    // P is written: 8 warps
  static constexpr int kGradsFull = kWeightsFull + 8;       // dS is written, twice: 8 warps
  static constexpr int kSumsFull = kGradsFull + 8;          // dQ is written: commit, 1
  static constexpr int kSumsEmpty = kSumsFull + 8;          // dQ has been read: 4 warps
  static constexpr int kDone = kSumsEmpty + 8;              // dK and dV: commit, 1
  static constexpr int kTmemAddress = kDone + 8;
  static constexpr int kBytes = kTmemAddress + 16;
  static_assert(kBytes <= 232448, "a CTA may have 227 KB of shared memory");

  // Tensor-memory columns.
  static constexpr int kScoreColumn = 0;
  static constexpr int kValueColumn = 128;
  static constexpr int kProductColumn = 256;  // dP, dS, dQ
  static constexpr int kKeyColumn = 384;
};

// Descriptor high word of tcgen05: stride = 8 rows, version 1, swizzle 128 bytes (ptx/sm100.cuh).
// The low words are those of tile/layout.cuh.
inline constexpr uint32_t kDescriptorHigh = 8u * 128 / 16 | 1u << 14 | 2u << 29;

// All lanes' work so far is handed over by one arrival of the warp. Whatever a whole warp waits for
// in this file comes again only after a later arrival of that warp, so that no lane is left behind
// in a wait while the barrier goes on to a phase of the same parity.
CF_DEVICE void arrive_warp(saddr bar) {
  if constexpr (kKept<kNoArrivalWarpSync>) ptx::warp_sync();
  if (ptx::lane() == 0) ptx::mbarrier_arrive(bar);
}

// The tile of this CTA: its keys, and the query blocks that see some of them.
template <class Config>
struct KeyWork {
  static constexpr bool kGeneral = Config::kGeneral != 0;
  using Mask = typename Config::Mask;
  using Sequence = typename SequenceOf<kGeneral, BackwardParams>::Type;

  const BackwardParams& params;
  KeyTile tile;
  Sequence sequence;
  int key_begin;
  QueryBlocks<Mask, kTileRows, kTileRows> blocks;

  CF_DEVICE KeyWork(const BackwardParams& params, const KeyTile& tile)
      : params(params),
        tile(tile),
        sequence{params, tile.batch},
        key_begin(tile.n_block * kTileRows),
        blocks(sequence, key_begin) {}

  // Packed sequences share one batch of the arrays.
  CF_DEVICE int array_batch() const {
    return kGeneral && params.cu_seqlens_kv != nullptr ? 0 : tile.batch;
  }
  CF_DEVICE TileRows<kGeneral> query_rows() const {
    return {sequence.q_begin(), sequence.seqlen_q(), array_batch()};
  }
  CF_DEVICE TileRows<kGeneral> key_rows() const {
    return {sequence.kv_begin(), sequence.seqlen_kv(), array_batch()};
  }
  CF_DEVICE QuerySteps steps() const {
    // The key blocks of a head start at different query blocks, so that they do not all add to the
    // same rows of dq at a time. (Under a right-bounded mask their first ones differ anyway.)
    int start = 0;
    if (!Mask::kHasRight && params.dq_turns == nullptr) {
      start = static_cast<int>(static_cast<int64_t>(key_begin) * blocks.count() /
                               sequence.seqlen_kv());
    }
    return {blocks.first, blocks.end, start, tile.head_kv * params.group, params.group};
  }
  // The slot of a step (Note [Query slots]).
  CF_DEVICE int64_t slot_of(const QuerySteps& step) const {
    return static_cast<int64_t>(step.head) * params.num_slots +
           query_slot(params, tile.batch, step.m_block, kTileRows);
  }
};

// --- loads (one thread) --------------------------------------------------------------------------

template <class Config>
struct Loads {
  using Layout = BackwardLayout<Config>;

  const KeyWork<Config>& work;
  saddr smem;

  template <class Tile>
  CF_DEVICE void load(saddr dst, const CUtensorMap* map, saddr full,
                      const TileRows<KeyWork<Config>::kGeneral>& rows, int row, int head,
                      int batch_rows, uint64_t policy) const {
    CF_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      rows.load(dst + c * Tile::chunk_bytes(kTileRows), map, full, c * Tile::kChunk, row, head,
                batch_rows, policy);
    }
  }
  CF_DEVICE void load_keys() const {
    const saddr full = smem + Layout::kKFull;
    ptx::mbarrier_arrive_expect_tx(full, Layout::kQkBytes);
    load<typename Layout::QkTile>(smem + Layout::kK, &work.params.k_map, full, work.key_rows(),
                                  work.key_begin, work.tile.head_kv, work.params.k_batch_rows,
                                  ptx::kEvictFirst);
  }
  CF_DEVICE void load_values() const {
    const saddr full = smem + Layout::kVFull;
    ptx::mbarrier_arrive_expect_tx(full, Layout::kVBytes);
    load<typename Layout::VTile>(smem + Layout::kV, &work.params.v_map, full, work.key_rows(),
                                 work.key_begin, work.tile.head_kv, work.params.v_batch_rows,
                                 ptx::kEvictFirst);
  }
  CF_DEVICE void load_queries(const QuerySteps& step,
                              const RingPlace<Config::kStages>& place) const {
    const saddr full = barrier_at(smem + Layout::kQFull, place.stage);
    const saddr rows = smem + Layout::kRows + place.stage * 2 * Layout::kRowBytes;
    const int64_t row = work.slot_of(step) * kTileRows;
    if constexpr (kKept<kNoQEmptyWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kQEmpty, place.stage), place.phase ^ 1);
    }
    ptx::mbarrier_arrive_expect_tx(full, Layout::kQkBytes + 2 * Layout::kRowBytes);
    load<typename Layout::QkTile>(smem + Layout::kQ + place.stage * Layout::kQkBytes,
                                  &work.params.q_map, full, work.query_rows(),
                                  step.m_block * kTileRows, step.head, work.params.q_batch_rows,
                                  ptx::kEvictLast);
    ptx::bulk_load(rows, work.params.row_lse + row, Layout::kRowBytes, full);
    ptx::bulk_load(rows + Layout::kRowBytes, work.params.row_delta + row, Layout::kRowBytes, full);
  }
  CF_DEVICE void load_dout(const QuerySteps& step,
                           const RingPlace<Config::kDoutStages>& place) const {
    const saddr full = barrier_at(smem + Layout::kDoutFull, place.stage);
    if constexpr (kKept<kNoDoutEmptyWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kDoutEmpty, place.stage), place.phase ^ 1);
    }
    ptx::mbarrier_arrive_expect_tx(full, Layout::kVBytes);
    load<typename Layout::VTile>(smem + Layout::kDout + place.stage * Layout::kVBytes,
                                 &work.params.dout_map, full, work.query_rows(),
                                 step.m_block * kTileRows, step.head,
                                 work.params.dout_batch_rows, ptx::kEvictLast);
  }

  CF_DEVICE void run() const {
    RingPlace<Config::kStages> q_place;
    RingPlace<Config::kDoutStages> dout_place;
    bool first = true;
    CF_NO_UNROLL
    for (QuerySteps step = work.steps(); step.left > 0; step.advance()) {
      if (first) load_keys();
      load_queries(step, q_place);
      if (first) load_values();
      load_dout(step, dout_place);
      q_place.advance();
      dout_place.advance();
      first = false;
    }
  }
};

// --- products (one thread) -----------------------------------------------------------------------

template <class Config>
struct Products {
  using Layout = BackwardLayout<Config>;
  using Element = typename Config::Element;
  using QkDescriptor = Descriptor<typename Layout::QkTile>;
  using VDescriptor = Descriptor<typename Layout::VTile>;
  using ScoreDescriptor = Descriptor<typename Layout::ScoreTile>;
  static constexpr int kWidthQk = Config::kHeadDimQk, kWidthV = Config::kHeadDimV;
  static constexpr int kSteps = kTileRows / 16;  // of a product over keys or queries
  // D[128][n] of operands that lie along (K-major) or across (MN-major) what is summed over.
  CF_DEVICE static constexpr uint32_t instruction(int n, bool across_b, bool across_a = false) {
    return ptx::tcgen05_instruction_descriptor<Element>(kTileRows, n, across_b, across_a);
  }

  saddr smem;
  taddr tmem;
  RingPlace<Config::kStages> q_place;
  RingPlace<Config::kDoutStages> dout_place;
  uint32_t phase = 0;  // of the step whose dS and dQ are next
  uint32_t weights_phase = 0;

  CF_DEVICE saddr q_tile() const { return smem + Layout::kQ + q_place.stage * Layout::kQkBytes; }
  CF_DEVICE saddr dout_tile() const {
    return smem + Layout::kDout + dout_place.stage * Layout::kVBytes;
  }

  // D = A B^T of rows in shared memory: S or dP.
  template <class Tile>
  CF_DEVICE void issue_outer(taddr d, saddr a_tile, saddr b_tile) const {
    using Operand = Descriptor<Tile>;
    const uint32_t a = Operand::k_major(a_tile), b = Operand::k_major(b_tile);
    CF_UNROLL
    for (int i = 0; i < Tile::kColumns / 16; ++i) {
      ptx::tcgen05_mma_ss<instruction(kTileRows, false), kDescriptorHigh, kDescriptorHigh>(
          d, a + Operand::k_step(kTileRows, i), b + Operand::k_step(kTileRows, i), i > 0);
    }
  }
  // D += A B: weights or their gradients in tensor memory, halves 64 columns apart, times rows of
  // queries in shared memory.
  template <class Tile>
  CF_DEVICE void issue_inner(taddr d, taddr a, saddr b_tile, bool accumulate) const {
    using Operand = Descriptor<Tile>;
    constexpr int kHalfSteps = kSteps / kHalves;
    const uint32_t b = Operand::mn_major(b_tile, kTileRows);
    CF_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      const int column = i / kHalfSteps * (kTileRows / kHalves) + i % kHalfSteps * 8;
      ptx::tcgen05_mma_ts<instruction(Tile::kColumns, true), kDescriptorHigh>(
          d, a + column, b + Operand::mn_step(i), accumulate || i > 0);
    }
  }

  CF_DEVICE void scores() const {
    if constexpr (kKept<kNoQFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kQFull, q_place.stage), q_place.phase);
    }
    issue_outer<typename Layout::QkTile>(tmem + Layout::kScoreColumn, smem + Layout::kK, q_tile());
    ptx::tcgen05_commit(smem + Layout::kScoresFull);
  }
  CF_DEVICE void products_and_values(bool first) {
    if constexpr (kKept<kNoDoutFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kDoutFull, dout_place.stage),
                         dout_place.phase);
    }
    issue_outer<typename Layout::VTile>(tmem + Layout::kProductColumn, smem + Layout::kV,
                                        dout_tile());
    ptx::tcgen05_commit(smem + Layout::kProductsFull);
    if constexpr (kKept<kNoWeightsFullWait>) {
      ptx::mbarrier_wait(smem + Layout::kWeightsFull, weights_phase);
    }
    weights_phase ^= 1;
    if constexpr (kKept<kNoWeightsFenceAfter>) ptx::tcgen05_fence_after();
    issue_inner<typename Layout::VTile>(tmem + Layout::kValueColumn, tmem + Layout::kScoreColumn,
                                        dout_tile(), !first);
    ptx::tcgen05_commit(barrier_at(smem + Layout::kDoutEmpty, dout_place.stage));
    dout_place.advance();
  }
  // dK and dQ of the step whose queries are in `queries`.
  CF_DEVICE void keys_and_sums(const RingPlace<Config::kStages>& queries, bool first) const {
    if constexpr (kKept<kNoGradsFullWait>) ptx::mbarrier_wait(smem + Layout::kGradsFull, phase);
    if constexpr (kKept<kNoGradsFenceAfter>) ptx::tcgen05_fence_after();
    issue_inner<typename Layout::QkTile>(tmem + Layout::kKeyColumn, tmem + Layout::kProductColumn,
                                         smem + Layout::kQ + queries.stage * Layout::kQkBytes,
                                         !first);
    ptx::tcgen05_commit(barrier_at(smem + Layout::kQEmpty, queries.stage));
    const uint32_t grads = ScoreDescriptor::mn_major(smem + Layout::kScores, kTileRows);
    const uint32_t k = QkDescriptor::mn_major(smem + Layout::kK, kTileRows);
    CF_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      ptx::tcgen05_mma_ss<instruction(kWidthQk, true, true), kDescriptorHigh, kDescriptorHigh>(
          tmem + Layout::kProductColumn, grads + ScoreDescriptor::mn_step(i),
          k + QkDescriptor::mn_step(i), i > 0);
    }
    ptx::tcgen05_commit(smem + Layout::kSumsFull);
  }

  CF_DEVICE void run(int steps) {
    if constexpr (kKept<kNoKFullWait>) ptx::mbarrier_wait(smem + Layout::kKFull, 0);
    scores();
    if constexpr (kKept<kNoVFullWait>) ptx::mbarrier_wait(smem + Layout::kVFull, 0);
    products_and_values(true);
    CF_NO_UNROLL
    for (int i = 0; i < steps; ++i) {
      const RingPlace<Config::kStages> queries = q_place;
      q_place.advance();
      const bool last = i + 1 == steps;
      // Free: dV, which has just been issued, reads the weights that were made of the last scores.
      if (!last) scores();
      keys_and_sums(queries, i == 0);
      if (!last) {
        if constexpr (kKept<kNoSumsEmptyWait>) ptx::mbarrier_wait(smem + Layout::kSumsEmpty, phase);
        if constexpr (kKept<kNoSumsEmptyFenceAfter>) ptx::tcgen05_fence_after();
        products_and_values(false);
      }
      phase ^= 1;
    }
    ptx::tcgen05_commit(smem + Layout::kDone);
  }
};

// --- weights (one key a thread) ------------------------------------------------------------------

template <class Config>
struct Weights {
  using Layout = BackwardLayout<Config>;
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using QkTile = typename Layout::QkTile;
  using VTile = typename Layout::VTile;
  using ScoreTile = typename Layout::ScoreTile;
  static constexpr bool kGeneral = Config::kGeneral != 0;
  static constexpr bool kBounded = Mask::kHasLeft || Mask::kHasRight;
  static constexpr int kQueries = kTileRows / kHalves;  // of a warpgroup, in a step
  static constexpr int kBatch = 16;  // queries that are worked on together, half of a tcgen05.st
  static_assert(ScoreTile::kChunk == kQueries, "a warpgroup's queries are a chunk of dS");

  const KeyWork<Config>& work;
  saddr smem;
  taddr tmem;  // this warp's lanes
  int half;    // which of the warpgroups
  int row;     // the thread's key, in the tile

  CF_DEVICE taddr half_column(int column) const { return tmem + column + half * kQueries; }

  // Queries [first, end) of this half that see the thread's key.
  CF_DEVICE QueryRange visible(int query_begin) const {
    const int key = work.key_begin + row;
    if (key >= work.sequence.seqlen_kv()) return {0, 0};
    const QueryRange range = seeing_queries<Mask>(work.sequence, key);
    const int begin = query_begin + half * kQueries;
    return {range.first - begin, range.end - begin};
  }
  // Zeros in place of the values of queries `begin` to `begin` + kBatch that do not see the key.
  CF_DEVICE static void hide(float* x, int begin, const QueryRange& range) {
    const uint32_t bits = low_bits(range.end - begin) & ~low_bits(range.first - begin);
    CF_UNROLL
    for (int i = 0; i < kBatch; ++i) x[i] = (bits >> i & 1u) != 0 ? x[i] : 0.0f;
  }
  // Four neighbouring rows of lse or delta.
  CF_DEVICE static void read_rows(float (&values)[4], saddr rows, int query) {
    const u32x4 four = ptx::lds128(rows + static_cast<uint32_t>(4 * query));
    values[0] = ptx::bits_float(four.x);
    values[1] = ptx::bits_float(four.y);
    values[2] = ptx::bits_float(four.z);
    values[3] = ptx::bits_float(four.w);
  }
  CF_DEVICE static void pack(uint32_t* packed, const float* x) {
    CF_UNROLL
    for (int i = 0; i < kBatch; i += 2) packed[i / 2] = ptx::pack2<Element>(x[i], x[i + 1]);
  }

  // Zeros in place of the rows of Q and dO of queries that see no key, if there are any: what they
  // hold may be anything, and so may 0 times it. S and dP, which have read them, are masked.
  CF_DEVICE void clear_rows_without_keys(int query_begin, saddr q_tile, saddr dout_tile,
                                         uint32_t phase) const {
    const QueryRange kept = queries_with_keys<Mask, kTileRows>(work.sequence, query_begin);
    if (kept.first <= 0 && kept.end >= kTileRows) return;
    if constexpr (kKept<kNoClearedProductsWait>) {
      ptx::mbarrier_wait(smem + Layout::kProductsFull, phase);
    }
    CF_NO_UNROLL
    for (int i = ptx::warp() - kWeightsWarp; i < kTileRows; i += kWeightsWarps) {
      if (i >= kept.first && i < kept.end) continue;
      const int granule = ptx::lane();
      const u32x4 zeros{0, 0, 0, 0};
      if (granule < QkTile::kColumns / 8) {
        ptx::sts128(q_tile + QkTile::granule_offset(kTileRows, i, granule), zeros);
      }
      if (granule < VTile::kColumns / 8) {
        ptx::sts128(dout_tile + VTile::granule_offset(kTileRows, i, granule), zeros);
      }
    }
    if constexpr (kKept<kNoClearedProxyFence>) ptx::fence_proxy_async();
  }

  // S to P, and to tensor memory. Capped scores leave P times the slope of the cap in `s`:
  // capped = softcap tanh(x) has the slope 1 - (capped / softcap)^2.
  CF_DEVICE void weigh(float (&s)[kQueries], saddr lse_rows, const QueryRange& range,
                       bool partial) const {
    const float scale = work.params.softmax_scale_log2;
    if constexpr (kGeneral) cap_scores(work.params, s);
    CF_UNROLL
    for (int begin = 0; begin < kQueries; begin += 2 * kBatch) {
      uint32_t packed[kBatch];
      CF_UNROLL
      for (int part = 0; part < 2; ++part) {
        float* scores = s + begin + part * kBatch;
        float p[kBatch];
        CF_UNROLL
        for (int i = 0; i < kBatch; i += 4) {
          float lse[4];
          read_rows(lse, lse_rows, begin + part * kBatch + i);
          CF_UNROLL
          for (int e = 0; e < 4; ++e) p[i + e] = ptx::ex2(ptx::fma(scores[i + e], scale, -lse[e]));
        }
        if (partial) hide(p, begin + part * kBatch, range);
        pack(packed + part * kBatch / 2, p);
        if constexpr (kGeneral) {
          const float softcap = ptx::opaque(work.params.softcap);
          if (softcap != 0.0f) {
            const float inverse = ptx::rcp(softcap);
            CF_UNROLL
            for (int i = 0; i < kBatch; ++i) {
              const float tanh = ptx::mul(scores[i], inverse);
              p[i] *= ptx::fma(-tanh, tanh, 1.0f);
            }
          }
        }
        CF_UNROLL
        for (int i = 0; i < kBatch; ++i) scores[i] = p[i];
      }
      ptx::tcgen05_st<kBatch>(half_column(Layout::kScoreColumn) + begin / 2, packed);
    }
    if constexpr (kKept<kNoWeightsStoreWait>) ptx::tcgen05_wait_st();
    if constexpr (kKept<kNoWeightsFenceBefore>) ptx::tcgen05_fence_before();
    arrive_warp(smem + Layout::kWeightsFull);
  }
  // dP to dS, to tensor memory and to shared memory.
  CF_DEVICE void differentiate(float (&dp)[kQueries], const float (&p)[kQueries], saddr delta_rows,
                               const QueryRange& range, bool partial) const {
    CF_UNROLL
    for (int begin = 0; begin < kQueries; begin += 2 * kBatch) {
      uint32_t packed[kBatch];
      CF_UNROLL
      for (int part = 0; part < 2; ++part) {
        float* ds = dp + begin + part * kBatch;
        CF_UNROLL
        for (int i = 0; i < kBatch; i += 4) {
          float delta[4];
          read_rows(delta, delta_rows, begin + part * kBatch + i);
          CF_UNROLL
          for (int e = 0; e < 4; ++e) {
            ds[i + e] = p[begin + part * kBatch + i + e] * (ds[i + e] - delta[e]);
          }
        }
        // Weights of 0 would do but for NaN in what they hide.
        if (partial) hide(ds, begin + part * kBatch, range);
        pack(packed + part * kBatch / 2, ds);
      }
      ptx::tcgen05_st<kBatch>(half_column(Layout::kProductColumn) + begin / 2, packed);
      CF_UNROLL
      for (int g = 0; g < kBatch / 4; ++g) {
        ptx::sts128(smem + Layout::kScores +
                        ScoreTile::granule_offset(kTileRows, row,
                                                  (half * kQueries + begin) / 8 + g),
                    {packed[4 * g], packed[4 * g + 1], packed[4 * g + 2], packed[4 * g + 3]});
      }
    }
    if constexpr (kKept<kNoGradsStoreWait>) ptx::tcgen05_wait_st();
    if constexpr (kKept<kNoGradsFenceBefore>) ptx::tcgen05_fence_before();
    if constexpr (kKept<kNoGradsProxyFence>) ptx::fence_proxy_async();
    arrive_warp(smem + Layout::kGradsFull);
  }
  CF_DEVICE void load_half(float (&x)[kQueries], int column) const {
    CF_UNROLL
    for (int i = 0; i < kQueries; i += kPieceColumns) {
      ptx::tcgen05_ld<kPieceColumns>(x + i, half_column(column) + i);
    }
  }

  CF_DEVICE void run() const {
    RingPlace<Config::kStages> place;
    RingPlace<Config::kDoutStages> dout_place;
    uint32_t phase = 0;
    CF_NO_UNROLL
    for (QuerySteps step = work.steps(); step.left > 0; step.advance()) {
      const int query_begin = step.m_block * kTileRows;
      const bool partial = work.blocks.is_partial(step.m_block);
      const QueryRange range = visible(query_begin);
      const saddr rows = smem + Layout::kRows + place.stage * 2 * Layout::kRowBytes +
                         half * (Layout::kRowBytes / kHalves);
      // Not left to kScoresFull, which the product thread passed on: TMA's writes are promised to
      // who waits for their own barrier.
      ptx::mbarrier_wait(barrier_at(smem + Layout::kQFull, place.stage), place.phase);
      float p[kQueries];
      if constexpr (kKept<kNoScoresFullWait>) ptx::mbarrier_wait(smem + Layout::kScoresFull, phase);
      if constexpr (kKept<kNoScoresFenceAfter>) ptx::tcgen05_fence_after();
      load_half(p, Layout::kScoreColumn);
      if constexpr (kKept<kNoScoresLoadWait>) ptx::tcgen05_wait_ld();
      ptx::tcgen05_pin(p);
      if (kBounded && partial) {
        clear_rows_without_keys(query_begin, smem + Layout::kQ + place.stage * Layout::kQkBytes,
                                smem + Layout::kDout + dout_place.stage * Layout::kVBytes, phase);
      }
      weigh(p, rows, range, partial);

      float dp[kQueries];
      if constexpr (kKept<kNoProductsFullWait>) {
        ptx::mbarrier_wait(smem + Layout::kProductsFull, phase);
      }
      if constexpr (kKept<kNoProductsFenceAfter>) ptx::tcgen05_fence_after();
      load_half(dp, Layout::kProductColumn);
      if constexpr (kKept<kNoProductsLoadWait>) ptx::tcgen05_wait_ld();
      ptx::tcgen05_pin(dp);
      differentiate(dp, p, rows + Layout::kRowBytes, range, partial);
      place.advance();
      dout_place.advance();
      phase ^= 1;
    }
    if constexpr (kKept<kNoDoneWait>) ptx::mbarrier_wait(smem + Layout::kDone, 0);
    if constexpr (kKept<kNoDoneFenceAfter>) ptx::tcgen05_fence_after();
    const BackwardParams& params = work.params;
    const bool direct = params.float_grads != 0 || params.accumulate != 0;
    if (half == 0) {
      write_grad<VTile>(params.dv, &params.dv_map, smem + Layout::kV, Layout::kValueColumn, 1.0f,
                        params.dv_stride_batch, params.dv_stride_seqlen, params.dv_stride_head,
                        params.head_dim_v, direct);
    } else {
      write_grad<QkTile>(params.dk, &params.dk_map, smem + Layout::kK, Layout::kKeyColumn,
                         params.grad_scale, params.dk_stride_batch, params.dk_stride_seqlen,
                         params.dk_stride_head, params.head_dim_qk, direct);
    }
  }

  // A gradient: 16-bit ones through shared memory, in the place of K or V, and by TMA; others
  // straight from registers.
  template <class Tile>
  CF_DEVICE void write_grad(void* gmem, const CUtensorMap* map, saddr staged, int column,
                            float scale, int64_t stride_batch, int64_t stride_seqlen,
                            int64_t stride_head, int head_dim, bool direct) const {
    const int64_t offset =
        work.array_batch() * stride_batch + work.tile.head_kv * stride_head +
        (work.sequence.kv_begin() + work.key_begin + row) * stride_seqlen;
    const bool exists = work.key_begin + row < work.sequence.seqlen_kv();
    CF_UNROLL
    for (int begin = 0; begin < Tile::kColumns; begin += kPieceColumns) {
      float grad[kPieceColumns];
      ptx::tcgen05_ld<kPieceColumns>(grad, tmem + column + begin);
      if constexpr (kKept<kNoOutputLoadWait>) ptx::tcgen05_wait_ld();
      ptx::tcgen05_pin(grad);
      CF_UNROLL
      for (int i = 0; i < kPieceColumns; ++i) grad[i] *= scale;
      if (direct) {
        CF_UNROLL
        for (int i = 0; i < kPieceColumns; i += 2) {
          if (!exists || begin + i >= head_dim) continue;
          add_or_write_grads<Element>(work.params, gmem, offset + begin + i, grad[i],
                                      grad[i + 1]);
        }
      } else {
        uint32_t packed[kPieceColumns / 2];
        pack(packed, grad);
        pack(packed + kBatch / 2, grad + kBatch);
        CF_UNROLL
        for (int g = 0; g < kPieceColumns / 8; ++g) {
          ptx::sts128(staged + Tile::granule_offset(kTileRows, row, begin / 8 + g),
                      {packed[4 * g], packed[4 * g + 1], packed[4 * g + 2], packed[4 * g + 3]});
        }
      }
    }
    // The last accesses to tensor memory, before the barrier ahead of its return.
    ptx::tcgen05_fence_before();
    if (direct) return;
    if constexpr (kKept<kNoOutputProxyFence>) ptx::fence_proxy_async();
    if constexpr (kKept<kNoOutputBarrier>) {
      ptx::named_barrier_sync(kOutputBarrier + half, kGroupThreads);
    }
    if (row != 0) return;
    const auto rows = work.key_rows();
    CF_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      rows.store(map, staged + c * Tile::chunk_bytes(kTileRows), c * Tile::kChunk, work.key_begin,
                 work.tile.head_kv, work.params.rows_kv);
    }
    ptx::tma_commit();
    if constexpr (kKept<kNoStoreWait>) ptx::tma_wait<0>();
  }
};

// --- dQ (a warpgroup; one query a thread) --------------------------------------------------------

template <class Config>
struct Sums {
  using Layout = BackwardLayout<Config>;
  using Order = DqOrder<Config>;
  static constexpr int kPieces = Config::kHeadDimQk / kPieceColumns;
  static_assert(Order::kUnitRows == kTileRows && Order::kUnitColumns == kPieceColumns &&
                    Order::kVector == 4 && !Order::kTransposed,
                "a unit of dq is a piece, four columns of a thread together");

  const KeyWork<Config>& work;
  saddr smem;
  taddr tmem;  // this warp's lanes
  int row;

  // A piece of the thread's row to the staging slot `slot`, and from there to the sums.
  CF_DEVICE void add(const float (&sums)[kPieceColumns], int slot, float* dst) const {
    const saddr staged = smem + Layout::kStaging + slot * Layout::kStagingBytes;
    if (row == 0) {  // the reduction before the last one has read its slot
      if constexpr (kKept<kNoStagingReadWait>) ptx::tma_wait_read<Layout::kStagingSlots - 1>();
    }
    if constexpr (kKept<kNoStagingFreeBarrier>) {
      ptx::named_barrier_sync(kStagingBarrier, kGroupThreads);
    }
    CF_UNROLL
    for (int i = 0; i < kPieceColumns / 4; ++i) {
      ptx::sts128(staged + static_cast<uint32_t>(16 * (i * kTileRows + row)),
                  {ptx::float_bits(sums[4 * i]), ptx::float_bits(sums[4 * i + 1]),
                   ptx::float_bits(sums[4 * i + 2]), ptx::float_bits(sums[4 * i + 3])});
    }
    if constexpr (kKept<kNoStagingProxyFence>) ptx::fence_proxy_async();
    if constexpr (kKept<kNoStagingFullBarrier>) {
      ptx::named_barrier_sync(kStagingBarrier, kGroupThreads);
    }
    if (row == 0) {
      ptx::bulk_reduce_add_f32(dst, staged, Layout::kStagingBytes);
      ptx::tma_commit();
    }
  }

  CF_DEVICE void run() const {
    const BackwardParams& params = work.params;
    uint32_t phase = 0;
    int slot = 0;
    CF_NO_UNROLL
    for (QuerySteps step = work.steps(); step.left > 0; step.advance()) {
      const int64_t query_slot = work.slot_of(step);
      float* dst = params.dq_sums + query_slot * (kTileRows * Config::kHeadDimQk);
      if constexpr (kKept<kNoSumsFullWait>) ptx::mbarrier_wait(smem + Layout::kSumsFull, phase);
      phase ^= 1;
      if constexpr (kKept<kNoSumsFenceAfter>) ptx::tcgen05_fence_after();
      if (row == 0 && params.dq_turns != nullptr) {
        const int turn = turn_of<typename Config::Mask, kTileRows, kTileRows>(
            work.sequence, step.m_block, work.tile.n_block);
        if constexpr (kKept<kNoTurnWait>) {
          while (ptx::ldg_acquire(params.dq_turns + query_slot) != turn) {
          }
        }
      }
      CF_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        float sums[kPieceColumns];
        ptx::tcgen05_ld<kPieceColumns>(sums,
                                       tmem + Layout::kProductColumn + piece * kPieceColumns);
        if constexpr (kKept<kNoSumsLoadWait>) ptx::tcgen05_wait_ld();
        ptx::tcgen05_pin(sums);
        if (piece == kPieces - 1) {
          if constexpr (kKept<kNoSumsFenceBefore>) ptx::tcgen05_fence_before();
          arrive_warp(smem + Layout::kSumsEmpty);
        }
        add(sums, slot, dst + piece * Order::kUnitFloats);
        slot ^= 1;
      }
      if (row == 0 && params.dq_turns != nullptr) {
        if constexpr (kKept<kNoTurnAddedWait>) ptx::tma_wait<0>();
        ptx::red_add_release(params.dq_turns + query_slot, 1);
      }
    }
    if (row == 0) ptx::tma_wait<0>();
  }
};

// --- the kernel ----------------------------------------------------------------------------------

template <class Config>
CF_DEVICE void initialize_barriers(saddr smem) {
  using Layout = BackwardLayout<Config>;
  ptx::mbarrier_init(smem + Layout::kKFull, 1);
  ptx::mbarrier_init(smem + Layout::kVFull, 1);
  for (int i = 0; i < Config::kStages; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kQFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kQEmpty, i), 1);
  }
  for (int i = 0; i < Config::kDoutStages; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kDoutFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kDoutEmpty, i), 1);
  }
  ptx::mbarrier_init(smem + Layout::kScoresFull, 1);
  ptx::mbarrier_init(smem + Layout::kProductsFull, 1);
  ptx::mbarrier_init(smem + Layout::kWeightsFull, kWeightsWarps);
  ptx::mbarrier_init(smem + Layout::kGradsFull, kWeightsWarps);
  ptx::mbarrier_init(smem + Layout::kSumsFull, 1);
  ptx::mbarrier_init(smem + Layout::kSumsEmpty, kGroupWarps);
  ptx::mbarrier_init(smem + Layout::kDone, 1);
  if constexpr (kKept<kNoInitFence>) ptx::fence_mbarrier_init();
}

// This CTA's share of the rows of no sequence, by one warp.
template <class Config>
CF_DEVICE void write_padding_share(const BackwardParams& params) {
  if constexpr (Config::kGeneral != 0) {
    const int workers = min(ptx::num_ctas(), kGradPaddingWorkers);
    if (ptx::cta_idx() < workers) {
      write_grad_padding<typename Config::Element>(params, ptx::cta_idx(), workers);
    }
  }
}

// A tile of keys that queries see.
template <class Config>
CF_DEVICE void run_tile(const KeyWork<Config>& work, saddr smem) {
  using Layout = BackwardLayout<Config>;
  const BackwardParams& params = work.params;
  const int warp = ptx::warp_uniform(ptx::warp());
  if (warp == kProductWarp) {
    ptx::tcgen05_alloc<kTmemColumns>(smem + Layout::kTmemAddress);
    ptx::tcgen05_relinquish_alloc_permit();
  } else if (warp == kLoadWarp && ptx::elect_one()) {
    initialize_barriers<Config>(smem);
  }
  ptx::warp_sync();
  if constexpr (kKept<kNoFirstBarrier>) ptx::cta_sync();
  const taddr tmem = ptx::lds32(smem + Layout::kTmemAddress);
  const taddr lanes = tmem + (static_cast<taddr>(warp % kGroupWarps * 32) << 16);
  const int row = ptx::tid() % kGroupThreads;

  if (warp < kWeightsWarp) {
    ptx::setmaxnreg_dec<kSumsRegisters>();
    Sums<Config>{work, smem, lanes, row}.run();
  } else if (warp < kProductWarp) {
    ptx::setmaxnreg_inc<kWeightsRegisters>();
    Weights<Config>{work, smem, lanes, (warp - kWeightsWarp) / kGroupWarps, row}.run();
  } else {
    ptx::setmaxnreg_dec<kOtherRegisters>();
    if (warp == kProductWarp) {
      const int steps = work.steps().left;
      if (ptx::elect_one()) Products<Config>{smem, tmem}.run(steps);
    } else if (warp == kLoadWarp) {
      if (ptx::elect_one()) Loads<Config>{work, smem}.run();
    } else if (warp == kPaddingWarp) {
      write_padding_share<Config>(params);
    }
    ptx::warp_sync();
  }

  // Nobody touches tensor memory any more; the last accesses of every role were fenced.
  if constexpr (kKept<kNoFinalBarrier>) ptx::cta_sync();
  if constexpr (kKept<kNoFinalFenceAfter>) ptx::tcgen05_fence_after();
  if (warp == kProductWarp) ptx::tcgen05_dealloc<kTmemColumns>(tmem);
}

// The body of the kernel. One tile a CTA: tensor memory and shared memory hold no more.
template <class Config>
CF_DEVICE void backward(const BackwardParams& params) {
  static_assert(is_same<typename Config::Scheduler, SingleTile>);
  KeyTile tile{-1, 0, 0};
  if (ptx::cta_idx() < params.num_tiles) {
    tile = decode_key_tile<Config, typename Config::Mask>(params, ptx::cta_idx());
  }
  if (tile.n_block >= 0) {
    const KeyWork<Config> work(params, tile);
    const int keys = work.sequence.seqlen_kv();
    if (work.key_begin < keys && work.blocks.count() > 0) {
      run_tile<Config>(work, ptx::smem_base());
      return;
    }
    // Keys that no query sees, rows by warps; behind the last key: write_padding_share.
    constexpr int kWarpRows = kTileRows / (Config::kThreads / 32);
    const int begin = work.key_begin + ptx::warp() * kWarpRows;
    const int end = min(begin + kWarpRows, keys);
    write_zero_grads<typename Config::Element>(params, work.array_batch(), tile.head_kv,
                                               work.sequence.kv_begin() + begin,
                                               work.sequence.kv_begin() + end);
  }
  if (ptx::warp() == 0) write_padding_share<Config>(params);
}

}  // namespace cf::sm100
