#ifndef QUERN_TOOLS_PERF_OP_UTIL_H_
#define QUERN_TOOLS_PERF_OP_UTIL_H_

// What the operators of the driver share: working sets and verdicts.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/testing/errors/largest_difference.h"
#include "quern/testing/reference_convert.h"

namespace quern {

// `sets` arrays of `bytes`, each aligned to a cache line, in one buffer.
class SetBuffer {
 public:
  absl::Status Create(int64_t sets, int64_t bytes) {
    stride_ = RoundUp(bytes, AlignedBuffer::kAlignment);
    bytes_ = bytes;
    int64_t total = 0;
    if (!CheckedMul(sets, stride_, &total)) {
      return absl::ResourceExhaustedError("perf: working sets exceed 2^63 B");
    }
    QUERN_ASSIGN_OR_RETURN(buffer_, AlignedBuffer::Create(total));
    // Pages exist from the first write on.
    if (!buffer_.empty()) std::memset(buffer_.data(), 0, buffer_.bytes());
    return absl::OkStatus();
  }
  template <typename T = uint8_t>
  T* at(int64_t set) {
    return reinterpret_cast<T*>(buffer_.data() + set * stride_);
  }
  int64_t bytes() const { return bytes_; }
  int64_t sets() const {
    return stride_ == 0 ? 0 : static_cast<int64_t>(buffer_.bytes()) / stride_;
  }

 private:
  AlignedBuffer buffer_;
  int64_t stride_ = 0;
  int64_t bytes_ = 0;
};

// Calls fn(T()) with the C++ type of dtype.
template <typename Fn>
auto WithType(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kF32:
      return fn(float{});
    case DType::kBF16:
      return fn(BFloat16{});
    case DType::kF16:
      return fn(Float16{});
    case DType::kF8E4M3:
      return fn(Float8E4M3{});
    case DType::kF8E5M2:
      return fn(Float8E5M2{});
    case DType::kI32:
      return fn(int32_t{});
    case DType::kI8:
      return fn(int8_t{});
    case DType::kI64:  // no operator here is timed on it
    case DType::kU8:
      break;
  }
  return fn(uint8_t{});
}

// Fills every set with reals in [lo, hi), rounded to T: a prime number of them,
// over and over.
template <typename T>
void FillReals(double lo, double hi, SetBuffer& sets) {
  constexpr size_t kPeriod = 65537;
  std::vector<T> pool;
  uint64_t state = 0x9e3779b97f4a7c15u;
  while (pool.size() < kPeriod) {
    state = state * 6364136223846793005u + 1442695040888963407u;  // Knuth
    const double unit = static_cast<double>(state >> 11) * 0x1p-53;
    pool.push_back(FromDouble<T>(lo + (hi - lo) * unit));
  }
  for (int64_t set = 0; set < sets.sets(); ++set) {
    const size_t count = static_cast<size_t>(sets.bytes()) / sizeof(T);
    // Sets differ in where they start.
    size_t from = static_cast<size_t>(set) % kPeriod;
    for (size_t i = 0; i < count;) {
      const size_t run = std::min(count - i, kPeriod - from);
      std::memcpy(sets.at<T>(set) + i, pool.data() + from, run * sizeof(T));
      i += run;
      from = 0;
    }
  }
}

// The worst of many comparisons, which Check returns. Tasks may add to it at
// once.
class Verdict {
 public:
  // |got - want| <= bound, element `index`. NaN fails, and so does a bound that
  // is no finite number.
  void Add(int64_t index, double got, double want, double bound) {
    worst_.Add(got, want);
    if (std::abs(got - want) <= bound && std::isfinite(bound)) return;
    if (failures_++ == 0) {
      first_ = absl::StrCat("element ", index, " is ", got, ", not ", want,
                            " within ", bound);
    }
  }
  void Merge(const Verdict& other) {
    const std::lock_guard<std::mutex> lock(mutex_);
    worst_.Merge(other.worst_);
    if (other.failures_ > 0 && failures_ == 0) first_ = other.first_;
    failures_ += other.failures_;
  }
  // Internal if an element failed, or if there was none.
  absl::StatusOr<double> Result(absl::string_view op) const {
    if (worst_.count() == 0) {
      return absl::InternalError(absl::StrCat(op, ": no element was compared"));
    }
    if (failures_ == 0) return worst_.value();
    return absl::InternalError(
        absl::StrCat(op, ": ", failures_, " elements are wrong; ", first_));
  }

 private:
  LargestDifference worst_;
  int64_t failures_ = 0;
  std::string first_;
  std::mutex mutex_;
};

// judge(i, verdict) for 0 <= i < count, on all workers.
template <typename Judge>
absl::StatusOr<double> JudgeAll(absl::string_view op, int64_t count,
                                Executor& executor, const Judge& judge) {
  constexpr int64_t kChunk = 4096;
  Verdict all;
  executor.ParallelFor(DivCeil(count, kChunk), [&](int64_t task, int) {
    Verdict mine;
    const int64_t end = std::min(count, (task + 1) * kChunk);
    for (int64_t i = task * kChunk; i < end; ++i) judge(i, mine);
    all.Merge(mine);
  });
  return all.Result(op);
}

// The largest relative error of rounding a normal number to dtype.
inline double RelativeRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return 0x1p-8;
    case DType::kF16:
      return 0x1p-11;
    default:
      return 0x1p-24;
  }
}

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_OP_UTIL_H_
