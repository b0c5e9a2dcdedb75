// What cpuid and the OS say.
#pragma once

#include "cpu/features.h"

namespace qao::cpu {

Features detect_features();

}  // namespace qao::cpu
