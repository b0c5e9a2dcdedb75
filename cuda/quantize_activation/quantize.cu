// Kernel selection and launch of activation quantization.
#include <algorithm>

#include "common/integers.h"
#include "common/launch.h"
#include "qao/quantize.h"
#include "quantize_activation/rows.cuh"
#include "quantize_activation/stream.cuh"

namespace qao::quantize {
namespace {

// Up to this many rows, each row has one thread per vector. Beyond, CTAs fill the GPU, and threads with several vectors
// keep more loads in flight.
constexpr int64_t kFewRows = 256;
// Up to this many tokens, the GEMM leaves room on an SM, where smaller CTAs can wait for it (PDL).
constexpr int64_t kFewTokens = 16;

bool is_aligned(const void* base, int64_t rows, int64_t stride_bytes, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(base) % bytes == 0 && (rows <= 1 || stride_bytes % bytes == 0);
}

bool needs_maxima(const Problem& p) { return p.scaling == Scaling::kTensor && !p.static_scale; }

Status check(const Problem& p, const Arguments& a) {
  if (p.format == Format::kFloat) {
    if (p.producer == Producer::kNone || a.y == nullptr || p.sums_group != 0)
      return Status::error("quantize: y needs a producer and a place, and no sums");
  } else if (p.format != Format::kInt8 && p.format != Format::kFp8) {
    return Status::error("quantize: the format is not int8, fp8 or float");
  }
  if (a.residual != nullptr && (p.producer != Producer::kRmsNorm || a.sum == nullptr))
    return Status::error("quantize: a residual needs RMSNorm and a place for its sum with x");
  if (a.row_scale != nullptr && (p.format != Format::kFloat || !is_gate(p.producer)))
    return Status::error("quantize: rows of y are scaled behind a gate alone");
  const bool rows = p.scaling == Scaling::kRow;
  if (p.format == Format::kInt8 && !rows) return Status::error("quantize: int8 has one scale per row");
  if (!rows && (p.producer != Producer::kNone || p.sums_group != 0)) {
    return Status::error("quantize: fused producers and sums need one scale per row");
  }
  if (!is_plain(p.producer) && (!p.symmetric || p.sums_group != 0 || p.order != Order::kRows)) {
    return Status::error("quantize: what producers make is rounded symmetrically, in rows, without sums");
  }
  if (p.producer == Producer::kHadamard && !(is_rotation(p.rotation) && p.k % p.rotation == 0)) {
    return Status::error("quantize: the rotation must be 16, 32, 64, 128 or 256 and divide k");
  }
  const int64_t g = p.sums_group;
  if (g != 0 && g < p.k && g != 32 && g != 64 && g != 128 && g != 256) {
    return Status::error("quantize: sums_group must be 32, 64, 128, 256 or at least k");
  }
  if (p.format == Format::kFloat) return {};
  if (a.q_stride < p.k || a.q_stride > int64_t{1} << 30)
    return Status::error("quantize: q_stride must be from k to 2^30");
  if (p.order == Order::kInt4Tiles && a.q_stride % 64 != 0) {
    return Status::error("quantize: kInt4Tiles needs a q_stride that is a multiple of 64");
  }
  return {};
}

Params describe(const Problem& p, const Arguments& a) {
  const int64_t size = size_of(p.x_dtype);
  const bool floats = p.format == Format::kFloat;
  Params params{};
  params.x = a.x, params.x_stride = a.x_stride;
  const bool silu_mul = p.producer == Producer::kSiluMul;
  params.other = silu_mul ? a.up : a.residual, params.other_stride = silu_mul ? a.up_stride : a.residual_stride;
  if (p.producer == Producer::kSwiglu) {
    params.other = static_cast<const char*>(a.x) + p.k * size, params.other_stride = a.x_stride;
  }
  params.gate = p.gate;
  params.rotation = p.rotation, params.factor = hadamard_factor(p.rotation);
  params.norm_weight = a.norm_weight;
  params.sum = a.sum;
  params.y = floats ? a.y : nullptr;
  params.row_scale = a.row_scale, params.row_scale_dtype = a.row_scale_dtype;
  params.q = static_cast<uint8_t*>(a.q), params.q_stride = a.q_stride;
  params.scales = a.scales, params.zeros = a.zeros, params.sums = p.sums_group == 0 ? nullptr : a.sums;
  params.maxima = static_cast<float*>(a.workspace);
  params.m = p.m;
  params.k = static_cast<int>(p.k);
  params.vectors = static_cast<int>(ceil_div(floats ? p.k : a.q_stride, kVector));
  params.group = p.sums_group >= p.k ? 0 : static_cast<int>(p.sums_group);
  while (params.group >> params.group_shift > 1) ++params.group_shift;
  params.groups = static_cast<int>(p.sums_groups());
  params.norm_weight_dtype = p.norm_weight_dtype;
  params.aligned = p.k % kVector == 0 && is_aligned(a.x, p.m, a.x_stride * size, 16) &&
                   is_aligned(params.other, p.m, params.other_stride * size, 16) && is_aligned(a.sum, 1, 0, 16) &&
                   is_aligned(params.y, 1, 0, 16);
  if (a.norm_weight != nullptr) {
    params.aligned &= p.norm_weight_dtype == p.x_dtype && is_aligned(a.norm_weight, 1, 0, 16);
  }
  params.q_aligned = is_aligned(a.q, 2, a.q_stride, kVector);
  params.fp8 = p.format == Format::kFp8;
  params.symmetric = params.fp8 || p.symmetric;
  params.static_scale = p.static_scale;
  params.int4_tiles = p.order == Order::kInt4Tiles;
  params.eps = p.eps;
  return params;
}

// All kernels let the next one start early. With `pays`, they also start before the previous one ends (PDL).
Status launch_after(void (*kernel)(Params), dim3 grid, dim3 cta, const Params& p, cudaStream_t stream,
                    bool pays = true) {
  Launch launch{grid, cta, stream};
  launch.overlapped = pays && is_hopper_code(reinterpret_cast<const void*>(kernel));
  return launch_kernel(launch, "launching a kernel of quantize", kernel, p);
}

template <DType dtype, Producer producer, int kVectors, bool kFast>
Status launch_rows(Params p, cudaStream_t stream) {
  const bool tile_by_tile = is_local(producer) && p.y != nullptr;
  const int most = tile_by_tile && p.m <= kFewRows ? 128 : max_threads(kVectors);
  p.tiles = static_cast<int>(ceil_div(p.vectors, int64_t{most} * kVectors));
  const int threads = static_cast<int>(ceil_div(p.vectors, p.tiles * kVectors * 32)) * 32;
  // Between GEMMs of few tokens, the CTAs of a norm would gather on the SMs that the GEMM left free, which is slower.
  const bool pays = producer != Producer::kRmsNorm || p.m <= 2 || p.m > 16;
  const dim3 grid(static_cast<unsigned>(p.m), tile_by_tile ? static_cast<unsigned>(p.tiles) : 1);
  return launch_after(rows_kernel<dtype, producer, kVectors, kFast>, grid, dim3(threads), p, stream, pays);
}

template <DType dtype, Producer producer>
Status launch_rows(const Params& p, cudaStream_t stream) {
  constexpr bool kPlain = is_plain(producer);
  const int threads = p.m > kFewRows ? 32 : kPlain && p.m <= kFewTokens ? 512 : 1024;  // then each has more vectors
  const bool aligned = p.aligned && (p.y != nullptr || p.q_aligned);
  if (!aligned) return launch_rows<dtype, producer, 1, false>(p, stream);
  if (p.vectors <= threads) return launch_rows<dtype, producer, 1, true>(p, stream);
  if (p.vectors <= 2 * threads && !(kPlain && p.m <= kFewRows)) {
    return launch_rows<dtype, producer, 2, true>(p, stream);
  }
  // As many vectors as registers allow; without a producer, x stays packed.
  constexpr bool kWide = dtype == DType::kFloat32;
  if constexpr (producer == Producer::kNone && !kWide) {
    if (p.m > kFewRows && p.vectors > 4 * 32) return launch_rows<dtype, producer, 8, true>(p, stream);
  }
  constexpr int kMost = kWide && producer == Producer::kRmsNorm ? 2 : 4;
  return launch_rows<dtype, producer, kMost, true>(p, stream);
}

template <DType dtype, int kVectors>
Status launch_stream(Params p, Scaling scaling, cudaStream_t stream) {
  // Powers of two, so that the threads of a CTA form whole rows of 32, 64, 128 or 256.
  unsigned threads = 32;
  while (threads < kStreamThreads && threads * kVectors < static_cast<unsigned>(p.vectors)) threads *= 2;
  const dim3 cta(threads, kStreamThreads / threads);
  p.slices = static_cast<int>(ceil_div(p.vectors, int64_t{threads} * kVectors));
  const int64_t ctas = ceil_div(p.m, cta.y) * p.slices;
  const dim3 grid(static_cast<unsigned>(ctas));
  if (scaling == Scaling::kBlock) {
    return launch_after(stream_kernel<dtype, Scaling::kBlock, kVectors>, grid, cta, p, stream);
  }
  if (!p.static_scale) {
    p.parts = static_cast<int>(std::min<int64_t>(ctas, kMaxParts));
    const Status status = launch_after(maxima_kernel<dtype, kVectors>, dim3(p.parts), cta, p, stream);
    if (!status.ok()) return status;
  }
  return launch_after(stream_kernel<dtype, Scaling::kTensor, kVectors>, grid, cta, p, stream);
}

template <DType dtype>
Status launch_dtype(const Problem& problem, const Params& p, cudaStream_t stream) {
  // With one row, the scale of the row is the scale of the tensor.
  if (problem.scaling != Scaling::kRow && !(needs_maxima(problem) && problem.m == 1)) {
    return p.m <= kFewRows ? launch_stream<dtype, 1>(p, problem.scaling, stream)
                           : launch_stream<dtype, 4>(p, problem.scaling, stream);
  }
  switch (problem.producer) {
    case Producer::kNone:
      return launch_rows<dtype, Producer::kNone>(p, stream);
    case Producer::kRmsNorm:
      return launch_rows<dtype, Producer::kRmsNorm>(p, stream);
    case Producer::kSiluMul:
      return launch_rows<dtype, Producer::kSiluMul>(p, stream);
    case Producer::kSwiglu:
      return problem.gate.is_silu_mul() ? launch_rows<dtype, Producer::kSiluMul>(p, stream)
                                        : launch_rows<dtype, Producer::kSwiglu>(p, stream);
    case Producer::kHadamard:
      return launch_rows<dtype, Producer::kHadamard>(p, stream);
  }
  return Status::error("quantize: unknown producer");
}

}  // namespace

int64_t workspace_bytes(const Problem& problem) { return needs_maxima(problem) ? kMaxParts * sizeof(float) : 0; }

Status launch(const Problem& problem, const Arguments& arguments, void* stream_handle) {
  if (Status status = check(problem, arguments); !status.ok() || problem.m == 0) return status;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const Params params = describe(problem, arguments);
  switch (problem.x_dtype) {
    case DType::kFloat32:
      return launch_dtype<DType::kFloat32>(problem, params, stream);
    case DType::kFloat16:
      return launch_dtype<DType::kFloat16>(problem, params, stream);
    case DType::kBFloat16:
      return launch_dtype<DType::kBFloat16>(problem, params, stream);
  }
  return Status::error("quantize: unknown dtype");
}

}  // namespace qao::quantize
