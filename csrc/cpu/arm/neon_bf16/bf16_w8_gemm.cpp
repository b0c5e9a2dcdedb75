// W8A16 GEMM with bfloat16 x and `bfmmla`: two rows of W by two of x, four columns at a time.
// Four rows of W are expanded, exactly, into a panel in L1 in operand order. Every pair of rows of x reads it.
#include "cpu/arm/simd.h"
#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

constexpr int kRowsW = 4, kPairsX = 4;
constexpr int64_t kPanelK = 512;
constexpr int kOperand = 8;  // values of two rows and four columns

// The upper halves of eight values that have zero lower halves.
uint16x8_t upper_halves(const float32x4_t (&v)[2]) {
  return vuzp2q_u16(vreinterpretq_u16_f32(v[0]), vreinterpretq_u16_f32(v[1]));
}

template <Format kFormat>
uint16x8_t expand(const uint8_t* weight, int64_t count) {
  uint8_t padded[8] = {};
  if (count < 8) {
    __builtin_memcpy(padded, weight, static_cast<size_t>(count));
    weight = padded;
  }
  float32x4_t values[2];
  kFormat == Format::kInt8 ? expand_int8(vld1_u8(weight), values) : expand_fp8(vld1_u8(weight), values);
  return upper_halves(values);
}

// panel[(end - begin) / 4, rounded up][2 pairs of rows][8]
template <Format kFormat>
void expand_rows(const uint8_t* const (&rows)[kRowsW], int64_t begin, int64_t end, uint16_t* panel) {
  for (int64_t k = begin; k < end; k += 8, panel += 4 * kOperand) {
    for (int pair = 0; pair < 2; ++pair) {
      const uint64x2_t a = vreinterpretq_u64_u16(expand<kFormat>(rows[2 * pair] + k, end - k));
      const uint64x2_t b = vreinterpretq_u64_u16(expand<kFormat>(rows[2 * pair + 1] + k, end - k));
      vst1q_u16(panel + pair * kOperand, vreinterpretq_u16_u64(vzip1q_u64(a, b)));
      vst1q_u16(panel + (2 + pair) * kOperand, vreinterpretq_u16_u64(vzip2q_u64(a, b)));
    }
  }
}

bfloat16x8_t load_operand(const uint16_t* values) { return vreinterpretq_bf16_u16(vld1q_u16(values)); }

// out[2 kM][16] = `steps` fours of columns of the panel times kM pairs of rows of x, x_pair apart.
template <int kM>
void multiply(const uint16_t* panel, const uint16_t* x, int64_t x_pair, int64_t steps, float* out) {
  float32x4_t sums[2][kM];
  for (auto& row : sums) {
    for (float32x4_t& sum : row) sum = vdupq_n_f32(0);
  }
  for (int64_t i = 0; i < steps; ++i) {
    const bfloat16x8_t w[2] = {load_operand(panel + 2 * i * kOperand), load_operand(panel + (2 * i + 1) * kOperand)};
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      const bfloat16x8_t rows = load_operand(x + m * x_pair + i * kOperand);
      sums[0][m] = vbfmmlaq_f32(sums[0][m], w[0], rows);
      sums[1][m] = vbfmmlaq_f32(sums[1][m], w[1], rows);
    }
  }
  for (int m = 0; m < kM; ++m) {
    vst1q_f32(out + 2 * m * kTileRows, vuzp1q_f32(sums[0][m], sums[1][m]));
    vst1q_f32(out + (2 * m + 1) * kTileRows, vuzp2q_f32(sums[0][m], sums[1][m]));
  }
}

// Writes y for columns n .. n + 3 from their sums, which already include block scales.
void write(const Job& job, int64_t n, bool per_block, const float* totals) {
  const int64_t count = job.n - n;
  const float32x4_t bias = job.bias != nullptr ? load_first(job.bias, n, job.bias_dtype, count) : vdupq_n_f32(0);
  const float32x4_t scales = job.weight_scaling == Scaling::kRow
                                 ? load_first(job.scales, n, DType::kFloat32, count)
                                 : vdupq_n_f32(per_block ? 1 : *static_cast<const float*>(job.scales));
  for (int64_t m = 0; m < job.m; ++m) {
    const float x_scale = per_block ? 1 : job.x_scales[m * job.x_scale_stride];
    const float32x4_t sum = vmulq_n_f32(vld1q_f32(totals + m * kTileRows), x_scale);
    store_first(job.y, m * job.n + n, job.y_dtype, vfmaq_f32(bias, sum, scales), count);
  }
}

