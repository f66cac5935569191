// A tensor as scaled 8-bit floats, in the order in which the fp8 kernels read them:
//   scale = max(amax / 448, 2^-126) of a block, 1 where amax is 0;  data = e4m3(x * (1 / scale))
// cupyflash/fp8.py defines every bit of it, says why tokens are reordered where data is transposed,
// and cites the papers (Shah et al. 2024, arXiv 2407.08608; Chee et al. 2023, arXiv 2307.13304).
//
// A CTA makes one tile: a slot of 64 or 128 tokens of one sequence and head, all channels. Every
// thread holds kPieces pieces of 16 channels of a token in registers; all threads do the same:
//
//   load      32 bytes of x a piece, all pieces before the first is used; zero behind the last
//             token and channel
//   rotate    with kRotate: signs, then the butterfly of a Hadamard matrix, at distances below 16
//             inside a piece, from there on between the lanes that hold neighbouring pieces
//   top       the largest finite magnitude: of the tile by shuffles and tops_smem of the warps, of
//             a token by tokens_smem (kTokenScale)
//   convert   16 bytes of data a piece
//   store     data as it is; data_t by way of tile_smem
//
// A scale of a whole sequence or tensor is known when all tiles have been read: one launch then
// writes the tops of the tiles, one reduces them to scales (a CTA each), one converts. The maxima
// are exact, so their order does not matter, and nothing has to be zero before.
//
// Shared memory, with P = kPieces * kThreads pieces:
//   0      tile_smem    [16-byte pieces]  P * 16   data, token after token
//   P * 16 tokens_smem  [float]           P * 4    tops of pieces, token after token; in place of
//                                                  the first, 1 / scale of the token (kTokenScale)
//   P * 20 tops_smem    [float]           32 * 4   tops of warps
//
// Barriers: a cta_sync between tops and their readers, between scales of tokens and their readers,
// and between tile_smem and its readers. A CTA makes one tile, so there is no way back.
#pragma once
#include "any/quantize_params.cuh"
#include "attn/sequence.cuh"
#include "ptx/ptx.cuh"
#include "tile/math.cuh"
#include "types.cuh"

