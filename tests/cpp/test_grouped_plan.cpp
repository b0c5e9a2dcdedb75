// gemm::plan for experts over GPUs, formats and sizes: every plan must fit its GPU and have tiles for every routing.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "gemm/moe_routing.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/operands.h"
#include "gemm/sm90_skinny/grouped.h"
#include "gpus.h"
#include "layout/int4.h"
#include "qao/grouped_gemm.h"

namespace qao::gemm {
namespace {

// All pairs of formats that have kernels.
std::vector<Problem> problems() {
  std::vector<Problem> all;
  for (Format x : kFormats) {
    for (Format weight : kFormats) {
      for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
        Problem problem;
        problem.x = x, problem.weight = weight, problem.x_dtype = dtype;
        problem.scale_dtype = DType::kFloat32, problem.group_size = 32, problem.has_zeros = true;
        problem.quantizes_x = x != Format::kFloat;
        if (is_float_int4(problem) || sm80_mma::operands_of(problem) != sm80_mma::Operands::kCount) {
          all.push_back(problem);
        }
      }
    }
  }
  return all;
}

// Tiles of `tile_m` rows that experts of so many rows have, and those of none.
int64_t tiles_of(const std::vector<int64_t>& ends, int64_t rows, int64_t tile_m) {
  int64_t begin = 0, tiles = 0;
  for (int64_t end : ends) tiles += ceil_div(end - begin, tile_m), begin = end;
  return tiles + ceil_div(rows - begin, tile_m);
}

}  // namespace

