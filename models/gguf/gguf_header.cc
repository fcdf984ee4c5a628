#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_format.h"

namespace quern {
namespace {

using gguf_format::kOp;
using gguf_format::Load;
using gguf_format::Quoted;
using gguf_format::ScalarBytes;
using gguf_format::SupportedTypes;

// Limit on the bytes of metadata and tensor list. The header is held in memory,
// and a sparse file may claim any length. A vocabulary of 256 Ki tokens takes
// some 16 MiB.
constexpr int64_t kMaxHeaderBytes = int64_t{256} << 20;
constexpr int64_t kMaxKeyBytes = 65535;  // limits of the format
constexpr int64_t kMaxNameBytes = 64;
constexpr int64_t kMaxRank = 4;
constexpr int64_t kDefaultAlignment = 32;
constexpr int64_t kMinAlignment = 8;
constexpr int64_t kMaxAlignment = 1 << 16;
// The fewest bytes that a key (1-byte name, 1-byte value) and a tensor (1-byte
// name, one dimension) take. A count that would need more bytes than the file
// has is refused.
constexpr int64_t kMinKeyBytes = 8 + 1 + 4 + 1;
constexpr int64_t kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;

}  // namespace

// Walks the header, and checks every step against the file's size.
class GgufFile::Cursor {
 public:
  explicit Cursor(GgufFile& file) : file_(file) {}

  int64_t offset() const { return offset_; }
  int64_t left() const { return file_.size_ - offset_; }

  // Skips `bytes`, which are called `what` in refusals.
  absl::Status Skip(int64_t bytes, absl::string_view what) {
    if (bytes > left()) {
      return InvalidArgument(kOp, what, " needs ", bytes, " bytes at offset ",
                             offset_, "; the file has ", file_.size_);
    }
    if (bytes > kMaxHeaderBytes - offset_) {
      return InvalidArgument(kOp, what, " needs ", bytes, " bytes at offset ",
                             offset_, "; need a header of at most ",
                             kMaxHeaderBytes);
    }
    QUERN_RETURN_IF_ERROR(file_.Ensure(offset_ + bytes));
    offset_ += bytes;
    return absl::OkStatus();
  }

  template <typename T>
  absl::StatusOr<T> Read(absl::string_view what) {
    QUERN_RETURN_IF_ERROR(Skip(sizeof(T), what));
    return Load<T>(file_.header() + offset_ - sizeof(T));
  }

  // Reads a count or length. InvalidArgument if count * each bytes exceed the
  // rest of the file.
  absl::StatusOr<int64_t> ReadCount(absl::string_view what, int64_t each) {
    QUERN_ASSIGN_OR_RETURN(const uint64_t count, Read<uint64_t>(what));
    if (count > static_cast<uint64_t>(left() / each)) {
      return InvalidArgument(kOp, what, "=", count, " at offset ", offset_ - 8,
                             "; the rest of the file has room for ",
                             left() / each);
    }
    return static_cast<int64_t>(count);
  }

  // Reads a string. The view is valid until the next step.
  absl::StatusOr<absl::string_view> ReadString(absl::string_view what,
                                               int64_t max_bytes) {
    QUERN_ASSIGN_OR_RETURN(const int64_t length, ReadCount(what, 1));
    if (length > max_bytes) {
      return InvalidArgument(kOp, what, " has ", length,
                             " bytes; need at most ", max_bytes);
    }
    QUERN_RETURN_IF_ERROR(Skip(length, what));
    return absl::string_view(
        reinterpret_cast<const char*>(file_.header()) + offset_ - length,
        static_cast<size_t>(length));
  }

