// The forms in which kernels read x, and how much of x is packed at a time.
#pragma once

#include "cpu/mm_job.h"
#include "cpu/pieces.h"
#include "qao/mm.h"

namespace qao::cpu {

struct Kernel;

struct Packing {
  int64_t max_rows;     // of x at a time
  int64_t max_bytes;    // of them when packed; fewer rows if they are long, 32 at least
  int64_t max_section;  // columns
  // Where each part of packed x lies. The sizes of `job` are set; without memory `pieces` only counts bytes.
  void (*lay_out)(Pieces& pieces, Job* job);
  int64_t (*units)(const Job& job);  // that pack() takes [begin, end) of
  void (*pack)(const Job& job, int64_t begin, int64_t end);
  // x in eight bits, rows [begin, end), as rows of 64 tiles_k values of x_dtype at `out`; null if pack() reads bytes.
  void (*widen)(const Job& job, void* out, int64_t begin, int64_t end);
  // Only if pack() leaves outliers out: y (of y_dtype) = job.y (float32, the product without them) + their products,
  // for N-tiles [begin, end).
  void (*add_outliers)(const Job& job, const Outliers& outliers, void* y, DType y_dtype, int64_t begin, int64_t end);
  // Likewise: the float32 kernel for rows that have too many of them; null: the scalar one.
  const Kernel* wide_rows = nullptr;
  // pack() can round floats (Job::floats) to e4m3 itself.
  bool rounds_to_fp8 = false;

  bool packs_rows() const;  // a unit is a row
};

extern const Packing kFixedPoint, kBf16Tiles, kBf16TilesOfInt8, kBf16Panels, kFloat32RowsAvx2, kFloat32RowsAvx512,
    kFloat32PanelsAvx2, kFloat32WidePanelsAvx2, kFloat32PanelsAvx512, kInt8Rows, kInt8RowsInSections, kInt8PanelsAvx2,
    kInt8PanelsInSectionsAvx2, kInt8PanelsAvx512, kInt8PanelsInSectionsAvx512, kInt16Panels, kInt8Tiles, kFloat32Rows,
    kBf16Pairs;

// The job that `problem` is for a kernel of that form, but for the rows of a call: m, y, packed x.
Job describe(const mm::Problem& problem, const mm::Arguments& arguments, const Packing& packing);

}  // namespace qao::cpu
