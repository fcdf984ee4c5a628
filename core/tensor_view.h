#ifndef QUERN_CORE_TENSOR_VIEW_H_
#define QUERN_CORE_TENSOR_VIEW_H_

// Non-owning, strided views. A view never allocates, never copies elements and
// never outlives its storage. Sizes and strides are in elements, not bytes; the
// last stride is 1, because kernels vectorise the last dimension.
//
//   MatrixView<const float> a = DenseMatrix<const float>(data, rows, cols);
//   const float* row = a.Row(i);            // a.extent(1) elements
//   AnyTensorView any = a;                  // dtype and rank as values

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "quern/core/check.h"
#include "quern/core/dtype.h"

namespace quern {

template <typename T, int kRank>
class TensorView {
 public:
  static_assert(kRank >= 1, "a view has at least one dimension");
  using Dims = std::array<int64_t, kRank>;

  constexpr TensorView() = default;
  constexpr TensorView(T* data, Dims extents, Dims strides)
      : data_(data), extents_(extents), strides_(strides) {
    QUERN_DCHECK(strides_[kRank - 1] == 1);
  }

  // Read-only view of the same elements. Never called if T is already const.
  constexpr operator TensorView<const T, kRank>() const {
    return {data_, extents_, strides_};
  }

  constexpr int64_t extent(int d) const { return extents_[AsIndex(d)]; }
  constexpr int64_t stride(int d) const { return strides_[AsIndex(d)]; }
  constexpr const Dims& extents() const { return extents_; }
  constexpr const Dims& strides() const { return strides_; }
  constexpr T* data() const { return data_; }

  constexpr int64_t size() const {
    int64_t size = 1;
    for (const int64_t extent : extents_) size *= extent;
    return size;
  }
  constexpr bool empty() const { return size() == 0; }

  // Row-major without gaps.
  constexpr bool dense() const {
    int64_t want = 1;
    for (size_t d = kRank; d-- > 0;) {
      if (extents_[d] > 1 && strides_[d] != want) return false;
      want *= extents_[d];
    }
    return true;
  }

  // Elements from one row (an index of the first dimension) to the next; 0 for
  // a view of a single row or of no elements, whose stride is meaningless.
  constexpr int64_t RowStride() const {
    if (extents_[0] <= 1) return 0;
    for (const int64_t extent : extents_) {
      if (extent == 0) return 0;
    }
    return strides_[0];
  }

  // Address of element [i, j, ...]; one index per dimension.
  template <typename... Index>
  constexpr T* At(Index... index) const {
    static_assert(sizeof...(Index) == kRank, "one index per dimension");
    const Dims indices = {static_cast<int64_t>(index)...};
    int64_t offset = 0;
    for (size_t d = 0; d < kRank; ++d) {
      QUERN_DCHECK(0 <= indices[d] && indices[d] < extents_[d]);
      offset += indices[d] * strides_[d];
    }
    return data_ + offset;
  }

  // Pointer to row `i` of a matrix; rows may be padded (stride(0) > extent(1)).
  constexpr T* Row(int64_t i) const {
    static_assert(kRank == 2, "only a matrix has rows");
    QUERN_DCHECK(0 <= i && i < extents_[0]);
    return data_ + i * strides_[0];
  }

 private:
  static constexpr size_t AsIndex(int d) {
    QUERN_DCHECK(0 <= d && d < kRank);
    return static_cast<size_t>(d);
  }

  T* data_ = nullptr;
  Dims extents_{};
  Dims strides_{};
};

template <typename T>
using VectorView = TensorView<T, 1>;
template <typename T>
using MatrixView = TensorView<T, 2>;

template <typename T>
constexpr VectorView<T> DenseVector(T* data, int64_t size) {
  return {data, {size}, {1}};
}

// Dense row-major matrix of `rows` x `cols`.
template <typename T>
constexpr MatrixView<T> DenseMatrix(T* data, int64_t rows, int64_t cols) {
  return {data, {rows, cols}, {cols, 1}};
}

// Dense row-major tensor.
template <typename T, size_t kRank>
constexpr TensorView<T, static_cast<int>(kRank)> DenseTensor(
    T* data, std::array<int64_t, kRank> extents) {
  std::array<int64_t, kRank> strides{};
  int64_t stride = 1;
  for (size_t d = kRank; d-- > 0;) {
    strides[d] = stride;
    stride *= extents[d];
  }
  return {data, extents, strides};
}

// A view whose element type and rank are values: what a plan with a DType in
// its spec takes at the boundary. `mutable_data` is null for a read-only view.
class AnyTensorView {
 public:
  static constexpr int kMaxRank = 5;
  using Dims = std::array<int64_t, kMaxRank>;

