// Attention forward for sm_80 and everything after it: cp.async, ldmatrix, mma.sync.
//
// FlashAttention-2 (Dao 2023, arXiv 2307.08691) over the online softmax of FlashAttention (Dao et
// al. 2022, arXiv 2205.14135; Milakov and Gimelshein 2018, arXiv 1805.02867): one CTA per tile of
// kBlockM queries of one head, rows split over the warps so that no warp ever needs another's
// scores, keys and values streamed through shared memory from right to left, one division at the
// end. docs/kernels/sm80_forward.md says why each choice is what it is.
//
// Warps: kWarps, all alike: every thread copies, multiplies and exponentiates. A warp owns
// kBlockM / kWarps = 16 or 32 rows; with 32 (two m16 fragments) each operand that comes out of
// shared memory feeds two products, which halves the traffic that bounds this kernel.
//
// Registers of a thread, d128, 32 rows a warp, 64 keys: output 128, scores 64 (half of that once
// they are packed into probabilities), row statistics 8; what is left of 255 holds addresses and
// operands on their way from shared memory. No row of the tuning table spills.
//
// Shared memory (bytes, kStages = S):
//   0                 queries, later the output    kBlockM * max(d_qk, d_v) * 2
//   kKeys             ring of S key tiles          kBlockN * d_qk * 2 each
//   kValues           ring of S value tiles        kBlockN * d_v * 2 each
//
// Pipeline. Copies are committed in one order, one group per tile of keys or values:
//   group 0 = {Q, K_0}, 1 = V_0, ..., 2 i = K_i, 2 i + 1 = V_i
// The first 2 S groups are issued at once; then every slot is refilled as soon as all warps have
// read it, with an empty group past the last block to keep the count, so that each wait of the loop
// leaves the 2 S - 2 newest groups in flight:
//   wait K_0, barrier
//   loop: S = Q K_i^T, mask | wait V_i, barrier | issue K_(i+S) | softmax, O += P V_i
//         wait K_(i+1), barrier | issue V_(i+S)
// The first barrier of the loop publishes V_i and says that all warps are done with K_i, whose slot
// K_(i+S) takes; the second does the same for K_(i+1) and V_i. With S = 1 this is
// FlashAttention-2's schedule: values travel under the score product, the next keys under the
// softmax and the second product.
//
// General kernels (kGeneral) read lengths on the device: rows of packed sequences start where those
// say, and what lies behind a length is to them what lies behind the arrays is to the others, not
// copied (zeros arrive) and not written. Capping the scores and what the mask needs to know of the
// sequence cost registers only where they are used.
//
// Note [Opaque values]
// The loop has no register to spare, and the compiler would spend one on every loop invariant that
// that it can name. What is needed rarely (the mask's bounds, the tile's coordinates for the
// epilogue and, with kHideThread, for the mask) or costs little (shared-memory addresses,
// kHideThread) is recomputed from a value that went through a warp shuffle, which it can neither
// hoist out of the loop nor reuse.
#pragma once
#include "attn/blocks.cuh"
#include "attn/mask.cuh"
#include "attn/padding.cuh"
#include "attn/scheduler.cuh"
#include "attn/sequence.cuh"
#include "attn/softcap.cuh"
#include "attn/softmax.cuh"
#include "params.cuh"
#include "ptx/ptx.cuh"
#include "sm80/tiles.cuh"
#include "tile/layout.cuh"

