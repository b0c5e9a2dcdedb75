#include "cpu/int4_pack.h"

#include "int4_operands.h"
#include "ops.h"

namespace qao {
namespace {

int4_mm::Problem packed_problem(const Op& op, const Argument& weight, const Argument& scales, int64_t n, int64_t k,
                                int64_t group_size) {
  int4_mm::Problem problem;
  op.check(n >= 1 && k >= 1, "out_features and in_features must be at least 1",
           "Pass the N and K of the weight that was packed");
  problem.n = n;
  problem.k = k;
  problem.group_size = checked_group_size(op, group_size, k);
  check_packed(op, weight, scales, weight, problem);
  return problem;
}

}  // namespace

std::tuple<Tensor, Tensor> pack_int4_op(const Tensor& q_tensor, const Tensor& scales_tensor,
                                        const std::optional<Tensor>& zeros_tensor, int64_t group_size) {
  Op op("pack_int4");
  const Argument q("q", q_tensor), scales("scales", scales_tensor);
  op.involve(&q), op.involve(&scales);
  std::optional<Argument> zeros;
  if (zeros_tensor) op.involve(&zeros.emplace("zeros", *zeros_tensor));
  op.involve("group_size", group_size);

  int4_mm::Problem problem;
  op.check(q.dtype() == uint8_code() && q.dim() == 2 && q.size(0) >= 1 && q.size(1) >= 1,
           "q must be a uint8 tensor [N, K] of values 0..15", "Pass one unsigned value per byte: q.to(torch.uint8)");
  problem.n = q.size(0);
  problem.k = q.size(1);
  problem.group_size = checked_group_size(op, group_size, problem.k);
  problem.scale_dtype = op.float_dtype(scales);
  problem.has_zeros = zeros.has_value();
  op.check(scales.has_shape({problem.n, problem.groups()}), "scales must have shape [N, ceil(K / group_size)]",
           "Check scales.shape");
  op.check(q.is_contiguous() && scales.is_contiguous() && (!zeros || zeros->is_contiguous()),
           "q, scales and zeros must be contiguous", "Call .contiguous() on them");
  op.check(scales.same_device(q) && (!zeros || zeros->same_device(q)), "q, scales and zeros are on different devices",
           "Move them to one device with .to(device)");
  if (zeros) {
    op.check(zeros->dtype() == scales.dtype() && zeros->has_shape({problem.n, problem.groups()}),
             "zeros must have the dtype and shape of scales", "Convert it: zeros.to(scales.dtype)");
  }

  const int64_t tiles_n = int4_mm::tiles_n(problem.n), parameters = problem.has_zeros ? 2 : 1;
  Tensor weight = empty({tiles_n, int4_mm::tiles_k(problem.k), int4_mm::kTileBytes}, int8_code(), q);
  Tensor packed_scales = empty({tiles_n, problem.groups(), parameters, int4_mm::kTileN}, scales.dtype(), q);
  int4_mm::Unpacked from;
  from.q = static_cast<uint8_t*>(q.data());
  from.scales = scales.data();
  from.zeros = zeros ? zeros->data() : nullptr;
  uint8_t* weight_data = static_cast<uint8_t*>(weight.data_ptr());
  if (q.is_cpu()) {
    op.check(cpu::int4_pack(problem, from, weight_data, packed_scales.data_ptr(), torch_threads()));
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(q);
    op.check(int4_mm::pack(problem, from, weight_data, packed_scales.data_ptr(), current_stream(q)));
#else
    op.fail_without_cuda();
#endif
  }
  return {weight, packed_scales};
}

std::tuple<Tensor, Tensor, Tensor> unpack_int4_op(const Tensor& weight_tensor, const Tensor& scales_tensor,
                                                  int64_t out_features, int64_t in_features, int64_t group_size) {
  Op op("unpack_int4");
  const Argument weight("weight", weight_tensor), scales("scales", scales_tensor);
  op.involve(&weight), op.involve(&scales);
  op.involve("out_features", out_features), op.involve("in_features", in_features);
  op.involve("group_size", group_size);
  const int4_mm::Problem problem = packed_problem(op, weight, scales, out_features, in_features, group_size);

  Tensor q = empty({problem.n, problem.k}, uint8_code(), weight);
  Tensor plain_scales = empty({problem.n, problem.groups()}, scales.dtype(), weight);
  Tensor zeros = empty({problem.n, problem.groups()}, scales.dtype(), weight);
  int4_mm::Unpacked to;
  to.q = static_cast<uint8_t*>(q.data_ptr());
  to.scales = plain_scales.data_ptr();
  to.zeros = zeros.data_ptr();
  const uint8_t* weight_data = static_cast<const uint8_t*>(weight.data());
  if (weight.is_cpu()) {
    op.check(cpu::int4_unpack(problem, weight_data, scales.data(), to, torch_threads()));
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(weight);
    op.check(int4_mm::unpack(problem, weight_data, scales.data(), to, current_stream(weight)));
#else
    op.fail_without_cuda();
#endif
  }
  return {q, plain_scales, zeros};
}

Tensor dequantize_int4_op(const Tensor& weight_tensor, const Tensor& scales_tensor, int64_t out_features,
                          int64_t in_features, int64_t group_size, torch::headeronly::ScalarType dtype) {
  Op op("dequantize_int4");
  const Argument weight("weight", weight_tensor), scales("scales", scales_tensor);
  op.involve(&weight), op.involve(&scales);
  op.involve("out_features", out_features), op.involve("in_features", in_features);
  op.involve("group_size", group_size);
  const int4_mm::Problem problem = packed_problem(op, weight, scales, out_features, in_features, group_size);
  const DType out_dtype = op.float_dtype("dtype", dtype);

  Tensor out = empty({problem.n, problem.k}, torch_dtype(out_dtype), weight);
  const uint8_t* weight_data = static_cast<const uint8_t*>(weight.data());
  if (weight.is_cpu()) {
    op.check(cpu::int4_dequantize(problem, weight_data, scales.data(), out_dtype, out.data_ptr(), torch_threads()));
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(weight);
    op.check(
        int4_mm::dequantize(problem, weight_data, scales.data(), out_dtype, out.data_ptr(), current_stream(weight)));
#else
    op.fail_without_cuda();
#endif
  }
  return out;
}

}  // namespace qao
