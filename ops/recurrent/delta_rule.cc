#include "quern/ops/recurrent/delta_rule.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <utility>

#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/threads/parallel_rows.h"
#include "quern/core/workspace.h"
#include "quern/ops/recurrent/chunked_sequences.h"
#include "quern/ops/recurrent/delta_chunks.h"
#include "quern/ops/recurrent/delta_drafts.h"
#include "quern/ops/recurrent/state_view.h"

namespace quern {
namespace {

constexpr char kOp[] = "delta_rule";

// Where heads are few, and in prefill, where a block of the state should stay
// in L1: 32 KiB of f32 at dk = 128.
constexpr int64_t kNarrow = 64;

constexpr int64_t kScratch = DeltaRulePlan::kMaxDk;
static_assert(kScratch % static_cast<int64_t>(kRowBlock) == 0 &&
                  kDeltaColumns == kRowBlock,
              "whole blocks");

// How a call is divided: units are columns within heads within sequences.
struct Division {
  int64_t heads, dv, columns;
  int64_t blocks() const { return DivCeil(dv, columns); }
  DeltaUnit At(int64_t unit) const {
    const int64_t column = unit % blocks() * columns;
    return {unit / blocks() / heads, unit / blocks() % heads, column,
            std::min(columns, dv - column)};
  }
};

// Sequences of one token, each in its slot.
class DeltaDecode {
 public:
  DeltaDecode(const DeltaRuleSpec& spec, const DeltaRuleKernels& kernels,
              const RowBlockKernels& blocks, const RowBlockKernels& gates,
              const DeltaRuleArgs& args)
      : spec_(spec),
        kernels_(kernels),
        blocks_(blocks),
        gates_(gates),
        args_(args),
        token_{q_, k_, a_, ak_, aq_, 0.0f, 0.0f} {}

  // next: the unit after this one, or null.
  void Do(const DeltaUnit& unit, const DeltaUnit* next) {
    const SequenceBatch& batch = args_.batch;
    const int64_t t = batch.begin(unit.sequence);
    if (t == batch.end(unit.sequence)) return;
    char* const out = ElementAt(args_.out, t, unit.head, unit.column);
    if (batch.source(unit.sequence) == spec_.null_slot) {
      ZeroRows(out, 1, unit.columns * static_cast<int64_t>(SizeOf(spec_.dtype)),
               0);
      return;
    }
    DeltaRuleStep step = {};
    const int64_t stride = RowStride(args_.state);
    step.to = StateOf(unit);
    step.from = step.to;
    step.to_stride = static_cast<size_t>(stride);
    step.from_stride = step.next_stride = step.to_stride;
    step.rows = static_cast<size_t>(spec_.dk);
    step.columns = static_cast<size_t>(unit.columns);
    step.v = v_;
    step.out = out_;
    step.next = NextState(unit, next);
    if (batch.fresh(unit.sequence)) {
      const auto element = static_cast<int64_t>(SizeOf(spec_.state_dtype));
      ZeroRows(static_cast<char*>(step.to), spec_.dk, unit.columns * element,
               stride * element);
    }
    PrepareDeltaToken(spec_, kernels_, blocks_, gates_, args_, t, unit.head,
                      token_);
    blocks_.load(ElementAt(args_.v, t, unit.head, unit.column), step.columns,
                 v_);
    kernels_.step(token_, step);
    blocks_.store(out_, step.columns, /*stream=*/false, out);
  }

 private:
  void* StateOf(const DeltaUnit& unit) const {
    return ElementAt(args_.state, args_.batch.source(unit.sequence), unit.head,
                     0, unit.column);
  }

  // The state of the next unit where it is read, and has the shape of this one.
  const void* NextState(const DeltaUnit& unit, const DeltaUnit* next) const {
    if (next == nullptr || next->columns != unit.columns) return nullptr;
    if (args_.batch.source(next->sequence) == spec_.null_slot ||
        args_.batch.begin(next->sequence) == args_.batch.end(next->sequence)) {
      return nullptr;
    }
    return StateOf(*next);
  }

