// Consumer warpgroup: mainloop over the k-tiles of 64 rows of W, promotion, and epilogue.
//
// The mainloops differ in the work that they overlap: conversion of W, WGMMA, promotion.
#pragma once

#include "gemm/sm90_ws/dequant_int4.cuh"
#include "gemm/sm90_ws/epilogue.cuh"
#include "gemm/sm90_ws/load.cuh"
#include "gemm/sm90_ws/mainloop_swap_ab.cuh"
#include "gemm/sm90_ws/zero_points.cuh"

namespace qao::gemm::sm90_ws {

// One warpgroup's 64 rows of an output tile.
template <typename K>
struct Consumer {
  using T = typename K::T;

  const Params& p;
  const CUtensorMap& y_map;
  Ring<K>& ring;
  const int lane = threadIdx.x % 32, warp = ptx::warp_index();
  // Promotion of one half of the tokens can overlap the WGMMAs of the other half, unless these would read W from shared
  // memory a second time. The largest tile is halved for lack of registers: its halves share one accumulator.
  static constexpr bool kBeside = K::kFolds && K::kPacked && !K::kFloatX && K::kTokens >= 64 && !K::kPreparesGroups;
  static constexpr int kHalves = kBeside || K::kOneHalf ? 2 : 1, kProducts = K::kOneHalf ? 1 : kHalves;
  static constexpr int kHalfTiles = K::kTilesM / kHalves;
  typename K::Product product[kProducts][kHalfTiles][4];
  float sum[K::kFolds ? K::kTilesM : 1][4];
  // Double-buffered across k-tiles
  Operand<K::kSteps> operand[K::kScalesOperand || K::kOneHalf || K::kPreparesGroups ? 1 : 2];
  std::conditional_t<K::kRowScales, RowScaledOperand<T>,
                     RawOperand<T, K::kWeight, K::kScalesOperand, K::kTile.rows, K::kSteps>>
      raw;
  uint32_t words_offset, scales_offset;  // kScalesOperand: of this lane, in a stage
  std::conditional_t<K::kSwapped, TokenScales<K>, int> token_scales;
  const float* block_scales;  // of this warpgroup's rows of W
  float block_scale, next_block_scale;

  // Waits for the current pipeline stage and loads the fragments of W that need conversion.
  template <int groups = 1>
  __device__ __forceinline__ void fetch() {
    tma::barrier_wait(ring.arrived(), ring.parity);
    const uint32_t weight = ring.address() + K::kStage.x;
    if constexpr (K::kScalesOperand) {
      raw.template load<groups>(ring.address() + words_offset, ring.address() + scales_offset, ring.rest());
    } else if constexpr (K::kFromRegisters && K::kFloatX && K::kPacked) {
      raw.load(p, weight, weight + K::kStage.weight, warp, lane);
    } else if constexpr (K::kRowScales) {
      raw.template load<K::kTile.rows>(groups > 0 && (!K::kFolds || p.groups > 1), weight,
                                       weight + K::kStage.weight + K::kStage.scales / 2, warp, lane);
    } else if constexpr (K::kPreparesGroups) {
      raw.template load_prepared<groups>(weight, weight + K::kStage.weight + K::kStage.scales, warp, lane);
    } else if constexpr (K::kCentred) {
      raw.template load<groups>(p, weight, weight + K::kStage.weight, warp, lane);
    } else if constexpr (K::kFromRegisters) {
      raw.load(weight, warp, lane);
    }
  }
  // Converts the fragments from fetch() to the A operand.
  template <int buffer>
  __device__ __forceinline__ void convert() {
    if constexpr (K::kFromRegisters) {
      raw.convert(operand[buffer]);
#pragma unroll
      for (int step = 0; step < K::kSteps; ++step) {
        ptx::pin(operand[buffer][step]);  // keeps the compiler from moving the conversion behind the WGMMA wait that
                                          // should hide it
      }
    }
  }

