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

#include "common/integers.h"
#include "common/place.cuh"
#include "common/ptx.cuh"
#include "gemm/sm80_mma/epilogue.cuh"
#include "gemm/sm80_mma/operand_conversion.cuh"
#include "gemm/sm80_mma/params.h"
#include "gemm/sm80_mma/prologue_quantize_x.cuh"
#include "gemm/sm80_mma/smem_access.cuh"
#include "gemm/sm80_mma/tile.h"

namespace qao::gemm::sm80_mma {

// Rows of x and y of a dense GEMM. GatheredRows of grouped.cuh has the same functions.
struct DenseRows {
  static constexpr bool kGathers = false;

  template <typename Cta>
  __device__ __forceinline__ int64_t row(const Cta& cta, int token) const {
    return cta.token0 + token;
  }
  // Writes the sums of rows n .. n + 3 of W for one token.
  template <typename Cta>
  __device__ __forceinline__ void write(const Cta& cta, int split, int token, int n, const Rows& rows,
                                        float (&value)[4]) const {
    write_four<Cta::kScaled>(cta.p.epilogue, split, cta.token0 + token, n, rows, cta.token_at(token), value);
  }
};

// `quantizes`: x is a ResidentX, and the ring holds W only. `RowsOfX`: where the rows of x are.
template <typename Product, typename Tile, bool quantizes, typename RowsOfX = DenseRows>
struct Cta {
  static constexpr bool kQuantizes = quantizes, kGathers = RowsOfX::kGathers;
  static constexpr OperandBytes kOperands{quantizes ? 0 : Product::kXBytes, Product::kWeight};
  static constexpr bool kPacked = is_packed(Product::kWeight), kBlocks = may_have_blocks(Product::kWeight);
  // Float x with 4-bit W: the ring holds no parameters of tokens, the epilogue has a bias alone, and a CTA one pass.
  static constexpr bool kWeightOnly = kOperands.weight_only(), kOnePass = kWeightOnly, kScaled = !kWeightOnly;
  // Float x and int4 with zero points: a float32 x leaves their fractions out (weight_only_fraction.cuh).
  static constexpr bool kFractions = [] {
    if constexpr (kWeightOnly) return Product::kZeros;
    return false;
  }();
  static constexpr int kColumns = kOperands.columns();  // of a K-tile
  static constexpr int kStageBytes = Tile::stage_bytes(kOperands), kStageDistance = Tile::kWarpsK * kStageBytes;
  static constexpr int kXAt = Tile::weight_bytes(kOperands), kWeightParametersAt = kXAt + Tile::x_bytes(kOperands),
                       kTokenParametersAt = kWeightParametersAt + kOperands.weight_parameters(Tile::kRowTiles);
  static constexpr int kXRowBytes = kColumns * Product::kXBytes, kXChunks = kXRowBytes / 16;  // chunks per row
  static constexpr int kWeightTileBytes = kOperands.weight_tile();
  static constexpr int kWeightChunks = kPacked ? kWeightTileBytes / 16 : kTileK / 16;  // int4: 16 rows
  static constexpr int kScaleTileBytes = kOperands.weight_parameters(1);
  // Groups per K-tile and their bytes for 16 rows, where the format of W fixes them; else 0, and Params has them.
  static constexpr int kGroups = kGroupsOfKTile<Product>, kGroupBytes = kTileN * 2;
  static constexpr int kMostScaleBytes = kGroups > 0 ? kGroups * kGroupBytes : kScaleTileBytes;
  static constexpr int kChunkShift = log2_of(kMostScaleBytes / 16);
  // Rows (int4: blocks of 16 rows) that one copy of all of the slice's threads covers.
  static constexpr int kWeightAtOnce = Tile::kSliceThreads / kWeightChunks, kXAtOnce = Tile::kSliceThreads / kXChunks;

  const Params& p;
  const RowsOfX source;
  const int slice, slice_thread, lane;
  const int warp_n, warp_m;         // within the slice; n-tile i of a warp is i * kWarpsN + warp_n
  const int64_t token0;             // first token of the CTA
  const int tokens;                 // existing tokens, at most kM
  const int first_row_tile, count;  // n-tiles of the CTA
  const int begin, steps;           // K-tiles of the CTA, counted through all parts of x
  const int64_t weight_stride;      // bytes per row; 4 bits: per 16 rows
  const uint32_t shared;            // shared-memory address
  const uint32_t ring;              // address of this slice's first stage

  // 8-bit x with int4: offset of row g's scale within a group, distance between rows 8 apart, and byte selector within
  // the word.
  const uint32_t parameter_at, parameter_step, parameter_select;

