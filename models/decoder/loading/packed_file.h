#ifndef QUERN_MODELS_DECODER_LOADING_PACKED_FILE_H_
#define QUERN_MODELS_DECODER_LOADING_PACKED_FILE_H_

// A file of packed weights by name, made to be mapped. Matrices are used where
// they lie in the file, so loading a model takes only as long as reading the
// names, and processes on one machine share one copy.
//
//   header   64 bytes
//   blobs    each at a multiple of LinearWeights::kAlignment
//   index    for each blob: offset, bytes, length of the name, the name
//
// Numbers are little-endian. A checksum covers header and index; blobs describe
// themselves (gemm/linear_weights.h).

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace quern {

class PackedFile {
 public:
  using Blob = std::pair<std::string, absl::Span<const uint8_t>>;

  // Writes a new file; `source` identifies what the weights were packed from.
  // The file appears complete or not at all. AlreadyExists if `path` exists;
  // InvalidArgument if two blobs have one name; otherwise the system's error,
  // in a message that names the file. Each few MiB it asks `go_on`, whose
  // failure it returns, too.
  static absl::Status Write(
      const std::string& path, uint64_t source, absl::Span<const Blob> blobs,
      absl::FunctionRef<absl::Status()> go_on = absl::OkStatus);

  // Maps a file, whose bytes must not change while it is mapped. NotFound if it
  // is missing; InvalidArgument if it is not a complete packed file of this
  // version and byte order; FailedPrecondition if it cannot be mapped. Reads
  // only header and index.
  static absl::StatusOr<PackedFile> Open(const std::string& path);

  PackedFile(PackedFile&& other) noexcept;
  PackedFile& operator=(PackedFile&& other) noexcept;
  ~PackedFile();

  // The path that it was opened with.
  const std::string& path() const { return path_; }
  uint64_t source() const { return source_; }
  // InvalidArgument names the missing blob. The bytes live as long as this
  // object.
  absl::StatusOr<absl::Span<const uint8_t>> Find(absl::string_view name) const;

 private:
  PackedFile() = default;
  absl::Status Parse();

  std::string path_;
  const uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
  uint64_t source_ = 0;
  std::map<std::string, absl::Span<const uint8_t>, std::less<>> blobs_;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_LOADING_PACKED_FILE_H_
