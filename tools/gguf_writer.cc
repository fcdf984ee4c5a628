#include "quern/tools/gguf_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/models/gguf/gguf.h"

namespace quern {
namespace {

constexpr char kOp[] = "gguf_writer";
constexpr int64_t kAlignment = 32;  // the default of GGUF
constexpr size_t kMaxNameBytes = 64;
constexpr size_t kMaxRank = 4;

template <typename T>
void Put(T value, std::string& to) {  // GGUF is little-endian
  to.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

void PutString(absl::string_view text, std::string& to) {
  Put<uint64_t>(text.size(), to);
  to.append(text.data(), text.size());
}

uint32_t Code(GgufValueType type) { return static_cast<uint32_t>(type); }

// Size in bytes of `elements` elements, which must be whole blocks; -1 if it
// exceeds 2^63.
int64_t BytesOf(GgufTensorType type, int64_t elements) {
  const GgufBlock block = GgufBlockOf(type);
  int64_t bytes = 0;
  return CheckedMul(elements / block.elements, block.bytes, &bytes) ? bytes
                                                                    : -1;
}

}  // namespace

GgufFileWriter::~GgufFileWriter() {
  if (fd_ >= 0) close(fd_);
  if (remove_) unlink(path_.c_str());
}

void GgufFileWriter::StartKey(absl::string_view key, uint32_t type) {
  PutString(key, keys_);
  Put(type, keys_);
  ++num_keys_;
}

void GgufFileWriter::StartArray(absl::string_view key, uint32_t element,
                                size_t count) {
  StartKey(key, Code(GgufValueType::kArray));
  Put(element, keys_);
  Put<uint64_t>(count, keys_);
}

void GgufFileWriter::KeyU32(absl::string_view key, uint32_t value) {
  StartKey(key, Code(GgufValueType::kU32));
  Put(value, keys_);
}

void GgufFileWriter::KeyF32(absl::string_view key, float value) {
  StartKey(key, Code(GgufValueType::kF32));
  Put(value, keys_);
}

void GgufFileWriter::KeyBool(absl::string_view key, bool value) {
  StartKey(key, Code(GgufValueType::kBool));
  Put<uint8_t>(value ? 1 : 0, keys_);
}

void GgufFileWriter::KeyString(absl::string_view key, absl::string_view value) {
  StartKey(key, Code(GgufValueType::kString));
  PutString(value, keys_);
}

void GgufFileWriter::KeyStrings(absl::string_view key,
                                absl::Span<const std::string> values) {
  StartArray(key, Code(GgufValueType::kString), values.size());
  for (const std::string& value : values) PutString(value, keys_);
}

void GgufFileWriter::KeyF32s(absl::string_view key,
                             absl::Span<const float> values) {
  StartArray(key, Code(GgufValueType::kF32), values.size());
  for (const float value : values) Put(value, keys_);
}

void GgufFileWriter::KeyI32s(absl::string_view key,
                             absl::Span<const int32_t> values) {
  StartArray(key, Code(GgufValueType::kI32), values.size());
  for (const int32_t value : values) Put(value, keys_);
}

void GgufFileWriter::KeyBytes(absl::string_view bytes) {
  keys_.append(bytes.data(), bytes.size());
  ++num_keys_;
}

absl::Status GgufFileWriter::AddTensor(absl::string_view name,
                                       absl::Span<const int64_t> dims,
                                       GgufTensorType type) {
  if (name.empty() || name.size() > kMaxNameBytes) {
    return InvalidArgument(kOp, "name of a tensor has ", name.size(),
                           " bytes; need 1 to ", kMaxNameBytes);
  }
  if (dims.empty() || dims.size() > kMaxRank) {
    return InvalidArgument(kOp, name, " has ", dims.size(),
                           " dimensions; need 1 to ", kMaxRank);
  }
  int64_t elements = 1;
  for (const int64_t dim : dims) {
    QUERN_RETURN_IF_ERROR(
        CheckAtLeast(kOp, absl::StrCat("dimension of ", name), dim, 1));
    if (!CheckedMul(elements, dim, &elements)) elements = -1;
    if (elements < 0) break;
  }
  const int64_t block = GgufBlockOf(type).elements;
  if (block == 0) {
    return InvalidArgument(kOp, name, " has type ", static_cast<uint32_t>(type),
                           ", which is not supported");
  }
  if (dims[0] % block != 0) {
    return InvalidArgument(kOp, name, " has rows of ", dims[0],
                           " elements; need a multiple of ", block, " for ",
                           GgufTensorTypeName(type));
  }
  const int64_t bytes = elements < 0 ? -1 : BytesOf(type, elements);
  int64_t padded = 0, end = 0;
  if (bytes < 0 || !CheckedAdd(bytes, kAlignment - 1, &padded) ||
      !CheckedAdd(padded, data_bytes_, &end)) {
    return InvalidArgument(kOp, name, " makes the file larger than 2^63 bytes");
  }
  PutString(name, tensors_);
  Put(static_cast<uint32_t>(dims.size()), tensors_);
  for (const int64_t dim : dims) Put(static_cast<uint64_t>(dim), tensors_);
  Put(static_cast<uint32_t>(type), tensors_);
  Put(static_cast<uint64_t>(data_bytes_), tensors_);
  tensor_bytes_.push_back(bytes);
  data_bytes_ += RoundUp(bytes, kAlignment);
  return absl::OkStatus();
}

std::string GgufFileWriter::Header() const {
  std::string header = "GGUF";
  Put<uint32_t>(3, header);
  Put<uint64_t>(tensor_bytes_.size(), header);
  Put(num_keys_, header);
  header += keys_;
  header += tensors_;
  header.resize(static_cast<size_t>(
      RoundUp(static_cast<int64_t>(header.size()), kAlignment)));
  return header;
}

int64_t GgufFileWriter::file_bytes() const {
  return static_cast<int64_t>(Header().size()) + data_bytes_;
}

absl::Status GgufFileWriter::Failure(int error,
                                     absl::string_view action) const {
  return absl::ErrnoToStatus(error,
                             absl::StrCat("cannot ", action, " '", path_, "'"));
}

absl::Status GgufFileWriter::Open(const std::string& path) {
  path_ = path;
  const std::string header = Header();
  const int64_t total = static_cast<int64_t>(header.size()) + data_bytes_;
  fd_ = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) return Failure(errno, "create");
  struct stat stat {};
  if (fstat(fd_, &stat) != 0) return Failure(errno, "stat");
  remove_ = S_ISREG(stat.st_mode);
  // Lack of space is reported here, before minutes of writing.
  struct statvfs system {};
  if (remove_ && fstatvfs(fd_, &system) == 0 && system.f_frsize > 0) {
    const auto block = static_cast<uint64_t>(system.f_frsize);
    const uint64_t needed = (static_cast<uint64_t>(total) + block - 1) / block;
    if (system.f_bavail < needed) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "'", path, "' would have ", total >> 20, " MiB; its file system has ",
          (system.f_bavail * block) >> 20, " MiB left"));
    }
  }
  return WriteAll(header.data(), header.size());
}

