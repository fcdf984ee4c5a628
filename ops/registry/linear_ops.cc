#include "quern/ops/registry/linear_ops.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/parallel/parallel_linear.h"
#include "quern/ops/parallel/parallel_lm_head.h"
#include "quern/ops/parallel/rank_linear.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/linear_layers.h"

namespace quern {
namespace {

using Tensors = absl::Span<const AnyTensorView>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;
using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;

// Names of implementations in gemm/linear.h.
constexpr char kPacked[] = "packed";
constexpr char kOneDnn[] = "onednn";

absl::StatusOr<ReplicatedLinearPlan> CreatePlan(
    const ReplicatedLinearSpec& spec, const AnyTensorView& weight,
    const AnyTensorView& bias, const Communicator&, Executor& executor) {
  return ReplicatedLinearPlan::Create(spec, weight, bias, executor);
}
absl::StatusOr<ColumnParallelLinearPlan> CreatePlan(
    const ColumnParallelLinearSpec& spec, const AnyTensorView& weight,
    const AnyTensorView& bias, const Communicator& ranks, Executor& executor) {
  return ColumnParallelLinearPlan::Create(spec, weight, bias, ranks, executor);
}
absl::StatusOr<RowParallelLinearPlan> CreatePlan(
    const RowParallelLinearSpec& spec, const AnyTensorView& weight,
    const AnyTensorView& bias, const Communicator& ranks, Executor& executor) {
  return RowParallelLinearPlan::Create(spec, weight, bias, ranks, executor);
}
absl::StatusOr<ParallelLmHeadPlan> CreatePlan(const ParallelLmHeadSpec& spec,
                                              const AnyTensorView& weight,
                                              const AnyTensorView& bias,
                                              const Communicator& ranks,
                                              Executor& executor) {
  return ParallelLmHeadPlan::Create(spec, weight, bias, ranks, executor);
}

void ExecutePlan(const ReplicatedLinearPlan& plan, const AnyTensorView& x,
                 const AnyTensorView& y, Workspace workspace, Communicator&,
                 Executor& executor) {
  plan.Execute(x, y, workspace, executor);
}
template <class Plan>
void ExecutePlan(const Plan& plan, const AnyTensorView& x,
                 const AnyTensorView& y, Workspace workspace,
                 Communicator& ranks, Executor& executor) {
  plan.Execute(x, y, workspace, ranks, executor);
}

// A layer whose plan is made by Prepare, when the weights are known.
template <class Spec>
class BoundLayer final : public BoundOp {
 public:
  using Plan = typename decltype(CreatePlan(
      std::declval<Spec>(), AnyTensorView(), AnyTensorView(),
      std::declval<const Communicator&>(),
      std::declval<Executor&>()))::value_type;

  BoundLayer(const Described<Spec>& described, const char* target)
      : layer_(described.layer), spec_(described.spec), target_(target) {}

  const char* target() const override { return target_; }

  absl::Status Prepare(Tensors t, Executor& executor) override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(layer_.op, t, 4));
    if ((t[2].rank() != 0) != layer_.bias.has_value()) {
      return InvalidArgument(layer_.op, "bias has rank ", t[2].rank(),
                             "; need what the operator was made with");
    }
    QUERN_ASSIGN_OR_RETURN(Plan plan,
                           CreatePlan(spec_, t[1], t[2], ranks(), executor));
    plan_.emplace(std::move(plan));
    weight_ = t[1];
    bias_ = t[2];
    return absl::OkStatus();
  }

