#ifndef QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PRODUCT_DECLARATION_H_
#define QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PRODUCT_DECLARATION_H_

// Private: what the declarations of SGLang's products share.

#include <cstdint>
#include <iterator>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "quern/core/dtype.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {

inline constexpr char kSglangProduct[] = "product";

template <class Spec>
OpDType<Spec> SglangFloats() {
  return OpDType<Spec>::OneOf(
      {std::begin(kFloatDTypes), std::end(kFloatDTypes)}, {&Spec::dtype});
}

inline absl::Status TooManyProductRows(int64_t max_rows) {
  return absl::ResourceExhaustedError(absl::StrCat(
      kSglangProduct, ": ", max_rows, " rows take more than 2^63 bytes"));
}

// Ends the declaration of a plan that has Create(bool native, spec).
template <class Plan, class Spec, class Args>
OpDeclaration<Plan, Spec, Args>& WithProductProviders(
    OpDeclaration<Plan, Spec, Args>& op) {
  return op
      .Provider("simd", [](const Spec& spec,
                           const OpCall&) { return Plan::Create(false, spec); })
      .Provider("reference",
                [](const Spec& spec, const OpCall&) {
                  return Plan::Create(true, spec);
                })
      .Layer();
}

class OpRegistry;  // ops/registry/op_registry.h

// Adds shared_expert_cpu.
absl::Status AddSglangSharedExpert(OpRegistry& registry);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PRODUCT_DECLARATION_H_
