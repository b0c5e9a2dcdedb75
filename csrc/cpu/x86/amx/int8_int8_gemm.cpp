// AMX W8A8 GEMM: A tiles are 16 rows of W x 64 k, B tiles come packed (pack_int8_tiles.cpp).
//
// Up to 64 rows of x, or with a small W: A tiles are loaded directly from W for each 32 rows of x, and C stays in
// registers along all of K. Otherwise: panels of 1024 k (int8_pipeline.h). The first rows of x load W directly and copy
// it to the panel, which avoids collisions of pages and cache sets, for the other rows. The next rows of W are
// prefetched meanwhile.
#include "cpu/gemm/kernels.h"
#include "cpu/scratch.h"
#include "cpu/x86/amx/int8_pipeline.h"
#include "cpu/x86/avx512/int8_output.h"

namespace qao::cpu {
namespace {

constexpr int64_t kPanelTiles = 16;

// Limits up to which W is not copied: few rows of x, or a small W, where 32 rows stay in L1 and lines of y in few
// pages.
constexpr int64_t kDirectTilesM = 4;
constexpr int64_t kDirectTilesK = 16, kDirectN = 3072;

bool is_direct(const Job& job) {
  return job.tiles_m <= kDirectTilesM || (job.tiles_k <= kDirectTilesK && job.n <= kDirectN);
}

// Copies 16 rows of W from row n, columns [begin, end), to A tiles; zeros past N and K.
void copy_tiles(const Job& job, int64_t n, int64_t begin, int64_t end, uint8_t* out) {
  const int64_t rows = least(kTileRows, job.n - n);
  const uint8_t* weight = job.weight + n * job.k;
  for (int64_t k = begin; k < end; k += kTileColumns, out += kTileBytes) {
    const __mmask64 mask = ~__mmask64{0} >> (kTileColumns - least(kTileColumns, end - k));
    for (int64_t r = 0; r < kTileRows; ++r) {
      const __m512i bytes = _mm512_maskz_loadu_epi8(r < rows ? mask : 0, weight + r * job.k + k);
      _mm512_store_si512(out + r * kTileColumns, bytes);
    }
  }
}

// ---- Direct loads of W: registers 0..3 = C of 1 or 2 N-tiles x 1 or 2 tiles of x, 4..5 = A, 6..7 = B ----

// C[kN][kM] += `count` steps. A tiles have `row` bytes between rows, `tile_n` between N-tiles, `step` between steps.
// Tiles of the next step load between the multiplications of this one. `fetch`, unless null, points to kN * 16 rows of
// W to prefetch.
template <int kN, int kM>
__attribute__((always_inline)) inline void multiply_tiles(const Job& job, const uint8_t* a, int64_t tile_n,
                                                          int64_t step, int64_t row, const int8_t* b, int64_t count,
                                                          const uint8_t* fetch) {
  const auto multiply = []<int n, int m>() { tile_multiply_signed_bytes<2 * n + m, 4 + n, 6 + m>(); };
  const int64_t b_tile = job.tiles_k * kTileBytes;
  if (count == 0) return;
  tile_load_once<6>(b);
  tile_load<4>(a, row);
  if constexpr (kN == 2) tile_load<5>(a + tile_n, row);
  if constexpr (kM == 2) tile_load_once<7>(b + b_tile);
  const auto one_step = [&]<bool kMore>(int64_t i) __attribute__((always_inline)) {
    a += step;
    b += kTileBytes;
    multiply.template operator()<0, 0>();
    if constexpr (kN == 2) multiply.template operator()<1, 0>();
    if constexpr (kMore) tile_load_once<6>(b);
    for (int64_t r = 0; fetch != nullptr && r < kN * kTileRows; ++r) {
      _mm_prefetch(fetch + r * job.k + i * kTileColumns, _MM_HINT_T1);
    }
    if constexpr (kM == 2) multiply.template operator()<0, 1>();
    if constexpr (kMore) tile_load<4>(a, row);
    if constexpr (kN == 2 && kM == 2) multiply.template operator()<1, 1>();
    if constexpr (kMore && kM == 2) tile_load_once<7>(b + b_tile);
    if constexpr (kMore && kN == 2) tile_load<5>(a + tile_n, row);
  };
  for (int64_t i = 0; i < count - 1; ++i) one_step.template operator()<true>(i);
  one_step.template operator()<false>(count - 1);
}

// c[kN][kM] = N-tiles times tiles of x from tile_m on. The first tiles of x prefetch the next N-tiles. rest: memory for
// two A tiles, for the partial K-tile at the end and for rows past N.
template <int kN, int kM>
void multiply_direct(const Job& job, int64_t tile_n, int64_t tile_m, uint8_t* rest, int32_t* c) {
  const int64_t n = tile_n * kTileRows;
  const uint8_t* first = job.weight + n * job.k;
  const int8_t* x = job.int8.values + tile_m * job.tiles_k * kTileBytes;
  const int64_t whole = n + kN * kTileRows <= job.n ? job.k / kTileColumns : 0;
  each_c<kN, kM>([]<int n, int m>() { tile_zero<2 * n + m>(); });
  multiply_tiles<kN, kM>(job, first, kTileRows * job.k, kTileColumns, job.k, x, whole,
                         tile_m == 0 ? first + kN * kTileRows * job.k : nullptr);
  for (int64_t t = whole; t < job.tiles_k; ++t) {
    for (int i = 0; i < kN; ++i) {
      copy_tiles(job, n + i * kTileRows, t * kTileColumns, least((t + 1) * kTileColumns, job.k), rest + i * kTileBytes);
    }
    multiply_tiles<kN, kM>(job, rest, kTileBytes, 0, kTileColumns, x + t * kTileBytes, 1, nullptr);
  }
  each_c<kN, kM>([&]<int n, int m>() { tile_store<2 * n + m>(c + (n * kM + m) * kTileSums); });
}

// Scales of two N-tiles, and sums of W's integers over k if x has zero points.
struct PairScales {
  bool has_zeros;
  alignas(64) float scale[2 * kTileRows];
  alignas(64) int32_t w_sum[2 * kTileRows];

