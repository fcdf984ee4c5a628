#include "quern/c/objects/named.h"

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/c/library.h"
#include "quern/c/objects/weights.h"
#include "quern/c/quern_named.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/linear_weights.h"

namespace quern {
namespace c_abi {
namespace {

constexpr char kExperts[] = "quern_expert_weights_create";
// More than any router has; a wrong count should not be followed far.
constexpr size_t kMaxExperts = 65536;

// "i8_channel weights, n=48, k=64".
std::string ExplainWeights(const LinearWeights& weights) {
  const LinearWeightsSpec& spec = weights.spec();
  return absl::StrCat(WeightFormatName(spec.format), " weights, n=", spec.n,
                      ", k=", spec.k);
}

absl::Status TakeWeights(const Library& library, const char* which,
                         quern_linear_weights* const* from, size_t count,
                         std::vector<LinearWeights>& to,
                         std::vector<Borrowed>& held) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(kExperts, which, from));
  for (size_t e = 0; e < count; ++e) {
    Borrowed weights;
    if (absl::Status taken =
            weights.Take(from[e], Kind::kLinearWeights, Mode::kHold);
        !taken.ok()) {
      return absl::Status(
          taken.code(),
          absl::StrCat(kExperts, ": ", which, "[", e, "]: ", taken.message()));
    }
    if (weights.slot()->library != &library) {
      return InvalidArgument(kExperts, which, "[", e, "]", kOtherLibrary);
    }
    to.push_back(weights.As<WeightsObject>().weights());
    held.push_back(std::move(weights));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Object>> MakeExperts(
    const Library& library, quern_linear_weights* const* gate_up,
    quern_linear_weights* const* down, size_t count) {
  QUERN_RETURN_IF_ERROR(CheckRange(
      kExperts, "count", static_cast<int64_t>(count), 1, kMaxExperts));
  ExpertWeights experts;
  std::vector<Borrowed> held;
  QUERN_RETURN_IF_ERROR(
      TakeWeights(library, "gate_up", gate_up, count, experts.gate_up, held));
  QUERN_RETURN_IF_ERROR(
      TakeWeights(library, "down", down, count, experts.down, held));
  return std::make_unique<ExpertsObject>(std::move(experts), std::move(held));
}

}  // namespace

std::string HandlerObject::Explain() const {
  if (handler_.weights.bytes().empty()) return "no weights yet";
  return ExplainWeights(handler_.weights);
}

std::string MetadataObject::Explain() const {
  return absl::StrCat("a schedule of ", metadata_.storage.q_lens.size(),
                      " sequences");
}

std::string ExpertsObject::Explain() const {
  return absl::StrCat(experts_.gate_up.size(), " experts, gate_up: ",
                      ExplainWeights(experts_.gate_up[0]),
                      "; down: ", ExplainWeights(experts_.down[0]));
}

}  // namespace c_abi
}  // namespace quern

using quern::c_abi::Kind;
using quern::c_abi::Library;
using quern::c_abi::MakeObject;
using quern::c_abi::Object;
using Made = absl::StatusOr<std::unique_ptr<Object>>;

extern "C" {

quern_status quern_onednn_handler_create(quern_library* library,
                                         quern_onednn_handler** handler) {
  return MakeObject(library, "quern_onednn_handler_create",
                    Kind::kOneDnnHandler, handler, [](const Library&) -> Made {
                      return std::make_unique<quern::c_abi::HandlerObject>();
                    });
}

quern_status quern_scheduler_metadata_create(
    quern_library* library, quern_scheduler_metadata** metadata) {
  return MakeObject(library, "quern_scheduler_metadata_create",
                    Kind::kSchedulerMetadata, metadata,
                    [](const Library&) -> Made {
                      return std::make_unique<quern::c_abi::MetadataObject>();
                    });
}

quern_status quern_expert_weights_create(quern_library* library,
                                         quern_linear_weights* const* gate_up,
                                         quern_linear_weights* const* down,
                                         size_t count,
                                         quern_expert_weights** experts) {
  return MakeObject(library, "quern_expert_weights_create",
                    Kind::kExpertWeights, experts, [&](const Library& owner) {
                      return quern::c_abi::MakeExperts(owner, gate_up, down,
                                                       count);
                    });
}

}  // extern "C"
