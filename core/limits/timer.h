#ifndef QUERN_CORE_LIMITS_TIMER_H_
#define QUERN_CORE_LIMITS_TIMER_H_

// Clocks and order statistics.

#include <chrono>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"

namespace quern {

// Wall-clock seconds since it was made.
class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(Clock::now() - start_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

// Wall-clock seconds that fn took.
inline double Seconds(absl::FunctionRef<void()> fn) {
  const Stopwatch stopwatch;
  fn();
  return stopwatch.seconds();
}

// The middle value, or the mean of the two in the middle; NaN if empty.
double Median(std::vector<double> values);
// The smallest and the largest; NaN if empty.
double Smallest(const std::vector<double>& values);
double Largest(const std::vector<double>& values);

// Nanoseconds that threads of this process were ready to run and had no CPU,
// so far. Zero where the kernel does not tell.
int64_t RunDelayNanoseconds();

// Watches one sample: how much of it someone else had our CPUs.
class PreemptionWatch {
 public:
  PreemptionWatch() : before_(RunDelayNanoseconds()) {}
  // Time that threads waited for a CPU, over `seconds`. May exceed 1: threads
  // wait side by side.
  double Delay(double seconds) const {
    return static_cast<double>(RunDelayNanoseconds() - before_) /
           (1e9 * seconds);
  }

 private:
  int64_t before_;
};

}  // namespace quern

#endif  // QUERN_CORE_LIMITS_TIMER_H_
