#include "quern/c/model/model.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/c/library.h"
#include "quern/c/model/gguf_source.h"
#include "quern/c/object.h"
#include "quern/c/objects/by_name.h"
#include "quern/c/objects/executor.h"
#include "quern/c/quern_model.h"
#include "quern/core/status_macros.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"

namespace quern {
namespace c_abi {
namespace {

constexpr char kCreate[] = "quern_model_create";
constexpr char kGetInfo[] = "quern_model_get_info";

// The name that "file" had in 0.2.
constexpr absl::string_view kOldFileName = "as_in_file";

absl::StatusOr<DecoderOptions> DecoderOptionsOf(
    const quern_model_options& options, const Library& library) {
  constexpr DecoderWeights kWeights[] = {
      DecoderWeights::kAsInFile, DecoderWeights::kBF16, DecoderWeights::kF32,
      DecoderWeights::kInt8};
  constexpr DecoderActivations kActivations[] = {DecoderActivations::kExact,
                                                 DecoderActivations::kInt8};
  DecoderOptions out;
  if (options.weights != nullptr && options.weights != kOldFileName) {
    QUERN_ASSIGN_OR_RETURN(out.weights,
                           ByName(kCreate, "weights", options.weights, kWeights,
                                  &DecoderWeightsName));
  }
  if (options.activations != nullptr) {
    QUERN_ASSIGN_OR_RETURN(out.activations,
                           ByName(kCreate, "activations", options.activations,
                                  kActivations, &DecoderActivationsName));
  }
  if (options.max_context != 0) out.max_context = options.max_context;
  out.max_bytes = options.max_bytes;
  if (options.packed_path != nullptr) out.packed_path = options.packed_path;
  if (options.progress != nullptr) {
    out.progress =
        [tell = options.progress, context = options.progress_context](
            int64_t done, int64_t total) { tell(context, done, total); };
  }
  if (options.cancelled != nullptr) {
    out.cancelled = [ask = options.cancelled,
                     context = options.cancelled_context] {
      return ask(context) != 0;
    };
  }
  out.operators = &library.ops();
  return out;
}

absl::StatusOr<std::unique_ptr<Object>> MakeModel(
    const Library& library, const quern_model_options* options,
    quern_executor* handle) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(kCreate, "options", options));
  QUERN_RETURN_IF_ERROR(CheckSize("quern_model_options", options->size,
                                  sizeof(quern_model_options)));
  QUERN_ASSIGN_OR_RETURN(const DecoderOptions of_model,
                         DecoderOptionsOf(*options, library));
  QUERN_ASSIGN_OR_RETURN(
      const GgufFile file,
      OpenGguf(kCreate, options->path, options->bytes, options->num_bytes));
  CallExecutor executor;
  QUERN_RETURN_IF_ERROR(executor.Take(handle, BrokenForks::kFinish));
  QUERN_ASSIGN_OR_RETURN(Decoder model,
                         Decoder::Create(file, of_model, executor.get()));
  QUERN_RETURN_IF_ERROR(executor.Verdict());
  return std::make_unique<ModelObject>(std::move(model));
}

absl::Status Fill(const Decoder& model, quern_model_info* info) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(kGetInfo, "info", info));
  QUERN_RETURN_IF_ERROR(
      CheckSize("quern_model_info", info->size, sizeof(quern_model_info)));
  const DecoderConfig& config = model.config();
  info->context = model.context();
  info->vocab = config.vocab;
  info->hidden = config.hidden;
  info->layers = config.layers;
  info->weight_bytes = model.weight_bytes();
  info->step_tokens = model.step_tokens();
  return absl::OkStatus();
}

}  // namespace

std::string ModelObject::Explain() const {
  const DecoderConfig& config = model_.config();
  return absl::StrCat("model of ", config.layers, " layers, hidden ",
                      config.hidden, ", vocabulary ", config.vocab,
                      ", context ", model_.context(), ", weights in ",
                      model_.weights(), ", ", model_.weight_bytes(), " bytes; ",
                      model_.Explain());
}

}  // namespace c_abi
}  // namespace quern

using quern::c_abi::CallOn;
using quern::c_abi::Kind;
using quern::c_abi::Library;
using quern::c_abi::MakeObject;
using quern::c_abi::Mode;
using quern::c_abi::ModelObject;

extern "C" {

quern_status quern_model_create(quern_library* library,
                                const quern_model_options* options,
                                quern_executor* executor, quern_model** model) {
  return MakeObject(library, "quern_model_create", Kind::kModel, model,
                    [&](const Library& owner) {
                      return quern::c_abi::MakeModel(owner, options, executor);
                    });
}

quern_status quern_model_get_info(quern_model* model, quern_model_info* info) {
  return CallOn<ModelObject>(model, Kind::kModel, Mode::kUse,
                             [&](const ModelObject& object) {
                               return quern::c_abi::Fill(object.model(), info);
                             });
}

}  // extern "C"
