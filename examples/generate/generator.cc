#include "examples/generate/generator.h"

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "examples/generate/continuation.h"
#include "examples/generate/input.h"
#include "examples/generate/options.h"
#include "examples/generate/perplexity.h"
#include "examples/generate/rank_group.h"
#include "examples/generate/session.h"
#include "examples/generate/text_writer.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/models/decoder/decoder.h"

namespace quern {
namespace {

// The options that every rank takes from the leader.
struct CommonOptions {
  int64_t max_tokens, samples;
  DecoderWeights weights;
  std::optional<DecoderActivations> activations;
  DType kv;
  bool perplexity, stats, limits;
};

GenerateOptions WithLeadersWord(GenerateOptions options, RankGroup& ranks) {
  CommonOptions common{options.max_tokens,  options.samples, options.weights,
                       options.activations, options.kv,      options.perplexity,
                       options.stats,       options.limits};
  ranks.Share(common);
  options.max_tokens = common.max_tokens;
  options.samples = common.samples;
  options.weights = common.weights;
  options.activations = common.activations;
  options.kv = common.kv;
  options.perplexity = common.perplexity;
  options.stats = common.stats;
  options.limits = common.limits;
  return options;
}

}  // namespace

absl::Status Generate(const GenerateOptions& own, Communicator* communicator,
                      int leader) {
  RankGroup ranks(communicator, leader);
  const GenerateOptions options = WithLeadersWord(own, ranks);
  // Over MPI, the number of ranks is not known when the options are read.
  if (options.limits && ranks.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--limits on ", ranks.size(),
                     " ranks; need one rank, whose threads measure them"));
  }
  absl::StatusOr<std::string> prompt = options.prompt.value_or("");
  if (ranks.leads() && !options.prompt.has_value()) prompt = ReadPrompt();
  QUERN_RETURN_IF_ERROR(ranks.Agree(prompt.status()));
  QUERN_ASSIGN_OR_RETURN(const std::unique_ptr<Session> session,
                         Session::Create(options, communicator, ranks));
  if (options.limits) QUERN_RETURN_IF_ERROR(session->TakeLimits());
  QUERN_RETURN_IF_ERROR(options.perplexity ? TellPerplexity(*prompt, *session)
                                           : ContinueText(*prompt, *session));
  session->TellWarnings();
  if (options.limits) QUERN_RETURN_IF_ERROR(session->TakeLimits());
  if (options.stats) session->TellStats();
  return absl::OkStatus();
}

int GenerateMain(const char* program,
                 const absl::StatusOr<GenerateOptions>& options,
                 Communicator* communicator, int leader) {
  RankGroup ranks(communicator, leader);
  absl::Status status = ranks.Agree(options.status());
  int code = 2;
  if (status.ok()) {
    code = 1;
    bool help = options->help;
    ranks.Share(help);
    if (!help) {
      status = Generate(*options, communicator, leader);
    } else {
      status =
          ranks.Agree(ranks.leads() ? Print(HelpText()) : absl::OkStatus());
    }
  }
  if (status.ok()) return 0;
  if (absl::IsCancelled(status)) {
    status = absl::CancelledError("interrupted while the model was loaded");
    code = 128 + SIGINT;
  }
  if (ranks.leads()) {
    std::fprintf(stderr, "%s: %s\n", program,
                 std::string(status.message()).c_str());
  }
  return code;
}

}  // namespace quern
