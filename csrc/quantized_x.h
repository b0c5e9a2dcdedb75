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

  // Quantises the rows that `arguments` name, and puts the quantised ones and what belongs to them in their place.
  // Where the product quantises x itself, the scale that is known is all it wants: it is there from the beginning.
  void make(const Op& op, mm::Arguments& arguments);

 private:
  const Argument& x_;
  const Argument* scale_;
  quantize::Problem problem_;
  std::optional<Tensor> memory_;
};

}  // namespace qao
