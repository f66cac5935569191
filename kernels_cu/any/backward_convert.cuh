// After the main kernel of a backward pass: dq of its sums, times grad_scale, in the caller's type,
// added to what is there if params.accumulate. Zeros in rows of dq that belong to no sequence, if
// params.clear_grads.
//
// CTAs stride over the slots (Note [Query slots]) of all query heads. A thread takes a patch of a
// slot, read 16 bytes at a time where the order of the sums keeps four of a patch together
// (DqOrder), and written 16 bytes (8 columns) at a time. No shared memory, no barrier.
#pragma once
#include "attn/grad_padding.cuh"
#include "attn/grads.cuh"
#include "attn/query_rows.cuh"
#include "backward_params.cuh"
#include "ptx/ptx.cuh"
#include "types.cuh"

namespace cf::any {

// Two rows of kColumns neighbouring columns: {r, r + kRowStep}.
template <class Config>
struct SumPatch {
  using Order = DqOrder<Config>;
  static constexpr bool kTransposed = Order::kTransposed;
  static constexpr bool kByRow = Order::kUnitRows == 128;
  // Accumulators 4 j to 4 j + 3 hold two columns of rows g and g + 8, or the transpose of that.
  static constexpr int kRowStep = kTransposed || kByRow ? 1 : 8;
  static constexpr int kColumns = kTransposed ? 16 : 8;
  static constexpr int kPatchesAcross = Order::kColumns / kColumns;
  static constexpr int kCount = Order::kRows / 2 * kPatchesAcross;
  static_assert(Order::kColumns % kColumns == 0);
  static_assert(Order::kRows % (2 * kRowStep) == 0);

  float values[2][kColumns];
  int row, column;

  CF_DEVICE explicit SumPatch(int patch) {
    const int pair = patch / kPatchesAcross;
    row = pair / kRowStep * 2 * kRowStep + pair % kRowStep;
    column = patch % kPatchesAcross * kColumns;
  }
  CF_DEVICE void load(const float* sums) {
    if constexpr (Order::kVector != 4) {
      CF_UNROLL
      for (int r = 0; r < 2; ++r) {
        CF_UNROLL
        for (int c = 0; c < kColumns; ++c) values[r][c] = one(sums, r, c);
      }
    } else if constexpr (kTransposed) {
      CF_UNROLL
      for (int c = 0; c < 8; ++c) {
        four(sums, 0, c, values[0][c], values[1][c], values[0][c + 8], values[1][c + 8]);
      }
    } else if constexpr (kByRow) {
      CF_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int r = i / 2, c = i % 2 * 4;
        four(sums, r, c, values[r][c], values[r][c + 1], values[r][c + 2], values[r][c + 3]);
      }
    } else {
      CF_UNROLL
      for (int c = 0; c < 8; c += 2) {
        four(sums, 0, c, values[0][c], values[0][c + 1], values[1][c], values[1][c + 1]);
      }
    }
  }

 private:
  CF_DEVICE int place(int r, int c) const {
    return Order::offset(row + r * kRowStep, column + c);
  }
  CF_DEVICE float one(const float* sums, int r, int c) const {
    return ptx::bits_float(ptx::ldg32(sums + place(r, c)));
  }
  CF_DEVICE void four(const float* sums, int r, int c, float& v0, float& v1, float& v2,
                      float& v3) const {
    const u32x4 v = ptx::ldg128(sums + place(r, c));
    v0 = ptx::bits_float(v.x);
    v1 = ptx::bits_float(v.y);
    v2 = ptx::bits_float(v.z);
    v3 = ptx::bits_float(v.w);
  }
};

// Eight columns of a row of dq, from an even place on, 16-byte aligned.
template <class Element>
CF_DEVICE void write_eight(const BackwardParams& params, int64_t offset, const float* values) {
  float scaled[8];
  CF_UNROLL
  for (int i = 0; i < 8; ++i) scaled[i] = values[i] * params.grad_scale;
  if (params.accumulate != 0) {
    CF_UNROLL
    for (int i = 0; i < 8; i += 2) {
      add_or_write_grads<Element>(params, params.dq, offset + i, scaled[i], scaled[i + 1]);
    }
  } else if (params.float_grads != 0) {
    auto* p = static_cast<float*>(params.dq) + offset;
    CF_UNROLL
    for (int i = 0; i < 8; i += 4) {
      ptx::stg128(p + i, {ptx::float_bits(scaled[i]), ptx::float_bits(scaled[i + 1]),
                          ptx::float_bits(scaled[i + 2]), ptx::float_bits(scaled[i + 3])});
    }
  } else {
    ptx::stg128(static_cast<Element*>(params.dq) + offset,
                {ptx::pack2<Element>(scaled[0], scaled[1]),
                 ptx::pack2<Element>(scaled[2], scaled[3]),
                 ptx::pack2<Element>(scaled[4], scaled[5]),
                 ptx::pack2<Element>(scaled[6], scaled[7])});
  }
}

// The body of the kernel.
template <class Config>
CF_DEVICE void backward_convert(const BackwardParams& params) {
  using Element = typename Config::Element;
  using Patch = SumPatch<Config>;
  const int slots = params.heads_q * params.num_slots;
  CF_NO_UNROLL
  for (int flat = ptx::cta_idx(); flat < slots; flat += ptx::num_ctas()) {
    const int head = flat / params.num_slots;
    const SlotRows rows(params, flat - head * params.num_slots, Config::kBlockM);
    const float* sums =
        params.dq_sums + static_cast<int64_t>(flat) * (Config::kBlockM * Config::kHeadDimQk);
    const int64_t base = rows.array_batch * params.dq_stride_batch + head * params.dq_stride_head;
    CF_NO_UNROLL
    for (int i = ptx::tid(); i < Patch::kCount; i += Config::kThreads) {
      Patch patch(i);
      if (patch.row >= rows.count || patch.column >= params.head_dim_qk) continue;
      patch.load(sums);
      CF_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int row = patch.row + r * Patch::kRowStep;
        if (row >= rows.count) continue;
        const int64_t offset =
            base + (rows.begin + row) * params.dq_stride_seqlen + patch.column;
        CF_UNROLL
        for (int c = 0; c < Patch::kColumns; c += 8) {
          if (patch.column + c < params.head_dim_qk) {
            write_eight<Element>(params, offset + c, patch.values[r] + c);
          }
        }
      }
    }
  }
  if (ptx::warp() == 0) {
    write_query_padding<Element>(params, ptx::cta_idx(), ptx::num_ctas());
  }
}

}  // namespace cf::any
