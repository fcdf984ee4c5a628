#include "quern/ops/rope/rotary_embedding.h"

#include <utility>

#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/rope/rotary_rows.h"

namespace quern {
namespace {

constexpr char kOp[] = "rotary_embedding";

}  // namespace

RotaryEmbeddingPlan::RotaryEmbeddingPlan(
    const RotaryEmbeddingSpec& spec, const RotaryEmbeddingKernels& kernels,
    std::shared_ptr<const AlignedBuffer> table)
    : spec_(spec), kernels_(kernels), table_(std::move(table)) {}

absl::StatusOr<RotaryEmbeddingPlan> RotaryEmbeddingPlan::Create(
    const RotaryEmbeddingSpec& spec, RotaryTables* tables) {
  QUERN_RETURN_IF_ERROR(CheckRotarySpec(kOp, spec));
  QUERN_ASSIGN_OR_RETURN(
      std::shared_ptr<const AlignedBuffer> table,
      GetRotaryTable(tables, kOp, spec, "max_positions", spec.max_positions));
  return RotaryEmbeddingPlan(spec, GetRotaryEmbeddingKernels(spec.dtype),
                             std::move(table));
}

absl::Status RotaryEmbeddingPlan::CheckArgs(IndexView positions,
                                            const AnyTensorView& x,
                                            const AnyTensorView& out) const {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "x", x, spec_.dtype,
                                   {kAnyExtent, kAnyExtent, spec_.head_dim}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "out", out, spec_.dtype,
                  {x.extent(0), x.extent(1), spec_.head_dim}));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "x", x, "out", out));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "positions", positions.tensor(), "out", out));
  return CheckRotaryPositions(kOp, positions, x.extent(0), spec_.max_positions);
}

absl::Status RotaryEmbeddingPlan::CheckQkArgs(IndexView positions,
                                              const AnyTensorView& q,
                                              const AnyTensorView& k) const {
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "q", q, spec_.dtype,
                                    {kAnyExtent, kAnyExtent, spec_.head_dim}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "k", k, spec_.dtype,
                                    {q.extent(0), kAnyExtent, spec_.head_dim}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "q", q, "k", k));
  const AnyTensorView numbers = positions.tensor();
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "positions", numbers, "q", q));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "positions", numbers, "k", k));
  return CheckRotaryPositions(kOp, positions, q.extent(0), spec_.max_positions);
}

const float* RotaryEmbeddingPlan::Row(int64_t position) const {
  return table_->data<float>() +
         position * RotaryRowFloats(spec_.style, spec_.rot_dim);
}

void RotaryEmbeddingPlan::Execute(IndexView positions, const AnyTensorView& x,
                                  const AnyTensorView& out,
                                  Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(positions, x, out));
  if (IsEmpty(x)) return;
  ParallelRows(executor, x.extent(0), 2 * x.extent(1) * spec_.head_dim,
               [&](int64_t begin, int64_t end) {
                 for (int64_t t = begin; t < end; ++t) {
                   RotateToken(kernels_, spec_, Row(positions[t]), x, out, t);
                 }
               });
}

void RotaryEmbeddingPlan::ExecuteQk(IndexView positions, const AnyTensorView& q,
                                    const AnyTensorView& k,
                                    Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckQkArgs(positions, q, k));
  if (IsEmpty(q) && IsEmpty(k)) return;
  ParallelRows(executor, q.extent(0),
               2 * (q.extent(1) + k.extent(1)) * spec_.head_dim,
               [&](int64_t begin, int64_t end) {
                 for (int64_t t = begin; t < end; ++t) {
                   RotateToken(kernels_, spec_, Row(positions[t]), q, q, t);
                   RotateToken(kernels_, spec_, Row(positions[t]), k, k, t);
                 }
               });
}

}  // namespace quern
