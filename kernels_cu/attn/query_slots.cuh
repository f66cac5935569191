// Slots of queries in the workspace of a backward pass, and the order of dq's sums within one.
// Note [Query slots] in backward_params.cuh.
#pragma once
#include "attn/scheduler.cuh"
#include "backward_params.cuh"
#include "ptx/ptx.cuh"

namespace cf {

// The slot of query block `m_block` of sequence `batch`. Packed sequences own slots from
// cu_seqlens_q[b] / block_m + b on.
CF_DEVICE int query_slot(const BackwardParams& params, int batch, int m_block, int block_m) {
  if (params.cu_seqlens_q == nullptr) return batch * params.num_m_blocks + m_block;
  return first_slot(params.cu_seqlens_q, params.rows_q, batch, block_m) + m_block;
}

// Where element (row, column) of a [kRows, kColumns] tile of dq lies among its floats: as the
// accumulators that hold it, so that a warp's store is contiguous. The tile (or its transpose) is
// cut into units of kUnitRows x kUnitColumns, row after row of units. In a unit:
//   kUnitRows = 16, 64   fragments of mma.sync or wgmma: 32 or 128 threads hold accumulators
//                        i = 4 j + e as ptx/wgmma.cuh says, kVector after the other by a thread
//   kUnitRows = 128      one row a thread (tensor memory), kVector columns by a thread
template <class Config>
struct DqOrder {
  static constexpr int kRows = Config::kBlockM, kColumns = Config::kHeadDimQk;
  static constexpr bool kTransposed = Config::kDqTransposed != 0;
  static constexpr int kUnitRows = Config::kDqUnitRows, kUnitColumns = Config::kDqUnitColumns;
  static constexpr int kVector = Config::kDqVector;
  static constexpr int kExtentRows = kTransposed ? kColumns : kRows;
  static constexpr int kExtentColumns = kTransposed ? kRows : kColumns;
  static constexpr int kThreads = kUnitRows == 128 ? 128 : kUnitRows * 2;
  static constexpr int kUnitFloats = kUnitRows * kUnitColumns;
  static_assert(kExtentRows % kUnitRows == 0 && kExtentColumns % kUnitColumns == 0);

  CF_DEVICE static constexpr int offset(int row, int column) {
    const int r = kTransposed ? column : row, c = kTransposed ? row : column;
    const int unit = r / kUnitRows * (kExtentColumns / kUnitColumns) + c / kUnitColumns;
    const int ur = r % kUnitRows, uc = c % kUnitColumns;
    int thread = ur, i = uc;
    if (kUnitRows != 128) {
      thread = ur / 16 * 32 + ur % 8 * 4 + uc % 8 / 2;
      i = uc / 8 * 4 + ur / 8 % 2 * 2 + uc % 2;
    }
    return unit * kUnitFloats + (i / kVector * kThreads + thread) * kVector + i % kVector;
  }
};

}  // namespace cf
