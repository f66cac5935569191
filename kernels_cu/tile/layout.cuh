// Where things lie: swizzled tiles in shared memory and the matrix descriptors that name them.
#pragma once
#include "types.cuh"
#include "ptx/ptx.cuh"

namespace cf {

// A tile of 16-bit elements, [rows][kColumns], as TMA writes it and the matrix units read it: cut
// into chunks of kSpan bytes of columns, chunk-major; within a chunk, row r is kSpan bytes and its
// 16-byte granule g lies at position g ^ (r mod (kSpan / 16)) (for 128 bytes; fewer bits below).
// Chunks start on multiples of 8 * kSpan bytes, so that the swizzle depends on the row alone.
template <int kColumns_>
struct Tile {
  static constexpr int kColumns = kColumns_;
  static constexpr int kSpan = kColumns % 64 == 0 ? 128 : 64;  // bytes: the swizzle's width
  static constexpr int kChunk = kSpan / 2;                     // columns of one chunk
  static constexpr int kChunks = kColumns / kChunk;
  static_assert(kColumns % kChunk == 0, "a tile is a whole number of 32-column chunks");

  CF_DEVICE static constexpr int bytes(int rows) { return rows * kColumns * 2; }
  CF_DEVICE static constexpr int chunk_bytes(int rows) { return rows * kSpan; }

  // Byte offset of 16-byte granule `granule` (8 columns) of row `row` in a tile of `rows` rows.
  CF_DEVICE static uint32_t granule_offset(int rows, int row, int granule) {
    constexpr int kPerChunk = kSpan / 16;
    const int chunk = granule / kPerChunk, inner = granule % kPerChunk;
    // Address bits [4:6] are XORed with bits [7:9] (128-byte span) or [4:5] with [7:8] (64-byte).
    const int phase = kSpan == 128 ? (row & 7) : ((row >> 1) & 3);
    return static_cast<uint32_t>(chunk * chunk_bytes(rows) + row * kSpan + ((inner ^ phase) << 4));
  }
};

// Matrix descriptors of Hopper's wgmma (PTX ISA, "Matrix Descriptor Format"), low and high words:
// bits 0-13 start address / 16, 16-29 leading byte offset / 16, 32-45 stride byte offset / 16,
// 62-63 swizzle (1: 128 bytes, 2: 64 bytes).
//
// Operand [rows][kColumns] read along its columns (K-major: Q, K): stride = 8 rows, the leading
// offset is unused. Read along its rows (MN-major: V as B of P V): stride = 8 rows (keys), leading
// offset = one chunk of columns.
template <class Tile>
struct Descriptor {
  static constexpr uint32_t kSwizzle = Tile::kSpan == 128 ? 1u : 2u;
  static constexpr uint32_t kHigh = static_cast<uint32_t>(8 * Tile::kSpan / 16) | (kSwizzle << 30);

  // Low word of a K-major operand; step k of 16 columns is `k_step(rows, k)` further on.
  CF_DEVICE static uint32_t k_major(saddr base) { return ((base & 0x3FFFFu) >> 4) | (1u << 16); }
  CF_DEVICE static constexpr uint32_t k_step(int rows, int k) {
    constexpr int kSteps = Tile::kChunk / 16;  // of one chunk
    return static_cast<uint32_t>((k / kSteps) * Tile::chunk_bytes(rows) + (k % kSteps) * 32) >> 4;
  }
  // Low word of an MN-major operand; step k of 16 rows is `mn_step(k)` further on.
  CF_DEVICE static uint32_t mn_major(saddr base, int rows) {
    return ((base & 0x3FFFFu) >> 4) | (static_cast<uint32_t>(Tile::chunk_bytes(rows) >> 4) << 16);
  }
  CF_DEVICE static constexpr uint32_t mn_step(int k) {
    return static_cast<uint32_t>(k * 16 * Tile::kSpan) >> 4;
  }
};

}  // namespace cf
