#include "examples/generate/stats.h"

#include <sys/resource.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/generate/machine_limits.h"
#include "examples/generate/options.h"
#include "examples/generate/rank_group.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/decoder/decoder_work.h"

namespace quern {
namespace {

// Resources that one rank uses.
struct RankUse {
  int64_t threads, weight_bytes, cache_bytes, cache_bytes_per_token,
      scratch_bytes, peak_bytes;
  DecoderWork prompt, generation;
};

RankUse UseOf(const Stats& stats, const Decoder& model,
              const DecoderState& state, const Executor& executor) {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return {executor.num_workers(), model.weight_bytes(),
          state.cache_bytes(),    state.cache_bytes_per_token(),
          state.scratch_bytes(),  int64_t{usage.ru_maxrss} * 1024,
          stats.prompt_work,      stats.generation_work};
}

// The work of all ranks.
DecoderWork Sum(const std::vector<RankUse>& uses, DecoderWork RankUse::*work) {
  DecoderWork sum;
  for (const RankUse& use : uses) sum += use.*work;
  return sum;
}

void PrintSpeed(const char* what, int64_t tokens, double seconds,
                const DecoderWork& work,
                const std::optional<LeastSeconds>& least) {
  std::fprintf(
      stderr, "%s: %s\n", what,
      SpeedText(tokens, seconds, work, least.has_value() ? &*least : nullptr)
          .c_str());
}

void PrintMemory(const std::string& whose, const RankUse& use, DType kv) {
  const auto mib = [](int64_t bytes) {
    return static_cast<double>(bytes) / (1 << 20);
  };
  std::fprintf(stderr,
               "%s: %.1f MiB weights, %.2f MiB %s cache (%lld bytes a token), "
               "%.1f MiB scratch, %.1f MiB peak of the process\n",
               whose.c_str(), mib(use.weight_bytes), mib(use.cache_bytes),
               std::string(DTypeName(kv)).c_str(),
               static_cast<long long>(use.cache_bytes_per_token),
               mib(use.scratch_bytes), mib(use.peak_bytes));
}

}  // namespace

void PrintStats(const Stats& stats, const GenerateOptions& options,
                const Decoder& model, const DecoderState& state,
                const Executor& executor, RankGroup& ranks) {
  const std::vector<RankUse> uses =
      ranks.Gather(UseOf(stats, model, state, executor));
  if (!ranks.leads()) return;
  const DecoderConfig& c = model.config();
  std::fprintf(stderr, "model: %s, %lld layers, width %lld, %s weights\n",
               c.name.empty() ? "without a name" : c.name.c_str(),
               static_cast<long long>(c.layers),
               static_cast<long long>(c.hidden), model.weights().c_str());
  std::fprintf(stderr, "loading: %.2f s\n", stats.load_s);
  const DecoderWork prompt = Sum(uses, &RankUse::prompt);
  const DecoderWork generation = Sum(uses, &RankUse::generation);
  std::optional<LeastSeconds> least, least_generation;
  if (stats.limits.has_value()) {
    least = {stats.limits->ReadSeconds(prompt),
             stats.limits->ComputeSeconds(prompt)};
    least_generation = {stats.generation_read_s,
                        stats.limits->ComputeSeconds(generation)};
  }
  PrintSpeed(options.perplexity ? "text" : "prompt", stats.prompt_tokens,
             stats.prompt_s, prompt, least);
  if (!options.perplexity) {
    // The first new token takes no step of the model, because it comes from the
    // prompt's logits.
    PrintSpeed("generation", stats.new_tokens, stats.generation_s, generation,
               least_generation);
    std::fprintf(stderr, "stopped by: %s\n", stats.stopped_by.c_str());
    if (options.samples > 1) {
      std::fprintf(stderr,
                   "samples: %lld; a step reads up to %lld keys of each head "
                   "less than they have\n",
                   static_cast<long long>(options.samples),
                   static_cast<long long>(stats.shared_tokens));
    }
  }
  if (stats.limits.has_value()) {
    std::fprintf(stderr, "limits: %s\n", LimitsText(*stats.limits).c_str());
  }
  int64_t threads = 0;
  for (size_t rank = 0; rank < uses.size(); ++rank) {
    threads += uses[rank].threads;
    PrintMemory(uses.size() > 1 ? absl::StrCat("rank ", rank) : "memory",
                uses[rank], options.kv);
  }
  if (ranks.size() > 1) {
    std::fprintf(stderr,
                 "ranks: %d; each gives %lld bytes a token to sums and "
                 "logits\n",
                 ranks.size(),
                 static_cast<long long>(model.rank_bytes_per_token()));
  }
  std::fprintf(stderr, "threads: %lld\nkernels: %s; attention: %s\n",
               static_cast<long long>(threads), model.Explain().c_str(),
               state.ExplainAttention().c_str());
  std::fprintf(stderr, "operators: %s\n", stats.operators.c_str());
}

}  // namespace quern
