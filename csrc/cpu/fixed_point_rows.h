// Packing of x as fixed point, chunk by chunk, for any instruction set.
// A file that includes this defines the three functions declared here.
#pragma once

#include "cpu/fixed_point.h"

namespace qao::cpu {
namespace {

// values[0 .. count) = x, then zeros up to a whole tile. Returns the bits of the largest magnitude. Inf and NaN become
// 0 and outliers.
int load_chunk(const Job& job, int64_t index, int64_t count, int64_t padded, float* values, uint64_t* outliers);

Counts count_chunk(const float* values, int64_t count, int largest, int reach);

// Packs one tile of values times `inverse`. The integer parts are word 0; the remainder of each word, in units of 2^-15
// of that word, is the next. |word| < 2^15 - 128. The bytes of word w go to out[w], high and low, its sums of each step
// to step_sums[w]. `places`: of the tile's steps in the chunk (Job::segment_places) that starts at out[w], or null.
void pack_tile(const float* values, float inverse, int words, int8_t* const* out, int (*step_sums)[4],
               const uint8_t* places);

// Returns the counts of the row, unless it is known to have a gap.
Counts pack_row(const Job& job, int64_t m, bool gap) {
  Counts row = {};
  alignas(32) float values[kMaxSection];
  for (int w = 0; w <= job.fixed_point.words; ++w) {
    for (int64_t s = 0; s < job.sections; ++s) job.fixed_point.sums[w][m * job.sections + s] = 0;
  }
  uint64_t* outliers = job.fixed_point.outliers + m * job.tiles_k;
  for (int64_t t = 0; t < job.tiles_k; ++t) outliers[t] = 0;
  for (int64_t c = 0; c < job.fixed_point.chunks; ++c) {
    const int64_t first_tile = c * job.fixed_point.chunk_tiles, k0 = first_tile * kTileColumns;
    const int64_t tiles =
        job.tiles_k - first_tile < job.fixed_point.chunk_tiles ? job.tiles_k - first_tile : job.fixed_point.chunk_tiles;
    const int64_t count = tiles * kTileColumns;
    const int bits = load_chunk(job, m * job.x_stride + k0, job.k - k0, count, values, outliers + first_tile);
    const auto count_below = [&](int largest, int reach) { return count_chunk(values, count, largest, reach); };
    const Form form =
        choose_form(job, values, count, bits, count_below, gap, outliers + first_tile, &row, job.remarks + m);
    const float inverse = bits_to_float(static_cast<uint32_t>(268 - set_form(job, m, c, form)) << 23);
    for (int64_t t = 0; t < tiles; ++t) {
      int8_t* out[kMaxWords] = {};
      int step_sums[kMaxWords][4] = {};
      for (int w = 0; w < form.words; ++w) {
        const int64_t tile = first_tile + (job.fixed_point.segment_places != nullptr ? 0 : t);
        out[w] = job.fixed_point.bytes[w] + (m * job.tiles_k + tile) * 2 * kTileColumns;
      }
      const uint8_t* places =
          job.fixed_point.segment_places != nullptr ? job.fixed_point.segment_places + 4 * t : nullptr;
      pack_tile(values + t * kTileColumns, inverse, form.words, out, step_sums, places);
      for (int step = 0; places != nullptr && step < 4; ++step) {
        float sum = 0;
        for (int w = form.words - 1; w >= 0; --w) {
          sum = sum * (1.0f / (1 << kWordShift)) + static_cast<float>(step_sums[w][step]);
        }
        const int64_t segment = (m * job.fixed_point.chunks + c) * 16 + 4 * t + step;
        job.fixed_point.segment_sums[segment] = sum * job.fixed_point.scales[m * job.fixed_point.chunks + c];
      }
      for (int w = 0; w < form.words; ++w) {
        for (int step = 0; step < 4; ++step) {
          const int64_t section = (k0 + t * kTileColumns + step * kStep) / job.section;
          if (section < job.sections) {
            job.fixed_point.sums[w][m * job.sections + section] += static_cast<float>(step_sums[w][step]);  // exact
          }
        }
      }
    }
  }
  return row;
}

void pack_rows(const Job& job, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    if (has_gap(pack_row(job, m, false))) pack_row(job, m, true);
    remark_outliers(job, m, job.fixed_point.outliers + m * job.tiles_k);
  }
}

}  // namespace
}  // namespace qao::cpu
