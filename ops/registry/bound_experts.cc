#include "quern/ops/registry/bound_experts.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/moe/router.h"
#include "quern/ops/moe/router_spec.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/native_experts.h"
#include "quern/ops/registry/native_router.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;

// The experts, ours or the reference's, and the sum over ranks.
class Experts {
 public:
  static absl::StatusOr<Experts> Create(const ExpertsSpec& spec,
                                        const ExpertWeights& weights,
                                        Communicator* ranks, bool native) {
    // The reference accepts exactly what our kernels accept.
    QUERN_ASSIGN_OR_RETURN(ExpertsPlan plan,
                           ExpertsPlan::Create(spec, weights));
    Experts experts(std::move(plan), ranks);
    if (native) {
      QUERN_ASSIGN_OR_RETURN(experts.native_,
                             NativeExperts::Create(spec, weights));
    }
    return experts;
  }

  const ExpertsPlan& plan() const { return plan_; }
  bool native() const { return native_.has_value(); }
  const char* target() const { return native() ? "scalar" : plan_.target(); }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    if (native()) return native_->WorkspaceBytes();
    return plan_.WorkspaceBytes(max_rows, max_workers);
  }
  void Execute(const ExpertsArgs& args, Workspace workspace,
               Executor& executor) const {
    if (native()) {
      native_->Run(args, workspace);
    } else {
      plan_.Execute(args, workspace, executor);
    }
    if (ranks_ != nullptr) ranks_->AllReduceSum(args.out);
  }

 private:
  Experts(ExpertsPlan plan, Communicator* ranks)
      : plan_(std::move(plan)), ranks_(ranks) {}

  ExpertsPlan plan_;
  Communicator* ranks_;
  std::optional<NativeExperts> native_;
};

VectorView<const int32_t> MapOf(const AnyTensorView& map) {
  if (map.rank() == 0) return {};
  return map.As<const int32_t, 1>();
}

// The tensors are hidden_states, topk_weights, topk_ids, expert_map,
// shared_output, out.
class BoundExperts final : public BoundOp {
 public:
  // `op` is a literal.
  BoundExperts(absl::string_view op, Experts experts)
      : op_(op), experts_(std::move(experts)) {}

  const char* target() const override { return experts_.target(); }
  std::string Explain(int64_t rows) const override {
    return experts_.native() ? target() : experts_.plan().Explain(rows);
  }
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(op_, t, 6));
    constexpr int64_t kAny[] = {kAnyExtent, kAnyExtent};
    QUERN_RETURN_IF_ERROR(
        CheckInput(op_, "topk_weights", t[1], DType::kF32, kAny));
    QUERN_RETURN_IF_ERROR(CheckInput(op_, "topk_ids", t[2], DType::kI32, kAny));
    if (t[3].rank() != 0) {
      QUERN_RETURN_IF_ERROR(
          CheckInput(op_, "expert_map", t[3], DType::kI32, {kAnyExtent}));
    }
    return experts_.plan().CheckArgs(ArgsOf(t));
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    return experts_.WorkspaceBytes(max_rows, max_workers);
  }
  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    experts_.Execute(ArgsOf(t), workspace, executor);
  }

 private:
  static ExpertsArgs ArgsOf(Tensors t) {
    return {t[0],        t[2].As<const int32_t, 2>(),
            MapOf(t[3]), t[1].As<const float, 2>(),
            t[5],        t[4]};
  }

  absl::string_view op_;
  Experts experts_;
};

// The tensors are hidden_states, router_logits, e_score_correction_bias,
// expert_map, shared_output, out.
class BoundMixture final : public BoundOp {
 public:
  // `op` is a literal.
  BoundMixture(absl::string_view op, const RouterPlan& router, Experts experts)
      : op_(op), router_(router), experts_(std::move(experts)) {}