  absl::Status CheckArgs(Tensors t) const override {
    QUERN_RETURN_IF_ERROR(CheckTensorCount(layer_.op, t, 4));
    QUERN_RETURN_IF_ERROR(CheckPrepared());
    if (!SameView(t[1], weight_) || !SameView(t[2], bias_)) {
      return InvalidArgument(layer_.op,
                             "weight or bias is not what Prepare was given");
    }
    const AnyTensorView x = AsRows(t[0]);
    return plan_->CheckArgs(x, AsRows(t[3]));
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const override {
    QUERN_RETURN_IF_ERROR(CheckPrepared());
    return plan_->WorkspaceBytes(max_rows, max_workers);
  }

  void Execute(Tensors t, Workspace workspace,
               Executor& executor) const noexcept override {
    QUERN_DCHECK_OK(CheckArgs(t));
    QUERN_CHECK(plan_.has_value());
    ExecutePlan(*plan_, AsRows(t[0]), AsRows(t[3]), workspace, ranks(),
                executor);
  }

 private:
  absl::Status CheckPrepared() const {
    if (plan_.has_value()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        layer_.op, ": has no weights; need a call of Prepare before"));
  }
  Communicator& ranks() const {
    if (layer_.ranks != nullptr) return *layer_.ranks;
    return self_;
  }

  const Layer layer_;
  const Spec spec_;
  const char* const target_;
  mutable SelfCommunicator self_;
  std::optional<Plan> plan_;
  AnyTensorView weight_, bias_;
};

// y = x w^T + bias, summed in double.
void Multiply(const AnyTensorView& x, const AnyTensorView& w,
              const AnyTensorView& bias, const AnyTensorView& y) {
  const ScalarRow b(bias, 0);
  for (int64_t t = 0; t < x.extent(0); ++t) {
    const ScalarRow in(x, t), out(y, t);
    for (int64_t j = 0; j < w.extent(0); ++j) {
      const ScalarRow row(w, j);
      double sum = b.null() ? 0.0 : double{b[j]};
      for (int64_t i = 0; i < w.extent(1); ++i) {
        sum += double{in[i]} * double{row[i]};
      }
      out.Set(j, static_cast<float>(sum));
    }
  }
}

void ExecuteReference(const Layer& layer, Tensors t) {
  const AnyTensorView x = AsRows(t[0]), y = AsRows(t[3]);
  const AnyTensorView part = ColumnSlice(y, layer.y_column, layer.n);
  AnyTensorView bias;
  if (t[2].rank() == 1 && (layer.join != Join::kSum || layer.rank == 0)) {
    const AnyTensorView row(t[2].dtype(), t[2].data(), 2, {1, t[2].extent(0)},
                            {t[2].extent(0), 1});
    bias = ColumnSlice(row, layer.w_row, layer.n);
  }
  if (layer.n > 0) {
    Multiply(ColumnSlice(x, layer.x_column, layer.k),
             ColumnSlice(RowSlice(t[1], layer.w_row, layer.n), layer.w_column,
                         layer.k),
             bias, part);
  }
  if (layer.ranks == nullptr) return;
  if (layer.join == Join::kSum) layer.ranks->AllReduceSum(y);
  if (layer.join == Join::kGather) {
    layer.ranks->AllGatherColumns(part, y, layer.shards);
  }
}

