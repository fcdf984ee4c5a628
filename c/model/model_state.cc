#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/c/library.h"
#include "quern/c/model/model.h"
#include "quern/c/object.h"
#include "quern/c/objects/by_name.h"
#include "quern/c/objects/executor.h"
#include "quern/c/quern_model.h"
#include "quern/c/tensor.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/models/decoder/decoder.h"

namespace quern {
namespace c_abi {
namespace {

constexpr char kCreate[] = "quern_model_state_create";
constexpr char kLength[] = "quern_model_state_length";
constexpr char kForward[] = "quern_model_state_forward";
constexpr char kGetInfo[] = "quern_model_state_get_info";
// No state has more sequences, and no step has two items of one sequence.
constexpr int64_t kMaxItems = int64_t{1} << 20;

absl::StatusOr<DecoderStateSpec> SpecOf(
    const quern_model_state_options* options) {
  DecoderStateSpec spec;
  if (options == nullptr) return spec;
  QUERN_RETURN_IF_ERROR(CheckSize("quern_model_state_options", options->size,
                                  sizeof(quern_model_state_options)));
  if (options->max_sequences != 0) spec.max_sequences = options->max_sequences;
  if (options->max_step_tokens != 0) {
    spec.max_step_tokens = options->max_step_tokens;
  }
  spec.cache_tokens = options->cache_tokens;
  if (options->page_size != 0) spec.page_size = options->page_size;
  if (options->cache_dtype != nullptr) {
    QUERN_ASSIGN_OR_RETURN(
        spec.cache_dtype,
        CacheDTypeOf(kCreate, "cache_dtype", options->cache_dtype));
  }
  spec.max_bytes = options->max_bytes;
  return spec;
}

absl::StatusOr<std::unique_ptr<Object>> MakeState(
    const Library& library, quern_model* model,
    const quern_model_state_options* options) {
  QUERN_ASSIGN_OR_RETURN(const DecoderStateSpec spec, SpecOf(options));
  Borrowed held;
  QUERN_RETURN_IF_ERROR(held.Take(model, Kind::kModel, Mode::kHold));
  if (held.slot()->library != &library) {
    return InvalidArgument(kCreate, "model", kOtherLibrary);
  }
  QUERN_ASSIGN_OR_RETURN(
      DecoderState state,
      DecoderState::Create(held.As<ModelObject>().model(), spec));
  return std::make_unique<ModelStateObject>(std::move(held), std::move(state));
}

// What Forward does not check: what is C's alone.
absl::Status CheckStep(const quern_model_step& step) {
  QUERN_RETURN_IF_ERROR(
      CheckSize("quern_model_step", step.size, sizeof(quern_model_step)));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kForward, "all_logits", step.all_logits, 0, 1));
  QUERN_RETURN_IF_ERROR(CheckRange(kForward, "reserved", step.reserved, 0, 0));
  if (step.num_items > static_cast<size_t>(kMaxItems)) {
    return InvalidArgument(kForward, "num_items=", step.num_items, "; need ",
                           kMaxItems, " or fewer");
  }
  if (step.num_items > 0) {
    QUERN_RETURN_IF_ERROR(CheckNotNull(kForward, "items", step.items));
  }
  for (size_t i = 0; i < step.num_items; ++i) {
    const quern_model_item& item = step.items[i];
    const std::string name = absl::StrCat("items[", i, "].");
    QUERN_RETURN_IF_ERROR(CheckRange(kForward, absl::StrCat(name, "reserved"),
                                     item.reserved, 0, 0));
    QUERN_RETURN_IF_ERROR(CheckAtLeast(
        kForward, absl::StrCat(name, "num_tokens"), item.num_tokens, 1));
    QUERN_RETURN_IF_ERROR(
        CheckNotNull(kForward, absl::StrCat(name, "tokens"), item.tokens));
  }
  return absl::OkStatus();
}

absl::Status Fill(const DecoderState& state, quern_model_state_info* info) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(kGetInfo, "info", info));
  QUERN_RETURN_IF_ERROR(CheckSize("quern_model_state_info", info->size,
                                  sizeof(quern_model_state_info)));
  info->cache_bytes = state.cache_bytes();
  info->cache_bytes_per_token = state.cache_bytes_per_token();
  info->free_tokens = state.free_tokens();
  info->scratch_bytes = state.scratch_bytes();
  return absl::OkStatus();
}

// Sets *sequence to the one that `make`() starts.
template <typename Make>
absl::Status Start(const char* function, int32_t* sequence, const Make& make) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(function, "sequence", sequence));
  *sequence = -1;
  QUERN_ASSIGN_OR_RETURN(*sequence, make());
  return absl::OkStatus();
}

