// Continues a text with a Llama-architecture model: the library from weights
// on disk to generated text. --help says how to call it.

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "examples/generate/options.h"
#include "examples/generate/progress.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/hwy_executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/models/gguf.h"
#include "quern/models/likelihood.h"
#include "quern/models/llama.h"
#include "quern/models/llama_config.h"
#include "quern/models/tokenizer.h"
#include "quern/ops/sampling/sampler.h"

namespace quern {
namespace {

constexpr char kShippedModel[] = "models/quern_kjv_4m/quern-kjv-4m.bf16.gguf";

bool Readable(const std::string& path) {
  return access(path.c_str(), R_OK) == 0;
}

// Bazel puts the model among the program's runfiles: `bazel run` starts there;
// otherwise they lie beside the binary.
absl::StatusOr<std::string> FindShippedModel() {
  std::vector<std::string> roots = {""};
  for (const char* variable : {"RUNFILES_DIR", "TEST_SRCDIR"}) {
    if (const char* value = std::getenv(variable); value != nullptr) {
      roots.push_back(absl::StrCat(value, "/quern/"));
      roots.push_back(absl::StrCat(value, "/_main/"));
    }
  }
  std::string self(4096, '\0');
  const ssize_t size = readlink("/proc/self/exe", &self[0], self.size());
  if (size > 0) {
    self.resize(static_cast<size_t>(size));
    for (const char* root : {".runfiles/quern/", ".runfiles/_main/",
                             ".runfiles/quern~/", ".runfiles/quern+/"}) {
      roots.push_back(self + root);
    }
  }
  for (const std::string& root : roots) {
    if (Readable(root + kShippedModel)) return root + kShippedModel;
  }
  return absl::NotFoundError(
      absl::StrCat("cannot find the model that comes with this program (",
                   kShippedModel, "); name one with --model=FILE.gguf"));
}

// `bazel run` changes the directory; paths are meant from where it was called.
std::string FromCaller(const std::string& path) {
  const char* directory = std::getenv("BUILD_WORKING_DIRECTORY");
  if (directory == nullptr || path.empty() || path[0] == '/') return path;
  return absl::StrCat(directory, "/", path);
}

// All of standard input without the newline at its end.
absl::StatusOr<std::string> ReadPrompt() {
  if (isatty(STDIN_FILENO) != 0) {
    std::fprintf(stderr, "Type the text to continue; end it with Ctrl-D.\n");
  }
  constexpr size_t kMaxBytes = 16 << 20;
  std::string text;
  char piece[4096];
  size_t got;
  while ((got = std::fread(piece, 1, sizeof(piece), stdin)) > 0) {
    text.append(piece, got);
    if (text.size() > kMaxBytes) {
      return absl::InvalidArgumentError(
          "standard input is longer than 16 MiB: too long for a prompt");
    }
  }
  if (std::ferror(stdin) != 0) {
    return absl::UnavailableError("cannot read the prompt from standard input");
  }
  if (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

absl::Status Print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() ||
      std::fflush(stdout) != 0) {
    return absl::UnavailableError("cannot write to standard output");
  }
  return absl::OkStatus();
}

struct Stats {
  double load_s = 0, prompt_s = 0, generation_s = 0;
  int64_t prompt_tokens = 0;
  int64_t new_tokens = 0;
  std::string stopped_by;
};

class Generator {
 public:
  static absl::StatusOr<std::unique_ptr<Generator>> Create(
      const GenerateOptions& options) {
    auto g = std::unique_ptr<Generator>(new Generator(options));
    const absl::Time start = absl::Now();
    std::string path = FromCaller(options.model);
    if (path.empty()) {
      QUERN_ASSIGN_OR_RETURN(path, FindShippedModel());
    }
    QUERN_ASSIGN_OR_RETURN(const GgufFile file, GgufFile::Open(path));
    QUERN_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Create(file));
    g->tokenizer_ = std::make_unique<Tokenizer>(std::move(tokenizer));
    if (options.threads == 0) {
      g->executor_ = HwyExecutor::CreateForThisMachine();
    } else {
      QUERN_ASSIGN_OR_RETURN(g->executor_,
                             HwyExecutor::Create(options.threads));
    }
    Progress progress("loading the model");
    LlamaOptions llama;
    llama.weights = options.weights;
    llama.packed_path = options.packed;
    llama.progress = [&](int64_t done, int64_t total) {
      progress.Show(done, total);
    };
    QUERN_ASSIGN_OR_RETURN(LlamaModel model,
                           LlamaModel::Create(file, llama, *g->executor_));
    g->model_ = std::make_unique<LlamaModel>(std::move(model));
    if (g->tokenizer_->vocab_size() > g->model_->config().vocab) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the model's tokenizer has ", g->tokenizer_->vocab_size(),
          " tokens; its embedding has ", g->model_->config().vocab));
    }
    g->stats_.load_s = absl::ToDoubleSeconds(absl::Now() - start);
    return g;
  }

  // Prints `prompt` and what follows it.
  absl::Status Run(const std::string& prompt) {
    std::vector<int32_t> ids = Encode(prompt);
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
    QUERN_RETURN_IF_ERROR(NewState(
        std::min(size, kPrefillTokens),
        std::min(model_->context(),
                 size + std::min(options_.max_tokens, model_->context()))));
    QUERN_ASSIGN_OR_RETURN(sequence_, state_->NewSequence());
    QUERN_RETURN_IF_ERROR(Print(prompt));
    QUERN_ASSIGN_OR_RETURN(MatrixView<const float> logits, Prefill(ids));
    QUERN_RETURN_IF_ERROR(Continue(logits));
    return Print("\n");
  }

  // Prints the perplexity of `text`, cut into windows of the model's context,
  // of 256 tokens at most; each starts without memory of the one before.
  absl::Status Score(const std::string& text) {
    const std::vector<int32_t> ids = Encode(text);
    const int64_t bos = tokenizer_->add_bos() ? 1 : 0;
    const int64_t window = std::min(model_->context(), kPrefillTokens);
    const auto size = static_cast<int64_t>(ids.size());
    if (size + bos < 2 || window < 2) {
      return absl::InvalidArgumentError(
          absl::StrCat("the text has ", size, size == 1 ? " token" : " tokens",
                       "; --perplexity needs one that follows another"));
    }
    QUERN_RETURN_IF_ERROR(NewState(window, window));
    Progress progress("reading the text");
    const absl::Time start = absl::Now();
    double loss = 0;
    int64_t predicted = 0;
    std::vector<int32_t> tokens;
    for (int64_t done = 0; done < size; done += window - bos) {
      progress.Show(done, size);
      const int64_t end = std::min(done + window - bos, size);
      tokens.assign(static_cast<size_t>(bos), tokenizer_->bos_id());
      tokens.insert(tokens.end(), ids.begin() + done, ids.begin() + end);
      if (tokens.size() < 2) break;
      QUERN_ASSIGN_OR_RETURN(sequence_, state_->NewSequence());
      const LlamaBatchItem item{sequence_, tokens};
      QUERN_ASSIGN_OR_RETURN(
          const auto logits,
          state_->Forward({item}, LogitsOf::kAllTokens, *executor_));
      loss +=
          NegativeLogLikelihood(logits, absl::MakeConstSpan(tokens).subspan(1));
      predicted += static_cast<int64_t>(tokens.size()) - 1;
      QUERN_RETURN_IF_ERROR(state_->EndSequence(sequence_));
    }
    stats_.prompt_s = absl::ToDoubleSeconds(absl::Now() - start);
    stats_.prompt_tokens = size;
    return Print(absl::StrFormat(
        "perplexity: %.4f over %d tokens, in windows of %d at most\n",
        std::exp(loss / static_cast<double>(predicted)), predicted, window));
  }

  void PrintStats() const {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const auto mib = [](int64_t bytes) {
      return static_cast<double>(bytes) / (1 << 20);
    };
    const LlamaConfig& c = model_->config();
    std::fprintf(stderr, "model: %s, %lld layers, width %lld, %s weights\n",
                 c.name.empty() ? "without a name" : c.name.c_str(),
                 static_cast<long long>(c.layers),
                 static_cast<long long>(c.hidden), model_->weights().c_str());
    std::fprintf(stderr, "loading: %.2f s\n", stats_.load_s);
    PrintSpeed(options_.perplexity ? "text" : "prompt", stats_.prompt_tokens,
               stats_.prompt_s);
    if (!options_.perplexity) {
      // The first new token comes from the prompt's logits.
      PrintSpeed("generation", stats_.new_tokens, stats_.generation_s);
      std::fprintf(stderr, "stopped by: %s\n", stats_.stopped_by.c_str());
    }
    std::fprintf(
        stderr,
        "memory: %.1f MiB weights, %.2f MiB %s cache (%lld bytes a token), "
        "%.1f MiB scratch, %.1f MiB peak of the process\n",
        mib(model_->weight_bytes()), mib(state_->cache_bytes()),
        std::string(DTypeName(options_.kv)).c_str(),
        static_cast<long long>(state_->cache_bytes_per_token()),
        mib(state_->scratch_bytes()),
        static_cast<double>(usage.ru_maxrss) / 1024);
    std::fprintf(stderr, "threads: %d\nkernels: %s; attention: %s\n",
                 executor_->num_workers(), model_->Explain().c_str(),
                 state_->attention_arithmetic());
  }

 private:
  std::vector<int32_t> Encode(const std::string& text) const {
    return tokenizer_->Encode(text, options_.specials
                                        ? Tokenizer::Specials::kAsTokens
                                        : Tokenizer::Specials::kAsText);
  }

  static constexpr int64_t kPrefillTokens = 256;

  explicit Generator(const GenerateOptions& options) : options_(options) {}

  absl::Status NewState(int64_t max_step_tokens, int64_t cache_tokens) {
    LlamaStateSpec spec;
    spec.max_step_tokens = max_step_tokens;
    spec.cache_tokens = cache_tokens;
    spec.cache_dtype = options_.kv;
    QUERN_ASSIGN_OR_RETURN(LlamaState state, LlamaState::Create(*model_, spec));
    state_ = std::make_unique<LlamaState>(std::move(state));
    return absl::OkStatus();
  }

  static void PrintSpeed(const char* what, int64_t tokens, double seconds) {
    std::fprintf(stderr, "%s: %lld tokens, %.4f s, %.0f tokens/s\n", what,
                 static_cast<long long>(tokens), seconds,
                 seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0);
  }

  absl::StatusOr<MatrixView<const float>> Prefill(
      const std::vector<int32_t>& ids) {
    Progress progress("reading the prompt");
    const absl::Time start = absl::Now();
    const auto size = static_cast<int64_t>(ids.size());
    MatrixView<const float> logits;
    for (int64_t done = 0; done < size; done += kPrefillTokens) {
      progress.Show(done, size);
      const LlamaBatchItem item{
          sequence_, absl::MakeConstSpan(ids).subspan(static_cast<size_t>(done),
                                                      kPrefillTokens)};
      QUERN_ASSIGN_OR_RETURN(
          logits, state_->Forward({item}, LogitsOf::kLastTokens, *executor_));
    }
    stats_.prompt_s = absl::ToDoubleSeconds(absl::Now() - start);
    stats_.prompt_tokens = size;
    return logits;
  }

  // Samples until something ends the text.
  absl::Status Continue(MatrixView<const float> logits) {
    SamplerSpec spec;
    spec.vocab = logits.extent(1);
    QUERN_ASSIGN_OR_RETURN(const SamplerPlan sampler,
                           SamplerPlan::Create(spec));
    QUERN_ASSIGN_OR_RETURN(AlignedBuffer scratch,
                           AlignedBuffer::Create(sampler.workspace_bytes(
                               executor_->num_workers())));
    SamplingParams params;
    params.temperature = options_.temperature;
    params.top_k = options_.top_k;
    params.top_p = options_.top_p;
    params.seed = options_.seed;
    StreamDecoder decoder(*tokenizer_, StreamDecoder::Start::kAfterText);
    const absl::Time start = absl::Now();
    for (;;) {
      params.step = static_cast<uint64_t>(state_->length(sequence_));
      int32_t token = SamplerPlan::kNoToken;
      sampler.Execute(logits, absl::MakeConstSpan(&params, 1),
                      absl::MakeSpan(&token, 1), Workspace(scratch),
                      *executor_);
      if (token == SamplerPlan::kNoToken) {
        return absl::DataLossError(
            "the model gave no usable probabilities: its weights are damaged");
      }
      ++stats_.new_tokens;
      if (tokenizer_->IsEnd(token)) {
        stats_.stopped_by =
            absl::StrCat("the model: end of text, ",
                         absl::CHexEscape(tokenizer_->piece(token)));
        break;
      }
      QUERN_RETURN_IF_ERROR(Print(decoder.Add(token)));
      if (stats_.new_tokens == options_.max_tokens) {
        stats_.stopped_by = absl::StrCat("--max_tokens=", options_.max_tokens);
        break;
      }
      if (state_->length(sequence_) == model_->context()) {
        stats_.stopped_by = absl::StrCat("the end of the context, ",
                                         model_->context(), " tokens");
        break;
      }
      const LlamaBatchItem item{sequence_, absl::MakeConstSpan(&token, 1)};
      QUERN_ASSIGN_OR_RETURN(
          logits, state_->Forward({item}, LogitsOf::kLastTokens, *executor_));
    }
    stats_.generation_s = absl::ToDoubleSeconds(absl::Now() - start);
    return Print(decoder.Finish());
  }

  const GenerateOptions options_;
  std::unique_ptr<HwyExecutor> executor_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<LlamaModel> model_;
  std::unique_ptr<LlamaState> state_;
  int32_t sequence_ = -1;
  Stats stats_;
};

absl::Status Generate(const GenerateOptions& options) {
  std::string prompt;
  if (options.prompt.has_value()) {
    prompt = *options.prompt;
  } else {
    QUERN_ASSIGN_OR_RETURN(prompt, ReadPrompt());
  }
  QUERN_ASSIGN_OR_RETURN(const std::unique_ptr<Generator> generator,
                         Generator::Create(options));
  QUERN_RETURN_IF_ERROR(options.perplexity ? generator->Score(prompt)
                                           : generator->Run(prompt));
  if (options.stats) generator->PrintStats();
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const absl::StatusOr<GenerateOptions> options = ParseOptions(argc, argv);
  if (!options.ok()) {
    std::fprintf(stderr, "generate: %s\n",
                 std::string(options.status().message()).c_str());
    return 2;
  }
  const absl::Status status =
      options->help ? Print(HelpText()) : Generate(*options);
  if (!status.ok()) {
    std::fprintf(stderr, "generate: %s\n",
                 std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) { return quern::Main(argc, argv); }
