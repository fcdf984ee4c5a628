#include "quern/ops/sampling/draw.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "quern/ops/sampling/logit_blocks.h"
#include "quern/ops/sampling/philox.h"
#include "quern/ops/sampling/sampler.h"
#include "quern/ops/sampling/sampler_kernels.h"

namespace quern {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The order of typical_p: first what is closest to the mean exponent.
struct MoreTypical {
  double Exponent(int32_t id) const {
    if (logits[id] == rule.largest) return 0.0;
    return static_cast<double>((logits[id] - rule.largest) / rule.temperature);
  }
  bool operator()(int32_t a, int32_t b) const {
    const double off_a = std::abs(Exponent(a) - mean);
    const double off_b = std::abs(Exponent(b) - mean);
    return off_a < off_b || (off_a == off_b && a < b);
  }
  const float* logits;
  const WeightRule& rule;
  double mean = 0.0;
};

// The end of the fewest first ids, in the order of `before`, whose weights sum
// to at least `wanted`: at least one. They are moved to the front. Linear in
// the number of ids, because each step halves them.
template <class Before>
int32_t* FewestThatReach(double wanted, int32_t* begin, int32_t* end,
                         const float* weights, const Before& before) {
  constexpr std::ptrdiff_t kFew = 64;
  const auto weigh = [weights](const int32_t* from, const int32_t* to) {
    double sum = 0.0;
    for (; from != to; ++from) sum += static_cast<double>(weights[*from]);
    return sum;
  };
  double sum = 0.0;  // of what lies before `begin`
  while (end - begin > kFew) {
    int32_t* const middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, before);
    const double with_half = sum + weigh(begin, middle);
    if (with_half >= wanted) {
      end = middle;
    } else {
      sum = with_half;
      begin = middle;
    }
  }
  std::sort(begin, end, before);
  while (begin != end) {
    sum += static_cast<double>(weights[*begin++]);
    if (sum >= wanted) break;
  }
  return begin;
}

class Drawing {
 public:
  Drawing(const float* logits, int64_t vocab, const SamplingParams& params,
          const SamplerKernels& kernels, const DrawScratch& scratch)
      : logits_(logits),
        params_(params),
        kernels_(kernels),
        scratch_(scratch),
        blocks_(logits, vocab) {
    rule_.largest = blocks_.Largest(kernels_, scratch_.largest);
    rule_.temperature = params.temperature;
    rule_.least_logit = -kInfinity;
    rule_.least_weight = params.min_p;
    top_k_ = params.top_k < vocab ? params.top_k : 0;
  }

  int32_t Token() {
    if (rule_.largest == -kInfinity) return SamplerPlan::kNoToken;
    if (params_.top_n_sigma > 0.0f) rule_.least_logit = LeastWithinSigmas();
    if (top_k_ == 0 && params_.top_p == 1.0f && params_.typical_p == 1.0f) {
      return DrawFromAll();
    }
    Select();
    for (int64_t i = 0; i < num_gathered_; ++i) {
      scratch_.sums[i] = kernels_.sum(WeightsOf(scratch_.gathered[i]));
    }
    const Place place = PlaceOf(num_gathered_);
    const int32_t block = scratch_.gathered[place.index];
    return Within(block, WeightsOf(block), place);
  }