template <Format kFormat>
void run(const Job& job, int64_t begin, int64_t end) {
  const bool per_block = job.weight_scaling == Scaling::kBlock;
  const int64_t step = per_block ? kScaleBlock : kPanelK;
  const int64_t pairs = divide_up(job.m, 2), x_pair = job.tiles_k * kTileColumns * 2;
  uint16_t* panel = static_cast<uint16_t*>(scratch(Scratch::kPanel, kPanelK * kRowsW * int64_t{sizeof(uint16_t)}));
  float* sums = static_cast<float*>(scratch(Scratch::kSums, 4 * pairs * kTileRows * int64_t{sizeof(float)}));
  float* totals = sums + 2 * pairs * kTileRows;
  for (int64_t n = begin * kTileRows; n < end * kTileRows; n += kTileRows) {
    for (int64_t i = 0; i < job.m * kTileRows; ++i) totals[i] = 0;
    for (int quad = 0; quad < kTileRows && n + quad < job.n; quad += kRowsW) {
      const uint8_t* rows[kRowsW];  // past N the last row again; its results are not written
      for (int r = 0; r < kRowsW; ++r) rows[r] = job.weight + least(n + quad + r, job.n - 1) * job.k;
      for (int64_t k = 0; k < job.k; k += step) {
        const int64_t k_end = least(k + step, job.k);
        expand_rows<kFormat>(rows, k, k_end, panel);
        const uint16_t* x = job.bf16_pairs + k / 4 * kOperand;
        const int64_t steps = divide_up(k_end - k, 4);
        int64_t p = 0;
        for (; p + kPairsX <= pairs; p += kPairsX) {
          multiply<kPairsX>(panel, x + p * x_pair, x_pair, steps, sums + 2 * p * kTileRows + quad);
        }
        for (; p < pairs; ++p) multiply<1>(panel, x + p * x_pair, x_pair, steps, sums + 2 * p * kTileRows + quad);
        const int64_t block = k / kScaleBlock;
        const float* scales = static_cast<const float*>(job.scales) + n / kScaleBlock * job.sections + block;
        for (int64_t m = 0; m < job.m; ++m) {
          float scale = 1;
          if (per_block) scale = *scales * job.x_scales[m * job.x_scale_stride + block * job.x_block_stride];
          float* at = totals + m * kTileRows + quad;
          vst1q_f32(at, vfmaq_n_f32(vld1q_f32(at), vld1q_f32(sums + m * kTileRows + quad), scale));
        }
      }
      write(job, n + quad, per_block, totals + quad);
    }
  }
}

}  // namespace

void neon_bf16::pack_bf16_pairs(const Job& job, int64_t begin, int64_t end) {
  for (int64_t pair = begin; pair < end; ++pair) {
    uint16_t* out = job.bf16_pairs + pair * job.tiles_k * kTileColumns * 2;
    for (int64_t k = 0; k < job.tiles_k * kTileColumns; k += 4, out += kOperand) {
      for (int i = 0; i < 2; ++i) {
        const int64_t m = 2 * pair + i, count = m < job.m ? job.k - k : 0;
        uint16_t values[4] = {};
        const uint16_t* x = static_cast<const uint16_t*>(job.x) + m * job.x_stride + k;
        if (count > 0) __builtin_memcpy(values, x, sizeof(uint16_t) * static_cast<size_t>(least(count, 4)));
        __builtin_memcpy(out + 4 * i, values, sizeof values);
      }
    }
  }
}

void neon_bf16::bf16_w8_gemm(const Job& job, int64_t begin, int64_t end) {
  job.weight_format == Format::kInt8 ? run<Format::kInt8>(job, begin, end) : run<Format::kFp8>(job, begin, end);
}

}  // namespace qao::cpu
