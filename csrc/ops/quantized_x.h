// Quantization of float activations before a GEMM.
#pragma once

#include <optional>

#include "qao/gemm.h"
#include "qao/quantize.h"
#include "stable_abi/tensor.h"

namespace qao {

class QuantizedX {
 public:
  // `scale`: static scale of x, or null.
  QuantizedX(const gemm::Problem& problem, const Argument& x, const Argument* scale);

  // Quantizes the rows of x in `arguments` and replaces x, its scales, zero points and sums there. Not called if the
  // GEMM kernel quantizes x; a static scale is in `arguments` from the start.
  void make(const Op& op, gemm::Arguments& arguments);
  // The same with what make() of `other` has made of the same x, if that is what this product reads. Returns false if
  // not.
  bool take(const QuantizedX& other, gemm::Arguments& arguments) const;

 private:
  void set(gemm::Arguments& arguments) const;

  const Argument& x_;
  const Argument* scale_;
  quantize::Problem problem_;
  std::optional<Tensor> memory_;
  std::optional<quantize::Arguments> made_;
};

}  // namespace qao
