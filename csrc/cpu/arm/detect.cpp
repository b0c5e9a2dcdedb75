// CPU features reported by the Linux kernel.
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include "cpu/features.h"

namespace qao::cpu {

Features detect_features() {
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  Features features = kScalar;
  if (first & HWCAP_ASIMD) features |= kHasAsimd;
  if (first & HWCAP_ASIMDDP) features |= kHasAsimdDp;
  if (second & HWCAP2_I8MM) features |= kHasI8mm;
  if (second & HWCAP2_BF16) features |= kHasBf16;
  return features;
}

}  // namespace qao::cpu
