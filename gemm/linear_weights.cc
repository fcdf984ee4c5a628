#include "quern/gemm/linear_weights.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/weights/linear_sources.h"
#include "quern/gemm/weights/packed_form.h"
#include "quern/quant/block_format.h"

namespace quern {
namespace {

constexpr char kOp[] = "linear_weights";

// Returns the flags of all sections that a packed form of this format may have.
uint32_t FlagsOf(WeightFormat format) {
  return PackedHeader::kBias |
         (format == WeightFormat::kI4Group
              ? PackedHeader::kZeros | PackedHeader::kOrder
              : 0);
}

PackedHeader HeaderOf(const LinearWeightsSpec& spec, uint32_t flags,
                      int64_t total_bytes) {
  PackedHeader header = {};
  std::memcpy(header.magic, PackedHeader::kMagic, sizeof(header.magic));
  header.version = PackedHeader::kVersion;
  header.byte_order = PackedHeader::kByteOrder;
  header.header_bytes = sizeof(PackedHeader);
  header.format = static_cast<uint32_t>(spec.format);
  header.n = spec.n;
  header.k = spec.k;
  header.group_size = spec.group_size;
  header.gated = spec.gated ? 1 : 0;
  if (spec.format == WeightFormat::kBlocks) {
    header.block_format = static_cast<uint32_t>(spec.block_format);
  }
  header.flags = flags;
  header.total_bytes = total_bytes;
  header.checksum = HeaderChecksum(header);
  return header;
}

// Returns the spec that a header describes. Refuses a header that HeaderOf does
// not write, and one for another number of bytes.
absl::StatusOr<LinearWeightsSpec> CheckHeader(const PackedHeader& header,
                                              int64_t bytes) {
  if (std::memcmp(header.magic, PackedHeader::kMagic, sizeof(header.magic)) !=
      0) {
    return InvalidArgument(kOp, "bytes do not begin with ",
                           PackedHeader::kMagic, ": no packed weights");
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "version", header.version,
                                   PackedHeader::kVersion, "this library"));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "byte_order", header.byte_order,
                                   PackedHeader::kByteOrder, "this machine"));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "header_bytes", header.header_bytes,
                                   sizeof(PackedHeader), "this version"));
  if (header.checksum != HeaderChecksum(header)) {
    return InvalidArgument(kOp, "the header is damaged: its checksum is ",
                           HeaderChecksum(header), "; it tells ",
                           header.checksum);
  }
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "format", header.format, 0,
                 static_cast<int64_t>(WeightFormat::kBlocks)));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "gated", header.gated, 0, 1));
  LinearWeightsSpec spec;
  spec.format = static_cast<WeightFormat>(header.format);
  spec.n = header.n;
  spec.k = header.k;
  spec.group_size = header.group_size;
  spec.gated = header.gated != 0;
  spec.block_format = static_cast<BlockFormat>(header.block_format);
  QUERN_RETURN_IF_ERROR(NormaliseWeightsSpec(spec));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "group_size", header.group_size,
                                   spec.group_size, "the packed form has"));
  const uint32_t of_format = FlagsOf(spec.format);
  if ((header.flags & ~of_format) != 0) {
    return InvalidArgument(kOp, "flags=", header.flags, "; ",
                           WeightFormatName(spec.format), " has none but ",
                           of_format);
  }
  const PackedHeader again = HeaderOf(spec, header.flags, header.total_bytes);
  if (std::memcmp(&again, &header, sizeof(header)) != 0) {
    return InvalidArgument(kOp, "reserved bytes of the header are not 0");
  }
  QUERN_ASSIGN_OR_RETURN(const PackedForm form,
                         PackedForm::Of(spec, header.flags));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, "total_bytes", header.total_bytes,
                                   form.total_bytes, "the header's shape has"));
  QUERN_RETURN_IF_ERROR(
      CheckEqual(kOp, "bytes", bytes, form.total_bytes, "the header tells"));
  return spec;
}

// Checks that `order` has every number in [0, k) once.
absl::Status CheckOrder(const int32_t* order, int64_t k) {
  std::vector<bool> seen(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i) {
    const int64_t at = order[i];
    if (at < 0 || at >= k || seen[static_cast<size_t>(at)]) {
      return InvalidArgument(kOp, "order[", i, "]=", at,
                             "; need every k in [0, ", k, ") once");
    }
    seen[static_cast<size_t>(at)] = true;
  }
  return absl::OkStatus();
}

