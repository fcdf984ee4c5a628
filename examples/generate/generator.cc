#include "examples/generate/generator.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "examples/generate/input.h"
#include "examples/generate/operators.h"
#include "examples/generate/options.h"
#include "examples/generate/progress.h"
#include "examples/generate/rank_group.h"
#include "examples/generate/stats.h"
#include "examples/generate/text_writer.h"
#include "quern/core/checksum.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/hwy_executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/models/decoder.h"
#include "quern/models/decoder_config.h"
#include "quern/models/gguf.h"
#include "quern/models/likelihood.h"
#include "quern/models/tokenizer.h"
#include "quern/ops/sampling/sampler.h"

namespace quern {
namespace {

// The options that every rank takes from the leader.
struct CommonOptions {
  int64_t max_tokens;
  DecoderWeights weights;
  DType kv;
  bool perplexity, stats;
};

GenerateOptions WithLeadersWord(GenerateOptions options, RankGroup& ranks) {
  CommonOptions common{options.max_tokens, options.weights, options.kv,
                       options.perplexity, options.stats};
  ranks.Share(common);
  options.max_tokens = common.max_tokens;
  options.weights = common.weights;
  options.kv = common.kv;
  options.perplexity = common.perplexity;
  options.stats = common.stats;
  return options;
}

// A number that differs between files of different shapes: an FNV-1a hash of
// their sizes, tensors and of what the metadata says about heads and context.
absl::StatusOr<uint64_t> ShapeOf(const GgufFile& file) {
  QUERN_ASSIGN_OR_RETURN(const DecoderConfig c, DecoderConfig::Create(file));
  std::string shape = absl::StrCat(file.file_bytes(), " ", c.context, " ",
                                   c.q_heads, " ", c.kv_heads);
  for (const GgufTensor& tensor : file.tensors()) {
    absl::StrAppend(&shape, " ", tensor.name, ":",
                    static_cast<uint32_t>(tensor.type));
    for (const int64_t dim : tensor.dims) absl::StrAppend(&shape, ",", dim);
  }
  return Fnv1a(shape.data(), shape.size(), kFnv1aBasis);
}

// What the leader tells the others after each token.
struct Step {
  int32_t token = SamplerPlan::kNoToken;
  int32_t goes_on = 0;
};

class Generator {
 public:
  // Collective, as all public functions are: an error is every rank's.
  static absl::StatusOr<std::unique_ptr<Generator>> Create(
      const GenerateOptions& options, Communicator* communicator,
      const RankGroup& ranks) {
    auto g = std::unique_ptr<Generator>(new Generator(options, ranks));
    const absl::Time start = absl::Now();
    absl::StatusOr<GgufFile> file = g->Open();
    QUERN_RETURN_IF_ERROR(g->ranks_.Agree(file.status()));
    QUERN_RETURN_IF_ERROR(g->CheckSameFile(*file));
    QUERN_RETURN_IF_ERROR(g->ranks_.Agree(g->Load(*file, communicator)));
    g->stats_.load_s = absl::ToDoubleSeconds(absl::Now() - start);
    return g;
  }

  // Prints `prompt`, which is the leader's, and what follows it.
  absl::Status Run(const std::string& prompt) {
    std::vector<int32_t> ids;
    QUERN_RETURN_IF_ERROR(ranks_.Agree(
        ranks_.leads() ? EncodePrompt(prompt, ids) : absl::OkStatus()));
    ranks_.Share(ids);
    const auto size = static_cast<int64_t>(ids.size());
    QUERN_RETURN_IF_ERROR(ranks_.Agree(NewState(
        std::min(size, kPrefillTokens),
        std::min(model_->context(),
                 size + std::min(options_.max_tokens, model_->context())))));
    QUERN_ASSIGN_OR_RETURN(sequence_, state_->NewSequence());
    QUERN_RETURN_IF_ERROR(ranks_.Agree(StartText(prompt)));
    QUERN_ASSIGN_OR_RETURN(MatrixView<const float> logits, Prefill(ids));
    return Continue(logits);
  }

