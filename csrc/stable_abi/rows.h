// Activations [..., K] as rows for kernels.
#pragma once

#include "stable_abi/tensor.h"

namespace qao {

// Rows with a constant stride and contiguous elements. Other views (transposed, permuted) are copied once; slices,
// offsets and padded rows are read in place.
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
    if (stride == 0 && count > 1) regular = false;  // TMA requires a positive row stride
    if (!regular) use(contiguous(tensor, x), x);
  }

  // Copies the rows to new, aligned memory.
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
