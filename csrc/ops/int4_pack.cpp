// Operators that pack, unpack and dequantize int4 weights.
#include "cpu/int4_pack.h"

#include "ops/int4_operands.h"
#include "stable_abi/operators.h"

namespace qao {
namespace {

int4::Weight packed_shape(const Op& op, const Argument& weight, const Argument& scales, int64_t n, int64_t k,
                          int64_t group_size) {
  check_packed_sizes(op, n, k);
  return checked_packed(op, weight, scales, weight, n, k, group_size);
}

std::tuple<Tensor, Tensor> pack_int4(const Tensor& q_tensor, const Tensor& scales_tensor,
                                     const std::optional<Tensor>& zeros_tensor, int64_t group_size) {
  Op op("pack_int4");
  const Argument q("q", q_tensor), scales("scales", scales_tensor);
  op.involve(&q), op.involve(&scales);
  std::optional<Argument> zeros;
  if (zeros_tensor) op.involve(&zeros.emplace("zeros", *zeros_tensor));
  op.involve("group_size", group_size);

  int4::Weight shape;
  op.check(q.dtype() == uint8_code() && q.dim() == 2 && q.size(0) >= 1 && q.size(1) >= 1,
           "q must be a uint8 tensor [N, K] of values 0..15", "Pass one unsigned value per byte: q.to(torch.uint8)");
  shape.n = q.size(0);
  shape.k = q.size(1);
  shape.group_size = checked_group_size(op, group_size, shape.k);
  shape.scale_dtype = op.float_dtype(scales);
  shape.has_zeros = zeros.has_value();
  op.check(scales.has_shape({shape.n, shape.groups()}), "scales must have shape [N, ceil(K / group_size)]",
           "Check scales.shape");
  op.check(q.is_contiguous() && scales.is_contiguous() && (!zeros || zeros->is_contiguous()),
           "q, scales and zeros must be contiguous", "Call .contiguous() on them");
  op.check(scales.same_device(q) && (!zeros || zeros->same_device(q)), "q, scales and zeros are on different devices",
           "Move them to one device with .to(device)");
  if (zeros) {
    op.check(zeros->dtype() == scales.dtype() && zeros->has_shape({shape.n, shape.groups()}),
             "zeros must have the dtype and shape of scales", "Convert it: zeros.to(scales.dtype)");
  }

  const int64_t tiles_n = int4::tiles_n(shape.n), parameters = shape.has_zeros ? 2 : 1;
  Tensor weight = empty({tiles_n, int4::tiles_k(shape.k), int4::kTileBytes}, int8_code(), q);
  Tensor packed_scales = empty({tiles_n, shape.groups(), parameters, int4::kTileN}, scales.dtype(), q);
  int4::Unpacked from;
  from.q = static_cast<uint8_t*>(q.data());
  from.scales = scales.data();
  from.zeros = zeros ? zeros->data() : nullptr;
  uint8_t* weight_data = static_cast<uint8_t*>(weight.data_ptr());
  if (q.is_cpu()) {
    op.check(cpu::int4_pack(shape, from, weight_data, packed_scales.data_ptr(), torch_threads()));
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(q);
    op.check(int4::pack(shape, from, weight_data, packed_scales.data_ptr(), current_stream(q)));
#else
    op.fail_without_cuda();
#endif
  }
  return {weight, packed_scales};
}

std::tuple<Tensor, Tensor, Tensor> unpack_int4(const Tensor& weight_tensor, const Tensor& scales_tensor,
                                               int64_t out_features, int64_t in_features, int64_t group_size) {
  Op op("unpack_int4");
  const Argument weight("weight", weight_tensor), scales("scales", scales_tensor);
  op.involve(&weight), op.involve(&scales);
  op.involve("out_features", out_features), op.involve("in_features", in_features);
  op.involve("group_size", group_size);
  const int4::Weight shape = packed_shape(op, weight, scales, out_features, in_features, group_size);

  Tensor q = empty({shape.n, shape.k}, uint8_code(), weight);
  Tensor plain_scales = empty({shape.n, shape.groups()}, scales.dtype(), weight);
  Tensor zeros = empty({shape.n, shape.groups()}, scales.dtype(), weight);
  int4::Unpacked to;
  to.q = static_cast<uint8_t*>(q.data_ptr());
  to.scales = plain_scales.data_ptr();
  to.zeros = zeros.data_ptr();
  const uint8_t* weight_data = static_cast<const uint8_t*>(weight.data());
  if (weight.is_cpu()) {
    op.check(cpu::int4_unpack(shape, weight_data, scales.data(), to, torch_threads()));
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(weight);
    op.check(int4::unpack(shape, weight_data, scales.data(), to, current_stream(weight)));
#else
    op.fail_without_cuda();
#endif
  }
  return {q, plain_scales, zeros};
}

Tensor dequantize_int4(const Tensor& weight_tensor, const Tensor& scales_tensor, int64_t out_features,
                       int64_t in_features, int64_t group_size, torch::headeronly::ScalarType dtype) {
  Op op("dequantize_int4");
  const Argument weight("weight", weight_tensor), scales("scales", scales_tensor);
  op.involve(&weight), op.involve(&scales);
  op.involve("out_features", out_features), op.involve("in_features", in_features);
  op.involve("group_size", group_size);
  const int4::Weight shape = packed_shape(op, weight, scales, out_features, in_features, group_size);
  const DType out_dtype = op.float_dtype("dtype", dtype);

  Tensor out = empty({shape.n, shape.k}, torch_dtype(out_dtype), weight);
  const uint8_t* weight_data = static_cast<const uint8_t*>(weight.data());
  if (weight.is_cpu()) {
    op.check(cpu::int4_dequantize(shape, weight_data, scales.data(), out_dtype, out.data_ptr(), torch_threads()));
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(weight);
    op.check(int4::dequantize(shape, weight_data, scales.data(), out_dtype, out.data_ptr(), current_stream(weight)));
#else
    op.fail_without_cuda();
#endif
  }
  return out;
}

constexpr Operator kOperators[] = {
    operator_of<"pack_int4", pack_int4>(
        "pack_int4(Tensor q, Tensor scales, Tensor? zeros, int group_size) -> (Tensor, Tensor)"),
    operator_of<"unpack_int4", unpack_int4>(
        "unpack_int4(Tensor weight, Tensor scales, int out_features, int in_features, int group_size) -> (Tensor, "
        "Tensor, Tensor)"),
    operator_of<"dequantize_int4", dequantize_int4>(
        "dequantize_int4(Tensor weight, Tensor scales, int out_features, int in_features, int group_size, "
        "ScalarType dtype) -> Tensor"),
};

}  // namespace

Operators int4_pack_operators() { return kOperators; }

}  // namespace qao
