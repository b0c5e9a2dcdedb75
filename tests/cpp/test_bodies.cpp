// The table of kernel bodies: each row is there for some problem, and no other than its own.
#include <doctest/doctest.h>

#include <set>
#include <string>
#include <vector>

#include "gpus.h"
#include "mm/gpu.h"
#include "qao/mm.h"

namespace qao::mm {
namespace {

constexpr Body kBodies[] = {Body::kStreamResident, Body::kStreamTma,  Body::kStreamRing,      Body::kWgmma,
                            Body::kMmaSync,        Body::kMmaSyncFp8, Body::kMmaSyncFloatInt4};

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

TEST_CASE("every body runs some problem, on the GPUs and for the formats it is for") {
  std::set<Body> seen;
  for (const Gpu& gpu : kGpus) {
    for (const Problem& problem : products()) {
      Plan plan;
      REQUIRE(mm::plan(problem, gpu, &plan).ok());
      const std::string about = std::string(name_of(problem.x)) + " x " + name_of(problem.weight) + ", compute " +
                                std::to_string(gpu.compute_capability) + ": " + to_string(plan);
      INFO(about);
      seen.insert(plan.body);
      const bool float_int4 = problem.x == Format::kFloat && is_packed(problem.weight);
      const bool streams =
          plan.body == Body::kStreamResident || plan.body == Body::kStreamTma || plan.body == Body::kStreamRing;
      if (streams) CHECK(runs_sm90(gpu));
      if (plan.body == Body::kWgmma) CHECK(is_hopper(gpu));
      if (streams || plan.body == Body::kMmaSyncFloatInt4) CHECK(float_int4);
      if (plan.body == Body::kMmaSync || plan.body == Body::kMmaSyncFp8) CHECK(!float_int4);
      if (plan.body == Body::kMmaSyncFp8) CHECK((has_fp8_mma(gpu) && problem.x == Format::kFp8));
      // Reports tell bodies apart by their names and what multiplies.
      CHECK(to_string(plan).starts_with(std::string(name_of(plan.body)) + " (" + plan.instruction + ")"));
    }
  }
  for (Body body : kBodies) {
    INFO(name_of(body));
    CHECK(seen.count(body) == 1);
  }
  CHECK(seen.size() == std::size(kBodies));
}

TEST_CASE("a GPU older than Hopper has one candidate, the portable one") {
  for (const Gpu& gpu : kGpus) {
    if (runs_sm90(gpu)) continue;
    for (const Problem& problem : products()) {
      const std::vector<Candidate<Plan>> all = candidates(problem, gpu);
      REQUIRE(all.size() == 1);
      Plan plan;
      REQUIRE(mm::plan(problem, gpu, &plan).ok());
      CHECK(all[0].plan.body == plan.body);
      CHECK(all[0].plan.config == plan.config);
    }
  }
}

}  // namespace qao::mm
