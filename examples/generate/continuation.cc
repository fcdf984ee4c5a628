#include "examples/generate/continuation.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "examples/generate/options.h"
#include "examples/generate/progress.h"
#include "examples/generate/rank_group.h"
#include "examples/generate/session.h"
#include "examples/generate/stats.h"
#include "examples/generate/text_writer.h"
#include "examples/generate/token_sampler.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/tokenizer/tokenizer.h"
#include "quern/ops/sampling/sampler.h"

namespace quern {
namespace {

using Logits = MatrixView<const float>;

// What the leader tells the others of each sample after each token.
struct Step {
  int32_t token = SamplerPlan::kNoToken;
  int32_t goes_on = 0;
};

// One text that follows the prompt.
struct Sample {
  int32_t sequence = -1;
  std::optional<TextWriter> writer;  // the leader's
};

class Continuation {
 public:
  explicit Continuation(Session& session)
      : session_(session),
        options_(session.options()),
        ranks_(session.ranks()),
        samples_(static_cast<size_t>(options_.samples)) {}

  absl::Status Run(const std::string& prompt) {
    std::vector<int32_t> ids;
    QUERN_RETURN_IF_ERROR(
        ranks_.Agree(ranks_.leads() ? Encode(prompt, ids) : absl::OkStatus()));
    ranks_.Share(ids);
    QUERN_RETURN_IF_ERROR(
        session_.NewState(StateFor(static_cast<int64_t>(ids.size()))));
    QUERN_ASSIGN_OR_RETURN(samples_[0].sequence,
                           session_.state().NewSequence());
    QUERN_RETURN_IF_ERROR(ranks_.Agree(StartTexts(prompt)));
    QUERN_ASSIGN_OR_RETURN(const Logits logits, Prefill(ids));
    for (size_t i = 1; i < samples_.size(); ++i) {
      QUERN_ASSIGN_OR_RETURN(samples_[i].sequence,
                             session_.state().Fork(samples_[0].sequence));
    }
    absl::Status printed;
    QUERN_RETURN_IF_ERROR(Continue(logits, printed));
    return ranks_.Agree(ranks_.leads() && printed.ok() ? FinishTexts(prompt)
                                                       : printed);
  }

 private:
  Sample& At(int64_t i) { return samples_[static_cast<size_t>(i)]; }

  absl::Status Encode(const std::string& prompt,
                      std::vector<int32_t>& ids) const {
    ids = session_.Encode(prompt);
    if (ids.empty()) {
      return absl::InvalidArgumentError(
          "the prompt is empty, and this model starts a text with no token");
    }
    const auto size = static_cast<int64_t>(ids.size());
    const int64_t context = session_.model().context();
    if (size > context) {
      return absl::InvalidArgumentError(
          absl::StrCat("the prompt has ", size,
                       " tokens; this model's context holds ", context));
    }
    return absl::OkStatus();
  }

  // The pages of the prompt's last tokens become each sample's own, and its
  // text ends within a page.
  DecoderStateSpec StateFor(int64_t prompt) const {
    DecoderStateSpec spec;
    const int64_t context = session_.model().context();
    const int64_t fresh = std::min(options_.max_tokens, context - prompt);
    spec.max_sequences = options_.samples;
    spec.max_step_tokens =
        std::max(std::min(prompt, session_.step_tokens()), options_.samples);
    spec.cache_tokens = prompt + fresh +
                        (options_.samples - 1) *
                            (RoundUp(fresh, spec.page_size) + spec.page_size);
    return spec;
  }

  // The leader prepares for what follows the prompt, and prints the prompt
  // where the text comes token by token.
  absl::Status StartTexts(const std::string& prompt) {
    if (!ranks_.leads()) return absl::OkStatus();
    QUERN_ASSIGN_OR_RETURN(
        TokenSampler sampler,
        TokenSampler::Create(options_, session_.model().config().vocab,
                             session_.ops(), session_.executor()));
    sampler_.emplace(std::move(sampler));
    const bool one = samples_.size() == 1;
    for (Sample& sample : samples_) {
      sample.writer.emplace(
          options_, one ? TextWriter::Mode::kPrint : TextWriter::Mode::kKeep,
          session_.tokenizer());
    }
    return one ? Print(prompt) : absl::OkStatus();
  }

  absl::StatusOr<Logits> Prefill(const std::vector<int32_t>& ids) {
    Progress progress("reading the prompt", session_.terminal());
    const absl::Time start = absl::Now();
    const auto size = static_cast<int64_t>(ids.size());
    Logits logits;
    const int64_t step = session_.step_tokens();
    for (int64_t done = 0; done < size; done += step) {
      progress.Show(done, size);
      const DecoderBatchItem item{
          samples_[0].sequence,
          absl::MakeConstSpan(ids).subspan(static_cast<size_t>(done),
                                           static_cast<size_t>(step))};
      QUERN_ASSIGN_OR_RETURN(
          logits, session_.state().Forward({item}, LogitsOf::kLastTokens,
                                           session_.executor()));
      session_.stats().prompt_work += session_.state().last_work();
    }
    session_.stats().prompt_s = absl::ToDoubleSeconds(absl::Now() - start);
    session_.stats().prompt_tokens = size;
    return logits;
  }

