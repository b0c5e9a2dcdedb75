// Several rows of int8 x times int4 W with VNNI: 16 rows of W in the lanes of a register, four k at a time.
//
// The nibbles of 32 rows of W over up to 256 k expand into a panel in L1, [four k][16 rows][4 bytes]; every row of x
// then broadcasts four bytes against it. Per section, with integer sums exact:
//   y += scale * (sum(q * x) - zero * sum(x)).
// Zero points come off section by section: x may be far from 0 all along K (asymmetric), and then both sums are large.
#include "cpu/mm_kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/avx512/int4_panel.h"
#include "cpu/x86/avx512/int4_parameters.h"
#include "cpu/x86/avx512/int8_output.h"
#include "int4/layout.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

constexpr int64_t kMaxTiles = 4;  // K-tiles of a panel
constexpr int kRowsX = 6;         // rows of x at once: 2 x 6 sums, 2 of W, and operands

// Panel rows [begin, end) of section `index`.
struct Section {
  int64_t begin, end, group, index;
};

// total[i][16 kN] += one section for the rows m .. m + kM of x. x: row m at the panel's first K-tile.
template <int kN, int kM>
void multiply(const Job& job, int64_t m, const Section& section, const int8_t* x, const uint8_t* panel,
              const Int4Parameters* const (&parameters)[kN], float* total) {
  const int64_t x_row = job.tiles_k * kTileK;
  __m512i sums[kN][kM];
  for (auto& row : sums) {
    for (auto& sum : row) sum = _mm512_setzero_si512();
  }
  const auto add_quads = [&]<int kBegin>(int64_t first) __attribute__((always_inline)) {
    const int8_t* tile = x + first / kQuads * kTileK;
#pragma GCC unroll 8
    for (int visit = kBegin; visit < kBegin + kQuads / 2; ++visit) {
      __m512i w[kN];
#pragma GCC unroll 2
      for (int n = 0; n < kN; ++n) {
        w[n] = _mm512_load_si512(panel + n * kMaxTiles * kTilePanel + (first + visit - kBegin) * 64);
      }
#pragma GCC unroll 6
      for (int i = 0; i < kM; ++i) {
        const __m512i four = broadcast_quad(tile + i * x_row + quad_of(visit) * 4);
#pragma GCC unroll 2
        for (int n = 0; n < kN; ++n) sums[n][i] = _mm512_dpbusd_epi32(sums[n][i], w[n], four);
      }
    }
  };
  for (int64_t visit = section.begin; visit < section.end; visit += kQuads / 2) {
    visit % kQuads == 0 ? add_quads.template operator()<0>(visit) : add_quads.template operator()<kQuads / 2>(visit);
  }
  for (int i = 0; i < kM; ++i) {
    const __m512 x_sum = _mm512_set1_ps(job.x_sums[(m + i) * job.sections + section.index]);
    for (int n = 0; n < kN; ++n) {
      float* at = total + (i * kN + n) * kTileN;
      const __m512 scale = _mm512_load_ps(parameters[n][section.group].scale);
      const __m512 zero = _mm512_load_ps(parameters[n][section.group].zero);
      const __m512 value = _mm512_fnmadd_ps(zero, x_sum, _mm512_cvtepi32_ps(sums[n][i]));
      _mm512_store_ps(at, _mm512_fmadd_ps(value, scale, _mm512_load_ps(at)));
    }
  }
}

template <int kN, int kM = kRowsX>
void multiply_some(const Job& job, int64_t m, const Section& section, const int8_t* x, const uint8_t* panel,
                   const Int4Parameters* const (&parameters)[kN], float* total) {
  if constexpr (kM > 0) {
    if (job.m - m >= kM) return multiply<kN, kM>(job, m, section, x, panel, parameters, total);
    multiply_some<kN, kM - 1>(job, m, section, x, panel, parameters, total);
  }
}

template <int kN>
void run_tiles(const Job& job, int64_t tile_n, uint8_t* panel, Int4Parameters* memory, float* total) {
  const Int4Parameters* parameters[kN];
  for (int n = 0; n < kN; ++n) {
    load_shifted_parameters(job, tile_n + n, memory + n * job.groups);
    parameters[n] = memory + n * job.groups;
  }
  for (int64_t i = 0; i < job.m * kN; ++i) _mm512_store_ps(total + i * kTileN, _mm512_setzero_ps());

  const int64_t tile_row = job.tiles_k * kTileBytes;
  const uint8_t* weight = job.weight + tile_n * tile_row;
  for (int64_t t = 0; t < job.tiles_k; t += kMaxTiles) {
    const int64_t tiles = least(kMaxTiles, job.tiles_k - t);
    for (int n = 0; n < kN; ++n) {
      for (int64_t i = 0; i < tiles; ++i) {
        expand_tile<_MM_HINT_T1>(weight + n * tile_row + (t + i) * kTileBytes, kN * tile_row,
                                 panel + (n * kMaxTiles + i) * kTilePanel);
      }
    }
    // Half K-tiles are counted in panel rows, kQuads / 2 each.
    const int64_t end = least(tiles * kTileK, job.k - t * kTileK);
    for (int64_t k = 0; k < end;) {
      const int64_t group = (t * kTileK + k) / job.group_size;
      const int64_t next = least((group + 1) * job.group_size - t * kTileK, tiles * kTileK);
      const Section section = {k / 4, (next + 31) / 32 * (kQuads / 2), group, (t * kTileK + k) / job.section};
      for (int64_t m = 0; m < job.m; m += kRowsX) {
        const int8_t* x = job.int8 + m * job.tiles_k * kTileK + t * kTileK;
        multiply_some<kN>(job, m, section, x, panel, parameters, total + m * kN * kTileN);
      }
      k = next;
    }
  }
  for (int n = 0; n < kN; ++n) {
    const Columns columns = load_columns(job, (tile_n + n) * kTileN);
    for (int64_t m = 0; m < job.m; ++m) {
      const __m512 sum = _mm512_load_ps(total + (m * kN + n) * kTileN);
      write_row(job, columns, m, sum);
    }
  }
}

}  // namespace

void avx512::int8_int4_gemm(const Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kPanelBytes = 2 * kMaxTiles * kTilePanel;
  const int64_t bytes = kPanelBytes + 2 * job.groups * static_cast<int64_t>(sizeof(Int4Parameters));
  auto* panel = static_cast<uint8_t*>(scratch(Scratch::kPanel, bytes));
  auto* parameters = reinterpret_cast<Int4Parameters*>(panel + kPanelBytes);
  float* total = static_cast<float*>(scratch(Scratch::kSums, job.m * 2 * kTileN * int64_t{sizeof(float)}));
  int64_t tile = begin;
  for (; tile + 2 <= end; tile += 2) run_tiles<2>(job, tile, panel, parameters, total);
  if (tile < end) run_tiles<1>(job, tile, panel, parameters, total);
}

}  // namespace qao::cpu