namespace cf::any {

inline constexpr int kPieceChannels = 16;
inline constexpr int kPieceBytes = 16;
inline constexpr float kMaxE4m3 = 448.0f;
inline constexpr float kMinScale = 0x1p-126f;  // its inverse is finite
inline constexpr int kMaxWarps = 32;

// kMutant: the barrier that is left out.
enum QuantizeMutant { kNoTopsBarrier = 1, kNoTokensBarrier, kNoTileBarrier };
inline constexpr int kQuantizeMutants = 3;

template <class Config>
struct QuantizeLayout {
  static constexpr int kPieces = Config::kPieces * Config::kThreads;
  static constexpr int kTileOffset = 0;
  static constexpr int kTokensOffset = kPieces * kPieceBytes;
  static constexpr int kTopsOffset = kTokensOffset + kPieces * 4;
  static constexpr int kBytes = kTopsOffset + kMaxWarps * 4;
};

CF_DEVICE float scale_of(float top) {
  return top == 0.0f ? 1.0f : ptx::fmax(top / kMaxE4m3, kMinScale);
}

// Of numbers that are not negative, in half the instructions.
CF_DEVICE int quotient(int a, int b) {
  return static_cast<int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

// The first slot of packed sequence `s`.
CF_DEVICE int first_slot(const QuantizeParams& params, int s) {
  return (clamp(read_or(params.cu_seqlens, s, 0), 0, params.rows) >> params.slot_log2) + s;
}

// The tokens of a slot: rows [begin, begin + count) of x.
struct TokenSlot {
  int sequence;     // its index
  int array_batch;  // index into the arrays
  int column;       // of data_t, in slots
  int begin;        // row of the slot's first token
  int count;        // tokens of the sequence, at most those of a slot
  int stored;       // rows of data that this slot writes: those behind the last sequence too
  int token_scale;  // place of the first token's own scale
  int scaled;       // how many of those this slot writes: one more than a sequence has tokens

  CF_DEVICE TokenSlot(const QuantizeParams& params, int slot) {
    const int tokens = 1 << params.slot_log2;
    if (params.cu_seqlens == nullptr) {
      sequence = array_batch = quotient(slot, params.num_slots);
      column = slot - sequence * params.num_slots;
      begin = token_scale = column * tokens;
      count = stored = scaled = min(params.rows - begin, tokens);
      return;
    }
    int low = 0, high = params.sequences;  // first_slot(low) <= slot < first_slot(high)
    while (high - low > 1) {
      const int middle = (low + high) >> 1;
      (first_slot(params, middle) <= slot ? low : high) = middle;
    }
    const int start = clamp(read_or(params.cu_seqlens, low, 0), 0, params.rows);
    const int end = clamp(read_or(params.cu_seqlens, low + 1, 0), start, params.rows);
    const int limit = low == params.sequences - 1 ? params.rows : end;
    // Not below 0 unless the first start is not 0.
    const int offset = max(slot - (start >> params.slot_log2) - low, 0) << params.slot_log2;
    sequence = low;
    array_batch = 0;
    column = slot;
    begin = start + offset;
    count = clamp(end - begin, 0, tokens);
    stored = clamp(limit - begin, 0, tokens);
    token_scale = begin + low;
    scaled = clamp(limit - begin + 1, 0, tokens);
  }
};

// Where piece i of a thread lies in its tile.
template <class Config>
struct Place {
  int idx;      // among the pieces of the tile, token after token
  int token;    // row of the slot
  int channel;  // the piece's first
  bool exists;  // all or no lanes of a warp: a slot has a multiple of 32 pieces

  CF_DEVICE Place(const QuantizeParams& params, int i) {
    idx = i * Config::kThreads + ptx::tid();
    // idx / pieces: exact while idx * (pieces * reciprocal - 2^16) < 2^16, which is below 15 idx.
    static_assert(15 * Config::kPieces * Config::kThreads < 1 << 16);
    token = idx * params.reciprocal >> 16;
    channel = (idx - token * params.pieces) * kPieceChannels;
    exists = token >> params.slot_log2 == 0;
  }
};

// One instruction: a stride of tokens has 32 bits.
CF_DEVICE int64_t row_offset(int token, int64_t stride) {
  return static_cast<int64_t>(token) * static_cast<int32_t>(stride);
}

// Sixteen channels of a token, as they were read.
template <class Element>
struct RawPiece {
  uint32_t words[8];

  // `channels` of them exist.
  CF_DEVICE void load(const Element* x, int channels) {
    CF_UNROLL
    for (int half = 0; half < 2; ++half) {
      u32x4 v = {0, 0, 0, 0};
      if (8 * half < channels) v = ptx::ldg128(x + 8 * half);
      words[4 * half] = v.x;
      words[4 * half + 1] = v.y;
      words[4 * half + 2] = v.z;
      words[4 * half + 3] = v.w;
    }
  }
  CF_DEVICE void negate(uint32_t negated) {  // see QuantizeParams
    constexpr uint32_t kSigns = 0x80008000u;
    CF_UNROLL
    for (int i = 0; i < 8; ++i) words[i] ^= negated << i & kSigns;
  }
  CF_DEVICE void widen(float (&values)[kPieceChannels]) const {
    CF_UNROLL
    for (int i = 0; i < 8; ++i) {
      ptx::unpack2<Element>(values[2 * i], values[2 * i + 1], words[i]);
    }
  }
};

// A piece times the Hadamard matrix. All lanes of the warp must call it: a matrix of more than 16
// channels spans a power of two of lanes, and begins at a multiple of it.
CF_DEVICE void mix_channels(const QuantizeParams& params, float (&values)[kPieceChannels]) {
  CF_UNROLL
  for (int distance = 1; distance < kPieceChannels; distance *= 2) {
    if (distance >= params.rotation_width) break;
    CF_UNROLL
    for (int i = 0; i < kPieceChannels; ++i) {
      if ((i & distance) != 0) continue;
      const float lower = values[i], upper = values[i + distance];
      values[i] = lower + upper;
      values[i + distance] = lower - upper;
    }
  }
  CF_NO_UNROLL
  for (int step = 1; step * kPieceChannels < params.rotation_width; step *= 2) {
    const float sign = (ptx::lane() & step) == 0 ? 1.0f : -1.0f;
    CF_UNROLL
    for (int i = 0; i < kPieceChannels; ++i) {
      // The sum, in the upper lane lower minus upper, rounded as an addition would.
      values[i] = ptx::fma(values[i], sign, ptx::shfl_xor(values[i], step));
    }
  }
  CF_UNROLL
  for (int i = 0; i < kPieceChannels; ++i) {
    values[i] = ptx::mul(values[i], params.rotation_factor);
  }
}

// The largest finite magnitude.
CF_DEVICE float top_of(const float (&values)[kPieceChannels]) {
  float top = 0.0f;
  CF_UNROLL
  for (int i = 0; i < kPieceChannels; ++i) top = ptx::fmax(top, ptx::fabs(values[i]));
  if (top == ptx::kInfinity) {  // rare; fmax passes NaN over
    top = 0.0f;
    CF_UNROLL
    for (int i = 0; i < kPieceChannels; ++i) {
      const float magnitude = ptx::fabs(values[i]);
      top = magnitude < ptx::kInfinity ? ptx::fmax(top, magnitude) : top;
    }
  }
  return top;
}

// The largest of all threads, to all.
template <class Config>
CF_DEVICE float cta_max(float x, saddr tops_smem) {
  constexpr int kWarps = Config::kThreads / 32;
  CF_UNROLL
  for (int step = 1; step < 32; step *= 2) x = ptx::fmax(x, ptx::shfl_xor(x, step));
  if (ptx::lane() == 0) ptx::sts_f32(tops_smem + 4 * ptx::warp(), x);
  if constexpr (ptx::kMutant != kNoTopsBarrier) ptx::cta_sync();
  CF_UNROLL
  for (int warp = 0; warp < kWarps; ++warp) {
    x = ptx::fmax(x, ptx::lds_f32(tops_smem + 4 * warp));
  }
  return x;
}

// Note [Pieces of a slot in shared memory]
// Pieces are written a row at a time, and read as columns of 4 channels in 16 rows: lanes that read
// together are 16 rows apart, which is a multiple of all banks. So the low three bits of a piece's
// index are exclusive-ored with its group of 16 rows: eight groups read from all 32 banks. In slots
// of four groups a warp reads two pieces at a time, whose indices differ in the lowest bit; there
// the group is doubled.
CF_DEVICE saddr piece_smem(const QuantizeParams& params, saddr tile_smem, int idx, int group) {
  return tile_smem + kPieceBytes * (idx ^ (group << (7 - params.slot_log2)));
}

// Row i of four words becomes byte i of four words.
CF_DEVICE void transpose_bytes(uint32_t (&w)[4]) {
  constexpr uint32_t kLowBytes = 0x5140, kHighBytes = 0x7362, kLows = 0x5410, kHighs = 0x7632;
  const uint32_t low01 = ptx::prmt(w[0], w[1], kLowBytes);
  const uint32_t low23 = ptx::prmt(w[2], w[3], kLowBytes);
  const uint32_t high01 = ptx::prmt(w[0], w[1], kHighBytes);
  const uint32_t high23 = ptx::prmt(w[2], w[3], kHighBytes);
  w[0] = ptx::prmt(low01, low23, kLows);
  w[1] = ptx::prmt(low01, low23, kHighs);
  w[2] = ptx::prmt(high01, high23, kLows);
  w[3] = ptx::prmt(high01, high23, kHighs);
}

// tile_smem to data_t: a thread takes 4 channels of 16 tokens, lanes next to each other the next 16
// tokens, so that 8 (4) of them write 128 (64) bytes of a channel.
template <class Config>
CF_DEVICE void store_transposed(const QuantizeParams& params, const TokenSlot& slot, int head,
                                saddr tile_smem) {
  const int groups_log2 = params.slot_log2 - 4;
  const int count = 4 * params.pieces << groups_log2;
  uint8_t* data_t = static_cast<uint8_t*>(params.data_t) +
                    slot.array_batch * params.data_t_stride_batch +
                    head * params.data_t_stride_head +
                    (static_cast<int64_t>(slot.column) << params.slot_log2);
  // Rows 2 i + {0, second, third, 9} of a group are word i of 16 tokens.
  const int second = params.row_pairs != 0 ? 8 : 1, third = params.row_pairs != 0 ? 1 : 8;
  CF_NO_UNROLL
  for (int i = ptx::tid(); i < count; i += Config::kThreads) {
    const int group = i & ((1 << groups_log2) - 1), channel = i >> groups_log2 << 2;
    uint32_t words[4][4];  // [channel, 4 tokens]
    CF_UNROLL
    for (int word = 0; word < 4; ++word) {
      uint32_t rows[4];
      CF_UNROLL
      for (int row = 0; row < 4; ++row) {
        const int token = 16 * group + 2 * word +
                          (row == 0 ? 0 : row == 1 ? second : row == 2 ? third : 9);
        const int idx = token * params.pieces + channel / kPieceChannels;
        rows[row] = ptx::lds32(piece_smem(params, tile_smem, idx, group) +
                               (channel & (kPieceChannels - 1)));
      }
      transpose_bytes(rows);
      CF_UNROLL
      for (int c = 0; c < 4; ++c) words[c][word] = rows[c];
    }
    uint8_t* p = data_t + channel * params.data_t_stride_channel + 16 * group;
    CF_UNROLL
    for (int c = 0; c < 4; ++c) {
      ptx::stg128(p + c * params.data_t_stride_channel,
                  {words[c][0], words[c][1], words[c][2], words[c][3]});
    }
  }
}

// kReduceStage: the scale of one head of a sequence, or of the tensor, from the tops of its tiles.
template <class Config>
CF_DEVICE void reduce_tops(const QuantizeParams& params) {
  using Layout = QuantizeLayout<Config>;
  int first = 0, end = params.num_tiles, step = 1;
  if (params.kind == kHeadScale) {
    const int sequence = quotient(ptx::cta_idx(), params.heads);
    const int head = ptx::cta_idx() - sequence * params.heads;
    const auto slot = [&](int s) {
      if (params.cu_seqlens == nullptr) return s * params.num_slots;
      if (s == params.sequences) return params.num_slots;
      return first_slot(params, s);
    };
    step = params.heads;
    first = slot(sequence) * step + head;
    end = min(slot(sequence + 1) * step, end);
  }
  float top = 0.0f;
  CF_NO_UNROLL
  for (int64_t i = first + static_cast<int64_t>(ptx::tid()) * step; i < end;
       i += static_cast<int64_t>(Config::kThreads) * step) {
    top = ptx::fmax(top, ptx::bits_float(ptx::ldg32(params.tops + i)));
  }
  top = cta_max<Config>(top, ptx::smem_base() + Layout::kTopsOffset);
  if (ptx::tid() == 0) ptx::stg_f32(params.scale + ptx::cta_idx(), scale_of(top));
}

// kTokenScale: scales of a slot's tokens, and their inverses to tokens_smem, from the tops there.
template <class Config>
CF_DEVICE void scale_tokens(const QuantizeParams& params, const TokenSlot& slot, float* scale) {
  static_assert(Config::kThreads >= 128, "a thread for every token of a slot");
  const int token = ptx::tid();
  if (token >> params.slot_log2 == 0) {
    const saddr row = ptx::smem_base() + QuantizeLayout<Config>::kTokensOffset +
                      4 * token * params.pieces;
    float top = 0.0f;
    CF_NO_UNROLL
    for (int piece = 0; piece < params.pieces; ++piece) {
      top = ptx::fmax(top, ptx::lds_f32(row + 4 * piece));
    }
    const float own = scale_of(top);
    ptx::sts_f32(row, 1.0f / own);
    if (token < slot.scaled) ptx::stg_f32(scale + slot.token_scale + token, own);
  }
  if constexpr (ptx::kMutant != kNoTokensBarrier) ptx::cta_sync();
}

// The pieces of a thread, in registers.
template <class Config>
struct Tile {
  using Element = typename Config::Element;
  using Layout = QuantizeLayout<Config>;
  static constexpr int kPieces = Config::kPieces;

  RawPiece<Element> raw[kPieces];
  float rotated[Config::kRotate != 0 ? kPieces : 1][kPieceChannels];

  CF_DEVICE void load(const QuantizeParams& params, const TokenSlot& slot, int head) {
    const auto* x = static_cast<const Element*>(params.x) +
                    slot.array_batch * params.x_stride_batch + head * params.x_stride_head +
                    slot.begin * params.x_stride_seqlen;
    CF_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const Place<Config> place(params, i);
      raw[i].load(x + row_offset(place.token, params.x_stride_seqlen) + place.channel,
                  place.token < slot.count ? params.head_dim - place.channel : 0);
    }
    if constexpr (Config::kRotate != 0) {
      CF_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        const Place<Config> place(params, i);
        raw[i].negate(static_cast<uint32_t>(params.negated[place.channel / kPieceChannels]));
        raw[i].widen(rotated[i]);
        if (place.exists) mix_channels(params, rotated[i]);
      }
    }
  }
  CF_DEVICE void values(int i, float (&v)[kPieceChannels]) const {
    if constexpr (Config::kRotate != 0) {
      CF_UNROLL
      for (int c = 0; c < kPieceChannels; ++c) v[c] = rotated[i][c];
    } else {
      raw[i].widen(v);
    }
  }

