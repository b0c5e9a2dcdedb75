#include "cpu/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>

namespace qao::cpu {
namespace {

constexpr Isa kAll[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx};

// Linux grants the 8 KB of tile state per process, on request.
bool os_permits_tiles() {
  constexpr int kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
}

bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool bf16 = d & (1u << 22), tile = d & (1u << 24), int8 = d & (1u << 25);
  return bf16 && tile && int8 && os_permits_tiles();
}

Isa detect() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) {
    return Isa::kScalar;
  }
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512vbmi")) {
    return Isa::kAvx2;
  }
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512;
  return has_amx() ? Isa::kAmx : Isa::kAvx512Bf16;
}

struct Selection {
  Isa isa = Isa::kScalar;
  Status status;
};

Selection select() {
  Selection selection;
  selection.isa = detected_isa();
  const char* wanted = std::getenv("QAO_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return selection;
  std::string names;
  for (Isa isa : kAll) {
    names += std::string(names.empty() ? "" : ", ") + name_of(isa);
    if (std::string(wanted) == name_of(isa)) {
      if (isa > selection.isa) {
        selection.status =
            Status::error(std::string("QAO_CPU_ISA=") + wanted + ", but this CPU offers only " + name_of(selection.isa),
                          "Unset QAO_CPU_ISA or name a lower level");
      }
      selection.isa = isa;
      return selection;
    }
  }
  selection.status = Status::error(std::string("QAO_CPU_ISA=") + wanted + " is not one of " + names,
                                   "Unset QAO_CPU_ISA or name one of them");
  return selection;
}

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    case Isa::kAmx:
      return "amx";
  }
  return "?";
}

Isa detected_isa() {
  static const Isa isa = detect();
  return isa;
}

Status selected_isa(Isa* isa) {
  static const Selection selection = select();
  *isa = selection.isa;
  return selection.status;
}

}  // namespace qao::cpu
