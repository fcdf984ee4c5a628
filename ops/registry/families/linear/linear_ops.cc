#include "quern/ops/registry/families/linear/linear_ops.h"

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "quern/core/communicator.h"
#include "quern/core/matrix_slice.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/parallel/parallel_linear.h"
#include "quern/ops/parallel/parallel_lm_head.h"
#include "quern/ops/parallel/rank_linear.h"
#include "quern/ops/parallel/vocab_shard.h"
#include "quern/ops/registry/families/linear/linear_declaration.h"
#include "quern/ops/registry/op_declaration.h"

namespace quern {
namespace {

struct Args {
  AnyTensorView x, weight, bias, y;
};

// How y is made from the ranks' parts.
enum class Join : uint8_t { kNone, kGather, kSum };

// One rank's layer x[.., x_columns], weight[w_rows, w_columns], bias[w_rows] ->
// y[.., y_columns]. It multiplies columns [x_column, + k) of x by rows [w_row,
// + n) and columns [w_column, + k) of weight, into columns [y_column, + n) of
// y.
struct Layer {
  DType x = DType::kF32, w = DType::kF32, bias = DType::kF32;
  int64_t x_columns = 0, w_rows = 0, w_columns = 0, y_columns = 0;
  bool has_bias = false;
  Communicator* ranks = nullptr;
  int rank = 0, size = 1;
  int64_t n = 0, k = 0;
  int64_t w_row = 0, w_column = 0, x_column = 0, y_column = 0;
  Join join = Join::kNone;
  ColumnShards shards;  // used by Join::kGather
};
// The layer, and the spec of the plan that runs it.
template <class Plan>
struct LayerSpec : Layer {
  std::decay_t<decltype(std::declval<const Plan&>().spec())> plan;
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

void ExecuteReference(const Layer& layer, const Args& t) {
  const AnyTensorView part = ColumnSlice(t.y, layer.y_column, layer.n);
  AnyTensorView bias;
  if (t.bias.rank() == 1 && (layer.join != Join::kSum || layer.rank == 0)) {
    bias = ColumnSlice(AsRows(t.bias), layer.w_row, layer.n);
  }
  if (layer.n > 0) {
    Multiply(ColumnSlice(t.x, layer.x_column, layer.k),
             ColumnSlice(RowSlice(t.weight, layer.w_row, layer.n),
                         layer.w_column, layer.k),
             bias, part);
  }
  if (layer.ranks == nullptr) return;
  if (layer.join == Join::kSum) layer.ranks->AllReduceSum(t.y);
  if (layer.join == Join::kGather) {
    layer.ranks->AllGatherColumns(part, t.y, layer.shards);
  }
}

absl::Status CheckReference(absl::string_view op, const Layer& layer,
                            const Args& t) {
  QUERN_RETURN_IF_ERROR(
      CheckInput(op, "x", t.x, layer.x, {kAnyExtent, layer.x_columns}));
  QUERN_RETURN_IF_ERROR(CheckInput(op, "weight", t.weight, layer.w,
                                   {layer.w_rows, layer.w_columns}));
  QUERN_RETURN_IF_ERROR(CheckElementsApart(op, "weight", t.weight));
  if (layer.has_bias) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(op, "bias", t.bias, layer.bias, {layer.w_rows}));
  } else if (t.bias.rank() != 0) {
    return InvalidArgument(op, "bias has rank ", t.bias.rank(), "; need none");
  }
  return CheckOutput(op, "y", t.y, layer.x, {t.x.extent(0), layer.y_columns});
}

// A layer whose plan is made by Prepare, when the weights are known; or the
// reference, which reads them when it runs.
template <class Plan>
class LayerPlan {
 public:
  using Spec = LayerSpec<Plan>;

  static absl::StatusOr<LayerPlan> Create(const Spec& spec,
                                          const OpCall& call) {
    LayerPlan made(call.op(), spec);
    if (call.provider() == OpRegistry::kReference) return made;
    // Names of implementations in gemm/linear.h.
    made.spec_.plan.kernels = call.provider() == "simd" ? "packed" : "onednn";
    // A layer with a single weight shows whether kernels exist for the dtypes.
    LinearSpec small;
    small.a = small.c = spec.x;
    small.kernels = made.spec_.plan.kernels;
    const float zero = 0.0f;
    LinearSource weight;
    weight.codes = AnyTensorView(spec.w, static_cast<const void*>(&zero), 2,
                                 {1, 1}, {1, 1});
    InlineExecutor executor;
    QUERN_ASSIGN_OR_RETURN(
        const LinearPlan probe,
        CreateRankLinear(call.op(), small, {weight}, executor));
    made.target_ = probe.target();
    return made;
  }

