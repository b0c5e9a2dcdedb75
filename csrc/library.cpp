// Registration of all operators.
//
// GEMM operators are tables in mm.cpp and scaled_mm.cpp; docs/ops.md documents arguments.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <cstdio>
#include <string>

#include "named.h"
#include "ops.h"

namespace {

using torch::stable::detail::StableLibrary;
using torch::stable::detail::StableTorchLibraryInit;

constexpr const char* kRotation = ", int x_rotation=0";

// Schema of a grouped GEMM: weights of experts and routing, then `rest`; `last` follows near the end.
void define_grouped(StableLibrary& m, const std::string& name, const std::string& rest, const char* last = "") {
  m.def((name +
         "(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor offsets, Tensor? row_index, Tensor? row_scale" +
         (rest.empty() ? "" : ", ") + rest + ", bool batch_invariant=False" + last + ", float[]? gate=None) -> Tensor")
            .c_str());
}

void define(StableLibrary& m) {
  for (const auto& table : {qao::products(), qao::scaled_products()}) {
    for (const qao::Operator& product : table) m.def(product.schema);
  }
  m.def(
      "add_rms_norm_int4_mm(Tensor x, Tensor? residual, Tensor? norm_weight, float eps, Tensor weight, Tensor scales, "
      "Tensor? bias, int out_features, int in_features, int group_size, bool gated) -> (Tensor, Tensor)");
  define_grouped(m, "int4_grouped_mm", "int out_features, int in_features, int group_size");
  define_grouped(m, "fp4_grouped_mm", "int out_features, int in_features, int group_size");
  define_grouped(m, "int8_grouped_mm", "");
  define_grouped(m, "fp8_grouped_mm", "");
  define_grouped(m, "int8_int8_grouped_mm", "Tensor? weight_sums", kRotation);
  define_grouped(m, "int8_int4_grouped_mm",
                 "Tensor? weight_sums, int out_features, int in_features, int group_size, Tensor? row_scales=None",
                 kRotation);
  define_grouped(m, "fp8_fp8_grouped_mm", "Tensor? x_scale, int x_group_size, bool fast_accum");
  define_grouped(m, "fp8_int4_grouped_mm", "int out_features, int in_features, int group_size, Tensor? row_scales=None",
                 ", bool fast_accum=False");
  m.def("expert_sort(Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor)");
  m.def(
      "expert_topk(Tensor logits, int top_k, bool sigmoid, Tensor? bias, bool normalized, float factor, int groups=1, "
      "int top_groups=1) -> (Tensor, Tensor)");
  m.def("expert_sum(Tensor rows, Tensor places, Tensor weights) -> Tensor");
  m.def("int8_quantize(Tensor x, bool symmetric, int rotation=0) -> (Tensor, Tensor, Tensor)");
  m.def("hadamard(Tensor x, int size) -> Tensor");
  m.def("fp8_quantize(Tensor x, int group_size, Tensor? scale) -> (Tensor, Tensor)");
  m.def("add_rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps) -> (Tensor, Tensor)");
  m.def("silu_mul(Tensor gate, Tensor up) -> Tensor");
  m.def("rms_norm_quantize(Tensor x, Tensor? weight, float eps, ScalarType dtype) -> (Tensor, Tensor)");
  m.def(
      "add_rms_norm_quantize(Tensor x, Tensor? residual, Tensor? weight, float eps, ScalarType dtype) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("silu_mul_quantize(Tensor gate, Tensor up, ScalarType dtype) -> (Tensor, Tensor)");
  m.def("swiglu(Tensor x, float alpha, float limit, float shift, bool interleaved) -> Tensor");
  m.def(
      "swiglu_quantize(Tensor x, float alpha, float limit, float shift, bool interleaved, ScalarType dtype) "
      "-> (Tensor, Tensor)");
  m.def(
      "quantize_groups(Tensor weight, int group_size, ScalarType dtype, bool symmetric, ScalarType scale_dtype, "
      "float[] factors, Tensor? importance=None, bool whole_zeros=False, int rounds=0) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def("quantize_blocks(Tensor weight, int rows, int columns) -> (Tensor, Tensor, Tensor)");
  m.def("quantize_fp4(Tensor weight, int group_size) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "quantize_weight_(Tensor weight, ScalarType dtype, int rows, int columns, bool symmetric, bool whole_zeros, "
      "Tensor(a!) q, Tensor(b!) scales, Tensor(c!) fault, Tensor? largest=None) -> ()");
  m.def(
      "load_weight_(Tensor weight, ScalarType dtype, int rows, int columns, bool symmetric, bool whole_zeros, "
      "Tensor(a!) q, Tensor(b!) scales, float limit) -> Tensor");
  m.def("largest_magnitude(Tensor weight) -> Tensor");
  m.def(
      "gptq_columns(Tensor weight, Tensor moved, Tensor scales, Tensor? zeros, Tensor ratios, ScalarType dtype) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("pack_int4(Tensor q, Tensor scales, Tensor? zeros, int group_size) -> (Tensor, Tensor)");
  m.def(
      "unpack_int4(Tensor weight, Tensor scales, int out_features, int in_features, int group_size) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "dequantize_int4(Tensor weight, Tensor scales, int out_features, int in_features, int group_size, "
      "ScalarType dtype) -> Tensor");
  m.def(
      "int4_embedding(Tensor ids, Tensor weight, Tensor scales, int num_embeddings, int embedding_dim, int group_size, "
      "ScalarType dtype) -> Tensor");
  m.def("int8_embedding(Tensor ids, Tensor weight, Tensor scales, ScalarType dtype) -> Tensor");
}

// One implementation per op for all devices, selected by its tensors.
void implement(StableLibrary& m) {
  for (const auto& table : {qao::products(), qao::scaled_products()}) {
    for (const qao::Operator& product : table) m.impl(product.name, product.call);
  }
  qao::implement<"add_rms_norm_int4_mm", &qao::add_rms_norm_int4_mm_op>(m);
  qao::implement<"int4_grouped_mm", &qao::int4_grouped_mm_op>(m);
  qao::implement<"fp4_grouped_mm", &qao::fp4_grouped_mm_op>(m);
  qao::implement<"int8_grouped_mm", &qao::int8_grouped_mm_op>(m);
  qao::implement<"fp8_grouped_mm", &qao::fp8_grouped_mm_op>(m);
  qao::implement<"int8_int8_grouped_mm", &qao::int8_int8_grouped_mm_op>(m);
  qao::implement<"int8_int4_grouped_mm", &qao::int8_int4_grouped_mm_op>(m);
  qao::implement<"fp8_fp8_grouped_mm", &qao::fp8_fp8_grouped_mm_op>(m);
  qao::implement<"fp8_int4_grouped_mm", &qao::fp8_int4_grouped_mm_op>(m);
  qao::implement<"expert_sort", &qao::expert_sort_op>(m);
  qao::implement<"expert_topk", &qao::expert_topk_op>(m);
  qao::implement<"expert_sum", &qao::expert_sum_op>(m);
  qao::implement<"int8_quantize", &qao::int8_quantize_op>(m);
  qao::implement<"hadamard", &qao::hadamard_op>(m);
  qao::implement<"fp8_quantize", &qao::fp8_quantize_op>(m);
  qao::implement<"add_rms_norm", &qao::add_rms_norm_op>(m);
  qao::implement<"silu_mul", &qao::silu_mul_op>(m);
  qao::implement<"rms_norm_quantize", &qao::rms_norm_quantize_op>(m);
  qao::implement<"add_rms_norm_quantize", &qao::add_rms_norm_quantize_op>(m);
  qao::implement<"silu_mul_quantize", &qao::silu_mul_quantize_op>(m);
  qao::implement<"swiglu", &qao::swiglu_op>(m);
  qao::implement<"swiglu_quantize", &qao::swiglu_quantize_op>(m);
  qao::implement<"quantize_groups", &qao::quantize_groups_op>(m);
  qao::implement<"quantize_blocks", &qao::quantize_blocks_op>(m);
  qao::implement<"quantize_fp4", &qao::quantize_fp4_op>(m);
  qao::implement<"quantize_weight_", &qao::quantize_weight_in_place_op>(m);
  qao::implement<"load_weight_", &qao::load_weight_op>(m);
  qao::implement<"largest_magnitude", &qao::largest_magnitude_op>(m);
  qao::implement<"gptq_columns", &qao::gptq_columns_op>(m);
  qao::implement<"pack_int4", &qao::pack_int4_op>(m);
  qao::implement<"unpack_int4", &qao::unpack_int4_op>(m);
  qao::implement<"dequantize_int4", &qao::dequantize_int4_op>(m);
  qao::implement<"int4_embedding", &qao::int4_embedding_op>(m);
  qao::implement<"int8_embedding", &qao::int8_embedding_op>(m);
}

// A namespace can be defined once per process. If another copy of qao has defined it, this copy stays unused; torch's
// macros would ignore the error and crash the process.
bool register_once() {
  constexpr const char* file = "csrc/library.cpp";  // appears in torch's messages; keeps build paths out of them
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

// For python/qao/ops/matmul.py: 1 if this copy of the library registered the operators of this process.
extern "C" __attribute__((visibility("default"))) int qao_is_registered() { return registered; }