// Writes zeros between the end of each section and the beginning of the next.
void ClearGaps(const PackedForm& form, int64_t k, uint8_t* to) {
  constexpr int64_t kHeaderBytes = sizeof(PackedHeader);
  const std::pair<int64_t, int64_t> sections[] = {
      {0, kHeaderBytes},
      {form.panels, form.panels + form.parts * form.part_bytes},
      {form.scales, form.scales + form.scales_bytes},
      {form.zeros, form.zeros + form.scales_bytes},
      {form.order, form.order + k * 4},
      {form.sums, form.sums + form.column_bytes},
      {form.bias, form.bias + form.column_bytes},
  };
  for (const auto& [begin, end] : sections) {
    if (begin == 0 && end != kHeaderBytes) continue;  // there is none
    const int64_t gap_end =
        std::min(RoundUp(end, PackedForm::kSectionAlignment), form.total_bytes);
    std::memset(to + end, 0, static_cast<size_t>(gap_end - end));
  }
}

}  // namespace

absl::StatusOr<int64_t> LinearWeights::MaxPackedBytes(
    const LinearWeightsSpec& spec) {
  LinearWeightsSpec packed = spec;
  QUERN_RETURN_IF_ERROR(NormaliseWeightsSpec(packed));
  QUERN_ASSIGN_OR_RETURN(const PackedForm form,
                         PackedForm::Of(packed, FlagsOf(packed.format)));
  return form.total_bytes;
}

absl::StatusOr<LinearWeights> LinearWeights::Pack(
    const LinearWeightsSpec& spec, absl::Span<const LinearSource> sources,
    Executor& executor) {
  LinearWeightsSpec packed = spec;
  QUERN_RETURN_IF_ERROR(NormaliseWeightsSpec(packed));
  QUERN_RETURN_IF_ERROR(CheckSources(packed, sources, executor));
  QUERN_ASSIGN_OR_RETURN(const std::vector<int32_t> order,
                         OrderOf(packed, sources));
  uint32_t flags = order.empty() ? 0 : PackedHeader::kOrder;
  for (const LinearSource& source : sources) {
    if (source.zeros.rank() != 0) flags |= PackedHeader::kZeros;
    if (source.bias.rank() != 0) flags |= PackedHeader::kBias;
  }
  QUERN_ASSIGN_OR_RETURN(const PackedForm form, PackedForm::Of(packed, flags));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer buffer,
                         AlignedBuffer::Create(form.total_bytes));
  QUERN_RETURN_IF_ERROR(
      PackSources(packed, form, sources, order, buffer.data(), executor));
  std::copy(order.begin(), order.end(),
            reinterpret_cast<int32_t*>(buffer.data() + form.order));
  ClearGaps(form, packed.k, buffer.data());
  const PackedHeader header = HeaderOf(packed, flags, form.total_bytes);
  std::memcpy(buffer.data(), &header, sizeof(header));
  const absl::Span<const uint8_t> bytes(buffer.data(),
                                        static_cast<size_t>(form.total_bytes));
  return LinearWeights(
      packed, flags, bytes,
      std::make_shared<const AlignedBuffer>(std::move(buffer)));
}

absl::StatusOr<LinearWeights> LinearWeights::Adopt(
    absl::Span<const uint8_t> bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  QUERN_RETURN_IF_ERROR(CheckAtLeast(
      kOp, "bytes", size, static_cast<int64_t>(sizeof(PackedHeader))));
  const auto address = reinterpret_cast<uintptr_t>(bytes.data());
  if (address % kAlignment != 0) {
    return InvalidArgument(kOp, "bytes begin ", address % kAlignment,
                           " beyond a multiple of ", kAlignment,
                           "; need such a multiple");
  }
  PackedHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  QUERN_ASSIGN_OR_RETURN(const LinearWeightsSpec spec,
                         CheckHeader(header, size));
  LinearWeights weights(spec, header.flags, bytes, nullptr);
  if (weights.order_ != nullptr) {
    QUERN_RETURN_IF_ERROR(CheckOrder(weights.order_, spec.k));
  }
  return weights;
}

LinearWeights::LinearWeights(const LinearWeightsSpec& spec, uint32_t flags,
                             absl::Span<const uint8_t> bytes,
                             std::shared_ptr<const AlignedBuffer> owned)
    : spec_(spec), owned_(std::move(owned)), bytes_(bytes) {
  const auto form = PackedForm::Of(spec, flags);
  QUERN_CHECK(form.ok());  // the caller has laid it out already
  const auto floats = [&](int64_t section) {
    return section == 0
               ? nullptr
               : reinterpret_cast<const float*>(bytes.data() + section);
  };
  const auto ints = [&](int64_t section) {
    return section == 0
               ? nullptr
               : reinterpret_cast<const int32_t*>(bytes.data() + section);
  };
  panels_ = bytes.data() + form->panels;
  scales_ = floats(form->scales);
  zeros_ = floats(form->zeros);
  order_ = ints(form->order);
  column_sums_ = ints(form->sums);
  bias_ = floats(form->bias);
}

}  // namespace quern
