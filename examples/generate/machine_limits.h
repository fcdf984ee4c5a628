#ifndef QUERN_EXAMPLES_GENERATE_MACHINE_LIMITS_H_
#define QUERN_EXAMPLES_GENERATE_MACHINE_LIMITS_H_

// What --limits holds the speed of a model against: the rates of this machine,
// measured by the workers that run the model: all of them before and after the
// text, and DRAM's between any two steps too, because it may flip between two
// rates within seconds.

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "quern/core/executor.h"
#include "quern/core/limits/limits.h"
#include "quern/core/limits/samples.h"
#include "quern/models/decoder/decoder_work.h"

namespace quern {

// Rates of 1e9 bytes or operations a second.
struct MachineLimits {
  double dram_gbps = 0;  // reads
  double f32_gops = 0, bf16_gops = 0, int8_gops = 0;
  bool steady = true;  // whether all were the same before and after

  // Least seconds in which this machine can read the bytes of `work`, and in
  // which it can compute its operations.
  double ReadSeconds(const DecoderWork& work) const;
  double ComputeSeconds(const DecoderWork& work) const;
};

// The least seconds that the bytes and the operations of a text need.
struct LeastSeconds {
  double read = 0, compute = 0;
};

// The least seconds that a step needs to read its bytes, between two reads of
// DRAM at these rates: at the larger one, because DRAM may change its rate
// within the step.
double StepReadSeconds(const DecoderWork& work, double gbps_before,
                       double gbps_after);

class LimitMeter {
 public:
  // Takes samples of every limit by the executor's workers, in a buffer of 8
  // times the last-level cache, 256 MiB at least, which is kept.
  // ResourceExhausted: no memory for it.
  absl::Status Take(Executor& executor);
  // The limits, from an even number of calls of Take that succeeded.
  MachineLimits Result() const;

  // Called before the first step of a text, after Take, and after each step
  // with what it read. Each call reads two quarters of the buffer, of which the
  // second is timed. That empties the caches.
  void BeforeSteps(Executor& executor) { dram_gbps_ = DramGbps(executor); }
  void AfterStep(const DecoderWork& work, Executor& executor);
  // The sum of StepReadSeconds over the steps.
  double step_read_seconds() const { return step_read_seconds_; }

 private:
  double DramGbps(Executor& executor);

  std::optional<Limits> limits_;
  Samples dram_, f32_, bf16_, int8_;
  double dram_gbps_ = 0, step_read_seconds_ = 0;
};

// The speed of `tokens` tokens in `seconds`, without a line break:
//
//   "512 tokens, 9.6600 s, 53 tokens/s, 0.92 GB/s, 118 GFLOP/s"
//
// with GOP/s where some operations are of int8, and with `least`, which may be
// null, the larger of its two times over the time, with the one of the two:
//
//   ", 0.61 of the arithmetic limit"
std::string SpeedText(int64_t tokens, double seconds, const DecoderWork& work,
                      const LeastSeconds* least);
// "DRAM read 28.1 GB/s, f32 196 GFLOP/s, bf16 196 GFLOP/s, int8 372 GOP/s".
std::string LimitsText(const MachineLimits& limits);

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_MACHINE_LIMITS_H_
