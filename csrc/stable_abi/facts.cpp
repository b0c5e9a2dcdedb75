// Facts of the build and of the CPU for python/qao/ops/library.py: a line "name<tab>value" each.
#include <string>

#include "cpu/features.h"

#define QAO_EXPORT extern "C" __attribute__((visibility("default")))

QAO_EXPORT const char* qao_build_info() {
  return "version\t" QAO_VERSION "\ncuda\t" QAO_CUDA_VERSION  // of the toolkit; empty: built without CUDA kernels
         "\narchs\t" QAO_CUDA_ARCHS "\ncompiler\t" QAO_COMPILER "\ntorch\t" QAO_TORCH_VERSION
         "\ntorch_target\t" QAO_TORCH_TARGET;
}

QAO_EXPORT const char* qao_cpu_features() {
  static const std::string facts = [] {
    using namespace qao::cpu;
    Features selected;
    const qao::Status status = selected_features(&selected);
    return std::string("detected\t") + highest_level(detected_features()).name + "\nfeatures\t" +
           names_of(detected_features()) + "\nselected\t" + (status.ok() ? highest_level(selected).name : "") +
           "\nerror\t" + (status.ok() ? "" : status.message());
  }();
  return facts.c_str();
}
