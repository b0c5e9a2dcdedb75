// Inputs of operators that begin with RMSNorm.
#pragma once

#include <algorithm>
#include <limits>
#include <string>

#include "qao/quantize.h"
#include "stable_abi/rows.h"

namespace qao {

// Rows of an input. Sets m, k and x_dtype of the problem.
inline Rows rows_of(const Op& op, const Tensor& tensor, const Argument& x, quantize::Problem* problem) {
  problem->x_dtype = op.float_dtype(x);
  op.check(x.dim() >= 1 && x.size(x.dim() - 1) >= 1, "x must have shape [..., K], K at least 1",
           "Pass at least one column");
  problem->k = x.size(x.dim() - 1);
  Rows rows(tensor, x);
  problem->m = rows.count;
  return rows;
}

inline void check_alike(const Op& op, const Argument& tensor, const Argument& x, const char* what) {
  op.check(tensor.dtype() == x.dtype() && tensor.same_device(x) && tensor.dim() == x.dim() &&
               std::equal(tensor.sizes(), tensor.sizes() + tensor.dim(), x.sizes()),
           what, "Check its shape and dtype, and move it there with .to(device)");
}

struct Norm {
  Norm(const char* name, const Tensor& x_tensor, const std::optional<Tensor>& residual_tensor,
       const std::optional<Tensor>& weight_tensor, double eps, const char* weight_name = "weight")
      : op(name), x("x", x_tensor) {
    op.involve(&x);
    if (residual_tensor) op.involve(&residual.emplace("residual", *residual_tensor));
    if (weight_tensor) op.involve(&weight.emplace(weight_name, *weight_tensor));
    op.check(eps >= 0 && eps <= std::numeric_limits<float>::max(), "eps must be a number from 0 to the largest float32",
             "Pass that of the model, 1e-6 for example");
    rows.emplace(rows_of(op, x_tensor, x, &problem));
    problem.producer = quantize::Producer::kRmsNorm;
    problem.eps = static_cast<float>(eps);
    arguments.x = rows->data, arguments.x_stride = rows->stride;
    if (residual) {
      check_alike(op, *residual, x, "residual must have the shape, dtype and device of x");
      residual_rows.emplace(*residual_tensor, *residual);
      arguments.residual = residual_rows->data, arguments.residual_stride = residual_rows->stride;
    }
    if (!weight) return;
    problem.norm_weight_dtype = op.float_dtype(*weight);
    if (!weight->has_shape({problem.k}) || !weight->is_contiguous()) {
      op.fail(weight_name + std::string(" must be contiguous of shape [K]"), "Check its shape against x.shape[-1]");
    }
    if (!weight->same_device(x)) {
      op.fail(weight_name + std::string(" and x are on different devices"), "Move them to one device with .to(device)");
    }
    arguments.norm_weight = weight->data();
  }
  Norm(const Norm&) = delete;  // op points to the arguments

  // Allocates x + residual.
  Tensor make_sum() {
    Tensor sum = empty_rows(problem.k, x.dtype(), x);
    arguments.sum = sum.data_ptr();
    return sum;
  }

  Op op;
  Argument x;
  std::optional<Argument> residual, weight;
  std::optional<Rows> rows, residual_rows;
  quantize::Problem problem;
  quantize::Arguments arguments;
};

// Runs a producer and returns its values in the dtype of x. In quantize.cpp.
Tensor values(const Op& op, quantize::Problem problem, quantize::Arguments arguments, const Argument& x);

}  // namespace qao
