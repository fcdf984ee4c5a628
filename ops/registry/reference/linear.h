#ifndef QUERN_OPS_REGISTRY_REFERENCE_LINEAR_H_
#define QUERN_OPS_REGISTRY_REFERENCE_LINEAR_H_

// A linear layer as plain loops over its packed weights, for the provider
// called "reference": each weight is decoded where it is used, sums are in
// double, and the result is rounded once.

#include <cstdint>

#include "absl/status/statusor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/weights/packed_form.h"
#include "quern/packing/code_layout.h"
#include "quern/packing/vnni_layout.h"

namespace quern {

class NativeLinear {
 public:
  // The result shares ownership of the bytes of `weights`.
  static absl::StatusOr<NativeLinear> Create(const LinearWeights& weights,
                                             LinearActivation activation);

  // Weight: column n of row k of the weights, without the scale of kI8Channel.
  // Source: the column of x that row k is multiplied with; it differs from k
  // where the weights came in act-order.
  double Weight(int64_t k, int64_t n) const;
  int64_t Source(int64_t k) const;

  // out = act(x * weights + bias) + residual, for matrices that the linear
  // layer accepts. A residual of rank 0 adds nothing. W8A8 weights multiply
  // rows of x that are quantised by quant/int8_quantize.h.
  void Multiply(const AnyTensorView& x, const AnyTensorView& residual,
                const AnyTensorView& out) const noexcept;

 private:
  NativeLinear(const LinearWeights& weights, LinearActivation activation,
               const PackedForm& form)
      : weights_(weights), activation_(activation), form_(form) {}

  // The sum, including the bias, of column n for row t of x.
  double Sum(const AnyTensorView& x, int64_t t, int64_t n) const;

  LinearWeights weights_;
  LinearActivation activation_;
  PackedForm form_;
  VnniLayout values_;  // floats, and int8 by channel
  CodeLayout codes_;   // the other formats
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_REFERENCE_LINEAR_H_
