// GEMM driver on the CPU.
// Packs some rows of x at a time for the kernel that the table selects, and divides N-tiles among threads.
#include "cpu/gemm/driver.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "cpu/gemm/batch.h"
#include "cpu/gemm/tile_shares.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

using gemm::Arguments;
using gemm::Problem;

constexpr int64_t kRowsUnit = 32;                   // rows of a part are a multiple of it: whole pairs of tiles of x
constexpr int64_t kFewestRows = 128;                // rows of a part: each part expands W again
constexpr int64_t kSmallWeight = int64_t{1} << 23;  // values of W up to which every thread may read all of it
constexpr int64_t kPartsBytes = int64_t{32} << 20;  // packed x of all parts together

int64_t bytes_of(Batch batch) {
  Pieces count(nullptr);
  batch.lay_out(count);
  return count.bytes();
}

void lay_out(Batch* batch, void* memory) {
  Pieces pieces(memory);
  batch->lay_out(pieces);
}

void forget_remarks(const Batch& batch) {
  if (batch.job.remarks != nullptr) std::memset(batch.job.remarks, 0, static_cast<size_t>(batch.problem.m));
}

// Batches of the same rows, with different weights.
void run_batches(std::span<Batch> batches, const Threads& threads) {
  Batch& first = batches[0];
  lay_out(&first, scratch(Scratch::kActivations, bytes_of(first)));
  forget_remarks(first);
  int64_t tiles = 0, work = 0;
  for (Batch& batch : batches) {
    if (&batch != &first) batch.share_x(first);
    tiles += batch.tiles_n(), work += batch.work();
  }
  const auto prepare = [&](int64_t begin, int64_t end) { first.prepare(begin, end); };
  const auto pack = [&](int64_t begin, int64_t end) { first.pack(begin, end); };
  const auto run = [&](int64_t begin, int64_t end) {
    for (const Batch& batch : batches) {
      const int64_t count = batch.tiles_n();
      if (begin < count && end > 0) batch.run(std::max<int64_t>(begin, 0), least(end, count));
      begin -= count, end -= count;
    }
  };
  const auto mend = [&] {
    for (const Batch& batch : batches) batch.mend(threads);
  };
  const bool knows_outliers = first.job.fixed_point.outliers == nullptr;  // there cannot be any
  Step rows(threads.count, first.rows_to_prepare()), units(threads.count, first.units());
  TileShares shares(threads.count, tiles, work);
  if (is_serial(threads, first.values_to_pack())) {
    prepare(0, first.rows_to_prepare());
    pack(0, first.units());
  } else {
    // One parallel region: on a busy machine, the end of each region may cost a scheduler time slice.
    threads.for_each([&](int thread) {
      rows.run(prepare);
      units.run(pack);
      if (knows_outliers) shares.run(thread, run);
    });
    if (knows_outliers) return mend();
  }
  if (first.has_outliers()) {
    for (const Batch& batch : batches) batch.run_with_outliers(threads);
  } else {
    threads.for_each([&](int thread) { shares.run(thread, run); });
  }
  mend();
}

void run_batch(Batch batch, const Threads& threads) { run_batches({&batch, 1}, threads); }

// For more threads than parts: a few threads share each part, with a barrier after every step.
void run_shared(std::vector<Batch>& parts, const Threads& threads) {
  int64_t bytes = 0;
  for (const Batch& part : parts) bytes += bytes_of(part);
  char* memory = static_cast<char*>(scratch(Scratch::kActivations, bytes));
  for (Batch& part : parts) {
    lay_out(&part, memory);
    memory += bytes_of(part);
    forget_remarks(part);
  }
  // Calls step(part, begin, end) over the units(part) of all parts, divided evenly among the threads.
  const int64_t count = static_cast<int64_t>(parts.size());
  const auto each = [&](const auto& units, const auto& step) {
    threads.for_each([&](int64_t thread) {
      for (int64_t i = 0; i < count; ++i) {
        const auto at = [&](int64_t border) {
          return units(parts[i]) * std::clamp<int64_t>(border * count - i * threads.count, 0, threads.count) /
                 threads.count;
        };
        if (at(thread) < at(thread + 1)) step(parts[i], at(thread), at(thread + 1));
      }
    });
  };
  if (parts[0].rows_to_prepare() > 0) {
    each([](const Batch& part) { return part.rows_to_prepare(); },
         [](const Batch& part, int64_t begin, int64_t end) { part.prepare(begin, end); });
  }
  each([](const Batch& part) { return part.units(); },
       [](const Batch& part, int64_t begin, int64_t end) { part.pack(begin, end); });
  const auto has_outliers = [](const Batch& part) { return part.has_outliers(); };
  if (std::none_of(parts.begin(), parts.end(), has_outliers)) {
    each([](const Batch& part) { return divide_up(part.tiles_n(), 2); },
         [](const Batch& part, int64_t begin, int64_t end) { part.run(2 * begin, least(2 * end, part.tiles_n())); });
    for (const Batch& part : parts) part.mend(threads);
    return;
  }
  // With outliers, parts run one after another.
  for (const Batch& part : parts) {
    if (part.has_outliers()) {
      part.run_with_outliers(threads);
    } else {
      split(threads, part.tiles_n(), [&](int64_t begin, int64_t end) { part.run(begin, end); });
    }
    part.mend(threads);
  }
}

