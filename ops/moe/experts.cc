#include "quern/ops/moe/experts.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/grouped_linear.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/check_indices.h"
#include "quern/ops/moe/expert_order.h"
#include "quern/ops/moe/experts_kernels.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/rows_of.h"

namespace quern {
namespace {

constexpr char kOp[] = "experts";

int64_t BlockTokens(int64_t top_k) {
  return std::max<int64_t>(ExpertsPlan::kBlockRoutes / top_k, 1);
}

// A dense matrix of a dtype that is known at run time.
AnyTensorView DenseRows(DType dtype, uint8_t* data, int64_t rows,
                        int64_t cols) {
  return AnyTensorView(dtype, static_cast<void*>(data), 2, {rows, cols},
                       {cols, 1});
}

// The rows of a block of tokens.
template <typename T>
MatrixView<T> RowsFrom(const MatrixView<T>& x, int64_t begin, int64_t count) {
  return {begin == 0 ? x.data() : x.Row(begin),
          {count, x.extent(1)},
          {x.stride(0), x.stride(1)}};
}

}  // namespace

// The memory of one block of tokens.
struct ExpertsPlan::Scratch {
  int32_t* offsets;  // [experts + 1]
  int32_t* order;    // [routes]: of the rows of h and y
  int32_t* row_of;   // [routes]: the row of y, or -1
  uint8_t* scaled;   // x times its weights, or null
  uint8_t* h;        // [routes, inter]
  float* y;          // [routes, hidden]
  Workspace order_workspace;
  Workspace product_workspace;  // of gate_up, then of down
};

template <typename Allocator>
ExpertsPlan::Scratch ExpertsPlan::LayOut(Allocator& allocator, int64_t tokens,
                                         int workers) const {
  const int64_t routes = tokens * spec_.top_k;
  const auto x_size = static_cast<int64_t>(SizeOf(spec_.x));
  Scratch scratch = {};
  scratch.offsets =
      allocator.template Allocate<int32_t>("offsets", experts() + 1);
  scratch.order = allocator.template Allocate<int32_t>("order", routes);
  scratch.row_of = allocator.template Allocate<int32_t>("row of y", routes);
  if (spec_.weight_on_input) {
    scratch.scaled = allocator.template Allocate<uint8_t>(
        "weighted x", tokens * hidden() * x_size);
  }
  scratch.h =
      allocator.template Allocate<uint8_t>("h", routes * inter() * x_size);
  scratch.y = allocator.template Allocate<float>("y", routes * hidden());
  const int64_t order_bytes = *order_.WorkspaceBytes(tokens, workers);
  const int64_t product_bytes =
      std::max(*gate_up_.WorkspaceBytes(routes, workers),
               *down_.WorkspaceBytes(routes, workers));
  scratch.order_workspace =
      Workspace(allocator.template Allocate<uint8_t>("order", order_bytes),
                static_cast<size_t>(order_bytes));
  scratch.product_workspace =
      Workspace(allocator.template Allocate<uint8_t>("product", product_bytes),
                static_cast<size_t>(product_bytes));
  return scratch;
}

ExpertsPlan::ExpertsPlan(const ExpertsSpec& spec, ExpertOrderPlan order,
                         GroupedLinearPlan gate_up, GroupedLinearPlan down)
    : spec_(spec),
      order_(std::move(order)),
      gate_up_(std::move(gate_up)),
      down_(std::move(down)),
      kernels_(GetExpertsKernels(spec.x, spec.out)) {}

absl::StatusOr<ExpertsPlan> ExpertsPlan::Create(const ExpertsSpec& spec,
                                                const ExpertWeights& weights) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "top_k", spec.top_k, 1, ExpertsSpec::kMaxTopK));
  if (spec.weight_on_input && spec.top_k != 1) {
    return InvalidArgument(kOp, "top_k=", spec.top_k,
                           "; need 1, as the weight is on the input");
  }
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "x", spec.x, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "out", spec.out, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(CheckEqual(
      kOp, "number of down", static_cast<int64_t>(weights.down.size()),
      static_cast<int64_t>(weights.gate_up.size()), "gate_up has"));
  ExpertOrderSpec order_spec;
  order_spec.experts = static_cast<int64_t>(weights.gate_up.size());
  QUERN_ASSIGN_OR_RETURN(ExpertOrderPlan order,
                         ExpertOrderPlan::Create(order_spec));
  // GroupedLinearPlan refuses where there are no weights.
  const auto activations = [&spec](const std::vector<LinearWeights>& all) {
    return all.empty() ? LinearActivations::kExact
                       : ActivationsFor(all[0].spec(), spec.activations);
  };
  GroupedLinearSpec linear;
  linear.a = spec.x;
  linear.c = spec.x;
  linear.activation = spec.activation;
  linear.activations = activations(weights.gate_up);
  QUERN_ASSIGN_OR_RETURN(GroupedLinearPlan gate_up,
                         GroupedLinearPlan::Create(linear, weights.gate_up));
  linear.c = DType::kF32;
  linear.activation = LinearActivation::kNone;
  linear.activations = activations(weights.down);
  QUERN_ASSIGN_OR_RETURN(GroupedLinearPlan down,
                         GroupedLinearPlan::Create(linear, weights.down));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "k of down", down.k(),
                                   ColumnsOfC(spec.activation, gate_up.n()),
                                   "gate_up gives"));
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "n of down", down.n(), gate_up.k(), "k of gate_up is"));
  return ExpertsPlan(spec, std::move(order), std::move(gate_up),
                     std::move(down));
}

