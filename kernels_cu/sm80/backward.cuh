// Attention backward for sm_80 and everything after it: cp.async, ldmatrix, mma.sync.
//
// FlashAttention-2 (Dao 2023, arXiv 2307.08691): a CTA owns a block of keys of one key head and
// walks the blocks of queries that see it, of every query head of the group. It recomputes the
// probabilities from the log-sum-exp, keeps dk and dv in registers and adds its part of dq to sums
// in global memory. docs/kernels/backward.md has the design.
//
// Products of a step, kBlockM queries times kBlockN keys, each cut among all warps (Partition):
//   S  = Q K^T      dP = dO V^T                      operands from shared memory
//   P  = exp2(S c - lse)      dS = P (dP - delta)    in registers, then to shared memory
//   dV += P^T dO    dK += dS^T Q    dQ = dS K        operands from shared memory
//
// Warps: all alike. Every thread copies, multiplies and exponentiates.
//
// Registers of a thread, d128, 64 x 128, 8 warps: dk 64, dv 64, S 32 and dP 32 (later dq 32).
//
// Shared memory, in order (BackwardLayout; swizzled tiles, tile/layout.cuh):
//   K      [kBlockN][head_dim_qk]                 later dk
//   V      [kBlockN][head_dim_v]                  later dv
//   Q      [kStages][kBlockM][head_dim_qk]
//   dO     [kDoutStages][kBlockM][head_dim_v]
//   P, dS  [kBlockM][kBlockN] each
//   lse    [kStages][kBlockM] floats              with Q
//   delta  [kDoutStages][kBlockM] floats          with dO
//
// Pipeline of step i; everything that has been issued by its start is for this step:
//   wait for Q_i and dO_i, barrier | issue Q_(i+1), dO_(i+1) where there are two stages
//   S, dP, P and dS to shared memory, barrier
//   dV | with one stage of dO: barrier, issue dO_(i+1)
//   dK | with one stage of Q: barrier, issue Q_(i+1)
//   dQ, added to global memory
// The first barrier publishes the tiles and says that all warps are done with step i - 1: with its
// P, its dS and the stage that is filled next. The second publishes P and dS.
//
// With turns (params.dq_turns) the additions to a slot of dq are made in the order of key blocks:
// one thread waits for this block's turn, two more barriers enclose the additions.
#pragma once
#include "attn/grad_padding.cuh"
#include "attn/grads.cuh"
#include "attn/mask.cuh"
#include "attn/query_blocks.cuh"
#include "attn/query_slots.cuh"
#include "attn/sequence.cuh"
#include "attn/softcap.cuh"
#include "backward_params.cuh"
#include "ptx/ptx.cuh"
#include "sm80/tiles.cuh"
#include "tile/layout.cuh"
#include "tile/math.cuh"

namespace cf::sm80 {

// Barriers and waits that a mutant build leaves out, one each; every one must make a test fail.
inline constexpr int kBackwardMutants = 11;
enum BackwardMutant {
  kNoLoadWait = 1,
  kNoLoadBarrier,
  kNoClearedBarrier,
  kNoScoresBarrier,
  kNoDoutBarrier,   // kDoutStages = 1 only
  kNoQueryBarrier,  // kStages = 1 only
  kNoTurnWait,
  kNoTurnBarrier,
  kNoAddedBarrier,
  kNoOutputBarrier,
  kNoStagedBarrier,
};
template <BackwardMutant kId>
inline constexpr bool kKept = ptx::kMutant != kId;

// How a product of [kRows, kColumns] is cut among the warps: kRowWarps along the rows, the others
// along the columns, in blocks of 16 x 16 dealt out in turns, so that the blocks of a warp are
// constant steps apart and its own first one fits into the first chunk of a tile.
template <int kRows, int kColumns, int kWarps, int kRowWarps_>
struct Partition {
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kColumnWarps = kWarps / kRowWarps;
  static constexpr int kFragments = kRows / 16 / kRowWarps;     // m16 fragments of a warp
  static constexpr int kBlocks = kColumns / 16 / kColumnWarps;  // pairs of n8 fragments
  static_assert(kRowWarps * kColumnWarps == kWarps);
  static_assert(kFragments * kRowWarps * 16 == kRows && kFragments > 0, "whole fragments a warp");
  static_assert(kBlocks * kColumnWarps * 16 == kColumns && kBlocks > 0, "whole blocks a warp");

