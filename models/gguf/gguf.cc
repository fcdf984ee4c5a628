#include "quern/models/gguf/gguf.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "hwy/base.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/models/gguf/gguf_format.h"
#include "quern/quant/block_format.h"

namespace quern {
namespace {

using gguf_format::kOp;
using gguf_format::Load;
using gguf_format::Quoted;

void Store(float value, float* to) { *to = value; }
void Store(float value, BFloat16* to) { *to = hwy::BF16FromF32(value); }

// Decodes `elements` elements of whole blocks.
void DecodeTo(BlockFormat format, const uint8_t* from, int64_t elements,
              float* out) {
  const BlockFormatInfo& info = *FindBlockFormat(static_cast<uint32_t>(format));
  DecodeBlocks(
      format,
      absl::MakeConstSpan(
          from, static_cast<size_t>(elements / info.values * info.bytes)),
      absl::MakeSpan(out, static_cast<size_t>(elements)));
}
void DecodeTo(BlockFormat format, const uint8_t* from, int64_t elements,
              BFloat16* out) {
  const BlockFormatInfo& info = *FindBlockFormat(static_cast<uint32_t>(format));
  float some[2048];  // whole blocks of every format
  for (int64_t done = 0; done < elements;) {
    const int64_t count = std::min<int64_t>(elements - done, 2048);
    DecodeTo(format, from, count, some);
    for (int64_t i = 0; i < count; ++i) Store(some[i], out++);
    from += count / info.values * info.bytes;
    done += count;
  }
}

// Converts `elements` elements of `type` from `from` to `out`.
template <typename Out>
void Convert(GgufTensorType type, const uint8_t* from, int64_t elements,
             Out* out) {
  switch (type) {
    case GgufTensorType::kF32:
      for (int64_t i = 0; i < elements; ++i) {
        Store(Load<float>(from + 4 * i), out + i);
      }
      return;
    case GgufTensorType::kF16:
      for (int64_t i = 0; i < elements; ++i) {
        Store(hwy::F32FromF16(Load<Float16>(from + 2 * i)), out + i);
      }
      return;
    case GgufTensorType::kBF16:
      if constexpr (sizeof(Out) == 2) {
        std::memcpy(out, from, static_cast<size_t>(elements) * 2);
      } else {
        for (int64_t i = 0; i < elements; ++i) {
          Store(hwy::F32FromBF16(Load<BFloat16>(from + 2 * i)), out + i);
        }
      }
      return;
    default:
      return DecodeTo(static_cast<BlockFormat>(type), from, elements, out);
  }
}

}  // namespace

absl::StatusOr<GgufFile> GgufFile::Open(const std::string& path) {
  QUERN_ASSIGN_OR_RETURN(GgufFile file, OpenPart(path));
  QUERN_RETURN_IF_ERROR(file.JoinParts(path));
  return file;
}

absl::StatusOr<GgufFile> GgufFile::OpenPart(const std::string& path) {
  GgufFile file;
  // O_NONBLOCK keeps open() from blocking on a FIFO, which is refused below.
  file.fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.fd_ < 0) {
    return absl::ErrnoToStatus(
        errno, absl::StrCat(kOp, ": cannot open ", Quoted(path)));
  }
  struct stat stat {};
  if (fstat(file.fd_, &stat) != 0) {
    return absl::ErrnoToStatus(
        errno, absl::StrCat(kOp, ": cannot stat ", Quoted(path)));
  }
  if (!S_ISREG(stat.st_mode)) {
    return InvalidArgument(kOp, Quoted(path), " is not a regular file");
  }
  file.size_ = static_cast<int64_t>(stat.st_size);
  QUERN_RETURN_IF_ERROR(file.ParseHeader());
  return file;
}

