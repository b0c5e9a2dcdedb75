// Operand loads and epilogue of a CTA of the portable mma.sync kernel.
//
//            tokens
//         +---------+      CTA: passes of kN rows of W x kM tokens, K split among warps_k slices. Slice s takes
//         |    x    |      K-tiles begin + s, begin + s + warps_k, ... through its private cp.async ring, so a
//         +---------+      slice of one warp needs no barrier. The ring keeps running across passes.
//   +---+ +---------+
//   | W | |    y    |
//   +---+ +---------+
#pragma once

#include "common/place.cuh"
#include "common/ptx.cuh"
#include "gemm/sm80_mma/epilogue.cuh"
#include "gemm/sm80_mma/operand_conversion.cuh"
#include "gemm/sm80_mma/params.h"
#include "gemm/sm80_mma/prologue_quantize_x.cuh"
#include "gemm/sm80_mma/smem_access.cuh"
#include "gemm/sm80_mma/tile.h"

namespace qao::gemm::sm80_mma {

// `quantizes`: x is a ResidentX, and the ring holds W only.
template <typename Product, typename Tile, bool quantizes>
struct Cta {
  static constexpr bool kQuantizes = quantizes;
  static constexpr OperandBytes kOperands{quantizes ? 0 : Product::kXBytes, Product::kWeight};
  static constexpr bool kInt4Weight = is_packed(Product::kWeight), kBlocks = may_have_blocks(Product::kWeight);
  static constexpr int kStageBytes = Tile::stage_bytes(kOperands), kStageDistance = Tile::kWarpsK * kStageBytes;
  static constexpr int kXAt = Tile::weight_bytes(kOperands), kWeightParametersAt = kXAt + Tile::x_bytes(kOperands),
                       kTokenParametersAt = kWeightParametersAt + kOperands.weight_parameters(Tile::kRowTiles);
  static constexpr int kXRowBytes = kTileK * Product::kXBytes, kXChunks = kXRowBytes / 16;  // chunks per row
  static constexpr int kWeightTileBytes = kOperands.weight_tile();
  static constexpr int kWeightChunks = kInt4Weight ? kWeightTileBytes / 16 : kTileK / 16;  // int4: 16 rows
  static constexpr int kScaleTileBytes = kOperands.weight_parameters(1);
  // Rows (int4: blocks of 16 rows) that one copy of all of the slice's threads covers.
  static constexpr int kWeightAtOnce = Tile::kSliceThreads / kWeightChunks, kXAtOnce = Tile::kSliceThreads / kXChunks;

  const Params& p;
  const int slice, slice_thread, lane;
  const int warp_n, warp_m;         // within the slice; n-tile i of a warp is i * kWarpsN + warp_n
  const int64_t token0;             // first token of the CTA
  const int tokens;                 // existing tokens, at most kM
  const int first_row_tile, count;  // n-tiles of the CTA
  const int begin, steps;           // K-tiles of the CTA, counted through all parts of x
  const int64_t weight_stride;      // bytes per row; int4: per 16 rows
  const uint32_t shared;            // shared-memory address
  const uint32_t ring;              // address of this slice's first stage

  // int4: offset of row g's scale within a group, distance between rows 8 apart, and byte selector within the word.
  const uint32_t parameter_at, parameter_step, parameter_select;

  // The next K-tile to fetch: its position in the loop, the n-tiles of that pass (zero or less past the last), and this
  // thread's first chunk. Further chunks follow at constant distances.
  int pass = 0, step = slice, k_tile;
  int row_tile0, row_tiles;
  const uint8_t *weight, *x;

  __device__ __forceinline__ Cta(const Params& params, const Place& at, uint32_t shared_address)
      : p(params),
        slice(Tile::kWarpsK == 1 ? 0 : threadIdx.x / Tile::kSliceThreads),
        slice_thread(threadIdx.x % Tile::kSliceThreads),
        lane(threadIdx.x % 32),
        warp_n(slice_thread / 32 % Tile::kWarpsN),
        warp_m(slice_thread / 32 / Tile::kWarpsN),
        token0(static_cast<int64_t>(at.token_block) * Tile::kM),
        tokens(static_cast<int>(min(p.m - token0, static_cast<int64_t>(Tile::kM)))),
        first_row_tile(p.run > 0 ? at.row_block * p.run + min(at.row_block, p.more_runs)
                                 : at.row_block * Tile::kRowTiles),
        count(p.run > 0 ? p.run + (at.row_block < p.more_runs) : min(p.row_tiles - first_row_tile, Tile::kRowTiles)),
        begin(at.begin),
        steps(at.end - at.begin),
        weight_stride(kInt4Weight ? int64_t{kTileN} * p.x_columns / 2 : p.k),
        shared(shared_address),
        ring(shared + slice * kStageBytes),
        parameter_at(lane / 4 * size_of(p.scale_dtype) & ~3),
        parameter_step(8 * size_of(p.scale_dtype)),
        parameter_select(select_parameter(p.scale_dtype, lane / 4)) {}

