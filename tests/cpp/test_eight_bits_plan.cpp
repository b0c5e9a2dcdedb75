// gemm::plan over GPUs and operations: every plan must be runnable, cover the whole product and name its instruction.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "gemm/sm80_mma/tile.h"
#include "gemm/sm90_ws/kernel_traits.h"
#include "gpus.h"
#include "qao/gemm.h"

namespace qao::gemm {
namespace {

using namespace sm80_mma;

// One problem an operation and what its plan may depend on; sizes are still to be set.
std::vector<Problem> operations() {
  std::vector<Problem> all;
  for (Format x : {Format::kFloat, Format::kInt8, Format::kFp8}) {
    for (Format weight : {Format::kInt8, Format::kFp8, Format::kInt4}) {
      if (x == Format::kFloat ? weight == Format::kInt4 : weight != x && weight != Format::kInt4) continue;
      for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        for (bool aligned : {true, false}) {
          Problem problem;
          problem.x = x, problem.weight = weight, problem.x_dtype = problem.y_dtype = dtype;
          problem.x_aligned = problem.weight_aligned = aligned;
          if (weight == Format::kFp8 && !aligned) problem.x_scaling = problem.weight_scaling = Scaling::kBlock;
          all.push_back(problem);
        }
      }
    }
  }
  return all;
}

template <typename Visit>
void for_each_problem(const Visit& visit) {
  const std::vector<Problem> all = operations();
  for (const Gpu& gpu : kGpus) {
    for (int64_t m : {1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 129, 1000, 4096, 100000}) {
      for (int64_t n : {1, 15, 17, 896, 4096, 14336, 152064}) {
        for (int64_t k : {1, 31, 129, 896, 4096, 14336, 300000}) {
          for (Problem problem : all) {
            problem.m = m, problem.n = n, problem.k = k;
            problem.group_size = problem.y_dtype == DType::kFloat32 ? 32 : problem.x_aligned ? 128 : k;
            problem.row_scales = problem.weight == Format::kInt4 && m % 2 == 1;
            visit(problem, gpu);
          }
        }
      }
    }
  }
}

std::string describe(const Problem& p, const Gpu& gpu) {
  return std::string(name_of(p.x)) + " (" + name_of(p.x_dtype) + ") x " + name_of(p.weight) + " m " +
         std::to_string(p.m) + " n " + std::to_string(p.n) + " k " + std::to_string(p.k) + " on compute " +
         std::to_string(gpu.compute_capability);
}

}  // namespace

