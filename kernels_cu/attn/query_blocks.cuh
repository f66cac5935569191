// The query blocks that a block of keys visits in the backward pass, and how key blocks are dealt
// out: attn/blocks.cuh and attn/scheduler.cuh with the roles of queries and keys exchanged.
#pragma once
#include "attn/mask.cuh"
#include "attn/scheduler.cuh"
#include "attn/sequence.cuh"
#include "backward_params.cuh"
#include "tile/math.cuh"

namespace cf {

// The queries [first, end) that may see key `key`; end <= first: none.
struct QueryRange {
  int first, end;
};
template <class Mask, class Sequence>
CF_DEVICE QueryRange seeing_queries(const Sequence& sequence, int key) {
  QueryRange range{0, sequence.seqlen_q()};
  if constexpr (Mask::kHasRight) range.first = max(range.first, key - sequence.right());
  if constexpr (Mask::kHasLeft) range.end = min(range.end, key - sequence.left() + 1);
  return range;
}

// Query blocks [first, end) are visited by keys [key_begin, key_begin + kBlockN). Those in
// [full_begin, full_end) hold no masked pair (queries behind the last one do not count: their
// weights are 0).
template <class Mask, int kBlockM, int kBlockN>
struct QueryBlocks {
  int first, end;
  int full_begin, full_end;

  template <class Sequence>
  CF_DEVICE QueryBlocks(const Sequence& sequence, int key_begin) {
    const int last_key = min(key_begin + kBlockN, sequence.seqlen_kv()) - 1;
    // Unions and intersections as in KvBlocks.
    const QueryRange upper = seeing_queries<Mask>(sequence, key_begin);
    const QueryRange lower = seeing_queries<Mask>(sequence, last_key);
    first = upper.first / kBlockM;
    end = last_key >= key_begin && lower.end > upper.first ? ceil_div(lower.end, kBlockM) : first;
    // A block is whole if no query before its first, and none behind its last, is cut; the end of
    // the queries cuts nothing.
    full_begin = ceil_div(lower.first, kBlockM);
    full_end = end;
    if constexpr (Mask::kHasLeft) {
      if (upper.end < sequence.seqlen_q()) full_end = upper.end > 0 ? upper.end / kBlockM : 0;
    }
    if (key_begin + kBlockN > sequence.seqlen_kv()) full_end = full_begin;  // absent keys
  }
  CF_DEVICE int count() const { return end - first; }
  CF_DEVICE bool is_partial(int m_block) const {
    return m_block < full_begin || m_block >= full_end;
  }
};

// The steps of a key block: its query blocks [first, end), from `start` behind the first on and
// around, of the first query head of the group, then of the second, ...
struct QuerySteps {
  int first, end;  // blocks of a head
  int m_block;     // of the step
  int head;        // query head
  int left;        // steps that are still to come, with this one

  CF_DEVICE QuerySteps(int first, int end, int start, int first_head, int heads)
      : first(first),
        end(end),
        m_block(first + start),
        head(first_head),
        left((end - first) * heads),
        left_of_head(end - first) {}
  // Returns whether the next step is of another head.
  CF_DEVICE bool advance() {
    --left;
    if (++m_block == end) m_block = first;
    if (--left_of_head > 0) return false;
    left_of_head = end - first;
    ++head;
    return true;
  }

