// Packing against its limit, a copy of as many bytes past the caches in the
// same process. The shape is that of Llama 3 8B's MLP. Measurements are in
// docs/performance_notes.md#packing.
//
//   ./bazelw run -c opt //packing:vnni_pack_bench

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "benchmark/benchmark.h"
#include "hwy/highway.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/packing/vnni_layout.h"
#include "quern/packing/vnni_pack.h"

namespace quern {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kK = 4096;
constexpr int64_t kN = 14336;
// Several weights in turn, so that nothing is in the caches.
constexpr int64_t kCopies = 2;

struct Memory {
  AlignedBuffer plain;
  AlignedBuffer packed;
};

// kCopies plain weights of `bytes`, filled with numbers, and as many packed.
Memory Allocate(int64_t bytes, int64_t packed_bytes) {
  Memory memory{*AlignedBuffer::Create(kCopies * bytes),
                *AlignedBuffer::Create(kCopies * packed_bytes)};
  auto* words = memory.plain.data<uint64_t>();
  for (size_t i = 0; i < memory.plain.bytes() / sizeof(uint64_t); ++i) {
    words[i] = i * 0x9e3779b97f4a7c15u;
  }
  std::memset(memory.packed.data(), 0x55, memory.packed.bytes());
  return memory;
}

void Report(benchmark::State& state, int64_t bytes_per_iteration) {
  state.SetBytesProcessed(state.iterations() * bytes_per_iteration);
}

// The limit: bytes read plus bytes written.
void BM_Copy(benchmark::State& state) {
  const auto executor = *HwyExecutor::Create(static_cast<int>(state.range(0)));
  const int64_t bytes = kN * kK * 2;
  Memory memory = Allocate(bytes, bytes);
  constexpr int64_t kTask = int64_t{256} << 10;
  const hn::Full128<uint8_t> d;
  int64_t turn = 0;
  for (auto _ : state) {
    const uint8_t* from = memory.plain.data() + turn * bytes;
    uint8_t* to = memory.packed.data() + turn * bytes;
    executor->ParallelFor(bytes / kTask, [&](int64_t task, int) HWY_ATTR {
      for (int64_t i = task * kTask; i < (task + 1) * kTask; i += 64) {
        const auto v0 = hn::Load(d, from + i);
        const auto v1 = hn::Load(d, from + i + 16);
        const auto v2 = hn::Load(d, from + i + 32);
        const auto v3 = hn::Load(d, from + i + 48);
        hn::Stream(v0, d, to + i);
        hn::Stream(v1, d, to + i + 16);
        hn::Stream(v2, d, to + i + 32);
        hn::Stream(v3, d, to + i + 48);
      }
    });
    turn = (turn + 1) % kCopies;
  }
  if (std::memcmp(memory.plain.data(), memory.packed.data(),
                  static_cast<size_t>(bytes)) != 0) {
    state.SkipWithError("wrong copy");
  }
  Report(state, 2 * bytes);
}
BENCHMARK(BM_Copy)->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime();

template <typename T>
bool Correct(const PackedView& packed, const T* w, WeightOrder order) {
  const VnniLayout& layout = packed.layout();
  const int64_t v = layout.v();
  for (int64_t k = 0; k < kK; k += 61) {
    for (int64_t n = 0; n < kN; n += 37) {
      const T* line = packed.Panel<T>(n / 16) + k / v * 16 * v;
      const T* want =
          order == WeightOrder::kNK ? &w[n * kK + k] : &w[k * kN + n];
      if (std::memcmp(&line[n % 16 * v + k % v], want, sizeof(T)) != 0) {
        return false;
      }
    }
  }
  return true;
}

template <typename T, WeightOrder kOrder>
void BM_Pack(benchmark::State& state) {
  const auto executor = *HwyExecutor::Create(static_cast<int>(state.range(0)));
  VnniPackSpec spec;
  spec.layout = *VnniLayout::Create(DTypeOf<T>, kK, kN);
  spec.order = kOrder;
  const auto plan = VnniPackPlan::Create(spec);
  const int64_t bytes = spec.layout.bytes();  // no padding in this shape
  Memory memory = Allocate(bytes, bytes);
  int64_t turn = 0;
  const auto weights = [&](int64_t copy) {
    const T* w = reinterpret_cast<const T*>(memory.plain.data() + copy * bytes);
    return kOrder == WeightOrder::kNK ? DenseMatrix(w, kN, kK)
                                      : DenseMatrix(w, kK, kN);
  };
  for (auto _ : state) {
    plan->Pack(weights(turn), memory.packed.data() + turn * bytes, *executor);
    turn = (turn + 1) % kCopies;
  }
  if (!Correct({spec.layout, memory.packed.data()}, weights(0).data(),
               kOrder)) {
    state.SkipWithError("wrong bytes");
  }
  state.SetLabel(plan->target());
  Report(state, 2 * bytes);
}

#define QUERN_BENCHMARK_PACK(T, order)               \
  BENCHMARK(BM_Pack<T, WeightOrder::order>)          \
      ->Name("BM_Pack/" #T "_" #order "_4096x14336") \
      ->ArgName("threads")                           \
      ->Arg(1)                                       \
      ->Arg(2)                                       \
      ->UseRealTime()
QUERN_BENCHMARK_PACK(BFloat16, kNK);
QUERN_BENCHMARK_PACK(int8_t, kNK);
QUERN_BENCHMARK_PACK(BFloat16, kKN);
QUERN_BENCHMARK_PACK(int8_t, kKN);

}  // namespace
}  // namespace quern
