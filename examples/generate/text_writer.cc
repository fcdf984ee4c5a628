#include "examples/generate/text_writer.h"

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "examples/generate/options.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/models/tokenizer.h"
#include "quern/ops/sampling/sampler.h"

namespace quern {

absl::Status Print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() ||
      std::fflush(stdout) != 0) {
    return absl::UnavailableError("cannot write to standard output");
  }
  return absl::OkStatus();
}

absl::StatusOr<TextWriter> TextWriter::Create(const GenerateOptions& options,
                                              const Tokenizer& tokenizer,
                                              int64_t vocab,
                                              const Executor& executor) {
  SamplerSpec spec;
  spec.vocab = vocab;
  QUERN_ASSIGN_OR_RETURN(SamplerPlan plan, SamplerPlan::Create(spec));
  QUERN_ASSIGN_OR_RETURN(
      AlignedBuffer scratch,
      AlignedBuffer::Create(plan.WorkspaceBytes(executor.num_workers())));
  return TextWriter(tokenizer, std::move(plan), std::move(scratch), options);
}

TextWriter::TextWriter(const Tokenizer& tokenizer, SamplerPlan plan,
                       AlignedBuffer scratch, const GenerateOptions& options)
    : tokenizer_(tokenizer),
      plan_(std::move(plan)),
      scratch_(std::move(scratch)),
      decoder_(tokenizer, StreamDecoder::Start::kAfterText),
      max_tokens_(options.max_tokens) {
  params_.temperature = options.temperature;
  params_.top_k = options.top_k;
  params_.top_p = options.top_p;
  params_.seed = options.seed;
}

absl::StatusOr<int32_t> TextWriter::Next(MatrixView<const float> logits,
                                         int64_t length, int64_t context,
                                         Executor& executor, bool& goes_on) {
  params_.step = static_cast<uint64_t>(length);
  int32_t token = SamplerPlan::kNoToken;
  plan_.Execute(logits, absl::MakeConstSpan(&params_, 1),
                absl::MakeSpan(&token, 1), Workspace(scratch_), executor);
  if (token == SamplerPlan::kNoToken) {
    return absl::DataLossError(
        "the model gave no usable probabilities: its weights are damaged");
  }
  ++tokens_;
  if (tokenizer_.IsEnd(token)) {
    stopped_by_ = absl::StrCat("the model: end of text, ",
                               absl::CHexEscape(tokenizer_.piece(token)));
  } else {
    QUERN_RETURN_IF_ERROR(Print(decoder_.Add(token)));
    if (tokens_ == max_tokens_) {
      stopped_by_ = absl::StrCat("--max_tokens=", max_tokens_);
    } else if (length == context) {
      stopped_by_ =
          absl::StrCat("the end of the context, ", context, " tokens");
    }
  }
  goes_on = stopped_by_.empty();
  return token;
}

absl::Status TextWriter::Finish() { return Print(decoder_.Finish() + "\n"); }

}  // namespace quern