  // Prints the perplexity of `text`, which is the leader's, cut into windows of
  // the model's context, of 256 tokens at most. Each window starts without
  // memory of the one before.
  absl::Status Score(const std::string& text) {
    const int64_t window = std::min(model_->context(), kPrefillTokens);
    std::vector<int32_t> ids;
    QUERN_RETURN_IF_ERROR(ranks_.Agree(
        ranks_.leads() ? EncodeText(text, window, ids) : absl::OkStatus()));
    QUERN_RETURN_IF_ERROR(ranks_.Agree(NewState(window, window)));
    Progress progress("reading the text", Terminal());
    const absl::Time start = absl::Now();
    const auto size = static_cast<int64_t>(ids.size());
    double loss = 0;
    int64_t predicted = 0;
    for (int64_t done = 0;;) {
      progress.Show(done, size);
      std::vector<int32_t> tokens;
      if (ranks_.leads()) tokens = NextWindow(ids, window, done);
      ranks_.Share(tokens);
      if (tokens.size() < 2) break;
      QUERN_ASSIGN_OR_RETURN(sequence_, state_->NewSequence());
      const DecoderBatchItem item{sequence_, tokens};
      QUERN_ASSIGN_OR_RETURN(
          const auto logits,
          state_->Forward({item}, LogitsOf::kAllTokens, *executor_));
      predicted += static_cast<int64_t>(tokens.size()) - 1;
      if (ranks_.leads()) {
        loss += NegativeLogLikelihood(logits,
                                      absl::MakeConstSpan(tokens).subspan(1));
      }
      QUERN_RETURN_IF_ERROR(state_->EndSequence(sequence_));
    }
    stats_.prompt_s = absl::ToDoubleSeconds(absl::Now() - start);
    stats_.prompt_tokens = size;
    return ranks_.Agree(
        !ranks_.leads()
            ? absl::OkStatus()
            : Print(absl::StrFormat(
                  "perplexity: %.4f over %d tokens, in windows of %d at most\n",
                  std::exp(loss / static_cast<double>(predicted)), predicted,
                  window)));
  }

  void TellStats() {
    PrintStats(stats_, options_, *model_, *state_, *executor_, ranks_);
  }

 private:
  static constexpr int64_t kPrefillTokens = 256;

  Generator(const GenerateOptions& options, const RankGroup& ranks)
      : options_(options), ranks_(ranks) {}

  // Where progress is shown; null on ranks that show none.
  FILE* Terminal() const { return ranks_.leads() ? stderr : nullptr; }

  // Everything that this rank needs besides the model itself.
  absl::StatusOr<GgufFile> Open() {
    QUERN_ASSIGN_OR_RETURN(const std::string path, ModelPath(options_.model));
    QUERN_ASSIGN_OR_RETURN(GgufFile file, GgufFile::Open(path));
    if (ranks_.leads()) {
      QUERN_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Create(file));
      tokenizer_ = std::make_unique<Tokenizer>(std::move(tokenizer));
    }
    if (options_.threads == 0) {
      executor_ = HwyExecutor::CreateForThisMachine();
    } else {
      QUERN_ASSIGN_OR_RETURN(executor_, HwyExecutor::Create(options_.threads));
    }
    return file;
  }

  // Ranks with models of different shapes would wait for each other for ever.
  absl::Status CheckSameFile(const GgufFile& file) {
    if (ranks_.size() == 1) return absl::OkStatus();
    const absl::StatusOr<uint64_t> own = ShapeOf(file);
    QUERN_RETURN_IF_ERROR(ranks_.Agree(own.status()));
    uint64_t leaders = *own;
    ranks_.Share(leaders);
    return ranks_.Agree(
        *own == leaders
            ? absl::OkStatus()
            : absl::FailedPreconditionError(absl::StrCat(
                  "its model file has another size, context, heads or tensors "
                  "than the one of rank ",
                  ranks_.leader())));
  }

