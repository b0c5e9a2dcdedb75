// GEMM operators: a function sets W, then x, of a pair of formats. The dense and the grouped operator share it.
#include "ops/gemm_call.h"
#include "ops/grouped_gemm_call.h"
#include "stable_abi/operators.h"

namespace qao {
namespace {

void int4_mm(GemmCall& gemm, const Tensor& x, int64_t out_features, int64_t in_features, int64_t group_size,
             bool batch_invariant) {
  gemm.use_packed_weight({out_features, in_features, group_size});
  gemm.use_float_x(x);
  gemm.problem.batch_invariant = batch_invariant;
}

void int8_mm(GemmCall& gemm, const Tensor& x, bool batch_invariant) {
  gemm.use_weight(kInt8Rows);
  gemm.use_float_x(x);
  gemm.problem.batch_invariant = batch_invariant;
}

void fp8_mm(GemmCall& gemm, const Tensor& x, bool batch_invariant) {
  gemm.use_weight(kFp8Rows);
  gemm.use_float_x(x);
  gemm.problem.batch_invariant = batch_invariant;
}

void fp4_mm(GemmCall& gemm, const Tensor& x, int64_t out_features, int64_t in_features, int64_t group_size,
            bool batch_invariant) {
  gemm.use_fp4_weight({out_features, in_features, group_size});
  gemm.use_float_x(x);
  gemm.problem.batch_invariant = batch_invariant;
}

void int8_int8_mm(GemmCall& gemm, const Tensor& x, const std::optional<Tensor>& weight_sums, bool batch_invariant,
                  int64_t x_rotation) {
  gemm.add_weight_sums(weight_sums);
  gemm.use_weight(kInt8Rows);
  gemm.use_int8_x(x, x_rotation);
  gemm.problem.batch_invariant = batch_invariant;
}

void int8_int4_mm(GemmCall& gemm, const Tensor& x, const std::optional<Tensor>& weight_sums,
                  const std::optional<Tensor>& row_scales, int64_t out_features, int64_t in_features,
                  int64_t group_size, bool batch_invariant, int64_t x_rotation) {
  gemm.add_weight_sums(weight_sums);
  gemm.add_row_scales(row_scales);
  gemm.use_packed_weight({out_features, in_features, group_size});
  gemm.use_int8_x(x, x_rotation);
  gemm.problem.batch_invariant = batch_invariant;
}

void fp8_fp8_mm(GemmCall& gemm, const Tensor& x, const std::optional<Tensor>& x_scale, int64_t x_group_size,
                bool fast_accum, bool batch_invariant) {
  gemm.add_x_scale(x_scale, x_group_size);
  gemm.use_weight(kFp8Rows);
  gemm.problem.fast_accum = fast_accum;
  gemm.use_fp8_x(x, x_group_size);
  gemm.problem.batch_invariant = batch_invariant;
}

void fp8_int4_mm(GemmCall& gemm, const Tensor& x, const std::optional<Tensor>& row_scales, int64_t out_features,
                 int64_t in_features, int64_t group_size, bool batch_invariant, bool fast_accum) {
  gemm.add_row_scales(row_scales);
  gemm.use_packed_weight({out_features, in_features, group_size});
  gemm.problem.fast_accum = fast_accum;
  gemm.use_fp8_x(x);
  gemm.problem.batch_invariant = batch_invariant;
}

// The operators of a function: it gets all arguments but those that they share.
template <OpName name, auto* function>
struct Gemm;
template <OpName name, typename... Rest, void (*function)(GemmCall&, const Tensor&, Rest...)>
struct Gemm<name, function> {
  static Tensor dense(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                      Rest... rest) {
    Call call(name.text, x);
    GemmCall gemm(call.op, call.x, weight, &scales, bias);
    function(gemm, x, rest...);
    return gemm.run();
  }