  // The leader samples the next token of each of the texts `open`, whose logits
  // are the rows, and writes it.
  absl::Status Choose(const Logits& logits, const std::vector<int64_t>& open,
                      std::vector<Step>& steps) {
    std::vector<int64_t> lengths;
    for (const int64_t i : open) {
      lengths.push_back(session_.state().length(At(i).sequence));
    }
    QUERN_ASSIGN_OR_RETURN(
        const auto tokens,
        sampler_->Next(logits, open, lengths, session_.executor()));
    for (size_t i = 0; i < open.size(); ++i) {
      bool goes_on = false;
      QUERN_RETURN_IF_ERROR(At(open[i]).writer->Add(
          tokens[i], lengths[i], session_.model().context(), goes_on));
      steps[i] = {tokens[i], goes_on ? 1 : 0};
    }
    return absl::OkStatus();
  }

  // What the leader has chosen, on every rank. An error ends all texts.
  std::vector<Step> ChooseAll(const Logits& logits,
                              const std::vector<int64_t>& open,
                              absl::Status& printed) {
    std::vector<Step> steps(open.size());
    if (ranks_.leads()) printed = Choose(logits, open, steps);
    if (!printed.ok()) steps.assign(open.size(), Step());
    ranks_.Share(absl::MakeSpan(steps));
    return steps;
  }

  // Adds tokens until something has ended each text; `printed` is the leader's
  // error, or OK.
  absl::Status Continue(Logits logits, absl::Status& printed) {
    DecoderState& state = session_.state();
    const bool limits = options_.limits;
    if (limits) session_.meter().BeforeSteps(session_.executor());
    absl::Time start = absl::Now();
    std::vector<int64_t> open(samples_.size());
    std::iota(open.begin(), open.end(), 0);
    // The prompt's last row is the first of every text.
    logits =
        Logits(logits.data(), {options_.samples, logits.extent(1)}, {0, 1});
    for (;;) {
      const std::vector<Step> steps = ChooseAll(logits, open, printed);
      std::vector<int64_t> still;
      std::vector<DecoderBatchItem> items;
      for (size_t i = 0; i < open.size(); ++i) {
        if (steps[i].goes_on == 0) {
          // Its pages are of use to the others.
          QUERN_RETURN_IF_ERROR(state.EndSequence(At(open[i]).sequence));
          continue;
        }
        still.push_back(open[i]);
        items.push_back(
            {At(open[i]).sequence, absl::MakeConstSpan(&steps[i].token, 1)});
      }
      open = std::move(still);
      if (open.empty()) break;
      QUERN_ASSIGN_OR_RETURN(logits, state.Forward(items, LogitsOf::kLastTokens,
                                                   session_.executor()));
      session_.stats().generation_work += state.last_work();
      session_.stats().shared_tokens =
          std::max(session_.stats().shared_tokens, state.shared_tokens());
      if (limits) {
        const absl::Time pause = absl::Now();
        session_.meter().AfterStep(state.last_work(), session_.executor());
        start += absl::Now() - pause;
      }
    }
    session_.stats().generation_s = absl::ToDoubleSeconds(absl::Now() - start);
    return absl::OkStatus();
  }

  // Prints what is left, or all of the texts where there are several.
  absl::Status FinishTexts(const std::string& prompt) {
    std::map<std::string, int64_t> stopped_by;
    for (Sample& sample : samples_) {
      session_.stats().new_tokens += sample.writer->tokens();
      ++stopped_by[sample.writer->stopped_by()];
      const bool first = &sample == &samples_[0];
      if (!first) QUERN_RETURN_IF_ERROR(Print("---\n"));
      if (samples_.size() > 1) QUERN_RETURN_IF_ERROR(Print(prompt));
      QUERN_RETURN_IF_ERROR(sample.writer->Finish());
    }
    session_.stats().stopped_by = absl::StrJoin(
        stopped_by, "; ", [this](std::string* out, const auto& reason) {
          *out += reason.first;
          if (samples_.size() > 1)
            absl::StrAppend(out, " (", reason.second, ")");
        });
    return absl::OkStatus();
  }

  Session& session_;
  const GenerateOptions& options_;
  RankGroup& ranks_;
  std::vector<Sample> samples_;
  std::optional<TokenSampler> sampler_;  // the leader's
};

}  // namespace

absl::Status ContinueText(const std::string& prompt, Session& session) {
  return Continuation(session).Run(prompt);
}

}  // namespace quern
