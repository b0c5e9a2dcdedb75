// Dispatch of the weight quantization kernels.
#include <bit>
#include <limits>
#include <mutex>
#include <vector>

#include "common/check.h"
#include "common/integers.h"
#include "layout/fp4.h"
#include "quantize_weight/params.h"

namespace qao::weight {
namespace {

bool is_blocks(const Problem& p) {
  return p.format == Format::kFp8 && p.rows == kScaleBlock && p.columns == kScaleBlock;
}

Params params_of(const Problem& problem, const Arguments& a) {
  Params p{};
  p.weight = a.weight, p.stride = a.weight_stride;
  p.q = a.q, p.scales = a.scales, p.fault = a.fault;
  p.largest = reinterpret_cast<uint32_t*>(a.largest), p.one_scale = needs_largest(problem);
  p.n = problem.n, p.k = problem.k, p.columns = problem.columns;
  p.symmetric = problem.symmetric, p.whole_zeros = problem.whole_zeros, p.scale_dtype = problem.scale_dtype;
  p.smallest = problem.scale_dtype == DType::kFloat16 ? 0x1p-24f : std::numeric_limits<float>::min();
  const int size = size_of(problem.weight_dtype);
  p.aligned = problem.k % 8 == 0 && reinterpret_cast<uintptr_t>(a.weight) % 16 == 0 &&
              (problem.n == 1 || a.weight_stride * size % 16 == 0);
  return p;
}

// Result word in mapped host memory that a kernel writes, and the event that follows it. A copy would take longer.
struct Report {
  int device = 0;
  int32_t* fault = nullptr;
  cudaEvent_t written = nullptr;

  Status make() {
    if (Status s = cuda_status(cudaGetDevice(&device), "asking for the current device"); !s.ok()) return s;
    void* word = nullptr;
    if (Status s = cuda_status(cudaHostAlloc(&word, sizeof(int32_t), cudaHostAllocMapped | cudaHostAllocPortable),
                               "asking for a word of the host");
        !s.ok()) {
      return s;
    }
    fault = static_cast<int32_t*>(word);
    return cuda_status(cudaEventCreateWithFlags(&written, cudaEventDisableTiming), "making an event");
  }
};

// Pool of unused reports. Never destroyed: CUDA may shut down earlier.
struct Reports {
  std::mutex mutex;
  std::vector<Report> free;

  static Reports& all() {
    static Reports* reports = new Reports;
    return *reports;
  }
  Status take(Report* report) {
    int device = 0;
    if (Status s = cuda_status(cudaGetDevice(&device), "asking for the current device"); !s.ok()) return s;
    const std::lock_guard lock(mutex);
    for (Report& one : free) {
      if (one.device != device) continue;
      *report = one, one = free.back(), free.pop_back();
      return {};
    }
    return report->make();
  }
  void give(const Report& report) {
    const std::lock_guard lock(mutex);
    free.push_back(report);
  }
};

Status check_not_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (Status s = cuda_status(cudaStreamIsCapturing(stream, &capture), "asking for the state of a stream"); !s.ok()) {
    return s;
  }
  if (capture == cudaStreamCaptureStatusNone) return {};
  return Status::error("it waits for the GPU, which no CUDA graph can capture",
                       "Load weights outside of captures, or capture quantize_weight_");
}

}  // namespace

bool needs_largest(const Problem& p) {
  if (p.format == Format::kFp4) return p.columns == fp4::kNvGroup;
  return p.format == Format::kFp8 && p.rows >= p.n && p.columns >= p.k && p.n > 1;
}

Status find_largest(const Problem& problem, const Arguments& a, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (Status s = cuda_status(cudaMemsetAsync(a.largest, 0, sizeof(float), stream), "clearing a maximum"); !s.ok()) {
    return s;
  }
  return find_largest(params_of(problem, a), problem.weight_dtype, stream);
}

Status quantize(const Problem& problem, const Arguments& a, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  Params p = params_of(problem, a);
  p.block_columns = static_cast<int>(problem.block_columns());
  if (problem.format == Format::kInt4) return quantize_int4(p, problem.weight_dtype, stream);
  if (problem.format == Format::kFp4) return quantize_fp4(p, problem.weight_dtype, stream);
  if (is_blocks(problem) && !p.one_scale) return quantize_blocks(p, problem.weight_dtype, stream);
  return quantize_rows(p, problem.weight_dtype, problem.format, stream);
}

Status load(const Problem& problem, const Arguments& a, float limit, bool* loaded, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (Status s = check_not_capturing(stream); !s.ok()) return s;
  Report report;
  if (Status s = Reports::all().take(&report); !s.ok()) return s;
  *report.fault = 0;
  Params p = params_of(problem, a);
  p.report = report.fault, p.limit = std::bit_cast<uint32_t>(limit);
  if (Status s = cuda_status(cudaMemsetAsync(a.fault, 0, 2 * sizeof(int32_t), stream), "clearing a fault"); !s.ok()) {
    return s;
  }
  if (Status s = find_largest(p, problem.weight_dtype, stream); !s.ok()) return s;
  if (Status s = cuda_status(cudaEventRecord(report.written, stream), "recording an event"); !s.ok()) return s;
  if (Status s = quantize(problem, a, stream); !s.ok()) return s;
  if (Status s = cuda_status(cudaEventSynchronize(report.written), "waiting for a weight"); !s.ok()) return s;
  *loaded = *static_cast<volatile int32_t*>(report.fault) == 0;
  Reports::all().give(report);
  return {};
}

}  // namespace qao::weight
