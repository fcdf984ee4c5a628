#ifndef QUERN_EXAMPLES_GENERATE_TEXT_WRITER_H_
#define QUERN_EXAMPLES_GENERATE_TEXT_WRITER_H_

// From logits to text on standard output, at once or in the end.

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/generate/options.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/models/tokenizer.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/sampling_ops.h"
#include "quern/ops/sampling/sampler.h"

namespace quern {

// Writes `text` to standard output without delay. Unavailable if that fails.
absl::Status Print(const std::string& text);

class TextWriter {
 public:
  enum class Mode : uint8_t {
    kPrint,  // each token's text at once
    kKeep,   // all of it in Finish
  };

  // Samples among `vocab` logits as the options say, but for the seed, by the
  // operator `sample` of `ops` and with the executor's number of workers.
  // `tokenizer` must outlive the result.
  static absl::StatusOr<TextWriter> Create(const GenerateOptions& options,
                                           uint64_t seed, Mode mode,
                                           const Tokenizer& tokenizer,
                                           int64_t vocab,
                                           const OpDispatcher& ops,
                                           const Executor& executor);

  // Samples the token that follows `length` tokens, with the text that it
  // completes. `goes_on` becomes false where the token ends the text.
  absl::StatusOr<int32_t> Next(MatrixView<const float> logits, int64_t length,
                               int64_t context, Executor& executor,
                               bool& goes_on);

  // Prints the rest of the text, and ends its line.
  absl::Status Finish();

  int64_t tokens() const { return tokens_; }
  // What ended the text, for --stats.
  const std::string& stopped_by() const { return stopped_by_; }

 private:
  // What `sample` reads of each step, where it was told to look for it.
  struct Sampling {
    SamplingParams params;
    SamplingStep step;
  };

  TextWriter(const Tokenizer& tokenizer, const GenerateOptions& options,
             uint64_t seed, Mode mode);
  absl::Status Write(const std::string& text);

  const Tokenizer& tokenizer_;
  Mode mode_;
  std::unique_ptr<Sampling> sampling_;
  std::unique_ptr<const BoundOp> sample_;
  AlignedBuffer scratch_;
  StreamDecoder decoder_;
  int64_t max_tokens_;
  int64_t tokens_ = 0;
  std::string stopped_by_;
  std::string kept_;
};

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_TEXT_WRITER_H_
