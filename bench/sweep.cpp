// qao_sweep OPERANDS: times every candidate plan of problems, for `python -m bench tune`.
//
// OPERANDS names x and W: int8_int8, fp8_int4, float_int4 (x in bfloat16), ...; and a variant: fp8_fp8_fast is with
// fast_accum, fp8_fp8_blocks with scales of blocks, int8_int4_symmetric without zero points, int8_int4_rows with
// row_scales. A line "m n k" of standard input is a problem, K a multiple of 128; a line of JSON on standard output a
// candidate: {"m", "n", "k", "chosen", "final", "plan", "operands", "tile_m", "counts", "bytes", "before_us", "us"}.
// An x of eight bits is quantized before every product, as in a model: that takes before_us of us. Tiles that share
// rows of W were up to 1.2 times slower behind that kernel, which lets all CTAs start at once, than behind another
// product. int4: asymmetric groups of 128, bfloat16 scales.
//
// The choice and the fastest others are timed again, interleaved, so that none is best by luck or on a cooler GPU.
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/integers.h"
#include "layout/int4.h"
#include "qao/gemm.h"
#include "qao/quantize.h"

namespace qao {
namespace {

constexpr int64_t kColdBytes = 600'000'000;  // of all copies of W: far past the L2 of any GPU
constexpr double kReplayMicroseconds = 400;
constexpr int kReplays = 5, kMaxCalls = 256, kRoughCalls = 3;
constexpr double kHopeless = 1.5;  // times the best plan's time: not measured any better
constexpr int kFinalists = 3, kTurns = 3;
constexpr int64_t kRandomBytes = 128 * 65537;  // that tensors repeat; no multiple of a row's bytes
constexpr int kWarmUps = 40;                   // measurements that no one sees, until the clocks have settled
constexpr int64_t kGroup = 128;
constexpr int64_t kComparedTokens = 16;
constexpr double kMaxDifference = 0.02;     // of two plans' results, against the largest value: sums in another order
constexpr double kMaxFastDifference = 0.5;  // sums of 14 bits, of products that cancel

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "qao_sweep: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "qao_sweep: %s\n", status.message().c_str());
  std::exit(1);
}

struct Free {
  void operator()(void* pointer) const { cudaFree(pointer); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(int64_t bytes) {
  void* pointer = nullptr;
  check(cudaMalloc(&pointer, static_cast<size_t>(std::max<int64_t>(bytes, 1))), "cudaMalloc");
  return Memory(pointer);
}
template <typename T>
Memory upload(const std::vector<T>& values) {
  Memory memory = allocate(static_cast<int64_t>(values.size() * sizeof(T)));
  check(cudaMemcpy(memory.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return memory;
}

uint16_t bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

// Normal numbers as quantizing leaves them, in the bytes of a format: of int4 two in a byte, of a float x bfloat16.
// Tensor cores draw more power for random bits, so that the clocks fall for the plans that keep them busiest.
uint16_t as_format(Format format, float normal, float other) {
  constexpr float kDeviations = 3.7f;  // to the largest of a row
  const auto whole = [](float value, float least, float most) {
    return static_cast<int>(std::lround(std::clamp(value, least, most)));
  };
  const auto nibble = [&](float value) { return whole(8 + value * 7 / kDeviations, 0, 15); };
  switch (format) {
    case Format::kInt8:
      return static_cast<uint8_t>(whole(normal * 127 / kDeviations, -127, 127));
    case Format::kFp8:
      return __nv_cvt_float_to_fp8(normal * 448 / kDeviations, __NV_SATFINITE, __NV_E4M3);
    case Format::kInt4:
      return static_cast<uint16_t>(nibble(normal) | nibble(other) << 4);
    default:
      return bfloat16(normal);
  }
}
std::vector<uint64_t> make_normal_words(Format format) {
  std::array<uint16_t, 1 << 16> table;
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  for (uint16_t& value : table) value = as_format(format, normal(generator), normal(generator));
  const int bits = format == Format::kFloat ? 16 : 8;
  uint64_t state = 1;
  std::vector<uint64_t> words(static_cast<size_t>(kRandomBytes / 8));
  for (uint64_t& word : words) {
    for (int at = 0; at < 64; at += bits) {
      state = state * 6364136223846793005 + 1442695040888963407;
      word |= uint64_t{table[state >> 48]} << at;
    }
  }
  return words;
}
Memory normals(Format format, int64_t bytes) {
  static std::map<Format, std::vector<uint64_t>> made;  // every problem has the same
  std::vector<uint64_t>& words = made[format];
  if (words.empty()) words = make_normal_words(format);
  const int64_t some = std::min(bytes, kRandomBytes);
  Memory memory = allocate(bytes);
  auto* at = static_cast<uint8_t*>(memory.get());
  check(cudaMemcpy(at, words.data(), static_cast<size_t>(some), cudaMemcpyHostToDevice), "cudaMemcpy");
  for (int64_t done = some; done < bytes; done *= 2) {
    check(cudaMemcpy(at + done, at, static_cast<size_t>(std::min(done, bytes - done)), cudaMemcpyDeviceToDevice),
          "cudaMemcpy");
  }
  return memory;
}
Memory floats(int64_t count, float value) { return upload(std::vector<float>(static_cast<size_t>(count), value)); }

struct Formats {
  Format x = Format::kFloat, weight = Format::kInt4;
  bool fast_accum = false, blocks = false, zeros = false, row_scales = false;
};

Formats formats_of(const std::string& words) {
  Formats formats;
  std::string operands = words;
  const auto take = [&](const std::string& variant) {
    const bool has = operands.ends_with(variant);
    if (has) operands.resize(operands.size() - variant.size());
    return has;
  };
  formats.fast_accum = take("_fast");
  formats.blocks = take("_blocks");
  formats.row_scales = take("_rows");
  const bool symmetric = formats.row_scales || take("_symmetric");
  const auto format = [&](const std::string& name) {
    for (Format f : {Format::kFloat, Format::kInt8, Format::kFp8, Format::kInt4}) {
      if (name == name_of(f)) return f;
    }
    std::fprintf(stderr, "qao_sweep: '%s' is not x_weight, such as int8_int4 or float_fp8\n", words.c_str());
    std::exit(1);
  };
  const size_t bar = std::min(operands.find('_'), operands.size());
  formats.x = format(operands.substr(0, bar));
  formats.weight = format(operands.substr(std::min(bar + 1, operands.size())));
  formats.zeros = formats.weight == Format::kInt4 && !symmetric;
  return formats;
}

// The same bytes in several places.
class Copies {
 public:
  Copies(Memory first, int64_t bytes, int64_t copies)
      : stride_(round_up(bytes, 256)), memory_(allocate(copies * stride_)) {
    for (int64_t i = 0; i < copies; ++i) {
      check(cudaMemcpy(at(i), first.get(), static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice), "copying W");
    }
  }
  uint8_t* at(int64_t copy) const { return static_cast<uint8_t*>(memory_.get()) + copy * stride_; }

 private:
  int64_t stride_;
  Memory memory_;
};

// The operands of one problem, with copies of W and its parameters enough that none stays in the L2.
class Operands {
 public:
  Operands(const Formats& formats, const gemm::Problem& problem)
      : packed_(formats.weight == Format::kInt4),
        eight_bits_(formats.x != Format::kFloat),
        row_scales_(formats.row_scales ? floats(problem.n, kScale) : Memory()),
        bytes_(packed_ ? int4::weight_bytes(problem.n, problem.k) : problem.n * problem.k),
        copies_(std::max<int64_t>(3, kColdBytes / bytes_ + 1)),
        columns_(int4::tiles_k(problem.k) * int4::kTileK),
        x_(normals(Format::kFloat, 2 * problem.m * problem.k)),
        q_(eight_bits_ ? allocate(problem.m * columns_) : Memory()),
        weights_(normals(formats.weight, bytes_), bytes_, copies_),
        scales_(packed_ ? group_parameters(formats, problem.n, problem.groups())
                        : floats(scale_count(formats, problem), 0.01f),
                packed_ ? parameters(formats, problem.n, problem.groups()) * 2 : scale_count(formats, problem) * 4,
                copies_),
        x_scales_(allocate(4 * problem.m * (formats.blocks ? problem.k_blocks() : 1))),
        x_sums_(allocate(4 * problem.m * problem.groups())),
        y_(allocate(problem.m * problem.n * 2)) {
    quantized_.m = problem.m, quantized_.k = problem.k;
    quantized_.format = problem.x, quantized_.scaling = problem.x_scaling;
    if (packed_) quantized_.order = quantize::Order::kInt4Tiles, quantized_.sums_group = problem.group_size;
  }

  int64_t copies() const { return copies_; }
  const void* y() const { return y_.get(); }
  bool quantizes(const gemm::Plan& plan) const { return eight_bits_ && !plan.quantizes_x; }
  Status quantize_x(cudaStream_t stream) const {
    quantize::Arguments a;
    a.x = x_.get(), a.x_stride = quantized_.k;
    a.q = q_.get(), a.q_stride = columns_;
    a.scales = static_cast<float*>(x_scales_.get());
    if (packed_) a.sums = static_cast<float*>(x_sums_.get());
    return quantize::launch(quantized_, a, stream);
  }
  gemm::Arguments arguments(const gemm::Plan& plan, int64_t copy, void* workspace) const {
    gemm::Arguments a;
    a.x = quantizes(plan) ? q_.get() : x_.get();
    a.x_stride = quantizes(plan) ? columns_ : quantized_.k;
    a.x_scales = static_cast<const float*>(x_scales_.get());
    if (packed_) a.x_sums = static_cast<const float*>(x_sums_.get());
    a.row_scales = static_cast<const float*>(row_scales_.get());
    a.weight = weights_.at(copy);
    a.scales = scales_.at(copy);
    a.y = y_.get();
    a.workspace = workspace;
    return a;
  }

 private:
  static constexpr float kScale = 0.0078125f;

  // Of a row-major W.
  static int64_t scale_count(const Formats& formats, const gemm::Problem& problem) {
    return formats.blocks ? ceil_div(problem.n, kScaleBlock) * problem.k_blocks() : problem.n;
  }
  // Scales of packed groups, each followed by its zero points if there are any.
  static int64_t parameters(const Formats& formats, int64_t n, int64_t groups) {
    return int4::tiles_n(n) * groups * (formats.zeros ? 2 : 1) * int4::kTileN;
  }
  static Memory group_parameters(const Formats& formats, int64_t n, int64_t groups) {
    std::vector<uint16_t> values(static_cast<size_t>(parameters(formats, n, groups)));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = bfloat16(formats.zeros && i / int4::kTileN % 2 == 1 ? 7.0f : kScale);
    }
    return upload(values);
  }

  bool packed_, eight_bits_;
  Memory row_scales_;
  int64_t bytes_, copies_, columns_;
  quantize::Problem quantized_;
  Memory x_, q_;
  Copies weights_, scales_;
  Memory x_scales_, x_sums_, y_;
};

// Of some tokens of y, from the first to the last.
std::vector<float> result(int64_t m, int64_t n, const Operands& operands) {
  const int64_t tokens = std::min(m, kComparedTokens);
  std::vector<uint16_t> bits(static_cast<size_t>(tokens * n));
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t token = tokens > 1 ? i * (m - 1) / (tokens - 1) : 0;
    check(cudaMemcpy(bits.data() + i * n, static_cast<const uint16_t*>(operands.y()) + token * n,
                     static_cast<size_t>(n) * 2, cudaMemcpyDeviceToHost),
          "cudaMemcpy");
  }
  std::vector<float> values(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) {
    const uint32_t word = uint32_t{bits[i]} << 16;
    std::memcpy(&values[i], &word, 4);
  }
  return values;
}

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0, largest = 1e-30;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) return INFINITY;
    most = std::max(most, std::abs(static_cast<double>(a[i]) - b[i]));
    largest = std::max(largest, std::abs(static_cast<double>(b[i])));
  }
  return most / largest;
}

