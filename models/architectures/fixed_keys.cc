#include "quern/models/architectures/fixed_keys.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/core/status_macros.h"
#include "quern/models/architectures/architecture.h"
#include "quern/models/architectures/model_part.h"
#include "quern/models/gguf/gguf.h"

namespace quern {
namespace {

constexpr char kOp[] = "decoder";

using Kind = FixedKey::Kind;
using P = ModelPart;
// The keys of parts, and those of every model.
constexpr FixedKey kFixedKeys[] = {
    // It multiplies cosines and sines, whatever the type of scaling is.
    {"rope.scaling.attn_factor", Kind::kReal, 1},
    {"attention.causal", Kind::kTrue, 1,
     ", because a token sees no tokens behind it; models of embeddings, which "
     "see them, are not read"},
    // Scales of queries by their positions, as Mistral-Large-3 has them.
    {"attention.temperature_scale", Kind::kReal, 0, "", P::kLatent},
    {"attention.temperature_length", Kind::kInteger, 0, "", P::kLatent},
    {"rope.scaling.yarn_ext_factor", Kind::kReal, 1, "", P::kYarn},
    {"rope.scaling.yarn_attn_factor", Kind::kReal, 1, "", P::kYarn},
    {"rope.scaling.yarn_beta_fast", Kind::kReal, 32, "", P::kYarn},
    {"rope.scaling.yarn_beta_slow", Kind::kReal, 1, "", P::kYarn},
};

absl::Status Check(const GgufFile& file, const std::string& name,
                   const FixedKey& key) {
  switch (key.kind) {
    case Kind::kInteger: {
      QUERN_ASSIGN_OR_RETURN(const int64_t value, file.GetInt(name));
      if (value == key.need) return absl::OkStatus();
      return Unimplemented(kOp, name, "=", value, "; need ", key.need, key.why);
    }
    case Kind::kReal: {
      QUERN_ASSIGN_OR_RETURN(const float value, file.GetF32(name));
      if (value == static_cast<float>(key.need)) return absl::OkStatus();
      return Unimplemented(kOp, name, "=", value, "; need ", key.need, key.why);
    }
    case Kind::kTrue: {
      QUERN_ASSIGN_OR_RETURN(const bool value, file.GetBool(name));
      if (value) return absl::OkStatus();
      return Unimplemented(kOp, name, " is false; need true", key.why);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckFixedKeys(const GgufFile& file,
                            const Architecture& architecture,
                            const ModelParts& parts) {
  for (const absl::Span<const FixedKey> keys :
       {absl::MakeConstSpan(kFixedKeys), architecture.fixed_keys}) {
    for (const FixedKey& key : keys) {
      if (!parts.HasAll(key.needs)) continue;
      const std::string name = absl::StrCat(architecture.name, ".", key.name);
      if (file.Has(name)) QUERN_RETURN_IF_ERROR(Check(file, name, key));
    }
  }
  return absl::OkStatus();
}

}  // namespace quern