 private:
  // Where a running sum passes the draw: in which of the blocks that have sums,
  // and after how much.
  struct Place {
    int64_t index = 0;
    double before = 0.0;
    double at = 0.0;
  };
  Place PlaceOf(int64_t count) const {
    double total = 0.0;
    for (int64_t i = 0; i < count; ++i) total += scratch_.sums[i];
    Place place;
    place.at = PhiloxUniform(params_.seed, params_.step) * total;
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      if (scratch_.sums[i] == 0.0) continue;
      place.index = i;
      place.before = sum;
      sum += scratch_.sums[i];
      if (sum > place.at) break;
    }
    return place;
  }
  // The token at a place within a block. If rounding made the draw equal the
  // block's sum, this is the last token with a weight.
  static int32_t Within(int64_t block, const float* weights,
                        const Place& place) {
    int64_t token = 0;
    double sum = place.before;
    for (int64_t i = 0; i < kSamplerBlock; ++i) {
      if (weights[i] == 0.0f) continue;
      token = i;
      sum += static_cast<double>(weights[i]);
      if (sum > place.at) break;
    }
    return static_cast<int32_t>(block * kSamplerBlock + token);
  }

  float* WeightsOf(int64_t block) const {
    return scratch_.weights + block * kSamplerBlock;
  }

  // Sums of the weights of all blocks, which are not kept.
  double SumAll() const {
    float weights[kSamplerBlock];
    double total = 0.0;
    for (int64_t b = 0; b < blocks_.count(); ++b) {
      scratch_.sums[b] = 0.0;
      if (scratch_.largest[b] < rule_.least_logit) continue;
      kernels_.weights(blocks_[b], rule_, weights);
      scratch_.sums[b] = kernels_.sum(weights);
      total += scratch_.sums[b];
    }
    return total;
  }
  int32_t DrawFromAll() const {
    SumAll();
    const Place place = PlaceOf(blocks_.count());
    float weights[kSamplerBlock];
    kernels_.weights(blocks_[place.index], rule_, weights);
    return Within(place.index, weights, place);
  }

  // The least f32 within top_n_sigma standard deviations of the largest logit.
  float LeastWithinSigmas() const {
    if (rule_.largest == kInfinity) return kInfinity;
    SamplerMoments all;
    for (int64_t b = 0; b < blocks_.count(); ++b) {
      const SamplerMoments one = kernels_.moments(blocks_[b], rule_);
      all.sum += one.sum;
      all.squares += one.squares;
      all.count += one.count;
    }
    const auto count = static_cast<double>(all.count);
    const double mean = all.sum / count;
    const double variance = std::max(all.squares / count - mean * mean, 0.0);
    const double least =
        static_cast<double>(rule_.largest) -
        static_cast<double>(params_.top_n_sigma) * std::sqrt(variance);
    if (least < -std::numeric_limits<float>::max()) return -kInfinity;
    const auto rounded = static_cast<float>(least);
    return static_cast<double>(rounded) < least
               ? std::nextafter(rounded, kInfinity)
               : rounded;
  }

  float KthLargestBlock(int64_t k) const {
    return blocks_.KthLargest(k, scratch_.largest, scratch_.order);
  }

  // Keeps the weights and ids of the logits from `least` on. Returns the sum of
  // their weights.
  double Gather(float least) {
    WeightRule rule = rule_;
    rule.least_logit = std::max(least, rule_.least_logit);
    num_gathered_ = 0;
    end_ = scratch_.ids;
    double total = 0.0;
    for (int64_t b = 0; b < blocks_.count(); ++b) {
      if (scratch_.largest[b] < rule.least_logit) continue;
      scratch_.gathered[num_gathered_++] = static_cast<int32_t>(b);
      float* const weights = WeightsOf(b);
      kernels_.weights(blocks_[b], rule, weights);
      total += kernels_.sum(weights);
      // A padded token has no weight.
      for (int64_t i = 0; i < kSamplerBlock; ++i) {
        if (weights[i] > 0.0f) {
          *end_++ = static_cast<int32_t>(b * kSamplerBlock + i);
        }
      }
    }
    return total;
  }
  double SumGathered() const {
    double total = 0.0;
    for (int64_t i = 0; i < num_gathered_; ++i) {
      total += kernels_.sum(WeightsOf(scratch_.gathered[i]));
    }
    return total;
  }
  // Drops the candidates from `kept` on.
  void Drop(int32_t* kept) {
    for (const int32_t* id = kept; id != end_; ++id) {
      scratch_.weights[*id] = 0.0f;
    }
    end_ = kept;
  }

  // Leaves the weights of what the filters keep.
  void Select() {
    const LargerLogit larger{logits_};
    int32_t* const begin = scratch_.ids;
    double total = 0.0;
    double wanted = 0.0;
    if (top_k_ > 0) {
      Gather(KthLargestBlock(top_k_));
      if (top_k_ < end_ - begin) {
        int32_t* const kth = begin + top_k_ - 1;
        std::nth_element(begin, kth, end_, larger);
        Drop(kth + 1);
      }
      total = SumGathered();
      wanted = static_cast<double>(params_.top_p) * total;
    } else if (params_.top_p < 1.0f) {
      // A quarter as many of the largest logits as there are blocks often
      // suffice.
      wanted = static_cast<double>(params_.top_p) * SumAll();
      const int64_t few = std::max<int64_t>(blocks_.count() / 4, 1);
      if (Gather(KthLargestBlock(few)) < wanted) Gather(-kInfinity);
    } else {
      total = Gather(-kInfinity);
    }
    if (params_.top_p < 1.0f) {
      Drop(FewestThatReach(wanted, begin, end_, scratch_.weights, larger));
      total = SumGathered();
    }
    if (params_.typical_p < 1.0f) {
      MoreTypical typical{logits_, rule_};
      for (const int32_t* id = begin; id != end_; ++id) {
        typical.mean += static_cast<double>(scratch_.weights[*id]) *
                        typical.Exponent(*id) / total;
      }
      Drop(FewestThatReach(static_cast<double>(params_.typical_p) * total,
                           begin, end_, scratch_.weights, typical));
    }
  }

  const float* logits_;
  const SamplingParams& params_;
  const SamplerKernels& kernels_;
  const DrawScratch& scratch_;
  LogitBlocks blocks_;
  WeightRule rule_;
  int64_t top_k_ = 0;  // 0: all
  int64_t num_gathered_ = 0;
  int32_t* end_ = nullptr;  // of the candidates
};

}  // namespace

int32_t GreedyToken(const float* logits, int64_t vocab,
                    const SamplerKernels& kernels) {
  const LogitBlocks blocks(logits, vocab);
  int64_t best = 0;
  float largest = -kInfinity;
  for (int64_t b = 0; b < blocks.count(); ++b) {
    const float most = kernels.largest(blocks[b]);
    if (most > largest) {
      largest = most;
      best = b;
    }
  }
  if (largest == -kInfinity) return SamplerPlan::kNoToken;
  const float* const block = blocks[best];
  return static_cast<int32_t>(
      best * kSamplerBlock +
      (std::find(block, block + kSamplerBlock, largest) - block));
}

int32_t DrawToken(const float* logits, int64_t vocab,
                  const SamplingParams& params, const SamplerKernels& kernels,
                  const DrawScratch& scratch) {
  return Drawing(logits, vocab, params, kernels, scratch).Token();
}

}  // namespace quern
