#include "quern/ops/registry/op_tensors.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <variant>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "quern/core/check_args.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

// The number of rows of a shape, whose extents `extent` returns.
template <typename Extent>
int64_t CountRows(OpRows rows, int rank, const Extent& extent) {
  if (rank <= 0) return 0;
  if (rows == OpRows::kFirst) return extent(0);
  int64_t count = 1;
  bool fits = true;
  for (int d = 0; d + 1 < rank; ++d) {
    if (extent(d) <= 0) return 0;
    fits = fits && CheckedMul(count, extent(d), &count);
  }
  return fits ? count : std::numeric_limits<int64_t>::max();
}

bool IsInPlace(const OpRules& rules, const std::string& a,
               const std::string& b) {
  return std::any_of(rules.in_place.begin(), rules.in_place.end(),
                     [&](const std::pair<std::string, std::string>& pair) {
                       return (pair.first == a && pair.second == b) ||
                              (pair.first == b && pair.second == a);
                     });
}

bool IsOfWord(char c) {
  return c == '_' || absl::ascii_isalnum(static_cast<unsigned char>(c));
}

// `text` with `to` in place of each `from` that a comparison names: "need 1 <=
// from <= 8".
std::string RenameBounds(absl::string_view text, const std::string& from,
                         const std::string& to) {
  std::string renamed;
  size_t at = 0;
  while (at < text.size()) {
    const absl::string_view rest = text.substr(at);
    const bool here = absl::StartsWith(rest, from) && at > 0 &&
                      !IsOfWord(text[at - 1]) &&
                      (absl::StartsWith(rest.substr(from.size()), " <") ||
                       absl::StartsWith(rest.substr(from.size()), " >"));
    if (here) {
      renamed += to;
      at += from.size();
    } else {
      renamed += text[at++];
    }
  }
  return renamed;
}

}  // namespace

absl::Status InWordsOf(absl::string_view op, const OpRules& rules,
                       const absl::Status& status) {
  if (status.ok()) return status;
  const absl::Status named = OfOp(op, status);
  const absl::string_view text = named.message().substr(op.size() + 2);
  for (const auto& [from, to] : rules.words) {
    if (!absl::StartsWith(text, from)) continue;
    const absl::string_view rest = text.substr(from.size());
    if (!rest.empty() && IsOfWord(rest[0])) continue;  // a longer word
    return absl::Status(
        status.code(),
        absl::StrCat(op, ": ", to, RenameBounds(rest, from, to)));
  }
  return named;
}

std::vector<std::string> OpTensors::NamesOf(const OpSchema& schema) {
  std::vector<std::string> names;
  for (const OpParam& param : schema.params) {
    if (param.type == OpType::kTensor) names.push_back(param.name);
  }
  for (int i = 0; i < schema.returns; ++i) {
    names.push_back(schema.returns == 1 ? "out" : absl::StrCat("out", i));
  }
  return names;
}

OpTensors::OpTensors(const OpSchema& schema, const OpRules& rules,
                     absl::Span<const OpArg> args,
                     absl::Span<const TensorMeta> returns)
    : op_(schema.name), rules_(rules) {
  const std::vector<std::string> names = NamesOf(schema);
  bool counted = false;
  const auto add = [&](const TensorMeta* meta, bool written) {
    const size_t at = tensors_.size();
    const bool given = meta != nullptr;
    tensors_.push_back({names[at], given ? meta->dtype : DType::kF32,
                        given ? static_cast<int>(meta->extents.size()) : 0,
                        given, written});
    if (!given || counted) return;
    if (!rules.rows_of.empty() && rules.rows_of != names[at]) return;
    counted = true;
    rows_of_ = at;
    made_rows_ = CountRows(rules_.rows, tensors_[at].rank, [&](int d) {
      return meta->extents[static_cast<size_t>(d)];
    });
  };
  for (size_t i = 0; i < schema.params.size() && i < args.size(); ++i) {
    const OpParam& param = schema.params[i];
    if (param.type != OpType::kTensor) continue;
    add(std::get_if<TensorMeta>(&args[i]), param.mutated);
  }
  for (const TensorMeta& meta : returns) {
    if (tensors_.size() < names.size()) add(&meta, true);
  }
  for (size_t i = 0; i < size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const Tensor &a = tensors_[i], &b = tensors_[j];
      if (!a.given || !b.given || !(a.written || b.written)) continue;
      if (IsInPlace(rules, a.name, b.name)) continue;
      apart_.push_back(a.written ? Pair{i, j} : Pair{j, i});
    }
  }
}

absl::Status OpTensors::Arrange(absl::Span<const NamedTensor> named,
                                std::vector<AnyTensorView>& ordered) const {
  ordered.assign(size(), AnyTensorView());
  for (const auto& [name, view] : named) {
    size_t i = 0;
    while (i < size() && tensors_[i].name != name) ++i;
    if (i == size()) {
      std::string names;
      for (const Tensor& tensor : tensors_) {
        absl::StrAppend(&names, names.empty() ? "" : ", ", tensor.name);
      }
      return InvalidArgument(op_, "has no tensor ", name, "; need ", names);
    }
    if (ordered[i].rank() != 0) {
      return InvalidArgument(op_, name, " is given twice");
    }
    ordered[i] = view;
  }
  return Check(ordered);
}

absl::Status OpTensors::CheckGiven(const Tensor& tensor,
                                   const AnyTensorView& view) const {
  if ((view.rank() != 0) != tensor.given) {
    return InvalidArgument(op_, tensor.name,
                           tensor.given ? " is missing" : " is given",
                           "; need what the operator was made with");
  }
  if (!tensor.given) return absl::OkStatus();
  if (view.dtype() != tensor.dtype) {
    return InvalidArgument(op_, tensor.name, " is ", DTypeName(view.dtype()),
                           "; need ", DTypeName(tensor.dtype),
                           ", as the operator was made");
  }
  if (view.rank() != tensor.rank) {
    return InvalidArgument(op_, tensor.name, " has rank ", view.rank(),
                           "; need ", tensor.rank,
                           ", as the operator was made");
  }
  if (tensor.written && !view.writable() && !IsEmpty(view)) {
    return InvalidArgument(op_, tensor.name,
                           " is read-only; need a view that may be written");
  }
  return absl::OkStatus();
}

absl::Status OpTensors::Check(absl::Span<const AnyTensorView> ordered) const {
  if (ordered.size() != size()) {
    return InvalidArgument(op_, "tensors=", ordered.size(), "; need ", size(),
                           ", as the schema has");
  }
  for (size_t i = 0; i < size(); ++i) {
    const Tensor& tensor = tensors_[i];
    const AnyTensorView& view = ordered[i];
    // Called for each step, so what is nearly always true is asked first.
    if (tensor.given == (view.rank() != 0) && tensor.rank == view.rank() &&
        tensor.dtype == view.dtype() && (view.writable() || !tensor.written)) {
      continue;
    }
    QUERN_RETURN_IF_ERROR(CheckGiven(tensor, view));
  }
  for (const Pair& pair : apart_) {
    if (!MayOverlap(ordered[pair.other], ordered[pair.written])) continue;
    return CheckApart(op_, tensors_[pair.other].name, ordered[pair.other],
                      tensors_[pair.written].name, ordered[pair.written]);
  }
  return absl::OkStatus();
}

int64_t OpTensors::Rows(absl::Span<const AnyTensorView> ordered) const {
  if (rows_of_ >= ordered.size()) return 0;
  const AnyTensorView& view = ordered[rows_of_];
  return CountRows(rules_.rows, view.rank(),
                   [&](int d) { return view.extent(d); });
}

}  // namespace quern
