// Wrappers of torch on the LibTorch stable ABI.
#include "stable_abi/tensor.h"

#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <new>
#include <stdexcept>

#if defined(QAO_WITH_CUDA)
#include "qao/device.h"
#endif

namespace qao {
namespace {

// Errors without an operator name; rethrow_named adds it.
[[noreturn]] void fail(const std::string& what) { throw std::runtime_error("qao: " + what); }

void expect(AOTITorchError code, const char* call) {
  if (code != AOTI_TORCH_SUCCESS) fail(std::string("torch refused ") + call);
}

const char* dtype_name(int32_t dtype) {
  struct Row {
    int32_t code;
    const char* name;
  };
  static const Row rows[] = {
      {aoti_torch_dtype_float32(), "float32"},
      {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
  };
  for (const Row& row : rows) {
    if (row.code == dtype) return row.name;
  }
  return "another dtype";
}

// No iostreams in this library: they break in processes with several copies of the C++ runtime.
std::string list_of(const int64_t* values, int64_t count) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) text.append(i ? ", " : "").append(std::to_string(values[i]));
  return text + "]";
}

}  // namespace

Argument::Argument(const char* name, const Tensor& tensor) : name_(name) {
  AtenTensorHandle handle = tensor.get();
  const bool read = aoti_torch_get_strides(handle, &strides_) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_get_sizes(handle, &sizes_) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_get_dim(handle, &dim_) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_get_dtype(handle, &dtype_) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_get_device_type(handle, &device_type_) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_get_device_index(handle, &device_index_) == AOTI_TORCH_SUCCESS &&
                    aoti_torch_get_data_ptr(handle, &data_) == AOTI_TORCH_SUCCESS;
  if (read && (data_ != nullptr || numel() == 0)) return;  // FSDP, for example, frees the storage of live tensors
  bool defined = false;
  aoti_torch_is_defined(handle, &defined);
  fail(name +
       (defined ? std::string(" has no memory that can be read. Pass a plain, dense tensor")
                : std::string(" must be a tensor, not None. Pass a tensor")) +
       ".");
}

int64_t Argument::numel() const {
  int64_t count = 1;
  for (int64_t i = 0; i < dim_; ++i) count *= sizes_[i];
  return count;
}

// Recomputed instead of using torch's flag. Strides of dimensions of size 1 are ignored, but the result holds for the
// memory that is read row by row.
bool Argument::is_contiguous() const {
  int64_t expected = 1;
  for (int64_t i = dim_ - 1; i >= -hidden_; --i) {
    if (sizes_[i] != 1 && strides_[i] != expected) return numel() == 0;
    expected *= sizes_[i];
  }
  return true;
}

bool Argument::has_shape(std::initializer_list<int64_t> shape) const {
  if (static_cast<int64_t>(shape.size()) != dim_) return false;
  int64_t i = 0;
  for (int64_t extent : shape) {
    if (sizes_[i++] != extent) return false;
  }
  return true;
}

int64_t Argument::hide_first() {
  --dim_, ++hidden_;
  ++strides_;
  return *sizes_++;
}

std::string Argument::describe() const {
  std::string text = std::string(name_) + ": " + dtype_name(dtype_) + list_of(sizes_ - hidden_, dim_ + hidden_);
  if (!is_contiguous()) text.append(" strides ").append(list_of(strides_ - hidden_, dim_ + hidden_));
  text += is_cuda() ? " on cuda" : is_cpu() ? " on cpu" : " on another device";
  if (is_cuda()) text.append(":").append(std::to_string(device_index_));
  return text;
}

void Op::fail(const std::string& what, const std::string& remedy) const {
  std::string got;
  for (size_t i = 0; i < argument_count_; ++i) got += (got.empty() ? "" : ", ") + arguments_[i]->describe();
  for (size_t i = 0; i < number_count_; ++i) {
    got += std::string(", ") + numbers_[i].first + ": " + std::to_string(numbers_[i].second);
  }
  throw std::runtime_error(std::string("qao::") + name_ + ": " + what + note_ + ". Got " + got + ". " + remedy + ".");
}

