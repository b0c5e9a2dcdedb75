// One group of a weight, for every instruction set: `Lanes` is sixteen float32 values and what to do with them. The
// order of every sum is that of sixteen lanes, so all instruction sets give the same bits; none may fuse a product and
// a sum (-ffp-contract=off, CMakeLists.txt). `static`: see numeric.h.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/numeric.h"
#include "cpu/quantize_kernels.h"

namespace qao::cpu {

constexpr int kLanes = 16;
constexpr float kRounder = 0x1.8p23f;  // added and taken off again, it rounds to nearest even; |values| below 2^22

static inline float round_even(float value) { return (value + kRounder) - kRounder; }
static inline float rounded_to(DType dtype, float value) {
  if (dtype == DType::kFloat32) return value;
  return dtype == DType::kBFloat16 ? from_bf16(to_bf16(value)) : from_fp16(to_fp16(value));
}

template <typename Lanes>
static inline Lanes round_even(Lanes v) {
  const Lanes rounder = Lanes::all(kRounder);
  return sub(add(v, rounder), rounder);
}

// As many ones as there are lanes with values, then zeros.
static inline const float* first_lanes(int64_t count) {
  static const float lanes[2 * kLanes] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  return count < kLanes ? lanes + kLanes - count : lanes;
}

// Steps by which values may miss a grid, for rounding. 1/16: that of bfloat16
// scales stays below, and 32 values would be so near by chance once in 1e27 groups.
constexpr float kGridTolerance = 0x1p-4f;
constexpr float kWholeTolerance = 0x1p-12f;  // steps by which a zero point that is a whole number may miss it
constexpr float kLargestZero = 64;           // magnitude of a zero point that is no whole number

// The range of the values and 0.
struct Range {
  float low, high;
};

// The scale that maps a group's whole range onto the codes.
static inline float full_scale(const GroupRules& rules, Range range) {
  const Codes& c = rules.codes;
  if (!rules.symmetric) return (range.high - range.low) / (c.highest - c.lowest);
  const float below = c.middle - c.lowest, above = c.highest - c.middle;
  if (below == above) return (-range.low > range.high ? -range.low : range.high) / above;
  // One code more below the middle: the sign of the scale gives it to the larger side.
  return (-range.low >= range.high ? range.low : range.high) / -below;
}

static inline float zero_of(const GroupRules& rules, Range range, float factor, float scale) {
  const Codes& c = rules.codes;
  if (rules.symmetric) return c.middle;
  const float zero = round_even(range.low * -factor / scale) + c.lowest;
  return zero < c.lowest ? c.lowest : zero > c.highest ? c.highest : zero;
}

// The steps from the lowest to the highest value, if every value is on one but for rounding; scales of 0 are none.
// Where the zero point is a whole number, the search finds the grid.
template <typename Lanes>
static bool find_grid(const GroupRules& rules, const float* values, int64_t count, QuantizedGroup* group) {
  const Codes& codes = rules.codes;
  if (count < rules.size || count % kLanes != 0) return false;  // zeros follow
  Lanes low = Lanes::load(values), high = low;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes v = Lanes::load(values + i);
    low = least(low, v), high = largest(high, v);
  }
  const float lowest_value = lowest_of(low), highest_value = -lowest_of(sub(Lanes::all(0), high));
  const float scale = rounded_to(rules.scale_dtype, (highest_value - lowest_value) / (codes.highest - codes.lowest));
  if (!(scale > rules.smallest)) return false;
  const float zero = rounded_to(rules.scale_dtype, -lowest_value / scale);
  if (!(std::fabs(zero) < kLargestZero) || std::fabs(zero - round_even(zero)) < kWholeTolerance) return false;
  const Lanes scales = Lanes::all(scale), zeros = Lanes::all(zero), lowest = Lanes::all(codes.lowest),
              highest = Lanes::all(codes.highest);
  Lanes distance = Lanes::all(0);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes steps = add(div(Lanes::load(values + i), scales), zeros);
    const Lanes off = sub(steps, least(largest(round_even(steps), lowest), highest));
    distance = largest(distance, largest(off, sub(Lanes::all(0), off)));
  }
  if (!(-lowest_of(sub(Lanes::all(0), distance)) < kGridTolerance)) return false;
  group->scale = scale, group->zero = zero;
  return true;
}

