#include "quern/ops/rope/apply_rotary.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/rope/rotary_rows.h"

namespace quern {
namespace {

constexpr char kOp[] = "apply_rotary_emb";

// Returns v[b, ...] of a view of rank 4, and v itself if its rank is 3.
AnyTensorView OfBatch(const AnyTensorView& v, int64_t b) {
  if (v.rank() == 3) return v;
  const int64_t bytes =
      b * v.RowStride() * static_cast<int64_t>(SizeOf(v.dtype()));
  const AnyTensorView::Dims extents{v.extent(1), v.extent(2), v.extent(3)};
  const AnyTensorView::Dims strides{v.stride(1), v.stride(2), v.stride(3)};
  if (v.writable()) {
    return AnyTensorView(
        v.dtype(),
        static_cast<void*>(static_cast<char*>(v.mutable_data()) + bytes), 3,
        extents, strides);
  }
  return AnyTensorView(
      v.dtype(),
      static_cast<const void*>(static_cast<const char*>(v.data()) + bytes), 3,
      extents, strides);
}

}  // namespace

absl::StatusOr<ApplyRotaryPlan> ApplyRotaryPlan::Create(
    const ApplyRotarySpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "head_dim", spec.head_dim, 2, kMaxMadeRotDim));
  if (spec.head_dim % 2 != 0) {
    return InvalidArgument(kOp, "head_dim=", spec.head_dim,
                           "; need an even number");
  }
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", spec.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "table_dtype", spec.table_dtype, kFloatDTypes));
  return ApplyRotaryPlan(spec);
}

ApplyRotaryPlan::ApplyRotaryPlan(const ApplyRotarySpec& spec)
    : spec_(spec),
      kernels_(GetRotaryEmbeddingKernels(spec.dtype)),
      table_blocks_(GetRowBlockKernels(spec.table_dtype, spec.dtype)) {}

absl::Status ApplyRotaryPlan::CheckArgs(const AnyTensorView& x,
                                        const AnyTensorView& cos,
                                        const AnyTensorView& sin,
                                        const AnyTensorView& out) const {
  // x of rank 3 lacks the first dimension, the batch.
  std::array<int64_t, 4> dims = {kAnyExtent, kAnyExtent, kAnyExtent,
                                 spec_.head_dim};
  const absl::Span<int64_t> want =
      absl::MakeSpan(dims).subspan(x.rank() == 4 ? 0 : 1);
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "x", x, spec_.dtype, want));
  for (size_t d = 0; d + 1 < want.size(); ++d) {
    want[d] = x.extent(static_cast<int>(d));
  }
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out", out, spec_.dtype, want));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "x", x, "out", out));
  const int64_t tokens = x.extent(x.rank() - 3);
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "cos", cos, spec_.table_dtype,
                                   {tokens, spec_.head_dim / 2}));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "sin", sin, spec_.table_dtype,
                                   {tokens, spec_.head_dim / 2}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "cos", cos, "out", out));
  return CheckApart(kOp, "sin", sin, "out", out);
}

void ApplyRotaryPlan::Execute(const AnyTensorView& x, const AnyTensorView& cos,
                              const AnyTensorView& sin,
                              const AnyTensorView& out,
                              Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, cos, sin, out));
  if (IsEmpty(x)) return;
  RotaryEmbeddingSpec heads;
  heads.head_dim = heads.rot_dim = spec_.head_dim;
  heads.style = spec_.style;
  heads.dtype = spec_.dtype;
  const int64_t batch = x.rank() == 4 ? x.extent(0) : 1;
  const int64_t tokens = x.extent(x.rank() - 3);
  const int64_t half = spec_.head_dim / 2;
  const int64_t table_size = static_cast<int64_t>(SizeOf(spec_.table_dtype));
  const auto load = [&](const AnyTensorView& table, int64_t t, int64_t j,
                        int64_t count, float* block) {
    const int64_t at = t * table.RowStride() + j;
    table_blocks_.load(static_cast<const char*>(table.data()) + at * table_size,
                       static_cast<size_t>(count), block);
  };
  // Workers share the tokens, because one row of cosines and sines serves all
  // batches.
  ParallelRows(executor, tokens,
               2 * batch * x.extent(x.rank() - 2) * spec_.head_dim,
               [&](int64_t begin, int64_t end) {
                 alignas(64) float c[kRowBlock], s[kRowBlock];
                 alignas(64) float row[2 * kMaxMadeRotDim];
                 constexpr int64_t kBlock = static_cast<int64_t>(kRowBlock);
                 for (int64_t t = begin; t < end; ++t) {
                   for (int64_t j = 0; j < half; j += kBlock) {
                     const int64_t count = std::min(kBlock, half - j);
                     load(cos, t, j, count, c);
                     load(sin, t, j, count, s);
                     for (int64_t i = 0; i < count; ++i) {
                       SetRotaryPair(spec_.style, spec_.head_dim, j + i, c[i],
                                     s[i], row);
                     }
                   }
                   for (int64_t b = 0; b < batch; ++b) {
                     RotateToken(kernels_, heads, row, OfBatch(x, b),
                                 OfBatch(out, b), t);
                   }
                 }
               });
}

}  // namespace quern
