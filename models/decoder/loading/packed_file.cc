#include "quern/models/decoder/loading/packed_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/algorithms/checksum.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/linear_weights.h"

namespace quern {
namespace {

constexpr char kOp[] = "packed_file";
constexpr char kMagic[9] = "QuernPak";
constexpr uint32_t kVersion = 1;
constexpr uint32_t kByteOrder = 0x01020304;
constexpr int64_t kAlignment = LinearWeights::kAlignment;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t byte_order;
  uint64_t source;
  uint64_t count;
  uint64_t index_offset;
  uint64_t index_bytes;
  uint64_t file_bytes;
  uint64_t checksum;  // of header without it, then index
};
static_assert(sizeof(Header) == 64, "part of the format");

// One entry of the index; its name follows.
struct Entry {
  uint64_t offset;
  uint64_t bytes;
  uint64_t name_bytes;
};
static_assert(sizeof(Entry) == 24, "part of the format");

uint64_t ChecksumOf(const Header& header, absl::string_view index) {
  return Fnv1a(index.data(), index.size(),
               Fnv1a(&header, offsetof(Header, checksum)));
}

absl::Status FromSystem(const std::string& path, absl::string_view what) {
  return absl::ErrnoToStatus(errno, absl::StrCat(kOp, ": ", what, " ", path));
}

absl::Status WriteAll(int fd, const void* data, size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = write(fd, from, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return FromSystem("the file", "cannot write");
    from += done;
    bytes -= static_cast<size_t>(done);
  }
  return absl::OkStatus();
}

absl::Status WriteTo(int fd, uint64_t source,
                     absl::Span<const PackedFile::Blob> blobs,
                     absl::FunctionRef<absl::Status()> go_on) {
  Header header = {};
  std::memcpy(header.magic, kMagic, sizeof(header.magic));
  header.version = kVersion;
  header.byte_order = kByteOrder;
  header.source = source;
  header.count = blobs.size();
  std::string index;
  auto end = static_cast<int64_t>(sizeof(Header));
  for (const auto& [name, bytes] : blobs) {
    const Entry entry = {static_cast<uint64_t>(end), bytes.size(), name.size()};
    index.append(reinterpret_cast<const char*>(&entry), sizeof(entry));
    index.append(name);
    end = RoundUp(end + static_cast<int64_t>(bytes.size()), kAlignment);
  }
  header.index_offset = static_cast<uint64_t>(end);
  header.index_bytes = index.size();
  header.file_bytes = header.index_offset + header.index_bytes;
  header.checksum = ChecksumOf(header, index);
  QUERN_RETURN_IF_ERROR(WriteAll(fd, &header, sizeof(header)));
  constexpr char kZeros[kAlignment] = {};
  for (const auto& [name, bytes] : blobs) {
    constexpr size_t kPiece = size_t{16} << 20;
    for (size_t done = 0; done < bytes.size(); done += kPiece) {
      QUERN_RETURN_IF_ERROR(go_on());
      QUERN_RETURN_IF_ERROR(WriteAll(fd, bytes.data() + done,
                                     std::min(kPiece, bytes.size() - done)));
    }
    const auto size = static_cast<int64_t>(bytes.size());
    QUERN_RETURN_IF_ERROR(WriteAll(
        fd, kZeros, static_cast<size_t>(RoundUp(size, kAlignment) - size)));
  }
  QUERN_RETURN_IF_ERROR(WriteAll(fd, index.data(), index.size()));
  if (fsync(fd) != 0) return FromSystem("the file", "cannot write");
  return absl::OkStatus();
}

}  // namespace

absl::Status PackedFile::Write(const std::string& path, uint64_t source,
                               absl::Span<const Blob> blobs,
                               absl::FunctionRef<absl::Status()> go_on) {
  std::set<absl::string_view> names;
  for (const Blob& blob : blobs) {
    if (!names.insert(blob.first).second) {
      return InvalidArgument(kOp, path, ": two blobs are named ", blob.first);
    }
  }
  // The usual file mode, so that the umask decides who may map the file.
  constexpr mode_t kMode = 0666;
  // Temporary names that exist are skipped: an earlier process may have left
  // one, or another container's process with the same id may be using it.
  std::string temporary;
  int fd = -1;
  for (int i = 0; fd < 0 && i < 100; ++i) {
    temporary = absl::StrCat(path, ".", getpid(), ".", i, ".tmp");
    fd =
        open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, kMode);
    if (fd < 0 && errno != EEXIST) break;
  }
  if (fd < 0) return FromSystem(path, "cannot create a file beside");
  absl::Status status = WriteTo(fd, source, blobs, go_on);
  if (close(fd) != 0 && status.ok()) status = FromSystem(path, "cannot close");
  // link() fails if `path` exists, where rename() would replace it.
  if (status.ok() && link(temporary.c_str(), path.c_str()) != 0) {
    status = FromSystem(path, "cannot create");
  }
  unlink(temporary.c_str());
  return status;
}

