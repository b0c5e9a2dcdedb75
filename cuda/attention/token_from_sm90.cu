// Attention of one token per sequence: rotary embedding, write to the cache and softmax in one kernel.
//
// A cluster of CTAs per key-value head. Keys are the rows and query heads the columns of mma.m16n8k16, so that up to
// eight query heads share a key-value head. Each warp takes tiles of 16 keys and keeps its own running softmax; K and V
// go from memory to registers. A lane loads 8 consecutive elements of a key, which serve as the fragments of two
// K-steps if q is read in the same order; for V it loads 8 elements of four keys and joins those of neighboring keys.
// The warps' parts are summed in shared memory, those of the CTAs by the owner of a row. Sums have a fixed order.
#include <cstdint>

#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "common/launch.h"
#include "common/mma.cuh"
#include "common/ptx.cuh"
#include "common/shared_memory.h"
#include "qao/device.h"
#include "qao/token_attention.h"

namespace qao::attention {
inline namespace token_kernels {

constexpr int kTileKeys = 16;
constexpr int kMostWarps = 8;  // one such CTA fills the registers of an SM, or two of half as many warps
constexpr int kHeads = static_cast<int>(kMostGroup);                            // most query heads of a CTA
constexpr int kNewKey = kHeads, kNewValue = kHeads + 1, kNewRows = kHeads + 2;  // rows of Shared::rows behind q

struct TokenParams {
  TokenArguments a;
  int keys, heads, group;
  int splits, log2_splits;  // CTAs of a cluster, which share the keys
  float scale;
  float excluding;  // the largest value of a float mask that excludes a key
};

template <int kSize>
struct Shared {
  static constexpr int kRow = kSize + 8;  // elements: without bank conflicts
  Part parts[kMostWarps][kHeads];
  Part arrived[kMostSplits][kHeads];
  __align__(16) uint16_t rows[kNewRows][kRow];  // q, the new key and the new value, rotated
};

// Floats of a row of the warps' sums in shared memory, padded against bank conflicts.
template <int kSize>
constexpr int kValueRow = kSize + 8;

// Transposes an 8 x 8 matrix of 16-bit elements across the lanes of a warp.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(result) : "r"(pair));
  return result;
}

// Rotates four pairs of elements half a head apart: (low, high) by the angles of cos and sin.
template <typename T>
__device__ __forceinline__ void rotate(uint2& low, uint2& high, uint2 cos_low, uint2 cos_high, uint2 sin_low,
                                       uint2 sin_high) {
  const auto turn = [](uint32_t& a, uint32_t& b, uint32_t ca, uint32_t cb, uint32_t sa, uint32_t sb) {
    using H = Half<T>;
    const float a0 = H::low(a), a1 = H::high(a), b0 = H::low(b), b1 = H::high(b);
    a = H::pair(a0 * H::low(ca) - b0 * H::low(sa), a1 * H::high(ca) - b1 * H::high(sa));
    b = H::pair(b0 * H::low(cb) + a0 * H::low(sb), b1 * H::high(cb) + a1 * H::high(sb));
  };
  turn(low.x, high.x, cos_low.x, cos_high.x, sin_low.x, sin_high.x);
  turn(low.y, high.y, cos_low.y, cos_high.y, sin_low.y, sin_high.y);
}

// What a lane holds, with g = lane / 4 and t = lane % 4: keys g and g + 8 of a tile, query heads 2 t and 2 t + 1.
template <typename T, int kSize>
struct Lane {
  static constexpr int kChunks = kSize / 32, kSets = kSize / 64;

  const int g, t;
  const uint16_t *key_lane, *value_lane;  // element 8 t of key g, and 8 g of key 2 t
  const int64_t key_stride, value_stride;
  const int keys;
  uint4 k[kChunks][2];        // keys g and g + 8
  uint4 v[kSets][4];          // keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9
  float y[kSets][4][4] = {};  // elements 8 g + 2 j, and 8 g + 2 j + 1 of a set of 64, for both heads
  Part part[2] = {{-INFINITY, 0}, {-INFINITY, 0}};

