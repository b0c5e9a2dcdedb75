// Attention of one token per sequence on the CPU: rotary embedding and write to the cache, then the attention of few
// tokens.
#include "cpu/token_attention.h"

#include <limits>

#include "cpu/attention.h"
#include "cpu/numeric.h"

namespace qao::cpu {
namespace {

using namespace attention;

// Writes a head of `p.size` elements, rotated by the angles at these offsets of cos and sin.
void rotate(const TokenProblem& p, const TokenArguments& a, int64_t batch, const void* from, int64_t from_at, void* to,
            int64_t to_at) {
  const int64_t half = p.size / 2;
  for (int64_t d = 0; d < half; ++d) {
    const float low = load(from, from_at + d, p.dtype), high = load(from, from_at + half + d, p.dtype);
    const auto angle = [&](const void* of, int64_t stride, int64_t at) {
      return load(of, batch * stride + at, p.dtype);
    };
    float rotated[2] = {low, high};
    if (a.cos != nullptr) {
      rotated[0] = low * angle(a.cos, a.cos_stride, d) - high * angle(a.sin, a.sin_stride, d);
      rotated[1] = high * angle(a.cos, a.cos_stride, half + d) + low * angle(a.sin, a.sin_stride, half + d);
    }
    store(to, to_at + d, p.dtype, rotated[0]), store(to, to_at + half + d, p.dtype, rotated[1]);
  }
}

float value_of(const KeyMask& mask, int64_t at) {
  if (mask.kind == Mask::kFloat) return load(mask.data, at, mask.dtype);
  return static_cast<const uint8_t*>(mask.data)[at] != 0 ? 0 : -std::numeric_limits<float>::infinity();
}

}  // namespace

Status token_attention(const TokenProblem& p, const TokenArguments& a, void* rotated_q, const Threads& threads) {
  int64_t position = *a.position;
  if (position < 0) position += p.keys;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    for (int64_t head = 0; head < p.heads; ++head) {
      rotate(p, a, batch, a.q, batch * a.q_strides[0] + head * a.q_strides[1], rotated_q,
             (batch * p.heads + head) * p.size);
    }
    if (position < 0 || position >= p.keys) continue;
    for (int64_t head = 0; head < p.kv_heads; ++head) {
      rotate(p, a, batch, a.k, batch * a.k_strides[0] + head * a.k_strides[1], a.key_cache,
             batch * a.key_strides[0] + head * a.key_strides[1] + position * a.key_strides[2]);
      const int64_t from = batch * a.v_strides[0] + head * a.v_strides[1];
      const int64_t to = batch * a.value_strides[0] + head * a.value_strides[1] + position * a.value_strides[2];
      for (int64_t d = 0; d < p.size; ++d) store(a.value_cache, to + d, p.dtype, load(a.v, from + d, p.dtype));
    }
  }
  Problem of;
  of.batch = p.batch, of.heads = p.heads, of.kv_heads = p.kv_heads, of.queries = 1, of.keys = p.keys;
  of.size = of.value_size = p.size;
  of.dtype = p.dtype, of.mask = a.mask.kind, of.mask_dtype = a.mask.dtype, of.scale = p.scale;
  Arguments given;
  given.q = rotated_q, given.k = a.key_cache, given.v = a.value_cache, given.mask = a.mask.data, given.y = a.y;
  given.q_strides[0] = p.heads * p.size, given.q_strides[1] = given.q_strides[2] = p.size;
  for (int i = 0; i < 3; ++i) given.k_strides[i] = a.key_strides[i], given.v_strides[i] = a.value_strides[i];
  given.mask_strides[0] = a.mask.batch_stride, given.mask_strides[3] = a.mask.key_stride;
  return cpu::attention(of, given, threads);
}

void key_ranges(const KeyMask& mask, int64_t batch, int64_t keys, KeyRange* ranges) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  for (int64_t of = 0; of < batch; ++of) {
    const auto scan = [&](float lowest) {
      KeyRange range{static_cast<int32_t>(keys), 0, 1, 0};
      int64_t count = 0;
      for (int64_t key = 0; key < keys; ++key) {
        const float value = value_of(mask, of * mask.batch_stride + key * mask.key_stride);
        if (value < lowest || value == kNever) continue;
        if (count++ == 0) range.begin = static_cast<int32_t>(key);
        range.end = static_cast<int32_t>(key) + 1;
        if (value != 0) range.plain = 0;
      }
      if (count != range.end - range.begin) range.plain = 0;
      return range;
    };
    ranges[of] = scan(lowest_mask(mask.kind, mask.dtype));
    if (ranges[of].end == 0 && mask.kind == Mask::kFloat) ranges[of] = scan(kNever), ranges[of].finite = 1;
  }
}

}  // namespace qao::cpu
