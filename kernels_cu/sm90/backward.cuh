// Backward attention for Hopper (sm_90a): dq, dk and dv from dout, by recomputing the probabilities
// from the log-sum-exp. Head dimensions up to 128; wider ones: sm80/backward.cuh.
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
#include "attn/grad_padding.cuh"
#include "attn/grads.cuh"
#include "attn/query_blocks.cuh"
#include "attn/query_slots.cuh"
#include "attn/ragged.cuh"
#include "attn/softcap.cuh"
#include "backward_params.cuh"
#include "ptx/ptx.cuh"
#include "tile/layout.cuh"
#include "tile/pipeline.cuh"

namespace cf::sm90 {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;

// Named barriers (0 is the CTA's).
inline constexpr int kScoresBarrier = 1;    // dS of a step is in shared memory: all consumers
inline constexpr int kEpilogueBarrier = 2;  // + w: the threads of consumer warpgroup w

// One synchronisation taken out each: every one of them must be caught by the emulator.
inline constexpr int kBackwardMutants = 19;
enum BackwardMutant {
  kNoKFullWait = 1,
  kNoVFullWait,
  kNoQFullWait,
  kNoDoutFullWait,
  kNoQEmptyWait,
  kNoKvEmptyWait,
  kNoProductWait,
  kEarlyQRelease,
  kNoScoresFence,
  kNoScoresBarrier,
  kNoSumsFence,
  kNoSumsFullWait,
  kNoSumsEmptyWait,
  kEarlySumsRelease,
  kNoOutputFence,
  kNoOutputBarrier,
  kNoOutputReadWait,
  kNoTileFullWait,
  kNoTileEmptyWait,
};
template <BackwardMutant kId>
inline constexpr bool kKept = ptx::kMutant != kId;

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

// A whole warp waits where one lane goes on to do something: none may still be waiting when the
// phase after the next, of the same parity, has begun.
CF_DEVICE void await_as_warp(saddr barrier, uint32_t parity) {
  ptx::mbarrier_wait(barrier, parity);
  ptx::warp_sync();
}

// --- tiles --------------------------------------------------------------------------------------

// A tile of this CTA's stream in shared memory, as the scheduler described it. Members are read
// where they are needed rather than kept in registers.
template <class Config>
struct TileSlot {
  saddr words;

  CF_DEVICE int word(int i) const { return static_cast<int>(ptx::lds32(words + 4u * i)); }
  // Query blocks that are visited of each query head, at least 1; -1: the stream ends.
  CF_DEVICE int count() const { return word(0); }
  CF_DEVICE int first() const { return word(1); }  // the block with the smallest index
  CF_DEVICE int start() const { return word(2); }  // how far behind it the walk starts
  CF_DEVICE int key_begin() const { return word(3); }  // within the sequence
  CF_DEVICE int head_kv() const { return word(4); }
  CF_DEVICE int batch() const { return word(5); }       // index into the arrays
  CF_DEVICE int first_slot() const { return word(6); }  // of the sequence's queries
  CF_DEVICE int full_begin() const { return word(7); }  // QueryBlocks
  CF_DEVICE int full_end() const { return word(8); }

  // General kernels: the members of a Sequence.
  CF_DEVICE int q_begin() const { return word(9); }
  CF_DEVICE int kv_begin() const { return word(10); }
  CF_DEVICE int seqlen_q() const { return word(11); }
  CF_DEVICE int seqlen_kv() const { return word(12); }
  CF_DEVICE int left() const { return word(13); }
  CF_DEVICE int right() const { return word(14); }

  CF_DEVICE auto sequence(const BackwardParams& params) const {
    if constexpr (Config::kGeneral != 0) {
      return *this;
    } else {
      return FixedSequence<BackwardParams>{params, 0};
    }
  }

