#include "quern/gemm/grouped_linear.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/kernels/epilogue_kernels.h"
#include "quern/gemm/layers/linear_layer.h"
#include "quern/gemm/layers/packed_layers.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/schedule/division.h"
#include "quern/gemm/schedule/group_line.h"
#include "quern/gemm/schedule/grouped_rows.h"
#include "quern/gemm/schedule/packed_product.h"

namespace quern {
namespace {

constexpr char kOp[] = "grouped_linear";

// Blocks of so many rows in all: one for each group that has rows, and one more
// for each kBlockRows of them.
int64_t MaxBlocks(int64_t rows, int64_t groups) {
  return std::min(rows, groups) + rows / kBlockRows;
}

// The blocks stand there twice: in the order of rows, which finds the block of
// a row, and in the order of the line.
struct Blocks {
  GroupBlock* by_row;
  GroupBlock* by_cost;
};
template <typename Allocator>
Blocks LayOutBlocks(Allocator& allocator, int64_t rows, int64_t groups) {
  const int64_t count = MaxBlocks(rows, groups);
  return {
      allocator.template Allocate<GroupBlock>("blocks by row", count),
      allocator.template Allocate<GroupBlock>("blocks by cost", count),
  };
}

// Writes the blocks in the order of rows. Returns how many there are.
size_t ListBlocks(const int32_t* offsets, int64_t groups, GroupBlock* blocks) {
  size_t count = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = offsets[g];
    if (offsets[g + 1] == begin) continue;
    ForEachRowBlock(offsets[g + 1] - begin, [&](int64_t first, int64_t rows) {
      blocks[count++] = {g, begin + first, rows, 0};
    });
  }
  return count;
}

const GroupBlock& BlockOfRow(absl::Span<const GroupBlock> by_row, int64_t row) {
  return *(std::upper_bound(by_row.begin(), by_row.end(), row,
                            [](int64_t r, const GroupBlock& block) {
                              return r < block.first;
                            }) -
           1);
}

absl::Status CheckSame(const LinearWeights& first, const LinearWeights& other,
                       size_t group) {
  const LinearWeightsSpec &x = first.spec(), &y = other.spec();
  const auto differs = [&](absl::string_view what, auto of_other,
                           auto of_first) {
    return InvalidArgument(kOp, what, " of weights[", group, "] is ", of_other,
                           "; need ", of_first, ", as weights[0] has");
  };
  if (y.n != x.n) return differs("n", y.n, x.n);
  if (y.k != x.k) return differs("k", y.k, x.k);
  if (y.format != x.format) {
    return differs("format", WeightFormatName(y.format),
                   WeightFormatName(x.format));
  }
  if (y.block_format != x.block_format) {
    return differs("block_format", static_cast<uint32_t>(y.block_format),
                   static_cast<uint32_t>(x.block_format));
  }
  if (y.group_size != x.group_size) {
    return differs("group_size", y.group_size, x.group_size);
  }
  if (y.gated != x.gated) return differs("gated", y.gated, x.gated);
  const auto differs_in = [&](absl::string_view what, bool other_has) {
    return InvalidArgument(kOp, "weights[", group, "] ",
                           other_has ? "has " : "has no ", what,
                           "; weights[0] ", other_has ? "has none" : "has");
  };
  if (other.has_bias() != first.has_bias()) {
    return differs_in("bias", other.has_bias());
  }
  if ((other.zeros() == nullptr) != (first.zeros() == nullptr)) {
    return differs_in("zero points", other.zeros() != nullptr);
  }
  if ((other.order() == nullptr) != (first.order() == nullptr)) {
    return differs_in("order of k", other.order() != nullptr);
  }
  return absl::OkStatus();
}

absl::Status CheckOffsets(const VectorView<const int32_t>& offsets,
                          int64_t rows) {
  for (int64_t g = 0; g < offsets.extent(0); ++g) {
    const int32_t least = g == 0 ? 0 : offsets.data()[g - 1];
    const int32_t at = offsets.data()[g];
    if (at < least || at > rows || (g == 0 && at != 0)) {
      return InvalidArgument(
          kOp, "offsets[", g, "]=", at, "; need ",
          g == 0 ? std::string("0") : absl::StrCat(least, " or more"),
          ", and at most the ", rows, " rows of c");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GroupedLinearPlan> GroupedLinearPlan::Create(
    const GroupedLinearSpec& spec, absl::Span<const LinearWeights> weights) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "number of weights",
                                   static_cast<int64_t>(weights.size()), 1,
                                   kMaxGroups));
  GroupedLinearPlan plan;
  plan.spec_ = spec;
  plan.weights_ = weights[0].spec();
  LinearSpec linear;
  linear.a = spec.a;
  linear.c = spec.c;
  linear.activation = spec.activation;
  linear.activations = spec.activations;
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "a", spec.a, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(CheckLinearSpec(kOp, linear, plan.weights_));
  plan.layers_.reserve(weights.size());
  for (size_t g = 0; g < weights.size(); ++g) {
    QUERN_RETURN_IF_ERROR(CheckSame(weights[0], weights[g], g));
    QUERN_ASSIGN_OR_RETURN(auto layer, CreatePackedLayer(linear, weights[g]));
    plan.layers_.push_back(std::move(layer));
  }
  return plan;
}

GroupedLinearPlan::GroupedLinearPlan() = default;
GroupedLinearPlan::GroupedLinearPlan(GroupedLinearPlan&&) noexcept = default;
GroupedLinearPlan& GroupedLinearPlan::operator=(GroupedLinearPlan&&) noexcept =
    default;
GroupedLinearPlan::~GroupedLinearPlan() = default;

int64_t GroupedLinearPlan::groups() const {
  return static_cast<int64_t>(layers_.size());
}

int64_t GroupedLinearPlan::packed_bytes() const {
  int64_t bytes = 0;
  for (const auto& layer : layers_) bytes += layer->packed_bytes();
  return bytes;
}

const char* GroupedLinearPlan::target() const { return layers_[0]->target(); }

std::string GroupedLinearPlan::Explain(int64_t rows) const {
  return layers_[0]->Explain(rows);
}

absl::StatusOr<int64_t> GroupedLinearPlan::WorkspaceBytes(
    int64_t max_rows, int max_workers) const {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "max_rows", max_rows, 0));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "max_workers", max_workers, 1, kMaxWorkers));
  if (max_rows > kMaxRows) {
    return absl::ResourceExhaustedError(
        absl::StrCat(kOp, ": max_rows=", max_rows, "; need at most ", kMaxRows,
                     ", which offsets can tell"));
  }
  WorkspaceLayout layout;
  LayOutBlocks(layout, max_rows, groups());
  layers_[0]->CountGroups(layout, max_rows, max_workers);
  if (layout.overflow()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        kOp, ": max_rows=", max_rows, ", max_workers=", max_workers,
        "; their workspace has 2^63 bytes or more"));
  }
  return layout.bytes();
}

