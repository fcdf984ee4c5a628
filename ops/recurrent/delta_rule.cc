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
#include "quern/ops/load_row.h"
#include "quern/ops/recurrent/chunked_sequences.h"
#include "quern/ops/recurrent/delta_chunks.h"
#include "quern/ops/recurrent/state_view.h"

namespace quern {
namespace {

constexpr char kOp[] = "delta_rule";

// Where heads are few, and in prefill, where a block of the state should stay
// in L1: 32 KiB of f32 at dk = 128.
constexpr int64_t kNarrow = 64;

// Floats of a block of drafts: half of L1, as a token reads one and writes one.
constexpr int64_t kDraftFloats = 4096;

constexpr int64_t kScratch = DeltaRulePlan::kMaxDk;
static_assert(kScratch % static_cast<int64_t>(kRowBlock) == 0 &&
                  kDeltaColumns == kRowBlock,
              "whole blocks");

// All tokens of a sequence, on some columns of a head: a unit of work.
struct Unit {
  int64_t sequence, head, column, columns;
};

// How a call is divided: units are columns within heads within sequences.
struct Division {
  int64_t heads, dv, columns;
  int64_t blocks() const { return DivCeil(dv, columns); }
  Unit At(int64_t unit) const {
    const int64_t column = unit % blocks() * columns;
    return {unit / blocks() / heads, unit / blocks() % heads, column,
            std::min(columns, dv - column)};
  }
};

class Run {
 public:
  Run(const DeltaRuleSpec& spec, const DeltaRuleKernels& kernels,
      const RowBlockKernels& blocks, const RowBlockKernels& gates,
      const DeltaRuleArgs& args)
      : spec_(spec),
        kernels_(kernels),
        blocks_(blocks),
        gates_(gates),
        args_(args),
        element_(SizeOf(spec.dtype)),
        state_element_(SizeOf(spec.state_dtype)) {}

  // next: the unit after this one, or null.
  void Do(const Unit& unit, const Unit* next) {
    const SequenceBatch& batch = args_.batch;
    const int64_t begin = batch.begin(unit.sequence);
    const int64_t end = batch.end(unit.sequence);
    if (batch.source(unit.sequence) == spec_.null_slot) {
      for (int64_t t = begin; t < end; ++t) {
        ZeroRows(ElementAt(args_.out, t, unit.head, unit.column), 1,
                 unit.columns * static_cast<int64_t>(element_), 0);
      }
      return;
    }
    if (begin == end) return;
    DeltaRuleStep step = {};
    const auto stride = static_cast<size_t>(RowStride(args_.state));
    step.to = StateOf(unit, batch.source(unit.sequence));
    step.to_stride = step.next_stride = stride;
    step.rows = static_cast<size_t>(spec_.dk);
    step.columns = static_cast<size_t>(unit.columns);
    step.v = v_;
    step.out = out_;
    const bool fresh = batch.fresh(unit.sequence);
    for (int64_t t = begin; t < end; ++t) {
      step.from = step.to, step.from_stride = step.to_stride;
      if (batch.drafts()) SetDestination(unit, t - begin, step);
      if (t == begin && fresh) {
        const auto element = static_cast<int64_t>(state_element_);
        ZeroRows(static_cast<char*>(step.to), spec_.dk, unit.columns * element,
                 static_cast<int64_t>(step.to_stride) * element);
        step.from = step.to, step.from_stride = step.to_stride;
      }
      if (t + 1 == end) step.next = NextState(unit, next);
      DoToken(unit, t, step);
    }
  }

 private:
  void* StateOf(const Unit& unit, int64_t slot) const {
    return ElementAt(args_.state, slot, unit.head, 0, unit.column);
  }

  // Where token i of the sequence leaves its state: in its slot, or in kept_.
  void SetDestination(const Unit& unit, int64_t i, DeltaRuleStep& step) {
    const int64_t slot =
        args_.batch.destination(unit.sequence, i, spec_.null_slot);
    const bool kept = slot != spec_.null_slot;
    step.to = kept ? StateOf(unit, slot) : kept_;
    step.to_stride = kept ? step.next_stride : step.columns;
  }

