// mm8 on the CPU: which kernel runs an int8 x, and how it is spread over threads; float_mm.cpp has every other x.
#include "cpu/mm8.h"

#include <algorithm>

#include "cpu/float_mm.h"
#include "cpu/mm8_kernels.h"
#include "cpu/mm8_scalar.h"
#include "cpu/pieces.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

using mm8::Arguments;
using mm8::Problem;

enum class Form { kPlain, kRows, kTiles };  // of x inside the kernel

struct Kernel {
  KernelName name;
  Form form;
  void (*pack)(const Mm8Job&, int64_t begin, int64_t end);
  void (*run)(const Mm8Job&, int64_t begin, int64_t end);
};

constexpr Kernel kScalar = {{"scalar", "float64"}, Form::kPlain, nullptr, nullptr};
constexpr Kernel kInt8Avx2 = {{"int8_avx2", "vpmaddwd"}, Form::kRows, mm8_pack_rows_avx2, mm8_int8_avx2};
constexpr Kernel kInt8Avx512 = {{"int8_avx512", "vpdpbusd"}, Form::kRows, mm8_pack_rows_avx2, mm8_int8_avx512};
constexpr Kernel kInt8Amx = {{"int8_amx", "tdpbssd"}, Form::kTiles, mm8_pack_tiles_avx512, mm8_int8_amx};
constexpr Kernel kInt4Avx2 = {{"int8_int4_avx2", "vpmaddubsw"}, Form::kRows, mm8_pack_rows_avx2, mm8_int4_avx2};
constexpr Kernel kInt4GemvAvx512 = {
    {"int8_int4_gemv_avx512", "vpdpbusd"}, Form::kRows, mm8_pack_rows_avx2, mm8_int4_gemv_avx512};
constexpr Kernel kInt4GemmAvx512 = {
    {"int8_int4_gemm_avx512", "vpdpbusd"}, Form::kRows, mm8_pack_rows_avx2, mm8_int4_gemm_avx512};
constexpr Kernel kInt4Amx = {{"int8_int4_amx", "tdpbusd"}, Form::kTiles, mm8_pack_tiles_avx512, mm8_int4_amx};

// Up to how many rows of x a kernel without tiles is the faster one.
constexpr int64_t kInt8FewRows = 4, kInt4FewRows = 1;

const Kernel& choose_int8_int8(const Problem& p, Isa isa) {
  if (isa == Isa::kAvx2) return kInt8Avx2;
  return isa == Isa::kAmx && p.m > kInt8FewRows && p.k <= kMaxIntegerK ? kInt8Amx : kInt8Avx512;
}

const Kernel& choose_int8_int4(const Problem& p, Isa isa) {
  if (isa == Isa::kAvx2) return kInt4Avx2;
  if (p.m <= kInt4FewRows) return kInt4GemvAvx512;
  return isa == Isa::kAmx && p.k <= kMaxIntegerK ? kInt4Amx : kInt4GemmAvx512;
}

const Kernel& choose(const Problem& p, Isa isa) {
  if (isa == Isa::kScalar) return kScalar;
  return p.weight == Format::kInt8 ? choose_int8_int8(p, isa) : choose_int8_int4(p, isa);
}

constexpr int64_t kMaxRows = 256;                      // of x at a time
constexpr int64_t kMaxPackedBytes = int64_t{5} << 18;  // fewer if they are long: they shall stay in L2

