// Rows of a CTA, and their mask: which keys count, and what it adds to the scores.
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "qao/attention.h"

namespace qao::attention {

// What a mask element of these bits adds to a score.
__device__ __forceinline__ float mask_value(Mask mask, DType dtype, uint32_t bits) {
  if (mask == Mask::kBool) return bits != 0 ? 0 : -INFINITY;
  if (dtype == DType::kFloat32) return __uint_as_float(bits);
  if (dtype == DType::kBFloat16) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ float load_mask_value(const void* data, Mask mask, DType dtype, int64_t at) {
  if (mask == Mask::kBool) return mask_value(mask, dtype, static_cast<const uint8_t*>(data)[at]);
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
  return mask_value(mask, dtype, static_cast<const uint16_t*>(data)[at]);
}

// The largest value of a float mask that excludes a key.
inline float largest_excluding(Mask mask, DType dtype) {
  return std::nextafter(lowest_mask(mask, dtype), -std::numeric_limits<float>::infinity());
}

constexpr int kRows = 16;  // most rows of a CTA: those of an mma.sync tile

struct Params {
  Arguments arguments;
  int kv_heads, heads, queries, keys, size, value_size;
  int group;                // query heads that share a key-value head
  int rows, row_blocks;     // group * queries, and the CTAs that they need
  int splits, log2_splits;  // CTAs of a cluster, which share the keys
  Mask mask;
  DType mask_dtype;
  float scale;
  float excluding;  // the largest value of a float mask that excludes a key
};

// The rows of a CTA: first_row to first_row + rows - 1. Row r of a key-value head is query r % queries of head
// r / queries of the group.
struct Block {
  int64_t batch;
  int kv_head, first_row, rows, rank;

  __device__ __forceinline__ int head(const Params& s, int row) const {
    return kv_head * s.group + (first_row + row) / s.queries;
  }
  __device__ __forceinline__ int query(const Params& s, int row) const { return (first_row + row) % s.queries; }
  __device__ __forceinline__ int64_t mask_offset(const Params& s, int row) const {
    const int64_t* strides = s.arguments.mask_strides;
    return batch * strides[0] + head(s, row) * strides[1] + query(s, row) * strides[2];
  }
};

// Keys begin to end - 1 contain all that any row of the CTA counts.
struct Range {
  int begin, end;
  float excluding;
};

// Bits of mask elements; 0 unless `wanted`.
template <int count>
__device__ __forceinline__ void load_mask(const Params& s, const int64_t (&at)[count], const bool (&wanted)[count],
                                          uint32_t (&bits)[count]) {
  const auto load = [&](const auto* mask) {
#pragma unroll
    for (int i = 0; i < count; ++i) bits[i] = wanted[i] ? mask[at[i]] : 0;
  };
  if (s.mask == Mask::kBool) {
    load(static_cast<const uint8_t*>(s.arguments.mask));
  } else if (s.mask_dtype == DType::kFloat32) {
    load(static_cast<const uint32_t*>(s.arguments.mask));
  } else {
    load(static_cast<const uint16_t*>(s.arguments.mask));
  }
}

__device__ __forceinline__ float mask_value(const Params& s, uint32_t bits) {
  return mask_value(s.mask, s.mask_dtype, bits);
}

// The mask of rows g and g + 8 of a CTA, for the lanes that hold scores of them.
struct MaskRows {
  const Params& s;
  const Range& range;
  const int t;
  int64_t start[2];
  bool exists[2];

  __device__ __forceinline__ MaskRows(const Params& params, const Block& block, const Range& keys, int g, int lane_of_4)
      : s(params), range(keys), t(lane_of_4) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      exists[h] = g + 8 * h < block.rows;
      start[h] = s.mask == Mask::kNone ? 0 : block.mask_offset(s, g + 8 * h);
    }
  }

  __device__ __forceinline__ int key_of(int first, int i) const { return first + 8 * (i / 2) + 2 * t + i % 2; }

