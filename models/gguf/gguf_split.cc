// Models that are split into several files.

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "quern/core/status_macros.h"
#include "quern/models/gguf/gguf.h"
#include "quern/models/gguf/gguf_format.h"

namespace quern {
namespace {

using gguf_format::kOp;
using gguf_format::Quoted;

constexpr char kCount[] = "split.count";
constexpr char kNumber[] = "split.no";
constexpr char kTensors[] = "split.tensors.count";
constexpr int64_t kMaxParts = 65535;

// The end of the name of part `no`, which counts from 0.
std::string EndOfName(int64_t no, int64_t count) {
  return absl::StrFormat("-%05d-of-%05d.gguf", no + 1, count);
}

std::string PartName(int64_t no, int64_t count) {
  return absl::StrCat("part ", no + 1, " of ", count, " of a split model");
}

}  // namespace

absl::Status GgufFile::ReadSplit(int64_t& count, int64_t& no) const {
  count = 1;
  no = 0;
  if (!Has(kCount)) return absl::OkStatus();
  QUERN_ASSIGN_OR_RETURN(count, GetInt(kCount));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, kCount, count, 0, kMaxParts));
  if (count == 0) count = 1;
  if (!Has(kNumber)) return absl::OkStatus();
  QUERN_ASSIGN_OR_RETURN(no, GetInt(kNumber));
  return CheckRange(kOp, kNumber, no, 0, count - 1);
}

absl::StatusOr<GgufFile> GgufFile::OpenPartOf(const std::string& path,
                                              int64_t no, int64_t count) {
  auto part = OpenPart(path);
  if (!part.ok()) {
    return absl::Status(
        part.status().code(),
        absl::StrCat(part.status().message(), "; ", Quoted(path), " is ",
                     PartName(no, count), ", whose parts lie in one folder"));
  }
  int64_t its_count, its_no;
  QUERN_RETURN_IF_ERROR(part->ReadSplit(its_count, its_no));
  if (its_count == count && its_no == no) return part;
  return InvalidArgument(kOp, Quoted(path), " is ", PartName(its_no, its_count),
                         "; need ", PartName(no, count), ", as its name says");
}

absl::Status GgufFile::JoinParts(const std::string& path) {
  int64_t count, no;
  QUERN_RETURN_IF_ERROR(ReadSplit(count, no));
  if (count == 1) return absl::OkStatus();
  const std::string end = EndOfName(0, count);
  if (no != 0) {
    return InvalidArgument(kOp, Quoted(path), " is ", PartName(no, count),
                           "; need the first, whose name ends in '", end, "'");
  }
  absl::string_view stem = path;
  if (!absl::EndsWith(stem, end)) {
    return InvalidArgument(kOp, Quoted(path), " is ", PartName(no, count),
                           "; need a name that ends in '", end,
                           "', from which the names of the others follow");
  }
  stem.remove_suffix(end.size());
  for (int64_t other = 1; other < count; ++other) {
    QUERN_ASSIGN_OR_RETURN(
        GgufFile part,
        OpenPartOf(absl::StrCat(stem, EndOfName(other, count)), other, count));
    for (GgufTensor& tensor : part.tensors_) {
      tensor.part = static_cast<int32_t>(other);
      if (!tensor_index_.emplace(tensor.name, tensors_.size()).second) {
        return InvalidArgument(kOp, "tensor ", Quoted(tensor.name), " of ",
                               PartName(other, count),
                               " is in a part before it, too");
      }
      tensors_.push_back(std::move(tensor));
    }
    part.tensors_.clear();
    part.tensor_index_.clear();
    other_parts_.push_back(std::move(part));
  }
  if (!Has(kTensors)) return absl::OkStatus();
  QUERN_ASSIGN_OR_RETURN(const int64_t tensors, GetInt(kTensors));
  return CheckEqual(kOp, kTensors, tensors,
                    static_cast<int64_t>(tensors_.size()), "the parts have");
}

}  // namespace quern
