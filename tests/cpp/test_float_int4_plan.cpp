// gemm::plan over GPUs and problems: every plan must be runnable and cover the whole product.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "gemm/sm90_skinny/params.h"
#include "gpus.h"
#include "layout/int4.h"
#include "qao/gemm.h"

namespace qao::gemm {
namespace {

using namespace sm90_skinny;

Problem float_int4() {
  Problem problem;
  problem.weight = Format::kInt4;
  problem.scale_dtype = DType::kBFloat16;
  return problem;
}

template <typename Visit>
void for_each_problem(const Visit& visit) {
  for (const Gpu& gpu : kGpus) {
    for (int64_t m : {1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 1000, 4096, 100000}) {
      for (int64_t n : {1, 15, 16, 17, 100, 896, 4096, 14336, 152064}) {
        for (int64_t k : {1, 31, 64, 65, 384, 896, 4096, 14336}) {
          for (int64_t group_size : {int64_t{32}, int64_t{128}, k}) {
            for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
              for (bool has_zeros : {false, true}) {
                Problem problem = float_int4();
                problem.m = m, problem.n = n, problem.k = k, problem.group_size = group_size;
                problem.x_dtype = dtype, problem.has_zeros = has_zeros;
                visit(problem, gpu);
              }
            }
          }
          for (int64_t group_size : {16, 32}) {
            for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
              Problem problem;
              problem.weight = Format::kFp4, problem.scale_dtype = DType::kBFloat16;
              problem.m = m, problem.n = n, problem.k = k, problem.group_size = group_size, problem.x_dtype = dtype;
              visit(problem, gpu);
            }
          }
        }
      }
    }
  }
}

std::string describe(const Problem& p, const Gpu& gpu) {
  return "m " + std::to_string(p.m) + " n " + std::to_string(p.n) + " k " + std::to_string(p.k) + " group " +
         std::to_string(p.group_size) + " of " + name_of(p.weight) + " x " + name_of(p.x_dtype) +
         (p.has_zeros ? " zeros" : "") + " on compute " + std::to_string(gpu.compute_capability);
}

}  // namespace

TEST_CASE("every problem has a plan that fits its GPU and covers the product") {
  for_each_problem([](const Problem& problem, const Gpu& gpu) {
    Plan plan;
    const Status status = gemm::plan(problem, gpu, &plan);
    const std::string about = describe(problem, gpu) + ": " + (status.ok() ? to_string(plan) : status.message());
    INFO(about);
    REQUIRE(status.ok());
    REQUIRE(plan.tile_n > 0);
    REQUIRE(plan.tile_m > 0);
    CHECK(plan.tile_n % kTileN == 0);
    CHECK(plan.warps >= 1);
    CHECK(plan.warps <= 32);
    CHECK(plan.stages >= 1);
    CHECK(plan.shared_bytes <= gpu.shared_bytes_per_cta);
    CHECK(plan.split_k >= 1);
    // Split-K parts are added up without a workspace on Hopper, and CTAs of sm90 walk over tiles where there are many.
    const Family family = plan.family;
    const int64_t tiles = ceil_div(problem.n, plan.tile_n) * ceil_div(problem.m, plan.tile_m);
    if (family == Family::kSm90SkinnyRingX || family == Family::kSm90SkinnySmemX || family == Family::kSm90SkinnyTmaX) {
      CHECK(gpu.compute_capability >= 90);
      CHECK(problem.m <= plan.tile_m);
      CHECK(plan.ctas <= gpu.num_sms);
      CHECK(plan.ctas % plan.split_k == 0);
      CHECK(plan.workspace_bytes == 0);
    } else if (family == Family::kSm90Ws && plan.split_k == 1) {
      CHECK(plan.ctas >= 1);
      CHECK(plan.ctas <= gpu.num_sms);
    } else if (family == Family::kSm90Ws) {
      CHECK(plan.ctas == tiles * plan.split_k);
    } else {
      CHECK(plan.ctas == tiles * plan.split_k);
    }
    // A slice of K without a K-tile (float32 x brings three bfloat16 parts) would be a CTA without work.
    CHECK(plan.split_k <= tiles_k(problem.k) * (problem.x_dtype == DType::kFloat32 ? 3 : 1));
    if (plan.split_k > 1 && family == Family::kSm80MmaWeightOnly)
      CHECK(plan.workspace_bytes >= 4 * plan.split_k * problem.m * problem.n);
    CHECK(plan.reason[0] != '\0');
  });
}