template <typename Fn>
quern_status With(quern_model_state* handle, Mode mode, const Fn& fn) {
  return CallOn<ModelStateObject>(handle, Kind::kModelState, mode, fn);
}

}  // namespace

std::string ModelStateObject::Explain() const {
  return absl::StrCat("state of a model, ", state_.cache_bytes(),
                      " bytes of cache, ", state_.cache_bytes_per_token(),
                      " bytes a token; ", state_.ExplainAttention());
}

absl::StatusOr<int64_t> ModelStateObject::Length(int32_t sequence) const {
  const int64_t length = state_.length(sequence);
  if (length >= 0) return length;
  return InvalidArgument(kLength, "sequence=", sequence,
                         " is not a sequence of the state");
}

quern_tensor ModelStateObject::Show(const float* data, int64_t rows) {
  shape_[0] = rows;
  return quern_dense(const_cast<float*>(data), ToC(DType::kF32), 2, shape_);
}

absl::Status ModelStateObject::Forward(const quern_model_step* step,
                                       quern_executor* handle,
                                       quern_tensor* logits) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(kForward, "logits", logits));
  *logits = Show(nullptr, 0);
  QUERN_RETURN_IF_ERROR(CheckNotNull(kForward, "step", step));
  QUERN_RETURN_IF_ERROR(CheckStep(*step));
  CallExecutor executor;
  QUERN_RETURN_IF_ERROR(executor.Take(handle, BrokenForks::kFinish));
  std::vector<DecoderBatchItem> items;
  items.reserve(step->num_items);
  for (const quern_model_item& item :
       absl::MakeConstSpan(step->items, step->num_items)) {
    items.push_back({item.sequence,
                     absl::MakeConstSpan(
                         item.tokens, static_cast<size_t>(item.num_tokens))});
  }
  QUERN_ASSIGN_OR_RETURN(
      const MatrixView<const float> rows,
      state_.Forward(
          items,
          step->all_logits == 1 ? LogitsOf::kAllTokens : LogitsOf::kLastTokens,
          executor.get()));
  QUERN_RETURN_IF_ERROR(executor.Verdict());
  *logits = Show(rows.data(), rows.extent(0));
  return absl::OkStatus();
}

}  // namespace c_abi
}  // namespace quern

using quern::c_abi::CheckNotNull;
using quern::c_abi::Kind;
using quern::c_abi::Library;
using quern::c_abi::MakeObject;
using quern::c_abi::Mode;
using quern::c_abi::ModelStateObject;

extern "C" {

quern_status quern_model_state_create(quern_library* library,
                                      quern_model* model,
                                      const quern_model_state_options* options,
                                      quern_model_state** state) {
  return MakeObject(library, "quern_model_state_create", Kind::kModelState,
                    state, [&](const Library& owner) {
                      return quern::c_abi::MakeState(owner, model, options);
                    });
}

quern_status quern_model_state_get_info(quern_model_state* state,
                                        quern_model_state_info* info) {
  return quern::c_abi::With(state, Mode::kUse, [&](const ModelStateObject& o) {
    return quern::c_abi::Fill(o.state(), info);
  });
}

quern_status quern_model_state_begin(quern_model_state* state,
                                     int32_t* sequence) {
  return quern::c_abi::With(state, Mode::kChange, [&](ModelStateObject& o) {
    return quern::c_abi::Start("quern_model_state_begin", sequence,
                               [&] { return o.state().NewSequence(); });
  });
}

quern_status quern_model_state_fork(quern_model_state* state, int32_t sequence,
                                    int32_t* forked) {
  return quern::c_abi::With(state, Mode::kChange, [&](ModelStateObject& o) {
    return quern::c_abi::Start("quern_model_state_fork", forked,
                               [&] { return o.state().Fork(sequence); });
  });
}

quern_status quern_model_state_end(quern_model_state* state, int32_t sequence) {
  return quern::c_abi::With(state, Mode::kChange, [&](ModelStateObject& o) {
    return o.state().EndSequence(sequence);
  });
}

quern_status quern_model_state_length(quern_model_state* state,
                                      int32_t sequence, int64_t* length) {
  return quern::c_abi::With(
      state, Mode::kUse, [&](const ModelStateObject& o) -> absl::Status {
        QUERN_RETURN_IF_ERROR(
            CheckNotNull("quern_model_state_length", "length", length));
        QUERN_ASSIGN_OR_RETURN(*length, o.Length(sequence));
        return absl::OkStatus();
      });
}

quern_status quern_model_state_forward(quern_model_state* state,
                                       const quern_model_step* step,
                                       quern_executor* executor,
                                       quern_tensor* logits) {
  return quern::c_abi::With(state, Mode::kChange, [&](ModelStateObject& o) {
    return o.Forward(step, executor, logits);
  });
}

}  // extern "C"
