// Attention of few tokens over a key-value cache.
#include "qao/attention.h"

#include "cpu/attention.h"
#include "ops/attention_operands.h"
#include "stable_abi/operators.h"

namespace qao {
namespace {

using attention::Arguments;
using attention::Mask;
using attention::Problem;

// q, k or v [batch, heads, length, size] with contiguous rows, which a GPU reads 16 bytes at a time.
struct Operand {
  Operand(const Op& op, const Tensor& tensor, const Argument& given) {
    op.check(given.dim() == 4, "q, k and v must have shape [batch, heads, length, size]",
             "Call view or unsqueeze on them");
    const bool regular = (given.size(3) == 1 || given.stride(3) == 1) && (given.is_cpu() || has_aligned_rows(given));
    if (!regular) copy = given.is_contiguous() ? cloned(tensor, given) : contiguous(tensor, given);
    data = regular ? given.data() : copy->data_ptr();
    int64_t step = 1;  // of a contiguous tensor
    for (int i = 2; i >= 0; --i) {
      step *= given.size(i + 1);
      strides[i] = regular ? given.stride(i) : step;
    }
  }
  std::optional<Tensor> copy;
  const void* data;
  int64_t strides[3];
};

// Sets the mask, which broadcasts to [batch, heads, queries, keys].
void use_mask(const Op& op, const Argument& mask, const Argument& q, Problem& p, Arguments& a) {
  const int64_t shape[] = {p.batch, p.heads, p.queries, p.keys};
  bool fits = mask.dim() <= 4;
  for (int64_t i = 0; fits && i < mask.dim(); ++i) {
    const int64_t at = 4 - mask.dim() + i;
    fits = mask.size(i) == 1 || mask.size(i) == shape[at];
    a.mask_strides[at] = mask.size(i) == 1 ? 0 : mask.stride(i);
  }
  op.check(fits, "mask must broadcast to [batch, heads, queries, keys]", "Check mask.shape against q and k");
  op.check(mask.same_device(q), "mask and q are on different devices", "Move them to one device with .to(device)");
  p.mask = mask.dtype() == bool_code() ? Mask::kBool : Mask::kFloat;
  if (p.mask == Mask::kFloat) p.mask_dtype = op.float_dtype(mask);
  a.mask = mask.data();
}

Tensor decode_attention(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                        const std::optional<Tensor>& mask_tensor, double scale) {
  Op op("decode_attention");
  const Argument q("q", q_tensor), k("k", k_tensor), v("v", v_tensor);
  op.involve(&q), op.involve(&k), op.involve(&v);
  std::optional<Argument> mask;
  if (mask_tensor) op.involve(&mask.emplace("mask", *mask_tensor));

  Problem p;
  p.dtype = op.float_dtype(q);
  op.check(k.dtype() == q.dtype() && v.dtype() == q.dtype(), "q, k and v must have one dtype", "Cast them to one");
  op.check(q.same_device(k) && q.same_device(v), "q, k and v are on different devices",
           "Move them to one device with .to(device)");
  const Operand of_q(op, q_tensor, q), of_k(op, k_tensor, k), of_v(op, v_tensor, v);
  p.batch = q.size(0), p.heads = q.size(1), p.queries = q.size(2), p.size = q.size(3);
  p.kv_heads = k.size(1), p.keys = k.size(2), p.value_size = v.size(3);
  op.check(k.size(0) == p.batch && v.size(0) == p.batch && k.size(3) == p.size && v.size(1) == p.kv_heads &&
               v.size(2) == p.keys,
           "k must have shape [batch, kv_heads, keys, size] and v [batch, kv_heads, keys, value_size]",
           "Check both against q");
  op.check(p.kv_heads >= 1 && p.heads % p.kv_heads == 0 && p.size >= 1 && p.value_size >= 1,
           "the heads of q must be a multiple of those of k and v, and heads not empty",
           "Pass k and v with one head per group of query heads, or one per query head");
  p.scale = static_cast<float>(scale);
  Arguments a;
  a.q = of_q.data, a.k = of_k.data, a.v = of_v.data;
  for (int i = 0; i < 3; ++i) {
    a.q_strides[i] = of_q.strides[i], a.k_strides[i] = of_k.strides[i], a.v_strides[i] = of_v.strides[i];
  }
  if (mask) use_mask(op, *mask, q, p, a);
  Tensor y = empty({p.batch, p.queries, p.heads, p.value_size}, q.dtype(), q);
  if (p.batch * p.queries * p.heads == 0) return y;
  a.y = y.data_ptr();
  if (q.is_cpu()) {
    op.check(cpu::attention(p, a, torch_threads(p.batch * p.heads * p.queries * p.keys * (p.size + p.value_size))));
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(q);
    op.check(attention::launch(p, a, current_stream(q)));
#else
    op.fail_without_cuda();
#endif
  }
  return y;
}

constexpr Operator kOperators[] = {
    operator_of<"decode_attention", decode_attention>(
        "decode_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor"),
};

}  // namespace

Operators attention_operators() { return kOperators; }

}  // namespace qao