TEST_CASE("eight bits: every problem has a plan that fits its GPU and covers the product") {
  for_each_problem([](const Problem& problem, const Gpu& gpu) {
    Plan plan, again;
    const Status status = gemm::plan(problem, gpu, &plan);
    const std::string about = describe(problem, gpu) + ": " + (status.ok() ? to_string(plan) : status.message());
    INFO(about);
    REQUIRE(status.ok());
    REQUIRE(plan.tile_n > 0);
    REQUIRE(plan.tile_m > 0);
    CHECK(plan.tile_n % kTileN == 0);
    CHECK(plan.warps >= 1);
    CHECK(plan.warps <= 32);
    CHECK(plan.shared_bytes <= gpu.shared_bytes_per_cta);
    CHECK(plan.split_k >= 1);
    // CTAs of sm90 walk over tiles where there are many, and add split-K parts up without a workspace. Other CTAs share
    // the rows of W out among them where each has all tokens.
    const bool sm90 = plan.family == Family::kSm90Ws;
    const int64_t tiles = ceil_div(problem.n, plan.tile_n) * ceil_div(problem.m, plan.tile_m);
    if (sm90) {
      CHECK(plan.tile_n >= sm90_ws::kWarpgroupRows);
      CHECK(plan.tile_n <= sm90_ws::kTiles[plan.config].rows);
      CHECK(plan.ctas >= 1);
      CHECK(plan.ctas <= 2 * gpu.num_sms);
      CHECK(plan.ctas % plan.split_k == 0);  // whole clusters
      CHECK(plan.split_k <= sm90_ws::kMaxCluster);
      if (plan.split_k > 1) CHECK(plan.ctas == tiles * plan.split_k);
      if (plan.splits_last) {  // full waves, and a tile of those left for each pair of CTAs at most
        const int64_t left = tiles % plan.ctas;
        CHECK(plan.split_k == 1);
        CHECK(plan.ctas % sm90_ws::kLastSplit == 0);
        CHECK(plan.ctas <= gpu.num_sms);
        CHECK(tiles > plan.ctas);
        CHECK(left > 0);
        CHECK(left * sm90_ws::kLastSplit <= plan.ctas);
      }
    } else if (plan.runs) {
      CHECK(problem.m <= plan.tile_m);
      CHECK(plan.ctas >= 1);
      CHECK(plan.ctas % plan.split_k == 0);
      CHECK(plan.ctas / plan.split_k <= ceil_div(problem.n, kTileN));
    } else {
      CHECK(plan.ctas == tiles * plan.split_k);
    }
    CHECK(plan.sums_at < plan.shared_bytes);
    CHECK(plan.prefetch_bytes % 16 == 0);
    // A float32 x brings three bfloat16 parts of K-tiles.
    const bool split_x = problem.x == Format::kFloat && problem.x_dtype == DType::kFloat32;
    const int64_t tile_k = sm90 ? sm90_ws::tile_k_of(problem, plan) : kTileK;
    CHECK(plan.split_k <= ceil_div(problem.k, tile_k) * (split_x ? 3 : 1));
    if (plan.split_k > 1 && !sm90) CHECK(plan.workspace_bytes >= 4 * plan.split_k * problem.m * problem.n);
    CHECK(plan.reason[0] != '\0');
    CHECK(plan.instruction[0] != '\0');
    REQUIRE(gemm::plan(problem, gpu, &again).ok());
    CHECK(to_string(plan) == to_string(again));
  });
}

TEST_CASE("eight bits: swapped tiles of fp8 blocks have all rows of a scale block") {
  for_each_problem([](const Problem& problem, const Gpu& gpu) {
    if (problem.x != Format::kFp8 || problem.weight_scaling != Scaling::kBlock || problem.weight == Format::kInt4)
      return;
    for (const Candidate<Plan>& candidate : candidates(problem, gpu)) {
      if (candidate.plan.family != Family::kSm90Ws) continue;
      CHECK(candidate.plan.tile_m <= 128);
      if (candidate.plan.tile_m == 128) CHECK(candidate.plan.tile_n == kScaleBlock);
    }
  });
}

TEST_CASE("eight bits: where sums are folded, tiles of more than 128 tokens are those of promoted fp8") {
  int64_t halved = 0;
  for_each_problem([&](Problem problem, const Gpu& gpu) {
    const bool promotes = problem.x == Format::kFp8 && problem.weight == Format::kFp8 && problem.x_aligned;
    for (bool fast : {false, true}) {
      problem.fast_accum = fast;
      for (const Candidate<Plan>& candidate : candidates(problem, gpu)) {
        const int tokens = candidate.plan.tile_m;
        if (candidate.plan.family != Family::kSm90Ws || tokens <= 128) continue;
        const bool folds = sm90_ws::traits_of(problem, sm90_ws::kTiles[candidate.plan.config]).folds;
        const bool rows =
            problem.x == Format::kFp8 && problem.weight == Format::kInt4 && problem.row_scales && !problem.has_zeros;
        const bool powers = rows && tokens == 256 && !fast;
        CHECK(folds == (powers || (promotes && (tokens != 256 || !fast))));
        CHECK((candidate.operands == std::string("kFp8Int4Rows")) == powers);
        CHECK((candidate.operands == std::string("kFp8Int4RowsFast")) == (rows && fast));
        if (!promotes || tokens != 256) continue;
        CHECK(folds == !fast);
        CHECK(candidate.operands == std::string(fast ? "kFp8Fp8Fast" : "kFp8Fp8"));
        halved += folds;
      }
    }
  });
  CHECK(halved > 0);
}