absl::StatusOr<PackedFile> PackedFile::Open(const std::string& path) {
  // O_NONBLOCK keeps open() from waiting for a writer if the file is a pipe.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FromSystem(path, "cannot open");
  const auto closer = absl::MakeCleanup([fd] { close(fd); });
  struct stat info;
  if (fstat(fd, &info) != 0) return FromSystem(path, "cannot ask the size of");
  if (!S_ISREG(info.st_mode)) {
    return InvalidArgument(kOp, path, " is not a regular file");
  }
  PackedFile file;
  file.path_ = path;
  const auto bytes = static_cast<int64_t>(info.st_size);
  if (bytes < static_cast<int64_t>(sizeof(Header))) {
    return InvalidArgument(kOp, path, " has ", bytes, " bytes; need ",
                           sizeof(Header), " or more");
  }
  void* const data =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    // The file exists, so this is not reported as NotFound.
    return absl::FailedPreconditionError(absl::StrCat(
        FromSystem(path, "cannot map").message(), ", although it exists"));
  }
  file.data_ = static_cast<const uint8_t*>(data);
  file.bytes_ = bytes;
  QUERN_RETURN_IF_ERROR(file.Parse());
  return file;
}

absl::Status PackedFile::Parse() {
  Header header;
  std::memcpy(&header, data_, sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(header.magic)) != 0) {
    return InvalidArgument(kOp, path_, " does not begin with ", kMagic,
                           ": not a file of packed weights");
  }
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, absl::StrCat(path_, ": version"),
                                   header.version, kVersion, "this library"));
  QUERN_RETURN_IF_ERROR(CheckEqual(kOp, absl::StrCat(path_, ": byte_order"),
                                   header.byte_order, kByteOrder,
                                   "this machine"));
  const auto size = static_cast<uint64_t>(bytes_);
  if (header.file_bytes != size || header.index_offset > size ||
      header.index_bytes != size - header.index_offset) {
    return InvalidArgument(kOp, path_, " has ", size,
                           " bytes; its header says ", header.file_bytes,
                           ", index_offset=", header.index_offset,
                           ", index_bytes=", header.index_bytes);
  }
  absl::string_view index(
      reinterpret_cast<const char*>(data_) + header.index_offset,
      header.index_bytes);
  if (header.checksum != ChecksumOf(header, index)) {
    return InvalidArgument(kOp, path_,
                           " is damaged: the checksum of header and index "
                           "does not match");
  }
  for (uint64_t i = 0; i < header.count; ++i) {
    Entry entry = {};
    const bool whole = index.size() >= sizeof(entry);
    if (whole) std::memcpy(&entry, index.data(), sizeof(entry));
    if (!whole || entry.name_bytes > index.size() - sizeof(entry) ||
        entry.offset % kAlignment != 0 || entry.offset > header.index_offset ||
        entry.bytes > header.index_offset - entry.offset) {
      return InvalidArgument(kOp, path_, ": entry ", i, " of ", header.count,
                             " of the index is damaged");
    }
    index.remove_prefix(sizeof(entry));
    const bool added =
        blobs_
            .emplace(std::string(index.substr(0, entry.name_bytes)),
                     absl::MakeConstSpan(data_ + entry.offset, entry.bytes))
            .second;
    if (!added) {
      return InvalidArgument(kOp, path_, ": entry ", i,
                             " of the index repeats the name of another");
    }
    index.remove_prefix(entry.name_bytes);
  }
  if (!index.empty()) {
    return InvalidArgument(kOp, path_, " has ", index.size(),
                           " bytes of index beyond its ", header.count,
                           " entries");
  }
  source_ = header.source;
  return absl::OkStatus();
}

absl::StatusOr<absl::Span<const uint8_t>> PackedFile::Find(
    absl::string_view name) const {
  const auto found = blobs_.find(name);
  if (found != blobs_.end()) return found->second;
  return InvalidArgument(kOp, path_, " has no weights of ", name);
}

PackedFile::PackedFile(PackedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      source_(other.source_),
      blobs_(std::move(other.blobs_)) {}

PackedFile& PackedFile::operator=(PackedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(source_, other.source_);
  std::swap(blobs_, other.blobs_);
  return *this;
}

PackedFile::~PackedFile() {
  if (data_ != nullptr) {
    munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(bytes_));
  }
}

}  // namespace quern
