#include "quern/testing/data.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quern/core/dtype.h"
#include "quern/testing/reference_convert.h"

namespace quern {

template <typename T>
std::vector<T> RoundedTo(const std::vector<double>& values) {
  std::vector<T> rounded;
  rounded.reserve(values.size());
  for (const double value : values) rounded.push_back(FromDouble<T>(value));
  return rounded;
}

template <typename T>
std::vector<double> ToDoubles(const std::vector<T>& values) {
  std::vector<double> doubles;
  doubles.reserve(values.size());
  for (const T value : values) doubles.push_back(ToDouble(value));
  return doubles;
}

template <typename T>
std::vector<T> UniformReals(Rng& rng, int64_t count, double lo, double hi) {
  std::vector<T> v;
  v.reserve(static_cast<size_t>(count));
  while (count-- > 0) v.push_back(FromDouble<T>(rng.Uniform(lo, hi)));
  return v;
}

template <typename T>
std::vector<T> SmallIntegers(Rng& rng, int64_t count, int64_t lo, int64_t hi) {
  std::vector<T> v;
  v.reserve(static_cast<size_t>(count));
  while (count-- > 0) {
    v.push_back(FromDouble<T>(static_cast<double>(rng.Integer(lo, hi))));
  }
  return v;
}

// Instances are compiled here and not in each test, because sanitizers compile
// tests without optimisation, and the loops above are half of what some do.
#define QUERN_INSTANTIATE(T)                                              \
  template std::vector<T> RoundedTo<T>(const std::vector<double>&);       \
  template std::vector<double> ToDoubles<T>(const std::vector<T>&);       \
  template std::vector<T> UniformReals<T>(Rng&, int64_t, double, double); \
  template std::vector<T> SmallIntegers<T>(Rng&, int64_t, int64_t, int64_t)

QUERN_INSTANTIATE(float);
QUERN_INSTANTIATE(double);
QUERN_INSTANTIATE(BFloat16);
QUERN_INSTANTIATE(Float16);
QUERN_INSTANTIATE(Float8E4M3);
QUERN_INSTANTIATE(Float8E5M2);
QUERN_INSTANTIATE(int8_t);
QUERN_INSTANTIATE(uint8_t);
QUERN_INSTANTIATE(int32_t);
QUERN_INSTANTIATE(uint32_t);
QUERN_INSTANTIATE(int64_t);

}  // namespace quern
