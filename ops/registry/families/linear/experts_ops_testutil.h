#ifndef QUERN_OPS_REGISTRY_FAMILIES_LINEAR_EXPERTS_OPS_TESTUTIL_H_
#define QUERN_OPS_REGISTRY_FAMILIES_LINEAR_EXPERTS_OPS_TESTUTIL_H_

// A small mixture of experts, a batch for it, and the arguments of the
// operators that take them.

#include <cstdint>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/weights.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/data.h"

namespace quern {

inline constexpr int64_t kTokens = 7, kHidden = 48, kInter = 40, kExperts = 6;
inline constexpr int64_t kTopK = 2;
inline constexpr const char* kRouted[] = {
    "modular_fused_moe", "transformers_fused_moe", "fused_experts_cpu"};
inline constexpr const char* kMixtures[] = {"fused_moe",
                                            "unquantized_fused_moe"};

// Experts [first, end) of all.
inline ExpertWeights MakeExperts(WeightFormat format, LinearActivation act,
                                 int64_t first = 0, int64_t end = kExperts) {
  TestRng rng;
  InlineExecutor executor;
  ExpertWeights weights;
  for (int64_t e = 0; e < end; ++e) {
    Shape up{0, kInter * (IsGated(act) ? 2 : 1), kHidden};
    up.act = act;
    const Shape down{0, kHidden, kInter};
    const KnownWeights known_up = RealWeights(rng, {format}, up);
    const KnownWeights known_down = RealWeights(rng, {format}, down);
    if (e < first) continue;
    weights.gate_up.push_back(known_up.Pack(executor));
    weights.down.push_back(known_down.Pack(executor));
  }
  return weights;
}

// A batch, with routes in range.
struct Inputs {
  std::vector<BFloat16> x, shared;
  std::vector<float> logits, weights;
  std::vector<int32_t> ids;
};
inline Inputs MakeInputs() {
  TestRng rng;
  Inputs in;
  in.x = UniformReals<BFloat16>(rng, kTokens * kHidden);
  in.shared = UniformReals<BFloat16>(rng, kTokens * kHidden);
  in.logits = UniformReals<float>(rng, kTokens * kExperts);
  in.weights = UniformReals<float>(rng, kTokens * kTopK);
  in.ids = SmallIntegers<int32_t>(rng, kTokens * kTopK, 0, kExperts - 1);
  return in;
}

inline const TensorMeta kX = {DType::kBF16, {kTokens, kHidden}};

inline NamedArgs RoutedArgs(const ExpertWeights* experts) {
  return {{"hidden_states", kX},
          {"experts", experts},
          {"topk_weights", TensorMeta{DType::kF32, {kTokens, kTopK}}},
          {"topk_ids", TensorMeta{DType::kI32, {kTokens, kTopK}}}};
}
inline NamedArgs MixtureArgs(const ExpertWeights* experts) {
  return {{"hidden_states", kX},
          {"router_logits", TensorMeta{DType::kF32, {kTokens, kExperts}}},
          {"experts", experts},
          {"top_k", kTopK}};
}
inline std::vector<NamedTensor> RoutedTensors(const Inputs& in) {
  return {
      {"hidden_states",
       DenseMatrix<const BFloat16>(in.x.data(), kTokens, kHidden)},
      {"topk_weights",
       DenseMatrix<const float>(in.weights.data(), kTokens, kTopK)},
      {"topk_ids", DenseMatrix<const int32_t>(in.ids.data(), kTokens, kTopK)}};
}
inline std::vector<NamedTensor> MixtureTensors(const Inputs& in) {
  return {{"hidden_states",
           DenseMatrix<const BFloat16>(in.x.data(), kTokens, kHidden)},
          {"router_logits",
           DenseMatrix<const float>(in.logits.data(), kTokens, kExperts)}};
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_FAMILIES_LINEAR_EXPERTS_OPS_TESTUTIL_H_
