#include "quern/gemm/weights/packed_form.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/algorithms/checksum.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/packing/block_panels.h"
#include "quern/packing/code_layout.h"
#include "quern/packing/vnni_layout.h"
#include "quern/quant/block_format.h"

namespace quern {
namespace {

constexpr char kOp[] = "linear_weights";

// Lays sections one after the other.
class Sections {
 public:
  // Where a section of `count` times `size` bytes begins.
  int64_t Add(int64_t count, int64_t size) {
    int64_t bytes = 0;
    fits_ = fits_ &&
            CheckedAdd(end_, PackedForm::kSectionAlignment - 1, &end_) &&
            CheckedMul(count, size, &bytes);
    end_ = end_ / PackedForm::kSectionAlignment * PackedForm::kSectionAlignment;
    const int64_t begin = end_;
    fits_ = fits_ && CheckedAdd(end_, bytes, &end_);
    return begin;
  }
  bool fits() const { return fits_; }
  int64_t end() const { return end_; }

 private:
  int64_t end_ = static_cast<int64_t>(sizeof(PackedHeader));
  bool fits_ = true;
};

// Bytes of one panel and of all of a part, or false where they do not fit.
bool PanelsOf(const LinearWeightsSpec& spec, PackedForm& form) {
  const int64_t k = spec.k, n = form.part_n;
  if (spec.format == WeightFormat::kBlocks) {
    const auto layout =
        BlockPanels::Create(BlockTraitsOf(spec.block_format).codes, k, n);
    if (!layout.ok()) return false;
    form.panel_bytes = layout->panel_bytes();
    form.part_bytes = layout->bytes();
    return true;
  }
  if (HasGroups(spec.format)) {
    const auto layout = CodeLayout::Create(BitsOf(CodesOf(spec.format)), k, n);
    if (!layout.ok()) return false;
    form.panel_bytes = layout->panel_bytes();
    form.part_bytes = layout->bytes();
    return true;
  }
  const auto layout = VnniLayout::Create(FloatOrI8(spec.format), k, n);
  if (!layout.ok()) return false;
  form.panel_bytes = layout->panel_bytes();
  form.part_bytes = layout->bytes();
  return true;
}

absl::Status CheckBlocks(const LinearWeightsSpec& spec) {
  const auto number = static_cast<uint32_t>(spec.block_format);
  const BlockFormatInfo* info = FindBlockFormat(number);
  if (info == nullptr) {
    return InvalidArgument(kOp, "block_format=", number,
                           "; need one of quant/block_format.h");
  }
  if (spec.k % info->values != 0) {
    return InvalidArgument(kOp, "k=", spec.k, "; blocks of ", info->name,
                           " need a multiple of ", info->values);
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t HeaderChecksum(const PackedHeader& header) {
  return Fnv1a(&header, offsetof(PackedHeader, checksum));
}

absl::StatusOr<PackedForm> PackedForm::Of(const LinearWeightsSpec& spec,
                                          uint32_t flags) {
  PackedForm form = {};
  form.parts = spec.gated ? 2 : 1;
  form.part_n = spec.n / form.parts;
  if (HasGroups(spec.format)) form.groups = DivCeil(spec.k, spec.group_size);
  Sections sections;
  bool fits = PanelsOf(spec, form);
  if (fits) form.panels = sections.Add(form.parts, form.part_bytes);
  const int64_t columns = spec.n * static_cast<int64_t>(sizeof(float));
  form.column_bytes = columns;
  if (HasGroups(spec.format)) {
    const int64_t panel_scales = form.groups * VnniLayout::kPanelCols;
    fits = fits && CheckedMul(DivCeil(form.part_n, VnniLayout::kPanelCols),
                              panel_scales, &form.part_scales);
    fits = fits && CheckedMul(form.parts * static_cast<int64_t>(sizeof(float)),
                              form.part_scales, &form.scales_bytes);
    form.scales = sections.Add(1, form.scales_bytes);
  } else if (spec.format == WeightFormat::kI8Channel) {
    form.scales_bytes = columns;
    form.scales = sections.Add(1, columns);
    form.sums = sections.Add(1, columns);
  }
  if ((flags & PackedHeader::kZeros) != 0) {
    form.zeros = sections.Add(1, form.scales_bytes);
  }
  if ((flags & PackedHeader::kOrder) != 0) {
    form.order = sections.Add(spec.k, sizeof(int32_t));
  }
  if ((flags & PackedHeader::kBias) != 0) form.bias = sections.Add(1, columns);
  if (!fits || !sections.fits()) {
    return InvalidArgument(kOp, "n=", spec.n, ", k=", spec.k,
                           "; the packed form has 2^63 bytes or more");
  }
  form.total_bytes = sections.end();
  return form;
}

absl::Status NormaliseWeightsSpec(LinearWeightsSpec& spec) {
  constexpr int64_t kMax = LinearWeights::kMaxExtent;
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "format", static_cast<int64_t>(spec.format), 0,
                 static_cast<int64_t>(WeightFormat::kBlocks)));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "n", spec.n, 1, kMax));
  QUERN_RETURN_IF_ERROR(CheckRange(
      kOp, "k", spec.k, 1,
      spec.format == WeightFormat::kI8Channel ? LinearWeights::kMaxKI8 : kMax));
  if (spec.gated && spec.n % 2 != 0) {
    return InvalidArgument(kOp, "n=", spec.n,
                           " is odd; gated weights need gate and up of n / 2 "
                           "columns each");
  }
  if (spec.format != WeightFormat::kBlocks) {
    spec.block_format = BlockFormat::kQ4_0;
  } else {
    QUERN_RETURN_IF_ERROR(CheckBlocks(spec));
  }
  if (!HasGroups(spec.format)) {
    spec.group_size = 0;
    return absl::OkStatus();
  }
  if (spec.group_size == LinearWeightsSpec::kWholeK) spec.group_size = spec.k;
  if (spec.group_size < 1 ||
      (spec.group_size < spec.k && spec.group_size % 16 != 0)) {
    return InvalidArgument(kOp, "group_size=", spec.group_size,
                           "; need a multiple of 16, k=", spec.k,
                           " or more, or -1");
  }
  spec.group_size = std::min(spec.group_size, spec.k);
  return absl::OkStatus();
}

}  // namespace quern