TEST_CASE("eight bits: int4 with scales of rows folds nothing and has tiles of 256 tokens") {
  Problem problem;
  problem.x = Format::kInt8, problem.weight = Format::kInt4, problem.quantizes_x = true;
  problem.m = 4096, problem.n = 4096, problem.k = 4096;
  for (int64_t group_size : {32, 64, 128, 256, 4096}) {
    for (bool has_zeros : {false, true}) {
      for (bool row_scales : {false, true}) {
        problem.group_size = group_size, problem.has_zeros = has_zeros, problem.row_scales = row_scales && !has_zeros;
        int most = 0;
        for (const Candidate<Plan>& candidate : candidates(problem, kH200)) {
          if (candidate.plan.family != Family::kSm90Ws) continue;
          const bool folds = sm90_ws::traits_of(problem, sm90_ws::kTiles[candidate.plan.config]).folds;
          CHECK(folds == (has_zeros || !row_scales));
          CHECK((candidate.operands == std::string("kInt8Int4Rows")) == !folds);
          most = std::max(most, candidate.plan.tile_m);
        }
        CHECK(most == (has_zeros || !row_scales ? 128 : 256));
      }
    }
  }
}

TEST_CASE("eight bits: int4 with powers of two and e4m3 activations is promoted as e4m3 is, in large tiles") {
  Problem problem;
  problem.x = Format::kFp8, problem.weight = Format::kInt4, problem.quantizes_x = problem.row_scales = true;
  problem.n = 4096, problem.k = 4096;
  for (int64_t group_size : {32, 64, 128, 256, 4096}) {
    for (bool invariant : {false, true}) {
      problem.group_size = group_size, problem.batch_invariant = invariant;
      for (int64_t m : {64, 256, 4096}) {
        problem.m = m;
        for (const Candidate<Plan>& candidate : candidates(problem, kH200)) {
          if (candidate.plan.family != Family::kSm90Ws) continue;
          const bool powers = candidate.plan.tile_m >= 128 && !invariant;
          CHECK((candidate.operands == std::string("kFp8Int4Rows")) == powers);
          CHECK((invariant ? candidate.plan.tile_m <= 128 : candidate.plan.tile_m % 128 == 0 || !powers));
        }
      }
      Plan plan;
      problem.m = 4096;
      CHECK(gemm::plan(problem, kH200, &plan).ok());
      CHECK(plan.tile_m == (invariant ? 128 : 256));
    }
  }
}

TEST_CASE("eight bits: ping-pong tiles, in pairs of CTAs, where sums need nothing along K") {
  int64_t found = 0;
  for_each_problem([&](Problem problem, const Gpu& gpu) {
    for (bool fast : {false, true}) {
      problem.fast_accum = fast;
      for (const Candidate<Plan>& candidate : candidates(problem, gpu)) {
        const Plan& plan = candidate.plan;
        if (plan.family != Family::kSm90Ws || !sm90_ws::kTiles[plan.config].ping_pong) continue;
        ++found;
        CHECK(problem.x == problem.weight);
        CHECK((problem.x == Format::kInt8 || fast));
        CHECK(!sm90_ws::traits_of(problem, sm90_ws::kTiles[plan.config]).folds);
        CHECK(plan.ctas % sm90_ws::kPingPongCluster == 0);
        CHECK(plan.ctas <= gpu.num_sms);
        CHECK(plan.split_k == 1);
        CHECK(!plan.splits_last);
        CHECK(plan.tile_n == sm90_ws::kTiles[plan.config].rows);
        CHECK(to_string(plan).find("ping-pong") != std::string::npos);
      }
    }
  });
  CHECK(found > 0);
}

