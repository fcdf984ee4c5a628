#include "quern/ops/parallel/bias_f32.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/float_type.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/quant/scalar_convert.h"

namespace quern {
absl::StatusOr<AlignedBuffer> BiasAsF32(absl::string_view op,
                                        const AnyTensorView& bias, int64_t n) {
  if (bias.rank() == 0) return AlignedBuffer();
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(op, "bias", bias.dtype(), kFloatDTypes));
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
