// tile/layout.cuh for elements of one byte, and products of 32 of them a step.
#pragma once
#include "types.cuh"
#include "ptx/ptx.cuh"

namespace cf {

// A tile of 8-bit elements, [rows][kColumns], as TMA writes it and the matrix units read it: chunks
// of kSpan columns, chunk-major, swizzled as the chunks of a Tile are.
template <int kColumns_>
struct ByteTile {
  static constexpr int kColumns = kColumns_;
  static constexpr int kSpan = kColumns % 128 == 0 ? 128 : kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kChunk = kSpan;
  static constexpr int kChunks = kColumns / kChunk;
  static_assert(kColumns % 32 == 0, "a product sums over 32 columns");

  CF_DEVICE static constexpr int bytes(int rows) { return rows * kColumns; }
  CF_DEVICE static constexpr int chunk_bytes(int rows) { return rows * kSpan; }
};

// Matrix descriptors of an operand read along its columns; swizzle 1: 128 bytes, 2: 64, 3: 32.
template <class Tile>
struct ByteDescriptor {
  static constexpr uint32_t kSwizzle = Tile::kSpan == 128 ? 1u : Tile::kSpan == 64 ? 2u : 3u;
  static constexpr uint32_t kHigh = static_cast<uint32_t>(8 * Tile::kSpan / 16) | (kSwizzle << 30);

  // Low word; step k of 32 columns is `k_step(rows, k)` further on.
  CF_DEVICE static uint32_t k_major(saddr base) { return ((base & 0x3FFFFu) >> 4) | (1u << 16); }
  CF_DEVICE static constexpr uint32_t k_step(int rows, int k) {
    constexpr int kSteps = Tile::kChunk / 32;  // of one chunk
    return static_cast<uint32_t>((k / kSteps) * Tile::chunk_bytes(rows) + (k % kSteps) * 32) >> 4;
  }
};

}  // namespace cf
