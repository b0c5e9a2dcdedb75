// Table of the CPU's GEMM kernels in the order in which they are tried.
#include "cpu/gemm/kernel_table.h"

#include <array>
#include <limits>

#include "cpu/gemm/kernels.h"

namespace qao::cpu {
namespace {

using gemm::Problem;

constexpr unsigned bit(Format format) { return 1u << static_cast<int>(format); }

constexpr unsigned kFloatX = bit(Format::kFloat) | bit(Format::kFp8);  // fp8 x is widened first
constexpr unsigned kInt8 = bit(Format::kInt8), kInt4 = bit(Format::kInt4), kW8 = kInt8 | bit(Format::kFp8);
constexpr unsigned kFp4 = bit(Format::kFp4), kGguf = bit(Format::kGguf);
constexpr unsigned kAnyFormat = ~0u;

constexpr int64_t kAnyNumber = std::numeric_limits<int64_t>::max();
constexpr RowsOfX kAny = {0, kAnyNumber};
constexpr RowsOfX up_to(int64_t most) { return {0, most}; }
constexpr RowsOfX from(int64_t least) { return {least, kAnyNumber}; }

#if defined(__x86_64__)
// One 16-bit word per value of x, and groups of whole K-tiles.
bool fits_byte_tiles(const Problem& p) {
  const DType dtype = p.x == Format::kFp8 ? p.y_dtype : p.x_dtype;
  return dtype != DType::kFloat32 && p.group_size != 32;
}
bool has_float32_x(const Problem& p) { return (p.x == Format::kFp8 ? p.y_dtype : p.x_dtype) == DType::kFloat32; }
// float32 x has two words of fixed point, other x one.
bool has_few_words(const Problem& p) { return p.m == 1 || p.x_dtype != DType::kFloat32; }
bool has_bf16_x(const Problem& p) {  // fp8 x is widened to bfloat16
  return (p.x == Format::kFp8 && (p.weight != Format::kInt4 || p.y_dtype == DType::kBFloat16)) ||
         (p.x == Format::kFloat && p.x_dtype == DType::kBFloat16);
}
// Byte sums would end every 32 or 64 columns. W in bfloat16 includes its scales, and y is no more precise.
bool has_short_groups(const Problem& p) {
  return p.y_dtype == DType::kBFloat16 && (p.group_size == 32 || (p.group_size == 64 && p.m > 64));
}
bool fits_int32(const Problem& p) { return p.k <= kMaxIntegerK; }
#elif defined(__aarch64__)
bool has_groups_of_32(const Problem& p) { return p.group_size == 32; }
bool is_bf16(const Problem& p) { return p.x == Format::kFp8 || p.x_dtype == DType::kBFloat16; }
#endif

// Tried in this order. The limits of M are where the next kernel becomes faster.
constexpr Kernel kKernels[] = {
#if defined(__x86_64__)
    // x in float or fp8, W int4
    {"amx gemm tdpbusd",
     kAmx,
     kFloatX,
     kInt4,
     {2, kFewRows},
     fits_byte_tiles,
     &kFixedPoint,
     amx::fixed_point_int4_few_rows},
    {"avx512 gemv vpdpbusd", kAvx512, kFloatX, kInt4, up_to(2), nullptr, &kFixedPoint, avx512::fixed_point_int4_gemv},
    {"amx gemm tdpbf16ps", kAmx, kFloatX, kInt4, kAny, nullptr, &kBf16Tiles, amx::bf16_int4_gemm},
    {"avx512_bf16 gemm vdpbf16ps", kAvx512Bf16, kFloatX, kInt4, from(16), has_bf16_x, &kBf16Panels,
     avx512_bf16::bf16_int4_gemm},
    {"avx512 gemm vfmadd231ps", kAvx512, kFloatX, kInt4, from(5), has_float32_x, &kFloat32PanelsAvx512,
     avx512::float32_gemm},
    {"avx512 gemm vpdpbusd", kAvx512, kFloatX, kInt4, kAny, nullptr, &kFixedPoint, avx512::fixed_point_int4_gemm},
    {"avx2 gemv vpmaddubsw", kAvx2, kFloatX, kInt4, up_to(1), nullptr, &kFixedPoint, avx2::fixed_point_int4_gemv},
    {"avx2 gemm vfmadd231ps", kAvx2, kFloatX, kInt4, from(16), nullptr, &kFloat32PanelsAvx2, avx2::float32_gemm},
    {"avx2 gemm vpmaddubsw", kAvx2, kFloatX, kInt4, kAny, nullptr, &kFixedPoint, avx2::fixed_point_int4_gemm},

    // x in float, W fp4
    {"avx512 gemv vpdpbusd", kAvx512, kFloatX, kFp4, up_to(2), nullptr, &kFixedPoint, avx512::fixed_point_int4_gemv},
    {"amx gemm tdpbf16ps", kAmx, kFloatX, kFp4, kAny, nullptr, &kBf16Tiles, amx::bf16_fp4_gemm},
    {"avx512_bf16 gemm vdpbf16ps", kAvx512Bf16, kFloatX, kFp4, kAny, has_bf16_x, &kBf16Panels,
     avx512_bf16::bf16_fp4_gemm},
    {"avx512 gemm vfmadd231ps", kAvx512, kFloatX, kFp4, kAny, nullptr, &kFloat32PanelsAvx512, avx512::float32_gemm},
    {"avx2 gemv vpmaddubsw", kAvx2, kFloatX, kFp4, up_to(1), nullptr, &kFixedPoint, avx2::fixed_point_int4_gemv},
    {"avx2 gemm vfmadd231ps", kAvx2, kFloatX, kFp4, kAny, nullptr, &kFloat32PanelsAvx2, avx2::float32_gemm},

    // x in float, W of GGUF
    {"amx gemm tdpbf16ps", kAmx, kFloatX, kGguf, from(5), has_bf16_x, &kBf16TilesInChunks, amx::bf16_gguf_gemm},
    {"avx512_bf16 gemm vdpbf16ps", kAvx512Bf16, kFloatX, kGguf, from(5), has_bf16_x, &kBf16Panels,
     avx512_bf16::bf16_gguf_gemm},
    {"avx512 gemm vfmadd231ps", kAvx512, kFloatX, kGguf, from(5), nullptr, &kFloat32PanelsAvx512,
     avx512::float32_gguf_gemm},
    {"avx512 gemv vpdpbusd", kAvx512, kFloatX, kGguf, kAny, nullptr, &kFixedPointSegments,
     avx512::fixed_point_gguf_gemv},
    {"avx2 gemv vpmaddwd", kAvx2, kFloatX, kGguf, up_to(4), has_few_words, &kFixedPointSegments,
     avx2::fixed_point_gguf_gemv},
    {"avx2 gemv vfmadd231ps", kAvx2, kFloatX, kGguf, up_to(4), nullptr, &kFloat32RowsAvx2, avx2::float32_gguf_gemv},
    {"avx2 gemm vfmadd231ps", kAvx2, kFloatX, kGguf, kAny, nullptr, &kFloat32PanelsAvx2, avx2::float32_gemm},

    // x in float or fp8, W int8 or fp8
    {"amx gemm tdpbf16ps", kAmx, kFloatX, kW8, from(3), nullptr, &kBf16Tiles, amx::bf16_w8_gemm},
    {"avx512_bf16 gemm vdpbf16ps", kAvx512Bf16, kFloatX, kW8, from(3), has_bf16_x, &kBf16Panels,
     avx512_bf16::bf16_w8_gemm},
    {"avx512 gemv vfmadd231ps", kAvx512, kFloatX, kW8, up_to(12), nullptr, &kFloat32RowsAvx512,
     avx512::float32_w8_gemv},
    {"avx512 gemm vfmadd231ps", kAvx512, kFloatX, kW8, kAny, nullptr, &kFloat32PanelsAvx512, avx512::float32_gemm},
    {"avx2 gemv vfmadd231ps", kAvx2, kFloatX, kW8, up_to(4), nullptr, &kFloat32RowsAvx2, avx2::float32_w8_gemv},
    {"avx2 gemm vfmadd231ps", kAvx2, kFloatX, kW8, kAny, nullptr, &kFloat32PanelsAvx2, avx2::float32_gemm},

    // x int8, W int8
    {"amx gemm tdpbssd", kAmx, kInt8, kInt8, from(5), fits_int32, &kInt8Tiles, amx::int8_int8_gemm},
    {"avx512 gemm vpdpbusd", kAvx512, kInt8, kInt8, from(9), fits_int32, &kInt8PanelsAvx512, avx512::int8_int8_gemm},
    {"avx512 gemv vpdpbusd", kAvx512, kInt8, kInt8, kAny, nullptr, &kInt8Rows, avx512::int8_int8_gemv},
    {"avx_vnni gemm vpdpbusd", kAvxVnni, kInt8, kInt8, from(3), fits_int32, &kInt8PanelsAvx2, avx_vnni::int8_int8_gemm},
    {"avx2 gemm vpmaddwd", kAvx2, kInt8, kInt8, from(3), fits_int32, &kInt16Panels, avx2::int8_int8_gemm},
    {"avx2 gemv vpmaddwd", kAvx2, kInt8, kInt8, kAny, nullptr, &kInt8Rows, avx2::int8_int8_gemv},

    // x int8, W int4
    {"avx512 gemv vpdpbusd", kAvx512, kInt8, kInt4, up_to(1), nullptr, &kInt8RowsInSections, avx512::int8_int4_gemv},
    {"amx gemm tdpbf16ps", kAmx, kInt8, kInt4, kAny, has_short_groups, &kBf16TilesOfInt8, amx::bf16_int4_gemm},
    {"amx gemm tdpbusd", kAmx, kInt8, kInt4, kAny, fits_int32, &kInt8Tiles, amx::int8_int4_gemm},
    {"avx512 gemm vpdpbusd", kAvx512, kInt8, kInt4, kAny, nullptr, &kInt8PanelsInSectionsAvx512,
     avx512::int8_int4_gemm},
    {"avx2 gemv vpmaddubsw", kAvx2, kInt8, kInt4, up_to(3), nullptr, &kInt8RowsInSections, avx2::int8_int4_gemv},
    {"avx_vnni gemm vpdpbusd", kAvxVnni, kInt8, kInt4, kAny, nullptr, &kInt8PanelsInSectionsAvx2,
     avx_vnni::int8_int4_gemm},
    {"avx2 gemm vpmaddubsw", kAvx2, kInt8, kInt4, kAny, nullptr, &kInt8PanelsInSectionsAvx2, avx2::int8_int4_gemm},

#elif defined(__aarch64__)
    // x in float or fp8, W int4
    {"neon_i8mm gemm smmla", kNeonI8mm, kFloatX, kInt4, kAny, nullptr, &kFixedPoint, neon_i8mm::fixed_point_int4_gemm},
    {"neon_dotprod gemm sdot", kNeonDotprod, kFloatX, kInt4, kAny, nullptr, &kFixedPoint,
     neon_dotprod::fixed_point_int4_gemm},
    {"neon gemm smull", kNeon, kFloatX, kInt4, kAny, nullptr, &kFixedPoint, neon::fixed_point_int4_gemm},

    // x in float, W fp4
    {"neon_i8mm gemm smmla", kNeonI8mm, kFloatX, kFp4, kAny, has_groups_of_32, &kFixedPoint,
     neon_i8mm::fixed_point_int4_gemm},
    {"neon_dotprod gemm sdot", kNeonDotprod, kFloatX, kFp4, kAny, nullptr, &kFixedPoint,
     neon_dotprod::fixed_point_int4_gemm},
    {"neon gemm smull", kNeon, kFloatX, kFp4, kAny, nullptr, &kFixedPoint, neon::fixed_point_int4_gemm},

    // x in float or fp8, W int8 or fp8
    {"neon_bf16 gemm bfmmla", kNeonBf16, kFloatX, kW8, kAny, is_bf16, &kBf16Pairs, neon_bf16::bf16_w8_gemm},
    {"neon gemm fmla", kNeon, kFloatX, kW8, kAny, nullptr, &kFloat32Rows, neon::float32_w8_gemm},

    // x int8
    {"neon_i8mm gemm smmla", kNeonI8mm, kInt8, kInt8, kAny, nullptr, &kInt8Rows, neon_i8mm::int8_int8_gemm},
    {"neon_dotprod gemm sdot", kNeonDotprod, kInt8, kInt8, kAny, nullptr, &kInt8Rows, neon_dotprod::int8_int8_gemm},
    {"neon gemm smull", kNeon, kInt8, kInt8, kAny, nullptr, &kInt8Rows, neon::int8_int8_gemm},
    {"neon_i8mm gemm smmla", kNeonI8mm, kInt8, kInt4, kAny, nullptr, &kInt8RowsInSections, neon_i8mm::int8_int4_gemm},
    {"neon_dotprod gemm sdot", kNeonDotprod, kInt8, kInt4, kAny, nullptr, &kInt8RowsInSections,
     neon_dotprod::int8_int4_gemm},
    {"neon gemm smull", kNeon, kInt8, kInt4, kAny, nullptr, &kInt8RowsInSections, neon::int8_int4_gemm},

#endif
    // anything; the last row, so that there is always a kernel
    {"scalar gemm float64", kScalar, kAnyFormat, kAnyFormat, kAny, nullptr, nullptr, nullptr},
};

constexpr bool serves(const Kernel& kernel, Format x, Format weight) {
  return (kernel.x_formats & bit(x)) != 0 && (kernel.w_formats & bit(weight)) != 0;
}

bool supports(const Kernel& kernel, const Problem& p, Features features) {
  return serves(kernel, p.x, p.weight) && includes(features, kernel.needs) && p.m >= kernel.rows.least &&
         p.m <= kernel.rows.most && (kernel.condition == nullptr || kernel.condition(p));
}

// First row for each pair of formats, so that the choice skips the rows of others.
constexpr auto kFirst = [] {
  std::array<std::array<uint8_t, kFormatCount>, kFormatCount> first{};
  for (int x = 0; x < kFormatCount; ++x) {
    for (int w = 0; w < kFormatCount; ++w) {
      while (!serves(kKernels[first[x][w]], Format{x}, Format{w})) ++first[x][w];
    }
  }
  return first;
}();

}  // namespace

#if defined(__x86_64__)
const Kernel kWideRowsAvx2 = {
    "avx2 gemm vfmadd231ps", kAvx2, kFloatX, kInt4 | kFp4, kAny, nullptr, &kFloat32WidePanelsAvx2,
    avx2::float32_wide_gemm};
#endif

const Kernel& choose(const Problem& given, Features features) {
  Problem problem = given;
  if (problem.batch_invariant) {  // the kernel for many rows, but not AMX, which has several summation orders
    problem.m = kAnyNumber;
    features &= ~(kHasAmxTile | kHasAmxInt8 | kHasAmxBf16);
  }
  const Kernel* kernel = kKernels + kFirst[static_cast<int>(problem.x)][static_cast<int>(problem.weight)];
  while (!supports(*kernel, problem, features)) ++kernel;
  return *kernel;
}

}  // namespace qao::cpu
