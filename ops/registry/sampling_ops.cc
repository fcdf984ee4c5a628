#include "quern/ops/registry/sampling_ops.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/bound_rows.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;

constexpr char kOp[] = "sample";

// The tensors are logits and tokens.
class BoundSampler final : public BoundOp {
 public:
  BoundSampler(const SamplerPlan& plan, int64_t vocab, const SamplingStep* step)
      : plan_(plan), vocab_(vocab), step_(step) {}

  const char* target() const override { return "scalar"; }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(kOp, t, 2));
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "logits", t[0], DType::kF32, {kAnyExtent, vocab_}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, "tokens", t[1], DType::kI32, {t[0].extent(0)}));
    return plan_.CheckArgs(t[0].As<const float, 2>(), step_->params,
                           TokensOf(t));
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    return plan_.WorkspaceBytes(max_rows, max_workers);
  }
  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    plan_.Execute(t[0].As<const float, 2>(), step_->params, TokensOf(t),
                  workspace, executor);
  }

 private:
  static absl::Span<int32_t> TokensOf(Tensors t) {
    return {static_cast<int32_t*>(t[1].mutable_data()),
            static_cast<size_t>(t[1].extent(0))};
  }

  SamplerPlan plan_;
  int64_t vocab_;
  const SamplingStep* step_;
};

absl::StatusOr<std::vector<TensorMeta>> Shapes(const TensorMeta& logits,
                                               const SamplingStep*) {
  if (logits.extents.size() == 2) {
    return std::vector<TensorMeta>{{DType::kI32, {logits.extents[0]}}};
  }
  return InvalidArgument(kOp, "logits have rank ", logits.extents.size(),
                         "; need 2");
}

absl::StatusOr<std::unique_ptr<BoundOp>> Make(const TensorMeta& logits,
                                              const SamplingStep* step) {
  QUERN_RETURN_IF_ERROR(Shapes(logits, step).status());
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "logits", logits.dtype, {DType::kF32}));
  SamplerSpec spec;
  spec.vocab = logits.extents[1];
  QUERN_ASSIGN_OR_RETURN(const SamplerPlan plan, SamplerPlan::Create(spec));
  return std::unique_ptr<BoundOp>(new BoundSampler(plan, spec.vocab, step));
}

NamedArgs Example(DType dtype) {
  static const std::vector<SamplingParams> greedy(4);
  static const SamplingStep step = {greedy};
  return {{"logits", TensorMeta{dtype, {4, 64}}}, {"step", &step}};
}

}  // namespace

absl::Status RegisterSamplingOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(
      r.Define<&Shapes>("sample(Tensor logits, SamplingStep step) -> Tensor",
                        &Example, OpKind::kLayer));
  return r.Add<&Make>(kOp, OpRegistry::kReference);
}

}  // namespace quern
