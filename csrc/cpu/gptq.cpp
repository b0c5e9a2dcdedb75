// GPTQ rounding on the CPU, sixteen rows at a time as lanes that the compiler may vectorize.
#include "cpu/gptq.h"

#include <algorithm>

#include "cpu/numeric.h"

namespace qao::cpu {
namespace {

using gptq::Arguments;
using gptq::kMaxColumns;
using gptq::Problem;

constexpr int kLanes = 16;
using Lanes = float[kLanes];

// Adding 1.5 * 2^23 rounds a float to an integer. The result only matters within 0..15 or -127..127.
inline float rounded(float value) { return value + 0x1.8p23f - 0x1.8p23f; }

template <Format format>
void nearest(const Lanes& quotient, const Lanes& zero, Lanes& code) {
  constexpr float kLow = format == Format::kInt4 ? 0 : -127, kHigh = format == Format::kInt4 ? 15 : 127;
  for (int lane = 0; lane < kLanes; ++lane) {
    if constexpr (format == Format::kFp8) {
      code[lane] = from_fp8(to_fp8(quotient[lane]));
    } else {
      code[lane] = rounded(std::min(std::max(quotient[lane] + zero[lane], kLow), kHigh));
    }
  }
}

void read(const float* from, int count, float missing, Lanes& to) {
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = from && lane < count ? from[lane] : missing;
}

// Rounds rows [row, row + count), at most sixteen.
template <Format format>
void round_rows(const Problem& p, const Arguments& a, int64_t row, int count) {
  Lanes moved[kMaxColumns];
  for (int64_t j = 0; j < p.columns; ++j) read(a.moved + j * p.rows + row, count, 0, moved[j]);
  for (int64_t i = 0; i < p.columns; ++i) {
    const int64_t at = i * p.rows + row;
    Lanes weight, scale, zero, quotient, code, error;
    read(a.weight + at, count, 0, weight), read(a.scales + at, count, 1, scale);
    read(a.zeros ? a.zeros + at : nullptr, count, 0, zero);
    for (int lane = 0; lane < kLanes; ++lane) quotient[lane] = (weight[lane] + moved[i][lane]) / scale[lane];
    nearest<format>(quotient, zero, code);
    for (int lane = 0; lane < kLanes; ++lane) error[lane] = weight[lane] - (code[lane] - zero[lane]) * scale[lane];
    for (int64_t j = i + 1; j < p.columns; ++j) {
      const float ratio = a.ratios[i * p.columns + j];
      for (int lane = 0; lane < kLanes; ++lane) moved[j][lane] += error[lane] * ratio;
    }
    for (int lane = 0; lane < count; ++lane) {
      a.codes[at + lane] =
          format == Format::kFp8 ? to_fp8(code[lane]) : static_cast<uint8_t>(static_cast<int>(code[lane]));
      a.errors[at + lane] = error[lane], a.rests[at + lane] = error[lane] + moved[i][lane];
    }
  }
}

}  // namespace

void gptq_round_columns(const Problem& p, const Arguments& a, const Threads& threads) {
  const auto rounding = p.codes == Format::kInt4   ? round_rows<Format::kInt4>
                        : p.codes == Format::kInt8 ? round_rows<Format::kInt8>
                                                   : round_rows<Format::kFp8>;
  share(threads, divide_up(p.rows, kLanes), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block * kLanes;
      rounding(p, a, row, static_cast<int>(least(kLanes, p.rows - row)));
    }
  });
}

}  // namespace qao::cpu
