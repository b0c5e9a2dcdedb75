// CTA tiles, format combinations and shared-memory layout of the WGMMA kernels.
// Pure host code and constants, shared with plan(). formats.inc has the combinations.
#pragma once

#include <algorithm>
#include <array>
#include <iterator>

#include "gemm/problem.h"
#include "qao/gemm.h"

namespace qao::gemm::sm90_ws {

// ---- CTA tiles and stages ----

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
  // Three or four consumer warpgroups for few tokens. Registers and stages suffice for one group of W per k-tile.
  constexpr bool one_group() const { return tall() && tokens < 128; }
  constexpr bool between() const { return (tokens & (tokens - 1)) != 0; }  // not a power of two
};

// Properties of a format combination that determine its kernels and tiles.
struct Traits {
  bool float_x;
  bool packed;    // W is int4 or fp4
  bool fine;      // W is fp4, with several groups per k-tile
  bool columns;   // promotion needs a value per token: a sum or a scale of x
  bool folds;     // promotes to a second set of accumulators in the mainloop
  bool swapped;   // swap-AB: tokens are the 64-row operand, rows of W the columns, equal in number
  bool promoted;  // promotion adds partial sums unscaled, every k-tile

  // Whether the tile is instantiated. Promotion and register operands leave fewer registers for accumulators. With
  // promotion and both operands in shared memory, the largest tile is instantiated too, and computes half of its tokens
  // at a time.
  constexpr bool serves(Tile tile) const {
    if (tile.ping_pong) return !(float_x || packed || folds);
    if (tile.one_group()) return float_x && packed && !fine && !folds;
    if (tile.tall()) return float_x ? !folds : !(columns || swapped || (packed && (promoted || !folds)));
    if (tile.tokens == 32) return !(folds && float_x);
    if (packed && promoted) return !tile.between();
    return tile.tokens <= (folds && (packed || float_x || columns) ? 128 : 256);
  }
  // Whether helper warps prepare the group parameters of 8-bit products: in tall tiles, where consumers are short of
  // registers and instructions.
  constexpr bool prepares_groups(Tile tile) const { return tile.tall() && packed && folds && !float_x; }
  // Columns per k-tile. Overhead per k-tile does not depend on the number of tokens, so small tiles have long k-tiles.
  constexpr int tile_k(Tile tile) const {
    return !float_x || (!folds && tile.tokens <= 128 && (!tile.tall() || tile.one_group())) ? 128 : 64;
  }
  // Groups of a packed W per k-tile: those of 32 columns, unless the tile has one.
  constexpr int most_groups(Tile tile) const { return tile.one_group() ? 1 : tile_k(tile) / 32; }
};
// Tokens per TMA box of x in an expert's last tile, if it has few tokens or would reach past the last row.
constexpr int expert_end_rows(int tokens) { return std::max(8, tokens / 4); }
// Each warpgroup has 64 rows of W and the same 64 tokens, or 64 tokens and the same 128 rows.
constexpr bool can_swap(int tokens) { return tokens == kWarpgroupRows || tokens == 2 * kWarpgroupRows; }
// Tiles in which one kernel multiplies x with several weights. Gated, half of the warpgroups have rows of gate.
constexpr bool merges_in(Tile tile, bool gated) {
  return tile.tokens <= 128 && !tile.ping_pong && (!gated || tile.warpgroups() % 2 == 0);
}

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
constexpr int kRowScaleBytes = 8, kRestBytes = 4;  // per row of W and group: see RowScale and PreparedGroups

// A pipeline stage holds tile_k columns of x, in atoms of 128 bytes per token, and of W.
struct Stage {
  int x, weight, scales;    // bytes
  int columns;              // promotion's floats per token, or converted group parameters of rows of W
  int chunk_bytes, chunks;  // buffers of y per warpgroup
  int token_floats;         // epilogue's floats per token
  int bytes, count, epilogue, tokens, rows, barriers, table, total;

