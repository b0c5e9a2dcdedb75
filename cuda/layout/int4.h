// The packed int4 layout, the only one for all M and all kernels, CPU and CUDA.
// Kernels, packers and C++ tests take their index arithmetic from here.
//
// weight   uint8 bytes [N/16][K/64][512]     n-tiles, k-tiles, bytes of one 16 x 64 tile (sizes rounded up)
// scales   float      [N/16][groups][P][16]  P = 1: scales; P = 2: scales, then zero points
//
// Dimensions 0 and 1 are tiles of N and of K (or groups of K), so a tensor-parallel shard is a slice.
//
// A tile has the order of the A operand of mma.m16n8k16, of WGMMA with A in registers, and (64 bytes per row pair) of
// one AVX-512 register or AMX row pair. Lane 4 g + t owns 16 consecutive bytes: rows g and g + 8, and columns 2t,
// 2t + 1, 2t + 8, 2t + 9 of each of the four k-steps of 16:
//
//               lane 4g + t                                   one byte
//    |  k-step 0  |  k-step 1  |  k-step 2  |  k-step 3  |    +-----------+-----------+
//    | b0 b1 b2 b3| b0 b1 b2 b3| b0 b1 b2 b3| b0 b1 b2 b3|    | row g + 8 |   row g   |
//      |  |  |  |                                             +-----------+-----------+
//      |  |  |  +-- k = 16 step + 2t + 9                       bits 7..4    bits 3..0
//      |  |  +----- k = 16 step + 2t + 1
//      |  +-------- k = 16 step + 2t + 8
//      +----------- k = 16 step + 2t
//
// So `word & 0x000F000F` holds two columns of row g (mma register 0), `>> 4` those of row g + 8 (register 1), `>> 8`
// and `>> 12` the columns eight further on (registers 2 and 3). `bytes & 0x0F` and `bytes & 0xF0` are row g and row
// g + 8 as unsigned bytes without a shift.
//
// A nibble q means (q - zero) * scale, with zero = 8 when symmetric. Rows and columns past N and K hold 8, with scale 0
// and zero point 8; x is read as 0 past K.
#pragma once

#include <cstdint>

#include "qao/types.h"

namespace qao::int4 {

constexpr int kTileN = 16;
constexpr int kTileK = 64;
constexpr int kTileBytes = kTileN * kTileK / 2;
constexpr int kSymmetricZero = 8;

QAO_HOST_DEVICE constexpr int64_t tiles_n(int64_t n) { return (n + kTileN - 1) / kTileN; }
QAO_HOST_DEVICE constexpr int64_t tiles_k(int64_t k) { return (k + kTileK - 1) / kTileK; }
QAO_HOST_DEVICE constexpr int64_t weight_bytes(int64_t n, int64_t k) { return tiles_n(n) * tiles_k(k) * kTileBytes; }

// Byte of element (row, column) inside its tile, and the position of its nibble in that byte.
QAO_HOST_DEVICE constexpr int tile_byte(int row, int column) {
  const int lane = (row % 8) * 4 + (column % 8) / 2;
  const int step = column / 16;
  const int byte = (column % 2) * 2 + (column % 16) / 8;
  return lane * 16 + step * 4 + byte;
}
QAO_HOST_DEVICE constexpr int tile_shift(int row) { return row < 8 ? 0 : 4; }

// The inverse of tile_byte(): the column of byte `byte` (0..63) of a row pair's 64 bytes.
QAO_HOST_DEVICE constexpr int tile_column(int byte) {
  const int t = byte / 16, step = byte % 16 / 4, b = byte % 4;
  return 16 * step + 2 * t + 8 * (b % 2) + b / 2;
}

// Byte of element (n, k) in the whole tensor.
QAO_HOST_DEVICE constexpr int64_t weight_offset(int64_t n, int64_t k, int64_t k_tiles) {
  return (n / kTileN * k_tiles + k / kTileK) * kTileBytes +
         tile_byte(static_cast<int>(n % kTileN), static_cast<int>(k % kTileK));
}

// Element of the scales tensor: parameter 0 is the scale, 1 the zero point.
QAO_HOST_DEVICE constexpr int64_t scale_offset(int64_t n, int64_t group, int64_t groups, int parameters,
                                               int parameter) {
  return ((n / kTileN * groups + group) * parameters + parameter) * kTileN + n % kTileN;
}

}  // namespace qao::int4
