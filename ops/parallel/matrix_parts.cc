#include "ops/parallel/matrix_parts.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/aligned_buffer.h"
#include "core/check_args.h"
#include "core/dtype.h"
#include "core/float_type.h"
#include "core/status_macros.h"
#include "core/tensor_view.h"
#include "quant/scalar_convert.h"

namespace quern {
namespace {

// The part with these extents that begins `offset` elements after x.
AnyTensorView PartOf(const AnyTensorView& x, int64_t offset,
                     const AnyTensorView::Dims& extents) {
  const auto bytes = offset * static_cast<int64_t>(SizeOf(x.dtype()));
  const AnyTensorView::Dims strides = {x.stride(0), x.stride(1)};
  // Null stays null.
  if (x.writable()) {
    return AnyTensorView(x.dtype(),
                         static_cast<char*>(x.mutable_data()) + bytes, x.rank(),
                         extents, strides);
  }
  const auto* data = static_cast<const char*>(x.data());
  return AnyTensorView(
      x.dtype(),
      static_cast<const void*>(data == nullptr ? nullptr : data + bytes),
      x.rank(), extents, strides);
}

}  // namespace

AnyTensorView RowSlice(const AnyTensorView& x, int64_t begin, int64_t count) {
  return PartOf(x, begin * x.stride(0), {count, x.extent(1)});
}

AnyTensorView ColumnSlice(const AnyTensorView& x, int64_t begin,
                          int64_t count) {
  return PartOf(x, begin, {x.extent(0), count});
}

absl::StatusOr<AlignedBuffer> BiasAsF32(absl::string_view op,
                                        const AnyTensorView& bias, int64_t n) {
  if (bias.rank() == 0) return AlignedBuffer();
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(op, "bias", bias.dtype(),
                                     {DType::kF32, DType::kBF16, DType::kF16}));
  QUERN_RETURN_IF_ERROR(CheckInput(op, "bias", bias, bias.dtype(), {n}));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer f32, AlignedBuffer::Create(n * 4));
  WithFloatType(bias.dtype(), [&](auto type) {
    const auto from = bias.As<const decltype(type), 1>();
    for (int64_t i = 0; i < n; ++i) {
      f32.data<float>()[i] = ToF32(from.data()[i]);
    }
    return 0;
  });
  return f32;
}

AnyTensorView BiasView(const AlignedBuffer& bias) {
  if (bias.empty()) return AnyTensorView();
  return BiasVector(bias);
}

VectorView<const float> BiasVector(const AlignedBuffer& bias) {
  return DenseVector(bias.data<const float>(),
                     static_cast<int64_t>(bias.bytes() / sizeof(float)));
}

}  // namespace quern
