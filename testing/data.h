#ifndef QUERN_TESTING_DATA_H_
#define QUERN_TESTING_DATA_H_

// Inputs of tests: random but replayable, the same on every platform.
//
//   TestRng rng;                       // seeded by the name of this test
//   auto a = UniformReals<BFloat16>(rng, m * k, -1, 1);
//   auto b = SmallIntegers<float>(rng, k * n, -8, 8);   // sums are exact
//
// A failure prints how to replay it. QUERN_TEST_SEED=n (or the flag
// --gtest_random_seed=n) gives every test other data; the default is 0.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/algorithms/checksum.h"
#include "quern/core/dtype.h"
#include "quern/testing/reference_convert.h"

namespace quern {

// SplitMix64 (Steele, Lea, Flood 2014): a counter and a mixing function, whole
// period 2^64, any seed is good.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // A number in [lo, hi).
  double Uniform(double lo, double hi) {
    return lo + (hi - lo) * std::ldexp(static_cast<double>(Next() >> 11), -53);
  }

  // An integer in [lo, hi], both included; the chances of any two differ by at
  // most (hi - lo) / 2^64.
  int64_t Integer(int64_t lo, int64_t hi) {
    const uint64_t range =
        static_cast<uint64_t>(hi) - static_cast<uint64_t>(lo);
    const uint64_t r = Next();
    const uint64_t offset =
        range == std::numeric_limits<uint64_t>::max() ? r : r % (range + 1);
    return static_cast<int64_t>(static_cast<uint64_t>(lo) + offset);
  }

  // Fisher-Yates.
  template <typename T>
  void Shuffle(std::vector<T>& v) {
    for (size_t i = v.size(); i > 1; --i) {
      std::swap(
          v[i - 1],
          v[static_cast<size_t>(Integer(0, static_cast<int64_t>(i) - 1))]);
    }
  }

 private:
  uint64_t state_;
};

// QUERN_TEST_SEED, else --gtest_random_seed.
inline uint64_t BaseSeed() {
  const char* text = std::getenv("QUERN_TEST_SEED");
  if (text != nullptr && *text != '\0') {
    return std::strtoull(text, nullptr, 0);
  }
  return static_cast<uint64_t>(GTEST_FLAG_GET(random_seed));
}

// "Suite.Test" of the running test.
inline std::string TestName() {
  const testing::TestInfo* info =
      testing::UnitTest::GetInstance()->current_test_info();
  if (info == nullptr) return "no test";
  return std::string(info->test_suite_name()) + "." + info->name();
}

inline uint64_t HashOf(const std::string& text) {
  return Fnv1a(text.data(), text.size());
}

// The Rng of the running test. While it lives, every failure tells the flags
// that replay it. `stream` makes a second one of the same test independent.
class TestRng : public Rng {
 public:
  explicit TestRng(uint64_t stream = 0)
      : Rng((BaseSeed() ^ HashOf(TestName())) + stream * 0xd1342543de82ef95u),
        trace_(__FILE__, __LINE__,
               "replay with QUERN_TEST_SEED=" + std::to_string(BaseSeed()) +
                   " --gtest_filter=" + TestName() +
                   " (./bazelw test --test_env=QUERN_TEST_SEED=" +
                   std::to_string(BaseSeed()) + " --test_filter=" + TestName() +
                   ")") {}

 private:
  testing::ScopedTrace trace_;
};

// QUERN_TEST_QUICK=1: the run is slow (an emulator); exhaustive tests should
// take a sample.
inline bool QuickTests() {
  const char* text = std::getenv("QUERN_TEST_QUICK");
  return text != nullptr && *text != '\0' && *text != '0';
}

// T below is an element type of core/dtype.h, double, int64_t or uint32_t.

// `values` rounded to T: what the reference must also be given.
template <typename T>
std::vector<T> RoundedTo(const std::vector<double>& values);

// Any element type as doubles, for the reference.
template <typename T>
std::vector<double> ToDoubles(const std::vector<T>& values);

// `count` reals in [lo, hi), rounded to T.
template <typename T = float>
std::vector<T> UniformReals(Rng& rng, int64_t count, double lo = -1.0,
                            double hi = 1.0);

// `count` integers in [lo, hi]. As floats they make sums that are exact, in
// any order, while the sums stay within the mantissa: 2^24 for f32.
template <typename T = float>
std::vector<T> SmallIntegers(Rng& rng, int64_t count, int64_t lo = -8,
                             int64_t hi = 8);

// The finite values at the edges of T: zeros, ones, the smallest and largest
// of each kind, and their negatives.
template <typename T>
std::vector<T> Extremes() {
  std::vector<T> v;
  if constexpr (IsFloatStorage<T>) {
    constexpr FloatFormat f = FormatOf<T>();
    const uint32_t one = Encode(f, 1.0);
    for (const uint32_t code :
         {0u, 1u, (1u << f.mantissa_bits) - 1, 1u << f.mantissa_bits, one - 1,
          one, one + 1, f.max_finite() - 1, f.max_finite()}) {
      v.push_back(FromBits<T>(code));
      v.push_back(FromBits<T>(code | f.sign_bit()));
    }
  } else {
    using Limits = std::numeric_limits<T>;
    v = {0,
         1,
         static_cast<T>(-1),
         Limits::max(),
         static_cast<T>(Limits::max() - 1),
         Limits::lowest(),
         static_cast<T>(Limits::lowest() + 1)};
  }
  return v;
}

// Infinities and NaNs of T; empty where it has none.
template <typename T>
std::vector<T> Specials() {
  std::vector<T> v;
  if constexpr (IsFloatStorage<T>) {
    constexpr FloatFormat f = FormatOf<T>();
    for (const uint32_t sign : {0u, f.sign_bit()}) {
      if (f.has_infinity) v.push_back(FromBits<T>(sign | f.infinity()));
      v.push_back(FromBits<T>(sign | f.nan()));
    }
  }
  return v;
}

// `count` elements drawn from `choices`.
template <typename T>
std::vector<T> ChosenFrom(Rng& rng, int64_t count,
                          const std::vector<T>& choices) {
  std::vector<T> v;
  v.reserve(static_cast<size_t>(count));
  const auto last = static_cast<int64_t>(choices.size()) - 1;
  while (count-- > 0) {
    v.push_back(choices[static_cast<size_t>(rng.Integer(0, last))]);
  }
  return v;
}

}  // namespace quern

#endif  // QUERN_TESTING_DATA_H_
