#ifndef QUERN_OPS_SAMPLING_LOGIT_BLOCKS_H_
#define QUERN_OPS_SAMPLING_LOGIT_BLOCKS_H_

// Private: a row of logits in blocks of kSamplerBlock, and how its largest are
// found without a sort of the row. The largest logit of each block tells which
// blocks have candidates.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>

#include "quern/core/math_util.h"
#include "quern/ops/sampling/sampler_kernels.h"

namespace quern {

inline int64_t SamplerBlocks(int64_t vocab) {
  return DivCeil(vocab, kSamplerBlock);
}

// The last block is padded with -infinity, which nothing chooses.
class LogitBlocks {
 public:
  LogitBlocks(const float* logits, int64_t vocab)
      : logits_(logits), vocab_(vocab) {
    const int64_t begin = vocab / kSamplerBlock * kSamplerBlock;
    std::fill(std::copy(logits + begin, logits + vocab, last_),
              last_ + kSamplerBlock, -std::numeric_limits<float>::infinity());
  }
  int64_t count() const { return SamplerBlocks(vocab_); }
  const float* operator[](int64_t block) const {
    return (block + 1) * kSamplerBlock <= vocab_
               ? logits_ + block * kSamplerBlock
               : last_;
  }

  // Writes the largest logit of each block; returns that of the row.
  float Largest(const SamplerKernels& kernels, float* of_blocks) const {
    float largest = -std::numeric_limits<float>::infinity();
    for (int64_t b = 0; b < count(); ++b) {
      of_blocks[b] = kernels.largest((*this)[b]);
      largest = std::max(largest, of_blocks[b]);
    }
    return largest;
  }

  // The k-th largest of the blocks' largest logits, which at least k logits of
  // the row reach; -infinity if there are fewer blocks. `order` is scratch.
  float KthLargest(int64_t k, const float* of_blocks, float* order) const {
    if (k > count()) return -std::numeric_limits<float>::infinity();
    std::copy(of_blocks, of_blocks + count(), order);
    std::nth_element(order, order + k - 1, order + count(),
                     std::greater<float>());
    return order[k - 1];
  }

 private:
  const float* logits_;
  int64_t vocab_;
  float last_[kSamplerBlock];
};

// The strict order of sampler.h: a larger logit first, then a lower id.
struct LargerLogit {
  bool operator()(int32_t a, int32_t b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }
  const float* logits;
};

}  // namespace quern

#endif  // QUERN_OPS_SAMPLING_LOGIT_BLOCKS_H_
