// Steps of a batch of rows of a GEMM: quantize, pack, run, and fix rows.
#include "cpu/gemm/batch.h"

#include <algorithm>
#include <cstring>

#include "cpu/gemm/tile_shares.h"
#include "cpu/numeric.h"
#include "cpu/scalar/gemm.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

using gemm::Arguments;
using gemm::Problem;

constexpr int64_t kFewestRows = 32;
constexpr int64_t kRowsNear = 4;  // packed while they are still in cache

}  // namespace

Batch Batch::of(const Kernel& kernel, const Problem& p, const Arguments& a, int64_t first, int64_t rows,
                const QuantizeKernels* kernels) {
  Batch batch;
  batch.kernel = &kernel;
  batch.problem = p, batch.arguments = a;
  batch.problem.m = rows, batch.problem.quantizes_x = false;
  Arguments& own = batch.arguments;
  const bool has_floats = p.x == Format::kFloat || p.quantizes_x;
  own.x = static_cast<const char*>(a.x) + first * a.x_stride * (has_floats ? size_of(p.x_dtype) : 1);
  own.y = static_cast<char*>(a.y) + first * p.n * size_of(p.y_dtype);
  if (p.quantizes_x) {
    batch.rounding.kernels = kernels;
    quantize::Problem& q = batch.rounding.problem;
    q.m = rows, q.k = p.k, q.x_dtype = p.x_dtype;
    q.format = p.x, q.scaling = p.x_scaling, q.symmetric = !p.x_zeros;
    q.rotate(p.x_rotation);
    batch.rounding.arguments.x = own.x, batch.rounding.arguments.x_stride = a.x_stride;
    return batch;
  }
  if (p.x != Format::kFloat && p.x_scaling != Scaling::kTensor) {
    own.x_scales += first * (p.x_scaling == Scaling::kRow ? 1 : p.k_blocks());
  }
  if (p.x_zeros) own.x_zeros += first;
  return batch;
}

int64_t Batch::most_rows(const Kernel& kernel, const Problem& p, const Arguments& a) {
  if (kernel.packing == nullptr) return std::max<int64_t>(p.m, 1);
  if (p.m <= kFewestRows) return kFewestRows;
  Batch batch = of(kernel, p, a, 0, kFewestRows);
  Pieces pieces(nullptr);
  batch.lay_out(pieces);
  const int64_t fitting = kernel.packing->max_bytes / (pieces.bytes() / kFewestRows) / kFewestRows * kFewestRows;
  return std::clamp(fitting, kFewestRows, kernel.packing->max_rows);
}

// Allocates the quantized x, or only its scales if pack() does the rounding.
void Batch::quantize_in(Pieces& pieces) {
  quantize::Arguments& q = rounding.arguments;
  const bool packed = kernel->packing != nullptr && kernel->packing->rounds_to_fp8 && problem.x == Format::kFp8;
  q.q_stride = divide_up(problem.k, kTileColumns) * kTileColumns;
  q.q = packed ? nullptr : pieces.take<int8_t>(problem.m * q.q_stride);
  q.scales = pieces.take<float>(rounding.problem.scales());
  q.zeros = problem.x_zeros ? pieces.take<int32_t>(problem.m) : nullptr;
  arguments.x = q.q, arguments.x_stride = q.q_stride;
  arguments.x_scales = q.scales, arguments.x_zeros = q.zeros;
}

void Batch::lay_out(Pieces& pieces) {
  if (rounding.kernels != nullptr) quantize_in(pieces);
  if (kernel->packing == nullptr) return;
  job = describe(problem, arguments, *kernel->packing);
  job.m = problem.m;
  if (rounding.kernels != nullptr && rounding.arguments.q == nullptr) {
    job.floats = rounding.arguments.x, job.floats_stride = rounding.arguments.x_stride;
    job.floats_dtype = problem.x_dtype;
  }
  job.tiles_m = divide_up(job.m, kTileRows);
  const int64_t wide_bytes = job.m * job.tiles_k * kTileColumns * size_of(job.x_dtype);
  wide = problem.x != Format::kFloat && kernel->packing->widen != nullptr ? pieces.take<char>(wide_bytes) : nullptr;
  if (wide != nullptr) job.x = wide, job.x_stride = job.tiles_k * kTileColumns;
  kernel->packing->lay_out(pieces, &job);
  job.remarks = problem.x != Format::kInt8 ? pieces.take<uint8_t>(job.m) : nullptr;
}

void Batch::share_x(const Batch& packed) {
  const Arguments own = arguments;
  arguments = packed.arguments;
  arguments.weight = own.weight, arguments.scales = own.scales, arguments.row_scales = own.row_scales;
  arguments.weight_sums = own.weight_sums, arguments.bias = own.bias, arguments.y = own.y;
  rounding = packed.rounding, wide = packed.wide;
  job = packed.job;
  job.n = problem.n, job.tiles_n = tiles_n();
  job.weight = static_cast<const uint8_t*>(own.weight), job.scales = own.scales;
  job.weight_sums = own.weight_sums;
  job.bias = problem.has_bias ? own.bias : nullptr, job.bias_dtype = problem.bias_dtype;
  job.y = own.y;
}

