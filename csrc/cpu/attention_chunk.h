// Attention over a chunk of keys, in vectors of the includer's instruction set.
// Nothing here has external linkage: see numeric.h.
#pragma once

#include <cstring>
#include <limits>

#include "cpu/attention_kernels.h"
#include "cpu/numeric.h"
#include "cpu/parallel.h"

namespace qao::cpu {
namespace {

// `Simd` has: kLanes, the type Floats of as many floats, load(data, index, dtype, count) with zeros past `count`
// values, fma(a, b, c), exponential(v) for v from -100 to 0, sum(v), and add_up(vectors, to), which stores the sums of
// four vectors.
template <typename Simd>
struct Attention {
  using Floats = typename Simd::Floats;
  static constexpr int kLanes = Simd::kLanes, kKeys = 4;
  static constexpr float kNever = -std::numeric_limits<float>::infinity();

  static int64_t padded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
  static int64_t floats(int64_t rows, int64_t mask_rows, int64_t size) {
    return rows * (padded(size, kLanes) + kChunkKeys) + mask_rows * kChunkKeys + kChunkKeys;
  }

  static Floats all(float value) { return Floats{} + value; }
  static Floats at(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
  }
  static void put(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

  // Returns the number of keys that count for any row; their indices are in `used`, then padding. The mask of these
  // keys is in `mask`, [mask_rows][kChunkKeys], with -infinity for keys that do not count.
  static int64_t read_mask(const AttentionChunk& c, float* mask, int32_t* used) {
    if (c.mask_rows == 0) {
      for (int64_t j = 0; j < padded(c.keys, kKeys); ++j) used[j] = static_cast<int32_t>(least(j, c.keys - 1));
      return c.keys;
    }
    float largest[kChunkKeys + kLanes];
    for (int64_t j = 0; j < c.keys; j += kLanes) put(largest + j, all(kNever));
    for (int64_t row = 0; row < c.mask_rows; ++row) {
      const int64_t start = row / c.queries * c.mask_head_stride + row % c.queries * c.mask_stride;
      float* to = mask + row * kChunkKeys;
      if (c.bool_mask) {
        const uint8_t* bytes = static_cast<const uint8_t*>(c.mask) + start;
        for (int64_t j = 0; j < c.keys; ++j) to[j] = bytes[j * c.mask_key_stride] ? 0 : kNever;
      } else if (c.mask_key_stride == 1) {
        for (int64_t j = 0; j < c.keys; j += kLanes) {
          put(to + j, Simd::load(c.mask, start + j, c.mask_dtype, c.keys - j));
        }
      } else {
        for (int64_t j = 0; j < c.keys; ++j) to[j] = load(c.mask, start + j * c.mask_key_stride, c.mask_dtype);
      }
      for (int64_t j = 0; j < c.keys; j += kLanes) {
        const Floats values = at(to + j), counted = values < c.lowest ? all(kNever) : values;
        put(to + j, counted);
        put(largest + j, counted != kNever ? all(0) : at(largest + j));
      }
    }
    int64_t count = 0;
    for (int64_t j = 0; j < c.keys; ++j) {
      used[count] = static_cast<int32_t>(j);
      count += largest[j] == 0;
    }
    for (int64_t i = count; i < padded(count, kKeys); ++i) used[i] = used[count - 1];
    for (int64_t row = 0; count < c.keys && row < c.mask_rows; ++row) {
      float* values = mask + row * kChunkKeys;
      for (int64_t i = 0; i < count; ++i) values[i] = values[used[i]];
    }
    return count;
  }

  // Calls run<rows>(row) for blocks of up to kRowBlock rows.
  template <typename Run>
  static void for_blocks(int64_t rows, const Run& run) {
    static_assert(kRowBlock == 4);
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) run.template operator()<4>(row);
    if (rows - row == 3) run.template operator()<3>(row);
    if (rows - row == 2) run.template operator()<2>(row);
    if (rows - row == 1) run.template operator()<1>(row);
  }

  // `kWhole`: heads are a multiple of kLanes.
  template <DType kDType, bool kWhole>
  static void multiply(const AttentionChunk& c, const float* q, const int32_t* used, int64_t count, float* scores) {
    const int64_t width = padded(c.size, kLanes);
    for_blocks(c.rows, [&]<int kRows>(int64_t row) {
      for (int64_t i = 0; i < count; i += kKeys) {
        Floats sums[kRows][kKeys] = {};
        for (int64_t d = 0; d < c.size; d += kLanes) {
          Floats key[kKeys];
#pragma GCC unroll 4
          for (int j = 0; j < kKeys; ++j) {
            key[j] = Simd::load(c.k, used[i + j] * c.k_stride + d, kDType, kWhole ? kLanes : c.size - d);
          }
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const Floats query = at(q + (row + r) * width + d);
#pragma GCC unroll 4
            for (int j = 0; j < kKeys; ++j) sums[r][j] = Simd::fma(query, key[j], sums[r][j]);
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) Simd::add_up(sums[r], scores + (row + r) * kChunkKeys + i);
      }
    });
  }

