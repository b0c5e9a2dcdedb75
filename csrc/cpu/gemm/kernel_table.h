// Table of the CPU kernels for y = x · Wᵀ, and the choice among them.
#pragma once

#include "cpu/features.h"
#include "cpu/gemm/activation_packing.h"

namespace qao::cpu {

struct RowsOfX {
  int64_t least, most;  // rows that a GEMM may have
};

struct Kernel {
  const char* name;               // for reports: instruction set, gemv or gemm, the multiply instruction
  Features needs;                 // CPU features
  unsigned x_formats, w_formats;  // supported formats, one bit per Format
  RowsOfX rows;
  bool (*condition)(const gemm::Problem&);  // further condition on the problem, or null
  const Packing* packing;  // the form of x that run() reads; null: the scalar kernel, which reads x directly
  void (*run)(const Job&, int64_t begin, int64_t end);
};

#if defined(__x86_64__)
extern const Kernel kWideRowsAvx2;  // for float and fp8 x, any M, int4 and fp4 W
#endif

// The first kernel of the table that the features and the problem permit. A pure function.
const Kernel& choose(const gemm::Problem& problem, Features features);

}  // namespace qao::cpu
