#include "examples/generate/text_writer.h"

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "examples/generate/options.h"
#include "quern/core/status_macros.h"
#include "quern/models/tokenizer/tokenizer.h"

namespace quern {

absl::Status Print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() ||
      std::fflush(stdout) != 0) {
    return absl::UnavailableError("cannot write to standard output");
  }
  return absl::OkStatus();
}

TextWriter::TextWriter(const GenerateOptions& options, Mode mode,
                       const Tokenizer& tokenizer)
    : tokenizer_(tokenizer),
      mode_(mode),
      decoder_(tokenizer, StreamDecoder::Start::kAfterText),
      max_tokens_(options.max_tokens) {}

absl::Status TextWriter::Add(int32_t token, int64_t length, int64_t context,
                             bool& goes_on) {
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
  return absl::OkStatus();
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