void rethrow_named(const char* name, const std::exception& error) {
  const std::string text = error.what(), ours = "qao: ", begin = std::string("qao::") + name + ": ";
  if (text.compare(0, 5, "qao::") == 0) throw std::runtime_error(text);
  if (text.compare(0, ours.size(), ours) == 0) throw std::runtime_error(begin + text.substr(ours.size()));
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    throw std::runtime_error(begin + "out of memory on the host. Free memory, or pass fewer rows at a time.");
  }
  // The text is a line of torch's headers.
  throw std::runtime_error(begin +
                           "a call of torch failed, out of memory maybe. Free memory, or pass fewer rows at a "
                           "time.");
}

DType Op::float_dtype(const Argument& argument) const {
  const std::optional<DType> dtype = float_dtype_of(argument.dtype());
  if (!dtype) {
    fail(std::string(argument.name()) + " must be float32, float16 or bfloat16",
         std::string("Convert it: ") + argument.name() + ".to(torch.bfloat16)");
  }
  return *dtype;
}

DType Op::float_dtype(const char* name, torch::headeronly::ScalarType dtype) const {
  const std::optional<DType> known =
      float_dtype_of(torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)));
  if (!known) {
    fail(std::string(name) + " must be torch.float32, torch.float16 or torch.bfloat16",
         "Pass one of these and convert the result");
  }
  return *known;
}

void Op::check_operand(const Argument& operand, const Argument& x) const {
  if (!operand.same_device(x)) {
    fail(std::string(operand.name()) + " and " + x.name() + " are on different devices",
         "Move them to one device with .to(device)");
  }
  if (!operand.is_contiguous()) {
    fail(std::string(operand.name()) + " must be contiguous", std::string("Pass ") + operand.name() + ".contiguous()");
  }
}

void Op::check_packed_operand(const Argument& operand, const Argument& x) const {
  check_operand(operand, x);
  if (!operand.is_aligned(16)) {
    fail(std::string(operand.name()) + " must start at a multiple of 16 bytes",
         std::string("Pass ") + operand.name() + ".clone()");
  }
}

DType Op::check_bias(const Argument& bias, const Argument& x, int64_t n) const {
  const DType dtype = float_dtype(bias);
  check(bias.has_shape({n}), "bias must have shape [out_features]", "Check bias.shape");
  check_operand(bias, x);
  return dtype;
}

void Op::fail_without_cuda() const {
  fail("this build of qao has no CUDA kernels", "Reinstall it with QAO_CUDA=ON where nvcc is installed");
}

int32_t torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return aoti_torch_dtype_float32();
    case DType::kFloat16:
      return aoti_torch_dtype_float16();
    case DType::kBFloat16:
      return aoti_torch_dtype_bfloat16();
  }
  return -1;
}
int32_t int8_code() { return aoti_torch_dtype_int8(); }
int32_t bool_code() { return aoti_torch_dtype_bool(); }
int32_t uint8_code() { return aoti_torch_dtype_uint8(); }
int32_t int32_code() { return aoti_torch_dtype_int32(); }
int32_t int64_code() { return aoti_torch_dtype_int64(); }
int32_t float32_code() { return aoti_torch_dtype_float32(); }
int32_t float64_code() { return aoti_torch_dtype_float64(); }
int32_t fp8_code() { return aoti_torch_dtype_float8_e4m3fn(); }

std::optional<DType> float_dtype_of(int32_t code) {
  if (code == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  if (code == aoti_torch_dtype_float16()) return DType::kFloat16;
  if (code == aoti_torch_dtype_float32()) return DType::kFloat32;
  return std::nullopt;
}

namespace {

constexpr int64_t kMaxDim = 16;

Tensor empty_of(const int64_t* sizes, int64_t dim, int32_t dtype, const Argument& like) {
  int64_t strides[kMaxDim];
  int64_t stride = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i] > 1 ? sizes[i] : 1;
  }
  AtenTensorHandle handle = nullptr;
  const int32_t device_type = like.is_cuda() ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  if (aoti_torch_empty_strided(dim, sizes, strides, dtype, device_type, like.device_index(), &handle) !=
      AOTI_TORCH_SUCCESS) {
    fail("out of memory: torch could not allocate " + std::string(dtype_name(dtype)) + list_of(sizes, dim) +
         " in addition to " + like.describe() + ". Free memory, or pass fewer rows at a time.");
  }
  return Tensor(handle);
}