TEST_CASE("what a decode plan tells the kernel covers the product and fits the shared memory") {
  for_each_problem([](const Problem& problem, const Gpu& gpu) {
    for (DType scale_dtype : {DType::kFloat32, DType::kBFloat16}) {
      if (problem.weight == Format::kFp4 && scale_dtype != DType::kBFloat16) continue;
      Problem scaled = problem;
      scaled.scale_dtype = scale_dtype;
      Plan plan;
      REQUIRE(gemm::plan(scaled, gpu, &plan).ok());
      if (plan.family != Family::kSm90SkinnyRingX) continue;
      INFO(describe(scaled, gpu) << ": " << to_string(plan));
      const Config& config = kRingX[plan.config];
      const int clusters = static_cast<int>(plan.ctas / plan.split_k);
      RingXParams d;
      int shared_bytes;
      REQUIRE(ring_x_params(scaled, config, plan.split_k, clusters, static_cast<int>(plan.shared_bytes), &d,
                            &shared_bytes));
      CHECK(shared_bytes <= plan.shared_bytes);
      CHECK(d.stages == plan.stages);
      CHECK(static_cast<int64_t>(d.row_tiles) * clusters + d.more_row_tiles == tiles_n(problem.n));
      CHECK(d.steps >= 1);
      CHECK(d.steps * plan.split_k + d.more_steps == ceil_div(problem.k, kStepColumns));
      CHECK(d.passes * config.tiles_n >= d.row_tiles + (d.more_row_tiles > 0));
      CHECK(d.slots >= 1);
      CHECK(d.slots <= d.passes);
      CHECK((d.columns_of_token == 1 || d.columns_of_token == d.groups_of_step));
      CHECK((d.columns_of_token == 1 || d.tokens * d.columns_of_token <= 8));
      CHECK(d.x_offset % 128 == 0);
      CHECK(d.stage_bytes % 128 == 0);
      CHECK(d.plain_steps * kStepColumns <= problem.k);
    }
  });
}

TEST_CASE("what a plan for at most eight tokens tells the kernel covers the product and fits the shared memory") {
  int64_t served = 0;
  for_each_problem([&](const Problem& problem, const Gpu& gpu) {
    for (DType scale_dtype : {DType::kFloat32, DType::kBFloat16}) {
      if (problem.weight == Format::kFp4 && scale_dtype != DType::kBFloat16) continue;
      Problem scaled = problem;
      scaled.scale_dtype = scale_dtype;
      Plan plan;
      REQUIRE(gemm::plan(scaled, gpu, &plan).ok());
      if (plan.family != Family::kSm90SkinnySmemX) continue;
      INFO(describe(scaled, gpu) << ": " << to_string(plan));
      ++served;
      CHECK(plan.split_k == 1);
      const Config& config = kSmemX[plan.config];
      const int ctas = static_cast<int>(plan.ctas), limit = static_cast<int>(plan.shared_bytes);
      SmemXParams d;
      int shared_bytes;
      REQUIRE(smem_x_params(scaled, config, ctas, limit, &d, &shared_bytes));
      CHECK(shared_bytes <= plan.shared_bytes);
      CHECK(static_cast<int64_t>(d.row_tiles) * ctas + d.more_row_tiles == tiles_n(problem.n));
      CHECK(d.steps == ceil_div(problem.k, kStepColumns));
      CHECK(d.passes * config.tiles_n >= d.row_tiles + (d.more_row_tiles > 0));
      CHECK(d.slots >= 1);
      CHECK(d.slots <= d.passes);
      CHECK(d.ring_offset % 128 == 0);
      CHECK(d.zeros_offset >= d.steps * d.tokens * kTokenBytes);
      CHECK(d.ring_offset >= d.zeros_offset + kZeroBytes);
      CHECK(d.stage_bytes % 128 == 0);
      CHECK(d.tokens * d.groups_of_step <= 8);  // columns of a product
      CHECK(d.partials_offset % 16 == 0);
      CHECK(d.plain_steps * kStepColumns <= problem.k);
      // A warp's pointer to parameters moves by whole groups.
      CHECK(((config.warps * d.groups_of_step) & ((1 << std::min(d.group_shift, 1)) - 1)) == 0);
      // An x too large for shared memory is left to another family.
      scaled.k = 1 << 20;
      CHECK_FALSE(smem_x_params(scaled, config, ctas, gpu.shared_bytes_per_cta, &d, &shared_bytes));
    }
  });
  CHECK(served > 0);
}

