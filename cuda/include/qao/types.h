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

// Storage format of matrix elements: a DType, or a row of formats.inc.
enum class Storage : int { kFloats, kBytes, kPacked, kFileBlocks };
enum class Format : int {
  kFloat,
#define QAO_FORMAT(id, ...) k##id,
#include "qao/formats.inc"
#undef QAO_FORMAT
};
struct FormatRecord {
  const char* name;
  Storage storage;
};
constexpr FormatRecord kFormatRecords[] = {
    {"float", Storage::kFloats},
#define QAO_FORMAT(id, name, storage) {name, Storage::storage},
#include "qao/formats.inc"
#undef QAO_FORMAT
};
constexpr Format kFormats[] = {
    Format::kFloat,
#define QAO_FORMAT(id, ...) Format::k##id,
#include "qao/formats.inc"
#undef QAO_FORMAT
};
constexpr int kFormatCount = sizeof(kFormats) / sizeof(kFormats[0]);

constexpr const char* name_of(Format format) { return kFormatRecords[static_cast<int>(format)].name; }
constexpr bool is_packed(Format format) { return kFormatRecords[static_cast<int>(format)].storage == Storage::kPacked; }
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

  bool operator==(const Gpu&) const = default;
};

// Properties of CUDA device `index`. Cached per device.
Status query_gpu(int index, Gpu* gpu);

}  // namespace qao
