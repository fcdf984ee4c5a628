#ifndef QUERN_EXAMPLES_GENERATE_INPUT_H_
#define QUERN_EXAMPLES_GENERATE_INPUT_H_

// What the program reads besides its command line: where the model is, and the
// text to continue.

#include <string>

#include "absl/status/statusor.h"

namespace quern {

// The path of the model that `model`, the value of --model, names. An empty
// value names the model that comes with the program: NotFound where that is
// missing. A relative path starts in the directory where the user called
// `bazel run`, which itself changes the directory.
absl::StatusOr<std::string> ModelPath(const std::string& model);

// All of standard input without the newline at its end. InvalidArgument beyond
// 16 MiB; Unavailable if it cannot be read.
absl::StatusOr<std::string> ReadPrompt();

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_INPUT_H_