std::string ExpertsPlan::Explain(int64_t rows) const {
  return absl::StrCat("gate and up: ", gate_up_.Explain(rows),
                      "; down: ", down_.Explain(rows));
}

absl::StatusOr<int64_t> ExpertsPlan::WorkspaceBytes(int64_t max_tokens,
                                                    int max_workers) const {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_tokens", max_tokens, 0));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "max_workers", max_workers, 1,
                                   GroupedLinearPlan::kMaxWorkers));
  const int64_t tokens = std::min(max_tokens, BlockTokens(spec_.top_k));
  // LayOut takes these for granted.
  QUERN_RETURN_IF_ERROR(
      gate_up_.WorkspaceBytes(tokens * spec_.top_k, max_workers).status());
  QUERN_RETURN_IF_ERROR(
      down_.WorkspaceBytes(tokens * spec_.top_k, max_workers).status());
  WorkspaceLayout layout;
  LayOut(layout, tokens, max_workers);
  if (layout.overflow()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(kOp, ": max_workers=", max_workers,
                     "; their workspace has 2^63 bytes or more"));
  }
  return layout.bytes();
}

absl::Status ExpertsPlan::CheckRows(const ExpertsArgs& args) const {
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "x", args.x, spec_.x, {kAnyExtent, hidden()}));
  const int64_t tokens = args.x.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "out", args.out, spec_.out, {tokens, hidden()}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "x", args.x, "out", args.out));
  if (args.map.data() != nullptr || args.map.extent(0) > 0) {
    const AnyTensorView map(args.map);
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "map", map, DType::kI32, {kAnyExtent}));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, "map", map, "out", args.out));
    QUERN_RETURN_IF_ERROR(
        CheckIndices(kOp, "map", "expert", args.map, experts(), -1));
  }
  if (args.add.rank() == 0) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "add", args.add, spec_.out, {tokens, hidden()}));
  return CheckInPlaceOrApart(kOp, "add", args.add, "out", args.out);
}

absl::Status ExpertsPlan::CheckArgs(const ExpertsArgs& args) const {
  QUERN_RETURN_IF_ERROR(CheckRows(args));
  const int64_t tokens = args.x.extent(0);
  const AnyTensorView ids(args.ids), weights(args.weights);
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "ids", ids, DType::kI32, {tokens, spec_.top_k}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "weights", weights, DType::kF32, {tokens, spec_.top_k}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "ids", ids, "out", args.out));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "weights", weights, "out", args.out));
  return order_.CheckIds(args.ids, args.map);
}