TEST_CASE("a product with RMSNorm before it is one kernel for few tokens from Hopper on, and is refused elsewhere") {
  int64_t served = 0;
  for_each_problem([&](const Problem& problem, const Gpu& gpu) {
    for (bool gated : {false, true}) {
      Problem normed = problem;
      normed.normed = true, normed.gated = gated;
      Plan plan;
      const bool fuses = fuses_norm(normed, gpu);
      INFO(describe(normed, gpu) << (gated ? " gated: " : ": ") << to_string(plan));
      REQUIRE(gemm::plan(normed, gpu, &plan).ok() == fuses);
      if (!fuses) continue;
      ++served;
      CHECK(gpu.compute_capability >= 90);
      CHECK(problem.x_dtype == DType::kBFloat16);
      CHECK(problem.k % kStepColumns == 0);
      const Config& config = kSmemX[plan.config];
      SmemXParams d;
      int shared_bytes;
      REQUIRE(smem_x_params(normed, config, static_cast<int>(plan.ctas), static_cast<int>(plan.shared_bytes), &d,
                            &shared_bytes));
      CHECK(shared_bytes <= gpu.shared_bytes_per_cta);
      // Pairs of row tiles, one of gate and one of up.
      const int64_t parts = gated ? 2 : 1, tiles = static_cast<int64_t>(d.row_tiles) * plan.ctas + d.more_row_tiles;
      CHECK(tiles * parts * kTileN >= problem.n);
      if (gated) CHECK(tiles * parts * kTileN == problem.n);
      CHECK(d.passes * config.tiles_n >= (d.row_tiles + (d.more_row_tiles > 0)) * parts);
      // A factor for each of eight tokens, and a sum of squares for every token and K-step.
      CHECK(d.factors_offset % 16 == 0);
      CHECK(d.partials_offset % 16 == 0);
      CHECK(d.partials_offset - d.factors_offset >= 4 * (kSmemXTokens + d.steps * d.tokens));
      normed.x_aligned = false;
      CHECK_FALSE(fuses_norm(normed, gpu));
    }
  });
  CHECK(served > 0);
}

