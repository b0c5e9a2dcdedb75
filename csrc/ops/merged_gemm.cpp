// GEMM operators of several weights and one x, such as the q, k and v projections of an attention block.
//
// Graph passes call them (python/qao/inductor). Arguments are those of the operator of one weight, in lists. The
// results have the bits of separate calls, except for int4 on a GPU, where one kernel adds in another order.
#include "ops/merged_gemm_call.h"
#include "stable_abi/operators.h"

namespace qao {
namespace {

Tensors merged_int4_mm(const Tensor& x, Tensors weight, Tensors scales, Optionals bias,
                       std::vector<int64_t> out_features, int64_t in_features, int64_t group_size) {
  Calls calls("_merged_int4_mm", x, weight, &scales, bias);
  return calls.run([&](size_t i, GemmCall& gemm) {
    gemm.use_packed_weight(calls.sizes(i, out_features, in_features, group_size));
    gemm.use_float_x(x);
  });
}

Tensors merged_fp4_mm(const Tensor& x, Tensors weight, Tensors scales, Optionals bias,
                      std::vector<int64_t> out_features, int64_t in_features, int64_t group_size) {
  Calls calls("_merged_fp4_mm", x, weight, &scales, bias);
  return calls.run([&](size_t i, GemmCall& gemm) {
    gemm.use_fp4_weight(calls.sizes(i, out_features, in_features, group_size));
    gemm.use_float_x(x);
  });
}

Tensors merged_int8_mm(const Tensor& x, Tensors weight, Tensors scales, Optionals bias) {
  return Calls("_merged_int8_mm", x, weight, &scales, bias).run([&](size_t, GemmCall& gemm) {
    gemm.use_weight(kInt8Rows);
    gemm.use_float_x(x);
  });
}

Tensors merged_fp8_mm(const Tensor& x, Tensors weight, Tensors scales, Optionals bias) {
  return Calls("_merged_fp8_mm", x, weight, &scales, bias).run([&](size_t, GemmCall& gemm) {
    gemm.use_weight(kFp8Rows);
    gemm.use_float_x(x);
  });
}

Tensors merged_int8_int8_mm(const Tensor& x, Tensors weight, Tensors scales, Optionals bias, Optionals weight_sums,
                            int64_t x_rotation) {
  return Calls("_merged_int8_int8_mm", x, weight, &scales, bias, &weight_sums).run([&](size_t, GemmCall& gemm) {
    gemm.use_weight(kInt8Rows);
    gemm.use_int8_x(x, x_rotation);
  });
}

Tensors merged_int8_int4_mm(const Tensor& x, Tensors weight, Tensors scales, Optionals bias, Optionals weight_sums,
                            std::vector<int64_t> out_features, int64_t in_features, int64_t group_size,
                            int64_t x_rotation) {
  Calls calls("_merged_int8_int4_mm", x, weight, &scales, bias, &weight_sums);
  return calls.run([&](size_t i, GemmCall& gemm) {
    gemm.use_packed_weight(calls.sizes(i, out_features, in_features, group_size));
    gemm.use_int8_x(x, x_rotation);
  });
}

Tensors merged_fp8_fp8_mm(const Tensor& x, Tensors weight, Tensors scales, Optionals bias,
                          std::optional<Tensor> x_scale, int64_t x_group_size, bool fast_accum) {
  Calls calls("_merged_fp8_fp8_mm", x, weight, &scales, bias);
  return calls.run([&](size_t, GemmCall& gemm) {
    gemm.add_x_scale(x_scale, x_group_size);
    gemm.use_weight(kFp8Rows);
    gemm.problem.fast_accum = fast_accum;
    gemm.use_fp8_x(x, x_group_size);
  });
}

Tensors merged_fp8_int4_mm(const Tensor& x, Tensors weight, Tensors scales, Optionals bias,
                           std::vector<int64_t> out_features, int64_t in_features, int64_t group_size,
                           bool fast_accum) {
  Calls calls("_merged_fp8_int4_mm", x, weight, &scales, bias);
  return calls.run([&](size_t i, GemmCall& gemm) {
    gemm.use_packed_weight(calls.sizes(i, out_features, in_features, group_size));
    gemm.problem.fast_accum = fast_accum;
    gemm.use_fp8_x(x);
  });
}

constexpr Operator kOperators[] = {
    operator_of<"_merged_int4_mm", merged_int4_mm>(
        "_merged_int4_mm(Tensor x, Tensor[] weight, Tensor[] scales, Tensor?[] bias, int[] out_features=[], int "
        "in_features=0, int group_size=0) -> Tensor[]"),
    operator_of<"_merged_fp4_mm", merged_fp4_mm>(
        "_merged_fp4_mm(Tensor x, Tensor[] weight, Tensor[] scales, Tensor?[] bias, int[] out_features=[], int "
        "in_features=0, int group_size=0) -> Tensor[]"),
    operator_of<"_merged_int8_mm", merged_int8_mm>(
        "_merged_int8_mm(Tensor x, Tensor[] weight, Tensor[] scales, Tensor?[] bias) -> Tensor[]"),
    operator_of<"_merged_fp8_mm", merged_fp8_mm>(
        "_merged_fp8_mm(Tensor x, Tensor[] weight, Tensor[] scales, Tensor?[] bias) -> Tensor[]"),
    operator_of<"_merged_int8_int8_mm", merged_int8_int8_mm>(
        "_merged_int8_int8_mm(Tensor x, Tensor[] weight, Tensor[] scales, Tensor?[] bias, Tensor?[] weight_sums, int "
        "x_rotation=0) -> Tensor[]"),
    operator_of<"_merged_int8_int4_mm", merged_int8_int4_mm>(
        "_merged_int8_int4_mm(Tensor x, Tensor[] weight, Tensor[] scales, Tensor?[] bias, Tensor?[] weight_sums, int[] "
        "out_features=[], int in_features=0, int group_size=0, int x_rotation=0) -> Tensor[]"),
    operator_of<"_merged_fp8_fp8_mm", merged_fp8_fp8_mm>(
        "_merged_fp8_fp8_mm(Tensor x, Tensor[] weight, Tensor[] scales, Tensor?[] bias, Tensor? x_scale=None, int "
        "x_group_size=-1, bool fast_accum=False) -> Tensor[]"),
    operator_of<"_merged_fp8_int4_mm", merged_fp8_int4_mm>(
        "_merged_fp8_int4_mm(Tensor x, Tensor[] weight, Tensor[] scales, Tensor?[] bias, int[] out_features=[], int "
        "in_features=0, int group_size=0, bool fast_accum=False) -> Tensor[]"),
};

}  // namespace

Operators merged_mm_operators() { return kOperators; }

}  // namespace qao
