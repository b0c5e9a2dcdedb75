// The compile-time shape of the sm90 kernels and their shared-memory layout: one definition for kernels and plan().
#pragma once

#include <algorithm>

#include "qao/types.h"

namespace qao::mm8::sm90 {

constexpr int kTileN = 128;  // rows of W per CTA: two warpgroups of 64
constexpr int kConsumerThreads = 256, kProducerThreads = 128;
constexpr int kMaxSharedBytes = 226 * 1024;
constexpr int kMaxSplit = 8;                              // CTAs of a cluster
constexpr int64_t kMaxIntegerK = (int64_t{1} << 17) - 1;  // sums of (-128)^2 stay below 2^31

// The tiles of configs.inc that registers allow: folding keeps two sets of sums, an operand in registers takes room
// too.
constexpr bool fits(int tokens, bool folds, bool from_registers) {
  return tokens <= (!folds ? 256 : from_registers ? 128 : 192);
}

// The epilogue transposes through shared memory: rows of tokens, padded against bank conflicts.
constexpr int kPaddedN = 64 + 4, kChunkTokens = 16;
constexpr int kHalfChunkTokens = 32, kHalfRowBytes = 64 * 2 + 16;
constexpr int kEpilogueBytes =
    2 * 2 * std::max(kChunkTokens * kPaddedN * 4, kHalfChunkTokens* kHalfRowBytes);  // two chunks of each warpgroup

// A stage holds 128 bytes of each token: 64 columns of an x of 16 bits, 128 of 8.
struct Stage {
  int x, weight, scales, columns;  // bytes; columns: floats per token that the scaling of sums needs
  int bytes, count, epilogue, total;

  constexpr Stage(bool float_x, bool packed, bool has_columns, int tokens)
      : x(tokens * 128),
        weight(kTileN * (float_x ? 64 : 128) / (packed ? 2 : 1)),
        scales(packed ? 4 * kTileN * 2 * 4 : 0),  // four groups, scale and zero point, float32 at most
        columns(has_columns ? (packed ? 4 : 1) * tokens * 4 : 0),
        bytes((x + weight + scales + columns + 1023) / 1024 * 1024),
        count(std::min(8, (kMaxSharedBytes - kEpilogueBytes - 2 * 2 * tokens * 4) / bytes)),
        epilogue(count * bytes),
        total(epilogue + kEpilogueBytes + 2 * 2 * tokens * 4) {}  // each warpgroup's scales and zero points of x
};

}  // namespace qao::mm8::sm90
