// Launch and instantiations of dense sm90_ws.
#include "common/launch.h"
#include "gemm/launch.h"
#include "gemm/sm90_ws/add_slices.cuh"
#include "gemm/sm90_ws/kernel_table.cuh"
#include "gemm/sm90_ws/make_params.h"

namespace qao::gemm::sm90_ws {

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream) {
  const Tile tile = kTiles[plan.config];
  const Params p = params_of(problem, plan, arguments, x);
  TensorMaps maps{};
  if (Status status = make_tensor_maps(problem, plan, arguments, x, p, 1, &maps); !status.ok()) return status;
  const KernelFunction<false> kernel = kKernels<false>[plan.config][row_of(problem, tile)];
  const int cluster = plan.splits_last ? kLastSplit : tile.ping_pong ? kPingPongCluster : p.split_k;
  Status status = launch_planned("launching sm90_ws", kernel, plan, cluster, stream, p, maps);
  if (!status.ok() || p.slices == 1) return status;
  Launch add{blocks_of(p.m * ((p.n + 3) / 4), kAddThreads), kAddThreads, static_cast<cudaStream_t>(stream)};
  add.overlapped = true;
  return launch_kernel(add, "launching sm90_ws_add_slices", sm90_ws_add_slices, p);
}

}  // namespace qao::gemm::sm90_ws
