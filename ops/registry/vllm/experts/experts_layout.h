#ifndef QUERN_OPS_REGISTRY_VLLM_EXPERTS_EXPERTS_LAYOUT_H_
#define QUERN_OPS_REGISTRY_VLLM_EXPERTS_EXPERTS_LAYOUT_H_

// Private: where a weight of one expert lies in vLLM's packed form, which
// experts_ops.h states.

#include <cstdint>

#include "absl/status/status.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"

namespace quern {

enum class ExpertsIsa : uint8_t { kVec, kAmx };

// The elements of k that lie side by side.
constexpr int64_t ExpertsPairOf(ExpertsIsa isa, DType dtype) {
  return isa == ExpertsIsa::kVec ? 1 : 4 / static_cast<int64_t>(SizeOf(dtype));
}

struct ExpertsLayout {
  static constexpr int64_t kColumns = 16;

  int64_t n = 0;
  int64_t k = 0;
  int64_t pair = 1;  // divides k

  int64_t At(int64_t row, int64_t i) const {
    return row / kColumns * kColumns * k +
           (i / pair * kColumns + row % kColumns) * pair + i % pair;
  }
};

// InvalidArgument unless an expert [n, k] can be packed.
inline absl::Status CheckExpertsShape(absl::string_view op,
                                      absl::string_view field,
                                      const ExpertsLayout& layout) {
  if (layout.n % ExpertsLayout::kColumns != 0) {
    return InvalidArgument(op, field, " has ", layout.n,
                           " rows for an expert; need a multiple of 16");
  }
  if (layout.k % layout.pair == 0) return absl::OkStatus();
  return InvalidArgument(op, field, " has ", layout.k,
                         " columns; need a multiple of ", layout.pair,
                         " with isa=\"amx\"");
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_VLLM_EXPERTS_EXPERTS_LAYOUT_H_
