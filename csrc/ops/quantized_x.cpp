// QuantizedX: memory and launch of activation quantization before a GEMM.
#include "ops/quantized_x.h"

#include "cpu/quantize.h"
#include "cpu/scratch.h"
#include "layout/int4.h"

namespace qao {
namespace {

constexpr int64_t kKeptBytes = 1 << 20;  // largest quantized x that a thread caches across calls

// Offsets in bytes of the buffers in one allocation.
struct Layout {
  int64_t bytes = 0;
  int64_t q_stride, q, scales, zeros, sums, workspace;

  Layout(const quantize::Problem& problem, int64_t workspace_bytes)
      : q_stride((problem.k + 63) / 64 * 64),
        q(take(problem.m * q_stride)),
        scales(take(problem.scales() * 4)),
        zeros(take(problem.m * 4)),
        sums(take(problem.m * problem.sums_groups() * 4)),
        workspace(take(workspace_bytes)) {}

 private:
  int64_t take(int64_t size) {
    const int64_t at = bytes;
    bytes += (size + 15) / 16 * 16;
    return at;
  }
};

}  // namespace

QuantizedX::QuantizedX(const gemm::Problem& problem, const Argument& x, const Argument* scale) : x_(x), scale_(scale) {
  problem_.m = problem.m;
  problem_.k = problem.k;
  problem_.x_dtype = problem.x_dtype;
  problem_.format = problem.x;
  problem_.scaling = problem.x_scaling;
  problem_.symmetric = !problem.x_zeros;
  problem_.static_scale = problem.static_scale;
  problem_.rotate(problem.x_rotation);
  if (problem.weight == Format::kInt4 && x.is_cuda()) {
    problem_.order = quantize::Order::kInt4Tiles;
    problem_.sums_group = problem.group_size;
  }
}

void QuantizedX::make(const Op& op, gemm::Arguments& arguments) {
  int64_t workspace_bytes = 0;
#if defined(QAO_WITH_CUDA)
  if (x_.is_cuda()) workspace_bytes = quantize::workspace_bytes(problem_);
#endif
  const Layout layout(problem_, workspace_bytes);
  char* base;
  if (x_.is_cpu() && layout.bytes <= kKeptBytes) {
    base = static_cast<char*>(cpu::scratch(cpu::Scratch::kQuantized, layout.bytes));
  } else {
    base = static_cast<char*>(memory_.emplace(empty({layout.bytes}, uint8_code(), x_)).data_ptr());
  }
  quantize::Arguments q;
  q.x = arguments.x, q.x_stride = arguments.x_stride;
  q.q = base + layout.q, q.q_stride = layout.q_stride;
  q.scales = reinterpret_cast<float*>(scale_ != nullptr ? scale_->data() : base + layout.scales);
  if (!problem_.symmetric) q.zeros = reinterpret_cast<int32_t*>(base + layout.zeros);
  if (problem_.sums_group > 0) q.sums = reinterpret_cast<float*>(base + layout.sums);
  q.workspace = base + layout.workspace;
  if (x_.is_cpu()) {
    op.check(cpu::quantize(problem_, q, torch_threads()));
  } else {
#if defined(QAO_WITH_CUDA)
    op.check(quantize::launch(problem_, q, current_stream(x_)));
#endif
  }
  made_ = q;
  set(arguments);
}

bool QuantizedX::take(const QuantizedX& other, gemm::Arguments& arguments) const {
  const quantize::Problem &own = problem_, &made = other.problem_;
  const auto scale = [](const Argument* given) { return given == nullptr ? nullptr : given->data(); };
  if (!other.made_ || own.symmetric != made.symmetric || own.order != made.order || own.scaling != made.scaling ||
      own.sums_group != made.sums_group || scale(scale_) != scale(other.scale_)) {
    return false;
  }
  other.set(arguments);
  return true;
}

void QuantizedX::set(gemm::Arguments& arguments) const {
  arguments.x = made_->q, arguments.x_stride = made_->q_stride;
  arguments.x_scales = made_->scales;
  arguments.x_zeros = made_->zeros;
  arguments.x_sums = made_->sums;
}

}  // namespace qao
