#include "quern/ops/parallel/parallel_lm_head.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/check_args.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/float_type.h"
#include "quern/core/matrix_slice.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/logits/logits.h"
#include "quern/ops/parallel/bias_f32.h"
#include "quern/ops/parallel/parallel_linear.h"
#include "quern/ops/parallel/rank_linear.h"
#include "quern/ops/parallel/vocab_shard.h"
#include "quern/ops/parallel_rows.h"
#include "quern/quant/scalar_convert.h"

namespace quern {
namespace {

constexpr char kOp[] = "parallel_lm_head";

// What a rank sends for its largest logit of a row.
struct Candidate {
  float logit;
  int32_t id;

  // Treats NaN as larger than every number. False for two NaN.
  bool LargerThan(const Candidate& other) const {
    if (std::isnan(other.logit)) return false;
    return logit > other.logit || std::isnan(logit);
  }
};

// Finds the largest logit of each row. Column j has the id first_id + j.
void LargestOf(const AnyTensorView& logits, int64_t first_id,
               Candidate* candidates, Executor& executor) {
  WithFloatType(logits.dtype(), [&](auto type) {
    using T = decltype(type);
    const T* data = static_cast<const T*>(logits.data());
    ParallelRows(
        executor, logits.extent(0), logits.extent(1),
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const T* row = data + i * logits.stride(0);
            Candidate best = {ToF32(row[0]), static_cast<int32_t>(first_id)};
            for (int64_t j = 1; j < logits.extent(1); ++j) {
              const Candidate here = {ToF32(row[j]),
                                      static_cast<int32_t>(first_id + j)};
              if (here.LargerThan(best)) best = here;
            }
            candidates[i] = best;
          }
        });
    return 0;
  });
}

}  // namespace

absl::StatusOr<ParallelLmHeadPlan> ParallelLmHeadPlan::Create(
    const ParallelLmHeadSpec& spec, const AnyTensorView& weight,
    const AnyTensorView& bias, const Communicator& communicator,
    Executor& executor) {
  const int rank = communicator.rank(), size = communicator.size();
  QUERN_ASSIGN_OR_RETURN(const VocabShard shard,
                         VocabShard::Create(spec.vocab, rank, size));
  const int64_t own = shard.originals();
  LogitsSpec process;
  process.vocab = std::max<int64_t>(own, 1);
  process.hidden = spec.hidden;
  process.logits_dtype = spec.logits_dtype;
  process.soft_cap = spec.soft_cap;
  process.scale = spec.scale;
  QUERN_ASSIGN_OR_RETURN(LogitsPlan process_plan, LogitsPlan::Create(process));

  const bool full = spec.part == WeightPart::kFull;
  const int64_t given = full ? spec.vocab.original : shard.rows();
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "weight", weight, spec.weight_dtype,
                                   {given, spec.hidden}));
  QUERN_ASSIGN_OR_RETURN(const AlignedBuffer f32_bias,
                         BiasAsF32(kOp, bias, given));

  ParallelLmHeadPlan plan(spec, shard, std::move(process_plan), rank, size);
  if (own == 0) return plan;
  LinearSpec linear;
  linear.a = spec.hidden_dtype;
  linear.c = spec.logits_dtype;
  linear.kernels = spec.kernels;
  const int64_t first = full ? shard.original_begin : 0;
  LinearSource source;
  source.codes = RowSlice(weight, first, own);
  if (!f32_bias.empty()) {
    source.bias = DenseVector(f32_bias.data<float>() + first, own);
  }
  QUERN_ASSIGN_OR_RETURN(plan.linear_,
                         CreateRankLinear(kOp, linear, {source}, executor));
  return plan;
}

absl::StatusOr<int64_t> ParallelLmHeadPlan::WorkspaceBytes(
    int64_t max_m, int max_workers) const {
  return RankWorkspaceBytes(kOp, row_bytes(), linear(), max_m, max_workers);
}

int64_t ParallelLmHeadPlan::row_bytes() const {
  return static_cast<int64_t>(sizeof(Candidate)) * (size_ + 1) +
         shard_.originals() * static_cast<int64_t>(SizeOf(spec_.logits_dtype));
}

ColumnShards ParallelLmHeadPlan::Columns() const {
  return {spec_.vocab.original, spec_.vocab.padded_original() / size_};
}

absl::Status ParallelLmHeadPlan::CheckHidden(
    const AnyTensorView& hidden) const {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "hidden", hidden, spec_.hidden_dtype,
                                   {kAnyExtent, spec_.hidden}));
  if (!linear_.has_value()) return absl::OkStatus();
  // The chosen linear implementation may have further conditions on its input.
  return linear_->CheckRows(hidden);
}