TEST_CASE("eight bits: what plan() takes is among the candidates") {
  for_each_problem([](Problem problem, const Gpu& gpu) {
    problem.fast_accum = problem.m == 1000;
    Plan plan;
    REQUIRE(gemm::plan(problem, gpu, &plan).ok());
    const std::string about = describe(problem, gpu) + ": " + to_string(plan);
    INFO(about);
    const auto is_plan = [&](const Plan& other) {
      return other.family == plan.family && other.config == plan.config && other.tile_n == plan.tile_n &&
             other.split_k == plan.split_k && other.splits_last == plan.splits_last && other.ctas == plan.ctas &&
             other.shared_bytes == plan.shared_bytes;
    };
    int found = 0;
    for (const Candidate<Plan>& candidate : candidates(problem, gpu)) {
      const bool costs = candidate.operands[0] != '\0';
      CHECK(costs == (candidate.plan.family == Family::kSm90Ws));
      CHECK(2 * candidate.counts[kKTiles] >= candidate.counts[kWaves]);  // one of few rows counts less than 1
      CHECK((candidate.counts[kWaves] > 0) == costs);
      CHECK((candidate.counts[kSplits] == 1) == (costs && (candidate.plan.split_k > 1 || candidate.plan.splits_last)));
      CHECK(candidate.plan.shared_bytes <= gpu.shared_bytes_per_cta);
      found += is_plan(candidate.plan);
    }
    CHECK(found == 1);
  });
}

TEST_CASE("eight bits: a product that quantizes x fits its GPU; another is planned as for a quantized x") {
  int64_t quantizing = 0;
  for_each_problem([&](Problem problem, const Gpu& gpu) {
    if (problem.x == Format::kFloat) return;
    for (Scaling scaling : {problem.x_scaling, Scaling::kTensor}) {
      for (bool static_scale : {false, true}) {
        if (static_scale && scaling != Scaling::kTensor) continue;
        problem.x_scaling = scaling, problem.static_scale = static_scale, problem.quantizes_x = true;
        Plan plan, quantized;
        REQUIRE(gemm::plan(problem, gpu, &plan).ok());
        INFO(describe(problem, gpu) << ": " << to_string(plan));
        CHECK(plan.quantizer[0] != '\0');
        CHECK(plan.shared_bytes <= gpu.shared_bytes_per_cta);
        if (plan.quantizes_x) {
          ++quantizing;
          CHECK(problem.x_aligned);
          CHECK(problem.m <= ResidentX::kMaxTokens);
          CHECK(problem.m <= plan.warps);  // every warp has one token
          CHECK(plan.warps <= ResidentX::kMaxWarps);
          CHECK((scaling != Scaling::kTensor || static_scale || problem.m == 1));
          CHECK(plan.split_k == 1);
          CHECK(plan.workspace_bytes == 0);
          CHECK(problem.m <= plan.tile_m);
        } else {
          Problem after = problem;
          after.quantizes_x = false, after.x_aligned = true;
          REQUIRE(gemm::plan(after, gpu, &quantized).ok());
          CHECK(plan.family == quantized.family);
          CHECK(plan.config == quantized.config);
          CHECK(plan.split_k == quantized.split_k);
          CHECK(plan.shared_bytes == quantized.shared_bytes);
          CHECK(plan.workspace_bytes == quantized.workspace_bytes);
        }
      }
    }
  });
  CHECK(quantizing > 0);
}

Plan planned(const Problem& problem) {
  Plan plan;
  REQUIRE(gemm::plan(problem, kH200, &plan).ok());
  return plan;
}
Problem problem_of(Format x, Format weight, int64_t m, int64_t n, int64_t k) {
  Problem problem;
  problem.x = x, problem.weight = weight, problem.m = m, problem.n = n, problem.k = k;
  problem.group_size = 128;
  return problem;
}