 private:
  int left_of_head;
};

// Of the queries of the block from `query_begin` on, counted from there, those that may see a key:
// [first, end). The others have no weights; the end of the queries is not looked at.
template <class Mask, int kBlockM, class Sequence>
CF_DEVICE QueryRange queries_with_keys(const Sequence& sequence, int query_begin) {
  QueryRange range{0, kBlockM};
  if constexpr (Mask::kHasRight) range.first = max(0, -sequence.right() - query_begin);
  if constexpr (Mask::kHasLeft) {
    range.end = min(kBlockM, sequence.seqlen_kv() - sequence.left() - query_begin);
  }
  return range;
}

// Puts `masked` in place of the masked elements of an accumulator fragment of transposed scores:
// row_key[r] is the key of fragment row g + 8 r, and element 4 j + e is at query query_start + 8 j
// + 2 (lane % 4) + e % 2 of row e / 2. Keys behind the last one are masked too; queries behind the
// last one need not be.
template <class Mask, class Sequence, int kCount>
CF_DEVICE void mask_transposed(const Sequence& sequence, float (&s)[kCount],
                               const int (&row_key)[2], int query_start, float masked) {
  const int column = query_start + 2 * (ptx::lane() & 3);
  CF_UNROLL
  for (int row = 0; row < 2; ++row) {
    const QueryRange range = seeing_queries<Mask>(sequence, row_key[row]);
    const bool inside = row_key[row] < sequence.seqlen_kv();
    const int first = inside ? range.first - column : kUnbounded;
    const int end = range.end - column;
    CF_UNROLL
    for (int j = 0; j < kCount / 4; ++j) {
      CF_UNROLL
      for (int e = 0; e < 2; ++e) {
        bool visible = inside;
        if constexpr (Mask::kHasLeft) visible = visible && 8 * j + e < end;
        if constexpr (Mask::kHasRight) visible = 8 * j + e >= first && (!Mask::kHasLeft || visible);
        float& score = s[4 * j + 2 * row + e];
        score = visible ? score : masked;
      }
    }
  }
}

// --- key blocks ---------------------------------------------------------------------------------

struct KeyTile {
  int n_block;  // -1: there is no such tile
  int head_kv;
  int batch;
};

// Tile `tile` of BackwardParams::num_tiles. Sections of heads, as in the forward; within a section
// the key blocks run from those that most queries see (under a right-bounded mask: the first) to
// the others, heads innermost. With turns (dq_turns) they run the other way, the order in which
// they are added: a tile waits for tiles of smaller numbers only.
template <class Config, class Mask>
CF_DEVICE KeyTile decode_key_tile(const BackwardParams& params, int tile) {
  const bool descending = Mask::kHasRight && params.dq_turns != nullptr;
  if constexpr (Config::kGeneral != 0) {
    if (params.cu_seqlens_kv != nullptr) {
      const int slot = tile / params.heads_kv;
      const auto first = [&](int batch) {
        return first_slot(params.cu_seqlens_kv, params.rows_kv, batch, Config::kBlockN);
      };
      int low = 0, high = params.batch;  // first(low) <= slot < first(high)
      if (high == 0 || slot < first(0) || slot >= first(high)) return {-1, 0, 0};
      while (high - low > 1) {
        const int middle = (low + high) >> 1;
        (first(middle) <= slot ? low : high) = middle;
      }
      const DeviceSequence sequence(params, low);
      const int begin = first(low);
      const int slots = first(low + 1) - begin;
      const int needed = ceil_div(sequence.seqlen_kv(), Config::kBlockN);
      const int rest = tile - begin * params.heads_kv;
      const int row = rest / params.heads_kv;
      if (row >= slots || row >= needed) return {-1, 0, low};
      return {descending ? needed - 1 - row : row, rest - row * params.heads_kv, low};
    }
  }
  const int all_heads = params.batch * params.heads_kv;
  const int per_section = params.section_heads * params.num_n_blocks;
  const int section = tile / per_section;
  const int first_head = section * params.section_heads;
  const int heads = min(params.section_heads, all_heads - first_head);
  const int rest = tile - section * per_section;
  const int row = rest / heads;
  const int flat_head = first_head + rest - row * heads;
  const int batch = flat_head / params.heads_kv;
  return {descending ? params.num_n_blocks - 1 - row : row, flat_head - batch * params.heads_kv,
          batch};
}

// --- query tiles --------------------------------------------------------------------------------

struct QueryTile {
  int m_block;  // in units of kRows queries; -1: there is no such tile
  int head_q;
  int batch;
};

// Tile `tile` of BackwardParams::num_query_tiles, of kRows queries of a head: in sections of heads,
// the longest first, heads innermost.
template <bool kGeneral, class Mask, int kRows>
CF_DEVICE QueryTile decode_query_tile(const BackwardParams& params, int tile) {
  if (tile >= params.num_query_tiles) return {-1, 0, 0};
  if constexpr (kGeneral) {
    if (params.cu_seqlens_q != nullptr) {
      const int slot = tile / params.heads_q;
      const auto first = [&](int batch) {
        return first_slot(params.cu_seqlens_q, params.rows_q, batch, kRows);
      };
      int low = 0, high = params.batch;  // first(low) <= slot < first(high)
      if (high == 0 || slot < first(0) || slot >= first(high)) return {-1, 0, 0};
      while (high - low > 1) {
        const int middle = (low + high) >> 1;
        (first(middle) <= slot ? low : high) = middle;
      }
      const DeviceSequence sequence(params, low);
      const int needed = ceil_div(sequence.seqlen_q(), kRows);
      const int row = slot - first(low);
      if (row >= needed) return {-1, 0, low};
      return {Mask::kHasRight ? needed - 1 - row : row, tile - slot * params.heads_q, low};
    }
  }
  const int all_heads = params.batch * params.heads_q;
  const int per_section = params.query_section_heads * params.num_query_blocks;
  const int section = tile / per_section;
  const int first_head = section * params.query_section_heads;
  const int heads = min(params.query_section_heads, all_heads - first_head);
  const int rest = tile - section * per_section;
  const int row = rest / heads;
  const int flat_head = first_head + rest - row * heads;
  const int batch = flat_head / params.heads_q;
  return {Mask::kHasRight ? params.num_query_blocks - 1 - row : row,
          flat_head - batch * params.heads_q, batch};
}

// When key block `n_block` may add to query block `m_block`, counted in blocks that have: the order
// of the additions. Under a right-bounded mask a query's last key block comes first (the blocks
// begin on the diagonal, so none waits for long), without one its first.
template <class Mask, int kBlockM, int kBlockN, class Sequence>
CF_DEVICE int turn_of(const Sequence& sequence, int m_block, int n_block) {
  const int query_begin = m_block * kBlockM;
  const int last_query = max(min(query_begin + kBlockM, sequence.seqlen_q()) - 1, query_begin);
  if constexpr (Mask::kHasRight) {
    const int end = visible_keys<Mask>(sequence, last_query).end;  // of the union of their keys
    return ceil_div(end, kBlockN) - 1 - n_block;
  } else {
    return n_block - visible_keys<Mask>(sequence, query_begin).first / kBlockN;
  }
}

}  // namespace cf