  // Element 8 n + 4 h + e of fragment f is, g = lane / 4 and q = lane % 4, in row g + 8 (e / 2)
  // of row block row_block() + kRowWarps f and in column 8 h + 2 q + e % 2 of column block
  // column_block() + kColumnWarps n.
  using Accumulators = float[kFragments][8 * kBlocks];

  CF_DEVICE static int row_block() { return ptx::warp() / kColumnWarps; }
  CF_DEVICE static int column_block() { return ptx::warp() % kColumnWarps; }

  CF_DEVICE static void clear(Accumulators& sums) {
    CF_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      CF_UNROLL
      for (int i = 0; i < 8 * kBlocks; ++i) sums[f][i] = 0.0f;
    }
  }
};

// Whether kWarps warps can take turns in the columns of a tile: each has its place in every chunk.
template <class Tile, int kWarps>
inline constexpr bool kTakesTurns = Tile::kChunk / 16 % kWarps == 0;

template <class Config>
struct BackwardLayout {
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  using QkTile = Tile<Config::kHeadDimQk>;  // Q, K and dk
  using VTile = Tile<Config::kHeadDimV>;    // V, dO and dv
  using ScoreTile = Tile<kBlockN>;          // P and dS
  static_assert(kBlockM <= 128, "a warp copies the rows of lse, another those of delta");
  static_assert(kWarps >= 2);

  using ScorePart = Partition<kBlockM, kBlockN, kWarps, Config::kScoreWarps>;
  using KeyPart = Partition<kBlockN, Config::kHeadDimQk, kWarps, Config::kGradWarps>;   // dk
  using ValuePart = Partition<kBlockN, Config::kHeadDimV, kWarps, Config::kGradWarps>;  // dv
  using SumPart = Partition<kBlockM, Config::kHeadDimQk, kWarps, Config::kSumWarps>;    // dq
  static_assert(kTakesTurns<ScoreTile, ScorePart::kColumnWarps>);
  static_assert(kTakesTurns<ScoreTile, KeyPart::kRowWarps>);
  static_assert(kTakesTurns<QkTile, KeyPart::kColumnWarps>);
  static_assert(kTakesTurns<VTile, ValuePart::kColumnWarps>);
  static_assert(kTakesTurns<QkTile, SumPart::kColumnWarps>);

  static constexpr int kKeyBytes = QkTile::bytes(kBlockN), kValueBytes = VTile::bytes(kBlockN);
  static constexpr int kQueryBytes = QkTile::bytes(kBlockM), kDoutBytes = VTile::bytes(kBlockM);
  static constexpr int kScoreBytes = ScoreTile::bytes(kBlockM);
  static constexpr int kRowBytes = kBlockM * 4;

  static constexpr int kKeys = 0;
  static constexpr int kValues = kKeys + kKeyBytes;
  static constexpr int kQueries = kValues + kValueBytes;
  static constexpr int kDout = kQueries + Config::kStages * kQueryBytes;
  static constexpr int kWeights = kDout + Config::kDoutStages * kDoutBytes;  // P
  static constexpr int kScores = kWeights + kScoreBytes;                     // dS
  static constexpr int kLse = kScores + kScoreBytes;
  static constexpr int kDelta = kLse + Config::kStages * kRowBytes;
  static constexpr int kBytes = kDelta + Config::kDoutStages * kRowBytes;
};

// What a CTA does with one tile of keys.
template <class Config>
struct Backward {
  using Layout = BackwardLayout<Config>;
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using QkTile = typename Layout::QkTile;
  using VTile = typename Layout::VTile;
  using ScoreTile = typename Layout::ScoreTile;
  using ScorePart = typename Layout::ScorePart;
  using KeyPart = typename Layout::KeyPart;
  using ValuePart = typename Layout::ValuePart;
  using SumPart = typename Layout::SumPart;
  using Scores = typename ScorePart::Accumulators;
  using GradK = typename KeyPart::Accumulators;
  using GradV = typename ValuePart::Accumulators;
  using Sums = typename SumPart::Accumulators;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kStages = Config::kStages, kDoutStages = Config::kDoutStages;
  static constexpr bool kGeneral = Config::kGeneral != 0;
  using Sequence = typename SequenceOf<kGeneral, BackwardParams>::Type;
  using Order = DqOrder<Config>;
  static_assert(!Order::kTransposed && Order::kUnitRows == 16 && Order::kUnitColumns == 16 &&
                    Order::kVector == 1,
                "a unit of dq is a fragment pair, each of its elements contiguous in a warp");
  static_assert(Order::kRows == kBlockM && Order::kColumns == Config::kHeadDimQk);

  const BackwardParams& params;
  const saddr smem;