  template <class Blocks, class Sequence>
  CF_DEVICE void describe(const Blocks& blocks, int start, int key_begin, int head_kv, int batch,
                          int first_slot, const Sequence& sequence) const {
    const auto u = [](int x) { return static_cast<uint32_t>(x); };
    ptx::sts128(words, {u(blocks.count()), u(blocks.first), u(start), u(key_begin)});
    ptx::sts128(words + 16, {u(head_kv), u(batch), u(first_slot), u(blocks.full_begin)});
    ptx::sts128(words + 32, {u(blocks.full_end), u(sequence.q_begin()), u(sequence.kv_begin()),
                             u(sequence.seqlen_q())});
    if constexpr (Config::kGeneral != 0) {
      ptx::sts128(words + 48,
                  {u(sequence.seqlen_kv()), u(sequence.left()), u(sequence.right()), 0});
    }
  }
};

// The place of a role in the stream of tiles.
template <class Config>
struct TileStream {
  using Layout = BackwardLayout<Config>;
  saddr smem;
  RingPlace<Layout::kTileSlots> place;

  CF_DEVICE TileSlot<Config> slot() const {
    return {smem + static_cast<uint32_t>(Layout::kTiles + place.stage * Layout::kTileBytes)};
  }
  CF_DEVICE TileSlot<Config> await() const {
    if constexpr (kKept<kNoTileFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kTileFull, place.stage), place.phase);
    }
    return slot();
  }
  // Called by one thread whose role no longer reads the tile.
  CF_DEVICE void release() const {
    ptx::mbarrier_arrive(barrier_at(smem + Layout::kTileEmpty, place.stage));
  }
};

// The steps of a tile: the query blocks of the first query head of the group, of the second, ...
struct Steps {
  int count, first;
  int head;     // query head
  int m_block;  // of the step
  int left;     // steps that are still to come, with this one

  CF_DEVICE Steps(int count, int first, int start, int first_head, int heads)
      : count(count), first(first), head(first_head), m_block(first + start), left(count * heads),
        left_of_head(count) {}
  CF_DEVICE void advance() {
    --left;
    if (++m_block == first + count) m_block = first;
    if (--left_of_head == 0) {
      left_of_head = count;
      ++head;
    }
  }

 private:
  int left_of_head;
};
template <class Config>
CF_DEVICE Steps steps_of(const BackwardParams& params, const TileSlot<Config>& tile) {
  return {ptx::warp_uniform(tile.count()), ptx::warp_uniform(tile.first()),
          ptx::warp_uniform(tile.start()), ptx::warp_uniform(tile.head_kv()) * params.group,
          params.group};
}

// --- scheduler ----------------------------------------------------------------------------------

// One warp: deals out this CTA's tiles: the first by position, then whichever is next (or, without
// a counter, every so many). With turns all are claimed: a tile waits for tiles of smaller numbers,
// which have then been taken by CTAs that run, whatever else keeps the GPU busy.
template <class Config>
struct Scheduler {
  using Layout = BackwardLayout<Config>;
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using Sequence = typename SequenceOf<Config::kGeneral != 0, BackwardParams>::Type;

  const BackwardParams& params;
  TileStream<Config> stream;

  CF_DEVICE int claim(bool leaves_zero) const {
    int claimed = 0;
    if (ptx::lane() == 0) {
      claimed = ptx::atomic_add(params.tile_counter, 1);
      // Every CTA makes one claim in vain; the last one leaves the counter at 0.
      if (leaves_zero && claimed == params.num_tiles - 1) ptx::stg32(params.tile_counter, 0);
    }
    return static_cast<int>(ptx::shfl_idx(static_cast<uint32_t>(claimed), 0));
  }
  CF_DEVICE int first_tile() const {
    return params.dq_turns != nullptr ? claim(false) : ptx::cta_idx();
  }
  CF_DEVICE int next_tile(int tile) const {
    if (params.dq_turns != nullptr) return claim(false);
    if (params.tile_counter == nullptr) return tile + ptx::num_ctas();
    return claim(true) + ptx::num_ctas();
  }

