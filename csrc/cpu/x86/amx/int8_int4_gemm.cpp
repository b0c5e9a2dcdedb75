// AMX W4A8 GEMM for more than 16 rows of x or groups of 32.
// 32 rows of W are expanded in panels of 256 k, minus their zero points, to A tiles for int8_pipeline.h. B tiles come
// packed (pack_int8_tiles.cpp). Sums are exact integers up to the end of a group or panel, where x's zero points times
// the sums of these bytes are subtracted.
#include "cpu/gemm/kernels.h"
#include "cpu/scratch.h"
#include "cpu/x86/amx/int8_pipeline.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileK;
using int4::kTileN;

constexpr int64_t kPackedBytes = int4::kTileBytes;  // of a tile of W

constexpr int64_t kLargePanelTiles = 16;  // K-tiles of a panel if a group is that long and x has many rows
constexpr int64_t kPanelTiles = 4;
constexpr int64_t kHalvesPanelTiles = 2;  // with groups of 32
constexpr int64_t kMaxSections = 4;       // groups that a panel may touch
constexpr int64_t kFewTilesM = 4;

int64_t panel_tiles(const Job& job) {
  if (job.int8.steps > job.tiles_k) return kHalvesPanelTiles;
  return job.group_size >= kLargePanelTiles * kTileK && job.tiles_m > kFewTilesM ? kLargePanelTiles : kPanelTiles;
}

// Parameters of a group and up to two N-tiles. A zero point is an integer, subtracted from W's bytes, plus a remainder,
// mostly 0, subtracted from the sums.
struct PairParameters {
  alignas(64) float scale[2 * kTileN];
  alignas(64) float shift[2 * kTileN];  // scale * remainder
  uint64_t zero[2 * kTileN];            // the integer, repeated in eight bytes
};

// Loads the parameters of N-tile `tile`, number n of the pair. Past the last group scales are 0. Returns whether any
// zero point has a remainder.
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

// Expands a tile of q - zero. lower, upper: zeros of columns 0..31 and of the rest, which may belong to two groups.
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

// Accumulates a unit's sections, each with its group's scale.
template <int kSectionsOfUnit, bool kXZeros>
struct ScaleAndAdd {
  static constexpr int kSections = kSectionsOfUnit;
  using Total = float;
  using Vector = __m512;
  static Vector load(const Total* from) { return _mm512_load_ps(from); }
  static void store(Total* to, Vector v) { _mm512_store_ps(to, v); }

  template <int kM>
  __attribute__((always_inline)) Vector add(const int32_t* c, int64_t row, int m, Vector total) const {
#pragma GCC unroll 4
    for (int s = 0; s < kSections; ++s) {
      const int32_t* of_row = c + (s * kPanelRows + row) * kM * kTileRows + m * kTileRows;
      __m512 sums = _mm512_cvtepi32_ps(_mm512_load_si512(of_row));
      if constexpr (kXZeros) {  // exact: below 2^24
        const __m512 w_sum = kM == 1 && w_sums == nullptr ? _mm512_cvtepi32_ps(_mm512_set1_epi32(of_row[kRowOfOnes]))
                                                          : _mm512_set1_ps(w_sums[s * kPanelRows + row]);
        sums = _mm512_fnmadd_ps(_mm512_load_ps(x_zeros + m * kTileRows), w_sum, sums);
      }
      total = _mm512_fmadd_ps(_mm512_set1_ps(parameters[s].scale[row]), sums, total);
    }
    return total;
  }
  __attribute__((always_inline)) __m512 scaled(Vector total, int64_t, __m512) const { return total; }

  const PairParameters* parameters;  // of the first section
  const float* w_sums;               // [kSections][2 x 16 n]; null if x has the row of ones
  const float* x_zeros;              // of the unit's rows
};

// Adds the rows of an A tile, over `columns` of its fours, to 16 words per row.
__attribute__((always_inline)) inline void add_row_sums(const uint8_t* a, __mmask16 columns,
                                                        __m512i (&sums)[kTileRows]) {
  const __m512i ones = _mm512_maskz_set1_epi32(columns, 0x01010101);
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) {
    sums[i] = _mm512_dpbusd_epi32(sums[i], ones, _mm512_load_si512(a + i * kTileColumns));
  }
}

