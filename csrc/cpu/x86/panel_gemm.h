// GEMM y = x Wᵀ in vector registers for several rows of x.
// Rows of W are in the lanes, so that sums are never reduced across lanes. Each includer instantiates it for its
// formats.
//
// K is divided into steps, the columns that fill 32 bits (one of float32, two of 16 bits, four of int8), and steps into
// panels. A panel of W is expanded into L1, [step][rows of W], and meets every row of x. x is packed as
// [panel][row][step]. Six rows of x times a panel keep all sums in registers: for six rows, each word of x is broadcast
// once and each word of W loaded once. The sums of a panel start at zero and are added to totals in memory, which keeps
// rounding errors small and allows scales of groups and blocks.
//
// A format is a class of static members:
//   kLanes, kVectors        words of a vector, vectors of W that meet six rows of x
//   kSteps, kColumns, kPanelColumns   steps of a panel, columns of a step and of a panel
//   kSectioned              sums of every section are added separately, otherwise those of a panel
//   Sum, Operand, Total     vectors of a section's sums, of words of W or x, of totals
//   zero, load, broadcast, load_total   initialization of these
//   multiply_add(sum, w, x)  returns the sum by value: GCC 12 keeps references in memory
//   kStepsOfPart, widen()   sums of so many steps are added to wider ones; 1: they are wide
//   Parameters, prepare()   parameters of W for add(), per group and N-tile; may be empty
//   expand()                an N-tile of a panel of W, kLanes words at a time `stride` words apart
//   kPanelsAtOnce           panels that expand() writes, one after another
//   kBits                   bits of a value of W: 8, in rows, or 4, packed in tiles; 0: expand() prefetches W
//   Fold, fold()            parameters of a vector of W's rows at the end of a section
//   Row, row()              the same for a row of x
//   kHasShortSections       totals stay in registers over the sections of a panel, N-tiles are vectors
//   kHasRests               sums may need another term: has_rest() of an N-tile, and add_rest()
//   kTakesZerosOff          int8 x has zero points: less() subtracts them, given sums of W
//   add(), store()          adds a section's sums, scaled, to a total; stores the total
//   finish()                writes some rows of y for kTiles N-tiles of W, from their totals
#pragma once

#include <utility>

#include "cpu/gemm/job.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

constexpr int kRowsAtOnce = 6;  // of x

