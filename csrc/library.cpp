// Every operator of qao: the table of contents. One line an op; docs/ops.md says what each argument means.
#include <torch/csrc/stable/library.h>

#include "ops.h"

STABLE_TORCH_LIBRARY(qao, m) {
  m.def(
      "int4_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int out_features, int in_features, int "
      "group_size) "
      "-> Tensor");
  m.def("pack_int4(Tensor q, Tensor scales, Tensor? zeros, int group_size) -> (Tensor, Tensor)");
  m.def(
      "unpack_int4(Tensor weight, Tensor scales, int out_features, int in_features, int group_size) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "dequantize_int4(Tensor weight, Tensor scales, int out_features, int in_features, int group_size, "
      "ScalarType dtype) -> Tensor");
}

namespace {
// One implementation an op; it asks its tensors which device they are on.
void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("int4_mm", TORCH_BOX(&qao::int4_mm_op));
  m.impl("pack_int4", TORCH_BOX(&qao::pack_int4_op));
  m.impl("unpack_int4", TORCH_BOX(&qao::unpack_int4_op));
  m.impl("dequantize_int4", TORCH_BOX(&qao::dequantize_int4_op));
}
}  // namespace

STABLE_TORCH_LIBRARY_IMPL(qao, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(qao, CUDA, m) { implement(m); }