  static constexpr int kWeightStep = kInt4Weight ? kWeightTileBytes : kTileK;  // bytes between K-tiles

  // Passes of the CTA, and n-tiles of a pass.
  __device__ __forceinline__ int passes() const { return (count + Tile::kRowTiles - 1) / Tile::kRowTiles; }
  __device__ __forceinline__ int row_tiles_of(int pass) const {
    return min(count - pass * Tile::kRowTiles, Tile::kRowTiles);
  }

  // Moves the fetch pointers to `step` of `pass`, or to a later pass if `step` is past the end. The parts of a float32
  // x are processed one after another.
  __device__ __forceinline__ void seek() {
    for (; step >= steps; ++pass) step -= steps;
    const int part = p.parts == 1 ? 0 : (begin + step) / p.k_tiles;
    k_tile = begin + step - part * p.k_tiles;
    row_tile0 = first_row_tile + pass * Tile::kRowTiles;
    row_tiles = row_tiles_of(pass);
    const int64_t row0 = static_cast<int64_t>(row_tile0) * (kInt4Weight ? 1 : kTileN);
    weight = p.weight + (row0 + slice_thread / kWeightChunks) * weight_stride + slice_thread % kWeightChunks * 16 +
             static_cast<int64_t>(k_tile) * kWeightStep;
    x = p.x + (token0 + slice_thread / kXChunks) * p.x_stride + slice_thread % kXChunks * 16 + part * p.part_stride +
        static_cast<int64_t>(k_tile) * kXRowBytes;
  }
  __device__ __forceinline__ void advance() {
    step += Tile::kWarpsK;
    if (step >= steps) return seek();
    k_tile += Tile::kWarpsK;
    weight += Tile::kWarpsK * kWeightStep;
    x += Tile::kWarpsK * kXRowBytes;
    while (k_tile >= p.k_tiles) {
      k_tile -= p.k_tiles;
      weight -= static_cast<int64_t>(p.k_tiles) * kWeightStep;
      x += p.part_stride - static_cast<int64_t>(p.k_tiles) * kXRowBytes;
    }
  }
  // Prefetches the first rows of W into L2 (sm_90). Not further than L2: the previous kernel may still write W, and L2
  // sees such a write. A request takes about 60 ns to issue, so requests are few and cover whole rows (int4: 16 rows).
  __device__ __forceinline__ void prefetch() const {
    const int rows = kInt4Weight ? count : min(p.n - first_row_tile * kTileN, count * kTileN);
    if (threadIdx.x >= min(rows, p.prefetch_rows)) return;
    const int64_t row = static_cast<int64_t>(first_row_tile) * (kInt4Weight ? 1 : kTileN) + threadIdx.x;
    ptx::prefetch_l2(p.weight + row * weight_stride, p.prefetch_bytes);
  }

  __device__ __forceinline__ uint32_t stage_address(int stage) const { return ring + stage * kStageDistance; }

  __device__ __forceinline__ void sync_slice() const {
    if constexpr (Tile::kSliceThreads == 32) {
      __syncwarp();
    } else if constexpr (Tile::kWarpsK == 1) {
      __syncthreads();
    } else {
      ptx::named_barrier(1 + slice, Tile::kSliceThreads);
    }
  }

  // Shared addresses of a K-tile's operands: W with its scales and zeros, x, and per-token parameters.
  struct KTile {
    uint32_t weight, x, tokens;
  };
  __device__ __forceinline__ KTile k_tile_at(int stage, int k_tile) const {
    const uint32_t at = stage_address(stage);
    if constexpr (quantizes) {
      const uint32_t x_at = shared + p.resident_at;
      return {at, x_at + k_tile * p.resident.tokens * kTileK,
              x_at + p.resident.parameters_at() + k_tile * p.resident.tile_parameters * token_stride() * 4};
    }
    return {at, at + kXAt, at + kTokenParametersAt};
  }
  __device__ __forceinline__ int token_stride() const { return quantizes ? p.resident.token_stride() : Tile::kM; }

