// AMX pipeline for many rows of int8 x and a panel of W.
// 32 rows of W are A tiles of 16 x 64 bytes, which stay in L1. A unit is a panel times one or two tiles of x. Its C
// tiles are stored and accumulated into totals, or those of the last panel into y, between the multiplications of the
// next unit. Tiles are loaded between the multiplications of the previous step. The interleaving is explicit because
// neither accumulation nor tile loads overlap much with other instructions.
//
// L1 holds a panel, the C tiles of two units and most of the totals. `static`: see numeric.h.
#pragma once

#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/amx/int8_tiles.h"

namespace qao::cpu {
namespace {

constexpr int64_t kTileBytes = kTileRegisterBytes;
constexpr int64_t kPanelRows = 2 * kTileRows;  // of W

// Rows of W for direct loads: the first unit loads A tiles from K-tiles [0, whole) of W and copies them to the panel.
// Other K-tiles must already be in the panel. Distances in bytes.
struct Rows {
  const uint8_t* first = nullptr;
  int64_t row = 0, whole = 0;
};

// Output without totals, for two N-tiles and y in bfloat16. `words`: [2][16] lines, pairs of rows of W by rows of x.
struct Output {
  __m512i* lines;  // of row 0 of x; other rows follow at `stride`
  int64_t stride;
  const float *x_scales, *x_zeros;  // [16 tiles_m]
  const ColumnsOfPair* columns;
  __m512i* words;
};

// Fold: kSections, a 32-bit type Total, and
//   add<kM>(c, row, m, total)   total + c[kSections][2][16 n][kM][16 m] for tile m of x and row of 2 x 16
//   scaled(total, row, zero)     float32, scaled like W, minus the contribution of x's zero points
// from: totals so far, [2][16 n][kM][16 m], or null. to: where the totals go, or null for y, tiles of x from row m on.
template <typename Fold>
struct Unit {
  const int8_t *b = nullptr, *next_b = nullptr;  // B tiles of this unit and of the next one
  int64_t steps = 0, section = 0;                // section: steps that are summed at a time
  Fold fold = {};
  const typename Fold::Total* from = nullptr;
  typename Fold::Total* to = nullptr;
  int64_t m = 0;
};

// Runs units one after another. Registers 0..3 = C of 2 N-tiles x kM tiles of x, 4..5 = A, 6..7 = B.
template <int kM, typename Fold>
class Pipeline {
 public:
  static constexpr int64_t kSectionSums = 2 * kM * kTileSums, kUnitSums = Fold::kSections * kSectionSums;

  // a_tile, b_tile: bytes between the panel's N-tiles and between tiles of x. halves: 1 if two steps share an A tile,
  // else 0. c: memory for two units' C tiles.
  Pipeline(uint8_t* panel, int64_t a_tile, int64_t b_tile, int halves, int32_t* c, const Output* output)
      : panel_(panel), a_tile_(a_tile), b_tile_(b_tile), halves_(halves), c_(c), store_(c), output_(output) {}

  // Loads the tiles of a unit's first step when the panel is new.
  void load(const int8_t* b, const Rows& direct) const {
    tile_load_once<6>(b);
    if (direct.whole > 0) {
      tile_load<4>(direct.first, direct.row);
      tile_load<5>(direct.first + kTileRows * direct.row, direct.row);
    } else {
      tile_load<4>(panel_);
      tile_load<5>(panel_ + a_tile_);
    }
    if constexpr (kM == 2) tile_load_once<7>(b + b_tile_);
  }

