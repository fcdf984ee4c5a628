// Attention of Llama 3 8B (32 query and 8 key/value heads of 128) over a bf16
// cache in random page order. Bytes are those of the keys and values that a
// step must read once; several caches in turn keep them out of the processor's.
//
//   ./bazelw run -c opt //attention:paged_attention_bench

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "benchmark/benchmark.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/cache/kv_cache.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/core/workspace.h"

namespace quern {
namespace {

constexpr int64_t kQHeads = 32;
constexpr int64_t kKvHeads = 8;
constexpr int64_t kDim = 128;
constexpr int64_t kPageSize = 64;
// Caches together at least this large, where one is smaller.
constexpr int64_t kColdBytes = int64_t{256} << 20;

void BM_PagedAttention(benchmark::State& state, int64_t batch, int64_t q_len,
                       int64_t kv_len) {
  const int workers = static_cast<int>(state.range(0));
  const auto executor = *HwyExecutor::Create(workers);
  KvLayoutSpec layout;
  layout.dtype = DType::kBF16;
  layout.kv_heads = kKvHeads;
  layout.head_dim = kDim;
  layout.page_size = kPageSize;
  AttentionSpec spec;
  spec.kv = *KvLayout::Create(layout);
  spec.q_heads = kQHeads;
  const PagedAttentionPlan plan = *PagedAttentionPlan::Create(spec);

  const int64_t pages_each = (kv_len + kPageSize - 1) / kPageSize;
  const int64_t num_pages = batch * pages_each;
  const int64_t layers = 1 + kColdBytes / (num_pages * spec.kv.page_bytes());
  KvCache cache = *KvCache::Create(spec.kv, num_pages, layers);
  // All keys and values 1: every output is 1.
  for (int64_t layer = 0; layer < layers; ++layer) {
    auto* element = reinterpret_cast<uint16_t*>(cache.Layer(layer).K(0, 0));
    for (int64_t i = 0; i < num_pages * spec.kv.page_bytes() / 2; ++i) {
      element[i] = 0x3F80;
    }
  }
  PageTableStorage pages;
  std::vector<int32_t> ids(static_cast<size_t>(pages_each));
  for (int64_t s = 0; s < batch; ++s) {
    for (int64_t p = 0; p < pages_each; ++p) {
      // A permutation: 7919 is prime.
      ids[static_cast<size_t>(p)] =
          static_cast<int32_t>(((s * pages_each + p) * 7919) % num_pages);
    }
    pages.Append(ids);
  }
  const int64_t tokens = batch * q_len;
  std::vector<float> q(static_cast<size_t>(tokens * kQHeads * kDim), 0.01f);
  std::vector<float> out(q.size());
  AttentionScheduleStorage storage;
  const std::vector<int64_t> q_lens(static_cast<size_t>(batch), q_len);
  const std::vector<int64_t> kv_lens(static_cast<size_t>(batch), kv_len);
  PagedAttentionArgs args;
  args.schedule =
      *AttentionSchedule::Build(spec, q_lens, kv_lens, workers, storage);
  args.pages = *pages.Build(kPageSize, num_pages);
  const std::array<int64_t, 3> shape = {tokens, kQHeads, kDim};
  args.q = DenseTensor<const float>(q.data(), shape);
  args.out = DenseTensor<float>(out.data(), shape);
  AlignedBuffer memory =
      *AlignedBuffer::Create(*plan.WorkspaceBytes(args.schedule, workers));

  int64_t layer = 0;
  for (auto _ : state) {
    args.kv = cache.Layer(layer++ % layers);
    plan.Execute(args, Workspace(memory), *executor);
    benchmark::ClobberMemory();
  }
  for (const float x : out) {
    if (!(std::abs(x - 1.0f) < 1e-4f)) state.SkipWithError("wrong result");
  }

  state.SetLabel(plan.target());
  state.SetBytesProcessed(state.iterations() * batch * kv_len * kKvHeads * 2 *
                          kDim * 2);
  // A multiply and an add for each element of each key and value seen.
  const double pairs =
      static_cast<double>(batch * q_len) *
      (static_cast<double>(kv_len) - static_cast<double>(q_len - 1) / 2);
  state.counters["FLOP/s"] =
      benchmark::Counter(pairs * 4.0 * static_cast<double>(kQHeads * kDim),
                         benchmark::Counter::kIsIterationInvariantRate);
}

#define QUERN_CASE(name, ...)                             \
  BENCHMARK_CAPTURE(BM_PagedAttention, name, __VA_ARGS__) \
      ->Arg(1)                                            \
      ->Arg(2)                                            \
      ->Unit(benchmark::kMillisecond)                     \
      ->UseRealTime()

QUERN_CASE(llama3_8b_decode_kv4096, 1, 1, 4096);
QUERN_CASE(llama3_8b_decode_batch8_kv2048, 8, 1, 2048);
QUERN_CASE(llama3_8b_prefill_512, 1, 512, 512);
QUERN_CASE(llama3_8b_chunk_256_on_4096, 1, 256, 4096);

#undef QUERN_CASE

}  // namespace
}  // namespace quern
