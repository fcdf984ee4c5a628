#include "quern/c/objects/weights.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/c/library.h"
#include "quern/c/objects/by_name.h"
#include "quern/c/objects/executor.h"
#include "quern/c/quern.h"
#include "quern/c/tensor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/quant/block_format.h"

namespace quern {
namespace c_abi {

std::string WeightsObject::Explain() const {
  const LinearWeightsSpec& spec = weights_.spec();
  return absl::StrCat(WeightFormatName(spec.format), " weights, n=", spec.n,
                      ", k=", spec.k, weights_.has_bias() ? ", bias" : "", ", ",
                      weights_.bytes().size(), " bytes");
}

namespace {

constexpr char kPack[] = "quern_linear_weights_pack";
constexpr size_t kMaxSources = 1024;

using Made = absl::StatusOr<std::unique_ptr<Object>>;

absl::StatusOr<WeightFormat> FormatOf(const char* text,
                                      const LinearSource& first) {
  if (text == nullptr) return FormatOfFloats(first.codes.dtype());
  constexpr WeightFormat kAll[] = {
      WeightFormat::kF32,       WeightFormat::kBF16,
      WeightFormat::kF16,       WeightFormat::kI8Channel,
      WeightFormat::kE4M3Block, WeightFormat::kI4Group,
      WeightFormat::kI8Group,   WeightFormat::kBlocks};
  return ByName(kPack, "format", text, kAll, &WeightFormatName);
}

absl::StatusOr<WeightLayout> LayoutOf(const char* text) {
  if (text == nullptr) return WeightLayout::kNK;
  constexpr WeightLayout kAll[] = {
      WeightLayout::kNK,   WeightLayout::kKN,     WeightLayout::kAwq,
      WeightLayout::kGptq, WeightLayout::kGptqV2, WeightLayout::kBlocks};
  return ByName(kPack, "layout", text, kAll, &WeightLayoutName);
}

absl::StatusOr<BlockFormat> BlockFormatOf(const char* text) {
  if (text == nullptr) return LinearWeightsSpec().block_format;
  std::string names;
  for (const BlockFormatInfo& info : BlockFormats()) {
    if (info.name == text) return info.format;
    absl::StrAppend(&names, names.empty() ? "" : ", ", info.name);
  }
  return InvalidArgument(kPack, "block_format=\"", text, "\"; need one of ",
                         names);
}

absl::StatusOr<LinearSource> SourceOf(const quern_linear_source& source) {
  LinearSource out;
  QUERN_ASSIGN_OR_RETURN(out.layout, LayoutOf(source.layout));
  QUERN_RETURN_IF_ERROR(CheckNotNull(kPack, "codes", source.codes));
  const struct {
    const char* name;
    const quern_tensor* tensor;
    AnyTensorView& view;
  } tensors[] = {{"codes", source.codes, out.codes},
                 {"scales", source.scales, out.scales},
                 {"zeros", source.zeros, out.zeros},
                 {"g_idx", source.g_idx, out.g_idx},
                 {"bias", source.bias, out.bias}};
  for (const auto& [name, tensor, view] : tensors) {
    if (tensor == nullptr) continue;
    QUERN_RETURN_IF_ERROR(SetView(kPack, name, *tensor, QUERN_READ_ONLY, view));
  }
  if (source.block_n != 0) out.block_n = source.block_n;
  return out;
}

absl::StatusOr<LinearWeightsSpec> SpecOf(
    const quern_linear_weights_options& options, const LinearSource& first) {
  LinearWeightsSpec spec;
  spec.n = options.n;
  spec.k = options.k;
  QUERN_ASSIGN_OR_RETURN(spec.format, FormatOf(options.format, first));
  if (options.group_size != 0) spec.group_size = options.group_size;
  QUERN_ASSIGN_OR_RETURN(spec.block_format,
                         BlockFormatOf(options.block_format));
  QUERN_RETURN_IF_ERROR(CheckRange(kPack, "gated", options.gated, 0, 1));
  QUERN_RETURN_IF_ERROR(CheckRange(kPack, "reserved", options.reserved, 0, 0));
  spec.gated = options.gated == 1;
  return spec;
}

Made Pack(const quern_linear_weights_options* options,
          const quern_linear_source* sources, size_t num_sources,
          size_t source_size, quern_executor* handle) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(kPack, "options", options));
  QUERN_RETURN_IF_ERROR(CheckSize("quern_linear_weights_options", options->size,
                                  sizeof(quern_linear_weights_options)));
  QUERN_RETURN_IF_ERROR(CheckNotNull(kPack, "sources", sources));
  QUERN_RETURN_IF_ERROR(CheckSize("quern_linear_source", source_size,
                                  sizeof(quern_linear_source)));
  QUERN_RETURN_IF_ERROR(CheckRange(
      kPack, "num_sources", static_cast<int64_t>(num_sources), 1, kMaxSources));
  std::vector<LinearSource> from;
  for (size_t i = 0; i < num_sources; ++i) {
    QUERN_ASSIGN_OR_RETURN(LinearSource source, SourceOf(sources[i]));
    from.push_back(source);
  }
  QUERN_ASSIGN_OR_RETURN(const LinearWeightsSpec spec,
                         SpecOf(*options, from[0]));
  CallExecutor executor;
  QUERN_RETURN_IF_ERROR(executor.Take(handle));
  QUERN_ASSIGN_OR_RETURN(const LinearWeights weights,
                         LinearWeights::Pack(spec, from, executor.get()));
  QUERN_RETURN_IF_ERROR(executor.Verdict());
  return std::make_unique<WeightsObject>(weights);
}

Made Adopt(const void* bytes, size_t num_bytes) {
  QUERN_RETURN_IF_ERROR(
      CheckNotNull("quern_linear_weights_adopt", "bytes", bytes));
  QUERN_ASSIGN_OR_RETURN(const LinearWeights weights,
                         LinearWeights::Adopt(absl::MakeConstSpan(
                             static_cast<const uint8_t*>(bytes), num_bytes)));
  return std::make_unique<WeightsObject>(weights);
}

absl::Status Bytes(const LinearWeights& weights, const void** bytes,
                   size_t* num_bytes) {
  constexpr char kFunction[] = "quern_linear_weights_bytes";
  QUERN_RETURN_IF_ERROR(CheckNotNull(kFunction, "bytes", bytes));
  QUERN_RETURN_IF_ERROR(CheckNotNull(kFunction, "num_bytes", num_bytes));
  *bytes = weights.bytes().data();
  *num_bytes = weights.bytes().size();
  return absl::OkStatus();
}

}  // namespace
}  // namespace c_abi
}  // namespace quern

