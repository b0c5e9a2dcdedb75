// Products of the outliers of x, which its fixed point leaves out (pack_fixed_point.cpp).
// They are computed in float32, column by column of W. y is rounded to its dtype afterwards.
#include "cpu/arm/simd.h"
#include "cpu/fixed_point.h"
#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "layout/fp4.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

constexpr int kVectors = kTileN / 4;

// A column of W in one N-tile.
struct Column {
  float32x4_t rows[kVectors];
};
Column fp4_column(const Job& job, int64_t tile, int64_t k, const uint8_t (&bytes)[8]) {
  float values[kTileN];
  for (int row = 0; row < kTileN; ++row) values[row] = fp4::kValues[bytes[row % 8] >> int4::tile_shift(row) & 15];
  Column column;
  for (int v = 0; v < kVectors; ++v) {
    const auto scale = [&](int64_t row) {
      return load4(job.scales, (tile * job.scale_rows + row) * kTileN + 4 * v, DType::kBFloat16);
    };
    column.rows[v] = vmulq_f32(vld1q_f32(values + 4 * v), scale(k / job.group_size));
    if (job.scale_rows > job.groups) {
      const float32x4_t divisor = vaddq_f32(vaddq_f32(scale(job.groups), scale(job.groups + 1)), scale(job.groups + 2));
      column.rows[v] = vdivq_f32(column.rows[v], divisor);
    }
  }
  return column;
}
Column load_column(const Job& job, int64_t tile, int64_t k) {
  const uint8_t* at =
      job.weight + (tile * job.tiles_k + k / kTileK) * kTileBytes + int4::tile_byte(0, static_cast<int>(k % kTileK));
  uint8_t bytes[8];
  for (int g = 0; g < 8; ++g) bytes[g] = at[g * kTileK];
  if (job.weight_format == Format::kFp4) return fp4_column(job, tile, k, bytes);
  const uint16x8_t low = vmovl_u8(vand_u8(vld1_u8(bytes), vdup_n_u8(15)));
  const uint16x8_t high = vmovl_u8(vshr_n_u8(vld1_u8(bytes), 4));
  const uint16x4_t q[kVectors] = {vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)};
  const int64_t group = k / job.section / job.sections_per_group;
  const int64_t offset = (tile * job.groups + group) * job.parameters * kTileN;
  Column column;
  for (int v = 0; v < kVectors; ++v) {
    const float32x4_t zero = job.parameters == 2 ? load4(job.scales, offset + kTileN + 4 * v, job.scale_dtype)
                                                 : vdupq_n_f32(int4::kSymmetricZero);
    column.rows[v] =
        vmulq_f32(vsubq_f32(vcvtq_f32_u32(vmovl_u16(q[v])), zero), load4(job.scales, offset + 4 * v, job.scale_dtype));
  }
  return column;
}

}  // namespace

void neon::add_outliers(const Job& job, const Outliers& outliers, void* y, DType y_dtype, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t m = 0; m < job.m; ++m) {
      float32x4_t sums[kVectors];
      for (float32x4_t& sum : sums) sum = vdupq_n_f32(0);
      for (int64_t i = outliers.first[m]; i < outliers.first[m + 1];) {
        const int64_t end = least(i + kOutliersAtOnce, outliers.first[m + 1]);
        float32x4_t some[kVectors];
        for (float32x4_t& sum : some) sum = vdupq_n_f32(0);
        for (; i < end; ++i) {
          const Column column = load_column(job, tile, outliers.columns[i]);
          for (int v = 0; v < kVectors; ++v) some[v] = vfmaq_n_f32(some[v], column.rows[v], outliers.values[i]);
        }
        for (int v = 0; v < kVectors; ++v) sums[v] = vaddq_f32(sums[v], some[v]);
      }
      const float x_scale = job.x_scales[m * job.x_scale_stride];
      for (int v = 0; v < kVectors; ++v) {
        const int64_t n = tile * kTileN + 4 * v, count = job.n - n;
        if (count <= 0) break;
        float32x4_t sum = load_first(job.y, m * job.n + n, DType::kFloat32, count);
        if (outliers.first[m] < outliers.first[m + 1]) sum = vfmaq_n_f32(sum, sums[v], x_scale);
        store_first(y, m * job.n + n, y_dtype, sum, count);
      }
    }
  }
}

}  // namespace qao::cpu
