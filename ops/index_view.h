#ifndef QUERN_OPS_INDEX_VIEW_H_
#define QUERN_OPS_INDEX_VIEW_H_

// Token ids, positions and row numbers: a borrowed vector of int32 or int64,
// because engines use both.
//
//   plan.Execute(DenseVector(ids.data(), n), ...);   // either width

#include <cstdint>

#include "quern/core/check.h"
#include "quern/core/tensor_view.h"

namespace quern {

class IndexView {
 public:
  constexpr IndexView() = default;
  constexpr IndexView(const VectorView<const int32_t>& v)
      : i32_(v.data()), size_(v.extent(0)) {}
  constexpr IndexView(const VectorView<int32_t>& v)
      : i32_(v.data()), size_(v.extent(0)) {}
  constexpr IndexView(const VectorView<const int64_t>& v)
      : i64_(v.data()), size_(v.extent(0)) {}
  constexpr IndexView(const VectorView<int64_t>& v)
      : i64_(v.data()), size_(v.extent(0)) {}

  constexpr int64_t size() const { return size_; }
  // True for a view without memory, which is legal only if the view is empty.
  constexpr bool null() const { return i32_ == nullptr && i64_ == nullptr; }

  // The numbers as a tensor, to compare addresses with; of rank 1.
  AnyTensorView tensor() const {
    if (i32_ != nullptr) return DenseVector(i32_, size_);
    return DenseVector(i64_, size_);
  }

  constexpr int64_t operator[](int64_t i) const {
    QUERN_DCHECK(0 <= i && i < size_);
    return i32_ != nullptr ? static_cast<int64_t>(i32_[i]) : i64_[i];
  }

 private:
  const int32_t* i32_ = nullptr;
  const int64_t* i64_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace quern

#endif  // QUERN_OPS_INDEX_VIEW_H_
