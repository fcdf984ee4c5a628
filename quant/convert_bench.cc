// Conversion against its limit, a copy that reads and writes as many bytes past
// the caches in the same process. 64 Mi elements: nothing stays in a cache.
// Measurements are in docs/performance_notes.md#quant.
//
//   ./bazelw run -c opt //quant:convert_bench

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "benchmark/benchmark.h"
#include "hwy/highway.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/quant/convert.h"

namespace quern {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kElements = int64_t{64} << 20;

// Both sides, large enough for f32, shared by all cases: their pages then are
// the same for the limit and for what is measured against it.
struct Memory {
  AlignedBuffer in = *AlignedBuffer::Create(kElements * 4);
  AlignedBuffer out = *AlignedBuffer::Create(kElements * 4);
  Memory() {
    for (int64_t i = 0; i < kElements; ++i) {
      in.data<float>()[i] = static_cast<float>(i % 509 - 254) / 16;
    }
    std::memset(out.data(), 0, out.bytes());
  }
};
Memory& SharedMemory() {
  static Memory& memory = *new Memory();
  return memory;
}

// The limit: reads `read` and writes `write` bytes for every 64 written, with
// vectors of the baseline.
void BM_Copy(benchmark::State& state, int64_t in_bytes, int64_t out_bytes) {
  Memory& memory = SharedMemory();
  const auto executor = *HwyExecutor::Create(static_cast<int>(state.range(0)));
  constexpr int64_t kTask = int64_t{64} << 10;
  const hn::Full128<uint8_t> d;
  const auto copy = [&](int64_t task, int) HWY_ATTR {
    const uint8_t* from = memory.in.data() + task * kTask * in_bytes;
    uint8_t* to = memory.out.data() + task * kTask * out_bytes;
    const int64_t lines = kTask * out_bytes / 64;
    const int64_t in_line = 64 * in_bytes / out_bytes;
    for (int64_t line = 0; line < lines; ++line) {
      auto sum = hn::Zero(d);
      for (int64_t i = 0; i < in_line; i += 16) {
        sum = hn::Or(sum, hn::LoadU(d, from + line * in_line + i));
      }
      for (int64_t i = 0; i < 64; i += 16) {
        hn::Stream(sum, d, to + line * 64 + i);
      }
    }
  };
  for (auto _ : state) executor->ParallelFor(kElements / kTask, copy);
  state.SetBytesProcessed(state.iterations() * kElements *
                          (in_bytes + out_bytes));
}

void BM_Convert(benchmark::State& state, DType from, DType to, Stores stores) {
  Memory& memory = SharedMemory();
  const auto executor = *HwyExecutor::Create(static_cast<int>(state.range(0)));
  ConvertSpec spec;
  spec.from = from;
  spec.to = to;
  spec.stores = stores;
  const auto plan = ConvertPlan::Create(spec);
  AlignedBuffer source;
  if (from != DType::kF32) {
    // Small values of the narrow type, whatever it is: bytes 0x30 to 0x37.
    source =
        *AlignedBuffer::Create(kElements * static_cast<int64_t>(SizeOf(from)));
    for (size_t i = 0; i < source.bytes(); ++i) {
      source.data()[i] = static_cast<uint8_t>(0x30 + i * 2654435761u % 8);
    }
  }
  const void* in = from == DType::kF32
                       ? static_cast<const void*>(memory.in.data())
                       : static_cast<const void*>(source.data());
  const AnyTensorView in_view(from, in, 1, {kElements}, {1});
  const AnyTensorView out_view(to, static_cast<void*>(memory.out.data()), 1,
                               {kElements}, {1});
  for (auto _ : state) plan->Execute(in_view, out_view, *executor);

  // Back again through a second plan: these values are exact in every type.
  if (from == DType::kF32 && to == DType::kBF16) {
    const float* x = memory.in.data<float>();
    const uint16_t* y = memory.out.data<uint16_t>();
    for (int64_t i = 0; i < kElements; i += 997) {
      uint32_t bits;
      std::memcpy(&bits, x + i, sizeof(bits));
      if (y[i] != bits >> 16) state.SkipWithError("wrong result");
    }
  }
  state.SetLabel(plan->target());
  state.SetBytesProcessed(state.iterations() * kElements *
                          static_cast<int64_t>(SizeOf(from) + SizeOf(to)));
}

#define QUERN_THREADS ->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime()
BENCHMARK_CAPTURE(BM_Copy, as_f32_to_bf16, 4, 2) QUERN_THREADS;
BENCHMARK_CAPTURE(BM_Convert, f32_to_bf16, DType::kF32, DType::kBF16,
                  Stores::kAuto)
QUERN_THREADS;
BENCHMARK_CAPTURE(BM_Convert, f32_to_bf16_through_the_caches, DType::kF32,
                  DType::kBF16, Stores::kCached)
QUERN_THREADS;
BENCHMARK_CAPTURE(BM_Copy, as_bf16_to_f32, 2, 4) QUERN_THREADS;
BENCHMARK_CAPTURE(BM_Convert, bf16_to_f32, DType::kBF16, DType::kF32,
                  Stores::kAuto)
QUERN_THREADS;
BENCHMARK_CAPTURE(BM_Convert, bf16_to_f32_through_the_caches, DType::kBF16,
                  DType::kF32, Stores::kCached)
QUERN_THREADS;
BENCHMARK_CAPTURE(BM_Convert, f32_to_f16, DType::kF32, DType::kF16,
                  Stores::kAuto)
QUERN_THREADS;
BENCHMARK_CAPTURE(BM_Convert, f16_to_f32, DType::kF16, DType::kF32,
                  Stores::kAuto)
QUERN_THREADS;
BENCHMARK_CAPTURE(BM_Copy, as_f32_to_f8, 4, 1) QUERN_THREADS;
BENCHMARK_CAPTURE(BM_Convert, f32_to_f8e4m3, DType::kF32, DType::kF8E4M3,
                  Stores::kAuto)
QUERN_THREADS;
BENCHMARK_CAPTURE(BM_Convert, f8e4m3_to_f32, DType::kF8E4M3, DType::kF32,
                  Stores::kAuto)
QUERN_THREADS;
BENCHMARK_CAPTURE(BM_Convert, f32_to_f8e5m2, DType::kF32, DType::kF8E5M2,
                  Stores::kAuto)
QUERN_THREADS;
BENCHMARK_CAPTURE(BM_Convert, bf16_to_f8e4m3, DType::kBF16, DType::kF8E4M3,
                  Stores::kAuto)
QUERN_THREADS;

}  // namespace
}  // namespace quern
