// Driver of grouped GEMMs on the CPU.
// The batches of all experts run concurrently, so that many experts with few rows cost as many thread barriers as one
// GEMM.
#include "cpu/gemm/grouped.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/gemm/batch.h"
#include "cpu/numeric.h"
#include "cpu/quantize_kernels.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

using gemm::Arguments;
using gemm::Experts;
using gemm::Problem;

constexpr int64_t kWaveBytes = int64_t{32} << 20;  // packed x in flight

// Rows of y from `first` on, all of one expert. If row scales or a gate follow, the batch writes to memory of the wave:
// in y's dtype before a gate, otherwise in float32.
struct Part {
  Batch batch;
  int64_t first = 0;
  bool gathers = false;
};

template <typename T>
const void* advance(const T* pointer, int64_t bytes) {
  return pointer == nullptr ? nullptr : reinterpret_cast<const char*>(pointer) + bytes;
}

class Wave {
 public:
  Wave(const Problem& p, const Arguments& a, const Experts& e, const quantize::Gate* gate,
       const QuantizeKernels& kernels, const Threads& threads)
      : p_(p), a_(a), e_(e), gate_(gate), kernels_(kernels), threads_(threads) {}

  void add(Part part) {
    Pieces count(nullptr);
    lay_out(count, &part);
    if (!parts_.empty() && bytes_ + count.bytes() > kWaveBytes) run();
    bytes_ += count.bytes();
    parts_.push_back(part);
  }

  void run() {
    Pieces pieces(scratch(Scratch::kActivations, bytes_));
    for (Part& part : parts_) lay_out(pieces, &part);
    prepare();
    multiply();
    if (gate_ != nullptr || e_.row_scale != nullptr) finish();
    parts_.clear();
    bytes_ = 0;
  }

 private:
  int64_t x_bytes() const { return p_.x == Format::kFloat ? size_of(p_.x_dtype) : 1; }
  int64_t scales_of_row() const {
    return p_.x == Format::kFloat || p_.x_scaling == Scaling::kTensor ? 0
           : p_.x_scaling == Scaling::kRow                            ? 1
                                                                      : p_.k_blocks();
  }

  // A single row is read in place.
  void lay_out(Pieces& pieces, Part* part) {
    const int64_t rows = part->batch.problem.m;
    Arguments& a = part->batch.arguments;
    part->gathers = e_.row_index != nullptr && rows > 1;
    part->batch.problem.y_dtype = p_.y_dtype;  // the form of x may depend on it
    const int64_t row = part->gathers ? 0 : e_.index(part->first);
    a.x = advance(static_cast<const char*>(a_.x), row * a_.x_stride * x_bytes());
    a.x_stride = a_.x_stride;
    a.x_scales = a_.x_scales + (a_.x_scales == nullptr ? 0 : row * scales_of_row());
    a.x_zeros = a_.x_zeros + (a_.x_zeros == nullptr ? 0 : row);
    if (part->gathers) {
      a.x = pieces.take<char>(rows * p_.k * x_bytes());
      a.x_stride = p_.k;
      if (scales_of_row() > 0) a.x_scales = pieces.take<float>(rows * scales_of_row());
      if (p_.x_zeros) a.x_zeros = pieces.take<int32_t>(rows);
    }
    part->batch.lay_out(pieces);
    a.y = static_cast<char*>(a_.y) + part->first * p_.n * size_of(p_.y_dtype);
    if (gate_ != nullptr) {
      a.y = pieces.take<char>(rows * p_.n * size_of(p_.y_dtype));
    } else if (e_.row_scale != nullptr) {
      a.y = pieces.take<float>(rows * p_.n);
      part->batch.problem.y_dtype = part->batch.job.y_dtype = DType::kFloat32;
    }
    part->batch.job.y = a.y;
  }