  const char* target() const override { return experts_.target(); }
  std::string Explain(int64_t rows) const override {
    return experts_.native() ? target() : experts_.plan().Explain(rows);
  }
  // Ids are not looked at, for there are none yet; the router's are in range.
  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(op_, t, 6));
    const int64_t tokens = t[0].extent(0);
    QUERN_RETURN_IF_ERROR(CheckInput(op_, "router_logits", t[1],
                                     router_.spec().logits_dtype,
                                     {tokens, router_.spec().experts}));
    if ((t[2].rank() != 0) != router_.spec().biased) {
      return InvalidArgument(op_, "e_score_correction_bias is ",
                             router_.spec().biased ? "missing" : "given",
                             "; need it as the operator was made");
    }
    const int64_t experts = experts_.plan().experts();
    if (t[3].rank() == 0 && router_.spec().experts != experts) {
      return InvalidArgument(op_, "expert_map is missing; need one from ",
                             router_.spec().experts, " experts to ", experts);
    }
    if (t[2].rank() != 0) {
      QUERN_RETURN_IF_ERROR(CheckInput(op_, "e_score_correction_bias", t[2],
                                       router_.spec().bias_dtype,
                                       {router_.spec().experts}));
    }
    if (t[3].rank() != 0) {
      QUERN_RETURN_IF_ERROR(CheckInput(op_, "expert_map", t[3], DType::kI32,
                                       {router_.spec().experts}));
    }
    ExpertsArgs args = {t[0], {}, MapOf(t[3]), {}, t[5], t[4]};
    return experts_.plan().CheckRows(args);
  }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                           experts_.WorkspaceBytes(max_rows, max_workers));
    int64_t routes = 0;
    WorkspaceLayout layout;
    if (CheckedMul(max_rows, router_.spec().top_k, &routes)) {
      LayOut(layout, max_rows);
      layout.Allocate<uint8_t>("experts", bytes);
      if (!layout.overflow()) return layout.bytes();
    }
    return absl::ResourceExhaustedError(
        absl::StrCat(op_, ": max_rows=", max_rows,
                     "; their routes have 2^63 bytes or more"));
  }
  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    const int64_t tokens = t[0].extent(0), top_k = router_.spec().top_k;
    const Routes routes = LayOut(workspace, tokens);
    const auto weights = DenseMatrix(routes.weights, tokens, top_k);
    const auto ids = DenseMatrix(routes.ids, tokens, top_k);
    if (experts_.native()) {
      NativeRouter(router_.spec(), t[1], t[2], weights, ids);
    } else {
      router_.Execute(t[1], t[2], weights, ids, executor);
    }
    experts_.Execute(
        {t[0], DenseMatrix<const int32_t>(routes.ids, tokens, top_k),
         MapOf(t[3]), DenseMatrix<const float>(routes.weights, tokens, top_k),
         t[5], t[4]},
        workspace, executor);
  }

 private:
  struct Routes {
    float* weights;
    int32_t* ids;
  };
  template <typename Allocator>
  Routes LayOut(Allocator& allocator, int64_t tokens) const {
    const int64_t routes = tokens * router_.spec().top_k;
    return {allocator.template Allocate<float>("weights", routes),
            allocator.template Allocate<int32_t>("ids", routes)};
  }

  absl::string_view op_;
  RouterPlan router_;
  Experts experts_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BoundOp>> BindExperts(
    absl::string_view op, const ExpertsSpec& spec, const ExpertWeights& weights,
    Communicator* ranks, bool native) {
  QUERN_ASSIGN_OR_RETURN(Experts experts,
                         Experts::Create(spec, weights, ranks, native));
  return std::unique_ptr<BoundOp>(new BoundExperts(op, std::move(experts)));
}

absl::StatusOr<std::unique_ptr<BoundOp>> BindMixture(
    absl::string_view op, const RouterSpec& route, const ExpertsSpec& spec,
    const ExpertWeights& weights, Communicator* ranks, bool native) {
  QUERN_ASSIGN_OR_RETURN(const RouterPlan router, RouterPlan::Create(route));
  QUERN_ASSIGN_OR_RETURN(Experts experts,
                         Experts::Create(spec, weights, ranks, native));
  return std::unique_ptr<BoundOp>(
      new BoundMixture(op, router, std::move(experts)));
}

}  // namespace quern
