// Operators that quantize weights into the tensors that GEMM kernels read.
#include <algorithm>
#include <cmath>

#include "cpu/int4_pack.h"
#include "cpu/numeric.h"
#include "cpu/quantize_weight.h"
#include "ops/fp4_operands.h"
#include "ops/int4_operands.h"
#include "qao/quantize_weight.h"
#include "stable_abi/operators.h"
#include "stable_abi/rows.h"

namespace qao {

using torch::headeronly::ScalarType;

namespace {

Status largest_on_cpu(const weight::Problem& p, const weight::Arguments& a, float* largest) {
  cpu::WeightArguments arguments;
  arguments.weight = a.weight, arguments.weight_stride = a.weight_stride;
  return cpu::largest_magnitude({p.n, p.k, p.weight_dtype}, arguments, torch_threads(p.n * p.k), largest);
}

// Packs the bfloat16 scales of fp4 (layout/fp4.h).
void lay_out_fp4_scales(const cpu::Fp4Problem& p, const uint16_t* plain, float divisor, uint16_t* scales) {
  const int64_t groups = p.groups(), rows = fp4::scale_rows(p.k, p.group_size());
  for (int64_t n = 0; n < int4::tiles_n(p.n) * int4::kTileN; ++n) {
    const bool inside = n < p.n;
    for (int64_t g = 0; g < groups; ++g) {
      scales[int4::scale_offset(n, g, rows, 1, 0)] = inside ? plain[n * groups + g] : uint16_t{0};
    }
    float rest = inside ? divisor : 1;
    for (int64_t part = groups; part < rows; ++part) {
      const uint16_t rounded = cpu::to_bf16(rest);
      scales[int4::scale_offset(n, part, rows, 1, 0)] = rounded;
      rest -= cpu::from_bf16(rounded);
    }
  }
}

Status quantize_fp4_on_cpu(const weight::Problem& p, const weight::Arguments& a, const Argument& like) {
  cpu::Fp4Problem problem;
  problem.n = p.n, problem.k = p.k, problem.weight_dtype = p.weight_dtype;
  problem.is_nvfp4 = p.columns == fp4::kNvGroup;
  Tensor codes = empty({p.n, p.k}, uint8_code(), like);
  Tensor scales = empty({p.n, problem.groups()}, torch_dtype(DType::kBFloat16), like);
  Tensor unused = empty({int4::tiles_n(p.n) * int4::kTileN}, torch_dtype(DType::kBFloat16), like);
  float divisor = 1;
  double squares[2];
  cpu::WeightArguments arguments;
  arguments.weight = a.weight, arguments.weight_stride = a.weight_stride;
  arguments.q = static_cast<uint8_t*>(codes.data_ptr()), arguments.scales = scales.data_ptr();
  arguments.zeros = &divisor, arguments.squares = squares;
  const auto threads = torch_threads(p.n * p.k);
  if (Status status = cpu::quantize_weight_fp4(problem, arguments, threads); !status.ok()) return status;
  if (!std::isfinite(squares[1])) {
    *a.fault = 1;
    return {};
  }
  lay_out_fp4_scales(problem, static_cast<const uint16_t*>(scales.data_ptr()), divisor,
                     static_cast<uint16_t*>(a.scales));
  // The nibbles are packed as an int4 weight with one group per row; its scales are unused.
  const int4::Weight shape{p.n, p.k, p.k, false, DType::kBFloat16};
  return cpu::int4_pack(shape, {arguments.q, arguments.scales, nullptr}, a.q, unused.data_ptr(), threads);
}

// Runs the quantizers of unpacked tensors and packs their results.
Status quantize_on_cpu(const weight::Problem& p, const weight::Arguments& a, const Argument& like) {
  if (*a.fault != 0) return {};
  if (p.format == Format::kFp4) return quantize_fp4_on_cpu(p, a, like);
  const auto threads = torch_threads(p.n * p.k);
  double squares[2];
  cpu::WeightArguments arguments;
  arguments.weight = a.weight, arguments.weight_stride = a.weight_stride;
  arguments.q = a.q, arguments.scales = a.scales, arguments.squares = squares;
  if (p.format == Format::kFp8) {
    cpu::BlockProblem problem{p.n, p.k, p.weight_dtype, std::min(p.rows, p.n), std::min(p.columns, p.k)};
    if (Status status = cpu::quantize_weight_fp8(problem, arguments, threads); !status.ok()) return status;
    *a.fault |= !std::isfinite(squares[1]);
    return {};
  }
  const float factor = 1;
  cpu::WeightProblem problem;
  problem.n = p.n, problem.k = p.k, problem.weight_dtype = p.weight_dtype, problem.format = p.format;
  problem.group_size = p.columns, problem.symmetric = p.symmetric, problem.scale_dtype = p.scale_dtype;
  problem.factors = &factor, problem.factor_count = 1, problem.whole_zeros = p.whole_zeros;
  Tensor scales = empty({p.n, p.block_columns()}, torch_dtype(p.scale_dtype), like);
  Tensor zeros = empty({p.n, p.block_columns()}, torch_dtype(p.scale_dtype), like);
  arguments.zeros = zeros.data_ptr();
  std::optional<Tensor> codes;
  if (p.format == Format::kInt4) {
    arguments.scales = scales.data_ptr();
    arguments.q = static_cast<uint8_t*>(codes.emplace(empty({p.n, p.k}, uint8_code(), like)).data_ptr());
  }
  if (Status status = cpu::quantize_weight(problem, arguments, threads); !status.ok()) return status;
  // Also catches scales that overflowed, which make the error non-finite.
  *a.fault |= !std::isfinite(squares[0]) || !std::isfinite(squares[1]);
  if (p.format != Format::kInt4) return {};
  const int4::Weight shape{p.n, p.k, p.columns, !p.symmetric, p.scale_dtype};
  const int4::Unpacked plain{arguments.q, arguments.scales, p.symmetric ? nullptr : arguments.zeros};
  return cpu::int4_pack(shape, plain, a.q, a.scales, threads);
}

// Checks the shapes of q and scales.
weight::Problem checked_problem(const Op& op, const Argument& weight, const Argument& q, const Argument& scales,
                                ScalarType dtype, int64_t rows, int64_t columns, bool symmetric, bool whole_zeros) {
  op.check(weight.dim() == 2 && weight.numel() > 0, "weight must have shape [N, K], N and K at least 1",
           "Check weight.shape");
  weight::Problem problem;
  problem.n = weight.size(0), problem.k = weight.size(1);
  problem.weight_dtype = op.float_dtype(weight);
  problem.rows = rows, problem.columns = columns;
  problem.symmetric = symmetric, problem.whole_zeros = whole_zeros;
  if (dtype == ScalarType::Byte) {
    problem.format = Format::kInt4;
    op.check(rows == 1, "rows must be 1 for four bits", "Pass 1 and the group size");
    problem.columns = checked_group_size(op, columns, problem.k);
    const int4::Weight shape = checked_packed(op, q, scales, weight, problem.n, problem.k, problem.columns);
    problem.scale_dtype = shape.scale_dtype;
    op.check(shape.has_zeros != symmetric, "scales must hold zero points unless symmetric",
             "Make them with pack_int4, zeros None exactly if symmetric");
    return problem;
  }
  if (dtype == ScalarType::Float4_e2m1fn_x2) {
    problem.format = Format::kFp4;
    op.check(rows == 1 && symmetric, "four-bit floats are symmetric, in groups of a row", "Pass 1, symmetric=True");
    check_fp4(op, q, scales, weight, problem.n, problem.k, columns);
    return problem;
  }
  const bool one_row = rows == 1 && columns == problem.k, one_scale = rows == problem.n && columns == problem.k;
  if (dtype == ScalarType::Char) {
    problem.format = Format::kInt8;
    op.check(one_row && symmetric, "int8 is symmetric, with a scale a row", "Pass 1 and K, and symmetric=True");
    op.check(scales.has_shape({problem.n}), "scales must have shape [N]", "Check scales.shape");
  } else {
    problem.format = Format::kFp8;
    op.check(dtype == ScalarType::Float8_e4m3fn,
             "dtype must be uint8 (0..15), float4_e2m1fn_x2, int8 (-127..127) or float8_e4m3fn",
             "Pass torch.uint8, torch.float4_e2m1fn_x2, torch.int8 or torch.float8_e4m3fn");
    op.check((one_row || one_scale || (rows == kScaleBlock && columns == kScaleBlock)) && symmetric,
             "e4m3 is symmetric, with a scale a row, one of all, or blocks of 128 x 128",
             "Pass 1 and K, N and K, or 128 and 128, and symmetric=True");
    op.check(scales.has_shape({problem.block_rows(), problem.block_columns()}),
             "scales must have shape [ceil(N / rows), ceil(K / columns)]", "Check scales.shape");
  }
  op.check(q.dtype() == int8_code() && q.has_shape({problem.n, problem.k}),
           "q must be int8 [N, K], also for the bytes of e4m3", "Pass q.view(torch.int8)");
  op.check(scales.dtype() == float32_code(), "scales must be float32", "Pass scales.float()");
  op.check_packed_operand(q, weight);
  op.check_packed_operand(scales, weight);
  return problem;
}

// Kernel arguments of W, q and scales.
weight::Arguments arguments_of(const Rows& source, const Argument& q, const Argument& scales) {
  weight::Arguments arguments;
  arguments.weight = source.data, arguments.weight_stride = source.stride;
  arguments.q = static_cast<uint8_t*>(q.data()), arguments.scales = scales.data();
  return arguments;
}

void quantize_weight_in_place(const Tensor& weight_tensor, const Tensor& q_tensor, const Tensor& scales_tensor,
                              const Tensor& fault_tensor, const std::optional<Tensor>& largest_tensor, ScalarType dtype,
                              int64_t rows, int64_t columns, bool symmetric, bool whole_zeros) {
  Op op("quantize_weight_");
  const Argument weight("weight", weight_tensor), q("q", q_tensor), scales("scales", scales_tensor);
  const Argument fault("fault", fault_tensor);
  op.involve(&weight), op.involve(&q), op.involve(&scales), op.involve(&fault);
  op.involve("rows", rows), op.involve("columns", columns);
  const weight::Problem problem = checked_problem(op, weight, q, scales, dtype, rows, columns, symmetric, whole_zeros);
  op.check(fault.dtype() == int32_code() && fault.has_shape({1}), "fault must be int32 [1]",
           "Pass torch.zeros(1, dtype=torch.int32, device=weight.device)");
  op.check_operand(fault, weight);

  const Rows source(weight_tensor, weight);
  weight::Arguments arguments = arguments_of(source, q, scales);
  arguments.fault = static_cast<int32_t*>(fault.data());
  std::optional<Argument> largest;
  if (largest_tensor) {
    op.involve(&largest.emplace("largest", *largest_tensor));
    op.check(largest->dtype() == float32_code() && largest->has_shape({1}), "largest must be float32 [1]",
             "Pass largest_magnitude(weight), or None");
    op.check_operand(*largest, weight);
    arguments.largest = static_cast<float*>(largest->data());
  }
  if (weight.is_cpu()) {
    op.check(quantize_on_cpu(problem, arguments, weight));
    return;
  }
#if defined(QAO_WITH_CUDA)
  const DeviceScope scope(weight);
  std::optional<Tensor> workspace;
  if (!arguments.largest && weight::needs_largest(problem)) {
    workspace.emplace(empty({1}, float32_code(), weight));
    arguments.largest = static_cast<float*>(workspace->data_ptr());
    op.check(weight::find_largest(problem, arguments, current_stream(weight)));
  }
  op.check(weight::quantize(problem, arguments, current_stream(weight)));
#else
  op.fail_without_cuda();
#endif
}

Tensor load_weight(const Tensor& weight_tensor, const Tensor& q_tensor, const Tensor& scales_tensor, ScalarType dtype,
                   int64_t rows, int64_t columns, bool symmetric, bool whole_zeros, double limit) {
  Op op("load_weight_");
  const Argument weight("weight", weight_tensor), q("q", q_tensor), scales("scales", scales_tensor);
  op.involve(&weight), op.involve(&q), op.involve(&scales);
  op.involve("rows", rows), op.involve("columns", columns);
  const weight::Problem problem = checked_problem(op, weight, q, scales, dtype, rows, columns, symmetric, whole_zeros);
  op.check(limit >= 0, "limit must not be negative", "Pass the largest magnitude that may be");
  const Rows source(weight_tensor, weight);
  weight::Arguments arguments = arguments_of(source, q, scales);
  if (weight.is_cpu()) {
    float largest = 0;
    op.check(largest_on_cpu(problem, arguments, &largest));
    if (!(largest <= limit)) return number_on_cpu(0);
    int32_t fault = 0;
    arguments.fault = &fault;
    op.check(quantize_on_cpu(problem, arguments, weight));
    return number_on_cpu(1);
  }
#if defined(QAO_WITH_CUDA)
  const DeviceScope scope(weight);
  const Tensor workspace = empty({2}, int32_code(), weight);
  arguments.fault = static_cast<int32_t*>(workspace.data_ptr());
  arguments.largest = reinterpret_cast<float*>(arguments.fault + 1);
  bool loaded = false;
  op.check(weight::load(problem, arguments, static_cast<float>(limit), &loaded, current_stream(weight)));
  return number_on_cpu(loaded);
#else
  op.fail_without_cuda();
#endif
}

Tensor largest_magnitude(const Tensor& weight_tensor) {
  Op op("largest_magnitude");
  const Argument weight("weight", weight_tensor);
  op.involve(&weight);
  op.check(weight.dim() == 2 && weight.numel() > 0, "weight must have shape [N, K], N and K at least 1",
           "Check weight.shape");
  weight::Problem problem;
  problem.n = weight.size(0), problem.k = weight.size(1), problem.weight_dtype = op.float_dtype(weight);
  const Rows source(weight_tensor, weight);
  weight::Arguments arguments;
  arguments.weight = source.data, arguments.weight_stride = source.stride;
  Tensor largest = empty({1}, float32_code(), weight);
  arguments.largest = static_cast<float*>(largest.data_ptr());
  if (weight.is_cpu()) {
    op.check(largest_on_cpu(problem, arguments, arguments.largest));
    return largest;
  }
#if defined(QAO_WITH_CUDA)
  const DeviceScope scope(weight);
  op.check(weight::find_largest(problem, arguments, current_stream(weight)));
  return largest;
#else
  op.fail_without_cuda();
#endif
}

constexpr Operator kOperators[] = {
    operator_of<"quantize_weight_", quantize_weight_in_place>(
        "quantize_weight_(Tensor weight, Tensor(a!) q, Tensor(b!) scales, Tensor(c!) fault, Tensor? largest, "
        "ScalarType dtype, int rows, int columns, bool symmetric, bool whole_zeros) -> ()"),
    operator_of<"load_weight_", load_weight>(
        "load_weight_(Tensor weight, Tensor(a!) q, Tensor(b!) scales, ScalarType dtype, int rows, int columns, bool "
        "symmetric, bool whole_zeros, float limit) -> Tensor"),
    operator_of<"largest_magnitude", largest_magnitude>("largest_magnitude(Tensor weight) -> Tensor"),
};

}  // namespace

Operators quantize_weight_in_place_operators() { return kOperators; }

}  // namespace qao