  void gather(const Part& part, int64_t begin, int64_t end) const {
    const Arguments& a = part.batch.arguments;
    const int64_t bytes = p_.k * x_bytes(), scales = scales_of_row();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = e_.index(part.first + i);
      std::memcpy(static_cast<char*>(const_cast<void*>(a.x)) + i * bytes,
                  static_cast<const char*>(a_.x) + row * a_.x_stride * x_bytes(), static_cast<size_t>(bytes));
      std::copy_n(a_.x_scales + row * scales, scales, const_cast<float*>(a.x_scales) + i * scales);
      if (p_.x_zeros) const_cast<int32_t*>(a.x_zeros)[i] = a_.x_zeros[row];
    }
  }

  // All threads together prepare long parts; the other parts take one thread each.
  void prepare() {
    const auto by = [](const Threads& threads, int64_t count, const auto& step) { split(threads, count, step); };
    const auto pack = [&](Part& part, const Threads& threads) {
      Batch& batch = part.batch;
      const int64_t rows = batch.problem.m;
      if (part.gathers) by(threads, rows, [&](int64_t begin, int64_t end) { gather(part, begin, end); });
      if (const int64_t wide = batch.rows_to_prepare(); wide > 0) {
        by(threads, wide, [&](int64_t begin, int64_t end) { batch.prepare(begin, end); });
      }
      if (batch.job.remarks != nullptr) std::memset(batch.job.remarks, 0, static_cast<size_t>(rows));
      by(threads, batch.units(), [&](int64_t begin, int64_t end) { batch.pack(begin, end); });
    };
    std::vector<Part*> few;
    int64_t values = 0;
    for (Part& part : parts_) {
      const int64_t own = part.batch.problem.m * p_.k;
      if (is_serial(threads_, own)) {
        few.push_back(&part), values += own;
      } else {
        pack(part, threads_);
      }
    }
    const auto each = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) pack(*few[static_cast<size_t>(i)], Threads{});
    };
    const int64_t count = static_cast<int64_t>(few.size());
    is_serial(threads_, values) ? each(0, count) : share(threads_, count, 1, each);
  }

  void multiply() {
    std::vector<const Batch*> plain;
    for (const Part& part : parts_) {
      if (part.batch.has_outliers()) {
        part.batch.run_with_outliers(threads_);
      } else {
        plain.push_back(&part.batch);
      }
    }
    const int64_t tiles = divide_up(p_.n, kTileRows), all = static_cast<int64_t>(plain.size()) * tiles;
    const auto run = [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t first = begin % tiles, count = least(tiles - first, end - begin);
        plain[static_cast<size_t>(begin / tiles)]->run(first, first + count);
        begin += count;
      }
    };
    if (threads_.count == 1) {
      run(0, all);
    } else {
      share(threads_, all, piece_of(all), run);
    }
    for (const Part& part : parts_) part.batch.mend(threads_);
  }

  // N-tiles that a thread takes at a time: a few pieces per thread, of whole blocks of tiles if there are enough.
  int64_t piece_of(int64_t tiles) const {
    constexpr int64_t kBlock = 16, kFewest = 4;
    const int64_t piece = tiles / (4 * threads_.count) / kBlock * kBlock;
    if (piece > 0) return least(piece, 4 * kBlock);
    return std::clamp(divide_up(tiles, threads_.count), kFewest, kBlock);
  }

  // Scales or gates the rows of the wave, which are contiguous in y.
  void finish() const {
    if (parts_.empty()) return;
    const int64_t first = parts_.front().first, count = parts_.back().first + parts_.back().batch.problem.m - first;
    const auto rows = [&](int64_t begin, int64_t end) {
      for (const Part& part : parts_) {
        const int64_t from = part.first - first, rows = part.batch.problem.m;
        const int64_t own = std::max<int64_t>(begin - from, 0), own_end = least(end - from, rows);
        if (own < own_end) gate_ != nullptr ? gate_rows(part, own, own_end) : scale_rows(part, own, own_end);
      }
    };
    is_serial(threads_, count * p_.n) ? rows(0, count)
                                      : share(threads_, count, divide_up(count, 4 * threads_.count), rows);
  }

  // Rows [begin, end) of a part.
  void scale_rows(const Part& part, int64_t begin, int64_t end) const {
    const float* y = static_cast<const float*>(part.batch.arguments.y) + begin * p_.n;
    for (int64_t m = part.first + begin; m < part.first + end; ++m) {
      const float factor = load(e_.row_scale, m, e_.row_scale_dtype);
      for (int64_t n = 0; n < p_.n; ++n) store(a_.y, m * p_.n + n, p_.y_dtype, factor * *y++);
    }
  }
  void gate_rows(const Part& part, int64_t begin, int64_t end) const {
    quantize::Problem problem;
    problem.m = part.batch.problem.m, problem.k = p_.n / 2;
    problem.x_dtype = p_.y_dtype;
    problem.producer = quantize::Producer::kSwiglu, problem.gate = *gate_;
    quantize::Arguments rows;
    rows.x = part.batch.arguments.y, rows.x_stride = p_.n;
    rows.y = static_cast<char*>(a_.y) + part.first * problem.k * size_of(p_.y_dtype);
    rows.row_scale = advance(e_.row_scale, part.first * size_of(e_.row_scale_dtype));
    rows.row_scale_dtype = e_.row_scale_dtype;
    write_values(problem, rows, kernels_, begin, end);
  }

  const Problem& p_;
  const Arguments& a_;
  const Experts& e_;
  const quantize::Gate* gate_;
  const QuantizeKernels& kernels_;
  const Threads& threads_;
  std::vector<Part> parts_;
  int64_t bytes_ = 0;
};

}  // namespace

Status grouped_gemm(const Problem& p, const Arguments& a, const Experts& e, const quantize::Gate* gate,
                    const Threads& threads) {
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  Wave wave(p, a, e, gate, quantize_kernels(features), threads);
  int64_t end = 0;
  for (int64_t expert = 0; expert < e.count; ++expert) {
    const int64_t begin = end;
    end = e.ends[expert];
    if (begin == end) continue;
    Problem problem = p;
    problem.m = end - begin;
    Arguments own = a;
    own.weight = advance(static_cast<const char*>(a.weight), expert * e.weight_bytes);
    own.scales = advance(static_cast<const char*>(a.scales), expert * e.scales_bytes);
    own.bias = advance(static_cast<const char*>(a.bias), expert * e.bias_bytes);
    own.weight_sums = static_cast<const float*>(advance(a.weight_sums, expert * e.sums_bytes));
    const Kernel& kernel = choose(problem, features);
    const int64_t step = Batch::most_rows(kernel, problem, own);
    for (int64_t first = begin; first < end; first += step) {
      wave.add({Batch::of(kernel, problem, own, 0, std::min(step, end - first)), first});
    }
  }
  wave.run();
  const int64_t row_bytes = (gate != nullptr ? p.n / 2 : p.n) * size_of(p.y_dtype);
  std::memset(static_cast<char*>(a.y) + end * row_bytes, 0, static_cast<size_t>((e.rows - end) * row_bytes));
  return {};
}

}  // namespace qao::cpu
