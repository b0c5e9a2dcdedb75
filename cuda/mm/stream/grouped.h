// Grouped products on ring.cuh as launch.cu sees them.
#pragma once

#include "mm/int4_params.h"
#include "mm/launch.h"
#include "mm/routing.h"
#include "mm/stream/ring.h"
#include "qao/quantize.h"

namespace qao::mm::stream {

struct GroupedTile : RingTile<1, 4, 12, 1> {
  static constexpr bool kGates = true;
};
constexpr RingConfig kGrouped = ring_config<GroupedTile>(4);

// Of a gated problem; in others any.
using quantize::Gate;

// `groups` of a K-step.
using GroupedKernel = void (*)(Int4Params, RingParams, Routing, Gate);
GroupedKernel grouped_kernel(int groups, bool has_zeros, DType scale_dtype);
GroupedKernel fp4_grouped_kernel(int groups);

// How a CTA cuts its part of an expert, `blocks` of them sharing its row tiles. False if that takes more than `room`
// bytes.
inline bool grouped_params(const Problem& problem, int blocks, int room, RingParams* to, int* shared_bytes) {
  Problem of_expert = problem;
  of_expert.m = kGrouped.tokens;
  return ring_params(of_expert, kGrouped, 1, blocks, room, to, shared_bytes);
}

// As the kernel computes it: SiLU(g) * u keeps a u of -0.
inline Gate for_kernel(Gate gate) {
  if (gate.is_silu_mul()) gate.shift = -0.0f;
  return gate;
}

// Where a gate's up lies, in a cut of a gated problem.
inline void set_halves(const Problem& problem, const Gate& gate, RingParams* cut) {
  if (!problem.gated || gate.interleaved) return;
  cut->halves = 1;
  cut->half_tiles = static_cast<int>(tiles_n(problem.n) / 2);
  cut->to_second = cut->half_tiles * cut->row_tile_bytes;
  cut->to_third = cut->row_tile_bytes - cut->to_second;
}

// Carries out a plan of a gated problem, or of another.
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts, const X& x,
              const Gate& gate, void* stream);

// Of shared memory that the kernel names itself, the rows of x: as long as what the rest is aligned to.
constexpr int kGroupedStaticBytes = 1024;

}  // namespace qao::mm::stream