  // Runs a unit; calls fetch() every step.
  template <bool kDirect, typename Fetch>
  void run(const Unit<Fold>& unit, const Rows& direct, const Fetch& fetch) {
    // Local copies: members would be reloaded after every tile instruction.
    uint8_t* const panel = panel_;
    const int64_t a_tile = a_tile_, b_tile = b_tile_, steps = unit.steps;
    const int halves = halves_;
    const int8_t *const b = unit.b, *const next_unit_b = unit.next_b;
    const Unit<Fold> before = before_;
    const Output* const output = output_;
    const int32_t* const before_c = c_ + (1 - parity_) * kUnitSums;
    int32_t *c = c_ + parity_ * kUnitSums, *store = store_;
    int64_t folded = folded_;
    const auto fold = [&](int64_t count) __attribute__((always_inline)) {
      for (const int64_t end = least(folded + count, kFolds); folded < end; ++folded) {
        fold_one(before, output, before_c, folded);
      }
    };
    // The first step stores the last C tiles of the previous unit; the other steps accumulate them.
    const int64_t slots = 4 * (steps - 1), folds_per_slot = slots > 0 ? divide_up(kFolds, slots) : 0;
    int64_t i = 0;
    const auto step = [&]<bool kFirstOfSection>(int64_t folds) __attribute__((always_inline)) {
      const auto multiply = [&]<int n, int m>() __attribute__((always_inline)) {
        if constexpr (kFirstOfSection) {
          store_c<n, m>(store);
          tile_zero<2 * n + m>();
        }
        tile_multiply_signed_bytes<2 * n + m, 4 + n, 6 + m>();
      };
      uint8_t* const copy = panel + i * kTileBytes;
      ++i;
      const uint8_t* next_a = i < steps ? panel + (i >> halves) * kTileBytes : panel;
      int64_t next_a_tile = a_tile, next_row = kTileColumns;
      if constexpr (kDirect) {
        if (i < direct.whole) {
          next_a = direct.first + i * kTileColumns;
          next_a_tile = kTileRows * direct.row, next_row = direct.row;
        }
      }
      const int8_t* next_b = i < steps ? b + i * kTileBytes : next_unit_b;
      multiply.template operator()<0, 0>();
      fold(folds);
      multiply.template operator()<1, 0>();
      tile_load_once<6>(next_b);
      fetch();
      fold(folds);
      if constexpr (kM == 2) multiply.template operator()<0, 1>();
      if constexpr (kDirect) tile_store<4>(copy);
      tile_load<4>(next_a, next_row);
      fold(folds);
      if constexpr (kM == 2) multiply.template operator()<1, 1>();
      if constexpr (kM == 2) tile_load_once<7>(next_b + b_tile);
      if constexpr (kDirect) tile_store<5>(copy + a_tile);
      tile_load<5>(next_a + next_a_tile, next_row);
      fold(folds);
    };
    for (int64_t section_end = unit.section; i < steps; section_end += unit.section, c += kSectionSums) {
      step.template operator()<true>(i == 0 ? 0 : folds_per_slot);
      store = c;
      while (i < least(steps, section_end)) step.template operator()<false>(folds_per_slot);
    }
    fold(kFolds);
    before_ = unit, store_ = store;
    folded_ = 0, parity_ = 1 - parity_;
  }

  // Accumulates the remaining rows.
  void finish() {
    each_c<2, kM>([&]<int n, int m>() { store_c<n, m>(store_); });
    for (; folded_ < kFolds; ++folded_) fold_one(before_, output_, c_ + (1 - parity_) * kUnitSums, folded_);
  }

 private:
  static constexpr int64_t kFolds = kPanelRows / 2 + kM;  // pairs of rows, then tiles of y

  __attribute__((always_inline)) static void fold_one(const Unit<Fold>& unit, const Output* output, const int32_t* c,
                                                      int64_t i) {
    using Total = typename Fold::Total;
    constexpr int64_t kPairs = kPanelRows / 2;
    if (i >= kPairs) {
      if (unit.to == nullptr)
        write(*output, unit.m + (i - kPairs) * kTileRows, output->words + (i - kPairs) * kTileRows);
      return;
    }
    const int64_t row = 2 * i;
#pragma GCC unroll 2
    for (int m = 0; m < kM; ++m) {
      typename Fold::Vector sums[2];
      for (int r = 0; r < 2; ++r) {
        const int64_t at = ((row + r) * kM + m) * kTileRows;
        const auto before = unit.from != nullptr ? Fold::load(unit.from + at) : typename Fold::Vector{};
        sums[r] = unit.fold.template add<kM>(c, row + r, m, before);
        if (unit.to != nullptr) Fold::store(unit.to + at, sums[r]);
      }
      if (unit.to == nullptr) {
        __m512 y[2];
        const __m512 zero = _mm512_load_ps(output->x_zeros + unit.m + m * kTileRows);
        const __m512 scale = _mm512_load_ps(output->x_scales + unit.m + m * kTileRows);
        for (int r = 0; r < 2; ++r) {
          y[r] =
              integer_y(scale, *output->columns, static_cast<int>(row + r), unit.fold.scaled(sums[r], row + r, zero));
        }
        output->words[m * kTileRows + i] = to_bf16_pairs(y[0], y[1]);
      }
    }
    static_assert(sizeof(Total) == 4);
  }