  // --- copies

  using QueryCopy = TileCopy<QkTile, kBlockM, Layout::kThreads, Element>;
  using DoutCopy = TileCopy<VTile, kBlockM, Layout::kThreads, Element>;

  CF_DEVICE saddr query_tile(int stage) const {
    return smem + static_cast<uint32_t>(Layout::kQueries + stage * Layout::kQueryBytes);
  }
  CF_DEVICE saddr dout_tile(int stage) const {
    return smem + static_cast<uint32_t>(Layout::kDout + stage * Layout::kDoutBytes);
  }
  CF_DEVICE saddr lse_rows(int stage) const {
    return smem + static_cast<uint32_t>(Layout::kLse + stage * Layout::kRowBytes);
  }
  CF_DEVICE saddr delta_rows(int stage) const {
    return smem + static_cast<uint32_t>(Layout::kDelta + stage * Layout::kRowBytes);
  }
  // The slot of a step (Note [Query slots]); `first_slot` is the sequence's.
  CF_DEVICE int64_t slot_of(int head, int m_block, int first_slot) const {
    return static_cast<int64_t>(head) * params.num_slots + first_slot + m_block;
  }
  // One warp copies a value for each of the kBlockM rows of a slot.
  CF_DEVICE static void copy_rows(saddr dst, const float* src) {
    const int first = 4 * ptx::lane();
    if (first < kBlockM) ptx::cp_async_16(dst + static_cast<uint32_t>(4 * first), src + first, 16);
  }
  CF_DEVICE void load_queries(const QueryCopy& copy, int stage, const QuerySteps& steps,
                              int first_slot) const {
    copy.fill({ptx::tid()}, query_tile(stage), steps.m_block * kBlockM);
    if (ptx::warp() == 0) {
      copy_rows(lse_rows(stage),
                params.row_lse + slot_of(steps.head, steps.m_block, first_slot) * kBlockM);
    }
  }
  CF_DEVICE void load_dout(const DoutCopy& copy, int stage, const QuerySteps& steps,
                           int first_slot) const {
    copy.fill({ptx::tid()}, dout_tile(stage), steps.m_block * kBlockM);
    if (ptx::warp() == 1) {
      copy_rows(delta_rows(stage),
                params.row_delta + slot_of(steps.head, steps.m_block, first_slot) * kBlockM);
    }
  }
  CF_DEVICE void load_keys(const KeyTile& work, int array_batch, const Sequence& sequence) const {
    const Thread thread{ptx::tid()};
    const int key_begin = work.n_block * kBlockN;
    const TileCopy<QkTile, kBlockN, Layout::kThreads, Element> keys(
        thread, params.k,
        array_batch * params.k_stride_batch + work.head_kv * params.k_stride_head +
            sequence.kv_begin() * params.k_stride_seqlen,
        params.k_stride_seqlen, sequence.seqlen_kv(), params.head_dim_qk);
    keys.fill(thread, smem + Layout::kKeys, key_begin);
    const TileCopy<VTile, kBlockN, Layout::kThreads, Element> values(
        thread, params.v,
        array_batch * params.v_stride_batch + work.head_kv * params.v_stride_head +
            sequence.kv_begin() * params.v_stride_seqlen,
        params.v_stride_seqlen, sequence.seqlen_kv(), params.head_dim_v);
    values.fill(thread, smem + Layout::kValues, key_begin);
  }

  // Zeros in place of the rows of Q and dO that have no weights (row_lse +inf): what they hold may
  // be anything, and so may 0 times it. Rows behind the last query are zeros already.
  CF_DEVICE void clear_rows_without_weights(int stage, int dout_stage, int queries) const {
    bool any = false;
    CF_UNROLL
    for (int first = 0; first < kBlockM; first += 32) {
      const int row = first + ptx::lane();
      if (row < min(queries, kBlockM)) any = any || has_no_weights(stage, row);
    }
    if (!ptx::vote_any(any)) return;
    CF_NO_UNROLL
    for (int row = ptx::warp(); row < kBlockM; row += Layout::kWarps) {
      if (!has_no_weights(stage, row)) continue;
      clear_row<QkTile>(query_tile(stage), row);
      clear_row<VTile>(dout_tile(dout_stage), row);
    }
    if constexpr (kKept<kNoClearedBarrier>) ptx::cta_sync();
  }
  CF_DEVICE bool has_no_weights(int stage, int row) const {
    return ptx::lds_f32(lse_rows(stage) + static_cast<uint32_t>(4 * row)) == ptx::kInfinity;
  }
  template <class Tile>
  CF_DEVICE static void clear_row(saddr tile, int row) {
    const int granule = ptx::lane();
    if (granule < Tile::kColumns / 8) {
      ptx::sts128(tile + Tile::granule_offset(kBlockM, row, granule), u32x4{0, 0, 0, 0});
    }
  }