int64_t Batch::rows_to_prepare() const {
  return !changes_rows() || (kernel->packing != nullptr && kernel->packing->packs_rows()) ? 0 : problem.m;
}

// Quantizes and widens rows.
void Batch::prepare(int64_t begin, int64_t end) const {
  if (rounding.kernels != nullptr) quantize_rows(rounding.problem, rounding.arguments, *rounding.kernels, begin, end);
  if (wide == nullptr) return;
  Job narrow = job;
  narrow.x = arguments.x, narrow.x_stride = arguments.x_stride;
  kernel->packing->widen(narrow, wide, begin, end);
}

int64_t Batch::units() const { return kernel->packing == nullptr ? 0 : kernel->packing->units(job); }

void Batch::pack(int64_t begin, int64_t end) const {
  if (begin == end) return;
  if (!changes_rows() || rows_to_prepare() > 0) return kernel->packing->pack(job, begin, end);
  for (int64_t m = begin; m < end; m += kRowsNear) {
    const int64_t last = least(m + kRowsNear, end);
    prepare(m, last);
    kernel->packing->pack(job, m, last);
  }
}

bool Batch::has_outliers() const {
  if (job.remarks == nullptr) return false;
  return std::any_of(job.remarks, job.remarks + job.m, [](uint8_t remark) { return (remark & kHasOutliers) != 0; });
}

void Batch::run(int64_t begin, int64_t end) const {
  if (kernel->packing != nullptr) return kernel->run(job, begin, end);
  scalar::gemm(problem, arguments, begin * kTileRows, least(end * kTileRows, problem.n));
}

// Runs the kernel without the outliers of x into float32 memory, then adds the products of the outliers. Rows without
// outliers get the same bits as otherwise.
void Batch::run_with_outliers(const Threads& threads) const {
  Job inner = job;
  int64_t count = 0;
  for (int64_t i = 0; i < job.m * job.tiles_k; ++i) count += __builtin_popcountll(job.fixed_point.outliers[i]);
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
      for (uint64_t bits = job.fixed_point.outliers[m * job.tiles_k + t]; bits != 0; bits &= bits - 1, ++i) {
        columns[i] = static_cast<int32_t>(t * kTileColumns + __builtin_ctzll(bits));
        values[i] = load(job.x, m * job.x_stride + columns[i], job.x_dtype);
      }
    }
  }
  first[job.m] = i;
  inner.y = product, inner.y_dtype = DType::kFloat32;
  const Outliers outliers = {first, columns, values};
  split_tiles(threads, job.tiles_n, work(), [&](int64_t begin, int64_t end) {
    kernel->run(inner, begin, end);
    kernel->packing->add_outliers(inner, outliers, job.y, job.y_dtype, begin, end);
  });
}

// Computes rows [first, first + rows) of y in float32, for any values of x.
void Batch::run_in_float32(int64_t first, int64_t rows, const Threads& threads) const {
  const Kernel* wide_rows = kernel->packing->wide_rows;
  if (wide_rows == nullptr) {
    return split(threads, problem.n, [&](int64_t begin, int64_t end) {
      for (int64_t m = first; m < first + rows; ++m) scalar::gemm_row(problem, arguments, m, begin, end);
    });
  }
  const int64_t most = most_rows(*wide_rows, problem, arguments);
  for (const int64_t last = first + rows; first < last; first += most) {
    Batch batch = of(*wide_rows, problem, arguments, first, std::min(most, last - first));
    Pieces count(nullptr);
    batch.lay_out(count);
    Pieces pieces(scratch(Scratch::kWideRows, count.bytes()));
    batch.lay_out(pieces);
    split(threads, batch.rows_to_prepare(), [&](int64_t begin, int64_t end) { batch.prepare(begin, end); });
    split(threads, batch.units(), [&](int64_t begin, int64_t end) { batch.pack(begin, end); });
    split_tiles(threads, batch.tiles_n(), batch.work(), [&](int64_t begin, int64_t end) { batch.run(begin, end); });
  }
}

// Fixes rows with Inf, NaN, values too large for the kernel, or values too far apart.
void Batch::mend(const Threads& threads) const {
  if (job.remarks == nullptr) return;
  for (int64_t m = 0, end = 0; m < job.m; m = end) {
    for (end = m; end < job.m && (job.remarks[end] & kIsWide) != 0; ++end) {
    }
    if (end > m) {
      run_in_float32(m, end - m, threads);
      continue;
    }
    end = m + 1;
    if ((job.remarks[m] & (kIsHuge | kHasNonfinite)) == 0) continue;
    split(threads, problem.n, [&](int64_t begin, int64_t end) {
      if (job.remarks[m] & kIsHuge) {
        scalar::gemm_row(problem, arguments, m, begin, end);
      } else {
        scalar::gemm_add_nonfinite(problem, arguments, m, begin, end);
      }
    });
  }
}

}  // namespace qao::cpu
