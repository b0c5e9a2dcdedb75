// Driver of attention of few tokens: work per key-value head and chunk of keys, then the sum over the chunks.
#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/attention_kernels.h"
#include "cpu/features.h"
#include "cpu/gemm/tile_shares.h"
#include "cpu/numeric.h"
#include "cpu/pieces.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

using attention::Arguments;
using attention::lowest_mask;
using attention::Mask;
using attention::Problem;

constexpr struct {
  Features needs;
  const AttentionKernels* kernels;
} kTable[] = {
#if defined(__x86_64__)
    {kAvx512, &avx512::kAttention},
    {kAvx2, &avx2::kAttention},
#endif
    {kScalar, &scalar::kAttention},
};

constexpr float kNever = -std::numeric_limits<float>::infinity();

class Attention {
 public:
  Attention(const Problem& problem, const Arguments& arguments, const AttentionKernels& kernels)
      : p_(problem), a_(arguments), kernels_(kernels) {
    rows_ = p_.heads / p_.kv_heads * p_.queries;
    mask_rows_ = p_.mask == Mask::kNone ? 0 : a_.mask_strides[1] == 0 ? p_.queries : rows_;
    chunks_ = divide_up(p_.keys, kChunkKeys);
  }

  int64_t heads() const { return p_.batch * p_.kv_heads; }
  int64_t chunks() const { return heads() * chunks_; }

  void lay_out(Pieces& pieces) {
    largest_ = pieces.take<float>(chunks() * rows_);
    sums_ = pieces.take<float>(chunks() * rows_);
    values_ = pieces.take<float>(chunks() * rows_ * p_.value_size);
  }

  // Chunk `index` of all, that is of head index / chunks_.
  void run(int64_t index, float lowest) const {
    const int64_t head = index / chunks_, batch = head / p_.kv_heads, kv_head = head % p_.kv_heads;
    const int64_t first = index % chunks_ * kChunkKeys, q_head = kv_head * (p_.heads / p_.kv_heads);
    const auto address = [](const void* data, int64_t offset, int64_t bytes) {
      return static_cast<const char*>(data) + offset * bytes;
    };
    const int64_t bytes = size_of(p_.dtype);
    AttentionChunk c;
    c.rows = rows_, c.queries = p_.queries, c.keys = std::min(kChunkKeys, p_.keys - first);
    c.size = p_.size, c.value_size = p_.value_size, c.dtype = p_.dtype, c.scale = p_.scale;
    c.q = address(a_.q, batch * a_.q_strides[0] + q_head * a_.q_strides[1], bytes);
    c.k = address(a_.k, batch * a_.k_strides[0] + kv_head * a_.k_strides[1] + first * a_.k_strides[2], bytes);
    c.v = address(a_.v, batch * a_.v_strides[0] + kv_head * a_.v_strides[1] + first * a_.v_strides[2], bytes);
    c.q_head_stride = a_.q_strides[1], c.q_stride = a_.q_strides[2];
    c.k_stride = a_.k_strides[2], c.v_stride = a_.v_strides[2];
    if (p_.mask != Mask::kNone) {
      const int64_t offset = batch * a_.mask_strides[0] + q_head * a_.mask_strides[1] + first * a_.mask_strides[3];
      c.mask = address(a_.mask, offset, p_.mask == Mask::kBool ? 1 : size_of(p_.mask_dtype));
      c.bool_mask = p_.mask == Mask::kBool, c.mask_dtype = p_.mask_dtype, c.mask_rows = mask_rows_;
      c.mask_head_stride = a_.mask_strides[1], c.mask_stride = a_.mask_strides[2];
      c.mask_key_stride = a_.mask_strides[3];
      c.lowest = lowest;
    }
    c.largest = largest_ + index * rows_, c.sums = sums_ + index * rows_;
    c.values = values_ + index * rows_ * p_.value_size;
    c.memory = static_cast<float*>(
        scratch(Scratch::kRow, kernels_.floats(rows_, mask_rows_, p_.size) * static_cast<int64_t>(sizeof(float))));
    kernels_.chunk(c);
  }