absl::StatusOr<GgufFile> GgufFile::Parse(absl::Span<const uint8_t> bytes) {
  GgufFile file;
  file.memory_ = bytes.data();
  file.size_ = static_cast<int64_t>(bytes.size());
  QUERN_RETURN_IF_ERROR(file.ParseHeader());
  int64_t parts, no;
  QUERN_RETURN_IF_ERROR(file.ReadSplit(parts, no));
  if (parts == 1) return file;
  return Unimplemented(kOp, "the bytes are part ", no + 1, " of ", parts,
                       " of a split model; need the path of its first part");
}

GgufFile::GgufFile(GgufFile&& other) noexcept { *this = std::move(other); }

GgufFile& GgufFile::operator=(GgufFile&& other) noexcept {
  if (this == &other) return *this;
  Close();
  fd_ = std::exchange(other.fd_, -1);
  memory_ = std::exchange(other.memory_, nullptr);
  size_ = std::exchange(other.size_, 0);
  version_ = other.version_;
  head_ = std::move(other.head_);
  values_ = std::move(other.values_);
  tensors_ = std::move(other.tensors_);
  tensor_index_ = std::move(other.tensor_index_);
  other_parts_ = std::move(other.other_parts_);
  return *this;
}

GgufFile::~GgufFile() { Close(); }

void GgufFile::Close() {
  if (fd_ < 0) return;
  close(fd_);
  fd_ = -1;
}

absl::Status GgufFile::Ensure(int64_t end) {
  if (fd_ < 0 || end <= static_cast<int64_t>(head_.size())) {
    return absl::OkStatus();
  }
  constexpr int64_t kFirst = 1 << 16;
  const auto have = static_cast<int64_t>(head_.size());
  const int64_t want = std::min(
      size_, std::max({end, kFirst, have <= size_ / 2 ? 2 * have : size_}));
  head_.resize(static_cast<size_t>(want));
  return ReadAt(have, want - have, &head_[static_cast<size_t>(have)]);
}

