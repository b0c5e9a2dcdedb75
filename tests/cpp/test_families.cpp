// The table of kernel families: each row is there for some problem, and no other than its own.
#include <doctest/doctest.h>

#include <array>
#include <iterator>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "gemm/arch.h"
#include "gpus.h"
#include "ops/plan_cache.h"
#include "qao/gemm.h"

namespace qao::gemm {
namespace {

constexpr Family kFamilies[] = {Family::kSm90SkinnySmemX, Family::kSm90SkinnyTmaX,   Family::kSm90SkinnyRingX,
                                Family::kSm90Ws,          Family::kSm90Mma,          Family::kSm89Mma,
                                Family::kSm80Mma,         Family::kSm80MmaWeightOnly};

std::vector<Problem> products() {
  std::vector<Problem> all;
  for (Format x : {Format::kFloat, Format::kInt8, Format::kFp8}) {
    for (Format weight : {Format::kInt8, Format::kFp8, Format::kInt4, Format::kFp4}) {
      if (x != Format::kFloat && weight != x && weight != Format::kInt4) continue;
      for (int64_t m : {1, 3, 8, 12, 16, 17, 512}) {
        Problem problem;
        problem.m = m, problem.n = problem.k = 4096;
        problem.x = x, problem.weight = weight;
        problem.group_size = weight == Format::kFp4 ? 32 : 128, problem.scale_dtype = DType::kBFloat16;
        all.push_back(problem);
      }
    }
  }
  return all;
}

}  // namespace

TEST_CASE("every family runs some problem, on the GPUs and for the formats it is for") {
  std::set<Family> seen;
  for (const Gpu& gpu : kGpus) {
    for (const Problem& problem : products()) {
      Plan plan;
      REQUIRE(gemm::plan(problem, gpu, &plan).ok());
      const std::string about = std::string(name_of(problem.x)) + " x " + name_of(problem.weight) + ", compute " +
                                std::to_string(gpu.compute_capability) + ": " + to_string(plan);
      INFO(about);
      seen.insert(plan.family);
      const bool float_int4 = problem.x == Format::kFloat && is_packed(problem.weight);
      const bool streams = plan.family == Family::kSm90SkinnySmemX || plan.family == Family::kSm90SkinnyTmaX ||
                           plan.family == Family::kSm90SkinnyRingX;
      if (streams) CHECK(runs_sm90(gpu));
      if (plan.family == Family::kSm90Ws) CHECK(is_hopper(gpu));
      if (streams || plan.family == Family::kSm80MmaWeightOnly) CHECK(float_int4);
      const bool is_mma =
          plan.family == Family::kSm90Mma || plan.family == Family::kSm89Mma || plan.family == Family::kSm80Mma;
      if (is_mma) CHECK(!float_int4);
      CHECK((plan.family == Family::kSm90Mma) == (is_mma && is_hopper(gpu)));
      if (plan.family == Family::kSm89Mma) CHECK((has_fp8_mma(gpu) && problem.x == Format::kFp8));
      // Reports tell families apart by their names and what multiplies.
      CHECK(kernel_name(plan).starts_with(std::string(name_of(plan.family)) + "_w"));
      CHECK(to_string(plan).starts_with(kernel_name(plan) + " (" + plan.instruction + ")"));
    }
  }
  for (Family family : kFamilies) {
    INFO(name_of(family));
    CHECK(seen.count(family) == 1);
  }
  CHECK(seen.size() == std::size(kFamilies));
}

TEST_CASE("a GPU older than Hopper has one candidate, the portable one") {
  for (const Gpu& gpu : kGpus) {
    if (runs_sm90(gpu)) continue;
    for (const Problem& problem : products()) {
      const std::vector<Candidate<Plan>> all = candidates(problem, gpu);
      REQUIRE(all.size() == 1);
      Plan plan;
      REQUIRE(gemm::plan(problem, gpu, &plan).ok());
      CHECK(all[0].plan.family == plan.family);
      CHECK(all[0].plan.config == plan.config);
    }
  }
}

TEST_CASE("a kernel's name has the family, the formats and the tile") {
  const auto name = [](Format x, Format weight, int64_t m) {
    Problem problem;
    problem.m = m, problem.n = problem.k = 4096;
    problem.x = x, problem.weight = weight, problem.group_size = 128, problem.scale_dtype = DType::kBFloat16;
    Plan plan;
    REQUIRE(gemm::plan(problem, kH200, &plan).ok());
    return kernel_name(plan);
  };
  CHECK(name(Format::kFloat, Format::kInt4, 1) == "sm90_skinny_smem_x_w4a16_32x8");
  CHECK(name(Format::kFloat, Format::kInt4, 4096) == "sm90_ws_w4a16_128x256");
  CHECK(name(Format::kInt8, Format::kInt8, 4096) == "sm90_ws_w8a8_128x256");
  CHECK(name(Format::kFp8, Format::kInt4, 4096).starts_with("sm90_ws_w4afp8_"));
  CHECK(name(Format::kFp8, Format::kFp8, 1).starts_with("sm90_mma_wfp8afp8_"));
}

TEST_CASE("plans of recent problems are those of plan()") {
  std::mt19937 random(7);
  const auto any = [&](std::initializer_list<int64_t> values) { return values.begin()[random() % values.size()]; };
  int made = 0;
  for (int i = 0; i < 20000; ++i) {  // many more problems than entries, and many of them again
    Problem problem;
    problem.m = any({1, 7, 32, 300}), problem.n = any({64, 1024, 4096, 28672}), problem.k = any({256, 4096, 14336});
    problem.weight = Format::kInt4, problem.scale_dtype = DType::kBFloat16, problem.group_size = any({32, 128});
    problem.has_zeros = any({0, 1}) != 0, problem.batch_invariant = any({0, 1}) != 0;
    const Gpu gpu = any({0, 1}) != 0 ? kH200 : kGpus[random() % std::size(kGpus)];
    const std::array<int64_t, 2> rows = {problem.n / 4, problem.n - problem.n / 4};
    const bool several = any({0, 1}) != 0;
    Plan expected;
    const bool exists = several ? merges(problem, rows, gpu, &expected) : plan(problem, gpu, &expected).ok();
    const PlanKey key(problem, gpu, several ? std::span<const int64_t>(rows) : std::span<const int64_t>());
    const Planned found = planned(key, [&](Planned* entry) {
      ++made;
      entry->exists = several ? merges(problem, rows, gpu, &entry->plan) : plan(problem, gpu, &entry->plan).ok();
    });
    REQUIRE(found.exists == exists);
    if (exists) REQUIRE(to_string(found.plan) == to_string(expected));
  }
  CHECK(made < 20000);
  const PlanKey key(Problem{.m = 5, .n = 5, .k = 5}, kH200);
  const auto fail = [](Planned*) { throw std::runtime_error("no plan"); };
  CHECK_THROWS(planned(key, fail));
  CHECK_THROWS(planned(key, fail));  // nothing was kept
}

}  // namespace qao::gemm