// Partition of the rows. Either all threads process one part after another. Or parts run concurrently, so that no
// thread reads what another packed, if all threads may read W and there are enough rows.
struct Cut {
  int64_t count = 1;
  bool side_by_side = false;
};

Cut cut(const Kernel& kernel, const Problem& p, const Arguments& a, int64_t threads) {
  const int64_t least_count = divide_up(p.m, Batch::most_rows(kernel, p, a)), most_count = p.m / kFewestRows;
  if (kernel.packing == nullptr || threads == 1 || most_count < 2 || p.n * p.k > kSmallWeight) return {least_count};
  if (least_count > threads) {
    const int64_t even = divide_up(least_count, threads) * threads;
    return {even <= most_count ? even : least_count, true};
  }
  return {std::max(least_count, std::min(threads, most_count)), true};
}

}  // namespace

const char* gemm_kernel(const Problem& problem, Features features) { return choose(problem, features).name; }

namespace {

// Whether both pack x in the same way: they differ in N, the bias and the alignment of W at most.
bool pack_alike(const Problem& a, const Problem& b) {
  const auto form = [](const Problem& p) {
    return std::tuple(p.m, p.k, p.x, p.weight, p.gguf_type, p.x_dtype, p.y_dtype, p.x_scaling, p.weight_scaling,
                      p.group_size, p.has_zeros, p.scale_dtype, p.x_zeros, p.quantizes_x, p.x_rotation, p.row_scales,
                      p.batch_invariant);
  };
  return form(a) == form(b);
}

}  // namespace

Status gemm(std::span<const Gemm> gemms, const Threads& threads) {
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  const Problem& first = gemms[0].problem;
  const Kernel& kernel = choose(first, features);
  const bool one_pass = std::all_of(gemms.begin(), gemms.end(), [&](const Gemm& gemm) {
    const Problem& p = gemm.problem;
    return pack_alike(first, p) && &choose(p, features) == &kernel &&
           cut(kernel, p, gemm.arguments, threads.count).count == 1;
  });
  if (!one_pass) {
    for (const Gemm& gemm : gemms) {
      if (Status status = cpu::gemm(gemm.problem, gemm.arguments, threads); !status.ok()) return status;
    }
    return {};
  }
  const QuantizeKernels& quantizers = quantize_kernels(features);
  std::vector<Batch> batches;
  for (const auto& [problem, arguments] : gemms) {
    batches.push_back(Batch::of(kernel, problem, arguments, 0, problem.m, &quantizers));
  }
  run_batches(batches, threads);
  return {};
}

Status gemm(const Problem& p, const Arguments& a, const Threads& threads) {
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  const Kernel& kernel = choose(p, features);
  const QuantizeKernels& quantizers = quantize_kernels(features);
  const Cut parts = cut(kernel, p, a, threads.count);
  const int64_t units = divide_up(p.m, kRowsUnit);
  const auto part = [&](int64_t i) {
    const int64_t first = units * i / parts.count * kRowsUnit;
    const int64_t last = std::min(units * (i + 1) / parts.count * kRowsUnit, p.m);
    return Batch::of(kernel, p, a, first, last - first, &quantizers);
  };
  if (parts.side_by_side && parts.count >= threads.count) {
    share_near(threads, parts.count, [&](int64_t i) { run_batch(part(i), Threads{}); });
    return {};
  }
  if (parts.side_by_side && bytes_of(part(0)) * parts.count <= kPartsBytes) {
    std::vector<Batch> all;
    for (int64_t i = 0; i < parts.count; ++i) all.push_back(part(i));
    run_shared(all, threads);
    return {};
  }
  for (int64_t i = 0; i < parts.count; ++i) run_batch(part(i), threads);
  return {};
}

}  // namespace qao::cpu