  // The results of key-value head `head`, from its chunks.
  void combine(int64_t head) const {
    bool empty = false;
    for (int64_t row = 0; row < rows_; ++row) empty = empty || total(head, row, largest(head, row)) == 0;
    // Softmax of a row with all keys masked by finite values depends on these values alone.
    if (empty && p_.mask == Mask::kFloat) {
      for (int64_t i = 0; i < chunks_; ++i) run(head * chunks_ + i, kNever);
    }
    for (int64_t row = 0; row < rows_; ++row) combine_row(head, row);
  }

 private:
  float largest(int64_t head, int64_t row) const {
    float found = kNever;
    for (int64_t i = 0; i < chunks_; ++i) found = std::max(found, largest_[(head * chunks_ + i) * rows_ + row]);
    return found;
  }
  // The weight of a chunk in the sum over all; 0 without a key that counts.
  float factor(int64_t head, int64_t chunk, int64_t row, float largest) const {
    const float own = largest_[(head * chunks_ + chunk) * rows_ + row];
    return own == kNever ? 0 : own == largest ? 1 : std::exp(own - largest);
  }
  float total(int64_t head, int64_t row, float largest) const {
    float sum = 0;
    for (int64_t i = 0; i < chunks_; ++i) {
      // Only NaN has a sum without a largest score.
      const float part = sums_[(head * chunks_ + i) * rows_ + row];
      sum += part != part ? part : factor(head, i, row, largest) * part;
    }
    return sum;
  }

  void combine_row(int64_t head, int64_t row) const {
    const int64_t batch = head / p_.kv_heads, q_head = head % p_.kv_heads * (p_.heads / p_.kv_heads);
    const int64_t query = row % p_.queries, y_row = (batch * p_.queries + query) * p_.heads + q_head + row / p_.queries;
    const float most = largest(head, row), sum = total(head, row, most);
    float* values = static_cast<float*>(scratch(Scratch::kSums, p_.value_size * static_cast<int64_t>(sizeof(float))));
    std::fill_n(values, p_.value_size, 0.0f);
    for (int64_t i = 0; i < chunks_; ++i) {
      const float weight = factor(head, i, row, most);
      if (weight == 0) continue;
      const float* part = values_ + ((head * chunks_ + i) * rows_ + row) * p_.value_size;
      for (int64_t d = 0; d < p_.value_size; ++d) values[d] += weight * part[d];
    }
    const float inverse = sum == 0 ? 0 : 1 / sum;  // without a key, 0 as in torch
    for (int64_t d = 0; d < p_.value_size; ++d) store(a_.y, y_row * p_.value_size + d, p_.dtype, values[d] * inverse);
  }

  const Problem& p_;
  const Arguments& a_;
  const AttentionKernels& kernels_;
  int64_t rows_, mask_rows_, chunks_;
  float *largest_ = nullptr, *sums_ = nullptr, *values_ = nullptr;
};

}  // namespace

Status attention(const attention::Problem& p, const attention::Arguments& a, const Threads& threads) {
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  const auto* row = kTable;
  while (!includes(features, row->needs)) ++row;
  Attention attention(p, a, *row->kernels);
  Pieces count(nullptr);
  attention.lay_out(count);
  Pieces pieces(scratch(Scratch::kActivations, count.bytes()));
  attention.lay_out(pieces);
  const auto chunks = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) attention.run(i, lowest_mask(p.mask, p.mask_dtype));
  };
  const auto heads = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) attention.combine(i);
  };
  if (is_serial(threads, p.batch * p.kv_heads * p.keys * (p.size + p.value_size))) {
    chunks(0, attention.chunks());
    heads(0, attention.heads());
    return {};
  }
  Step first(threads.count, attention.chunks()), second(threads.count, attention.heads());
  threads.for_each([&](int) {
    first.run(chunks);
    second.run(heads);
  });
  return {};
}

}  // namespace qao::cpu
