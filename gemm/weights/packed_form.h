#ifndef QUERN_GEMM_WEIGHTS_PACKED_FORM_H_
#define QUERN_GEMM_WEIGHTS_PACKED_FORM_H_

// Private: how the packed form of gemm/linear_weights.h lies in memory.
//
//   header     256 bytes
//   panels     codes: of all columns, or of the gate's, then of up's, each in
//              packing/vnni_layout.h (floats, int8 by channel) or
//              packing/code_layout.h (codes with groups) or
//              packing/block_panels.h (blocks, with their scales)
//   scales     f32[n] (int8 by channel), or f32[part][panel][group][16]
//   zeros      f32[part][panel][group][16], less 8, as the codes of 4 bits
//   order      i32[k]: row i of the codes meets a[m, order[i]]
//   sums       i32[n]: of the codes of each column (int8 by channel)
//   bias       f32[n]
//
// Each section begins at a multiple of kSectionAlignment from the header on and
// is there where the format or the flags say so; bytes between sections are 0.
// All numbers are little-endian. Bytes depend on nothing but the weights: not
// on the machine, its instruction set or the number of workers.

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/weights/code_type.h"

namespace quern {

struct PackedHeader {
  static constexpr char kMagic[9] = "QuernLin";
  static constexpr uint32_t kVersion = 2;
  static constexpr uint32_t kByteOrder = 0x01020304;
  // Bits of `flags`.
  static constexpr uint32_t kZeros = 1;
  static constexpr uint32_t kOrder = 2;
  static constexpr uint32_t kBias = 4;

  char magic[8];
  uint32_t version;
  uint32_t byte_order;
  uint32_t header_bytes;
  uint32_t format;  // a WeightFormat
  int64_t n;
  int64_t k;
  int64_t group_size;  // in [1, k], or 0 where the format has no groups
  uint32_t gated;      // 0 or 1
  uint32_t flags;
  int64_t total_bytes;    // header included
  uint32_t block_format;  // a BlockFormat, or 0 where the format has no blocks
  uint8_t reserved[180];  // 0
  uint64_t checksum;      // of all before it
};
static_assert(sizeof(PackedHeader) == 256, "part of the packed form");
static_assert(offsetof(PackedHeader, checksum) == 248, "has no padding");

// FNV-1a, 64 bits, of what lies before `checksum`.
uint64_t HeaderChecksum(const PackedHeader& header);

constexpr bool HasGroups(WeightFormat format) {
  return format >= WeightFormat::kE4M3Block && format <= WeightFormat::kI8Group;
}
// The codes of a format that has groups.
constexpr CodeType CodesOf(WeightFormat format) {
  return format == WeightFormat::kE4M3Block ? CodeType::kE4M3
         : format == WeightFormat::kI4Group ? CodeType::kI4
                                            : CodeType::kI8;
}

// The type of the weights of a format that has no groups and no blocks.
constexpr DType FloatOrI8(WeightFormat format) {
  return format == WeightFormat::kF32    ? DType::kF32
         : format == WeightFormat::kBF16 ? DType::kBF16
         : format == WeightFormat::kF16  ? DType::kF16
                                         : DType::kI8;
}

// Where everything lies. One function answers for those who write the form and
// for those who read it.
struct PackedForm {
  static constexpr int64_t kSectionAlignment = LinearWeights::kAlignment;

  // `spec` as LinearWeights::spec() has it. InvalidArgument if the form has
  // 2^63 bytes or more.
  static absl::StatusOr<PackedForm> Of(const LinearWeightsSpec& spec,
                                       uint32_t flags);

  int64_t parts;        // 2 where gated, else 1
  int64_t part_n;       // columns of each part
  int64_t groups;       // groups of k; 0 where the format has none
  int64_t panel_bytes;  // one panel
  int64_t part_bytes;   // the panels of one part
  int64_t part_scales;  // f32 in one part's scales; 0 without groups
  // Bytes from the header to each section; 0 where there is no such section.
  int64_t panels, scales, zeros, order, sums, bias;
  int64_t scales_bytes;  // size of the scales, and of the zeros
  int64_t column_bytes;  // size of the sums, and of the bias
  int64_t total_bytes;
};

// Proves n, k, format, group_size and block_format. Replaces group_size by what
// the packed form has: k for kWholeK or more than k, 0 where there are no
// groups. Replaces block_format by kQ4_0 where there are no blocks.
absl::Status NormaliseWeightsSpec(LinearWeightsSpec& spec);

}  // namespace quern

#endif  // QUERN_GEMM_WEIGHTS_PACKED_FORM_H_
