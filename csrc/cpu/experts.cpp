#include "cpu/experts.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cpu/numeric.h"

namespace qao::cpu {
namespace {

int64_t bucket_of(const experts::Sort& s, int64_t slot) {
  const int64_t expert =
      s.wide ? static_cast<const int64_t*>(s.chosen)[slot] : static_cast<const int32_t*>(s.chosen)[slot];
  return expert < 0 || expert > s.experts ? s.experts : expert;
}

template <DType dtype>
void add_rows(const experts::Sum& s, const Threads& threads) {
  constexpr int64_t kColumns = 512;  // summed at a time, in the L1 cache
  split(threads, s.tokens, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t first = 0; first < s.columns; first += kColumns) {
        const int64_t count = least(kColumns, s.columns - first);
        float sum[kColumns] = {};
        for (int64_t slot = token * s.top_k; slot < (token + 1) * s.top_k; ++slot) {
          const float weight = load(s.weights, slot, s.weights_dtype);
          const int64_t at = s.places[slot] * s.columns + first;
          for (int64_t c = 0; c < count; ++c) sum[c] += weight * load(s.rows, at + c, dtype);
        }
        for (int64_t c = 0; c < count; ++c) store(s.y, token * s.columns + first + c, dtype, sum[c]);
      }
    }
  });
}

}  // namespace

void sort(const experts::Sort& s) {
  std::vector<int64_t> next(static_cast<size_t>(s.experts) + 2);  // the next place of a bucket
  for (int64_t slot = 0; slot < s.slots; ++slot) ++next[bucket_of(s, slot) + 1];
  for (int64_t e = 0; e < s.experts; ++e) {
    next[e + 1] += next[e];
    s.offsets[e] = static_cast<int32_t>(next[e + 1]);
  }
  for (int64_t slot = 0; slot < s.slots; ++slot) {
    const int64_t place = next[bucket_of(s, slot)]++;
    s.row_index[place] = static_cast<int32_t>(slot / s.top_k);
    s.places[slot] = static_cast<int32_t>(place);
  }
}

Status sum(const experts::Sum& s, const Threads& threads) {
  for (int64_t slot = 0; slot < s.tokens * s.top_k; ++slot) {
    if (s.places[slot] >= 0 && s.places[slot] < s.count) continue;
    return Status::error("places must be rows: " + std::to_string(s.places[slot]) + " of token " +
                             std::to_string(slot / s.top_k) + " is none of " + std::to_string(s.count),
                         "Pass the places of expert_sort, and all rows of the products");
  }
  switch (s.dtype) {
    case DType::kFloat32:
      add_rows<DType::kFloat32>(s, threads);
      break;
    case DType::kFloat16:
      add_rows<DType::kFloat16>(s, threads);
      break;
    case DType::kBFloat16:
      add_rows<DType::kBFloat16>(s, threads);
      break;
  }
  return {};
}

}  // namespace qao::cpu