// Calls visit<0>(), visit<1>(), …: a loop that is unrolled before register allocation.
template <int kCount>
__attribute__((always_inline)) inline void each(auto&& visit) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (visit.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

struct Nothing {};

// 8-bit W, without parameters per group.
struct EightBits {
  static constexpr int kBits = 8;
  using Parameters = Nothing;
  static void prepare(const Job&, int64_t, int64_t, Parameters*) {}
};

// Totals that are plain sums of sections.
template <typename Panel>
struct PlainTotals : Panel {
  using Fold = Nothing;
  using Row = Nothing;
  template <typename Parameters>
  static Fold fold(const Job&, const Parameters&, int, int64_t, int64_t) {
    return {};
  }
  static Row row(const Job&, int64_t, int64_t) { return {}; }
  using Value = typename Panel::Sum;
  static Value add(Fold, Row, Value sums, Value before) { return Panel::plus(sums, before); }
};

alignas(64) constexpr uint32_t kNoTotals[64] = {};  // totals before the first section

// A row of x of ones, for formats of bytes: its products are sums of W.
struct Ones {
  uint32_t words[64];
};
constexpr Ones kOnes = [] {
  Ones ones = {};
  for (uint32_t& word : ones.words) word = 0x01010101;
  return ones;
}();
constexpr int64_t kMaxSectionsOfPanel = 8;

struct RowsOfY {
  int64_t begin, end;
};

// Address of the i-th contiguous run of kPanelColumns bytes of W in a panel of an N-tile.
template <typename F>
inline const uint8_t* line_of(const Job& job, int64_t tile_n, int64_t panel, int64_t i) {
  constexpr int64_t kColumns = F::kPanelColumns;
  if constexpr (F::kBits == 8) return job.weight + (tile_n * kTileRows + i) * job.k + panel * kColumns;
  return job.weight + (tile_n * job.tiles_k + panel * (kColumns / kTileColumns)) * int4::kTileBytes + i * kColumns;
}
template <typename F>
constexpr int64_t kLinesOf = F::kBits == 8 ? kTileRows : int4::kTileBytes / kTileColumns;

// kTiles N-tiles of W at one panel.
template <typename F>
struct Block {
  static constexpr int kTileVectors = kTileRows / F::kLanes;

  int64_t tile_n;
  int64_t panel = 0;
  uint32_t* weight;                      // [steps][kTiles][16], then the sums of up to eight sections, likewise
  const typename F::Parameters* groups;  // [groups][kTiles]
  uint32_t* totals;                      // [m][kTiles][16]

  // Sums of W over section s of the panel.
  template <int kTiles>
  uint32_t* weight_sums(const Job& job, int64_t s) const {
    return weight + (F::kSteps + s - panel * F::kPanelColumns / job.section) * kTiles * kTileRows;
  }
};

// sums += W · x over steps [begin, end) of the panel.
template <typename F, int kM, int kV>
__attribute__((always_inline)) inline void add_steps(const uint32_t* weight, const uint32_t* x, int64_t begin,
                                                     int64_t end, typename F::Sum (&sums)[kM][kV]) {
  for (int64_t step = begin; step < end; ++step) {
    typename F::Operand w[kV];
    each<kV>([&]<int v>() { w[v] = F::load(weight + (step * kV + v) * F::kLanes); });
    each<kM>([&]<int i>() {
      const typename F::Operand value = F::broadcast(x + i * F::kSteps + step);
      each<kV>([&]<int v>() { sums[i][v] = F::multiply_add(sums[i][v], w[v], value); });
    });
  }
}

// sums = W · x over steps [begin, end) of the panel.
template <typename F, int kM, int kV>
__attribute__((always_inline)) inline void sum_steps(const uint32_t* weight, const uint32_t* x, int64_t begin,
                                                     int64_t end, typename F::Sum (&sums)[kM][kV]) {
  each<kM>([&]<int i>() { each<kV>([&]<int v>() { sums[i][v] = F::zero(); }); });
  if constexpr (F::kStepsOfPart == 1) {
    add_steps<F>(weight, x, begin, end, sums);
  } else {
    for (int64_t part = begin; part < end; part += F::kStepsOfPart) {
      typename F::Sum narrow[kM][kV];
      each<kM>([&]<int i>() { each<kV>([&]<int v>() { narrow[i][v] = F::zero(); }); });
      add_steps<F>(weight, x, part, part + F::kStepsOfPart, narrow);
      each<kM>([&]<int i>() { each<kV>([&]<int v>() { sums[i][v] = F::widen(sums[i][v], narrow[i][v]); }); });
    }
  }
}

// Multiplies steps [begin, end) of the panel, which belong to section s, for rows m .. m + kM of x.
template <typename F, int kTiles, int kM>
[[gnu::noinline]] void multiply_section(const Job& job, const Block<F>& block, int64_t m, int64_t s, int64_t begin,
                                        int64_t end) {
  constexpr int kV = kTiles * Block<F>::kTileVectors;
  const uint32_t* x = job.panels + (block.panel * job.m + m) * F::kSteps;
  typename F::Sum sums[kM][kV];
  sum_steps<F>(block.weight, x, begin, end, sums);
  if constexpr (F::kTakesZerosOff) {
    const uint32_t* w_sums = block.template weight_sums<kTiles>(job, s);
    each<kM>([&]<int i>() {
      const int32_t zero = job.x_zeros[m + i];
      each<kV>([&]<int v>() { sums[i][v] = F::less(sums[i][v], zero, F::load(w_sums + v * F::kLanes)); });
    });
  }
  const typename F::Parameters* groups = block.groups + s / job.sections_per_group * kTiles;
  constexpr int kTileVectors = Block<F>::kTileVectors;
  if constexpr (F::kHasRests) {
    bool has_rest = false;
    for (int t = 0; t < kTiles; ++t) has_rest |= F::has_rest(groups[t]);
    if (has_rest) {
      each<kM>([&]<int i>() {
        const typename F::Row row = F::row(job, m + i, s);
        each<kV>([&]<int v>() { sums[i][v] = F::add_rest(groups[v / kTileVectors], row, sums[i][v]); });
      });
    }
  }
  typename F::Fold folds[kV];
  each<kV>([&]<int v>() {
    folds[v] = F::fold(job, groups[v / kTileVectors], v % kTileVectors, block.tile_n + v / kTileVectors, s);
  });
  constexpr int64_t kRow = kV * F::kLanes;
  uint32_t* const totals = block.totals + m * kRow;
  const bool is_first = block.panel == 0 && begin == 0;
  const uint32_t* const before = is_first ? kNoTotals : totals;
  const int64_t before_row = is_first ? 0 : kRow;
  // All values of a row are computed before any is stored: to the compiler, a store may alias anything.
  each<kM>([&]<int i>() {
    const typename F::Row row = F::row(job, m + i, s);
    typename F::Total after[kV];
    each<kV>([&]<int v>() {
      after[v] = F::add(folds[v], row, sums[i][v], F::load_total(before + i * before_row + v * F::kLanes));
    });
    each<kV>([&]<int v>() { F::store(totals + i * kRow + v * F::kLanes, after[v]); });
  });
}

// Calls visit(s, begin, end) with the steps of the panel that belong to section s.
template <typename F>
__attribute__((always_inline)) inline void each_section(const Job& job, const Block<F>& block, const auto& visit) {
  const int64_t first = block.panel * F::kPanelColumns, columns = least(job.k - first, F::kPanelColumns);
  // Multiples of sixteen: a format may order the columns within them freely.
  const int64_t end = divide_up(columns, 16 * F::kColumns) * 16;
  const int64_t length = F::kSectioned ? least(job.section, F::kPanelColumns) / F::kColumns : F::kSteps;
  int64_t s = first / job.section;
  for (int64_t begin = 0; begin * F::kColumns < columns; begin += length) visit(s++, begin, least(begin + length, end));
}

// Multiplies all sections of the panel, kPart N-tiles at a time: their totals stay in registers between sections.
template <typename F, int kTiles, int kM>
[[gnu::noinline]] void multiply_short_sections(const Job& job, const Block<F>& block, int64_t m) {
  constexpr int kPart = kTiles < 2 ? 1 : 2;
  const uint32_t* x = job.panels + (block.panel * job.m + m) * F::kSteps;
  for (int tile = 0; tile < kTiles; tile += kPart) {
    typename F::Total totals[kM][kPart];
    uint32_t* const memory = block.totals + (m * kTiles + tile) * kTileRows;
    const uint32_t* const before = block.panel == 0 ? kNoTotals : memory;
    const int64_t before_row = block.panel == 0 ? 0 : kTiles * kTileRows;
    each<kM>([&]<int i>() {
      each<kPart>([&]<int v>() { totals[i][v] = F::load_total(before + i * before_row + v * kTileRows); });
    });
    each_section(job, block, [&](int64_t s, int64_t begin, int64_t end) __attribute__((always_inline)) {
      typename F::Sum sums[kM][kPart];
      each<kM>([&]<int i>() { each<kPart>([&]<int v>() { sums[i][v] = F::zero(); }); });
      for (int64_t step = begin; step < end; ++step) {
        typename F::Operand w[kPart];
        each<kPart>([&]<int v>() { w[v] = F::load(block.weight + (step * kTiles + tile + v) * kTileRows); });
        each<kM>([&]<int i>() {
          const typename F::Operand value = F::broadcast(x + i * F::kSteps + step);
          each<kPart>([&]<int v>() { sums[i][v] = F::multiply_add(sums[i][v], w[v], value); });
        });
      }
      const typename F::Parameters* groups = block.groups + s / job.sections_per_group * kTiles + tile;
      typename F::Fold folds[kPart];
      each<kPart>([&]<int v>() { folds[v] = F::fold(job, groups[v], 0, block.tile_n + tile + v, s); });
      each<kM>([&]<int i>() {
        const typename F::Row row = F::row(job, m + i, s);
        each<kPart>([&]<int v>() { totals[i][v] = F::add(folds[v], row, sums[i][v], totals[i][v]); });
      });
    });
    each<kM>(
        [&]<int i>() { each<kPart>([&]<int v>() { F::store(memory + (i * kTiles + v) * kTileRows, totals[i][v]); }); });
  }
}

template <typename F, int kTiles, int kM = kRowsAtOnce>
void multiply_panel(const Job& job, const Block<F>& block, int64_t m) {
  if constexpr (kM > 0) {
    if (job.m - m < kM) return multiply_panel<F, kTiles, kM - 1>(job, block, m);
    if constexpr (F::kHasShortSections) return multiply_short_sections<F, kTiles, kM>(job, block, m);
    each_section(job, block, [&](int64_t s, int64_t begin, int64_t end) {
      multiply_section<F, kTiles, kM>(job, block, m, s, begin, end);
    });
  }
}

template <typename F, int kTiles>
void sum_weight(const Job& job, const Block<F>& block) {
  constexpr int kV = kTiles * Block<F>::kTileVectors;
  each_section(job, block, [&](int64_t s, int64_t begin, int64_t end) {
    typename F::Sum sums[1][kV];
    sum_steps<F>(block.weight, kOnes.words, begin, end, sums);
    __builtin_memcpy(block.template weight_sums<kTiles>(job, s), sums, sizeof(sums));
  });
}

// Prefetches the lines of y that a block's rows will be written to.
template <int kTiles>
__attribute__((always_inline)) inline void fetch_y(const Job& job, int64_t tile_n, RowsOfY rows) {
  const int64_t size = size_of(job.y_dtype);
  for (int64_t m = rows.begin; m < rows.end; ++m) {
    const char* y = static_cast<const char*>(job.y) + (m * job.n + tile_n * kTileRows) * size;
    for (int64_t byte = 0; byte < kTiles * kTileRows * size; byte += 64) __builtin_prefetch(y + byte, 1, 3);
  }
}

template <typename F, int kTiles>
void run_block(const Job& job, Block<F> block, typename F::Parameters* groups) {
  constexpr int64_t kRow = kTiles * kTileRows;
  for (int64_t group = 0; group < job.groups; ++group) {
    for (int t = 0; t < kTiles; ++t) F::prepare(job, block.tile_n + t, group, &groups[group * kTiles + t]);
  }
  const int64_t panels = divide_up(job.k, F::kPanelColumns), batches = divide_up(job.m, kRowsAtOnce);
  uint32_t* const weight = block.weight;
  for (block.panel = 0; block.panel < panels; ++block.panel) {
    block.weight = weight + block.panel % F::kPanelsAtOnce * F::kSteps * kRow;
    // Prefetches the next panel of W in between: requests for all lines at once would queue.
    const bool last = block.panel + 1 == panels;
    const int64_t next_tile = last ? block.tile_n + kTiles : block.tile_n, next_panel = last ? 0 : block.panel + 1;
    constexpr int64_t kLines = kTiles * kLinesOf<F>;
    const int64_t portions = kTiles + batches;
    // Inlined: GCC considers a function that only prefetches to have no effect.
    const auto fetch = [&](int64_t portion) __attribute__((always_inline)) {
      if constexpr (F::kBits == 0) return;
      for (int64_t i = portion * kLines / portions; i < (portion + 1) * kLines / portions; ++i) {
        const uint8_t* bytes = line_of<F>(job, next_tile + i / kLinesOf<F>, next_panel, i % kLinesOf<F>);
        for (int64_t at = 0; at < F::kPanelColumns; at += 64) __builtin_prefetch(bytes + at, 0, 2);
      }
    };
    for (int t = 0; block.panel % F::kPanelsAtOnce == 0 && t < kTiles; ++t) {
      fetch(t);
      F::expand(job, block.tile_n + t, block.panel, groups + t, kTiles, block.weight + t * kTileRows, kRow);
    }
    if constexpr (F::kTakesZerosOff) sum_weight<F, kTiles>(job, block);
    for (int64_t batch = 0; batch < batches; ++batch) {
      fetch(kTiles + batch);
      const RowsOfY rows = {batch * kRowsAtOnce, least((batch + 1) * kRowsAtOnce, job.m)};
      if (last) fetch_y<kTiles>(job, block.tile_n, rows);
      multiply_panel<F, kTiles>(job, block, rows.begin);
      if (last) F::template finish<kTiles>(job, block.tile_n, block.totals, rows);
    }
  }
}

template <typename F>
void run_panels(const Job& job, int64_t begin, int64_t end) {
  constexpr int kTiles = F::kVectors * F::kLanes / kTileRows;
  constexpr int64_t kPanelRows = F::kPanelsAtOnce * F::kSteps + (F::kTakesZerosOff ? kMaxSectionsOfPanel : 0);
  Block<F> block;
  block.weight = static_cast<uint32_t*>(scratch(Scratch::kPanel, kPanelRows * kTiles * kTileRows * 4));
  block.totals = static_cast<uint32_t*>(scratch(Scratch::kSums, job.m * kTiles * kTileRows * 4));
  const int64_t bytes = job.groups * kTiles * static_cast<int64_t>(sizeof(typename F::Parameters));
  auto* groups = static_cast<typename F::Parameters*>(scratch(Scratch::kGroups, bytes));
  block.groups = groups;
  block.tile_n = begin;
  const auto run_all = [&]<int kCount>(std::integral_constant<int, kCount>) {
    for (; block.tile_n + kCount <= end; block.tile_n += kCount) run_block<F, kCount>(job, block, groups);
  };
  run_all(std::integral_constant<int, kTiles>());
  if constexpr (kTiles > 2) run_all(std::integral_constant<int, 2>());
  if constexpr (kTiles > 1) run_all(std::integral_constant<int, 1>());
}

// run_panels() for any W: Int4 and Fp4 for 4-bit W, Bytes<format> for 8-bit W.
template <typename Int4, typename Fp4, template <Format> typename Bytes>
void run_format(const Job& job, int64_t begin, int64_t end) {
  switch (job.weight_format) {
    case Format::kInt4:
      return run_panels<Int4>(job, begin, end);
    case Format::kFp4:
      return run_panels<Fp4>(job, begin, end);
    case Format::kInt8:
      return run_panels<Bytes<Format::kInt8>>(job, begin, end);
    default:
      return run_panels<Bytes<Format::kFp8>>(job, begin, end);
  }
}

// run_panels() for x with zero points. A separate kernel, so that x without them has no overhead.
template <typename F>
struct LessZeros : F {
  static constexpr bool kTakesZerosOff = true;
};
template <typename F>
void run_with_zeros(const Job& job, int64_t begin, int64_t end) {
  job.x_zeros != nullptr ? run_panels<LessZeros<F>>(job, begin, end) : run_panels<F>(job, begin, end);
}

}  // namespace
}  // namespace qao::cpu
