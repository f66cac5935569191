// What the forward kernels for Hopper share: the stream of tiles, the warps that deal them out and
// load them, and the barriers between those and the consumers. forward.cuh has the algorithm and
// the pipeline; a kernel's ForwardLayout says where things lie.
#pragma once
#include "attn/blocks.cuh"
#include "attn/padding.cuh"
#include "attn/ragged.cuh"
#include "attn/scheduler.cuh"
#include "params.cuh"
#include "ptx/ptx.cuh"
#include "tile/layout.cuh"
#include "tile/pipeline.cuh"

namespace cf::sm90 {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;
inline constexpr int kWarpsPerWarpgroup = 4;

// Named barriers (0 is the CTA's). Turn of warpgroup w: its own 128 threads and those that pass it.
inline constexpr int kTurnBarrier = 1;      // + w
inline constexpr int kEpilogueBarrier = 4;  // + w: the 128 threads of consumer warpgroup w

// One synchronisation taken out each: every one of them must be caught by the emulator.
inline constexpr int kForwardMutants = 20;
enum ForwardMutant {
  kNoKEmptyWait = 1,
  kNoVEmptyWait,
  kNoQEmptyWait,
  kNoQFullWait,
  kNoKFullWait,
  kNoVFullWait,
  kNoProductWait,
  kEarlyKRelease,
  kEarlyVRelease,
  kNoProxyFence,
  kNoEpilogueBarrier,
  kNoStoreReadWait,
  kNoTurnPass,
  kEarlyQRelease,
  kOwnReleaseOnly,
  kNoExitSync,
  kNoTileFullWait,
  kNoTileEmptyWait,
  kEarlyTileRelease,
  kNoTicketWait,
};
template <ForwardMutant kId>
inline constexpr bool kKept = ptx::kMutant != kId;

// Of each kernel file: the map of shared memory.
template <class Config>
struct ForwardLayout;
// Of kernels of 8-bit floats (ForwardLayout::kQuantized): the scales of a block of keys and values,
// which go with its keys, and where the transposed values of a sequence lie. forward_fp8.cuh.
template <class Config>
struct BlockScales;

template <class Config>
CF_DEVICE void initialize_barriers(saddr smem) {
  using Layout = ForwardLayout<Config>;
  for (int i = 0; i < Config::kQStages * Layout::kWarpgroups; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kQFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kQEmpty, i), Layout::kQEmptyArrivals);
  }
  for (int i = 0; i < Config::kStages; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kKFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kKEmpty, i), Layout::kKEmptyArrivals);
    ptx::mbarrier_init(barrier_at(smem + Layout::kVFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kVEmpty, i), Layout::kVEmptyArrivals);
  }
  for (int i = 0; i < Layout::kTileSlots; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kTileFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kTileEmpty, i), Layout::kTileEmptyArrivals);
  }
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(barrier_at(smem + Layout::kTicketFull, i), 1);
    ptx::mbarrier_init(barrier_at(smem + Layout::kTicketEmpty, i), 1);
  }
  ptx::fence_mbarrier_init();
}

// A whole warp waits where one lane goes on to do something. None may be left behind: it could be
// still waiting when the phase after the next has begun, whose parity looks like the one it missed.
CF_DEVICE void await_as_warp(saddr barrier, uint32_t parity) {
  ptx::mbarrier_wait(barrier, parity);
  ptx::warp_sync();
}

// A tile of this CTA's stream in shared memory, as the scheduler described it. Members are read
// where they are needed rather than kept in registers.
template <class Config>
struct TileSlot {
  saddr words;

  CF_DEVICE int word(int i) const { return static_cast<int>(ptx::lds32(words + 4u * i)); }
  // Key blocks that the cluster visits, at least 1; -1: the stream ends.
  CF_DEVICE int count() const { return word(0); }
  CF_DEVICE int end() const { return word(1); }           // the block after the last
  CF_DEVICE int query_begin() const { return word(2); }   // of this CTA, within the sequence
  CF_DEVICE int head_q() const { return word(3); }
  CF_DEVICE int batch() const { return word(4); }
  CF_DEVICE int head_kv() const { return word(5); }

