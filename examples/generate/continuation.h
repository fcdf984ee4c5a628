#ifndef QUERN_EXAMPLES_GENERATE_CONTINUATION_H_
#define QUERN_EXAMPLES_GENERATE_CONTINUATION_H_

#include <string>

#include "absl/status/status.h"
#include "examples/generate/session.h"

namespace quern {

// Prints `prompt`, which is the leader's, and what follows it: token by token,
// or with several samples one text after another, when all are complete. The
// samples share the prompt's keys and values. Collective: an error is every
// rank's.
absl::Status ContinueText(const std::string& prompt, Session& session);

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_CONTINUATION_H_
