#include "quern/models/tokenizer/tokenizer.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/c/library.h"
#include "quern/c/model/gguf_source.h"
#include "quern/c/object.h"
#include "quern/c/quern_model.h"
#include "quern/core/status_macros.h"
#include "quern/models/gguf/gguf.h"

namespace quern {
namespace c_abi {
namespace {

constexpr char kCreate[] = "quern_tokenizer_create";
constexpr char kGetInfo[] = "quern_tokenizer_get_info";
constexpr char kIsEnd[] = "quern_tokenizer_is_end";
constexpr char kEncode[] = "quern_tokenizer_encode";
constexpr char kDecode[] = "quern_tokenizer_decode";

class TokenizerObject final : public Object {
 public:
  explicit TokenizerObject(Tokenizer tokenizer)
      : tokenizer_(std::move(tokenizer)) {}

  std::string Explain() const override {
    return absl::StrCat("tokenizer of ", tokenizer_.vocab_size(),
                        " pieces, bos ", tokenizer_.bos_id(), ", eos ",
                        tokenizer_.eos_id());
  }
  const Tokenizer& tokenizer() const { return tokenizer_; }

 private:
  Tokenizer tokenizer_;
};

absl::StatusOr<std::unique_ptr<Object>> MakeTokenizer(
    const quern_tokenizer_options* options) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(kCreate, "options", options));
  QUERN_RETURN_IF_ERROR(CheckSize("quern_tokenizer_options", options->size,
                                  sizeof(quern_tokenizer_options)));
  QUERN_ASSIGN_OR_RETURN(
      const GgufFile file,
      OpenGguf(kCreate, options->path, options->bytes, options->num_bytes));
  QUERN_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::Create(file));
  return std::make_unique<TokenizerObject>(std::move(tokenizer));
}

// InvalidArgument: elements without memory, or more than memory can hold.
absl::Status CheckArray(const char* function, const char* name,
                        const void* elements, const char* count_name,
                        size_t count, size_t element_bytes) {
  const size_t most =
      static_cast<size_t>(std::numeric_limits<std::ptrdiff_t>::max()) /
      element_bytes;
  if (count > most) {
    return InvalidArgument(function, count_name, "=", count, "; need ", most,
                           " or fewer");
  }
  return count == 0 ? absl::OkStatus() : CheckNotNull(function, name, elements);
}

absl::Status CheckFlags(const char* function, uint64_t flags, uint64_t all) {
  if ((flags & ~all) == 0) return absl::OkStatus();
  return InvalidArgument(function, "flags=", flags, "; need bits of ", all);
}

absl::Status Fill(const Tokenizer& tokenizer, quern_tokenizer_info* info) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(kGetInfo, "info", info));
  QUERN_RETURN_IF_ERROR(CheckSize("quern_tokenizer_info", info->size,
                                  sizeof(quern_tokenizer_info)));
  info->vocab = tokenizer.vocab_size();
  info->bos = tokenizer.bos_id();
  info->eos = tokenizer.eos_id();
  info->adds_bos = tokenizer.add_bos() ? 1 : 0;
  return absl::OkStatus();
}

absl::Status Encode(const Tokenizer& tokenizer, absl::string_view text,
                    uint64_t flags, absl::Span<int32_t> out, size_t* count) {
  const auto specials = (flags & QUERN_ENCODE_SPECIALS) != 0
                            ? Tokenizer::Specials::kAsTokens
                            : Tokenizer::Specials::kAsText;
  const std::vector<int32_t> ids = (flags & QUERN_ENCODE_BOS) != 0
                                       ? tokenizer.EncodeText(text, specials)
                                       : tokenizer.Encode(text, specials);
  std::copy_n(ids.begin(), std::min(ids.size(), out.size()), out.begin());
  *count = ids.size();
  return absl::OkStatus();
}

std::string Decoded(const Tokenizer& tokenizer,
                    absl::Span<const int32_t> tokens, uint64_t flags) {
  if ((flags & QUERN_DECODE_CONTINUES) == 0) return tokenizer.Decode(tokens);
  std::string text;
  for (const int32_t token : tokens) {
    if (token < 0 || token >= tokenizer.vocab_size()) continue;
    text += tokenizer.TokenBytes(token);
  }
  return text;
}