  PairScales(const Job& job, int64_t tile_n) : has_zeros(job.x_zeros != nullptr) {
    for (int i = 0; i < 2; ++i) {
      const int64_t n = (tile_n + i) * kTileRows;
      const __m512 scales = load_scales(job, n);
      _mm512_store_ps(scale + i * kTileRows, scales);
      _mm512_store_si512(w_sum + i * kTileRows, sums_of_integers(job, n, scales));
    }
  }
  // Scales the sums of row `row`, after subtracting the contribution of x's zero points as integers.
  __attribute__((always_inline)) __m512 scaled(__m512i sum, int64_t row, __m512 zero) const {
    if (has_zeros) {
      const __m512i zeros = _mm512_mullo_epi32(_mm512_cvtps_epi32(zero), _mm512_set1_epi32(w_sum[row]));
      sum = _mm512_sub_epi32(sum, zeros);
    }
    return _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale[row]));
  }
};

template <int kN, int kM>
void direct_pair(const Job& job, int64_t tile_n, int64_t tile_m) {
  alignas(64) uint8_t rest[2 * kTileBytes];
  alignas(64) int32_t c[kN * kM * kTileSums];
  multiply_direct<kN, kM>(job, tile_n, tile_m, rest, c);
  const PairScales scales(job, tile_n);
  ColumnsOfPair columns;
  load_columns(job, tile_n * kTileRows, &columns);
  for (int m = 0; m < kM; ++m) {
    const auto sums = [&](int i, __m512 zero) __attribute__((always_inline)) {
      const int32_t* sum = c + (i / kTileRows * kM + m) * kTileSums + i % kTileRows * kTileRows;
      return scales.scaled(_mm512_load_si512(sum), i, zero);
    };
    store_integer_tiles<kN>(job, tile_n * kTileRows, (tile_m + m) * kTileRows, columns, sums);
  }
}

// kN N-tiles by all rows of x: the first pass reads W from memory, a second one from L2.
template <int kN>
void direct_rows(const Job& job, int64_t tile_n) {
  int64_t tile_m = 0;
  for (; tile_m + 2 <= job.tiles_m; tile_m += 2) direct_pair<kN, 2>(job, tile_n, tile_m);
  if (tile_m < job.tiles_m) direct_pair<kN, 1>(job, tile_n, tile_m);
}

