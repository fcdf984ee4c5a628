#include "quern/attention/attention_scratch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/workspace.h"

namespace quern {
namespace {

constexpr int kWorkers = 3;

struct Piece {
  uintptr_t begin;
  uintptr_t end;
};

// The bytes of `count` elements for each worker.
template <typename T>
void AppendParts(const PerWorker<T>& part, int64_t count,
                 std::vector<Piece>* pieces) {
  for (int worker = 0; worker < kWorkers; ++worker) {
    const auto begin = reinterpret_cast<uintptr_t>(part.Of(worker));
    pieces->push_back(
        {begin, begin + static_cast<uintptr_t>(count) * sizeof(T)});
  }
}

AttentionSpec MakeSpec(KvForm form, int64_t group) {
  KvLayoutSpec layout;
  layout.dtype = DType::kBF16;
  layout.kv_heads = 2;
  layout.head_dim = layout.v_head_dim = 40;
  layout.page_size = 32;
  layout.form = form;
  AttentionSpec spec;
  spec.kv = KvLayout::Create(layout).value();
  spec.q_heads = 2 * group;
  spec.q_dtype = spec.out_dtype = DType::kBF16;
  return spec;
}

// No two workers write to one cache line. Blocks of 1, 3, 5 and 7 rows of 4 or
// 8 bytes fill none.
TEST(AttentionScratchTest, GivesEachWorkerCacheLinesOfItsOwn) {
  for (const KvForm form : {KvForm::kPaired, KvForm::kPlain}) {
    for (const int64_t group : {1, 3, 5, 7}) {
      SCOPED_TRACE(testing::Message() << KvFormName(form) << " " << group);
      const AttentionSpec spec = MakeSpec(form, group);
      const std::vector<int64_t> q_lens = {1, 1}, kv_lens = {700, 3000};
      AttentionScheduleStorage storage;
      const AttentionSchedule schedule =
          AttentionSchedule::Build(spec, q_lens, kv_lens, kWorkers, storage)
              .value();
      const int64_t rows = schedule.max_block_rows();
      ASSERT_EQ(rows, group);
      WorkspaceLayout layout;
      LayOutAttentionScratch(layout, spec.kv, rows, schedule.partial_rows(),
                             kWorkers);
      ASSERT_FALSE(layout.overflow());
      auto buffer = AlignedBuffer::Create(layout.bytes()).value();
      Workspace workspace(buffer);
      const AttentionScratch s = LayOutAttentionScratch(
          workspace, spec.kv, rows, schedule.partial_rows(), kWorkers);
      EXPECT_EQ(workspace.bytes_left(), 0u);

      const AttentionStrides strides(spec.kv);
      constexpr int64_t kChunk = AttentionSchedule::kChunkTokens;
      constexpr auto kGroups = static_cast<int64_t>(kChunkGroups);
      std::vector<Piece> pieces;
      AppendParts(s.q, rows * strides.q, &pieces);
      AppendParts(s.stored, rows, &pieces);
      AppendParts(s.loaded, rows, &pieces);
      AppendParts(s.logits, rows * kChunk, &pieces);
      AppendParts(s.weights, rows * 2, &pieces);
      AppendParts(s.seen, rows, &pieces);
      AppendParts(s.hidden, rows, &pieces);
      AppendParts(s.slopes, rows, &pieces);
      AppendParts(s.ahead, rows, &pieces);
      for (const WorkerRows& of : {s.piece, s.total}) {
        AppendParts(of.state, rows, &pieces);
        AppendParts(of.out, rows * strides.out, &pieces);
      }
      AppendParts(s.k, kGroups * strides.k_group, &pieces);
      AppendParts(s.v, kGroups * strides.v_group, &pieces);
      AppendParts(s.masked_v, kGroups * strides.v_group, &pieces);
      AppendParts(s.k_scales, kChunk, &pieces);
      AppendParts(s.v_scales, kChunk, &pieces);
      if (form == KvForm::kPlain) AppendParts(s.rows, 4 * kChunk, &pieces);
      const auto memory = reinterpret_cast<uintptr_t>(buffer.data());
      std::sort(
          pieces.begin(), pieces.end(),
          [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
      for (size_t i = 0; i < pieces.size(); ++i) {
        EXPECT_EQ(pieces[i].begin % 64, 0u) << i;
        const uintptr_t next = i + 1 < pieces.size() ? pieces[i + 1].begin
                                                     : memory + buffer.bytes();
        EXPECT_LE(pieces[i].end, next) << i;
      }
    }
  }
}

}  // namespace
}  // namespace quern
