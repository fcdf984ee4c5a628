#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/quant/block_format.h"
#include "quern/quant/block_format_testutil.h"
#include "quern/testing/data.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/linear/linear_inputs.h"

namespace quern {
namespace {

// Weights lie in about [-kReach, kReach], and minima do not exceed it.
constexpr double kReach = 1;

// A block format, by rows that are not rounded or are int8 in blocks.
class Blocks final : public LinearInput {
 public:
  Blocks(const LinearWeightsSpec& spec, const BlockFormatInfo& info,
         LinearActivations activations)
      : LinearInput(spec),
        info_(info),
        activations_(activations),
        arrow_(absl::StrCat("*", absl::AsciiStrToLower(info.name), "->")) {}

  absl::string_view arrow() const override { return arrow_; }
  int64_t bytes() const override { return n() * row_bytes(); }
  absl::StatusOr<LinearSource> Source() override {
    if (blocks_.empty()) {
      Rng rng(1);
      blocks_ =
          RandomBlocks(rng, info_.format, n() * k() / info_.values, kReach);
    }
    LinearSource source;
    source.layout = WeightLayout::kBlocks;
    source.codes = AnyTensorView(DType::kU8, blocks_.data(), 2,
                                 {n(), row_bytes()}, {row_bytes(), 1});
    return source;
  }
  LinearActivations activations() const override { return activations_; }

  bool has_small_codes() const override {
    return info_.format != BlockFormat::kQ8_0 &&
           info_.format != BlockFormat::kIQ4_NL &&
           info_.format != BlockFormat::kIQ4_XS;
  }
  void RoundRow(std::vector<double>& row) const override {
    if (multiplies_int8()) RoundToInt8Blocks(row);
  }
  // Columns may be asked for by several threads at once.
  Weight At(int64_t col, int64_t i) override {
    const uint8_t* block =
        blocks_.data() + col * row_bytes() + i / info_.values * info_.bytes;
    const double w =
        ReferenceValue(info_.format, block, i % info_.values).value;
    return {w, std::abs(w) + (multiplies_int8() ? 2.01 * kReach : 0)};
  }
  // int8: sums of sub-blocks of 16 k or more, with two additions each. Else the
  // bound of gemm/linear.h.
  double relative_error() const override {
    const auto roundings = static_cast<double>(
        multiplies_int8() ? 2 * k() / 16 + 4 : k() + k() / 256 + 4);
    return roundings * 0x1p-24;
  }

 private:
  int64_t row_bytes() const { return k() / info_.values * info_.bytes; }

  const BlockFormatInfo& info_;
  LinearActivations activations_;
  std::string arrow_;
  std::vector<uint8_t> blocks_;
};

}  // namespace

void RoundToInt8Blocks(std::vector<double>& row) {
  constexpr size_t kBlock = 32;
  for (size_t at = 0; at < row.size(); at += kBlock) {
    float most = 0;
    for (size_t i = at; i < at + kBlock; ++i) {
      most = std::max(most, static_cast<float>(std::abs(row[i])));
    }
    const float scale = most == 0 ? 1.0f : std::max(most / 127.0f, 0x1p-125f);
    const float inverse = 1.0f / scale;
    for (size_t i = at; i < at + kBlock; ++i) {
      row[i] = scale * std::nearbyint(row[i] * double{inverse});
    }
  }
}

LinearInputOr BlockInput(const Args& args, const MatrixShape& shape) {
  std::vector<std::string> names;
  for (const BlockFormatInfo& info : BlockFormats()) {
    names.push_back(absl::AsciiStrToLower(info.name));
  }
  const std::vector<absl::string_view> choices(names.begin(), names.end());
  QUERN_ASSIGN_OR_RETURN(const std::string name,
                         args.Choice("weights", choices));
  QUERN_ASSIGN_OR_RETURN(const std::string activations,
                         args.Choice("activations", {"exact", "int8"}));
  const auto at = std::find(names.begin(), names.end(), name) - names.begin();
  const BlockFormatInfo& info = BlockFormats()[static_cast<size_t>(at)];
  if (shape.k % info.values != 0) {
    return InvalidArgument(args.op(), "k=", shape.k, "; ", info.name,
                           " needs a multiple of ", info.values);
  }
  LinearWeightsSpec spec;
  spec.format = WeightFormat::kBlocks;
  spec.block_format = info.format;
  spec.n = shape.n;
  spec.k = shape.k;
  spec.gated = shape.gated;
  return std::make_unique<Blocks>(spec, info,
                                  activations == "int8"
                                      ? LinearActivations::kInt8Blocks
                                      : LinearActivations::kExact);
}

LinearInputOr FloatOrBlockInput(const Args& args, const MatrixShape& shape) {
  return args.Text("weights").empty() ? FloatInput(args, shape)
                                      : BlockInput(args, shape);
}

}  // namespace quern