  // --- products
  //
  // An operand is four 8 x 8 matrices of a 16 x 16 block, which ldmatrix delivers in the order that
  // mma wants them: down the rows first for A, and for B that lies transposed to what the product
  // needs; along the columns first for the other two. Both take the block of a tile in which the
  // warp starts.

  template <class Tile, int kRows>
  CF_DEVICE static Operand<Tile, kRows> down(saddr tile, int row_block, int column_block) {
    const int lane = ptx::lane();
    return {tile, 16 * row_block + (lane & 15), 2 * column_block + (lane >> 4)};
  }
  template <class Tile, int kRows>
  CF_DEVICE static Operand<Tile, kRows> along(saddr tile, int row_block, int column_block) {
    const int lane = ptx::lane();
    return {tile, 16 * row_block + (lane & 7) + (lane >> 4) * 8,
            2 * column_block + ((lane >> 3) & 1)};
  }
  template <bool kTransposed>
  CF_DEVICE static void load(uint32_t (&r)[4], saddr a) {
    if constexpr (kTransposed) {
      ptx::ldmatrix_x4_trans(r, a);
    } else {
      ptx::ldmatrix_x4(r, a);
    }
  }
  // sums += A B over kSteps steps of 16; a_at(fragment, step) and b_at(block, step) are the lane's
  // addresses.
  template <class Part, int kSteps, bool kTransposedA, bool kTransposedB, class AddressA,
            class AddressB>
  CF_DEVICE static void multiply(typename Part::Accumulators& sums, const AddressA& a_at,
                                 const AddressB& b_at) {
    CF_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[Part::kFragments][4];
      CF_UNROLL
      for (int f = 0; f < Part::kFragments; ++f) load<kTransposedA>(a[f], a_at(f, step));
      CF_UNROLL
      for (int n = 0; n < Part::kBlocks; ++n) {
        uint32_t b[4];
        load<kTransposedB>(b, b_at(n, step));
        CF_UNROLL
        for (int f = 0; f < Part::kFragments; ++f) {
          ptx::mma_m16n8k16<Element>(&sums[f][8 * n], a[f], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(&sums[f][8 * n + 4], a[f], b[2], b[3]);
        }
      }
    }
  }
  // S = Q K^T or dP = dO V^T: rows of queries by rows of keys.
  template <class Tile>
  CF_DEVICE static void multiply_rows(Scores& s, saddr query_tile, saddr key_tile) {
    const auto a = down<Tile, kBlockM>(query_tile, ScorePart::row_block(), 0);
    const auto b = along<Tile, kBlockN>(key_tile, ScorePart::column_block(), 0);
    ScorePart::clear(s);
    multiply<ScorePart, Tile::kColumns / 16, false, false>(
        s, [&](int f, int step) { return a.at(ScorePart::kRowWarps * f, step); },
        [&](int n, int step) { return b.at(ScorePart::kColumnWarps * n, step); });
  }
  // dV += P^T dO or dK += dS^T Q, over the queries.
  template <class Part, class Tile>
  CF_DEVICE static void add_products(typename Part::Accumulators& grad, saddr score_tile,
                                     saddr query_tile) {
    const auto a = along<ScoreTile, kBlockM>(score_tile, 0, Part::row_block());
    const auto b = down<Tile, kBlockM>(query_tile, 0, Part::column_block());
    multiply<Part, kBlockM / 16, true, true>(
        grad, [&](int f, int step) { return a.at(step, Part::kRowWarps * f); },
        [&](int n, int step) { return b.at(step, Part::kColumnWarps * n); });
  }
  // dQ = dS K, over the keys.
  CF_DEVICE void multiply_scores_keys(Sums& sums) const {
    const auto a = down<ScoreTile, kBlockM>(smem + Layout::kScores, SumPart::row_block(), 0);
    const auto b = down<QkTile, kBlockN>(smem + Layout::kKeys, 0, SumPart::column_block());
    SumPart::clear(sums);
    multiply<SumPart, kBlockN / 16, false, true>(
        sums, [&](int f, int step) { return a.at(SumPart::kRowWarps * f, step); },
        [&](int n, int step) { return b.at(step, SumPart::kColumnWarps * n); });
  }

