#ifndef QUERN_MODELS_GGUF_GGUF_H_
#define QUERN_MODELS_GGUF_GGUF_H_

// A reader of GGUF, versions 2 and 3, little-endian:
//
//   "GGUF" u32 version | u64 tensors | u64 keys
//   keys    x { string key, u32 type, value }
//   tensors x { string name, u32 rank, u64 dims[rank], u32 type, u64 offset }
//   padding to general.alignment (32 if absent) | tensor data
//
// Dimensions are listed fastest first: dims [256, 512] are 512 rows of 256.
// A string is a u64 length and bytes; an array is a u32 element type, a u64
// count and the elements.
//
// The file is not trusted. Open and Parse refuse, with a sentence that names
// field, value and bound: another version or byte order; anything that ends
// beyond the file; counts, lengths and sizes that overflow; arrays of arrays;
// bools other than 0 and 1; two keys or two tensors of one name; ranks other
// than 1..4; zero dimensions; rows that are not whole blocks; tensor types
// other than F32, F16, BF16 and the formats of quant/block_format.h; data that
// is misaligned, overlaps or leaves the file. Memory stays within a small
// multiple of the file's size.
//
// A model may be split into several files, the parts, whose names end in
// -00001-of-00003.gguf and so on. The first part has the metadata. Open takes
// its path, opens the other parts beside it, and the result has the tensors of
// all of them.
//
// The file must not change while it is open. If it becomes shorter, Open and
// the Read functions report DataLoss: they use pread, and nothing is mapped.
//
// Thread-safe after Open: all members are const.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/quant/block_format.h"

namespace quern {

// Value types by their number in the file format.
enum class GgufValueType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

// The block formats of quant/block_format.h, which has their formulas, and the
// types whose blocks are single elements.
enum class GgufTensorType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = static_cast<uint32_t>(BlockFormat::kQ4_0),
  kQ4_1 = static_cast<uint32_t>(BlockFormat::kQ4_1),
  kQ5_0 = static_cast<uint32_t>(BlockFormat::kQ5_0),
  kQ5_1 = static_cast<uint32_t>(BlockFormat::kQ5_1),
  kQ8_0 = static_cast<uint32_t>(BlockFormat::kQ8_0),
  kQ2_K = static_cast<uint32_t>(BlockFormat::kQ2_K),
  kQ3_K = static_cast<uint32_t>(BlockFormat::kQ3_K),
  kQ4_K = static_cast<uint32_t>(BlockFormat::kQ4_K),
  kQ5_K = static_cast<uint32_t>(BlockFormat::kQ5_K),
  kQ6_K = static_cast<uint32_t>(BlockFormat::kQ6_K),
  kIQ4_NL = static_cast<uint32_t>(BlockFormat::kIQ4_NL),
  kIQ4_XS = static_cast<uint32_t>(BlockFormat::kIQ4_XS),
  kBF16 = 30,
  kTQ2_0 = static_cast<uint32_t>(BlockFormat::kTQ2_0),
  kMXFP4 = static_cast<uint32_t>(BlockFormat::kMXFP4),
};

// Returns "F32" or "Q8_0" and so on, also for types that this reader refuses,
// such as "IQ2_XS"; "unknown" for other numbers.
absl::string_view GgufTensorTypeName(GgufTensorType type);

// A row consists of whole blocks; F32, F16 and BF16 have blocks of one element.
struct GgufBlock {
  int64_t elements;
  int64_t bytes;
};
// Zeros for a type that this reader refuses.
GgufBlock GgufBlockOf(GgufTensorType type);

struct GgufTensor {
  std::string name;
  GgufTensorType type;
  std::vector<int64_t> dims;  // 1..4 of them, each >= 1, fastest first
  int64_t elements;           // their product
  int64_t offset;             // of the first byte, from the file's start
  int64_t bytes;
  int32_t part = 0;  // which file of a split model has the data

