// Gradients of keys and values in global memory: as single pairs, and rows of zeros.
#pragma once
#include "backward_params.cuh"
#include "ptx/ptx.cuh"

namespace cf {

// Elements `offset`, `offset` + 1 (an even place) of dk or dv: float32 or 16-bit, added to what is
// there if params.accumulate.
template <class Element>
CF_DEVICE void add_or_write_grads(const BackwardParams& params, void* grads, int64_t offset,
                                  float low, float high) {
  if (params.float_grads != 0) {
    float* p = static_cast<float*>(grads) + offset;
    if (params.accumulate != 0) {
      low += ptx::bits_float(ptx::ldg32(p));
      high += ptx::bits_float(ptx::ldg32(p + 1));
    }
    ptx::stg_f32(p, low);
    ptx::stg_f32(p + 1, high);
    return;
  }
  Element* p = static_cast<Element*>(grads) + offset;
  if (params.accumulate != 0) {
    float old_low, old_high;
    ptx::unpack2<Element>(old_low, old_high, ptx::ldg32(p));
    low += old_low;
    high += old_high;
  }
  ptx::stg32(p, ptx::pack2<Element>(low, high));
}

// One warp: zeros in rows [begin, end) of a head's gradients, unless they are added to. Rows count
// from the start of array batch `batch`; their bytes are a multiple of 16, as their addresses are.
template <class Element>
CF_DEVICE void write_zero_rows(const BackwardParams& params, void* grads, int64_t stride_batch,
                               int64_t stride_seqlen, int64_t stride_head, int head_dim, int batch,
                               int head, int begin, int end) {
  if (params.accumulate != 0) return;
  const int bytes = params.float_grads != 0 ? 4 : static_cast<int>(sizeof(Element));
  auto* first =
      static_cast<uint8_t*>(grads) + (batch * stride_batch + head * stride_head) * bytes;
  const int granules = head_dim * bytes / 16;  // up to 64
  CF_NO_UNROLL
  for (int row = begin; row < end; ++row) {
    CF_NO_UNROLL
    for (int granule = ptx::lane(); granule < granules; granule += 32) {
      ptx::stg128(first + row * stride_seqlen * bytes + 16 * granule, u32x4{0, 0, 0, 0});
    }
  }
}
// The same in dk and dv of a key head.
template <class Element>
CF_DEVICE void write_zero_grads(const BackwardParams& params, int batch, int head_kv, int begin,
                                int end) {
  write_zero_rows<Element>(params, params.dk, params.dk_stride_batch, params.dk_stride_seqlen,
                           params.dk_stride_head, params.head_dim_qk, batch, head_kv, begin, end);
  write_zero_rows<Element>(params, params.dv, params.dv_stride_batch, params.dv_stride_seqlen,
                           params.dv_stride_head, params.head_dim_v, batch, head_kv, begin, end);
}

}  // namespace cf
