// What the plan tests share: the GPUs they plan for.
#pragma once

#include "common/integers.h"
#include "qao/types.h"

namespace qao {

// Compute capability, SMs, opt-in shared memory per CTA.
constexpr Gpu kGpus[] = {
    {80, 108, 166912},  // A100
    {86, 84, 101376},   // RTX 3090, A40
    {89, 142, 101376},  // L40S
    {90, 132, 232448},  // H100, H200
    {100, 148, 232448}, {120, 170, 101376},
};

}  // namespace qao