  const char* target() const { return target_; }

  absl::Status Prepare(const Args& t, Executor& executor) {
    if (reference()) return absl::OkStatus();
    if ((t.bias.rank() != 0) != spec_.has_bias) {
      return InvalidArgument(op_, "bias has rank ", t.bias.rank(),
                             "; need what the operator was made with");
    }
    SelfCommunicator self;
    if constexpr (kAlone) {
      QUERN_ASSIGN_OR_RETURN(
          Plan plan, Plan::Create(spec_.plan, t.weight, t.bias, executor));
      plan_.emplace(std::move(plan));
    } else {
      QUERN_ASSIGN_OR_RETURN(
          Plan plan,
          Plan::Create(spec_.plan, t.weight, t.bias, RanksOr(self), executor));
      plan_.emplace(std::move(plan));
    }
    weight_ = t.weight;
    bias_ = t.bias;
    return absl::OkStatus();
  }

  absl::Status CheckArgs(const Args& t) const {
    if (reference()) return CheckReference(op_, spec_, t);
    QUERN_RETURN_IF_ERROR(CheckPrepared());
    if (!SameView(t.weight, weight_) || !SameView(t.bias, bias_)) {
      return InvalidArgument(op_,
                             "weight or bias is not what Prepare was given");
    }
    return plan_->CheckArgs(t.x, t.y);
  }

  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_rows,
                                         int max_workers) const {
    if (reference()) return 0;
    QUERN_RETURN_IF_ERROR(CheckPrepared());
    return plan_->WorkspaceBytes(max_rows, max_workers);
  }

  void Execute(const Args& t, Workspace workspace,
               Executor& executor) const noexcept {
    QUERN_DCHECK_OK(CheckArgs(t));
    if (reference()) return ExecuteReference(spec_, t);
    QUERN_CHECK(plan_.has_value());
    SelfCommunicator self;
    if constexpr (kAlone) {
      plan_->Execute(t.x, t.y, workspace, executor);
    } else {
      plan_->Execute(t.x, t.y, workspace, RanksOr(self), executor);
    }
  }

 private:
  // A layer that knows no ranks.
  static constexpr bool kAlone = std::is_same_v<Plan, ReplicatedLinearPlan>;

  LayerPlan(absl::string_view op, const Spec& spec) : op_(op), spec_(spec) {}

  bool reference() const { return spec_.plan.kernels.empty(); }
  absl::Status CheckPrepared() const {
    if (plan_.has_value()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(op_, ": has no weights; need a call of Prepare before"));
  }
  Communicator& RanksOr(SelfCommunicator& self) const {
    return spec_.ranks != nullptr ? *spec_.ranks : self;
  }

  std::string op_;
  Spec spec_;
  const char* target_ = "scalar";
  std::optional<Plan> plan_;
  AnyTensorView weight_, bias_;
};

// Whether the weight is the rank's part alone.
WeightPart PartOf(const OpCall& call) {
  return call.Bool("weight_is_shard") ? WeightPart::kShard : WeightPart::kFull;
}

// The number of rows or columns that belong to this rank, of `given`: all of
// them if the argument is the rank's shard, or else its part of the whole.
absl::StatusOr<int64_t> OwnOf(const Layer& layer, const OpCall& call,
                              absl::string_view field, int64_t given) {
  if (PartOf(call) == WeightPart::kShard) return given;
  if (given % layer.size == 0) return given / layer.size;
  return InvalidArgument(call.op(), field, "=", given,
                         "; need a multiple of the ", layer.size, " ranks");
}

