// All that qao needs of torch, on the LibTorch stable ABI: reading a tensor's metadata once, one error format, outputs,
// the current CUDA stream, torch's threads.
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

// A tensor argument: its name for messages and its metadata, read once.
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

  // From here on the argument is one of the equal parts that lie along dimension 0, the first; returns how many there
  // are. Messages go on showing all of it, and contiguous means all of it.
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

// The op being run, for messages. Every error of qao has the form
//   qao::int4_mm: <what is wrong>. Got <every tensor and number involved>. <what to do>.
class Op {
 public:
  explicit Op(const char* name) : name_(name) {}

  void involve(const Argument* argument) { arguments_.at(argument_count_++) = argument; }
  void involve(const char* name, int64_t value) { numbers_.at(number_count_++) = {name, value}; }
  // Said of every mistake.
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

  // dtype of `argument` if it is one of float32, float16, bfloat16; an error otherwise.
  DType float_dtype(const Argument& argument) const;
  // float32, float16 or bfloat16 as an argument of the op; an error otherwise.
  DType float_dtype(const char* name, torch::headeronly::ScalarType dtype) const;
  // Operands lie in one piece on the device of x.
  void check_operand(const Argument& operand, const Argument& x) const;
  // Packed ones are read with 16-byte loads.
  void check_packed_operand(const Argument& operand, const Argument& x) const;
  // A bias [n] in a float dtype, which is returned.
  DType check_bias(const Argument& bias, const Argument& x, int64_t n) const;
  [[noreturn]] void fail_without_cuda() const;

 private:
  const char* name_;
  const char* note_ = "";
  // Arrays, since a vector would ask for memory several times in every call.
  std::array<const Argument*, 9> arguments_;
  std::array<std::pair<const char*, int64_t>, 4> numbers_;
  size_t argument_count_ = 0, number_count_ = 0;
};

// Throws `error` again with the name of its operator, and without what torch says about its own headers.
[[noreturn]] void rethrow_named(const char* name, const std::exception& error);

// dtype codes of torch that the ops accept
int32_t torch_dtype(DType dtype);
int32_t int8_code();
int32_t uint8_code();
int32_t int32_code();
int32_t int64_code();
int32_t float32_code();
int32_t float64_code();
int32_t fp8_code();  // float8_e4m3fn
std::optional<DType> float_dtype_of(int32_t torch_dtype);

// Uninitialised contiguous tensors beside `like`: of these sizes; of its own sizes but for the last; of its own sizes
// and one more.
Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, const Argument& like);
Tensor empty_rows(int64_t last, int32_t dtype, const Argument& like);
Tensor empty_vectors(int64_t last, int32_t dtype, const Argument& like);
Tensor number_on_cpu(int32_t value);  // int32 [1]

// A copy of the tensor of `argument` whose elements lie one after the other.
Tensor contiguous(const Tensor& tensor, const Argument& argument);
Tensor cloned(const Tensor& tensor, const Argument& argument);  // the same, whether they do or not

// The cudaStream_t torch would use on this device now.
void* current_stream(const Argument& on);
// Sets the current CUDA device for a scope if it is another one; does nothing for CPU tensors.
class DeviceScope {
 public:
  explicit DeviceScope(const Argument& on);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

// torch's intra-op pool at the size of torch.get_num_threads(); for few multiplications the calling thread alone.
cpu::Threads torch_threads(int64_t multiplications = std::numeric_limits<int64_t>::max());

}  // namespace qao
