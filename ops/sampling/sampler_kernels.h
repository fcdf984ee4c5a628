#ifndef QUERN_OPS_SAMPLING_SAMPLER_KERNELS_H_
#define QUERN_OPS_SAMPLING_SAMPLER_KERNELS_H_

// Private seam between the sampler (plain C++) and its SIMD translation unit.
// A kernel reads one block of logits or weights. A row's last block is padded
// by the caller, with -infinity.
//
// Results have the same bits on every instruction set: a product and a sum are
// rounded once, by arithmetic in double where the CPU cannot fuse them, or each
// for itself, and sums have a fixed order.

#include <cstddef>
#include <cstdint>

namespace quern {

// Numbers in a block: few enough that a few blocks hold the largest logits of a
// row, and enough that their sums cost little.
inline constexpr int64_t kSamplerBlock = 256;

// How a logit becomes a weight.
struct WeightRule {
  float largest = 0.0f;      // of the row, above -infinity
  float temperature = 1.0f;  // > 0
  // A logit below least_logit has weight 0, and so has a weight below
  // least_weight.
  float least_logit = 0.0f;
  float least_weight = 0.0f;
  // Always 0. The compiler cannot know that, and so cannot fuse a product that
  // was combined with it.
  float zero = 0.0f;
};

// Moments of the logits above -infinity of a block, where d = largest - logit.
struct SamplerMoments {
  double sum = 0.0;      // of d
  double squares = 0.0;  // sum of d^2
  int64_t count = 0;
};

struct SamplerKernels {
  const char* target;
  // The largest number; -infinity if all are NaN or -infinity.
  float (*largest)(const float* logits);
  // weights[i] = exp((logits[i] - largest) / temperature), and 1 for a logit
  // that equals the largest. 0 where the logit is NaN, where the rule says so,
  // or where the exponent is below -87. The difference is rounded to f32; the
  // weight is within 4 units of 2^-24 of what follows from it, relative. If the
  // largest is infinite or the temperature outside [2^-60, 2^60], the exponent
  // is rounded to f32, too. Returns the sum of the weights.
  double (*weights)(const float* logits, const WeightRule& rule,
                    float* weights);
  // The sum in double: 16 sums of every 16th number, added in pairs.
  double (*sum)(const float* weights);
  // The rule's largest is finite.
  SamplerMoments (*moments)(const float* logits, const WeightRule& rule);
  // How many logits are greater than a number.
  int32_t (*greater)(const float* logits, float value);
};

// The kernels of the best instruction set this CPU supports.
SamplerKernels GetSamplerKernels();

}  // namespace quern

#endif  // QUERN_OPS_SAMPLING_SAMPLER_KERNELS_H_
