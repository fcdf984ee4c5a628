#include "quern/c/objects/rotary_scaling.h"

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/c/library.h"
#include "quern/c/objects/by_name.h"
#include "quern/c/quern.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace c_abi {
namespace {

constexpr char kCreate[] = "quern_rotary_scaling_create";
// More pairs than any head has; a wrong count should not be followed far.
constexpr int64_t kMaxFactors = 1 << 16;

absl::string_view NameOf(RotaryScalingKind kind) {
  switch (kind) {
    case RotaryScalingKind::kNone:
      return "none";
    case RotaryScalingKind::kLinear:
      return "linear";
    case RotaryScalingKind::kDynamicNtk:
      return "dynamic_ntk";
    case RotaryScalingKind::kLlama3:
      return "llama3";
    case RotaryScalingKind::kYarn:
      return "yarn";
    case RotaryScalingKind::kLongRope:
      return "longrope";
  }
  return "";
}

absl::StatusOr<std::unique_ptr<Object>> Make(
    const quern_rotary_scaling_options* options) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(kCreate, "options", options));
  QUERN_RETURN_IF_ERROR(CheckSize("quern_rotary_scaling_options", options->size,
                                  sizeof(quern_rotary_scaling_options)));
  QUERN_RETURN_IF_ERROR(CheckNotNull(kCreate, "kind", options->kind));
  constexpr RotaryScalingKind kKinds[] = {
      RotaryScalingKind::kNone,       RotaryScalingKind::kLinear,
      RotaryScalingKind::kDynamicNtk, RotaryScalingKind::kLlama3,
      RotaryScalingKind::kYarn,       RotaryScalingKind::kLongRope};
  RotaryScaling scaling;
  QUERN_ASSIGN_OR_RETURN(
      scaling.kind, ByName(kCreate, "kind", options->kind, kKinds, &NameOf));
  const auto set = [](double given, double& field) {
    if (given != 0) field = given;
  };
  set(options->factor, scaling.factor);
  set(options->low_freq, scaling.low_freq);
  set(options->high_freq, scaling.high_freq);
  set(options->beta_fast, scaling.beta_fast);
  set(options->beta_slow, scaling.beta_slow);
  set(options->attention_factor, scaling.attention_factor);
  set(options->mscale, scaling.mscale);
  set(options->mscale_all_dim, scaling.mscale_all_dim);
  QUERN_RETURN_IF_ERROR(
      CheckRange(kCreate, "untruncated", options->untruncated, 0, 1));
  scaling.truncate = options->untruncated == 0;
  scaling.original = options->original;
  scaling.target = options->target;
  QUERN_RETURN_IF_ERROR(
      CheckRange(kCreate, "num_factors", options->num_factors, 0, kMaxFactors));
  if (options->num_factors > 0) {
    QUERN_RETURN_IF_ERROR(
        CheckNotNull(kCreate, "short_factors", options->short_factors));
    QUERN_RETURN_IF_ERROR(
        CheckNotNull(kCreate, "long_factors", options->long_factors));
    scaling.short_factors.assign(options->short_factors,
                                 options->short_factors + options->num_factors);
    scaling.long_factors.assign(options->long_factors,
                                options->long_factors + options->num_factors);
  }
  return std::make_unique<RotaryScalingObject>(std::move(scaling));
}

}  // namespace

std::string RotaryScalingObject::Explain() const {
  return absl::StrCat("rotary scaling ", NameOf(scaling_.kind), ", factor ",
                      scaling_.factor);
}

}  // namespace c_abi
}  // namespace quern

using quern::c_abi::Kind;
using quern::c_abi::Library;
using quern::c_abi::MakeObject;

extern "C" {

quern_status quern_rotary_scaling_create(
    quern_library* library, const quern_rotary_scaling_options* options,
    quern_rotary_scaling** scaling) {
  return MakeObject(
      library, quern::c_abi::kCreate, Kind::kRotaryScaling, scaling,
      [&](const Library&) { return quern::c_abi::Make(options); });
}

}  // extern "C"