  absl::Status Load(const GgufFile& file, Communicator* communicator) {
    Progress progress("loading the model", Terminal());
    QUERN_ASSIGN_OR_RETURN(const auto operators,
                           Operators::Create(options_.custom_ops));
    DecoderOptions decoder;
    decoder.weights = options_.weights;
    decoder.packed_path = options_.packed;
    decoder.communicator = communicator;
    decoder.operators = &operators->dispatcher();
    decoder.progress = [&](int64_t done, int64_t total) {
      progress.Show(done, total);
    };
    QUERN_ASSIGN_OR_RETURN(Decoder model,
                           Decoder::Create(file, decoder, *executor_));
    model_ = std::make_unique<Decoder>(std::move(model));
    stats_.operators = operators->Summary();
    if (ranks_.leads() && tokenizer_->vocab_size() > model_->config().vocab) {
      return absl::InvalidArgumentError(
          absl::StrCat("the model's tokenizer has ", tokenizer_->vocab_size(),
                       " tokens; its embedding has ", model_->config().vocab));
    }
    return absl::OkStatus();
  }

  absl::Status NewState(int64_t max_step_tokens, int64_t cache_tokens) {
    DecoderStateSpec spec;
    spec.max_step_tokens = max_step_tokens;
    spec.cache_tokens = cache_tokens;
    spec.cache_dtype = options_.kv;
    QUERN_ASSIGN_OR_RETURN(DecoderState state,
                           DecoderState::Create(*model_, spec));
    state_ = std::make_unique<DecoderState>(std::move(state));
    return absl::OkStatus();
  }

  std::vector<int32_t> Encode(const std::string& text) const {
    return tokenizer_->Encode(text, options_.specials
                                        ? Tokenizer::Specials::kAsTokens
                                        : Tokenizer::Specials::kAsText);
  }