  int64_t cols() const { return dims[0]; }
  int64_t rows() const { return elements / dims[0]; }
  int64_t row_bytes() const { return bytes / rows(); }
};

// Rows [row, row + rows) of a tensor, and columns [col, col + cols) of each.
struct GgufPart {
  int64_t row = 0, rows = 0;
  int64_t col = 0, cols = 0;
};

class GgufFile {
 public:
  // NotFound, PermissionDenied or another error of the system if the file
  // cannot be opened; InvalidArgument or Unimplemented if this reader does not
  // support its contents. Time is proportional to the header. Tensor data is
  // not read. A refusal of a split model names the part that is missing, or the
  // first part if the path is another's.
  static absl::StatusOr<GgufFile> Open(const std::string& path);

  // Like Open, for bytes in memory, which must outlive the result.
  // Unimplemented for a part of a split model.
  static absl::StatusOr<GgufFile> Parse(absl::Span<const uint8_t> bytes);

  GgufFile(GgufFile&& other) noexcept;
  GgufFile& operator=(GgufFile&& other) noexcept;
  ~GgufFile();

  // The bytes of all parts together.
  int64_t file_bytes() const {
    int64_t bytes = size_;
    for (const GgufFile& part : other_parts_) bytes += part.size_;
    return bytes;
  }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }

  // InvalidArgument names the missing tensor. The pointer lives as long as this
  // object.
  absl::StatusOr<const GgufTensor*> FindTensor(absl::string_view name) const;
  bool HasTensor(absl::string_view name) const {
    return tensor_index_.find(name) != tensor_index_.end();
  }

  // Metadata. InvalidArgument if the key is missing, or if its value has
  // another type or, for GetInt, does not fit in an int64.
  bool Has(absl::string_view key) const {
    return values_.find(key) != values_.end();
  }
  // Accepts any of the eight integer types.
  absl::StatusOr<int64_t> GetInt(absl::string_view key) const;
  absl::StatusOr<uint32_t> GetU32(absl::string_view key) const;
  absl::StatusOr<float> GetF32(absl::string_view key) const;
  absl::StatusOr<bool> GetBool(absl::string_view key) const;
  // The returned view lives as long as this object.
  absl::StatusOr<absl::string_view> GetString(absl::string_view key) const;
  absl::StatusOr<std::vector<absl::string_view>> GetStrings(
      absl::string_view key) const;
  absl::StatusOr<std::vector<float>> GetF32s(absl::string_view key) const;
  absl::StatusOr<std::vector<int32_t>> GetI32s(absl::string_view key) const;

  // The names of all keys, sorted, and the bytes that the file has of one:
  // name, type and value. The views live as long as this object.
  std::vector<absl::string_view> Keys() const;
  absl::StatusOr<absl::string_view> KeyBytes(absl::string_view key) const;

  // Describes the file for refusals: "GGUF 3 of architecture 'llama', name 'x',
  // tensors F32 and Q8_0".
  std::string Describe() const;

  // Reads and converts the rows [first_row, first_row + out.size() / cols()).
  // F32, F16 and BF16 to f32 are exact; block formats become what DecodeBlocks
  // makes of them. To bf16, the f32 value is rounded to nearest even. DataLoss
  // if the file ends too early.
  absl::Status ReadRows(const GgufTensor& tensor, int64_t first_row,
                        absl::Span<float> out) const;
  absl::Status ReadRows(const GgufTensor& tensor, int64_t first_row,
                        absl::Span<BFloat16> out) const;

  // Like ReadRows, for a part of a tensor, row after row; reads nothing else of
  // the file. InvalidArgument unless out has rows * cols elements, the part
  // lies in the tensor, and its columns begin and end at blocks.
  absl::Status ReadPart(const GgufTensor& tensor, const GgufPart& part,
                        absl::Span<float> out) const;
  absl::Status ReadPart(const GgufTensor& tensor, const GgufPart& part,
                        absl::Span<BFloat16> out) const;

  // Reads a part without conversion; `out` has PartBytes bytes.
  absl::Status ReadPartBytes(const GgufTensor& tensor, const GgufPart& part,
                             absl::Span<uint8_t> out) const;
  // Tells the system that `bytes` from `offset` on, of a file of a split model,
  // will be read soon. Does nothing for bytes in memory.
  void ExpectReads(int32_t part, int64_t offset, int64_t bytes) const;

  // The bytes of rows * cols elements in the tensor's type, for columns of
  // whole blocks. -1 for 2^63 or more, which no part of a tensor has.
  static int64_t PartBytes(const GgufTensor& tensor, const GgufPart& part);

 private:
  class Cursor;
  // Location of a value. For an array: its element type, count and first
  // element.
  struct Value {
    GgufValueType type;
    GgufValueType element;
    int64_t count;
    int64_t offset;
    int64_t begin = 0, end = 0;  // of name, type and value
  };

  GgufFile() = default;
  void Close();
  // Opens one file, which may be a part of a split model.
  static absl::StatusOr<GgufFile> OpenPart(const std::string& path);
  // Opens the other parts of a split model, and takes their tensors. Does
  // nothing for a model of one file.
  absl::Status JoinParts(const std::string& path);
  // Part `no` of `count`, opened and checked.
  static absl::StatusOr<GgufFile> OpenPartOf(const std::string& path,
                                             int64_t no, int64_t count);
  // The number of parts, 1 for a model of one file; the number of this one,
  // from 0 on.
  absl::Status ReadSplit(int64_t& count, int64_t& no) const;
  // The file that has the tensor's data.
  const GgufFile& PartOf(const GgufTensor& tensor) const {
    return tensor.part == 0
               ? *this
               : other_parts_[static_cast<size_t>(tensor.part - 1)];
  }
  absl::Status ParseHeader();
  absl::Status ParseTensor(Cursor& cursor, int64_t index);
  absl::Status PlaceTensors(int64_t data_begin, int64_t alignment);
  // Makes header()[0, end) valid; end <= size_.
  absl::Status Ensure(int64_t end);
  const uint8_t* header() const {
    return fd_ < 0 ? memory_ : reinterpret_cast<const uint8_t*>(head_.data());
  }
  // Like Describe, but without tensors, which may not have been read yet.
  std::string DescribeKeys() const;
  // InvalidArgument unless the part lies in the tensor and has `size` elements,
  // or `size` bytes with in_bytes.
  absl::Status CheckPart(const GgufTensor& tensor, const GgufPart& part,
                         size_t size, bool in_bytes) const;
  // Copies the file's [offset, offset + bytes).
  absl::Status ReadAt(int64_t offset, int64_t bytes, void* out) const;
  template <typename Out>
  absl::Status ReadRowsTo(const GgufTensor& tensor, int64_t first_row,
                          absl::Span<Out> out) const;
  template <typename Out>
  absl::Status ReadPartTo(const GgufTensor& tensor, const GgufPart& part,
                          absl::Span<Out> out) const;
  absl::StatusOr<Value> Find(absl::string_view key, GgufValueType type) const;
  absl::StatusOr<Value> FindArray(absl::string_view key,
                                  GgufValueType element) const;

  int fd_ = -1;                      // -1: parsed from memory
  const uint8_t* memory_ = nullptr;  // the caller's bytes; null for a file
  int64_t size_ = 0;
  uint32_t version_ = 0;
  std::string head_;  // the header, if read from a file
  // A std::map, because Abseil's hash tables do not compile under GCC 12's
  // -fsanitize=undefined.
  std::map<std::string, Value, std::less<>> values_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string, size_t, std::less<>> tensor_index_;
  std::vector<GgufFile> other_parts_;  // without tensors
};

}  // namespace quern

#endif  // QUERN_MODELS_GGUF_GGUF_H_
