// The driver of all products: x is packed for the kernel that the table names, some rows at a time, N-tiles are spread
// over threads, and what the kernel's arithmetic leaves out of x is put right.
#include "cpu/mm.h"

#include <algorithm>
#include <cstring>

#include "cpu/mm_table.h"
#include "cpu/numeric.h"
#include "cpu/scalar/mm.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

using mm::Arguments;
using mm::Problem;

// Sets the sizes of x's packed form for `rows` rows and, with memory, where it lies; returns its bytes. `wide` is where
// x goes that must be widened first, else null.
int64_t lay_out(const Problem& p, const Packing& packing, int64_t rows, void* memory, Job* job, void** wide) {
  job->m = rows;
  job->tiles_m = divide_up(rows, kTileRows);
  Pieces pieces(memory);
  const int64_t wide_bytes = rows * job->tiles_k * kTileColumns * size_of(job->x_dtype);
  *wide = p.x == Format::kFp8 ? pieces.take<char>(wide_bytes) : nullptr;
  packing.lay_out(pieces, job);
  job->remarks = p.x != Format::kInt8 ? pieces.take<uint8_t>(rows) : nullptr;
  return pieces.bytes();
}

constexpr int64_t kFewestRows = 32;

// Rows at a time: a multiple of kFewestRows whose packed form fits its share of memory.
int64_t rows_at_once(const Problem& p, const Arguments& a, const Packing& packing) {
  if (p.m <= kFewestRows) return kFewestRows;
  Job job = describe(p, a, packing);
  void* wide = nullptr;
  const int64_t bytes_per_row = lay_out(p, packing, kFewestRows, nullptr, &job, &wide) / kFewestRows;
  return std::clamp(packing.max_bytes / bytes_per_row / kFewestRows * kFewestRows, kFewestRows, packing.max_rows);
}

void run_kernel(const Kernel& kernel, const Job& job, const Threads& threads) {
  split_tiles(threads, job.tiles_n, job.m * job.n * job.k,
              [&](int64_t begin, int64_t end) { kernel.run(job, begin, end); });
}

// The kernel's product without the outliers of x goes to memory as float32, and they are added to it. Rows that have
// none get the same bits as otherwise.
void run_with_outliers(const Kernel& kernel, Job job, const Threads& threads) {
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
        columns[i] = static_cast<int32_t>(t * kTileColumns + __builtin_ctzll(bits));
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
    kernel.packing->add_outliers(job, outliers, y, y_dtype, begin, end);
  });
}

// Rows that hold Inf, NaN or values too large for the kernel; row 0 of the job is row `first` of x.
void mend_rows(const Problem& p, const Arguments& a, const Job& job, int64_t first, const Threads& threads) {
  for (int64_t m = 0; m < job.m; ++m) {
    if (job.remarks[m] == 0) continue;
    split(threads, p.n, [&](int64_t begin, int64_t end) {
      if (job.remarks[m] & kIsHuge) {
        scalar::mm_row(p, a, first + m, begin, end);
      } else {
        scalar::mm_add_nonfinite(p, a, first + m, begin, end);
      }
    });
  }
}

// Rows [first, first + rows) of x.
void run_rows(const Kernel& kernel, const Problem& p, const Arguments& a, int64_t first, int64_t rows,
              const Threads& threads) {
  Job job = describe(p, a, *kernel.packing);
  const int64_t x_bytes = p.x == Format::kFloat ? size_of(p.x_dtype) : 1;
  job.x = static_cast<const char*>(a.x) + first * a.x_stride * x_bytes;
  job.x_scales += first * job.x_scale_stride;
  if (job.x_zeros != nullptr) job.x_zeros += first;
  job.y = static_cast<char*>(a.y) + first * p.n * size_of(p.y_dtype);
  void* wide = nullptr;
  const int64_t bytes = lay_out(p, *kernel.packing, rows, nullptr, &job, &wide);
  lay_out(p, *kernel.packing, rows, scratch(Scratch::kActivations, bytes), &job, &wide);

  const auto prepare = [&](int64_t units, int64_t values, const auto& step) {
    is_serial(threads, values) ? step(int64_t{0}, units) : split(threads, units, step);
  };
  if (wide != nullptr) {
    prepare(rows, rows * p.k, [&](int64_t begin, int64_t end) { kernel.packing->widen_fp8(job, wide, begin, end); });
    job.x = wide;
    job.x_stride = job.tiles_k * kTileColumns;
  }
  if (job.remarks != nullptr) std::memset(job.remarks, 0, static_cast<size_t>(rows));
  // Bytes are copied, which takes half as long.
  prepare(kernel.packing->units(job), p.x == Format::kInt8 ? rows * p.k / 2 : rows * p.k,
          [&](int64_t begin, int64_t end) { kernel.packing->pack(job, begin, end); });
  if (job.remarks == nullptr) return run_kernel(kernel, job, threads);
  if (std::any_of(job.remarks, job.remarks + rows, [](uint8_t remark) { return (remark & kHasOutliers) != 0; })) {
    return run_with_outliers(kernel, job, threads);
  }
  run_kernel(kernel, job, threads);
  mend_rows(p, a, job, first, threads);
}

}  // namespace

const char* mm_kernel(const Problem& problem, Features features) { return choose(problem, features).name; }

Status mm(const Problem& p, const Arguments& a, const Threads& threads) {
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  const Kernel& kernel = choose(p, features);
  if (kernel.packing == nullptr) {
    split(threads, p.n, [&](int64_t begin, int64_t end) { scalar::mm(p, a, begin, end); });
    return {};
  }
  const int64_t step = rows_at_once(p, a, *kernel.packing);
  for (int64_t first = 0; first < p.m; first += step) {
    run_rows(kernel, p, a, first, std::min(step, p.m - first), threads);
  }
  return {};
}

}  // namespace qao::cpu
