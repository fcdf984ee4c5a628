// The cache, a schedule and attention, as an engine calls them for one layer:
// three requests about one document, in one prefill step and one decode step.
// Each step is compared with a plain loop, and the exit code says whether they
// agree.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/paged_attention/reference_testutil.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/attention/shared_prefix.h"
#include "quern/cache/kv_cache.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_allocator.h"
#include "quern/cache/page_table.h"
#include "quern/cache/write_kv.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/core/workspace.h"

namespace quern {
namespace {

using Lengths = std::vector<int64_t>;
constexpr int64_t kPageSize = 64, kPages = 32, kLayers = 1;

// Objects that live as long as the model.
struct Model {
  AttentionSpec spec;
  WriteKvPlan write;
  PagedAttentionPlan attention;
  KvCache cache;
};

absl::StatusOr<Model> MakeModel() {
  KvLayoutSpec layout;
  layout.dtype = DType::kBF16;
  layout.kv_heads = kKvHeads;
  layout.head_dim = kHeadDim;
  layout.page_size = kPageSize;
  AttentionSpec spec;
  QUERN_ASSIGN_OR_RETURN(spec.kv, KvLayout::Create(layout));
  spec.q_heads = kQHeads;
  spec.q_dtype = DType::kBF16;
  WriteKvSpec write_spec;
  write_spec.kv = spec.kv;
  write_spec.input = DType::kBF16;
  QUERN_ASSIGN_OR_RETURN(auto write, WriteKvPlan::Create(write_spec));
  QUERN_ASSIGN_OR_RETURN(auto attention, PagedAttentionPlan::Create(spec));
  QUERN_ASSIGN_OR_RETURN(auto cache, KvCache::Create(spec.kv, kPages, kLayers));
  return Model{spec, write, attention, std::move(cache)};
}

// Runs one step on the last q_lens[s] of the kv_lens[s] tokens of each sequence
// s, whose pages are page_ids[s].
absl::Status Step(const char* name, const Lengths& q_lens,
                  const Lengths& kv_lens,
                  const std::vector<std::vector<int32_t>>& page_ids,
                  Model& model, Executor& executor) {
  // Done once a step. Storages are borrowed; an engine keeps them between
  // steps.
  PageTableStorage table;
  for (const std::vector<int32_t>& ids : page_ids) table.Append(ids);
  QUERN_ASSIGN_OR_RETURN(const PageTable pages, table.Build(kPageSize, kPages));
  int64_t tokens = 0;
  for (const int64_t q_len : q_lens) tokens += q_len;
  std::vector<int64_t> slots(static_cast<size_t>(tokens));
  QUERN_RETURN_IF_ERROR(
      pages.SlotMapping(q_lens, kv_lens, absl::MakeSpan(slots)));

  SharedPrefixStorage prefix_storage;
  QUERN_ASSIGN_OR_RETURN(
      const SharedPrefixes prefixes,
      SharedPrefixes::Find(pages, q_lens, kv_lens, prefix_storage));
  AttentionBatch batch;
  batch.q_lens = q_lens;
  batch.kv_lens = kv_lens;
  batch.prefix_groups = prefixes.groups();
  batch.prefix_members = prefixes.members();
  AttentionScheduleStorage schedule_storage;
  QUERN_ASSIGN_OR_RETURN(
      const AttentionSchedule schedule,
      AttentionSchedule::Build(model.spec, batch, AttentionTiles(),
                               executor.num_workers(), schedule_storage));
  QUERN_ASSIGN_OR_RETURN(
      const int64_t bytes,
      model.attention.WorkspaceBytes(schedule, executor.num_workers()));
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer scratch, AlignedBuffer::Create(bytes));

  // Done once a layer: first the new keys and values are written, then
  // attention finds them in the cache.
  const std::vector<BFloat16> q = Rows('q', kQHeads, q_lens, kv_lens);
  const std::vector<BFloat16> k = Rows('k', kKvHeads, q_lens, kv_lens);
  const std::vector<BFloat16> v = Rows('v', kKvHeads, q_lens, kv_lens);
  std::vector<float> out(q.size());
  WriteKvArgs write;
  write.k =
      DenseTensor<const BFloat16, 3>(k.data(), {tokens, kKvHeads, kHeadDim});
  write.v =
      DenseTensor<const BFloat16, 3>(v.data(), {tokens, kKvHeads, kHeadDim});
  write.slots = slots;
  write.cache = model.cache.Layer(0);
  QUERN_RETURN_IF_ERROR(model.write.CheckArgs(write));
  model.write.Execute(write, executor);

  PagedAttentionArgs args;
  args.q =
      DenseTensor<const BFloat16, 3>(q.data(), {tokens, kQHeads, kHeadDim});
  args.kv = model.cache.Layer(0);
  args.pages = pages;
  args.schedule = schedule;
  args.out = DenseTensor<float, 3>(out.data(), {tokens, kQHeads, kHeadDim});
  QUERN_RETURN_IF_ERROR(model.attention.CheckArgs(args));
  model.attention.Execute(args, Workspace(scratch), executor);

  int64_t saved = 0;
  for (const PrefixGroup& prefix : schedule.prefixes()) {
    saved += prefix.saved_tokens();
  }
  QUERN_ASSIGN_OR_RETURN(const double error,
                         CompareWithPlainAttention(out, q_lens, kv_lens));
  std::printf(
      "%s: %lld tokens, %lld keys not read again, "
      "largest error %.5f (%s, %s)\n",
      name, static_cast<long long>(tokens), static_cast<long long>(saved),
      error, model.attention.target(), model.attention.arithmetic());
  return absl::OkStatus();
}

absl::Status Run() {
  const auto executor = HwyExecutor::CreateForThisMachine();
  QUERN_ASSIGN_OR_RETURN(Model model, MakeModel());
  QUERN_ASSIGN_OR_RETURN(auto allocator,
                         PageAllocator::Create(kPages, kPageSize));

  // The first sequence writes the document; the others hold its pages as well.
  std::vector<std::vector<int32_t>> pages(3);
  Lengths kv_lens = {kDocument + 40, kDocument + 3, kDocument + 4};
  QUERN_RETURN_IF_ERROR(allocator.Grow(kv_lens[0], pages[0]));
  for (size_t s = 1; s < pages.size(); ++s) {
    QUERN_RETURN_IF_ERROR(allocator.Fork(pages[0], kDocument, pages[s]));
    QUERN_RETURN_IF_ERROR(allocator.Grow(kv_lens[s], pages[s]));
  }
  const Lengths prompt = {kDocument + 40, 3, 4};
  QUERN_RETURN_IF_ERROR(
      Step("prefill", prompt, kv_lens, pages, model, *executor));

  for (size_t s = 0; s < pages.size(); ++s) {
    QUERN_RETURN_IF_ERROR(allocator.Grow(++kv_lens[s], pages[s]));
  }
  return Step("decode", {1, 1, 1}, kv_lens, pages, model, *executor);
}

}  // namespace
}  // namespace quern

int main() {
  const absl::Status status = quern::Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
