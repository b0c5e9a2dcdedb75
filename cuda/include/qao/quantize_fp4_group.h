// Quantization of one group of a weight to fp4 (e2m1): the better of two scales, and the codes.
//
// `Lanes` is sixteen float32 values as in quantize_group.h; its rules on summation order and rounding apply here too.
// `Place` is the target that it runs on:
//  Place::to_e4m3(value): the nearest e4m3 value, at most 448
//   Place::put_bytes(lanes, q, count): the lowest byte of the first `count` lanes
//   Place::put_signs(values, q, count): q[i] |= 8 where the sign bit of values[i] is set
#pragma once

#include <cmath>
#include <cstdint>

#include "qao/quantize_group.h"

#if defined(__CUDACC__)
#define QAO_GROUP_CODE static __device__
#else
#define QAO_GROUP_CODE static
#endif

namespace qao::groups {

// Of magnitudes.
template <typename Lanes>
struct Fp4 {
  Lanes value, code;
};

// Clamps a magnitude to each of the three ranges of uniform steps, 0 to 2, 2 to 4 and 4 to 6, and rounds it there. The
// sum over the ranges is the value; the number of steps is the code. Adding a large constant rounds to its last bit.
template <typename Lanes>
QAO_GROUP_CODE Fp4<Lanes> round_to_fp4(Lanes magnitude) {
  const Lanes two = Lanes::all(2), four = Lanes::all(4), six = Lanes::all(6);
  const Lanes halves = Lanes::all(0x1.8p22f), ones = Lanes::all(0x1.8p23f), twos = Lanes::all(0x1.8p24f);
  const Lanes first = sub(add(least(magnitude, two), halves), halves);
  const Lanes second = sub(add(least(largest(magnitude, two), four), ones), ones);
  const Lanes third = sub(add(least(largest(magnitude, four), six), twos), twos);
  const Lanes value = sub(add(add(first, second), third), six);
  return {value, sub(add(add(add(first, first), second), mul(third, Lanes::all(0.5f))), four)};
}

// Divisors of the values: a step of 0 maps all values to 0.
template <typename Lanes>
QAO_GROUP_CODE Lanes fp4_divisors(float step) {
  return Lanes::all(step > 0 ? step : HUGE_VALF);
}

// values[0 .. count), zero-padded to a multiple of sixteen lanes. The first scale keeps the largest magnitude in range
// (a power of two: below 8; the largest code is 6). The second is the next one with less error for small values: twice
// the first, or the one that maps the largest magnitude to 4. Ties go to the first.
template <typename Lanes, typename Place, typename Values>
QAO_GROUP_CODE Group quantize_fp4_group(const Fp4Rules& rules, Values values, int64_t count, uint8_t* q) {
  const Lanes nothing = Lanes::all(0);
  Lanes lowest = nothing, norm = nothing;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes v = Lanes::load(values + i);
    lowest = least(lowest, least(v, sub(nothing, v))), norm = add(norm, mul(v, v));
  }
  const float most = 0 - lowest_of(lowest);  // avoids negative zero, which scales must not be
  float scales[2];
  if (rules.is_nvfp4) {
    const float wanted = most * rules.divisor;
    scales[0] = Place::to_e4m3(wanted / 6), scales[1] = Place::to_e4m3(wanted / 4);
  } else {
    int exponent;
    frexpf(most, &exponent);
    exponent = exponent - 3 < -127 ? -127 : exponent - 3 > 127 ? 127 : exponent - 3;
    scales[0] = ldexpf(1, exponent), scales[1] = ldexpf(1, exponent < 127 ? exponent + 1 : 127);
  }
  Group best;
  float best_step = 0;
  for (int choice = 0; choice < 2; ++choice) {
    const float step = rules.is_nvfp4 ? scales[choice] / rules.divisor : scales[choice];
    const Lanes steps = Lanes::all(step), divisors = fp4_divisors<Lanes>(step);
    Lanes error = nothing;
    for (int64_t i = 0; i < count; i += kLanes) {
      const Lanes v = Lanes::load(values + i), magnitude = largest(v, sub(nothing, v));
      const Lanes off = sub(mul(round_to_fp4(div(magnitude, divisors)).value, steps), magnitude);
      error = add(error, mul(off, off));
    }
    const float sum = sum_of(error);
    if (choice == 0 || sum < best.error) best.error = sum, best.scale = scales[choice], best_step = step;
  }
  best.norm = sum_of(norm);
  const Lanes divisors = fp4_divisors<Lanes>(best_step);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes v = Lanes::load(values + i), magnitude = largest(v, sub(nothing, v));
    // The low byte of the float's bits is the code.
    const Lanes code = add(round_to_fp4(div(magnitude, divisors)).code, Lanes::all(kRounder));
    Place::put_bytes(code, q + i, count - i < kLanes ? count - i : kLanes);
  }
  if (best_step > 0) Place::put_signs(values, q, count);
  return best;
}

}  // namespace qao::groups

#undef QAO_GROUP_CODE