  CF_DEVICE void run() {
    CF_NO_UNROLL
    for (int tile = first_tile();; tile = next_tile(tile)) {
      if constexpr (kKept<kNoTileEmptyWait>) {
        await_as_warp(barrier_at(stream.smem + Layout::kTileEmpty, stream.place.stage),
                      stream.place.phase ^ 1);
      }
      if (tile >= params.num_tiles) break;
      const KeyTile work = decode_key_tile<Config, Mask>(params, tile);
      if (work.n_block >= 0) deal(work);
    }
    if (ptx::lane() == 0) ptx::sts32(stream.slot().words, ~0u);  // count -1
    end_slot();
    if constexpr (Config::kGeneral != 0) {
      write_grad_padding<Element>(params, ptx::cta_idx(), ptx::num_ctas());
    }
  }
  CF_DEVICE void deal(const KeyTile& work) {
    const Sequence sequence{params, work.batch};
    const int key_begin = work.n_block * Config::kBlockN;
    if (key_begin >= sequence.seqlen_kv()) return;  // seqused_kv: write_grad_padding
    const QueryBlocks<Mask, Config::kBlockM, Config::kBlockN> blocks(sequence, key_begin);
    // Packed sequences share one batch of the arrays.
    const int array_batch = params.cu_seqlens_kv != nullptr ? 0 : work.batch;
    if (blocks.count() <= 0) {
      const int end = min(key_begin + Config::kBlockN, sequence.seqlen_kv());
      write_zero_grads<Element>(params, array_batch, work.head_kv,
                                sequence.kv_begin() + key_begin, sequence.kv_begin() + end);
      return;
    }
    // The key blocks of a head start at different query blocks, so that they do not all add to the
    // same rows of dq at a time. (Under a right-bounded mask their first ones differ anyway.)
    int start = 0;
    if (!Mask::kHasRight && params.dq_turns == nullptr) {
      start = static_cast<int>(static_cast<int64_t>(key_begin) * blocks.count() /
                               sequence.seqlen_kv());
    }
    if (ptx::lane() == 0) {
      stream.slot().describe(blocks, start, key_begin, work.head_kv, array_batch,
                             query_slot(params, work.batch, 0, Config::kBlockM), sequence);
    }
    end_slot();
  }
  CF_DEVICE void end_slot() {
    if (ptx::lane() == 0) {
      ptx::mbarrier_arrive(barrier_at(stream.smem + Layout::kTileFull, stream.place.stage));
    }
    stream.place.advance();
  }
};

// --- producer -----------------------------------------------------------------------------------

// One warp: keys and values of every tile, queries and output gradients of every step, each with
// its rows of lse or delta.
template <class Config>
struct Producer {
  using Layout = BackwardLayout<Config>;
  using QkTile = typename Layout::QkTile;
  using VTile = typename Layout::VTile;
  static constexpr bool kGeneral = Config::kGeneral != 0;

  const BackwardParams& params;
  const saddr smem;
  const bool elected;  // the whole warp walks the stream (its state is uniform), one thread issues
  TileStream<Config> stream;
  RingPlace<1> kv_place;
  RingPlace<Config::kStages> place;

  // Rows of an array that tiles are taken from, with what its tensor map needs to know.
  struct Source {
    const CUtensorMap* map;
    int batch_rows;
    TileRows<kGeneral> rows;
  };

