// One sequence of the batch as its tiles see it: where its rows lie, how many count, and which
// diagonals of its scores are visible. Two kinds, with the same members:
//
//   FixedSequence    every sequence has the lengths and bounds of the launch parameters
//   DeviceSequence   lengths, starts and offsets are read on the device (Config::kGeneral)
//
// Key j is visible to query i iff  left <= j - i <= right  and j < seqlen_kv. Lengths are clamped
// to the arrays, so that no wrong one makes a kernel leave them.
#pragma once
#include "params.cuh"
#include "ptx/ptx.cuh"
#include "tile/math.cuh"

namespace cf {

template <class Params>
struct FixedSequence {
  const Params& params;
  int batch;

  CF_DEVICE int q_begin() const { return 0; }
  CF_DEVICE int kv_begin() const { return 0; }
  CF_DEVICE int seqlen_q() const { return params.seqlen_q; }
  CF_DEVICE int seqlen_kv() const { return params.seqlen_kv; }
  CF_DEVICE int left() const { return static_cast<int>(params.mask_left); }
  CF_DEVICE int right() const { return static_cast<int>(params.mask_right); }
};

CF_DEVICE int clamp(int x, int low, int high) { return max(min(x, high), low); }

// Entry `idx` of an array of lengths or offsets, or what stands for an absent array.
CF_DEVICE int read_or(const int32_t* array, int idx, int absent) {
  return array == nullptr ? absent : static_cast<int>(ptx::ldg32(array + idx));
}

struct DeviceSequence {
  int batch;              // its index
  int q_start, kv_start;  // first row, in units of seqlen: 0 unless sequences are packed
  int used_q, used_kv;    // rows that count
  int diagonal_left, diagonal_right;

  CF_DEVICE int q_begin() const { return q_start; }
  CF_DEVICE int kv_begin() const { return kv_start; }
  CF_DEVICE int seqlen_q() const { return used_q; }
  CF_DEVICE int seqlen_kv() const { return used_kv; }
  CF_DEVICE int left() const { return diagonal_left; }
  CF_DEVICE int right() const { return diagonal_right; }

  template <class Params>
  CF_DEVICE DeviceSequence(const Params& params, int batch) : batch(batch) {
    span(params.cu_seqlens_q, params.seqused_q, params.rows_q, q_start, used_q);
    span(params.cu_seqlens_kv, params.seqused_kv, params.rows_kv, kv_start, used_kv);
    int64_t shift = params.bottom_right != 0 ? used_kv - used_q : 0;
    shift += read_or(params.q_offset, batch, 0);
    shift -= read_or(params.kv_offset, batch, 0);
    diagonal_left = diagonal(params.mask_left + shift);
    diagonal_right = diagonal(params.mask_right + shift);
  }

 private:
  CF_DEVICE void span(const int32_t* starts, const int32_t* counts, int rows, int& start,
                      int& used) const {
    start = starts == nullptr ? 0 : clamp(read_or(starts, batch, 0), 0, rows);
    const int end = clamp(read_or(starts, starts == nullptr ? 0 : batch + 1, rows), start, rows);
    used = clamp(read_or(counts, batch, end - start), 0, end - start);
  }
  CF_DEVICE static int diagonal(int64_t x) {
    return static_cast<int>(x < -kUnbounded ? -kUnbounded : x > kUnbounded ? kUnbounded : x);
  }
};

template <bool kGeneral, class Params = ForwardParams>
struct SequenceOf {
  using Type = FixedSequence<Params>;
};
template <class Params>
struct SequenceOf<true, Params> {
  using Type = DeviceSequence;
};

}  // namespace cf
