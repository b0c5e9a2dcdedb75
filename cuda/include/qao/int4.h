// Packing, unpacking and dequantization of int4 weights (cuda/layout/int4.h) on the GPU. C++ API.
//
// csrc/ops/int4_pack.cpp is the only caller in qao.
#pragma once

#include <cstdint>

#include "qao/status.h"
#include "qao/types.h"

namespace qao::int4 {

// Shape and format of a packed weight and its parameters.
struct Weight {
  int64_t n = 0;           // rows
  int64_t k = 0;           // columns
  int64_t group_size = 0;  // 32, 64, 128, 256 or k (one group per row)
  bool has_zeros = false;  // asymmetric: the scales tensor also holds zero points
  DType scale_dtype = DType::kBFloat16;

  int64_t groups() const { return (k + group_size - 1) / group_size; }
};

// The same weight unpacked; `scales` and `zeros` are row-major [n, groups].
struct Unpacked {
  uint8_t* q = nullptr;    // [n, k], one value 0..15 per byte
  void* scales = nullptr;  // [n, groups] of scale_dtype
  void* zeros = nullptr;   // [n, groups] of scale_dtype; pack: null if symmetric; unpack: filled with 8 if symmetric
};

// Enqueued on `stream` (a cudaStream_t) of the current device. Asynchronous.
Status pack(const Weight& shape, const Unpacked& from, uint8_t* weight, void* scales, void* stream);
Status unpack(const Weight& shape, const uint8_t* weight, const void* scales, const Unpacked& to, void* stream);
// out[n,k] of out_dtype = (q - zero) * scale, computed in float32 and rounded once.
Status dequantize(const Weight& shape, const uint8_t* weight, const void* scales, DType out_dtype, void* out,
                  void* stream);

}  // namespace qao::int4
