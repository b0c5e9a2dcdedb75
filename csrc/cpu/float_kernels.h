// What the kernels share that take x in float, or in fp8 widened to it. Files compiled for one ISA include this header,
// so it declares and never defines: an inline function here could reach the linker as AVX-512 code and be chosen for
// every CPU.
//
// A kernel runs in two steps over at most `max_rows` rows of x: `pack` puts x into the form its inner loop reads, `run`
// computes y for a range of N-tiles. Both are split over threads by float_mm.cpp.
//
// int4: K is cut into sections of 32, 64, 128 or (not for AMX) 256: the group size, or the largest if groups are
// larger. A section lies in one group, so its scale and zero point are constants. W in eight bits: sections of 128, the
// width of a block of scales.
#pragma once

#include <cstdint>

#include "qao/types.h"

namespace qao::cpu {

constexpr int kMaxSection = 256, kMaxSectionAmx = 128;
constexpr int kPrefetchBytes = 2048;  // of W ahead of its use: the hardware stops at every 4 KB page
constexpr int kFewRowsAmx = 8;
constexpr int kBlockK = 512;    // AMX: k per block of packed x; a multiple of every section
constexpr int kPackK = 256;     // AMX: k that one thread packs at a time, likewise
constexpr int kWordShift = 15;  // fixed point: a second 16-bit word counts in units of 2^-15 of the first

// Rows of x beyond a kernel's arithmetic.
constexpr uint8_t kHasNonfinite = 1;  // Inf or NaN were packed as 0; their products are added afterwards
constexpr uint8_t kIsHuge = 2;        // sums of the row's parts could overflow one by one: the row is computed anew
constexpr uint8_t kHasOutliers = 4;   // fixed point: values in `outliers` were packed as 0; the same

struct FloatJob {
  int64_t m = 0, n = 0, k = 0;  // m: rows of this call, counted from x and y
  const void* x = nullptr;
  int64_t x_stride = 0;  // elements
  // y[m] is multiplied by x_scales[m * x_scale_stride]; x in blocks of 128 columns: by block, blocks side by side.
  const float* x_scales = nullptr;
  int64_t x_scale_stride = 0;
  int64_t x_block_stride = 0;  // 1 with blocks, else 0
  const uint8_t* weight = nullptr;
  const void* scales = nullptr;
  const void* bias = nullptr;  // null if none
  void* y = nullptr;
  Format weight_format = Format::kInt4;
  Scaling weight_scaling = Scaling::kRow;  // W in eight bits; its scales are float32
  DType x_dtype = DType::kBFloat16, y_dtype = DType::kBFloat16, scale_dtype = DType::kBFloat16,
        bias_dtype = DType::kBFloat16;
  int parameters = 1;  // 2: zero points follow the scales
  int64_t tiles_n = 0, tiles_k = 0, groups = 0;
  int section = 0;
  int64_t sections = 0, sections_per_group = 0;

  // x as fixed point with one power-of-two scale per `chunk_tiles` K-tiles: x = scale * (word 0 + word 1 * 2^-15), each
  // word an integer below 2^15 - 128 in magnitude, stored as 256 * high + low with signed bytes. float32 has both
  // words.
  int words = 0;
  int64_t chunk_tiles = 0, chunks = 0;
  int8_t* bytes = nullptr;        // [m][tiles_k][words][high, low][64], each 64 in the order of tile_column()
  float* chunk_scales = nullptr;  // [m][chunks]
  float* word_sums = nullptr;     // [m][sections][words] sums of the words
  uint64_t* outliers = nullptr;   // [m][tiles_k] a bit a column: Inf, NaN, and what lies too far above its chunk

  // x for AMX: B tiles of 16 k-pairs x 16 rows, in `parts` bfloat16 summands (float32: 3, float16: 2).
  int parts = 0;
  int64_t tiles_m = 0;
  uint16_t* pairs = nullptr;  // [blocks of 512 k][tiles_m][8 K-tiles][parts][2][16][16][2]
  float* sums = nullptr;      // [sections][16 tiles_m] sums of x; only for int4 and parts > 1
  float* blocks = nullptr;    // [sections][16 tiles_m] scales of x's blocks; only if W has blocks

  // x for W in eight bits without AMX: float32, scales applied, zeros past K, columns in the kernel's order.
  float* floats = nullptr;  // [m][64 tiles_k]

  uint8_t* remarks = nullptr;  // [m]; what float_mm.cpp must put right afterwards: bits of the constants above
};

// e4m3 x, rows [begin, end), as rows of 64 tiles_k values of x_dtype at `out`.
void widen_fp8_avx2(const FloatJob& job, void* out, int64_t begin, int64_t end);
// x as fixed point, rows [begin, end).
void int4_pack_fixed_avx2(const FloatJob& job, int64_t begin, int64_t end);
// What int4_pack_fixed_avx2 left out of x: row m has columns and values [first[m], first[m + 1]).
struct Outliers {
  const int64_t* first = nullptr;
  const int32_t* columns = nullptr;
  const float* values = nullptr;
};
// y (of y_dtype) = job.y (float32, the product without them) + their products, for N-tiles [begin, end).
void int4_add_outliers_avx2(const FloatJob& job, const Outliers& outliers, void* y, DType y_dtype, int64_t begin,
                            int64_t end);
// x as AMX tiles, [begin, end) in units of kPackK columns.
void pack_pairs_amx(const FloatJob& job, int64_t begin, int64_t end);
// x as float32, rows [begin, end).
void byte_pack_avx2(const FloatJob& job, int64_t begin, int64_t end);
void byte_pack_avx512(const FloatJob& job, int64_t begin, int64_t end);

// y for N-tiles [begin, end).
void int4_gemv_avx2(const FloatJob& job, int64_t begin, int64_t end);
void int4_gemv_avx512(const FloatJob& job, int64_t begin, int64_t end);
void int4_gemm_avx2(const FloatJob& job, int64_t begin, int64_t end);
void int4_gemm_avx512(const FloatJob& job, int64_t begin, int64_t end);
void int4_few_rows_amx(const FloatJob& job, int64_t begin, int64_t end);  // at most kFewRowsAmx rows, one word
void int4_gemm_amx(const FloatJob& job, int64_t begin, int64_t end);
void byte_rows_avx2(const FloatJob& job, int64_t begin, int64_t end);
void byte_rows_avx512(const FloatJob& job, int64_t begin, int64_t end);
void byte_gemm_amx(const FloatJob& job, int64_t begin, int64_t end);

}  // namespace qao::cpu
