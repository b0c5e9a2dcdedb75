// int8 x times int4 W with AMX, more than 16 rows of x or groups of 32. 32 rows of W are expanded in panels of 256 k,
// less their zero points, into A tiles of 16 rows x 64 bytes, and meet all rows of x, 32 x 32 of C at a time; B tiles
// come packed (pack_int8_tiles.cpp). Sums are exact integers up to the end of a group, or of a panel.
//
// L1 holds a panel of A tiles, the C tiles of two units (a panel against two tiles of x) and most of the totals. C
// tiles are stored and folded between the products of the next unit, and tiles loaded between those of the step before:
// neither a fold nor a load overlaps with much else.
#include "cpu/mm_kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/amx/int8_tiles.h"
#include "int4/layout.h"

namespace qao::cpu {
namespace {

using int4::kTileK;
using int4::kTileN;

constexpr int64_t kPackedBytes = int4::kTileBytes;  // of a tile of W
constexpr int64_t kTileBytes = kTileRegisterBytes;

constexpr int64_t kLargePanelTiles = 16;  // K-tiles of a panel if a group is as long and x has many rows
constexpr int64_t kPanelTiles = 4;
constexpr int64_t kHalvesPanelTiles = 2;  // with groups of 32
constexpr int64_t kMaxSections = 4;       // groups that a panel has a part of
constexpr int64_t kFewTilesM = 4;

int64_t panel_tiles(const Job& job) {
  if (job.steps > job.tiles_k) return kHalvesPanelTiles;
  return job.group_size >= kLargePanelTiles * kTileK && job.tiles_m > kFewTilesM ? kLargePanelTiles : kPanelTiles;
}

// Of a group and up to two N-tiles. A zero point is an integer, which is taken off W's bytes, and a rest, mostly 0,
// which is taken off the sums.
struct PairParameters {
  alignas(64) float scale[2 * kTileN];
  alignas(64) float shift[2 * kTileN];  // scale * rest
  uint64_t zero[2 * kTileN];            // the integer as eight bytes
};

// Of N-tile `tile`, number n of the pair. Past the last group scales are 0. Returns whether a zero point has a rest.
bool load_pair_parameters(const Job& job, int64_t tile, int n, PairParameters* parameters) {
  bool rests = false;
  for (int64_t group = 0; group < job.groups + kMaxSections - 1; ++group, ++parameters) {
    __m512 scale = _mm512_setzero_ps(), zero = _mm512_set1_ps(int4::kSymmetricZero);
    if (group < job.groups) {
      const int64_t at = (tile * job.groups + group) * job.parameters * kTileN;
      scale = load16(job.scales, at, job.scale_dtype);
      if (job.parameters == 2) zero = load16(job.scales, at + kTileN, job.scale_dtype);
    }
    const __m512 in_range = _mm512_max_ps(_mm512_min_ps(zero, _mm512_set1_ps(15)), _mm512_setzero_ps());
    const __m512i integer = _mm512_cvtps_epi32(in_range);
    const __m512 rest = _mm512_sub_ps(zero, _mm512_cvtepi32_ps(integer));
    rests |= _mm512_cmp_ps_mask(rest, _mm512_setzero_ps(), _CMP_NEQ_UQ) != 0;
    _mm512_store_ps(parameters->scale + n * kTileN, scale);
    _mm512_store_ps(parameters->shift + n * kTileN, _mm512_mul_ps(scale, rest));
    alignas(64) uint32_t zeros[kTileN];
    _mm512_store_si512(zeros, integer);
    for (int i = 0; i < kTileN; ++i) parameters->zero[n * kTileN + i] = zeros[i] * 0x0101010101010101;
  }
  return rests;
}

// A tile of q - zero. lower, upper: zeros of columns 0..31 and of the others, which may be of two groups.
void expand_without_zeros(const uint8_t* tile, const uint64_t* lower, const uint64_t* upper, uint8_t* a) {
  constexpr __mmask8 kUpperColumns = 0xAA;  // in the order of W's bytes
  const __m512i mask = _mm512_set1_epi8(0x0F);
  const auto zeros = [&](int row) __attribute__((always_inline)) {
    const __m512i zero = _mm512_set1_epi64(static_cast<int64_t>(lower[row]));
    return _mm512_mask_set1_epi64(zero, kUpperColumns, static_cast<int64_t>(upper[row]));
  };
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    const __m512i bytes = _mm512_loadu_si512(tile + g * 64), high = _mm512_srli_epi16(bytes, 4);
    _mm512_store_si512(a + g * 64, _mm512_sub_epi8(_mm512_and_si512(bytes, mask), zeros(g)));
    _mm512_store_si512(a + (g + 8) * 64, _mm512_sub_epi8(_mm512_and_si512(high, mask), zeros(g + 8)));
  }
}

// A panel against kM tiles of x.
struct Unit {
  const int8_t *b, *next_b;          // of this one and of the one that follows
  int64_t steps, section;            // a section: a group's steps within the panel
  float* total;                      // [2][16 n][kM][16 m]
  const PairParameters* parameters;  // of the first section
};

// Units one after the other. Registers 0..3 = C of 2 N-tiles x kM tiles of x, 4..5 = A, 6..7 = B.
template <int kM, int kSections>
class Pipeline {
 public:
  // c: memory for two units' C tiles, [kSections][2][16 n][kM][16 m] each.
  Pipeline(const Job& job, const uint8_t* panel, int32_t* c)
      : panel_(panel),
        a_tile_(panel_tiles(job) * kTileBytes),
        b_tile_(job.steps * kTileBytes),
        halves_(job.steps > job.tiles_k ? 1 : 0),
        c_(c),
        store_(c) {}