  // General kernels: the members of a Sequence.
  CF_DEVICE int q_begin() const { return word(6); }
  CF_DEVICE int kv_begin() const { return word(7); }
  CF_DEVICE int seqlen_q() const { return word(8); }
  CF_DEVICE int seqlen_kv() const { return word(9); }
  CF_DEVICE int left() const { return word(10); }
  CF_DEVICE int right() const { return word(11); }
  // And of 8-bit floats: its index, which that of the arrays is not where sequences are packed.
  CF_DEVICE int sequence_index() const {
    if constexpr (Config::kGeneral != 0) return word(12);
    return batch();
  }

  CF_DEVICE auto sequence(const ForwardParams& params) const {
    if constexpr (Config::kGeneral != 0) {
      return *this;
    } else {
      return FixedSequence<ForwardParams>{params, 0};
    }
  }

  template <class Sequence>
  CF_DEVICE void describe(int count, int end, int query_begin, int head_q, int head_kv, int batch,
                          int sequence_index, const Sequence& sequence) const {
    const auto u = [](int x) { return static_cast<uint32_t>(x); };
    ptx::sts128(words, {u(count), u(end), u(query_begin), u(head_q)});
    ptx::sts128(words + 16, {u(batch), u(head_kv), u(sequence.q_begin()), u(sequence.kv_begin())});
    if constexpr (Config::kGeneral != 0) {
      ptx::sts128(words + 32, {u(sequence.seqlen_q()), u(sequence.seqlen_kv()), u(sequence.left()),
                               u(sequence.right())});
      if constexpr (ForwardLayout<Config>::kQuantized) ptx::sts32(words + 48, u(sequence_index));
    }
  }
};

// The place of a role in the stream of tiles.
template <class Config>
struct TileStream {
  using Layout = ForwardLayout<Config>;
  using Slot = TileSlot<Config>;
  static constexpr int kPairHeads = Config::kPairHeads;
  static constexpr int kSlotHeads = kPairHeads ? 2 : 1;
  static constexpr int kSlotRows =
      kPairHeads ? Config::kBlockM : Config::kCluster * Config::kBlockM;

  saddr smem;
  RingPlace<Layout::kTileSlots> place;

  CF_DEVICE static int cta_rank() {  // in the cluster
    return Config::kCluster == 1 ? 0 : ptx::cta_idx() % Config::kCluster;
  }
  CF_DEVICE Slot slot(int stage) const {
    return Slot{smem + static_cast<uint32_t>(Layout::kTiles + stage * Layout::kTileBytes)};
  }
  CF_DEVICE Slot await() const {
    if constexpr (kKept<kNoTileFullWait>) {
      ptx::mbarrier_wait(barrier_at(smem + Layout::kTileFull, place.stage), place.phase);
    }
    return slot(place.stage);
  }
  // This warp needs the tile at `stage` no longer.
  CF_DEVICE void release(int stage) const {
    ptx::warp_sync();  // all lanes have read it
    if (ptx::lane() == 0) ptx::mbarrier_arrive(barrier_at(smem + Layout::kTileEmpty, stage));
  }
};

// --- scheduler ----------------------------------------------------------------------------------

// One warp: deals out this CTA's tiles. Without a counter, by position (Config::Scheduler). With a
// counter, the first tile by position, then whichever is next, so that CTAs that are done early
// take more. The first CTA of a cluster claims for both.
template <class Config>
struct Scheduler {
  using Layout = ForwardLayout<Config>;
  using Stream = TileStream<Config>;
  using Mask = typename Config::Mask;
  using Element = typename Config::Element;
  using Sequence = typename SequenceOf<Config::kGeneral != 0>::Type;

  const ForwardParams& params;
  Stream stream;
  RingPlace<2> ticket_place;

  CF_DEVICE static int slot() { return ptx::cta_idx() / Config::kCluster; }
  CF_DEVICE static int slots() { return ptx::num_ctas() / Config::kCluster; }

