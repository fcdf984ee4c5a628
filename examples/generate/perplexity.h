#ifndef QUERN_EXAMPLES_GENERATE_PERPLEXITY_H_
#define QUERN_EXAMPLES_GENERATE_PERPLEXITY_H_

#include <string>

#include "absl/status/status.h"
#include "examples/generate/session.h"

namespace quern {

// Prints the perplexity of `text`, which is the leader's, cut into windows of
// the model's context, of 256 at most. Each window starts
// without memory of the one before. Collective: an error is every rank's.
absl::Status TellPerplexity(const std::string& text, Session& session);

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_PERPLEXITY_H_
