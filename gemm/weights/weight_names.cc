#include "absl/strings/string_view.h"
#include "quern/gemm/linear_weights.h"

namespace quern {

absl::string_view WeightFormatName(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return "f32";
    case WeightFormat::kBF16:
      return "bf16";
    case WeightFormat::kF16:
      return "f16";
    case WeightFormat::kI8Channel:
      return "i8_channel";
    case WeightFormat::kE4M3Block:
      return "e4m3_block";
    case WeightFormat::kI4Group:
      return "i4_group";
    case WeightFormat::kI8Group:
      return "i8_group";
    case WeightFormat::kBlocks:
      return "blocks";
  }
  return "unknown";
}

absl::string_view WeightLayoutName(WeightLayout layout) {
  switch (layout) {
    case WeightLayout::kNK:
      return "nk";
    case WeightLayout::kKN:
      return "kn";
    case WeightLayout::kAwq:
      return "awq";
    case WeightLayout::kGptq:
      return "gptq";
    case WeightLayout::kGptqV2:
      return "gptq_v2";
    case WeightLayout::kBlocks:
      return "blocks";
  }
  return "unknown";
}

}  // namespace quern