  // Tile number `step` of this CTA; num_tiles or more: there is none.
  CF_DEVICE int next_tile(int step) {
    if (params.tile_counter == nullptr) {
      return typename Config::Scheduler{step}.tile(slot(), slots());
    }
    if (step == 0) return slot();
    if constexpr (Config::kCluster == 1) {
      return claim();
    } else {
      return Stream::cta_rank() == 0 ? send_ticket(claim()) : receive_ticket();
    }
  }
  // Every CTA (or cluster) makes one claim in vain; who makes the last one leaves the counter at 0
  // for the next launch.
  CF_DEVICE int claim() {
    int claimed = 0;
    if (ptx::lane() == 0) {
      claimed = ptx::atomic_add(params.tile_counter, 1);
      if (claimed == params.num_tiles - 1) ptx::stg32(params.tile_counter, 0);
    }
    return static_cast<int>(ptx::shfl_idx(static_cast<uint32_t>(claimed), 0)) + slots();
  }
  CF_DEVICE int send_ticket(int tile) {
    await_as_warp(barrier_at(stream.smem + Layout::kTicketEmpty, ticket_place.stage),
                  ticket_place.phase ^ 1);
    if (ptx::lane() == 0) {
      const saddr word =
          stream.smem + static_cast<uint32_t>(Layout::kTickets + 4 * ticket_place.stage);
      const saddr full = barrier_at(stream.smem + Layout::kTicketFull, ticket_place.stage);
      ptx::store_async_32(ptx::map_to_cta(word, 1), static_cast<uint32_t>(tile),
                          ptx::map_to_cta(full, 1));
    }
    ticket_place.advance();
    return tile;
  }
  CF_DEVICE int receive_ticket() {
    const saddr full = barrier_at(stream.smem + Layout::kTicketFull, ticket_place.stage);
    const saddr empty = barrier_at(stream.smem + Layout::kTicketEmpty, ticket_place.stage);
    if (ptx::lane() == 0) ptx::mbarrier_arrive_expect_tx(full, 4);
    if constexpr (kKept<kNoTicketWait>) ptx::mbarrier_wait(full, ticket_place.phase);
    const uint32_t tile =
        ptx::lds32(stream.smem + static_cast<uint32_t>(Layout::kTickets + 4 * ticket_place.stage));
    ptx::warp_sync();  // all lanes have read it
    if (ptx::lane() == 0) ptx::mbarrier_arrive_remote(ptx::map_to_cta(empty, 0));
    ticket_place.advance();
    return ptx::warp_uniform(static_cast<int>(tile));
  }

  CF_DEVICE void run() {
    const int last_waves = params.num_tiles - 2 * slots();
    for (int step = 0, tile = 0;; ++step) {
      begin_slot(stream.place);
      // Claimed ahead, so that its keys come in time; but not at the end, where a tile that waits
      // here is one that another CTA could work on.
      if (Layout::kTileSlots > 2 && tile >= last_waves) {
        auto next = stream.place;
        next.advance();
        begin_slot(next);
      }
      tile = next_tile(step);
      if (tile >= params.num_tiles) break;
      const WorkTile work = decode<Config, Mask>(params, tile, params.heads_q / Stream::kSlotHeads,
                                                 Stream::kSlotRows);
      if (work.m_block < 0) continue;
      deal(work);
    }
    if (ptx::lane() == 0) ptx::sts32(stream.slot(stream.place.stage).words, ~0u);  // count -1
    end_slot();
    if constexpr (Config::kGeneral != 0) {
      write_padding<Element>(params, ptx::cta_idx(), ptx::num_ctas());
    }
  }
  CF_DEVICE void deal(const WorkTile& work) {
    const Sequence sequence{params, work.batch};
    const int rank = Stream::cta_rank();
    const int slot_begin = work.m_block * Stream::kSlotRows;
    const int query_begin = slot_begin + (Stream::kPairHeads ? 0 : rank * Config::kBlockM);
    const int head_q = work.head * Stream::kSlotHeads + (Stream::kPairHeads ? rank : 0);
    if constexpr (Config::kGeneral != 0) {  // seqused_q may end before the tile: write_padding
      if (slot_begin >= sequence.seqlen_q()) return;
    }
    const KvBlocks<Mask, Config::kBlockN> blocks(sequence, slot_begin, Stream::kSlotRows);
    // Packed sequences share one batch of the arrays.
    const int array_batch = params.cu_seqlens_q != nullptr ? 0 : work.batch;
    if (blocks.count == 0) {
      const int end = min(query_begin + Config::kBlockM, sequence.seqlen_q());
      write_empty_rows<Element>(params, array_batch, head_q, sequence.q_begin() + query_begin,
                                sequence.q_begin() + end, true);
      return;
    }
    if (ptx::lane() == 0) {
      stream.slot(stream.place.stage)
          .describe(blocks.count, blocks.end, query_begin, head_q, head_q / params.group,
                    array_batch, work.batch, sequence);
    }
    end_slot();
  }
  CF_DEVICE void begin_slot(const RingPlace<Layout::kTileSlots>& place) {
    if constexpr (kKept<kNoTileEmptyWait>) {
      await_as_warp(barrier_at(stream.smem + Layout::kTileEmpty, place.stage), place.phase ^ 1);
    }
  }
  CF_DEVICE void end_slot() {
    if (ptx::lane() == 0) {
      ptx::mbarrier_arrive(barrier_at(stream.smem + Layout::kTileFull, stream.place.stage));
    }
    stream.place.advance();
  }
};

