#include "examples/generate/text_writer.h"

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "examples/generate/options.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/models/tokenizer.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/sampling_ops.h"
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
                                              uint64_t seed, Mode mode,
                                              const Tokenizer& tokenizer,
                                              int64_t vocab,
                                              const OpDispatcher& ops,
                                              const Executor& executor) {
  TextWriter writer(tokenizer, options, seed, mode);
  QUERN_ASSIGN_OR_RETURN(
      MadeOp sample,
      ops.Make("sample", {{"logits", TensorMeta{DType::kF32, {1, vocab}}},
                          {"step", &writer.sampling_->step}}));
  writer.sample_ = std::move(sample.op);
  QUERN_ASSIGN_OR_RETURN(const int64_t bytes, writer.sample_->WorkspaceBytes(
                                                  1, executor.num_workers()));
  QUERN_ASSIGN_OR_RETURN(writer.scratch_, AlignedBuffer::Create(bytes));
  return writer;
}

TextWriter::TextWriter(const Tokenizer& tokenizer,
                       const GenerateOptions& options, uint64_t seed, Mode mode)
    : tokenizer_(tokenizer),
      mode_(mode),
      sampling_(std::make_unique<Sampling>()),
      decoder_(tokenizer, StreamDecoder::Start::kAfterText),
      max_tokens_(options.max_tokens) {
  SamplingParams& params = sampling_->params;
  params.temperature = options.temperature;
  params.top_k = options.top_k;
  params.top_p = options.top_p;
  params.seed = seed;
  sampling_->step.params = absl::MakeConstSpan(&params, 1);
}

absl::StatusOr<int32_t> TextWriter::Next(MatrixView<const float> logits,
                                         int64_t length, int64_t context,
                                         Executor& executor, bool& goes_on) {
  sampling_->params.step = static_cast<uint64_t>(length);
  int32_t token = SamplerPlan::kNoToken;
  const AnyTensorView tensors[] = {logits, DenseVector(&token, 1)};
  sample_->Execute(tensors, Workspace(scratch_), executor);
  if (token == SamplerPlan::kNoToken) {
    return absl::DataLossError(
        "the model gave no usable probabilities: its weights are damaged");
  }
  ++tokens_;
  if (tokenizer_.IsEnd(token)) {
    stopped_by_ = absl::StrCat("the model: end of text, ",
                               absl::CHexEscape(tokenizer_.piece(token)));
  } else {
    QUERN_RETURN_IF_ERROR(Write(decoder_.Add(token)));
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

absl::Status TextWriter::Write(const std::string& text) {
  if (mode_ == Mode::kPrint) return Print(text);
  kept_ += text;
  return absl::OkStatus();
}

absl::Status TextWriter::Finish() {
  return Print(kept_ + decoder_.Finish() + "\n");
}

}  // namespace quern