  absl::Status EncodePrompt(const std::string& prompt,
                            std::vector<int32_t>& ids) const {
    ids = Encode(prompt);
    if (tokenizer_->add_bos()) ids.insert(ids.begin(), tokenizer_->bos_id());
    if (ids.empty()) {
      return absl::InvalidArgumentError(
          "the prompt is empty, and this model starts a text with no token");
    }
    const auto size = static_cast<int64_t>(ids.size());
    if (size > model_->context()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the prompt has ", size, " tokens; this model's context holds ",
          model_->context()));
    }
    return absl::OkStatus();
  }

  absl::Status EncodeText(const std::string& text, int64_t window,
                          std::vector<int32_t>& ids) const {
    ids = Encode(text);
    const size_t bos = tokenizer_->add_bos() ? 1 : 0;
    if (ids.size() + bos >= 2 && window >= 2) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "the text has ", ids.size(), ids.size() == 1 ? " token" : " tokens",
        "; --perplexity needs one that follows another"));
  }

  // The tokens of the window that begins at ids[done]; `done` becomes where the
  // next one begins. Less than two tokens end the text.
  std::vector<int32_t> NextWindow(const std::vector<int32_t>& ids,
                                  int64_t window, int64_t& done) const {
    const int64_t bos = tokenizer_->add_bos() ? 1 : 0;
    const auto size = static_cast<int64_t>(ids.size());
    const int64_t end = std::min(done + window - bos, size);
    if (done == end) return {};
    std::vector<int32_t> tokens(static_cast<size_t>(bos), tokenizer_->bos_id());
    tokens.insert(tokens.end(), ids.begin() + done, ids.begin() + end);
    done = end;
    return tokens;
  }

  absl::StatusOr<MatrixView<const float>> Prefill(
      const std::vector<int32_t>& ids) {
    Progress progress("reading the prompt", Terminal());
    const absl::Time start = absl::Now();
    const auto size = static_cast<int64_t>(ids.size());
    MatrixView<const float> logits;
    for (int64_t done = 0; done < size; done += kPrefillTokens) {
      progress.Show(done, size);
      const DecoderBatchItem item{
          sequence_, absl::MakeConstSpan(ids).subspan(static_cast<size_t>(done),
                                                      kPrefillTokens)};
      QUERN_ASSIGN_OR_RETURN(
          logits, state_->Forward({item}, LogitsOf::kLastTokens, *executor_));
    }
    stats_.prompt_s = absl::ToDoubleSeconds(absl::Now() - start);
    stats_.prompt_tokens = size;
    return logits;
  }

  // The leader prints the prompt and prepares for what follows it.
  absl::Status StartText(const std::string& prompt) {
    if (!ranks_.leads()) return absl::OkStatus();
    QUERN_ASSIGN_OR_RETURN(
        TextWriter writer,
        TextWriter::Create(options_, *tokenizer_, model_->config().vocab,
                           *executor_));
    writer_.emplace(std::move(writer));
    return Print(prompt);
  }

  // The leader samples and prints; `step` ends the text where this fails.
  absl::Status Choose(MatrixView<const float> logits, Step& step) {
    bool goes_on = false;
    QUERN_ASSIGN_OR_RETURN(
        step.token, writer_->Next(logits, state_->length(sequence_),
                                  model_->context(), *executor_, goes_on));
    step.goes_on = goes_on ? 1 : 0;
    return absl::OkStatus();
  }

  // Adds tokens until something ends the text.
  absl::Status Continue(MatrixView<const float> logits) {
    const absl::Time start = absl::Now();
    absl::Status printed;
    for (;;) {
      Step step;
      if (ranks_.leads()) printed = Choose(logits, step);
      ranks_.Share(step);
      if (step.goes_on == 0) break;
      const DecoderBatchItem item{sequence_,
                                  absl::MakeConstSpan(&step.token, 1)};
      QUERN_ASSIGN_OR_RETURN(
          logits, state_->Forward({item}, LogitsOf::kLastTokens, *executor_));
    }
    stats_.generation_s = absl::ToDoubleSeconds(absl::Now() - start);
    if (ranks_.leads()) {
      stats_.new_tokens = writer_->tokens();
      stats_.stopped_by = writer_->stopped_by();
      if (printed.ok()) printed = writer_->Finish();
    }
    return ranks_.Agree(printed);
  }

  const GenerateOptions options_;
  RankGroup ranks_;
  std::unique_ptr<HwyExecutor> executor_;
  std::unique_ptr<Tokenizer> tokenizer_;  // the leader's
  std::unique_ptr<Decoder> model_;
  std::unique_ptr<DecoderState> state_;
  std::optional<TextWriter> writer_;  // the leader's
  int32_t sequence_ = -1;
  Stats stats_;
};

}  // namespace

absl::Status Generate(const GenerateOptions& own, Communicator* communicator,
                      int leader) {
  RankGroup ranks(communicator, leader);
  const GenerateOptions options = WithLeadersWord(own, ranks);
  absl::StatusOr<std::string> prompt = options.prompt.value_or("");
  if (ranks.leads() && !options.prompt.has_value()) prompt = ReadPrompt();
  QUERN_RETURN_IF_ERROR(ranks.Agree(prompt.status()));
  QUERN_ASSIGN_OR_RETURN(const std::unique_ptr<Generator> generator,
                         Generator::Create(options, communicator, ranks));
  QUERN_RETURN_IF_ERROR(options.perplexity ? generator->Score(*prompt)
                                           : generator->Run(*prompt));
  if (options.stats) generator->TellStats();
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
  if (ranks.leads()) {
    std::fprintf(stderr, "%s: %s\n", program,
                 std::string(status.message()).c_str());
  }
  return code;
}

}  // namespace quern
