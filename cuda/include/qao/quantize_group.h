// Integer quantization of one group of a weight: search and fit of scale and zero point, and the codes.
//
// Shared by all instruction sets and GPUs. `Lanes` is sixteen float32 values with these operations:
//   Lanes::all(value), Lanes::load(values), add, sub, mul, div, least, largest, lowest_of(lanes), sum_of(lanes)
// `Place` is the target that it runs on:
//   Place::rounded_to(dtype, value)
//  Place::first_lanes(count): memory for Lanes::load: ones in the lanes that hold values, then zeros
//  Place::put_bytes(lanes, q, count): stores the low byte of the first `count` lanes
// Every sum is in the order of sixteen lanes, and no multiply and add are fused (CMakeLists.txt), so all targets give
// the same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "qao/quantize_groups.h"

// `static`: keeps the linker from merging copies compiled for different instruction sets.
#if defined(__CUDACC__)
#define QAO_GROUP_CODE static __device__
#else
#define QAO_GROUP_CODE static
#endif

namespace qao::groups {

constexpr int kLanes = 16;
constexpr float kRounder = 0x1.8p23f;  // added and subtracted, it rounds to nearest even; |values| below 2^22

QAO_GROUP_CODE float round_even(float value) { return (value + kRounder) - kRounder; }
template <typename Lanes>
QAO_GROUP_CODE Lanes round_even(Lanes v) {
  const Lanes rounder = Lanes::all(kRounder);
  return sub(add(v, rounder), rounder);
}

// Tolerance, in steps, for values on a grid. The rounding of bfloat16 scales stays below 1/16; 32 random values would
// lie on a grid by chance once in 1e27 groups.
constexpr float kGridTolerance = 0x1p-4f;
constexpr float kWholeTolerance = 0x1p-12f;  // tolerance, in steps, for an integer zero point
constexpr float kLargestZero = 64;           // largest magnitude of a float zero point

// Range of the values, including 0.
struct Range {
  float low, high;
};

// The scale that maps the full range of a group onto the codes.
QAO_GROUP_CODE float full_scale(const Rules& rules, Range range) {
  const Codes& c = rules.codes;
  if (!rules.symmetric) return (range.high - range.low) / (c.highest - c.lowest);
  const float below = c.middle - c.lowest, above = c.highest - c.middle;
  if (below == above) return (-range.low > range.high ? -range.low : range.high) / above;
  // There is one more code below the middle. The sign of the scale assigns it to the larger side.
  return (-range.low >= range.high ? range.low : range.high) / -below;
}

QAO_GROUP_CODE float zero_of(const Rules& rules, Range range, float factor, float scale) {
  const Codes& c = rules.codes;
  if (rules.symmetric) return c.middle;
  const float zero = round_even(range.low * -factor / scale) + c.lowest;
  return zero < c.lowest ? c.lowest : zero > c.highest ? c.highest : zero;
}

// Detects values that already lie on a uniform grid between lowest and highest value, up to rounding. Scales must not
// be 0. Grids with an integer zero point are left to the search.
template <typename Lanes, typename Place, typename Values>
QAO_GROUP_CODE bool find_grid(const Rules& rules, Values values, int64_t count, Group* group) {
  const Codes& codes = rules.codes;
  if (count < rules.size || count % kLanes != 0) return false;  // padded
  Lanes low = Lanes::load(values), high = low;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes v = Lanes::load(values + i);
    low = least(low, v), high = largest(high, v);
  }
  const float lowest_value = lowest_of(low), highest_value = -lowest_of(sub(Lanes::all(0), high));
  const float full = (highest_value - lowest_value) / (codes.highest - codes.lowest);
  const float scale = Place::rounded_to(rules.scale_dtype, full);
  if (!(scale > rules.smallest)) return false;
  const float zero = Place::rounded_to(rules.scale_dtype, -lowest_value / scale);
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

// Alternating least squares: fits scale and zero point to the codes, with errors weighted by importance, then
// recomputes the codes. Iterates while the error decreases, at most `rules.rounds` times. Padding has weight zero.
template <typename Lanes, typename Place, typename Values, typename Importance>
QAO_GROUP_CODE void refit(const Rules& rules, Values values, Importance importance, int64_t count, Group* group) {
  const Lanes lowest = Lanes::all(rules.codes.lowest), highest = Lanes::all(rules.codes.highest);
  constexpr float kInfinity = HUGE_VALF;
  float scale = group->scale, zero = group->zero, least_loss = kInfinity;
  for (int64_t round = 0;; ++round) {
    const Lanes scales = Lanes::all(scale), zeros = Lanes::all(zero);
    // Weighted sums of: 1, steps from the zero point, steps^2; errors, errors * steps, errors^2.
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
    scale = Place::rounded_to(rules.scale_dtype, before + slope);
    if (!(scale > rules.smallest && scale < kInfinity)) return;
    // The zero point absorbs the rounding error of the scale.
    zero = Place::rounded_to(rules.scale_dtype, zero - (errors + (before - scale) * steps) / (scale * ones));
    if (!(std::fabs(zero) < kLargestZero)) return;
  }
}

// values[0 .. count), padded with zeros of importance 0 to a multiple of sixteen lanes. Selects the first factor with
// the least sum of squared errors times importance; importance is >= 0 and has the same length. With float zero points,
// values that already lie on a grid of sixteen steps keep it; others refine scale and zero point by least squares.
template <typename Lanes, typename Place, typename Values, typename Importance>
QAO_GROUP_CODE Group quantize_group(const Rules& rules, Values values, Importance importance, int64_t count,
                                    uint8_t* q) {
  Lanes low = Lanes::all(0), high = low, norm = low;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes v = Lanes::load(values + i);
    low = least(low, v), high = largest(high, v), norm = add(norm, mul(v, v));
  }
  const Range range{lowest_of(low), -lowest_of(sub(Lanes::all(0), high))};
  const Codes& codes = rules.codes;
  const float full = full_scale(rules, range);
  Group best;
  float least_loss = 0;
  const bool free_zero = !rules.symmetric && !rules.whole_zeros;
  const bool on_grid = free_zero && find_grid<Lanes, Place>(rules, values, count, &best);
  for (int64_t f = 0; f < (on_grid ? 0 : rules.factor_count); ++f) {
    float scale = full * rules.factors[f];
    scale = Place::rounded_to(rules.scale_dtype, std::fabs(scale) < rules.smallest ? rules.smallest : scale);
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
  if (free_zero && !on_grid && rules.rounds > 0) refit<Lanes, Place>(rules, values, importance, count, &best);
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
    const Lanes difference = mul(sub(v, mul(sub(code, zero), scales)), Lanes::load(Place::first_lanes(count - i)));
    error = add(error, mul(difference, difference));
    // The low byte of the float's bits is the code.
    Place::put_bytes(add(code, Lanes::all(kRounder)), q + i, count - i < kLanes ? count - i : kLanes);
  }
  best.error = sum_of(error);
  return best;
}

}  // namespace qao::groups

#undef QAO_GROUP_CODE