  // The tiles of a unit's first step, when the panel is new.
  void load(const int8_t* b) const {
    tile_load_once<6>(b);
    tile_load<4>(panel_);
    tile_load<5>(panel_ + a_tile_);
    if constexpr (kM == 2) tile_load_once<7>(b + b_tile_);
  }

  // fetch() is called every step.
  template <typename Fetch>
  void run(const Unit& unit, const Fetch& fetch) {
    // Copies of members, which would be read again after every tile instruction.
    const uint8_t* const panel = panel_;
    const int64_t a_tile = a_tile_, b_tile = b_tile_, steps = unit.steps;
    const int halves = halves_;
    const int8_t *const b = unit.b, *const next_unit_b = unit.next_b;
    const Unit before = before_;
    const int32_t* const before_c = c_ + (1 - parity_) * kUnitSums;
    int32_t *c = c_ + parity_ * kUnitSums, *store = store_;
    int64_t row = row_;
    const auto fold = [&](int64_t rows) __attribute__((always_inline)) {
      for (const int64_t end = least(row + rows, kRows); row < end; row += 2) {
        fold_row(before, before_c, row);
        fold_row(before, before_c, row + 1);
      }
    };
    // The first step stores the last C tiles of the unit before; the others fold them.
    const int64_t slots = 4 * (steps - 1), rows_per_slot = slots > 0 ? 2 * divide_up(kRows / 2, slots) : 0;
    int64_t i = 0;
    const auto step = [&]<bool kFirstOfSection>(int64_t rows) __attribute__((always_inline)) {
      ++i;
      const uint8_t* next_a = i < steps ? panel + (i >> halves) * kTileBytes : panel;
      const int8_t* next_b = i < steps ? b + i * kTileBytes : next_unit_b;
      const auto multiply = [&]<int n, int m>() __attribute__((always_inline)) {
        if constexpr (kFirstOfSection) {
          store_c<n, m>(store);
          tile_zero<2 * n + m>();
        }
        tile_multiply_signed_bytes<2 * n + m, 4 + n, 6 + m>();
      };
      multiply.template operator()<0, 0>();
      fold(rows);
      multiply.template operator()<1, 0>();
      tile_load_once<6>(next_b);
      fetch();
      fold(rows);
      if constexpr (kM == 2) multiply.template operator()<0, 1>();
      tile_load<4>(next_a);
      fold(rows);
      if constexpr (kM == 2) multiply.template operator()<1, 1>();
      if constexpr (kM == 2) tile_load_once<7>(next_b + b_tile);
      tile_load<5>(next_a + a_tile);
      fold(rows);
    };
    for (int64_t section_end = unit.section; i < steps; section_end += unit.section, c += kSectionSums) {
      step.template operator()<true>(i == 0 ? 0 : rows_per_slot);
      store = c;
      while (i < least(steps, section_end)) step.template operator()<false>(rows_per_slot);
    }
    fold(kRows);
    before_ = unit, store_ = store;
    row_ = 0, parity_ = 1 - parity_;
  }

  // Folds what is left.
  void finish() {
    each_c<2, kM>([&]<int n, int m>() { store_c<n, m>(store_); });
    for (; row_ < kRows; ++row_) fold_row(before_, c_ + (1 - parity_) * kUnitSums, row_);
  }