TEST_CASE("what a plan with x of 9 to 16 tokens in shared memory tells the kernel covers the product and fits") {
  int64_t served = 0;
  for_each_problem([&](const Problem& problem, const Gpu& gpu) {
    for (DType scale_dtype : {DType::kFloat32, DType::kBFloat16}) {
      if (problem.weight == Format::kFp4 && scale_dtype != DType::kBFloat16) continue;
      Problem scaled = problem;
      scaled.scale_dtype = scale_dtype;
      for (const Candidate<Plan>& candidate : candidates(scaled, gpu)) {
        const Plan& plan = candidate.plan;
        if (plan.family != Family::kSm90SkinnyTmaX) continue;
        const std::string about = describe(scaled, gpu) + ": " + to_string(plan);
        INFO(about);
        ++served;
        const Config& config = kTmaX[plan.config];
        const int ctas = static_cast<int>(plan.ctas), limit = static_cast<int>(plan.shared_bytes);
        TmaXParams d;
        int shared_bytes;
        REQUIRE(tma_x_params(scaled, config, ctas, limit, &d, &shared_bytes));
        CHECK(shared_bytes == plan.shared_bytes);
        CHECK(problem.m <= plan.tile_m);
        CHECK(plan.ctas <= gpu.num_sms);
        CHECK(plan.split_k == 1);
        CHECK(d.row_tiles >= 1);
        CHECK(static_cast<int64_t>(d.row_tiles) * ctas + d.more_row_tiles == tiles_n(problem.n));
        CHECK(d.passes * config.tiles_n >= d.row_tiles + (d.more_row_tiles > 0));
        CHECK(d.steps * kStepColumns >= problem.k);
        CHECK(d.row_tile_bytes == d.steps * kStepBytes);
        const int stage_bytes = tma_x_stage_bytes(config.tiles_n, problem.has_zeros);
        CHECK(stage_bytes % 128 == 0);
        CHECK(stage_bytes >= config.tiles_n * kTileN * kTmaXTokens * 4);  // sums of a pass
        CHECK(d.ring_offset == d.steps * kStepBoxes * kTmaXTokens * kBoxRowBytes);
        CHECK(d.barriers_offset == d.ring_offset + config.warps * config.stages * stage_bytes);
        CHECK(d.barriers_offset % 8 == 0);
        CHECK(d.places_offset == d.barriers_offset + 8 * d.steps);
        // A warp's pointer to parameters moves by whole groups.
        CHECK((config.warps & ((1 << std::min(d.group_shift, 1)) - 1)) == 0);
        scaled.x_aligned = false;
        CHECK_FALSE(tma_x_params(scaled, config, ctas, limit, &d, &shared_bytes));
        scaled.x_aligned = true;
      }
    }
  });
  CHECK(served > 0);
}

TEST_CASE("on Hopper an fp4 weight has special kernels for bfloat16 activations, for others that of every GPU") {
  Problem problem;
  problem.weight = Format::kFp4, problem.scale_dtype = DType::kBFloat16, problem.n = problem.k = 4096;
  const auto family = [&](const Gpu& gpu) {
    Plan plan;
    REQUIRE(gemm::plan(problem, gpu, &plan).ok());
    return plan.family;
  };
  for (int64_t group_size : {16, 32}) {
    problem.group_size = group_size;
    for (int64_t m : {1, 8, 9, 16, 17, 1000}) {
      problem.m = m;
      CHECK(family(kH200) == (m == 1    ? Family::kSm90SkinnySmemX
                              : m <= 16 ? Family::kSm90SkinnyRingX
                                        : Family::kSm90Ws));
      CHECK(family(kA100) == Family::kSm80MmaWeightOnly);
      for (DType dtype : {DType::kFloat32, DType::kFloat16}) {
        problem.x_dtype = dtype;
        CHECK(family(kH200) == Family::kSm80MmaWeightOnly);
      }
      problem.x_dtype = DType::kBFloat16;
    }
  }
  problem.m = 2;  // as many columns of a product as four groups have
  CHECK(family(kH200) == Family::kSm90SkinnySmemX);
  problem.n = 14336;  // several passes
  CHECK(family(kH200) == Family::kSm90SkinnyRingX);
  problem.group_size = 16;
  CHECK(family(kH200) == Family::kSm90SkinnyRingX);
  problem.m = 1;
  CHECK(family(kH200) == Family::kSm90SkinnySmemX);
  problem.m = 2, problem.n = 4096;
  CHECK(family(kH200) == Family::kSm90SkinnyRingX);
  problem.m = 1, problem.k = problem.group_size;  // a K-step of one group
  CHECK(family(kH200) == Family::kSm80MmaWeightOnly);
}

