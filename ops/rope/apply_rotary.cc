#include "quern/ops/rope/apply_rotary.h"

#include <array>
#include <cstddef>
#include <cstring>

#include "absl/types/span.h"
#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/load_row.h"
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
                                   {tokens, spec_.RowElements()}));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "sin", sin, spec_.table_dtype,
                                   {tokens, spec_.RowElements()}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "cos", cos, "out", out));
  return CheckApart(kOp, "sin", sin, "out", out);
}

struct ApplyRotaryPlan::TokenRows {
  alignas(64) float first[2 * kMaxMadeRotDim];
  alignas(64) float second[2 * kMaxMadeRotDim];
  bool equal;  // the second is not made
};

void ApplyRotaryPlan::MakeRows(const AnyTensorView& cos,
                               const AnyTensorView& sin, int64_t t,
                               TokenRows& rows) const {
  // Whole rows, and room for the last vector that LoadRow stores.
  alignas(64) float c[kMaxMadeRotDim + 64], s[kMaxMadeRotDim + 64];
  const int64_t n = spec_.RowElements(), pairs = spec_.head_dim / 2;
  const size_t size = SizeOf(spec_.table_dtype);
  const auto load = [&](const AnyTensorView& table, float* row) {
    const auto at = static_cast<size_t>(t * table.RowStride());
    LoadRow(table_blocks_, static_cast<const char*>(table.data()) + at * size,
            n, size, row);
  };
  load(cos, c);
  load(sin, s);
  const bool halves = spec_.style == RotaryStyle::kHalves;
  rows.equal = true;
  for (int64_t j = 0; j < pairs; ++j) {
    int64_t a = j, b = j;
    if (spec_.rows == RotaryRows::kEach) {
      a = halves ? j : 2 * j;
      b = halves ? pairs + j : 2 * j + 1;
    }
    SetRotaryPair(spec_.style, spec_.head_dim, j, c[a], s[a], rows.first);
    // A NaN is not equal to itself, and pairs have one angle.
    rows.equal = rows.equal && (a == b || (c[a] == c[b] && s[a] == s[b]));
  }
  if (rows.equal) return;
  for (int64_t j = 0; j < pairs; ++j) {
    const int64_t b = halves ? pairs + j : 2 * j + 1;
    SetRotaryPair(spec_.style, spec_.head_dim, j, c[b], s[b], rows.second);
  }
}

// The heads of token t of x[tokens, heads, head_dim]. Where an element of a
// pair has an angle of its own, each head is rotated twice.
void ApplyRotaryPlan::Rotate(const TokenRows& rows, const AnyTensorView& x,
                             const AnyTensorView& out, int64_t t) const {
  RotaryEmbeddingSpec heads;
  heads.head_dim = heads.rot_dim = spec_.head_dim;
  heads.style = spec_.style;
  heads.dtype = spec_.dtype;
  if (rows.equal) return RotateToken(kernels_, heads, rows.first, x, out, t);
  const auto size = static_cast<int64_t>(SizeOf(spec_.dtype));
  const int64_t n = spec_.head_dim;
  alignas(64) char second[kMaxMadeRotDim * sizeof(float)];
  const AnyTensorView seconds(spec_.dtype, static_cast<void*>(second), 3,
                              {1, 1, n}, {n, n, 1});
  const auto head = [&](const AnyTensorView& v, int64_t h) {
    auto* const data = static_cast<char*>(const_cast<void*>(v.data()));
    return data + (t * v.stride(0) + h * v.stride(1)) * size;
  };
  for (int64_t h = 0; h < x.extent(1); ++h) {
    const AnyTensorView from(spec_.dtype, static_cast<const void*>(head(x, h)),
                             3, {1, 1, n}, {n, n, 1});
    char* const to = head(out, h);
    RotateToken(kernels_, heads, rows.second, from, seconds, 0);
    RotateToken(kernels_, heads, rows.first, from,
                AnyTensorView(spec_.dtype, static_cast<void*>(to), 3, {1, 1, n},
                              {n, n, 1}),
                0);
    const bool halves = spec_.style == RotaryStyle::kHalves;
    for (int64_t j = 0; j < n / 2; ++j) {
      const int64_t b = (halves ? n / 2 + j : 2 * j + 1) * size;
      std::memcpy(to + b, second + b, static_cast<size_t>(size));
    }
  }
}

void ApplyRotaryPlan::Execute(const AnyTensorView& x, const AnyTensorView& cos,
                              const AnyTensorView& sin,
                              const AnyTensorView& out,
                              Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(x, cos, sin, out));
  if (IsEmpty(x)) return;
  const int64_t batch = x.rank() == 4 ? x.extent(0) : 1;
  // Workers share the tokens, because one row of cosines and sines serves all
  // batches.
  ParallelRows(executor, x.extent(x.rank() - 3),
               2 * batch * x.extent(x.rank() - 2) * spec_.head_dim,
               [&](int64_t begin, int64_t end) {
                 TokenRows rows;
                 for (int64_t t = begin; t < end; ++t) {
                   MakeRows(cos, sin, t, rows);
                   for (int64_t b = 0; b < batch; ++b) {
                     Rotate(rows, OfBatch(x, b), OfBatch(out, b), t);
                   }
                 }
               });
}

}  // namespace quern
