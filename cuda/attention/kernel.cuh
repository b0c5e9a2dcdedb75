// Attention of up to 16 rows over the keys of one key-value head, on mma.sync.
//
// A row is a query of one of the query heads that share the key-value head. The CTAs of a cluster share the tiles of 16
// keys, and so do their warps; each warp keeps its own running softmax, and there is no barrier in the loop. K, V and
// the weights never pass through shared memory:
// - scores = q kᵀ sum over d in an order of our choice: a lane loads 8 consecutive d of a key, which serve as the
//   fragments of two steps of 16 if q is loaded in the same way;
// - the accumulators of the scores are the fragment of weights. A lane loads 8 consecutive d of its four keys, and
//   pairs of keys are joined: column n of tile j is d = 8 n + j.
#pragma once

#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/ptx.cuh"

namespace qao::attention {

constexpr int kTileKeys = 16;

template <int kSize>
constexpr int kWarps = kSize <= 128 ? 8 : 4;  // more registers per thread for the largest heads

struct __align__(16) Eight {  // consecutive 16-bit elements
  uint32_t word[4];
};

__device__ __forceinline__ Eight load_eight(const uint16_t* from, bool exists) {
  Eight value{};
  if (exists) *reinterpret_cast<uint4*>(&value) = *reinterpret_cast<const uint4*>(from);
  return value;
}

// What a lane holds of its warp's rows g and g + 8, with g = lane / 4 and t = lane % 4.
template <typename T, int kSize>
struct Lane {
  // Chunks of 32 elements of q and k, and sets of 64 of v, that are loaded at a time.
  static constexpr int kChunks = kSize / 32, kChunksHeld = kChunks < 4 ? kChunks : 4;
  static constexpr int kSets = kSize / 64, kSetsHeld = kSets < 2 ? kSets : 2;
  static constexpr bool kQInRegisters = kSize <= 128;
  static constexpr int kQRow = kSize + 32;  // elements of a row of q in shared memory: without bank conflicts

  const Params& s;
  const Block& block;
  const int g, t;
  const uint16_t *k_head, *v_head;
  int end;            // of the keys
  uint32_t q_shared;  // q of a large head
  Eight q[kQInRegisters ? kChunks : 1][2];
  Eight k[kChunksHeld][2];  // keys g and g + 8
  Eight v[kSetsHeld][4];    // keys 2t, 2t + 1, 2t + 8, 2t + 9
  float scores[2][4];       // of two tiles of 8 keys: their keys 2t, 2t + 1 for row g, then for row g + 8
  float y[kSets][8][4] = {};
  Part part[2] = {{-INFINITY, 0}, {-INFINITY, 0}};

  __device__ __forceinline__ Lane(const Params& params, const Block& of, int lane)
      : s(params), block(of), g(lane / 4), t(lane % 4) {
    const Arguments& a = s.arguments;
    k_head = static_cast<const uint16_t*>(a.k) + block.batch * a.k_strides[0] + block.kv_head * a.k_strides[1];
    v_head = static_cast<const uint16_t*>(a.v) + block.batch * a.v_strides[0] + block.kv_head * a.v_strides[1];
  }

  __device__ __forceinline__ Eight q_of(int row, int d) const {
    const Arguments& a = s.arguments;
    const uint16_t* head = static_cast<const uint16_t*>(a.q) + block.batch * a.q_strides[0];
    const bool exists = row < block.rows && d < s.size;
    return load_eight(head + block.head(s, row) * a.q_strides[1] + block.query(s, row) * a.q_strides[2] + d, exists);
  }

  // To registers, or to `rows` in shared memory by all threads of the CTA.
  __device__ __forceinline__ void load_q(uint16_t* rows) {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int h = 0; h < 2; ++h) q[c][h] = q_of(g + 8 * h, 32 * c + 8 * t);
      }
    } else {
      for (int i = static_cast<int>(threadIdx.x); i < kRows * (kSize / 8); i += kWarps<kSize> * 32) {
        const int row = i / (kSize / 8), d = i % (kSize / 8) * 8;
        *reinterpret_cast<Eight*>(rows + row * kQRow + d) = q_of(row, d);
      }
      q_shared = ptx::shared_address(rows);
      __syncthreads();
    }
  }

  __device__ __forceinline__ void load_k(int first, int pass) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = first + 8 * n + g;
      const uint16_t* from = k_head + key * s.arguments.k_strides[2];
#pragma unroll
      for (int c = 0; c < kChunksHeld; ++c) {
        const int d = 32 * (pass * kChunksHeld + c) + 8 * t;
        k[c][n] = load_eight(from + d, key < end && d < s.size);
      }
    }
  }

  __device__ __forceinline__ void load_v(int first, int pass) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + 8 * (i / 2) + 2 * t + i % 2;
      const uint16_t* from = v_head + key * s.arguments.v_strides[2];
