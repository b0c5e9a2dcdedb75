// Builder for one grouped GEMM call: the steps of GemmCall with operands stacked by expert.
#pragma once

#include "ops/gate.h"
#include "ops/gemm_call.h"
#include "qao/grouped_gemm.h"

namespace qao {

// Maps rows of y to experts and to rows of x, with optional factors of rows of y.
struct Routing {
  const Tensor& offsets;
  const std::optional<Tensor>& row_index;
  const std::optional<Tensor>& row_scale;
};

class GroupedGemmCall : public GemmCall {
 public:
  GroupedGemmCall(Op& op, const Argument& x, const Tensor& weight, const Tensor* scales,
                  const std::optional<Tensor>& bias, const Routing& routing);

  // y [S, N], or [S, N / 2] with a gate.
  Tensor run(const GateNumbers& gate);

 private:
  void hide_experts() override;
  void use_gate(const GateNumbers& numbers);
  void run_on_gpu(Tensor& y);
  void check_routing();
  void check_values() const;

  gemm::Experts experts_;
  std::optional<quantize::Gate> gate_;
  const Argument offsets_;
  std::optional<Argument> row_index_, row_scale_;
};

}  // namespace qao
