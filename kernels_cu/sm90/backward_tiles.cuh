// What the backward kernels for Hopper share: the stream of key tiles and its steps, the warps that
// deal them out and load them, products of a warpgroup's 64 rows, and gradients on their way out.
// backward.cuh has the algorithm and the pipeline; a kernel's BackwardLayout says where things lie.
#pragma once
#include "attn/grad_padding.cuh"
#include "attn/grads.cuh"
#include "attn/query_blocks.cuh"
#include "attn/query_slots.cuh"
#include "attn/ragged.cuh"
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
inline constexpr int kClearedBarrier = 4;   // rows without keys have been cleared: all consumers

// One synchronisation taken out each: every one of them must be caught by the emulator, in the
// kernels that have it.
inline constexpr int kBackwardMutants = 28;
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
  // backward_keys.cuh, backward_queries.cuh
  kNoWeightsFullWait,
  kNoWeightsEmptyWait,
  kNoKEmptyWait,
  kNoVEmptyWait,
  kEarlyKRelease,
  kEarlyVRelease,
  kNoEpilogueBarrier,
  kNoClearedFence,
  kNoClearedBarrier,
};
template <BackwardMutant kId>
inline constexpr bool kKept = ptx::kMutant != kId;

// Of each kernel file: the map of shared memory.
template <class Config>
struct BackwardLayout;

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

