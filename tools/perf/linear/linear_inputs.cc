#include "quern/tools/perf/linear/linear_inputs.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/epilogue.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/testing/reference_convert.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/linear/linear_cases.h"
#include "quern/tools/perf/op_util.h"

namespace quern {
namespace {

constexpr int64_t kMaxExtent = 1 << 24;
// Weights of Q8_0 that share a scale, and their bytes.
constexpr int64_t kInt8Group = 32;  // the k of one scale

AnyTensorView Matrix(DType dtype, void* data, int64_t rows, int64_t cols) {
  return AnyTensorView(dtype, data, 2, {rows, cols}, {cols, 1});
}

// Sums of k rounded products, each off by a unit of the magnitudes.
double ErrorOfSum(double k) { return k * 0x1p-23; }
// Three roundings more for each group of 16 k or more, and one for 512 k.
double ErrorOfGroups(int64_t k) {
  return ErrorOfSum(1.25 * static_cast<double>(k) + 6);
}

class Floats final : public LinearInput {
 public:
  Floats(const LinearWeightsSpec& spec, DType dtype)
      : LinearInput(spec), dtype_(dtype) {}

  absl::string_view arrow() const override { return "->"; }
  int64_t bytes() const override {
    return n() * k() * static_cast<int64_t>(SizeOf(dtype_));
  }
  absl::StatusOr<LinearSource> Source() override {
    if (codes_.sets() == 0) {
      QUERN_RETURN_IF_ERROR(codes_.Create(1, bytes()));
      WithType(dtype_,
               [this](auto type) { FillReals<decltype(type)>(-1, 1, codes_); });
    }
    LinearSource source;
    source.codes = Matrix(dtype_, codes_.at(0), n(), k());
    return source;
  }
  Weight At(int64_t col, int64_t i) override {
    const double w = WithType(dtype_, [&](auto type) {
      return ToDouble(codes_.at<decltype(type)>(0)[col * k() + i]);
    });
    return {w, std::abs(w)};
  }
  double relative_error() const override {
    return ErrorOfSum(static_cast<double>(k()));
  }

 private:
  DType dtype_;
  SetBuffer codes_;
};

class Int8Channel final : public LinearInput {
 public:
  explicit Int8Channel(const LinearWeightsSpec& spec) : LinearInput(spec) {}

  absl::string_view arrow() const override { return "*i8->"; }
  int64_t bytes() const override { return n() * k() + n() * 4; }
  absl::StatusOr<LinearSource> Source() override {
    if (codes_.sets() == 0) {
      QUERN_RETURN_IF_ERROR(codes_.Create(1, n() * k()));
      QUERN_RETURN_IF_ERROR(scales_.Create(1, n() * 4));
      FillReals<int8_t>(-127, 127, codes_);
      FillReals<float>(0.001, 0.01, scales_);
    }
    LinearSource source;
    source.codes = Matrix(DType::kI8, codes_.at(0), n(), k());
    source.scales = DenseVector(scales_.at<float>(0), n());
    return source;
  }
  Weight At(int64_t col, int64_t i) override {
    const double w =
        double{scales_.at<float>(0)[col]} * codes_.at<int8_t>(0)[col * k() + i];
    return {w, std::abs(w)};
  }
  // The sum of integers is exact. It becomes f32, and is multiplied twice.
  double relative_error() const override { return 4 * 0x1p-24; }

 private:
  SetBuffer codes_, scales_;
};

class Fp8Block final : public LinearInput {
 public:
  Fp8Block(const LinearWeightsSpec& spec, int64_t block_n)
      : LinearInput(spec), block_n_(block_n) {}

  absl::string_view arrow() const override { return "*f8e4m3->"; }
  int64_t bytes() const override { return n() * k() + scale_count() * 4; }
  absl::StatusOr<LinearSource> Source() override {
    if (codes_.sets() == 0) {
      QUERN_RETURN_IF_ERROR(codes_.Create(1, n() * k()));
      QUERN_RETURN_IF_ERROR(scales_.Create(1, scale_count() * 4));
      FillReals<Float8E4M3>(-4, 4, codes_);
      FillReals<float>(0.02, 0.2, scales_);
    }
    LinearSource source;
    source.codes = Matrix(DType::kF8E4M3, codes_.at(0), n(), k());
    source.scales =
        Matrix(DType::kF32, scales_.at(0), scale_count() / groups(), groups());
    source.block_n = block_n_;
    return source;
  }
  Weight At(int64_t col, int64_t i) override {
    const double w =
        ToDouble(codes_.at<Float8E4M3>(0)[col * k() + i]) *
        scales_.at<float>(0)[col / block_n_ * groups() + i / spec().group_size];
    return {w, std::abs(w)};
  }
  double relative_error() const override { return ErrorOfGroups(k()); }

