// Tiles of the sm80 kernels: how threads copy them into shared memory and ldmatrix reads them.
#pragma once
#include "ptx/ptx.cuh"
#include "tile/layout.cuh"
#include "types.cuh"

namespace cf::sm80 {

// A thread by its index in the CTA, known or opaque (Note [Opaque values] in
// sm80/forward.cuh).
struct Thread {
  int tid;
  CF_DEVICE int lane() const { return tid & 31; }
  CF_DEVICE int warp() const { return tid >> 5; }
};

// One thread's part in copying [kRows, kColumns] tiles of a matrix [num_rows, num_columns] in
// global memory (one batch and head of a tensor) into swizzled tiles of shared memory: 16-byte
// granules, a row of a chunk by neighbouring threads, the same granule of every kPassRows-th row by
// one thread.
template <class Tile, int kRows, int kThreads, class Element>
struct TileCopy {
  static constexpr int kGranules = Tile::kSpan / 16;  // in a row of a chunk
  static constexpr int kPassRows = kThreads / kGranules;
  static constexpr int kPasses = kRows / kPassRows;
  static_assert(kPasses * kPassRows == kRows, "whole passes of the CTA over the tile");
  static_assert(kPassRows % 8 == 0, "a thread's swizzle phase is the same in all passes");

  const Element* mapped;  // what copies that read nothing point at
  const Element* src;     // the thread's granule of the tile that `refill` takes next
  int64_t stride;         // elements from row to row; rows are 16-byte aligned
  int num_rows;           // at least 1
  int num_columns;        // a multiple of 8

  // The matrix of one batch and head, `offset` elements into a tensor.
  CF_DEVICE TileCopy(Thread thread, const void* tensor, int64_t offset, int64_t stride,
                     int num_rows, int num_columns)
      : mapped(static_cast<const Element*>(tensor)),
        src(mapped + offset + row(thread) * stride + column(thread)),
        stride(stride),
        num_rows(num_rows),
        num_columns(num_columns) {}

  CF_DEVICE static int row(Thread thread) { return thread.tid / kGranules; }
  CF_DEVICE static int column(Thread thread) { return thread.tid % kGranules * 8; }

  // Issues the copies of rows [row_begin, row_begin + kRows). Rows and columns that the matrix does
  // not have become zeros (values must: 0 * NaN is NaN).
  CF_DEVICE void fill(Thread thread, saddr tile, int row_begin) const {
    const saddr dst = tile + Tile::granule_offset(kRows, row(thread), column(thread) / 8);
    const Element* from = src + row_begin * stride;
    CF_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool row_inside = row_begin + row(thread) + pass * kPassRows < num_rows;
      CF_UNROLL
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        const bool inside = row_inside && column(thread) + chunk * Tile::kChunk < num_columns;
        ptx::cp_async_16(dst + offset_of(pass, chunk),
                         inside ? from + chunk * Tile::kChunk : mapped, inside ? 16 : 0);
      }
      from += kPassRows * stride;
    }
  }

  // Moves `rows` down the matrix (it starts in the first row). A pointer that the loop carries
  // costs fewer registers than the parts from which the compiler would add it up.
  CF_DEVICE void advance(int rows) { src += rows * stride; }
  // Moves to another matrix of the tensor, `elements` further on.
  CF_DEVICE void shift(int64_t elements) { src += elements; }

  // Issues the copies of kRows rows that all exist into a tile that `fill` has used before: columns
  // that the matrix does not have are zero already.
  CF_DEVICE void refill(Thread thread, saddr tile) const {
    const saddr dst = tile + Tile::granule_offset(kRows, row(thread), column(thread) / 8);
    const Element* from = src;
    CF_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      CF_UNROLL
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        if (column(thread) + chunk * Tile::kChunk < num_columns) {
          ptx::cp_async_16(dst + offset_of(pass, chunk), from + chunk * Tile::kChunk, 16);
        }
      }
      from += kPassRows * stride;
    }
  }

 private:
  CF_DEVICE static constexpr uint32_t offset_of(int pass, int chunk) {
    return static_cast<uint32_t>(pass * kPassRows * Tile::kSpan + chunk * Tile::chunk_bytes(kRows));
  }
};

// A matrix operand in shared memory as ldmatrix reads it: the address that this lane gives for the
// first 16 columns; other columns and rows are constant steps away. Rows step by 16, so that the
// swizzle's phase is the lane's own.
template <class Tile, int kRows>
struct Operand {
  saddr lane_address;

  CF_DEVICE Operand(saddr tile, int row, int granule)
      : lane_address(tile + Tile::granule_offset(kRows, row, granule)) {}

  // Columns [16 step, 16 step + 16), rows 16 row_block further down.
  CF_DEVICE saddr at(int row_block, int step) const {
    constexpr int kChunkSteps = Tile::kChunk / 16;
    const uint32_t swizzled = lane_address ^ static_cast<uint32_t>(step % kChunkSteps * 32);
    return swizzled + static_cast<uint32_t>(step / kChunkSteps * Tile::chunk_bytes(kRows) +
                                            row_block * 16 * Tile::kSpan);
  }
};

}  // namespace cf::sm80