// Replays a graph.
class Timer {
 public:
  Timer() {
    check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    check(cudaEventCreate(&start_), "cudaEventCreate");
    check(cudaEventCreate(&stop_), "cudaEventCreate");
  }

  // A graph of `count` calls of enqueue(i, stream).
  template <typename Enqueue>
  cudaGraphExec_t graph_of(int64_t count, const Enqueue& enqueue) const {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int64_t i = 0; i < count; ++i) check(enqueue(i, stream_));
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    return executable;
  }

  // Median of the microseconds of `replays` after one that does not count; destroys the graph.
  double measure(cudaGraphExec_t graph, int replays) const {
    std::vector<float> times(static_cast<size_t>(replays) + 1);
    for (float& ms : times) {
      check(cudaEventRecord(start_, stream_), "cudaEventRecord");
      check(cudaGraphLaunch(graph, stream_), "cudaGraphLaunch");
      check(cudaEventRecord(stop_, stream_), "cudaEventRecord");
      check(cudaEventSynchronize(stop_), "a replay");
      check(cudaEventElapsedTime(&ms, start_, stop_), "cudaEventElapsedTime");
    }
    check(cudaGraphExecDestroy(graph), "cudaGraphExecDestroy");
    std::nth_element(times.begin() + 1, times.begin() + 1 + replays / 2, times.end());
    return 1000.0 * static_cast<double>(times[static_cast<size_t>(1 + replays / 2)]);
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t start_, stop_;
};

