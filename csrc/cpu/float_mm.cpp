// Products of float or fp8 x on the CPU: which kernel runs, and how it is spread over threads.
#include "cpu/float_mm.h"

#include <algorithm>
#include <cstring>

#include "cpu/float_kernels.h"
#include "cpu/mm8_scalar.h"
#include "cpu/numeric.h"
#include "cpu/pieces.h"
#include "cpu/scratch.h"
#include "int4_mm/layout.h"

namespace qao::cpu {
namespace {

using int4_mm::kTileK;
using int4_mm::kTileN;
using mm8::Arguments;
using mm8::Problem;

enum class Form { kPlain, kFixedPoint, kFloats, kPairs };  // of x inside the kernel

struct Kernel {
  KernelName name;
  Form form;
  void (*pack)(const FloatJob&, int64_t begin, int64_t end);
  void (*run)(const FloatJob&, int64_t begin, int64_t end);
};

constexpr Kernel kScalar = {{"scalar", "float64"}, Form::kPlain, nullptr, nullptr};
constexpr Kernel kGemvAvx2 = {{"gemv_avx2", "vpmaddubsw"}, Form::kFixedPoint, int4_pack_fixed_avx2, int4_gemv_avx2};
constexpr Kernel kGemmAvx2 = {{"gemm_avx2", "vpmaddubsw"}, Form::kFixedPoint, int4_pack_fixed_avx2, int4_gemm_avx2};
constexpr Kernel kGemvAvx512 = {{"gemv_avx512", "vpdpbusd"}, Form::kFixedPoint, int4_pack_fixed_avx2, int4_gemv_avx512};
constexpr Kernel kGemmAvx512 = {{"gemm_avx512", "vpdpbusd"}, Form::kFixedPoint, int4_pack_fixed_avx2, int4_gemm_avx512};
constexpr Kernel kFewRowsAmxKernel = {
    {"few_rows_amx", "tdpbusd"}, Form::kFixedPoint, int4_pack_fixed_avx2, int4_few_rows_amx};
constexpr Kernel kGemmAmx = {{"gemm_amx", "tdpbf16ps"}, Form::kPairs, pack_pairs_amx, int4_gemm_amx};
constexpr Kernel kByteRowsAvx2 = {{"byte_rows_avx2", "vfmadd"}, Form::kFloats, byte_pack_avx2, byte_rows_avx2};
constexpr Kernel kByteRowsAvx512 = {{"byte_rows_avx512", "vfmadd"}, Form::kFloats, byte_pack_avx512, byte_rows_avx512};
constexpr Kernel kByteGemmAmx = {{"byte_gemm_amx", "tdpbf16ps"}, Form::kPairs, pack_pairs_amx, byte_gemm_amx};

// AVX-512: up to how many rows of x reading each row of W again costs less than expanding W once for all.
constexpr int64_t kGemvRows = 2;
// AMX, W in eight bits: the same, against float32 arithmetic.
constexpr int64_t kByteRows = 2;

// The dtype kernels see. fp8 is widened, exactly in any dtype; with an int4 W to that of y, since what the kernels
// round goes by it.
DType kernel_dtype(const Problem& p) {
  if (p.x != Format::kFp8) return p.x_dtype;
  return p.weight == Format::kInt4 ? p.y_dtype : DType::kBFloat16;
}

const Kernel& choose_int4(const Problem& p, Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return kScalar;
    case Isa::kAvx2:
      return p.m == 1 ? kGemvAvx2 : kGemmAvx2;
    case Isa::kAvx512:
    case Isa::kAvx512Bf16:
      return p.m <= kGemvRows ? kGemvAvx512 : kGemmAvx512;
    case Isa::kAmx:
      if (p.m == 1) return kGemvAvx512;
      if (p.m <= kFewRowsAmx && kernel_dtype(p) != DType::kFloat32 && p.group_size != 32) return kFewRowsAmxKernel;
      return p.m <= kGemvRows ? kGemvAvx512 : kGemmAmx;
  }
  return kScalar;
}

const Kernel& choose(const Problem& p, Isa isa) {
  if (isa == Isa::kScalar) return kScalar;
  if (p.weight == Format::kInt4) return choose_int4(p, isa);
  if (isa == Isa::kAvx2) return kByteRowsAvx2;
  return isa == Isa::kAmx && p.m > kByteRows ? kByteGemmAmx : kByteRowsAvx512;
}

constexpr int64_t kMaxRows = 512;                       // of x at a time
constexpr int64_t kMaxPackedBytes = int64_t{16} << 20;  // fewer if they are long
constexpr int64_t kMaxFloatBytes = int64_t{1} << 20;    // read again for every 4 rows of W, so they must fit L2

FloatJob describe(const Problem& p, const Arguments& a, Form form) {
  static constexpr float kOne = 1;
  FloatJob job;
  job.n = p.n, job.k = p.k;
  job.x_stride = a.x_stride;
  job.x_scales = p.x == Format::kFloat ? &kOne : a.x_scales;
  if (p.x == Format::kFp8) {
    job.x_scale_stride = p.x_scaling == Scaling::kTensor ? 0 : p.x_scaling == Scaling::kRow ? 1 : p.k_blocks();
    job.x_block_stride = p.x_scaling == Scaling::kBlock ? 1 : 0;
  }
  job.weight = static_cast<const uint8_t*>(a.weight), job.scales = a.scales;
  job.bias = p.has_bias ? a.bias : nullptr;
  job.weight_format = p.weight, job.weight_scaling = p.weight_scaling;
  job.x_dtype = kernel_dtype(p), job.y_dtype = p.y_dtype;
  job.scale_dtype = p.scale_dtype, job.bias_dtype = p.bias_dtype;
  job.parameters = p.has_zeros ? 2 : 1;
  job.tiles_n = int4_mm::tiles_n(p.n), job.tiles_k = int4_mm::tiles_k(p.k);
  const bool int4 = p.weight == Format::kInt4;
  job.groups = int4 ? p.groups() : 1;
  const int64_t group = int4 ? p.group_size : p.k;
  const bool grouped = int4 && (group == 32 || group == 64 || group == 128 || group == 256);
  const int largest = int4 && form != Form::kPairs ? kMaxSection : kMaxSectionAmx;
  job.section = grouped ? static_cast<int>(std::min<int64_t>(group, largest)) : largest;
  job.sections = divide_up(p.k, job.section);
  job.sections_per_group = grouped ? group / job.section : job.sections;
  return job;
}

// Sets the sizes of x's packed form for rows [first, first + rows) and, with memory, where it lies; returns its bytes.
// `wide` is where x goes that must be widened first, else null.
int64_t lay_out(const Problem& p, const Arguments& a, Form form, int64_t first, int64_t rows, void* memory,
                FloatJob* job, void** wide) {
  const int64_t x_bytes = p.x == Format::kFp8 ? 1 : size_of(p.x_dtype);
  job->m = rows;
  job->x = static_cast<const char*>(a.x) + first * a.x_stride * x_bytes;
  job->x_scales += first * job->x_scale_stride;
  job->y = static_cast<char*>(a.y) + first * p.n * size_of(p.y_dtype);
  Pieces pieces(memory);
  const int64_t wide_bytes = rows * job->tiles_k * kTileK * size_of(job->x_dtype);
  *wide = p.x == Format::kFp8 ? pieces.take<char>(wide_bytes) : nullptr;
  if (form == Form::kFixedPoint) {
    job->words = job->x_dtype == DType::kFloat32 ? 2 : 1;
    job->chunk_tiles = divide_up(job->section, kTileK);
    job->chunks = divide_up(job->tiles_k, job->chunk_tiles);
    job->bytes = pieces.take<int8_t>(rows * job->tiles_k * job->words * 2 * kTileK);
    job->chunk_scales = pieces.take<float>(rows * job->chunks);
    job->word_sums = pieces.take<float>(rows * job->sections * job->words);
    job->outliers = pieces.take<uint64_t>(rows * job->tiles_k);
  } else if (form == Form::kFloats) {
    job->floats = pieces.take<float>(rows * job->tiles_k * kTileK);
  } else {
    job->parts = job->x_dtype == DType::kFloat32 ? 3 : job->x_dtype == DType::kFloat16 ? 2 : 1;
    job->tiles_m = divide_up(rows, kTileN);
    const int64_t padded_rows = job->tiles_m * kTileN;
    const bool int4 = job->weight_format == Format::kInt4, blocks = !int4 && p.weight_scaling == Scaling::kBlock;
    job->pairs = pieces.take<uint16_t>(divide_up(p.k, kBlockK) * kBlockK * padded_rows * job->parts);
    job->sums = pieces.take<float>(int4 && job->parts > 1 ? job->sections * padded_rows : 0);
    job->blocks = blocks ? pieces.take<float>(job->sections * padded_rows) : nullptr;
  }
  job->remarks = pieces.take<uint8_t>(rows);
  return pieces.bytes();
}

void mend_rows(const Problem& p, const Arguments& a, const FloatJob& job, int64_t first, const Threads& threads) {
  for (int64_t m = 0; m < job.m; ++m) {
    if (job.remarks[m] == 0) continue;
    split(threads, p.n, [&](int64_t begin, int64_t end) {
      if (job.remarks[m] & kIsHuge) {
        mm8_scalar_row(p, a, first + m, begin, end);
      } else {
        mm8_add_nonfinite(p, a, first + m, begin, end);
      }
    });
  }
}

// The kernel's product without the outliers of x goes to memory as float32, and they are added to it. Rows that have
// none get the same bits as otherwise.
void run_with_outliers(const Kernel& kernel, FloatJob job, const Threads& threads) {
  int64_t count = 0;
  for (int64_t i = 0; i < job.m * job.tiles_k; ++i) count += __builtin_popcountll(job.outliers[i]);
  float *product = nullptr, *values = nullptr;
  int64_t* first = nullptr;
  int32_t* columns = nullptr;
  const auto take = [&](void* memory) {
    Pieces pieces(memory);
    product = pieces.take<float>(job.m * job.n);
    first = pieces.take<int64_t>(job.m + 1);
    columns = pieces.take<int32_t>(count), values = pieces.take<float>(count);
    return pieces.bytes();
  };
  take(scratch(Scratch::kOutliers, take(nullptr)));
  int64_t i = 0;
  for (int64_t m = 0; m < job.m; ++m) {
    first[m] = i;
    for (int64_t t = 0; t < job.tiles_k; ++t) {
      for (uint64_t bits = job.outliers[m * job.tiles_k + t]; bits != 0; bits &= bits - 1, ++i) {
        columns[i] = static_cast<int32_t>(t * kTileK + __builtin_ctzll(bits));
        values[i] = load(job.x, m * job.x_stride + columns[i], job.x_dtype);
      }
    }
  }
  first[job.m] = i;
  void* const y = job.y;
  const DType y_dtype = job.y_dtype;
  job.y = product, job.y_dtype = DType::kFloat32;
  const Outliers outliers = {first, columns, values};
  split_tiles(threads, job.tiles_n, job.m * job.n * job.k, [&](int64_t begin, int64_t end) {
    kernel.run(job, begin, end);
    int4_add_outliers_avx2(job, outliers, y, y_dtype, begin, end);
  });
}

void run_rows(const Kernel& kernel, const Problem& p, const Arguments& a, int64_t first, int64_t rows,
              const Threads& threads) {
  const FloatJob described = describe(p, a, kernel.form);
  FloatJob job = described;
  void* wide = nullptr;
  const int64_t bytes = lay_out(p, a, kernel.form, first, rows, nullptr, &job, &wide);
  job = described;
  lay_out(p, a, kernel.form, first, rows, scratch(Scratch::kActivations, bytes), &job, &wide);
  std::memset(job.remarks, 0, static_cast<size_t>(rows));

  const auto prepare = [&](int64_t units, const auto& step) {
    is_serial(threads, rows * p.k) ? step(int64_t{0}, units) : split(threads, units, step);
  };
  if (wide != nullptr) {
    prepare(rows, [&](int64_t begin, int64_t end) { widen_fp8_avx2(job, wide, begin, end); });
    job.x = wide;
    job.x_stride = job.tiles_k * kTileK;
  }
  prepare(kernel.form == Form::kPairs ? divide_up(p.k, kPackK) : rows,
          [&](int64_t begin, int64_t end) { kernel.pack(job, begin, end); });
  if (std::any_of(job.remarks, job.remarks + rows, [](uint8_t remark) { return (remark & kHasOutliers) != 0; })) {
    return run_with_outliers(kernel, job, threads);
  }
  split_tiles(threads, job.tiles_n, rows * p.n * p.k, [&](int64_t begin, int64_t end) { kernel.run(job, begin, end); });
  mend_rows(p, a, job, first, threads);
}

// Rows at a time: a multiple of 32 whose packed form fits its share of memory.
int64_t rows_at_once(const Problem& p, const Arguments& a, Form form) {
  FloatJob job = describe(p, a, form);
  void* wide = nullptr;
  const int64_t bytes_per_row = lay_out(p, a, form, 0, 32, nullptr, &job, &wide) / 32;
  const int64_t limit = form == Form::kFloats ? kMaxFloatBytes : kMaxPackedBytes;
  return std::clamp(limit / bytes_per_row / 32 * 32, int64_t{32}, kMaxRows);
}

}  // namespace

KernelName float_mm_kernel(const Problem& problem, Isa isa) { return choose(problem, isa).name; }

Status float_mm(const Problem& p, const Arguments& a, const Threads& threads) {
  Isa isa;
  if (Status status = selected_isa(&isa); !status.ok()) return status;
  const Kernel& kernel = choose(p, isa);
  if (kernel.form == Form::kPlain) {
    split(threads, p.n, [&](int64_t begin, int64_t end) { mm8_scalar(p, a, begin, end); });
    return {};
  }
  const int64_t step = rows_at_once(p, a, kernel.form);
  for (int64_t first = 0; first < p.m; first += step)
    run_rows(kernel, p, a, first, std::min(step, p.m - first), threads);
  return {};
}

}  // namespace qao::cpu
