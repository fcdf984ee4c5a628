#ifndef QUERN_OPS_REGISTRY_FAMILIES_ROWS_SAMPLING_OPS_H_
#define QUERN_OPS_REGISTRY_FAMILIES_ROWS_SAMPLING_OPS_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/sampling/sampler.h"

namespace quern {

// How each row of a step is sampled. `sample` is made with the address of a
// SamplingStep, which the engine refills for each step.
struct SamplingStep {
  absl::Span<const SamplingParams> params;
};

// sample: logits f32[rows, vocab] -> the token of each row, i32[rows]. The
// equation is in ops/sampling/sampler.h. A token does not depend on the
// instruction set, so the provider reference is the same code as simd.
absl::Status RegisterSamplingOps(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_ROWS_SAMPLING_OPS_H_