  static Tensor grouped(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                        const Tensor& offsets, const std::optional<Tensor>& row_index,
                        const std::optional<Tensor>& row_scale, Rest... rest, const GateNumbers& gate) {
    Call call(name.text, x);
    GroupedGemmCall gemm(call.op, call.x, weight, &scales, bias, {offsets, row_index, row_scale});
    function(gemm, x, rest...);
    return gemm.run(gate);
  }
};

template <OpName name, auto* function>
consteval Operator dense(const char* schema) {
  return operator_of<name, &Gemm<name, function>::dense>(schema);
}

template <OpName name, auto* function>
consteval Operator grouped(const char* schema) {
  return operator_of<name, &Gemm<name, function>::grouped>(schema);
}

constexpr Operator kOperators[] = {
    dense<"int4_mm", int4_mm>(
        "int4_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int out_features=0, int in_features=0, "
        "int group_size=0, bool batch_invariant=False) -> Tensor"),
    dense<"int8_mm", int8_mm>(
        "int8_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, bool batch_invariant=False) -> Tensor"),
    dense<"fp8_mm", fp8_mm>(
        "fp8_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, bool batch_invariant=False) -> Tensor"),
    dense<"fp4_mm", fp4_mm>(
        "fp4_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int out_features=0, int in_features=0, "
        "int group_size=0, bool batch_invariant=False) -> Tensor"),
    dense<"int8_int8_mm", int8_int8_mm>(
        "int8_int8_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor? weight_sums=None, "
        "bool batch_invariant=False, int x_rotation=0) -> Tensor"),
    dense<"int8_int4_mm", int8_int4_mm>(
        "int8_int4_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor? weight_sums=None, "
        "Tensor? row_scales=None, int out_features=0, int in_features=0, int group_size=0, bool batch_invariant=False, "
        "int x_rotation=0) -> Tensor"),
    dense<"fp8_fp8_mm", fp8_fp8_mm>(
        "fp8_fp8_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor? x_scale=None, int x_group_size=-1, "
        "bool fast_accum=False, bool batch_invariant=False) -> Tensor"),
    dense<"fp8_int4_mm", fp8_int4_mm>(
        "fp8_int4_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor? row_scales=None, "
        "int out_features=0, int in_features=0, int group_size=0, bool batch_invariant=False, bool fast_accum=False)"
        " -> Tensor"),
    grouped<"int4_grouped_mm", int4_mm>(
        "int4_grouped_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor offsets, Tensor? row_index, "
        "Tensor? row_scale, int out_features=0, int in_features=0, int group_size=0, bool batch_invariant=False, "
        "float[]? gate=None) -> Tensor"),
    grouped<"int8_grouped_mm", int8_mm>(
        "int8_grouped_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor offsets, Tensor? row_index, "
        "Tensor? row_scale, bool batch_invariant=False, float[]? gate=None) -> Tensor"),
    grouped<"fp8_grouped_mm", fp8_mm>(
        "fp8_grouped_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor offsets, Tensor? row_index, "
        "Tensor? row_scale, bool batch_invariant=False, float[]? gate=None) -> Tensor"),
    grouped<"fp4_grouped_mm", fp4_mm>(
        "fp4_grouped_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor offsets, Tensor? row_index, "
        "Tensor? row_scale, int out_features=0, int in_features=0, int group_size=0, bool batch_invariant=False, "
        "float[]? gate=None) -> Tensor"),
    grouped<"int8_int8_grouped_mm", int8_int8_mm>(
        "int8_int8_grouped_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor offsets, Tensor? row_index, "
        "Tensor? row_scale, Tensor? weight_sums=None, bool batch_invariant=False, int x_rotation=0, float[]? gate=None)"
        " -> Tensor"),
    grouped<"int8_int4_grouped_mm", int8_int4_mm>(
        "int8_int4_grouped_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor offsets, Tensor? row_index, "
        "Tensor? row_scale, Tensor? weight_sums=None, Tensor? row_scales=None, int out_features=0, int in_features=0, "
        "int group_size=0, bool batch_invariant=False, int x_rotation=0, float[]? gate=None) -> Tensor"),
    grouped<"fp8_fp8_grouped_mm", fp8_fp8_mm>(
        "fp8_fp8_grouped_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor offsets, Tensor? row_index, "
        "Tensor? row_scale, Tensor? x_scale=None, int x_group_size=-1, bool fast_accum=False, "
        "bool batch_invariant=False, float[]? gate=None) -> Tensor"),
    grouped<"fp8_int4_grouped_mm", fp8_int4_mm>(
        "fp8_int4_grouped_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor offsets, Tensor? row_index, "
        "Tensor? row_scale, Tensor? row_scales=None, int out_features=0, int in_features=0, int group_size=0, "
        "bool batch_invariant=False, bool fast_accum=False, float[]? gate=None) -> Tensor"),
};

}  // namespace

Operators mm_operators() { return kOperators; }

}  // namespace qao
