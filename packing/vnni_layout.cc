#include "quern/packing/vnni_layout.h"

#include <algorithm>
#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {

absl::StatusOr<VnniLayout> VnniLayout::Create(DType dtype, int64_t k,
                                              int64_t n) {
  constexpr char kOp[] = "vnni_layout";
  if (dtype != DType::kBF16 && dtype != DType::kF16 && dtype != DType::kF32 &&
      dtype != DType::kI8) {
    return Unimplemented(kOp, "dtype=", DTypeName(dtype),
                         "; need bf16, f16, f32 or i8");
  }
  if (k < 1 || n < 1) {
    return InvalidArgument(kOp, "b[k=", k, ", n=", n,
                           "]; need k >= 1 and n >= 1");
  }
  const VnniLayout layout(dtype, k, n);
  int64_t bytes = 0;
  if (!CheckedMul(layout.lines(), kLineBytes, &bytes) ||
      !CheckedMul(bytes, layout.panels(), &bytes)) {
    return InvalidArgument(kOp, "b[k=", k, ", n=", n,
                           "]; need a packed size that fits in int64");
  }
  return layout;
}

int64_t VnniLayout::cols(int64_t panel) const {
  QUERN_DCHECK(0 <= panel && panel < panels());
  return std::min(kPanelCols, n_ - panel * kPanelCols);
}

}  // namespace quern
