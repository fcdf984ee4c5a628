#ifndef QUERN_MODELS_GGUF_GGUF_FORMAT_H_
#define QUERN_MODELS_GGUF_GGUF_FORMAT_H_

// Private: facts about the file format that the parts of the GGUF reader share.

#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/models/gguf/gguf.h"

namespace quern {
namespace gguf_format {

inline constexpr char kOp[] = "gguf";

// Bytes of a scalar; 0 for strings, arrays and unknown types.
inline int64_t ScalarBytes(GgufValueType type) {
  switch (type) {
    case GgufValueType::kU8:
    case GgufValueType::kI8:
    case GgufValueType::kBool:
      return 1;
    case GgufValueType::kU16:
    case GgufValueType::kI16:
      return 2;
    case GgufValueType::kU32:
    case GgufValueType::kI32:
    case GgufValueType::kF32:
      return 4;
    case GgufValueType::kU64:
    case GgufValueType::kI64:
    case GgufValueType::kF64:
      return 8;
    case GgufValueType::kString:
    case GgufValueType::kArray:
      return 0;
  }
  return 0;
}

inline absl::string_view ValueTypeName(GgufValueType type) {
  static constexpr absl::string_view kNames[] = {
      "u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
      "bool", "string", "array", "u64", "i64", "f64"};
  const auto index = static_cast<uint32_t>(type);
  return index < 13 ? kNames[index] : "unknown";
}

// The tensor types that are read, with their numbers: "F32 (0), F16 (1) or BF16
// (30)".
std::string SupportedTypes();

// Quotes a name from a file so that it is safe to print.
inline std::string Quoted(absl::string_view text) {
  constexpr size_t kShown = 64;
  return absl::StrCat("'", absl::CHexEscape(text.substr(0, kShown)),
                      text.size() > kShown ? "...'" : "'");
}

template <typename T>
T Load(const uint8_t* from) {  // GGUF is little-endian
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

}  // namespace gguf_format
}  // namespace quern

#endif  // QUERN_MODELS_GGUF_GGUF_FORMAT_H_