  // Issues the copies of the current K-tile. Rows past M or N are not fetched: their results are never stored.
  __device__ __forceinline__ void fetch(int stage) const {
    const KTile to = k_tile_at(stage, k_tile);
    fetch_weight(to.weight);
    if constexpr (!quantizes) fetch_x(to);
  }
  __device__ __forceinline__ int columns_left() const { return p.x_columns - k_tile * kTileK; }

  __device__ __forceinline__ void fetch_weight(uint32_t to) const {
    const int columns = columns_left();
    if constexpr (kBlocks) {
      if (p.block_scales != nullptr && slice_thread < row_tiles) {
        const int64_t block = (row_tile0 + slice_thread) * kTileN / kScaleBlock;
        ptx::cp_async_4(to + kWeightParametersAt + slice_thread * 4, p.block_scales + block * p.k_tiles + k_tile);
      }
    }
    if constexpr (kInt4Weight) {
      fetch_int4(to, columns);
      fetch_groups(to);
    } else if (columns >= kTileK && p.weight_aligned) {
      fetch_rows<kTileK, kWeightAtOnce, Tile::kN>(to, weight, weight_stride, weight_rows());
    } else {
      fetch_edge<uint8_t, kTileK>(to, weight, weight_stride, columns, weight_rows(), p.weight_aligned);
    }
  }

  __device__ __forceinline__ void fetch_x(const KTile& to) const {
    const int columns = columns_left();
    if (columns >= kTileK && p.x_aligned) {
      fetch_rows<kXRowBytes, kXAtOnce, Tile::kM>(to.x, x, p.x_stride, tokens);
    } else {
      using Element = std::conditional_t<Product::kXBytes == 1, uint8_t, uint16_t>;
      fetch_edge<Element, kXRowBytes>(to.x, x, p.x_stride, columns, tokens, p.x_aligned);
    }
    if constexpr (kInt4Weight) {
      fetch_sums(to.tokens);
    } else if constexpr (kBlocks && Product::kXBytes == 1) {
      if (p.block_scales == nullptr) return;
      for (int token = slice_thread; token < tokens; token += Tile::kSliceThreads) {
        ptx::cp_async_4(to.tokens + token * 4, p.x_block_scales + (token0 + token) * p.k_tiles + k_tile);
      }
    }
  }
  __device__ __forceinline__ int weight_rows() const { return min(p.n - row_tile0 * kTileN, row_tiles * kTileN); }

  template <int row_bytes, int rows_at_once, int max_rows>
  __device__ __forceinline__ void fetch_rows(uint32_t to, const uint8_t* from, int64_t stride, int rows) const {
    constexpr int kChunks = row_bytes / 16;
    const int64_t distance = rows_at_once * stride;
#pragma unroll
    for (int i = 0; i * rows_at_once < max_rows; ++i) {
      const int row = slice_thread / kChunks + i * rows_at_once;
      if (row < rows) ptx::cp_async_16(to + swizzled<row_bytes>(row, slice_thread % kChunks), from + i * distance);
    }
  }

  // As fetch(), for a K-tile that ends past K (zero-filled) and for rows that are not 16-byte aligned. Kept out of the
  // mainloop's code and registers.
  template <typename Element, int row_bytes>
  static __device__ __noinline__ void fetch_edge(uint32_t to, const uint8_t* from, int64_t stride, int columns,
                                                 int rows, bool aligned) {
    constexpr int kChunks = row_bytes / 16, kRowsAtOnce = Tile::kSliceThreads / kChunks;
    const int thread = threadIdx.x % Tile::kSliceThreads, chunk = thread % kChunks;
#pragma unroll 1
    for (int row = thread / kChunks; row < rows; row += kRowsAtOnce, from += kRowsAtOnce * stride) {
      fetch_edge_chunk<Element>(to + swizzled<row_bytes>(row, chunk), from, chunk, columns, aligned);
    }
  }