  // Bits of the four keys of this lane in the tile from key `first`, for both rows.
  __device__ __forceinline__ void load(int first, uint32_t (&bits)[8]) const {
    if (s.mask == Mask::kNone) return;
    int64_t at[8];
    bool wanted[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = key_of(first, i % 4);
      at[i] = start[i / 4] + key * s.arguments.mask_strides[3];
      wanted[i] = exists[i / 4] && key < range.end;
    }
    load_mask(s, at, wanted, bits);
  }

  // Scales the scores and adds the mask. Returns a bit for each of this lane's keys: whether its v may be used. Without
  // a mask those past the end have zeros.
  __device__ __forceinline__ unsigned apply(int first, const uint32_t (&bits)[8], float (&scores)[2][4]) const {
    unsigned used = 15;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool inside = key_of(first, i) < range.end;
      bool counts = false;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& score = scores[i / 2][2 * h + i % 2];
        if (s.mask == Mask::kNone) {
          score = inside ? score * s.scale : -INFINITY;
          continue;
        }
        const float added = mask_value(s, bits[4 * h + i]);
        const bool own = inside && exists[h] && !(added <= range.excluding);
        score = own ? score * s.scale + added : -INFINITY;
        counts |= own;
      }
      if (s.mask == Mask::kNone) continue;
      const unsigned of_rows = __ballot_sync(~0u, counts) >> t & 0x11111111;  // the lanes of the same keys
      if (of_rows == 0) used &= ~(1u << i);
    }
    return used;
  }
};

struct RangeParts {
  int begin, end;
  unsigned rows;  // a bit for each that has a key
};

// The range of the keys that count, found by all threads of the CTA. `parts` is in shared memory.
template <int kWarps>
__device__ __forceinline__ RangeParts scan_mask(const Params& s, const Block& block, int mask_rows, float excluding,
                                                RangeParts (&parts)[kWarps]) {
  constexpr int kThreads = kWarps * 32, kAtOnce = 8;
  const int thread = static_cast<int>(threadIdx.x);
  RangeParts found{s.keys, 0, 0};
  for (int row = 0; row < mask_rows; ++row) {
    const int64_t start = block.mask_offset(s, row);
    for (int first = thread; first < s.keys; first += kThreads * kAtOnce) {
      int64_t at[kAtOnce];
      bool wanted[kAtOnce];
      uint32_t bits[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int key = first + i * kThreads;
        at[i] = start + key * s.arguments.mask_strides[3], wanted[i] = key < s.keys;
      }
      load_mask(s, at, wanted, bits);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!wanted[i] || mask_value(s, bits[i]) <= excluding) continue;
        found.begin = min(found.begin, first + i * kThreads), found.end = max(found.end, first + i * kThreads + 1);
        found.rows |= 1u << row;
      }
    }
  }
  found = {__reduce_min_sync(~0u, found.begin), __reduce_max_sync(~0u, found.end), __reduce_or_sync(~0u, found.rows)};
  __syncthreads();  // `parts` of a previous scan were read
  if (thread % 32 == 0) parts[thread / 32] = found;
  __syncthreads();
#pragma unroll
  for (const RangeParts& part : parts) {
    found.begin = min(found.begin, part.begin), found.end = max(found.end, part.end), found.rows |= part.rows;
  }
  return found;
}

template <int kWarps>
__device__ __forceinline__ Range range_of(const Params& s, const Block& block, RangeParts (&parts)[kWarps]) {
  if (s.mask == Mask::kNone) return {0, s.keys, -INFINITY};
  const int64_t* strides = s.arguments.mask_strides;
  const int distinct = strides[1] != 0 ? block.rows : strides[2] != 0 ? min(block.rows, s.queries) : 1;
  float excluding = s.excluding;
  RangeParts found = scan_mask(s, block, distinct, excluding, parts);
  // Softmax of a row with all keys masked by finite values depends on these values alone.
  if (s.mask == Mask::kFloat && found.rows != (1u << distinct) - 1) {
    excluding = -INFINITY;
    found = scan_mask(s, block, distinct, excluding, parts);
  }
  return {found.begin, found.end, excluding};  // without a key, begin is beyond the end
}

}  // namespace qao::attention