absl::Status GgufFile::ReadAt(int64_t offset, int64_t bytes, void* out) const {
  if (fd_ < 0) {
    if (bytes > 0) {
      std::memcpy(out, memory_ + offset, static_cast<size_t>(bytes));
    }
    return absl::OkStatus();
  }
  auto* to = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got = pread(fd_, to, static_cast<size_t>(bytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::ErrnoToStatus(errno, "gguf: cannot read");
    if (got == 0) {
      return absl::DataLossError(absl::StrCat(kOp, ": the file ends at offset ",
                                              offset, "; it had ", size_,
                                              " bytes when it was opened"));
    }
    to += got;
    offset += got;
    bytes -= got;
  }
  return absl::OkStatus();
}

void GgufFile::ExpectReads(int32_t part, int64_t offset, int64_t bytes) const {
  const int fd =
      part == 0 ? fd_ : other_parts_[static_cast<size_t>(part - 1)].fd_;
  if (fd < 0 || bytes <= 0) return;
  // A hint; whatever it returns, the bytes can be read.
  static_cast<void>(posix_fadvise(fd, offset, bytes, POSIX_FADV_WILLNEED));
}

int64_t GgufFile::PartBytes(const GgufTensor& tensor, const GgufPart& part) {
  const GgufBlock block = GgufBlockOf(tensor.type);
  int64_t bytes = 0;
  const bool fits =
      CheckedMul(part.cols / block.elements, block.bytes, &bytes) &&
      CheckedMul(bytes, part.rows, &bytes);
  return fits ? bytes : -1;
}

absl::Status GgufFile::CheckPart(const GgufTensor& tensor, const GgufPart& part,
                                 size_t size, bool in_bytes) const {
  const int64_t block = GgufBlockOf(tensor.type).elements;
  const bool inside = part.row >= 0 && part.rows >= 0 &&
                      part.row <= tensor.rows() - part.rows && part.col >= 0 &&
                      part.cols >= 0 && part.col <= tensor.cols() - part.cols;
  if (inside && part.col % block == 0 && part.cols % block == 0) {
    const int64_t want =
        in_bytes ? PartBytes(tensor, part) : part.rows * part.cols;
    if (static_cast<int64_t>(size) == want) return absl::OkStatus();
  }
  return InvalidArgument(kOp, "tensor ", Quoted(tensor.name), ": ", part.rows,
                         " rows from ", part.row, ", ", part.cols,
                         " columns from ", part.col, ", into ", size,
                         " elements or bytes; need a part of ", tensor.rows(),
                         " rows and ", tensor.cols(), " columns in blocks of ",
                         block, ", and room for it alone");
}

template <typename Out>
absl::Status GgufFile::ReadPartTo(const GgufTensor& tensor,
                                  const GgufPart& part,
                                  absl::Span<Out> out) const {
  QUERN_RETURN_IF_ERROR(CheckPart(tensor, part, out.size(), false));
  const GgufBlock block = GgufBlockOf(tensor.type);
  const bool whole = part.cols == tensor.cols();  // rows are contiguous
  const int64_t runs = whole ? 1 : part.rows;
  const int64_t elements = whole ? part.rows * part.cols : part.cols;
  // Elements per chunk: whole blocks, about 64 KiB, which stay in L1/L2 between
  // pread and conversion.
  constexpr int64_t kChunkElements = 1 << 15;
  std::string chunk;
  Out* to = out.data();
  for (int64_t run = 0; run < runs; ++run) {
    int64_t offset = tensor.offset + (part.row + run) * tensor.row_bytes() +
                     part.col / block.elements * block.bytes;
    for (int64_t done = 0; done < elements; done += kChunkElements) {
      const int64_t now = std::min(kChunkElements, elements - done);
      const int64_t bytes = now / block.elements * block.bytes;
      chunk.resize(static_cast<size_t>(bytes));
      QUERN_RETURN_IF_ERROR(PartOf(tensor).ReadAt(offset, bytes, &chunk[0]));
      Convert(tensor.type, reinterpret_cast<const uint8_t*>(chunk.data()), now,
              to);
      offset += bytes;
      to += now;
    }
  }
  return absl::OkStatus();
}

template <typename Out>
absl::Status GgufFile::ReadRowsTo(const GgufTensor& tensor, int64_t first_row,
                                  absl::Span<Out> out) const {
  const auto elements = static_cast<int64_t>(out.size());
  return ReadPartTo(
      tensor, {first_row, elements / tensor.cols(), 0, tensor.cols()}, out);
}

absl::Status GgufFile::ReadRows(const GgufTensor& tensor, int64_t first_row,
                                absl::Span<float> out) const {
  return ReadRowsTo(tensor, first_row, out);
}
absl::Status GgufFile::ReadRows(const GgufTensor& tensor, int64_t first_row,
                                absl::Span<BFloat16> out) const {
  return ReadRowsTo(tensor, first_row, out);
}
absl::Status GgufFile::ReadPart(const GgufTensor& tensor, const GgufPart& part,
                                absl::Span<float> out) const {
  return ReadPartTo(tensor, part, out);
}
absl::Status GgufFile::ReadPart(const GgufTensor& tensor, const GgufPart& part,
                                absl::Span<BFloat16> out) const {
  return ReadPartTo(tensor, part, out);
}

absl::Status GgufFile::ReadPartBytes(const GgufTensor& tensor,
                                     const GgufPart& part,
                                     absl::Span<uint8_t> out) const {
  QUERN_RETURN_IF_ERROR(CheckPart(tensor, part, out.size(), true));
  const GgufBlock block = GgufBlockOf(tensor.type);
  const bool whole = part.cols == tensor.cols();
  const int64_t runs = whole ? 1 : part.rows;
  const int64_t bytes =
      static_cast<int64_t>(out.size()) / std::max<int64_t>(runs, 1);
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t offset = tensor.offset +
                           (part.row + run) * tensor.row_bytes() +
                           part.col / block.elements * block.bytes;
    QUERN_RETURN_IF_ERROR(
        PartOf(tensor).ReadAt(offset, bytes, out.data() + run * bytes));
  }
  return absl::OkStatus();
}

}  // namespace quern
