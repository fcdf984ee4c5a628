#ifndef QUERN_CORE_FLOAT_TYPE_H_
#define QUERN_CORE_FLOAT_TYPE_H_

#include "quern/core/dtype.h"

namespace quern {

// fn(T()) for the C++ type T of `dtype`, which is f32, bf16 or f16: from the
// DType of a spec to one instantiation of a kernel.
//
//   kernels.row = WithFloatType(c, [](auto t) { return &Row<decltype(t)>; });
template <typename Fn>
auto WithFloatType(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kBF16:
      return fn(BFloat16());
    case DType::kF16:
      return fn(Float16());
    default:
      return fn(float());
  }
}

}  // namespace quern

#endif  // QUERN_CORE_FLOAT_TYPE_H_
