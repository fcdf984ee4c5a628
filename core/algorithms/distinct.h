#ifndef QUERN_CORE_ALGORITHMS_DISTINCT_H_
#define QUERN_CORE_ALGORITHMS_DISTINCT_H_

// Whether a number, such as a slot or a page, occurs twice in a list. The
// answer takes neither memory of the caller's nor an allocation, because
// Execute asks for it in debug builds, for every layer.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace quern {

// A set of numbers in [begin, begin + kSize), as bits.
template <int64_t kNumbers>
class NumberWindow {
 public:
  static constexpr int64_t kSize = kNumbers;
  static_assert(kNumbers > 0 && kNumbers % 64 == 0, "whole words");

  // Empties the set and moves its window of numbers.
  void Reset(int64_t begin) {
    begin_ = begin;
    bits_.fill(0);
  }
  bool Covers(int64_t number) const {
    return number >= begin_ && number - begin_ < kSize;
  }
  // `number` is covered.
  bool Contains(int64_t number) const {
    return (Word(number) >> (Offset(number) % 64) & 1) != 0;
  }
  void Insert(int64_t number) {
    bits_[Offset(number) / 64] |= uint64_t{1} << (Offset(number) % 64);
  }

 private:
  size_t Offset(int64_t number) const {
    return static_cast<size_t>(number - begin_);
  }
  uint64_t Word(int64_t number) const { return bits_[Offset(number) / 64]; }

  int64_t begin_ = 0;
  std::array<uint64_t, static_cast<size_t>(kSize / 64)> bits_;
};

inline constexpr int64_t kNoNumber = std::numeric_limits<int64_t>::max();

// A number that occurs twice among number(i), i < count, or kNoNumber if none
// does; negative numbers do not count. Where several occur twice, the result is
// the one whose second occurrence comes first in the lowest window. Takes the
// numbers window by window, and calls full(window) with all that lie in it. A
// window of the default size takes 16 KiB. Cost: one pass over the list where
// all numbers lie within kWindow of the smallest, one more for each further
// window that has any.
template <int64_t kWindow = int64_t{1} << 17, typename Number, typename Full>
int64_t FindTwice(size_t count, const Number& number, const Full& full) {
  int64_t begin = kNoNumber;
  for (size_t i = 0; i < count; ++i) {
    if (const int64_t n = number(i); n >= 0) begin = std::min(begin, n);
  }
  NumberWindow<kWindow> window;
  while (begin != kNoNumber) {
    window.Reset(begin);
    int64_t next = kNoNumber;
    for (size_t i = 0; i < count; ++i) {
      const int64_t n = number(i);
      if (n < begin) continue;
      if (!window.Covers(n)) {
        next = std::min(next, n);
        continue;
      }
      if (window.Contains(n)) return n;
      window.Insert(n);
    }
    full(window);
    begin = next;
  }
  return kNoNumber;
}

}  // namespace quern

#endif  // QUERN_CORE_ALGORITHMS_DISTINCT_H_
