// Conversions between plain [N, K] nibbles and the packed layout on the CPU.
// Same interface as CUDA; no torch headers.
#pragma once

#include <cstdint>

#include "cpu/parallel.h"
#include "qao/int4.h"

namespace qao::cpu {

Status int4_pack(const int4::Weight& shape, const int4::Unpacked& from, uint8_t* weight, void* scales,
                 const Threads& threads);
Status int4_unpack(const int4::Weight& shape, const uint8_t* weight, const void* scales, const int4::Unpacked& to,
                   const Threads& threads);
Status int4_dequantize(const int4::Weight& shape, const uint8_t* weight, const void* scales, DType out_dtype, void* out,
                       const Threads& threads);

}  // namespace qao::cpu
