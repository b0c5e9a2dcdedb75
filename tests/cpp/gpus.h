// What the plan tests share: the GPUs they plan for.
#pragma once

#include "common/integers.h"
#include "qao/types.h"

namespace qao {

// Compute capability, SMs, opt-in shared memory per CTA.
constexpr Gpu kA100{80, 108, 166912}, kH200{90, 132, 232448}, kB200{100, 148, 232448};
constexpr Gpu kGpus[] = {
    kA100,
    {86, 84, 101376},   // RTX 3090, A40
    {89, 142, 101376},  // L40S
    kH200,              // H100 too
    kB200,
    {120, 170, 101376},  // RTX 5090
};

}  // namespace qao
