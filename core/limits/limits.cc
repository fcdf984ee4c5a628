#include "quern/core/limits/limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "hwy/base.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/executor.h"
#include "quern/core/limits/limit_kinds.h"
#include "quern/core/limits/limits_kernels.h"
#include "quern/core/limits/timer.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

// Tasks of a memory loop are long: each begins with streams that no prefetcher
// knows and ends when its stores have left the core. 2 MiB took 1.05 of the
// time of 16 MiB (two reads and a write, Zen 5, 2026).
constexpr size_t kLeastTaskBytes = 2 << 20;
constexpr size_t kTasksPerWorker = 2;  // level out a worker that lost its CPU
constexpr size_t kParts = 4;
constexpr std::array<size_t, 5> kPrefetch = {0, 512, 1024, 2048, 4096};
// Nothing that ThreadSanitizer watches is a limit, and its shadow of a buffer
// is four times as large.
constexpr int64_t kLeastBytes = int64_t{HWY_IS_TSAN ? 32 : 256} << 20;
constexpr double kPeakSeconds = 1e-3;
constexpr int kPeakParts = 4;

// Where results go that nobody reads, so that they must be computed.
std::atomic<uint64_t> sink{0};

// A chain of 8 * rounds additions, each of which needs the one before and takes
// one cycle. The compiler knows neither operand, so it cannot fold additions.
uint64_t AddChain(int rounds, uint64_t sum, uint64_t one) {
  const auto add = [](uint64_t& x, uint64_t& y) {
#if defined(__GNUC__)
    asm volatile("" : "+r"(x), "+r"(y));
#endif
    x += y;
  };
  for (int round = 0; round < rounds; ++round) {
    add(sum, one);
    add(sum, one);
    add(sum, one);
    add(sum, one);
    add(sum, one);
    add(sum, one);
    add(sum, one);
    add(sum, one);
  }
  return sum;
}

// Every way that Calibrate tries. The first is what runs without Calibrate.
std::vector<StreamWay> WaysOf(DramKind kind) {
  std::vector<StreamWay> ways;
  for (const bool past_caches : {true, false}) {
    if (past_caches && kind.writes == 0) continue;
    for (const size_t streams : {size_t{1}, kMaxStreams}) {
      for (const size_t prefetch : kPrefetch) {
        if (prefetch > 0 && kind == DramKind::kWrite) continue;
        ways.push_back({streams, prefetch, past_caches});
      }
    }
  }
  return ways;
}

}  // namespace

absl::string_view PagesName(const AlignedBuffer& buffer) {
  const auto huge = static_cast<double>(buffer.HugePageBytes());
  const auto all = static_cast<double>(buffer.bytes());
  if (huge >= 0.95 * all) return "2M";
  return huge <= 0.05 * all ? "4K" : "mixed";
}

absl::StatusOr<Limits> Limits::Create(const CpuInfo& cpu, LimitPages pages) {
  Limits limits;
  limits.streams_ = GetStreamKernels();
  limits.peaks_ = GetPeakKernels();
  limits.l2_set_bytes_ = cpu.l2_bytes / 2;
  limits.l3_bytes_ = cpu.l3_bytes;
  const int64_t bytes = std::max<int64_t>(
      HWY_IS_TSAN ? 0 : 8 * cpu.last_level_bytes(), kLeastBytes);
  // Parts of whole tasks.
  const auto unit = static_cast<int64_t>(kParts * kLeastTaskBytes);
  QUERN_ASSIGN_OR_RETURN(
      limits.buffer_, AlignedBuffer::Create((bytes + unit - 1) / unit * unit));
#ifdef MADV_NOHUGEPAGE
  if (pages == LimitPages::kSmall) {
    madvise(limits.buffer_.data(), limits.buffer_.bytes(), MADV_NOHUGEPAGE);
  }
#endif
  std::memset(limits.buffer_.data(), 1, limits.buffer_.bytes());
  limits.pages_ = std::string(PagesName(limits.buffer_));
  return limits;
}

void Limits::Calibrate(DramKind kind, int64_t rounds, Executor& executor) {
  const std::vector<StreamWay> ways = WaysOf(kind);
  // Times count relative to those just before and after them: DRAM may change
  // its speed meanwhile, which must not decide between ways.
  std::vector<std::vector<double>> slower(ways.size());
  for (int64_t round = 0; round < rounds; ++round) {
    std::vector<double> seconds;
    for (const StreamWay way : ways) {
      seconds.push_back(Dram(kind, way, executor).seconds);
    }
    const double least = *std::min_element(seconds.begin(), seconds.end());
    for (size_t i = 0; i < ways.size(); ++i) {
      slower[i].push_back(seconds[i] / least);
    }
  }
  size_t best = 0;
  for (size_t i = 1; i < ways.size(); ++i) {
    if (Median(slower[i]) < Median(slower[best])) best = i;
  }
  for (Way& way : ways_) {
    if (way.kind == kind) {
      way.way = ways[best];
      return;
    }
  }
  ways_.push_back({kind, ways[best]});
}

StreamWay Limits::WayOf(DramKind kind) const {
  for (const Way& way : ways_) {
    if (way.kind == kind) return way.way;
  }
  return WaysOf(kind).front();
}

LimitSample Limits::Dram(DramKind kind, Executor& executor) {
  return Dram(kind, WayOf(kind), executor);
}

