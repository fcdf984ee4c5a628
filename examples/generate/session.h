#ifndef QUERN_EXAMPLES_GENERATE_SESSION_H_
#define QUERN_EXAMPLES_GENERATE_SESSION_H_

// A rank's model, with all that a run of the program needs besides.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/generate/machine_limits.h"
#include "examples/generate/operators.h"
#include "examples/generate/options.h"
#include "examples/generate/rank_group.h"
#include "examples/generate/stats.h"
#include "quern/core/communicator.h"
#include "quern/core/executor.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/tokenizer/tokenizer.h"
#include "quern/ops/registry/op_dispatcher.h"

namespace quern {

class Session {
 public:
  // Collective: an error is every rank's.
  static absl::StatusOr<std::unique_ptr<Session>> Create(
      const GenerateOptions& options, Communicator* communicator,
      const RankGroup& ranks);

  const GenerateOptions& options() const { return options_; }
  RankGroup& ranks() { return ranks_; }
  Executor& executor() { return *executor_; }
  const Decoder& model() const { return *model_; }
  // Tokens of a prompt that a step reads at most: the leader's machine's
  // Decoder::step_tokens, on every rank.
  int64_t step_tokens() const { return step_tokens_; }
  const OpDispatcher& ops() const { return operators_->dispatcher(); }
  const Tokenizer& tokenizer() const { return *tokenizer_; }  // the leader's
  DecoderState& state() { return *state_; }
  Stats& stats() { return stats_; }
  // Where progress is shown; null on ranks that show none.
  FILE* terminal() const { return ranks_.leads() ? stderr : nullptr; }

  // Makes state(). Collective, and so are its errors.
  absl::Status NewState(DecoderStateSpec spec);
  // The ids of a whole text, with the token that begins one if the model wants
  // it. The leader's.
  std::vector<int32_t> Encode(const std::string& text) const;
  // Prints what of --custom_ops had no effect, on the leader's standard error.
  void TellWarnings() const;
  // Measures the limits of the machine for --limits, on one rank. Called before
  // and after the text.
  absl::Status TakeLimits();
  LimitMeter& meter() { return meter_; }
  // Collective.
  void TellStats();

 private:
  Session(const GenerateOptions& options, const RankGroup& ranks)
      : options_(options), ranks_(ranks) {}

  // Everything that this rank needs besides the model itself.
  absl::StatusOr<GgufFile> Open();
  // Ranks with models of different shapes would wait for each other for ever.
  absl::Status CheckSameFile(const GgufFile& file);
  absl::Status Load(const GgufFile& file, Communicator* communicator);

  const GenerateOptions options_;
  RankGroup ranks_;
  std::unique_ptr<HwyExecutor> executor_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<const Operators> operators_;
  std::unique_ptr<Decoder> model_;
  std::unique_ptr<DecoderState> state_;
  int64_t step_tokens_ = 0;
  Stats stats_;
  LimitMeter meter_;
};

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_SESSION_H_