  // Not inlined: it would be duplicated in every slot.
  __attribute__((noinline)) static void write(const Output& output, int64_t m, const __m512i* lines) {
    __m512i words[kTileRows];
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) words[i] = lines[i];
    transpose16(words);
    for (int i = 0; i < kTileRows; ++i) output.lines[(m + i) * output.stride] = words[i];
  }

  template <int n, int m>
  __attribute__((always_inline)) static void store_c(int32_t* c) {
    tile_store<2 * n + m>(c + n * kM * kTileSums + m * kTileRows, kM * kTileRows * int64_t{sizeof(int32_t)});
  }

  uint8_t* panel_;
  int64_t a_tile_, b_tile_;
  int halves_;
  int32_t *c_, *store_;
  const Output* output_;
  Unit<Fold> before_;
  int64_t folded_ = kFolds;  // of `before_`
  int64_t parity_ = 0;
};

// Multiplies all rows of x by 32 rows of W, panel by panel. totals: [pairs of tiles of x][2][16 n][2, or 1 for an odd
// last tile][16 m]; with `output` the last panel writes y instead. panel: memory for 2 x W::tiles A tiles. c: memory
// for the C tiles of two units.
//
// A weight policy W is a class with
//   Fold, kDirect            kDirect: the first unit of a panel loads W directly; x then has at least two tiles
//   tiles, steps, section    K-tiles of a panel, steps along all of K, steps of a section
//   Rows fill(t, end, slots) puts K-tiles [t, end) into the panel, or returns where they are
//   fetch()                  called `slots` times until the next fill(): prefetches a share of the following data
//   fold(step, m)            the Fold of a unit that begins at `step` with rows of x from m on
template <typename W>
void multiply_panels(const Job& job, W& w, uint8_t* panel, int32_t* c, typename W::Fold::Total* totals,
                     const Output* output) {
  using Fold = typename W::Fold;
  const int64_t halves = job.int8.steps / job.tiles_k, b_tile = job.int8.steps * kTileBytes, pairs = job.tiles_m / 2;
  Pipeline<2, Fold> two(panel, w.tiles * kTileBytes, b_tile, halves == 2, c, output);
  Pipeline<1, Fold> one(panel, w.tiles * kTileBytes, b_tile, halves == 2, c, output);
  bool forward = true;  // each panel begins with the most recent totals of the previous one
  for (int64_t t = 0; t < job.tiles_k; t += w.tiles, forward = !forward) {
    const int64_t end = least(job.tiles_k, t + w.tiles);
    const int64_t begin_step = t * halves, end_step = least(end * halves, w.steps);
    const Rows direct = w.fill(t, end, (end_step - begin_step) * ((job.tiles_m + 1) / 2));
    const auto fetch = [&]() __attribute__((always_inline)) { w.fetch(); };
    const auto b_at = [&](int64_t tile_m) {
      return job.int8.values + (tile_m * job.int8.steps + begin_step) * kTileBytes;
    };
    const auto unit = [&](int64_t tile_m, int64_t next_m) -> Unit<Fold> {
      typename Fold::Total* const total = totals + tile_m * 2 * kTileSums;
      return {b_at(tile_m),
              b_at(next_m),
              end_step - begin_step,
              w.section,
              w.fold(begin_step, tile_m * kTileRows),
              t == 0 ? nullptr : total,
              output != nullptr && end == job.tiles_k ? nullptr : total,
              tile_m * kTileRows};
    };
    const auto tile_of = [&](int64_t pair) { return 2 * (forward ? pair : pairs - 1 - pair); };
    const auto pair_unit = [&](int64_t i) { return unit(tile_of(i), tile_of(least(i + 1, pairs - 1))); };
    if (pairs > 0) {
      two.load(b_at(tile_of(0)), direct);
      two.template run<W::kDirect>(pair_unit(0), direct, fetch);
      for (int64_t i = 1; i < pairs; ++i) two.template run<false>(pair_unit(i), direct, fetch);
    }
    if (job.tiles_m % 2 != 0) {
      if (pairs > 0) two.finish();
      one.load(b_at(2 * pairs), {});
      one.template run<false>(unit(2 * pairs, 2 * pairs), {}, fetch);
      one.finish();
    }
  }
  if (job.tiles_m % 2 == 0) two.finish();
}

// Buffers y of some pairs of N-tiles before writing it at once: otherwise tile instructions would wait for lines of y.
class DirectOutput {
 public:
  explicit DirectOutput(const Job& job) : job_(job), rows_(job.tiles_m * kTileRows) {
    const int64_t bytes = rows_ * (2 * int64_t{sizeof(float)} + kPairs * int64_t{sizeof(__m512i)});
    lines_ = static_cast<__m512i*>(scratch(Scratch::kGroups, bytes));
    auto* scales = reinterpret_cast<float*>(lines_ + rows_ * kPairs);
    load_all_rows(job, scales, scales + rows_);
    output_ = {lines_, kPairs, scales, scales + rows_, &columns_, words_};
  }
  DirectOutput(const DirectOutput&) = delete;

