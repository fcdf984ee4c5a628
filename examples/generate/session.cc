#include "examples/generate/session.h"

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "examples/generate/input.h"
#include "examples/generate/interrupt.h"
#include "examples/generate/operators.h"
#include "examples/generate/options.h"
#include "examples/generate/progress.h"
#include "examples/generate/rank_group.h"
#include "examples/generate/stats.h"
#include "quern/core/algorithms/checksum.h"
#include "quern/core/communicator.h"
#include "quern/core/status_macros.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/decoder/decoder.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/tokenizer/tokenizer.h"

namespace quern {
namespace {

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

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> Session::Create(
    const GenerateOptions& options, Communicator* communicator,
    const RankGroup& ranks) {
  std::unique_ptr<Session> s(new Session(options, ranks));
  const absl::Time start = absl::Now();
  absl::StatusOr<GgufFile> file = s->Open();
  QUERN_RETURN_IF_ERROR(s->ranks_.Agree(file.status()));
  QUERN_RETURN_IF_ERROR(s->CheckSameFile(*file));
  QUERN_RETURN_IF_ERROR(s->ranks_.Agree(s->Load(*file, communicator)));
  s->step_tokens_ = s->model_->step_tokens();
  s->ranks_.Share(s->step_tokens_);
  s->stats_.load_s = absl::ToDoubleSeconds(absl::Now() - start);
  return s;
}

absl::StatusOr<GgufFile> Session::Open() {
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

absl::Status Session::CheckSameFile(const GgufFile& file) {
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

absl::Status Session::Load(const GgufFile& file, Communicator* communicator) {
  Progress progress("loading the model", terminal());
  QUERN_ASSIGN_OR_RETURN(operators_, Operators::Create(options_.custom_ops));
  DecoderOptions decoder;
  decoder.weights = options_.weights;
  decoder.activations = options_.activations;
  decoder.packed_path = CallersPath(options_.packed);
  decoder.communicator = communicator;
  decoder.operators = &operators_->dispatcher();
  decoder.cancelled = &Interrupted;
  decoder.progress = [&](int64_t done, int64_t total) {
    progress.Show(done, total);
  };
  {
    const InterruptGuard guard;
    QUERN_ASSIGN_OR_RETURN(Decoder model,
                           Decoder::Create(file, decoder, *executor_));
    model_ = std::make_unique<Decoder>(std::move(model));
  }
  // What came until the guard ended, too.
  if (Interrupted()) return absl::CancelledError("interrupted");
  if (ranks_.leads() && tokenizer_->vocab_size() > model_->config().vocab) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model's tokenizer has ", tokenizer_->vocab_size(),
                     " tokens; its embedding has ", model_->config().vocab));
  }
  return absl::OkStatus();
}

absl::Status Session::NewState(DecoderStateSpec spec) {
  spec.cache_dtype = options_.kv;
  absl::StatusOr<DecoderState> state = DecoderState::Create(*model_, spec);
  QUERN_RETURN_IF_ERROR(ranks_.Agree(state.status()));
  state_ = std::make_unique<DecoderState>(*std::move(state));
  return absl::OkStatus();
}

std::vector<int32_t> Session::Encode(const std::string& text) const {
  return tokenizer_->EncodeText(text, options_.specials
                                          ? Tokenizer::Specials::kAsTokens
                                          : Tokenizer::Specials::kAsText);
}

void Session::TellWarnings() const {
  if (!ranks_.leads()) return;
  std::fputs(operators_->Warnings().c_str(), stderr);
}

absl::Status Session::TakeLimits() { return meter_.Take(*executor_); }

void Session::TellStats() {
  if (options_.limits) {
    stats_.limits = meter_.Result();
    stats_.generation_read_s = meter_.step_read_seconds();
  }
  stats_.operators = operators_->Summary();
  PrintStats(stats_, options_, *model_, *state_, *executor_, ranks_);
}

}  // namespace quern
