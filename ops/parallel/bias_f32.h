#ifndef QUERN_OPS_PARALLEL_MATRIX_PARTS_H_
#define QUERN_OPS_PARALLEL_MATRIX_PARTS_H_

// Private: converts a bias of any dtype to f32, as gemm needs it.

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/tensor_view.h"

namespace quern {

// Returns bias[n] as f32, or an empty buffer if bias has rank 0.
// InvalidArgument for another shape, Unimplemented for a dtype other than f32,
// bf16 and f16.
absl::StatusOr<AlignedBuffer> BiasAsF32(absl::string_view op,
                                        const AnyTensorView& bias, int64_t n);

// View of a buffer as f32[n]; a view of rank 0 if the buffer is empty.
AnyTensorView BiasView(const AlignedBuffer& bias);
VectorView<const float> BiasVector(const AlignedBuffer& bias);

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_MATRIX_PARTS_H_
