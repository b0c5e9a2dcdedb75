// Conversions between plain [N, K] nibbles and the packed layout, one N-tile at a time.
#include <algorithm>

#include "cpu/int4_mm.h"
#include "cpu/numeric.h"
#include "int4_mm/layout.h"

namespace qao::cpu {
namespace {

using int4_mm::kTileK;
using int4_mm::kTileN;
using int4_mm::Problem;
using int4_mm::Unpacked;

template <typename Task>
void for_each_tile_row(const Problem& p, const Threads& threads, const Task& task) {
  const int64_t tiles = int4_mm::tiles_n(p.n);
  threads.for_each([&](int index) {
    for (int64_t t = tiles * index / threads.count; t < tiles * (index + 1) / threads.count; ++t) task(t);
  });
}

int parameters(const Problem& p) { return p.has_zeros ? 2 : 1; }

}  // namespace

Status int4_pack(const Problem& p, const Unpacked& from, uint8_t* weight, void* scales, const Threads& threads) {
  const int64_t k_tiles = int4_mm::tiles_k(p.k), groups = p.groups();
  for (int64_t i = 0; i < p.n * p.k; ++i) {
    if (from.q[i] > 15) {
      return Status::error("q holds " + std::to_string(from.q[i]) + " at row " + std::to_string(i / p.k) + ", column " +
                           std::to_string(i % p.k) + "; values must be 0..15");
    }
  }
  for_each_tile_row(p, threads, [&](int64_t tile) {
    for (int64_t n = tile * kTileN; n < (tile + 1) * kTileN; n += 1) {
      const int row = static_cast<int>(n % kTileN), shift = int4_mm::tile_shift(row);
      for (int64_t k = 0; k < k_tiles * kTileK; ++k) {
        uint8_t& byte = weight[int4_mm::weight_offset(n, k, k_tiles)];
        const uint8_t q = n < p.n && k < p.k ? from.q[n * p.k + k] : int4_mm::kSymmetricZero;
        byte = static_cast<uint8_t>(shift == 0 ? q : byte | q << shift);  // rows 0..7 come before rows 8..15
      }
      for (int64_t g = 0; g < groups; ++g) {
        const float scale = n < p.n ? load(from.scales, n * groups + g, p.scale_dtype) : 0.0f;
        store(scales, int4_mm::scale_offset(n, g, groups, parameters(p), 0), p.scale_dtype, scale);
        if (!p.has_zeros) continue;
        const float zero = n < p.n ? load(from.zeros, n * groups + g, p.scale_dtype) : float{int4_mm::kSymmetricZero};
        store(scales, int4_mm::scale_offset(n, g, groups, 2, 1), p.scale_dtype, zero);
      }
    }
  });
  return {};
}

Status int4_unpack(const Problem& p, const uint8_t* weight, const void* scales, const Unpacked& to,
                   const Threads& threads) {
  const int64_t k_tiles = int4_mm::tiles_k(p.k), groups = p.groups();
  for_each_tile_row(p, threads, [&](int64_t tile) {
    for (int64_t n = tile * kTileN; n < std::min(p.n, (tile + 1) * kTileN); ++n) {
      const int shift = int4_mm::tile_shift(static_cast<int>(n % kTileN));
      for (int64_t k = 0; k < p.k; ++k) {
        to.q[n * p.k + k] = weight[int4_mm::weight_offset(n, k, k_tiles)] >> shift & 15;
      }
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t scale = int4_mm::scale_offset(n, g, groups, parameters(p), 0);
        store(to.scales, n * groups + g, p.scale_dtype, load(scales, scale, p.scale_dtype));
        const float zero = p.has_zeros ? load(scales, scale + kTileN, p.scale_dtype) : float{int4_mm::kSymmetricZero};
        store(to.zeros, n * groups + g, p.scale_dtype, zero);
      }
    }
  });
  return {};
}

Status int4_dequantize(const Problem& p, const uint8_t* weight, const void* scales, DType out_dtype, void* out,
                       const Threads& threads) {
  const int64_t k_tiles = int4_mm::tiles_k(p.k), groups = p.groups();
  for_each_tile_row(p, threads, [&](int64_t tile) {
    for (int64_t n = tile * kTileN; n < std::min(p.n, (tile + 1) * kTileN); ++n) {
      const int shift = int4_mm::tile_shift(static_cast<int>(n % kTileN));
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t offset = int4_mm::scale_offset(n, g, groups, parameters(p), 0);
        const float scale = load(scales, offset, p.scale_dtype);
        const float zero = p.has_zeros ? load(scales, offset + kTileN, p.scale_dtype) : float{int4_mm::kSymmetricZero};
        for (int64_t k = g * p.group_size; k < std::min(p.k, (g + 1) * p.group_size); ++k) {
          const int q = weight[int4_mm::weight_offset(n, k, k_tiles)] >> shift & 15;
          store(out, n * p.k + k, out_dtype, (static_cast<float>(q) - zero) * scale);
        }
      }
    }
  });
  return {};
}

}  // namespace qao::cpu
