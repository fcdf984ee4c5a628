#ifndef QUERN_C_TESTING_C_TESTUTIL_H_
#define QUERN_C_TESTING_C_TESTUTIL_H_

// Test utility: a library for each test, texts as strings, and tensors of the C
// interface from the library's views.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/tensor.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"

namespace quern {

inline std::string MessageOf(const void* object) {
  std::string text(quern_message(object, nullptr, 0), '\0');
  quern_message(object, &text[0], text.size() + 1);
  return text;
}
inline std::string ExplanationOf(const void* object) {
  std::string text(quern_explain(object, nullptr, 0), '\0');
  quern_explain(object, &text[0], text.size() + 1);
  return text;
}

// `status`, of a call on `object`, is `code`, and the sentence has these words.
inline void ExpectRefused(quern_status status, const void* object,
                          quern_status code, const std::string& words) {
  EXPECT_EQ(status, code) << MessageOf(object);
  EXPECT_NE(MessageOf(object).find(words), std::string::npos)
      << MessageOf(object) << "\nlacks: " << words;
}
#define EXPECT_C_OK(status, object) \
  EXPECT_EQ(status, QUERN_OK) << MessageOf(object)
#define ASSERT_C_OK(status, object) \
  ASSERT_EQ(status, QUERN_OK) << MessageOf(object)

// A quern_tensor that has its shape and strides beside it.
class TensorInC {
 public:
  TensorInC(DType dtype, void* data, std::vector<int64_t> shape)
      : shape_(std::move(shape)) {
    tensor_ = quern_dense(data, c_abi::ToC(dtype),
                          static_cast<int32_t>(shape_.size()), shape_.data());
  }
  explicit TensorInC(const AnyTensorView& view)
      : TensorInC(view.dtype(), const_cast<void*>(view.data()), {}) {
    for (int d = 0; d < view.rank(); ++d) {
      shape_.push_back(view.extent(d));
      strides_.push_back(view.stride(d));
    }
    tensor_.ndim = view.rank();
    tensor_.shape = shape_.data();
    tensor_.strides = strides_.data();
  }
  TensorInC(const TensorInC&) = delete;
  TensorInC& operator=(const TensorInC&) = delete;

  quern_tensor* get() { return &tensor_; }
  quern_tensor* operator->() { return &tensor_; }

 private:
  std::vector<int64_t> shape_, strides_;
  quern_tensor tensor_;
};

// Owns a library, and with it everything that a test makes.
class LibraryInC {
 public:
  LibraryInC() {
    char text[512];
    EXPECT_EQ(quern_library_create(nullptr, &library_, text, sizeof(text)),
              QUERN_OK)
        << text;
  }
  ~LibraryInC() { EXPECT_C_OK(quern_destroy(library_), library_); }
  LibraryInC(const LibraryInC&) = delete;
  LibraryInC& operator=(const LibraryInC&) = delete;

  quern_library* get() const { return library_; }

 private:
  quern_library* library_ = nullptr;
};

}  // namespace quern

#endif  // QUERN_C_TESTING_C_TESTUTIL_H_
