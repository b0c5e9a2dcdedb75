// MoE permute: stable counting sort of slots by expert.
//
//   each warp counts the experts in its run of slots  ->  prefix sums over warps, then over experts
//   ->  each warp iterates over its run again and assigns positions
//
// Many slots are split across CTAs. A separate kernel counts experts per CTA; then each CTA sums the counts of all
// CTAs, and of the CTAs before it.
#include <algorithm>

#include "common/integers.h"
#include "common/launch.h"
#include "common/ptx.cuh"
#include "qao/moe.h"

namespace qao::experts {
inline namespace sort_kernels {

constexpr int kMostWarps = 32, kSlotsPerWarp = 64, kMostCtas = 64;
constexpr int kSharedBytes = 48 << 10;  // available on every GPU without opt-in

struct Params : Sort {
  int* counts;  // [CTAs, buckets], with several CTAs
};

// Distribution of the slots.
struct Grid {
  int64_t warps, ctas;
};
Grid grid_of(const Sort& s) {
  const int64_t bucket_bytes = (s.experts + 1) * static_cast<int64_t>(sizeof(int));
  const int64_t fit = kSharedBytes / bucket_bytes - 1;
  const int64_t wanted = std::clamp<int64_t>(ceil_div(s.slots, int64_t{kSlotsPerWarp}), 1, kMostWarps);
  const int64_t warps = std::min(wanted, fit);
  const int64_t ctas = warps < 1 ? 0 : ceil_div(std::max<int64_t>(s.slots, 1), warps * kSlotsPerWarp);
  return {warps, std::min<int64_t>(ctas, kMostCtas)};
}

// Invalid experts go into the bucket after the last expert.
__device__ __forceinline__ int bucket_of(const Sort& s, int64_t slot) {
  const int64_t expert =
      s.wide ? static_cast<const int64_t*>(s.chosen)[slot] : static_cast<const int32_t*>(s.chosen)[slot];
  const int64_t none = s.experts;
  return static_cast<int>(expert < 0 ? none : min(expert, none));
}

// Slots [begin, end) of a warp. The runs of a CTA are contiguous.
struct Run {
  int64_t begin, end;
  __device__ __forceinline__ explicit Run(const Sort& s) {
    const int64_t warps = blockDim.x / 32, parts = warps * gridDim.x;
    const int64_t size = (s.slots + 32 * parts - 1) / (32 * parts) * 32;
    begin = min((blockIdx.x * warps + threadIdx.x / 32) * size, s.slots), end = min(begin + size, s.slots);
  }
};

__global__ void __launch_bounds__(kMostWarps * 32) count_kernel(const __grid_constant__ Params p) {
  extern __shared__ int counts[];  // [buckets]
  const int buckets = static_cast<int>(p.experts) + 1;
  for (int i = threadIdx.x; i < buckets; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  ptx::wait_then_launch_dependents();
  const Run run(p);
  for (int64_t slot = run.begin + threadIdx.x % 32; slot < run.end; slot += 32)
    atomicAdd(counts + bucket_of(p, slot), 1);
  __syncthreads();
  for (int i = threadIdx.x; i < buckets; i += blockDim.x) p.counts[blockIdx.x * buckets + i] = counts[i];
}

__global__ void __launch_bounds__(kMostWarps * 32) sort_kernel(const __grid_constant__ Params p) {
  extern __shared__ int counts[];  // [warps, buckets], then [buckets] totals
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int buckets = static_cast<int>(p.experts) + 1;
  int* const own = counts + warp * buckets;
  int* const all = counts + warps * buckets;
  const Run run(p);
  for (int i = threadIdx.x; i < warps * buckets; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  ptx::wait_then_launch_dependents();

  // Count experts per warp
  for (int64_t slot = run.begin + lane; slot < run.end; slot += 32) atomicAdd(own + bucket_of(p, slot), 1);
  __syncthreads();
  // Prefix sums over CTAs and warps
  for (int bucket = threadIdx.x; bucket < buckets; bucket += blockDim.x) {
    int sum = 0;  // count in previous CTAs and warps
    int total = 0;
    if (gridDim.x > 1) {
#pragma unroll 8
      for (int cta = 0; cta < gridDim.x; ++cta) {
        const int count = p.counts[cta * buckets + bucket];
        total += count;
        sum += cta < blockIdx.x ? count : 0;
      }
    }
    for (int w = 0; w < warps; ++w) {
      int& count = counts[w * buckets + bucket];
      const int before = sum;
      sum += count, count = before;
    }
    all[bucket] = gridDim.x > 1 ? total : sum;
  }
  __syncthreads();
  // Prefix sum over experts
  if (warp == 0) {  // each lane has adjacent buckets
    const int each = (buckets + 31) / 32, first = min(lane * each, buckets), last = min(first + each, buckets);
    int own_sum = 0;
    for (int bucket = first; bucket < last; ++bucket) own_sum += all[bucket];
    int place = own_sum;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, place, distance);
      if (lane >= distance) place += other;
    }
    place -= own_sum;
    for (int bucket = first; bucket < last; ++bucket) {
      const int count = all[bucket];
      all[bucket] = place, place += count;
      if (bucket < p.experts && blockIdx.x == 0) p.offsets[bucket] = place;
    }
  }
  __syncthreads();
  // Assign positions
  for (int64_t base = run.begin; base < run.end; base += 32) {
    const int64_t slot = base + lane;
    const int bucket = slot < run.end ? bucket_of(p, slot) : -1;
    const unsigned same = __match_any_sync(~0u, bucket);
    const int before = __popc(same & ((1u << lane) - 1));
    const int place = bucket < 0 ? 0 : all[bucket] + own[bucket] + before;
    __syncwarp();
    if (bucket >= 0) {
      if (before == 0) own[bucket] += __popc(same);
      p.row_index[place] = static_cast<int>(slot / p.top_k);
      p.places[slot] = place;
    }
    __syncwarp();
  }
}

}  // namespace sort_kernels

int64_t workspace_bytes(const Sort& sort) {
  const int64_t ctas = grid_of(sort).ctas;
  return ctas > 1 ? ctas * (sort.experts + 1) * static_cast<int64_t>(sizeof(int)) : 0;
}

Status launch(const Sort& sort, void* stream) {
  const auto [warps, ctas] = grid_of(sort);
  if (warps < 1) {
    return Status::error("a GPU sorts up to 6000 experts, not " + std::to_string(sort.experts),
                         "Sort with torch.sort(stable=True)");
  }
  const Params params{sort, static_cast<int*>(sort.workspace)};
  const size_t bucket_bytes = static_cast<size_t>(sort.experts + 1) * sizeof(int);
  const auto enqueue = [&](void (*kernel)(Params), size_t shared_bytes) {
    Launch launch{dim3(static_cast<unsigned>(ctas)), dim3(static_cast<unsigned>(warps) * 32),
                  static_cast<cudaStream_t>(stream)};
    launch.shared_bytes = shared_bytes;
    launch.overlapped = is_hopper_code(reinterpret_cast<const void*>(kernel));
    return launch_kernel(launch, "launching the sort of experts", kernel, params);
  };
  if (ctas > 1) {
    if (Status status = enqueue(count_kernel, bucket_bytes); !status.ok()) return status;
  }
  return enqueue(sort_kernel, (warps + 1) * bucket_bytes);
}

}  // namespace qao::experts
