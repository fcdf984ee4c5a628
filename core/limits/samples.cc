#include "quern/core/limits/samples.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "quern/core/limits/timer.h"

namespace quern {

void Samples::Add(double value, double delay) {
  samples_.push_back({value, delay});
  if (delay <= kMaxDelay) ++clean_;
}

std::vector<double> Samples::Used() const {
  std::vector<Sample> sorted = samples_;
  std::stable_sort(
      sorted.begin(), sorted.end(),
      [](const Sample& a, const Sample& b) { return a.delay < b.delay; });
  size_t used = static_cast<size_t>(clean_);
  if (clean_ < 3) {
    used = std::min(sorted.size(), std::max<size_t>(3, sorted.size() / 4));
  }
  std::vector<double> values;
  for (size_t i = 0; i < used; ++i) values.push_back(sorted[i].value);
  return values;
}

Samples Samples::Slice(int64_t begin, int64_t end) const {
  Samples slice;
  for (int64_t i = begin; i < end; ++i) {
    const Sample& sample = samples_[static_cast<size_t>(i)];
    slice.Add(sample.value, sample.delay);
  }
  return slice;
}

Bound BoundOf(const Samples& samples) {
  const int64_t half = (samples.taken() + 1) / 2;
  const std::vector<double> first = samples.Slice(0, half).Used();
  const std::vector<double> second =
      samples.Slice(samples.taken() - half, samples.taken()).Used();
  const double low = std::min(Median(first), Median(second));
  const double high = std::max(Median(first), Median(second));
  const double best = std::max(Largest(first), Largest(second));
  return {high,
          samples.taken() > 1 && high <= 1.05 * low && best <= 1.1 * high};
}

bool TakeMore(const Samples& samples, int64_t runs, double seconds) {
  if (samples.clean() >= runs) return false;
  return samples.taken() < 3 * runs || (samples.clean() < 3 && seconds < 3);
}

Samples Collect(int64_t runs, absl::FunctionRef<double()> take) {
  Samples samples;
  for (const Stopwatch total; TakeMore(samples, runs, total.seconds());) {
    const PreemptionWatch watch;
    double value = 0;
    const double seconds = Seconds([&] { value = take(); });
    samples.Add(value, watch.Delay(seconds));
  }
  return samples;
}

}  // namespace quern
