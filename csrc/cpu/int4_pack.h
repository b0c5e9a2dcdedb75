// Conversions between plain [N, K] nibbles and the packed layout on the CPU. Same Problem as CUDA; no torch headers.
#pragma once

#include <cstdint>

#include "cpu/parallel.h"
#include "qao/int4_mm.h"

namespace qao::cpu {

Status int4_pack(const int4_mm::Problem& problem, const int4_mm::Unpacked& from, uint8_t* weight, void* scales,
                 const Threads& threads);
Status int4_unpack(const int4_mm::Problem& problem, const uint8_t* weight, const void* scales,
                   const int4_mm::Unpacked& to, const Threads& threads);
Status int4_dequantize(const int4_mm::Problem& problem, const uint8_t* weight, const void* scales, DType out_dtype,
                       void* out, const Threads& threads);

}  // namespace qao::cpu
