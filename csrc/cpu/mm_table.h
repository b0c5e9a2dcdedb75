// The table of the kernels for y = x · Wᵀ on the CPU, and the choice from it.
#pragma once

#include "cpu/features.h"
#include "cpu/mm_packing.h"

namespace qao::cpu {

struct RowsOfX {
  int64_t least, most;  // that a product may have
};

struct Kernel {
  const char* name;               // for reports: instruction set, gemv or gemm, the instruction that multiplies
  Features needs;                 // of the CPU
  unsigned x_formats, w_formats;  // it serves: a bit a Format
  RowsOfX rows;
  bool (*condition)(const mm::Problem&);  // more that it asks of a problem, or null
  const Packing* packing;  // the form of x that run() reads; null: the scalar kernel, which reads x itself
  void (*run)(const Job&, int64_t begin, int64_t end);
};

#if defined(__x86_64__)
extern const Kernel kWideRowsAvx2;  // for float and fp8 x, any M, int4 and fp4 W
#endif

// The first kernel of the table that the features and the problem allow. A pure function.
const Kernel& choose(const mm::Problem& problem, Features features);

}  // namespace qao::cpu
