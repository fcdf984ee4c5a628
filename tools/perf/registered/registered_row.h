#ifndef QUERN_TOOLS_PERF_REGISTERED_REGISTERED_ROW_H_
#define QUERN_TOOLS_PERF_REGISTERED_REGISTERED_ROW_H_

// Private: what registered_check.cc reads of one row of a call, and the verdict
// on what the call wrote there.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/testing/reference_convert.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/registered/registered_check.h"

namespace quern {

// Half a unit in the last place of x, or half a step of an integer dtype.
inline double HalfUnit(DType dtype, double x) {
  return WithType(dtype, [x](auto type) {
    using T = decltype(type);
    if constexpr (std::is_integral_v<T>) {
      return 0.5;
    } else {
      return RoundingBound<T>(x);
    }
  });
}

// One row of a call, and the verdict on it.
class RowCheck {
 public:
  using Doubles = std::vector<double>;
  static constexpr double kUnit = 0x1p-24;  // of f32, relative

  RowCheck(absl::Span<const CheckedTensor> tensors, int64_t row,
           Verdict& verdict)
      : tensors_(tensors), row_(row), verdict_(verdict) {}

  int64_t row() const { return row_; }
  DType dtype(size_t tensor) const { return tensors_[tensor].dtype; }
  // The number of elements of a row.
  int64_t Width(size_t tensor) const {
    int64_t width = 1;
    const std::vector<int64_t>& extents = tensors_[tensor].extents;
    for (size_t d = 1; d < extents.size(); ++d) width *= extents[d];
    return width;
  }

  Doubles Before(size_t tensor) const { return Before(tensor, row_); }
  Doubles Before(size_t tensor, int64_t row) const {
    const int64_t width = Width(tensor);
    return Read(tensor, tensors_[tensor].before, row * width, width);
  }
  // The elements of a vector, which has no rows.
  Doubles Vector(size_t tensor) const {
    return Read(tensor, tensors_[tensor].before, 0,
                tensors_[tensor].extents[0]);
  }
  int64_t Integer(size_t tensor, int64_t at) const {
    return static_cast<const int32_t*>(tensors_[tensor].before)[at];
  }
  Doubles After(size_t tensor) const {
    const int64_t width = Width(tensor);
    return Read(tensor, tensors_[tensor].after, row_ * width, width);
  }

  // error(i) bounds the error of element i before it was rounded to its dtype.
  template <typename Error>
  void Expect(size_t tensor, const Doubles& want, const Error& error) {
    Judge(tensor, want, [&](size_t i) {
      const double e = error(i);
      return e + HalfUnit(dtype(tensor), std::abs(want[i]) + e);
    });
  }
  void ExpectRelative(size_t tensor, const Doubles& want, double units) {
    Expect(tensor, want,
           [&](size_t i) { return std::abs(want[i]) * units * kUnit; });
  }
  void ExpectEqual(size_t tensor, const Doubles& want) {
    Judge(tensor, want, [](size_t) { return 0.0; });
  }

 private:
  Doubles Read(size_t tensor, const void* data, int64_t from,
               int64_t count) const {
    return WithType(dtype(tensor), [&](auto type) {
      const auto* elements = static_cast<const decltype(type)*>(data) + from;
      Doubles doubles;
      for (int64_t i = 0; i < count; ++i) {
        doubles.push_back(ToDouble(elements[i]));
      }
      return doubles;
    });
  }
  template <typename Bound>
  void Judge(size_t tensor, const Doubles& want, const Bound& bound) {
    const Doubles got = After(tensor);
    const auto first = row_ * static_cast<int64_t>(got.size());
    // A reference of another length is wrong in its first element.
    const bool fits = want.size() == got.size();
    for (size_t i = 0; i < got.size(); ++i) {
      verdict_.Add(first + static_cast<int64_t>(i), got[i],
                   fits ? want[i] : std::nan(""), fits ? bound(i) : 0.0);
    }
  }

  absl::Span<const CheckedTensor> tensors_;
  int64_t row_;
  Verdict& verdict_;
};

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_REGISTERED_REGISTERED_ROW_H_
