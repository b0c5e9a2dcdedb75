// Checks of GGUF weights.
#pragma once

#include <string>

#include "cpu/gguf.h"
#include "stable_abi/tensor.h"

namespace qao {

// A weight [N, row_bytes] of a GGUF type, on the device of `other`.
inline cpu::gguf::Weight checked_gguf_weight(const Op& op, const Argument& weight, const Argument& other,
                                             int64_t qtype) {
  const auto [columns, bytes] = cpu::gguf::block_size(qtype);
  op.check(bytes > 0,
           "qtype must be ggml's number of Q4_0 (2), Q4_1 (3), Q5_0 (6), Q5_1 (7), Q8_0 (8), Q2_K (10), Q3_K (11), "
           "Q4_K (12), Q5_K (13), Q6_K (14), IQ4_NL (20) or IQ4_XS (23)",
           "Dequantize other types with the gguf package, and quantize the weight again");
  op.check(weight.dtype() == uint8_code() && weight.dim() == 2 && weight.size(0) >= 1 && weight.size(1) >= 1,
           "weight must be uint8 of shape [N, bytes of a row]", "Pass the tensor's bytes as the GGUF file holds them");
  if (weight.size(1) % bytes != 0) {
    op.fail("rows of weight must hold whole blocks of " + std::to_string(bytes) + " bytes",
            "Pass the qtype that the GGUF file records for this tensor");
  }
  op.check_operand(weight, other);
  if (!weight.is_cpu()) {
    op.fail(
        "GGUF weights have kernels for CPUs only",
        "Move the tensors to the CPU, or load the file for the GPU: qao.from_pretrained(path, device_map=\"cuda\")");
  }
  cpu::gguf::Weight rows;
  rows.type = qtype;
  rows.n = weight.size(0);
  rows.k = weight.size(1) / bytes * columns;
  rows.weight = static_cast<const uint8_t*>(weight.data());
  return rows;
}

}  // namespace qao
