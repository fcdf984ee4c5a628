#include "examples/generate/operators.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/status_macros.h"
#include "quern/models/decoder/decoder.h"
#include "quern/ops/registry/families/rows/sampling_ops.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"

namespace quern {

absl::StatusOr<std::unique_ptr<Operators>> Operators::Create(
    const std::string& policy) {
  std::unique_ptr<Operators> ops(new Operators());
  QUERN_ASSIGN_OR_RETURN(OpPolicy parsed, OpPolicy::Parse(policy));
  QUERN_RETURN_IF_ERROR(RegisterDecoderOps(ops->registry_));
  QUERN_RETURN_IF_ERROR(RegisterSamplingOps(ops->registry_));
  ops->dispatcher_ =
      std::make_unique<const OpDispatcher>(ops->registry_, std::move(parsed));
  return ops;
}

std::string Operators::Summary() const {
  std::string text;
  const auto add = [&text](const std::string& name, int64_t count,
                           const char* kind) {
    if (count == 0) return;
    absl::StrAppend(&text, text.empty() ? "" : ", ", name, " ", count, kind);
  };
  for (const std::string& name : registry_.Names()) {
    const OpCounts counts = dispatcher_->Counts(name);
    add(name, counts.enabled, "");
    add(name, counts.disabled, " by reference");
  }
  return text;
}

std::string Operators::Warnings() const {
  std::string text;
  for (const std::string& warning : dispatcher_->Warnings()) {
    absl::StrAppend(&text, warning, "\n");
  }
  return text;
}

}  // namespace quern