absl::Status GgufFileWriter::WriteAll(const void* data, size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t wrote = write(fd_, from, bytes);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return Failure(errno, "write");
    from += wrote;
    bytes -= static_cast<size_t>(wrote);
  }
  return absl::OkStatus();
}

absl::Status GgufFileWriter::Append(absl::Span<const uint8_t> bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  const int64_t left =
      tensor_ < tensor_bytes_.size() ? tensor_bytes_[tensor_] - written_ : 0;
  if (fd_ < 0 || size > left) {
    return InvalidArgument(kOp, "bytes=", size, " for tensor ", tensor_,
                           "; need at most ", left,
                           fd_ < 0 ? ", after Open" : "");
  }
  QUERN_RETURN_IF_ERROR(WriteAll(bytes.data(), bytes.size()));
  written_ += size;
  if (size < left) return absl::OkStatus();
  static constexpr char kZeros[kAlignment] = {};
  const int64_t padding = RoundUp(written_, kAlignment) - written_;
  QUERN_RETURN_IF_ERROR(WriteAll(kZeros, static_cast<size_t>(padding)));
  ++tensor_;
  written_ = 0;
  return absl::OkStatus();
}

absl::Status GgufFileWriter::Finish() {
  if (fd_ < 0 || tensor_ != tensor_bytes_.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat(kOp, ": ", tensor_, " of ", tensor_bytes_.size(),
                     " tensors are written; need all"));
  }
  // Some file systems report only at close that the disk is full.
  const int fd = fd_;
  fd_ = -1;
  if (close(fd) != 0) return Failure(errno, "write");
  remove_ = false;
  return absl::OkStatus();
}

}  // namespace quern
