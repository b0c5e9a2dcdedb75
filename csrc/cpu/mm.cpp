// The driver of a product: x is packed for the kernel that the table names, some rows at a time, and N-tiles are spread
// over threads.
#include "cpu/mm.h"

#include <algorithm>
#include <cstring>

#include "cpu/mm_batch.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

using mm::Arguments;
using mm::Problem;

void run_batch(Batch batch, const Threads& threads) {
  Pieces count(nullptr);
  batch.lay_out(count);
  Pieces pieces(scratch(Scratch::kActivations, count.bytes()));
  batch.lay_out(pieces);

  const auto prepare = [&](int64_t units, int64_t values, const auto& step) {
    is_serial(threads, values) ? step(int64_t{0}, units) : split(threads, units, step);
  };
  const int64_t rows = batch.problem.m, values = rows * batch.problem.k;
  if (batch.wide != nullptr) {
    prepare(rows, values, [&](int64_t begin, int64_t end) { batch.widen(begin, end); });
    batch.use_wide();
  }
  if (batch.job.remarks != nullptr) std::memset(batch.job.remarks, 0, static_cast<size_t>(rows));
  // Bytes are copied, which takes half as long.
  prepare(batch.units(), batch.problem.x == Format::kInt8 ? values / 2 : values,
          [&](int64_t begin, int64_t end) { batch.pack(begin, end); });
  if (batch.has_outliers()) return batch.run_with_outliers(threads);
  split_tiles(threads, batch.tiles_n(), batch.work(), [&](int64_t begin, int64_t end) { batch.run(begin, end); });
  batch.mend(threads);
}

}  // namespace

const char* mm_kernel(const Problem& problem, Features features) { return choose(problem, features).name; }

Status mm(const Problem& p, const Arguments& a, const Threads& threads) {
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  const Kernel& kernel = choose(p, features);
  const int64_t step = Batch::most_rows(kernel, p, a);
  for (int64_t first = 0; first < p.m; first += step) {
    run_batch(Batch::of(kernel, p, a, first, std::min(step, p.m - first)), threads);
  }
  return {};
}

}  // namespace qao::cpu
