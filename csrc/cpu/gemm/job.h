// One GEMM y = x · Wᵀ + bias over some rows of x, as the driver passes it to a kernel.
// Files compiled for one instruction set include this header, so it declares and never defines: the linker could choose
// an inline function compiled to AVX-512 for every CPU.
//
// A kernel runs in two steps over at most Packing::max_rows rows of x: `pack` converts x to the form that its inner
// loop reads, `run` computes y for a range of N-tiles of 16 rows of W. driver.cpp divides both among threads.
//
// K is divided into sections. For int4 W a section is a group, or a part of it if the kernel sums fewer columns at a
// time, so a section has one scale and zero point. For fp4 W it has 32 columns, one group or two. For 8-bit W it has
// the columns that the kernel sums at a time, or the 128 columns of a block of scales.
#pragma once

#include <cstdint>

#include "qao/types.h"

namespace qao::cpu {

constexpr int kTileRows = 16;     // rows of W in an N-tile, rows of x in a tile of x
constexpr int kTileColumns = 64;  // columns of a K-tile

// Maximum columns of a section.
constexpr int kMaxSection = 256;         // byte products with int4 W
constexpr int kMaxSectionBf16 = 128;     // bfloat16 tiles, and 8-bit W with block scales
constexpr int64_t kMaxIntegerK = 65536;  // bytes summed in int32: 255 * 128 * k < 2^31
constexpr int kPrefetchBytes = 2048;     // prefetch distance in W: the hardware prefetcher stops at 4 KB pages
constexpr int kFewRows = 8;              // rows of x that fill one tile with their high and low bytes
constexpr int kBlockK = 512;             // bfloat16 tiles: k per block of packed x; a multiple of every section
constexpr int kPackK = 256;              // bfloat16 tiles: k that one thread packs at a time, likewise
constexpr int kFewTilesM = 4;            // bfloat16 tiles: tiles of x up to which W is expanded again for every two
constexpr int kMaxWords = 3;             // of fixed point
constexpr int kWordShift = 15;           // fixed point: a 16-bit word counts in units of 2^-15 of the previous one

// Remarks on rows of x that are beyond a kernel's arithmetic.
constexpr uint8_t kHasNonfinite = 1;   // Inf or NaN were packed as 0; their products are added afterwards
constexpr uint8_t kIsHuge = 2;         // partial sums of the row could overflow: the row is recomputed
constexpr uint8_t kHasOutliers = 4;    // fixed point: values in `outliers` were packed as 0 and are added afterwards
constexpr uint8_t kIsWide = 8;         // fixed point: too many outliers; the row is recomputed in float32
constexpr uint8_t kHasMoreWords = 16;  // fixed point: some chunks have one more word

// ---- Packed forms of x: a kernel reads the one that its row of the table names (activation_packing.h) ----

// Fixed point with one power-of-two scale per `chunk_tiles` K-tiles: x = scale * (word 0 + word 1 * 2^-15 + word 2 *
// 2^-30). Each word is an integer below 2^15 - 128 in magnitude, stored as 256 * high + low in signed bytes. Words
// that a chunk does not have are not written.
struct PackedFixedPoint {
  int words = 0;  // of every chunk, 2 for float32; some chunks have one more
  int64_t chunk_tiles = 0, chunks = 0;
  int8_t* bytes[kMaxWords] = {};   // by word: [m][tiles_k][high, low][64], each 64 in the order of tile_column()
  float* sums[kMaxWords] = {};     // by word: [m][sections]
  float* scales = nullptr;         // [m][chunks]
  uint8_t* chunk_words = nullptr;  // [m][chunks] words of a chunk
  uint64_t* outliers = nullptr;    // [m][tiles_k], one bit per column: Inf, NaN, and values too far above their chunk
  // GGUF W: chunks of 256 columns, of which bytes [64 v + 16 i, + 16) are those of segment order[4 v + i] of 16
  // columns, and the sums of x itself over segments, in natural order. Only Inf and NaN are outliers.
  const uint8_t* segment_places = nullptr;  // [16], the inverse of that order
  float* segment_sums = nullptr;            // [m][chunks][16]
};

// bfloat16 B tiles of 16 k-pairs x 16 rows. x is the sum of `parts` bfloat16 parts (float32: 3, float16: 2).
struct PackedBf16Tiles {
  int parts = 0;
  uint16_t* values = nullptr;     // [blocks of 512 k][tiles_m][8 K-tiles][parts][2][16][16][2]
  float* block_scales = nullptr;  // [sections][16 tiles_m]; only if W has block scales
};

// int8, columns of each 64 in the order of W's bytes (int4: tile_column()). Past K zeros, or x's zero point in rows and
// panels for int4 W. Either rows, or B tiles of 16 fours of k x 16 rows. With groups of 32 a K-tile has two B tiles,
// one per half, with zeros in place of the other half.
struct PackedInt8 {
  int64_t steps = 0;         // B tiles along K
  int8_t* values = nullptr;  // [m][tiles_k][64], or [tiles_m][steps][16][16][4]
};

struct Job {
  int64_t m = 0, n = 0, k = 0;  // m: rows of this call, from the start of x and y
  const void* x = nullptr;
  int64_t x_stride = 0;          // elements
  const void* floats = nullptr;  // x before pack() rounds it to fp8, or null
  int64_t floats_stride = 0;
  DType floats_dtype = DType::kBFloat16;
  // y[m] is multiplied by x_scales[m * x_scale_stride]. With blocks of 128 columns of x, scales are per block,
  // contiguous.
  const float* x_scales = nullptr;
  int64_t x_scale_stride = 0;
  int64_t x_block_stride = 0;          // 1 with blocks, else 0
  const int32_t* x_zeros = nullptr;    // int8 x: [m], null if symmetric
  const uint8_t* weight = nullptr;     // [n][k]; int4, fp4: packed
  const void* scales = nullptr;        // of W
  const float* weight_sums = nullptr;  // with x_zeros: [n]
  const void* bias = nullptr;          // or null
  void* y = nullptr;
  Format weight_format = Format::kInt4;
  Scaling weight_scaling = Scaling::kRow;  // 8-bit W, with float32 scales
  Format x_format = Format::kFloat;
  DType x_dtype = DType::kBFloat16, y_dtype = DType::kBFloat16, scale_dtype = DType::kBFloat16,
        bias_dtype = DType::kBFloat16;
  int parameters = 1;  // int4: 2 if zero points follow the scales
  int64_t tiles_n = 0, tiles_k = 0;
  int64_t group_size = 0, groups = 1;  // int4, fp4: columns per scale; 8-bit W: all of K
  int64_t scale_rows = 0;              // fp4: dimension 1 of the scales; NVFP4 has three more rows than groups
  int64_t section = 0, sections = 0, sections_per_group = 0;
  int gguf_type = 0;      // GGUF W: ggml's type number
  int64_t row_bytes = 0;  // likewise

