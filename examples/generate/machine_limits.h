#ifndef QUERN_EXAMPLES_GENERATE_MACHINE_LIMITS_H_
#define QUERN_EXAMPLES_GENERATE_MACHINE_LIMITS_H_

// What --limits holds the speed of a model against: the rates of this machine,
// measured before and after the text by the workers that run the model.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "quern/core/executor.h"
#include "quern/core/limits/samples.h"
#include "quern/models/decoder_work.h"

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

class LimitMeter {
 public:
  // Takes samples of every limit by the executor's workers, in a buffer of 8
  // times the last-level cache, 256 MiB at least, which is freed again.
  // ResourceExhausted: no memory for it.
  absl::Status Take(Executor& executor);
  // The limits, from an even number of calls of Take that succeeded.
  MachineLimits Result() const;

 private:
  Samples dram_, f32_, bf16_, int8_;
};

// The speed of `tokens` tokens in `seconds`, without a line break:
//
//   "512 tokens, 9.6600 s, 53 tokens/s, 0.92 GB/s, 118 GFLOP/s"
//
// with GOP/s where some operations are of int8, and with limits, which may be
// null, the larger of ReadSeconds and ComputeSeconds over the time, with the
// one of the two:
//
//   ", 0.61 of the arithmetic limit"
std::string SpeedText(int64_t tokens, double seconds, const DecoderWork& work,
                      const MachineLimits* limits);
// "DRAM read 28.1 GB/s, f32 196 GFLOP/s, bf16 196 GFLOP/s, int8 372 GOP/s".
std::string LimitsText(const MachineLimits& limits);

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_MACHINE_LIMITS_H_
