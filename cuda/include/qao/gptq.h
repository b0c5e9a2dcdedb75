// GPTQ's loop over the columns of a block, rounding each beside the errors of those before it. Rows are independent.
// The C++ API; csrc/gptq.cpp is its only caller, and nothing here knows torch.
#pragma once

#include <cstdint>

#include "qao/status.h"
#include "qao/types.h"

namespace qao::gptq {

constexpr int kMaxColumns = 128;

// Column after column: value = weight + moved; code = nearest of value / scale + zero; error = weight - what the code
// stands for; moved of every later column j += error * ratios[column, j].
struct Problem {
  int64_t columns = 0, rows = 0;  // columns: 1 .. kMaxColumns
  Format codes = Format::kInt4;   // kInt4: 0..15 in a byte; kInt8: -127..127; kFp8: e4m3, saturated
};

// All contiguous. [columns, rows] but for ratios, float32 [columns, columns], of which what is above the diagonal is
// read.
struct Arguments {
  const float *weight = nullptr, *moved = nullptr, *scales = nullptr;
  const float* zeros = nullptr;  // null: 0
  const float* ratios = nullptr;
  uint8_t* codes = nullptr;
  float* errors = nullptr;  // weight less what codes stand for
  float* rests = nullptr;   // value less that
};

// Enqueued on `stream` (a cudaStream_t) of the current device. Asynchronous.
Status round_columns(const Problem& problem, const Arguments& arguments, void* stream);

}  // namespace qao::gptq