LimitSample Limits::Dram(DramKind kind, StreamWay way, Executor& executor) {
  const size_t part = buffer_.bytes() / kParts;
  const auto workers = static_cast<size_t>(executor.num_workers());
  const size_t task_bytes =
      std::max(part / (kTasksPerWorker * workers) / kLeastTaskBytes,
               size_t{1}) *
      kLeastTaskBytes;
  const auto tasks = static_cast<int64_t>(part / task_bytes);
  const auto touched = static_cast<size_t>(kind.touched());
  const size_t round_bytes = touched * kLimitBlockBytes;
  const size_t rounds = task_bytes / round_bytes / kMaxStreams * kMaxStreams;
  const size_t reads =
      static_cast<size_t>(kind.reads) * rounds * kLimitBlockBytes;
  const size_t writes =
      static_cast<size_t>(kind.writes) * rounds * kLimitBlockBytes;
  const auto pass = [&] {
    uint8_t* data = buffer_.data() + next_part_ * part;
    next_part_ = (next_part_ + 1) % kParts;
    executor.ParallelFor(tasks, [&](int64_t task, int) {
      uint8_t* begin = data + static_cast<size_t>(task) * task_bytes;
      const StreamRegions regions = {begin, begin + reads,
                                     begin + reads + writes, rounds};
      sink.fetch_xor(streams_.stream(kind, way, regions),
                     std::memory_order_relaxed);
    });
  };
  pass();
  LimitSample sample;
  sample.amount = static_cast<double>(tasks) *
                  static_cast<double>(rounds * kLimitBlockBytes) * kind.moved();
  sample.seconds = Seconds(pass);
  return sample;
}

LimitSample Limits::CacheRead(int64_t bytes_per_worker,
                              Executor& executor) const {
  constexpr size_t kUnit = kLimitBlockBytes * kMaxStreams;
  const auto workers = static_cast<size_t>(executor.num_workers());
  const size_t most = buffer_.bytes() / workers;
  const size_t bytes = std::max(
      std::min(static_cast<size_t>(bytes_per_worker), most) / kUnit * kUnit,
      kUnit);
  // A quarter of a millisecond at least.
  const size_t passes = std::max<size_t>(4, (size_t{64} << 20) / bytes);
  const auto read = [&](size_t times) {
    executor.ParallelFor(static_cast<int64_t>(workers), [&](int64_t task, int) {
      const uint8_t* begin = buffer_.data() + static_cast<size_t>(task) * bytes;
      const StreamRegions regions = {begin, nullptr, nullptr,
                                     bytes / kLimitBlockBytes};
      for (size_t i = 0; i < times; ++i) {
        sink.fetch_xor(streams_.stream(DramKind::kRead, StreamWay(), regions),
                       std::memory_order_relaxed);
      }
    });
  };
  read(2);  // into the cache
  LimitSample sample;
  sample.amount = static_cast<double>(workers * passes * bytes);
  sample.seconds = Seconds([&] { read(passes); });
  return sample;
}

const PeakKernel& Limits::Kernel(PeakKind kind) const {
  switch (kind) {
    case PeakKind::kF32:
      return peaks_.f32;
    case PeakKind::kBF16:
      return peaks_.bf16;
    case PeakKind::kI8:
      return peaks_.i8;
    case PeakKind::kI6:
      break;
  }
  return peaks_.i6;
}

LimitSample Limits::Peak(PeakKind kind, Executor& executor) {
  const PeakKernel& kernel = Kernel(kind);
  size_t& steps = steps_[static_cast<size_t>(kind)];
  // The shortest of `times`.
  const auto shortest = [&](int times) {
    double seconds = std::numeric_limits<double>::infinity();
    for (int i = 0; i < times; ++i) {
      seconds = std::min(seconds, Seconds([&] {
                           sink.fetch_xor(kernel.run(steps, 1, 1) != 0 ? 1 : 0,
                                          std::memory_order_relaxed);
                         }));
    }
    return seconds;
  };
  if (steps == 0) {
    steps = 1024;
    while (shortest(3) < kPeakSeconds / kPeakParts * 0.7) steps *= 2;
  }
  const int workers = executor.num_workers();
  std::vector<double> seconds(static_cast<size_t>(workers));
  executor.ParallelFor(workers, [&](int64_t task, int) {
    seconds[static_cast<size_t>(task)] = shortest(kPeakParts);
  });
  const double ops = kernel.ops_per_step() * static_cast<double>(steps);
  double rate = 0;
  for (const double s : seconds) rate += ops / s;
  LimitSample sample;
  sample.seconds = *std::max_element(seconds.begin(), seconds.end());
  sample.amount = rate * sample.seconds;
  return sample;
}

LimitSample Limits::Clock() {
  constexpr int kRounds = 16000;  // 40 us at 3 GHz
  LimitSample best;
  best.amount = 8.0 * kRounds;
  for (int i = 0; i < kPeakParts; ++i) {
    const double seconds = Seconds([&] {
      sink.fetch_xor(AddChain(kRounds, 1, 1), std::memory_order_relaxed);
    });
    if (i == 0 || seconds < best.seconds) best.seconds = seconds;
  }
  return best;
}

int64_t Limits::l3_set_bytes(int workers) const {
  // Three quarters: the rest is for the L2s' victims and the neighbours.
  return l3_bytes_ / 4 * 3 / std::max(workers, 1);
}

std::string Limits::Variant(DramKind kind) const {
  const StreamWay way = WayOf(kind);
  std::string text;
  if (kind.writes > 0) text = way.past_caches ? "nt stores, " : "stores, ";
  absl::StrAppend(&text, way.streams,
                  way.streams == 1 ? " stream" : " streams");
  if (way.prefetch_bytes > 0) {
    absl::StrAppend(&text, ", prefetch ", way.prefetch_bytes, " B");
  }
  return text;
}

}  // namespace quern