  const DeltaRuleSpec& spec_;
  const DeltaRuleKernels& kernels_;
  const RowBlockKernels& blocks_;
  const RowBlockKernels& gates_;
  const DeltaRuleArgs& args_;
  DeltaRuleToken token_;
  alignas(64) float q_[kScratch];
  alignas(64) float k_[kScratch];
  alignas(64) float a_[kScratch];
  alignas(64) float ak_[kScratch];
  alignas(64) float aq_[kScratch];
  alignas(64) float v_[kDeltaColumns];
  alignas(64) float out_[kDeltaColumns];
};

}  // namespace

DeltaRulePlan::DeltaRulePlan(const DeltaRuleSpec& spec)
    : spec_(spec),
      kernels_(GetDeltaRuleKernels(spec.state_dtype)),
      chunks_(GetChunkKernels()),
      blocks_(GetRowBlockKernels(spec.dtype, spec.dtype)),
      states_(GetRowBlockKernels(spec.state_dtype, spec.state_dtype)),
      gates_(GetRowBlockKernels(spec.g_dtype, spec.g_dtype)) {
  if (spec_.chunk == 0) spec_.chunk = kChunk;
  if (spec_.scale == 0.0f) {
    spec_.scale =
        static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.dk)));
  }
}

absl::StatusOr<DeltaRulePlan> DeltaRulePlan::Create(const DeltaRuleSpec& spec) {
  constexpr int64_t kMost = int64_t{1} << 24;
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "key_heads", spec.key_heads, 1, kMost));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "value_heads", spec.value_heads, 1, kMost));
  if (spec.value_heads % spec.key_heads != 0) {
    return InvalidArgument(kOp, "value_heads=", spec.value_heads,
                           "; need a multiple of key_heads=", spec.key_heads);
  }
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "dk", spec.dk, 1, kMaxDk));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "dv", spec.dv, 1, kMost));
  QUERN_RETURN_IF_ERROR(CheckFinite(kOp, "scale", spec.scale));
  QUERN_RETURN_IF_ERROR(CheckFinite(kOp, "norm_eps", spec.norm_eps));
  if (spec.norm_eps < 0) {
    return InvalidArgument(kOp, "norm_eps=", spec.norm_eps, "; need 0 or more");
  }
  if (spec.chunk != 0 && spec.chunk != 1) {
    QUERN_RETURN_IF_ERROR(CheckRange(kOp, "chunk", spec.chunk, 8, kMaxChunk));
  }
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", spec.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "state_dtype", spec.state_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "beta", spec.beta_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "g", spec.g_dtype, kFloatDTypes));
  return DeltaRulePlan(spec);
}

absl::Status DeltaRulePlan::CheckArgs(const DeltaRuleArgs& args) const {
  const DeltaRuleSpec& s = spec_;
  QUERN_RETURN_IF_ERROR(CheckArgsButGates(args));
  const int64_t tokens = args.q.extent(0);
  QUERN_RETURN_IF_ERROR(
      s.decay == DeltaDecay::kPerHead
          ? CheckInput(kOp, "g", args.g, s.g_dtype, {tokens, s.value_heads})
          : CheckInput(kOp, "g", args.g, s.g_dtype,
                       {tokens, s.value_heads, s.dk}));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "beta", args.beta, s.beta_dtype,
                                   {tokens, s.value_heads}));
  const std::pair<absl::string_view, const AnyTensorView*> gates[] = {
      {"g", &args.g}, {"beta", &args.beta}};
  for (const auto& [name, view] : gates) {
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, *view, "state", args.state));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, *view, "out", args.out));
  }
  return absl::OkStatus();
}

absl::Status DeltaRulePlan::CheckArgsButGates(const DeltaRuleArgs& args) const {
  const DeltaRuleSpec& s = spec_;
  const int64_t tokens = args.q.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "q", args.q, s.dtype, {kAnyExtent, s.key_heads, s.dk}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "k", args.k, s.dtype, {tokens, s.key_heads, s.dk}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "v", args.v, s.dtype, {tokens, s.value_heads, s.dv}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "state", args.state, s.state_dtype,
                                    {kAnyExtent, s.value_heads, s.dk, s.dv}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "out", args.out, s.dtype,
                                    {tokens, s.value_heads, s.dv}));
  const std::pair<absl::string_view, const AnyTensorView*> inputs[] = {
      {"q", &args.q}, {"k", &args.k}};
  for (const auto& [name, view] : inputs) {
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, *view, "state", args.state));
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, *view, "out", args.out));
  }
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "v", args.v, "state", args.state));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "state", args.state, "out", args.out));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "v", args.v, "out", args.out));
  QUERN_RETURN_IF_ERROR(CheckBatchApart(kOp, args.batch, "state", args.state));
  QUERN_RETURN_IF_ERROR(CheckBatchApart(kOp, args.batch, "out", args.out));
  return CheckSequences(kOp, args.batch, tokens, args.state.extent(0),
                        s.null_slot);
}

bool DeltaRulePlan::Chunked(const SequenceBatch& batch,
                            int64_t sequence) const {
  return spec_.chunk > 1 &&
         batch.end(sequence) - batch.begin(sequence) >= kChunkedFrom &&
         !batch.drafts() && batch.state_indices[sequence] != spec_.null_slot;
}