  // Skips `count` values of `type`.
  absl::Status SkipValues(GgufValueType type, int64_t count,
                          absl::string_view what) {
    if (type == GgufValueType::kString) {
      for (int64_t i = 0; i < count; ++i) {
        QUERN_RETURN_IF_ERROR(
            ReadString(what, std::numeric_limits<int64_t>::max()).status());
      }
      return absl::OkStatus();
    }
    QUERN_RETURN_IF_ERROR(Skip(count * ScalarBytes(type), what));
    if (type != GgufValueType::kBool) return absl::OkStatus();
    for (int64_t at = offset_ - count; at < offset_; ++at) {
      if (file_.header()[at] > 1) {
        return InvalidArgument(kOp, what, " is a bool of value ",
                               file_.header()[at], "; need 0 or 1");
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Value> ReadValue(absl::string_view what) {
    QUERN_ASSIGN_OR_RETURN(const uint32_t code, Read<uint32_t>(what));
    Value value;
    value.type = static_cast<GgufValueType>(code);
    value.count = 1;
    value.offset = offset_;
    if (value.type == GgufValueType::kArray) {
      QUERN_ASSIGN_OR_RETURN(const uint32_t element, Read<uint32_t>(what));
      value.element = static_cast<GgufValueType>(element);
      if (value.element == GgufValueType::kArray) {
        return Unimplemented(kOp, what, " is an array of arrays");
      }
    } else {
      value.element = value.type;
    }
    const bool is_string = value.element == GgufValueType::kString;
    const int64_t each = is_string ? 8 : ScalarBytes(value.element);
    if (each == 0) {
      return InvalidArgument(kOp, what, " has value type ",
                             static_cast<uint32_t>(value.element),
                             "; need 0..12");
    }
    if (value.type == GgufValueType::kArray) {
      QUERN_ASSIGN_OR_RETURN(value.count,
                             ReadCount(absl::StrCat(what, " count"), each));
    }
    value.offset = offset_;
    QUERN_RETURN_IF_ERROR(SkipValues(value.element, value.count, what));
    return value;
  }

 private:
  GgufFile& file_;
  int64_t offset_ = 0;
};

absl::Status GgufFile::ParseHeader() {
  Cursor cursor(*this);
  QUERN_ASSIGN_OR_RETURN(const uint32_t magic, cursor.Read<uint32_t>("magic"));
  if (magic != 0x46554747) {  // "GGUF"
    return InvalidArgument(kOp, "magic=0x", absl::Hex(magic, absl::kZeroPad8),
                           "; need 0x46554747 (GGUF): not a GGUF file");
  }
  QUERN_ASSIGN_OR_RETURN(version_, cursor.Read<uint32_t>("version"));
  // Version 2 has the layout of version 3; version 1 has shorter lengths.
  if (version_ != 2 && version_ != 3) {
    const bool swapped = version_ == 0x02000000 || version_ == 0x03000000;
    return Unimplemented(kOp, "version=", version_, "; need 2 or 3",
                         swapped ? " (big-endian file)" : "");
  }
  QUERN_ASSIGN_OR_RETURN(const int64_t num_tensors,
                         cursor.ReadCount("tensor count", kMinTensorBytes));
  QUERN_ASSIGN_OR_RETURN(const int64_t num_keys,
                         cursor.ReadCount("key count", kMinKeyBytes));
  for (int64_t i = 0; i < num_keys; ++i) {
    const int64_t begin = cursor.offset();
    QUERN_ASSIGN_OR_RETURN(
        const absl::string_view view,
        cursor.ReadString(absl::StrCat("name of key ", i), kMaxKeyBytes));
    if (view.empty()) {
      return InvalidArgument(kOp, "name of key ", i, " is empty");
    }
    std::string key(view);
    QUERN_ASSIGN_OR_RETURN(Value value,
                           cursor.ReadValue(absl::StrCat("key ", Quoted(key))));
    value.begin = begin;
    value.end = cursor.offset();
    if (!values_.emplace(key, value).second) {
      return InvalidArgument(kOp, "key ", Quoted(key), " occurs twice");
    }
  }
  int64_t alignment = kDefaultAlignment;
  if (Has("general.alignment")) {
    QUERN_ASSIGN_OR_RETURN(alignment, GetInt("general.alignment"));
    if (alignment < kMinAlignment || alignment > kMaxAlignment ||
        (alignment & (alignment - 1)) != 0) {
      return InvalidArgument(kOp, "general.alignment=", alignment,
                             "; need a power of two, ", kMinAlignment,
                             " <= general.alignment <= ", kMaxAlignment);
    }
  }
  for (int64_t i = 0; i < num_tensors; ++i) {
    QUERN_RETURN_IF_ERROR(ParseTensor(cursor, i));
  }
  return PlaceTensors(RoundUp(cursor.offset(), alignment), alignment);
}

absl::Status GgufFile::ParseTensor(Cursor& cursor, int64_t index) {
  QUERN_ASSIGN_OR_RETURN(
      const absl::string_view name,
      cursor.ReadString(absl::StrCat("name of tensor ", index), kMaxNameBytes));
  if (name.empty()) {
    return InvalidArgument(kOp, "name of tensor ", index, " is empty");
  }
  GgufTensor tensor;
  tensor.name = std::string(name);
  const std::string what = absl::StrCat("tensor ", Quoted(tensor.name));
  QUERN_ASSIGN_OR_RETURN(const uint32_t rank, cursor.Read<uint32_t>(what));
  if (rank < 1 || rank > kMaxRank) {
    return InvalidArgument(kOp, what, " has rank=", rank,
                           "; need 1 <= rank <= ", kMaxRank);
  }
  tensor.elements = 1;
  for (uint32_t d = 0; d < rank; ++d) {
    QUERN_ASSIGN_OR_RETURN(const uint64_t dim, cursor.Read<uint64_t>(what));
    constexpr auto kMaxDim =
        static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    if (dim < 1 || dim > kMaxDim ||
        !CheckedMul(tensor.elements, static_cast<int64_t>(dim),
                    &tensor.elements)) {
      return InvalidArgument(kOp, what, " has dims[", d, "]=", dim,
                             "; need >= 1 and a product < 2^63");
    }
    tensor.dims.push_back(static_cast<int64_t>(dim));
  }
  QUERN_ASSIGN_OR_RETURN(const uint32_t type, cursor.Read<uint32_t>(what));
  tensor.type = static_cast<GgufTensorType>(type);
  const GgufBlock block = GgufBlockOf(tensor.type);
  if (block.elements == 0) {
    return Unimplemented(kOp, what, " has type=", type, " (",
                         GgufTensorTypeName(tensor.type), "); need ",
                         SupportedTypes(), "; the file is ", DescribeKeys());
  }
  if (tensor.dims[0] % block.elements != 0) {
    return InvalidArgument(kOp, what, " has dims[0]=", tensor.dims[0],
                           "; need a multiple of ", block.elements, ", as ",
                           GgufTensorTypeName(tensor.type), " has blocks");
  }
  if (!CheckedMul(tensor.elements / block.elements, block.bytes,
                  &tensor.bytes)) {
    return InvalidArgument(kOp, what, " has ", tensor.elements,
                           " elements; need fewer than 2^63 bytes");
  }
  QUERN_ASSIGN_OR_RETURN(const uint64_t offset, cursor.Read<uint64_t>(what));
  if (offset > static_cast<uint64_t>(size_)) {
    return InvalidArgument(kOp, what, " has offset=", offset, "; the file has ",
                           size_, " bytes");
  }
  tensor.offset = static_cast<int64_t>(offset);
  if (!tensor_index_.emplace(tensor.name, tensors_.size()).second) {
    return InvalidArgument(kOp, what, " occurs twice");
  }
  tensors_.push_back(std::move(tensor));
  return absl::OkStatus();
}

// Makes offsets absolute, and proves that the tensors are in the file and do
// not overlap.
absl::Status GgufFile::PlaceTensors(int64_t data_begin, int64_t alignment) {
  std::vector<size_t> order(tensors_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return tensors_[a].offset < tensors_[b].offset;
  });
  int64_t end = 0;  // of the previous tensor, relative
  for (const size_t i : order) {
    GgufTensor& tensor = tensors_[i];
    const std::string what = absl::StrCat("tensor ", Quoted(tensor.name));
    if (tensor.offset % alignment != 0) {
      return InvalidArgument(kOp, what, " has offset=", tensor.offset,
                             "; need a multiple of ", alignment);
    }
    if (tensor.offset < end) {
      return InvalidArgument(kOp, what, " has offset=", tensor.offset,
                             "; the tensor before it ends at ", end);
    }
    const int64_t room = size_ - data_begin;
    if (tensor.offset > room || tensor.bytes > room - tensor.offset) {
      return InvalidArgument(kOp, what, " needs ", tensor.bytes,
                             " bytes at offset ", tensor.offset,
                             " of the data; the file has ", room);
    }
    end = tensor.offset + tensor.bytes;
    tensor.offset += data_begin;
  }
  return absl::OkStatus();
}

}  // namespace quern