absl::Status ParallelLmHeadPlan::CheckArgs(const AnyTensorView& hidden,
                                           const AnyTensorView& logits) const {
  QUERN_RETURN_IF_ERROR(CheckHidden(hidden));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "logits", logits, spec_.logits_dtype,
                                    {hidden.extent(0), spec_.vocab.original}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "hidden", hidden, "logits", logits));
  if (!linear_.has_value()) return absl::OkStatus();
  return linear_->CheckArgs(
      {hidden, ColumnSlice(logits, shard_.original_begin, shard_.originals())});
}

absl::Status ParallelLmHeadPlan::CheckArgMaxArgs(
    const AnyTensorView& hidden, VectorView<int64_t> tokens) const {
  if (!(spec_.scale > 0.0f)) {
    return InvalidArgument(kOp, "scale=", spec_.scale,
                           "; need scale > 0 to find the largest logit");
  }
  QUERN_RETURN_IF_ERROR(CheckHidden(hidden));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "tokens", tokens.extent(0),
                                   hidden.extent(0), "rows of hidden"));
  if (tokens.data() == nullptr && !tokens.empty()) {
    return InvalidArgument(kOp, "tokens is null; need ", tokens.extent(0));
  }
  return absl::OkStatus();
}

AnyTensorView ParallelLmHeadPlan::LogitsAt(void* data,
                                           int64_t rows) const noexcept {
  const int64_t own = shard_.originals();
  return AnyTensorView(spec_.logits_dtype, data, 2, {rows, own}, {own, 1});
}

void ParallelLmHeadPlan::OwnLogits(const AnyTensorView& hidden,
                                   const AnyTensorView& logits,
                                   const Workspace& workspace,
                                   Executor& executor) const noexcept {
  if (!linear_.has_value()) return;
  linear_->Execute({hidden, logits}, workspace, executor);
  process_.Execute(logits, executor);
}

void ParallelLmHeadPlan::Execute(const AnyTensorView& hidden,
                                 const AnyTensorView& logits,
                                 Workspace workspace,
                                 Communicator& communicator,
                                 Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(hidden, logits));
  QUERN_DCHECK(communicator.rank() == rank_ && communicator.size() == size_);
  const AnyTensorView own =
      ColumnSlice(logits, shard_.original_begin, shard_.originals());
  OwnLogits(hidden, own, workspace, executor);
  communicator.AllGatherColumns(own, logits, Columns());
}

void ParallelLmHeadPlan::ExecuteToRoot(const AnyTensorView& hidden,
                                       const AnyTensorView& logits,
                                       Workspace workspace,
                                       Communicator& communicator,
                                       Executor& executor) const noexcept {
  QUERN_DCHECK_OK(rank_ == 0 ? CheckArgs(hidden, logits) : CheckHidden(hidden));
  QUERN_DCHECK(communicator.rank() == rank_ && communicator.size() == size_);
  const int64_t n = hidden.extent(0);
  void* rows = workspace.Allocate<uint8_t>("rows", n * row_bytes());
  const AnyTensorView own =
      rank_ == 0
          ? ColumnSlice(logits, shard_.original_begin, shard_.originals())
          : LogitsAt(rows, n);
  OwnLogits(hidden, own, workspace, executor);
  communicator.GatherColumnsToRoot(own, logits, Columns());
}

void ParallelLmHeadPlan::ArgMax(const AnyTensorView& hidden,
                                VectorView<int64_t> tokens, Workspace workspace,
                                Communicator& communicator,
                                Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgMaxArgs(hidden, tokens));
  QUERN_DCHECK(communicator.rank() == rank_ && communicator.size() == size_);
  const int64_t n = hidden.extent(0);
  if (n == 0) return;
  void* rows = workspace.Allocate<uint8_t>("rows", n * row_bytes());
  auto* own = static_cast<Candidate*>(rows);  // one per row
  Candidate* all = own + n;                   // one per row, rank by rank
  if (linear_.has_value()) {
    const AnyTensorView logits = LogitsAt(all + n * size_, n);
    OwnLogits(hidden, logits, workspace, executor);
    LargestOf(logits, shard_.original_begin, own, executor);
  } else {
    // Candidates that lose against those of rank 0, which always has an id.
    std::fill_n(own, n, Candidate{-std::numeric_limits<float>::infinity(), 0});
  }
  communicator.AllGather(own, all, n * static_cast<int64_t>(sizeof(Candidate)));
  for (int64_t i = 0; i < n; ++i) {
    Candidate best = all[i];
    for (int r = 1; r < size_; ++r) {
      if (all[r * n + i].LargerThan(best)) best = all[r * n + i];
    }
    *tokens.At(i) = best.id;
  }
}

}  // namespace quern
