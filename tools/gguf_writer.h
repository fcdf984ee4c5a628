#ifndef QUERN_TOOLS_GGUF_WRITER_H_
#define QUERN_TOOLS_GGUF_WRITER_H_

// Writes GGUF version 3 files larger than memory; models/gguf/gguf.h describes
// the format. Metadata and the list of tensors are collected; the tensors'
// bytes go straight to disk.
//
//   GgufFileWriter writer;
//   writer.KeyString("general.architecture", "llama");
//   QUERN_RETURN_IF_ERROR(writer.AddTensor("x", {3, 2}, GgufTensorType::kF32));
//   QUERN_RETURN_IF_ERROR(writer.Open(path));
//   QUERN_RETURN_IF_ERROR(writer.Append(bytes));  // as often as is handy
//   QUERN_RETURN_IF_ERROR(writer.Finish());
//
// The destructor removes a file that was opened and not finished. Not
// thread-safe.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/models/gguf/gguf.h"

namespace quern {

class GgufFileWriter {
 public:
  GgufFileWriter() = default;
  ~GgufFileWriter();
  GgufFileWriter(const GgufFileWriter&) = delete;
  GgufFileWriter& operator=(const GgufFileWriter&) = delete;

  // Adds a metadata key, in the order of the calls, all before Open. Keys must
  // be distinct, because readers refuse a file with a key twice.
  void KeyU32(absl::string_view key, uint32_t value);
  void KeyF32(absl::string_view key, float value);
  void KeyBool(absl::string_view key, bool value);
  void KeyString(absl::string_view key, absl::string_view value);
  void KeyStrings(absl::string_view key, absl::Span<const std::string> values);
  void KeyF32s(absl::string_view key, absl::Span<const float> values);
  void KeyI32s(absl::string_view key, absl::Span<const int32_t> values);

  // A key as another file has it (GgufFile::KeyBytes).
  void KeyBytes(absl::string_view bytes);

  // Announces a tensor, before Open; dims[0] is the length of a row.
  // InvalidArgument for an empty name or one longer than 64 bytes, for other
  // than 1 to 4 dimensions, for a dimension below 1, for rows that are not
  // whole blocks of `type`, and for a file beyond 2^63 bytes.
  absl::Status AddTensor(absl::string_view name, absl::Span<const int64_t> dims,
                         GgufTensorType type);

  // Size of the whole file in bytes.
  int64_t file_bytes() const;

  // Creates or replaces `path`, and writes everything but the tensors' bytes.
  // ResourceExhausted if the file system has no room for file_bytes(); the
  // operating system's error if the file cannot be written.
  absl::Status Open(const std::string& path);

  // Appends the next bytes of the tensors, in the order in which they were
  // announced. InvalidArgument if they exceed the current tensor.
  absl::Status Append(absl::Span<const uint8_t> bytes);

  // Completes the file. FailedPrecondition if tensors are incomplete.
  absl::Status Finish();

 private:
  void StartKey(absl::string_view key, uint32_t type);
  void StartArray(absl::string_view key, uint32_t element, size_t count);
  std::string Header() const;
  absl::Status WriteAll(const void* data, size_t bytes);
  absl::Status Failure(int error, absl::string_view action) const;

  std::string keys_, tensors_;  // encoded as in the file
  uint64_t num_keys_ = 0;
  std::vector<int64_t> tensor_bytes_;
  int64_t data_bytes_ = 0;  // of all tensors, padded

  std::string path_;
  int fd_ = -1;
  bool remove_ = false;  // path_ is our own, incomplete file
  size_t tensor_ = 0;    // the tensor that Append writes
  int64_t written_ = 0;  // its bytes so far
};

}  // namespace quern

#endif  // QUERN_TOOLS_GGUF_WRITER_H_
