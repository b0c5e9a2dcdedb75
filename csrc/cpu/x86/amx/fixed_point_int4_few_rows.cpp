// AMX W4A16 kernel for a few rows of x in fixed point.
// A mask and a shift convert a tile of W to an A tile of 16 rows x 64 unsigned bytes. The B tile is x, with high bytes
// in columns 0..7 and low bytes in 8..15:
//
//   column            0 .. 7                8 .. 15
//   C (int32)         sum(q * high)         sum(q * low)                of one chunk of k, exact
//   total (float32)   += 256 * factor *     += factor *                 factor = scale * x_scale
//                     (C - zero * sum(high))  (C - zero * sum(low))
//
// y is the sum of both halves. Rows with chunks of two words are recomputed with AVX-512. Chunks are accumulated one
// behind and tiles of W expanded one ahead, so that the tile unit never waits for a recent store.
#include "cpu/gemm/kernels.h"
#include "cpu/scratch.h"
#include "cpu/x86/amx/tiles.h"
#include "cpu/x86/avx512/int4_parameters.h"
#include "cpu/x86/avx512/simd.h"
#include "cpu/x86/weight_stream.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

constexpr int64_t kHalf = kFewRows;  // columns of C per plane of x
constexpr int kColumns = 2 * kFewRows;

// Parameters of x per chunk, by column of C.
struct ChunkFactors {
  alignas(64) float scale[kColumns];  // 256 * x_scale, x_scale
  alignas(64) float sum[kColumns];    // of the bytes
};

// Packs B tiles [tiles_k][16 fours of k][16 columns][4], and the factors of each chunk.
void pack_columns(const Job& job, int8_t* b, ChunkFactors* factors) {
  const __m512i ones = _mm512_set1_epi8(1);
  for (int64_t c = 0; c < job.fixed_point.chunks; ++c) {
    factors[c] = ChunkFactors{};
    for (int64_t m = 0; m < job.m; ++m) {
      factors[c].scale[m] = 256 * job.fixed_point.scales[m * job.fixed_point.chunks + c];
      factors[c].scale[m + kHalf] = job.fixed_point.scales[m * job.fixed_point.chunks + c];
    }
  }
  for (int64_t t = 0; t < job.tiles_k; ++t) {
    __m512i columns[kColumns];
    for (int64_t i = 0; i < kColumns; ++i) {
      const int64_t m = i % kHalf, plane = i / kHalf;
      const int8_t* bytes = job.fixed_point.bytes[0] + ((m * job.tiles_k + t) * 2 + plane) * kTileK;
      columns[i] = m < job.m ? _mm512_load_si512(bytes) : _mm512_setzero_si512();
      const int sum = _mm512_reduce_add_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, columns[i]));
      factors[t / job.fixed_point.chunk_tiles].sum[i] += static_cast<float>(sum);
    }
    transpose16(columns);
    for (int i = 0; i < kColumns; ++i) _mm512_store_si512(b + (t * kColumns + i) * 64, columns[i]);
  }
}

// Expands 16 x 64 nibbles to bytes.
__attribute__((always_inline)) inline void expand(const uint8_t* tile, uint8_t* a) {
  const __m512i mask = _mm512_set1_epi8(0x0F);
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    const __m512i bytes = _mm512_loadu_si512(tile + g * 64);
    _mm512_store_si512(a + g * 64, _mm512_and_si512(bytes, mask));
    _mm512_store_si512(a + (g + 8) * 64, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask));
  }
}

__attribute__((always_inline)) inline void fold(const int32_t* c, const Int4Parameters& parameters,
                                                const ChunkFactors& factors, __m512 (&total)[kTileN]) {
  const __m512 x_scale = _mm512_load_ps(factors.scale), x_sum = _mm512_load_ps(factors.sum);
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) {
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(c + row * kColumns));
    const __m512 value = _mm512_fnmadd_ps(_mm512_set1_ps(parameters.zero[row]), x_sum, sum);
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(parameters.scale[row]), x_scale);
    total[row] = _mm512_fmadd_ps(scale, value, total[row]);
  }
}

