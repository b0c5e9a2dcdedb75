// Names and levels of CPU features, and the choice by QAO_CPU_ISA.
#include "cpu/features.h"

#include <cstdlib>

namespace qao::cpu {
namespace {

constexpr Level kLevels[] = {
#if defined(__aarch64__)
    {"scalar", kScalar},      {"neon", kNeon},          {"neon_dotprod", kNeonDotprod},
    {"neon_i8mm", kNeonI8mm}, {"neon_bf16", kNeonBf16},
#else
    {"scalar", kScalar},          {"avx2", kAvx2}, {"avx_vnni", kAvxVnni}, {"avx512", kAvx512},
    {"avx512_bf16", kAvx512Bf16}, {"amx", kAmx},
#endif
};

constexpr struct {
  Feature feature;
  const char* name;
} kNames[] = {
    {kHasAvx2, "avx2"},
    {kHasFma, "fma"},
    {kHasF16c, "f16c"},
    {kHasAvxVnni, "avx_vnni"},
    {kHasAvx512F, "avx512f"},
    {kHasAvx512Bw, "avx512bw"},
    {kHasAvx512Dq, "avx512dq"},
    {kHasAvx512Vl, "avx512vl"},
    {kHasAvx512Vbmi, "avx512vbmi"},
    {kHasAvx512Vnni, "avx512_vnni"},
    {kHasAvx512Bf16, "avx512_bf16"},
    {kHasAmxTile, "amx_tile"},
    {kHasAmxInt8, "amx_int8"},
    {kHasAmxBf16, "amx_bf16"},
    {kHasAsimd, "asimd"},
    {kHasAsimdDp, "asimddp"},
    {kHasI8mm, "i8mm"},
    {kHasBf16, "bf16"},
};

struct Selection {
  Features features = kScalar;
  Status status;
};

Selection select() {
  const Features offer = detected_features();
  const char* wanted = std::getenv("QAO_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return {offer, {}};
  std::string names;
  for (const Level& level : kLevels) {
    if (std::string(wanted) == level.name) {
      if (includes(offer, level.features)) return {level.features, {}};
      return {level.features,
              Status::error(std::string("QAO_CPU_ISA=") + wanted + ", but this CPU offers only " +
                                highest_level(offer).name + "; it lacks " + names_of(level.features & ~offer),
                            "Unset QAO_CPU_ISA or name a lower level")};
    }
    names += std::string(names.empty() ? "" : ", ") + level.name;
  }
  return {offer, Status::error(std::string("QAO_CPU_ISA=") + wanted + " is not one of " + names,
                               "Unset QAO_CPU_ISA or name one of them")};
}

}  // namespace

std::span<const Level> levels() { return kLevels; }

const Level& highest_level(Features offer) {
  const Level* highest = kLevels;
  for (const Level& level : kLevels) {
    if (includes(offer, level.features)) highest = &level;
  }
  return *highest;
}

std::string names_of(Features features) {
  std::string names;
  for (const auto& [feature, name] : kNames) {
    if (features & feature) names += std::string(names.empty() ? "" : " ") + name;
  }
  return names;
}

Features detected_features() {
  static const Features features = detect_features();
  return features;
}

Status selected_features(Features* features) {
  static const Selection selection = select();
  *features = selection.features;
  return selection.status;
}

}  // namespace qao::cpu
