#include "ops/rope/rotary_embedding.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <utility>

#include "core/check_args.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "ops/parallel_rows.h"

namespace quern {
namespace {

constexpr char kOp[] = "rotary_embedding";

// f32 of one position's row of the table: cosines and sines, in the order that
// the kernel of the style reads.
int64_t RowFloats(const RotaryEmbeddingSpec& spec) {
  return spec.style == RotaryStyle::kHalves ? spec.rot_dim : 2 * spec.rot_dim;
}

void FillTable(const RotaryEmbeddingSpec& spec, const RotaryFrequencies& of,
               float* table) {
  const int64_t half = spec.rot_dim / 2;
  const double sign = spec.turn == RotaryTurn::kBackward ? -1.0 : 1.0;
  for (int64_t j = 0; j < half; ++j) {
    const double frequency = of.frequencies[static_cast<size_t>(j)];
    for (int64_t p = 0; p < spec.max_positions; ++p) {
      const double angle = static_cast<double>(p) * frequency;
      const float c = static_cast<float>(of.magnitude * std::cos(angle));
      const float s = static_cast<float>(sign * of.magnitude * std::sin(angle));
      float* row = table + p * RowFloats(spec);
      if (spec.style == RotaryStyle::kHalves) {
        row[j] = c;
        row[half + j] = s;
      } else {
        row[2 * j] = c;
        row[2 * j + 1] = c;
        row[spec.rot_dim + 2 * j] = -s;
        row[spec.rot_dim + 2 * j + 1] = s;
      }
    }
  }
}

absl::Status CheckPositions(IndexView positions, int64_t tokens,
                            int64_t max_positions) {
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "positions.size", positions.size(), tokens, "tokens"));
  if (positions.null() && tokens > 0) {
    return InvalidArgument(kOp, "positions is null; need ", tokens);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    if (positions[t] < 0 || positions[t] >= max_positions) {
      return InvalidArgument(kOp, "positions[", t, "]=", positions[t],
                             "; need 0 <= position < ", max_positions);
    }
  }
  return absl::OkStatus();
}

}  // namespace

RotaryEmbeddingPlan::RotaryEmbeddingPlan(const RotaryEmbeddingSpec& spec,
                                         const RotaryEmbeddingKernels& kernels,
                                         AlignedBuffer table)
    : spec_(spec), kernels_(kernels), table_(std::move(table)) {}

absl::StatusOr<RotaryEmbeddingPlan> RotaryEmbeddingPlan::Create(
    const RotaryEmbeddingSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "head_dim", spec.head_dim, 2));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "rot_dim", spec.rot_dim, 2, spec.head_dim));
  if (spec.rot_dim % 2 != 0) {
    return InvalidArgument(kOp, "rot_dim=", spec.rot_dim,
                           "; need an even number");
  }
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "rot_offset", spec.rot_offset, 0,
                                   spec.head_dim - spec.rot_dim));
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kOp, "max_positions", spec.max_positions, 1));
  if (!(spec.base > 0.0 && std::isfinite(spec.base))) {
    return InvalidArgument(kOp, "base=", spec.base, "; need finite base > 0");
  }
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", spec.dtype,
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  QUERN_ASSIGN_OR_RETURN(
      const RotaryFrequencies frequencies,
      ComputeRotaryFrequencies(spec.rot_dim, spec.base, spec.scaling));
  // Half of the way to overflow: RowFloats may double rot_dim.
  int64_t floats = 0, bytes = 0;
  if (!CheckedMul(spec.max_positions, spec.rot_dim, &floats) ||
      !CheckedMul(floats, 2 * int64_t{sizeof(float)}, &bytes)) {
    return InvalidArgument(kOp, "max_positions=", spec.max_positions,
                           ", rot_dim=", spec.rot_dim,
                           "; need their product to be below 2^60");
  }
  QUERN_ASSIGN_OR_RETURN(
      AlignedBuffer table,
      AlignedBuffer::Create(spec.max_positions * RowFloats(spec) *
                            int64_t{sizeof(float)}));
  FillTable(spec, frequencies, table.data<float>());
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
  return CheckPositions(positions, x.extent(0), spec_.max_positions);
}

absl::Status RotaryEmbeddingPlan::CheckQkArgs(IndexView positions,
                                              const AnyTensorView& q,
                                              const AnyTensorView& k) const {
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "q", q, spec_.dtype,
                                    {kAnyExtent, kAnyExtent, spec_.head_dim}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "k", k, spec_.dtype,
                                    {q.extent(0), kAnyExtent, spec_.head_dim}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "q", q, "k", k));
  return CheckPositions(positions, q.extent(0), spec_.max_positions);
}

void RotaryEmbeddingPlan::RotateToken(int64_t position, const AnyTensorView& x,
                                      const AnyTensorView& out,
                                      int64_t token) const {
  const int64_t size = static_cast<int64_t>(SizeOf(spec_.dtype));
  const int64_t row = RowFloats(spec_);
  RotaryHeads heads = {};
  const char* const from =
      static_cast<const char*>(x.data()) + token * x.stride(0) * size;
  char* const to =
      static_cast<char*>(out.mutable_data()) + token * out.stride(0) * size;
  heads.x = from + spec_.rot_offset * size;
  heads.out = to + spec_.rot_offset * size;
  // The stride of a lone head may be any number.
  const bool steps = x.extent(1) > 1;
  heads.x_stride = steps ? static_cast<size_t>(x.stride(1)) : 0;
  heads.out_stride = steps ? static_cast<size_t>(out.stride(1)) : 0;
  heads.heads = static_cast<size_t>(x.extent(1));
  heads.rot_dim = static_cast<size_t>(spec_.rot_dim);
  heads.cos = table_.data<float>() + position * row;
  heads.sin = heads.cos + row / 2;
  if (spec_.style == RotaryStyle::kHalves) {
    kernels_.halves(heads);
  } else {
    kernels_.pairs(heads);
  }
  if (spec_.rot_dim == spec_.head_dim || from == to) return;
  const int64_t end = spec_.rot_offset + spec_.rot_dim;
  for (int64_t h = 0; h < x.extent(1); ++h) {
    const char* const head = from + h * x.stride(1) * size;
    char* const out_head = to + h * out.stride(1) * size;
    std::memcpy(out_head, head, static_cast<size_t>(spec_.rot_offset * size));
    std::memcpy(out_head + end * size, head + end * size,
                static_cast<size_t>((spec_.head_dim - end) * size));
  }
}

void RotaryEmbeddingPlan::Execute(IndexView positions, const AnyTensorView& x,
                                  const AnyTensorView& out,
                                  Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(positions, x, out));
  ParallelRows(executor, x.extent(0), 2 * x.extent(1) * spec_.head_dim,
               [&](int64_t begin, int64_t end) {
                 for (int64_t t = begin; t < end; ++t) {
                   RotateToken(positions[t], x, out, t);
                 }
               });
}

void RotaryEmbeddingPlan::ExecuteQk(IndexView positions, const AnyTensorView& q,
                                    const AnyTensorView& k,
                                    Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckQkArgs(positions, q, k));
  ParallelRows(executor, q.extent(0),
               2 * (q.extent(1) + k.extent(1)) * spec_.head_dim,
               [&](int64_t begin, int64_t end) {
                 for (int64_t t = begin; t < end; ++t) {
                   RotateToken(positions[t], q, q, t);
                   RotateToken(positions[t], k, k, t);
                 }
               });
}

}  // namespace quern
