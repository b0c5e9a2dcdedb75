// int8 x times int8 W, for every instruction set: lanes along K, four rows of W by up to four of x. `Dot` holds the
// instructions (lane_dot.h).
#pragma once

#include "cpu/arm/simd.h"
#include "cpu/mm_job.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

constexpr int kRowsW = 4, kRowsX = 4;
constexpr int kStep = 16;  // columns at a time

// out[kM][16]: integers of columns [begin, end), which x holds padded.
template <int kM>
void multiply(const uint8_t* const (&rows)[kRowsW], const int8_t* x, int64_t x_row, int64_t begin, int64_t end,
              int32_t* out) {
  Dot::Sums<kRowsW, kM> sums;
  const auto add = [&](const uint8_t* const(&at)[kRowsW], int64_t offset, int64_t k) __attribute__((always_inline)) {
    int8x16_t w[kRowsW], bytes[kM];
#pragma GCC unroll 4
    for (int r = 0; r < kRowsW; ++r) w[r] = vreinterpretq_s8_u8(vld1q_u8(at[r] + offset));
#pragma GCC unroll 4
    for (int i = 0; i < kM; ++i) bytes[i] = vld1q_s8(x + i * x_row + k);
    sums.add(w, bytes);
  };
  int64_t k = begin;
  for (; k + kStep <= end; k += kStep) add(rows, k, k);
  if (k < end) {
    uint8_t padded[kRowsW][kStep] = {};
    for (int r = 0; r < kRowsW; ++r) __builtin_memcpy(padded[r], rows[r] + k, static_cast<size_t>(end - k));
    const uint8_t* const last[kRowsW] = {padded[0], padded[1], padded[2], padded[3]};
    add(last, 0, k);
  }
  for (int i = 0; i < kM; ++i) vst1q_s32(out + i * kTileRows, sums.all(0, i));
}

// y for columns n .. n + 3.
void write(const Job& job, int64_t n, const float* totals) {
  const int64_t count = job.n - n;
  const float32x4_t bias = job.bias != nullptr ? load_first(job.bias, n, job.bias_dtype, count) : vdupq_n_f32(0);
  const float32x4_t weight_sums =
      job.x_zeros != nullptr ? load_first(job.weight_sums, n, DType::kFloat32, count) : vdupq_n_f32(0);
  const float32x4_t scales = job.weight_scaling == Scaling::kRow ? load_first(job.scales, n, DType::kFloat32, count)
                                                                 : vdupq_n_f32(*static_cast<const float*>(job.scales));
  for (int64_t m = 0; m < job.m; ++m) {
    float32x4_t sum = vmulq_f32(vld1q_f32(totals + m * kTileRows), scales);
    if (job.x_zeros != nullptr) sum = vfmsq_n_f32(sum, weight_sums, static_cast<float>(job.x_zeros[m]));
    store_first(job.y, m * job.n + n, job.y_dtype, vfmaq_n_f32(bias, sum, job.x_scales[m * job.x_scale_stride]), count);
  }
}

void run_int8(const Job& job, int64_t begin, int64_t end) {
  const int64_t count = job.m * kTileRows, x_row = job.tiles_k * kTileColumns;
  int32_t* sums = static_cast<int32_t*>(scratch(Scratch::kSums, 2 * count * int64_t{sizeof(int32_t)}));
  float* totals = reinterpret_cast<float*>(sums + count);
  for (int64_t n = begin * kTileRows; n < end * kTileRows; n += kTileRows) {
    for (int64_t s = 0; s < job.sections; ++s) {
      const int64_t k = s * job.section, k_end = least(k + job.section, job.k);
      for (int quad = 0; quad < kTileRows; quad += kRowsW) {
        const uint8_t* w[kRowsW];  // past N the last row again; what comes of it is not written
        for (int r = 0; r < kRowsW; ++r) w[r] = job.weight + least(n + quad + r, job.n - 1) * job.k;
        int64_t m = 0;
        for (; m + kRowsX <= job.m; m += kRowsX) {
          multiply<kRowsX>(w, job.int8 + m * x_row, x_row, k, k_end, sums + m * kTileRows + quad);
        }
        for (; m < job.m; ++m) multiply<1>(w, job.int8 + m * x_row, x_row, k, k_end, sums + m * kTileRows + quad);
      }
      for (int64_t i = 0; i < count; i += 4) {
        const float32x4_t sum = vcvtq_f32_s32(vld1q_s32(sums + i));
        vst1q_f32(totals + i, s == 0 ? sum : vaddq_f32(vld1q_f32(totals + i), sum));
      }
    }
    for (int quad = 0; quad < kTileRows && n + quad < job.n; quad += kRowsW) write(job, n + quad, totals + quad);
  }
}

}  // namespace
}  // namespace qao::cpu