  __device__ __forceinline__ Lane(const TokenParams& s, int lane, int batch, int kv_head)
      : g(lane / 4),
        t(lane % 4),
        key_lane(static_cast<const uint16_t*>(s.a.key_cache) + batch * s.a.key_strides[0] +
                 kv_head * s.a.key_strides[1] + g * s.a.key_strides[2] + 8 * t),
        value_lane(static_cast<const uint16_t*>(s.a.value_cache) + batch * s.a.value_strides[0] +
                   kv_head * s.a.value_strides[1] + 2 * t * s.a.value_strides[2] + 8 * g),
        key_stride(s.a.key_strides[2]),
        value_stride(s.a.value_strides[2]),
        keys(s.keys) {}

  __device__ __forceinline__ int key_of_score(int first, int n) const { return first + 8 * n + g; }
  __device__ __forceinline__ int key_of_value(int first, int i) const { return first + 2 * t + 8 * (i / 2) + i % 2; }

  __device__ __forceinline__ void load_k(int first) {
    const uint16_t* from = key_lane + first * key_stride;
#pragma unroll
    for (int n = 0; n < 2; ++n, from += 8 * key_stride) {
      const bool exists = key_of_score(first, n) < keys;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        k[c][n] = exists ? *reinterpret_cast<const uint4*>(from + 32 * c) : uint4{};
      }
    }
  }
  __device__ __forceinline__ void load_v(int first) {
    const uint16_t* from = value_lane + first * value_stride;
#pragma unroll
    for (int i = 0; i < 4; ++i, from += (i == 2 ? 7 : 1) * value_stride) {
      const bool exists = key_of_value(first, i) < keys;
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        v[set][i] = exists ? *reinterpret_cast<const uint4*>(from + 64 * set) : uint4{};
      }
    }
  }

  // Takes the new key and value, which the cache may not hold yet.
  __device__ __forceinline__ void insert_key(int first, int position, const Shared<kSize>& shared) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (key_of_score(first, n) != position) continue;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        k[c][n] = *reinterpret_cast<const uint4*>(&shared.rows[kNewKey][32 * c + 8 * t]);
      }
    }
  }
  __device__ __forceinline__ void insert_value(int first, int position, const Shared<kSize>& shared) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key_of_value(first, i) != position) continue;
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        v[set][i] = *reinterpret_cast<const uint4*>(&shared.rows[kNewValue][64 * set + 8 * g]);
      }
    }
  }

  // Scores of keys g (elements 0 and 1) and g + 8 for heads 2 t and 2 t + 1.
  __device__ __forceinline__ void multiply(const uint4 (&q)[kChunks], float (&scores)[4]) const {
    float sum[2][4] = {};  // two chains of dependent instructions
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint32_t low[4] = {k[c][0].x, k[c][1].x, k[c][0].y, k[c][1].y};
      const uint32_t high[4] = {k[c][0].z, k[c][1].z, k[c][0].w, k[c][1].w};
      Half<T>::mma(sum[0], low, q[c].x, q[c].y);
      Half<T>::mma(sum[1], high, q[c].z, q[c].w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = sum[0][i] + sum[1][i];
  }

  // Turns scores into weights e^(score - largest), and rescales what the largest score so far was too small for.
  __device__ __forceinline__ void weigh(float (&scores)[4]) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = fmaxf(scores[h], scores[2 + h]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
      }
      largest = fmaxf(largest, part[h].largest);
      factor[h] = weight_of(part[h].largest, largest);
      scores[h] = weight_of(scores[h], largest), scores[2 + h] = weight_of(scores[2 + h], largest);
      part[h] = {largest, part[h].sum * factor[h] + (scores[h] + scores[2 + h])};
    }
    if (!__any_sync(~0u, factor[0] != 1 || factor[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < kSets * 16; ++i) y[i / 16][i / 4 % 4][i % 4] *= factor[i % 2];
  }

  __device__ __forceinline__ void add_values(const float (&scores)[4]) {
    const uint32_t b0 = transposed(Half<T>::pair(scores[0], scores[1]));
    const uint32_t b1 = transposed(Half<T>::pair(scores[2], scores[3]));
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto word = [&](int i) { return reinterpret_cast<const uint32_t (&)[4]>(v[set][i])[j]; };
        const uint32_t a[4] = {__byte_perm(word(0), word(1), 0x5410), __byte_perm(word(0), word(1), 0x7632),
                               __byte_perm(word(2), word(3), 0x5410), __byte_perm(word(2), word(3), 0x7632)};
        Half<T>::mma(y[set][j], a, b0, b1);
      }
    }
  }

  // Sets v of keys that do not count to zero: whatever it holds, also NaN, must not reach y. `counts` is of this lane's
  // keys of scores.
  __device__ __forceinline__ void clear_values(const bool (&counts)[2]) {
    const unsigned low = __ballot_sync(~0u, counts[0]), high = __ballot_sync(~0u, counts[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i < 2 ? low : high) >> (4 * (2 * t + i % 2)) & 1) continue;
#pragma unroll
      for (int set = 0; set < kSets; ++set) v[set][i] = {};
    }
  }

  // To shared memory: parts[8], and values of row i < rows at values[i * kValueRow].
  __device__ __forceinline__ void store(Part* parts, float* values, int rows) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = part[h].sum;
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
      const int row = 2 * t + h;
      if (row >= rows) continue;
      if (g == 0) parts[row] = {part[h].largest, sum};
      if (sum == 0) continue;
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          *reinterpret_cast<float4*>(values + row * kValueRow<kSize> + 64 * set + 8 * g + 2 * j) = {
              y[set][j][h], y[set][j][h + 2], y[set][j + 1][h], y[set][j + 1][h + 2]};
        }
      }
    }
  }
};