  template <class Tile>
  CF_DEVICE void load(saddr dst, saddr full, const Source& source, int tile_rows, int row,
                      int head, uint64_t policy) const {
    CF_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      source.rows.load(dst + c * Tile::chunk_bytes(tile_rows), source.map, full, c * Tile::kChunk,
                       row, head, source.batch_rows, policy);
    }
  }
  CF_DEVICE void load_keys(const Source& source, const TileSlot<Config>& tile) {
    if constexpr (kKept<kNoKvEmptyWait>) {
      await_as_warp(smem + Layout::kKvEmpty, kv_place.phase ^ 1);
    }
    if (!elected) return;
    ptx::mbarrier_arrive_expect_tx(smem + Layout::kKFull, Layout::kKBytes);
    load<QkTile>(smem + Layout::kK, smem + Layout::kKFull, source, Config::kBlockN,
                 tile.key_begin(), tile.head_kv(), ptx::kEvictFirst);
  }
  CF_DEVICE void load_values(const Source& source, const TileSlot<Config>& tile) {
    if (elected) {
      ptx::mbarrier_arrive_expect_tx(smem + Layout::kVFull, Layout::kVBytes);
      load<VTile>(smem + Layout::kV, smem + Layout::kVFull, source, Config::kBlockN,
                  tile.key_begin(), tile.head_kv(), ptx::kEvictFirst);
    }
    kv_place.advance();
  }
  CF_DEVICE saddr rows_smem(int which) const {
    return smem + static_cast<uint32_t>(Layout::kRows +
                                        (2 * place.stage + which) * Layout::kRowBytes);
  }
  CF_DEVICE int64_t row_of(const Steps& step, int first_slot) const {
    return (static_cast<int64_t>(step.head) * params.num_slots + first_slot + step.m_block) *
           Config::kBlockM;
  }
  CF_DEVICE void load_queries(const Source& source, const Steps& step, int first_slot) {
    const saddr full = barrier_at(smem + Layout::kQFull, place.stage);
    if constexpr (kKept<kNoQEmptyWait>) {
      await_as_warp(barrier_at(smem + Layout::kQEmpty, place.stage), place.phase ^ 1);
    }
    if (!elected) return;
    ptx::mbarrier_arrive_expect_tx(full, Layout::kQBytes + Layout::kRowBytes);
    load<QkTile>(smem + Layout::kQ + place.stage * Layout::kQBytes, full, source, Config::kBlockM,
                 step.m_block * Config::kBlockM, step.head, ptx::kEvictLast);
    ptx::bulk_load(rows_smem(0), params.row_lse + row_of(step, first_slot), Layout::kRowBytes,
                   full);
  }
  // Behind load_queries, which has waited until the slot of both is free.
  CF_DEVICE void load_dout(const Source& source, const Steps& step, int first_slot) {
    const saddr full = barrier_at(smem + Layout::kDoutFull, place.stage);
    if (!elected) return;
    ptx::mbarrier_arrive_expect_tx(full, Layout::kDoutBytes + Layout::kRowBytes);
    load<VTile>(smem + Layout::kDout + place.stage * Layout::kDoutBytes, full, source,
                Config::kBlockM, step.m_block * Config::kBlockM, step.head, ptx::kEvictLast);
    ptx::bulk_load(rows_smem(1), params.row_delta + row_of(step, first_slot), Layout::kRowBytes,
                   full);
  }

  CF_DEVICE void run() {
    for (;;) {
      const TileSlot<Config> tile = stream.await();
      const int count = ptx::warp_uniform(tile.count());
      if (count < 0) break;
      TileRows<kGeneral> rows_q{0, 0, ptx::warp_uniform(tile.batch())};
      TileRows<kGeneral> rows_kv = rows_q;
      if constexpr (kGeneral) {
        rows_q.begin = ptx::warp_uniform(tile.q_begin());
        rows_q.length = ptx::warp_uniform(tile.seqlen_q());
        rows_kv.begin = ptx::warp_uniform(tile.kv_begin());
        rows_kv.length = ptx::warp_uniform(tile.seqlen_kv());
      }
      const int first_slot = ptx::warp_uniform(tile.first_slot());
      bool first = true;
      CF_NO_UNROLL
      for (Steps step = steps_of(params, tile); step.left > 0; step.advance()) {
        if (first) load_keys({&params.k_map, params.k_batch_rows, rows_kv}, tile);
        load_queries({&params.q_map, params.q_batch_rows, rows_q}, step, first_slot);
        if (first) load_values({&params.v_map, params.v_batch_rows, rows_kv}, tile);
        load_dout({&params.dout_map, params.dout_batch_rows, rows_q}, step, first_slot);
        place.advance();
        first = false;
      }
      ptx::warp_sync();  // all lanes have read the tile
      if (ptx::lane() == 0) stream.release();
      stream.place.advance();
    }
  }
};