template <typename Fn>
quern_status With(quern_tokenizer* handle, const Fn& fn) {
  return CallOn<TokenizerObject>(
      handle, Kind::kTokenizer, Mode::kUse,
      [&](const TokenizerObject& object) -> absl::Status {
        return fn(object.tokenizer());
      });
}

}  // namespace
}  // namespace c_abi
}  // namespace quern

using quern::Tokenizer;
using quern::c_abi::CheckArray;
using quern::c_abi::CheckFlags;
using quern::c_abi::CheckNotNull;
using quern::c_abi::Kind;
using quern::c_abi::Library;
using quern::c_abi::MakeObject;
using quern::c_abi::With;

extern "C" {

quern_status quern_tokenizer_create(quern_library* library,
                                    const quern_tokenizer_options* options,
                                    quern_tokenizer** tokenizer) {
  return MakeObject(
      library, "quern_tokenizer_create", Kind::kTokenizer, tokenizer,
      [&](const Library&) { return quern::c_abi::MakeTokenizer(options); });
}

quern_status quern_tokenizer_get_info(quern_tokenizer* tokenizer,
                                      quern_tokenizer_info* info) {
  return With(tokenizer,
              [&](const Tokenizer& t) { return quern::c_abi::Fill(t, info); });
}

quern_status quern_tokenizer_is_end(quern_tokenizer* tokenizer, int32_t token,
                                    int32_t* is_end) {
  return With(tokenizer, [&](const Tokenizer& t) -> absl::Status {
    using quern::c_abi::kIsEnd;
    QUERN_RETURN_IF_ERROR(CheckNotNull(kIsEnd, "is_end", is_end));
    *is_end = t.IsEnd(token) ? 1 : 0;
    return absl::OkStatus();
  });
}

quern_status quern_tokenizer_encode(quern_tokenizer* tokenizer,
                                    const char* text, size_t num_bytes,
                                    uint64_t flags, int32_t* tokens,
                                    size_t capacity, size_t* num_tokens) {
  return With(tokenizer, [&](const Tokenizer& t) -> absl::Status {
    using quern::c_abi::kEncode;
    QUERN_RETURN_IF_ERROR(CheckNotNull(kEncode, "num_tokens", num_tokens));
    *num_tokens = 0;
    QUERN_RETURN_IF_ERROR(
        CheckArray(kEncode, "text", text, "num_bytes", num_bytes, 1));
    QUERN_RETURN_IF_ERROR(CheckArray(kEncode, "tokens", tokens, "capacity",
                                     capacity, sizeof(int32_t)));
    QUERN_RETURN_IF_ERROR(
        CheckFlags(kEncode, flags, QUERN_ENCODE_SPECIALS | QUERN_ENCODE_BOS));
    return quern::c_abi::Encode(t, absl::string_view(text, num_bytes), flags,
                                absl::MakeSpan(tokens, capacity), num_tokens);
  });
}

quern_status quern_tokenizer_decode(quern_tokenizer* tokenizer,
                                    const int32_t* tokens, size_t num_tokens,
                                    uint64_t flags, char* text, size_t capacity,
                                    size_t* num_bytes) {
  return With(tokenizer, [&](const Tokenizer& t) -> absl::Status {
    using quern::c_abi::kDecode;
    QUERN_RETURN_IF_ERROR(CheckNotNull(kDecode, "num_bytes", num_bytes));
    *num_bytes = 0;
    QUERN_RETURN_IF_ERROR(CheckArray(kDecode, "tokens", tokens, "num_tokens",
                                     num_tokens, sizeof(int32_t)));
    QUERN_RETURN_IF_ERROR(
        CheckArray(kDecode, "text", text, "capacity", capacity, 1));
    QUERN_RETURN_IF_ERROR(CheckFlags(kDecode, flags, QUERN_DECODE_CONTINUES));
    *num_bytes = quern::c_abi::CopyText(
        quern::c_abi::Decoded(t, absl::MakeConstSpan(tokens, num_tokens),
                              flags),
        text, capacity);
    return absl::OkStatus();
  });
}

}  // extern "C"
