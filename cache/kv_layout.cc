#include "cache/kv_layout.h"

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/aligned_buffer.h"
#include "core/dtype.h"
#include "core/math_util.h"
#include "core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "kv_layout";

// Bytes of one block, or more than the limit if there are more.
int64_t BlockBytes(DType dtype, int64_t page_size, int64_t head_dim) {
  int64_t bytes = 0;
  if (!CheckedMul(page_size, head_dim, &bytes) ||
      !CheckedMul(bytes, static_cast<int64_t>(SizeOf(dtype)), &bytes) ||
      bytes > KvLayout::kMaxPageBytes) {
    return KvLayout::kMaxPageBytes + 1;
  }
  return RoundUp(bytes, static_cast<int64_t>(AlignedBuffer::kAlignment));
}

}  // namespace

absl::StatusOr<KvLayout> KvLayout::Create(const KvLayoutSpec& spec) {
  const int64_t v_head_dim =
      spec.v_head_dim == 0 ? spec.head_dim : spec.v_head_dim;
  constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "kv_heads", spec.kv_heads, 1, kMaxInt32));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "head_dim", spec.head_dim, 1, kMaxInt32));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "v_head_dim", v_head_dim, 1, kMaxInt32));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "page_size", spec.page_size, 1, kMaxInt32));
  if (spec.dtype != DType::kF32 && spec.dtype != DType::kBF16 &&
      spec.dtype != DType::kF16) {
    return Unimplemented(kOp, "dtype is ", DTypeName(spec.dtype),
                         "; need f32, bf16 or f16");
  }
  KvLayout layout;
  layout.dtype_ = spec.dtype;
  layout.kv_heads_ = spec.kv_heads;
  layout.head_dim_ = spec.head_dim;
  layout.v_head_dim_ = v_head_dim;
  layout.page_size_ = spec.page_size;
  layout.k_block_bytes_ = BlockBytes(spec.dtype, spec.page_size, spec.head_dim);
  layout.v_block_bytes_ = BlockBytes(spec.dtype, spec.page_size, v_head_dim);
  int64_t page_bytes = 0;
  if (!CheckedMul(spec.kv_heads, layout.k_block_bytes_ + layout.v_block_bytes_,
                  &page_bytes) ||
      page_bytes > kMaxPageBytes) {
    return InvalidArgument(
        kOp, "kv_heads=", spec.kv_heads, ", page_size=", spec.page_size,
        ", head_dim=", spec.head_dim, ", v_head_dim=", v_head_dim,
        "; need a page of at most ", kMaxPageBytes, " bytes");
  }
  return layout;
}

}  // namespace quern