  // The top of the tile, to all threads; with `by_token` also to tokens_smem, of each piece.
  CF_DEVICE float tops(const QuantizeParams& params, bool by_token) const {
    float top = 0.0f;
    CF_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      float v[kPieceChannels];
      values(i, v);
      const float of_piece = top_of(v);
      top = ptx::fmax(top, of_piece);
      if (by_token) {
        const Place<Config> place(params, i);
        const saddr tokens_smem = ptx::smem_base() + Layout::kTokensOffset;
        if (place.exists) ptx::sts_f32(tokens_smem + 4 * place.idx, of_piece);
      }
    }
    return cta_max<Config>(top, ptx::smem_base() + Layout::kTopsOffset);
  }

  // Numbers to data and tile_smem. `inverse` is 1 / scale of the tile.
  CF_DEVICE void convert(const QuantizeParams& params, const TokenSlot& slot, int head,
                         float inverse) const {
    const saddr tokens_smem = ptx::smem_base() + Layout::kTokensOffset;
    const saddr tile_smem = ptx::smem_base() + Layout::kTileOffset;
    uint8_t* data = static_cast<uint8_t*>(params.data) +
                    slot.array_batch * params.data_stride_batch + head * params.data_stride_head +
                    slot.begin * params.data_stride_seqlen;
    const int stored = params.data != nullptr ? slot.stored : 0;
    CF_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const Place<Config> place(params, i);
      if (!place.exists) continue;
      if (params.kind == kTokenScale) {
        inverse = ptx::lds_f32(tokens_smem + 4 * place.token * params.pieces);
      }
      float v[kPieceChannels];
      values(i, v);
      uint32_t words[4];
      CF_UNROLL
      for (int w = 0; w < 4; ++w) {
        words[w] = ptx::pack4_e4m3(ptx::mul(v[4 * w], inverse), ptx::mul(v[4 * w + 1], inverse),
                                   ptx::mul(v[4 * w + 2], inverse),
                                   ptx::mul(v[4 * w + 3], inverse));
        if constexpr (Config::kRotate != 0) {
          if (place.token >= slot.count) words[w] = 0;  // a rotated zero may be negative
        }
      }
      const u32x4 numbers = {words[0], words[1], words[2], words[3]};
      if (place.token < stored) {
        ptx::stg128(data + row_offset(place.token, params.data_stride_seqlen) + place.channel,
                    numbers);
      }
      if (params.data_t != nullptr) {
        ptx::sts128(piece_smem(params, tile_smem, place.idx, place.token / 16), numbers);
      }
    }
  }
};

