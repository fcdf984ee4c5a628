#ifndef QUERN_C_TESTING_EXAMPLE_TESTUTIL_H_
#define QUERN_C_TESTING_EXAMPLE_TESTUTIL_H_

// Test utility: tensors for the arguments that the registry gives as examples.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/testing/reference_convert.h"

namespace quern {

// The elements of a tensor in one run of bytes.
inline std::vector<uint8_t> Filled(const TensorMeta& meta, int64_t salt) {
  int64_t count = 1;
  for (const int64_t extent : meta.extents) count *= extent;
  std::vector<uint8_t> bytes(static_cast<size_t>(count) * SizeOf(meta.dtype),
                             0x55);
  const auto fill = [&](auto type, const auto& value) {
    auto* const data = reinterpret_cast<decltype(type)*>(bytes.data());
    for (int64_t i = 0; i < count; ++i) data[i] = value(i);
  };
  constexpr int32_t kSome[] = {3, 0, 17, 127, 64};
  const auto real = [salt](int64_t i) {
    return static_cast<double>((i * 37 + salt * 11) % 61 + 1) / 16 - 1.5;
  };
  switch (meta.dtype) {
    case DType::kI32:
      fill(int32_t(), [&](int64_t i) { return kSome[i % 5]; });
      break;
    case DType::kI64:
      fill(int64_t(), [&](int64_t i) { return int64_t{kSome[i % 5]}; });
      break;
    case DType::kF32:
      fill(float(), [&](int64_t i) { return FromDouble<float>(real(i)); });
      break;
    case DType::kBF16:
      fill(BFloat16(),
           [&](int64_t i) { return FromDouble<BFloat16>(real(i)); });
      break;
    case DType::kF16:
      fill(Float16(), [&](int64_t i) { return FromDouble<Float16>(real(i)); });
      break;
    default:
      break;
  }
  return bytes;
}

inline AnyTensorView ViewOf(const TensorMeta& meta,
                            std::vector<uint8_t>& bytes) {
  AnyTensorView::Dims extents{}, strides{};
  int64_t stride = 1;
  for (size_t d = meta.extents.size(); d-- > 0;) {
    extents[d] = meta.extents[d];
    strides[d] = stride;
    stride *= extents[d];
  }
  return AnyTensorView(meta.dtype, static_cast<void*>(bytes.data()),
                       static_cast<int>(meta.extents.size()), extents, strides);
}

}  // namespace quern

#endif  // QUERN_C_TESTING_EXAMPLE_TESTUTIL_H_
