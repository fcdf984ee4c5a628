#include "quern/core/algorithms/distinct.h"

#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "quern/testing/data.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

// The window that FindTwice takes by default.
using Window = NumberWindow<int64_t{1} << 17>;

int64_t Twice(const std::vector<int64_t>& numbers) {
  return FindTwice(
      numbers.size(), [&](size_t i) { return numbers[i]; },
      [](const Window&) {});
}

TEST(FindTwiceTest, AgreesWithASet) {
  Rng rng(1);
  int found = 0, none = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const int64_t size = rng.Integer(0, 40);
    // A few windows, of which the list may leave out some.
    const int64_t range = rng.Integer(0, 1) == 0 ? 400 : 8 * Window::kSize;
    std::vector<int64_t> numbers;
    std::set<int64_t> seen, repeated;
    for (int64_t i = 0; i < size; ++i) {
      int64_t n = rng.Integer(-range / 8, range);
      if (!numbers.empty() && rng.Integer(0, 99) == 0) n = numbers.front();
      numbers.push_back(n);
      if (n >= 0 && !seen.insert(n).second) repeated.insert(n);
    }
    const int64_t twice = Twice(numbers);
    if (repeated.empty()) {
      EXPECT_EQ(twice, kNoNumber);
      ++none;
    } else {
      EXPECT_EQ(repeated.count(twice), 1u) << twice;
      ++found;
    }
  }
  EXPECT_GT(found, 200);
  EXPECT_GT(none, 200);
}

TEST(FindTwiceTest, KnowsBothSidesOfAWindowsEnd) {
  constexpr int64_t kSize = Window::kSize;
  for (const int64_t first : {int64_t{0}, int64_t{5}, kNoNumber - 2 * kSize}) {
    for (const int64_t at : {kSize - 1, kSize, kSize + 1}) {
      EXPECT_EQ(Twice({first + at, first, first + at}), first + at);
      EXPECT_EQ(Twice({first + at, first, first + at - 1}), kNoNumber);
    }
  }
  EXPECT_EQ(Twice({-1, -1, 3}), kNoNumber);
  EXPECT_EQ(Twice({}), kNoNumber);
}

TEST(FindTwiceTest, NamesTheFirstRepeatedInTheLowestWindow) {
  constexpr int64_t kSize = Window::kSize;
  EXPECT_EQ(Twice({9, 4, 4, 9}), 4);
  // 3 * kSize is repeated before 1 is, but in a higher window.
  EXPECT_EQ(Twice({3 * kSize, 3 * kSize, 1, 1}), 1);
}

TEST(FindTwiceTest, ShowsEachWindowWithWhatLiesInIt) {
  constexpr int64_t kSize = Window::kSize;
  const std::vector<int64_t> numbers = {9 * kSize, 3, kSize + 2, -1};
  std::vector<int64_t> shown;
  const int64_t twice = FindTwice(
      numbers.size(), [&](size_t i) { return numbers[i]; },
      [&](const Window& window) {
        for (const int64_t n : {int64_t{3}, int64_t{4}, kSize + 2, 9 * kSize}) {
          if (window.Covers(n) && window.Contains(n)) shown.push_back(n);
        }
      });
  EXPECT_EQ(twice, kNoNumber);
  EXPECT_EQ(shown, (std::vector<int64_t>{3, kSize + 2, 9 * kSize}));
}

TEST(FindTwiceTest, TakesWindowsOfAnotherSize) {
  const std::vector<int64_t> numbers = {130, 2, 128, 64, 3, 128};
  std::vector<int64_t> counts;  // of numbers in each window
  const int64_t twice = FindTwice<64>(
      numbers.size(), [&](size_t i) { return numbers[i]; },
      [&](const NumberWindow<64>& window) {
        counts.push_back(0);
        for (int64_t n = 0; n <= 130; ++n) {
          if (window.Covers(n) && window.Contains(n)) ++counts.back();
        }
      });
  EXPECT_EQ(twice, 128);
  EXPECT_EQ(counts, (std::vector<int64_t>{3}));
}

TEST(FindTwiceTest, AllocatesNothing) {
  const std::vector<int64_t> numbers = {9 * Window::kSize, 3, 2, -1};
  EXPECT_NO_ALLOCATION(Twice(numbers));
}

}  // namespace
}  // namespace quern
