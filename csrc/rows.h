// An activation [..., K] as the rows a kernel reads.
#pragma once

#include "tensor.h"

namespace qao {

// Rows at a constant distance, elements of a row adjacent. Views that are not so (transposed, permuted) are copied
// once; slices, offsets and padded rows are read where they lie.
struct Rows {
  Rows(const Tensor& tensor, const Argument& x) : data(x.data()) {
    const int64_t last = x.dim() - 1;
    count = 1;
    for (int64_t i = 0; i < last; ++i) count *= x.size(i);
    stride = x.size(last);
    if (count == 0) return;
    bool regular = x.size(last) == 1 || x.stride(last) == 1;
    int64_t rows_below = 1;  // rows covered by the dimensions already seen
    for (int64_t i = last - 1; i >= 0; --i) {
      if (x.size(i) == 1) continue;
      if (rows_below == 1) {
        stride = x.stride(i);
      } else if (x.stride(i) != stride * rows_below) {
        regular = false;
      }
      rows_below *= x.size(i);
    }
    if (stride == 0 && count > 1) regular = false;  // the copy engine cannot read one row many times
    if (!regular) use(contiguous(tensor, x), x);
  }

  // To memory of their own, which begins at an aligned address.
  void move(const Tensor& tensor, const Argument& x) { use(cloned(tensor, x), x); }

  bool is_aligned(int64_t element_size) const {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && (count <= 1 || stride * element_size % 16 == 0);
  }

  const void* data;
  int64_t count = 0;   // M
  int64_t stride = 0;  // elements
  std::optional<Tensor> copy;

 private:
  void use(const Tensor& rows, const Argument& x) {
    copy = rows;
    data = copy->data_ptr();
    stride = x.size(x.dim() - 1);
  }
};

}  // namespace qao