 private:
  static constexpr int64_t kRows = 2 * kTileN;
  static constexpr int64_t kSectionSums = 2 * kM * kTileSums, kUnitSums = kSections * kSectionSums;

  template <int n, int m>
  __attribute__((always_inline)) static void store_c(int32_t* c) {
    tile_store<2 * n + m>(c + n * kM * kTileSums + m * kTileRows, kM * kTileRows * int64_t{sizeof(int32_t)});
  }

  // A row of W against kM tiles of x.
  __attribute__((always_inline)) static void fold_row(const Unit& unit, const int32_t* c, int64_t row) {
    float* total = unit.total + row * kM * kTileRows;
    c += row * kM * kTileRows;
    __m512 sum[kM];
    for (int m = 0; m < kM; ++m) sum[m] = _mm512_load_ps(total + m * kTileRows);
#pragma GCC unroll 4
    for (int s = 0; s < kSections; ++s) {
      const __m512 scale = _mm512_set1_ps(unit.parameters[s].scale[row]);
      for (int m = 0; m < kM; ++m) {
        const __m512i sums = _mm512_load_si512(c + s * kSectionSums + m * kTileRows);
        sum[m] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sums), sum[m]);
      }
    }
    for (int m = 0; m < kM; ++m) _mm512_store_ps(total + m * kTileRows, sum[m]);
  }

  const uint8_t* panel_;
  int64_t a_tile_, b_tile_;
  int halves_;
  int32_t *c_, *store_;
  Unit before_ = {};
  int64_t row_ = kRows;  // of `before_`, the next to be folded
  int64_t parity_ = 0;
};