namespace cf::sm80 {

// Barriers and waits that a mutant build leaves out, one each; every one must make a test fail.
inline constexpr int kForwardMutants = 7;
enum ForwardMutant {
  kNoFirstWait = 1,
  kNoFirstBarrier,
  kNoValueWait,
  kNoValueBarrier,
  kNoKeyWait,
  kNoKeyBarrier,
  kNoOutSync,
};
template <ForwardMutant kId>
inline constexpr bool kKept = ptx::kMutant != kId;

// CTAs that look for rows of no sequence (general kernels), at most: where there are more, most
// would look in vain.
inline constexpr int kPaddingWorkers = 256;

template <class Config>
struct ForwardLayout {
  static constexpr int kThreads = 32 * Config::kWarps;
  static constexpr int kWarpRows = Config::kBlockM / Config::kWarps;
  static constexpr int kFragments = kWarpRows / 16;  // m16 fragments of a warp
  static_assert(kWarpRows * Config::kWarps == Config::kBlockM && kFragments * 16 == kWarpRows,
                "a warp owns a multiple of 16 rows");
  static_assert(kFragments == 1 || kFragments == 2, "more would not fit into registers");
  static_assert(Config::kBlockN % 16 == 0, "the second product takes keys in steps of 16");

  using QkTile = Tile<Config::kHeadDimQk>;  // queries and keys
  using VTile = Tile<Config::kHeadDimV>;    // values and the output

  static constexpr int kQueryBytes = QkTile::bytes(Config::kBlockM);
  static constexpr int kOutBytes = VTile::bytes(Config::kBlockM);
  static constexpr int kKeyBytes = QkTile::bytes(Config::kBlockN);
  static constexpr int kValueBytes = VTile::bytes(Config::kBlockN);

  static constexpr int kQuery = 0;
  static constexpr int kOut = 0;
  static constexpr int kKeys = kQueryBytes > kOutBytes ? kQueryBytes : kOutBytes;
  static constexpr int kValues = kKeys + Config::kStages * kKeyBytes;
  static constexpr int kBytes = kValues + Config::kStages * kValueBytes;
};

// Everything that a tile's functions share; all members are compile-time names.
template <class Config>
struct Forward {
  using Layout = ForwardLayout<Config>;
  using Element = typename Config::Element;
  using Mask = typename Config::Mask;
  using QkTile = typename Layout::QkTile;
  using VTile = typename Layout::VTile;
  static constexpr int kFragments = Layout::kFragments;
  static constexpr int kQkSteps = Config::kHeadDimQk / 16;
  static constexpr int kKeySteps = Config::kBlockN / 16;
  static constexpr int kVSteps = Config::kHeadDimV / 16;
  static constexpr bool kQueryInRegisters = Config::kQueryInRegisters != 0;
  static constexpr bool kGeneral = Config::kGeneral != 0;
  using Sequence = typename SequenceOf<kGeneral>::Type;
  using Softmax = OnlineSoftmax<false>;

  // Accumulators: element 4 j + e of fragment f is row 16 f + g + 8 (e / 2) of the warp's rows and
  // column 8 j + 2 q + e % 2, with g = lane / 4 and q = lane % 4.
  using Scores = float[kFragments][Config::kBlockN / 2];
  using Out = float[kFragments][Config::kHeadDimV / 2];
  // Probabilities as A operands: element i of step k (16 keys) is pair 4 k + i of the accumulators.
  using Probabilities = uint32_t[kFragments][Config::kBlockN / 4];
  // A operands of all steps of the score product (kQueryInRegisters), else of none.
  using Query = uint32_t[kQueryInRegisters ? kQkSteps : 1][kFragments][4];

  // Note [Opaque values]: kHideThread trades a shuffle an iteration for the registers in which the
  // compiler would otherwise keep everything that derives from the thread's index.
  CF_DEVICE static Thread this_thread() {
    if constexpr (Config::kHideThread != 0) {
      const uint32_t tid = static_cast<uint32_t>(ptx::tid());
      return {static_cast<int>(ptx::shfl_idx(tid, ptx::lane()))};
    } else {
      return {ptx::tid()};
    }
  }

