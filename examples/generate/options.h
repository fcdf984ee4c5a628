#ifndef QUERN_EXAMPLES_GENERATE_OPTIONS_H_
#define QUERN_EXAMPLES_GENERATE_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace quern {

struct GenerateOptions {
  std::string model;                  // "": the shipped one
  std::optional<std::string> prompt;  // none: standard input
  int64_t max_tokens = 0;
  int threads = 0;  // 0: as many as there are cores
  float temperature = 0;
  int64_t top_k = 0;
  float top_p = 0;
  uint64_t seed = 0;
  bool stats = false;
  bool help = false;
};

// Reads the command line. InvalidArgument is one sentence for the user.
absl::StatusOr<GenerateOptions> ParseOptions(int argc, char** argv);

// What --help prints.
std::string HelpText();

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_OPTIONS_H_
