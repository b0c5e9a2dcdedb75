// Operators: records of name, schema and function, in one table per file.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <span>
#include <string_view>

#include "stable_abi/tensor.h"

namespace qao {

struct Operator {
  const char* name;
  const char* schema;
  void (*call)(StableIValue*, uint64_t, uint64_t);
};

// The tables, which library.cpp registers. Each is at the end of the file of its functions; docs/ops.md documents the
// arguments.
using Operators = std::span<const Operator>;
Operators attention_operators();
Operators embedding_operators();
Operators expert_operators();
Operators gguf_operators();
Operators gptq_operators();
Operators int4_pack_operators();
Operators merged_mm_operators();
Operators mm_operators();
Operators norm_mm_operators();
Operators quantize_operators();
Operators quantize_weight_operators();
Operators quantize_weight_in_place_operators();
Operators scaled_mm_operators();
Operators token_attention_operators();

// A string as a template argument.
template <size_t size>
struct OpName {
  constexpr OpName(const char (&literal)[size]) { std::copy_n(literal, size, text); }
  char text[size];
};

// The function on torch's stack of arguments. Prefixes exceptions with the operator's name.
template <OpName name, auto* function>
void boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  try {
    TORCH_BOX(function)(stack, inputs, outputs);
  } catch (const std::exception& error) {
    rethrow_named(name.text, error);
  }
}

// The record of an operator. Its name is checked against the schema, which begins with it.
template <OpName name, auto* function>
consteval Operator operator_of(const char* schema) {
  const std::string_view text(schema);
  if (!text.starts_with(name.text) || text.find('(') + 1 != sizeof(name.text))
    throw "the schema is of another operator";
  return {name.text, schema, boxed<name, function>};
}

}  // namespace qao
