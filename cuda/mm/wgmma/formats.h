// Which formats the body multiplies, and how: the rows of formats.inc. Pure host code, and constants for the kernels.
#pragma once

#include <array>
#include <iterator>

#include "mm/problem.h"
#include "mm/wgmma/tile.h"
#include "qao/mm.h"

namespace qao::mm::wgmma {

// What happens to sums during the walk over K.
enum class Fold {
  kNone,     // nothing: scales wait for the epilogue
  kPromote,  // sums of e4m3 or of the parts of a float32 x, which the tensor cores cut short, move to float32 sums
  kBlock,    // scales of 128 x 128 blocks of W, and of 1 x 128 of an x of eight bits
  kGroup,    // scales of the groups of an int4 W
};

// x as it is multiplied: a float32 is three parts in bfloat16.
enum class XKind : int { kBFloat16, kFloat16, kBFloat16Parts, kInt8, kFp8, kCount };

inline XKind x_kind_of(const Problem& problem) {
  if (problem.x == Format::kInt8) return XKind::kInt8;
  if (problem.x == Format::kFp8) return XKind::kFp8;
  if (is_split(problem)) return XKind::kBFloat16Parts;
  return problem.x_dtype == DType::kFloat16 ? XKind::kFloat16 : XKind::kBFloat16;
}

// The tiles a row is for. kFastAccum: with fast_accum, sums may stay in the tensor cores; the largest tile and those by
// turns have kernels for that. kRowScales: all, with a scale for each row of W and whole numbers for its groups.
// kLargeRowScales: those of 128 and 256 tokens, with a scale for each row of W and powers of two for its groups.
// kFastRowScales: of those and 192 tokens, with fast_accum.
enum class Tiles { kAllTiles, kSwapped, kNotSwapped, kFastAccum, kRowScales, kLargeRowScales, kFastRowScales };

struct Formats {
  XKind x;
  Format weight;
  bool blocks;  // one scale for each block of 128 x 128 of W
  Fold fold;
  bool columns;  // the fold needs a value per token
  Tiles tiles;

  constexpr bool is_for(Tile tile) const {
    if (tiles == Tiles::kSwapped) return can_swap(tile.tokens);
    if (tiles == Tiles::kNotSwapped) return !can_swap(tile.tokens);
    if (tiles == Tiles::kLargeRowScales) return tile.tokens == 128 || tile.tokens == 256;
    if (tiles == Tiles::kFastRowScales) return tile.tokens >= 128;
    return tiles != Tiles::kFastAccum || tile.tokens == 256 || tile.by_turns;
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
#include "mm/wgmma/formats.inc"
#undef QAO_FORMATS
};
constexpr int kRowCount = static_cast<int>(std::size(kRows));

// The first row of each combination; kRowCount: it has no kernel.
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
    [] {  // row_of() ends among the rows of its combination
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

// The row that serves the problem in such tiles.
inline int row_of(const Problem& problem, Tile tile) {
  int row = first_row_of(problem);
  // Not all tiles have kernels that leave sums in the tensor cores.
  const bool fast = problem.fast_accum && !problem.batch_invariant;
  // Powers of two have large tiles alone, which add in another order than the small ones of groups do.
  const bool row_scales = has_row_scales(problem) && (problem.x == Format::kInt8 || !problem.batch_invariant);
  while (!kRows[row].serves(tile, fast, row_scales)) ++row;
  return row;
}
// Whether a row of y has the same bits in all tiles that keep_order() says yes to: K is walked in one order by all, but
// operands that change places may be added in another one.
inline bool keep_order(const Problem& problem, Traits traits) {
  return traits.swapped || problem.x != Format::kFp8 || !has_blocks(problem);
}
inline Traits traits_of(const Problem& problem, Tile tile) { return kRows[row_of(problem, tile)].traits(); }

inline int tile_k_of(const Problem& problem, const Plan& plan) {
  return traits_of(problem, kTiles[plan.config]).tile_k(kTiles[plan.config]);
}

}  // namespace qao::mm::wgmma