  // --- weights

  // Of rows in shared memory, those of this thread in fragment f.
  CF_DEVICE static void read_rows(float (&values)[2], saddr rows, int f) {
    const int row = 16 * (ScorePart::row_block() + ScorePart::kRowWarps * f) + ptx::lane() / 4;
    CF_UNROLL
    for (int r = 0; r < 2; ++r) {
      values[r] = ptx::lds_f32(rows + static_cast<uint32_t>(4 * row + 32 * r));
    }
  }
  // S to P.
  CF_DEVICE void exponentiate(Scores& s, saddr lse_rows) const {
    const float scale = params.softmax_scale_log2;
    CF_UNROLL
    for (int f = 0; f < ScorePart::kFragments; ++f) {
      float lse[2];
      read_rows(lse, lse_rows, f);
      CF_UNROLL
      for (int i = 0; i < 8 * ScorePart::kBlocks; ++i) {
        s[f][i] = ptx::ex2(ptx::fma(s[f][i], scale, -lse[i / 2 % 2]));
      }
    }
  }
  // dP to dS.
  CF_DEVICE static void differentiate(Scores& dp, const Scores& p, saddr delta_rows) {
    CF_UNROLL
    for (int f = 0; f < ScorePart::kFragments; ++f) {
      float delta[2];
      read_rows(delta, delta_rows, f);
      CF_UNROLL
      for (int i = 0; i < 8 * ScorePart::kBlocks; ++i) {
        dp[f][i] = p[f][i] * (dp[f][i] - delta[i / 2 % 2]);
      }
    }
  }
  // Capped S to P, and dP to dS: capped = softcap tanh(x) has the slope 1 - (capped / softcap)^2.
  CF_DEVICE void weigh_capped(Scores& s, Scores& dp, saddr lse_rows, saddr delta_rows) const {
    const float inverse = ptx::rcp(params.softcap);
    CF_UNROLL
    for (int f = 0; f < ScorePart::kFragments; ++f) {
      float lse[2], delta[2];
      read_rows(lse, lse_rows, f);
      read_rows(delta, delta_rows, f);
      CF_UNROLL
      for (int i = 0; i < 8 * ScorePart::kBlocks; ++i) {
        const int r = i / 2 % 2;
        const float tanh = ptx::mul(s[f][i], inverse);
        s[f][i] = ptx::ex2(ptx::fma(s[f][i], params.softmax_scale_log2, -lse[r]));
        dp[f][i] = ptx::mul(s[f][i], ptx::fma(-tanh, tanh, 1.0f)) * (dp[f][i] - delta[r]);
      }
    }
  }
  // Zeros in place of P and dS of hidden pairs: products with 0 would do but for what the hidden
  // rows hold. Queries and keys that do not exist are hidden too.
  CF_DEVICE static void hide(Scores& p, Scores& ds, const Sequence& sequence, int query_begin,
                             int key_begin) {
    const int query = query_begin + 16 * ScorePart::row_block() + ptx::lane() / 4;
    const int key = key_begin + 16 * ScorePart::column_block() + 2 * (ptx::lane() & 3);
    CF_UNROLL
    for (int f = 0; f < ScorePart::kFragments; ++f) {
      CF_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = query + 16 * ScorePart::kRowWarps * f + 8 * r;
        const KeyRange range = visible_keys<Mask>(sequence, row);
        const int first = range.first - key;
        const int end = row < sequence.seqlen_q() ? range.end - key : -kUnbounded;
        CF_UNROLL
        for (int j = 0; j < 2 * ScorePart::kBlocks; ++j) {
          CF_UNROLL
          for (int e = 0; e < 2; ++e) {
            const int column = 16 * ScorePart::kColumnWarps * (j / 2) + 8 * (j % 2) + e;
            bool visible = column < end;
            if constexpr (Mask::kHasLeft) visible = visible && column >= first;
            const int i = 4 * j + 2 * r + e;
            p[f][i] = visible ? p[f][i] : 0.0f;
            ds[f][i] = visible ? ds[f][i] : 0.0f;
          }
        }
      }
    }
  }
  // Accumulators to a tile of 16-bit elements, in pairs.
  template <class Part, class Tile, int kRows>
  CF_DEVICE static void store(saddr tile, const typename Part::Accumulators& sums) {
    const int lane = ptx::lane();
    const Operand<Tile, kRows> pairs{tile, 16 * Part::row_block() + lane / 4,
                                     2 * Part::column_block()};
    CF_UNROLL
    for (int f = 0; f < Part::kFragments; ++f) {
      CF_UNROLL
      for (int n = 0; n < Part::kBlocks; ++n) {
        const saddr block = pairs.at(Part::kRowWarps * f, Part::kColumnWarps * n);
        CF_UNROLL
        for (int i = 0; i < 4; ++i) {  // halves of the columns, then of the rows
          const saddr granule = (block ^ static_cast<uint32_t>(i / 2 * 16)) +
                                static_cast<uint32_t>(i % 2 * 8 * Tile::kSpan);
          const float* pair = &sums[f][8 * n + 2 * i];
          ptx::sts32(granule + static_cast<uint32_t>(4 * (lane & 3)),
                     ptx::pack2<Element>(pair[0], pair[1]));
        }
      }
    }
  }

  // --- dq

  // Adds a part of dq to its slot: 32 neighbouring floats by a warp's instruction (DqOrder).
  CF_DEVICE void add_sums(const Sums& sums, int64_t slot) const {
    constexpr int kColumnBlocks = Config::kHeadDimQk / 16;
    float* dst = params.dq_sums + slot * (kBlockM * Config::kHeadDimQk) +
                 (SumPart::row_block() * kColumnBlocks + SumPart::column_block()) *
                     Order::kUnitFloats +
                 ptx::lane();
    CF_UNROLL
    for (int f = 0; f < SumPart::kFragments; ++f) {
      CF_UNROLL
      for (int n = 0; n < SumPart::kBlocks; ++n) {
        const int unit = SumPart::kRowWarps * f * kColumnBlocks + SumPart::kColumnWarps * n;
        CF_UNROLL
        for (int i = 0; i < 8; ++i) {
          ptx::red_add_f32(dst + unit * Order::kUnitFloats + 32 * i, sums[f][8 * n + i]);
        }
      }
    }
  }
  // The same when it is this key block's turn, which it passes on.
  CF_DEVICE void add_sums_in_turn(const Sums& sums, int64_t slot, int turn) const {
    if constexpr (kKept<kNoTurnWait>) {
      if (ptx::tid() == 0) {
        while (ptx::ldg_acquire(params.dq_turns + slot) != turn) {
        }
      }
    }
    if constexpr (kKept<kNoTurnBarrier>) ptx::cta_sync();
    add_sums(sums, slot);
    if constexpr (kKept<kNoAddedBarrier>) ptx::cta_sync();
    if (ptx::tid() == 0) ptx::red_add_release(params.dq_turns + slot, 1);
  }

  // --- a tile

  // From Q and dO in shared memory to P and dS there.
  CF_DEVICE void make_scores(int stage, int dout_stage, const Sequence& sequence, bool partial,
                             int query_begin, int key_begin) const {
    Scores s, dp;
    multiply_rows<QkTile>(s, query_tile(stage), smem + Layout::kKeys);
    const bool capped = kGeneral && params.softcap != 0.0f;
    if (capped) {
      CF_UNROLL
      for (int f = 0; f < ScorePart::kFragments; ++f) cap_scores(params, s[f]);
    } else {
      exponentiate(s, lse_rows(stage));
    }
    multiply_rows<VTile>(dp, dout_tile(dout_stage), smem + Layout::kValues);
    if (capped) {
      weigh_capped(s, dp, lse_rows(stage), delta_rows(dout_stage));
    } else {
      differentiate(dp, s, delta_rows(dout_stage));
    }
    if (partial) hide(s, dp, sequence, query_begin, key_begin);
    store<ScorePart, ScoreTile, kBlockM>(smem + Layout::kWeights, s);
    store<ScorePart, ScoreTile, kBlockM>(smem + Layout::kScores, dp);
  }

  // One tile of keys, as the pipeline at the top of this file says.
  CF_DEVICE void run_tile(int tile) const {
    const KeyTile work = decode_key_tile<Config, Mask>(params, tile);
    if (work.n_block < 0) return;
    const Sequence sequence{params, work.batch};
    const int key_begin = work.n_block * kBlockN;
    if (key_begin >= sequence.seqlen_kv()) return;  // rows of no sequence: write_grad_padding
    const QueryBlocks<Mask, kBlockM, kBlockN> blocks(sequence, key_begin);
    // Packed sequences share one batch of the arrays.
    const int array_batch = kGeneral && params.cu_seqlens_kv != nullptr ? 0 : work.batch;
    if (blocks.count() <= 0) {
      write_zeros(work, array_batch, sequence);
      return;
    }
    // The key blocks of a head start at different query blocks, so that they do not all add to the
    // same rows of dq at a time. (Under a right-bounded mask their first ones differ anyway.)
    int start = 0;
    if (!Mask::kHasRight && params.dq_turns == nullptr) {
      start = static_cast<int>(static_cast<int64_t>(key_begin) * blocks.count() /
                               sequence.seqlen_kv());
    }
    const int first_head = work.head_kv * params.group;
    QuerySteps steps(blocks.first, blocks.end, start, first_head, params.group);
    const int first_slot = query_slot(params, work.batch, 0, kBlockM);
    QueryCopy query_copy({ptx::tid()}, params.q,
                         array_batch * params.q_stride_batch + first_head * params.q_stride_head +
                             sequence.q_begin() * params.q_stride_seqlen,
                         params.q_stride_seqlen, sequence.seqlen_q(), params.head_dim_qk);
    DoutCopy dout_copy({ptx::tid()}, params.dout,
                       array_batch * params.dout_stride_batch +
                           first_head * params.dout_stride_head +
                           sequence.q_begin() * params.dout_stride_seqlen,
                       params.dout_stride_seqlen, sequence.seqlen_q(), params.head_dim_v);

    load_keys(work, array_batch, sequence);
    load_queries(query_copy, 0, steps, first_slot);
    load_dout(dout_copy, 0, steps, first_slot);
    GradK dk;
    GradV dv;
    KeyPart::clear(dk);
    ValuePart::clear(dv);
    int stage = 0;
    CF_NO_UNROLL
    for (bool last = false; !last;) {
      const int m_block = steps.m_block;
      const int64_t slot = slot_of(steps.head, m_block, first_slot);
      const int next_stage = stage ^ 1;
      const int dout_stage = kDoutStages == 1 ? 0 : stage, query_stage = kStages == 1 ? 0 : stage;
      if constexpr (kKept<kNoLoadWait>) ptx::cp_async_wait_all();
      if constexpr (kKept<kNoLoadBarrier>) ptx::cta_sync();
      if (steps.advance()) {
        query_copy.shift(params.q_stride_head);
        dout_copy.shift(params.dout_stride_head);
      }
      last = steps.left == 0;
      if (kStages == 2 && !last) load_queries(query_copy, next_stage, steps, first_slot);
      if (kDoutStages == 2 && !last) load_dout(dout_copy, next_stage, steps, first_slot);
      const int query_begin = m_block * kBlockM;
      clear_rows_without_weights(query_stage, dout_stage, sequence.seqlen_q() - query_begin);
      const bool partial =
          blocks.is_partial(m_block) || query_begin + kBlockM > sequence.seqlen_q();
      make_scores(query_stage, dout_stage, sequence, partial, query_begin, key_begin);
      if constexpr (kKept<kNoScoresBarrier>) ptx::cta_sync();

      add_products<ValuePart, VTile>(dv, smem + Layout::kWeights, dout_tile(dout_stage));
      if constexpr (kDoutStages == 1) {
        if constexpr (kKept<kNoDoutBarrier>) ptx::cta_sync();
        if (!last) load_dout(dout_copy, 0, steps, first_slot);
      }
      add_products<KeyPart, QkTile>(dk, smem + Layout::kScores, query_tile(query_stage));
      if constexpr (kStages == 1) {
        if constexpr (kKept<kNoQueryBarrier>) ptx::cta_sync();
        if (!last) load_queries(query_copy, 0, steps, first_slot);
      }
      Sums sums;
      multiply_scores_keys(sums);
      if (params.dq_turns == nullptr) {
        add_sums(sums, slot);
      } else {
        add_sums_in_turn(sums, slot,
                         turn_of<Mask, kBlockM, kBlockN>(sequence, m_block, work.n_block));
      }
      stage = next_stage;
    }
    write_grads(dk, dv, work, array_batch, sequence);
  }

  // --- epilogue

  // Gradients of keys that no query sees, rows by warps.
  CF_DEVICE void write_zeros(const KeyTile& work, int array_batch,
                             const Sequence& sequence) const {
    constexpr int kRows = kBlockN / Layout::kWarps;
    const int begin = work.n_block * kBlockN + ptx::warp() * kRows;
    const int end = min(begin + kRows, sequence.seqlen_kv());
    write_zero_grads<Element>(params, array_batch, work.head_kv, sequence.kv_begin() + begin,
                              sequence.kv_begin() + end);
  }
  // dk and dv: 16-bit ones through shared memory, in the place of K and V, so that global stores
  // are 16 bytes wide; others straight from registers.
  CF_DEVICE void write_grads(GradK& dk, const GradV& dv, const KeyTile& work, int array_batch,
                             const Sequence& sequence) const {
    CF_UNROLL
    for (int f = 0; f < KeyPart::kFragments; ++f) {
      CF_UNROLL
      for (int i = 0; i < 8 * KeyPart::kBlocks; ++i) dk[f][i] *= params.grad_scale;
    }
    const int key_begin = work.n_block * kBlockN;
    const int keys = sequence.seqlen_kv() - key_begin;
    const int64_t row = sequence.kv_begin() + key_begin;
    const int64_t offset_k = array_batch * params.dk_stride_batch +
                             work.head_kv * params.dk_stride_head + row * params.dk_stride_seqlen;
    const int64_t offset_v = array_batch * params.dv_stride_batch +
                             work.head_kv * params.dv_stride_head + row * params.dv_stride_seqlen;
    if (params.float_grads != 0 || params.accumulate != 0) {
      write_directly<KeyPart>(dk, params.dk, offset_k, params.dk_stride_seqlen, keys,
                              params.head_dim_qk);
      write_directly<ValuePart>(dv, params.dv, offset_v, params.dv_stride_seqlen, keys,
                                params.head_dim_v);
      return;
    }
    if constexpr (kKept<kNoOutputBarrier>) ptx::cta_sync();  // all warps are done with K
    store<KeyPart, QkTile, kBlockN>(smem + Layout::kKeys, dk);
    store<ValuePart, VTile, kBlockN>(smem + Layout::kValues, dv);
    if constexpr (kKept<kNoStagedBarrier>) ptx::cta_sync();
    write_staged<QkTile>(smem + Layout::kKeys, static_cast<Element*>(params.dk) + offset_k,
                         params.dk_stride_seqlen, keys, params.head_dim_qk);
    write_staged<VTile>(smem + Layout::kValues, static_cast<Element*>(params.dv) + offset_v,
                        params.dv_stride_seqlen, keys, params.head_dim_v);
  }
  template <class Part>
  CF_DEVICE void write_directly(const typename Part::Accumulators& grad, void* gmem, int64_t offset,
                                int64_t stride, int keys, int head_dim) const {
    const int first_row = 16 * Part::row_block() + ptx::lane() / 4;
    const int first_column = 16 * Part::column_block() + 2 * (ptx::lane() & 3);
    CF_UNROLL
    for (int f = 0; f < Part::kFragments; ++f) {
      CF_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + 16 * Part::kRowWarps * f + 8 * r;
        if (row >= keys) continue;
        CF_UNROLL
        for (int j = 0; j < 2 * Part::kBlocks; ++j) {
          const int column = first_column + 16 * Part::kColumnWarps * (j / 2) + 8 * (j % 2);
          if (column >= head_dim) continue;
          add_or_write_grads<Element>(params, gmem, offset + row * stride + column,
                                      grad[f][4 * j + 2 * r], grad[f][4 * j + 2 * r + 1]);
        }
      }
    }
  }
  template <class Tile>
  CF_DEVICE static void write_staged(saddr tile, Element* gmem, int64_t stride, int keys,
                                     int head_dim) {
    constexpr int kGranules = Tile::kColumns / 8;  // of 16 bytes, in a row
    static_assert(kBlockN * kGranules % Layout::kThreads == 0);
    CF_UNROLL
    for (int i = 0; i < kBlockN * kGranules / Layout::kThreads; ++i) {
      const int item = i * Layout::kThreads + ptx::tid();
      const int row = item / kGranules, granule = item % kGranules;
      if (row < keys && granule * 8 < head_dim) {
        ptx::stg128(gmem + row * stride + granule * 8,
                    ptx::lds128(tile + Tile::granule_offset(kBlockN, row, granule)));
      }
    }
  }
};

// The body of the kernel. One tile a CTA, as in the forward.
template <class Config>
CF_DEVICE void backward(const BackwardParams& params) {
  static_assert(is_same<typename Config::Scheduler, SingleTile>);
  if (ptx::cta_idx() < params.num_tiles) {
    Backward<Config>{params, ptx::smem_base()}.run_tile(ptx::cta_idx());
  }
  if constexpr (Config::kGeneral != 0) {
    const int workers = min(ptx::num_ctas(), kGradPaddingWorkers);
    if (ptx::cta_idx() < workers && ptx::warp() == 0) {
      write_grad_padding<typename Config::Element>(params, ptx::cta_idx(), workers);
    }
  }
}

}  // namespace cf::sm80
