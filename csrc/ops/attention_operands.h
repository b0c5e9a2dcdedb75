// Checks that the attention operators share.
#pragma once

#include "qao/attention.h"
#include "stable_abi/tensor.h"

namespace qao {

// Whether a GPU can read the rows of a 16-bit tensor of four dimensions 16 bytes at a time.
inline bool has_aligned_rows(const Argument& given) {
  bool aligned = given.is_aligned(attention::kAlignment);
  for (int i = 0; i < 3; ++i) {  // elements of two bytes; others fail later
    aligned = aligned && (given.size(i) == 1 || given.stride(i) * 2 % attention::kAlignment == 0);
  }
  return aligned;
}

}  // namespace qao
