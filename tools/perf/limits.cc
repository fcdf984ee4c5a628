#include "tools/perf/limits.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/aligned_buffer.h"
#include "core/cpu_info.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/status_macros.h"
#include "hwy/base.h"
#include "tools/perf/limits_kernels.h"
#include "tools/perf/op.h"
#include "tools/perf/timer.h"

namespace quern {
namespace {

// One task of a memory loop: enough to forget its start, few enough bytes that
// a worker which lost its core does not hold up the rest.
constexpr size_t kTaskBytes = 2 << 20;
constexpr double kPeakSeconds = 1e-3;
constexpr size_t kParts = 8;
// Bytes that the loop is ahead of itself; 0: the hardware prefetcher alone.
constexpr std::array<size_t, 5> kPrefetch = {0, 512, 1024, 2048, 4096};

// Where results go that nobody reads, so that they must be computed.
std::atomic<uint64_t> sink{0};

// One, two, one, two...: no denormals, no overflow, not all equal.
template <typename T>
void FillOperands(T one, T two, AlignedBuffer& buffer) {
  T* data = buffer.data<T>();
  for (size_t i = 0; i < buffer.bytes() / sizeof(T); ++i) {
    data[i] = i % 3 == 0 ? two : one;
  }
}

}  // namespace

absl::string_view PagesName(const AlignedBuffer& buffer) {
  const auto huge = static_cast<double>(buffer.HugePageBytes());
  const auto all = static_cast<double>(buffer.bytes());
  if (huge >= 0.95 * all) return "2M";
  return huge <= 0.05 * all ? "4K" : "mixed";
}

absl::StatusOr<Limits> Limits::Create(const CpuInfo& cpu) {
  Limits limits;
  limits.kernels_ = GetLimitKernels();
  limits.l2_set_bytes_ = cpu.l2_bytes / 2;
  limits.l3_bytes_ = cpu.l3_bytes;
  const int64_t bytes =
      std::max<int64_t>(8 * cpu.last_level_bytes(), int64_t{256} << 20);
  // Parts of halves of whole tasks.
  const auto unit = static_cast<int64_t>(2 * kParts * kTaskBytes);
  QUERN_ASSIGN_OR_RETURN(
      limits.buffer_, AlignedBuffer::Create((bytes + unit - 1) / unit * unit));
  std::memset(limits.buffer_.data(), 1, limits.buffer_.bytes());
  limits.pages_ = std::string(PagesName(limits.buffer_));
  for (AlignedBuffer& operands : limits.operands_) {
    QUERN_ASSIGN_OR_RETURN(operands, AlignedBuffer::Create(kOperandBytes));
  }
  FillOperands<float>(1.0f, 2.0f, limits.operands_[0]);
  FillOperands<BFloat16>(hwy::BF16FromF32(1.0f), hwy::BF16FromF32(2.0f),
                         limits.operands_[1]);
  FillOperands<uint8_t>(1, 2, limits.operands_[2]);
  return limits;
}

void Limits::Calibrate(int64_t rounds, Executor& executor) {
  const auto best = [&](DramKind kind, size_t& prefetch) {
    std::array<double, kPrefetch.size()> seconds;
    seconds.fill(std::numeric_limits<double>::infinity());
    for (int64_t round = 0; round < rounds; ++round) {
      for (size_t i = 0; i < kPrefetch.size(); ++i) {
        prefetch = kPrefetch[i];
        seconds[i] = std::min(seconds[i], Dram(kind, executor).seconds);
      }
    }
    prefetch = kPrefetch[static_cast<size_t>(
        std::min_element(seconds.begin(), seconds.end()) - seconds.begin())];
  };
  best(DramKind::kRead, read_prefetch_);
  best(DramKind::kCopy, copy_prefetch_);
}

LimitSample Limits::Dram(DramKind kind, Executor& executor) {
  const size_t half = buffer_.bytes() / 2;
  const bool copy = kind == DramKind::kCopy;
  const size_t part = (copy ? half : buffer_.bytes()) / kParts;
  uint8_t* data = buffer_.data() + next_part_ * part;
  next_part_ = (next_part_ + 1) % kParts;
  const auto tasks = static_cast<int64_t>(part / kTaskBytes);
  LimitSample sample;
  sample.amount = static_cast<double>(copy ? 2 * part : part);
  sample.seconds = Seconds([&] {
    executor.ParallelFor(tasks, [&](int64_t task, int) {
      uint8_t* begin = data + static_cast<size_t>(task) * kTaskBytes;
      switch (kind) {
        case DramKind::kRead:
          sink.fetch_xor(kernels_.read(begin, kTaskBytes, read_prefetch_),
                         std::memory_order_relaxed);
          break;
        case DramKind::kWrite:
          kernels_.write(begin, kTaskBytes);
          break;
        case DramKind::kCopy:
          kernels_.copy(begin, begin + half, kTaskBytes, copy_prefetch_);
          break;
      }
    });
  });
  return sample;
}

LimitSample Limits::CacheRead(int64_t bytes_per_worker,
                              Executor& executor) const {
  const size_t block = kLimitBlockBytes;
  const size_t bytes =
      std::max(static_cast<size_t>(bytes_per_worker) / block * block, block);
  const auto workers = static_cast<size_t>(executor.num_workers());
  // A quarter of a millisecond at least.
  const size_t passes = std::max<size_t>(4, (size_t{64} << 20) / bytes);
  const auto read = [&](size_t times) {
    executor.ParallelFor(static_cast<int64_t>(workers), [&](int64_t task, int) {
      const uint8_t* begin = buffer_.data() + static_cast<size_t>(task) * bytes;
      for (size_t i = 0; i < times; ++i) {
        sink.fetch_xor(kernels_.read(begin, bytes, 0),
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

LimitSample Limits::Peak(PeakKind kind, Executor& executor) {
  const DotKernel& dot = kind == PeakKind::kF32    ? kernels_.f32
                         : kind == PeakKind::kBF16 ? kernels_.bf16
                                                   : kernels_.i8;
  const auto index = static_cast<size_t>(kind);
  const uint8_t* operands = operands_[index].data();
  const auto run = [&](int64_t steps, Executor& on) {
    return Seconds([&] {
      on.ParallelFor(on.num_workers(), [&](int64_t, int) {
        const double sum = dot.run(static_cast<size_t>(steps), operands);
        sink.fetch_xor(sum != 0 ? 1 : 0, std::memory_order_relaxed);
      });
    });
  };
  int64_t& steps = steps_[index];
  if (steps == 0) {
    InlineExecutor inline_executor;
    // The shortest of three, so that a disturbance does not end the doubling.
    steps = 1024;
    const auto shortest = [&] {
      return std::min({run(steps, inline_executor), run(steps, inline_executor),
                       run(steps, inline_executor)});
    };
    while (shortest() < kPeakSeconds * 0.7) steps *= 2;
  }
  LimitSample sample;
  sample.amount = dot.ops_per_step * static_cast<double>(steps) *
                  static_cast<double>(executor.num_workers());
  sample.seconds = run(steps, executor);
  return sample;
}

int64_t Limits::l3_set_bytes(int workers) const {
  // Three quarters: the rest is for the L2s' victims and the neighbours.
  return l3_bytes_ / 4 * 3 / std::max(workers, 1);
}

std::string Limits::Variant(DramKind kind) const {
  if (kind == DramKind::kWrite) return "nt stores";
  const bool copy = kind == DramKind::kCopy;
  const size_t prefetch = copy ? copy_prefetch_ : read_prefetch_;
  return absl::StrCat(copy ? "nt stores, " : "",
                      prefetch == 0
                          ? std::string("plain loads")
                          : absl::StrCat("prefetch ", prefetch, " B ahead"));
}

}  // namespace quern