TEST_CASE("few tokens of 16 bits stream their weights from Hopper on, all else does not") {
  Problem problem = float_int4();
  problem.m = 1, problem.n = problem.k = 4096, problem.group_size = 128, problem.has_zeros = true;
  const auto planned = [](const Problem& of, const Gpu& gpu) {
    Plan plan;
    REQUIRE(gemm::plan(of, gpu, &plan).ok());
    return plan;
  };
  const auto family = [&](const Problem& of, const Gpu& gpu) { return planned(of, gpu).family; };
  CHECK(family(problem, kH200) == Family::kSm90SkinnySmemX);
  CHECK(family(problem, kB200) == Family::kSm90SkinnySmemX);
  CHECK(family(problem, kA100) == Family::kSm80MmaWeightOnly);
  problem.n = 6144;  // three row tiles a pass
  CHECK(family(problem, kH200) == Family::kSm90SkinnySmemX);
  CHECK(planned(problem, kH200).tile_n == 48);
  problem.m = 3;
  CHECK(family(problem, kH200) == Family::kSm90SkinnySmemX);
  problem.m = 4;
  CHECK(family(problem, kH200) == Family::kSm90SkinnyRingX);
  problem.m = 1;
  problem.group_size = 32;  // parameters of three row tiles are more than a warp copies at once
  CHECK(planned(problem, kH200).tile_n == 32);
  problem.n = 4096;
  CHECK(family(problem, kH200) == Family::kSm90SkinnySmemX);
  problem.k = 2048;  // hardly a K-step a warp
  CHECK(family(problem, kH200) == Family::kSm90SkinnyRingX);
  problem.m = 4, problem.n = 14336, problem.k = 4096;  // more than eight columns of a token and a group
  CHECK(family(problem, kH200) == Family::kSm90SkinnyRingX);
  problem.group_size = 128;
  CHECK(family(problem, kH200) == Family::kSm90SkinnySmemX);
  problem.m = 5;
  CHECK(family(problem, kH200) == Family::kSm90SkinnyRingX);
  problem.n = 28672;  // many rows for every multiprocessor
  CHECK(family(problem, kH200) == Family::kSm90SkinnySmemX);
  problem.m = 6;
  CHECK(family(problem, kH200) == Family::kSm90SkinnyRingX);
  problem.n = 128256;
  CHECK(family(problem, kH200) == Family::kSm90SkinnySmemX);
  problem.k = 65536;  // x does not fit
  CHECK(family(problem, kH200) == Family::kSm90SkinnyRingX);

  for (int64_t n : {1024, 4096, 6144, 14336, 28672}) {
    problem.m = 16, problem.n = n, problem.k = 4096;
    CHECK(family(problem, kH200) == Family::kSm90SkinnyTmaX);
    problem.group_size = 64;  // sums of their own
    CHECK(family(problem, kH200) == Family::kSm90SkinnyRingX);
    problem.group_size = 128;
  }
  problem.n = 28672;  // four passes of four row tiles rather than five of three
  CHECK(planned(problem, kH200).tile_n == 64);
  problem.n = 10240;  // two of three rather than two of four
  CHECK(planned(problem, kH200).tile_n == 48);
  problem.n = 5120, problem.k = 5120;  // x leaves room for passes of two row tiles only
  CHECK(family(problem, kH200) == Family::kSm90SkinnyRingX);
  problem.n = 3584, problem.k = 18944;
  CHECK(family(problem, kH200) == Family::kSm90SkinnyRingX);
  problem.n = 152064, problem.k = 896;  // hardly any columns
  CHECK(family(problem, kH200) == Family::kSm90Ws);
  for (int64_t n : {4096, 8192, 28672, 152064}) {
    problem.m = 17, problem.n = n, problem.k = 4096, problem.x_aligned = true;
    CHECK(family(problem, kH200) == Family::kSm90Ws);
    CHECK(family(problem, kA100) == Family::kSm80MmaWeightOnly);
    problem.x_aligned = false;
    CHECK(family(problem, kH200) == Family::kSm80MmaWeightOnly);
  }
  problem.m = 16, problem.n = 4096;  // TMA loads x
  CHECK(family(problem, kH200) == Family::kSm90SkinnyRingX);
  problem.x_aligned = true, problem.x_dtype = DType::kFloat16;
  CHECK(family(problem, kH200) == Family::kSm90SkinnyTmaX);
  problem.m = 8, problem.k = 896;
  CHECK(family(problem, kH200) == Family::kSm90SkinnySmemX);
  problem.k = 14336;
  CHECK(family(problem, kH200) == Family::kSm80MmaWeightOnly);
  problem.m = 16;
  CHECK(family(problem, kH200) == Family::kSm80MmaWeightOnly);
  problem.n = 6144;
  CHECK(family(problem, kH200) == Family::kSm90Ws);
  problem.m = 1, problem.x_dtype = DType::kFloat32;
  CHECK(family(problem, kH200) == Family::kSm80MmaWeightOnly);
}

