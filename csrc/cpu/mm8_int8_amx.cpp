// int8 x times int8 W with AMX: A tiles are 16 rows of W x 64 k, B tiles come packed (mm8_pack_tiles_avx512.cpp).
//
// Up to 32 rows of x: A tiles are loaded from W as it lies; every byte of it is used once.
// More: 32 rows of W x 512 k are copied into L1, where neither pages nor cache sets collide, and meet all rows of x.
// Either way the rows of W that come next are fetched meanwhile, a share with each step.
#include "cpu/amx.h"
#include "cpu/mm8_finish_avx512.h"
#include "cpu/mm8_kernels.h"
#include "cpu/scratch.h"
#include "cpu/simd_avx512.h"

namespace qao::cpu {
namespace {

constexpr int64_t kTileBytes = kTileRegisterBytes;
constexpr int kTileSums = 256;        // of a C tile
constexpr int64_t kBlockTilesN = 16;  // N-tiles whose C stays in L2
constexpr int64_t kBlockTilesK = 8;   // K-tiles of a panel
constexpr int64_t kDirectTilesM = 2;  // x so short that W is not copied

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// One or two N-tiles of W over the K-tiles of a block, as A tiles.
struct Panel {
  const uint8_t* tiles;  // A tile t of N-tile i starts at tiles + i * tile_n + t * tile_k
  int64_t tile_n, tile_k, row;
  const uint8_t* next;  // rows of W to be fetched, job.k bytes apart
};

// 16 rows of W from row n, columns [begin, end), as A tiles; zeros past N and K.
void copy_tiles(const Mm8Job& job, int64_t n, int64_t begin, int64_t end, uint8_t* out) {
  constexpr int kStreams = 4;
  const int64_t rows = least(kTileRows, job.n - n);
  const uint8_t* weight = static_cast<const uint8_t*>(job.weight) + n * job.k;
  for (int64_t first = 0; first < kTileRows; first += kStreams) {
    for (int64_t k = begin; k < end; k += kTileColumns) {
      const __mmask64 mask = ~__mmask64{0} >> (kTileColumns - least(kTileColumns, end - k));
#pragma GCC unroll 4
      for (int64_t r = first; r < first + kStreams; ++r) {
        const __m512i bytes = _mm512_maskz_loadu_epi8(r < rows ? mask : 0, weight + r * job.k + k);
        _mm512_store_si512(out + (k - begin) / kTileColumns * kTileBytes + r * kTileColumns, bytes);
      }
    }
  }
}

template <int kN, int kM>
__attribute__((always_inline)) inline void each_c(auto&& visit) {
  visit.template operator()<0, 0>();
  if constexpr (kM == 2) visit.template operator()<0, 1>();
  if constexpr (kN == 2) visit.template operator()<1, 0>();
  if constexpr (kN == 2 && kM == 2) visit.template operator()<1, 1>();
}

// C[kN][kM] += K-tiles [begin, end); registers 0..3 = C[n][m], 4..5 = A[n], 6..7 = B[m]. c: [kN][tiles_m] tiles.
template <int kN, int kM>
void multiply(const Mm8Job& job, const Panel& panel, int64_t tile_m, int64_t begin, int64_t end, int32_t* c) {
  const auto at = [&](int n, int m) { return c + (n * job.tiles_m + tile_m + m) * kTileSums; };
  if (begin == 0) {
    each_c<kN, kM>([]<int n, int m>() { tile_zero<2 * n + m>(); });
  } else {
    each_c<kN, kM>([&]<int n, int m>() { tile_load<2 * n + m>(at(n, m)); });
  }
  const int64_t first_row = 2 * kTileRows * tile_m / job.tiles_m, end_row = 2 * kTileRows * (tile_m + kM) / job.tiles_m;
  const uint8_t* a = panel.tiles;
  const int8_t* b = job.bytes + (tile_m * job.tiles_k + begin) * kTileBytes;
  for (int64_t t = begin; t < end; ++t, a += panel.tile_k, b += kTileBytes) {
    for (int64_t row = first_row; row < end_row; ++row) {
      _mm_prefetch(panel.next + row * job.k + t * kTileColumns, _MM_HINT_T1);
    }
    tile_load<4>(a, panel.row);
    if constexpr (kN == 2) tile_load<5>(a + panel.tile_n, panel.row);
    tile_load<6>(b);
    if constexpr (kM == 2) tile_load<7>(b + job.tiles_k * kTileBytes);
    each_c<kN, kM>([]<int n, int m>() { tile_multiply_signed_bytes<2 * n + m, 4 + n, 6 + m>(); });
  }
  each_c<kN, kM>([&]<int n, int m>() { tile_store<2 * n + m>(at(n, m)); });
}

template <int kN>
void panel_against_rows(const Mm8Job& job, const Panel& panel, int64_t begin, int64_t end, int32_t* c) {
  int64_t tile_m = 0;
  for (; tile_m + 2 <= job.tiles_m; tile_m += 2) multiply<kN, 2>(job, panel, tile_m, begin, end, c);
  if (tile_m < job.tiles_m) multiply<kN, 1>(job, panel, tile_m, begin, end, c);
}

// C of kN N-tiles += K-tiles [begin, end).
template <int kN>
void run_block(const Mm8Job& job, int64_t tile_n, int64_t begin, int64_t end, uint8_t* copy, int32_t* c) {
  const int64_t n = tile_n * kTileRows;
  const uint8_t* weight = static_cast<const uint8_t*>(job.weight) + n * job.k;
  const uint8_t* next = weight + kN * kTileRows * job.k;
  const int64_t whole = job.tiles_m <= kDirectTilesM && n + kN * kTileRows <= job.n ? job.k / kTileColumns : 0;
  const int64_t direct_end = whole > begin ? least(whole, end) : begin;
  if (begin < direct_end) {
    const Panel panel = {weight + begin * kTileColumns, kTileRows * job.k, kTileColumns, job.k, next};
    panel_against_rows<kN>(job, panel, begin, direct_end, c);
  }
  for (int64_t t = direct_end; t < end; t += kBlockTilesK) {
    const int64_t block_end = least(t + kBlockTilesK, end);
    for (int i = 0; i < kN; ++i) {
      copy_tiles(job, n + i * kTileRows, t * kTileColumns, least(block_end * kTileColumns, job.k),
                 copy + i * kBlockTilesK * kTileBytes);
    }
    const Panel panel = {copy, kBlockTilesK * kTileBytes, kTileBytes, kTileColumns, next};
    panel_against_rows<kN>(job, panel, t, block_end, c);
  }
}

// y for one N-tile from its C tiles [tiles_m][16 n][16 m].
void finish(const Mm8Job& job, int64_t tile_n, const int32_t* c) {
  const int64_t n = tile_n * kTileRows;
  const Columns columns = load_columns(job, n);
  const __m512 scales = load_scales(job, n);
  for (int64_t tile_m = 0; tile_m < job.tiles_m; ++tile_m, c += kTileSums) {
    __m512i rows[kTileRows];
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) rows[i] = _mm512_load_si512(c + i * kTileRows);
    transpose16(rows);
    const int64_t m = tile_m * kTileRows, count = least(kTileRows, job.m - m);
    for (int64_t i = 0; i < count; ++i) {
      write_row(job, columns, m + i, _mm512_mul_ps(_mm512_cvtepi32_ps(rows[i]), scales));
    }
  }
}

}  // namespace

