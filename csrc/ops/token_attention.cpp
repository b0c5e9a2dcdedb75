// Attention of one token per sequence: rotary embedding, write to a static cache, and softmax. Graph passes call it.
#include "qao/token_attention.h"

#include "cpu/token_attention.h"
#include "ops/attention_operands.h"
#include "stable_abi/operators.h"

namespace qao {
namespace {

using attention::KeyMask;
using attention::KeyRange;
using attention::Mask;
using attention::TokenArguments;
using attention::TokenProblem;

// The mask of one query per sequence, [batch or 1, 1, 1, keys].
KeyMask key_mask(const Op& op, const Argument& mask) {
  op.check(mask.dim() == 4 && mask.size(1) == 1 && mask.size(2) == 1, "mask must have shape [batch or 1, 1, 1, keys]",
           "Pass the mask of one query per sequence that all heads share");
  KeyMask result;
  result.kind = mask.dtype() == bool_code() ? Mask::kBool : Mask::kFloat;
  if (result.kind == Mask::kFloat) result.dtype = op.float_dtype(mask);
  result.data = mask.data();
  result.batch_stride = mask.size(0) == 1 ? 0 : mask.stride(0), result.key_stride = mask.stride(3);
  return result;
}

Tensor key_range(const Tensor& mask_tensor) {
  Op op("_key_range");
  const Argument mask("mask", mask_tensor);
  op.involve(&mask);
  const KeyMask given = key_mask(op, mask);
  Tensor ranges = empty({mask.size(0), 4}, int32_code(), mask);
  if (mask.size(0) == 0) return ranges;
  auto* const found = static_cast<KeyRange*>(ranges.data_ptr());
  if (mask.is_cpu()) {
    cpu::key_ranges(given, mask.size(0), mask.size(3), found);
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(mask);
    op.check(attention::launch_key_range(given, mask.size(0), mask.size(3), found, current_stream(mask)));
#else
    op.fail_without_cuda();
#endif
  }
  return ranges;
}

// A tensor of one token [batch, heads, 1, size], or a cache [batch, heads, keys, size]; sets its strides.
template <size_t count>
const void* use(const Op& op, const Argument& given, std::initializer_list<int64_t> shape, int64_t (&strides)[count]) {
  op.check(given.has_shape(shape),
           "q must have shape [batch, heads, 1, size], k and v [batch, kv_heads, 1, size], and "
           "the caches [batch, kv_heads, keys, size]",
           "Check their shapes");
  const bool regular = given.stride(3) == 1 && (given.is_cpu() || has_aligned_rows(given));
  op.check(regular, "elements of a head must be contiguous, and heads aligned to 16 bytes", "Pass contiguous tensors");
  for (size_t i = 0; i < count; ++i) strides[i] = given.stride(static_cast<int64_t>(i));
  return given.data();
}

// cos or sin, [batch or 1, 1, 1, size]; returns the stride of the batch.
int64_t use_angles(const Op& op, const Argument& angles, const Argument& q) {
  op.check(angles.dim() == 4 && (angles.size(0) == q.size(0) || angles.size(0) == 1) && angles.size(1) == 1 &&
               angles.size(2) == 1 && angles.size(3) == q.size(3) && angles.stride(3) == 1 &&
               (angles.is_cpu() || has_aligned_rows(angles)),
           "cos and sin must have shape [batch or 1, 1, 1, size], with contiguous elements", "Check their shapes");
  return angles.size(0) == 1 ? 0 : angles.stride(0);
}

Tensor token_attention(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                       const std::optional<Tensor>& cos_tensor, const std::optional<Tensor>& sin_tensor,
                       const Tensor& position_tensor, const Tensor& key_cache_tensor, const Tensor& value_cache_tensor,
                       const std::optional<Tensor>& mask_tensor, const std::optional<Tensor>& range_tensor,
                       double scale) {
  Op op("_token_attention");
  const Argument q("q", q_tensor), k("k", k_tensor), v("v", v_tensor), position("position", position_tensor);
  const Argument keys("key_cache", key_cache_tensor), values("value_cache", value_cache_tensor);
  op.involve(&q), op.involve(&k), op.involve(&v), op.involve(&position), op.involve(&keys), op.involve(&values);
  std::optional<Argument> cos, sin, mask, range;
  if (cos_tensor) op.involve(&cos.emplace("cos", *cos_tensor));
  if (sin_tensor) op.involve(&sin.emplace("sin", *sin_tensor));
  if (mask_tensor) op.involve(&mask.emplace("mask", *mask_tensor));
  if (range_tensor) op.involve(&range.emplace("key_range", *range_tensor));

  TokenProblem p;
  TokenArguments a;
  p.dtype = op.float_dtype(q);
  for (const Argument* other : {&k, &v, &keys, &values, cos ? &*cos : &q, sin ? &*sin : &q}) {
    op.check(other->dtype() == q.dtype(), "q, k, v, cos, sin and the caches must have one dtype", "Cast them to one");
    op.check(other->same_device(q), "operands are on different devices", "Move them to one device with .to(device)");
  }
  op.check(q.dim() == 4 && keys.dim() == 4, "q and the caches must have 4 dimensions", "Call view on them");
  p.batch = q.size(0), p.heads = q.size(1), p.size = q.size(3), p.kv_heads = keys.size(1), p.keys = keys.size(2);
  op.check(p.kv_heads >= 1 && p.heads % p.kv_heads == 0 && p.size >= 2 && p.size % 2 == 0,
           "the heads of q must be a multiple of those of the caches, and heads have an even size",
           "Check q against key_cache");
  a.q = use(op, q, {p.batch, p.heads, 1, p.size}, a.q_strides);
  a.k = use(op, k, {p.batch, p.kv_heads, 1, p.size}, a.k_strides);
  a.v = use(op, v, {p.batch, p.kv_heads, 1, p.size}, a.v_strides);
  a.key_cache = const_cast<void*>(use(op, keys, {p.batch, p.kv_heads, p.keys, p.size}, a.key_strides));
  a.value_cache = const_cast<void*>(use(op, values, {p.batch, p.kv_heads, p.keys, p.size}, a.value_strides));
  op.check(cos.has_value() == sin.has_value(), "cos and sin must be given together", "Pass both or neither");
  if (cos) {
    a.cos = cos->data(), a.cos_stride = use_angles(op, *cos, q);
    a.sin = sin->data(), a.sin_stride = use_angles(op, *sin, q);
  }
  op.check(position.dtype() == int64_code() && position.numel() == 1 && position.same_device(q),
           "position must be one int64 number on the device of q", "Pass the index of the new key in the cache");
  a.position = static_cast<const int64_t*>(position.data());
  op.check(mask.has_value() == range.has_value(), "mask and key_range must be given together",
           "Pass _key_range(mask) too");
  if (mask) {
    op.check(mask->dim() == 4 && (mask->size(0) == 1 || mask->size(0) == p.batch) && mask->size(3) == p.keys &&
                 mask->same_device(q) && range->has_shape({mask->size(0), 4}) && range->dtype() == int32_code() &&
                 range->same_device(q),
             "mask must have shape [batch or 1, 1, 1, keys], and key_range be that of the mask",
             "Check mask.shape against key_cache");
    a.mask = key_mask(op, *mask);
    a.ranges = static_cast<const KeyRange*>(range->data());
    a.range_stride = mask->size(0) == 1 ? 0 : 1;
  }
  p.scale = static_cast<float>(scale);
  Tensor y = empty({p.batch, 1, p.heads, p.size}, q.dtype(), q);
  if (p.batch == 0) return y;
  a.y = y.data_ptr();
  if (q.is_cpu()) {
    Tensor rotated = empty({p.batch, p.heads, p.size}, q.dtype(), q);
    op.check(cpu::token_attention(p, a, rotated.data_ptr(), torch_threads(p.batch * p.heads * p.keys * p.size * 2)));
    return y;
  }
#if defined(QAO_WITH_CUDA)
  op.check(p.dtype != DType::kFloat32 && attention::has_token_kernel(p.size) &&
               p.heads / p.kv_heads <= attention::kMostGroup && p.keys < (1 << 30),
           "a GPU takes 16 bits, heads of 64 or 128 elements, and at most 8 query heads of a key-value head",
           "Rotate and write to the cache with torch, and call decode_attention");
  const DeviceScope scope(q);
  op.check(attention::launch_token(p, a, current_stream(q)));
#else
  op.fail_without_cuda();
#endif
  return y;
}

constexpr Operator kOperators[] = {
    operator_of<"_key_range", key_range>("_key_range(Tensor mask) -> Tensor"),
    operator_of<"_token_attention", token_attention>(
        "_token_attention(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor position, Tensor(a!) "
        "key_cache, Tensor(b!) value_cache, Tensor? mask, Tensor? key_range, float scale) -> Tensor"),
};

}  // namespace

Operators token_attention_operators() { return kOperators; }

}  // namespace qao
