// cuda/layout/int4.h against the picture in its head, written here a second time.
#include <doctest/doctest.h>

#include <set>
#include <vector>

#include "layout/int4.h"

namespace qao::int4 {
namespace {

// Column of byte b of the word that lane 4g + t holds for a k-step.
int picture_column(int t, int step, int b) {
  const int columns[4] = {2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9};
  return 16 * step + columns[b];
}

// Any value 0..15 that distinguishes neighbors.
uint8_t nibble(int row, int column) { return static_cast<uint8_t>((row * 7 + column * 5 + column / 16) % 16); }

std::vector<uint8_t> packed_tile() {
  std::vector<uint8_t> tile(kTileBytes, 0);
  for (int row = 0; row < kTileN; ++row) {
    for (int column = 0; column < kTileK; ++column) {
      tile[tile_byte(row, column)] |= static_cast<uint8_t>(nibble(row, column) << tile_shift(row));
    }
  }
  return tile;
}

}  // namespace

TEST_CASE("every element of a tile has its own nibble") {
  std::set<int> nibbles;
  for (int row = 0; row < kTileN; ++row) {
    for (int column = 0; column < kTileK; ++column) {
      const int byte = tile_byte(row, column), shift = tile_shift(row);
      REQUIRE((byte >= 0 && byte < kTileBytes));
      REQUIRE((shift == 0 || shift == 4));
      nibbles.insert(2 * byte + shift / 4);
    }
  }
  CHECK(nibbles.size() == kTileN * kTileK);
}

TEST_CASE("tile_column is the inverse of tile_byte inside the 64 bytes of a row pair") {
  for (int row = 0; row < kTileN; ++row) {
    for (int column = 0; column < kTileK; ++column) {
      const int byte = tile_byte(row, column);
      CHECK(byte / 64 == row % 8);
      CHECK(tile_column(byte % 64) == column);
    }
  }
}

TEST_CASE("lane 4g + t holds what the picture says") {
  for (int g = 0; g < 8; ++g) {
    for (int t = 0; t < 4; ++t) {
      for (int step = 0; step < 4; ++step) {
        for (int b = 0; b < 4; ++b) {
          const int column = picture_column(t, step, b), byte = (4 * g + t) * 16 + 4 * step + b;
          CHECK(tile_byte(g, column) == byte);
          CHECK(tile_byte(g + 8, column) == byte);
        }
      }
    }
  }
  CHECK(tile_shift(0) == 0);
  CHECK(tile_shift(7) == 0);
  CHECK(tile_shift(8) == 4);
  CHECK(tile_shift(15) == 4);
}

TEST_CASE("masked words are the registers of mma.m16n8k16") {
  const std::vector<uint8_t> tile = packed_tile();
  for (int g = 0; g < 8; ++g) {
    for (int t = 0; t < 4; ++t) {
      for (int step = 0; step < 4; ++step) {
        const uint8_t* bytes = &tile[(4 * g + t) * 16 + 4 * step];
        const uint32_t word = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24;
        for (int reg = 0; reg < 4; ++reg) {
          const uint32_t pair = word >> (4 * reg) & 0x000F000F;
          const int row = g + 8 * (reg % 2), column = 16 * step + 2 * t + 8 * (reg / 2);
          CHECK((pair & 0xFFFF) == nibble(row, column));
          CHECK((pair >> 16) == nibble(row, column + 1));
        }
      }
    }
  }
}

TEST_CASE("masked bytes are rows g and g + 8 without a shift") {
  const std::vector<uint8_t> tile = packed_tile();
  for (int g = 0; g < 8; ++g) {
    for (int i = 0; i < 64; ++i) {
      const uint8_t byte = tile[64 * g + i];
      CHECK((byte & 0x0F) == nibble(g, tile_column(i)));
      CHECK((byte & 0xF0) == 16 * nibble(g + 8, tile_column(i)));
    }
  }
}

TEST_CASE("sizes round up to tiles, and offsets fill the tensor") {
  CHECK(tiles_n(1) == 1);
  CHECK(tiles_n(16) == 1);
  CHECK(tiles_n(17) == 2);
  CHECK(tiles_k(64) == 1);
  CHECK(tiles_k(65) == 2);
  CHECK(weight_bytes(17, 65) == 4 * kTileBytes);

  const int64_t n = 33, k = 130, k_tiles = tiles_k(k);
  std::set<int64_t> nibbles;
  for (int64_t row = 0; row < tiles_n(n) * kTileN; ++row) {
    for (int64_t column = 0; column < k_tiles * kTileK; ++column) {
      const int64_t offset = weight_offset(row, column, k_tiles);
      REQUIRE((offset >= 0 && offset < weight_bytes(n, k)));
      nibbles.insert(2 * offset + tile_shift(static_cast<int>(row % kTileN)) / 4);
    }
  }
  CHECK(static_cast<int64_t>(nibbles.size()) == 2 * weight_bytes(n, k));
  // Dimensions 0 and 1 are N-tiles and K-tiles.
  CHECK(weight_offset(16, 0, k_tiles) == k_tiles * kTileBytes);
  CHECK(weight_offset(0, 64, k_tiles) == kTileBytes);
  // Past 2^31 bytes.
  CHECK(weight_offset(int64_t{1} << 20, 0, 1024) == (int64_t{1} << 16) * 1024 * kTileBytes);
}

TEST_CASE("scales lie as [N/16][groups][parameters][16]") {
  const int64_t groups = 3;
  for (int parameters : {1, 2}) {
    int64_t expected = 0;
    for (int64_t tile = 0; tile < 2; ++tile) {
      for (int64_t group = 0; group < groups; ++group) {
        for (int parameter = 0; parameter < parameters; ++parameter) {
          for (int64_t row = 0; row < kTileN; ++row) {
            CHECK(scale_offset(tile * kTileN + row, group, groups, parameters, parameter) == expected++);
          }
        }
      }
    }
  }
}

}  // namespace qao::int4