template <class Config>
CF_DEVICE QuerySteps steps_of(const BackwardParams& params, const TileSlot<Config>& tile) {
  const int first = ptx::warp_uniform(tile.first());
  return {first, first + ptx::warp_uniform(tile.count()), ptx::warp_uniform(tile.start()),
          ptx::warp_uniform(tile.head_kv()) * params.group, params.group};
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
  CF_DEVICE int64_t row_of(const QuerySteps& step, int first_slot) const {
    return (static_cast<int64_t>(step.head) * params.num_slots + first_slot + step.m_block) *
           Config::kBlockM;
  }
  CF_DEVICE void load_queries(const Source& source, const QuerySteps& step, int first_slot) {
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
  CF_DEVICE void load_dout(const Source& source, const QuerySteps& step, int first_slot) {
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
      for (QuerySteps step = steps_of(params, tile); step.left > 0; step.advance()) {
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

// --- rows without weights ------------------------------------------------------------------------

// Zeros in place of the rows of a tile of kRows that are not in `kept`, by all consumers.
template <class Tile, int kRows>
CF_DEVICE void clear_other_rows(saddr tile, const QueryRange& kept) {
  constexpr int kWarps = kConsumerThreads / 32;
  CF_NO_UNROLL
  for (int row = ptx::warp() % kWarps; row < kRows; row += kWarps) {
    if (row >= kept.first && row < kept.end) continue;
    if (ptx::lane() < Tile::kColumns / 8) {
      ptx::sts128(tile + Tile::granule_offset(kRows, row, ptx::lane()), u32x4{0, 0, 0, 0});
    }
  }
}
// Clears the rows of Q and dO, both loaded, of queries that see no key, if the block from
// `query_begin` on has any: what they hold may be anything, and so may 0 times it. By all
// consumers, before any of them multiplies with the tiles. `await_dout()` waits for dO.
template <class Config, class Sequence, class Await>
CF_DEVICE void clear_rows_without_keys(const Sequence& sequence, int query_begin, saddr q_tile,
                                       saddr dout_tile, const Await& await_dout) {
  using Layout = BackwardLayout<Config>;
  const QueryRange kept =
      queries_with_keys<typename Config::Mask, Config::kBlockM>(sequence, query_begin);
  if (ptx::warp_uniform(kept.first <= 0 && kept.end >= Config::kBlockM) != 0) return;
  await_dout();
  clear_other_rows<typename Layout::QkTile, Config::kBlockM>(q_tile, kept);
  clear_other_rows<typename Layout::VTile, Config::kBlockM>(dout_tile, kept);
  if constexpr (kKept<kNoClearedFence>) ptx::fence_proxy_async();
  if constexpr (kKept<kNoClearedBarrier>) {
    ptx::named_barrier_sync(kClearedBarrier, kConsumerThreads);
  }
}

// --- products of a warpgroup ---------------------------------------------------------------------

// D[64, kN] = A B^T: 64 rows of A from a tile of kRows, both operands along their columns; one
// commit group.
template <class Element, class Tile, int kRows, int kN>
CF_DEVICE void issue_outer(float (&d)[kN / 2], saddr a_rows, saddr b_tile) {
  using Operand = Descriptor<Tile>;
  const uint32_t a = Operand::k_major(a_rows);
  const uint32_t b = Operand::k_major(b_tile);
  ptx::wgmma_pin(d);
  ptx::wgmma_fence();
  CF_UNROLL
  for (int step = 0; step < Tile::kColumns / 16; ++step) {
    ptx::wgmma_ss<Element, kN, Operand::kHigh, Operand::kHigh, 0>(
        d, a + Operand::k_step(kRows, step), b + Operand::k_step(kN, step), step > 0);
  }
  ptx::wgmma_commit();
}
// D[64, columns] += A B: A [64, 16 kSteps] from registers, B along its rows; one commit group.
template <class Element, class Tile, int kSteps>
CF_DEVICE void issue_inner(float (&d)[Tile::kColumns / 2], const uint32_t (&a)[kSteps][4],
                           saddr b_tile, bool accumulate) {
  using Operand = Descriptor<Tile>;
  const uint32_t b = Operand::mn_major(b_tile, 16 * kSteps);
  ptx::wgmma_pin(d);
  ptx::wgmma_fence();
  CF_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    ptx::wgmma_rs<Element, Tile::kColumns, Operand::kHigh, 1>(
        d, a[step], b + Operand::mn_step(step), accumulate || step > 0);
  }
  ptx::wgmma_commit();
}
// Waits until at most kPending groups of products are under way; `result` is then complete.
template <int kPending, int kCount>
CF_DEVICE void await_products(float (&result)[kCount]) {
  if constexpr (kKept<kNoProductWait>) ptx::wgmma_wait<kPending>();
  ptx::wgmma_pin(result);
}
// Accumulators in pairs, as A operands.
template <class Element, int kSteps>
CF_DEVICE void pack_operand(uint32_t (&packed)[kSteps][4], const float (&s)[8 * kSteps]) {
  CF_UNROLL
  for (int i = 0; i < 4 * kSteps; ++i) {
    packed[i / 4][i % 4] = ptx::pack2<Element>(s[2 * i], s[2 * i + 1]);
  }
}

// Of the rows of lse or delta at `rows`, this thread's two in columns 8 j, 8 j + 1 further on.
CF_DEVICE void read_row_pair(float (&values)[2], saddr rows, int j) {
  const u32x2 pair = ptx::lds64(rows + static_cast<uint32_t>(32 * j + 8 * (ptx::lane() & 3)));
  values[0] = ptx::bits_float(pair.x);
  values[1] = ptx::bits_float(pair.y);
}

// --- gradients of a warpgroup's 64 rows ----------------------------------------------------------

// Accumulators to rows [first_row, first_row + 64) of a 16-bit tile of kRows.
template <class Element, class Tile, int kRows>
CF_DEVICE void stage_grad(saddr tile_smem, int first_row,
                          const float (&grad)[Tile::kColumns / 2]) {
  const int lane = ptx::lane();
  const int row = first_row + 16 * (ptx::warp() % 4) + (lane & 15);
  CF_UNROLL
  for (int j = 0; j < Tile::kColumns / 16; ++j) {
    uint32_t r[4];
    CF_UNROLL
    for (int m = 0; m < 4; ++m) {
      r[m] = ptx::pack2<Element>(grad[8 * j + 2 * m], grad[8 * j + 2 * m + 1]);
    }
    ptx::stmatrix_x4(tile_smem + Tile::granule_offset(kRows, row, 2 * j + (lane >> 4)), r[0], r[1],
                     r[2], r[3]);
  }
}
// Those rows, staged, by TMA to rows from `row` on of head `head`; `rows`: of the sequence,
// `all_rows`: of the array along seqlen. By one thread.
template <class Tile, int kRows, bool kGeneral>
CF_DEVICE void store_grad(const CUtensorMap* map, saddr tile_smem, int first_row,
                          const TileRows<kGeneral>& rows, int row, int head, int all_rows) {
  CF_UNROLL
  for (int c = 0; c < Tile::kChunks; ++c) {
    rows.store(map, tile_smem + c * Tile::chunk_bytes(kRows) + Tile::chunk_bytes(first_row),
               c * Tile::kChunk, row, head, all_rows);
  }
}
// Accumulators straight to global memory. `offset`: of this thread's first row (lane / 4 of its
// warp's 16) and of column 0; rows_left: rows from that one to the end of the sequence.
template <class Element, int kWidth>
CF_DEVICE void write_grad(const BackwardParams& params, const float (&grad)[kWidth / 2],
                          void* gmem, int64_t offset, int64_t stride_seqlen, int rows_left,
                          int head_dim) {
  const int64_t first = offset + 2 * (ptx::lane() & 3);
  CF_UNROLL
  for (int r = 0; r < 2; ++r) {
    if (8 * r >= rows_left) continue;
    CF_UNROLL
    for (int j = 0; j < kWidth / 8; ++j) {
      if (8 * j >= head_dim) continue;
      add_or_write_grads<Element>(params, gmem, first + 8 * r * stride_seqlen + 8 * j,
                                  grad[4 * j + 2 * r], grad[4 * j + 2 * r + 1]);
    }
  }
}

}  // namespace cf::sm90
