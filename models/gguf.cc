#include "models/gguf.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "core/dtype.h"
#include "core/math_util.h"
#include "core/status_macros.h"
#include "hwy/base.h"

namespace quern {
namespace {

constexpr char kOp[] = "gguf";
constexpr int64_t kMaxKeyBytes = 65535;  // the format's own limits
constexpr int64_t kMaxNameBytes = 64;
// Of metadata and tensor list: it is held in memory, and a sparse file may
// claim any length. A vocabulary of 256 Ki tokens takes some 16 MiB.
constexpr int64_t kMaxHeaderBytes = int64_t{256} << 20;
constexpr int64_t kMaxRank = 4;
constexpr int64_t kDefaultAlignment = 32;
constexpr int64_t kMinAlignment = 8;
constexpr int64_t kMaxAlignment = 1 << 16;
// The least that a key (1-byte name, 1-byte value) and a tensor (1-byte name,
// one dimension) take: a count that needs more than the file is a lie.
constexpr int64_t kMinKeyBytes = 8 + 1 + 4 + 1;
constexpr int64_t kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;

// Bytes of a scalar; 0 for strings, arrays and numbers that are no type.
int64_t ScalarBytes(GgufValueType type) {
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

absl::string_view ValueTypeName(GgufValueType type) {
  static constexpr absl::string_view kNames[] = {
      "u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
      "bool", "string", "array", "u64", "i64", "f64"};
  const auto index = static_cast<uint32_t>(type);
  return index < 13 ? kNames[index] : "unknown";
}

struct BlockSize {
  int64_t elements;
  int64_t bytes;
};

BlockSize BlockOf(GgufTensorType type) {
  switch (type) {
    case GgufTensorType::kF32:
      return {1, 4};
    case GgufTensorType::kF16:
    case GgufTensorType::kBF16:
      return {1, 2};
    case GgufTensorType::kQ8_0:
      return {GgufFile::kQ8Block, GgufFile::kQ8BlockBytes};
  }
  return {0, 0};
}

// A name out of the file, fit to be printed.
std::string Quoted(absl::string_view text) {
  constexpr size_t kShown = 64;
  return absl::StrCat("'", absl::CHexEscape(text.substr(0, kShown)),
                      text.size() > kShown ? "...'" : "'");
}

template <typename T>
T Load(const uint8_t* from) {  // GGUF and every target here: little-endian
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

void Store(float value, float* to) { *to = value; }
void Store(float value, BFloat16* to) { *to = hwy::BF16FromF32(value); }

// `elements` of `type` at `from` to `out`.
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
    case GgufTensorType::kQ8_0:
      for (int64_t block = 0; block < elements / GgufFile::kQ8Block; ++block) {
        const uint8_t* in = from + block * GgufFile::kQ8BlockBytes;
        const float scale = hwy::F32FromF16(Load<Float16>(in));
        for (int64_t i = 0; i < GgufFile::kQ8Block; ++i) {
          Store(scale * static_cast<float>(static_cast<int8_t>(in[2 + i])),
                out + block * GgufFile::kQ8Block + i);
        }
      }
      return;
  }
}

}  // namespace

absl::string_view GgufTensorTypeName(GgufTensorType type) {
  switch (type) {
    case GgufTensorType::kF32:
      return "F32";
    case GgufTensorType::kF16:
      return "F16";
    case GgufTensorType::kQ8_0:
      return "Q8_0";
    case GgufTensorType::kBF16:
      return "BF16";
  }
  return "unknown";
}

// Walks the header. Every step is checked against the file's size.
class GgufFile::Cursor {
 public:
  explicit Cursor(GgufFile& file) : file_(file) {}

  int64_t offset() const { return offset_; }
  int64_t left() const { return file_.size_ - offset_; }

  // Moves over `bytes`; what they are is said by `what`.
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

