// A stable counting sort by one CTA: numbers of experts are few, and slots are a few bytes each.
//
//   every warp counts the experts of its run of slots  ->  counts become first places, along warps, then along experts
//   ->  every warp walks its run again and gives places
#include <algorithm>

#include "common/integers.h"
#include "common/launch.h"
#include "common/ptx.cuh"
#include "qao/experts.h"

namespace qao::experts {
namespace {

constexpr int kMostWarps = 32, kSlotsPerWarp = 64;
constexpr int kSharedBytes = 48 << 10;  // that every GPU has without asking

// What is no expert is in the bucket after the last one's.
__device__ __forceinline__ int bucket_of(const Sort& s, int64_t slot) {
  const int64_t expert =
      s.wide ? static_cast<const int64_t*>(s.chosen)[slot] : static_cast<const int32_t*>(s.chosen)[slot];
  const int64_t none = s.experts;
  return static_cast<int>(expert < 0 ? none : min(expert, none));
}

__global__ void __launch_bounds__(kMostWarps * 32) sort_kernel(const __grid_constant__ Sort s) {
  extern __shared__ int counts[];  // [warps, buckets], and [buckets] of all
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int buckets = static_cast<int>(s.experts) + 1;
  int* const own = counts + warp * buckets;
  int* const all = counts + warps * buckets;
  const int64_t run = (s.slots + 32 * warps - 1) / (32 * warps) * 32;
  const int64_t begin = min(warp * run, s.slots), end = min(begin + run, s.slots);
  for (int i = threadIdx.x; i < warps * buckets; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  ptx::wait_then_launch_dependents();

  for (int64_t slot = begin + lane; slot < end; slot += 32) atomicAdd(own + bucket_of(s, slot), 1);
  __syncthreads();
  for (int bucket = threadIdx.x; bucket < buckets; bucket += blockDim.x) {
    int sum = 0;
    for (int w = 0; w < warps; ++w) {
      int& count = counts[w * buckets + bucket];
      const int before = sum;
      sum += count, count = before;
    }
    all[bucket] = sum;
  }
  __syncthreads();
  if (warp == 0) {  // a lane has neighbouring buckets
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
      if (bucket < s.experts) s.offsets[bucket] = place;
    }
  }
  __syncthreads();
  for (int64_t base = begin; base < end; base += 32) {
    const int64_t slot = base + lane;
    const int bucket = slot < end ? bucket_of(s, slot) : -1;
    const unsigned same = __match_any_sync(~0u, bucket);
    const int before = __popc(same & ((1u << lane) - 1));
    const int place = bucket < 0 ? 0 : all[bucket] + own[bucket] + before;
    __syncwarp();
    if (bucket >= 0) {
      if (before == 0) own[bucket] += __popc(same);
      s.row_index[place] = static_cast<int>(slot / s.top_k);
      s.places[slot] = place;
    }
    __syncwarp();
  }
}

}  // namespace

Status launch(const Sort& sort, void* stream) {
  const int64_t bucket_bytes = (sort.experts + 1) * static_cast<int64_t>(sizeof(int));
  const int64_t fit = kSharedBytes / bucket_bytes - 1;
  if (fit < 1) {
    return Status::error("a GPU sorts up to 6000 experts, not " + std::to_string(sort.experts),
                         "Sort with torch.sort(stable=True)");
  }
  const int64_t wanted = std::clamp<int64_t>(ceil_div(sort.slots, int64_t{kSlotsPerWarp}), 1, kMostWarps);
  const unsigned warps = static_cast<unsigned>(std::min(wanted, fit));
  Launch launch{dim3(1), dim3(warps * 32), static_cast<cudaStream_t>(stream)};
  launch.shared_bytes = static_cast<size_t>((warps + 1) * bucket_bytes);
  launch.overlapped = is_hopper_code(reinterpret_cast<const void*>(&sort_kernel));
  return launch_kernel(launch, "launching the sort of experts", sort_kernel, sort);
}

}  // namespace qao::experts