// Rotates q and the new key to shared memory, and writes the new key and value to the cache in the CTA of its tile.
template <typename T, int kSize>
struct NewRows {
  static constexpr int kOfRow = kSize / 8;  // threads: each has four elements of both halves of a head

  __device__ __forceinline__ NewRows(const TokenParams& s, int of_batch, int of_head, int thread)
      : a(s.a),
        batch(of_batch),
        kv_head(of_head),
        row(thread / kOfRow),
        d(thread % kOfRow * 4),
        exists(row < s.group || row == kNewKey || row == kNewValue) {
    const bool is_query = row < kHeads;
    const int64_t* strides = is_query ? a.q_strides : row == kNewKey ? a.k_strides : a.v_strides;
    const void* data = is_query ? a.q : row == kNewKey ? a.k : a.v;
    from = static_cast<const uint16_t*>(data) + batch * strides[0] +
           (is_query ? kv_head * s.group + row : kv_head) * strides[1] + d;
  }
  static __device__ __forceinline__ uint2 load_four(const void* data, int64_t at) {
    return *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + at);
  }
  __device__ __forceinline__ void load() {
    if (!exists) return;
    low = load_four(from, 0), high = load_four(from, kSize / 2);
    if (a.cos == nullptr || row == kNewValue) return;
    const int64_t cos = batch * a.cos_stride + d, sin = batch * a.sin_stride + d;
    angle[0] = load_four(a.cos, cos), angle[1] = load_four(a.cos, cos + kSize / 2);
    angle[2] = load_four(a.sin, sin), angle[3] = load_four(a.sin, sin + kSize / 2);
  }
  // `position` is that of the new key if this CTA writes it, else negative.
  __device__ __forceinline__ void store(int position, Shared<kSize>& shared) {
    if (!exists) return;
    if (a.cos != nullptr && row != kNewValue) rotate<T>(low, high, angle[0], angle[1], angle[2], angle[3]);
    *reinterpret_cast<uint2*>(&shared.rows[row][d]) = low;
    *reinterpret_cast<uint2*>(&shared.rows[row][d + kSize / 2]) = high;
    if (row < kHeads || position < 0) return;
    const int64_t* strides = row == kNewKey ? a.key_strides : a.value_strides;
    uint16_t* to = static_cast<uint16_t*>(row == kNewKey ? a.key_cache : a.value_cache) + batch * strides[0] +
                   kv_head * strides[1] + position * strides[2] + d;
    *reinterpret_cast<uint2*>(to) = low;
    *reinterpret_cast<uint2*>(to + kSize / 2) = high;
  }

  const TokenArguments& a;
  const int batch, kv_head, row, d;
  const bool exists;
  const uint16_t* from;
  uint2 low, high, angle[4];
};