TEST_CASE("pairs of CTAs split K for 9 to 16 tokens where that fills more of the GPU") {
  const auto planned = [](int64_t m, int64_t n, int64_t k) {
    Problem problem = float_int4();
    problem.m = m, problem.n = n, problem.k = k, problem.group_size = 128;
    Plan plan;
    REQUIRE(gemm::plan(problem, kH200, &plan).ok());
    return plan;
  };
  CHECK(planned(8, 1024, 4096).ctas == 128);  // 64 row tiles
  CHECK(planned(8, 4096, 4096).split_k == 1);
  CHECK(planned(16, 2560, 9728).split_k == 2);
  CHECK(planned(16, 4096, 14336).split_k == 2);
  CHECK(planned(16, 13824, 5120).split_k == 1);
}

TEST_CASE("what plan() takes is among the candidates, and every one of them fits the GPU") {
  for_each_problem([](const Problem& problem, const Gpu& gpu) {
    Plan plan;
    REQUIRE(gemm::plan(problem, gpu, &plan).ok());
    const std::string about = describe(problem, gpu) + ": " + to_string(plan);
    INFO(about);
    int found = 0;
    for (const Candidate<Plan>& candidate : candidates(problem, gpu)) {
      const Plan& other = candidate.plan;
      CHECK(other.shared_bytes <= gpu.shared_bytes_per_cta);
      CHECK(problem.m <= (other.family == Family::kSm90SkinnyRingX ? other.tile_m : problem.m));
      found += other.family == plan.family && other.config == plan.config && other.tile_n == plan.tile_n &&
               other.split_k == plan.split_k && other.splits_last == plan.splits_last && other.ctas == plan.ctas &&
               other.shared_bytes == plan.shared_bytes;
    }
    CHECK(found == 1);
  });
}

TEST_CASE("splitting K never fills the GPU more than once") {
  for_each_problem([](const Problem& problem, const Gpu& gpu) {
    Plan plan;
    REQUIRE(gemm::plan(problem, gpu, &plan).ok());
    INFO(describe(problem, gpu) << ": " << to_string(plan));
    if (plan.split_k > 1) CHECK(plan.ctas <= gpu.num_sms);
  });
}

TEST_CASE("the same problem gives the same plan") {
  for_each_problem([](const Problem& problem, const Gpu& gpu) {
    Plan first, second;
    REQUIRE(gemm::plan(problem, gpu, &first).ok());
    REQUIRE(gemm::plan(problem, gpu, &second).ok());
    REQUIRE(to_string(first) == to_string(second));
  });
}