// --- producer -----------------------------------------------------------------------------------

// One warp: keeps the rings of K and V full, and each warpgroup's Q ahead of it. Values follow one
// block behind the keys, the order in which the consumers need them, also across tiles.
template <class Config>
struct Producer {
  using Layout = ForwardLayout<Config>;
  using QkTile = typename Layout::QkTile;
  using VTile = typename Layout::VTile;

  static constexpr bool kGeneral = Config::kGeneral != 0;

  // A block of keys or values to load.
  struct Source {
    int kv_start, head_kv;
    TileRows<kGeneral> rows;
    int sequence_index;  // of 8-bit floats only
  };

  const ForwardParams& params;
  const saddr smem;
  const bool elected;  // the whole warp walks the stream (its state is uniform), one thread issues
  TileStream<Config> stream;
  RingPlace<Config::kStages> k_place, v_place;
  RingPlace<Config::kQStages> q_place;

  // Fills one stage of a K or V ring, this CTA's share of it where a cluster shares the work.
  template <class Tile>
  CF_DEVICE void load_block(saddr stage, const CUtensorMap* map, saddr full, const Source& source,
                            int batch_rows) {
    const int cta_rank = TileStream<Config>::cta_rank();
    constexpr int kRows = Config::kBlockN / Config::kCluster;
    if (!elected) return;
    ptx::mbarrier_arrive_expect_tx(full, static_cast<uint32_t>(Tile::bytes(Config::kBlockN)));
    CF_UNROLL
    for (int c = 0; c < Tile::kChunks; ++c) {
      const saddr dst = stage + c * Tile::chunk_bytes(Config::kBlockN) +
                        cta_rank * Tile::chunk_bytes(kRows);
      const int row = source.kv_start + cta_rank * kRows;
      if constexpr (Config::kCluster == 1) {
        source.rows.load(dst, map, full, c * Tile::kChunk, row, source.head_kv, batch_rows,
                         ptx::kEvictLast);
      } else {
        source.rows.load_multicast(dst, map, full, c * Tile::kChunk, row, source.head_kv,
                                   batch_rows, (1 << Config::kCluster) - 1, ptx::kEvictLast);
      }
    }
  }
  CF_DEVICE void load_k(const Source& source) {
    if constexpr (kKept<kNoKEmptyWait>) {
      await_as_warp(barrier_at(smem + Layout::kKEmpty, k_place.stage), k_place.phase ^ 1);
    }
    if constexpr (Layout::kQuantized) {
      if (elected) {
        BlockScales<Config>::write(params, smem, k_place.stage, source.kv_start, source.head_kv,
                                   source.rows, source.sequence_index);
      }
    }
    load_block<QkTile>(smem + Layout::kK + k_place.stage * Layout::kKBytes, &params.k_map,
                       barrier_at(smem + Layout::kKFull, k_place.stage), source,
                       params.k_batch_rows);
    k_place.advance();
  }
  CF_DEVICE void load_v(const Source& source) {
    if constexpr (kKept<kNoVEmptyWait>) {
      await_as_warp(barrier_at(smem + Layout::kVEmpty, v_place.stage), v_place.phase ^ 1);
    }
    const saddr stage = smem + Layout::kV + v_place.stage * Layout::kVBytes;
    const saddr full = barrier_at(smem + Layout::kVFull, v_place.stage);
    if constexpr (Layout::kQuantized) {
      load_transposed(stage, full, source);
    } else {
      load_block<VTile>(stage, &params.v_map, full, source, params.v_batch_rows);
    }
    v_place.advance();
  }
  // A block of transposed values, [head_dim_v][kBlockN keys].
  CF_DEVICE void load_transposed(saddr stage, saddr full, const Source& source) {
    constexpr int kRows = Config::kHeadDimV / Config::kCluster;
    const int cta_rank = TileStream<Config>::cta_rank();
    if (!elected) return;
    ptx::mbarrier_arrive_expect_tx(full, Layout::kVBytes);
    const int column = source.kv_start + BlockScales<Config>::first_value(
                                             params, source.rows.begin, source.sequence_index);
    CF_UNROLL
    for (int c = 0; c < VTile::kChunks; ++c) {
      const saddr dst = stage + c * VTile::chunk_bytes(Config::kHeadDimV) +
                        cta_rank * VTile::chunk_bytes(kRows);
      if constexpr (Config::kCluster == 1) {
        ptx::tma_load_4d(dst, &params.v_map, full, column + c * VTile::kChunk, 0, source.head_kv,
                         source.rows.batch, ptx::kEvictLast);
      } else {
        ptx::tma_load_4d_multicast(dst, &params.v_map, full, column + c * VTile::kChunk,
                                   cta_rank * kRows, source.head_kv, source.rows.batch,
                                   (1 << Config::kCluster) - 1, ptx::kEvictLast);
      }
    }
  }
  CF_DEVICE void load_q(const TileSlot<Config>& tile) {
    const int query_begin = tile.query_begin(), head_q = tile.head_q();
    TileRows<kGeneral> rows{0, 0, tile.batch()};
    if constexpr (kGeneral) {
      rows.begin = tile.q_begin();
      rows.length = tile.seqlen_q();
    }
    CF_UNROLL
    for (int w = 0; w < Layout::kWarpgroups; ++w) {
      const int buffer = q_place.stage * Layout::kWarpgroups + w;
      const saddr full = barrier_at(smem + Layout::kQFull, buffer);
      if constexpr (kKept<kNoQEmptyWait>) {
        await_as_warp(barrier_at(smem + Layout::kQEmpty, buffer), q_place.phase ^ 1);
      }
      if (!elected) continue;
      ptx::mbarrier_arrive_expect_tx(full, Layout::kQBytes);
      CF_UNROLL
      for (int c = 0; c < QkTile::kChunks; ++c) {
        rows.load(
            smem + Layout::kQ + buffer * Layout::kQBytes + c * QkTile::chunk_bytes(kWarpgroupRows),
            &params.q_map, full, c * QkTile::kChunk, query_begin + w * kWarpgroupRows, head_q,
            params.q_batch_rows, ptx::kEvictFirst);
      }
    }
    q_place.advance();
  }

  CF_DEVICE void run() {
    Source values{0, 0, {0, 0, 0}, 0};
    bool values_due = false;
    for (;;) {
      const TileSlot<Config> tile = stream.await();
      const int count = ptx::warp_uniform(tile.count());
      if (count < 0) break;
      Source keys{ptx::warp_uniform(tile.end()) * Config::kBlockN,
                  ptx::warp_uniform(tile.head_kv()),
                  {0, 0, ptx::warp_uniform(tile.batch())},
                  0};
      if constexpr (Layout::kQuantized) {
        keys.sequence_index = ptx::warp_uniform(tile.sequence_index());
      }
      if constexpr (kGeneral) {
        keys.rows.begin = ptx::warp_uniform(tile.kv_begin());
        keys.rows.length = ptx::warp_uniform(tile.seqlen_kv());
      }
      CF_NO_UNROLL
      for (int i = 0; i < count; ++i) {
        keys.kv_start -= Config::kBlockN;
        load_k(keys);
        if (values_due) load_v(values);
        if (i == 0) {
          load_q(tile);
          stream.release(stream.place.stage);
        }
        values = keys;
        values_due = true;
      }
      stream.place.advance();
    }
    if (values_due) load_v(values);
  }
};

}  // namespace cf::sm90
