#include "quern/attention/attention_spec.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

bool IsQueryType(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

}  // namespace

absl::Status CheckAttentionSpec(const char* op, const AttentionSpec& spec) {
  if (spec.kv == KvLayout()) return InvalidArgument(op, "kv layout is empty");
  const int64_t kv_heads = spec.kv.kv_heads();
  QUERN_RETURN_IF_ERROR(CheckRange(op, "q_heads", spec.q_heads, 1,
                                   std::numeric_limits<int32_t>::max()));
  if (spec.q_heads % kv_heads != 0) {
    return InvalidArgument(op, "q_heads=", spec.q_heads,
                           "; need a multiple of kv_heads=", kv_heads);
  }
  if (!IsQueryType(spec.q_dtype)) {
    return Unimplemented(op, "q_dtype is ", DTypeName(spec.q_dtype),
                         "; need f32, bf16 or f16");
  }
  if (!IsQueryType(spec.out_dtype)) {
    return Unimplemented(op, "out_dtype is ", DTypeName(spec.out_dtype),
                         "; need f32, bf16 or f16");
  }
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(op, "window_left", spec.window_left, kNoWindow));
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(op, "window_right", spec.window_right, kNoWindow));
  // Scale and soft cap are multiplied by log2(e), which must not overflow.
  constexpr float kMost = 1e38f;
  if (!(std::abs(spec.scale) <= kMost)) {
    return InvalidArgument(op, "scale=", spec.scale,
                           "; need a finite number of at most 1e38");
  }
  if (!(spec.soft_cap >= 0 && spec.soft_cap <= kMost)) {
    return InvalidArgument(op, "soft_cap=", spec.soft_cap,
                           "; need 0 or a number above it of at most 1e38");
  }
  return absl::OkStatus();
}

}  // namespace quern
