#ifndef QUERN_OPS_PARALLEL_MATRIX_PARTS_H_
#define QUERN_OPS_PARALLEL_MATRIX_PARTS_H_

// Private: views of parts of a matrix whose dtype is a value, and a bias of any
// dtype as the f32 that gemm wants.

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "core/aligned_buffer.h"
#include "core/tensor_view.h"

namespace quern {

// Rows [begin, begin + count) of a matrix.
AnyTensorView RowSlice(const AnyTensorView& x, int64_t begin, int64_t count);

// Columns [begin, begin + count) of a matrix.
AnyTensorView ColumnSlice(const AnyTensorView& x, int64_t begin, int64_t count);

// bias[n] as f32, empty for one of rank 0. InvalidArgument for another shape,
// Unimplemented for a dtype other than f32, bf16 and f16.
absl::StatusOr<AlignedBuffer> BiasAsF32(absl::string_view op,
                                        const AnyTensorView& bias, int64_t n);

// f32[n] of a buffer, or of rank 0 where it is empty.
AnyTensorView BiasView(const AlignedBuffer& bias);
VectorView<const float> BiasVector(const AlignedBuffer& bias);

}  // namespace quern

#endif  // QUERN_OPS_PARALLEL_MATRIX_PARTS_H_
