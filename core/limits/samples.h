#ifndef QUERN_CORE_LIMITS_SAMPLES_H_
#define QUERN_CORE_LIMITS_SAMPLES_H_

// Samples of a rate or a time on a machine that others use too.

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"

namespace quern {

// Samples of one quantity, each with the share of it that was waited for a
// CPU.
class Samples {
 public:
  // Below it, a sample counts as clean.
  static constexpr double kMaxDelay = 0.02;

  void Add(double value, double delay);

  // The clean samples; if there are fewer than three, the least delayed
  // quarter, three at least.
  std::vector<double> Used() const;
  int64_t clean() const { return clean_; }
  int64_t disturbed() const { return taken() - clean_; }
  int64_t taken() const { return static_cast<int64_t>(samples_.size()); }

  // The samples [begin, end), in the order in which they were taken.
  Samples Slice(int64_t begin, int64_t end) const;

 private:
  struct Sample {
    double value;
    double delay;
  };
  std::vector<Sample> samples_;
  int64_t clean_ = 0;
};

// Whether to take one more: until `runs` are clean, or 3 * runs were taken; but
// on a busy machine up to three seconds for three clean ones.
bool TakeMore(const Samples& samples, int64_t runs, double seconds);

// Adds samples of `take`, which returns one value, while TakeMore.
Samples Collect(int64_t runs, absl::FunctionRef<double()> take);

// An upper bound, from samples of its rate.
struct Bound {
  // The larger of two medians: of the first half of the samples, and of the
  // second half.
  double value = 0;
  // Whether the machine stayed the same: the two medians within 5 %, and no
  // sample more than 10 % above `value`.
  bool steady = false;
};
Bound BoundOf(const Samples& samples);

}  // namespace quern

#endif  // QUERN_CORE_LIMITS_SAMPLES_H_