// The body of the kernel.
template <class Config>
CF_DEVICE void quantize(const QuantizeParams& params) {
  if (params.stage == kReduceStage) {
    reduce_tops<Config>(params);
    return;
  }
  const int flat_slot = quotient(ptx::cta_idx(), params.heads);
  const int head = ptx::cta_idx() - flat_slot * params.heads;
  const TokenSlot slot(params, flat_slot);
  Tile<Config> tile;
  tile.load(params, slot, head);
  float scale = 1.0f;
  if (params.stage == kConvertStage) {
    const int place = params.kind == kHeadScale ? slot.sequence * params.heads + head : 0;
    scale = ptx::bits_float(ptx::ldg32(params.scale + place));
  } else {
    const float top = tile.tops(params, params.kind == kTokenScale);
    if (params.stage == kTopsStage) {
      if (ptx::tid() == 0) ptx::stg_f32(params.tops + ptx::cta_idx(), top);
      return;
    }
    scale = scale_of(top);
    float* scales = params.scale + slot.array_batch * params.scale_stride_batch +
                    head * params.scale_stride_head;
    if (params.kind == kTokenScale) scale_tokens<Config>(params, slot, scales);
    if (params.kind == kBlockScale && ptx::tid() == 0) ptx::stg_f32(scales + slot.column, scale);
  }
  tile.convert(params, slot, head, 1.0f / scale);
  if (params.data_t != nullptr) {
    if constexpr (ptx::kMutant != kNoTileBarrier) ptx::cta_sync();
    store_transposed<Config>(params, slot, head, ptx::smem_base());
  }
}

}  // namespace cf::any
