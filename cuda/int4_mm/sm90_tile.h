// The compile-time shape of the sm90 kernels and their shared-memory layout: one definition for kernels and plan().
#pragma once

#include <algorithm>

#include "qao/types.h"

namespace qao::int4_mm::sm90 {

constexpr int kRows = 128;  // of W per CTA: two warpgroups of 64
constexpr int kConsumerThreads = 256, kProducerThreads = 128;
constexpr int kMaxSharedBytes = 226 * 1024;  // of a multiprocessor
constexpr int kMaxSplit = 8;                 // CTAs of a cluster

// A float32 x needs a second set of sums; see Kernel.
constexpr bool serves(int tokens, bool exact) { return !exact || tokens <= 128; }
constexpr bool splits(int tokens) { return tokens <= 128; }

// Making an operand in registers for few tokens leaves the tensor cores idle half of the time.
constexpr int ctas_per_sm(int tokens, bool exact) { return !exact && tokens <= 64 ? 2 : 1; }

// The epilogue transposes through shared memory: rows of tokens, padded against bank conflicts.
constexpr int kPaddedRows = 64 + 4, kChunkRowBytes = 64 * 2 + 16;

constexpr int kRowScaleBytes = 8;  // of one row of W in one group: see RowScale

// A stage holds 64 columns of W and x.
struct Stage {
  int x, weight, scales;  // bytes; scales as they are stored: two groups of 32, scale and zero point, float32 at most
  int made;               // scales made ready for the operand, or, `exact`, sums of x for two groups
  int bytes, chunk_tokens, count, epilogue, total;

  constexpr Stage(bool exact, int tokens)
      : x(tokens * 128),
        weight(kRows * 64 / 2),
        scales(2 * kRows * 2 * 4),
        made(exact ? 2 * tokens * 4 : 2 * kRows * kRowScaleBytes),
        bytes((x + weight + scales + made + 1023) / 1024 * 1024),
        chunk_tokens(ctas_per_sm(tokens, exact) == 1 ? 32 : 16),
        count(std::min(8, (kMaxSharedBytes / ctas_per_sm(tokens, exact) - 4 * chunk_tokens * kChunkRowBytes) / bytes)),
        epilogue(count * bytes),
        total(epilogue + 4 * chunk_tokens * kChunkRowBytes) {}  // two chunks of each warpgroup
};

}  // namespace qao::int4_mm::sm90
