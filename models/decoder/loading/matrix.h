#ifndef QUERN_MODELS_DECODER_LOADING_MATRIX_H_
#define QUERN_MODELS_DECODER_LOADING_MATRIX_H_

// Private: a rank's part of one of a model's matrices, as the operator `linear`
// multiplies by it:
//
//   y = residual + activation(W x + b)

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

class Matrix {
 public:
  // `linear` was made for x of this type with k columns, and for W of n rows.
  Matrix(std::unique_ptr<const BoundOp> linear, DType rows, int64_t n,
         int64_t k)
      : linear_(std::move(linear)), rows_(rows), n_(n), k_(k) {}

  DType rows() const { return rows_; }
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  absl::StatusOr<int64_t> WorkspaceBytes(int64_t max_tokens,
                                         int max_workers) const {
    return linear_->WorkspaceBytes(max_tokens, max_workers);
  }
  std::string Explain(int64_t tokens) const { return linear_->Explain(tokens); }
  // x[tokens, k]. `residual` is y itself, or has no rank and adds nothing.
  void Execute(const AnyTensorView& x, const AnyTensorView& y,
               const AnyTensorView& residual, Workspace workspace,
               Executor& executor) const noexcept {
    linear_->Execute({x, residual, y}, workspace, executor);
  }

 private:
  std::unique_ptr<const BoundOp> linear_;
  DType rows_;
  int64_t n_;
  int64_t k_;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_LOADING_MATRIX_H_
