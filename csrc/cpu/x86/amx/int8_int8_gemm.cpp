// int8 x times int8 W with AMX: A tiles are 16 rows of W x 64 k, B tiles come packed (pack_int8_tiles.cpp).
//
// A tiles are loaded from W as it lies. The first rows of x also copy them into L1, where neither pages nor cache sets
// collide, for the others; up to 32 rows need no copy. The rows of W that come next are fetched meanwhile.
#include "cpu/mm_kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/amx/int8_tiles.h"

namespace qao::cpu {
namespace {

constexpr int64_t kTileBytes = kTileRegisterBytes;
constexpr int64_t kBlockTilesN = 2;   // a pair at a time: its pages of W and its C stay near
constexpr int64_t kBlockTilesK = 16;  // K-tiles of a panel, which stays in L1
constexpr int64_t kDirectTilesM = 2;  // x so short that W is not copied

// ---- registers 0..3 = C of 1 or 2 N-tiles x 1 or 2 tiles of x, 4..5 = A, 6..7 = B ----

// A tiles of W along K, of one or two N-tiles. Distances in bytes: of N-tiles, of steps along K, of rows.
struct ATiles {
  const uint8_t* first;
  int64_t tile_n, step, row;
};

// C[kN][kM] += `count` steps; `b` has B tiles side by side, the other tile of x `b_tile` bytes on. Tiles of the next
// step load between the products of this one; those of x, in L2, must not push W out of L1. each_step(i) is called
// while A of step i is in its registers.
template <int kN, int kM, typename EachStep>
__attribute__((always_inline)) inline void multiply_tiles(const ATiles& a, const int8_t* b, int64_t b_tile,
                                                          int64_t count, const EachStep& each_step) {
  const auto multiply = []<int n, int m>() { tile_multiply_signed_bytes<2 * n + m, 4 + n, 6 + m>(); };
  if (count == 0) return;
  const uint8_t* next_a = a.first;
  tile_load_once<6>(b);
  tile_load<4>(next_a, a.row);
  if constexpr (kN == 2) tile_load<5>(next_a + a.tile_n, a.row);
  if constexpr (kM == 2) tile_load_once<7>(b + b_tile);
  const auto step = [&]<bool kMore>(int64_t i) __attribute__((always_inline)) {
    next_a += a.step;
    b += kTileRegisterBytes;
    multiply.template operator()<0, 0>();
    if constexpr (kN == 2) multiply.template operator()<1, 0>();
    if constexpr (kMore) tile_load_once<6>(b);
    each_step(i);
    if constexpr (kM == 2) multiply.template operator()<0, 1>();
    if constexpr (kMore) tile_load<4>(next_a, a.row);
    if constexpr (kN == 2 && kM == 2) multiply.template operator()<1, 1>();
    if constexpr (kMore && kM == 2) tile_load_once<7>(b + b_tile);
    if constexpr (kMore && kN == 2) tile_load<5>(next_a + a.tile_n, a.row);
  };
  for (int64_t i = 0; i < count - 1; ++i) step.template operator()<true>(i);
  step.template operator()<false>(count - 1);
}

// 16 rows of W from row n, columns [begin, end), as A tiles; zeros past N and K.
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

// Two forms of the same A tiles: in W as it lies, K-tiles [begin, whole) of a block, and copied, [begin, end).
struct Panel {
  ATiles direct, copied;
  uint8_t* copy;
  int64_t begin, whole, end;
  const uint8_t* next;  // rows of W to be fetched
};

// c[kN][tiles_m] += the panel times tile_m and the next kM - 1 of x.
template <int kN, int kM>
void multiply(const Job& job, const Panel& panel, int64_t tile_m, int32_t* c) {
  const auto at = [&](int n, int m) { return c + (n * job.tiles_m + tile_m + m) * kTileSums; };
  if (panel.begin == 0) {
    each_c<kN, kM>([]<int n, int m>() { tile_zero<2 * n + m>(); });
  } else {
    each_c<kN, kM>([&]<int n, int m>() { tile_load<2 * n + m>(at(n, m)); });
  }
  const int8_t* b = job.int8 + (tile_m * job.tiles_k + panel.begin) * kTileBytes;
  const int64_t b_tile = job.tiles_k * kTileBytes, whole = panel.whole - panel.begin;
  const bool copies = kM < job.tiles_m;
  if (tile_m == 0) {
    multiply_tiles<kN, kM>(panel.direct, b, b_tile, whole, [&](int64_t i) {
      if (copies) {
        tile_store<4>(panel.copy + i * kTileBytes);
        if constexpr (kN == 2) tile_store<5>(panel.copy + panel.copied.tile_n + i * kTileBytes);
      }
      for (int64_t row = 0; row < kN * kTileRows; ++row) {
        _mm_prefetch(panel.next + row * job.k + i * kTileColumns, _MM_HINT_T1);
      }
    });
    ATiles rest = panel.copied;
    rest.first += whole * kTileBytes;
    multiply_tiles<kN, kM>(rest, b + whole * kTileBytes, b_tile, panel.end - panel.whole, [](int64_t) {});
  } else {
    multiply_tiles<kN, kM>(panel.copied, b, b_tile, panel.end - panel.begin, [](int64_t) {});
  }
  each_c<kN, kM>([&]<int n, int m>() { tile_store<2 * n + m>(at(n, m)); });
}

// c[kN][tiles_m] += K-tiles [begin, end). copy: memory for kN x `step_k` A tiles.
template <int kN>
void run_block(const Job& job, int64_t tile_n, int64_t begin, int64_t end, int64_t step_k, uint8_t* copy, int32_t* c) {
  const int64_t n = tile_n * kTileRows;
  const uint8_t* first = job.weight + n * job.k + begin * kTileColumns;
  const int64_t whole = n + kN * kTileRows <= job.n ? least(end, job.k / kTileColumns) : begin;
  const ATiles direct = {first, kTileRows * job.k, kTileColumns, job.k};
  const ATiles copied = {copy, step_k * kTileBytes, kTileBytes, kTileColumns};
  const Panel panel = {direct, copied, copy, begin, whole, end, first + kN * kTileRows * job.k};
  for (int i = 0; i < kN && whole < end; ++i) {
    copy_tiles(job, n + i * kTileRows, whole * kTileColumns, least(end * kTileColumns, job.k),
               copy + (i * step_k + whole - begin) * kTileBytes);
  }
  int64_t tile_m = 0;
  for (; tile_m + 2 <= job.tiles_m; tile_m += 2) multiply<kN, 2>(job, panel, tile_m, c);
  if (tile_m < job.tiles_m) multiply<kN, 1>(job, panel, tile_m, c);
}

}  // namespace

void amx::int8_int8_gemm(const Job& job, int64_t begin, int64_t end) {
  const TileScope tiles;
  const int64_t step_k = job.tiles_m <= kDirectTilesM ? job.tiles_k : kBlockTilesK;
  uint8_t* copy = static_cast<uint8_t*>(scratch(Scratch::kPanel, 2 * step_k * kTileBytes));
  const int64_t row_sums = job.tiles_m * kTileSums;
  int32_t* c = static_cast<int32_t*>(scratch(Scratch::kSums, kBlockTilesN * row_sums * int64_t{sizeof(int32_t)}));
  for (int64_t block = begin; block < end; block += kBlockTilesN) {
    const int64_t block_end = least(end, block + kBlockTilesN);
    for (int64_t t = 0; t < job.tiles_k; t += step_k) {
      const int64_t end_t = least(job.tiles_k, t + step_k);
      for (int64_t tile_n = block; tile_n < block_end; tile_n += 2) {
        int32_t* pair = c + (tile_n - block) * row_sums;
        tile_n + 1 < block_end ? run_block<2>(job, tile_n, t, end_t, step_k, copy, pair)
                               : run_block<1>(job, tile_n, t, end_t, step_k, copy, pair);
      }
    }
    for (int64_t tile_n = block; tile_n < block_end; ++tile_n) {
      const __m512 scales = load_scales(job, tile_n * kTileRows);
      write_tiles(job, tile_n, c + (tile_n - block) * row_sums,
                  [&](__m512i sums) { return _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scales); });
    }
  }
}

}  // namespace qao::cpu
