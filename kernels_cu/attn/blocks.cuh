// The key blocks that a tile of queries visits, from right to left: first those that the right edge
// of the mask (or the end of the keys) cuts, then whole ones, then those that the left edge cuts.
// Blocks that the mask empties are never visited.
#pragma once
#include "attn/mask.cuh"
#include "tile/math.cuh"

namespace cf {

struct KvBlock {
  int start;     // first key
  bool partial;  // some (query, key) pair of the block is masked
};

template <class Mask, int kBlockN>
struct KvBlocks {
  int end, count;            // `count` blocks are visited, from block end - 1 down
  int full_begin, full_end;  // those without a masked pair: [full_begin, full_end)

  // The blocks that queries [visit_begin, visit_begin + visit_rows) need; whole among them are
  // those that are whole for queries [query_begin, query_begin + query_rows). The first range is
  // the larger one where CTAs of a cluster load each other's keys.
  template <class Sequence>
  CF_DEVICE KvBlocks(const Sequence& sequence, int visit_begin, int visit_rows, int query_begin,
                     int query_rows) {
    // The union of the rows' ranges runs from the first row's first key to the last row's last;
    // their intersection from the last row's first key to the first row's last.
    const KeyRange upper = visible_keys<Mask>(sequence, visit_begin);
    const KeyRange lower =
        visible_keys<Mask>(sequence, last_row(sequence, visit_begin, visit_rows));
    end = lower.end > 0 ? ceil_div(lower.end, kBlockN) : 0;
    count = lower.end > upper.first ? end - upper.first / kBlockN : 0;
    const int last = last_row(sequence, query_begin, query_rows);
    full_begin = ceil_div(visible_keys<Mask>(sequence, last).first, kBlockN);
    const int full_keys = visible_keys<Mask>(sequence, query_begin).end;
    full_end = full_keys > 0 ? full_keys / kBlockN : 0;
  }
  template <class Sequence>
  CF_DEVICE KvBlocks(const Sequence& sequence, int query_begin, int query_rows)
      : KvBlocks(sequence, query_begin, query_rows, query_begin, query_rows) {}

  // The i-th block visited.
  CF_DEVICE KvBlock at(int i) const {
    const int n = end - 1 - i;
    return {n * kBlockN, n < full_begin || n >= full_end};
  }

 private:
  template <class Sequence>
  CF_DEVICE static int last_row(const Sequence& sequence, int begin, int rows) {
    return max(min(begin + rows, sequence.seqlen_q()) - 1, begin);
  }
};

}  // namespace cf
