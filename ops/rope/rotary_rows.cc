#include "quern/ops/rope/rotary_rows.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <utility>

#include "quern/core/check_args.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/ops/check_indices.h"
#include "quern/ops/rope/rotary_scaling.h"

namespace quern {
namespace {

void FillTable(const RotaryEmbeddingSpec& spec, const RotaryFrequencies& of,
               int64_t count, float* table) {
  const int64_t row_floats = RotaryRowFloats(spec.style, spec.rot_dim);
  const double sign = spec.turn == RotaryTurn::kBackward ? -1.0 : 1.0;
  for (int64_t j = 0; j < spec.rot_dim / 2; ++j) {
    const double frequency = of.frequencies[static_cast<size_t>(j)];
    for (int64_t p = 0; p < count; ++p) {
      const double angle = static_cast<double>(p) * frequency;
      SetRotaryPair(spec.style, spec.rot_dim, j,
                    static_cast<float>(of.magnitude * std::cos(angle)),
                    static_cast<float>(sign * of.magnitude * std::sin(angle)),
                    table + p * row_floats);
    }
  }
}

}  // namespace

absl::Status CheckRotarySpec(absl::string_view op,
                             const RotaryEmbeddingSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(op, "head_dim", spec.head_dim, 2));
  QUERN_RETURN_IF_ERROR(
      CheckRange(op, "rot_dim", spec.rot_dim, 2, spec.head_dim));
  if (spec.rot_dim % 2 != 0) {
    return InvalidArgument(op, "rot_dim=", spec.rot_dim,
                           "; need an even number");
  }
  QUERN_RETURN_IF_ERROR(CheckRange(op, "rot_offset", spec.rot_offset, 0,
                                   spec.head_dim - spec.rot_dim));
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(op, "max_positions", spec.max_positions, 1));
  QUERN_RETURN_IF_ERROR(CheckPositive(op, "base", spec.base, "finite base"));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(op, "dtype", spec.dtype, kFloatDTypes));
  return absl::OkStatus();
}

absl::StatusOr<AlignedBuffer> MakeRotaryTable(absl::string_view op,
                                              const RotaryEmbeddingSpec& spec,
                                              absl::string_view count_field,
                                              int64_t count) {
  // A row has up to 2 * rot_dim floats, hence the factor of two.
  int64_t floats = 0, bytes = 0;
  if (!CheckedMul(count, spec.rot_dim, &floats) ||
      !CheckedMul(floats, 2 * int64_t{sizeof(float)}, &bytes)) {
    return InvalidArgument(op, count_field, "=", count,
                           ", rot_dim=", spec.rot_dim,
                           "; need their product to be below 2^60");
  }
  // The table is allocated before the frequencies, so that a rot_dim too large
  // for memory is refused here: the frequencies' std::vector could only fail.
  QUERN_ASSIGN_OR_RETURN(
      AlignedBuffer table,
      AlignedBuffer::Create(count * RotaryRowFloats(spec.style, spec.rot_dim) *
                            int64_t{sizeof(float)}));
  QUERN_ASSIGN_OR_RETURN(
      const RotaryFrequencies frequencies,
      ComputeRotaryFrequencies(spec.rot_dim, spec.base, spec.scaling));
  FillTable(spec, frequencies, count, table.data<float>());
  return table;
}

absl::Status CheckRotaryPositions(absl::string_view op, IndexView positions,
                                  int64_t count, int64_t max_positions) {
  QUERN_RETURN_IF_ERROR(
      CheckEqual(op, "positions.size", positions.size(), count, "tokens"));
  return CheckIndices(op, "positions", "position", positions, max_positions);
}

void RotateToken(const RotaryEmbeddingKernels& kernels,
                 const RotaryEmbeddingSpec& spec, const float* row,
                 const AnyTensorView& x, const AnyTensorView& out,
                 int64_t token) {
  if (x.extent(1) == 0) return;  // x may then have no memory
  const int64_t size = static_cast<int64_t>(SizeOf(spec.dtype));
  RotaryHeads heads = {};
  const char* const from =
      static_cast<const char*>(x.data()) + token * x.stride(0) * size;
  char* const to =
      static_cast<char*>(out.mutable_data()) + token * out.stride(0) * size;
  heads.x = from + spec.rot_offset * size;
  heads.out = to + spec.rot_offset * size;
  // The stride of a single head is meaningless and is replaced by 0.
  const bool steps = x.extent(1) > 1;
  heads.x_stride = steps ? static_cast<size_t>(x.stride(1)) : 0;
  heads.out_stride = steps ? static_cast<size_t>(out.stride(1)) : 0;
  heads.heads = static_cast<size_t>(x.extent(1));
  heads.rot_dim = static_cast<size_t>(spec.rot_dim);
  heads.cos = row;
  heads.sin = row + RotaryRowFloats(spec.style, spec.rot_dim) / 2;
  if (spec.style == RotaryStyle::kHalves) {
    kernels.halves(heads);
  } else {
    kernels.pairs(heads);
  }
  if (spec.rot_dim == spec.head_dim || from == to) return;
  const int64_t end = spec.rot_offset + spec.rot_dim;
  for (int64_t h = 0; h < x.extent(1); ++h) {
    const char* const head = from + h * x.stride(1) * size;
    char* const out_head = to + h * out.stride(1) * size;
    std::memcpy(out_head, head, static_cast<size_t>(spec.rot_offset * size));
    std::memcpy(out_head + end * size, head + end * size,
                static_cast<size_t>((spec.head_dim - end) * size));
  }
}

}  // namespace quern