void direct_range(const Job& job, int64_t begin, int64_t end) {
  for (int64_t tile_n = begin; tile_n < end; tile_n += 2) {
    tile_n + 1 < end ? direct_rows<2>(job, tile_n) : direct_rows<1>(job, tile_n);
  }
}

// ---- More rows ----

struct Add {
  static constexpr int kSections = 1;
  using Total = int32_t;
  using Vector = __m512i;
  static Vector load(const Total* from) { return _mm512_load_si512(from); }
  static void store(Total* to, Vector v) { _mm512_store_si512(to, v); }

  template <int kM>
  __attribute__((always_inline)) Vector add(const int32_t* c, int64_t row, int m, Vector total) const {
    return _mm512_add_epi32(total, _mm512_load_si512(c + (row * kM + m) * kTileRows));
  }
  __attribute__((always_inline)) __m512 scaled(Vector total, int64_t row, __m512 zero) const {
    return scales->scaled(total, row, zero);
  }

  const PairScales* scales;
};

// Weight policy for multiply_panels() with two N-tiles.
struct Int8 {
  using Fold = Add;
  static constexpr bool kDirect = true;
  static constexpr int64_t tiles = kPanelTiles, section = kPanelTiles;

  Int8(const Job& of_job, int64_t tile_n, uint8_t* of_panel)
      : job(of_job), n(tile_n * kTileRows), panel(of_panel), steps(job.tiles_k), scales(job, tile_n) {}

  Rows fill(int64_t t, int64_t end, int64_t slots) {
    const int64_t whole = n + kPanelRows <= job.n ? least(end, job.k / kTileColumns) : t;
    for (int i = 0; i < 2 && whole < end; ++i) {
      copy_tiles(job, n + i * kTileRows, whole * kTileColumns, least(end * kTileColumns, job.k),
                 panel + (i * tiles + whole - t) * kTileBytes);
    }
    const uint8_t* first = job.weight + n * job.k + t * kTileColumns;
    lines = divide_up(kPanelRows * (end - t), slots);
    next = first + kPanelRows * job.k;
    next_row = 0;
    return {first, job.k, whole - t};
  }

  __attribute__((always_inline)) void fetch() {
    for (int64_t line = 0; line < lines; ++line) {
      _mm_prefetch(next + next_row * job.k, _MM_HINT_T1);
      if (++next_row == kPanelRows) next += 64, next_row = 0;
    }
  }

  Fold fold(int64_t, int64_t) const { return {&scales}; }

  const Job& job;
  const int64_t n;
  uint8_t* const panel;
  const int64_t steps;
  int64_t lines = 0, next_row = 0;  // lines to prefetch per step; the row of the next one
  const uint8_t* next = nullptr;
  const PairScales scales;
};

void many_rows(const Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kPanelBytes = 2 * kPanelTiles * kTileBytes;
  constexpr int64_t kUnitsBytes = 2 * Pipeline<2, Add>::kUnitSums * int64_t{sizeof(int32_t)};
  uint8_t* panel = static_cast<uint8_t*>(scratch(Scratch::kPanel, kPanelBytes + kUnitsBytes));
  int32_t* c = reinterpret_cast<int32_t*>(panel + kPanelBytes);
  const int64_t bytes = 2 * job.tiles_m * kTileSums * int64_t{sizeof(int32_t)};
  int32_t* totals = static_cast<int32_t*>(scratch(Scratch::kSums, bytes));
  DirectOutput output_of(job);
  for (int64_t tile_n = begin; tile_n < end; tile_n += 2) {
    Int8 w(job, tile_n, panel);
    const Output* output = output_of.of(tile_n, end);
    multiply_panels(job, w, panel, c, totals, output);
    if (output != nullptr) {
      output_of.add();
      continue;
    }
    const auto sums = [&](int i, __m512i total, __m512 zero)
                          __attribute__((always_inline)) { return w.scales.scaled(total, i, zero); };
    tile_n + 1 < end ? write_totals<2>(job, tile_n, totals, sums) : write_totals<1>(job, tile_n, totals, sums);
  }
  output_of.write();
}

}  // namespace

void amx::int8_int8_gemm(const Job& job, int64_t begin, int64_t end) {
  const TileScope registers;
  is_direct(job) ? direct_range(job, begin, end) : many_rows(job, begin, end);
}

}  // namespace qao::cpu
