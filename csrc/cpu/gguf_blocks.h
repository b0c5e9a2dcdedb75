// Blocks of GGUF weights: sizes, codes and scales of every type.
// A row of W is a run of blocks. Every block type is read as codes 0..255 and, per segment of 16 columns, a scale and a
// minimum:
//   w = scale * (code - kOffset) - minimum
// in float32 with the roundings of the formats' definition. The anonymous namespace: see numeric.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/numeric.h"

namespace qao::cpu::gguf {
namespace {

constexpr int kSegment = 16;  // columns
constexpr int kUnit = 256;    // columns that kernels treat at a time: one block, or eight of 32 columns
constexpr int kUnitSegments = kUnit / kSegment;

// ggml's type numbers.
enum Type : int {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIq4Nl = 20,
  kIq4Xs = 23,
};

// IQ4_NL's and IQ4_XS's values plus 128.
constexpr uint8_t kIq4Codes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

inline uint16_t load16(const uint8_t* bytes) {
  uint16_t value;
  std::memcpy(&value, bytes, 2);
  return value;
}
inline uint32_t load32(const uint8_t* bytes) {
  uint32_t value;
  std::memcpy(&value, bytes, 4);
  return value;
}
inline float half(const uint8_t* bytes) {
#if defined(__F16C__)
  typedef short Shorts8 __attribute__((vector_size(16)));
  return __builtin_ia32_vcvtph2ps(Shorts8{static_cast<short>(load16(bytes))})[0];
#else
  return from_fp16(load16(bytes));
#endif
}

// A vector: compilers unroll loops of 16 to scalar code.
typedef uint8_t Bytes16 __attribute__((vector_size(16)));

// Nibbles of 16 bytes: columns 0..15 are the lower ones.
inline void split_nibbles(const uint8_t* bytes, uint8_t* codes) {
  Bytes16 both;
  std::memcpy(&both, bytes, 16);
  const Bytes16 low = both & 15, high = both >> 4;
  std::memcpy(codes, &low, 16), std::memcpy(codes + 16, &high, 16);
}
inline void to_iq4(uint8_t* codes, int count) {
#if defined(__SSSE3__)
  typedef char Chars16 __attribute__((vector_size(16)));
  Chars16 table, values;
  std::memcpy(&table, kIq4Codes, 16);
  for (int i = 0; i < count; i += 16) {
    std::memcpy(&values, codes + i, 16);
    values = __builtin_ia32_pshufb128(table, values);
    std::memcpy(codes + i, &values, 16);
  }
#else
  for (int i = 0; i < count; ++i) codes[i] = kIq4Codes[codes[i]];
#endif
}
inline void add_fifth_bits(uint32_t bits, uint8_t* codes) {
  constexpr uint64_t kOnes = 0x0101010101010101;
  for (int i = 0; i < 4; ++i) {  // byte j of `spread` is bit j, in its place
    const uint64_t spread = (bits >> 8 * i & 0xFF) * kOnes & 0x8040201008040201;
    uint64_t eight;
    std::memcpy(&eight, codes + 8 * i, 8);
    eight |= (spread + 0x7F * kOnes) >> 3 & 0x10 * kOnes;
    std::memcpy(codes + 8 * i, &eight, 8);
  }
}

// Calls visit(half, run, i) for the 256 columns of a block, in loops of 32 that compilers vectorize.
template <typename Visit>
inline void each_run(const Visit& visit) {
  for (int half = 0; half < 2; ++half) {
    for (int run = 0; run < 4; ++run) {
      for (int i = 0; i < 32; ++i) visit(half, run, i);
    }
  }
}

// The eight 6-bit scales, then the eight 6-bit minima, of Q4_K and Q5_K from their 12 bytes.
inline void split_scales(const uint8_t* bytes, uint8_t (&values)[16]) {
  const uint32_t low = load32(bytes), high = load32(bytes + 4), both = load32(bytes + 8);
  const uint32_t words[4] = {low & 0x3F3F3F3F, (both & 0x0F0F0F0F) | (low >> 2 & 0x30303030), high & 0x3F3F3F3F,
                             (both >> 4 & 0x0F0F0F0F) | (high >> 2 & 0x30303030)};
  std::memcpy(values, words, 16);
}

// A block type has
//   kColumns, kBytes   of a block
//   kOffset            subtracted from codes
//   kHasMinima         otherwise minima are 0, and scales() leaves them out
//   codes()            codes of the columns, in order
//   scales()           scales and minima of the segments, in order
template <Type>
struct Blocks;

struct Of32 {
  static constexpr int kColumns = 32;
  static constexpr bool kHasMinima = false;
};
template <>
struct Blocks<kQ4_0> : Of32 {
  static constexpr int kBytes = 18, kOffset = 8;
  static void codes(const uint8_t* block, uint8_t* codes) { split_nibbles(block + 2, codes); }
  static void scales(const uint8_t* block, float* scale, float*) { scale[0] = scale[1] = half(block); }
};
template <>
struct Blocks<kQ5_0> : Of32 {
  static constexpr int kBytes = 22, kOffset = 16;
  static void codes(const uint8_t* block, uint8_t* codes) {
    split_nibbles(block + 6, codes), add_fifth_bits(load32(block + 2), codes);
  }
  static void scales(const uint8_t* block, float* scale, float*) { scale[0] = scale[1] = half(block); }
};
template <>
struct Blocks<kQ8_0> : Of32 {
  static constexpr int kBytes = 34, kOffset = 128;
  static void codes(const uint8_t* block, uint8_t* codes) {
    for (int i = 0; i < 32; ++i) codes[i] = block[2 + i] ^ 0x80;
  }
  static void scales(const uint8_t* block, float* scale, float*) { scale[0] = scale[1] = half(block); }
};
template <>
struct Blocks<kIq4Nl> : Of32 {
  static constexpr int kBytes = 18, kOffset = 128;
  static void codes(const uint8_t* block, uint8_t* codes) {
    split_nibbles(block + 2, codes);
    to_iq4(codes, 32);
  }
  static void scales(const uint8_t* block, float* scale, float*) { scale[0] = scale[1] = half(block); }
};

struct Of32WithMinima {
  static constexpr int kColumns = 32, kOffset = 0;
  static constexpr bool kHasMinima = true;
  static void scales(const uint8_t* block, float* scale, float* minimum) {
    scale[0] = scale[1] = half(block), minimum[0] = minimum[1] = -half(block + 2);
  }
};
template <>
struct Blocks<kQ4_1> : Of32WithMinima {
  static constexpr int kBytes = 20;
  static void codes(const uint8_t* block, uint8_t* codes) { split_nibbles(block + 4, codes); }
};
template <>
struct Blocks<kQ5_1> : Of32WithMinima {
  static constexpr int kBytes = 24;
  static void codes(const uint8_t* block, uint8_t* codes) {
    split_nibbles(block + 8, codes), add_fifth_bits(load32(block + 4), codes);
  }
};

template <>
struct Blocks<kQ2_K> {
  static constexpr int kColumns = 256, kBytes = 84, kOffset = 0;
  static constexpr bool kHasMinima = true;
  static void codes(const uint8_t* block, uint8_t* codes) {
    each_run(
        [&](int half, int run, int i) { codes[128 * half + 32 * run + i] = block[16 + 32 * half + i] >> 2 * run & 3; });
  }
  static void scales(const uint8_t* block, float* scale, float* minimum) {
    const float d = half(block + 80), least = half(block + 82);
    for (int s = 0; s < 16; ++s) scale[s] = d * (block[s] & 15), minimum[s] = least * (block[s] >> 4);
  }
};
template <>
struct Blocks<kQ3_K> {
  static constexpr int kColumns = 256, kBytes = 110, kOffset = 4;
  static constexpr bool kHasMinima = false;
  static void codes(const uint8_t* block, uint8_t* codes) {
    each_run([&](int half, int run, int i) {
      const int low = block[32 + 32 * half + i] >> 2 * run & 3, high = block[i] >> (4 * half + run) & 1;
      codes[128 * half + 32 * run + i] = static_cast<uint8_t>(low | high << 2);
    });
  }
  static void scales(const uint8_t* block, float* scale, float*) {
    const uint8_t* bytes = block + 96;
    const uint32_t low[2] = {load32(bytes), load32(bytes + 4)}, high = load32(bytes + 8);
    uint32_t words[4];
    for (int i = 0; i < 4; ++i) {
      words[i] = (low[i % 2] >> i / 2 * 4 & 0x0F0F0F0F) | (high >> 2 * i & 0x03030303) << 4;
    }
    uint8_t values[16];
    std::memcpy(values, words, 16);
    const float d = half(block + 108);
    for (int s = 0; s < 16; ++s) scale[s] = d * static_cast<float>(values[s] - 32);
  }
};

// Q4_K and Q5_K.
struct SixBitScales {
  static constexpr int kColumns = 256, kOffset = 0;
  static constexpr bool kHasMinima = true;
  static void scales(const uint8_t* block, float* scale, float* minimum) {
    const float d = half(block), least = half(block + 2);
    uint8_t values[16];
    split_scales(block + 4, values);
    for (int s = 0; s < 16; ++s) scale[s] = d * values[s / 2], minimum[s] = least * values[8 + s / 2];
  }
};
template <>
struct Blocks<kQ4_K> : SixBitScales {
  static constexpr int kBytes = 144;
  static void codes(const uint8_t* block, uint8_t* codes) {
    each_run([&](int half, int run, int i) {
      codes[128 * half + 32 * run + i] = block[16 + 64 * half + run / 2 * 32 + i] >> run % 2 * 4 & 15;
    });
  }
};
template <>
struct Blocks<kQ5_K> : SixBitScales {
  static constexpr int kBytes = 176;
  static void codes(const uint8_t* block, uint8_t* codes) {
    each_run([&](int half, int run, int i) {
      const int low = block[48 + 64 * half + run / 2 * 32 + i] >> run % 2 * 4 & 15;
      const int high = block[16 + i] >> (4 * half + run) & 1;
      codes[128 * half + 32 * run + i] = static_cast<uint8_t>(low | high << 4);
    });
  }
};
template <>
struct Blocks<kQ6_K> {
  static constexpr int kColumns = 256, kBytes = 210, kOffset = 32;
  static constexpr bool kHasMinima = false;
  static void codes(const uint8_t* block, uint8_t* codes) {
    each_run([&](int half, int run, int i) {
      const int low = block[64 * half + 32 * (run % 2) + i] >> run / 2 * 4 & 15;
      const int high = block[128 + 32 * half + i] >> 2 * run & 3;
      codes[128 * half + 32 * run + i] = static_cast<uint8_t>(low | high << 4);
    });
  }
  static void scales(const uint8_t* block, float* scale, float*) {
    const float d = half(block + 208);
    for (int s = 0; s < 16; ++s) scale[s] = d * static_cast<int8_t>(block[192 + s]);
  }
};
template <>
struct Blocks<kIq4Xs> {
  static constexpr int kColumns = 256, kBytes = 136, kOffset = 128;
  static constexpr bool kHasMinima = false;
  static void codes(const uint8_t* block, uint8_t* codes) {
    for (int i = 0; i < 8; ++i) split_nibbles(block + 8 + 16 * i, codes + 32 * i);
    to_iq4(codes, 256);
  }
  static void scales(const uint8_t* block, float* scale, float*) {
    const float d = half(block);
    const int high = load16(block + 2);
    for (int s = 0; s < 16; ++s) {
      const int group = s / 2, low = block[4 + group / 2] >> group % 2 * 4 & 15;
      scale[s] = d * static_cast<float>((low | (high >> 2 * group & 3) << 4) - 32);
    }
  }
};

template <Type kType>
constexpr int64_t kUnitBytes = kUnit / Blocks<kType>::kColumns * Blocks<kType>::kBytes;

// Columns that have one scale.
constexpr int scale_columns(Type type) { return type == kQ2_K || type == kQ3_K || type == kQ6_K ? 16 : 32; }

// Segments of 256 columns in the order in which SIMD kernels find them in W: four vectors of four.
struct Segments {
  uint8_t of[kUnitSegments];
};
constexpr Segments segment_order(Type type) {
  switch (type) {
    case kQ4_K:
    case kQ5_K:  // 16 bytes of each of the four runs of 32: lower nibbles, then upper ones
      return {{0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15}};
    case kQ2_K:
    case kQ3_K:  // 64 bytes, shifted
      return {{0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15}};
    case kQ8_0:
    case kQ6_K:
      return {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
    default:  // lower nibbles of four runs of 16 bytes, then upper ones
      return {{0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15}};
  }
}
constexpr Segments inverse(Segments order) {
  Segments places = {};
  for (int i = 0; i < kUnitSegments; ++i) places.of[order.of[i]] = static_cast<uint8_t>(i);
  return places;
}

// Calls visit<type>(). `type` is one of Type.
template <typename Visit>
inline auto with_type(int type, const Visit& visit) {
  switch (type) {
    case kQ4_0:
      return visit.template operator()<kQ4_0>();
    case kQ4_1:
      return visit.template operator()<kQ4_1>();
    case kQ5_0:
      return visit.template operator()<kQ5_0>();
    case kQ5_1:
      return visit.template operator()<kQ5_1>();
    case kQ8_0:
      return visit.template operator()<kQ8_0>();
    case kQ2_K:
      return visit.template operator()<kQ2_K>();
    case kQ3_K:
      return visit.template operator()<kQ3_K>();
    case kQ4_K:
      return visit.template operator()<kQ4_K>();
    case kQ5_K:
      return visit.template operator()<kQ5_K>();
    case kQ6_K:
      return visit.template operator()<kQ6_K>();
    case kIq4Nl:
      return visit.template operator()<kIq4Nl>();
    default:
      return visit.template operator()<kIq4Xs>();
  }
}

}  // namespace
}  // namespace qao::cpu::gguf
