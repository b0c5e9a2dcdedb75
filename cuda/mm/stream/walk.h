// How groups fall on the K-steps of the streaming bodies: one definition for their cuts.
#pragma once

#include <algorithm>

#include "common/integers.h"
#include "int4/layout.h"
#include "mm/stream/tile.h"
#include "qao/mm.h"

namespace qao::mm::stream {

struct StepGroups {
  int bytes;           // of parameters of a group and row tile
  int of_step, shift;  // K-step s begins with group s * of_step >> shift
  int advance;         // bytes of parameters from a K-step to that `warps` later
};

inline StepGroups step_groups(const Problem& problem, int warps) {
  StepGroups groups{(problem.has_zeros ? 2 : 1) * kTileN * size_of(problem.scale_dtype), 1, 30, 0};
  if (problem.group_size >= problem.k) return groups;  // one for all steps
  groups.of_step = std::max(kStepColumns / static_cast<int>(problem.group_size), 1);
  groups.shift = log2_of(problem.group_size / kStepColumns);
  groups.advance = (warps * groups.of_step >> groups.shift) * groups.bytes;
  return groups;
}

}  // namespace qao::mm::stream