// --- writer -------------------------------------------------------------------------------------

// One warp: adds each warpgroup's part of dQ to its slot, a bulk reduction each. With turns, waits
// for this key block's, and passes it on once both parts have been added.
template <class Config>
struct Writer {
  using Layout = BackwardLayout<Config>;

  const BackwardParams& params;
  const saddr smem;
  TileStream<Config> stream;
  RingPlace<1> place;  // of both parts

  CF_DEVICE saddr part(int w) const {
    return smem + static_cast<uint32_t>(Layout::kSums + w * Layout::kPartBytes);
  }
  CF_DEVICE void release(int w) const {
    ptx::mbarrier_arrive(barrier_at(smem + Layout::kSumsEmpty, w));
  }

  CF_DEVICE void run() {
    for (;;) {
      const TileSlot<Config> tile = stream.await();
      const int count = ptx::warp_uniform(tile.count());
      if (count < 0) break;
      // The slot of the tile's first query block, of the query head at hand.
      int slot = ptx::warp_uniform(tile.head_kv()) * params.group * params.num_slots +
                 ptx::warp_uniform(tile.first_slot()) + ptx::warp_uniform(tile.first());
      CF_NO_UNROLL
      for (int head = 0; head < params.group; ++head, slot += params.num_slots) {
        int block = ptx::warp_uniform(tile.start());
        CF_NO_UNROLL
        for (int left = count; left > 0; --left) {
          add(slot + block, block, tile);
          place.advance();
          if (++block == count) block = 0;
        }
      }
      ptx::warp_sync();  // all lanes have read the tile
      if (ptx::lane() == 0) stream.release();
      stream.place.advance();
    }
    if (ptx::lane() == 0) ptx::tma_wait<0>();
  }
  // Both parts to a slot, that of the tile's query block `block`.
  CF_DEVICE void add(int slot, int block, const TileSlot<Config>& tile) const {
    const bool elected = ptx::lane() == 0;
    if (elected && params.dq_turns != nullptr) {
      const int turn = turn_of<typename Config::Mask, Config::kBlockM, Config::kBlockN>(
          tile.sequence(params), tile.first() + block, tile.key_begin() / Config::kBlockN);
      while (ptx::ldg_acquire(params.dq_turns + slot) != turn) {
      }
    }
    CF_UNROLL
    for (int w = 0; w < kConsumers; ++w) {
      if constexpr (kKept<kNoSumsFullWait>) {
        await_as_warp(barrier_at(smem + Layout::kSumsFull, w), place.phase);
      }
      if (!elected) continue;
      constexpr int kSlotFloats = Config::kBlockM * Config::kHeadDimQk;
      const int64_t offset =
          static_cast<int64_t>(slot) * kSlotFloats + w * (Layout::kPartBytes / 4);
      ptx::bulk_reduce_add_f32(params.dq_sums + offset, part(w),
                               static_cast<uint32_t>(Layout::part_bytes(w)));
      ptx::tma_commit();
      if constexpr (!kKept<kEarlySumsRelease>) release(w);
    }
    if (!elected) return;
    if (params.dq_turns != nullptr) {
      ptx::tma_wait<0>();
      ptx::red_add_release(params.dq_turns + slot, 1);
    }
    if constexpr (kKept<kEarlySumsRelease>) {
      ptx::tma_wait_read<1>();
      release(0);
      ptx::tma_wait_read<0>();
      release(1);
    }
  }
};

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

  // S^T = K Q^T or dP^T = V dO^T: this warpgroup's 64 rows of A, both operands along their columns;
  // one commit group.
  template <class Tile>
  CF_DEVICE void issue_outer(Scores& s, saddr a_tile, saddr b_tile) const {
    using Operand = Descriptor<Tile>;
    const uint32_t a = Operand::k_major(a_tile + warpgroup * Tile::chunk_bytes(kWarpgroupRows));
    const uint32_t b = Operand::k_major(b_tile);
    ptx::wgmma_pin(s);
    ptx::wgmma_fence();
    CF_UNROLL
    for (int step = 0; step < Tile::kColumns / 16; ++step) {
      ptx::wgmma_ss<Element, kBlockM, Operand::kHigh, Operand::kHigh, 0>(
          s, a + Operand::k_step(kBlockN, step), b + Operand::k_step(kBlockM, step), step > 0);
    }
    ptx::wgmma_commit();
  }
  // dV += P^T dO or dK += dS^T Q: A from registers, B along its rows; one commit group.
  template <class Tile>
  CF_DEVICE void issue_inner(float (&grad)[Tile::kColumns / 2], const Packed& a, saddr b_tile,
                             bool accumulate) const {
    using Operand = Descriptor<Tile>;
    const uint32_t b = Operand::mn_major(b_tile, kBlockM);
    ptx::wgmma_pin(grad);
    ptx::wgmma_fence();
    CF_UNROLL
    for (int step = 0; step < kStepsM; ++step) {
      ptx::wgmma_rs<Element, Tile::kColumns, Operand::kHigh, 1>(
          grad, a[step], b + Operand::mn_step(step), accumulate || step > 0);
    }
    ptx::wgmma_commit();
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
  // Waits until at most kPending groups of products are under way; `result` is then complete.
  template <int kPending, int kCount>
  CF_DEVICE static void await_products(float (&result)[kCount]) {
    if constexpr (kKept<kNoProductWait>) ptx::wgmma_wait<kPending>();
    ptx::wgmma_pin(result);
  }

  // --- weights

  // Of the rows of the step at `place`, this thread's in columns 8 j, 8 j + 1 further on.
  CF_DEVICE void read_rows(float (&values)[2], int which, int j) const {
    const u32x2 pair = ptx::lds64(
        smem + static_cast<uint32_t>(Layout::kRows + (2 * place.stage + which) * Layout::kRowBytes +
                                     32 * j + 8 * (ptx::lane() & 3)));
    values[0] = ptx::bits_float(pair.x);
    values[1] = ptx::bits_float(pair.y);
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
  CF_DEVICE static void pack(Packed& packed, const Scores& s) {
    CF_UNROLL
    for (int i = 0; i < kBlockM / 4; ++i) {
      packed[i / 4][i % 4] = ptx::pack2<Element>(s[2 * i], s[2 * i + 1]);
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

  // This warpgroup's part of dQ to the writer, in the order of DqOrder: units of its accumulators.
  template <int kColumns>
  CF_DEVICE void hand_over_sums(const float (&sums)[kColumns / 2]) const {
    if constexpr (kKept<kNoSumsEmptyWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kSumsEmpty, warpgroup), sums_place.phase ^ 1);
    }
    const saddr part = smem + static_cast<uint32_t>(
        Layout::kSums + warpgroup * Layout::kPartBytes +
        16 * (ptx::tid() % kWarpgroupThreads));
    CF_UNROLL
    for (int i = 0; i < kColumns / 8; ++i) {
      ptx::sts128(part + 16 * kWarpgroupThreads * i,
                  {ptx::float_bits(sums[4 * i]), ptx::float_bits(sums[4 * i + 1]),
                   ptx::float_bits(sums[4 * i + 2]), ptx::float_bits(sums[4 * i + 3])});
    }
    if constexpr (kKept<kNoSumsFence>) ptx::fence_proxy_async();
    ptx::warp_sync();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(barrier_at(smem + Layout::kSumsFull, warpgroup));
  }

  // From dS in shared memory on: the products that end a step.
  template <int kColumns>
  CF_DEVICE void finish_step(GradK& dk, GradV& dv, const Packed& ds, bool accumulate) {
    float sums[kColumns / 2];
    issue_sums<kColumns>(sums);
    await_products<1>(dv);
    issue_inner<QkTile>(dk, ds, q_tile(), accumulate);
    await_products<1>(sums);
    hand_over_sums<kColumns>(sums);
    sums_place.advance();
    if constexpr (!kKept<kEarlyQRelease>) release_q();
    await_products<0>(dk);
    if constexpr (kKept<kEarlyQRelease>) release_q();
  }
  CF_DEVICE void release_q() const {
    if (leader) ptx::mbarrier_arrive(barrier_at(smem + Layout::kQEmpty, place.stage));
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
    issue_outer<QkTile>(s, smem + Layout::kK, q_tile());
    if constexpr (kKept<kNoDoutFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kDoutFull, place.stage), place.phase);
    }
    issue_outer<VTile>(dp, smem + Layout::kV, dout_tile());
    const bool partial = is_partial(tile, m_block);
    await_products<1>(s);
    const int query_begin = m_block * kBlockM;
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
      pack(p, s);
      differentiate(dp, s);
    }
    // Weights of 0 would do but for NaN in what they hide.
    if (kBounded && partial) mask(dp, tile, query_begin);
    pack(ds, dp);
    if (!kBounded && partial) drop_absent_keys(ds, tile);
    store_scores(ds);
    issue_inner<VTile>(dv, p, dout_tile(), accumulate);
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
        for (Steps steps = steps_of(params, tile); steps.left > 0; steps.advance()) {
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
      stage<QkTile>(smem + Layout::kK, dk);
      stage<VTile>(smem + Layout::kV, dv);
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
  CF_DEVICE void stage(saddr tile_smem, const float (&grad)[Tile::kColumns / 2]) const {
    const int lane = ptx::lane();
    const int row = warpgroup * kWarpgroupRows + 16 * (ptx::warp() % 4) + (lane & 15);
    CF_UNROLL
    for (int j = 0; j < Tile::kColumns / 16; ++j) {
      uint32_t r[4];
      CF_UNROLL
      for (int m = 0; m < 4; ++m) {
        r[m] = ptx::pack2<Element>(grad[8 * j + 2 * m], grad[8 * j + 2 * m + 1]);
      }
      ptx::stmatrix_x4(tile_smem + Tile::granule_offset(kBlockN, row, 2 * j + (lane >> 4)), r[0],
                       r[1], r[2], r[3]);
    }
  }
  template <class Tile>
  CF_DEVICE void store(const CUtensorMap* map, saddr tile_smem,
                       const TileSlot<Config>& tile) const {
    const auto sequence = tile.sequence(params);
    const int row = tile.key_begin() + warpgroup * kWarpgroupRows;
    if (row >= sequence.seqlen_kv()) return;
    const TileRows<kGeneral> rows{sequence.kv_begin(), sequence.seqlen_kv(), tile.batch()};
    CF_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      rows.store(map,
                 tile_smem + c * Tile::chunk_bytes(kBlockN) +
                     warpgroup * Tile::chunk_bytes(kWarpgroupRows),
                 c * Tile::kChunk, row, tile.head_kv(), params.rows_kv);
    }
  }
  template <int kWidth>
  CF_DEVICE void write_directly(const float (&grad)[kWidth / 2], const TileSlot<Config>& tile,
                                void* gmem, int64_t stride_batch, int64_t stride_seqlen,
                                int64_t stride_head, int head_dim) const {
    const auto sequence = tile.sequence(params);
    const int key = first_key(tile);
    const int64_t offset = tile.batch() * stride_batch + tile.head_kv() * stride_head +
                           (sequence.kv_begin() + key) * stride_seqlen + 2 * (ptx::lane() & 3);
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (key + 8 * r >= sequence.seqlen_kv()) continue;
      CF_UNROLL
      for (int j = 0; j < kWidth / 8; ++j) {
        if (8 * j >= head_dim) continue;
        add_or_write_grads<Element>(params, gmem, offset + 8 * r * stride_seqlen + 8 * j,
                                    grad[4 * j + 2 * r], grad[4 * j + 2 * r + 1]);
      }
    }
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
