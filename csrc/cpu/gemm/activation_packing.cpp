// Packed forms of x, and the description of a problem as a kernel's job.
#include "cpu/gemm/activation_packing.h"

#include <algorithm>

#include "cpu/gemm/kernel_table.h"
#include "cpu/gemm/kernels.h"
#include "cpu/gguf.h"
#include "cpu/numeric.h"
#include "cpu/parallel.h"
#include "layout/fp4.h"

namespace qao::cpu {
namespace {

using gemm::Arguments;
using gemm::Problem;

int64_t rows_of(const Job& job) { return job.m; }

void lay_out_fixed_point(Pieces& pieces, Job* job) {
  job->fixed_point.words = job->x_dtype == DType::kFloat32 ? 2 : 1;
  job->fixed_point.chunk_tiles = divide_up(job->section, kTileColumns);
  job->fixed_point.chunks = divide_up(job->tiles_k, job->fixed_point.chunk_tiles);
  for (int w = 0; w <= job->fixed_point.words; ++w) {
    job->fixed_point.bytes[w] = pieces.take<int8_t>(job->m * job->tiles_k * 2 * kTileColumns);
    job->fixed_point.sums[w] = pieces.take<float>(job->m * job->sections);
  }
  job->fixed_point.scales = pieces.take<float>(job->m * job->fixed_point.chunks);
  job->fixed_point.chunk_words = pieces.take<uint8_t>(job->m * job->fixed_point.chunks);
  job->fixed_point.outliers = pieces.take<uint64_t>(job->m * job->tiles_k);
}

void lay_out_float32_rows(Pieces& pieces, Job* job) {
  job->float32 = pieces.take<float>(job->m * job->tiles_k * kTileColumns);
}

void lay_out_int8_rows(Pieces& pieces, Job* job) {
  job->int8.values = pieces.take<int8_t>(job->m * job->tiles_k * kTileColumns);
  job->x_sums = pieces.take<float>(job->m * job->sections);
}

#if defined(__x86_64__)
// Only Inf and NaN: scalar code suffices.
void add_gguf_outliers(const Job& job, const Outliers& outliers, void* y, DType y_dtype, int64_t begin, int64_t end) {
  for (int64_t n = begin * kTileRows; n < least(end * kTileRows, job.n); ++n) {
    for (int64_t m = 0; m < job.m; ++m) {
      float sum = static_cast<const float*>(job.y)[m * job.n + n];
      for (int64_t i = outliers.first[m]; i < outliers.first[m + 1]; ++i) {
        float values[kMaxSection];
        const int64_t k = outliers.columns[i], first = k / kMaxSection * kMaxSection;
        gguf::dequantize_row(job.gguf_type, job.weight + n * job.row_bytes, first, least(kMaxSection, job.k - first),
                             values);
        sum += outliers.values[i] * values[k - first];
      }
      store(y, m * job.n + n, y_dtype, sum);
    }
  }
}

void lay_out_segments(Pieces& pieces, Job* job) {
  lay_out_fixed_point(pieces, job);
  job->fixed_point.segment_places = gguf::segment_places(job->gguf_type);
  job->fixed_point.segment_sums = pieces.take<float>(job->m * job->fixed_point.chunks * 16);
}

int64_t tiles_of(const Job& job) { return job.tiles_m; }
int64_t columns_of(const Job& job) { return divide_up(job.k, kPackK); }

void lay_out_bf16_tiles(Pieces& pieces, Job* job) {
  job->bf16_tiles.parts = job->x_dtype == DType::kFloat32 ? 3 : job->x_dtype == DType::kFloat16 ? 2 : 1;
  const int64_t padded_rows = job->tiles_m * kTileRows;
  const bool sums = job->weight_format == Format::kInt4 && job->bf16_tiles.parts > 1;
  // y in bfloat16 permits operands rounded to bfloat16 with scales applied; that pays off where W is expanded rarely.
  const bool rounded = job->y_dtype == DType::kBFloat16 && job->tiles_m > kFewTilesM;
  const bool blocks = job->weight_format != Format::kInt4 && job->weight_scaling == Scaling::kBlock && !rounded;
  job->bf16_tiles.values =
      pieces.take<uint16_t>(divide_up(job->k, kBlockK) * kBlockK * padded_rows * job->bf16_tiles.parts);
  job->x_sums = pieces.take<float>(sums ? job->sections * padded_rows : 0);
  job->bf16_tiles.block_scales = blocks ? pieces.take<float>(job->sections * padded_rows) : nullptr;
}

// Panels (x86/panel_gemm.h) of kPanelColumns columns, with kColumns columns per word.
template <int64_t kPanelColumns, int64_t kColumns>
void lay_out_panels(Pieces& pieces, Job* job) {
  const int64_t words = divide_up(job->k, kPanelColumns) * (kPanelColumns / kColumns);
  job->panels = pieces.take<uint32_t>(words * job->m);
  job->x_sums = pieces.take<float>(job->m * job->sections);
}

void lay_out_int8_tiles(Pieces& pieces, Job* job) {
  job->int8.steps = job->weight_format == Format::kInt4 && job->group_size == 32 ? 2 * job->tiles_k : job->tiles_k;
  const int64_t padded_rows = job->tiles_m * kTileRows;
  job->int8.values = pieces.take<int8_t>(padded_rows * job->int8.steps * kTileColumns);
  job->x_sums = pieces.take<float>(padded_rows * job->sections);
}

#elif defined(__aarch64__)
int64_t pairs_of(const Job& job) { return divide_up(job.m, 2); }

void lay_out_bf16_pairs(Pieces& pieces, Job* job) {
  job->bf16_pairs = pieces.take<uint16_t>(pairs_of(*job) * 2 * job->tiles_k * kTileColumns);
}
#endif

// The float dtype that kernels see. fp8 x is widened, exactly in any dtype. With an int4 W, 8-bit x takes the dtype of
// y, since the kernel's rounding depends on it.
DType kernel_dtype(const Problem& p) {
  if (p.x == Format::kFloat) return p.x_dtype;
  return p.weight == Format::kInt4 ? p.y_dtype : DType::kBFloat16;
}

constexpr int64_t kFloatBytes = int64_t{16} << 20;
constexpr int64_t kPanelBytes = int64_t{3} << 20;        // every block of N-tiles reads all of them from a shared L3
constexpr int64_t kFloat32PanelBytes = 2 * kPanelBytes;  // likewise, with more arithmetic in between
constexpr int64_t kFloat32Bytes = int64_t{1} << 20;      // read again for every 4 rows of W, so they must fit L2
constexpr int64_t kInt8Bytes = int64_t{5} << 18;         // they must stay in L2

}  // namespace

#if defined(__x86_64__)
const Packing kFixedPoint = {512,
                             kFloatBytes,
                             kMaxSection,
                             lay_out_fixed_point,
                             rows_of,
                             avx2::pack_fixed_point,
                             avx2::widen_fp8,
                             avx2::add_outliers,
                             &kWideRowsAvx2};
const Packing kFixedPointSegments = {
    512, kPanelBytes, kMaxSection, lay_out_segments, rows_of, avx2::pack_fixed_point, nullptr, add_gguf_outliers};
const Packing kBf16Tiles = {512,        kFloatBytes,          kMaxSectionBf16, lay_out_bf16_tiles,
                            columns_of, amx::pack_bf16_tiles, amx::widen_fp8,  nullptr};
const Packing kBf16TilesOfInt8 = {512,        kFloatBytes,          kMaxSectionBf16, lay_out_bf16_tiles,
                                  columns_of, amx::pack_bf16_tiles, amx::widen_int8, nullptr};
const Packing kBf16TilesInChunks = {512,        kFloatBytes,          kMaxSection, lay_out_bf16_tiles,
                                    columns_of, amx::pack_bf16_tiles, nullptr,     nullptr};
const Packing kFloat32RowsAvx2 = {512,     kFloat32Bytes,      kMaxSectionBf16, lay_out_float32_rows,
                                  rows_of, avx2::pack_float32, avx2::widen_fp8, nullptr};
const Packing kFloat32RowsAvx512 = {512,     kFloat32Bytes,        kMaxSectionBf16, lay_out_float32_rows,
                                    rows_of, avx512::pack_float32, avx2::widen_fp8, nullptr};

// A panel holds whole sections.
constexpr Packing panels(int64_t max_section, decltype(Packing::lay_out) lay_out, decltype(Packing::pack) pack,
                         decltype(Packing::widen) widen, bool rounds_to_fp8 = false, int64_t max_bytes = kPanelBytes) {
  return {512, max_bytes, max_section, lay_out, rows_of, pack, widen, nullptr, nullptr, rounds_to_fp8};
}
const Packing kFloat32PanelsAvx2 =
    panels(256, lay_out_panels<256, 1>, avx2::pack_float32_panels, avx2::widen_fp8, false, kFloat32PanelBytes);
const Packing kFloat32WidePanelsAvx2 =
    panels(32, lay_out_panels<256, 1>, avx2::pack_float32_panels, avx2::widen_fp8, false, kFloat32PanelBytes);
const Packing kFloat32PanelsAvx512 =
    panels(64, lay_out_panels<64, 1>, avx512::pack_float32_panels, nullptr, true, kFloat32PanelBytes);
const Packing kBf16Panels = panels(128, lay_out_panels<128, 2>, avx512_bf16::pack_bf16_panels, nullptr, true);
const Packing kInt16Panels = panels(kMaxIntegerK, lay_out_panels<256, 2>, avx2::pack_int16_panels, nullptr);
const Packing kInt8PanelsAvx2 = panels(kMaxIntegerK, lay_out_panels<256, 4>, avx2::pack_int8_panels, nullptr);
const Packing kInt8PanelsAvx512 = panels(kMaxIntegerK, lay_out_panels<256, 4>, avx512::pack_int8_panels, nullptr);
const Packing kInt8PanelsInSectionsAvx2 = panels(256, lay_out_panels<256, 4>, avx2::pack_int8_panels, nullptr);
const Packing kInt8PanelsInSectionsAvx512 = panels(256, lay_out_panels<256, 4>, avx512::pack_int8_panels, nullptr);

const Packing kInt8Rows = {256,     kInt8Bytes,           kMaxIntegerK, lay_out_int8_rows,
                           rows_of, avx2::pack_int8_rows, nullptr,      nullptr};
const Packing kInt8RowsInSections = {256,     kInt8Bytes,           kMaxSection, lay_out_int8_rows,
                                     rows_of, avx2::pack_int8_rows, nullptr,     nullptr};
const Packing kInt8Tiles = {512,      kInt8Bytes,           kMaxIntegerK, lay_out_int8_tiles,
                            tiles_of, amx::pack_int8_tiles, nullptr,      nullptr};
#elif defined(__aarch64__)
const Packing kFixedPoint = {512,
                             kFloatBytes,
                             kMaxSection,
                             lay_out_fixed_point,
                             rows_of,
                             neon::pack_fixed_point,
                             neon::widen_fp8,
                             neon::add_outliers};
const Packing kBf16Pairs = {
    512,    kFloat32Bytes, kMaxSectionBf16, lay_out_bf16_pairs, pairs_of, neon_bf16::pack_bf16_pairs, neon::widen_fp8,
    nullptr};
const Packing kFloat32Rows = {512,     kFloat32Bytes,      kMaxSectionBf16, lay_out_float32_rows,
                              rows_of, neon::pack_float32, neon::widen_fp8, nullptr};
const Packing kInt8Rows = {256,     kInt8Bytes,           kMaxIntegerK, lay_out_int8_rows,
                           rows_of, neon::pack_int8_rows, nullptr,      nullptr};
const Packing kInt8RowsInSections = {256,     kInt8Bytes,           kMaxSection, lay_out_int8_rows,
                                     rows_of, neon::pack_int8_rows, nullptr,     nullptr};
#endif

bool Packing::packs_rows() const { return units == rows_of; }

Job describe(const Problem& p, const Arguments& a, const Packing& packing) {
  static constexpr float kOne = 1;
  Job job;
  job.n = p.n, job.k = p.k;
  job.x = a.x, job.x_stride = a.x_stride;
  job.x_scales = p.x == Format::kFloat ? &kOne : a.x_scales;
  if (p.x != Format::kFloat) {
    job.x_scale_stride = p.x_scaling == Scaling::kTensor ? 0 : p.x_scaling == Scaling::kRow ? 1 : p.k_blocks();
    job.x_block_stride = p.x_scaling == Scaling::kBlock ? 1 : 0;
  }
  job.x_zeros = p.x_zeros ? a.x_zeros : nullptr;
  job.weight = static_cast<const uint8_t*>(a.weight), job.scales = a.scales;
  job.weight_sums = a.weight_sums;
  job.bias = p.has_bias ? a.bias : nullptr;
  job.y = a.y;
  job.weight_format = p.weight, job.weight_scaling = p.weight_scaling;
  job.x_format = p.x, job.x_dtype = kernel_dtype(p), job.y_dtype = p.y_dtype;
  job.scale_dtype = p.scale_dtype, job.bias_dtype = p.bias_dtype;
  job.parameters = p.has_zeros ? 2 : 1;
  job.tiles_n = divide_up(p.n, kTileRows), job.tiles_k = divide_up(p.k, kTileColumns);
  if (p.weight == Format::kGguf) {
    const gguf::BlockSize block = gguf::block_size(p.gguf_type);
    job.gguf_type = p.gguf_type, job.row_bytes = p.k / block.columns * block.bytes;
    job.tiles_k = divide_up(p.k, kMaxSection) * (kMaxSection / kTileColumns);  // whole chunks
  }
  const bool int4 = p.weight == Format::kInt4;
  job.group_size = is_packed(p.weight) ? p.group_size : p.k;
  job.groups = divide_up(p.k, job.group_size);
  if (p.weight == Format::kFp4) {  // groups of 16 are halves of a section
    job.scale_rows = fp4::scale_rows(p.k, p.group_size);
    job.section = fp4::kMxGroup, job.sections = divide_up(p.k, job.section), job.sections_per_group = 1;
    return job;
  }
  // A single group per row may have any length, so its sections need not divide it.
  const bool grouped = int4 && (p.group_size == 32 || p.group_size == 64 || p.group_size == 128 || p.group_size == 256);
  job.section = grouped ? std::min(p.group_size, packing.max_section) : packing.max_section;
  if (p.weight == Format::kGguf && packing.max_section < kMaxSection) job.section = gguf::scale_columns(p.gguf_type);
  job.sections = divide_up(p.k, job.section);
  job.sections_per_group = grouped ? p.group_size / job.section : job.sections;
  return job;
}

}  // namespace qao::cpu
