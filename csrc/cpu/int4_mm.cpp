// int4_mm on the CPU: which kernel runs, and how it is spread over threads.
#include "cpu/int4_mm.h"

#include <algorithm>
#include <cstring>

#include "cpu/int4_kernels.h"
#include "cpu/int4_mm_scalar.h"
#include "cpu/pieces.h"
#include "cpu/scratch.h"
#include "int4_mm/layout.h"

namespace qao::cpu {
namespace {

using int4_mm::Arguments;
using int4_mm::kTileK;
using int4_mm::kTileN;
using int4_mm::Problem;

enum class Form { kPlain, kFixedPoint, kPairs };  // of x inside the kernel

struct Kernel {
  const char* name;
  Form form;
  void (*pack)(const Int4Job&, int64_t begin, int64_t end);
  void (*run)(const Int4Job&, int64_t begin, int64_t end);
};

constexpr Kernel kScalar = {"scalar", Form::kPlain, nullptr, nullptr};
constexpr Kernel kGemvAvx2 = {"gemv_avx2", Form::kFixedPoint, int4_pack_fixed_avx2, int4_gemv_avx2};
constexpr Kernel kGemmAvx2 = {"gemm_avx2", Form::kFixedPoint, int4_pack_fixed_avx2, int4_gemm_avx2};
constexpr Kernel kGemvAvx512 = {"gemv_avx512", Form::kFixedPoint, int4_pack_fixed_avx2, int4_gemv_avx512};
constexpr Kernel kGemmAvx512 = {"gemm_avx512", Form::kFixedPoint, int4_pack_fixed_avx2, int4_gemm_avx512};
constexpr Kernel kFewRowsAmxKernel = {"few_rows_amx", Form::kFixedPoint, int4_pack_fixed_avx2, int4_few_rows_amx};
constexpr Kernel kGemmAmx = {"gemm_amx", Form::kPairs, int4_pack_pairs_amx, int4_gemm_amx};

// AVX-512: up to how many rows of x reading each row of W again costs less than expanding W once for all.
constexpr int64_t kGemvRows = 2;

const Kernel& choose(const Problem& p, Isa isa) {
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
      if (p.m <= kFewRowsAmx && p.x_dtype != DType::kFloat32 && p.group_size != 32) return kFewRowsAmxKernel;
      return p.m <= kGemvRows ? kGemvAvx512 : kGemmAmx;
  }
  return kScalar;
}

constexpr int64_t kMaxRows = 512;                       // of x at a time
constexpr int64_t kMaxPackedBytes = int64_t{16} << 20;  // fewer if they are long
constexpr int64_t kSerialPackValues = 16384;            // waking threads would cost more

Int4Job describe(const Problem& p, const Arguments& a, Form form) {
  Int4Job job;
  job.n = p.n, job.k = p.k;
  job.x_stride = a.x_stride;
  job.weight = a.weight, job.scales = a.scales, job.bias = p.has_bias ? a.bias : nullptr;
  job.x_dtype = p.x_dtype, job.scale_dtype = p.scale_dtype, job.bias_dtype = p.bias_dtype;
  job.parameters = p.has_zeros ? 2 : 1;
  job.tiles_n = int4_mm::tiles_n(p.n), job.tiles_k = int4_mm::tiles_k(p.k), job.groups = p.groups();
  const bool grouped = p.group_size == 32 || p.group_size == 64 || p.group_size == 128 || p.group_size == 256;
  const int largest = form == Form::kPairs ? kMaxSectionAmx : kMaxSection;
  job.section = grouped ? static_cast<int>(std::min<int64_t>(p.group_size, largest)) : largest;
  job.sections = divide_up(p.k, job.section);
  job.sections_per_group = grouped ? p.group_size / job.section : job.sections;
  return job;
}

// Sets the sizes of x's packed form for rows [first, first + rows) and, with memory, where it lies; returns its bytes.
int64_t lay_out(const Problem& p, const Arguments& a, Form form, int64_t first, int64_t rows, void* memory,
                Int4Job* job) {
  const int64_t row_bytes = a.x_stride * size_of(p.x_dtype);
  job->m = rows;
  job->x = static_cast<const char*>(a.x) + first * row_bytes;
  job->y = static_cast<char*>(a.y) + first * p.n * size_of(p.x_dtype);
  Pieces pieces(memory);
  if (form == Form::kFixedPoint) {
    job->words = p.x_dtype == DType::kFloat32 ? 2 : 1;
    job->chunk_tiles = divide_up(job->section, kTileK);
    job->chunks = divide_up(job->tiles_k, job->chunk_tiles);
    job->bytes = pieces.take<int8_t>(rows * job->tiles_k * job->words * 2 * kTileK);
    job->chunk_scales = pieces.take<float>(rows * job->chunks);
    job->word_sums = pieces.take<float>(rows * job->sections * job->words);
  } else {
    job->parts = p.x_dtype == DType::kFloat32 ? 3 : p.x_dtype == DType::kFloat16 ? 2 : 1;
    job->tiles_m = divide_up(rows, kTileN);
    const int64_t padded_rows = job->tiles_m * kTileN;
    job->pairs = pieces.take<uint16_t>(divide_up(p.k, kBlockK) * kBlockK * padded_rows * job->parts);
    job->sums = pieces.take<float>(job->parts > 1 ? job->sections * padded_rows : 0);
  }
  job->remarks = pieces.take<uint8_t>(rows);
  return pieces.bytes();
}

void mend_rows(const Problem& p, const Arguments& a, const Int4Job& job, int64_t first, const Threads& threads) {
  for (int64_t m = 0; m < job.m; ++m) {
    if (job.remarks[m] == 0) continue;
    split(threads, p.n, [&](int64_t begin, int64_t end) {
      if (job.remarks[m] & kIsHuge) {
        int4_mm_scalar_row(p, a, first + m, begin, end);
      } else {
        int4_add_nonfinite(p, a, first + m, begin, end);
      }
    });
  }
}

void run_rows(const Kernel& kernel, const Problem& p, const Arguments& a, int64_t first, int64_t rows,
              const Threads& threads) {
  Int4Job job = describe(p, a, kernel.form);
  const int64_t bytes = lay_out(p, a, kernel.form, first, rows, nullptr, &job);
  lay_out(p, a, kernel.form, first, rows, scratch(Scratch::kActivations, bytes), &job);
  std::memset(job.remarks, 0, static_cast<size_t>(rows));

  const int64_t units = kernel.form == Form::kFixedPoint ? rows : divide_up(p.k, kPackK);
  if (rows * p.k <= kSerialPackValues) {
    kernel.pack(job, 0, units);
  } else {
    split(threads, units, [&](int64_t begin, int64_t end) { kernel.pack(job, begin, end); });
  }
  split(threads, job.tiles_n, [&](int64_t begin, int64_t end) { kernel.run(job, begin, end); });
  mend_rows(p, a, job, first, threads);
}

// Rows at a time: a multiple of 32 whose packed form fits its share of memory.
int64_t rows_at_once(const Problem& p, const Arguments& a, Form form) {
  Int4Job job = describe(p, a, form);
  const int64_t bytes_per_row = lay_out(p, a, form, 0, 32, nullptr, &job) / 32;
  return std::clamp(kMaxPackedBytes / bytes_per_row / 32 * 32, int64_t{32}, kMaxRows);
}

}  // namespace

const char* int4_mm_kernel(const Problem& problem, Isa isa) { return choose(problem, isa).name; }

Status int4_mm(const Problem& p, const Arguments& a, const Threads& threads) {
  Isa isa;
  if (Status status = selected_isa(&isa); !status.ok()) return status;
  const Kernel& kernel = choose(p, isa);
  if (kernel.form == Form::kPlain) {
    split(threads, p.n, [&](int64_t begin, int64_t end) { int4_mm_scalar(p, a, begin, end); });
    return {};
  }
  const int64_t step = rows_at_once(p, a, kernel.form);
  for (int64_t first = 0; first < p.m; first += step)
    run_rows(kernel, p, a, first, std::min(step, p.m - first), threads);
  return {};
}

}  // namespace qao::cpu