  // Output for N-tiles from tile_n on, which must follow those of the last add() unless write() was called. Null if y
  // is not bfloat16 or only one N-tile is left.
  const Output* of(int64_t tile_n, int64_t end) {
    if (job_.y_dtype != DType::kBFloat16 || tile_n + 1 >= end) return nullptr;
    const int64_t n = tile_n * kTileRows;
    if (count_ == 0) first_ = n;
    load_columns(job_, n, &columns_);
    return &output_;
  }

  // Completes the pair.
  void add() {
    ++output_.lines;
    if (++count_ == kPairs) write();
  }

  void write() {
    if (count_ == 0) return;
    output_.lines = lines_;
    auto* y = static_cast<uint16_t*>(job_.y) + first_;
    const int64_t last = job_.n - first_ - (count_ - 1) * kPanelRows;  // columns of the last pair
    const __mmask32 mask = last >= kPanelRows ? 0xFFFFFFFFu : (1u << last) - 1;
    for (int64_t m = 0; m < job_.m; ++m, y += job_.n) {
      const __m512i* line = lines_ + m * kPairs;
      for (int64_t i = 0; i < count_ - 1; ++i) _mm512_storeu_si512(y + i * kPanelRows, line[i]);
      _mm512_mask_storeu_epi16(y + (count_ - 1) * kPanelRows, mask, line[count_ - 1]);
    }
    count_ = 0;
  }

 private:
  static constexpr int64_t kPairs = 4;

  const Job& job_;
  const int64_t rows_;
  Output output_;
  ColumnsOfPair columns_;
  __m512i words_[2 * kTileRows];
  __m512i* lines_;  // [rows][kPairs], the first `count_` in use
  int64_t first_ = 0, count_ = 0;
};

// Writes y of kN N-tiles from their totals. sums(i, total, zero) converts row i of W times a tile of x to float32, as
// Fold::scaled().
template <int kN, typename Total, typename Sums>
void write_totals(const Job& job, int64_t tile_n, const Total* totals, const Sums& sums) {
  ColumnsOfPair columns;
  load_columns(job, tile_n * kTileRows, &columns);
  for (int64_t tile = 0; tile < job.tiles_m; ++tile) {
    const int64_t first = tile / 2 * 2, in_pair = least(2, job.tiles_m - first);
    const Total* of_tile = totals + first * 2 * kTileSums + (tile - first) * kTileRows;
    const auto row = [&](int i, __m512 zero) __attribute__((always_inline)) {
      return sums(i, _mm512_load_si512(of_tile + i * in_pair * kTileRows), zero);
    };
    store_integer_tiles<kN>(job, tile_n * kTileRows, tile * kTileRows, columns, row);
  }
}

}  // namespace
}  // namespace qao::cpu
