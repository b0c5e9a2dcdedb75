// Dequantization of GGUF weights and embedding lookup, for any CPU.
#include "cpu/gguf.h"

#include <string>

#include "cpu/features.h"
#include "cpu/gguf_blocks.h"

namespace qao::cpu::gguf {
namespace {

template <Type kType>
void dequantize_blocks(const uint8_t* row, int64_t begin, int64_t count, float* out) {
  using B = Blocks<kType>;
  const uint8_t* block = row + begin / B::kColumns * B::kBytes;
  for (int64_t k = 0; k < count; k += B::kColumns, block += B::kBytes) {
    uint8_t codes[B::kColumns];
    float scale[B::kColumns / kSegment], minimum[B::kColumns / kSegment];
    B::codes(block, codes);
    B::scales(block, scale, minimum);
    for (int segment = 0; segment < B::kColumns / kSegment; ++segment) {
      const float factor = scale[segment], least = B::kHasMinima ? minimum[segment] : 0;
      const uint8_t* from = codes + segment * kSegment;
      float* to = out + k + segment * kSegment;
      for (int i = 0; i < kSegment; ++i) {
        const float value = factor * static_cast<float>(from[i] - B::kOffset);
        to[i] = B::kHasMinima ? value - least : value;
      }
    }
  }
}

// Row `from` of W as row `to` of the result.
void write_row(const Weight& rows, [[maybe_unused]] Features features, int64_t from, int64_t to) {
  const BlockSize block = block_size(rows.type);
  const uint8_t* row = rows.weight + from * (rows.k / block.columns * block.bytes);
#if defined(__x86_64__)
  if (includes(features, kAvx512)) {
    char* out = static_cast<char*>(rows.out) + to * rows.k * size_of(rows.dtype);
    return avx512::dequantize_gguf(rows.type, row, rows.k, rows.dtype, out);
  }
#endif
  if (rows.dtype == DType::kFloat32) {
    return dequantize_row(rows.type, row, 0, rows.k, static_cast<float*>(rows.out) + to * rows.k);
  }
  float values[kUnit];
  for (int64_t k = 0; k < rows.k; k += kUnit) {
    const int64_t count = least(kUnit, rows.k - k);
    dequantize_row(rows.type, row, k, count, values);
    uint16_t* out = static_cast<uint16_t*>(rows.out) + to * rows.k + k;
    if (rows.dtype == DType::kBFloat16) {
      for (int64_t i = 0; i < count; ++i) out[i] = to_bf16(values[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = to_fp16(values[i]);
    }
  }
}

}  // namespace

BlockSize block_size(int64_t type) {
  for (int known : {kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIq4Nl, kIq4Xs}) {
    if (type != known) continue;
    return with_type(known, []<Type kType> { return BlockSize{Blocks<kType>::kColumns, Blocks<kType>::kBytes}; });
  }
  return {0, 0};
}

int64_t scale_columns(int64_t type) { return scale_columns(static_cast<Type>(type)); }

const uint8_t* segment_places(int64_t type) {
  return with_type(static_cast<int>(type), []<Type kType> {
    static constexpr Segments kPlaces = inverse(segment_order(kType));
    return kPlaces.of;
  });
}

void dequantize_row(int64_t type, const uint8_t* row, int64_t begin, int64_t count, float* out) {
  with_type(static_cast<int>(type), [&]<Type kType> { dequantize_blocks<kType>(row, begin, count, out); });
}

Status dequantize(const Weight& rows, const Threads& threads) {
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  split(threads, rows.n, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) write_row(rows, features, n, n);
  });
  return {};
}

Status embedding(const Weight& rows, const void* ids, bool wide_ids, int64_t m, const Threads& threads) {
  const auto id = [&](int64_t i) {
    return wide_ids ? static_cast<const int64_t*>(ids)[i] : int64_t{static_cast<const int32_t*>(ids)[i]};
  };
  for (int64_t i = 0; i < m; ++i) {
    if (id(i) >= 0 && id(i) < rows.n) continue;
    return Status::error("ids must be in 0.." + std::to_string(rows.n - 1) + " (num_embeddings " +
                             std::to_string(rows.n) + "), but element " + std::to_string(i) + " is " +
                             std::to_string(id(i)),
                         "Check the tokenizer against the model's vocabulary");
  }
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  split(threads, m, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) write_row(rows, features, id(i), i);
  });
  return {};
}

}  // namespace qao::cpu::gguf