  CF_DEVICE static Operand<QkTile, Config::kBlockM> query_operand(Thread thread, saddr smem) {
    const int row = thread.warp() * Layout::kWarpRows + (thread.lane() & 15);
    return {smem + Layout::kQuery, row, thread.lane() >> 4};
  }
  // Two n8 fragments of keys: {keys 0-7, 8-15} x {columns 0-7, 8-15}.
  CF_DEVICE static Operand<QkTile, Config::kBlockN> key_operand(Thread thread, saddr keys) {
    return {keys, (thread.lane() & 7) + (thread.lane() >> 4) * 8, (thread.lane() >> 3) & 1};
  }
  // Transposed on the way: {keys 0-7, 8-15} x {columns 0-7, 8-15}.
  CF_DEVICE static Operand<VTile, Config::kBlockN> value_operand(Thread thread, saddr values) {
    return {values, thread.lane() & 15, thread.lane() >> 4};
  }

  CF_DEVICE static void load_query_step(uint32_t (&a)[kFragments][4], Thread thread, saddr smem,
                                        int step) {
    const auto operand = query_operand(thread, smem);
    CF_UNROLL
    for (int f = 0; f < kFragments; ++f) ptx::ldmatrix_x4(a[f], operand.at(f, step));
  }

  // scores = Q K^T, K in shared memory [kBlockN, kHeadDimQk].
  CF_DEVICE static void multiply_query_keys(Scores& scores, const Query& query, Thread thread,
                                            saddr smem, saddr keys) {
    const auto operand = key_operand(thread, keys);
    CF_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      CF_UNROLL
      for (int i = 0; i < Config::kBlockN / 2; ++i) scores[f][i] = 0.0f;
    }
    CF_UNROLL
    for (int step = 0; step < kQkSteps; ++step) {
      uint32_t a[kFragments][4];
      if constexpr (kQueryInRegisters) {
        CF_UNROLL
        for (int f = 0; f < kFragments; ++f) {
          CF_UNROLL
          for (int i = 0; i < 4; ++i) a[f][i] = query[step][f][i];
        }
      } else {
        load_query_step(a, thread, smem, step);
      }
      CF_UNROLL
      for (int n = 0; n < kKeySteps; ++n) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, operand.at(n, step));
        CF_UNROLL
        for (int f = 0; f < kFragments; ++f) {
          ptx::mma_m16n8k16<Element>(&scores[f][8 * n], a[f], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(&scores[f][8 * n + 4], a[f], b[2], b[3]);
        }
      }
    }
  }

  // Half a fragment at a time: ptxas interleaves all that one branch holds, and 128 keys spill 848
  // bytes (NVRTC 13.5).
  CF_DEVICE static void cap(const ForwardParams& params, Scores& scores) {
    if constexpr (kGeneral) {
      constexpr int kHalf = Config::kBlockN / 4;
      CF_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        CF_UNROLL
        for (int half = 0; half < 2; ++half) {
          cap_scores(params, reinterpret_cast<float(&)[kHalf]>(scores[f][half * kHalf]));
        }
      }
    }
  }

  // A score fragment's accumulators are, packed in pairs, the A operand of the same 16 keys.
  CF_DEVICE static void pack_probabilities(uint32_t (&packed)[Config::kBlockN / 4],
                                           const float (&fragment)[Config::kBlockN / 2]) {
    CF_UNROLL
    for (int i = 0; i < Config::kBlockN / 4; ++i) {
      packed[i] = ptx::pack2<Element>(fragment[2 * i], fragment[2 * i + 1]);
    }
  }

  // out += P V, V in shared memory [kBlockN, kHeadDimV].
  CF_DEVICE static void multiply_probabilities_values(Out& out, const Probabilities& p,
                                                      Thread thread, saddr values) {
    const auto operand = value_operand(thread, values);
    CF_UNROLL
    for (int step = 0; step < kKeySteps; ++step) {
      uint32_t a[kFragments][4];
      CF_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        CF_UNROLL
        for (int i = 0; i < 4; ++i) a[f][i] = p[f][4 * step + i];
      }
      CF_UNROLL
      for (int n = 0; n < kVSteps; ++n) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, operand.at(step, n));
        CF_UNROLL
        for (int f = 0; f < kFragments; ++f) {
          ptx::mma_m16n8k16<Element>(&out[f][8 * n], a[f], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(&out[f][8 * n + 4], a[f], b[2], b[3]);
        }
      }
    }
  }

  CF_DEVICE static void scale_rows(float (&fragment)[Config::kHeadDimV / 2],
                                   const float (&factor)[2]) {
    CF_UNROLL
    for (int i = 0; i < Config::kHeadDimV / 2; ++i) fragment[i] *= factor[(i & 3) >> 1];
  }

  CF_DEVICE static WorkTile decode_tile(const ForwardParams& params, int tile_idx) {
    return decode<Config, Mask>(params, tile_idx, params.heads_q, Config::kBlockM);
  }
  // The tile once more, for the mask and the epilogue: Note [Opaque values]. Packed sequences take
  // a search, so general kernels keep what it found, in two registers.
  CF_DEVICE static int flat_head_of(const ForwardParams& params, const WorkTile& work) {
    return kGeneral ? work.batch * params.heads_q + work.head : 0;
  }
  CF_DEVICE static WorkTile tile_again(const ForwardParams& params, int tile_idx, int m_block,
                                       int flat_head) {
    if constexpr (kGeneral) {
      const int opaque = ptx::warp_uniform(flat_head), batch = opaque / params.heads_q;
      return {ptx::warp_uniform(m_block), opaque - batch * params.heads_q, batch};
    } else {
      return decode_tile(params, ptx::warp_uniform(tile_idx));
    }
  }
  // Packed sequences share one batch of the arrays.
  CF_DEVICE static int array_batch(const ForwardParams& params, const WorkTile& work) {
    return kGeneral && params.cu_seqlens_q != nullptr ? 0 : work.batch;
  }

  // Writes the warp's rows of the output through its own part of shared memory, so that global
  // stores are 16 bytes wide; and their log-sum-exps. The loop's last barrier came after the last
  // read of the queries, whose place the output takes.
  CF_DEVICE static void write_output(const ForwardParams& params, const WorkTile& work,
                                     Softmax (&softmax)[2], Out& out) {
    const int g = ptx::lane() >> 2, q = ptx::lane() & 3;
    const int warp_row = ptx::warp() * Layout::kWarpRows;
    const int query_begin = work.m_block * Config::kBlockM;
    const Sequence sequence{params, work.batch};
    const saddr out_smem = ptx::smem_base() + Layout::kOut;

    float* lse_gmem = params.lse;  // [seqlen_q]
    if (lse_gmem != nullptr) {
      lse_gmem += array_batch(params, work) * params.lse_stride_batch +
                  work.head * params.lse_stride_head + sequence.q_begin();
    }
    CF_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      float factor[2], lse[2];
      softmax[f].finish(params.softmax_scale, factor, lse);
      CF_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = warp_row + 16 * f + g + 8 * r;
        // A row without keys is 0 even where a NaN or an infinity in V (0 * NaN) has reached it.
        const bool empty = factor[r] == 0.0f;
        CF_UNROLL
        for (int j = 0; j < Config::kHeadDimV / 8; ++j) {
          const float* pair = &out[f][4 * j + 2 * r];
          ptx::sts32(out_smem + VTile::granule_offset(Config::kBlockM, row, j) +
                         static_cast<uint32_t>(4 * q),
                     ptx::pack2<Element>(empty ? 0.0f : pair[0] * factor[r],
                                         empty ? 0.0f : pair[1] * factor[r]));
        }
        if (lse_gmem != nullptr && q == 0 && query_begin + row < sequence.seqlen_q()) {
          ptx::stg_f32(lse_gmem + query_begin + row, lse[r]);
        }
      }
    }
    if constexpr (kKept<kNoOutSync>) ptx::warp_sync();

    Element* out_gmem = static_cast<Element*>(params.out) +  // [seqlen_q, head_dim_v]
                        array_batch(params, work) * params.out_stride_batch +
                        work.head * params.out_stride_head +
                        sequence.q_begin() * params.out_stride_seqlen;
    constexpr int kGranules = Config::kHeadDimV / 8;  // of 16 bytes, in a row
    CF_UNROLL
    for (int i = 0; i < Layout::kWarpRows * kGranules / 32; ++i) {
      const int item = i * 32 + ptx::lane();
      const int row = warp_row + item / kGranules, granule = item % kGranules;
      const int64_t query = query_begin + row;
      if (query < sequence.seqlen_q() && granule * 8 < params.head_dim_v) {
        ptx::stg128(
            out_gmem + query * params.out_stride_seqlen + granule * 8,
            ptx::lds128(out_smem + VTile::granule_offset(Config::kBlockM, row, granule)));
      }
    }
  }

  // One tile of queries, as the pipeline at the top of this file says.
  CF_DEVICE static void run_tile(const ForwardParams& params, int tile_idx) {
    const WorkTile work = decode_tile(params, tile_idx);
    const Sequence sequence{params, work.batch};
    constexpr int kStages = Config::kStages;
    constexpr int kInFlight = 2 * kStages - 2;  // groups that the loop's waits leave pending
    const saddr smem = ptx::smem_base();
    const Thread first_thread = this_thread();
    const int query_begin = work.m_block * Config::kBlockM;
    if constexpr (kGeneral) {
      if (work.m_block < 0 || query_begin >= sequence.seqlen_q()) return;
    }
    const KvBlocks<Mask, Config::kBlockN> blocks(sequence, query_begin, Config::kBlockM);
    const int num_blocks = blocks.count;
    const int flat_head = flat_head_of(params, work);

    const int batch = array_batch(params, work), head_kv = work.head / params.group;
    const TileCopy<QkTile, Config::kBlockM, Layout::kThreads, Element> query_copy(
        first_thread, params.q,
        batch * params.q_stride_batch + work.head * params.q_stride_head +
            sequence.q_begin() * params.q_stride_seqlen,
        params.q_stride_seqlen, sequence.seqlen_q(), params.head_dim_qk);
    TileCopy<QkTile, Config::kBlockN, Layout::kThreads, Element> key_copy(
        first_thread, params.k,
        batch * params.k_stride_batch + head_kv * params.k_stride_head +
            sequence.kv_begin() * params.k_stride_seqlen,
        params.k_stride_seqlen, sequence.seqlen_kv(), params.head_dim_qk);
    TileCopy<VTile, Config::kBlockN, Layout::kThreads, Element> value_copy(
        first_thread, params.v,
        batch * params.v_stride_batch + head_kv * params.v_stride_head +
            sequence.kv_begin() * params.v_stride_seqlen,
        params.v_stride_seqlen, sequence.seqlen_kv(), params.head_dim_v);
    const auto keys = [smem](int slot) {
      return smem + static_cast<uint32_t>(Layout::kKeys + slot * Layout::kKeyBytes);
    };
    const auto values = [smem](int slot) {
      return smem + static_cast<uint32_t>(Layout::kValues + slot * Layout::kValueBytes);
    };

    Out out;
    CF_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      CF_UNROLL
      for (int i = 0; i < Config::kHeadDimV / 2; ++i) out[f][i] = 0.0f;
    }
    Softmax softmax[2] = {Softmax(params.softmax_scale_log2),
                          Softmax(params.softmax_scale_log2)};  // a fragment each
    Query query;

    if (num_blocks > 0) {
      query_copy.fill(first_thread, smem + Layout::kQuery, query_begin);
      CF_UNROLL
      for (int i = 0; i < kStages; ++i) {
        if (i < num_blocks) key_copy.fill(first_thread, keys(i), blocks.at(i).start);
        ptx::cp_async_commit();
        if (i < num_blocks) value_copy.fill(first_thread, values(i), blocks.at(i).start);
        ptx::cp_async_commit();
      }
      key_copy.advance(blocks.at(kStages - 1).start);
      value_copy.advance(blocks.at(kStages - 1).start);
      if constexpr (kKept<kNoFirstWait>) ptx::cp_async_wait<2 * kStages - 1>();
      if constexpr (kKept<kNoFirstBarrier>) ptx::cta_sync();
      if constexpr (kQueryInRegisters) {
        CF_UNROLL
        for (int step = 0; step < kQkSteps; ++step) {
          load_query_step(query[step], first_thread, smem, step);
        }
      }
    }
    int slot = 0;
    CF_NO_UNROLL
    for (int i = 0; i < num_blocks;) {
      const KvBlock block = blocks.at(i);
      const Thread thread = this_thread();
      Scores scores;
      multiply_query_keys(scores, query, thread, smem, keys(slot));
      cap(params, scores);
      if (block.partial) {
        // Opaque, or the bounds of all rows would be held in registers: Note [Opaque values]. Where
        // those are scarcest not even the tile's place is kept.
        WorkTile again{ptx::warp_uniform(work.m_block), 0, 0};
        if constexpr (kGeneral || Config::kHideThread != 0) {
          again = tile_again(params, tile_idx, work.m_block, flat_head);
        }
        const Sequence masked{params, again.batch};
        const int row = again.m_block * Config::kBlockM + thread.warp() * Layout::kWarpRows +
                        (thread.lane() >> 2);
        CF_UNROLL
        for (int f = 0; f < kFragments; ++f) {
          mask_fragment<Mask>(masked, scores[f], {row + 16 * f, row + 16 * f + 8}, block.start);
        }
      }

      if constexpr (kKept<kNoValueWait>) ptx::cp_async_wait<kInFlight>();
      if constexpr (kKept<kNoValueBarrier>) ptx::cta_sync();
      if (i + kStages < num_blocks) {
        key_copy.advance(blocks.at(i + kStages).start - blocks.at(i + kStages - 1).start);
        key_copy.refill(thread, keys(slot));
      }
      ptx::cp_async_commit();
      Probabilities p;
      CF_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        float correction[2];
        if (softmax[f].update(scores[f], correction)) scale_rows(out[f], correction);
        pack_probabilities(p[f], scores[f]);
      }
      multiply_probabilities_values(out, p, thread, values(slot));

      if (++i == num_blocks) break;
      if constexpr (kKept<kNoKeyWait>) ptx::cp_async_wait<kInFlight>();
      if constexpr (kKept<kNoKeyBarrier>) ptx::cta_sync();
      if (i + kStages - 1 < num_blocks) {
        value_copy.advance(blocks.at(i + kStages - 1).start - blocks.at(i + kStages - 2).start);
        value_copy.refill(thread, values(slot));
      }
      ptx::cp_async_commit();
      slot = slot == kStages - 1 ? 0 : slot + 1;
    }
    write_output(params, tile_again(params, tile_idx, work.m_block, flat_head), softmax, out);
  }
};

// The body of the kernel. One tile a CTA: nothing would overlap between the tiles of a persistent
// CTA without a producer warp, and the hardware deals CTAs out as places become free.
template <class Config>
CF_DEVICE void forward(const ForwardParams& params) {
  static_assert(is_same<typename Config::Scheduler, SingleTile>);
  if (ptx::cta_idx() < params.num_tiles) Forward<Config>::run_tile(params, ptx::cta_idx());
  if constexpr (Config::kGeneral != 0) {
    const int workers = min(ptx::num_ctas(), kPaddingWorkers);
    if (ptx::cta_idx() < workers && ptx::warp() == 0) {
      write_padding<typename Config::Element>(params, ptx::cta_idx(), workers);
    }
  }
}

}  // namespace cf::sm80
