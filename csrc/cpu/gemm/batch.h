// A batch of rows of a GEMM.
// It quantizes and packs x, computes y by N-tiles, and fixes rows beyond the kernel's arithmetic. The drivers
// driver.cpp and grouped.cpp divide these steps among threads.
#pragma once

#include "cpu/gemm/kernel_table.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"
#include "cpu/quantize.h"

namespace qao::cpu {

// How a float x is quantized to eight bits.
struct Rounding {
  const QuantizeKernels* kernels = nullptr;  // null: x already has its format
  quantize::Problem problem;
  quantize::Arguments arguments;
};

struct Batch {
  const Kernel* kernel = nullptr;
  gemm::Problem problem;      // m is the rows of this batch, x is quantized
  gemm::Arguments arguments;  // x, y and per-row data begin with the batch's first row
  Rounding rounding;
  // Set by lay_out.
  Job job;
  void* wide = nullptr;  // widened x, if the kernel needs it

  // Rows [first, first + rows) of a GEMM. `kernels` quantizes them if the problem says so.
  static Batch of(const Kernel& kernel, const gemm::Problem& problem, const gemm::Arguments& arguments, int64_t first,
                  int64_t rows, const QuantizeKernels* kernels = nullptr);
  // Rows at a time: a multiple of 32 that fits its share of memory when packed, or all if the kernel does not pack.
  static int64_t most_rows(const Kernel& kernel, const gemm::Problem& problem, const gemm::Arguments& arguments);

  // Allocates packed x. Without memory `pieces` only counts bytes.
  void lay_out(Pieces& pieces);
  // Instead: reads the packed x of a batch that differs in the weight, bias and y alone.
  void share_x(const Batch& packed);

  // The steps, in this order. Each range of a step may run on a different thread.
  int64_t rows_to_prepare() const;  // 0 if nothing is to do, or if pack() does it row by row
  void prepare(int64_t begin, int64_t end) const;
  int64_t units() const;  // units of pack()
  void pack(int64_t begin, int64_t end) const;
  bool has_outliers() const;
  void run(int64_t begin, int64_t end) const;  // N-tiles; if there are no outliers
  void run_with_outliers(const Threads& threads) const;
  void mend(const Threads& threads) const;  // after run() or run_with_outliers()

  int64_t tiles_n() const { return divide_up(problem.n, kTileRows); }
  int64_t work() const { return problem.m * problem.n * problem.k; }
  // Values with the same packing time; int8 values that are only copied take half as long.
  int64_t values_to_pack() const {
    const bool copies = problem.x == Format::kInt8 && rounding.kernels == nullptr;
    return problem.m * problem.k / (copies ? 2 : 1);
  }

 private:
  void quantize_in(Pieces& pieces);
  bool changes_rows() const { return rounding.kernels != nullptr || wide != nullptr; }  // before packing
  void run_in_float32(int64_t first, int64_t rows, const Threads& threads) const;       // some of the rows
};

}  // namespace qao::cpu
