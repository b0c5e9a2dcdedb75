// The compile-time shape of the sm90 kernels and their shared-memory layout: one definition for kernels and plan().
#pragma once

#include <algorithm>

#include "mm8/workspace.h"
#include "qao/mm8.h"

namespace qao::mm8::sm90 {

constexpr int kTileN = 128;  // rows of W per CTA at most: two warpgroups of 64
constexpr int kConsumerThreads = 256, kProducerThreads = 128;
constexpr int kMaxSharedBytes = 226 * 1024;  // of a multiprocessor
constexpr int kMaxCluster = 8;
constexpr int64_t kMaxIntegerK = (int64_t{1} << 17) - 1;  // sums of (-128)^2 stay below 2^31

// What decides which kernel serves a problem, and with which tiles.
struct Traits {
  bool float_x;
  bool packed;   // W is int4
  bool columns;  // scaling the sums needs a value per token: a sum of x or a scale of it
  bool folds;    // sums are scaled during the walk over K: a second set of them
  bool swapped;  // tokens are the 64-row operand and rows of W its columns, as many of them

  // Whether the tile is compiled. Folding and an operand in registers take room of the sums.
  constexpr bool serves(int tokens) const {
    if (tokens == 32) return !(folds && float_x);
    return tokens <= (!folds ? 256 : packed || float_x || columns ? 128 : 192);
  }
  // Columns of a K-tile. What surrounds its products takes as long for few tokens as for many.
  constexpr int tile_k(int tokens) const { return !float_x || (!folds && tokens <= 128) ? 128 : 64; }
};
// Each warpgroup has 64 rows of W and the same 64 tokens, or 64 tokens and the same 128 rows.
constexpr bool can_swap(int tokens) { return tokens == 64 || tokens == kTileN; }

inline Traits traits_of(const Problem& p, int tokens) {
  const bool float_x = p.x == Format::kFloat, packed = p.weight == Format::kInt4, split = is_split(p);
  const bool block = !packed && p.weight_scaling == Scaling::kBlock;
  // e4m3 sums may stay in the tensor cores where asked for: that is worth kernels of its own with the largest tile.
  const bool short_sums = p.x == Format::kFp8 && !(p.fast_accum && tokens == 256);
  const bool swapped = block && !float_x && can_swap(tokens);
  const bool columns = packed ? split : block && !float_x && !swapped;
  return {float_x, packed, columns, (packed && !float_x) || block || split || short_sums, swapped};
}

// The epilogue transposes through shared memory: rows of tokens, padded against bank conflicts.
constexpr int kPaddedN = 64 + 4, kChunkTokens = 32, kChunkBytes = kChunkTokens * (64 * 2 + 16);

constexpr int kMaxStages = 8, kBarrierBytes = kMaxStages * 8, kControlBytes = 4 * kBarrierBytes;  // see Ring
constexpr int kRowScaleBytes = 8;       // of one row of W in one group: see RowScale
constexpr int kRestBytes = kTileN * 4;  // from a group's scales to what bfloat16 cuts off them

// A stage holds tile_k columns of x, in parts of 128 bytes of each token, and of W.
struct Stage {
  int x, weight, scales;  // bytes
  int columns;            // floats per token that the scaling of sums needs, or scales of rows of W made ready
  int bytes, count, epilogue, tokens, rows, barriers, total;

  constexpr Stage(const Traits& t, int m)
      : x(m * t.tile_k(m) * (t.float_x ? 2 : 1)),
        weight(kTileN * t.tile_k(m) / (t.packed ? 2 : 1)),
        scales(t.packed ? t.tile_k(m) / 32 * kTileN * 2 * 4 : 0),  // groups of 32, scale and zero, float32 at most
        columns(t.columns               ? (t.packed ? 2 : 1) * m * 4
                : t.packed && t.float_x ? t.tile_k(m) / 32 * kTileN * kRowScaleBytes
                                        : 0),
        bytes((x + weight + scales + columns + 1023) / 1024 * 1024),
        // After the ring, for each warpgroup: two chunks, the scales and zero points of x, scales, sums and bias of its
        // rows of W. Then the mbarriers.
        count(std::min(kMaxStages,
                       (kMaxSharedBytes - 4 * kChunkBytes - 4 * m * 4 - 3 * kTileN * 4 - kControlBytes) / bytes)),
        epilogue(count * bytes),
        tokens(epilogue + 4 * kChunkBytes),
        rows(tokens + 4 * m * 4),
        barriers(rows + 3 * kTileN * 4),
        total(barriers + kControlBytes) {}
};

}  // namespace qao::mm8::sm90
