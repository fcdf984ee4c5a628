#include "quern/tools/perf/attention/schedule.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/attention/schedule_makespan.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"

namespace quern {
namespace {

// `list`, repeated until there are `count`.
std::vector<int64_t> Repeat(const std::vector<int64_t>& list, size_t count) {
  std::vector<int64_t> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = list[i % list.size()];
  return values;
}

// The integers of a step, for any number of workers.
class Schedule final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    auto op = absl::WrapUnique(new Schedule());
    KvLayoutSpec kv;
    QUERN_ASSIGN_OR_RETURN(const auto q_lens, args.Ints("q_lens", 0, 1 << 30));
    QUERN_ASSIGN_OR_RETURN(const auto kv_lens,
                           args.Ints("kv_lens", 0, 1 << 30));
    QUERN_ASSIGN_OR_RETURN(const int64_t batch, args.Int("batch", 0, 1 << 20));
    QUERN_ASSIGN_OR_RETURN(const int64_t workers,
                           args.Int("workers", 1, 1 << 16));
    QUERN_ASSIGN_OR_RETURN(op->spec_.q_heads, args.Int("q_heads", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(kv.kv_heads, args.Int("kv_heads", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(op->tiles_.block_rows,
                           args.Int("block_rows", 1, 4096));
    QUERN_ASSIGN_OR_RETURN(op->tiles_.row_tile, args.Int("row_tile", 1, 4096));
    kv.head_dim = 128;
    kv.page_size = 16;
    QUERN_ASSIGN_OR_RETURN(op->spec_.kv, KvLayout::Create(kv));
    const size_t count = batch != 0 ? static_cast<size_t>(batch)
                                    : std::max(q_lens.size(), kv_lens.size());
    op->q_lens_ = Repeat(q_lens, count);
    op->kv_lens_ = Repeat(kv_lens, count);
    op->workers_ = static_cast<int>(workers);
    QUERN_ASSIGN_OR_RETURN(op->schedule_, op->Build());
    op->what_ = absl::StrCat("batch=", count, " q_lens=", args.Text("q_lens"),
                             " kv_lens=", args.Text("kv_lens"),
                             " q_heads=", op->spec_.q_heads,
                             " kv_heads=", kv.kv_heads, " workers=", workers,
                             " block_rows=", op->tiles_.block_rows);
    return std::unique_ptr<Op>(std::move(op));
  }

  OpInfo Info() const override {
    OpInfo info;
    const AttentionMakespan makespan = SimulateMakespan(schedule_, workers_);
    info.shape = absl::StrCat(
        what_, " items=", schedule_.work().size(),
        " shares=", schedule_.shares().size(),
        " merges=", schedule_.merges().size(),
        " partial_rows=", schedule_.partial_rows(),
        absl::StrFormat(" ideal=%.0f makespan=%.0f ratio=%.3f", makespan.ideal,
                        makespan.total(), makespan.ratio()));
    info.dtype = "int32";
    info.isa = std::string(kNoIsa);
    info.SetTraffic(0, static_cast<double>(set_bytes()));
    return info;
  }

  // One storage, however often it is filled.
  int64_t set_bytes() const override {
    return static_cast<int64_t>(
        schedule_.sequences().size() * sizeof(AttentionSequence) +
        schedule_.work().size() * sizeof(AttentionWork) +
        schedule_.shares().size() * sizeof(AttentionShare) +
        schedule_.merges().size() * sizeof(AttentionMerge));
  }
  int64_t max_sets() const override { return 1; }

  absl::Status Setup(int64_t, Executor&) override { return absl::OkStatus(); }

  void Run(int64_t, Executor&) override { schedule_ = Build().value(); }

  // Pairs of a row and a key, all heads: those of the items against those of
  // the sequences.
  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    double want = 0, got = 0;
    for (size_t s = 0; s < q_lens_.size(); ++s) {
      if (kv_lens_[s] == 0) continue;
      const auto q_len = static_cast<double>(q_lens_[s]);
      want += q_len * (static_cast<double>(kv_lens_[s]) - (q_len - 1) / 2);
    }
    want *= static_cast<double>(schedule_.kv_heads());
    for (const AttentionWork& work : schedule_.work()) {
      for (int64_t q = work.block.q_begin; q < work.block.q_end; ++q) {
        const int64_t begin = work.chunk_begin * kChunk;
        const int64_t end = std::min(schedule_.VisibleEnd(work.block, q),
                                     work.chunk_end * kChunk);
        got += static_cast<double>(std::max(int64_t{0}, end - begin));
      }
    }
    if (got == want) return 0.0;
    return absl::InternalError(
        absl::StrCat("schedule: the items have ", got,
                     " pairs of a query and a key; need ", want));
  }

 private:
  static constexpr int64_t kChunk = AttentionSchedule::kChunkTokens;

  absl::StatusOr<AttentionSchedule> Build() {
    return AttentionSchedule::Build(spec_, {q_lens_, kv_lens_, {}}, tiles_,
                                    workers_, storage_);
  }

  AttentionSpec spec_;
  AttentionTiles tiles_;
  std::vector<int64_t> q_lens_, kv_lens_;
  int workers_ = 1;
  std::string what_;
  AttentionScheduleStorage storage_;
  AttentionSchedule schedule_;
};

}  // namespace

OpEntry ScheduleOp() {
  return {"schedule",
          "how a step of attention is divided, and how evenly",
          {{"batch", "0", "sequences; 0: as many as there are lengths"},
           {"q_lens", "1", "new tokens of each, repeated over the batch"},
           {"kv_lens", "4096", "tokens of each, repeated over the batch"},
           {"q_heads", "32", "a multiple of kv_heads"},
           {"kv_heads", "8", "key/value heads"},
           {"workers", "64", "that it is for: only one of them makes it"},
           {"block_rows", "128", "rows of a block at most"},
           {"row_tile", "1", "rows that kernels compute at once"}},
          &Schedule::Create};
}

}  // namespace quern