template <typename T, int kSize, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kMostWarps / kWarps)
    token_kernel(const __grid_constant__ TokenParams s) {
  constexpr int kPlaces = kSize / 4, kThreads = kWarps * 32;
  extern __shared__ __align__(16) float values[];
  __shared__ Shared<kSize> shared;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = ptx::warp_index();
  const int rank = static_cast<int>(blockIdx.x), kv_head = static_cast<int>(blockIdx.y);
  const int batch = static_cast<int>(blockIdx.z), tile = rank + s.splits * warp;
  const int step = s.splits * kWarps * kTileKeys;
  if (s.splits > 1) ptx::cluster_arrive();  // to know below that the other CTAs have started
  Lane<T, kSize> own(s, lane, batch, kv_head);
  NewRows<T, kSize> rows(s, batch, kv_head, thread);
  ptx::wait_then_launch_dependents();

  const int64_t given = *s.a.position;
  KeyRange range{0, s.keys, 1, 0};
  if (s.a.ranges != nullptr) range = s.a.ranges[batch * s.a.range_stride];
  rows.load();
  int first = tile * kTileKeys;
  own.load_k(first);
  own.load_v(first);
  const int64_t counted = given < 0 ? given + s.keys : given;
  const int position = counted >= 0 && counted < s.keys ? static_cast<int>(counted) : -1;
  const int written = (position / kTileKeys & (s.splits - 1)) == rank ? position : -1;
  rows.store(written, shared);
  if constexpr (kThreads < kNewRows * NewRows<T, kSize>::kOfRow) {
    NewRows<T, kSize> more(s, batch, kv_head, thread + kThreads);
    more.load();
    more.store(written, shared);
  }
  const float excluding = range.finite ? -INFINITY : s.excluding;
  const KeyMask& mask = s.a.mask;
  __syncthreads();
  uint4 q[kSize / 32];
#pragma unroll
  for (int c = 0; c < kSize / 32; ++c) {
    q[c] = *reinterpret_cast<const uint4*>(&shared.rows[own.g][32 * c + 8 * own.t]);
  }
  if (first + kTileKeys <= range.begin) {
    const int missing = range.begin - kTileKeys + 1 - first;
    first += (missing + step - 1) / step * step;
    own.load_k(first);
    own.load_v(first);
  }
#pragma unroll 1
  for (; first < range.end; first += step) {
    const bool is_new = position >= first && position < first + kTileKeys;
    if (is_new) own.insert_key(first, position, shared);
    float scores[4];
    own.multiply(q, scores);
    const int next = first + step;
    if (next < range.end) own.load_k(next);
    bool counts[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = own.key_of_score(first, n);
      counts[n] = key >= range.begin && key < range.end;
      float added = 0;
      if (!range.plain && counts[n]) {
        added = load_mask_value(mask.data, mask.kind, mask.dtype, batch * mask.batch_stride + key * mask.key_stride);
        counts[n] = !(added <= excluding);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scores[2 * n + h] = counts[n] ? fmaf(scores[2 * n + h], s.scale, added) : -INFINITY;
      }
    }
    own.weigh(scores);
    if (is_new) own.insert_value(first, position, shared);
    if (!__all_sync(~0u, counts[0] && counts[1])) own.clear_values(counts);
    own.add_values(scores);
    if (next < range.end) own.load_v(next);
  }

  float* const mine = values + warp * s.group * kValueRow<kSize>;
  own.store(shared.parts[warp], mine, s.group);
  __syncthreads();
  if (s.splits > 1) ptx::cluster_wait();
  constexpr int kAtOnce = 32 / kPlaces * kWarps;  // rows; a warp has two of a small head
  const int place = lane % kPlaces;
  const int slots = owned_rows(s.group, s.log2_splits);
  float4* const inbox = reinterpret_cast<float4*>(values + kWarps * s.group * kValueRow<kSize>);
  const auto store_y = [&](int of_row, Part part, float4 value) {
    const int64_t y_row = static_cast<int64_t>(batch) * s.heads + kv_head * s.group + of_row;
    const float inverse = part.sum == 0 ? 0 : 1 / part.sum;  // without a key, 0 as in torch
    const uint2 four = {Half<T>::pair(value.x * inverse, value.y * inverse),
                        Half<T>::pair(value.z * inverse, value.w * inverse)};
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(s.a.y) + y_row * kSize + 4 * place) = four;
  };
