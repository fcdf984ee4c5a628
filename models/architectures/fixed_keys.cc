#include "quern/models/architectures/fixed_keys.h"

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/status_macros.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/gguf/gguf.h"

namespace quern {
namespace {

constexpr char kOp[] = "decoder";

enum class Kind : uint8_t { kInteger, kReal, kTrue };

// A key, "<architecture>.<name>", whose value is `need`, or true for kTrue.
struct FixedKey {
  const char* architecture;  // nullptr: all that have the part
  uint32_t has;              // ModelPart bits
  const char* name;
  Kind kind;
  int64_t need;
  const char* why;  // the end of a refusal
};

constexpr uint32_t kAny = 0;
constexpr uint32_t kLatent = Bit(ModelPart::kLatent);
constexpr uint32_t kYarn = Bit(ModelPart::kYarn);
constexpr FixedKey kFixedKeys[] = {
    // It multiplies cosines and sines, whatever the type of scaling is.
    {nullptr, kAny, "rope.scaling.attn_factor", Kind::kReal, 1, ""},
    {nullptr, kAny, "attention.causal", Kind::kTrue, 1,
     ", because a token sees no tokens behind it; models of embeddings, which "
     "see them, are not read"},
    // Scales of queries by their positions, as Mistral-Large-3 has them.
    {nullptr, kLatent, "attention.temperature_scale", Kind::kReal, 0, ""},
    {nullptr, kLatent, "attention.temperature_length", Kind::kInteger, 0, ""},
    {nullptr, kYarn, "rope.scaling.yarn_ext_factor", Kind::kReal, 1, ""},
    {nullptr, kYarn, "rope.scaling.yarn_attn_factor", Kind::kReal, 1, ""},
    {nullptr, kYarn, "rope.scaling.yarn_beta_fast", Kind::kReal, 32, ""},
    {nullptr, kYarn, "rope.scaling.yarn_beta_slow", Kind::kReal, 1, ""},
    {"lfm2", kAny, "attention.sliding_window", Kind::kInteger, 0,
     ", because every layer that attends sees the whole text"},
    {"gemma2", kAny, "attention.sliding_window_pattern", Kind::kInteger, 2,
     ", because every second layer is local"},
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
                            absl::string_view architecture, uint32_t parts) {
  for (const FixedKey& key : kFixedKeys) {
    if (key.architecture != nullptr && architecture != key.architecture) {
      continue;
    }
    if ((parts & key.has) != key.has) continue;
    const std::string name = absl::StrCat(architecture, ".", key.name);
    if (file.Has(name)) QUERN_RETURN_IF_ERROR(Check(file, name, key));
  }
  return absl::OkStatus();
}

}  // namespace quern