#pragma unroll
      for (int set = 0; set < kSetsHeld; ++set) {
        const int d = 64 * (pass * kSetsHeld + set) + 8 * g;
        v[set][i] = load_eight(from + d, key < end && d < s.value_size);
      }
    }
  }

  __device__ __forceinline__ void multiply(int pass) {
#pragma unroll
    for (int c = 0; c < kChunksHeld; ++c) {
      Eight low, high;  // rows g and g + 8 of q
      if constexpr (kQInRegisters) {
        low = q[c][0], high = q[c][1];
      } else {
        const uint32_t from = q_shared + (g * kQRow + 32 * (pass * kChunksHeld + c) + 8 * t) * 2;
        *reinterpret_cast<uint4*>(&low) = ptx::load_shared_16(from);
        *reinterpret_cast<uint4*>(&high) = ptx::load_shared_16(from + 8 * kQRow * 2);
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint32_t fragment[4] = {low.word[2 * step], high.word[2 * step], low.word[2 * step + 1],
                                      high.word[2 * step + 1]};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          Half<T>::mma(scores[n], fragment, k[c][n].word[2 * step], k[c][n].word[2 * step + 1]);
        }
      }
    }
  }

  // Turns scores into weights e^(score - largest), and rescales what the largest score so far was too small for.
  __device__ __forceinline__ void weigh() {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest =
          fmaxf(fmaxf(scores[0][2 * h], scores[0][2 * h + 1]), fmaxf(scores[1][2 * h], scores[1][2 * h + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(fmaxf(largest, __shfl_xor_sync(~0u, largest, 2)), part[h].largest);
      factor[h] = weight_of(part[h].largest, largest);
      part[h].largest = largest;
      part[h].sum *= factor[h];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[i / 2][2 * h + i % 2];
        score = weight_of(score, largest);
        part[h].sum += score;
      }
    }
    if (!__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < kSets * 32; ++i) y[i / 32][i / 4 % 8][i % 4] *= factor[i / 2 % 2];
  }

  __device__ __forceinline__ void add_values(int pass) {
    const uint32_t weights[4] = {Half<T>::pair(scores[0][0], scores[0][1]), Half<T>::pair(scores[0][2], scores[0][3]),
                                 Half<T>::pair(scores[1][0], scores[1][1]), Half<T>::pair(scores[1][2], scores[1][3])};
#pragma unroll
    for (int set = 0; set < kSetsHeld; ++set) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned halves = j % 2 == 0 ? 0x5410 : 0x7632;
        const uint32_t b0 = __byte_perm(v[set][0].word[j / 2], v[set][1].word[j / 2], halves);
        const uint32_t b1 = __byte_perm(v[set][2].word[j / 2], v[set][3].word[j / 2], halves);
        Half<T>::mma(y[pass * kSetsHeld + set][j], weights, b0, b1);
      }
    }
  }

  // Loads k and v of a warp's first tile, before the range of the keys is known.
  __device__ __forceinline__ void load_first(int tile) {
    end = s.keys;
    load_k(tile * kTileKeys, 0);
    load_v(tile * kTileKeys, 0);
  }

  // The tiles `tile`, tile + step, ... of 16 keys, after load_first(). Those outside the range are skipped.
  __device__ __forceinline__ void run(const Range& range, int tile, int step) {
    const MaskRows mask(s, block, range, g, t);
    end = range.end;
    int first = tile * kTileKeys;
    if (first + kTileKeys <= range.begin) {
      const int stride = step * kTileKeys, missing = range.begin - kTileKeys + 1 - first;
      first += (missing + stride - 1) / stride * stride;
      load_k(first, 0);
      load_v(first, 0);
    }
    for (; first < end; first += step * kTileKeys) {
      uint32_t bits[8];
      mask.load(first, bits);
#pragma unroll
      for (float& score : reinterpret_cast<float (&)[8]>(scores)) score = 0;
#pragma unroll
      for (int pass = 0; pass < kChunks / kChunksHeld; ++pass) {
        multiply(pass);
        if (pass + 1 < kChunks / kChunksHeld) {
          load_k(first, pass + 1);
        } else {
          load_k(first + step * kTileKeys, 0);
        }
      }
      const unsigned used = mask.apply(first, bits, scores);
      weigh();
#pragma unroll
      for (int pass = 0; pass < kSets / kSetsHeld; ++pass) {
        if (pass > 0) load_v(first, pass);
        if (!__all_sync(~0u, used == 15)) clear_values(used);
        add_values(pass);
      }
      load_v(first + step * kTileKeys, 0);
    }
  }

  // Sets v of keys that no row counts to zero: whatever it holds, also NaN, must not reach y.
  __device__ __forceinline__ void clear_values(unsigned used) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (used >> i & 1) continue;
#pragma unroll
      for (int set = 0; set < kSetsHeld; ++set) v[set][i] = {};
    }
  }

  // To shared memory: parts[16], and values of row i < rows at values[i * kSize / 4], in the order of place_of().
  __device__ __forceinline__ void store(Part* parts, float4* values) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = g + 8 * h;
      float sum = part[h].sum;
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (row >= block.rows) continue;
      if (t == 0) parts[row] = {part[h].largest, sum};
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // elements 16 t + 4 i of the set
          const int j = i % 2 * 4, c = 2 * h + i / 2;
          values[row * (kSize / 4) + place_of(row, 16 * set + 4 * t + i)] = {y[set][j][c], y[set][j + 1][c],
                                                                             y[set][j + 2][c], y[set][j + 3][c]};
        }
      }
    }
  }

  // Place of elements 4 i to 4 i + 3 of a row; also the inverse. The lanes that store at once meet different banks.
  static __device__ __forceinline__ int place_of(int row, int i) {
    const int within = (i % 4 * 4 + i / 4 % 4) ^ (row % 2 * 5);
    return i / 16 * 16 + within;
  }
};

}  // namespace qao::attention
