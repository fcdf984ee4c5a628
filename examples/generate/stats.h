#ifndef QUERN_EXAMPLES_GENERATE_STATS_H_
#define QUERN_EXAMPLES_GENERATE_STATS_H_

// Prints what --stats shows: times, memory of each rank, traffic between ranks,
// and kernels.

#include <cstdint>
#include <optional>
#include <string>

#include "examples/generate/machine_limits.h"
#include "examples/generate/options.h"
#include "examples/generate/rank_group.h"
#include "quern/core/executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/decoder/decoder_work.h"

namespace quern {

struct Stats {
  double load_s = 0, prompt_s = 0, generation_s = 0;
  int64_t prompt_tokens = 0;
  int64_t new_tokens = 0;
  // What the steps of the prompt, or of a text whose perplexity is asked for,
  // and those of the generation needed on this rank.
  DecoderWork prompt_work, generation_work;
  std::optional<MachineLimits> limits;  // with --limits
  // Least seconds of reading what generation_work says, each step at DRAM's
  // rate beside it; with --limits.
  double generation_read_s = 0;
  // Keys of each head that a step did not read again at most, because samples
  // share them.
  int64_t shared_tokens = 0;
  std::string stopped_by;
  std::string operators;  // Operators::Summary
};

// Collective: the leader prints, on standard error, what all ranks report.
void PrintStats(const Stats& stats, const GenerateOptions& options,
                const Decoder& model, const DecoderState& state,
                const Executor& executor, RankGroup& ranks);

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_STATS_H_