// Microseconds a call, W out of the L2; roughly if above `hopeless`.
double measure(const gemm::Problem& problem, const gemm::Plan& plan, const Operands& operands, const Timer& timer,
               double hopeless = INFINITY) {
  const Memory workspace = allocate(plan.workspace_bytes);
  const auto enqueue = [&](int64_t i, cudaStream_t stream) {
    if (operands.quantizes(plan)) {
      if (Status status = operands.quantize_x(stream); !status.ok()) return status;
    }
    return launch(problem, plan, operands.arguments(plan, i % operands.copies(), workspace.get()), stream);
  };
  const double rough = timer.measure(timer.graph_of(kRoughCalls, enqueue), 1) / kRoughCalls;
  if (rough > hopeless) return rough;
  const int64_t calls = std::clamp<int64_t>(static_cast<int64_t>(kReplayMicroseconds / rough), 1, kMaxCalls);
  return timer.measure(timer.graph_of(calls, enqueue), kReplays) / static_cast<double>(calls);
}

bool same(const gemm::Plan& a, const gemm::Plan& b) {
  return a.family == b.family && a.config == b.config && a.tile_n == b.tile_n && a.splits_last == b.splits_last &&
         a.split_k == b.split_k && a.ctas == b.ctas && a.shared_bytes == b.shared_bytes;
}

