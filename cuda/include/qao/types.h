// Scalar types, formats, and the GPU properties that a plan may depend on. No torch, no CUDA.
#pragma once

#include <cstdint>

#include "qao/status.h"

#if defined(__CUDACC__)
#define QAO_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define QAO_HOST_DEVICE inline
#endif

namespace qao {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

QAO_HOST_DEVICE constexpr int size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "?";
}

// Storage format of matrix elements: a DType, 8 bits (fp8 is e4m3), or 4 bits (cuda/layout/int4.h; fp4 is e2m1,
// cuda/layout/fp4.h). GGUF: blocks of any of its types, row-major, on the CPU only (csrc/cpu/gguf_blocks.h).
enum class Format : int { kFloat = 0, kInt8 = 1, kFp8 = 2, kInt4 = 3, kFp4 = 4, kGguf = 5 };

constexpr const char* name_of(Format format) {
  switch (format) {
    case Format::kFloat:
      return "float";
    case Format::kInt8:
      return "int8";
    case Format::kFp8:
      return "fp8";
    case Format::kInt4:
      return "int4";
    case Format::kFp4:
      return "fp4";
    case Format::kGguf:
      return "gguf";
  }
  return "?";
}

constexpr Format kFormats[] = {Format::kFloat, Format::kInt8, Format::kFp8, Format::kInt4, Format::kFp4, Format::kGguf};
constexpr int kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);

// 4-bit weights are packed, with parameters per group along K. All others are row-major bytes.
constexpr bool is_packed(Format weight) { return weight == Format::kInt4 || weight == Format::kFp4; }
// Whether W may have a scale per 128 x 128 block, which kernels apply along K.
constexpr bool may_have_blocks(Format weight) { return weight == Format::kFp8; }

// Elements that share a scale: the whole matrix, a row, or a block: 1 x 128 of activations, 128 x 128 of a weight.
enum class Scaling : int { kTensor = 0, kRow = 1, kBlock = 2 };
constexpr int64_t kScaleBlock = 128;

constexpr const char* name_of(Scaling scaling) {
  switch (scaling) {
    case Scaling::kTensor:
      return "tensor";
    case Scaling::kRow:
      return "row";
    case Scaling::kBlock:
      return "block";
  }
  return "?";
}

// Inputs of plan(), a pure function of the problem and of these numbers: every rank and run selects the same kernel.
struct Gpu {
  int compute_capability = 0;    // 10 * major + minor: 80, 89, 90, ...
  int num_sms = 0;               // streaming multiprocessors
  int shared_bytes_per_cta = 0;  // opt-in limit of dynamic shared memory
};

// Properties of CUDA device `index`. Cached per device.
Status query_gpu(int index, Gpu* gpu);

}  // namespace qao
