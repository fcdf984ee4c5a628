#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "quern/core/status_macros.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_format.h"
#include "quern/quant/block_format.h"

namespace quern {
namespace {

using gguf_format::kOp;
using gguf_format::Load;
using gguf_format::Quoted;
using gguf_format::ValueTypeName;

struct TypeName {
  uint32_t type;
  absl::string_view name;
};
// The tensor types of the format by number, including those that this reader
// refuses.
constexpr TypeName kTypeNames[] = {
    {0, "F32"},      {1, "F16"},     {2, "Q4_0"},     {3, "Q4_1"},
    {6, "Q5_0"},     {7, "Q5_1"},    {8, "Q8_0"},     {9, "Q8_1"},
    {10, "Q2_K"},    {11, "Q3_K"},   {12, "Q4_K"},    {13, "Q5_K"},
    {14, "Q6_K"},    {15, "Q8_K"},   {16, "IQ2_XXS"}, {17, "IQ2_XS"},
    {18, "IQ3_XXS"}, {19, "IQ1_S"},  {20, "IQ4_NL"},  {21, "IQ3_S"},
    {22, "IQ2_S"},   {23, "IQ4_XS"}, {24, "I8"},      {25, "I16"},
    {26, "I32"},     {27, "I64"},    {28, "F64"},     {29, "IQ1_M"},
    {30, "BF16"},    {34, "TQ1_0"},  {35, "TQ2_0"},   {39, "MXFP4"}};

}  // namespace

absl::string_view GgufTensorTypeName(GgufTensorType type) {
  for (const TypeName& entry : kTypeNames) {
    if (entry.type == static_cast<uint32_t>(type)) return entry.name;
  }
  return "unknown";
}

GgufBlock GgufBlockOf(GgufTensorType type) {
  switch (type) {
    case GgufTensorType::kF32:
      return {1, 4};
    case GgufTensorType::kF16:
    case GgufTensorType::kBF16:
      return {1, 2};
    default:
      break;
  }
  const BlockFormatInfo* format = FindBlockFormat(static_cast<uint32_t>(type));
  if (format == nullptr) return {0, 0};
  return {format->values, format->bytes};
}

std::string gguf_format::SupportedTypes() {
  std::vector<std::string> types;
  for (const TypeName& entry : kTypeNames) {
    if (GgufBlockOf(static_cast<GgufTensorType>(entry.type)).elements > 0) {
      types.push_back(absl::StrCat(entry.name, " (", entry.type, ")"));
    }
  }
  const std::string last = types.back();
  types.pop_back();
  return absl::StrCat(absl::StrJoin(types, ", "), " or ", last);
}

std::string GgufFile::DescribeKeys() const {
  std::string text = absl::StrCat("GGUF ", version_);
  for (const auto& [key, what] :
       {std::pair<const char*, const char*>{"general.architecture",
                                            " of architecture "},
        {"general.name", ", name "}}) {
    const absl::StatusOr<absl::string_view> value = GetString(key);
    if (value.ok()) absl::StrAppend(&text, what, Quoted(*value));
  }
  return text;
}

std::string GgufFile::Describe() const {
  std::vector<absl::string_view> types;
  for (const GgufTensor& tensor : tensors_) {
    const absl::string_view name = GgufTensorTypeName(tensor.type);
    if (std::find(types.begin(), types.end(), name) == types.end()) {
      types.push_back(name);
    }
  }
  if (types.empty()) return DescribeKeys();
  return absl::StrCat(DescribeKeys(), ", tensors ",
                      absl::StrJoin(types, " and "));
}

std::vector<absl::string_view> GgufFile::Keys() const {
  std::vector<absl::string_view> keys;
  keys.reserve(values_.size());
  for (const auto& [key, value] : values_) keys.push_back(key);
  return keys;
}

absl::StatusOr<absl::string_view> GgufFile::KeyBytes(
    absl::string_view key) const {
  const auto it = values_.find(key);
  if (it == values_.end()) {
    return InvalidArgument(kOp, "no key ", Quoted(key));
  }
  return absl::string_view(
      reinterpret_cast<const char*>(header()) + it->second.begin,
      static_cast<size_t>(it->second.end - it->second.begin));
}

absl::StatusOr<const GgufTensor*> GgufFile::FindTensor(
    absl::string_view name) const {
  const auto it = tensor_index_.find(name);
  if (it == tensor_index_.end()) {
    return InvalidArgument(kOp, "no tensor ", Quoted(name));
  }
  return &tensors_[it->second];
}

absl::StatusOr<GgufFile::Value> GgufFile::Find(absl::string_view key,
                                               GgufValueType type) const {
  const auto it = values_.find(key);
  if (it == values_.end()) {
    return InvalidArgument(kOp, "no key ", Quoted(key));
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

}  // namespace quern
