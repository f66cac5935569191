// Arithmetic shared by the matrix instructions: formats, shared-memory matrix descriptors,
// products.
#pragma once
#include "engine.hpp"

namespace cf::emulate {

inline int element_bytes(Format format) {
  switch (format) {
    case Format::kBf16:
    case Format::kF16: return 2;
    case Format::kE4m3:
    case Format::kE5m2: return 1;
    case Format::kTf32: return 4;
  }
  return 0;
}

inline float bf16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
inline uint16_t bf16_bits(float value) {  // rounded to nearest even
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Where a swizzle of 32, 64 or 128 bytes puts the byte of an address: the 16-byte granule index
// within the span is exclusive-ored with address bits 7 and up.
inline uint32_t swizzled(uint32_t address, uint32_t span) {
  switch (span) {
    case 128: return address ^ (address >> 3 & 0x70);
    case 64: return address ^ (address >> 3 & 0x30);
    case 32: return address ^ (address >> 3 & 0x10);
    default: return address;
  }
}

// The 16 / element_bytes values of a 16-byte granule.
void unpack_granule(Format format, const uint8_t* granule, float* values);
// Values of one 32-bit register: two 16-bit or four 8-bit elements.
void unpack_register(Format format, uint32_t bits, float* values);

// A decoded shared-memory matrix descriptor; byte units. Bits (PTX ISA, "Matrix-descriptor"):
// 0-13 start >> 4, 16-29 leading offset >> 4, 32-45 stride offset >> 4, 49-51 base offset, and the
// swizzle in 62-63 (sm_90) or 61-63 with version 1 in 46-47 (sm_100).
struct MatrixDescriptor {
  uint32_t start, leading, stride, swizzle;
};
MatrixDescriptor decode_descriptor_sm90(uint64_t bits);
MatrixDescriptor decode_descriptor_sm100(uint64_t bits);

// Reads elements [first, first + extent) of M or N by `depth` (K) through a descriptor from the
// async view, to values[(i - first) * stride_extent + k * stride_depth].
struct GatherTo {
  float* values;
  int stride_extent, stride_depth;
};
void gather_operand(Cta& cta, const MatrixDescriptor& descriptor, Format format, bool mn_major,
                    int first, int extent, int depth, GatherTo to, const Access* access);

// d[m][n] += sum over k of a[m][k] b[k][n]; rows of d are `pitch` floats apart, m a multiple of 4
// and n of 8.
void multiply(float* d, size_t pitch, const float* a, const float* b, int m, int n, int k);

}  // namespace cf::emulate