// Reduces the 16 words of each row.
__m512i sums_of_words(const __m512i (&rows)[kTileRows]) {
  __m512i pairs[8], fours[4], eights[2];
  for (int i = 0; i < 8; ++i) {
    const __m512i a = rows[2 * i], b = rows[2 * i + 1];
    pairs[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512i a = pairs[2 * i], b = pairs[2 * i + 1];
    fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  const auto add_lanes = [](__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
  };
  for (int i = 0; i < 2; ++i) eights[i] = add_lanes(fours[2 * i], fours[2 * i + 1]);
  return add_lanes(eights[0], eights[1]);
}

// Per-thread memory.
struct Workspace {
  explicit Workspace(const Job& job) {
    const int64_t panel_bytes = 2 * panel_tiles(job) * kTileBytes, rows = job.tiles_m * kTileRows;
    const int64_t parameter_bytes = (job.groups + kMaxSections - 1) * static_cast<int64_t>(sizeof(PairParameters));
    const int64_t float_bytes = (kSumsOfPanels + rows) * static_cast<int64_t>(sizeof(float));
    const int64_t bytes = panel_bytes + kUnitsBytes + parameter_bytes + float_bytes;
    panel = static_cast<uint8_t*>(scratch(Scratch::kPanel, bytes));
    c = reinterpret_cast<int32_t*>(panel + panel_bytes);
    parameters = reinterpret_cast<PairParameters*>(panel + panel_bytes + kUnitsBytes);
    w_sums = reinterpret_cast<float*>(panel + panel_bytes + kUnitsBytes + parameter_bytes);
    x_zeros = w_sums + kSumsOfPanels;
    for (int64_t m = 0; m < rows; m += kTileRows) _mm512_store_ps(x_zeros + m, load_rows(job, m).zero);
  }

  static constexpr int64_t kUnitsBytes = 2 * kMaxSections * 4 * kTileSums * int64_t{sizeof(int32_t)};
  static constexpr int64_t kSumsOfPanels = 2 * kMaxSections * kPanelRows;

  uint8_t* panel;  // [2][panel_tiles()] A tiles
  int32_t* c;      // [2] units' C tiles
  PairParameters* parameters;
  float* w_sums;   // of two panels, each [sections][2 x 16 n]
  float* x_zeros;  // [16 tiles_m]
};

// Weight policy for multiply_panels() with `count` N-tiles, 1 or 2. With one N-tile it is repeated in place of the
// second.
template <int kSections, bool kXZeros>
struct Int4 {
  using Fold = ScaleAndAdd<kSections, kXZeros>;
  static constexpr bool kDirect = false;

  Int4(const Job& of_job, int64_t tile_n, int of_count, const Workspace& of_memory)
      : job(of_job),
        memory(of_memory),
        count(of_count),
        halves(job.int8.steps / job.tiles_k),
        in_group(group_steps(job)),
        row_bytes(job.tiles_k * kPackedBytes),
        weight(job.weight + tile_n * row_bytes),
        tiles(panel_tiles(job)),
        steps(job.groups * in_group),
        section(least(in_group, tiles * halves)) {
    for (int n = 0; n < 2; ++n) has_rests |= load_pair_parameters(job, tile_n + n % count, n, memory.parameters);
  }

  Rows fill(int64_t t, int64_t end, int64_t slots) {
    for (int n = 0; n < 2; ++n) {
      for (int64_t i = t; i < end; ++i) {
        const PairParameters* first = memory.parameters + i * halves / in_group;
        expand_without_zeros(weight + n % count * row_bytes + i * kPackedBytes, first[0].zero + n * kTileN,
                             first[halves - 1].zero + n * kTileN, memory.panel + (n * tiles + i - t) * kTileBytes);
      }
    }
    if (kXZeros && !has_row_of_ones(job)) sum_sections(t, end);
    lines = divide_up(kPackedBytes / 64 * (end - t), slots);
    next = weight + (end < job.tiles_k ? end * kPackedBytes : 2 * row_bytes);
    return {};
  }

  __attribute__((always_inline)) void fetch() {
    for (int64_t line = 0; line < lines; ++line, next += 64) {
      _mm_prefetch(next, _MM_HINT_T1);
      _mm_prefetch(next + row_bytes, _MM_HINT_T1);
    }
  }

  Fold fold(int64_t step, int64_t m) const { return {memory.parameters + step / in_group, w_sums, memory.x_zeros + m}; }

  // Computes the sums of W over the panel's sections, for its units.
  void sum_sections(int64_t t, int64_t end) {
    float* to = memory.w_sums + t / tiles % 2 * (kSections * kPanelRows);  // those of the last panel are still in use
    w_sums = to;
    const int64_t panel_steps = (end - t) * halves;
    for (int64_t s = 0; s < kSections; ++s) {
      for (int n = 0; n < 2; ++n, to += kTileN) {
        __m512i sums[kTileRows] = {};
        for (int64_t i = s * section; i < least((s + 1) * section, panel_steps); ++i) {
          const __mmask16 columns = halves == 1 ? 0xFFFF : i % 2 == 0 ? 0x3333 : 0xCCCC;
          add_row_sums(memory.panel + (n * tiles + i / halves) * kTileBytes, columns, sums);
        }
        _mm512_store_ps(to, _mm512_cvtepi32_ps(sums_of_words(sums)));
      }
    }
  }

  const Job& job;
  const Workspace& memory;
  const int count;
  const int64_t halves;  // steps per K-tile
  const int64_t in_group, row_bytes;
  const uint8_t* const weight;
  const int64_t tiles, steps, section;  // with groups of 32 the last K-tile may have only one half
  bool has_rests = false;               // of zero points
  int64_t lines = 0;                    // of each N-tile to prefetch per step
  const uint8_t* next = nullptr;
  const float* w_sums = nullptr;  // of the panel, if needed
};

// totals -= remainders of zero points times sums of x.
void take_off_rests(const Job& job, const PairParameters* parameters, float* totals) {
  for (int64_t tile = 0; tile < job.tiles_m; ++tile) {
    const int64_t first = tile / 2 * 2, stride = least(2, job.tiles_m - first) * kTileRows;
    for (int n = 0; n < 2; ++n) {
      float* of_tile = totals + first * 2 * kTileSums + (tile - first) * kTileRows + n * kTileN * stride;
      __m512 row[kTileN];
      for (int i = 0; i < kTileN; ++i) row[i] = _mm512_load_ps(of_tile + i * stride);
      for (int64_t group = 0; group < job.groups; ++group) {
        const float* shift = parameters[group].shift + n * kTileN;
        const __m512 x_sums = load_sums(job, group, tile);
#pragma GCC unroll 16
        for (int i = 0; i < kTileN; ++i) row[i] = _mm512_fnmadd_ps(_mm512_set1_ps(shift[i]), x_sums, row[i]);
      }
      for (int i = 0; i < kTileN; ++i) _mm512_store_ps(of_tile + i * stride, row[i]);
    }
  }
}

template <int kSections, bool kXZeros>
void many_rows(const Job& job, int64_t begin, int64_t end, const Workspace& memory) {
  const int64_t bytes = 2 * job.tiles_m * kTileSums * int64_t{sizeof(float)};
  float* totals = static_cast<float*>(scratch(Scratch::kSums, bytes));
  DirectOutput direct(job);
  for (int64_t tile_n = begin; tile_n < end; tile_n += 2) {
    const int count = static_cast<int>(least(2, end - tile_n));
    Int4<kSections, kXZeros> w(job, tile_n, count, memory);
    if (w.has_rests) direct.write();
    const Output* output = w.has_rests ? nullptr : direct.of(tile_n, end);
    multiply_panels(job, w, memory.panel, memory.c, totals, output);
    if (output != nullptr) {
      direct.add();
      continue;
    }
    if (w.has_rests) take_off_rests(job, memory.parameters, totals);
    const auto sums = [](int, __m512i total, __m512)
                          __attribute__((always_inline)) { return _mm512_castsi512_ps(total); };
    count == 2 ? write_totals<2>(job, tile_n, totals, sums) : write_totals<1>(job, tile_n, totals, sums);
  }
  direct.write();
}

template <bool kXZeros>
void many_rows(const Job& job, int64_t begin, int64_t end, const Workspace& memory) {
  const int64_t steps = panel_tiles(job) * (job.int8.steps / job.tiles_k),
                sections = steps / least(group_steps(job), steps);
  const auto run = sections == 1   ? many_rows<1, kXZeros>
                   : sections == 2 ? many_rows<2, kXZeros>
                                   : many_rows<kMaxSections, kXZeros>;
  run(job, begin, end, memory);
}

}  // namespace

void amx::int8_int4_gemm(const Job& job, int64_t begin, int64_t end) {
  // Beyond this, the sums from which int8_int4_few_rows() subtracts zero points would not be exact in float32.
  constexpr int64_t kExactColumns = 8192;
  const bool exact = least(job.group_size, job.k) <= kExactColumns;
  const bool few = job.tiles_m == 1 && (job.x_zeros == nullptr || has_row_of_ones(job));
  if (few && job.int8.steps == job.tiles_k && exact) return amx::int8_int4_few_rows(job, begin, end);
  const TileScope registers;
  const Workspace memory(job);
  job.x_zeros != nullptr ? many_rows<true>(job, begin, end, memory) : many_rows<false>(job, begin, end, memory);
}

}  // namespace qao::cpu