  // The next K-tile to fetch: its position in the loop, the n-tiles of that pass (zero or less past the last), and this
  // thread's first chunk. Further chunks follow at constant distances.
  int pass = 0, step = slice, k_tile;
  int row_tile0, row_tiles;
  const uint8_t *weight, *x;
  const uint8_t* scales;  // float x with 4-bit W

  __device__ __forceinline__ Cta(const Params& params, const Place& at, uint32_t shared_address, RowsOfX rows_of_x = {})
      : p(params),
        source(rows_of_x),
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
        weight_stride(kWeightOnly ? int64_t{p.k_tiles} * kWeightTileBytes
                      : kPacked   ? int64_t{kTileN} * p.x_columns / 2
                                  : p.k),
        shared(shared_address),
        ring(shared + slice * kStageBytes),
        parameter_at(lane / 4 * size_of(p.scale_dtype) & ~3),
        parameter_step(8 * size_of(p.scale_dtype)),
        parameter_select(select_parameter(p.scale_dtype, lane / 4)) {}

  __device__ __forceinline__ int chunk_shift() const { return kGroups > 0 ? kChunkShift : p.scale_chunk_shift; }
  __device__ __forceinline__ int group_bytes() const { return kGroups > 0 ? kGroupBytes : p.group_bytes; }

  static constexpr int kWeightStep = kPacked ? kWeightTileBytes : kTileK;  // bytes between K-tiles

  // Passes of the CTA, and n-tiles of a pass.
  __device__ __forceinline__ int passes() const {
    return kOnePass ? 1 : (count + Tile::kRowTiles - 1) / Tile::kRowTiles;
  }
  __device__ __forceinline__ int row_tiles_of(int pass) const {
    return min(count - pass * Tile::kRowTiles, Tile::kRowTiles);
  }