  // Copies two packed tiles of each 16 rows, or one at the end of K: x is zero where stale data takes the place of the
  // other.
  __device__ __forceinline__ void fetch_int4(uint32_t to, int columns) const {
    constexpr int kChunks = kWeightChunks, kCount = Tile::kRowTiles * kChunks;
#pragma unroll
    for (int i = 0; i * Tile::kSliceThreads < kCount; ++i) {
      const int index = slice_thread + i * Tile::kSliceThreads, row_tile = index / kChunks, chunk = index % kChunks;
      const int64_t skipped = Tile::kSliceThreads >= kChunks ? i * (Tile::kSliceThreads / kChunks) * weight_stride
                                                             : i * Tile::kSliceThreads / kChunks * weight_stride +
                                                                   i * Tile::kSliceThreads % kChunks * 16;
      if (row_tile < row_tiles && (columns >= kTileK || chunk < kChunks / 2)) {
        ptx::cp_async_16(to + index * 16, weight + skipped);
      }
    }
  }

  __device__ __forceinline__ int first_group() const {
    return p.tile_groups > 1 ? k_tile * p.tile_groups : k_tile >> p.group_shift;
  }
  // int4: copies scales and zeros of the K-tile's groups, zeros for groups past K.
  __device__ __forceinline__ void fetch_groups(uint32_t to) const {
    const int group = first_group(), exist = p.groups - group, shift = p.scale_chunk_shift;
    for (int i = slice_thread; i < row_tiles << shift; i += Tile::kSliceThreads) {
      const int row_tile = i >> shift, offset = (i & ((1 << shift) - 1)) * 16;
      const uint32_t at = to + kWeightParametersAt + row_tile * kScaleTileBytes + offset;
      if (offset < exist * p.group_bytes) {
        ptx::cp_async_16(
            at,
            p.group_scales + (static_cast<int64_t>(row_tile0 + row_tile) * p.groups + group) * p.group_bytes + offset);
      } else {
        ptx::store_shared_16(at, {0, 0, 0, 0});
      }
    }
  }
  // int4: copies the sums of x over these groups, for the zero points.
  __device__ __forceinline__ void fetch_sums(uint32_t to) const {
    if (!begins_group(k_tile)) return;
    const int group = first_group(), exist = p.groups - group;
    for (int i = slice_thread; i < p.tile_groups * Tile::kM; i += Tile::kSliceThreads) {
      const int token = i % Tile::kM, g = i / Tile::kM;
      const uint32_t at = to + i * 4;
      if (token >= tokens) continue;
      if (g < exist) {
        ptx::cp_async_4(at, p.x_sums + (token0 + token) * p.groups + group + g);
      } else {
        ptx::store_shared_4(at, 0);
      }
    }
  }
  // Zero points are subtracted in the first K-tile of a group.
  __device__ __forceinline__ bool begins_group(int tile) const {
    return p.tile_groups > 1 || (tile & ((1 << p.group_shift) - 1)) == 0;
  }

  // Parameters of two adjacent tokens: sums of x in `group` of the K-tile, or block scales.
  __device__ __forceinline__ float2 read_tokens(const KTile& tile, int group, int token_tile) const {
    int token = (warp_m * Tile::kTilesM + token_tile) * 8 + lane % 4 * 2;
    if constexpr (quantizes) token = min(token, token_stride() - 2);  // tokens past the end read an existing one
    return ptx::load_shared_float2(tile.tokens + (group * token_stride() + token) * 4);
  }

  // Scale and zero point of rows g and g + 8, in units of the MMA's operands. `zero` is the part that weight() does not
  // subtract.
  struct Group {
    float scale[2], zero[2];
  };
  __device__ __forceinline__ void read_group(uint32_t stage, int group, int i, Group& to) const {
    constexpr float kFactor[2] = {Product::kFactor, Product::kHighFactor};
    const uint32_t from = group_at(stage, group, i);
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      to.scale[high] = parameter(from + high * parameter_step) * kFactor[high];
      const float zero = p.has_zeros ? parameter(from + (2 + high) * parameter_step) : 8.0f;
      to.zero[high] = (Product::kCentred ? centred::fraction(zero) : zero) / kFactor[high];
    }
  }
  __device__ __forceinline__ centred::Codes read_codes(uint32_t stage, int group, int i) const {
    if (!p.has_zeros) return {0x08080808, 0x08080808};
    const uint32_t from = group_at(stage, group, i) + 2 * parameter_step;
    return {centred::four_codes(parameter(from)), centred::four_codes(parameter(from + parameter_step))};
  }
  __device__ __forceinline__ uint32_t group_at(uint32_t stage, int group, int i) const {
    return stage + kWeightParametersAt + (i * Tile::kWarpsN + warp_n) * kScaleTileBytes + group * p.group_bytes +
           parameter_at;
  }
  __device__ __forceinline__ float parameter(uint32_t at) const {
    return load_parameter(at, parameter_select, p.scale_dtype);
  }