absl::Status CheckReference(const Layer& layer, Tensors t) {
  QUERN_RETURN_IF_ERROR(CheckTensorCount(layer.op, t, 4));
  const AnyTensorView x = AsRows(t[0]), y = AsRows(t[3]);
  QUERN_RETURN_IF_ERROR(CheckInput(layer.op, "x", x, layer.x.dtype,
                                   {kAnyExtent, layer.x.extents.back()}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(layer.op, "weight", t[1], layer.w.dtype, layer.w.extents));
  QUERN_RETURN_IF_ERROR(CheckElementsApart(layer.op, "weight", t[1]));
  if (layer.bias.has_value()) {
    QUERN_RETURN_IF_ERROR(CheckInput(layer.op, "bias", t[2], layer.bias->dtype,
                                     layer.bias->extents));
  } else if (t[2].rank() != 0) {
    return InvalidArgument(layer.op, "bias has rank ", t[2].rank(),
                           "; need none");
  }
  return CheckOutput(layer.op, "y", y, layer.x.dtype,
                     {x.extent(0), layer.y.extents.back()});
}

// The functions that a registry needs for an operator described by kDescribe.
template <auto kDescribe>
struct OpOf;
template <class Spec, class... A,
          absl::StatusOr<Described<Spec>> (*kDescribe)(A...)>
struct OpOf<kDescribe> {
  static Metas Shapes(A... args) {
    QUERN_ASSIGN_OR_RETURN(const auto described, kDescribe(args...));
    return std::vector<TensorMeta>{described.layer.y};
  }

  // Makes the layer on the kernels of gemm/linear.h with the name kKernels.
  template <const char* kKernels>
  static Bound Linear(A... args) {
    QUERN_ASSIGN_OR_RETURN(auto described, kDescribe(args...));
    described.spec.kernels = kKernels;
    // A layer with a single weight shows whether kernels exist for the dtypes.
    LinearSpec small;
    small.a = small.c = described.layer.x.dtype;
    small.kernels = kKernels;
    const float zero = 0.0f;
    LinearSource weight;
    weight.codes =
        AnyTensorView(described.layer.w.dtype, static_cast<const void*>(&zero),
                      2, {1, 1}, {1, 1});
    InlineExecutor executor;
    QUERN_ASSIGN_OR_RETURN(
        const LinearPlan probe,
        CreateRankLinear(described.layer.op, small, {weight}, executor));
    return std::unique_ptr<BoundOp>(
        new BoundLayer<Spec>(described, probe.target()));
  }

  static Bound Reference(A... args) {
    QUERN_ASSIGN_OR_RETURN(const auto described, kDescribe(args...));
    const Layer layer = described.layer;
    return std::unique_ptr<BoundOp>(new BoundCalls(
        "scalar", [layer](Tensors t) { return CheckReference(layer, t); },
        [layer](Tensors t, Executor&) { ExecuteReference(layer, t); }));
  }
};

template <auto kDescribe>
absl::Status Register(OpRegistry& r, absl::string_view op,
                      absl::string_view params, OpExample example) {
  using Op = OpOf<kDescribe>;
  QUERN_RETURN_IF_ERROR(r.Define<&Op::Shapes>(
      absl::StrCat(op, "(", params, ") -> Tensor"), example, OpKind::kLayer));
  QUERN_RETURN_IF_ERROR(r.Declare(
      op, {{}, OpRows::kLeading, "", {{"y", "out"}, {"logits", "out"}}}));
  QUERN_RETURN_IF_ERROR((r.Add<&Op::template Linear<kPacked>>(op, "simd")));
  if (OneDnnIsLinked()) {
    QUERN_RETURN_IF_ERROR((r.Add<&Op::template Linear<kOneDnn>>(op, kOneDnn)));
  }
  return r.Add<&Op::Reference>(op, OpRegistry::kReference);
}

NamedArgs Example(DType dtype) {
  return {{"x", TensorMeta{dtype, {4, 64}}},
          {"weight", TensorMeta{dtype, {32, 64}}},
          {"bias", TensorMeta{DType::kF32, {32}}}};
}
NamedArgs HeadExample(DType dtype) {
  return {{"hidden", TensorMeta{dtype, {4, 64}}},
          {"weight", TensorMeta{dtype, {100, 64}}},
          {"vocab", int64_t{100}}};
}

}  // namespace

absl::Status RegisterLinearOps(OpRegistry& r) {
  QUERN_RETURN_IF_ERROR(Register<&DescribeReplicated>(
      r, "replicated_linear", "Tensor x, Tensor weight, Tensor? bias",
      &Example));
  QUERN_RETURN_IF_ERROR(Register<&DescribeColumn>(
      r, "column_parallel_linear",
      "Tensor x, Tensor weight, Tensor? bias, Communicator? ranks, "
      "bool weight_is_shard=False, bool gather_output=False",
      &Example));
  QUERN_RETURN_IF_ERROR(Register<&DescribeRow>(
      r, "row_parallel_linear",
      "Tensor x, Tensor weight, Tensor? bias, Communicator? ranks, "
      "bool weight_is_shard=False, bool input_is_parallel=True, "
      "bool reduce_results=True",
      &Example));
  return Register<&DescribeHead>(
      r, "parallel_lm_head",
      "Tensor hidden, Tensor weight, Tensor? bias, Communicator? ranks, "
      "int vocab, int added=0, bool weight_is_shard=False",
      &HeadExample);
}

}  // namespace quern