struct Timed {
  Candidate<gemm::Plan> candidate;
  double us = 0;
  bool chosen = false, is_final = false;
};

// Times the choice and the fastest others again, interleaved.
void repeat_finalists(const gemm::Problem& problem, const Operands& operands, const Timer& timer,
                      std::vector<Timed>* all) {
  std::stable_sort(all->begin(), all->end(), [](const Timed& a, const Timed& b) { return a.us < b.us; });
  std::vector<Timed*> finalists;
  for (Timed& timed : *all) {
    if (timed.chosen || finalists.size() < kFinalists) finalists.push_back(&timed);
  }
  std::vector<std::vector<double>> times(finalists.size());
  for (int turn = 0; turn < kTurns; ++turn) {
    for (size_t i = 0; i < finalists.size(); ++i) {
      times[i].push_back(measure(problem, finalists[i]->candidate.plan, operands, timer));
    }
  }
  for (size_t i = 0; i < finalists.size(); ++i) {
    std::nth_element(times[i].begin(), times[i].begin() + kTurns / 2, times[i].end());
    finalists[i]->us = times[i][kTurns / 2];
    finalists[i]->is_final = true;
  }
}

void sweep(const Formats& formats, int64_t m, int64_t n, int64_t k, const Gpu& gpu, const Timer& timer, bool warm_up) {
  gemm::Problem problem;
  problem.x = formats.x, problem.weight = formats.weight;
  problem.m = m, problem.n = n, problem.k = k;
  problem.group_size = kGroup;
  problem.fast_accum = formats.fast_accum;
  problem.has_zeros = formats.zeros;
  problem.row_scales = formats.row_scales;
  problem.scale_dtype = DType::kBFloat16;
  if (formats.blocks) problem.x_scaling = problem.weight_scaling = Scaling::kBlock;
  problem.quantizes_x = formats.x != Format::kFloat;
  const Operands operands(formats, problem);
  const double before =
      problem.quantizes_x
          ? timer.measure(
                timer.graph_of(kMaxCalls, [&](int64_t, cudaStream_t stream) { return operands.quantize_x(stream); }),
                kReplays) /
                kMaxCalls
          : 0;
  const double bytes = static_cast<double>(n * k) * (formats.weight == Format::kInt4 ? 0.5 : 1);  // as plan() counts
  gemm::Plan chosen;
  check(plan(problem, gpu, &chosen));
  for (int i = 0; warm_up && i < kWarmUps; ++i) measure(problem, chosen, operands, timer);
  std::vector<Timed> all;
  for (const Candidate<gemm::Plan>& candidate : candidates(problem, gpu)) {
    all.push_back({candidate, 0, same(candidate.plan, chosen)});
  }
  // The choice first: then the others are soon hopeless.
  std::stable_partition(all.begin(), all.end(), [](const Timed& timed) { return timed.chosen; });
  std::vector<float> first;
  double best = INFINITY;
  for (Timed& timed : all) {
    const gemm::Plan& plan = timed.candidate.plan;
    timed.us = measure(problem, plan, operands, timer, kHopeless * best);
    best = std::min(best, timed.us);
    const std::vector<float> values = result(m, n, operands);
    if (first.empty()) first = values;
    if (!(difference(values, first) < (formats.fast_accum ? kMaxFastDifference : kMaxDifference))) {
      std::fprintf(stderr, "qao_sweep: another result by %s\n", to_string(plan).c_str());
      std::exit(1);
    }
  }
  repeat_finalists(problem, operands, timer, &all);
  for (const Timed& timed : all) {
    const gemm::Plan& plan = timed.candidate.plan;
    std::printf(R"({"m": %ld, "n": %ld, "k": %ld, "chosen": %s, "final": %s, "plan": "%s", "operands": "%s", )",
                static_cast<long>(m), static_cast<long>(n), static_cast<long>(k), timed.chosen ? "true" : "false",
                timed.is_final ? "true" : "false", to_string(plan).c_str(), timed.candidate.operands);
    std::printf(R"("tile_m": %d, "counts": [)", plan.tile_m);
    for (int i = 0; i < kTerms; ++i) std::printf("%s%g", i > 0 ? ", " : "", timed.candidate.counts[i]);
    std::printf(R"(], "bytes": %g, "before_us": %.4f, "us": %.4f})"
                "\n",
                bytes, operands.quantizes(plan) ? before : 0, timed.us);
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace qao

int main(int count, char** words) {
  using namespace qao;
  if (count != 2) {
    std::fprintf(stderr, "usage: qao_sweep OPERANDS < problems\n");
    return 1;
  }
  const Formats formats = formats_of(words[1]);
  Gpu gpu;
  check(query_gpu(0, &gpu));
  const Timer timer;
  int64_t m, n, k;
  for (bool first = true; std::cin >> m >> n >> k; first = false) sweep(formats, m, n, k, gpu, timer, first);
  return 0;
}
