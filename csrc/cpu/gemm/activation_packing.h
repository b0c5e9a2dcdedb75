// Packed forms of x that kernels read, and how much of x is packed at a time.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/pieces.h"
#include "qao/gemm.h"

namespace qao::cpu {

struct Kernel;

struct Packing {
  int64_t max_rows;     // of x at a time
  int64_t max_bytes;    // of packed rows; long rows get fewer, at least 32
  int64_t max_section;  // columns
  // Lays out the parts of packed x. The sizes in `job` are set; without memory `pieces` only counts bytes.
  void (*lay_out)(Pieces& pieces, Job* job);
  int64_t (*units)(const Job& job);  // units of pack()
  void (*pack)(const Job& job, int64_t begin, int64_t end);
  // Widens 8-bit x, rows [begin, end), to rows of 64 tiles_k values of x_dtype at `out`. Null if pack() reads bytes.
  void (*widen)(const Job& job, void* out, int64_t begin, int64_t end);
  // Only if pack() leaves out outliers: y (of y_dtype) = job.y (float32, without outliers) + the products of outliers,
  // for N-tiles [begin, end).
  void (*add_outliers)(const Job& job, const Outliers& outliers, void* y, DType y_dtype, int64_t begin, int64_t end);
  // Likewise, the float32 kernel for rows with too many outliers; null selects the scalar kernel.
  const Kernel* wide_rows = nullptr;
  // Whether pack() can round floats (Job::floats) to e4m3.
  bool rounds_to_fp8 = false;

  bool packs_rows() const;  // a unit is a row
};

extern const Packing kFixedPoint, kFixedPointSegments, kBf16Tiles, kBf16TilesOfInt8, kBf16TilesInChunks, kBf16Panels,
    kFloat32RowsAvx2, kFloat32RowsAvx512, kFloat32PanelsAvx2, kFloat32WidePanelsAvx2, kFloat32PanelsAvx512, kInt8Rows,
    kInt8RowsInSections, kInt8PanelsAvx2, kInt8PanelsInSectionsAvx2, kInt8PanelsAvx512, kInt8PanelsInSectionsAvx512,
    kInt16Panels, kInt8Tiles, kFloat32Rows, kBf16Pairs;

// The job of `problem` for a kernel with this packing, without the fields of a call: m, y, packed x.
Job describe(const gemm::Problem& problem, const gemm::Arguments& arguments, const Packing& packing);

}  // namespace qao::cpu
