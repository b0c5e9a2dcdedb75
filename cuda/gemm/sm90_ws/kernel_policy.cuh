// Types, layout and roles of one instantiation of the kernel.
#pragma once

#include <type_traits>

#include "common/wgmma.cuh"
#include "gemm/sm90_ws/kernel_traits.h"
#include "gemm/sm90_ws/params.h"

namespace qao::gemm::sm90_ws {

// T: MMA type, __nv_bfloat16, __half, int8_t or qao::wgmma::E4m3 or E5m2. `columns`: promotion needs a value per token,
// a scale or a sum of x.
template <typename T_, Format weight, Fold fold, bool columns, int rows, int tokens, bool ping_pong,
          bool grouped = false>
struct Kernel {
  using T = T_;
  using Product = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;
  static constexpr Format kWeight = weight;
  static constexpr Fold kFold = fold;
  static constexpr bool kFolds = fold != Fold::kNone, kColumns = columns;
  static constexpr bool kFloatX =
      !std::is_same_v<T, int8_t> && !std::is_same_v<T, qao::wgmma::E4m3> && !std::is_same_v<T, qao::wgmma::E5m2>;
  static constexpr bool kPacked = is_packed(weight), kFromRegisters = kFloatX || kPacked;
  static constexpr bool kScalesOperand =
      kPacked && kFloatX && !kFolds;  // int4 and fp4 are multiplied by their scales in T
  static constexpr bool kGroups = fold == Fold::kGroup;
  // int4 with int8 x: multiplied by integers per group, in int8; with e4m3 x: by powers of two, in e5m2
  static constexpr bool kRowScales = kPacked && !kFloatX && !kGroups;
  // int4 with e4m3 x: codes minus integer zero points
  static constexpr bool kCentred = kPacked && std::is_same_v<T, qao::wgmma::E4m3>;
  static constexpr bool kSwapped = fold == Fold::kBlock && !kFloatX && !columns;
  static constexpr bool kOwnTokens = kSwapped && tokens == rows;  // a warpgroup has 64 tokens; else it has 64 rows of W
  static constexpr bool kOneHalf = kFolds && tokens == 256;       // registers for products of half of the tokens only
  static constexpr Traits kTraits{kFloatX, kPacked,  weight == Format::kFp4, columns,
                                  kFolds,  kSwapped, fold == Fold::kPromote};
  static constexpr Tile kTile{rows, tokens, ping_pong};
  static constexpr bool kOneGroup = kTile.one_group();
  static constexpr bool kPreparesGroups = kTraits.prepares_groups(kTile);
  // Three warps convert scales, one stage ahead
  static constexpr bool kMakesScales = kScalesOperand || kRowScales || kPreparesGroups;
  static constexpr bool kSlices = kScalesOperand && !grouped;  // may leave sums of slices of K to a second kernel
  static constexpr bool kPingPong = ping_pong, kGrouped = grouped, kMerged = false, kGated = false;
  static constexpr int kSharers = kTile.sharers();
  using Params = std::conditional_t<grouped, GroupedParams, sm90_ws::Params>;
  using Maps = TensorMaps;
  static constexpr int kRowParts = kTile.warpgroup_rows() / kWarpgroupRows;  // 64-row parts per warpgroup
  static constexpr int kTileK = kTraits.tile_k(kTile), kTokens = tokens, kTilesM = tokens / 8;
  static constexpr int kAtomK = kFloatX ? 64 : 128, kAtoms = kTileK / kAtomK;  // 128 bytes per token
  static constexpr int kSteps = kAtoms * kAtomSteps;                           // WGMMAs, 32 bytes per token each
  static constexpr Stage kStage{kTraits, kTile, grouped};
  static constexpr int kWarpgroups = kTile.warpgroups(), kConsumerThreads = kWarpgroups * 128,
                       kThreads = kConsumerThreads + kProducerThreads;
  // All threads start with equal register counts; consumers take exactly the registers that producers give up.
  static constexpr int kProducerRegisters = kPreparesGroups ? 32 : kMakesScales ? 56 : 40;
  static constexpr int kConsumerRegisters = kWarpgroups == 4   ? 104
                                            : kPreparesGroups  ? 160
                                            : kWarpgroups == 3 ? 152
                                            : kMakesScales     ? 224
                                                               : 232;
  static_assert(kWarpgroups * tokens * kPaddedN * 4 <= kStage.epilogue, "a tile of split K overlays the ring");
  static constexpr int kPanel = 2048 / tokens;  // token tiles per panel
  static constexpr int kEndRows = expert_end_rows(tokens);
};

// The dense kernel K for several weights of one x. `gated`: for gate and up. A tile has equally many rows of each, and
// y is SiLU(gate) * up.
template <typename K, bool gated>
struct MergedKernel : K {
  static_assert(K::kScalesOperand && !K::kPingPong && !K::kGrouped, "no other roles look up a weight");
  static constexpr bool kMerged = true, kGated = gated, kSlices = false;
  using Params = MergedParams;
  using Maps = MergedTensorMaps;
};

// Consumer warpgroups with rows of W in this tile.
__device__ __forceinline__ int warpgroups(const Params& p) {
  return (p.tile_rows + kWarpgroupRows - 1) / kWarpgroupRows;
}

}  // namespace qao::gemm::sm90_ws
