#ifndef QUERN_TESTING_GUARD_BUFFER_H_
#define QUERN_TESTING_GUARD_BUFFER_H_

// Memory in which a wrong access is an event. GuardBuffer<T>(n) holds n
// elements between two pages that may not be touched:
//
//   | no access | canary ...           elements | no access |   Edge::kEnd
//   | no access | elements           ... canary | no access |   Edge::kBegin
//
// Reading or writing past the guarded edge ends the process; writing past the
// other one changes canary bytes, which the destructor reports as a failure of
// the running test. Elements start as poison: NaN where the type has one, else
// bytes 0x55; what a kernel leaves unwritten or reads in vain shows.
//
// `shift` moves the elements that many elements away from the edge, so that
// every misalignment of a base pointer can be had: 1 <= shift < 64 is usual.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/check.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/reference_convert.h"

namespace quern {

enum class Edge { kBegin, kEnd };

// NaN, or bytes 0x55.
template <typename T>
T Poison() {
  if constexpr (IsFloatStorage<T>) {
    return FromBits<T>(FormatOf<T>().nan());
  } else {
    T poison;
    std::memset(&poison, 0x55, sizeof(T));
    return poison;
  }
}

// Whether x has the bits of Poison<T>().
template <typename T>
bool IsPoison(T x) {
  const T poison = Poison<T>();
  return std::memcmp(&x, &poison, sizeof(T)) == 0;
}

template <typename T>
class GuardBuffer {
 public:
  static_assert(std::is_trivially_copyable_v<T>, "elements are bytes");

  explicit GuardBuffer(int64_t count, Edge edge = Edge::kEnd, int64_t shift = 0)
      : count_(static_cast<size_t>(count)) {
    QUERN_CHECK(count >= 0 && shift >= 0);
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t gap = static_cast<size_t>(shift) * sizeof(T);
    const size_t used = count_ * sizeof(T) + gap;
    inner_bytes_ = (used / page + 1) * page;
    mapped_bytes_ = inner_bytes_ + 2 * page;
    void* mapping = mmap(nullptr, mapped_bytes_, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    QUERN_CHECK(mapping != MAP_FAILED);
    mapping_ = static_cast<uint8_t*>(mapping);
    inner_ = mapping_ + page;
    QUERN_CHECK(mprotect(inner_, inner_bytes_, PROT_READ | PROT_WRITE) == 0);
    uint8_t* first =
        edge == Edge::kBegin ? inner_ + gap : inner_ + inner_bytes_ - used;
    std::memset(inner_, kCanary, inner_bytes_);
    data_ = reinterpret_cast<T*>(first);
    FillWithPoison();
  }

  GuardBuffer(const std::vector<T>& values, Edge edge = Edge::kEnd,
              int64_t shift = 0)
      : GuardBuffer(static_cast<int64_t>(values.size()), edge, shift) {
    if (!values.empty()) {
      std::memcpy(data_, values.data(), values.size() * sizeof(T));
    }
  }

  ~GuardBuffer() {
    EXPECT_TRUE(CanariesIntact());
    munmap(mapping_, mapped_bytes_);
  }

  GuardBuffer(const GuardBuffer&) = delete;
  GuardBuffer& operator=(const GuardBuffer&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return static_cast<int64_t>(count_); }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

  VectorView<T> view() { return DenseVector(data_, size()); }
  VectorView<const T> view() const {
    return DenseVector<const T>(data_, size());
  }
  std::vector<T> ToVector() const {
    return std::vector<T>(data_, data_ + count_);
  }

  void FillWithPoison() {
    const T poison = Poison<T>();
    std::fill(data_, data_ + count_, poison);
  }

  // No byte between the elements and the guard pages has changed.
  testing::AssertionResult CanariesIntact() const {
    const auto* begin = reinterpret_cast<const uint8_t*>(data_);
    const uint8_t* end = begin + count_ * sizeof(T);
    for (const uint8_t* p = inner_; p < inner_ + inner_bytes_; ++p) {
      if (p == begin) p = end;
      if (p == inner_ + inner_bytes_) break;
      if (*p == kCanary) continue;
      testing::AssertionResult failure = testing::AssertionFailure();
      return p < begin ? failure << "write " << begin - p
                                 << " bytes before the first element"
                       : failure << "write " << p - end + 1
                                 << " bytes past the last element";
    }
    return testing::AssertionSuccess();
  }

 private:
  static constexpr uint8_t kCanary = 0xA7;

  uint8_t* mapping_ = nullptr;  // both guard pages included
  size_t mapped_bytes_ = 0;
  uint8_t* inner_ = nullptr;  // between the guard pages
  size_t inner_bytes_ = 0;
  T* data_ = nullptr;
  size_t count_ = 0;
};

// A matrix whose rows are `stride` >= cols elements apart, in a GuardBuffer
// that ends with the last element of the last row. Everything is poison at
// first; the destructor reports writes into the padding between rows.
template <typename T>
class StridedMatrix {
 public:
  StridedMatrix(int64_t rows, int64_t cols, int64_t stride,
                Edge edge = Edge::kEnd, int64_t shift = 0)
      : rows_(rows),
        cols_(cols),
        stride_(stride),
        buffer_(rows == 0 ? 0 : (rows - 1) * stride + cols, edge, shift) {
    QUERN_CHECK(rows >= 0 && cols >= 0 && stride >= cols);
  }
  // Takes its elements from dense values, row by row.
  StridedMatrix(const std::vector<T>& values, int64_t rows, int64_t cols,
                int64_t stride, Edge edge = Edge::kEnd, int64_t shift = 0)
      : StridedMatrix(rows, cols, stride, edge, shift) {
    QUERN_CHECK(static_cast<int64_t>(values.size()) == rows * cols);
    for (int64_t r = 0; r < rows && cols > 0; ++r) {
      std::memcpy(view().Row(r), values.data() + r * cols,
                  static_cast<size_t>(cols) * sizeof(T));
    }
  }

  ~StridedMatrix() { EXPECT_TRUE(PaddingIntact()); }

  StridedMatrix(const StridedMatrix&) = delete;
  StridedMatrix& operator=(const StridedMatrix&) = delete;

  MatrixView<T> view() {
    return {buffer_.data(), {rows_, cols_}, {stride_, 1}};
  }
  MatrixView<const T> view() const {
    return {buffer_.data(), {rows_, cols_}, {stride_, 1}};
  }

  std::vector<T> ToDense() const {
    std::vector<T> dense;
    for (int64_t r = 0; r < rows_; ++r) {
      const T* row = view().Row(r);
      dense.insert(dense.end(), row, row + cols_);
    }
    return dense;
  }

  void FillWithPoison() { buffer_.FillWithPoison(); }

  testing::AssertionResult PaddingIntact() const {
    for (int64_t r = 0; r + 1 < rows_; ++r) {
      for (int64_t c = cols_; c < stride_; ++c) {
        if (IsPoison(buffer_[r * stride_ + c])) continue;
        return testing::AssertionFailure()
               << "write into the padding of row " << r << ", at column " << c;
      }
    }
    return buffer_.CanariesIntact();
  }

 private:
  int64_t rows_;
  int64_t cols_;
  int64_t stride_;
  GuardBuffer<T> buffer_;
};

}  // namespace quern

#endif  // QUERN_TESTING_GUARD_BUFFER_H_
