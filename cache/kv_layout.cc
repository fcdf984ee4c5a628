#include "quern/cache/kv_layout.h"

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "kv_layout";

// The form of pages of 16, 32, ... tokens for which none is asked: what
// attention reads without a copy.
constexpr KvForm kFormOfWholeGroups = KvForm::kPaired;

bool IsElementType(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 ||
         dtype == DType::kF16 || dtype == DType::kI8 ||
         dtype == DType::kF8E4M3 || dtype == DType::kF8E5M2;
}

// Bytes of one block of page_size rows, or more than the limit if there are
// more.
int64_t BlockBytes(DType dtype, int64_t page_size, int64_t row) {
  int64_t bytes = 0;
  if (!CheckedMul(page_size, row, &bytes) ||
      !CheckedMul(bytes, static_cast<int64_t>(SizeOf(dtype)), &bytes) ||
      bytes > KvLayout::kMaxPageBytes) {
    return KvLayout::kMaxPageBytes + 1;
  }
  return RoundUp(bytes, static_cast<int64_t>(AlignedBuffer::kAlignment));
}

absl::Status CheckScaling(DType dtype, KvForm form, KvScaling scaling) {
  if (scaling == KvScaling::kPerBlock &&
      (dtype != DType::kF8E4M3 || form != KvForm::kLatent)) {
    return InvalidArgument(kOp, "scaling is per_block for ", DTypeName(dtype),
                           " in the ", KvFormName(form),
                           " form; need f8e4m3 in the latent form");
  }
  if (SizeOf(dtype) > 1 && scaling != KvScaling::kNone) {
    return InvalidArgument(kOp, "scaling is ", KvScalingName(scaling), " for ",
                           DTypeName(dtype), "; need none");
  }
  if (dtype == DType::kI8 && scaling == KvScaling::kNone) {
    return InvalidArgument(kOp,
                           "scaling is none for i8; need per_tensor, per_head "
                           "or per_token_head");
  }
  return absl::OkStatus();
}

absl::Status CheckForm(const KvLayoutSpec& spec, KvForm form,
                       int64_t v_head_dim) {
  if (form == KvForm::kPlain) return absl::OkStatus();
  if (spec.page_size % KvLayout::kGroupTokens != 0) {
    return InvalidArgument(kOp, "page_size=", spec.page_size,
                           "; need a multiple of ", KvLayout::kGroupTokens,
                           " for the ", KvFormName(form), " form");
  }
  if (form == KvForm::kPaired) return absl::OkStatus();
  if (v_head_dim % 4 != 0 || v_head_dim >= spec.head_dim) {
    return InvalidArgument(kOp, "v_head_dim=", v_head_dim,
                           "; need a multiple of 4 below head_dim=",
                           spec.head_dim, " for the latent form");
  }
  if (SizeOf(spec.dtype) == 1 && spec.scaling != KvScaling::kPerBlock) {
    return Unimplemented(kOp, "dtype is ", DTypeName(spec.dtype),
                         " and scaling ", KvScalingName(spec.scaling),
                         "; need f32, bf16 or f16, or f8e4m3 with per_block, "
                         "for the latent form");
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view KvFormName(KvForm form) {
  switch (form) {
    case KvForm::kPlain:
      return "plain";
    case KvForm::kPaired:
      return "paired";
    case KvForm::kLatent:
      return "latent";
  }
  return "?";
}

absl::string_view KvScalingName(KvScaling scaling) {
  switch (scaling) {
    case KvScaling::kNone:
      return "none";
    case KvScaling::kPerTensor:
      return "per_tensor";
    case KvScaling::kPerHead:
      return "per_head";
    case KvScaling::kPerTokenHead:
      return "per_token_head";
    case KvScaling::kPerBlock:
      return "per_block";
  }
  return "?";
}

KvForm KvLayout::AutomaticForm(int64_t page_size) {
  return page_size % kGroupTokens == 0 ? kFormOfWholeGroups : KvForm::kPlain;
}

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
  if (!IsElementType(spec.dtype)) {
    return Unimplemented(kOp, "dtype is ", DTypeName(spec.dtype),
                         "; need f32, bf16, f16, i8, f8e4m3 or f8e5m2");
  }
  KvLayout layout;
  layout.dtype_ = spec.dtype;
  layout.form_ = spec.form.value_or(AutomaticForm(spec.page_size));
  layout.scaling_ = spec.scaling;
  QUERN_RETURN_IF_ERROR(CheckScaling(spec.dtype, layout.form_, spec.scaling));
  QUERN_RETURN_IF_ERROR(CheckForm(spec, layout.form_, v_head_dim));
  if (layout.in_groups()) layout.pair_ = SizeOf(spec.dtype) <= 2 ? 2 : 1;
  layout.kv_heads_ = spec.kv_heads;
  layout.head_dim_ = spec.head_dim;
  layout.v_head_dim_ = v_head_dim;
  layout.page_size_ = spec.page_size;
  layout.k_block_bytes_ =
      BlockBytes(spec.dtype, spec.page_size,
                 spec.scaling == KvScaling::kPerBlock ? layout.token_bytes()
                                                      : layout.k_row());
  if (layout.form_ != KvForm::kLatent) {
    layout.v_block_bytes_ = BlockBytes(spec.dtype, spec.page_size, v_head_dim);
  }
  if (spec.scaling == KvScaling::kPerTokenHead) {
    layout.scale_block_bytes_ = BlockBytes(DType::kF32, spec.page_size, 1);
  }
  int64_t page_bytes = 0;
  if (!CheckedMul(spec.kv_heads, layout.head_bytes(), &page_bytes) ||
      page_bytes > kMaxPageBytes) {
    return InvalidArgument(
        kOp, "kv_heads=", spec.kv_heads, ", page_size=", spec.page_size,
        ", head_dim=", spec.head_dim, ", v_head_dim=", v_head_dim,
        "; need a page of at most ", kMaxPageBytes, " bytes");
  }
  return layout;
}

}  // namespace quern