TEST_CASE("eight bits: who quantizes x on an H200") {
  const auto quantizes = [](Format x, Format weight, int64_t m, int64_t n, int64_t k, bool aligned = true) {
    Problem problem = problem_of(x, weight, m, n, k);
    problem.x_aligned = aligned, problem.quantizes_x = true;
    return planned(problem).quantizes_x;
  };
  for (const auto& [x, weight] : {std::pair{Format::kInt8, Format::kInt8},
                                  {Format::kInt8, Format::kInt4},
                                  {Format::kFp8, Format::kFp8},
                                  {Format::kFp8, Format::kInt4}}) {
    for (const auto& [n, k] : {std::pair{1024, 1024}, {4096, 4096}, {6144, 4096}, {28672, 4096}, {4096, 14336}}) {
      CHECK(quantizes(x, weight, 1, n, k));
      CHECK(!quantizes(x, weight, 1, n, k, false));
      CHECK(!quantizes(x, weight, 9, n, k));
    }
    CHECK(quantizes(x, weight, 4, 4096, 4096));
    CHECK(!quantizes(x, weight, 2, 8192, 28672));  // a kernel for x alone takes less time
  }
}

TEST_CASE("eight bits: who multiplies few tokens on an H200") {
  const auto family = [](Format x, Format weight, int64_t m, int64_t n, int64_t k) {
    const Plan plan = planned(problem_of(x, weight, m, n, k));
    // Next to a CTA of 16 warps with all registers there would be no room for the kernel that quantizes the next x.
    if (weight != Format::kInt4 && plan.family == Family::kSm90Mma) CHECK(plan.warps <= 8);
    return plan.family;
  };
  const Format int8 = Format::kInt8, fp8 = Format::kFp8, int4 = Format::kInt4;
  for (const auto& [x, weight] : {std::pair{int8, int8}, {int8, int4}, {fp8, fp8}, {fp8, int4}}) {
    for (const auto& [n, k] : {std::pair{1024, 1024}, {4096, 4096}, {6144, 4096}, {28672, 4096}, {4096, 14336}}) {
      CHECK(family(x, weight, 8, n, k) == Family::kSm90Mma);
      CHECK(family(x, weight, 33, n, k) == Family::kSm90Ws);
      const bool one_pass = n <= 4096, long_run = n == 28672;
      const bool mma_16 = x == int8 ? weight == int4 || !long_run : weight == int4 && n <= 6144;
      CHECK(family(x, weight, 16, n, k) == (mma_16 ? Family::kSm90Mma : Family::kSm90Ws));
      const bool mma_32 = x == int8 && one_pass && (weight == int8 || k <= 8192);
      CHECK(family(x, weight, 32, n, k) == (mma_32 ? Family::kSm90Mma : Family::kSm90Ws));
    }
  }
}

TEST_CASE("eight bits: few rows of W and a long K run on wgmma on an H200, with split-K") {
  const auto family = [](Format x, Format weight, int64_t m, int64_t n, int64_t k, bool quantizes = false) {
    Problem problem = problem_of(x, weight, m, n, k);
    problem.quantizes_x = quantizes;
    const Plan plan = planned(problem);
    CHECK(plan.quantizes_x == (quantizes && plan.family == Family::kSm90Mma && m <= 8));
    return plan.family;
  };
  const Format float_x = Format::kFloat, int8 = Format::kInt8, fp8 = Format::kFp8, int4 = Format::kInt4;
  const Family mma = Family::kSm90Mma, ws = Family::kSm90Ws;
  for (const Format weight : {fp8, int4}) {
    CHECK(family(fp8, weight, 1, 1024, 4096) == mma);
    CHECK(family(fp8, weight, 1, 1024, 6144) == ws);
    CHECK(family(fp8, weight, 1, 1024, 6144, true) == mma);  // quantizing is a kernel more
    CHECK(family(fp8, weight, 8, 1408, 8192, true) == ws);
    CHECK(family(fp8, weight, 1, 1920, 8192) == mma);  // 120 row tiles for 132 SMs
    CHECK(family(fp8, weight, 1, 1920, 16384) == ws);
    CHECK(family(fp8, weight, 1, 2176, 16384) == mma);
  }
  CHECK(family(int8, int4, 16, 1024, 8192) == ws);
  CHECK(family(int8, int4, 1, 1408, 16384, true) == mma);
  CHECK(family(int8, int4, 1, 1152, 28928, true) == ws);
  for (const Format weight : {int8, int4}) {
    CHECK(family(int8, weight, 24, 1152, 6144) == ws);  // mma.sync in tiles of 32 tokens
    CHECK(family(int8, weight, 24, 1152, 4096) == mma);
  }
  CHECK(family(int8, int8, 16, 1024, 16384) == mma);
  CHECK(family(int8, int8, 1, 1024, 32768) == ws);
  CHECK(family(float_x, fp8, 1, 1152, 12288) == ws);
  CHECK(family(float_x, fp8, 1, 1152, 8192) == mma);
  CHECK(family(float_x, int8, 1, 1408, 16384) == mma);
  CHECK(family(float_x, int8, 1, 1408, 24576) == ws);
}