// y of `count` N-tiles from total [pairs of tiles of x][2][16 n][2 or, of an odd last tile, 1][16 m]; neighbours in N
// share cache lines. rests: parameters with the rests of zero points, or null if there are none.
void write_pair(const Job& job, int64_t tile_n, int count, const float* total, const PairParameters* rests) {
  Columns columns[2];
  for (int n = 0; n < count; ++n) columns[n] = load_columns(job, (tile_n + n) * kTileRows);
  for (int64_t tile = 0; tile < job.tiles_m; ++tile) {
    const int64_t first = tile / 2 * 2, in_pair = least(2, job.tiles_m - first);
    __m512i rows[2][kTileRows];
    for (int n = 0; n < count; ++n) {
      const float* sums = total + (first * 2 + n * in_pair) * kTileSums + (tile - first) * kTileRows;
      __m512 row[kTileRows];
      for (int i = 0; i < kTileRows; ++i) row[i] = _mm512_load_ps(sums + i * in_pair * kTileRows);
      for (int64_t group = 0; rests != nullptr && group < job.groups; ++group) {
        const float* shift = rests[group].shift + n * kTileN;
        const __m512 x_sums = load_sums(job, group, tile);
#pragma GCC unroll 16
        for (int i = 0; i < kTileRows; ++i) row[i] = _mm512_fnmadd_ps(_mm512_set1_ps(shift[i]), x_sums, row[i]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) rows[n][i] = _mm512_castps_si512(row[i]);
      transpose16(rows[n]);
    }
    for (int64_t i = 0; i < least(kTileRows, job.m - tile * kTileRows); ++i) {
      for (int n = 0; n < count; ++n) write_row(job, columns[n], tile * kTileRows + i, _mm512_castsi512_ps(rows[n][i]));
    }
  }
}

constexpr int64_t kUnitsBytes = 2 * kMaxSections * 4 * kTileSums * int64_t{sizeof(int32_t)};

// Memory of a thread.
struct Workspace {
  uint8_t* panel;  // [2][panel_tiles()] A tiles
  int32_t* c;      // [2] units' C tiles
  PairParameters* parameters;
};

// `count` N-tiles, 1 or 2; in the place of a second one the first again.
template <int kSections>
void many_rows(const Job& job, int64_t tile_n, int count, const Workspace& memory) {
  bool rests = false;
  for (int n = 0; n < 2; ++n) rests |= load_pair_parameters(job, tile_n + n % count, n, memory.parameters);
  const int64_t block = panel_tiles(job), in_group = group_steps(job), halves = job.steps / job.tiles_k;
  const int64_t steps = job.groups * in_group;  // with groups of 32 the last K-tile may have but one half
  const int64_t row_bytes = job.tiles_k * kPackedBytes;
  const uint8_t* weight = job.weight + tile_n * row_bytes;
  const int64_t total_values = 2 * job.tiles_m * kTileSums;
  float* total = static_cast<float*>(scratch(Scratch::kSums, total_values * int64_t{sizeof(float)}));
  for (int64_t i = 0; i < total_values; i += 16) _mm512_store_ps(total + i, _mm512_setzero_ps());

  Pipeline<2, kSections> two(job, memory.panel, memory.c);
  Pipeline<1, kSections> one(job, memory.panel, memory.c);
  const int64_t pairs = job.tiles_m / 2;
  bool forward = true;  // every panel begins with the totals that the one before left near
  for (int64_t t = 0; t < job.tiles_k; t += block, forward = !forward) {
    const int64_t end = least(job.tiles_k, t + block);
    for (int n = 0; n < 2; ++n) {
      for (int64_t i = t; i < end; ++i) {
        const PairParameters* first = memory.parameters + i * halves / in_group;
        expand_without_zeros(weight + n % count * row_bytes + i * kPackedBytes, first[0].zero + n * kTileN,
                             first[halves - 1].zero + n * kTileN, memory.panel + (n * block + i - t) * kTileBytes);
      }
    }
    const int64_t begin_step = t * halves, end_step = least(end * halves, steps);
    // What comes next of W is fetched meanwhile, a share every step.
    const int64_t slots = (end_step - begin_step) * ((job.tiles_m + 1) / 2);
    const int64_t lines = divide_up(kPackedBytes / 64 * (end - t), slots);
    const uint8_t* next = weight + (end < job.tiles_k ? end * kPackedBytes : 2 * row_bytes);
    const auto fetch = [&]() __attribute__((always_inline)) {
      for (int64_t line = 0; line < lines; ++line, next += 64) {
        _mm_prefetch(next, _MM_HINT_T1);
        _mm_prefetch(next + row_bytes, _MM_HINT_T1);
      }
    };
    const auto b_at = [&](int64_t tile_m) { return job.int8 + (tile_m * job.steps + begin_step) * kTileBytes; };
    const auto unit = [&](int64_t tile_m, int64_t next_m) -> Unit {
      return {b_at(tile_m),
              b_at(next_m),
              end_step - begin_step,
              least(in_group, block * halves),
              total + tile_m * 2 * kTileSums,
              memory.parameters + begin_step / in_group};
    };
    const auto tile_of = [&](int64_t pair) { return 2 * (forward ? pair : pairs - 1 - pair); };
    if (pairs > 0) two.load(b_at(tile_of(0)));
    for (int64_t i = 0; i < pairs; ++i) two.run(unit(tile_of(i), tile_of(least(i + 1, pairs - 1))), fetch);
    if (job.tiles_m % 2 != 0) {
      if (pairs > 0) two.finish();
      one.load(b_at(2 * pairs));
      one.run(unit(2 * pairs, 2 * pairs), fetch);
      one.finish();
    }
  }
  if (job.tiles_m % 2 == 0) two.finish();
  write_pair(job, tile_n, count, total, rests ? memory.parameters : nullptr);
}

}  // namespace

void amx::int8_int4_gemm(const Job& job, int64_t begin, int64_t end) {
  // Longer, and the sums from which that one takes zero points off would not be exact as float32.
  constexpr int64_t kExactColumns = 8192;
  const bool exact = least(job.group_size, job.k) <= kExactColumns;
  if (job.tiles_m == 1 && job.steps == job.tiles_k && exact) return amx::int8_int4_few_rows(job, begin, end);
  const TileScope registers;
  const int64_t panel_bytes = 2 * panel_tiles(job) * kTileBytes;
  const int64_t parameter_bytes = (job.groups + kMaxSections - 1) * static_cast<int64_t>(sizeof(PairParameters));
  auto* panel = static_cast<uint8_t*>(scratch(Scratch::kPanel, panel_bytes + kUnitsBytes + parameter_bytes));
  const Workspace memory = {panel, reinterpret_cast<int32_t*>(panel + panel_bytes),
                            reinterpret_cast<PairParameters*>(panel + panel_bytes + kUnitsBytes)};
  const int64_t steps = panel_tiles(job) * (job.steps / job.tiles_k), sections = steps / least(group_steps(job), steps);
  const auto run = sections == 1 ? many_rows<1> : sections == 2 ? many_rows<2> : many_rows<kMaxSections>;
  for (int64_t tile_n = begin; tile_n < end; tile_n += 2) {
    run(job, tile_n, static_cast<int>(least(2, end - tile_n)), memory);
  }
}

}  // namespace qao::cpu
