// Some rows of a product on their way through a kernel: x is quantised and packed, y is computed by N-tiles, and what
// the kernel's arithmetic leaves out of x is put right. The drivers mm.cpp and grouped_mm.cpp spread these steps over
// threads.
#pragma once

#include "cpu/mm_table.h"
#include "cpu/parallel.h"
#include "cpu/pieces.h"
#include "cpu/quantize.h"

namespace qao::cpu {

// How a float x becomes eight bits.
struct Rounding {
  const QuantizeKernels* kernels = nullptr;  // null: x has its format already
  quantize::Problem problem;
  quantize::Arguments arguments;
};

struct Batch {
  const Kernel* kernel = nullptr;
  mm::Problem problem;      // with m the rows of this batch, and an x that is quantised
  mm::Arguments arguments;  // whose x, y and what belongs to rows begin with its first one
  Rounding rounding;
  // Set by lay_out.
  Job job;
  void* wide = nullptr;  // where x goes that must be widened first

  // Rows [first, first + rows) of a product. `kernels` quantise them, if the problem says so.
  static Batch of(const Kernel& kernel, const mm::Problem& problem, const mm::Arguments& arguments, int64_t first,
                  int64_t rows, const QuantizeKernels* kernels = nullptr);
  // Rows at a time: a multiple of 32 whose packed form fits its share of memory; all for a kernel that packs none.
  static int64_t most_rows(const Kernel& kernel, const mm::Problem& problem, const mm::Arguments& arguments);

  // Where packed x lies; without memory `pieces` only counts bytes.
  void lay_out(Pieces& pieces);

  // In this order; each part of a step may run on a thread of its own.
  int64_t rows_to_prepare() const;  // 0 where nothing is to be done, or pack does it row by row
  void prepare(int64_t begin, int64_t end) const;
  int64_t units() const;  // that pack takes
  void pack(int64_t begin, int64_t end) const;
  bool has_outliers() const;
  void run(int64_t begin, int64_t end) const;  // N-tiles; unless there are outliers
  void run_with_outliers(const Threads& threads) const;
  void mend(const Threads& threads) const;  // after either

  int64_t tiles_n() const { return divide_up(problem.n, kTileRows); }
  int64_t work() const { return problem.m * problem.n * problem.k; }
  // As many as take as long to pack; int8 that are only copied take half as long.
  int64_t values_to_pack() const {
    const bool copies = problem.x == Format::kInt8 && rounding.kernels == nullptr;
    return problem.m * problem.k / (copies ? 2 : 1);
  }

 private:
  void quantize_in(Pieces& pieces);
  bool changes_rows() const { return rounding.kernels != nullptr || wide != nullptr; }  // before they are packed
  void run_in_float32(int64_t first, int64_t rows, const Threads& threads) const;       // some of them
};

}  // namespace qao::cpu