TEST_CASE("eight bits: 9 to 16 tokens of int8 x int4 on an H200 by the row tiles of an SM") {
  const auto family = [](int64_t n) { return planned(problem_of(Format::kInt8, Format::kInt4, 16, n, 4096)).family; };
  CHECK(family(8192) == Family::kSm90Mma);  // one pass of four
  for (const int64_t n : {9216, 14336, 20480}) CHECK(family(n) == Family::kSm90Ws);
  CHECK(family(28672) == Family::kSm90Mma);  // two CTAs an SM with passes of eight
}

TEST_CASE("eight bits: the passes over a run of row tiles leave few places empty") {
  using enum Format;
  // Row tiles that a CTA has on 132 multiprocessors, and that a pass has places for by the format of W.
  struct Case {
    int64_t n, k, run;
    int int8, fp8, int4;
  };
  for (const Case& c : {Case{1024, 4096, 1, 1, 1, 1},
                        {4096, 4096, 2, 2, 2, 2},
                        {5120, 5120, 3, 3, 3, 3},
                        {6144, 4096, 3, 3, 3, 3},
                        {8192, 8192, 4, 4, 4, 4},
                        {10240, 5120, 5, 3, 3, 3},
                        {12288, 4096, 6, 3, 3, 3},
                        {14336, 4096, 7, 4, 4, 4},
                        {28672, 4096, 14, 3, 2, 4},
                        {8192, 28672, 4, 2, 2, 4}}) {  // so long an x leaves no room for longer rings
    CHECK(ceil_div(c.n / kTileN, kH200.num_sms) == c.run);
    for (const auto& [weight, places] : {std::pair{kInt8, c.int8}, {kFp8, c.fp8}, {kInt4, c.int4}}) {
      Problem problem = problem_of(weight == kFp8 ? kFp8 : kInt8, weight, 1, c.n, c.k);
      problem.quantizes_x = true;
      const Plan plan = planned(problem);
      INFO(to_string(plan));
      CHECK(plan.quantizes_x);
      CHECK(plan.runs);
      CHECK(plan.tile_n == places * kTileN);
    }
  }
}

TEST_CASE("eight bits: who multiplies few tokens in blocks of scales on an H200") {
  const auto family = [](int64_t m, int64_t n, int64_t k) {
    Problem problem = problem_of(Format::kFp8, Format::kFp8, m, n, k);
    problem.weight_scaling = problem.x_scaling = Scaling::kBlock;
    return planned(problem).family;
  };
  CHECK(family(16, 4096, 4096) == Family::kSm90Mma);
  CHECK(family(17, 4096, 4096) == Family::kSm90Ws);
  CHECK(family(8, 6144, 4096) == Family::kSm90Mma);
  CHECK(family(9, 6144, 4096) == Family::kSm90Ws);
  CHECK(family(9, 2560, 9728) == Family::kSm90Ws);
}