using quern::c_abi::CallOn;
using quern::c_abi::Kind;
using quern::c_abi::Library;
using quern::c_abi::MakeObject;
using quern::c_abi::Mode;
using quern::c_abi::WeightsObject;

extern "C" {

quern_status quern_linear_weights_pack(
    quern_library* library, const quern_linear_weights_options* options,
    const quern_linear_source* sources, size_t num_sources, size_t source_size,
    quern_executor* executor, quern_linear_weights** weights) {
  return MakeObject(library, "quern_linear_weights_pack", Kind::kLinearWeights,
                    weights, [&](const Library&) {
                      return quern::c_abi::Pack(options, sources, num_sources,
                                                source_size, executor);
                    });
}

quern_status quern_linear_weights_adopt(quern_library* library,
                                        const void* bytes, size_t num_bytes,
                                        quern_linear_weights** weights) {
  return MakeObject(
      library, "quern_linear_weights_adopt", Kind::kLinearWeights, weights,
      [&](const Library&) { return quern::c_abi::Adopt(bytes, num_bytes); });
}

quern_status quern_linear_weights_bytes(quern_linear_weights* weights,
                                        const void** bytes, size_t* num_bytes) {
  return CallOn<WeightsObject>(
      weights, Kind::kLinearWeights, Mode::kUse, [&](WeightsObject& object) {
        return quern::c_abi::Bytes(object.weights(), bytes, num_bytes);
      });
}

}  // extern "C"
