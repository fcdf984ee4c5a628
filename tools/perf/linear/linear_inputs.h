#ifndef QUERN_TOOLS_PERF_LINEAR_LINEAR_INPUTS_H_
#define QUERN_TOOLS_PERF_LINEAR_LINEAR_INPUTS_H_

// Weights of a linear layer in each format, as models store them.

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/tools/perf/args.h"

namespace quern {

class LinearInput {
 public:
  virtual ~LinearInput() = default;

  const LinearWeightsSpec& spec() const { return spec_; }
  // What the report's dtype puts between those of a and of c: "*i4->".
  virtual absl::string_view arrow() const = 0;
  // Bytes of codes, scales and zero points.
  virtual int64_t bytes() const = 0;
  // Makes the weights at the first call.
  virtual absl::StatusOr<LinearSource> Source() = 0;

  // What LinearSpec::activations must be.
  virtual LinearActivations activations() const {
    return LinearActivations::kExact;
  }
  // Whether products are of int8.
  bool multiplies_int8() const {
    return spec_.format == WeightFormat::kI8Channel ||
           activations() == LinearActivations::kInt8Blocks;
  }
  // Whether codes have at most six bits and no sign. For products of int8.
  virtual bool has_small_codes() const {
    return spec_.format == WeightFormat::kI4Group;
  }
  // Replaces a row of a, in double, by what is multiplied in its place.
  virtual void RoundRow(std::vector<double>& /*row*/) const {}

  // A weight in double, and the largest magnitude that is summed for it.
  struct Weight {
    double value, magnitude;
  };
  virtual Weight At(int64_t n, int64_t k) = 0;
  // The sum of one column is off by at most this times the sum of magnitudes.
  virtual double relative_error() const = 0;

 protected:
  explicit LinearInput(const LinearWeightsSpec& spec) : spec_(spec) {}
  int64_t n() const { return spec_.n; }
  int64_t k() const { return spec_.k; }

 private:
  LinearWeightsSpec spec_;
};

// Replaces a row by what gemm/kernels/block_kernels.h makes of it: int8 in
// blocks of 32, each times its scale. Its size is a multiple of 32.
void RoundToInt8Blocks(std::vector<double>& row);

using LinearInputOr = absl::StatusOr<std::unique_ptr<LinearInput>>;

struct MatrixShape {
  int64_t n, k;
  bool gated;
};

// What the keys n, k and activation of a linear operator say. InvalidArgument:
// a value that is not in its range.
absl::StatusOr<MatrixShape> MatrixShapeOf(const Args& args);

// Each reads the keys that its comment names. InvalidArgument: a value that is
// not in its range, or a k that the format cannot have.

// dtype; or where the key weights names one, BlockInput.
LinearInputOr FloatOrBlockInput(const Args& args, const MatrixShape& shape);
// weights and activations.
LinearInputOr BlockInput(const Args& args, const MatrixShape& shape);
// dtype.
LinearInputOr FloatInput(const Args& args, const MatrixShape& shape);
// int8, with a scale for each column.
LinearInputOr Int8ChannelInput(const Args& args, const MatrixShape& shape);
// block_n, block_k.
LinearInputOr Fp8BlockInput(const Args& args, const MatrixShape& shape);
// group, zeros; by rows that are not rounded.
LinearInputOr Int4GroupInput(const Args& args, const MatrixShape& shape);
// group, zeros, activations.
LinearInputOr Int4LinearInput(const Args& args, const MatrixShape& shape);
// GGUF's Q8_0, for rows that are not rounded.
LinearInputOr Int8GroupInput(const Args& args, const MatrixShape& shape);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LINEAR_LINEAR_INPUTS_H_