void ExpertsPlan::Execute(const ExpertsArgs& args, Workspace workspace,
                          Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const int64_t tokens = args.x.extent(0);
  const int64_t blocks = DivCeil(tokens, BlockTokens(spec_.top_k));
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t begin = tokens * i / blocks;
    const int64_t count = tokens * (i + 1) / blocks - begin;
    ExpertsArgs block = args;
    block.x = RowSlice(args.x, begin, count);
    block.ids = RowsFrom(args.ids, begin, count);
    block.weights = RowsFrom(args.weights, begin, count);
    block.out = RowSlice(args.out, begin, count);
    if (args.add.rank() != 0) block.add = RowSlice(args.add, begin, count);
    ExecuteBlock(block, workspace, executor);
  }
}

void ExpertsPlan::ExecuteBlock(const ExpertsArgs& args, Workspace workspace,
                               Executor& executor) const {
  const int64_t tokens = args.x.extent(0);
  const int64_t routes = tokens * spec_.top_k;
  const Scratch scratch = LayOut(workspace, tokens, executor.num_workers());

  ExpertOrderArgs order;
  order.ids = args.ids;
  order.map = args.map;
  order.offsets = DenseVector(scratch.offsets, experts() + 1);
  order.order = DenseVector(scratch.order, routes);
  order_.Execute(order, scratch.order_workspace, executor);
  const int64_t rows = scratch.offsets[experts()];
  std::fill_n(scratch.row_of, routes, -1);
  for (int64_t r = 0; r < rows; ++r) {
    scratch.row_of[scratch.order[r]] = static_cast<int32_t>(r);
  }

  GroupedLinearArgs linear;
  linear.a = spec_.weight_on_input ? ScaleRows(args, scratch.scaled, executor)
                                   : args.x;
  linear.index = DenseVector<const int32_t>(scratch.order, rows);
  linear.rows_per_index = spec_.top_k;
  linear.offsets = DenseVector<const int32_t>(scratch.offsets, experts() + 1);
  linear.c = DenseRows(spec_.x, scratch.h, rows, inter());
  gate_up_.Execute(linear, scratch.product_workspace, executor);
  linear.a = linear.c;
  linear.index = {};
  linear.rows_per_index = 1;
  linear.c = DenseMatrix(scratch.y, rows, hidden());
  down_.Execute(linear, scratch.product_workspace, executor);
  Combine(args, scratch, executor);
}

AnyTensorView ExpertsPlan::ScaleRows(const ExpertsArgs& args, uint8_t* scaled,
                                     Executor& executor) const {
  const int64_t tokens = args.x.extent(0);
  const AnyTensorView to = DenseRows(spec_.x, scaled, tokens, hidden());
  const RowsOf from_rows(args.x), to_rows(to), weights(args.weights);
  ParallelRows(executor, tokens, hidden(), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      kernels_.scale(*reinterpret_cast<const float*>(weights[t]), from_rows[t],
                     to_rows[t], static_cast<size_t>(hidden()));
    }
  });
  return to;
}

void ExpertsPlan::Combine(const ExpertsArgs& args, const Scratch& scratch,
                          Executor& executor) const {
  const int64_t tokens = args.x.extent(0);
  const int64_t top_k = spec_.top_k;
  const RowsOf out(args.out), add(args.add), weights(args.weights);
  const auto combine = [&](int64_t begin, int64_t end) {
    const float* rows[ExpertsSpec::kMaxTopK];
    float row_weights[ExpertsSpec::kMaxTopK];
    CombineArgs combined = {};
    combined.rows = rows;
    combined.weights = row_weights;
    combined.n = static_cast<size_t>(hidden());
    for (int64_t t = begin; t < end; ++t) {
      const auto* w = reinterpret_cast<const float*>(weights[t]);
      combined.count = 0;
      for (int64_t j = 0; j < top_k; ++j) {
        const int64_t row = scratch.row_of[t * top_k + j];
        if (row < 0) continue;
        rows[combined.count] = scratch.y + row * hidden();
        row_weights[combined.count++] = spec_.weight_on_input ? 1.0f : w[j];
      }
      combined.add = args.add.rank() == 0 ? nullptr : add[t];
      combined.out = out[t];
      kernels_.combine(combined);
    }
  };
  ParallelRows(executor, tokens, (top_k + 1) * hidden(), combine);
}

}  // namespace quern