// What all layers need of their tensors.
absl::Status FillTensors(Layer& layer, const OpCall& call) {
  for (const int64_t extent : {layer.w_rows, layer.w_columns}) {
    QUERN_RETURN_IF_ERROR(CheckRange(call.op(), "an extent of weight", extent,
                                     1, LinearWeights::kMaxExtent));
  }
  layer.n = layer.w_rows;
  layer.k = layer.w_columns;
  layer.has_bias = call.has("bias");
  return absl::OkStatus();
}

template <class Plan>
void FillDTypes(LayerSpec<Plan>& layer) {
  layer.plan.x = layer.plan.y = layer.x;
  layer.plan.w = layer.w;
}

absl::Status FillReplicated(LayerSpec<ReplicatedLinearPlan>& layer,
                            const OpCall& call) {
  FillDTypes(layer);
  layer.plan.n = layer.y_columns = layer.n;
  layer.plan.k = layer.k;
  return CheckEqual(call.op(), "columns of x", layer.x_columns, layer.k,
                    "weight has");
}

absl::Status FillColumn(LayerSpec<ColumnParallelLinearPlan>& layer,
                        const OpCall& call) {
  FillDTypes(layer);
  QUERN_ASSIGN_OR_RETURN(layer.n,
                         OwnOf(layer, call, "rows of weight", layer.n));
  int64_t all = 0;
  if (!CheckedMul(layer.n, layer.size, &all)) {
    return InvalidArgument(call.op(), "y has 2^63 columns or more");
  }
  layer.plan.part = PartOf(call);
  if (layer.plan.part == WeightPart::kFull) layer.w_row = layer.rank * layer.n;
  layer.plan.gather_output = call.Bool("gather_output");
  layer.y_columns = layer.plan.gather_output ? all : layer.n;
  if (layer.plan.gather_output) {
    layer.y_column = layer.rank * layer.n;
    layer.join = Join::kGather;
    layer.shards = {all, layer.n};
  }
  layer.plan.outputs.resize(1);
  layer.plan.outputs[0].size = all;
  layer.plan.k = layer.k;
  return CheckEqual(call.op(), "columns of x", layer.x_columns, layer.k,
                    "weight has");
}

absl::Status FillRow(LayerSpec<RowParallelLinearPlan>& layer,
                     const OpCall& call) {
  FillDTypes(layer);
  QUERN_ASSIGN_OR_RETURN(layer.k,
                         OwnOf(layer, call, "columns of weight", layer.k));
  int64_t all = 0;
  if (!CheckedMul(layer.k, layer.size, &all)) {
    return InvalidArgument(call.op(), "x has 2^63 columns or more");
  }
  const bool parallel = call.Bool("input_is_parallel");
  const bool sum = call.Bool("reduce_results");
  layer.plan.part = PartOf(call);
  if (layer.plan.part == WeightPart::kFull) {
    layer.w_column = layer.rank * layer.k;
  }
  if (!parallel) layer.x_column = layer.rank * layer.k;
  if (sum) layer.join = Join::kSum;
  layer.plan.n = layer.y_columns = layer.n;
  layer.plan.k = all;
  layer.plan.input_is_parallel = parallel;
  layer.plan.reduce_results = sum;
  QUERN_RETURN_IF_ERROR(CheckEqual(
      call.op(), "columns of x", layer.x_columns, parallel ? layer.k : all,
      parallel ? "the rank has" : "the ranks have"));
  if (sum || !layer.has_bias) return absl::OkStatus();
  return InvalidArgument(call.op(),
                         "reduce_results=False with a bias; need none, as only "
                         "rank 0 would add it");
}

absl::Status FillHead(LayerSpec<ParallelLmHeadPlan>& layer,
                      const OpCall& call) {
  const int64_t vocab = call.Int("vocab");
  const bool full = PartOf(call) == WeightPart::kFull;
  ParallelLmHeadSpec& plan = layer.plan;
  plan.vocab.original = vocab;
  plan.vocab.added = call.Int("added");
  plan.hidden = layer.k;
  plan.hidden_dtype = plan.logits_dtype = layer.x;
  plan.weight_dtype = layer.w;
  plan.part = PartOf(call);
  QUERN_ASSIGN_OR_RETURN(
      const VocabShard shard,
      VocabShard::Create(plan.vocab, layer.rank, layer.size));
  QUERN_RETURN_IF_ERROR(CheckEqual(call.op(), "rows of weight", layer.n,
                                   full ? vocab : shard.rows(),
                                   full ? "vocab" : "the shard has"));
  QUERN_RETURN_IF_ERROR(CheckEqual(call.op(), "columns of hidden",
                                   layer.x_columns, layer.k, "weight has"));
  layer.n = shard.originals();
  layer.y_column = shard.original_begin;
  if (full) layer.w_row = shard.original_begin;
  layer.join = Join::kGather;
  layer.shards = {vocab, plan.vocab.padded_original() / layer.size};
  layer.y_columns = vocab;
  return absl::OkStatus();
}

