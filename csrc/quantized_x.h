// A float x that becomes eight bits before its product.
#pragma once

#include <optional>

#include "qao/mm.h"
#include "qao/quantize.h"
#include "tensor.h"

namespace qao {

class QuantizedX {
 public:
  // `problem` says how; `scale`: of all of x, known beforehand, or null.
  QuantizedX(const mm::Problem& problem, const Argument& x, const Argument* scale);

  // Quantises the rows of x in `arguments` and replaces x, its scales, zero points and sums there. Where the product
  // quantises x itself, only a known scale is needed, and that is in `arguments` from the start.
  void make(const Op& op, mm::Arguments& arguments);

 private:
  const Argument& x_;
  const Argument* scale_;
  quantize::Problem problem_;
  std::optional<Tensor> memory_;
};

}  // namespace qao
