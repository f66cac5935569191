// Tiles of rows by TMA, of fixed sequences and of those whose lengths are only known on the device.
//
// Note [Ragged maps]
// TMA fills with zeros (and does not store) what lies beyond a dimension of its map, but the map is
// made on the host, which does not know where a sequence ends. So a general kernel's map has rows
// twice. Row r of a sequence of `length` rows is at coordinate far - length + r of the one, whose
// extent is `far`: it is out of bounds iff r >= length. What that is too much, the others take
// back:
//   loads   dims {head_dim, 2^30, heads, 2^30 + 1, origins}, strides {row, head, 2^34 - row, row},
//           far = 2^30, at {far - length + r, head, far, origin}: far (2^34 - row) + far row is
//           2^64, which is nothing. origin = length + the first row's distance from the array's.
//   stores  dims {head_dim, rows, rows + 1, heads, batch}, far = rows, base `rows` rows before the
//           array, at {far - length + r, begin + length, head, batch}.
// Loads through a map of the second kind worked on an H200 on small arrays and ended with an
// illegal address on large ones, whose bases lie in memory that nobody owns: presumably a box that
// is out of bounds reads there all the same. The ideas are those of "ragged" tensors in
// FlashAttention-4 and QuACK (stores) and in QuACK and Triton (loads).
#pragma once
#include "attn/sequence.cuh"
#include "params.cuh"
#include "ptx/ptx.cuh"

namespace cf {

inline constexpr int kFarRow = 1 << 30;

// Rows of one array (q and out, or k and v) that a tile is taken from.
template <bool kGeneral>
struct TileRows {
  int begin, length;  // of the sequence; general only
  int batch;          // index into the array

  // batch_rows: how many rows one batch entry of the array is further on than the last.
  CF_DEVICE void load(saddr dst, const CUtensorMap* map, saddr full, int column, int row, int head,
                      int batch_rows, uint64_t policy) const {
    if constexpr (kGeneral) {
      ptx::tma_load_5d(dst, map, full, column, kFarRow - length + row, head, kFarRow,
                       begin + length + batch * batch_rows, policy);
    } else {
      ptx::tma_load_4d(dst, map, full, column, row, head, batch, policy);
    }
  }
  CF_DEVICE void load_multicast(saddr dst, const CUtensorMap* map, saddr full, int column, int row,
                                int head, int batch_rows, uint16_t cta_mask,
                                uint64_t policy) const {
    if constexpr (kGeneral) {
      ptx::tma_load_5d_multicast(dst, map, full, column, kFarRow - length + row, head, kFarRow,
                                 begin + length + batch * batch_rows, cta_mask, policy);
    } else {
      ptx::tma_load_4d_multicast(dst, map, full, column, row, head, batch, cta_mask, policy);
    }
  }
  // rows: of the array along seqlen.
  CF_DEVICE void store(const CUtensorMap* map, saddr src, int column, int row, int head,
                       int rows) const {
    if constexpr (kGeneral) {
      ptx::tma_store_5d(map, src, column, rows - length + row, begin + length, head, batch);
    } else {
      ptx::tma_store_4d(map, src, column, row, head, batch);
    }
  }
};

}  // namespace cf
