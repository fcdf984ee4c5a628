#ifndef QUERN_MODELS_GGUF_GGUF_TESTUTIL_H_
#define QUERN_MODELS_GGUF_GGUF_TESTUTIL_H_

// Writes GGUF files for tests, in memory. The files may be illegal: contents
// are written as given, unchecked.
//
//   GgufWriter writer;
//   writer.Key("general.architecture", "llama").Key("llama.block_count", 2u);
//   writer.Tensor("x", {3, 2}, GgufTensorType::kF32, BytesOf(values));
//   const std::string file = writer.Finish();

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "quern/models/gguf/gguf.h"

namespace quern {

template <typename T>
std::string Raw(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(&bytes[0], &value, sizeof(T));
  return bytes;
}

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(&bytes[0], values.data(), bytes.size());
  return bytes;
}

class GgufWriter {
 public:
  static std::string String(absl::string_view text) {
    return Raw<uint64_t>(text.size()) + std::string(text);
  }

  // Writes `value` as the bytes that follow the type in the file.
  GgufWriter& RawKey(absl::string_view key, uint32_t type,
                     absl::string_view value) {
    keys_ += String(key) + Raw(type) + std::string(value);
    ++num_keys_;
    return *this;
  }
  GgufWriter& Key(absl::string_view key, uint32_t value) {
    return RawKey(key, 4, Raw(value));
  }
  GgufWriter& Key(absl::string_view key, int32_t value) {
    return RawKey(key, 5, Raw(value));
  }
  GgufWriter& Key(absl::string_view key, float value) {
    return RawKey(key, 6, Raw(value));
  }
  GgufWriter& Key(absl::string_view key, bool value) {
    return RawKey(key, 7, Raw<uint8_t>(value ? 1 : 0));
  }
  GgufWriter& Key(absl::string_view key, const char* value) {
    return RawKey(key, 8, String(value));
  }
  GgufWriter& Key(absl::string_view key,
                  const std::vector<std::string>& values) {
    std::string all;
    for (const std::string& value : values) all += String(value);
    return Array(key, 8, values.size(), all);
  }
  GgufWriter& Key(absl::string_view key, const std::vector<float>& values) {
    return Array(key, 6, values.size(), BytesOf(values));
  }
  GgufWriter& Key(absl::string_view key, const std::vector<int32_t>& values) {
    return Array(key, 5, values.size(), BytesOf(values));
  }
  GgufWriter& Array(absl::string_view key, uint32_t element, uint64_t count,
                    absl::string_view values) {
    return RawKey(key, 9, Raw(element) + Raw(count) + std::string(values));
  }

  GgufWriter& Tensor(absl::string_view name, const std::vector<uint64_t>& dims,
                     GgufTensorType type, absl::string_view data) {
    RawTensor(name, dims, static_cast<uint32_t>(type), data_.size());
    data_ += std::string(data);
    Pad(data_);
    return *this;
  }
  GgufWriter& RawTensor(absl::string_view name,
                        const std::vector<uint64_t>& dims, uint32_t type,
                        uint64_t offset) {
    tensors_ += String(name) + Raw(static_cast<uint32_t>(dims.size())) +
                BytesOf(dims) + Raw(type) + Raw(offset);
    ++num_tensors_;
    return *this;
  }

  std::string Finish() const { return Finish(num_tensors_, num_keys_); }
  // Finishes with the given counts, which may be wrong.
  std::string Finish(uint64_t num_tensors, uint64_t num_keys) const {
    std::string file = "GGUF" + Raw<uint32_t>(3) + Raw(num_tensors) +
                       Raw(num_keys) + keys_ + tensors_;
    Pad(file);
    return file + data_;
  }

 private:
  static void Pad(std::string& bytes) {
    bytes.resize((bytes.size() + 31) / 32 * 32, '\0');
  }

  std::string keys_, tensors_, data_;
  uint64_t num_keys_ = 0, num_tensors_ = 0;
};

}  // namespace quern

#endif  // QUERN_MODELS_GGUF_GGUF_TESTUTIL_H_
