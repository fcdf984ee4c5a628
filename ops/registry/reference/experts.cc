#include "quern/ops/registry/reference/experts.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/reference/activation.h"
#include "quern/ops/registry/reference/linear.h"

namespace quern {

absl::StatusOr<NativeExperts> NativeExperts::Create(
    const ExpertsSpec& spec, const ExpertWeights& weights) {
  NativeExperts experts(spec, weights.gate_up[0].spec().k,
                        weights.down[0].spec().k);
  for (const LinearWeights& w : weights.gate_up) {
    QUERN_ASSIGN_OR_RETURN(NativeLinear linear,
                           NativeLinear::Create(w, spec.activation));
    experts.gate_up_.push_back(std::move(linear));
  }
  for (const LinearWeights& w : weights.down) {
    QUERN_ASSIGN_OR_RETURN(NativeLinear linear,
                           NativeLinear::Create(w, LinearActivation::kNone));
    experts.down_.push_back(std::move(linear));
  }
  return experts;
}

template <typename Allocator>
NativeExperts::Scratch NativeExperts::LayOut(Allocator& allocator) const {
  return {allocator.template Allocate<float>("x", hidden_),
          allocator.template Allocate<float>("h", inter_),
          allocator.template Allocate<float>("y", hidden_),
          allocator.template Allocate<float>("sum", hidden_)};
}

int64_t NativeExperts::WorkspaceBytes() const {
  WorkspaceLayout layout;
  LayOut(layout);
  return layout.bytes();
}

void NativeExperts::Run(const ExpertsArgs& args,
                        Workspace workspace) const noexcept {
  const Scratch s = LayOut(workspace);
  const AnyTensorView weights(args.weights);
  const NativeRound rounded(spec_.x);
  for (int64_t t = 0; t < args.x.extent(0); ++t) {
    const ScalarRow x(args.x, t), out(args.out, t), w(weights, t);
    std::fill_n(s.sum, hidden_, 0.0f);
    for (int64_t j = 0; j < spec_.top_k; ++j) {
      int64_t expert = *args.ids.At(t, j);
      if (expert >= 0 && args.map.data() != nullptr) {
        expert = args.map.data()[expert];
      }
      if (expert < 0) continue;
      const auto e = static_cast<size_t>(expert);
      for (int64_t i = 0; i < hidden_; ++i) {
        s.x[i] = spec_.weight_on_input ? rounded(w[j] * x[i]) : x[i];
      }
      gate_up_[e].Multiply(DenseMatrix<const float>(s.x, 1, hidden_), {},
                           DenseMatrix(s.h, 1, inter_));
      for (int64_t i = 0; i < inter_; ++i) {
        s.h[i] = rounded(s.h[i]);
      }
      down_[e].Multiply(DenseMatrix<const float>(s.h, 1, inter_), {},
                        DenseMatrix(s.y, 1, hidden_));
      const float weight = spec_.weight_on_input ? 1.0f : w[j];
      for (int64_t i = 0; i < hidden_; ++i) s.sum[i] += weight * s.y[i];
    }
    for (int64_t i = 0; i < hidden_; ++i) {
      out.Set(i, args.add.rank() == 0 ? s.sum[i]
                                      : s.sum[i] + ScalarRow(args.add, t)[i]);
    }
  }
}

}  // namespace quern
