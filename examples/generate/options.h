#ifndef QUERN_EXAMPLES_GENERATE_OPTIONS_H_
#define QUERN_EXAMPLES_GENERATE_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/models/decoder/decoder.h"

namespace quern {

struct GenerateOptions {
  std::optional<std::string> prompt;  // nullopt: read standard input
  std::string model;                  // empty: the shipped model
  bool specials = false;
  DecoderWeights weights = DecoderWeights::kAsInFile;
  // nullopt: DefaultActivations(weights)
  std::optional<DecoderActivations> activations;
  std::string packed;  // DecoderOptions::packed_path
  DType kv = kDefaultCacheDType;
  std::string custom_ops;  // text of an OpPolicy
  bool perplexity = false;
  int64_t max_tokens = 128;
  int64_t samples = 1;       // texts that follow the prompt
  int threads = 0;           // 0: as many as cores
  std::string isa;           // argument of SetMaxIsa; empty: QUERN_MAX_ISA
  std::optional<int> ranks;  // nullopt: 1, or all MPI processes
  float temperature = 0.8f;
  int64_t top_k = 40;
  float top_p = 1;
  float min_p = 0;
  float top_n_sigma = 0;
  float typical_p = 1;
  uint64_t seed = 4;
  bool stats = false;
  bool limits = false;  // only with stats
  bool help = false;
};

// Reads the command line. InvalidArgument is one sentence for the user.
absl::StatusOr<GenerateOptions> ParseOptions(int argc, char** argv);

// Caps the instruction set of this process as --isa says, or else QUERN_MAX_ISA
// in the environment. InvalidArgument names the flag or the variable.
absl::Status CapIsa(const GenerateOptions& options);

// What --help prints.
std::string HelpText();

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_OPTIONS_H_
