// Wrappers of torch on the LibTorch stable ABI: tensors, errors, CUDA streams and threads.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <exception>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "cpu/parallel.h"
#include "qao/status.h"
#include "qao/types.h"

namespace qao {

using torch::stable::Tensor;

// A tensor argument: name for messages, and metadata that is read once.
class Argument {
 public:
  Argument(const char* name, const Tensor& tensor);

  const char* name() const { return name_; }
  int64_t dim() const { return dim_; }
  int64_t size(int64_t i) const { return sizes_[i]; }
  int64_t stride(int64_t i) const { return strides_[i]; }
  int64_t numel() const;
  int32_t dtype() const { return dtype_; }
  bool is_cuda() const { return device_type_ == aoti_torch_device_type_cuda(); }
  bool is_cpu() const { return device_type_ == aoti_torch_device_type_cpu(); }
  int32_t device_index() const { return device_index_; }
  bool same_device(const Argument& other) const {
    return device_type_ == other.device_type_ && device_index_ == other.device_index_;
  }
  bool is_contiguous() const;
  bool is_aligned(int64_t bytes) const { return reinterpret_cast<uintptr_t>(data_) % bytes == 0; }
  bool has_shape(std::initializer_list<int64_t> shape) const;
  void* data() const { return data_; }
  const int64_t* sizes() const { return sizes_; }

  // Hides dimension 0: from here on the argument describes the first of the equal slices along it. Returns their
  // number. Messages and is_contiguous() still refer to the full tensor.
  int64_t hide_first();

  // "x: bfloat16[3, 64] strides [64, 1] on cuda:0"
  std::string describe() const;

 private:
  const char* name_;
  int64_t dim_ = 0;
  int64_t* sizes_ = nullptr;
  int64_t* strides_ = nullptr;
  int64_t hidden_ = 0;  // dimensions before the first one
  int32_t dtype_ = 0;
  int32_t device_type_ = 0;
  int32_t device_index_ = -1;
  void* data_ = nullptr;
};

// The running op, for messages. Every error of qao has the form
//   qao::int4_mm: <problem>. Got <all tensors and numbers>. <remedy>.
class Op {
 public:
  explicit Op(const char* name) : name_(name) {}

  void involve(const Argument* argument) { arguments_.at(argument_count_++) = argument; }
  void involve(const char* name, int64_t value) { numbers_.at(number_count_++) = {name, value}; }
  // Appended to every error.
  void note(const char* text) { note_ = text; }

  [[noreturn]] void fail(const std::string& what, const std::string& remedy) const;
  void check(bool condition, const char* what, const char* remedy) const {
    if (!condition) fail(what, remedy);
  }
  void check(const Status& status) const {
    if (status.ok()) return;
    fail(status.message(),
         status.remedy().empty() ? "Please report this with the output of `python -m qao`" : status.remedy());
  }

  // dtype of `argument`; an error unless float32, float16 or bfloat16.
  DType float_dtype(const Argument& argument) const;
  // dtype argument of the op; an error unless float32, float16 or bfloat16.
  DType float_dtype(const char* name, torch::headeronly::ScalarType dtype) const;
  // Operands are contiguous and on the device of x.
  void check_operand(const Argument& operand, const Argument& x) const;
  // Packed operands are read with 16-byte loads.
  void check_packed_operand(const Argument& operand, const Argument& x) const;
  // Checks a bias [n] and returns its float dtype.
  DType check_bias(const Argument& bias, const Argument& x, int64_t n) const;
  [[noreturn]] void fail_without_cuda() const;

 private:
  const char* name_;
  const char* note_ = "";
  // Arrays avoid the allocations of a vector in every call.
  std::array<const Argument*, 10> arguments_;
  std::array<std::pair<const char*, int64_t>, 4> numbers_;
  size_t argument_count_ = 0, number_count_ = 0;
};

// Rethrows `error` with the name of its operator, without text about torch's headers.
[[noreturn]] void rethrow_named(const char* name, const std::exception& error);

// torch dtype codes that the ops accept.
int32_t torch_dtype(DType dtype);
int32_t int8_code();
int32_t bool_code();
int32_t uint8_code();
int32_t int32_code();
int32_t int64_code();
int32_t float32_code();
int32_t float64_code();
int32_t fp8_code();  // float8_e4m3fn
std::optional<DType> float_dtype_of(int32_t torch_dtype);

// Uninitialized contiguous tensors on the device of `like`: of these sizes; of its sizes with a new last one; of its
// sizes with one appended.
Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, const Argument& like);
Tensor empty_rows(int64_t last, int32_t dtype, const Argument& like);
Tensor empty_vectors(int64_t last, int32_t dtype, const Argument& like);
Tensor number_on_cpu(int32_t value);  // int32 [1]

// A contiguous copy of the tensor of `argument`.
Tensor contiguous(const Tensor& tensor, const Argument& argument);
Tensor cloned(const Tensor& tensor, const Argument& argument);  // the same, always copied

// torch's current cudaStream_t on this device.
void* current_stream(const Argument& on);
// Sets the current CUDA device for a scope if it differs. Does nothing for CPU tensors.
class DeviceScope {
 public:
  explicit DeviceScope(const Argument& on);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

// torch's intra-op thread pool with torch.get_num_threads() threads; serial if there are few multiplications.
cpu::Threads torch_threads(int64_t multiplications = std::numeric_limits<int64_t>::max());

}  // namespace qao
