// Attention of few tokens: a cluster of CTAs per key-value head and block of 16 rows.
//
// The warps' parts of the softmax are summed in shared memory. Each CTA then sends its rows to the CTA of the cluster
// that owns them, which sums again and stores. Sums have a fixed order.
#include <limits>
#include <string>

#include "attention/kernel.cuh"
#include "common/integers.h"
#include "common/launch.h"
#include "common/shared_memory.h"

namespace qao::attention {
inline namespace decode_kernels {

template <int kSize>
struct Shared {
  RangeParts range[kWarps<kSize>];
  Part parts[kWarps<kSize>][kRows];
  Part arrived[kMostSplits][kRows];
};

// Float4 values of the dynamic shared memory: of the warps, [warps][rows], then of the cluster, [splits][owned rows].
template <int kSize>
__host__ __device__ constexpr int64_t values_of_warps(int rows) {
  return int64_t{kWarps<kSize>} * rows * (kSize / 4);
}

__device__ __forceinline__ Block block_of(const Params& s) {
  unsigned index = blockIdx.x >> s.log2_splits;
  Block block;
  block.first_row = static_cast<int>(index % s.row_blocks) * kRows, index /= s.row_blocks;
  block.kv_head = static_cast<int>(index % s.kv_heads), block.batch = index / s.kv_heads;
  block.rows = min(kRows, s.rows - block.first_row);
  block.rank = static_cast<int>(blockIdx.x) & (s.splits - 1);
  return block;
}

template <typename T, int kSize>
__device__ __forceinline__ void store_y(const Params& s, const Block& block, int row, int place, Part part,
                                        float4 value) {
  const int d = 4 * Lane<T, kSize>::place_of(row, place);
  if (d >= s.value_size) return;
  const int64_t y_row = (block.batch * s.queries + block.query(s, row)) * s.heads + block.head(s, row);
  const bool none = part.sum == 0;  // without a key, 0 as in torch
  const float inverse = 1 / part.sum;
  store_float4(s.arguments.y, y_row * s.value_size + d, Half<T>::kDType,
               {none ? 0 : value.x * inverse, none ? 0 : value.y * inverse, none ? 0 : value.z * inverse,
                none ? 0 : value.w * inverse});
}

// Sends this CTA's part of a row to its owner.
template <int kSize>
__device__ __forceinline__ void send(const Params& s, const Block& block, int row, int place, int slots, Part part,
                                     float4 value, Shared<kSize>& shared, const float4* inbox) {
#if __CUDA_ARCH__ >= 900
  const int owner = row & (s.splits - 1), slot = row >> s.log2_splits;
  const uint32_t to = ptx::shared_address(inbox + (block.rank * slots + slot) * (kSize / 4) + place);
  ptx::store_cluster_float4(ptx::cluster_address(to, owner), value);
  if (place > 0) return;
  const uint32_t part_to = ptx::shared_address(&shared.arrived[block.rank][slot]);
  ptx::store_cluster_float2(ptx::cluster_address(part_to, owner), {part.largest, part.sum});
#endif
}

template <typename T, int kSize>
__global__ void __launch_bounds__(kWarps<kSize> * 32, 1) decode_kernel(const __grid_constant__ Params s) {
  using Own = Lane<T, kSize>;
  constexpr int kThreads = kWarps<kSize> * 32, kPlaces = kSize / 4, kRowsAtOnce = kThreads / kPlaces;
  extern __shared__ float4 values[];
  __shared__ Shared<kSize> shared;
  __shared__ __align__(16) uint16_t q_rows[Own::kQInRegisters ? 8 : kRows * Own::kQRow];
  const int thread = static_cast<int>(threadIdx.x), warp = ptx::warp_index();
  const Block block = block_of(s);
#if __CUDA_ARCH__ >= 900
  if (s.splits > 1) ptx::cluster_arrive();  // to know below that the other CTAs have started
#endif
  ptx::wait_then_launch_dependents();

  Own own(s, block, thread % 32);
  const int tile = block.rank + s.splits * warp;
  own.load_first(tile);
  own.load_q(q_rows);
  const Range range = range_of(s, block, shared.range);
  own.run(range, tile, s.splits * kWarps<kSize>);

  const int stored_rows = min(kRows, s.rows), slots = owned_rows(stored_rows, s.log2_splits);
  float4* const inbox = values + values_of_warps<kSize>(stored_rows);
  own.store(shared.parts[warp], values + warp * stored_rows * kPlaces);
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (s.splits > 1) ptx::cluster_wait();
#endif
  const int place = thread % kPlaces;
  for (int row = thread / kPlaces; row < block.rows; row += kRowsAtOnce) {
    float4 value;
    const Part part = combine<kWarps<kSize>>(
        kWarps<kSize>, [&](int i) { return shared.parts[i][row]; },
        [&](int i) { return values[(i * stored_rows + row) * kPlaces + place]; }, value);
    if (s.splits == 1) {
      store_y<T, kSize>(s, block, row, place, part, value);
    } else {
      send<kSize>(s, block, row, place, slots, part, value, shared, inbox);
    }
  }
#if __CUDA_ARCH__ >= 900
  if (s.splits == 1) return;
  ptx::cluster_barrier();
  for (int slot = thread / kPlaces; slot < slots; slot += kRowsAtOnce) {
    const int row = (slot << s.log2_splits) + block.rank;
    if (row >= block.rows) break;
    float4 value;
    const Part part = combine<kMostSplits>(
        s.splits, [&](int i) { return shared.arrived[i][slot]; },
        [&](int i) { return inbox[(i * slots + slot) * kPlaces + place]; }, value);
    store_y<T, kSize>(s, block, row, place, part, value);
  }
#endif
}

template <typename T, int kSize>
Status launch_kernel_of(Params s, int64_t batch, cudaStream_t stream) {
  const auto kernel = decode_kernel<T, kSize>;
  const void* const address = reinterpret_cast<const void*>(kernel);
  Gpu gpu;
  if (Status status = query_gpu(current_gpu(), &gpu); !status.ok()) return status;
  if (Status status = grant_shared_memory(address); !status.ok()) return status;
  const int64_t blocks = batch * s.kv_heads * s.row_blocks;
  const bool hopper = is_hopper_code(address);
  if (hopper) s.log2_splits = log2_splits(kTileKeys * kWarps<kSize>, s.keys, blocks, gpu.num_sms);
  s.splits = 1 << s.log2_splits;
  if (blocks << s.log2_splits > std::numeric_limits<int>::max()) {
    return Status::error("more sequences and heads than a GPU's grid holds", "Pass fewer sequences at a time");
  }
  const int stored_rows = std::min(kRows, s.rows);
  Launch launch{dim3(static_cast<unsigned>(blocks) << s.log2_splits), dim3(kWarps<kSize> * 32), stream};
  launch.cluster = s.splits;
  launch.overlapped = hopper;
  const int64_t arriving = int64_t{kSize / 4} * s.splits * owned_rows(stored_rows, s.log2_splits);
  launch.shared_bytes = sizeof(float4) * static_cast<size_t>(values_of_warps<kSize>(stored_rows) + arriving);
  return launch_kernel(launch, "launching decode_attention", kernel, s);
}

template <typename T>
Status launch_of(const Params& s, int64_t batch, cudaStream_t stream) {
  const int size = std::max(s.size, s.value_size);
  if (size <= 64) return launch_kernel_of<T, 64>(s, batch, stream);
  if (size <= 128) return launch_kernel_of<T, 128>(s, batch, stream);
  return launch_kernel_of<T, 256>(s, batch, stream);
}

Status check(const Problem& p) {
  constexpr const char* kElsewhere = "call torch's scaled_dot_product_attention";
  if (p.dtype == DType::kFloat32) {
    return Status::error("a GPU takes bfloat16 and float16", std::string("Cast q, k and v, or ") + kElsewhere);
  }
  if (p.size % kSizeStep != 0 || p.value_size % kSizeStep != 0 || std::max(p.size, p.value_size) > kMostSize) {
    return Status::error("a GPU takes heads of 8 to 256 elements, in steps of 8",
                         std::string("Pad q, k and v with zeros, or ") + kElsewhere);
  }
  constexpr int64_t kMost = 1 << 30;  // indices of a CTA are int
  if (p.keys > kMost || p.heads > kMost || p.queries > kMost || p.heads / p.kv_heads * p.queries > kMost) {
    return Status::error("a GPU takes at most 2^30 keys, and as many queries of a group", "Pass fewer at a time");
  }
  return {};
}

}  // namespace decode_kernels

Status launch(const Problem& p, const Arguments& a, void* stream) {
  if (Status status = check(p); !status.ok()) return status;
  Params s{};
  s.arguments = a;
  s.kv_heads = static_cast<int>(p.kv_heads), s.heads = static_cast<int>(p.heads);
  s.queries = static_cast<int>(p.queries), s.keys = static_cast<int>(p.keys);
  s.size = static_cast<int>(p.size), s.value_size = static_cast<int>(p.value_size);
  s.group = s.heads / s.kv_heads, s.rows = s.group * s.queries;
  s.row_blocks = static_cast<int>(ceil_div(s.rows, kRows));
  s.mask = p.mask, s.mask_dtype = p.mask_dtype, s.scale = p.scale;
  s.excluding = largest_excluding(p.mask, p.mask_dtype);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  return p.dtype == DType::kBFloat16 ? launch_of<__nv_bfloat16>(s, p.batch, on) : launch_of<__half>(s, p.batch, on);
}

}  // namespace qao::attention