  constexpr Stage(const Traits& t, Tile tile, bool grouped = false)
      : x(tile.tokens * t.tile_k(tile) * (t.float_x ? 2 : 1)),
        weight(tile.rows * t.tile_k(tile) / (t.packed ? 2 : 1)),
        scales(t.packed ? t.most_groups(tile) * tile.rows * 2 * 4 : 0),  // scale and zero point, float32 at most
        columns(t.columns                                            ? (t.packed ? 2 : 1) * tile.tokens * 4
                : (t.packed && t.float_x) || t.prepares_groups(tile) ? t.most_groups(tile) * tile.rows * kRowScaleBytes
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

// ---- Formats ----

// Promotion of partial sums along K.
enum class Fold {
  kNone,     // no promotion: scales are applied in the epilogue
  kPromote,  // add partial sums of e4m3 or float32 parts, which tensor cores truncate, to float32 sums
  kBlock,    // scale by 128 x 128 blocks of W, and by 1 x 128 blocks of 8-bit x
  kGroup,    // scale by groups of an int4 W
};

// Format of x in the MMA. float32 is split into three bfloat16 parts.
enum class XKind : int { kBFloat16, kFloat16, kBFloat16Parts, kInt8, kFp8, kCount };

inline XKind x_kind_of(const Problem& problem) {
  if (problem.x == Format::kInt8) return XKind::kInt8;
  if (problem.x == Format::kFp8) return XKind::kFp8;
  if (is_split(problem)) return XKind::kBFloat16Parts;
  return problem.x_dtype == DType::kFloat16 ? XKind::kFloat16 : XKind::kBFloat16;
}

// Tiles of a row. kFastAccum: fast_accum without promotion, for the largest tile and ping-pong tiles. kRowScales: all
// tiles, two-level scales with integers per group. kLargeRowScales: 128 and 256 tokens, two-level scales with powers of
// two per group. kFastRowScales: the same and 192 tokens, with fast_accum.
enum class Tiles { kAllTiles, kSwapped, kNotSwapped, kFastAccum, kRowScales, kLargeRowScales, kFastRowScales };

struct Formats {
  XKind x;
  Format weight;
  bool blocks;  // one scale per 128 x 128 block of W
  Fold fold;
  bool columns;  // promotion needs a value per token
  Tiles tiles;

  constexpr bool is_for(Tile tile) const {
    if (tiles == Tiles::kSwapped) return can_swap(tile.tokens);
    if (tiles == Tiles::kNotSwapped) return !can_swap(tile.tokens);
    if (tiles == Tiles::kLargeRowScales) return tile.tokens == 128 || tile.tokens == 256;
    if (tiles == Tiles::kFastRowScales) return tile.tokens >= 128;
    return tiles != Tiles::kFastAccum || tile.tokens == 256 || tile.ping_pong;
  }
  constexpr bool serves(Tile tile, bool fast_accum, bool row_scales) const {
    return is_for(tile) && (!is_fast() || fast_accum) && (!has_row_scales() || row_scales);
  }
  constexpr bool is_fast() const { return tiles == Tiles::kFastAccum || tiles == Tiles::kFastRowScales; }
  constexpr bool has_row_scales() const { return tiles >= Tiles::kRowScales; }
  constexpr Traits traits() const {
    const bool float_x = x != XKind::kInt8 && x != XKind::kFp8;
    const bool swapped = fold == Fold::kBlock && !float_x && !columns;
    return {float_x, is_packed(weight),     weight == Format::kFp4, columns, fold != Fold::kNone,
            swapped, fold == Fold::kPromote};
  }
};
constexpr Formats kRows[] = {
#define QAO_FORMATS(x, type, weight, blocks, fold, columns, tiles) \
  {XKind::x, Format::weight, blocks, Fold::fold, columns, Tiles::tiles},
#include "gemm/sm90_ws/formats.inc"
#undef QAO_FORMATS
};
constexpr int kRowCount = static_cast<int>(std::size(kRows));

// First row of each combination; kRowCount: no kernel.
constexpr auto kFirstRow = [] {
  std::array<std::array<std::array<int, 2>, kFormatCount>, static_cast<int>(XKind::kCount)> first{};
  for (auto& of_x : first) {
    for (auto& of_weight : of_x) of_weight = {kRowCount, kRowCount};
  }
  for (int row = kRowCount - 1; row >= 0; --row) {
    first[static_cast<int>(kRows[row].x)][static_cast<int>(kRows[row].weight)][kRows[row].blocks] = row;
  }
  return first;
}();

static_assert(
    [] {  // row_of() stays within the rows of its combination
      for (int row = 0; row < kRowCount; ++row) {
        for (const Tile& tile : kTiles) {
          for (bool fast : {false, true}) {
            int at = row;
            const auto alike = [&] {
              return at < kRowCount && kRows[at].x == kRows[row].x && kRows[at].weight == kRows[row].weight &&
                     kRows[at].blocks == kRows[row].blocks;
            };
            const bool first =
                kFirstRow[static_cast<int>(kRows[row].x)][static_cast<int>(kRows[row].weight)][kRows[row].blocks] ==
                row;
            while (first && alike() && !kRows[at].serves(tile, fast, fast)) ++at;
            if (first && !alike()) return false;
          }
        }
      }
      return true;
    }(),
    "a combination of formats.inc lies in one place and serves every tile");

inline int first_row_of(const Problem& problem) {
  return kFirstRow[static_cast<int>(x_kind_of(problem))][static_cast<int>(problem.weight)][has_blocks(problem)];
}
inline bool has_kernels(const Problem& problem) { return first_row_of(problem) < kRowCount; }

// The row for the problem with this tile.
inline int row_of(const Problem& problem, Tile tile) {
  int row = first_row_of(problem);
  // fast_accum kernels exist for some tiles only.
  const bool fast = problem.fast_accum && !problem.batch_invariant;
  // Kernels with powers of two exist for large tiles only, and accumulate in another order than kernels with groups.
  const bool row_scales = has_row_scales(problem) && (problem.x == Format::kInt8 || !problem.batch_invariant);
  while (!kRows[row].serves(tile, fast, row_scales)) ++row;
  return row;
}
// Whether y has the same bits in all tiles for which this is true. All tiles accumulate along K in one order, but
// swap-AB may change the order inside an MMA.
inline bool keep_order(const Problem& problem, Traits traits) {
  return traits.swapped || problem.x != Format::kFp8 || !has_blocks(problem);
}
inline Traits traits_of(const Problem& problem, Tile tile) { return kRows[row_of(problem, tile)].traits(); }

inline int tile_k_of(const Problem& problem, const Plan& plan) {
  return traits_of(problem, kTiles[plan.config]).tile_k(kTiles[plan.config]);
}

}  // namespace qao::gemm::sm90_ws