 private:
  int64_t groups() const { return DivCeil(k(), spec().group_size); }
  int64_t scale_count() const { return DivCeil(n(), block_n_) * groups(); }

  int64_t block_n_;
  SetBuffer codes_, scales_;
};

class Int4Group final : public LinearInput {
 public:
  Int4Group(const LinearWeightsSpec& spec, bool has_zeros,
            LinearActivations activations)
      : LinearInput(spec), has_zeros_(has_zeros), activations_(activations) {}

  absl::string_view arrow() const override { return "*i4->"; }
  // Counts what models hold: scales of 16 bits, zero points of four.
  int64_t bytes() const override {
    return n() * k() / 2 + count() * 2 + (has_zeros_ ? count() / 2 : 0);
  }
  absl::StatusOr<LinearSource> Source() override {
    if (codes_.sets() == 0) {
      QUERN_RETURN_IF_ERROR(codes_.Create(1, n() * k()));
      QUERN_RETURN_IF_ERROR(zeros_.Create(1, count()));
      QUERN_RETURN_IF_ERROR(scales_.Create(1, count() * 2));
      FillReals<Float16>(0.01, 0.1, scales_);
      uint64_t state = 1;
      for (SetBuffer* buffer : {&codes_, &zeros_}) {
        for (int64_t i = 0; i < buffer->bytes(); ++i) {
          state = state * 6364136223846793005u + 1442695040888963407u;  // Knuth
          buffer->at(0)[i] = static_cast<uint8_t>(state >> 60);
        }
      }
    }
    LinearSource source;
    source.codes = Matrix(DType::kU8, codes_.at(0), n(), k());
    source.scales = Matrix(DType::kF16, scales_.at(0), groups(), n());
    if (has_zeros_) {
      source.zeros = Matrix(DType::kU8, zeros_.at(0), groups(), n());
    }
    return source;
  }
  Weight At(int64_t col, int64_t i) override {
    const int64_t g = i / spec().group_size * n() + col;
    const double s = ToDouble(scales_.at<Float16>(0)[g]);
    const int zero = has_zeros_ ? zeros_.at(0)[g] : 8;
    const int code = codes_.at(0)[col * k() + i];
    const double w = s * (code - zero);
    if (multiplies_int8()) return {w, std::abs(w)};
    return {w, s * (std::abs(code - 8) + std::abs(zero - 8))};
  }
  LinearActivations activations() const override { return activations_; }
  void RoundRow(std::vector<double>& row) const override {
    if (multiplies_int8()) RoundToInt8Blocks(row);
  }
  // int8: the bound of gemm/linear.h, with a bias and a rounding of their
  // products.
  double relative_error() const override {
    if (!multiplies_int8()) return ErrorOfGroups(k());
    return (static_cast<double>(k()) / 16 + 4) * 0x1p-24;
  }

 private:
  int64_t groups() const { return DivCeil(k(), spec().group_size); }
  int64_t count() const { return groups() * n(); }

  bool has_zeros_;
  LinearActivations activations_;
  SetBuffer codes_, scales_, zeros_;
};

// Codes and scales of blocks of Q8_0, apart.
class Int8Group final : public LinearInput {
 public:
  explicit Int8Group(const LinearWeightsSpec& spec) : LinearInput(spec) {}