// The first `kept` sizes of `like`, then `last`.
Tensor empty_after(int64_t kept, int64_t last, int32_t dtype, const Argument& like) {
  if (kept >= kMaxDim)
    fail("tensors of more than 16 dimensions are not supported. Got " + like.describe() + ". Flatten it.");
  int64_t sizes[kMaxDim];
  std::copy_n(like.sizes(), kept, sizes);
  sizes[kept] = last;
  return empty_of(sizes, kept + 1, dtype, like);
}

}  // namespace

Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, const Argument& like) {
  return empty_of(sizes.begin(), static_cast<int64_t>(sizes.size()), dtype, like);
}

Tensor empty_rows(int64_t last, int32_t dtype, const Argument& like) {
  return empty_after(like.dim() - 1, last, dtype, like);
}

Tensor empty_vectors(int64_t last, int32_t dtype, const Argument& like) {
  return empty_after(like.dim(), last, dtype, like);
}

Tensor number_on_cpu(int32_t value) {
  const int64_t one = 1;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(1, &one, &one, int32_code(), aoti_torch_device_type_cpu(), 0, &handle) !=
      AOTI_TORCH_SUCCESS) {
    fail("out of memory: torch could not allocate a number on the CPU. Free memory.");
  }
  Tensor result(handle);
  *static_cast<int32_t*>(result.data_ptr()) = value;
  return result;
}

namespace {

template <typename Copy>
Tensor copy_of(const Argument& argument, const Copy& copy) {
  try {
    return copy();
  } catch (const std::exception&) {  // its text is a line of torch's headers
    fail("out of memory: torch could not copy " + argument.describe() +
         ", which is not contiguous. Free memory, or pass fewer rows at a time.");
  }
}

}  // namespace

Tensor contiguous(const Tensor& tensor, const Argument& argument) {
  return copy_of(argument, [&] { return torch::stable::contiguous(tensor); });
}

Tensor cloned(const Tensor& tensor, const Argument& argument) {
  return copy_of(argument, [&] { return torch::stable::contiguous(torch::stable::clone(tensor)); });
}

void* current_stream(const Argument& on) {
  // The symbol exists only in libtorch_cuda, which CPU builds of torch lack, so it is looked up at run time.
  using GetStream = AOTITorchError (*)(int32_t, void**);
  static const GetStream get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<GetStream>(symbol);
  }();
  if (get_stream == nullptr) {
    fail("a CUDA tensor was passed, but libtorch_cuda.so is not loaded in this process. Import a CUDA build of torch.");
  }
  void* stream = nullptr;
  expect(get_stream(on.device_index(), &stream), "the current CUDA stream");
  return stream;
}

DeviceScope::DeviceScope(const Argument& on) {
#if defined(QAO_WITH_CUDA)
  if (on.is_cuda() && current_gpu() != on.device_index()) {
    expect(aoti_torch_create_device_guard(on.device_index(), &guard_), "a device guard");
  }
#else
  (void)on;
#endif
}

DeviceScope::~DeviceScope() {
  if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
}

cpu::Threads torch_threads(int64_t multiplications) {
  constexpr int64_t kSerial = 1 << 17;  // waking other threads takes about this long
  if (multiplications <= kSerial) return {};
  uint32_t count = 1;
  expect(torch_get_num_threads(&count), "get_num_threads");
  cpu::Threads threads;
  threads.count = static_cast<int>(count);
  threads.run = [](int n, void (*task)(void*, int), void* context) {
    struct Call {
      void (*task)(void*, int);
      void* context;
    } call{task, context};
    const auto body = [](int64_t begin, int64_t end, void* opaque) {
      const Call& c = *static_cast<Call*>(opaque);
      for (int64_t i = begin; i < end; ++i) c.task(c.context, static_cast<int>(i));
    };
    expect(torch_parallel_for(0, n, 1, body, &call), "parallel_for");
  };
  return threads;
}

}  // namespace qao
