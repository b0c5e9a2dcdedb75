// One group of a weight, for every instruction set: `Lanes` is sixteen float32 values and what to do with them. The
// order of every sum is that of sixteen lanes, so all instruction sets give the same bits; none may fuse a product and
// a sum (-ffp-contract=off, CMakeLists.txt). `static`: see numeric.h.
#pragma once

#include <cmath>
#include <cstring>

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

// Steps by which values may miss a grid, for rounding. 1/16: that of bfloat16
// scales stays below, and 32 values would be so near by chance once in 1e27 groups.
constexpr float kGridTolerance = 0x1p-4f;
constexpr float kWholeTolerance = 0x1p-12f;  // steps by which a zero point that is a whole number may miss it
constexpr float kLargestGridZero = 64;

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
  if (!(std::fabs(zero) < kLargestGridZero) || std::fabs(zero - round_even(zero)) < kWholeTolerance) return false;
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
  const bool on_grid = !rules.symmetric && find_grid<Lanes>(rules, values, count, &best);
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
  best.norm = sum_of(norm);
  Lanes error = Lanes::all(0);
  const Lanes scales = Lanes::all(best.scale), zero = Lanes::all(best.zero), lowest = Lanes::all(codes.lowest),
              highest = Lanes::all(codes.highest);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes v = Lanes::load(values + i);
    const Lanes steps = div(v, scales);
    const Lanes rounded = on_grid ? round_even(add(steps, zero)) : add(round_even(steps), zero);
    const Lanes code = least(largest(rounded, lowest), highest);
    const Lanes difference = sub(v, mul(sub(code, zero), scales));
    error = add(error, mul(difference, difference));
    uint8_t bytes[kLanes];
    to_bytes(add(code, Lanes::all(kRounder)), bytes);  // the lowest byte of its bits is the code
    std::memcpy(q + i, bytes, static_cast<size_t>(count - i < kLanes ? count - i : kLanes));
  }
  best.error = sum_of(error);
  return best;
}

}  // namespace qao::cpu
