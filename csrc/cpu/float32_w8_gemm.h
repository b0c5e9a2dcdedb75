// W8A16 kernel with float32 x for CPUs without AMX, and for one row of x.
// Lanes run along K, over four rows of W at a time (four streams of memory); the next four are prefetched meanwhile.
// `Simd` provides the instructions:
//   Vector, kLanes, kColumns            columns of W expanded at once; a multiple of kLanes that divides 64
//   kDirectRows                         rows of x up to which W is expanded in registers, else into a panel in L1
//   zero, load, store, fma, multiply, broadcast, load_values, store_values, lane_sums
//   expand<format>(bytes, out)          kColumns columns of W as float32
//   reorder<format>(columns)            x in the order in which expand() leaves W's columns
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

constexpr int kRowsW = 4, kRowsX = Simd::kRowsX;
constexpr int64_t kPanelK = 512;  // columns of a panel
constexpr int kVectors = Simd::kColumns / Simd::kLanes;
using Vector = Simd::Vector;
typedef float Four __attribute__((vector_size(16), may_alias));  // rows of W

// Expands kColumns columns of a row of W, or the last `count` and zeros.
template <Format kFormat>
__attribute__((always_inline)) inline void expand(const uint8_t* weight, int64_t count, Vector (&out)[kVectors]) {
  if (count >= Simd::kColumns) return Simd::template expand<kFormat>(weight, out);
  uint8_t padded[Simd::kColumns] = {};
  __builtin_memcpy(padded, weight, static_cast<size_t>(count));
  Simd::template expand<kFormat>(padded, out);
}

// Four rows of W, columns [begin, end).
template <Format kFormat>
struct Rows {
  const uint8_t* row[kRowsW];
  int64_t k;
  const float* block_scales;  // of these rows, or null

  __attribute__((always_inline)) inline void columns(int r, int64_t at, Vector (&out)[kVectors]) const {
    __builtin_prefetch(row[r] + kRowsW * k + at, 0, 2);
    expand<kFormat>(row[r] + at, k - at, out);
    if (block_scales == nullptr) return;
    const Vector scale = Simd::broadcast(block_scales[at / kScaleBlock]);
    for (Vector& values : out) values = Simd::multiply(values, scale);
  }
};

// Expanded rows of W: [4][kPanelK].
struct Panel {
  const float* values;
  int64_t begin;

  __attribute__((always_inline)) inline void columns(int r, int64_t at, Vector (&out)[kVectors]) const {
    for (int i = 0; i < kVectors; ++i) out[i] = Simd::load(values + r * kPanelK + at - begin + i * Simd::kLanes);
  }
};

// sums[kM][16] += W · x over columns [begin, end). x is padded.
template <int kM, typename Source>
void multiply(const Source& weight, const float* x, int64_t x_row, int64_t begin, int64_t end, float* sums) {
  Vector lanes[kM][kRowsW];
  for (auto& row : lanes) {
    for (Vector& sum : row) sum = Simd::zero();
  }
  for (int64_t k = begin; k < end; k += Simd::kColumns) {
#pragma GCC unroll 4
    for (int r = 0; r < kRowsW; ++r) {
      Vector columns[kVectors];
      weight.columns(r, k, columns);
#pragma GCC unroll 6
      for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          lanes[i][r] = Simd::fma(columns[v], Simd::load(x + i * x_row + k + v * Simd::kLanes), lanes[i][r]);
        }
      }
    }
  }
  for (int i = 0; i < kM; ++i) {
    Four* const at = reinterpret_cast<Four*>(sums + i * kTileRows);
    *at = *at + Simd::lane_sums(lanes[i]);
  }
}

template <int kM, typename Source>
void multiply_some(const Job& job, const Source& weight, int64_t m, int64_t begin, int64_t end, float* sums) {
  if constexpr (kM > 0) {
    const int64_t x_row = job.tiles_k * kTileColumns;
    if (job.m - m >= kM) {
      return multiply<kM>(weight, job.float32 + m * x_row, x_row, begin, end, sums + m * kTileRows);
    }
    multiply_some<kM - 1>(job, weight, m, begin, end, sums);
  }
}

