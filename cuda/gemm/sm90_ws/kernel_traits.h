// Format combinations of the WGMMA kernels: the rows of formats.inc. Pure host code and constants.
#pragma once

#include <array>
#include <iterator>

#include "gemm/problem.h"
#include "gemm/sm90_ws/tile.h"
#include "qao/gemm.h"

namespace qao::gemm::sm90_ws {

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
    return {float_x, is_packed(weight), columns, fold != Fold::kNone, swapped, fold == Fold::kPromote};
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
