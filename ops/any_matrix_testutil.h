#ifndef QUERN_OPS_ANY_MATRIX_TESTUTIL_H_
#define QUERN_OPS_ANY_MATRIX_TESTUTIL_H_

// Test utility for operators whose dtypes are run-time values: a matrix between
// guard pages, with poison between its rows, whose elements can be read as
// doubles.

#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_convert.h"

namespace quern {

// Calls fn(T()) with the C++ type T of `dtype`: f32, bf16 or f16.
template <typename Fn>
auto WithType(DType dtype, const Fn& fn) {
  if (dtype == DType::kF32) return fn(float());
  if (dtype == DType::kBF16) return fn(BFloat16());
  QUERN_CHECK(dtype == DType::kF16);
  return fn(Float16());
}

// The value of dtype nearest to x, rounded to f32 first, as kernels do.
inline double RoundThroughF32(DType dtype, double x) {
  const double f32 = ToDouble(FromDouble<float>(x));
  return WithType(dtype, [f32](auto type) {
    return ToDouble(FromDouble<decltype(type)>(f32));
  });
}

// Bound on the error of a result x that was computed in f32 within a relative
// error of `relative` and then rounded to dtype.
inline double ResultBound(DType dtype, double x, double relative) {
  // The computed value may lie in the binade above x, where rounding is
  // coarser.
  const double reach = x * (1.0 + 2.0 * relative);
  const double rounding = WithType(dtype, [reach](auto type) {
    return RoundingBound<decltype(type)>(reach);
  });
  return std::abs(x) * relative + rounding;
}

class AnyMatrix {
 public:
  // Makes a matrix filled with poison.
  AnyMatrix(DType dtype, int64_t rows, int64_t cols, int64_t stride,
            Edge edge = Edge::kEnd, int64_t shift = 0)
      : dtype_(dtype) {
    if (dtype == DType::kF32) {
      f32_ = std::make_unique<StridedMatrix<float>>(rows, cols, stride, edge,
                                                    shift);
    } else if (dtype == DType::kBF16) {
      bf16_ = std::make_unique<StridedMatrix<BFloat16>>(rows, cols, stride,
                                                        edge, shift);
    } else {
      QUERN_CHECK(dtype == DType::kF16);
      f16_ = std::make_unique<StridedMatrix<Float16>>(rows, cols, stride, edge,
                                                      shift);
    }
  }
  // Makes a matrix from dense values, rounded to dtype.
  AnyMatrix(DType dtype, const std::vector<double>& values, int64_t rows,
            int64_t cols, int64_t stride, Edge edge = Edge::kEnd,
            int64_t shift = 0)
      : AnyMatrix(dtype, rows, cols, stride, edge, shift) {
    QUERN_CHECK(static_cast<int64_t>(values.size()) == rows * cols);
    Visit([&](auto view) {
      for (int64_t i = 0; i < rows * cols; ++i) {
        auto& element = *view.At(i / cols, i % cols);
        element = FromDouble<std::remove_reference_t<decltype(element)>>(
            values[static_cast<size_t>(i)]);
      }
    });
  }

  AnyTensorView view() const {
    AnyTensorView any;
    Visit([&any](auto view) { any = view; });
    return any;
  }
  AnyTensorView const_view() const {
    const AnyTensorView v = view();
    return AnyTensorView(dtype_, v.data(), 2, {v.extent(0), v.extent(1)},
                         {v.stride(0), 1});
  }
  // A matrix of one row as a view of rank 1.
  AnyTensorView vector() const {
    const AnyTensorView v = view();
    return AnyTensorView(dtype_, v.data(), 1, {v.extent(1)}, {1});
  }
  // View of each row as heads of head_dim elements, head_stride elements apart.
  AnyTensorView heads(int64_t heads, int64_t head_dim,
                      int64_t head_stride) const {
    const AnyTensorView v = view();
    return AnyTensorView(dtype_, v.mutable_data(), 3,
                         {v.extent(0), heads, head_dim},
                         {v.stride(0), head_stride, 1});
  }

  // All elements as doubles, row by row without padding.
  std::vector<double> doubles() const {
    std::vector<double> values;
    Visit([&values](auto view) {
      for (int64_t r = 0; r < view.extent(0); ++r) {
        for (int64_t c = 0; c < view.extent(1); ++c) {
          values.push_back(ToDouble(*view.At(r, c)));
        }
      }
    });
    return values;
  }
  std::vector<uint32_t> bits() const { return RowBits(0, view().extent(0)); }
  std::vector<uint32_t> RowBits(int64_t first, int64_t rows) const {
    std::vector<uint32_t> bits;
    Visit([&](auto view) {
      for (int64_t r = first; r < first + rows; ++r) {
        for (int64_t c = 0; c < view.extent(1); ++c) {
          bits.push_back(BitsOf(*view.At(r, c)));
        }
      }
    });
    return bits;
  }

 private:
  template <typename Fn>
  void Visit(const Fn& fn) const {
    if (f32_ != nullptr) fn(f32_->view());
    if (bf16_ != nullptr) fn(bf16_->view());
    if (f16_ != nullptr) fn(f16_->view());
  }

  DType dtype_;
  std::unique_ptr<StridedMatrix<float>> f32_;
  std::unique_ptr<StridedMatrix<BFloat16>> bf16_;
  std::unique_ptr<StridedMatrix<Float16>> f16_;
};

}  // namespace quern

#endif  // QUERN_OPS_ANY_MATRIX_TESTUTIL_H_