Mm8Job describe(const Problem& p, const Arguments& a, Form form) {
  Mm8Job job;
  job.n = p.n, job.k = p.k;
  job.x_stride = a.x_stride;
  job.weight = a.weight, job.scales = a.scales, job.bias = p.has_bias ? a.bias : nullptr;
  job.weight_sums = a.weight_sums;
  job.weight_format = p.weight;
  job.y_dtype = p.y_dtype, job.scale_dtype = p.scale_dtype, job.bias_dtype = p.bias_dtype;
  job.scale_per_row = p.weight_scaling == Scaling::kRow;
  job.parameters = p.has_zeros ? 2 : 1;
  job.tiles_n = divide_up(p.n, kTileRows), job.tiles_k = divide_up(p.k, kTileColumns);
  job.group_size = p.weight == Format::kInt4 ? p.group_size : p.k;
  job.groups = divide_up(p.k, job.group_size);
  const int64_t largest = p.weight == Format::kInt4 && form == Form::kRows ? kRowsSection : kMaxIntegerK;
  job.section = std::min(job.group_size, largest);
  job.sections = divide_up(p.k, job.section);
  job.steps = p.weight == Format::kInt4 && p.group_size == 32 ? 2 * job.tiles_k : job.tiles_k;
  return job;
}

// Sets the sizes of x's packed form for rows [first, first + rows) and, with memory, where it lies; returns its bytes.
int64_t lay_out(const Problem& p, const Arguments& a, Form form, int64_t first, int64_t rows, void* memory,
                Mm8Job* job) {
  job->m = rows;
  job->x = static_cast<const int8_t*>(a.x) + first * a.x_stride;
  job->x_scales = a.x_scales + first;
  job->x_zeros = p.x_zeros ? a.x_zeros + first : nullptr;
  job->y = static_cast<char*>(a.y) + first * p.n * size_of(p.y_dtype);
  job->tiles_m = divide_up(rows, kTileRows);
  Pieces pieces(memory);
  const int64_t padded_rows = form == Form::kTiles ? job->tiles_m * kTileRows : rows;
  job->bytes = pieces.take<int8_t>(padded_rows * (form == Form::kTiles ? job->steps : job->tiles_k) * kTileColumns);
  job->sums = pieces.take<float>(padded_rows * job->sections);
  return pieces.bytes();
}

void run_rows(const Kernel& kernel, const Problem& p, const Arguments& a, int64_t first, int64_t rows,
              const Threads& threads) {
  Mm8Job job = describe(p, a, kernel.form);
  const int64_t bytes = lay_out(p, a, kernel.form, first, rows, nullptr, &job);
  lay_out(p, a, kernel.form, first, rows, scratch(Scratch::kActivations, bytes), &job);
  const int64_t units = kernel.form == Form::kTiles ? job.tiles_m : rows;
  if (is_serial(threads, rows * p.k / 2)) {  // a copy takes half as long
    kernel.pack(job, 0, units);
  } else {
    split(threads, units, [&](int64_t begin, int64_t end) { kernel.pack(job, begin, end); });
  }
  split_tiles(threads, job.tiles_n, rows * p.n * p.k, [&](int64_t begin, int64_t end) { kernel.run(job, begin, end); });
}

// Rows at a time: a multiple of 32 whose packed form fits its share of memory.
int64_t rows_at_once(const Problem& p, const Arguments& a, Form form) {
  Mm8Job job = describe(p, a, form);
  const int64_t bytes_per_row = lay_out(p, a, form, 0, 32, nullptr, &job) / 32;
  return std::clamp(kMaxPackedBytes / bytes_per_row / 32 * 32, int64_t{32}, kMaxRows);
}

}  // namespace

KernelName mm8_kernel(const Problem& problem, Isa isa) {
  return problem.x == Format::kInt8 ? choose(problem, isa).name : float_mm_kernel(problem, isa);
}

Status mm8(const Problem& p, const Arguments& a, const Threads& threads) {
  if (p.x != Format::kInt8) return float_mm(p, a, threads);
  Isa isa;
  if (Status status = selected_isa(&isa); !status.ok()) return status;
  const Kernel& kernel = choose(p, isa);
  if (kernel.form == Form::kPlain) {
    split(threads, p.n, [&](int64_t begin, int64_t end) { mm8_scalar(p, a, begin, end); });
    return {};
  }
  const int64_t step = rows_at_once(p, a, kernel.form);
  for (int64_t first = 0; first < p.m; first += step) {
    run_rows(kernel, p, a, first, std::min(step, p.m - first), threads);
  }
  return {};
}

}  // namespace qao::cpu
