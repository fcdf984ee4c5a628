#ifndef QUERN_TOOLS_RANDOM_VOCABULARY_H_
#define QUERN_TOOLS_RANDOM_VOCABULARY_H_

// Private: the vocabulary of a model with random weights, as
// tools/random_model.h describes it.

#include <cstdint>

#include "absl/strings/string_view.h"
#include "quern/tools/gguf_writer.h"

namespace quern {

// Pieces that every vocabulary has: control tokens, bytes and the space.
inline constexpr int64_t kMinRandomVocab = 260;

// Adds the keys tokenizer.ggml.*. `vocab` must be at least kMinRandomVocab.
void AddVocabularyKeys(absl::string_view architecture, int64_t vocab,
                       GgufFileWriter& w);

}  // namespace quern

#endif  // QUERN_TOOLS_RANDOM_VOCABULARY_H_
