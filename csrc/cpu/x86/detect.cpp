// CPU features reported by cpuid and the OS.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/features.h"

namespace qao::cpu {
namespace {

// Linux grants the 8 KB of tile state per process, on request.
bool os_permits_tiles() {
  constexpr int kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

}  // namespace

Features detect_features() {
  Features features = kScalar;
  const auto add = [&](bool offered, Feature feature) {
    if (offered) features |= feature;
  };
  // The compiler's builtins also check that the OS saves the registers; cpuid alone does not.
  __builtin_cpu_init();
  add(__builtin_cpu_supports("avx2"), kHasAvx2);
  add(__builtin_cpu_supports("fma"), kHasFma);
  add(__builtin_cpu_supports("f16c"), kHasF16c);
  add(__builtin_cpu_supports("avx512f"), kHasAvx512F);
  add(__builtin_cpu_supports("avx512bw"), kHasAvx512Bw);
  add(__builtin_cpu_supports("avx512dq"), kHasAvx512Dq);
  add(__builtin_cpu_supports("avx512vl"), kHasAvx512Vl);
  add(__builtin_cpu_supports("avx512vbmi"), kHasAvx512Vbmi);
  add(__builtin_cpu_supports("avx512vnni"), kHasAvx512Vnni);
  add(__builtin_cpu_supports("avx512bf16"), kHasAvx512Bf16);
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) add(a >> 4 & 1 && includes(features, kHasAvx2), kHasAvxVnni);
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && os_permits_tiles()) {
    features |= kHasAmxTile;
    add(d >> 25 & 1, kHasAmxInt8);
    add(d >> 22 & 1, kHasAmxBf16);
  }
  return features;
}

}  // namespace qao::cpu
