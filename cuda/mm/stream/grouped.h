// Grouped products on ring.cuh as launch.cu sees them.
#pragma once

#include "mm/int4_params.h"
#include "mm/routing.h"
#include "mm/stream/ring.h"

namespace qao::mm::stream {

using GroupedTile = RingTile<1, 4, 12, 1>;
constexpr RingConfig kGrouped = ring_config<GroupedTile>(4);

// `groups` of a K-step.
using GroupedKernel = void (*)(Int4Params, RingParams, Routing);
GroupedKernel grouped_kernel(int groups, bool has_zeros, DType scale_dtype);
GroupedKernel fp4_grouped_kernel(int groups);

// How a CTA cuts its part of an expert, `blocks` of them sharing its row tiles. False if that takes more than `room`
// bytes.
inline bool grouped_params(const Problem& problem, int blocks, int room, RingParams* to, int* shared_bytes) {
  Problem of_expert = problem;
  of_expert.m = kGrouped.tokens;
  return ring_params(of_expert, kGrouped, 1, blocks, room, to, shared_bytes);
}

// Of shared memory that the kernel names itself, the rows of x: as long as what the rest is aligned to.
constexpr int kGroupedStaticBytes = 1024;

}  // namespace qao::mm::stream
