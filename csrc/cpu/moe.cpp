// MoE routing on the CPU: top-k, permute and unpermute.
#include "cpu/moe.h"

#include <algorithm>
#include <cmath>
#include <limits>
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

// Index of the largest value that is not taken, the first if tied. NaN counts as larger than any number.
size_t best_of(const std::vector<float>& values, const std::vector<char>& taken) {
  size_t best = values.size();
  for (size_t i = 0; i < values.size(); ++i) {
    if (taken[i]) continue;
    if (best == values.size() || values[i] > values[best] || (std::isnan(values[i]) && !std::isnan(values[best]))) {
      best = i;
    }
  }
  return best;
}

template <DType dtype>
void add_rows(const experts::Sum& s, const Threads& threads) {
  constexpr int64_t kColumns = 512;  // summed at once, in L1
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

// Marks experts outside of the best groups as taken. A group is ranked by the sum of its two best experts.
void leave_groups(const experts::TopK& t, const std::vector<float>& biased, std::vector<char>* taken) {
  const int size = t.experts / t.groups;
  std::vector<float> ranks(static_cast<size_t>(t.groups));
  for (int g = 0; g < t.groups; ++g) {
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      const float value = biased[e];
      if (value > first) {
        second = first, first = value;
      } else if (value > second) {
        second = value;
      }
    }
    ranks[g] = size == 1 ? first : first + second;
  }
  std::vector<char> kept(ranks.size());
  for (int i = 0; i < t.top_groups; ++i) kept[best_of(ranks, kept)] = 1;
  for (int e = 0; e < t.experts; ++e) (*taken)[e] = !kept[e / size];
}

void choose_for(const experts::TopK& t, int64_t token, std::vector<float>& scores, std::vector<float>& biased,
                std::vector<char>& taken) {
  float largest = -std::numeric_limits<float>::infinity();
  double sum = 0;
  for (int e = 0; e < t.experts; ++e) {
    scores[e] = load(t.logits, token * t.experts + e, t.logits_dtype);
    if (scores[e] > largest) largest = scores[e];
  }
  const bool softmax = t.scores == experts::Scores::kSoftmax;
  if (softmax) {
    for (float& score : scores) sum += score = std::exp(score - largest);
  }
  for (int e = 0; e < t.experts; ++e) {
    scores[e] = softmax ? static_cast<float>(scores[e] / sum) : 1 / (1 + std::exp(-scores[e]));
    biased[e] = t.bias == nullptr ? scores[e] : scores[e] + load(t.bias, e, t.bias_dtype);
    taken[e] = 0;
  }
  if (t.groups > 1) leave_groups(t, biased, &taken);
  float* const weights = t.weights + token * t.top_k;
  float together = 0;
  for (int64_t choice = 0; choice < t.top_k; ++choice) {
    const size_t best = best_of(biased, taken);
    taken[best] = 1;
    t.chosen[token * t.top_k + choice] = static_cast<int64_t>(best);
    together += weights[choice] = scores[best];
  }
  const float scale = t.factor / (t.normalized ? together + experts::kLeastSum : 1);
  for (int64_t choice = 0; choice < t.top_k; ++choice) weights[choice] *= scale;
}

}  // namespace

void choose(const experts::TopK& t, const Threads& threads) {
  split(threads, t.tokens, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(static_cast<size_t>(t.experts)), biased(scores.size());
    std::vector<char> taken(scores.size());
    for (int64_t token = begin; token < end; ++token) choose_for(t, token, scores, biased, taken);
  });
}

void sort(const experts::Sort& s) {
  std::vector<int64_t> next(static_cast<size_t>(s.experts) + 2);  // next slot of each bucket
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
                             std::to_string(slot / s.top_k) + " is not below " + std::to_string(s.count),
                         "Pass the places of expert_sort, and all rows of the GEMM's result");
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
