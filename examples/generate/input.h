#ifndef QUERN_EXAMPLES_GENERATE_INPUT_H_
#define QUERN_EXAMPLES_GENERATE_INPUT_H_

// What the program reads besides its command line: where the model is, and the
// text to continue.

#include <string>

#include "absl/status/statusor.h"

namespace quern {

// `path` from the directory where the user called `bazel run`, which itself
// changes the directory. Absolute and empty paths stay as they are.
std::string CallersPath(const std::string& path);

// The path of the model that `model`, the value of --model, names: CallersPath.
// An empty value names the model that comes with the program: NotFound where
// that is missing.
absl::StatusOr<std::string> ModelPath(const std::string& model);

// All of standard input without the newline at its end. InvalidArgument beyond
// 16 MiB; Unavailable if it cannot be read.
absl::StatusOr<std::string> ReadPrompt();

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_INPUT_H_
