// The arithmetic of matrix instructions, and the warp-level ones: ldmatrix, stmatrix, mma.sync.
#include <cmath>

#include "numerics.hpp"

namespace cf::emulate {

// --- formats -------------------------------------------------------------------------------------

namespace {

float f16_value(uint16_t bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}

// e4m3 (no infinities, 0x7f is NaN) and e5m2 (IEEE-like).
struct SmallFloats {
  float e4m3[256], e5m2[256];
  SmallFloats() {
    for (int bits = 0; bits < 256; ++bits) {
      const int magnitude = bits & 0x7f;
      const float sign = bits & 0x80 ? -1.f : 1.f;
      const int e4 = magnitude >> 3, m4 = magnitude & 7;
      e4m3[bits] = magnitude == 0x7f
                       ? NAN
                       : sign * (e4 != 0 ? std::ldexp(1.f + static_cast<float>(m4) / 8.f, e4 - 7)
                                         : std::ldexp(static_cast<float>(m4) / 8.f, -6));
      e5m2[bits] = f16_value(static_cast<uint16_t>(bits << 8));
    }
  }
};
const SmallFloats kSmallFloats;

}  // namespace

void unpack_granule(Format format, const uint8_t* granule, float* values) {
  uint16_t halves[8];
  switch (format) {
    case Format::kBf16:
      memcpy(halves, granule, 16);
      for (int i = 0; i < 8; ++i) values[i] = bf16_value(halves[i]);
      return;
    case Format::kF16:
      memcpy(halves, granule, 16);
      for (int i = 0; i < 8; ++i) values[i] = f16_value(halves[i]);
      return;
    case Format::kE4m3:
      for (int i = 0; i < 16; ++i) values[i] = kSmallFloats.e4m3[granule[i]];
      return;
    case Format::kE5m2:
      for (int i = 0; i < 16; ++i) values[i] = kSmallFloats.e5m2[granule[i]];
      return;
    case Format::kTf32: memcpy(values, granule, 16); return;
  }
}

void unpack_register(Format format, uint32_t bits, float* values) {
  switch (format) {
    case Format::kBf16:
      values[0] = bf16_value(static_cast<uint16_t>(bits));
      values[1] = bf16_value(static_cast<uint16_t>(bits >> 16));
      return;
    case Format::kF16:
      values[0] = f16_value(static_cast<uint16_t>(bits));
      values[1] = f16_value(static_cast<uint16_t>(bits >> 16));
      return;
    case Format::kE4m3:
      for (int i = 0; i < 4; ++i) values[i] = kSmallFloats.e4m3[bits >> (8 * i) & 0xff];
      return;
    case Format::kE5m2:
      for (int i = 0; i < 4; ++i) values[i] = kSmallFloats.e5m2[bits >> (8 * i) & 0xff];
      return;
    case Format::kTf32: memcpy(values, &bits, 4); return;
  }
}

// --- descriptors and operands --------------------------------------------------------------------

static MatrixDescriptor decode_offsets(uint64_t bits) {
  if ((bits >> 49 & 7) != 0) fail("matrix descriptor: a base offset is not emulated");
  const auto field = [bits](int first) {
    return static_cast<uint32_t>(bits >> first & 0x3fff) << 4;
  };
  return {field(0), field(16), field(32), 0};
}

MatrixDescriptor decode_descriptor_sm90(uint64_t bits) {
  MatrixDescriptor descriptor = decode_offsets(bits);
  static constexpr uint32_t kSpans[4] = {0, 128, 64, 32};
  descriptor.swizzle = kSpans[bits >> 62];
  return descriptor;
}

MatrixDescriptor decode_descriptor_sm100(uint64_t bits) {
  MatrixDescriptor descriptor = decode_offsets(bits);
  if ((bits >> 46 & 3) != 1)
    fail("tcgen05 matrix descriptor: the version field is %d, not 1",
         static_cast<int>(bits >> 46 & 3));
  if ((bits >> 52 & 1) != 0)
    fail("tcgen05 matrix descriptor: the absolute leading offset mode is not emulated");
  switch (bits >> 61) {
    case 0: descriptor.swizzle = 0; break;
    case 2: descriptor.swizzle = 128; break;
    case 4: descriptor.swizzle = 64; break;
    case 6: descriptor.swizzle = 32; break;
    default:
      fail("tcgen05 matrix descriptor: swizzle mode %d is not emulated",
           static_cast<int>(bits >> 61));
  }
  return descriptor;
}

// Canonical layouts, in granules of 16 bytes (T elements):
//   K-major:  rows of 8 lie `swizzle` bytes apart (16 without swizzle), groups of 8 rows `stride`;
//             along K, granules are adjacent (without swizzle: `leading` apart).
//   MN-major: 8 values of k lie `swizzle` bytes apart, groups of 8 `stride`; along MN a row of
//             `swizzle` bytes, then `leading`. Without swizzle the two offsets change roles.
void gather_operand(Cta& cta, const MatrixDescriptor& descriptor, Format format, bool mn_major,
                    int first, int extent, int depth, GatherTo to, const Access* access) {
  const int size = element_bytes(format);
  const int per_granule = 16 / size;
  const uint32_t span = descriptor.swizzle;
  const uint32_t limit = static_cast<uint32_t>(cta.async.size());
  float values[16];
  const auto read = [&](uint32_t address) {
    const uint32_t offset = swizzled(address, span) - kSharedBase;
    if (offset + 16 > limit || address < kSharedBase)
      fail("matrix descriptor: operand at shared offset %d lies outside %u bytes",
           static_cast<int>(offset), limit);
    if (access != nullptr) observe_shared(cta, offset, 16, false, *access);
    unpack_granule(format, cta.async.data() + offset, values);
  };
  if (!mn_major) {
    const uint32_t row_pitch = span != 0 ? span : 16;
    const uint32_t granule_pitch = span != 0 ? 16 : descriptor.leading;
    for (int i = first; i < first + extent; ++i) {
      const uint32_t row = descriptor.start + i / 8 * descriptor.stride + i % 8 * row_pitch;
      for (int k = 0; k < depth; k += per_granule) {
        read(row + k / per_granule * granule_pitch);
        float* out = to.values + (i - first) * to.stride_extent + k * to.stride_depth;
        for (int j = 0; j < per_granule; ++j) out[j * to.stride_depth] = values[j];
      }
    }
    return;
  }
  if (size == 4) fail("an MN-major 32-bit operand is not emulated");
  const uint32_t row_bytes = span != 0 ? span : 16;
  const uint32_t along_mn = span != 0 ? descriptor.leading : descriptor.stride;
  const uint32_t along_k = span != 0 ? descriptor.stride : descriptor.leading;
  const int row_extent = static_cast<int>(row_bytes) / size;
  for (int k = 0; k < depth; ++k) {
    for (int i = first; i < first + extent; i += per_granule) {
      read(descriptor.start + i / row_extent * along_mn + i % row_extent * size + k / 8 * along_k +
           k % 8 * row_bytes);
      float* out = to.values + (i - first) * to.stride_extent + k * to.stride_depth;
      const int count = std::min(per_granule, first + extent - i);
      for (int j = 0; j < count; ++j) out[j * to.stride_extent] = values[j];
    }
  }
}

// --- products ------------------------------------------------------------------------------------

namespace {

typedef float Vector __attribute__((vector_size(32), aligned(4), may_alias));

template <int kVectors>
void multiply_columns(float* d, size_t pitch, const float* a, const float* b, int n, int k) {
  Vector sum[4][kVectors];
  for (int row = 0; row < 4; ++row)
    for (int v = 0; v < kVectors; ++v)
      sum[row][v] = *reinterpret_cast<const Vector*>(d + row * pitch + 8 * v);
  for (int i = 0; i < k; ++i) {
    Vector right[kVectors];
    for (int v = 0; v < kVectors; ++v)
      right[v] = *reinterpret_cast<const Vector*>(b + static_cast<size_t>(i) * n + 8 * v);
    for (int row = 0; row < 4; ++row)
      for (int v = 0; v < kVectors; ++v) sum[row][v] += a[row * k + i] * right[v];
  }
  for (int row = 0; row < 4; ++row)
    for (int v = 0; v < kVectors; ++v)
      *reinterpret_cast<Vector*>(d + row * pitch + 8 * v) = sum[row][v];
}

}  // namespace

void multiply(float* d, size_t pitch, const float* a, const float* b, int m, int n, int k) {
  for (int row = 0; row < m; row += 4) {
    int column = 0;
    for (; column + 16 <= n; column += 16)
      multiply_columns<2>(d + row * pitch + column, pitch, a + row * k, b + column, n, k);
    if (column < n)
      multiply_columns<1>(d + row * pitch + column, pitch, a + row * k, b + column, n, k);
  }
}

// --- ldmatrix, stmatrix --------------------------------------------------------------------------

namespace {

struct MatrixArgument {
  uint32_t* registers;
  saddr address;
  Fiber* fiber;
};

// Lane and half that hold element (row, column) of an 8x8 matrix.
int holder_lane(int row, int column, bool transposed) {
  return transposed ? column * 4 + row / 2 : row * 4 + column / 2;
}
int holder_half(int row, int column, bool transposed) { return (transposed ? row : column) & 1; }

// Extra wavefronts of reading or writing 8 rows of 16 bytes.
void count_bank_conflicts(void** arguments, int matrix) {
  int rows_of_bank[8] = {};
  int worst = 1;
  for (int row = 0; row < 8; ++row) {
    const saddr address = static_cast<MatrixArgument*>(arguments[matrix * 8 + row])->address;
    worst = std::max(worst, ++rows_of_bank[address / 16 % 8]);
  }
  machine.counters.bank_conflicts += worst - 1;
}

}  // namespace

void ldmatrix(uint32_t* registers, int count, bool transposed, saddr address, Where where) {
  MatrixArgument mine{registers, address, &self()};
  warp_rendezvous(transposed ? "ldmatrix.trans" : "ldmatrix", where, &mine, [&](void** arguments) {
    for (int matrix = 0; matrix < count; ++matrix) {
      count_bank_conflicts(arguments, matrix);
      for (int row = 0; row < 8; ++row) {
        const auto& source = *static_cast<MatrixArgument*>(arguments[matrix * 8 + row]);
        check_alignment(source.address, 16, "ldmatrix");
        Cta& cta = cta_of(source.address);
        const uint32_t offset = shared_offset(cta, source.address, 16);
        if (machine.race)
          observe_shared(cta, offset, 16, false, thread_access(*source.fiber, where));
        uint16_t elements[8];
        memcpy(elements, cta.generic.data() + offset, 16);
        for (int column = 0; column < 8; ++column) {
          const int lane = holder_lane(row, column, transposed);
          const int shift = 16 * holder_half(row, column, transposed);
          uint32_t& to = static_cast<MatrixArgument*>(arguments[lane])->registers[matrix];
          to = (to & ~(0xffffu << shift)) | static_cast<uint32_t>(elements[column]) << shift;
        }
      }
    }
  });
}

void stmatrix(const uint32_t* registers, int count, bool transposed, saddr address, Where where) {
  require_architecture(90, 129, "stmatrix", where);
  MatrixArgument mine{const_cast<uint32_t*>(registers), address, &self()};
  warp_rendezvous(transposed ? "stmatrix.trans" : "stmatrix", where, &mine, [&](void** arguments) {
    for (int matrix = 0; matrix < count; ++matrix) {
      count_bank_conflicts(arguments, matrix);
      for (int row = 0; row < 8; ++row) {
        const auto& target = *static_cast<MatrixArgument*>(arguments[matrix * 8 + row]);
        check_alignment(target.address, 16, "stmatrix");
        Cta& cta = cta_of(target.address);
        const uint32_t offset = shared_offset(cta, target.address, 16);
        uint16_t elements[8];
        for (int column = 0; column < 8; ++column) {
          const int lane = holder_lane(row, column, transposed);
          const uint32_t bits = static_cast<MatrixArgument*>(arguments[lane])->registers[matrix];
          elements[column] =
              static_cast<uint16_t>(bits >> (16 * holder_half(row, column, transposed)));
        }
        if (machine.race)
          observe_shared(cta, offset, 16, true, thread_access(*target.fiber, where));
        // Every lane's fence covers what the warp stored on its behalf: the data lie in the dirty
        // list of the lane that gave the address.
        generic_store(*target.fiber, cta, offset, elements, 16);
      }
    }
  });
}

// --- mma.sync ------------------------------------------------------------------------------------

void mma_m16n8k16(Format format, float* d, const uint32_t* a, const uint32_t* b, Where where) {
  struct Argument {
    float* d;
    const uint32_t *a, *b;
  } mine{d, a, b};
  warp_rendezvous("mma.m16n8k16", where, &mine, [format](void** arguments) {
    ++machine.counters.mma;
    alignas(32) float left[16 * 16], right[16 * 8], sum[16 * 8];
    float pair[2];
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const auto& from = *static_cast<Argument*>(arguments[lane]);
      const int g = lane / 4, q = lane % 4 * 2;
      for (int i = 0; i < 4; ++i) {
        unpack_register(format, from.a[i], pair);
        float* to = left + (g + i % 2 * 8) * 16 + q + i / 2 * 8;
        to[0] = pair[0];
        to[1] = pair[1];
        sum[(g + i / 2 * 8) * 8 + q + i % 2] = from.d[i];
      }
      for (int i = 0; i < 2; ++i) {
        unpack_register(format, from.b[i], pair);
        right[(q + i * 8) * 8 + g] = pair[0];
        right[(q + i * 8 + 1) * 8 + g] = pair[1];
      }
    }
    multiply(sum, 8, left, right, 16, 8, 16);
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const auto& to = *static_cast<Argument*>(arguments[lane]);
      const int g = lane / 4, q = lane % 4 * 2;
      for (int i = 0; i < 4; ++i) to.d[i] = sum[(g + i / 2 * 8) * 8 + q + i % 2];
    }
  });
}

}  // namespace cf::emulate