  // No view: rank 0. Sets 24 of the 104 bytes, because the arguments of a plan
  // have many views that most operators leave out.
  AnyTensorView() {}

  template <typename T, int kRank>
  AnyTensorView(const TensorView<T, kRank>& view)
      : data_(view.data()), dtype_(DTypeOf<T>), rank_(kRank) {
    static_assert(kRank <= kMaxRank, "raise kMaxRank");
    if constexpr (!std::is_const_v<T>) mutable_data_ = view.data();
    for (int d = 0; d < kRank; ++d) {
      extents_.of[d] = view.extent(d);
      strides_.of[d] = view.stride(d);
    }
  }

  // A read-only view of bytes that were described at run time. Rank 0 is no
  // view. The constructor takes any other rank as well, because it has no
  // Status to refuse one with: CheckInput and CheckOutput do.
  AnyTensorView(DType dtype, const void* data, int rank, const Dims& extents,
                const Dims& strides)
      : data_(data), dtype_(dtype), rank_(rank) {
    for (int d = 0; d < rank && d < kMaxRank; ++d) {
      extents_.of[d] = extents[static_cast<size_t>(d)];
      strides_.of[d] = strides[static_cast<size_t>(d)];
    }
  }
  // A view that may be written through.
  AnyTensorView(DType dtype, void* data, int rank, const Dims& extents,
                const Dims& strides)
      : AnyTensorView(dtype, static_cast<const void*>(data), rank, extents,
                      strides) {
    mutable_data_ = data;
  }

  DType dtype() const { return dtype_; }
  int rank() const { return rank_; }
  // A dimension from rank() on has extent and stride 0. One that no view has,
  // because rank() is out of range, has -1, which every operator refuses.
  int64_t extent(int d) const { return At(extents_, d); }
  int64_t stride(int d) const { return At(strides_, d); }
  // Like TensorView::RowStride.
  int64_t RowStride() const {
    for (int d = 1; d < rank_; ++d) {
      if (extent(d) == 0) return 0;
    }
    return extent(0) > 1 ? stride(0) : 0;
  }
  const void* data() const { return data_; }
  void* mutable_data() const { return mutable_data_; }
  bool writable() const { return mutable_data_ != nullptr; }

  // The typed view again. T must be dtype(), const unless writable() or empty.
  // The last stride is 1 also where it is not used: its extent is 1 at most.
  template <typename T, int kRank>
  TensorView<T, kRank> As() const {
    static_assert(kRank <= kMaxRank, "raise kMaxRank");
    QUERN_DCHECK(DTypeOf<T> == dtype_ && kRank == rank_);
    typename TensorView<T, kRank>::Dims extents{}, strides{};
    for (int d = 0; d < kRank; ++d) {
      extents[static_cast<size_t>(d)] = extent(d);
      strides[static_cast<size_t>(d)] = stride(d);
    }
    if (extents[kRank - 1] <= 1) strides[kRank - 1] = 1;
    if constexpr (std::is_const_v<T>) {
      return {static_cast<T*>(data_), extents, strides};
    } else {
      const TensorView<T, kRank> view(static_cast<T*>(mutable_data_), extents,
                                      strides);
      QUERN_DCHECK(writable() || data_ == nullptr || view.empty());
      return view;
    }
  }

 private:
  // One number for each dimension. Only the first rank() are set. Copying the
  // others is defined, because a union is copied as its bytes.
  union Numbers {
    int64_t of[kMaxRank];
  };

  int64_t At(const Numbers& numbers, int d) const {
    if (d < 0 || d >= kMaxRank) return -1;
    return d < rank_ ? numbers.of[d] : 0;
  }

  const void* data_ = nullptr;
  void* mutable_data_ = nullptr;
  DType dtype_ = DType::kF32;
  int rank_ = 0;
  Numbers extents_;
  Numbers strides_;
};

}  // namespace quern

#endif  // QUERN_CORE_TENSOR_VIEW_H_
