// Packing of int8 x as padded rows, columns in the order of W's bytes, with section sums.
// For int4 W, both padding and sums include x's zero point.
#include "cpu/arm/neon/tile_order.h"
#include "cpu/gemm/kernels.h"

namespace qao::cpu {

void neon::pack_int8_rows(const Job& job, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    const int8_t* x = static_cast<const int8_t*>(job.x) + m * job.x_stride;
    float* sums = job.x_sums + m * job.sections;
    const int zero = job.weight_format == Format::kInt4 && job.x_zeros != nullptr ? job.x_zeros[m] : 0;
    for (int64_t s = 0; s < job.sections; ++s) sums[s] = 0;
    for (int64_t k = 0; k < job.k; k += kTileColumns) {
      const int64_t count = job.k - k < kTileColumns ? job.k - k : kTileColumns;
      int8_t padded[kTileColumns];
      __builtin_memset(padded, zero, sizeof(padded));
      __builtin_memcpy(padded, x + k, static_cast<size_t>(count));
      int8x16_t parts[4];
      for (int i = 0; i < 4; ++i) {
        parts[i] = vld1q_s8(padded + 16 * i);
        const int64_t section = (k + 16 * i) / job.section;
        if (section < job.sections) sums[section] += static_cast<float>(vaddlvq_s8(parts[i]) - 16 * zero);  // exact
      }
      int8_t* out = job.int8.values + m * job.tiles_k * kTileColumns + k;
      if (job.weight_format == Format::kInt4) {
        store_in_tile_order(parts, out);
      } else {
        for (int i = 0; i < 4; ++i) vst1q_s8(out + 16 * i, parts[i]);
      }
    }
  }
}

}  // namespace qao::cpu