  // A count or length: what follows takes at least count * each bytes.
  absl::StatusOr<int64_t> ReadCount(absl::string_view what, int64_t each) {
    QUERN_ASSIGN_OR_RETURN(const uint64_t count, Read<uint64_t>(what));
    if (count > static_cast<uint64_t>(left() / each)) {
      return InvalidArgument(kOp, what, "=", count, " at offset ", offset_ - 8,
                             "; the rest of the file has room for ",
                             left() / each);
    }
    return static_cast<int64_t>(count);
  }

  // The view is valid until the next step.
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

  // Moves over `count` values of `type`.
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
    Value value{static_cast<GgufValueType>(code), GgufValueType::kU8, 1,
                offset_};
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

absl::StatusOr<GgufFile> GgufFile::Open(const std::string& path) {
  GgufFile file;
  // O_NONBLOCK: a FIFO would block before it can be refused.
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
  if (file.size_ > 0) {
    void* mapping = mmap(nullptr, static_cast<size_t>(file.size_), PROT_READ,
                         MAP_PRIVATE, file.fd_, 0);
    if (mapping == MAP_FAILED) {
      return absl::ErrnoToStatus(
          errno, absl::StrCat(kOp, ": cannot map ", Quoted(path)));
    }
    file.memory_ = static_cast<const uint8_t*>(mapping);
  }
  QUERN_RETURN_IF_ERROR(file.ParseHeader());
  return file;
}

absl::StatusOr<GgufFile> GgufFile::Parse(absl::Span<const uint8_t> bytes) {
  GgufFile file;
  file.memory_ = bytes.data();
  file.size_ = static_cast<int64_t>(bytes.size());
  QUERN_RETURN_IF_ERROR(file.ParseHeader());
  return file;
}

GgufFile::GgufFile(GgufFile&& other) noexcept { *this = std::move(other); }

GgufFile& GgufFile::operator=(GgufFile&& other) noexcept {
  if (this == &other) return *this;
  Close();
  fd_ = std::exchange(other.fd_, -1);
  memory_ = std::exchange(other.memory_, nullptr);
  size_ = std::exchange(other.size_, 0);
  head_ = std::move(other.head_);
  values_ = std::move(other.values_);
  tensors_ = std::move(other.tensors_);
  tensor_index_ = std::move(other.tensor_index_);
  return *this;
}

GgufFile::~GgufFile() { Close(); }

void GgufFile::Close() {
  if (fd_ < 0) return;
  if (memory_ != nullptr) {
    munmap(const_cast<uint8_t*>(memory_), static_cast<size_t>(size_));
  }
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

absl::Status GgufFile::ParseHeader() {
  Cursor cursor(*this);
  QUERN_ASSIGN_OR_RETURN(const uint32_t magic, cursor.Read<uint32_t>("magic"));
  if (magic != 0x46554747) {  // "GGUF"
    return InvalidArgument(kOp, "magic=0x", absl::Hex(magic, absl::kZeroPad8),
                           "; need 0x46554747 (GGUF): not a GGUF file");
  }
  QUERN_ASSIGN_OR_RETURN(const uint32_t version,
                         cursor.Read<uint32_t>("version"));
  if (version != 3) {
    return Unimplemented(kOp, "version=", version, "; need 3",
                         version == 0x03000000 ? " (big-endian file)" : "");
  }
  QUERN_ASSIGN_OR_RETURN(const int64_t num_tensors,
                         cursor.ReadCount("tensor count", kMinTensorBytes));
  QUERN_ASSIGN_OR_RETURN(const int64_t num_keys,
                         cursor.ReadCount("key count", kMinKeyBytes));
  for (int64_t i = 0; i < num_keys; ++i) {
    QUERN_ASSIGN_OR_RETURN(
        const absl::string_view view,
        cursor.ReadString(absl::StrCat("name of key ", i), kMaxKeyBytes));
    if (view.empty()) {
      return InvalidArgument(kOp, "name of key ", i, " is empty");
    }
    std::string key(view);
    QUERN_ASSIGN_OR_RETURN(const Value value,
                           cursor.ReadValue(absl::StrCat("key ", Quoted(key))));
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
  const BlockSize block = BlockOf(tensor.type);
  if (block.elements == 0) {
    return Unimplemented(kOp, what, " has type=", type,
                         "; need F32 (0), F16 (1), Q8_0 (8) or BF16 (30)");
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

// Makes offsets absolute, and proves that the tensors lie apart in the file.
absl::Status GgufFile::PlaceTensors(int64_t data_begin, int64_t alignment) {
  std::vector<size_t> order(tensors_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return tensors_[a].offset < tensors_[b].offset;
  });
  int64_t end = 0;  // of the tensor before, relative to data_begin
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

absl::StatusOr<const GgufTensor*> GgufFile::FindTensor(
    absl::string_view name) const {
  const auto it = tensor_index_.find(name);
  if (it == tensor_index_.end()) {
    return absl::NotFoundError(absl::StrCat(kOp, ": no tensor ", Quoted(name)));
  }
  return &tensors_[it->second];
}

absl::StatusOr<GgufFile::Value> GgufFile::Find(absl::string_view key,
                                               GgufValueType type) const {
  const auto it = values_.find(key);
  if (it == values_.end()) {
    return absl::NotFoundError(absl::StrCat(kOp, ": no key ", Quoted(key)));
  }
  if (it->second.type != type) {
    return InvalidArgument(kOp, "key ", Quoted(key), " is of type ",
                           ValueTypeName(it->second.type), "; need ",
                           ValueTypeName(type));
  }
  return it->second;
}

absl::StatusOr<GgufFile::Value> GgufFile::FindArray(
    absl::string_view key, GgufValueType element) const {
  QUERN_ASSIGN_OR_RETURN(const Value value, Find(key, GgufValueType::kArray));
  if (value.element != element) {
    return InvalidArgument(kOp, "key ", Quoted(key), " is an array of ",
                           ValueTypeName(value.element), "; need ",
                           ValueTypeName(element));
  }
  return value;
}

absl::StatusOr<int64_t> GgufFile::GetInt(absl::string_view key) const {
  const auto it = values_.find(key);
  const GgufValueType type =
      it == values_.end() ? GgufValueType::kI64 : it->second.type;
  const uint8_t* at =
      it == values_.end() ? nullptr : header() + it->second.offset;
  switch (type) {
    case GgufValueType::kU8:
      return Load<uint8_t>(at);
    case GgufValueType::kI8:
      return Load<int8_t>(at);
    case GgufValueType::kU16:
      return Load<uint16_t>(at);
    case GgufValueType::kI16:
      return Load<int16_t>(at);
    case GgufValueType::kU32:
      return Load<uint32_t>(at);
    case GgufValueType::kI32:
      return Load<int32_t>(at);
    case GgufValueType::kU64:
      if (Load<uint64_t>(at) >> 63 != 0) {
        return InvalidArgument(kOp, "key ", Quoted(key), " is ",
                               Load<uint64_t>(at), "; need < 2^63");
      }
      return static_cast<int64_t>(Load<uint64_t>(at));
    default: {
      QUERN_ASSIGN_OR_RETURN(const Value value, Find(key, GgufValueType::kI64));
      return Load<int64_t>(header() + value.offset);
    }
  }
}

absl::StatusOr<uint32_t> GgufFile::GetU32(absl::string_view key) const {
  QUERN_ASSIGN_OR_RETURN(const Value value, Find(key, GgufValueType::kU32));
  return Load<uint32_t>(header() + value.offset);
}

absl::StatusOr<float> GgufFile::GetF32(absl::string_view key) const {
  QUERN_ASSIGN_OR_RETURN(const Value value, Find(key, GgufValueType::kF32));
  return Load<float>(header() + value.offset);
}

absl::StatusOr<bool> GgufFile::GetBool(absl::string_view key) const {
  QUERN_ASSIGN_OR_RETURN(const Value value, Find(key, GgufValueType::kBool));
  return header()[value.offset] != 0;
}

absl::StatusOr<absl::string_view> GgufFile::GetString(
    absl::string_view key) const {
  QUERN_ASSIGN_OR_RETURN(const Value value, Find(key, GgufValueType::kString));
  const uint8_t* at = header() + value.offset;
  return absl::string_view(reinterpret_cast<const char*>(at + 8),
                           Load<uint64_t>(at));
}

absl::StatusOr<std::vector<absl::string_view>> GgufFile::GetStrings(
    absl::string_view key) const {
  QUERN_ASSIGN_OR_RETURN(const Value value,
                         FindArray(key, GgufValueType::kString));
  std::vector<absl::string_view> strings;
  strings.reserve(static_cast<size_t>(value.count));
  const uint8_t* at = header() + value.offset;
  for (int64_t i = 0; i < value.count; ++i) {
    const auto length = Load<uint64_t>(at);
    strings.emplace_back(reinterpret_cast<const char*>(at + 8), length);
    at += 8 + length;
  }
  return strings;
}

absl::StatusOr<std::vector<float>> GgufFile::GetF32s(
    absl::string_view key) const {
  QUERN_ASSIGN_OR_RETURN(const Value value,
                         FindArray(key, GgufValueType::kF32));
  std::vector<float> out(static_cast<size_t>(value.count));
  if (!out.empty()) {
    std::memcpy(out.data(), header() + value.offset,
                out.size() * sizeof(float));
  }
  return out;
}

absl::StatusOr<std::vector<int32_t>> GgufFile::GetI32s(
    absl::string_view key) const {
  QUERN_ASSIGN_OR_RETURN(const Value value,
                         FindArray(key, GgufValueType::kI32));
  std::vector<int32_t> out(static_cast<size_t>(value.count));
  if (!out.empty()) {
    std::memcpy(out.data(), header() + value.offset,
                out.size() * sizeof(int32_t));
  }
  return out;
}

absl::Span<const uint8_t> GgufFile::Mapped(const GgufTensor& tensor) const {
  return {memory_ + tensor.offset, static_cast<size_t>(tensor.bytes)};
}

template <typename Out>
absl::Status GgufFile::ReadRowsTo(const GgufTensor& tensor, int64_t first_row,
                                  absl::Span<Out> out) const {
  const auto elements = static_cast<int64_t>(out.size());
  const int64_t rows = elements / tensor.cols();
  if (elements % tensor.cols() != 0 || first_row < 0 || rows > tensor.rows() ||
      first_row > tensor.rows() - rows) {
    return InvalidArgument(kOp, "tensor ", Quoted(tensor.name), ": ", elements,
                           " elements from row ", first_row,
                           "; need whole rows of ", tensor.cols(), " within ",
                           tensor.rows());
  }
  const BlockSize block = BlockOf(tensor.type);
  // Whole blocks, about 64 KiB: stays in L1/L2 between pread and conversion.
  constexpr int64_t kChunkElements = 1 << 15;
  std::string chunk;
  int64_t offset =
      tensor.offset + first_row * tensor.cols() / block.elements * block.bytes;
  for (int64_t done = 0; done < elements; done += kChunkElements) {
    const int64_t now = std::min(kChunkElements, elements - done);
    const int64_t bytes = now / block.elements * block.bytes;
    chunk.resize(static_cast<size_t>(bytes));
    QUERN_RETURN_IF_ERROR(ReadAt(offset, bytes, &chunk[0]));
    Convert(tensor.type, reinterpret_cast<const uint8_t*>(chunk.data()), now,
            out.data() + done);
    offset += bytes;
  }
  return absl::OkStatus();
}

absl::Status GgufFile::ReadRows(const GgufTensor& tensor, int64_t first_row,
                                absl::Span<float> out) const {
  return ReadRowsTo(tensor, first_row, out);
}
absl::Status GgufFile::ReadRows(const GgufTensor& tensor, int64_t first_row,
                                absl::Span<BFloat16> out) const {
  return ReadRowsTo(tensor, first_row, out);
}

}  // namespace quern