TEST_CASE("every grouped product has a plan that fits its GPU") {
  CHECK(problems().size() == 21);
  for (const Gpu& gpu : kGpus) {
    for (Problem problem : problems()) {
      for (int64_t experts : {1, 8, 128, 384}) {
        for (int64_t rows : {1, 8, 100, 2000, 100000}) {
          for (int64_t n : {1, 100, 1536, 28672}) {
            for (int64_t k : {1, 768, 7168}) {
              problem.m = rows, problem.n = n, problem.k = k;
              Experts e;
              e.count = experts, e.rows = rows;
              Plan plan;
              const Status status = gemm::plan(problem, e, gpu, &plan);
              const std::string about = std::string(name_of(problem.x)) + " x " + name_of(problem.weight) + ", " +
                                        std::to_string(experts) + " experts, " + std::to_string(rows) +
                                        " rows: " + (status.ok() ? to_string(plan) : status.message());
              INFO(about);
              REQUIRE(status.ok());
              CHECK(plan.shared_bytes <= gpu.shared_bytes_per_cta);
              const int64_t tiles = token_tiles(experts, rows, plan.tile_m);
              REQUIRE(tiles > 0);
              const int64_t row_tiles = int4::tiles_n(n);
              if (plan.family == Family::kSm90Ws) {  // CTAs stay, at most one an SM
                CHECK(plan.ctas >= 1);
                CHECK(plan.ctas <= std::min<int64_t>(gpu.num_sms, tiles * (ceil_div(n, plan.tile_n) + 1)));
              } else if (plan.family == Family::kSm90SkinnyRingX) {  // the GPU cuts
                CHECK(plan.ctas_at_once >= gpu.num_sms);
                CHECK(plan.ctas >= plan.ctas_at_once);
              } else {
                CHECK(plan.ctas % tiles == 0);
                const int64_t row_blocks = plan.ctas / tiles;
                CHECK(row_blocks <= row_tiles);  // none without work
                if (!plan.runs) CHECK(row_blocks == ceil_div(n, plan.tile_n));
              }
              CHECK((plan.workspace_bytes > 0) == (problem.x == Format::kFloat && problem.x_dtype == DType::kFloat32));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("no routing needs more tiles than a plan has") {
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    const int64_t experts = 1 + static_cast<int64_t>(random() % 40), rows = 1 + static_cast<int64_t>(random() % 300);
    std::vector<int64_t> ends;
    for (int64_t e = 0; e < experts; ++e) ends.push_back(static_cast<int64_t>(random() % (rows + 1)));
    std::sort(ends.begin(), ends.end());
    for (int tile_m : {8, 16, 32, 64}) {
      CHECK(tiles_of(ends, rows, tile_m) <= token_tiles(experts, rows, tile_m));
    }
  }
}

TEST_CASE("few bfloat16 rows an expert stream on Hopper") {
  Problem problem;
  problem.x = Format::kFloat, problem.weight = Format::kInt4, problem.x_dtype = DType::kBFloat16;
  problem.n = 1536, problem.k = 2048, problem.group_size = 128, problem.x_aligned = true;
  Experts experts;
  experts.count = 128;
  Plan plan;
  for (int64_t rows : {8, 256}) {
    problem.m = experts.rows = rows;
    REQUIRE(gemm::plan(problem, experts, kH200, &plan).ok());
    CHECK(plan.family == Family::kSm90SkinnyRingX);
    const bool at_once = plan.ctas <= kH200.num_sms, several_waves = plan.ctas >= 2 * kH200.num_sms;
    CHECK((at_once || several_waves));
    REQUIRE(gemm::plan(problem, experts, kA100, &plan).ok());
    CHECK(plan.family == Family::kSm80MmaWeightOnly);
  }
  const auto family_of = [&](int64_t each) {
    problem.m = experts.rows = 128 * each;
    REQUIRE(gemm::plan(problem, experts, kH200, &plan).ok());
    CHECK(plan.shared_bytes <= kH200.shared_bytes_per_cta);
    return plan.family;
  };
  CHECK(family_of(6) == Family::kSm90SkinnyRingX);
  CHECK(family_of(7) == Family::kSm90Ws);  // scales of 32 bits
  problem.scale_dtype = DType::kBFloat16;
  CHECK(family_of(6) == Family::kSm90SkinnyRingX);
  CHECK(family_of(7) == Family::kSm90SkinnyTmaX);
  CHECK(family_of(8) == Family::kSm90SkinnyTmaX);
  CHECK(plan.tile_m == 16);
  CHECK(family_of(9) == Family::kSm90Ws);
  problem.k = 4096;  // the end of a pass counts less
  CHECK(family_of(12) == Family::kSm90SkinnyTmaX);
  CHECK(family_of(13) == Family::kSm90Ws);
  problem.k = 7168;  // for which 16 rows of x are too many
  CHECK(family_of(8) == Family::kSm90SkinnyTmaX);
  CHECK(plan.tile_m == 12);
  CHECK(family_of(9) == Family::kSm90Ws);
  problem.k = 14336;
  CHECK(family_of(8) == Family::kSm90Ws);
  problem.k = 2048, problem.group_size = 64;
  CHECK(family_of(8) == Family::kSm90Ws);
  problem.weight = Format::kFp4, problem.group_size = 32;
  CHECK(family_of(4) == Family::kSm90SkinnyRingX);
  CHECK(family_of(5) == Family::kSm90Ws);
}

TEST_CASE("CTAs share the tiles that a routing has: all at once, or finer in several rounds") {
  using sm90_skinny::sharing, sm90_skinny::Spread;
  for (const int places : {20, 132, 200}) {
    for (const int us : {1, 48, 455, 1800}) {
      for (const int passes : {1, 5, 24, 448}) {
        const Spread spread{places, passes, us, 4 + us / passes / 2};
        for (int tiles = 0; tiles <= 1000; ++tiles) {
          const int parts = sharing(spread, tiles);
          REQUIRE(parts >= 1);
          REQUIRE(parts <= passes);
          REQUIRE(int64_t{parts} * tiles <= std::max(tiles, 5 * places));
          if (tiles > 0) REQUIRE(parts >= std::min(passes, places / tiles));  // no SM idles that need not
        }
      }
    }
  }
  const Spread small{132, 24, 50, 5};
  CHECK(sharing(small, 8) == 16);
  CHECK(sharing(small, 60) == 2);   // more starts for nothing
  CHECK(sharing(small, 78) == 3);   // a third of an expert twice, not a whole one
  CHECK(sharing(small, 89) == 4);   // a quarter three times
  CHECK(sharing(small, 150) == 3);  // a third four times, not a whole one twice
}

TEST_CASE("many rows an expert are wgmma's on Hopper") {
  Problem problem;
  problem.x = problem.weight = Format::kInt8, problem.quantizes_x = true;
  problem.n = 1536, problem.k = 2048;
  Experts experts;
  experts.count = 128;
  Plan plan;
  const auto plan_of = [&](int64_t rows) {
    problem.m = experts.rows = rows;
    REQUIRE(gemm::plan(problem, experts, kH200, &plan).ok());
    CHECK(plan.family == Family::kSm90Ws);
    CHECK(plan.split_k == 1);
  };
  plan_of(128 * 32);
  CHECK(plan.tile_m < 128);
  CHECK(plan.workspace_bytes == 0);  // rows lie as they are read
  const int index = 0;
  experts.row_index = &index;
  plan_of(128 * 128);
  CHECK(plan.tile_m == 128);
  CHECK(plan.ctas % 2 == 0);  // ping-pong: pairs share x
  CHECK(plan.workspace_bytes >= 128 * 128 * problem.k);
  experts.row_index = nullptr;
  problem.quantizes_x = false, problem.x = Format::kFloat, problem.x_aligned = false;
  plan_of(128 * 16);
  CHECK(plan.workspace_bytes >= 128 * 16 * 2 * problem.k);
  experts.count = 1024;  // more than the table holds
  problem.m = experts.rows = 1024 * 64;
  REQUIRE(gemm::plan(problem, experts, kH200, &plan).ok());
  CHECK(plan.family == Family::kSm90Mma);
}

TEST_CASE("what has no plan says so") {
  Problem problem;
  problem.x = problem.weight = Format::kInt8;
  problem.m = 4, problem.n = 16, problem.k = 65537;
  Experts experts;
  experts.count = 2, experts.rows = 4;
  Plan plan;
  CHECK(!gemm::plan(problem, experts, kH200, &plan).ok());
  problem.k = 65536;
  CHECK(gemm::plan(problem, experts, kH200, &plan).ok());
  CHECK(!gemm::plan(problem, experts, Gpu{75, 40, 65536}, &plan).ok());
  problem.x = Format::kFp8;
  CHECK(!gemm::plan(problem, experts, kH200, &plan).ok());
  experts.rows = int64_t{1} << 31, problem.x = Format::kInt8;
  CHECK(!gemm::plan(problem, experts, kH200, &plan).ok());
}

}  // namespace qao::gemm
