// Conversions between plain [N, K] nibbles and the packed layout, one 16 x 64 tile at a time.
#include "cpu/int4_pack.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "cpu/numeric.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;
using int4::Unpacked;
using int4::Weight;

constexpr int kPairs = kTileN / 2;         // rows g and g + 8 share 64 bytes
constexpr int64_t kPieceValues = 1 << 17;  // values that a thread takes at a time
constexpr int kSegment = 32;               // columns that never straddle a group

constexpr std::array<uint8_t, kTileK> kColumns = [] {
  std::array<uint8_t, kTileK> columns{};
  for (int byte = 0; byte < kTileK; ++byte) columns[byte] = static_cast<uint8_t>(int4::tile_column(byte));
  return columns;
}();

using Tile = uint8_t[kTileN][kTileK];

void pack_tile(const Tile& q, uint8_t* out) {
  for (int g = 0; g < kPairs; ++g) {
    for (int byte = 0; byte < kTileK; ++byte) {
      out[g * kTileK + byte] = static_cast<uint8_t>(q[g][kColumns[byte]] | q[g + kPairs][kColumns[byte]] << 4);
    }
  }
}

void unpack_tile(const uint8_t* in, Tile& q) {
  for (int g = 0; g < kPairs; ++g) {
    for (int byte = 0; byte < kTileK; ++byte) {
      q[g][kColumns[byte]] = in[g * kTileK + byte] & 15;
      q[g + kPairs][kColumns[byte]] = in[g * kTileK + byte] >> 4;
    }
  }
}

template <typename Task>
void for_each_tile_row(const Weight& p, const Threads& threads, const Task& task) {
  share(threads, int4::tiles_n(p.n), std::max<int64_t>(1, kPieceValues / (kTileN * p.k)),
        [&](int64_t begin, int64_t end) {
          for (int64_t t = begin; t < end; ++t) task(t);
        });
}

int64_t rows_in_tile(const Weight& p, int64_t tile) { return std::min<int64_t>(kTileN, p.n - tile * kTileN); }
int64_t columns_in_tile(const Weight& p, int64_t tile) { return std::min<int64_t>(kTileK, p.k - tile * kTileK); }
int parameters(const Weight& p) { return p.has_zeros ? 2 : 1; }

// Index of the first value above 15, or -1.
int64_t first_invalid(const Weight& p, const uint8_t* q, const Threads& threads) {
  std::atomic<int64_t> first_row{p.n};
  share(threads, p.n, std::max<int64_t>(1, kPieceValues / p.k), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const uint8_t* row = q + n * p.k;
      uint8_t bits = 0;
      for (int64_t k = 0; k < p.k; ++k) bits |= row[k];
      if (bits <= 15) continue;
      for (int64_t known = first_row; n < known && !first_row.compare_exchange_weak(known, n);) {
      }
      return;
    }
  });
  if (first_row == p.n) return -1;
  const uint8_t* row = q + first_row * p.k;
  return std::find_if(row, row + p.k, [](uint8_t value) { return value > 15; }) - q;
}

// Scale and zero point of row n, group g.
std::array<float, 2> load_group(const Weight& p, const void* scales, int64_t n, int64_t g) {
  const int64_t offset = int4::scale_offset(n, g, p.groups(), parameters(p), 0);
  return {load(scales, offset, p.scale_dtype),
          p.has_zeros ? load(scales, offset + kTileN, p.scale_dtype) : float{int4::kSymmetricZero}};
}

template <typename Value>
void dequantize(const Weight& p, const uint8_t* weight, const void* scales, DType out_dtype, Value* out,
                const Threads& threads) {
  const int64_t k_tiles = int4::tiles_k(p.k);
  for_each_tile_row(p, threads, [&](int64_t tile_n) {
    for (int64_t tile_k = 0; tile_k < k_tiles; ++tile_k) {
      Tile q;
      unpack_tile(weight + (tile_n * k_tiles + tile_k) * kTileBytes, q);
      const int64_t columns = columns_in_tile(p, tile_k);
      for (int64_t row = 0; row < rows_in_tile(p, tile_n); ++row) {
        const int64_t n = tile_n * kTileN + row;
        for (int64_t begin = 0; begin < columns; begin += kSegment) {
          const int64_t k = tile_k * kTileK + begin;
          const auto [scale, zero] = load_group(p, scales, n, k / p.group_size);
          Value values[16];
          for (int i = 0; i < 16; ++i) store(values, i, out_dtype, (static_cast<float>(i) - zero) * scale);
          const int64_t count = std::min<int64_t>(kSegment, columns - begin);
          for (int64_t i = 0; i < count; ++i) out[n * p.k + k + i] = values[q[row][begin + i]];
        }
      }
    }
  });
}

}  // namespace

