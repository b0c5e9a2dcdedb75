// Embedding lookup in a quantized weight.
// Scalar code suffices: a row takes a few hundred nanoseconds, bound by memory.
#include "cpu/embedding.h"

#include <array>

#include "cpu/numeric.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using embedding::Arguments;
using embedding::Problem;
using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

constexpr int kSegment = 32;  // columns that never straddle a group

// Byte of a tile's column among the 64 of its row pair.
constexpr std::array<uint8_t, kTileK> kBytes = [] {
  std::array<uint8_t, kTileK> bytes{};
  for (int column = 0; column < kTileK; ++column) bytes[column] = static_cast<uint8_t>(int4::tile_byte(0, column));
  return bytes;
}();

int64_t load_id(const Problem& p, const void* ids, int64_t i) {
  return p.wide_ids ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
}

template <DType dtype, typename Value>
Value as(float value) {
  if constexpr (dtype == DType::kFloat32) return value;
  if constexpr (dtype == DType::kBFloat16) return to_bf16(value);
  if constexpr (dtype == DType::kFloat16) return to_fp16(value);
}

template <DType dtype, typename Value>
void int4_row(const Problem& p, const Arguments& a, int64_t id, Value* out) {
  const int64_t k_tiles = int4::tiles_k(p.k), groups = p.groups();
  const int row = static_cast<int>(id % kTileN), shift = int4::tile_shift(row);
  const uint8_t* tiles = a.weight + id / kTileN * k_tiles * kTileBytes + row % 8 * kTileK;
  Value values[16];  // values of the 16 nibbles in the segment's group
  int64_t group = -1;
  for (int64_t k = 0; k < p.k; k += kSegment) {
    if (k / p.group_size != group) {
      group = k / p.group_size;
      const int64_t at = int4::scale_offset(id, group, groups, p.has_zeros ? 2 : 1, 0);
      const float scale = load(a.scales, at, p.scale_dtype);
      const float zero = p.has_zeros ? load(a.scales, at + kTileN, p.scale_dtype) : float{int4::kSymmetricZero};
      for (int i = 0; i < 16; ++i) values[i] = as<dtype, Value>((static_cast<float>(i) - zero) * scale);
    }
    const uint8_t* bytes = tiles + k / kTileK * kTileBytes;
    const uint8_t* places = kBytes.data() + k % kTileK;
    const int64_t count = least(kSegment, p.k - k);
    for (int64_t i = 0; i < count; ++i) out[k + i] = values[bytes[places[i]] >> shift & 15];
  }
}

template <DType dtype, typename Value>
void int8_row(const Problem& p, const Arguments& a, int64_t id, Value* out) {
  const int8_t* q = reinterpret_cast<const int8_t*>(a.weight) + id * p.k;
  const float scale = static_cast<const float*>(a.scales)[p.one_scale ? 0 : id];
  for (int64_t k = 0; k < p.k; ++k) out[k] = as<dtype, Value>(static_cast<float>(q[k]) * scale);
}

template <DType dtype, typename Value>
void rows(const Problem& p, const Arguments& a, const Threads& threads) {
  split(threads, p.m, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Value* out = static_cast<Value*>(a.out) + i * p.k;
      const int64_t id = load_id(p, a.ids, i);
      p.weight == Format::kInt4 ? int4_row<dtype>(p, a, id, out) : int8_row<dtype>(p, a, id, out);
    }
  });
}

}  // namespace

Status embedding(const Problem& p, const Arguments& a, const Threads& threads) {
  for (int64_t i = 0; i < p.m; ++i) {
    if (const int64_t id = load_id(p, a.ids, i); id < 0 || id >= p.n) {
      return Status::error("ids must be in 0.." + std::to_string(p.n - 1) + " (num_embeddings " + std::to_string(p.n) +
                               "), but element " + std::to_string(i) + " is " + std::to_string(id),
                           "Check the tokenizer against the model's vocabulary");
    }
  }
  switch (p.out_dtype) {
    case DType::kFloat32:
      rows<DType::kFloat32, float>(p, a, threads);
      break;
    case DType::kFloat16:
      rows<DType::kFloat16, uint16_t>(p, a, threads);
      break;
    case DType::kBFloat16:
      rows<DType::kBFloat16, uint16_t>(p, a, threads);
      break;
  }
  return {};
}

}  // namespace qao::cpu