template <class Plan>
using LayerOp = OpDeclaration<LayerPlan<Plan>, LayerSpec<Plan>, Args>;

template <class Plan>
LayerOp<Plan> BeginLayer(const char* name, const char* x) {
  using Spec = LayerSpec<Plan>;
  LayerOp<Plan> op(name);
  op.In(x, &Args::x, {kLeading, &Spec::x_columns}, FloatOf<Spec>(&Spec::x))
      .In("weight", &Args::weight, {&Spec::w_rows, &Spec::w_columns},
          FloatOf<Spec>(&Spec::w))
      .Maybe("bias", &Args::bias, {&Spec::w_rows}, FloatOf<Spec>(&Spec::bias))
      .Then(&FillTensors);
  return op;
}

// One that is divided over ranks.
template <class Plan>
LayerOp<Plan> BeginParallel(const char* name, const char* x) {
  LayerOp<Plan> op = BeginLayer<Plan>(name, x);
  op.template Object<Communicator>("ranks", true)
      .Then([](LayerSpec<Plan>& layer, const OpCall& call) {
        layer.ranks = call.Object<Communicator>("ranks");
        if (layer.ranks != nullptr) {
          layer.rank = layer.ranks->rank();
          layer.size = layer.ranks->size();
        }
        return absl::OkStatus();
      });
  return op;
}

template <class Plan>
absl::Status AddLayer(LayerOp<Plan>& op, const char* x,
                      absl::Status (*fill)(LayerSpec<Plan>&, const OpCall&),
                      std::vector<OpExampleArg> example, OpRegistry& registry) {
  std::vector<std::string> providers = {"simd"};
  if (OneDnnIsLinked()) providers.emplace_back("onednn");
  providers.emplace_back(OpRegistry::kReference);
  return op.Then(fill)
      .Out("y", &Args::y, {Like(x), &LayerSpec<Plan>::y_columns}, Like(x))
      .Word("logits", "out")
      .Word("x", x)
      .Layer()
      .Providers(std::move(providers))
      .Creates(&LayerPlan<Plan>::Create)
      .Example(std::move(example))
      .AddTo(registry);
}

}  // namespace

absl::Status RegisterLinearOps(OpRegistry& registry) {
  const std::vector<OpExampleArg> example = {
      {"x", {4, 64}}, {"weight", {32, 64}}, {"bias", {32}, DType::kF32}};
  auto replicated = BeginLayer<ReplicatedLinearPlan>("replicated_linear", "x");
  QUERN_RETURN_IF_ERROR(
      AddLayer(replicated, "x", &FillReplicated, example, registry));
  auto column =
      BeginParallel<ColumnParallelLinearPlan>("column_parallel_linear", "x");
  column.Attr("weight_is_shard", false).Attr("gather_output", false);
  QUERN_RETURN_IF_ERROR(AddLayer(column, "x", &FillColumn, example, registry));
  auto row = BeginParallel<RowParallelLinearPlan>("row_parallel_linear", "x");
  row.Attr("weight_is_shard", false)
      .Attr("input_is_parallel", true)
      .Attr("reduce_results", true);
  QUERN_RETURN_IF_ERROR(AddLayer(row, "x", &FillRow, example, registry));
  auto head = BeginParallel<ParallelLmHeadPlan>("parallel_lm_head", "hidden");
  head.Need<int64_t>("vocab")
      .Attr("added", int64_t{0})
      .Attr("weight_is_shard", false);
  return AddLayer(
      head, "hidden", &FillHead,
      {{"hidden", {4, 64}}, {"weight", {100, 64}}, {"vocab", int64_t{100}}},
      registry);
}

}  // namespace quern