  // Issues WGMMAs for k-steps [first, first + steps), 32 bytes of each token per step. No register writes in between.
  template <int buffer, int first, int steps, int half = 0>
  __device__ __forceinline__ void multiply(uint32_t stage, bool fresh) {
    multiply<buffer, first, steps, half>(stage, fresh, product[half % kProducts]);
  }
  template <int buffer, int first, int steps, int half = 0>
  __device__ __forceinline__ void multiply(uint32_t stage, bool fresh, typename K::Product (&to)[kHalfTiles][4]) {
    const uint32_t own = warp / 4 * 64 * 128;
    const uint64_t x = qao::wgmma::descriptor(stage + (K::kOwnTokens ? own : half * kHalfTiles * 8 * 128));
    const uint64_t weight = qao::wgmma::descriptor(stage + K::kStage.x + (K::kOwnTokens ? 0 : own));
    qao::wgmma::fence();
#pragma unroll
    for (int step = first; step < first + steps; ++step) {
      if constexpr (K::kFromRegisters) {
        const uint64_t columns = x + step / kAtomSteps * (K::kTokens * 128 / 16) + step % kAtomSteps * 2;
        qao::wgmma::Product<T, kHalfTiles * 8>::run(to, operand[buffer][step], columns, step > first || !fresh);
      } else if constexpr (K::kSwapped) {
        qao::wgmma::Product<T, K::kTokens>::run(to, x + 2 * step, weight + 2 * step, step > first || !fresh);
      } else {
        qao::wgmma::Product<T, kHalfTiles * 8>::run(to, weight + 2 * step, x + 2 * step, step > first || !fresh);
      }
    }
    qao::wgmma::commit();
  }

  // Releases the stage to the producer. Every lane arrives for its own reads.
  __device__ __forceinline__ void release(uint32_t barrier) const { tma::barrier_arrive(barrier); }

  // Scale of a group and fraction of its zero point, for rows g and g + 8.
  struct Group {
    float scale[2], fraction[2];
    float beyond[2];  // swap-AB: scales for the next scale block of W
  };
  template <DType dtype>
  __device__ __forceinline__ Group read_group(uint32_t from) const {
    Group group;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const uint32_t at = from + (lane / 4 + high * 8) * size_of(dtype);
      group.scale[high] = load_shared_float<dtype>(at);
      if constexpr (K::kColumns) {
        const uint32_t zero = at + int4::kTileN * size_of(dtype);
        group.fraction[high] = p.has_zeros ? zero_fraction(load_shared_float<dtype>(zero)) : 0.0f;
      }
    }
    return group;
  }
  __device__ __forceinline__ Group read_group(uint32_t stage, int index) const {
    if constexpr (K::kPreparesGroups) {
      const uint32_t prepared = stage + K::kStage.x + K::kStage.weight + K::kStage.scales;
      const float2 scales = ptx::load_shared_float2(prepared + prepared_offset<K::kTile.rows>(index, warp, lane));
      return {{scales.x, scales.y}, {0, 0}, {0, 0}};
    } else if constexpr (K::kFold == Fold::kGroup) {
      const uint32_t from = stage + K::kStage.x + K::kStage.weight + (warp * p.groups_per_tile + index) * p.group_bytes;
      if (p.scale_dtype == DType::kBFloat16) return read_group<DType::kBFloat16>(from);
      if (p.scale_dtype == DType::kFloat16) return read_group<DType::kFloat16>(from);
      return read_group<DType::kFloat32>(from);
    } else if constexpr (K::kSwapped) {
      const TokenScales<K>& of = token_scales;
      return {{of.present(0, 0), of.present(1, 0)}, {0, 0}, {of.present(0, 1), of.present(1, 1)}};
    } else if constexpr (K::kFold == Fold::kBlock) {
      return {{block_scale, block_scale}, {0, 0}, {0, 0}};
    } else {
      return {};
    }
  }