absl::Status GroupedLinearPlan::CheckArgs(const GroupedLinearArgs& args) const {
  const AnyTensorView index(args.index), offsets(args.offsets);
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "a", args.a, spec_.a, {kAnyExtent, k()}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "c", args.c, spec_.c,
                  {kAnyExtent, ColumnsOfC(spec_.activation, n())}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "a", args.a, "c", args.c));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "offsets", offsets, DType::kI32, {groups() + 1}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "offsets", offsets, "c", args.c));
  QUERN_RETURN_IF_ERROR(CheckOffsets(args.offsets, args.c.extent(0)));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "rows_per_index", args.rows_per_index, 1, kMaxRows));
  const int64_t rows = args.offsets.data()[groups()];
  if (args.index.data() == nullptr) {
    return CheckAtLeast(kOp, "rows of a", args.a.extent(0), rows);
  }
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "index", index, DType::kI32, {kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "index", index, "c", args.c));
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "extent of index", args.index.extent(0), rows));
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t i = args.index.data()[r];
    if (i >= 0 && i / args.rows_per_index < args.a.extent(0)) continue;
    return InvalidArgument(kOp, "index[", r, "]=", i, "; need 0 <= index / ",
                           args.rows_per_index, " < ", args.a.extent(0),
                           ", the rows of a");
  }
  return absl::OkStatus();
}

void GroupedLinearPlan::Execute(const GroupedLinearArgs& args,
                                const Workspace& workspace,
                                Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const int64_t rows = args.offsets.data()[groups()];
  if (rows == 0) return;
  const int workers = executor.num_workers();
  Workspace memory = workspace;
  const Blocks blocks = LayOutBlocks(memory, rows, groups());
  const size_t count = ListBlocks(args.offsets.data(), groups(), blocks.by_row);
  std::copy_n(blocks.by_row, count, blocks.by_cost);
  const absl::Span<const GroupBlock> by_row(blocks.by_row, count);
  const GroupedRows all = {rows, workers, memory};
  const PackedLayer& any = *layers_[0];
  InlineExecutor inline_executor;

  const auto* a = static_cast<const uint8_t*>(args.a.data());
  const int64_t a_row_bytes = RowBytes(args.a);
  const auto pack = [&](int64_t row, int worker) {
    const GroupBlock& block = BlockOfRow(by_row, row);
    const int64_t row_of_a = args.index.data() == nullptr
                                 ? row
                                 : args.index.data()[row] / args.rows_per_index;
    layers_[static_cast<size_t>(block.group)]->PackRow(
        all, {block.first, block.rows}, row - block.first,
        a + row_of_a * a_row_bytes, worker);
  };
  Executor& packers =
      WorthAFork(rows * any.lines() / 8, 0) ? executor : inline_executor;
  packers.ParallelFor(rows, pack);

  const GroupLine line({blocks.by_cost, count}, any.panels(), workers);
  LinearArgs to;
  to.c = args.c;
  // Where the next share begins. Which worker claims it changes no bit.
  std::atomic<int64_t> front{0};
  const auto multiply = [&](int64_t /*task*/, int worker) {
    int64_t begin = front.load(std::memory_order_relaxed);
    while (begin < line.units()) {
      const int64_t end = line.ShareEnd(begin);
      if (!front.compare_exchange_weak(begin, end, std::memory_order_relaxed)) {
        continue;
      }
      line.ForEachRange(
          begin, end,
          [&](const GroupBlock& block, int64_t panel, int64_t panel_end) {
            layers_[static_cast<size_t>(block.group)]->MultiplyBlock(
                all, {block.first, block.rows}, panel, panel_end, to, worker);
          });
      begin = front.load(std::memory_order_relaxed);
    }
  };
  Executor& multipliers =
      WorthAFork(static_cast<int64_t>(count) * any.panels() * any.lines(),
                 rows / static_cast<int64_t>(count))
          ? executor
          : inline_executor;
  multipliers.ParallelFor(multipliers.num_workers(), multiply);
}

}  // namespace quern