  // Moves the fetch pointers to `step` of `pass`, or to a later pass if `step` is past the end. The parts of a float32
  // x are processed one after another.
  __device__ __forceinline__ void seek() {
    for (; !kOnePass && step >= steps; ++pass) step -= steps;
    const int part = p.parts == 1 ? 0 : (begin + step) / p.k_tiles;
    k_tile = begin + step - part * p.k_tiles;
    row_tile0 = first_row_tile + pass * Tile::kRowTiles;
    row_tiles = row_tiles_of(pass);
    const int64_t row0 = static_cast<int64_t>(row_tile0) * (kPacked ? 1 : kTileN);
    weight = p.weight + (row0 + slice_thread / kWeightChunks) * weight_stride + slice_thread % kWeightChunks * 16 +
             static_cast<int64_t>(k_tile) * kWeightStep;
    x = p.x + (token0 + slice_thread / kXChunks) * p.x_stride + slice_thread % kXChunks * 16 + part * p.part_stride +
        static_cast<int64_t>(k_tile) * kXRowBytes;
    if constexpr (kWeightOnly) {
      const int row_tile = row_tile0 + (slice_thread >> chunk_shift());
      scales = p.group_scales + static_cast<int64_t>(row_tile) * p.groups * group_bytes() +
               (slice_thread & ((1 << chunk_shift()) - 1)) * 16;
    }
  }
  __device__ __forceinline__ void advance() {
    step += Tile::kWarpsK;
    if (!kOnePass && step >= steps) return seek();
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
    const int rows = kPacked ? count : min(p.n - first_row_tile * kTileN, count * kTileN);
    if (threadIdx.x >= min(rows, p.prefetch_rows)) return;
    const int64_t row = static_cast<int64_t>(first_row_tile) * (kPacked ? 1 : kTileN) + threadIdx.x;
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
  __device__ __forceinline__ int columns_left() const { return p.x_columns - k_tile * kColumns; }

  __device__ __forceinline__ void fetch_weight(uint32_t to) const {
    const int columns = columns_left();
    if constexpr (kBlocks) {
      if (p.block_scales != nullptr && slice_thread < row_tiles) {
        const int64_t block = (row_tile0 + slice_thread) * kTileN / kScaleBlock;
        ptx::cp_async_4(to + kWeightParametersAt + slice_thread * 4, p.block_scales + block * p.k_tiles + k_tile);
      }
    }
    if constexpr (kWeightOnly) {
      fetch_int4(to, kTileK);
      fetch_scales(to);
    } else if constexpr (kPacked) {
      fetch_int4(to, columns);
      fetch_groups(to);
    } else if (columns >= kTileK && p.weight_aligned) {
      fetch_rows<kTileK, kWeightAtOnce, Tile::kN, false>(to, weight, weight_stride, weight_rows());
    } else {
      fetch_edge<uint8_t, kTileK>(to, weight, weight_stride, columns, weight_rows(), p.weight_aligned);
    }
  }

  __device__ __forceinline__ int64_t x_row(int token) const { return source.row(*this, token); }

  __device__ __forceinline__ void fetch_x(const KTile& to) const {
    const int columns = columns_left();
    using Element = std::conditional_t<Product::kXBytes == 1, uint8_t, uint16_t>;
    // Spelled out for both: a condition inside one of the branches changes their layout, and costs instructions.
    if constexpr (kGathers) {
      if (columns >= kColumns && p.x_aligned) {
        fetch_rows<kXRowBytes, kXAtOnce, Tile::kM, true>(to.x, x, source.r.x_stride, tokens);
      } else {
        fetch_edge<Element, kXRowBytes>(to.x, x, source.r.x_stride, columns, tokens, p.x_aligned, source.table);
      }
    } else if (columns >= kColumns && p.x_aligned) {
      fetch_rows<kXRowBytes, kXAtOnce, Tile::kM, false>(to.x, x, p.x_stride, tokens);
    } else {
      fetch_edge<Element, kXRowBytes>(to.x, x, p.x_stride, columns, tokens, p.x_aligned);
    }
    if constexpr (kPacked && !kWeightOnly) {
      fetch_sums(to.tokens);
    } else if constexpr (kBlocks && Product::kXBytes == 1) {
      if (p.block_scales == nullptr) return;
      for (int token = slice_thread; token < tokens; token += Tile::kSliceThreads) {
        ptx::cp_async_4(to.tokens + token * 4, p.x_block_scales + x_row(token) * p.k_tiles + k_tile);
      }
    }
  }
  __device__ __forceinline__ int weight_rows() const { return min(p.n - row_tile0 * kTileN, row_tiles * kTileN); }

  // `from` is this thread's chunk of its first row, or if rows of x are gathered of row 0.
  template <int row_bytes, int rows_at_once, int max_rows, bool gathers>
  __device__ __forceinline__ void fetch_rows(uint32_t to, const uint8_t* from, int64_t stride, int rows) const {
    constexpr int kChunks = row_bytes / 16;
    const int64_t distance = rows_at_once * stride;
#pragma unroll
    for (int i = 0; i * rows_at_once < max_rows; ++i) {
      const int row = slice_thread / kChunks + i * rows_at_once;
      if constexpr (gathers) {
        const uint32_t at = to + swizzled<row_bytes>(row, slice_thread % kChunks);
        if (row < rows) ptx::cp_async_16(at, from + x_row(row) * stride);
      } else {
        if (row < rows) ptx::cp_async_16(to + swizzled<row_bytes>(row, slice_thread % kChunks), from + i * distance);
      }
    }
  }

  // As fetch(), for a K-tile that ends past K (zero-filled) and for rows that are not 16-byte aligned. Kept out of the
  // mainloop's code and registers.
  template <typename Element, int row_bytes, typename... Table>
  static __device__ __noinline__ void fetch_edge(uint32_t to, const uint8_t* from, int64_t stride, int columns,
                                                 int rows, bool aligned, Table... table) {
    constexpr int kChunks = row_bytes / 16, kRowsAtOnce = Tile::kSliceThreads / kChunks;
    const int thread = threadIdx.x % Tile::kSliceThreads, chunk = thread % kChunks;
#pragma unroll 1
    for (int row = thread / kChunks; row < rows; row += kRowsAtOnce) {
      const uint8_t* at = from;
      if constexpr (sizeof...(table) > 0) at += ptx::load_shared_int((table + ...) + row * 4) * stride;
      fetch_edge_chunk<Element>(to + swizzled<row_bytes>(row, chunk), at, chunk, columns, aligned);
      if constexpr (sizeof...(table) == 0) from += kRowsAtOnce * stride;
    }
  }

  // Copies two packed tiles of each 16 rows, or one at the end of K: x is zero where stale data takes the place of the
  // other. Float x: one packed tile.
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
    if constexpr (kGroups > 0) return k_tile * kGroups;
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
  // The same for a float x, where K-tiles are short: `scales` is this thread's chunk, of the same columns in all rows.
  __device__ __forceinline__ void fetch_scales(uint32_t to) const {
    const int group = first_group(), shift = chunk_shift(), offset = (slice_thread & ((1 << shift) - 1)) * 16;
    const bool exists = (p.groups - group) * group_bytes() > offset;
#pragma unroll
    for (int i = 0; i * Tile::kSliceThreads < Tile::kRowTiles * kMostScaleBytes / 16; ++i) {
      const int row_tile = (slice_thread + i * Tile::kSliceThreads) >> shift;
      const uint32_t at = to + kWeightParametersAt + row_tile * kScaleTileBytes + offset;
      const int64_t skipped = static_cast<int64_t>(i * Tile::kSliceThreads >> shift) * p.groups + group;
      if (row_tile >= row_tiles) break;
      if (exists) {
        ptx::cp_async_16(at, scales + skipped * group_bytes());
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
        ptx::cp_async_4(at, p.x_sums + x_row(token) * p.groups + group + g);
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
  // What the conversion of W, or if it needs nothing the scaling of sums, has to know of a group.
  using Codes = typename CodesOf<Product>::Type;
  __device__ __forceinline__ Codes read_codes(uint32_t stage, int group, int i) const {
    if constexpr (kWeightOnly) {
      return Product::read_codes(group_at(stage, group, i), lane / 4, p.scale_dtype);
    } else {
      if (!p.has_zeros) return {0x08080808, 0x08080808};
      const uint32_t from = group_at(stage, group, i) + 2 * parameter_step;
      return {centred::four_codes(parameter(from)), centred::four_codes(parameter(from + parameter_step))};
    }
  }
  __device__ __forceinline__ uint32_t group_at(uint32_t stage, int group, int i) const {
    return stage + kWeightParametersAt + (i * Tile::kWarpsN + warp_n) * kScaleTileBytes + group * group_bytes() +
           (kWeightOnly ? 0 : parameter_at);
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
  static constexpr bool kReadsRowsEarly = Tile::kM == 8 && !kWeightOnly;
  struct EarlyRows {
    Rows rows;
    __device__ __forceinline__ EarlyRows(const Cta& cta, int of_pass) {
      if constexpr (kReadsRowsEarly) rows = rows_of<kScaled>(cta.p.epilogue, cta.own_row(of_pass));
    }
  };

  static constexpr bool kWholeSums = std::is_same_v<typename Product::Sum, int> && !kPacked;

  // Adds the slices in a fixed order, transposed to token-major through shared memory, and writes four rows at a time.
  __device__ __forceinline__ void write_result(const Sums<float>& sum, uint8_t* shared_memory, int of_pass, int split,
                                               const EarlyRows& early) const {
    if (kOnePass || p.sums_at == 0) {
      ptx::cp_async_wait<0>();
      __syncthreads();  // all slices are done with their rings, which the sums overlay
    }
    if (!kOnePass && p.sum_places == 1 && of_pass > 0) __syncthreads();  // sums of the previous pass have been read
    float* tile = reinterpret_cast<float*>(shared_memory + (kOnePass ? 0 : p.sums_at)) +
                  (kOnePass || p.sum_places == 1 ? 0 : of_pass % 2 * (Tile::kTokenSumBytes / 4 * tokens));
    const int places = kOnePass ? Tile::kM : tokens;  // one for each token: a constant where memory suffices
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = (i * Tile::kWarpsN + warp_n) * kTileN + lane / 4 + (e / 2) * 8;
          const int token = (warp_m * Tile::kTilesM + j) * 8 + lane % 4 * 2 + e % 2;
          if (kOnePass || token < tokens) tile[(slice * places + token) * Tile::kPaddedN + row] = sum[i][j][e];
        }
      }
    }
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x) % kQuads * 4, n = own_row(of_pass);
    if (row >= row_tiles_of(of_pass) * kTileN || n >= p.n) return;
    if (kStorers < Tile::kThreads && threadIdx.x >= kStorers) return;
    const Rows rows = kReadsRowsEarly ? early.rows : rows_of<kScaled>(p.epilogue, n);
    for (int token = threadIdx.x / kQuads; token < tokens; token += Tile::kThreads / kQuads) {
      float value[4] = {};
#pragma unroll
      for (int s = 0; s < Tile::kWarpsK; ++s) {
        add_four(value, *reinterpret_cast<const float4*>(&tile[(s * places + token) * Tile::kPaddedN + row]),
                 kWholeSums && p.epilogue.whole_sums);
      }
      source.write(*this, split, token, n, rows, value);
    }
  }
  __device__ __forceinline__ Token token_at(int token) const {
    if constexpr (quantizes) {
      return quantized_token(p, shared, token);
    } else if constexpr (kScaled) {
      return token_of(p.epilogue, x_row(token));
    } else {
      return {};
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
    quantize_tokens<Product::kXFormat, kPacked>(p, floats(), shared);
    __syncthreads();
  }
};

}  // namespace qao::gemm::sm80_mma
