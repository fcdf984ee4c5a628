#ifndef QUERN_EXAMPLES_GENERATE_TEXT_WRITER_H_
#define QUERN_EXAMPLES_GENERATE_TEXT_WRITER_H_

// From tokens to text on standard output, at once or in the end.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "examples/generate/options.h"
#include "quern/models/tokenizer/tokenizer.h"

namespace quern {

// Writes `text` to standard output without delay. Unavailable if that fails.
absl::Status Print(const std::string& text);

class TextWriter {
 public:
  enum class Mode : uint8_t {
    kPrint,  // each token's text at once
    kKeep,   // all of it in Finish
  };

  // `tokenizer` must outlive the result.
  TextWriter(const GenerateOptions& options, Mode mode,
             const Tokenizer& tokenizer);

  // Writes the text that `token` completes, which follows `length` tokens of a
  // context of so many. `goes_on` becomes false where the token ends the text.
  absl::Status Add(int32_t token, int64_t length, int64_t context,
                   bool& goes_on);

  // Prints the rest of the text, and ends its line.
  absl::Status Finish();

  int64_t tokens() const { return tokens_; }
  // What ended the text, for --stats.
  const std::string& stopped_by() const { return stopped_by_; }

 private:
  absl::Status Write(const std::string& text);

  const Tokenizer& tokenizer_;
  Mode mode_;
  StreamDecoder decoder_;
  int64_t max_tokens_;
  int64_t tokens_ = 0;
  std::string stopped_by_;
  std::string kept_;
};

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_TEXT_WRITER_H_