#pragma unroll
  for (int i = 0; i < kHeads; i += kAtOnce) {
    const int row = i + warp + kWarps * (lane / kPlaces);
    if (row >= s.group) break;
    float4 value;
    const Part part = combine<kWarps>(
        kWarps, [&](int i) { return shared.parts[i][row]; },
        [&](int i) {
          return *reinterpret_cast<const float4*>(values + (i * s.group + row) * kValueRow<kSize> + 4 * place);
        },
        value);
    if (s.splits == 1) {
      store_y(row, part, value);
    } else {
      const int owner = row & (s.splits - 1), slot = row >> s.log2_splits;
      const uint32_t to = ptx::shared_address(inbox + (rank * slots + slot) * kPlaces + place);
      ptx::store_cluster_float4(ptx::cluster_address(to, owner), value);
      if (place == 0) {
        const uint32_t part_to = ptx::shared_address(&shared.arrived[rank][slot]);
        ptx::store_cluster_float2(ptx::cluster_address(part_to, owner), {part.largest, part.sum});
      }
    }
  }
  if (s.splits == 1) return;
  ptx::cluster_barrier();
  const int slot = warp, own_row = (slot << s.log2_splits) + rank;
  if (slot >= slots || own_row >= s.group || lane >= kPlaces) return;
  float4 value;
  const Part part = combine<kMostSplits>(
      s.splits, [&](int i) { return shared.arrived[i][slot]; },
      [&](int i) { return inbox[(i * slots + slot) * kPlaces + place]; }, value);
  store_y(own_row, part, value);
}

template <typename T, int kSize, int kWarps>
Status launch_of(TokenParams s, const TokenProblem& p, const Gpu& gpu, cudaStream_t stream) {
  const auto kernel = token_kernel<T, kSize, kWarps>;
  if (gpu.compute_capability < 90) {
    return Status::error("the kernel needs a GPU from compute capability 9.0 on",
                         "Rotate and write to the cache with torch, and call decode_attention");
  }
  if (Status status = grant_shared_memory(reinterpret_cast<const void*>(kernel)); !status.ok()) return status;
  s.log2_splits = kWarps < kMostWarps ? 0 : log2_splits(kTileKeys * kWarps, p.keys, p.batch * p.kv_heads, gpu.num_sms);
  s.splits = 1 << s.log2_splits;
  Launch launch{dim3(s.splits, static_cast<unsigned>(p.kv_heads), static_cast<unsigned>(p.batch)), dim3(kWarps * 32),
                stream};
  launch.cluster = s.splits;
  launch.overlapped = true;
  const int slots = owned_rows(s.group, s.log2_splits);
  const int floats = kWarps * s.group * kValueRow<kSize> + s.splits * slots * kSize;
  launch.shared_bytes = sizeof(float) * static_cast<size_t>(floats);
  return launch_kernel(launch, "launching attention::token_kernel", kernel, s);
}

// More heads than SMs get CTAs of half an SM: all run at once where twice as many fit, and one computes while the other
// starts or ends.
template <typename T, int kSize>
Status launch_of_size(const TokenParams& s, const TokenProblem& p, cudaStream_t stream) {
  Gpu gpu;
  if (Status status = query_gpu(current_gpu(), &gpu); !status.ok()) return status;
  return p.batch * p.kv_heads > gpu.num_sms ? launch_of<T, kSize, kMostWarps / 2>(s, p, gpu, stream)
                                            : launch_of<T, kSize, kMostWarps>(s, p, gpu, stream);
}

template <typename T>
Status launch_of_type(const TokenParams& s, const TokenProblem& p, cudaStream_t stream) {
  return p.size == 64 ? launch_of_size<T, 64>(s, p, stream) : launch_of_size<T, 128>(s, p, stream);
}

}  // namespace token_kernels

Status launch_token(const TokenProblem& p, const TokenArguments& a, void* stream) {
  constexpr int64_t kMostBlocks = 65535;  // along y and z of a grid
  if (p.batch > kMostBlocks || p.kv_heads > kMostBlocks) {
    return Status::error("more sequences or heads than a GPU's grid holds", "Pass fewer sequences at a time");
  }
  TokenParams s{};
  s.a = a;
  s.keys = static_cast<int>(p.keys), s.heads = static_cast<int>(p.heads);
  s.group = static_cast<int>(p.heads / p.kv_heads);
  s.scale = p.scale;
  s.excluding = largest_excluding(a.mask.kind, a.mask.dtype);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  return p.dtype == DType::kBFloat16 ? launch_of_type<__nv_bfloat16>(s, p, on) : launch_of_type<__half>(s, p, on);
}

}  // namespace qao::attention
