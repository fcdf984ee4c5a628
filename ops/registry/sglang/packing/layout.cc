#include "quern/ops/registry/sglang/packing/layout.h"

#include <algorithm>
#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "sglang_layout";

bool IsPackable(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
    case DType::kF16:
    case DType::kF8E4M3:
    case DType::kI8:
    case DType::kU8:
      return true;
    default:
      return false;
  }
}

}  // namespace

absl::StatusOr<SglangLayout> SglangLayout::Create(DType dtype, int64_t k,
                                                  int64_t n) {
  if (!IsPackable(dtype)) {
    return Unimplemented(kOp, "dtype=", DTypeName(dtype),
                         "; need bf16, f16, f8e4m3, i8 or u8");
  }
  if (k < 1 || n < 1) {
    return InvalidArgument(kOp, "w[n=", n, ", k=", k,
                           "]; need n >= 1 and k >= 1");
  }
  if (n < 16) {
    return Unimplemented(kOp, "n=", n,
                         "; SGLang keeps n < 16 unpacked, as f32 [k, n]");
  }
  const int64_t granule = SizeOf(dtype) == 1 && dtype != DType::kF8E4M3
                              ? kBlockCols
                              : kBlockCols / 2;
  if (n % granule != 0 || k % 32 != 0) {
    return InvalidArgument(kOp, DTypeName(dtype), " w[n=", n, ", k=", k,
                           "]; need n % ", granule, " == 0 and k % 32 == 0");
  }
  const SglangLayout layout(dtype, k, n);
  int64_t bytes = 0;  // at most 2 * k or k + 4 for each column
  if (!CheckedMul(k, 2, &bytes) || !CheckedMul(bytes, n, &bytes)) {
    return InvalidArgument(kOp, "w[n=", n, ", k=", k,
                           "]; need a packed size that fits in int64");
  }
  return layout;
}

int64_t SglangLayout::cols(int64_t block) const {
  QUERN_DCHECK(0 <= block && block < blocks());
  return std::min(kBlockCols, n_ - block * kBlockCols);
}

int64_t SglangLayout::plain_row_bytes() const {
  if (dtype_ == DType::kU8) return k_ / 2;
  return k_ * static_cast<int64_t>(SizeOf(dtype_));
}

int64_t SglangLayout::col_bytes() const {
  return plain_row_bytes() + (has_compensation() ? 4 : 0);
}

}  // namespace quern