template <Format kFormat>
void multiply_rows(const Job& job, const Rows<kFormat>& rows, float* panel, float* sums) {
  if (job.m <= Simd::kDirectRows) return multiply_some<Simd::kDirectRows>(job, rows, 0, 0, job.k, sums);
  for (int64_t begin = 0; begin < job.k; begin += kPanelK) {
    const int64_t end = least(begin + kPanelK, job.k);
    for (int r = 0; r < kRowsW; ++r) {
      for (int64_t k = begin; k < end; k += Simd::kColumns) {
        Vector columns[kVectors];
        rows.columns(r, k, columns);
        for (int v = 0; v < kVectors; ++v) Simd::store(panel + r * kPanelK + k - begin + v * Simd::kLanes, columns[v]);
      }
    }
    for (int64_t m = 0; m < job.m; m += kRowsX) {
      multiply_some<kRowsX>(job, Panel{panel, begin}, m, begin, end, sums);
    }
  }
}

template <Format kFormat>
void run(const Job& job, int64_t begin, int64_t end) {
  float* panel = static_cast<float*>(scratch(Scratch::kPanel, kRowsW * kPanelK * int64_t{sizeof(float)}));
  float* sums = static_cast<float*>(scratch(Scratch::kSums, job.m * kTileRows * int64_t{sizeof(float)}));
  const float* scales = static_cast<const float*>(job.scales);
  const bool per_block = job.weight_scaling == Scaling::kBlock;
  for (int64_t n = begin * kTileRows; n < end * kTileRows; n += kTileRows) {
    for (int64_t i = 0; i < job.m * kTileRows; ++i) sums[i] = 0;
    for (int quad = 0; quad < kTileRows && n + quad < job.n; quad += kRowsW) {
      Rows<kFormat> rows;
      rows.k = job.k;
      rows.block_scales = per_block ? scales + n / kScaleBlock * job.sections : nullptr;
      for (int r = 0; r < kRowsW; ++r) {  // past N the last row again; its results are not written
        rows.row[r] = job.weight + least(n + quad + r, job.n - 1) * job.k;
      }
      multiply_rows(job, rows, panel, sums + quad);
    }
    for (int i = 0; i < kTileRows && n + i < job.n; i += Simd::kLanes) {
      const int64_t count = job.n - n - i;
      const Vector bias =
          job.bias != nullptr ? Simd::load_values(job.bias, n + i, job.bias_dtype, count) : Simd::zero();
      const Vector scale = job.weight_scaling == Scaling::kRow
                               ? Simd::load_values(scales, n + i, DType::kFloat32, count)
                               : Simd::broadcast(per_block ? 1 : scales[0]);
      for (int64_t m = 0; m < job.m; ++m) {
        const Vector y = Simd::fma(Simd::load(sums + m * kTileRows + i), scale, bias);
        Simd::store_values(job.y, m * job.n + n + i, job.y_dtype, y, count);
      }
    }
  }
}

template <Format kFormat>
void pack(const Job& job, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    float* out = job.float32 + m * job.tiles_k * kTileColumns;
    for (int64_t k = 0; k < job.tiles_k * kTileColumns; k += Simd::kColumns) {
      const float* scale = job.x_scales + m * job.x_scale_stride + k / kScaleBlock * job.x_block_stride;
      Vector columns[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = k + v * Simd::kLanes;
        columns[v] = Simd::zero();
        if (at >= job.k) continue;
        columns[v] = Simd::multiply(Simd::load_values(job.x, m * job.x_stride + at, job.x_dtype, job.k - at),
                                    Simd::broadcast(*scale));
      }
      Simd::template reorder<kFormat>(columns);
      for (int v = 0; v < kVectors; ++v) Simd::store(out + k + v * Simd::kLanes, columns[v]);
    }
  }
}

}  // namespace
}  // namespace qao::cpu