  // ---- Packed x ----

  // Sums of x over each section, for zero points. Rows and panels: [m][sections]; of int8 x with int4 W, minus x's zero
  // point. Tiles: [sections][16 tiles_m]; of bfloat16 tiles only for int4 W and more than one part.
  float* x_sums = nullptr;

  int64_t tiles_m = 0;  // tiles of 16 rows of x
  PackedFixedPoint fixed_point;
  PackedBf16Tiles bf16_tiles;
  // bfloat16 in pairs of rows, zeros past M and K.
  uint16_t* bf16_pairs = nullptr;  // [m / 2, rounded up][16 tiles_k][2][4]

  // float32 with scales applied, zeros past K, columns in the kernel's order.
  float* float32 = nullptr;  // [m][64 tiles_k]

  PackedInt8 int8;
  // 32-bit words of one column of float32 (scales applied), two of bfloat16 or four of int8, zeros past K
  // (x86/panel_gemm.h).
  uint32_t* panels = nullptr;  // [panels of K][m][64]

  uint8_t* remarks = nullptr;  // float x: [m]; what the driver must fix afterwards, as bits of the constants above
};

// Values left out of the fixed-point x: row m has columns and values [first[m], first[m + 1]).
struct Outliers {
  const int64_t* first = nullptr;
  const int32_t* columns = nullptr;
  const float* values = nullptr;
};

}  // namespace qao::cpu