void write_rows(const Job& job, int64_t tile_n, const __m512 (&total)[kTileN]) {
  __m512i rows[kTileN];
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) {
    const __m512 swapped = _mm512_shuffle_f32x4(total[row], total[row], 0x4E);
    rows[row] = _mm512_castps_si512(_mm512_add_ps(total[row], swapped));
  }
  transpose16(rows);
  const int64_t n = tile_n * kTileN;
  const __mmask16 mask = first(job.n - n);
  const __m512 bias = job.bias != nullptr ? load16(job.bias, n, job.bias_dtype, mask) : _mm512_setzero_ps();
  for (int64_t m = 0; m < job.m; ++m) {
    const __m512 x_scale = _mm512_set1_ps(job.x_scales[m * job.x_scale_stride]);
    store16(job.y, m * job.n + n, job.y_dtype, _mm512_fmadd_ps(_mm512_castsi512_ps(rows[m]), x_scale, bias), mask);
  }
}

void run_tile(const Job& job, int64_t tile_n, const int8_t* b, const ChunkFactors* factors, WeightStream stream) {
  alignas(64) uint8_t a[2][kTileRegisterBytes];
  alignas(64) int32_t c[2][kTileN * kColumns];
  Int4Parameters parameters[2];
  __m512 total[kTileN];
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) total[row] = _mm512_setzero_ps();

  const uint8_t* weight = job.weight + tile_n * job.tiles_k * kTileBytes;
  expand(weight, a[0]);
  int64_t t = 0;
  for (int64_t chunk = 0; chunk < job.fixed_point.chunks; ++chunk) {
    tile_zero<0>();
    const int64_t end = t + job.fixed_point.chunk_tiles < job.tiles_k ? t + job.fixed_point.chunk_tiles : job.tiles_k;
    for (; t < end; ++t) {
      stream.fetch();
      if (t + 1 < job.tiles_k) expand(weight + (t + 1) * kTileBytes, a[(t + 1) % 2]);
      tile_load<1>(a[t % 2]);
      tile_load<2>(b + t * kTileRegisterBytes);
      tile_multiply_bytes<0, 1, 2>();
    }
    tile_store<0>(c[chunk % 2]);
    load_parameters(job, tile_n, chunk / job.sections_per_group, &parameters[chunk % 2]);
    if (chunk > 0) fold(c[(chunk - 1) % 2], parameters[(chunk - 1) % 2], factors[chunk - 1], total);
  }
  const int64_t last = job.fixed_point.chunks - 1;
  fold(c[last % 2], parameters[last % 2], factors[last], total);
  write_rows(job, tile_n, total);
}

// The job of row m alone.
Job row_of(const Job& job, int64_t m) {
  Job row = job;
  row.m = 1;
  PackedFixedPoint& x = row.fixed_point;
  for (int w = 0; w <= x.words; ++w) {
    x.bytes[w] += m * job.tiles_k * 2 * kTileK;
    x.sums[w] += m * job.sections;
  }
  x.scales += m * x.chunks, x.chunk_words += m * x.chunks;
  row.remarks += m;
  row.x_scales += m * job.x_scale_stride;
  row.y = static_cast<char*>(job.y) + m * job.n * (job.y_dtype == DType::kFloat32 ? 4 : 2);
  return row;
}

}  // namespace

void amx::fixed_point_int4_few_rows(const Job& job, int64_t begin, int64_t end) {
  int8_t* b = static_cast<int8_t*>(scratch(Scratch::kPanel, job.tiles_k * kTileRegisterBytes));
  ChunkFactors* factors =
      static_cast<ChunkFactors*>(scratch(Scratch::kSums, job.fixed_point.chunks * int64_t{sizeof(ChunkFactors)}));
  pack_columns(job, b, factors);
  const TileScope tiles;
  const uint8_t* weight = job.weight + begin * job.tiles_k * kTileBytes;
  for (int64_t tile_n = begin; tile_n < end; ++tile_n) {
    run_tile(job, tile_n, b, factors, WeightStream(weight, tile_n - begin, job.tiles_k));
  }
  for (int64_t m = 0; m < job.m; ++m) {
    if ((job.remarks[m] & kHasMoreWords) != 0) avx512::fixed_point_int4_gemv(row_of(job, m), begin, end);
  }
}

}  // namespace qao::cpu
