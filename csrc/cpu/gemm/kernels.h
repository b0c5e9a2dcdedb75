// All GEMM kernels of the CPU, by namespace of their instruction set.
// kernel_table.cpp decides when each runs. A name is the form of x, the format of W ("w8": int8 or fp8), and gemv
// (lanes run along K, each row of x reads W again) or gemm.
#pragma once

#include "cpu/gemm/job.h"

namespace qao::cpu {

// pack_...: packs x into the form of that name, units [begin, end) as its Packing counts them.
// GEMMs: compute y for N-tiles [begin, end).
namespace avx2 {
void widen_fp8(const Job& job, void* out, int64_t begin, int64_t end);  // to rows of 64 tiles_k values of x_dtype
void pack_fixed_point(const Job& job, int64_t begin, int64_t end);
// y (of y_dtype) = job.y (float32, without outliers) + the products of outliers.
void add_outliers(const Job& job, const Outliers& outliers, void* y, DType y_dtype, int64_t begin, int64_t end);
void pack_float32(const Job& job, int64_t begin, int64_t end);
void pack_float32_panels(const Job& job, int64_t begin, int64_t end);
void pack_int8_rows(const Job& job, int64_t begin, int64_t end);
void pack_int8_panels(const Job& job, int64_t begin, int64_t end);
void pack_int16_panels(const Job& job, int64_t begin, int64_t end);
void fixed_point_int4_gemv(const Job& job, int64_t begin, int64_t end);
void fixed_point_int4_gemm(const Job& job, int64_t begin, int64_t end);
void float32_w8_gemv(const Job& job, int64_t begin, int64_t end);
void fixed_point_gguf_gemv(const Job& job, int64_t begin, int64_t end);
void float32_gguf_gemv(const Job& job, int64_t begin, int64_t end);
void float32_gemm(const Job& job, int64_t begin, int64_t end);
void float32_wide_gemm(const Job& job, int64_t begin, int64_t end);  // sums of few columns separately; 4-bit W
void int8_int8_gemv(const Job& job, int64_t begin, int64_t end);
void int8_int8_gemm(const Job& job, int64_t begin, int64_t end);
void int8_int4_gemv(const Job& job, int64_t begin, int64_t end);
void int8_int4_gemm(const Job& job, int64_t begin, int64_t end);
}  // namespace avx2

namespace avx_vnni {
void int8_int8_gemm(const Job& job, int64_t begin, int64_t end);
void int8_int4_gemm(const Job& job, int64_t begin, int64_t end);
}  // namespace avx_vnni

namespace avx512 {
void widen_fp8(const Job& job, void* out, int64_t begin, int64_t end);
void pack_float32(const Job& job, int64_t begin, int64_t end);
void pack_float32_panels(const Job& job, int64_t begin, int64_t end);
void pack_int8_panels(const Job& job, int64_t begin, int64_t end);
void fixed_point_int4_gemv(const Job& job, int64_t begin, int64_t end);
void fixed_point_int4_gemm(const Job& job, int64_t begin, int64_t end);
void fixed_point_gguf_gemv(const Job& job, int64_t begin, int64_t end);
void float32_w8_gemv(const Job& job, int64_t begin, int64_t end);
void float32_gemm(const Job& job, int64_t begin, int64_t end);
void float32_gguf_gemm(const Job& job, int64_t begin, int64_t end);
void int8_int8_gemv(const Job& job, int64_t begin, int64_t end);
void int8_int8_gemm(const Job& job, int64_t begin, int64_t end);
void int8_int4_gemv(const Job& job, int64_t begin, int64_t end);
void int8_int4_gemm(const Job& job, int64_t begin, int64_t end);
}  // namespace avx512

namespace avx512_bf16 {
void pack_bf16_panels(const Job& job, int64_t begin, int64_t end);
void bf16_w8_gemm(const Job& job, int64_t begin, int64_t end);
void bf16_int4_gemm(const Job& job, int64_t begin, int64_t end);
void bf16_fp4_gemm(const Job& job, int64_t begin, int64_t end);
void bf16_gguf_gemm(const Job& job, int64_t begin, int64_t end);
}  // namespace avx512_bf16

namespace amx {
void widen_int8(const Job& job, void* out, int64_t begin, int64_t end);  // as avx2::widen_fp8; minus x_zeros
void widen_fp8(const Job& job, void* out, int64_t begin, int64_t end);   // scaled, if x has blocks that W's tiles lack
void pack_bf16_tiles(const Job& job, int64_t begin, int64_t end);
void pack_int8_tiles(const Job& job, int64_t begin, int64_t end);
void fixed_point_int4_few_rows(const Job& job, int64_t begin, int64_t end);  // at most kFewRows rows of x, one word
void bf16_int4_gemm(const Job& job, int64_t begin, int64_t end);
void bf16_fp4_gemm(const Job& job, int64_t begin, int64_t end);
void bf16_w8_gemm(const Job& job, int64_t begin, int64_t end);
void bf16_gguf_gemm(const Job& job, int64_t begin, int64_t end);
void int8_int8_gemm(const Job& job, int64_t begin, int64_t end);
void int8_int4_few_rows(const Job& job, int64_t begin, int64_t end);  // at most 16 rows of x, no groups of 32
void int8_int4_gemm(const Job& job, int64_t begin, int64_t end);      // delegates such rows to int8_int4_few_rows
}  // namespace amx

namespace neon {
void widen_fp8(const Job& job, void* out, int64_t begin, int64_t end);
void pack_fixed_point(const Job& job, int64_t begin, int64_t end);
void add_outliers(const Job& job, const Outliers& outliers, void* y, DType y_dtype, int64_t begin, int64_t end);
void pack_float32(const Job& job, int64_t begin, int64_t end);
void pack_int8_rows(const Job& job, int64_t begin, int64_t end);
void fixed_point_int4_gemm(const Job& job, int64_t begin, int64_t end);
void float32_w8_gemm(const Job& job, int64_t begin, int64_t end);
void int8_int8_gemm(const Job& job, int64_t begin, int64_t end);
void int8_int4_gemm(const Job& job, int64_t begin, int64_t end);
}  // namespace neon

namespace neon_dotprod {
void fixed_point_int4_gemm(const Job& job, int64_t begin, int64_t end);
void int8_int8_gemm(const Job& job, int64_t begin, int64_t end);
void int8_int4_gemm(const Job& job, int64_t begin, int64_t end);
}  // namespace neon_dotprod

namespace neon_i8mm {
void fixed_point_int4_gemm(const Job& job, int64_t begin, int64_t end);
void int8_int8_gemm(const Job& job, int64_t begin, int64_t end);
void int8_int4_gemm(const Job& job, int64_t begin, int64_t end);
}  // namespace neon_i8mm

namespace neon_bf16 {
void pack_bf16_pairs(const Job& job, int64_t begin, int64_t end);
void bf16_w8_gemm(const Job& job, int64_t begin, int64_t end);
}  // namespace neon_bf16

}  // namespace qao::cpu