  // The state of the next unit where it is read, and has the shape of this one.
  const void* NextState(const Unit& unit, const Unit* next) const {
    if (next == nullptr || next->columns != unit.columns) return nullptr;
    const int64_t slot = args_.batch.source(next->sequence);
    if (slot == spec_.null_slot ||
        args_.batch.begin(next->sequence) == args_.batch.end(next->sequence)) {
      return nullptr;
    }
    return StateOf(*next, slot);
  }

  void Prepare(const Unit& unit, int64_t t) {
    const int64_t key_head = unit.head / (spec_.value_heads / spec_.key_heads);
    LoadRow(blocks_, ElementAt(args_.q, t, key_head), spec_.dk, element_, q_);
    LoadRow(blocks_, ElementAt(args_.k, t, key_head), spec_.dk, element_, k_);
    token_ = {q_, k_, a_, ak_, aq_, 0.0f, 0.0f};
    token_.beta = NumberAt(args_.beta, t, unit.head);
    const bool per_channel = spec_.decay == DeltaDecay::kPerChannel;
    const char* const at = ElementAt(args_.g, t, unit.head);
    const auto* g = reinterpret_cast<const float*>(at);
    if (spec_.g_dtype != DType::kF32) {
      LoadRow(gates_, at, per_channel ? spec_.dk : 1, SizeOf(spec_.g_dtype),
              a_);
      g = a_;  // where the decay of each g takes its place
    }
    DeltaRuleNorm norm = {spec_.norm == DeltaNorm::kL2, spec_.norm_eps,
                          spec_.scale};
    kernels_.prepare(g, per_channel, static_cast<size_t>(spec_.dk), norm,
                     token_);
  }

  void DoToken(const Unit& unit, int64_t t, const DeltaRuleStep& step) {
    Prepare(unit, t);
    blocks_.load(ElementAt(args_.v, t, unit.head, unit.column), step.columns,
                 v_);
    kernels_.step(token_, step);
    blocks_.store(out_, step.columns, /*stream=*/false,
                  ElementAt(args_.out, t, unit.head, unit.column));
  }

  const DeltaRuleSpec& spec_;
  const DeltaRuleKernels& kernels_;
  const RowBlockKernels& blocks_;
  const RowBlockKernels& gates_;
  const DeltaRuleArgs& args_;
  const size_t element_;
  const size_t state_element_;
  DeltaRuleToken token_ = {};
  alignas(64) float q_[kScratch];
  alignas(64) float k_[kScratch];
  alignas(64) float a_[kScratch];
  alignas(64) float ak_[kScratch];
  alignas(64) float aq_[kScratch];
  alignas(64) float v_[kDeltaColumns];
  alignas(64) float out_[kDeltaColumns];
  alignas(64) float kept_[kDraftFloats];  // a state that has no slot
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
  const bool decode = tokens <= sequences;
  const bool enough =
      sequences * spec_.value_heads >= 4 * executor.num_workers();
  Division division = {spec_.value_heads, spec_.dv, kNarrow};
  if (decode && enough) {
    division.columns = static_cast<int64_t>(kDeltaColumns);
  }
  if (args.batch.drafts()) {
    const int64_t most = kDraftFloats / spec_.dk;
    division.columns = std::min(kNarrow, most < 16 ? most : most / 16 * 16);
  }
  const int64_t units =
      args.batch.sequences() * spec_.value_heads * division.blocks();
  // Sequences differ in length, so that prefill has more tasks to level out. In
  // decode the first state of a task was not asked for ahead: eight to a task.
  const int64_t most =
      decode ? std::clamp<int64_t>(units / (8 * executor.num_workers()), 1, 4)
             : 32;
  const int64_t cost = DivCeil(std::max<int64_t>(tokens, 1), sequences) *
                       spec_.dk * std::min(division.columns, spec_.dv);
  ParallelRowRanges(executor, units, cost, most,
                    [&](int64_t begin, int64_t end) {
                      Run run(spec_, kernels_, blocks_, gates_, args);
                      for (int64_t i = begin; i < end; ++i) {
                        if (Chunked(args.batch, division.At(i).sequence)) {
                          continue;
                        }
                        const Unit next = division.At(std::min(i + 1, end - 1));
                        run.Do(division.At(i), i + 1 < end ? &next : nullptr);
                      }
                    });
}

}  // namespace quern
