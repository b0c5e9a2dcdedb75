// Operator registration: boxed functions that prefix exceptions with the operator's name.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <string_view>

#include "tensor.h"

namespace qao {

// A string as a template argument.
template <size_t size>
struct OpName {
  constexpr OpName(const char (&literal)[size]) { std::copy_n(literal, size, text); }
  char text[size];
};

template <OpName name, auto* function>
void boxed(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  try {
    TORCH_BOX(function)(stack, inputs, outputs);
  } catch (const std::exception& error) {
    rethrow_named(name.text, error);
  }
}

// One row of an operator table.
struct Operator {
  const char* name;
  const char* schema;
  void (*call)(StableIValue*, uint64_t, uint64_t);
};
template <OpName name, auto* function>
consteval Operator operator_of(const char* schema) {
  if (!std::string_view(schema).starts_with(name.text)) throw "the schema is of another operator";
  return {name.text, schema, boxed<name, function>};
}

template <OpName name, auto* function>
void implement(torch::stable::detail::StableLibrary& library) {
  library.impl(name.text, boxed<name, function>);
}

}  // namespace qao