void mm8_int8_amx(const Mm8Job& job, int64_t begin, int64_t end) {
  const TileScope tiles;
  uint8_t* copy = static_cast<uint8_t*>(scratch(Scratch::kPanel, 2 * kBlockTilesK * kTileBytes));
  const int64_t row_sums = job.tiles_m * kTileSums;
  int32_t* c = static_cast<int32_t*>(scratch(Scratch::kSums, kBlockTilesN * row_sums * int64_t{sizeof(int32_t)}));
  const int64_t step_k = job.tiles_m <= kDirectTilesM ? job.tiles_k : kBlockTilesK;
  for (int64_t block = begin; block < end; block += kBlockTilesN) {
    const int64_t block_end = least(end, block + kBlockTilesN);
    for (int64_t t = 0; t < job.tiles_k; t += step_k) {
      const int64_t end_t = least(job.tiles_k, t + step_k);
      for (int64_t tile_n = block; tile_n < block_end; tile_n += 2) {
        int32_t* pair = c + (tile_n - block) * row_sums;
        tile_n + 1 < block_end ? run_block<2>(job, tile_n, t, end_t, copy, pair)
                               : run_block<1>(job, tile_n, t, end_t, copy, pair);
      }
    }
    for (int64_t tile_n = block; tile_n < block_end; ++tile_n) finish(job, tile_n, c + (tile_n - block) * row_sums);
  }
}

}  // namespace qao::cpu
