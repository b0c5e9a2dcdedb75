// Parts of a softmax over keys, and the clusters of CTAs that share the keys.
#pragma once

#include <cmath>
#include <cstdint>

namespace qao::attention {

constexpr int kMostSplits = 8;  // CTAs that share the keys of a head: the portable cluster size

// The largest score of some keys, and the sum of e^(score - largest).
struct __align__(8) Part {
  float largest, sum;
};

// exp(score - largest), where `largest` may be of no key.
__device__ __forceinline__ float weight_of(float score, float largest) {
  return __expf(score - (largest == -INFINITY ? 0.0f : largest));
}

// Sums `count` parts in their order, each with four values. Those of a part without a key are not read.
template <int kMost, typename PartOf, typename ValuesOf>
__device__ __forceinline__ Part combine(int count, const PartOf& part_of, const ValuesOf& values_of, float4& values) {
  Part all{-INFINITY, 0};
  values = {0, 0, 0, 0};
  Part parts[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    parts[i] = i < count ? part_of(i) : Part{-INFINITY, 0};
    all.largest = fmaxf(all.largest, parts[i].largest);
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    if (parts[i].sum == 0) continue;
    const float weight = weight_of(parts[i].largest, all.largest);
    const float4 own = values_of(i);
    all.sum += weight * parts[i].sum;
    values.x += weight * own.x, values.y += weight * own.y, values.z += weight * own.z, values.w += weight * own.w;
  }
  return all;
}

// CTAs of a cluster, as log2: as many as have a tile for each warp, while the GPU runs all clusters at once. A GPC has
// SMs left that fill no cluster: 16 clusters of 8 took two waves on the 132 SMs of an H200. `at_once`: keys of the
// tiles of a CTA's warps.
inline int log2_splits(int64_t at_once, int64_t keys, int64_t blocks, int num_sms) {
  int result = 0;
  while ((1 << result) < kMostSplits && at_once << result < keys &&
         blocks << (result + 1) <= num_sms - 4 * ((2 << result) - 1)) {
    ++result;
  }
  return result;
}

// Rows that each CTA of a cluster sums, of those that it stores: row r belongs to CTA r % splits.
__host__ __device__ constexpr int owned_rows(int stored_rows, int log2_splits) {
  return (stored_rows + (1 << log2_splits) - 1) >> log2_splits;
}

}  // namespace qao::attention