// Least squares by turns: the scale and zero point that fit the codes best, each column's error weighed, then the codes
// nearest under these, as long as that takes the error down and `rules.rounds` times at most. The zeros behind the
// values weigh nothing.
template <typename Lanes>
static void refit(const GroupRules& rules, const float* values, const float* importance, int64_t count,
                  QuantizedGroup* group) {
  const Lanes lowest = Lanes::all(rules.codes.lowest), highest = Lanes::all(rules.codes.highest);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float scale = group->scale, zero = group->zero, least_loss = kInfinity;
  for (int64_t round = 0;; ++round) {
    const Lanes scales = Lanes::all(scale), zeros = Lanes::all(zero);
    // Weighed sums of: 1, steps from the zero point, their squares; errors, their products with steps, their squares.
    Lanes one = Lanes::all(0), step = one, square = one, error = one, product = one, loss = one;
    for (int64_t i = 0; i < count; i += kLanes) {
      const Lanes v = Lanes::load(values + i), weight = Lanes::load(importance + i);
      const Lanes code = least(largest(round_even(add(div(v, scales), zeros)), lowest), highest);
      const Lanes steps = sub(code, zeros), off = sub(v, mul(steps, scales));
      const Lanes weighed_steps = mul(weight, steps), weighed = mul(weight, off);
      one = add(one, weight), step = add(step, weighed_steps), square = add(square, mul(weighed_steps, steps));
      error = add(error, weighed), product = add(product, mul(weighed, steps)), loss = add(loss, mul(weighed, off));
    }
    const float sum = sum_of(loss);
    if (!(sum < least_loss)) return;
    group->scale = scale, group->zero = zero, least_loss = sum;
    if (round == rules.rounds) return;
    const float ones = sum_of(one), steps = sum_of(step), errors = sum_of(error);
    const float slope = (ones * sum_of(product) - steps * errors) / (ones * sum_of(square) - steps * steps);
    const float before = scale;
    scale = rounded_to(rules.scale_dtype, before + slope);
    if (!(scale > rules.smallest && scale < kInfinity)) return;
    // What rounding the scale leaves over is the zero point's as well.
    zero = rounded_to(rules.scale_dtype, zero - (errors + (before - scale) * steps) / (scale * ones));
    if (!(std::fabs(zero) < kLargestZero)) return;
  }
}

template <typename Lanes>
static QuantizedGroup quantize_group(const GroupRules& rules, const float* values, const float* importance,
                                     int64_t count, uint8_t* q) {
  Lanes low = Lanes::all(0), high = low, norm = low;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes v = Lanes::load(values + i);
    low = least(low, v), high = largest(high, v), norm = add(norm, mul(v, v));
  }
  const Range range{lowest_of(low), -lowest_of(sub(Lanes::all(0), high))};
  const Codes& codes = rules.codes;
  const float full = full_scale(rules, range);
  QuantizedGroup best;
  float least_loss = 0;
  const bool free_zero = !rules.symmetric && !rules.whole_zeros;
  const bool on_grid = free_zero && find_grid<Lanes>(rules, values, count, &best);
  for (int64_t f = 0; f < (on_grid ? 0 : rules.factor_count); ++f) {
    float scale = full * rules.factors[f];
    scale = rounded_to(rules.scale_dtype, std::fabs(scale) < rules.smallest ? rules.smallest : scale);
    const float zero = zero_of(rules, range, rules.factors[f], scale);
    const Lanes scales = Lanes::all(scale), lowest = Lanes::all(codes.lowest - zero),
                highest = Lanes::all(codes.highest - zero);
    Lanes loss = Lanes::all(0);
    for (int64_t i = 0; i < count; i += kLanes) {
      const Lanes v = Lanes::load(values + i);
      const Lanes code = least(largest(round_even(div(v, scales)), lowest), highest);
      const Lanes difference = sub(v, mul(code, scales));
      loss = add(loss, mul(mul(difference, difference), Lanes::load(importance + i)));
    }
    const float sum = sum_of(loss);
    if (f == 0 || sum < least_loss) best.scale = scale, best.zero = zero, least_loss = sum;
  }
  if (free_zero && !on_grid && rules.rounds > 0) refit<Lanes>(rules, values, importance, count, &best);
  best.norm = sum_of(norm);
  const bool is_whole = best.zero == round_even(best.zero);
  Lanes error = Lanes::all(0);
  const Lanes scales = Lanes::all(best.scale), zero = Lanes::all(best.zero), lowest = Lanes::all(codes.lowest),
              highest = Lanes::all(codes.highest);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes v = Lanes::load(values + i);
    const Lanes steps = div(v, scales);
    const Lanes rounded = is_whole ? add(round_even(steps), zero) : round_even(add(steps, zero));
    const Lanes code = least(largest(rounded, lowest), highest);
    const Lanes difference = mul(sub(v, mul(sub(code, zero), scales)), Lanes::load(first_lanes(count - i)));
    error = add(error, mul(difference, difference));
    uint8_t bytes[kLanes];
    to_bytes(add(code, Lanes::all(kRounder)), bytes);  // the lowest byte of its bits is the code
    std::memcpy(q + i, bytes, static_cast<size_t>(count - i < kLanes ? count - i : kLanes));
  }
  best.error = sum_of(error);
  return best;
}

}  // namespace qao::cpu