Status int4_pack(const Weight& p, const Unpacked& from, uint8_t* weight, void* scales, const Threads& threads) {
  if (const int64_t i = first_invalid(p, from.q, threads); i >= 0) {
    return Status::error("q holds " + std::to_string(from.q[i]) + " at row " + std::to_string(i / p.k) + ", column " +
                             std::to_string(i % p.k) + "; values must be 0..15",
                         "Quantize to four bits first");
  }
  const int64_t k_tiles = int4::tiles_k(p.k), groups = p.groups();
  for_each_tile_row(p, threads, [&](int64_t tile_n) {
    const int64_t rows = rows_in_tile(p, tile_n), first = tile_n * kTileN;
    for (int64_t tile_k = 0; tile_k < k_tiles; ++tile_k) {
      Tile q;
      std::memset(q, int4::kSymmetricZero, sizeof q);
      for (int64_t row = 0; row < rows; ++row) {
        const uint8_t* source = from.q + (first + row) * p.k + tile_k * kTileK;
        std::memcpy(q[row], source, static_cast<size_t>(columns_in_tile(p, tile_k)));
      }
      pack_tile(q, weight + (tile_n * k_tiles + tile_k) * kTileBytes);
    }
    for (int64_t n = first; n < first + kTileN; ++n) {
      const bool exists = n < p.n;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t offset = int4::scale_offset(n, g, groups, parameters(p), 0);
        store(scales, offset, p.scale_dtype, exists ? load(from.scales, n * groups + g, p.scale_dtype) : 0.0f);
        if (!p.has_zeros) continue;
        const float zero = exists ? load(from.zeros, n * groups + g, p.scale_dtype) : float{int4::kSymmetricZero};
        store(scales, offset + kTileN, p.scale_dtype, zero);
      }
    }
  });
  return {};
}

Status int4_unpack(const Weight& p, const uint8_t* weight, const void* scales, const Unpacked& to,
                   const Threads& threads) {
  const int64_t k_tiles = int4::tiles_k(p.k), groups = p.groups();
  for_each_tile_row(p, threads, [&](int64_t tile_n) {
    const int64_t rows = rows_in_tile(p, tile_n), first = tile_n * kTileN;
    for (int64_t tile_k = 0; tile_k < k_tiles; ++tile_k) {
      Tile q;
      unpack_tile(weight + (tile_n * k_tiles + tile_k) * kTileBytes, q);
      for (int64_t row = 0; row < rows; ++row) {
        uint8_t* target = to.q + (first + row) * p.k + tile_k * kTileK;
        std::memcpy(target, q[row], static_cast<size_t>(columns_in_tile(p, tile_k)));
      }
    }
    for (int64_t n = first; n < first + rows; ++n) {
      for (int64_t g = 0; g < groups; ++g) {
        const auto [scale, zero] = load_group(p, scales, n, g);
        store(to.scales, n * groups + g, p.scale_dtype, scale);
        store(to.zeros, n * groups + g, p.scale_dtype, zero);
      }
    }
  });
  return {};
}

Status int4_dequantize(const Weight& p, const uint8_t* weight, const void* scales, DType out_dtype, void* out,
                       const Threads& threads) {
  if (out_dtype == DType::kFloat32) {
    dequantize(p, weight, scales, out_dtype, static_cast<float*>(out), threads);
  } else {
    dequantize(p, weight, scales, out_dtype, static_cast<uint16_t*>(out), threads);
  }
  return {};
}

}  // namespace qao::cpu
