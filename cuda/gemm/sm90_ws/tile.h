// Compile-time tile shapes and shared-memory layout of the WGMMA kernels, shared with plan().
#pragma once

#include <algorithm>

#include "gemm/problem.h"
#include "qao/gemm.h"

namespace qao::gemm::sm90_ws {

constexpr int kWarpgroupRows = 64, kProducerThreads = 128;
constexpr int kMaxSharedBytes = 226 * 1024;  // per SM
constexpr int kMaxCluster = 8, kLastSplit = 2, kPingPongCluster = 2;

// CTA tile of y. A consumer warpgroup has 64 of the rows of W, or all of them with ping-pong.
struct Tile {
  int rows, tokens;
  bool ping_pong;

  constexpr int warpgroups() const { return ping_pong ? 2 : rows / kWarpgroupRows; }
  constexpr int warpgroup_rows() const { return ping_pong ? rows : kWarpgroupRows; }
  constexpr int sharers() const {
    return ping_pong ? kPingPongCluster : 1;
  }  // CTAs of the cluster that multicast a part of x each
  constexpr bool tall() const { return rows > 2 * kWarpgroupRows; }
  constexpr bool between() const { return (tokens & (tokens - 1)) != 0; }  // not a power of two
};

// Properties of a format combination that determine its kernels and tiles.
struct Traits {
  bool float_x;
  bool packed;    // W is int4 or fp4
  bool columns;   // promotion needs a value per token: a sum or a scale of x
  bool folds;     // promotes to a second set of accumulators in the mainloop
  bool swapped;   // swap-AB: tokens are the 64-row operand, rows of W the columns, equal in number
  bool promoted;  // promotion adds partial sums unscaled, every k-tile

  // Whether the tile is instantiated. Promotion and register operands leave fewer registers for accumulators. With
  // promotion and both operands in shared memory, the largest tile is instantiated too, and computes half of its tokens
  // at a time.
  constexpr bool serves(Tile tile) const {
    if (tile.ping_pong) return !(float_x || packed || folds);
    if (tile.tall()) return float_x ? !folds : !(packed || columns || swapped);
    if (tile.tokens == 32) return !(folds && float_x);
    if (packed && promoted) return !tile.between();
    return tile.tokens <= (folds && (packed || float_x || columns) ? 128 : 256);
  }
  // Columns per k-tile. Overhead per k-tile does not depend on the number of tokens, so small tiles have long k-tiles.
  constexpr int tile_k(Tile tile) const {
    return !float_x || (!folds && tile.tokens <= 128 && !tile.tall()) ? 128 : 64;
  }
};
// Tokens per TMA box of x in an expert's last tile, if it has few tokens or would reach past the last row.
constexpr int expert_end_rows(int tokens) { return std::max(8, tokens / 4); }
// Each warpgroup has 64 rows of W and the same 64 tokens, or 64 tokens and the same 128 rows.
constexpr bool can_swap(int tokens) { return tokens == kWarpgroupRows || tokens == 2 * kWarpgroupRows; }

constexpr Tile kTiles[] = {
#define QAO_TILE(rows, tokens, ping_pong) {rows, tokens, ping_pong},
#include "gemm/sm90_ws/tiles.inc"
#undef QAO_TILE
};
// The epilogue transposes through shared memory: rows of tokens, padded against bank conflicts, or swizzled for TMA
// stores.
constexpr int kPaddedN = 64 + 4, kChunkTokens = 32, kChunkBytes = kChunkTokens * (64 * 2 + 16),
              kSwizzledChunkBytes = kChunkTokens * 64 * 2;

// Grouped GEMM: table of the first row and tile of each expert, in shared memory.
constexpr int kMaxExperts = 512, kTableBytes = (kMaxExperts + 1) * 8;

constexpr int kMaxStages = 8, kBarrierBytes = kMaxStages * 8, kControlBytes = 4 * kBarrierBytes;  // see Ring
constexpr int kRowScaleBytes = 8, kRestBytes = 4;  // per row of W and group: see RowScale

// A pipeline stage holds tile_k columns of x, in atoms of 128 bytes per token, and of W.
struct Stage {
  int x, weight, scales;    // bytes
  int columns;              // promotion's floats per token, or converted scales of rows of W
  int chunk_bytes, chunks;  // buffers of y per warpgroup
  int token_floats;         // epilogue's floats per token
  int bytes, count, epilogue, tokens, rows, barriers, table, total;

  constexpr Stage(const Traits& t, Tile tile, bool grouped = false)
      : x(tile.tokens * t.tile_k(tile) * (t.float_x ? 2 : 1)),
        weight(tile.rows * t.tile_k(tile) / (t.packed ? 2 : 1)),
        scales(t.packed ? t.tile_k(tile) / 32 * tile.rows * 2 * 4
                        : 0),  // groups of 32, scale and zero point, float32 at most
        columns(t.columns               ? (t.packed ? 2 : 1) * tile.tokens * 4
                : t.packed && t.float_x ? t.tile_k(tile) / 32 * tile.rows * kRowScaleBytes
                                        : 0),
        chunk_bytes(tile.ping_pong ? kSwizzledChunkBytes : kChunkBytes),
        chunks(tile.ping_pong ? 3 : 2),
        token_floats(grouped ? 3 : 2),
        bytes((x + weight + scales + columns + 1023) / 1024 * 1024),
        // Behind the ring, per warpgroup: chunks of y; scales and zero points of x and factors of y; scales, sums and
        // bias of its rows of W. Then the mbarriers and the table of experts.
        count(std::min(kMaxStages, (kMaxSharedBytes - (grouped ? kTableBytes : 0) -
                                    tile.warpgroups() * (chunks * chunk_bytes + token_floats * tile.tokens * 4) -
                                    3 * tile.warpgroups() * tile.warpgroup_rows() * 4 - kControlBytes) /
                                       bytes)),
        epilogue(count * bytes),
        tokens(epilogue + tile.warpgroups() * chunks * chunk_bytes),
        rows(tokens + tile.warpgroups() * token_floats * tile.tokens * 4),
        barriers(rows + 3 * tile.warpgroups() * tile.warpgroup_rows() * 4),
        table(barriers + kControlBytes),
        total(table + (grouped ? kTableBytes : 0)) {}
};

}  // namespace qao::gemm::sm90_ws