  absl::string_view arrow() const override { return "*i8g->"; }
  int64_t bytes() const override { return n() * k() + count() * 2; }
  absl::StatusOr<LinearSource> Source() override {
    if (codes_.sets() == 0) {
      QUERN_RETURN_IF_ERROR(codes_.Create(1, n() * k()));
      QUERN_RETURN_IF_ERROR(scales_.Create(1, count() * 2));
      FillReals<int8_t>(-127, 127, codes_);
      FillReals<Float16>(0.001, 0.01, scales_);
    }
    LinearSource source;
    source.codes = Matrix(DType::kI8, codes_.at(0), n(), k());
    source.scales = Matrix(DType::kF16, scales_.at(0), count() / n(), n());
    return source;
  }
  Weight At(int64_t col, int64_t i) override {
    const int64_t g = i / spec().group_size * n() + col;
    const double w = ToDouble(scales_.at<Float16>(0)[g]) *
                     codes_.at<int8_t>(0)[col * k() + i];
    return {w, std::abs(w)};
  }
  double relative_error() const override { return ErrorOfGroups(k()); }

 private:
  int64_t count() const { return k() / spec().group_size * n(); }

  SetBuffer codes_, scales_;
};

LinearWeightsSpec SpecOf(const MatrixShape& shape, WeightFormat format) {
  LinearWeightsSpec spec;
  spec.format = format;
  spec.n = shape.n;
  spec.k = shape.k;
  spec.gated = shape.gated;
  return spec;
}

LinearInputOr Int4With(const Args& args, const MatrixShape& shape,
                       LinearActivations activations) {
  LinearWeightsSpec spec = SpecOf(shape, WeightFormat::kI4Group);
  QUERN_ASSIGN_OR_RETURN(spec.group_size, args.Int("group", 16, kMaxExtent));
  QUERN_ASSIGN_OR_RETURN(const bool has_zeros, args.Flag("zeros"));
  return std::make_unique<Int4Group>(spec, has_zeros, activations);
}

}  // namespace

absl::StatusOr<MatrixShape> MatrixShapeOf(const Args& args) {
  MatrixShape shape = {};
  QUERN_ASSIGN_OR_RETURN(const LinearActivation activation,
                         LinearActivationOf(args));
  shape.gated = IsGated(activation);
  QUERN_ASSIGN_OR_RETURN(shape.n, args.Int("n", 1, kMaxExtent));
  QUERN_ASSIGN_OR_RETURN(shape.k, args.Int("k", 1, kMaxExtent));
  return shape;
}

LinearInputOr FloatInput(const Args& args, const MatrixShape& shape) {
  QUERN_ASSIGN_OR_RETURN(const DType dtype, args.Type("dtype", kFloatDTypes));
  return std::make_unique<Floats>(SpecOf(shape, FormatOfFloats(dtype)), dtype);
}

LinearInputOr Int8ChannelInput(const Args& args, const MatrixShape& shape) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(args.op(), "k", shape.k, 1, LinearWeights::kMaxKI8));
  return std::make_unique<Int8Channel>(SpecOf(shape, WeightFormat::kI8Channel));
}

LinearInputOr Fp8BlockInput(const Args& args, const MatrixShape& shape) {
  LinearWeightsSpec spec = SpecOf(shape, WeightFormat::kE4M3Block);
  QUERN_ASSIGN_OR_RETURN(const int64_t block_n,
                         args.Int("block_n", 1, kMaxExtent));
  QUERN_ASSIGN_OR_RETURN(spec.group_size, args.Int("block_k", 1, kMaxExtent));
  return std::make_unique<Fp8Block>(spec, block_n);
}

LinearInputOr Int4GroupInput(const Args& args, const MatrixShape& shape) {
  return Int4With(args, shape, LinearActivations::kExact);
}

LinearInputOr Int4LinearInput(const Args& args, const MatrixShape& shape) {
  QUERN_ASSIGN_OR_RETURN(const std::string activations,
                         args.Choice("activations", {"exact", "int8"}));
  return Int4With(args, shape,
                  activations == "int8" ? LinearActivations::kInt8Blocks
                                        : LinearActivations::kExact);
}

LinearInputOr Int8GroupInput(const Args& args, const MatrixShape& shape) {
  LinearWeightsSpec spec = SpecOf(shape, WeightFormat::kI8Group);
  if (spec.k % kInt8Group != 0) {
    return InvalidArgument(args.op(), "k=", spec.k, "; need a multiple of ",
                           kInt8Group);
  }
  spec.group_size = kInt8Group;
  return std::make_unique<Int8Group>(spec);
}

}  // namespace quern
