#ifndef QUERN_MODELS_GGUF_GGUF_SAMPLE_TESTUTIL_H_
#define QUERN_MODELS_GGUF_GGUF_SAMPLE_TESTUTIL_H_

// A file with metadata and tensors of every kind, and how tests of the reader
// read files.

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_testutil.h"

namespace quern {

// `file` must outlive the result.
inline absl::StatusOr<GgufFile> ParseString(const std::string& file) {
  return GgufFile::Parse(absl::MakeConstSpan(
      reinterpret_cast<const uint8_t*>(file.data()), file.size()));
}

// Writes a file, and returns its path.
inline std::string TempFile(absl::string_view name, const std::string& bytes) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/", name);
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

// Bytes of one Q8_0 block: scale 0.5, values 0, -1, 2, -3, ...
inline std::string Q8Block() {
  std::string block = Raw<uint16_t>(0x3800);
  for (int i = 0; i < 32; ++i) {
    block += Raw(static_cast<int8_t>(i % 2 == 0 ? i : -i));
  }
  return block;
}

inline GgufWriter Sample() {
  GgufWriter writer;
  writer.Key("u32", 7u)
      .Key("i32", -7)
      .Key("f32", 1.5f)
      .Key("bool", true)
      .Key("string", "text")
      .RawKey("u8", 0, Raw<uint8_t>(200))
      .RawKey("i8", 1, Raw<int8_t>(-3))
      .RawKey("u16", 2, Raw<uint16_t>(60000))
      .RawKey("i16", 3, Raw<int16_t>(-60))
      .RawKey("u64", 10, Raw<uint64_t>(1) + "")
      .RawKey("u64.large", 10, Raw<uint64_t>(~uint64_t{0}))
      .RawKey("i64", 11, Raw<int64_t>(-1))
      .RawKey("f64", 12, Raw<double>(2.5))
      .Key("strings", std::vector<std::string>{"", "one", "two"})
      .Key("floats", std::vector<float>{1, -2})
      .Key("ints", std::vector<int32_t>{})
      .Array("bools", 7, 2, absl::string_view("\0\1", 2));
  writer
      .Tensor("f32", {3, 2}, GgufTensorType::kF32,
              BytesOf<float>({1, 2, 3, 4, 5, 6}))
      .Tensor("f16", {2}, GgufTensorType::kF16,
              BytesOf<uint16_t>({0x3c00, 0xc100}))
      .Tensor("bf16", {1, 2, 1, 1}, GgufTensorType::kBF16,
              BytesOf<uint16_t>({0x3f80, 0xc020}))
      .Tensor("q8_0", {32, 2}, GgufTensorType::kQ8_0, Q8Block() + Q8Block());
  return writer;
}

}  // namespace quern

#endif  // QUERN_MODELS_GGUF_GGUF_SAMPLE_TESTUTIL_H_