namespace {

// Scratch of one worker; none where no sequence goes by chunks.
int64_t WorkerBytes(const DeltaRuleSpec& spec) {
  if (spec.chunk <= 1) return 0;
  WorkspaceLayout layout;
  LayOutDeltaChunk(layout, spec,
                   std::min(spec.dv, static_cast<int64_t>(kDeltaColumns)));
  return layout.bytes();
}

}  // namespace

absl::StatusOr<int64_t> DeltaRulePlan::WorkspaceBytes(int64_t max_tokens,
                                                      int max_workers) const {
  return ChunkWorkspaceBytes(kOp, kChunkedFrom, WorkerBytes(spec_), max_tokens,
                             max_workers);
}

void DeltaRulePlan::Execute(const DeltaRuleArgs& args, Workspace workspace,
                            Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  RunSequences(
      args.batch, args.q.extent(0) / kChunkedFrom, WorkerBytes(spec_),
      executor.num_workers(), workspace,
      [&](int64_t s) { return Chunked(args.batch, s); },
      [&](int64_t* sequences, int64_t count, uint8_t* memory) {
        ExecuteChunks(args, sequences, count, memory, executor);
      },
      [&](int64_t sequences, int64_t tokens) {
        ExecuteTokens(args, sequences, tokens, executor);
      });
}

// Each unit is a task.
void DeltaRulePlan::ExecuteChunks(const DeltaRuleArgs& args, int64_t* chunked,
                                  int64_t count, uint8_t* memory,
                                  Executor& executor) const {
  const int64_t heads = spec_.value_heads;
  int64_t columns = std::min(spec_.dv, static_cast<int64_t>(kDeltaColumns));
  // Narrow units repeat the products of q and k.
  if (count * heads * DivCeil(spec_.dv, columns) < 4 * executor.num_workers()) {
    columns = std::min(spec_.dv, kNarrow);
  }
  const int64_t blocks = DivCeil(spec_.dv, columns);
  const auto bytes = static_cast<size_t>(WorkerBytes(spec_));
  executor.ParallelFor(count * heads * blocks, [&](int64_t task, int worker) {
    Workspace mine(memory + static_cast<size_t>(worker) * bytes, bytes);
    const DeltaChunkScratch scratch = LayOutDeltaChunk(mine, spec_, columns);
    const int64_t column = task % blocks * columns;
    DeltaChunks(spec_, chunks_, blocks_, states_, gates_, args, scratch)
        .Run({chunked[task / blocks / heads], task / blocks % heads, column,
              std::min(columns, spec_.dv - column)});
  });
}

void DeltaRulePlan::ExecuteTokens(const DeltaRuleArgs& args, int64_t sequences,
                                  int64_t tokens, Executor& executor) const {
  const SequenceBatch& batch = args.batch;
  bool decode = !batch.drafts();
  for (int64_t s = 0; decode && s < batch.sequences(); ++s) {
    decode = batch.end(s) - batch.begin(s) <= 1 || Chunked(batch, s);
  }
  const bool enough =
      sequences * spec_.value_heads >= 4 * executor.num_workers();
  Division division = {spec_.value_heads, spec_.dv, kNarrow};
  if (decode && enough) {
    division.columns = static_cast<int64_t>(kDeltaColumns);
  } else if (!decode) {
    division.columns = enough ? spec_.dv : DeltaDraftColumns(spec_.dk);
  }
  const int64_t units =
      batch.sequences() * spec_.value_heads * division.blocks();
  // Sequences differ in length, so that prefill has more tasks to level out. In
  // decode the first state of a task was not asked for ahead: eight to a task.
  const int64_t most = std::clamp<int64_t>(units / (8 * executor.num_workers()),
                                           1, decode ? 4 : 32);
  const int64_t cost = DivCeil(std::max<int64_t>(tokens, 1), sequences) *
                       spec_.dk * std::min(division.columns, spec_.dv);
  const auto run = [&](auto& worker, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (Chunked(batch, division.At(i).sequence)) continue;
      const DeltaUnit next = division.At(std::min(i + 1, end - 1));
      worker.Do(division.At(i), i + 1 < end ? &next : nullptr);
    }
  };
  ParallelRowRanges(
      executor, units, cost, most, [&](int64_t begin, int64_t end) {
        if (decode) {
          DeltaDecode worker(spec_, kernels_, blocks_, gates_, args);
          run(worker, begin, end);
        } else {
          DeltaDrafts worker(spec_, kernels_, blocks_, gates_, args);
          run(worker, begin, end);
        }
      });
}

}  // namespace quern
