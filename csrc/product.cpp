// Product: weight operands, plan and launch.
#include "product.h"

#include "cpu/mm.h"
#include "fp4_operands.h"

namespace qao {

Product::Product(Op& op, const Argument& x, const Tensor& weight, const Tensor& scales,
                 const std::optional<Tensor>& bias)
    : op_(op), x_(x), weight_("weight", weight), scales_("scales", scales) {
  op_.involve(&weight_), op_.involve(&scales_);
  if (bias) op_.involve(&bias_.emplace("bias", *bias));
  arguments.weight = weight_.data();
  arguments.scales = scales_.data();
}

void Product::add_weight_sums(const std::optional<Tensor>& weight_sums) {
  if (weight_sums) op_.involve(&weight_sums_.emplace("weight_sums", *weight_sums));
}

void Product::add_row_scales(const std::optional<Tensor>& row_scales) {
  if (row_scales) op_.involve(&row_scales_.emplace("row_scales", *row_scales));
}

void Product::add_x_scale(const std::optional<Tensor>& x_scale, int64_t x_group_size) {
  if (x_scale) op_.involve(&x_scale_.emplace("x_scale", *x_scale));
  op_.involve("x_group_size", x_group_size);
}

void Product::set_sizes(int64_t n, int64_t k) {
  problem.n = n;
  problem.k = k;
  op_.check(x_.dim() >= 1 && x_.size(x_.dim() - 1) == k, "x must have shape [..., in_features]",
            "Check x.shape against the layer's in_features");
}

// One scale per 128 x 128 block.
bool Product::has_block_scales() const {
  return scales_.has_shape({(problem.n + kScaleBlock - 1) / kScaleBlock, problem.k_blocks()});
}

void Product::use_weight(const RowMajor& rows) {
  hide_experts();
  problem.weight = rows.format;
  const bool typed = weight_.dtype() == int8_code() || weight_.dtype() == rows.dtype();
  op_.check(typed && weight_.dim() == 2 && weight_.size(0) >= 1 && weight_.size(1) >= 1, rows.must_be,
            "Quantize the weight first");
  set_sizes(weight_.size(0), weight_.size(1));
  op_.check(scales_.dtype() == float32_code(), "scales must be float32", "Pass scales.float()");
  if (scales_.numel() == problem.n && (scales_.dim() == 1 || scales_.size(scales_.dim() - 1) == 1)) {
    problem.weight_scaling = Scaling::kRow;
  } else if (scales_.numel() == 1) {
    problem.weight_scaling = Scaling::kTensor;
  } else {
    op_.check(rows.may_have_blocks && has_block_scales(),
              rows.may_have_blocks
                  ? "scales must have shape [N], [1], or [ceil(N / 128), ceil(K / 128)] for blocks of 128 x 128"
                  : "scales must have shape [N] or [1]",
              "Check scales.shape against weight.shape");
    problem.weight_scaling = Scaling::kBlock;
  }
  problem.weight_aligned = weight_.is_aligned(16) && problem.k % 16 == 0;
  op_.check_operand(weight_, x_), op_.check_operand(scales_, x_);
}

void Product::use_packed_weight(const PackedSizes& given) {
  hide_experts();
  const PackedSizes sizes = given.left_out() ? int4_sizes_of(op_, weight_, scales_) : given;
  use_sizes(sizes);
  problem.weight = Format::kInt4;
  const int4::Weight packed = checked_packed(op_, weight_, scales_, x_, sizes.n, sizes.k, sizes.group_size);
  problem.group_size = packed.group_size;
  problem.has_zeros = packed.has_zeros;
  problem.scale_dtype = packed.scale_dtype;
  problem.row_scales = !problem.has_zeros && problem.groups() == 1;  // the scale of the only group
  if (row_scales_) use_row_scales();
}

void Product::use_fp4_weight(const PackedSizes& given) {
  hide_experts();
  const PackedSizes sizes = given.left_out() ? fp4_sizes_of(op_, weight_, scales_) : given;
  use_sizes(sizes);
  problem.weight = Format::kFp4;
  check_fp4(op_, weight_, scales_, x_, sizes.n, sizes.k, sizes.group_size);
  problem.group_size = sizes.group_size;
  problem.scale_dtype = DType::kBFloat16;
}

void Product::use_sizes(const PackedSizes& sizes) {
  op_.involve("out_features", sizes.n), op_.involve("in_features", sizes.k);
  op_.involve("group_size", sizes.group_size);
  check_packed_sizes(op_, sizes.n, sizes.k);
  set_sizes(sizes.n, sizes.k);
}

void Product::use_row_scales() {
  op_.check(!problem.has_zeros, "row_scales are for a weight without zero points",
            "Pass None, or quantize with symmetric=True");
  op_.check(row_scales_->dtype() == float32_code() && row_scales_->has_shape({problem.n}),
            "row_scales must be float32 of shape [out_features]",
            "Pass the row scales of a weight quantized with two-level scales, or None");
  op_.check_operand(*row_scales_, x_);
  problem.row_scales = true;
  arguments.row_scales = static_cast<const float*>(row_scales_->data());
}

void Product::use_bias_and_sums() {
  if (bias_) {
    problem.has_bias = true;
    problem.bias_dtype = op_.check_bias(*bias_, x_, problem.n);
    arguments.bias = bias_->data();
  }
  if (!weight_sums_) return;
  problem.x_zeros = true;
  op_.check(weight_sums_->dtype() == float32_code() && weight_sums_->has_shape({problem.n}),
            "weight_sums must be float32 of shape [out_features]",
            "Pass the row sums of the dequantized weight, or None for a symmetric x");
  op_.check_operand(*weight_sums_, x_);
  arguments.weight_sums = static_cast<const float*>(weight_sums_->data());
}

#if defined(QAO_WITH_CUDA)
Gpu gpu_of(const Op& op, const Argument& x) {
  Gpu gpu;
  op.check(query_gpu(x.device_index(), &gpu));
  return gpu;
}
#endif

void Product::make_quantized_x() {
  quantized_->make(op_, arguments);
  problem.quantizes_x = false;
}

Tensor Product::make_y() {
  use_bias_and_sums();
  Tensor y = empty_rows(problem.gated ? problem.n / 2 : problem.n, torch_dtype(problem.y_dtype), x_);
  arguments.y = y.data_ptr();
  return y;
}

void Product::launch([[maybe_unused]] const Product* before) {
  if (problem.m == 0) return;
  if (x_.is_cpu()) {
    // The CPU GEMM quantizes rows itself, except with one scale for the whole tensor.
    if (quantized_ && problem.x_scaling == Scaling::kTensor) make_quantized_x();
    return op_.check(cpu::mm(problem, arguments, torch_threads(problem.m * problem.n * problem.k)));
  }
#if defined(QAO_WITH_CUDA)
  const DeviceScope scope(x_);
  mm::Plan plan;
  op_.check(mm::plan(problem, gpu_of(op_, x_), &plan));
  if (quantized_ && !plan.quantizes_x && !(before && quantized_->take(*before->quantized_, arguments))) {
    quantized_->make(op_, arguments);
  }
  std::optional<Tensor> workspace;
  if (plan.workspace_bytes > 0) {
    arguments.workspace = workspace.emplace(empty({plan.workspace_bytes}, uint8_code(), x_)).data_ptr();
  }
  op_.check(mm::launch(problem, plan, arguments, current_stream(x_)));
#else
  op_.fail_without_cuda();
#endif
}

Tensor Product::run() {
  if (problem.batch_invariant) keep_rows_apart();
  Tensor y = make_y();
  launch();
  return y;
}

#if defined(QAO_WITH_CUDA)
std::optional<std::vector<Tensor>> Product::run_fused(std::span<Product* const> products, const mm::Problem& first,
                                                      const mm::Arguments& x) {
  const Product& any = *products[0];
  if (any.x_.is_cpu() || first.m == 0 || products.size() > mm::kMaxParts) return {};
  mm::Problem problem = first;
  problem.n = 0;
  problem.has_bias = false;
  std::vector<int64_t> rows;
  for (Product* product : products) {
    product->use_bias_and_sums();
    const mm::Problem& own = product->problem;
    if (own.weight != first.weight || own.has_zeros != first.has_zeros || own.scale_dtype != first.scale_dtype ||
        own.group_size != first.group_size) {
      return {};
    }
    if (own.has_bias) {
      if (problem.has_bias && problem.bias_dtype != own.bias_dtype) return {};
      problem.has_bias = true, problem.bias_dtype = own.bias_dtype;
    }
    rows.push_back(own.n);
    problem.n += own.n;
  }
  mm::Plan plan;
  if (!mm::merges(problem, rows, gpu_of(any.op_, any.x_), &plan)) return {};

  std::vector<Tensor> ys;
  std::vector<mm::Part> parts;
  for (Product* product : products) {
    if (!problem.gated || ys.empty()) ys.push_back(product->make_y());
    const mm::Arguments& own = product->arguments;
    parts.push_back({product->problem.n, own.weight, own.scales, own.bias, own.y});
  }
  const DeviceScope scope(any.x_);
  any.op_.check(mm::launch(problem, plan, x, parts, current_stream(any.x_)));
  return ys;
}
#else
std::optional<std::vector<Tensor>> Product::run_fused(std::span<Product* const>, const mm::Problem&,
                                                      const mm::Arguments&) {
  return {};
}
#endif

std::vector<Tensor> Product::run_merged(std::span<Product* const> products) {
  if (auto fused = run_fused(products, products[0]->problem, products[0]->arguments)) return std::move(*fused);
  std::vector<Tensor> ys;
  for (Product* product : products) ys.push_back(product->make_y());
  Product& first = *products[0];
  const bool one_scale = first.quantized_ && first.problem.x_scaling == Scaling::kTensor;
  if (!first.x_.is_cpu() || first.problem.m == 0 || one_scale) {
    for (Product* product : products) product->launch(product == &first ? nullptr : &first);
    return ys;
  }
  std::vector<cpu::Gemm> gemms;
  int64_t work = 0;
  for (Product* product : products) {
    gemms.push_back({product->problem, product->arguments});
    work += product->problem.m * product->problem.n * product->problem.k;
  }
  first.op_.check(cpu::mm(gemms, torch_threads(work)));
  return ys;
}

}  // namespace qao
