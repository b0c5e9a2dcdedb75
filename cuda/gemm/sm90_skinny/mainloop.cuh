// Mainloop and epilogue loop of the skinny-GEMM kernels.
//
// A kernel's CTA (smem_x.cuh, tma_x.cuh, ring_x.cuh) loads W and x, places partial sums and completes sums of y. Its
// MMA policy multiplies the stages: multiply(stage, step, sum).
#pragma once

#include "gemm/sm90_skinny/load_weight.cuh"

namespace qao::gemm::sm90_skinny {

template <typename Cta>
__device__ __forceinline__ void advance(const Cta& cta, typename Cta::Cursor& at) {
  at.step += Cta::kWarps;
  at.weight += Cta::kWarps * kStepBytes;
  at.scales += cta.d.scale_advance;
  if (at.step >= cta.begin + cta.steps) cta.turn(at);
}

// Issues the copies of the next K-step.
template <typename Cta>
__device__ __forceinline__ void refill(const Cta& cta, typename Cta::Cursor& ahead, uint32_t stage) {
  cta.fetch(ahead, stage);
  ptx::cp_async_commit();
  advance(cta, ahead);
}

// Prologue: fills the stages from `first` on but the last.
template <typename Cta>
__device__ __forceinline__ void fill(const Cta& cta, typename Cta::Cursor& ahead, int first = 0) {
#pragma unroll 1
  for (int i = first; i < cta.stages.count - 1; ++i) refill(cta, ahead, cta.stage_address(i));
}

// Waits until at most stages - 2 copies are in flight.
__device__ __forceinline__ void wait_for_stage(int stages) {
  if (stages == 2) {
    ptx::cp_async_wait<0>();
  } else if (stages == 3) {
    ptx::cp_async_wait<1>();
  } else {
    ptx::cp_async_wait<2>();
  }
}

// Mainloop over all K-steps of this warp in `passes` passes, with a filled ring. write(pass, slots) is the epilogue of
// the `slots` passes from `pass` on.
template <typename Cta, typename Mma, typename Write>
__device__ __forceinline__ void walk(const Cta& cta, const Mma& mma, typename Cta::Cursor& ahead, int passes,
                                     const Write& write) {
  uint32_t stage = cta.ring, stage_ahead = cta.stage_address(cta.stages.count - 1);
  const uint32_t last_stage = stage_ahead;
  int step = cta.slice, slot = 0;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    typename Mma::Sums sum = {};
#pragma unroll 1
    for (; step < cta.steps; step += Cta::kWarps) {
      // Wait for the stage
      wait_for_stage(cta.stages.count);
      __syncwarp();  // it has arrived in all lanes, and all have read the previous one
      // Refill the previous stage
      refill(cta, ahead, stage_ahead);
      // Convert W and issue the MMAs
      if (pass == 0) cta.wait_for_x(step);
      mma.multiply(stage, step, sum);
      stage_ahead = stage;
      stage = stage == last_stage ? cta.ring : stage + cta.stages.bytes;
    }
    step -= cta.steps;
    // Store the partial sums, and finish passes when all slots are full
    cta.keep(mma, slot, stage_ahead, sum);
    if (++slot == cta.slots() || pass + 1 == passes) {
      __syncthreads();
      write(pass + 1 - slot, slot);
      slot = 0;
    }
  }
}

// Calls use(quad) for each quad that this thread stores in the `slots` passes from `pass` on. A quad is four rows of a
// token. All lanes of a warp iterate equally often. `rank` of `ranks` CTAs share the quads.
template <typename Cta, typename Use>
__device__ __forceinline__ void for_each_quad(const Cta& cta, int pass, int slots, int rank, int ranks,
                                              const Use& use) {
  constexpr int kThreads = Cta::Tile::kThreads;
  const int all = cta.quads(slots);
  // `slice` is uniform to the compiler and threadIdx.x is not: with a divergent loop here, the mainloop around it loses
  // its uniform registers (5 to 8 % of the time of 16 tokens).
#pragma unroll 1
  for (int first = cta.slice * 32 + rank * kThreads; first < all; first += ranks * kThreads) {
    use(cta.quad(pass, first + cta.lane, all));
  }
}

// Epilogue of the `slots` passes from `pass` on: adds the warps' partial sums in a fixed order and stores y.
template <typename Cta>
__device__ __forceinline__ void write(const Cta& cta, int pass, int slots) {
  for_each_quad(cta, pass, slots, 0, 1, [&](const auto& at) {
    float value[4] = {};
    if (at.exists) cta.add_slices(at, value);
    cta.finish(at, value);
  });
}
template <typename Cta, typename Mma>
__device__ __forceinline__ void walk(const Cta& cta, const Mma& mma, typename Cta::Cursor& ahead, int passes) {
  walk(cta, mma, ahead, passes, [&](int pass, int slots) {
    write(cta, pass, slots);
    if (pass + slots < passes) __syncthreads();
  });
}

// Four rows of y of a token, from row n of W on.
struct Quad {
  int slot, token;
  int place;  // among the quads of a token in its pass; tma_x.cuh: of all tokens
  int n;
  bool exists;
};

// CTA with partial sums in slots: [slot][warp][token][columns of the token][kPaddedRow] float32. A slot holds the
// n-tiles of one pass.
template <typename Tile, typename Cut>
struct SlotCta : WeightLoader<Tile, Cut> {
  using Base = WeightLoader<Tile, Cut>;
  using Base::d, Base::kR, Base::kWarps, Base::row_tile0, Base::row_tiles, Base::slice, Base::tokens;
  const uint32_t partials;
  const int columns;  // of MMAs per token

  template <typename... Of>
  __device__ __forceinline__ SlotCta(uint32_t sums, int columns_of_token, const Of&... of)
      : Base(of...), partials(sums), columns(columns_of_token) {}

  __device__ __forceinline__ int slots() const { return d.slots; }
  __device__ __forceinline__ uint32_t partial(int slot, int of_slice, int token, int column = 0) const {
    return partials + (((slot * kWarps + of_slice) * tokens + token) * columns + column) * (Tile::kPaddedRow * 4);
  }
  template <typename Mma>
  __device__ __forceinline__ void keep(const Mma& mma, int slot, uint32_t, const typename Mma::Sums& sum) const {
    mma.give(sum, [&](int token, int column, int row, int of_tile, float value) {
      ptx::store_shared_float(partial(slot, slice, token, column) + row * 4 + of_tile * 4, value);
    });
  }

  static constexpr int kQuads = kR * kTileN / 4;  // of a token
  __device__ __forceinline__ int quads(int slots) const { return slots * tokens * kQuads; }
  __device__ __forceinline__ Quad quad(int pass, int i, int all) const {
    Quad at{0, i / kQuads, i % kQuads};
    while (i < all && at.token >= tokens) at.token -= tokens, ++at.slot;
    const int row_tile = (pass + at.slot) * kR + at.place / 4;
    at.n = (row_tile0 + row_tile) * kTileN + at.place % 4 * 4;
    at.exists = i < all && row_tile < row_tiles;
    return at;
  }
  __device__ __forceinline__ uint32_t partial_of(const Quad& at, int column = 0) const {
    return partial(at.slot, 0, at.token, column) + at.place * 16;
  }
  __device__ __forceinline__ void add_slices(const Quad& at, float (&value)[4]) const {
#pragma unroll 1
    for (int column = 0; column < columns; ++column) {
      sm90_skinny::add_slices<kWarps>(partial_of(at, column), tokens * columns * (Tile::kPaddedRow * 4), value);
    }
  }
};

}  // namespace qao::gemm::sm90_skinny
