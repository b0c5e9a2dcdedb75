// What the mm8 kernels share. Files compiled for one ISA include this header, so it declares and never defines: an
// inline function here could reach the linker as AVX-512 code and be chosen for every CPU.
//
// A kernel runs in two steps over some rows of x: `pack` puts x into the form its inner loop reads, `run` computes y
// for a range of N-tiles of 16 rows of W. Both are split over threads by mm8.cpp.
#pragma once

#include <cstdint>

#include "qao/types.h"

namespace qao::cpu {

// Products of bytes are summed in int32: 255 * 128 * k < 2^31. Sums over more columns go on in float32.
constexpr int64_t kMaxIntegerK = 65536;
constexpr int64_t kRowsSection = 256;  // int4, x as rows
constexpr int kTileRows = 16;          // rows of W in an N-tile, rows of x in a tile of x
constexpr int kTileColumns = 64;       // k of a K-tile

struct Mm8Job {
  int64_t m = 0, n = 0, k = 0;  // m: rows of this call, counted from x and y
  const void* x = nullptr;
  int64_t x_stride = 0;              // elements
  const float* x_scales = nullptr;   // [m]
  const int32_t* x_zeros = nullptr;  // [m], null if x is symmetric
  const void* weight = nullptr;      // [n][k]; int4: packed
  const void* scales = nullptr;
  const float* weight_sums = nullptr;  // [n]
  const void* bias = nullptr;          // null if none
  void* y = nullptr;
  Format weight_format = Format::kInt8;
  DType y_dtype = DType::kBFloat16, scale_dtype = DType::kFloat32, bias_dtype = DType::kBFloat16;
  bool scale_per_row = true;  // of W in eight bits; else one for all
  int parameters = 1;         // int4: 2 if zero points follow the scales
  int64_t tiles_n = 0, tiles_k = 0;
  int64_t group_size = 0, groups = 1;  // int4: columns that share a scale; int8: all of K
  // Columns whose products are summed as integers, all of one group. int4: a group, as rows at most kRowsSection of it;
  // int8: at most kMaxIntegerK.
  int64_t section = 0, sections = 1;

  // int8 x, columns of each 64 in the order of W's bytes (int4: tile_column()), zeros past K. Either rows or B tiles of
  // 16 fours of k x 16 rows; with groups of 32 two B tiles a K-tile, one for each half, zeros in the place of the
  // other.
  int64_t tiles_m = 0;
  int64_t steps = 0;        // B tiles along K
  int8_t* bytes = nullptr;  // [m][tiles_k][64], or [tiles_m][steps][16][16][4]
  float* sums = nullptr;    // sums of x over a section: [m][sections], or [sections][16 tiles_m]
};

// Rows of x [begin, end), and tiles of 16 rows of it.
void mm8_pack_rows_avx2(const Mm8Job& job, int64_t begin, int64_t end);
void mm8_pack_tiles_avx512(const Mm8Job& job, int64_t begin, int64_t end);

// y for N-tiles [begin, end). mm8_int4_amx leaves up to 16 rows of x, unless groups are of 32, to the one before it.
void mm8_int8_avx2(const Mm8Job& job, int64_t begin, int64_t end);
void mm8_int8_avx512(const Mm8Job& job, int64_t begin, int64_t end);
void mm8_int8_amx(const Mm8Job& job, int64_t begin, int64_t end);
void mm8_int4_avx2(const Mm8Job& job, int64_t begin, int64_t end);
void mm8_int4_gemv_avx512(const Mm8Job& job, int64_t begin, int64_t end);
void mm8_int4_gemm_avx512(const Mm8Job& job, int64_t begin, int64_t end);
void mm8_int4_few_rows_amx(const Mm8Job& job, int64_t begin, int64_t end);
void mm8_int4_amx(const Mm8Job& job, int64_t begin, int64_t end);

}  // namespace qao::cpu
