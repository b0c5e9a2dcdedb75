// Registration of all operators.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <cstdio>

#include "stable_abi/operators.h"

namespace {

using torch::stable::detail::StableLibrary;
using torch::stable::detail::StableTorchLibraryInit;

const qao::Operators kTables[] = {
    qao::mm_operators(),
    qao::merged_mm_operators(),
    qao::scaled_mm_operators(),
    qao::token_attention_operators(),
    qao::norm_mm_operators(),
    qao::expert_operators(),
    qao::quantize_operators(),
    qao::quantize_weight_operators(),
    qao::quantize_weight_in_place_operators(),
    qao::gptq_operators(),
    qao::int4_pack_operators(),
    qao::embedding_operators(),
    qao::attention_operators(),
    qao::gguf_operators(),
};

void define(StableLibrary& library) {
  for (const qao::Operators table : kTables) {
    for (const qao::Operator& op : table) library.def(op.schema);
  }
}

// One function per operator for all devices, selected by its tensors.
void implement(StableLibrary& library) {
  for (const qao::Operators table : kTables) {
    for (const qao::Operator& op : table) library.impl(op.name, op.call);
  }
}

// A namespace can be defined once per process. If another copy of qao has defined it, this copy stays unused; torch's
// macros would ignore the error and crash the process.
bool register_once() {
  constexpr const char* file =
      "csrc/stable_abi/library.cpp";  // appears in torch's messages; keeps build paths out of them
  TorchLibraryHandle trial = nullptr;
  if (aoti_torch_library_init_def("qao", file, __LINE__, &trial) != AOTI_TORCH_SUCCESS) {
    Dl_info self{};
    dladdr(reinterpret_cast<const void*>(&implement), &self);
    std::fprintf(stderr, "qao: %s stays unused: this process has the operators of another copy of qao\n",
                 self.dli_fname);
    return false;
  }
  aoti_torch_delete_library_object(trial);
  new StableTorchLibraryInit(StableLibrary::Kind::DEF, define, "qao", nullptr, file, __LINE__);
  // Also registered for sparse and quantized tensors, since the operators' checks reject them with clearer errors than
  // torch. Not for MKL-DNN tensors: their data pointer refers to blocks, which the operators could not detect.
  for (const char* key :
       {"CPU", "CUDA", "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA", "QuantizedCPU", "QuantizedCUDA"}) {
    // Leaked on purpose: other threads may be in an operator at process exit.
    new StableTorchLibraryInit(StableLibrary::Kind::IMPL, implement, "qao", key, file, __LINE__);
  }
  return true;
}

const bool registered = register_once();

}  // namespace

// For python/qao/ops/library.py: 1 if this copy of the library registered the operators of this process.
extern "C" __attribute__((visibility("default"))) int qao_is_registered() { return registered; }
