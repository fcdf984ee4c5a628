#include "examples/generate/machine_limits.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "quern/core/executor.h"
#include "quern/core/limits/limit_kinds.h"
#include "quern/core/limits/limits.h"
#include "quern/core/limits/samples.h"
#include "quern/core/limits/timer.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/status_macros.h"
#include "quern/models/decoder/decoder_work.h"

namespace quern {
namespace {

constexpr int kRounds = 11;
constexpr int64_t kCalibrationRounds = 4;

double Giga(int64_t amount) { return static_cast<double>(amount) * 1e-9; }

// "118", "28.1", "0.92": three digits, of a rate of at most some thousands.
std::string Rate(double rate) {
  return absl::StrFormat("%.*f", rate < 10 ? 2 : (rate < 100 ? 1 : 0), rate);
}

}  // namespace

double MachineLimits::ReadSeconds(const DecoderWork& work) const {
  return Giga(work.bytes()) / dram_gbps;
}

double MachineLimits::ComputeSeconds(const DecoderWork& work) const {
  return Giga(work.f32_ops) / f32_gops + Giga(work.bf16_ops) / bf16_gops +
         Giga(work.int8_ops) / int8_gops;
}

double StepReadSeconds(const DecoderWork& work, double gbps_before,
                       double gbps_after) {
  return Giga(work.bytes()) / std::max(gbps_before, gbps_after);
}

absl::Status LimitMeter::Take(Executor& executor) {
  if (!limits_.has_value()) {
    QUERN_ASSIGN_OR_RETURN(limits_, Limits::Create(GetCpuInfo()));
    limits_->Calibrate(DramKind::kRead, kCalibrationRounds, executor);
  }
  const auto take = [](Samples& samples, const auto& sample) {
    const PreemptionWatch watch;
    const LimitSample taken = sample();
    samples.Add(taken.rate() * 1e-9, watch.Delay(taken.seconds));
  };
  for (int round = 0; round < kRounds; ++round) {
    take(dram_, [&] { return limits_->Dram(DramKind::kRead, executor); });
    take(f32_, [&] { return limits_->Peak(PeakKind::kF32, executor); });
    take(bf16_, [&] { return limits_->Peak(PeakKind::kBF16, executor); });
    take(int8_, [&] { return limits_->Peak(PeakKind::kI8, executor); });
  }
  return absl::OkStatus();
}

double LimitMeter::DramGbps(Executor& executor) {
  return limits_->Dram(DramKind::kRead, executor).rate() * 1e-9;
}

void LimitMeter::AfterStep(const DecoderWork& work, Executor& executor) {
  const double after = DramGbps(executor);
  step_read_seconds_ += StepReadSeconds(work, dram_gbps_, after);
  dram_gbps_ = after;
}

MachineLimits LimitMeter::Result() const {
  // The halves of the samples are those before and those after the text.
  const Bound dram = BoundOf(dram_), f32 = BoundOf(f32_), bf16 = BoundOf(bf16_),
              int8 = BoundOf(int8_);
  return {dram.value, f32.value, bf16.value, int8.value,
          dram.steady && f32.steady && bf16.steady && int8.steady};
}

std::string SpeedText(int64_t tokens, double seconds, const DecoderWork& work,
                      const LeastSeconds* least) {
  const auto rate = [seconds](double amount) {
    return seconds > 0 ? amount / seconds : 0.0;
  };
  std::string text = absl::StrFormat(
      "%d tokens, %.4f s, %.0f tokens/s, %s GB/s, %s %s/s", tokens, seconds,
      rate(static_cast<double>(tokens)), Rate(rate(Giga(work.bytes()))),
      Rate(rate(Giga(work.ops()))), work.int8_ops > 0 ? "GOP" : "GFLOP");
  if (least != nullptr) {
    absl::StrAppendFormat(
        &text, ", %.2f of the %s limit",
        rate(std::max(least->read, least->compute)),
        least->read >= least->compute ? "DRAM" : "arithmetic");
  }
  return text;
}

std::string LimitsText(const MachineLimits& limits) {
  return absl::StrFormat(
      "DRAM read %.1f GB/s, f32 %.0f GFLOP/s, bf16 %.0f GFLOP/s, int8 %.0f "
      "GOP/s%s",
      limits.dram_gbps, limits.f32_gops, limits.bf16_gops, limits.int8_gops,
      limits.steady ? "" : "; not the same before and after the text");
}

}  // namespace quern