TEST_CASE("wgmma serves more than 16 tokens of an aligned x on Hopper, in the tile that measured best") {
  const auto planned = [&](int64_t m, int64_t n, int64_t k, bool aligned = true, int64_t group_size = 128) {
    Problem problem = float_int4();
    problem.m = m, problem.n = n, problem.k = k, problem.group_size = group_size, problem.x_aligned = aligned;
    Plan plan;
    REQUIRE(gemm::plan(problem, kH200, &plan).ok());
    return plan;
  };
  CHECK(planned(16, 4096, 4096).family == Family::kSm90SkinnyTmaX);
  CHECK(planned(17, 4096, 4096, false).family == Family::kSm80MmaWeightOnly);
  CHECK(planned(17, 4096, 4096).family == Family::kSm90Ws);
  CHECK(std::string(planned(17, 4096, 4096).instruction) == "wgmma bf16");
  const Plan few = planned(64, 28672, 4096), fine = planned(64, 28672, 4096, true, 32);
  CHECK(few.tile_m == 64);
  CHECK(few.tile_n == 256);
  CHECK(fine.tile_n == 128);  // taller tiles have one group per k-tile
  CHECK(fine.ctas == 132);    // more row tiles than multiprocessors: CTAs walk over them
  // tests/test_mm.py multiplies in these tiles
  CHECK(kernel_name(planned(20, 25300, 384)) == "sm90_ws_w4a16_192x32");
  CHECK(kernel_name(planned(32, 33000, 384)) == "sm90_ws_w4a16_256x32");
  CHECK(kernel_name(planned(50, 25300, 384)) == "sm90_ws_w4a16_192x64");
  CHECK(kernel_name(planned(64, 33000, 384)) == "sm90_ws_w4a16_256x64");
  const Plan deep = planned(32, 4096, 14336);  // few row tiles and a long K: a second kernel adds slices of K
  CHECK(deep.partials > 1);
  CHECK(deep.ctas > 66);
  CHECK(deep.workspace_bytes >= 4 * deep.partials * 32 * 4096);
  const Plan middle = planned(128, 8192, 8192), large = planned(4096, 28672, 4096);
  CHECK(middle.tile_m == 128);
  CHECK(middle.split_k == 2);
  CHECK(large.tile_m == 256);
  CHECK(planned(300, 8192, 8192).tile_m == 160);
  const Plan tall = planned(512, 6144, 4096), left = planned(512, 28672, 4096);
  CHECK(tall.tile_n == 192);
  CHECK(tall.ctas == 128);
  CHECK(left.tile_m == 256);
  CHECK(left.splits_last);
}

TEST_CASE("one kernel multiplies 17 to 128 tokens with several weights on Hopper, and makes the gate") {
  const auto merged = [&](int64_t m, const std::vector<int64_t>& rows, bool gated = false) {
    Problem problem = float_int4();
    problem.m = m, problem.k = 4096, problem.group_size = 128, problem.gated = gated;
    for (const int64_t n : rows) problem.n += n;
    Plan plan;
    if (!merges(problem, rows, kH200, &plan)) return std::string("none");
    return kernel_name(plan) + " " + std::to_string(plan.ctas);
  };
  CHECK(merged(17, {4096, 1024, 1024}) == "sm90_ws_w4a16_128x32 96");
  CHECK(merged(128, {4096, 1024, 1024}).starts_with("sm90_ws"));
  CHECK(merged(32, {14336, 14336}) == "sm90_ws_w4a16_256x32 112");
  CHECK(merged(32, {14336, 14336}, true) == "sm90_ws_w4a16_256x32 112");
  CHECK(merged(32, {4100, 4100}) != "none");  // each ends inside a tile
  CHECK(merged(12, {4096, 1024, 1024}) == "none");
  CHECK(merged(4096, {4096, 1024, 1024}) == "none");
}

TEST_CASE("a GPU below compute capability 8.0 is refused by name") {
  Problem problem = float_int4();
  problem.m = problem.n = problem.k = 64, problem.group_size = 64;
  Plan plan;
  const Status status = gemm::plan(problem, Gpu{75, 40, 65536}, &plan);
  CHECK(!status.ok());
  CHECK(status.message().find("7.5") != std::string::npos);
  CHECK(status.message().find("8.0") != std::string::npos);
}

}  // namespace qao::gemm
