#include "examples/generate/perplexity.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "examples/generate/progress.h"
#include "examples/generate/rank_group.h"
#include "examples/generate/session.h"
#include "examples/generate/text_writer.h"
#include "quern/core/status_macros.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/likelihood.h"
#include "quern/models/tokenizer/tokenizer.h"

namespace quern {
namespace {

// Perplexity depends on the length of a window, so every machine has this one.
constexpr int64_t kWindowTokens = 256;

absl::Status Encode(const std::string& text, int64_t window, Session& session,
                    std::vector<int32_t>& ids) {
  ids = session.Encode(text);
  // Each window begins with bos, and NextWindow puts it there.
  const size_t bos = session.tokenizer().add_bos() ? 1 : 0;
  ids.erase(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(bos));
  if (ids.size() + bos >= 2 && window >= 2) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the text has ", ids.size(), ids.size() == 1 ? " token" : " tokens",
      "; --perplexity needs one that follows another"));
}

// The tokens of the window that begins at ids[done]; `done` becomes where the
// next one begins. Less than two tokens end the text.
std::vector<int32_t> NextWindow(const std::vector<int32_t>& ids, int64_t window,
                                const Tokenizer& tokenizer, int64_t& done) {
  const int64_t bos = tokenizer.add_bos() ? 1 : 0;
  const auto size = static_cast<int64_t>(ids.size());
  const int64_t end = std::min(done + window - bos, size);
  if (done == end) return {};
  std::vector<int32_t> tokens(static_cast<size_t>(bos), tokenizer.bos_id());
  tokens.insert(tokens.end(), ids.begin() + done, ids.begin() + end);
  done = end;
  return tokens;
}

// `loss` is the sum of `predicted` negative log-likelihoods.
absl::Status PrintPerplexity(double loss, int64_t predicted, int64_t window) {
  const double perplexity = std::exp(loss / static_cast<double>(predicted));
  if (!std::isfinite(perplexity)) {
    return absl::DataLossError(absl::StrCat(
        "the perplexity is ", perplexity,
        ": the model gave no usable probabilities; its weights are damaged"));
  }
  return Print(absl::StrFormat(
      "perplexity: %.4f over %d tokens, in windows of %d at most\n", perplexity,
      predicted, window));
}

}  // namespace

absl::Status TellPerplexity(const std::string& text, Session& session) {
  RankGroup& ranks = session.ranks();
  const int64_t window = std::min(session.model().context(), kWindowTokens);
  std::vector<int32_t> ids;
  QUERN_RETURN_IF_ERROR(ranks.Agree(
      ranks.leads() ? Encode(text, window, session, ids) : absl::OkStatus()));
  DecoderStateSpec spec;
  spec.max_step_tokens = spec.cache_tokens = window;
  QUERN_RETURN_IF_ERROR(session.NewState(spec));
  DecoderState& state = session.state();
  Progress progress("reading the text", session.terminal());
  const absl::Time start = absl::Now();
  const auto size = static_cast<int64_t>(ids.size());
  double loss = 0;
  int64_t predicted = 0;
  for (int64_t done = 0;;) {
    progress.Show(done, size);
    std::vector<int32_t> tokens;
    if (ranks.leads()) {
      tokens = NextWindow(ids, window, session.tokenizer(), done);
    }
    ranks.Share(tokens);
    if (tokens.size() < 2) break;
    QUERN_ASSIGN_OR_RETURN(const int32_t sequence, state.NewSequence());
    const DecoderBatchItem item{sequence, tokens};
    QUERN_ASSIGN_OR_RETURN(
        const auto logits,
        state.Forward({item}, LogitsOf::kAllTokens, session.executor()));
    session.stats().prompt_work += state.last_work();
    predicted += static_cast<int64_t>(tokens.size()) - 1;
    if (ranks.leads()) {
      loss +=
          NegativeLogLikelihood(logits, absl::MakeConstSpan(tokens).subspan(1));
    }
    QUERN_RETURN_IF_ERROR(state.EndSequence(sequence));
  }
  session.stats().prompt_s = absl::ToDoubleSeconds(absl::Now() - start);
  session.stats().prompt_tokens = size;
  return ranks.Agree(ranks.leads() ? PrintPerplexity(loss, predicted, window)
                                   : absl::OkStatus());
}

}  // namespace quern
