#ifndef QUERN_OPS_REGISTRY_OP_TENSORS_H_
#define QUERN_OPS_REGISTRY_OP_TENSORS_H_

// The tensors that one operator is executed with: their order, the names,
// dtypes, ranks and marks that the schema and the arguments give them, which of
// them may share memory, and what a row of a step is. All of it holds for every
// implementation.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_schema.h"

namespace quern {

using NamedTensor = std::pair<absl::string_view, AnyTensorView>;

// Which dimensions of a tensor count the rows of a step.
enum class OpRows : uint8_t {
  kFirst,    // the first dimension
  kLeading,  // all dimensions but the last, multiplied
};

// What the text of a schema does not say about an operator's tensors.
struct OpRules {
  // Pairs of tensors that may share memory although one of them is written. The
  // operator's own CheckArgs says how: most pairs need the same elements or
  // none in common. Each other tensor that is written lies apart from all
  // tensors.
  std::vector<std::pair<std::string, std::string>> in_place;
  OpRows rows = OpRows::kFirst;
  // The tensor that has the rows. Empty: the first tensor that is given.
  std::string rows_of = {};
  // What the plans of the operator call its arguments, and what the schema
  // calls them. A refusal that begins with the first word is given with the
  // second: "q.extent(0)=1" becomes "query.extent(0)=1".
  std::vector<std::pair<std::string, std::string>> words = {};
};

// Returns the refusal in the operator's name (OfOp), with the schema's word for
// the argument that it begins with. Allocates nothing for OK.
absl::Status InWordsOf(absl::string_view op, const OpRules& rules,
                       const absl::Status& status);

class OpTensors {
 public:
  OpTensors() = default;
  // Lists the tensors of the schema in its order, then the returned ones:
  // "out", or "out0", "out1" and so on if there are several.
  OpTensors(const OpSchema& schema, const OpRules& rules,
            absl::Span<const OpArg> args, absl::Span<const TensorMeta> returns);

  // The names of the tensors of a schema, in the order described above.
  static std::vector<std::string> NamesOf(const OpSchema& schema);

  // A refusal of the implementation in the words of the schema.
  absl::Status InWords(const absl::Status& status) const {
    return status.ok() ? status : InWordsOf(op_, rules_, status);
  }

  size_t size() const { return tensors_.size(); }
  const std::string& name(size_t i) const { return tensors_[i].name; }

  // Puts the tensors in order, with a default-constructed view for each one
  // that is omitted. Allocates nothing if `ordered` has size() elements
  // already. InvalidArgument for a name that the operator does not have or that
  // is given twice, and for what Check refuses.
  absl::Status Arrange(absl::Span<const NamedTensor> named,
                       std::vector<AnyTensorView>& ordered) const;

  // InvalidArgument names a tensor that is missing, or given although the
  // operator was made without it; that has another dtype or rank than the
  // operator was made with; that is written but read-only; or that is written
  // and overlaps another tensor, unless the pair is declared in place. Reads no
  // elements. The strides may be any numbers.
  absl::Status Check(absl::Span<const AnyTensorView> ordered) const;

  // The rows of a step with these tensors, which BoundOp::WorkspaceBytes takes;
  // INT64_MAX for 2^63 or more. Reads shapes alone, and checks nothing.
  int64_t Rows(absl::Span<const AnyTensorView> ordered) const;
  // The rows of the tensors that the operator was made with.
  int64_t made_rows() const { return made_rows_; }

 private:
  struct Tensor {
    std::string name;
    DType dtype;
    int rank;
    bool given;    // whether the operator was made with it
    bool written;  // whether Execute writes it
  };
  // Two tensors that must lie apart: the one that is written, and another.
  struct Pair {
    size_t written;
    size_t other;
  };

  absl::Status CheckGiven(const Tensor& tensor,
                          const AnyTensorView& view) const;

  std::string op_;
  OpRules rules_;
  std::vector<Tensor> tensors_;
  std::vector<Pair> apart_;
  size_t rows_of_ = 0;
  int64_t made_rows_ = 0;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_TENSORS_H_
