#ifndef QUERN_EXAMPLES_GENERATE_MODEL_TESTUTIL_H_
#define QUERN_EXAMPLES_GENERATE_MODEL_TESTUTIL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "quern/models/testing/golden_testutil.h"
#include "quern/testing/files.h"

namespace quern {

// Path of a copy of the shipped model where the integer of `key` begins with
// the bytes of `value`, which are changed in place.
template <typename T>
std::string ModelWith(const std::string& key, T value) {
  std::string model = FileBytes(ModelFile("quern-kjv-4m.bf16.gguf"));
  const size_t at = model.find(key);
  EXPECT_NE(at, std::string::npos);
  if (at == std::string::npos) return "";
  // The key's name is followed by its type, of four bytes, and then the value.
  std::memcpy(&model[at + key.size() + 4], &value, sizeof(value));
  const std::string path = absl::StrCat(::testing::TempDir(), "/", key, "_",
                                        static_cast<int64_t>(value));
  std::ofstream(path, std::ios::binary) << model;
  return path;
}

// The shipped model, whose texts end at `token` instead of </s>.
inline std::string ModelThatEndsAt(int32_t token) {
  return ModelWith("tokenizer.ggml.eos_token_id", token);
}

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_MODEL_TESTUTIL_H_