  // Columns d to d + kVectors * kLanes of the sums of values.
  template <DType kDType, bool kWhole, int kRows, int kVectors>
  static void add_columns(const AttentionChunk& c, const float* weights, const int32_t* used, int64_t count,
                          int64_t row, int64_t d) {
    Floats sums[kRows][kVectors] = {};
    for (int64_t i = 0; i < count; ++i) {
      Floats value[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        const int64_t column = d + j * kLanes;
        value[j] = Simd::load(c.v, used[i] * c.v_stride + column, kDType, kWhole ? kLanes : c.value_size - column);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Floats weight = all(weights[(row + r) * kChunkKeys + i]);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sums[r][j] = Simd::fma(weight, value[j], sums[r][j]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < kVectors; ++j) {
        float* to = c.values + (row + r) * c.value_size + d + j * kLanes;
        if (kWhole) {
          put(to, sums[r][j]);
        } else {
          for (int64_t i = 0; i < kLanes && d + j * kLanes + i < c.value_size; ++i) to[i] = sums[r][j][i];
        }
      }
    }
  }

  template <DType kDType, bool kWhole>
  static void add_values(const AttentionChunk& c, const float* weights, const int32_t* used, int64_t count) {
    for_blocks(c.rows, [&]<int kRows>(int64_t row) {
      int64_t d = 0;
      for (; d + 4 * kLanes <= c.value_size; d += 4 * kLanes) {
        add_columns<kDType, kWhole, kRows, 4>(c, weights, used, count, row, d);
      }
      for (; d < c.value_size; d += kLanes) {
        add_columns<kDType, kWhole, kRows, 1>(c, weights, used, count, row, d);
      }
    });
  }

  // Scores to exponentials, in place. `added` is the mask of the row, or null.
  static void exponentials(const AttentionChunk& c, const float* added, int64_t count, int64_t row, float* scores) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats score = at(scores + i) * c.scale, mask = added == nullptr ? Floats{} : at(added + i);
      put(scores + i, mask == kNever ? all(kNever) : score + mask);
    }
    for (int64_t i = count; i < padded(count, kLanes); ++i) scores[i] = kNever;
    Floats most = all(kNever);
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats score = at(scores + i);
      most = score > most ? score : most;
    }
    float largest = kNever;
    for (int lane = 0; lane < kLanes; ++lane) largest = most[lane] > largest ? most[lane] : largest;
    Floats total = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats score = at(scores + i), below = score - largest;  // NaN stays NaN
      const Floats e = Simd::exponential(below < -100 ? all(-100) : below);
      const Floats weight = score == kNever ? Floats{} : e;
      put(scores + i, weight);
      total += weight;
    }
    c.largest[row] = largest, c.sums[row] = Simd::sum(total);
  }

  template <DType kDType>
  static void run(const AttentionChunk& c) {
    const int64_t width = padded(c.size, kLanes);
    float *q = c.memory, *weights = q + c.rows * width, *mask = weights + c.rows * kChunkKeys;
    int32_t used[kChunkKeys + kKeys];
    const int64_t count = read_mask(c, mask, used);
    if (count == 0) {
      for (int64_t row = 0; row < c.rows; ++row) c.largest[row] = kNever, c.sums[row] = 0;
      std::memset(c.values, 0, static_cast<size_t>(c.rows * c.value_size) * sizeof(float));
      return;
    }
    for (int64_t row = 0; row < c.rows; ++row) {
      const int64_t start = row / c.queries * c.q_head_stride + row % c.queries * c.q_stride;
      for (int64_t d = 0; d < c.size; d += kLanes) {
        put(q + row * width + d, Simd::load(c.q, start + d, kDType, c.size - d));
      }
    }
    const bool whole = c.size % kLanes == 0 && c.value_size % kLanes == 0;
    whole ? multiply<kDType, true>(c, q, used, count, weights) : multiply<kDType, false>(c, q, used, count, weights);
    for (int64_t row = 0; row < c.rows; ++row) {
      const float* added = c.mask_rows == 0 ? nullptr : mask + row % c.mask_rows * kChunkKeys;
      exponentials(c, added, count, row, weights + row * kChunkKeys);
    }
    whole ? add_values<kDType, true>(c, weights, used, count) : add_values<kDType, false>(c, weights, used, count);
  }

  static void chunk(const AttentionChunk& c) {
    if (c.dtype == DType::kBFloat16) return run<DType::kBFloat16>(c);
    if (c.dtype == DType::kFloat16) return run<DType::kFloat16>(c);
    run<DType::kFloat32>(c);
  }
};

}  // namespace
}  // namespace qao::cpu