  template <typename Value>
  using Sums = Value[Tile::kTilesN][Tile::kTilesM][4];

  // The four rows of W that this thread stores in a pass.
  static constexpr int kQuads = Tile::kN / 4;
  static constexpr int kStorers = Tile::kThreads / kQuads * kQuads;  // a multiple of kQuads
  __device__ __forceinline__ int own_row(int of_pass) const {
    return (first_row_tile + of_pass * Tile::kRowTiles) * kTileN + static_cast<int>(threadIdx.x) % kQuads * 4;
  }
  // Their epilogue parameters, read before the mainloop where registers allow: with few tokens nothing else would hide
  // the latency.
  static constexpr bool kReadsRowsEarly = Tile::kM == 8;
  struct EarlyRows {
    Rows rows;
    __device__ __forceinline__ EarlyRows(const Cta& cta, int of_pass) {
      if constexpr (kReadsRowsEarly) rows = rows_of(cta.p.epilogue, cta.own_row(of_pass));
    }
  };

  static constexpr bool kWholeSums = std::is_same_v<typename Product::Sum, int> && !kInt4Weight;

  // Adds the slices in a fixed order, transposed to token-major through shared memory, and calls `write` for four rows
  // at a time.
  template <typename Write>
  __device__ __forceinline__ void add_slices(const Sums<float>& sum, uint8_t* shared_memory, int of_pass,
                                             const EarlyRows& early, const Write& write) const {
    if (p.sums_at == 0) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // all slices are done with their rings, which the sums overlay
    }
    if (p.sum_places == 1 && of_pass > 0) __syncthreads();  // the sums of the previous pass have been read
    float* tile = reinterpret_cast<float*>(shared_memory + p.sums_at) +
                  (p.sum_places == 1 ? 0 : of_pass % 2 * (Tile::kTokenSumBytes / 4 * tokens));
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = (i * Tile::kWarpsN + warp_n) * kTileN + lane / 4 + (e / 2) * 8;
          const int token = (warp_m * Tile::kTilesM + j) * 8 + lane % 4 * 2 + e % 2;
          if (token < tokens) tile[(slice * tokens + token) * Tile::kPaddedN + row] = sum[i][j][e];
        }
      }
    }
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x) % kQuads * 4, n = own_row(of_pass);
    if (row >= row_tiles_of(of_pass) * kTileN || n >= p.n) return;
    if (kStorers < Tile::kThreads && threadIdx.x >= kStorers) return;
    const Rows rows = kReadsRowsEarly ? early.rows : rows_of(p.epilogue, n);
    for (int token = threadIdx.x / kQuads; token < tokens; token += Tile::kThreads / kQuads) {
      float value[4] = {};
#pragma unroll
      for (int s = 0; s < Tile::kWarpsK; ++s) {
        add_four(value, *reinterpret_cast<const float4*>(&tile[(s * tokens + token) * Tile::kPaddedN + row]),
                 kWholeSums && p.epilogue.whole_sums);
      }
      write(token, n, rows, value);
    }
  }
  __device__ __forceinline__ void write_result(const Sums<float>& sum, uint8_t* shared_memory, int of_pass, int split,
                                               const EarlyRows& early) const {
    const auto write = [&](int token, int n, const Rows& rows, float (&value)[4]) {
      write_four(p.epilogue, split, token0 + token, n, rows, token_at(token), value);
    };
    add_slices(sum, shared_memory, of_pass, early, write);
  }
  __device__ __forceinline__ Token token_at(int token) const {
    if constexpr (quantizes) {
      return quantized_token(p, shared, token);
    } else {
      return token_of(p.epilogue, token0 + token);
    }
  }

  // The stage that is filled last holds the unquantized x.
  __device__ __forceinline__ uint32_t floats() const { return shared + (Tile::kStages - 1) * kStageDistance; }
  __device__ __forceinline__ void bring_x() const {
    bring_floats(p, floats());
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void quantize_x() const {
    ptx::cp_async_wait<Tile::kStages - 1>();  // x was issued before the first K-tiles of W
    __syncthreads();
    quantize_tokens<Product::kXFormat, kInt4Weight>(p, floats(), shared);
    __syncthreads();
  }
};

}  // namespace qao::gemm::sm80_mma
