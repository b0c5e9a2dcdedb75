// Every operator of qao: the table of contents. One line an op; docs/ops.md says what each argument means.
#include <torch/csrc/stable/library.h>

#include "ops.h"

STABLE_TORCH_LIBRARY(qao, m) {
  m.def(
      "int4_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int out_features, int in_features, int "
      "group_size) "
      "-> Tensor");
  m.def(
      "add_rms_norm_int4_mm(Tensor x, Tensor? residual, Tensor? norm_weight, float eps, Tensor weight, Tensor scales, "
      "Tensor? bias, int out_features, int in_features, int group_size, bool gated) -> (Tensor, Tensor)");
  m.def("int8_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor");
  m.def("fp8_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias) -> Tensor");
  m.def("int8_int8_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor? weight_sums) -> Tensor");
  m.def(
      "int8_int4_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor? weight_sums, int out_features, "
      "int in_features, int group_size) -> Tensor");
  m.def(
      "fp8_fp8_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor? x_scale, int x_group_size, "
      "bool fast_accum) -> Tensor");
  m.def(
      "fp8_int4_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int out_features, int in_features, "
      "int group_size) -> Tensor");
  m.def(
      "int8_scaled_mm(Tensor x, Tensor x_scales, Tensor? x_zeros, Tensor weight, Tensor scales, Tensor? bias, "
      "Tensor? weight_sums, ScalarType out_dtype) -> Tensor");
  m.def(
      "fp8_scaled_mm(Tensor x, Tensor x_scales, Tensor weight, Tensor scales, Tensor? bias, ScalarType out_dtype, "
      "bool fast_accum) -> Tensor");
  m.def("int8_quantize(Tensor x, bool symmetric) -> (Tensor, Tensor, Tensor)");
  m.def("fp8_quantize(Tensor x, int group_size, Tensor? scale) -> (Tensor, Tensor)");
  m.def("add_rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps) -> (Tensor, Tensor)");
  m.def("silu_mul(Tensor gate, Tensor up) -> Tensor");
  m.def("rms_norm_quantize(Tensor x, Tensor? weight, float eps, ScalarType dtype) -> (Tensor, Tensor)");
  m.def(
      "add_rms_norm_quantize(Tensor x, Tensor? residual, Tensor? weight, float eps, ScalarType dtype) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("silu_mul_quantize(Tensor gate, Tensor up, ScalarType dtype) -> (Tensor, Tensor)");
  m.def(
      "quantize_groups(Tensor weight, int group_size, ScalarType dtype, bool symmetric, ScalarType scale_dtype, "
      "float[] factors) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("quantize_blocks(Tensor weight, int rows, int columns) -> (Tensor, Tensor, Tensor)");
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

namespace {
// One implementation an op; it asks its tensors which device they are on.
void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("int4_mm", TORCH_BOX(&qao::int4_mm_op));
  m.impl("add_rms_norm_int4_mm", TORCH_BOX(&qao::add_rms_norm_int4_mm_op));
  m.impl("int8_mm", TORCH_BOX(&qao::int8_mm_op));
  m.impl("fp8_mm", TORCH_BOX(&qao::fp8_mm_op));
  m.impl("int8_int8_mm", TORCH_BOX(&qao::int8_int8_mm_op));
  m.impl("int8_int4_mm", TORCH_BOX(&qao::int8_int4_mm_op));
  m.impl("fp8_fp8_mm", TORCH_BOX(&qao::fp8_fp8_mm_op));
  m.impl("fp8_int4_mm", TORCH_BOX(&qao::fp8_int4_mm_op));
  m.impl("int8_scaled_mm", TORCH_BOX(&qao::int8_scaled_mm_op));
  m.impl("fp8_scaled_mm", TORCH_BOX(&qao::fp8_scaled_mm_op));
  m.impl("int8_quantize", TORCH_BOX(&qao::int8_quantize_op));
  m.impl("fp8_quantize", TORCH_BOX(&qao::fp8_quantize_op));
  m.impl("add_rms_norm", TORCH_BOX(&qao::add_rms_norm_op));
  m.impl("silu_mul", TORCH_BOX(&qao::silu_mul_op));
  m.impl("rms_norm_quantize", TORCH_BOX(&qao::rms_norm_quantize_op));
  m.impl("add_rms_norm_quantize", TORCH_BOX(&qao::add_rms_norm_quantize_op));
  m.impl("silu_mul_quantize", TORCH_BOX(&qao::silu_mul_quantize_op));
  m.impl("quantize_groups", TORCH_BOX(&qao::quantize_groups_op));
  m.impl("quantize_blocks", TORCH_BOX(&qao::quantize_blocks_op));
  m.impl("pack_int4", TORCH_BOX(&qao::pack_int4_op));
  m.impl("unpack_int4", TORCH_BOX(&qao::unpack_int4_op));
  m.impl("dequantize_int4", TORCH_BOX(&qao::dequantize_int4_op));
  m.impl("int4_embedding", TORCH_BOX(&qao::int4_embedding_op));
  m.impl("int8_embedding", TORCH_BOX(&qao::int8_embedding_op));
}
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(qao, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(qao, CUDA, m) { implement(m); }
