// GPTQ rounding of a block of columns with error feedback; rows are independent. C++ API.
//
// csrc/ops/gptq.cpp is the only caller.
#pragma once

#include <cstdint>

#include "qao/status.h"
#include "qao/types.h"

namespace qao::gptq {

constexpr int kMaxColumns = 128;

// For each column in order: value = weight + moved; code = round(value / scale + zero); error = weight - dequantized
// code. Then moved += error * ratios[column, j] for every later column j.
struct Problem {
  int64_t columns = 0, rows = 0;  // columns: 1 .. kMaxColumns
  Format codes = Format::kInt4;   // kInt4: 0..15 in a byte; kInt8: -127..127; kFp8: e4m3, saturated
};

// All contiguous, [columns, rows]; except ratios: float32 [columns, columns], read above the diagonal only.
struct Arguments {
  const float *weight = nullptr, *moved = nullptr, *scales = nullptr;
  const float* zeros = nullptr;  // null: 0
  const float* ratios = nullptr;
  uint8_t* codes = nullptr;
  float* errors = nullptr;  // weight - dequantized codes
  float* rests = nullptr;   // value - dequantized codes
};

// Enqueued on `stream` (a cudaStream_t) of the current device. Asynchronous.
Status round_columns(const Problem& problem, const Arguments& arguments, void* stream);

}  // namespace qao::gptq