TEST_CASE("eight bits: who multiplies few tokens of a float x on an H200") {
  const auto family = [](Format weight, int64_t m, int64_t n, Scaling scaling = Scaling::kRow,
                         DType x_dtype = DType::kBFloat16) {
    Problem problem = problem_of(Format::kFloat, weight, m, n, 4096);
    problem.weight_scaling = scaling, problem.x_dtype = x_dtype;
    return planned(problem).family;
  };
  using enum Format;
  for (const int64_t n : {1024, 4096, 28672}) {
    CHECK(family(kFp8, 8, n) == Family::kSm90Mma);
    CHECK(family(kFp8, 9, n) == Family::kSm90Ws);
    CHECK(family(kInt8, 16, n) == Family::kSm90Mma);
    CHECK(family(kInt8, 17, n) == Family::kSm90Ws);
    CHECK(family(kFp8, 16, n, Scaling::kBlock) == Family::kSm90Mma);
    CHECK(family(kFp8, 17, n, Scaling::kBlock) == Family::kSm90Ws);
    CHECK(family(kInt8, 32, n, Scaling::kRow, DType::kFloat32) == Family::kSm90Mma);
  }
}

TEST_CASE("eight bits: tiles of wgmma have as few rows as save time") {
  const auto plan = [](auto... problem) { return planned(problem_of(problem...)); };
  using enum Format;
  // 28672 rows are two waves of 132 tiles of 112, too; 13824 are one wave of 124.
  CHECK(plan(kInt8, kInt8, 64, 28672, 4096).tile_n == 112);
  CHECK(plan(kFp8, kFp8, 64, 13824, 5120).tile_n == 112);
  // A warpgroup multiplies 64 rows anyway, where that or making them ready takes longest.
  CHECK(plan(kInt8, kInt4, 64, 28672, 4096).tile_n == 128);
  CHECK(plan(kInt8, kInt8, 512, 28672, 4096).tile_n == 128);
  // Several tiles of tokens read W again, from L2.
  CHECK(plan(kInt8, kInt8, 128, 4480, 11136).tile_n % 64 != 0);
  CHECK(plan(kInt8, kInt8, 192, 4480, 11136).tile_n % 64 == 0);
  // One of two warpgroups, and neither split K.
  const Plan half = plan(kInt8, kInt8, 128, 4096, 4096);
  CHECK(half.tile_n == 64);
  CHECK(half.split_k == 1);
  CHECK(half.ctas == 128);
}

TEST_CASE("eight bits: 300 tokens are two tiles of 160") {
  using enum Format;
  for (const auto& [x, weight] : {std::pair{kFloat, kInt8}, {kFloat, kFp8}, {kInt8, kInt8}, {kFp8, kFp8}}) {
    const Plan plan = planned(problem_of(x, weight, 300, 8192, 8192));
    INFO(to_string(plan));
    CHECK(plan.tile_m == 160);
    CHECK(plan.tile_n == 128);
  }
}

TEST_CASE("eight bits: three warpgroups where two leave multiprocessors idle") {
  const auto plan = [](auto... problem) { return planned(problem_of(problem...)); };
  using enum Format;
  // 6144 rows times 512 tokens are 128 tiles of 192 x 128, 96 of 128 x 256 and 192 of 128 x 128.
  for (const auto& [x, weight] : {std::pair{kFloat, kInt8}, {kFloat, kFp8}, {kInt8, kInt8}, {kFp8, kFp8}}) {
    const Plan tall = plan(x, weight, 512, 6144, 4096);
    INFO(to_string(tall));
    CHECK(tall.tile_n == 192);
    CHECK(tall.tile_m == 128);
    CHECK(tall.warps == 16);
    CHECK(tall.ctas == 128);
    CHECK(plan(x, weight, 512, 4096, 4096).tile_n == 128);
  }
}

TEST_CASE("eight bits: many tokens of fp8 in halves of the largest tile") {
  const auto plan = [](auto... problem) { return planned(problem_of(problem...)); };
  using enum Format;
  for (const auto& [m, n, k] : {std::array{4096, 4096, 4096}, {1024, 8192, 8192}, {1024, 28672, 4096}}) {
    const Plan halves = plan(kFp8, kFp8, m, n, k);
    INFO(to_string(halves));
    CHECK(halves.tile_n == 128);
    CHECK(halves.tile_m == 256);
  }
}