  // Promotes: sum += scale (product - fraction column), or scale column product for blocks.
  template <int half = 0>
  __device__ __forceinline__ void fold(const Group& group, uint32_t columns) {
    fold<half>(group, columns, product[half % kProducts]);
  }
  template <int half>
  __device__ __forceinline__ void fold(const Group& group, uint32_t columns,
                                       const typename K::Product (&from)[kHalfTiles][4]) {
#pragma unroll
    for (int j = 0; j < kHalfTiles; ++j) {
      float (&to)[4] = sum[half * kHalfTiles + j];
      float2 column = {1, 1};
      if constexpr (K::kColumns) column = ptx::load_shared_float2(columns + (j * 8 + lane % 4 * 2) * 4);
      const float column_of[2] = {column.x, column.y};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = static_cast<float>(from[j][e]);
        if constexpr (K::kFold == Fold::kPromote) {
          to[e] += value;
        } else if constexpr (K::kSwapped && !K::kOwnTokens) {
          to[e] += (j * 8 < token_scales.next_block ? group.scale[e / 2] : group.beyond[e / 2]) * value;
        } else if constexpr (K::kFold == Fold::kBlock) {
          to[e] += group.scale[e / 2] * column_of[e % 2] * value;
        } else {
          to[e] += group.scale[e / 2] * (K::kColumns ? value - group.fraction[e / 2] * column_of[e % 2] : value);
        }
      }
    }
  }

  // Mainloop body with promotion: one or two k-tiles, one piece per group. Also converts the operand of the following
  // k-tile unless `last`. Promotion is once per group, or as often as the tensor cores' accumulation precision
  // requires. The WGMMAs of the next piece are issued once promotion has read the accumulators that they overwrite.
  template <int groups, int k_tiles>
  __device__ __forceinline__ void folding_k_tiles(int& at, bool& fresh, bool last) {
    constexpr int kPieceSteps = K::kSteps / groups, kPieces = k_tiles * groups;
    uint32_t stage = ring.address();
    const auto issue = [&]<int piece, int half>() {
      multiply<piece / groups, piece % groups * kPieceSteps, kPieceSteps, half>(stage, groups > 1 || fresh);
    };
    const auto work = [&]<int piece>() {
      constexpr bool kEndsTile = piece % groups == groups - 1, kMore = piece + 1 < kPieces;
      const uint32_t from = stage, released = ring.released();
      const uint32_t columns =
          from + K::kStage.x + K::kStage.weight + K::kStage.scales + piece % groups * K::kTokens * 4;
      if constexpr (K::kFold == Fold::kBlock && !K::kSwapped) {
        block_scale = next_block_scale;
        next_block_scale = __ldg(block_scales + ((at + 1 == p.k_tiles ? 0 : at + 1) >> p.fold_shift));
      }
      // Advance to the next k-tile and convert W
      const bool folds = groups > 1 || !std::is_same_v<T, int8_t> || ends_group(p, at) || (!kMore && last);
      if constexpr (kEndsTile) {
        ring.advance();
        if (kMore || !last) {
          fetch<groups>();
          convert<kMore ? 1 : 0>();
        }
        stage = ring.address();
        fresh = folds;
        at = at + 1 == p.k_tiles ? 0 : at + 1;
      }
      // Promote, and issue the next piece
      const Group scales = read_group(from, piece % groups);
      if constexpr (K::kSwapped) token_scales.advance();
      if constexpr (kHalves == 2) {
        qao::wgmma::wait<1>();
        if (folds) fold<0>(scales, columns);
        if constexpr (kMore) issue.template operator()<piece + 1, 0>();
      }
      qao::wgmma::wait<kHalves == 2 && kMore ? 1 : 0>();
      if constexpr (kEndsTile && !K::kColumns) release(released);
      if (folds) fold<kHalves - 1>(scales, columns);
      if constexpr (kEndsTile && K::kColumns) release(released);
      if constexpr (kMore) issue.template operator()<piece + 1, kHalves - 1>();
    };
    issue.template operator()<0, 0>();
    if constexpr (kHalves == 2) issue.template operator()<0, 1>();
    [&]<int... piece>(std::integer_sequence<int, piece...>) {
      (work.template operator()<piece>(), ...);
    }(std::make_integer_sequence<int, kPieces>{});
  }

  template <typename Sum>
  static __device__ __forceinline__ void zero(Sum (&sums)[K::kTilesM][4]) {
#pragma unroll
    for (int j = 0; j < K::kTilesM; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j][e] = 0;
    }
  }

  template <int groups>
  __device__ __forceinline__ void walk_folding(int begin, int end) {
    zero(sum);
    bool fresh = true;
    int at = begin % p.k_tiles;
    if constexpr (K::kSwapped) {
      token_scales.start(begin, end);
    } else if constexpr (K::kFold == Fold::kBlock) {
      next_block_scale = __ldg(block_scales + (at >> p.fold_shift));
    }
    fetch<groups>();
    convert<0>();
    int i = begin;
    for (; i + 1 < end; i += 2) folding_k_tiles<groups, 2>(at, fresh, i + 2 == end);
    if (i < end) folding_k_tiles<groups, 1>(at, fresh, true);
  }

  // Tall tiles: a warpgroup converts W, multiplies and promotes one after the other, without a second buffer of
  // anything. The two other warpgroups keep the tensor cores busy meanwhile.
  template <int groups>
  __device__ __forceinline__ void walk_in_sequence(int begin, int end) {
    constexpr int kPieceSteps = K::kSteps / groups;
    zero(sum);
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      fetch<groups>();
      convert<0>();
      const uint32_t stage = ring.address(), released = ring.released();
      const auto work = [&]<int piece>() {
        typename K::Product part[kHalfTiles][4];  // holds nothing before the MMAs, which overwrite it
        multiply<0, piece * kPieceSteps, kPieceSteps>(stage, true, part);
        const Group scales = read_group(stage, piece);
        qao::wgmma::wait<0>();
        if constexpr (piece == groups - 1) release(released);
        fold<0>(scales, 0, part);
      };
      [&]<int... piece>(std::integer_sequence<int, piece...>) {
        (work.template operator()<piece>(), ...);
      }(std::make_integer_sequence<int, groups>{});
      ring.advance();
    }
  }

  // Second half of the current k-tile and first half of the next one. Both halves share one accumulator, so WGMMA and
  // promotion alternate; the other warpgroup keeps the tensor cores busy meanwhile.
  template <bool last>
  __device__ __forceinline__ void halved_k_tile() {
    const uint32_t stage = ring.address(), released = ring.released();
    qao::wgmma::wait<0>();
    fold<0>({}, 0);
    multiply<0, 0, K::kSteps, 1>(stage, true);
    ring.advance();
    qao::wgmma::wait<0>();
    release(released);
    fold<1>({}, 0);
    if constexpr (!last) {
      fetch();  // not earlier: the accumulators and operand leave no registers for the next codes
      convert<0>();
      multiply<0, 0, K::kSteps, 0>(ring.address(), true);
    }
  }

  __device__ __forceinline__ void walk_halves(int begin, int end) {
    zero(sum);
    fetch();
    convert<0>();
    multiply<0, 0, K::kSteps, 0>(ring.address(), true);
#pragma unroll 1
    for (int i = begin; i + 1 < end; ++i) halved_k_tile<false>();
    halved_k_tile<true>();
  }

  // Mainloop body without promotion: the WGMMAs of two k-tiles overlap.
  template <int buffer, int groups>
  __device__ __forceinline__ void k_tile(bool first, bool last, uint32_t& unreleased) {
    multiply<buffer, 0, K::kSteps>(ring.address(), false);
    qao::wgmma::wait<1>();
    if (!first) release(unreleased);
    unreleased = ring.released();
    ring.advance();
    if (!last) {
      fetch<groups>();
      convert<1 - buffer>();
    }
  }

  template <int groups = 1>
  __device__ __forceinline__ void walk(int begin, int end) {
    uint32_t unreleased = 0;
    fetch<groups>();
    convert<0>();
    for (int i = begin; i < end; i += 2) {
      k_tile<0, groups>(i == begin, i + 1 == end, unreleased);
      if (i + 1 < end) k_tile<1, groups>(false, i + 2 == end, unreleased);
    }
    qao::wgmma::wait<0>();
    release(unreleased);
  }

  // The same with one operand buffer: W is converted once its previous WGMMAs complete. The other warpgroup's WGMMAs
  // hide the conversion.
  template <int groups>
  __device__ __forceinline__ void walk_scaling(int begin, int end) {
    uint32_t unreleased = 0;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      fetch<groups>();
      qao::wgmma::wait<0>();
      if (i > begin) release(unreleased);
      convert<0>();
      multiply<0, 0, K::kSteps>(ring.address(), false);
      unreleased = ring.released();
      ring.advance();
    }
    qao::wgmma::wait<0>();
    release(unreleased);
  }

  __device__ __forceinline__ void run(const Place& at, uint32_t epilogue) {
    // Prologue: fetch scales
    ptx::wait_for_previous_kernel();
    Place own = at;
    if constexpr (K::kGated) own.weight = warp / 4 / (K::kWarpgroups / 2);
    fetch_scales<K>(p, rows(), tokens(), own, row0(at));
    if constexpr (K::kScalesOperand) {  // kept in registers: computing them delays the first loads of each k-tile
      const uint32_t weight = K::kStage.x;
      words_offset = ptx::opaque(weight + word_offset<K::kSteps / kAtomSteps>(warp, lane));
      scales_offset = ptx::opaque(weight + K::kStage.weight + K::kStage.scales + raw.scale_offset(warp, lane));
    }
    if constexpr (K::kSwapped) {
      token_scales.place(p, at, row0(at));
    } else if constexpr (K::kFold == Fold::kBlock) {
      const int block = min(row0(at) + warp % 4 * 16, p.n - 1) / kScaleBlock, last = (p.n - 1) / kScaleBlock;
      block_scales = p.block_scales + (of_expert<K>(at, last + 1) + int64_t{block}) * p.groups;
    }
    // Mainloop without promotion
    if constexpr (!K::kFolds) {
      zero(product[0]);
      if constexpr (K::kWeight == Format::kFp4) {  // a group is one or two k-steps
        if (p.groups_per_tile == K::kSteps) {
          walk_scaling<K::kSteps>(at.begin, at.end);
        } else {
          walk_scaling<K::kSteps / 2>(at.begin, at.end);
        }
      } else if constexpr (K::kOneGroup) {
        walk_scaling<1>(at.begin, at.end);
      } else if constexpr (K::kScalesOperand) {
        if (p.groups_per_tile == 1) {
          walk_scaling<1>(at.begin, at.end);
        } else if (K::kAtoms == 1 || p.groups_per_tile == 2) {
          walk_scaling<2>(at.begin, at.end);
        } else {
          walk_scaling<2 * K::kAtoms>(at.begin, at.end);
        }
      } else if constexpr (K::kRowScales) {
        if (p.groups == 1) {
          walk<0>(at.begin, at.end);
        } else {
          walk<kAtomSteps>(at.begin, at.end);
        }
      } else {
        walk(at.begin, at.end);
      }
      write(product[0], epilogue, at);
    } else {
      // Mainloop with promotion
      if constexpr (K::kOneHalf) {
        walk_halves(at.begin, at.end);
      } else if constexpr (K::kPreparesGroups) {
        if (p.groups_per_tile == 1) {
          walk_in_sequence<1>(at.begin, at.end);
        } else if (p.groups_per_tile == 2) {
          walk_in_sequence<2>(at.begin, at.end);
        } else {
          walk_in_sequence<4>(at.begin, at.end);
        }
      } else if (K::kGroups && p.groups_per_tile == 2) {
        walk_folding<K::kGroups ? 2 : 1>(at.begin, at.end);
      } else if (K::kGroups && !K::kFloatX && p.groups_per_tile == 4) {
        walk_folding<K::kGroups && !K::kFloatX ? 4 : 1>(at.begin, at.end);
      } else {
        walk_folding<1>(at.begin, at.end);
      }
      // Zero points
      if constexpr (K::kGroups && !K::kFloatX) {
        const int last = (p.n - 1) / int4::kTileN;
        const int row_tile = of_expert<K>(at, last + 1) + min(row0(at) / int4::kTileN + warp % 4, last);
        if (p.subtracts_zeros) subtract_zeros<K>(p, row_tile, first_token<K>(at), at.split_k, sum);
      }
      write(sum, epilogue, at);
    }
  }

  __device__ __forceinline__ uint32_t rows() const { return ring.data + K::kStage.rows + warp / 4 * 3 * 64 * 4; }
  __device__ __forceinline__ uint32_t tokens() const {
    return ring.data + K::kStage.tokens + warp / 4 * K::kStage.token_floats * K::kTokens * 4;
  }
  __device__ __forceinline__ int row0(const Place& at) const {
    const int warpgroup = K::kGated ? warp / 4 % (K::kWarpgroups / 2) : warp / 4;
    return at.row_block * rows_in_tile<K>(p) + warpgroup * 64;
  }

  // Float x implies the dtype of y; bfloat16 parts imply float32.
  template <typename Sum>
  __device__ __forceinline__ void write(Sum& result, uint32_t epilogue, const Place& at) const {
    constexpr bool kFloatY = !K::kFloatX || K::kFolds, kHalfY = !K::kFloatX || !K::kFolds || K::kFold == Fold::kBlock;
    const Target target{rows(),
                        tokens(),
                        first_token<K>(at),
                        last_token<K>(p, at),
                        row0(at),
                        min(rows_of<K>(p, at.weight), (at.row_block + 1) * rows_in_tile<K>(p)),
                        at.split_k,
                        at.weight};
    if (K::kSlices && p.slices > 1) {
      write_slice<K>(p, result, target, at.slice);
    } else if constexpr (K::kGated) {
      if (apply_gate<K>(p, result, epilogue, rows())) write_half_result<K>(p, y_map, result, epilogue, target);
    } else if (!K::kGrouped && at.split_k > 1) {
      // The tile overlays the pipeline stages, so wait until all warpgroups are done with them.
      ptx::named_barrier(1 + K::kWarpgroups, warpgroups(p) * 128);
      write_split_result<K>(p, result, ring.data, target);
    } else if constexpr (K::kSwapped) {
      write_swapped_result<K>(p, result, epilogue, target);
    } else if (kFloatY && (!kHalfY || p.y_dtype == DType::kFloat32)) {
      if constexpr (kFloatY) write_float_result<K>(p, result, target);
    } else {
      if constexpr (kHalfY) write_half_result<K>(p, y_map, result, epilogue, target);
    }
  }
};

}  // namespace qao::gemm::sm90_ws
