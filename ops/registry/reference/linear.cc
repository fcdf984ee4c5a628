#include "quern/ops/registry/reference/linear.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/reference/quantised_row.h"
#include "quern/quant/scalar_convert.h"

namespace quern {
namespace {

constexpr int64_t kCols = CodeLayout::kPanelCols;
static_assert(kCols == VnniLayout::kPanelCols, "panels have 16 columns");

template <typename T>
double Read(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  if constexpr (std::is_same_v<T, int8_t>) {
    return static_cast<double>(value);
  } else {
    return static_cast<double>(ToF32(value));
  }
}

// GPT-OSS's clamp of gate and up.
constexpr double kSwigluOaiLimit = 7;

double Activate(LinearActivation activation, double v) {
  switch (activation) {
    case LinearActivation::kNone:
      return v;
    case LinearActivation::kSilu:
    case LinearActivation::kSiluAndMul:
      return v / (1.0 + std::exp(-v));
    case LinearActivation::kGelu:
    case LinearActivation::kGeluAndMul:
      return v / 2 * (1.0 + std::erf(v / std::sqrt(2.0)));
    case LinearActivation::kGeluTanh:
    case LinearActivation::kGeluTanhAndMul:
      return v / 2 *
             (1.0 + std::tanh(std::sqrt(2.0 / 3.14159265358979323846) *
                              (v + 0.044715 * v * v * v)));
    case LinearActivation::kSwigluOaiAndMul: {
      const double g = v > kSwigluOaiLimit ? kSwigluOaiLimit : v;
      return g / (1.0 + std::exp(-1.702 * g));
    }
  }
  return v;
}

double Up(LinearActivation activation, double v) {
  if (activation != LinearActivation::kSwigluOaiAndMul) return v;
  if (v > kSwigluOaiLimit) v = kSwigluOaiLimit;
  return (v < -kSwigluOaiLimit ? -kSwigluOaiLimit : v) + 1;
}

}  // namespace

absl::StatusOr<NativeLinear> NativeLinear::Create(const LinearWeights& weights,
                                                  LinearActivation activation) {
  const LinearWeightsSpec& spec = weights.spec();
  if (spec.format == WeightFormat::kBlocks) {
    return Unimplemented("native_linear", "has no weights in blocks");
  }
  uint32_t flags = weights.has_bias() ? PackedHeader::kBias : 0;
  if (weights.zeros() != nullptr) flags |= PackedHeader::kZeros;
  if (weights.order() != nullptr) flags |= PackedHeader::kOrder;
  QUERN_ASSIGN_OR_RETURN(const PackedForm form, PackedForm::Of(spec, flags));
  NativeLinear linear(weights, activation, form);
  if (HasGroups(spec.format)) {
    const int64_t bits = spec.format == WeightFormat::kI4Group ? 4 : 8;
    QUERN_ASSIGN_OR_RETURN(linear.codes_,
                           CodeLayout::Create(bits, spec.k, form.part_n));
  } else {
    QUERN_ASSIGN_OR_RETURN(
        linear.values_,
        VnniLayout::Create(FloatOrI8(spec.format), spec.k, form.part_n));
  }
  return linear;
}

int64_t NativeLinear::Source(int64_t k) const {
  return weights_.order() == nullptr ? k : weights_.order()[k];
}

double NativeLinear::Weight(int64_t k, int64_t n) const {
  const LinearWeightsSpec& spec = weights_.spec();
  const int64_t part = n / form_.part_n, column = n % form_.part_n;
  const int64_t panel = column / kCols, c = column % kCols;
  const uint8_t* const panels =
      weights_.panels() + part * form_.part_bytes + panel * form_.panel_bytes;
  if (!HasGroups(spec.format)) {
    const int64_t v = values_.v();
    const int64_t element = (k / v * kCols + c) * v + k % v;
    const uint8_t* const at =
        panels + element * static_cast<int64_t>(SizeOf(values_.dtype()));
    switch (values_.dtype()) {
      case DType::kBF16:
        return Read<BFloat16>(at);
      case DType::kF16:
        return Read<Float16>(at);
      case DType::kI8:
        return Read<int8_t>(at);
      default:
        return Read<float>(at);
    }
  }
  const int64_t i = k % codes_.line_k();
  const uint8_t* const at =
      panels + k / codes_.line_k() * CodeLayout::kLineBytes + codes_.Byte(c, i);
  const int64_t panel_count =
      form_.part_n / kCols + (form_.part_n % kCols != 0);
  const int64_t group =
      ((part * panel_count + panel) * form_.groups + k / spec.group_size) *
          kCols +
      c;
  double code = 0;
  if (spec.format == WeightFormat::kE4M3Block) {
    code = Read<Float8E4M3>(at);
  } else if (spec.format == WeightFormat::kI8Group) {
    code = Read<int8_t>(at);
  } else {
    // Codes and zero points are both stored with an offset of 8.
    code = static_cast<double>((*at >> codes_.Shift(i)) & 15) - 8;
    if (weights_.zeros() != nullptr) code -= double{weights_.zeros()[group]};
  }
  return double{weights_.scales()[group]} * code;
}

double NativeLinear::Sum(const AnyTensorView& x, int64_t t, int64_t n) const {
  const LinearWeightsSpec& spec = weights_.spec();
  const ScalarRow row(x, t);
  double sum = 0;
  if (spec.format == WeightFormat::kI8Channel) {
    const QuantisedRow q(row, spec.k);
    for (int64_t k = 0; k < spec.k; ++k) sum += q[k] * Weight(k, n);
    sum *= double{q.scale()} * double{weights_.scales()[n]};
  } else {
    for (int64_t k = 0; k < spec.k; ++k) {
      sum += double{row[Source(k)]} * Weight(k, n);
    }
  }
  return weights_.has_bias() ? sum + double{weights_.bias()[n]} : sum;
}

void NativeLinear::Multiply(const AnyTensorView& x,
                            const AnyTensorView& residual,
                            const AnyTensorView& out) const noexcept {
  const int64_t columns = out.extent(1);
  for (int64_t t = 0; t < out.extent(0); ++t) {
    const ScalarRow to(out, t);
    for (int64_t n = 0; n < columns; ++n) {
      double y = Activate(activation_, Sum(x, t, n));
      if (IsGated(activation_)) y *= Up(activation_, Sum(x, t, columns + n));
      if (residual.rank() != 0) y += double{ScalarRow(residual, t)[n]};
      to.Set(n, static_cast<float>(y));
    }
  }
}

}  // namespace quern