TEST_CASE("eight bits: pairs of CTAs split K of the tiles after the last full wave, where that is one at most each") {
  const auto plan = [](auto... problem) { return planned(problem_of(problem...)); };
  using enum Format;
  // 448 tiles of 128 x 256 are three waves and 52; 896 are six and 104.
  const Plan some = plan(kFloat, kFp8, 512, 28672, 4096), many = plan(kFloat, kFp8, 1024, 28672, 4096);
  CHECK(some.splits_last);
  CHECK(some.tile_m == 256);
  CHECK(some.split_k == 1);
  CHECK(some.ctas == 132);
  CHECK(to_string(some).find("splits_last") != std::string::npos);
  CHECK(!many.splits_last);
  CHECK(to_string(many).find("splits_last") == std::string::npos);
}

TEST_CASE("eight bits: int32 sums of a slice of K cannot overflow") {
  for (const Gpu& gpu : kGpus) {
    if (gpu.compute_capability == 90) continue;  // wgmma may serve there and sums in another way
    for (int64_t m : {1, 16, 4096}) {
      Problem problem;
      problem.x = problem.weight = Format::kInt8;
      problem.m = m, problem.n = 20000, problem.k = 1 << 20;
      Plan plan;
      REQUIRE(gemm::plan(problem, gpu, &plan).ok());
      INFO(describe(problem, gpu) << ": " << to_string(plan));
      // All warps of a CTA at one slice each is the least it may rely on.
      CHECK(problem.k / plan.split_k / plan.warps <= 65536);
      if (m > 64) CHECK(problem.k / plan.split_k <= 65536);
    }
  }
}

TEST_CASE("eight bits: wgmma sums int8 over as many columns as an int32 holds") {
  Problem problem;
  problem.x = problem.weight = Format::kInt8;
  problem.m = problem.n = 4096;
  for (const auto& [k, kernel] : {std::pair{(1 << 17) - 16, Family::kSm90Ws}, {1 << 17, Family::kSm90Mma}}) {
    problem.k = k;
    const Plan plan = planned(problem);
    INFO(describe(problem, kH200) << ": " << to_string(plan));
    CHECK(plan.family == kernel);
  }
}

TEST_CASE("eight bits: the plan names the tensor cores' instruction") {
  const auto instruction = [](Format x, Format weight, int compute_capability) {
    for (const Gpu& gpu : kGpus) {
      if (gpu.compute_capability != compute_capability) continue;
      Problem problem;
      problem.x = x, problem.weight = weight;
      problem.m = 1, problem.n = problem.k = problem.group_size = 4096;
      Plan plan;
      REQUIRE(gemm::plan(problem, gpu, &plan).ok());
      return std::string(plan.instruction);
    }
    return std::string("no such GPU");
  };
  for (int compute_capability : {80, 86, 89, 90, 120}) {
    CHECK(instruction(Format::kInt8, Format::kInt8, compute_capability) == "mma.sync s8");
    CHECK(instruction(Format::kInt8, Format::kInt4, compute_capability) == "mma.sync s8");
    CHECK(instruction(Format::kFloat, Format::kInt8, compute_capability) == "mma.sync bf16");
  }
  CHECK(instruction(Format::kFloat, Format::kFp8, 90) == "mma.sync f16");
  CHECK(instruction(Format::kFp8, Format::kFp8, 80) == "mma.sync f16");
  CHECK(instruction(Format::kFp8, Format::kInt4, 86) == "mma.sync f16");
  CHECK(instruction(Format::kFp8, Format::kFp8, 89) == "mma.sync e4m3");
  CHECK(instruction(Format::kFp8, Format::kInt4, 120) == "mma.sync e4m3");
}

TEST_CASE("eight bits: a GPU below compute capability 8.0 is refused by name") {
  Problem problem;
  problem.m = problem.n = problem.k = 64;
  Plan plan;
  const Status status = gemm::plan(problem, Gpu{75, 40, 65536}, &plan);
  CHECK(!status.ok());
  CHECK(status.message().find("7.5") != std::string::npos);
  CHECK(status.message().find("8.0") != std::string::npos);
}

}  // namespace qao::gemm
