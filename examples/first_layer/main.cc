// One norm, one linear layer and one step of attention for a single token.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/paged_attention.h"
#include "quern/attention/schedule.h"
#include "quern/cache/kv_cache.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/cache/write_kv.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear.h"
#include "quern/gemm/linear_weights.h"
#include "quern/ops/norm/rms_norm.h"

namespace {

using quern::BFloat16;
using quern::DType;

constexpr int64_t kHidden = 256, kHeads = 4, kHeadDim = 64;
constexpr int64_t kQuery =
    kHeads * kHeadDim;  // and one head of keys and values
constexpr int64_t kColumns = kQuery + 2 * kHeadDim;

// 1. The norm: f32[1, hidden] in, bf16[1, hidden] out.
absl::Status Norm(const std::vector<float>& x, std::vector<BFloat16>& normed,
                  quern::Executor& executor) {
  quern::RmsNormSpec spec;
  spec.hidden = kHidden;
  spec.out_dtype = DType::kBF16;
  QUERN_ASSIGN_OR_RETURN(const auto plan, quern::RmsNormPlan::Create(spec));
  const std::vector<float> weight(kHidden, 1.0f);
  plan.Execute(quern::DenseMatrix(x.data(), 1, kHidden),
               quern::DenseVector(weight.data(), kHidden),
               quern::DenseMatrix(normed.data(), 1, kHidden), executor);
  return absl::OkStatus();
}

// 2. The linear layer: query, key and value of the token in one row of bf16.
absl::Status Project(const std::vector<BFloat16>& normed,
                     std::vector<BFloat16>& qkv, quern::Executor& executor) {
  // Three matrices [rows, hidden], as a model has them, packed as one.
  const std::vector<float> w(kQuery * kHidden, 1.0f / kHidden);
  quern::LinearWeightsSpec weights_spec;
  weights_spec.n = kColumns;
  weights_spec.k = kHidden;
  weights_spec.format = quern::WeightFormat::kF32;
  quern::LinearSource q, k, v;
  q.codes = quern::DenseMatrix(w.data(), kQuery, kHidden);
  k.codes = v.codes = quern::DenseMatrix(w.data(), kHeadDim, kHidden);
  QUERN_ASSIGN_OR_RETURN(
      const auto weights,
      quern::LinearWeights::Pack(weights_spec, {q, k, v}, executor));

  quern::LinearSpec spec;  // bf16 in, bf16 out
  QUERN_ASSIGN_OR_RETURN(const auto plan,
                         quern::LinearPlan::Create(spec, weights, executor));
  QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                         plan.WorkspaceBytes(1, executor.num_workers()));
  QUERN_ASSIGN_OR_RETURN(auto memory, quern::AlignedBuffer::Create(bytes));
  quern::LinearArgs args;
  args.a = quern::DenseMatrix(normed.data(), 1, kHidden);
  args.c = quern::DenseMatrix(qkv.data(), 1, kColumns);
  plan.Execute(args, quern::Workspace(memory), executor);
  std::printf("linear: %s\n", plan.Explain(1).c_str());
  return absl::OkStatus();
}

// 3. Attention: the token's key and value go to page 0 of a cache. Its queries
// meet all keys so far, which is that single key.
absl::Status Attend(const std::vector<BFloat16>& qkv, std::vector<float>& out,
                    quern::Executor& executor) {
  quern::KvLayoutSpec layout;
  layout.dtype = DType::kBF16;
  layout.kv_heads = 1;
  layout.head_dim = kHeadDim;
  layout.page_size = 64;
  quern::AttentionSpec spec;
  QUERN_ASSIGN_OR_RETURN(spec.kv, quern::KvLayout::Create(layout));
  spec.q_heads = kHeads;
  spec.q_dtype = DType::kBF16;
  quern::WriteKvSpec write_spec;
  write_spec.kv = spec.kv;
  write_spec.input = DType::kBF16;
  QUERN_ASSIGN_OR_RETURN(const auto writer,
                         quern::WriteKvPlan::Create(write_spec));
  QUERN_ASSIGN_OR_RETURN(const auto plan,
                         quern::PagedAttentionPlan::Create(spec));
  QUERN_ASSIGN_OR_RETURN(auto cache, quern::KvCache::Create(spec.kv, 1, 1));

  // Once a step: set which pages a sequence has, and who computes what.
  const std::vector<int64_t> lengths = {1};
  const std::vector<int32_t> page_ids = {0};
  quern::PageTableStorage table;
  table.Append(page_ids);
  QUERN_ASSIGN_OR_RETURN(const auto pages, table.Build(64, 1));
  std::vector<int64_t> slots(1);
  QUERN_RETURN_IF_ERROR(
      pages.SlotMapping(lengths, lengths, absl::MakeSpan(slots)));
  quern::AttentionBatch batch;
  batch.q_lens = batch.kv_lens = lengths;
  quern::AttentionScheduleStorage storage;
  QUERN_ASSIGN_OR_RETURN(
      const auto schedule,
      quern::AttentionSchedule::Build(spec, batch, quern::AttentionTiles(),
                                      executor.num_workers(), storage));
  QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                         plan.WorkspaceBytes(schedule, executor.num_workers()));
  QUERN_ASSIGN_OR_RETURN(auto memory, quern::AlignedBuffer::Create(bytes));

  // Once a layer: write the new key and value, then attend.
  const auto heads = [&](int64_t column, int64_t count) {
    return quern::DenseTensor<const BFloat16, 3>(qkv.data() + column,
                                                 {1, count, kHeadDim});
  };
  quern::WriteKvArgs write;
  write.k = heads(kQuery, 1);
  write.v = heads(kQuery + kHeadDim, 1);
  write.slots = slots;
  write.cache = cache.Layer(0);
  writer.Execute(write, executor);
  quern::PagedAttentionArgs args;
  args.q = heads(0, kHeads);
  args.kv = cache.Layer(0);
  args.pages = pages;
  args.schedule = schedule;
  args.out = quern::DenseTensor<float, 3>(out.data(), {1, kHeads, kHeadDim});
  plan.Execute(args, quern::Workspace(memory), executor);
  std::printf("attention: %s, %s\n", plan.target(), plan.arithmetic());
  return absl::OkStatus();
}

absl::Status Run() {
  const auto executor = quern::HwyExecutor::CreateForThisMachine();
  const std::vector<float> x(kHidden, 3.0f);
  std::vector<BFloat16> normed(kHidden), qkv(kColumns);
  std::vector<float> out(kQuery);
  QUERN_RETURN_IF_ERROR(Norm(x, normed, *executor));
  QUERN_RETURN_IF_ERROR(Project(normed, qkv, *executor));
  QUERN_RETURN_IF_ERROR(Attend(qkv, out, *executor));
  // All elements of x have one magnitude, so the norm makes them 1. A row of
  // weights sums to 1, and attention over one token returns that token's value.
  for (const float value : out) {
    if (!(std::fabs(value - 1.0f) <= 0.01f)) {
      return absl::InternalError("the result is not 1");
    }
  }
  std::printf("every element is 1, as it must be\n");
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
