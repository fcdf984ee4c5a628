#include "quern/ops/recurrent/state_update.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/string_view.h"
#include "quern/core/check_args.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/core/threads/parallel_rows.h"
#include "quern/core/workspace.h"
#include "quern/ops/load_row.h"
#include "quern/ops/recurrent/chunked_sequences.h"
#include "quern/ops/recurrent/state_chunks.h"
#include "quern/ops/recurrent/state_drafts.h"
#include "quern/ops/recurrent/state_view.h"

namespace quern {
namespace {

constexpr char kOp[] = "state_update";

constexpr int64_t kMostRows = static_cast<int64_t>(kStateRows);
// Where heads are few.
constexpr int64_t kFewRows = 64;
static_assert(kStateRows == kRowBlock && kFewRows % 16 == 0, "whole blocks");

// Sequences of one token, each in its slot.
class StateDecode {
 public:
  StateDecode(const StateUpdateSpec& spec, const StateUpdateKernels& kernels,
              const RowBlockKernels& blocks, const RowBlockKernels& bc_blocks,
              const StateUpdateArgs& args)
      : spec_(spec),
        kernels_(kernels),
        blocks_(blocks),
        bc_blocks_(bc_blocks),
        args_(args) {}

  void Do(const StateUnit& unit) {
    const SequenceBatch& batch = args_.batch;
    const int64_t t = batch.begin(unit.sequence);
    if (t == batch.end(unit.sequence)) return;
    char* const out = ElementAt(args_.out, t, unit.head, unit.row);
    const int64_t slot = batch.source(unit.sequence);
    if (slot == spec_.null_slot) {
      ZeroRows(out, 1, unit.rows * static_cast<int64_t>(SizeOf(spec_.dtype)),
               0);
      return;
    }
    StateUpdateStep step = {};
    step.to = ElementAt(args_.state, slot, unit.head, unit.row);
    step.from = step.to;
    step.to_stride = static_cast<size_t>(RowStride(args_.state));
    step.from_stride = step.to_stride;
    step.rows = static_cast<size_t>(unit.rows);
    step.n = static_cast<size_t>(spec_.d_state);
    step.b = b_;
    step.c = c_;
    step.delta = delta_;
    step.x = x_;
    step.y = y_;
    step.a_head = head_.Load(spec_, args_, unit);
    step.a = head_.a();
    step.a_stride = head_.a_stride();
    if (batch.fresh(unit.sequence)) {
      const auto element = static_cast<int64_t>(SizeOf(spec_.state_dtype));
      ZeroRows(static_cast<char*>(step.to), unit.rows, spec_.d_state * element,
               RowStride(args_.state) * element);
    }
    const int64_t group = unit.head / (spec_.heads / spec_.groups);
    const size_t element = SizeOf(spec_.BcDType());
    LoadRow(bc_blocks_, ElementAt(args_.b, t, group), spec_.d_state, element,
            b_);
    LoadRow(bc_blocks_, ElementAt(args_.c, t, group), spec_.d_state, element,
            c_);
    LoadStateToken(spec_, kernels_, blocks_, args_, t, unit, head_.bias(), x_,
                   delta_);
    kernels_.step(step);
    const bool gated = args_.z.rank() != 0;
    if (gated) {
      blocks_.load(ElementAt(args_.z, t, unit.head, unit.row), step.rows, z_);
    }
    kernels_.finish(head_.d(), x_, gated ? z_ : nullptr, step.rows, y_);
    blocks_.store(y_, step.rows, /*stream=*/false, out);
  }

 private:
  const StateUpdateSpec& spec_;
  const StateUpdateKernels& kernels_;
  const RowBlockKernels& blocks_;
  const RowBlockKernels& bc_blocks_;
  const StateUpdateArgs& args_;
  StateHead head_;
  alignas(64) float b_[StateUpdatePlan::kMaxState];
  alignas(64) float c_[StateUpdatePlan::kMaxState];
  // What follows the rows of a block is computed on.
  alignas(64) float x_[kStateRows] = {};
  alignas(64) float z_[kStateRows] = {};
  alignas(64) float delta_[kStateRows] = {};
  alignas(64) float y_[kStateRows] = {};
};

}  // namespace

StateUpdatePlan::StateUpdatePlan(const StateUpdateSpec& spec)
    : spec_(spec),
      kernels_(GetStateUpdateKernels(spec.state_dtype)),
      chunks_(GetChunkKernels()),
      blocks_(GetRowBlockKernels(spec.dtype, spec.dtype)),
      bc_blocks_(GetRowBlockKernels(spec.BcDType(), spec.BcDType())),
      states_(GetRowBlockKernels(spec.state_dtype, spec.state_dtype)) {
  if (spec_.chunk == 0) spec_.chunk = kChunk;
  if (spec_.form == SsmForm::kPerRow) spec_.chunk = 1;
}

absl::StatusOr<StateUpdatePlan> StateUpdatePlan::Create(
    const StateUpdateSpec& spec) {
  constexpr int64_t kMost = int64_t{1} << 24;
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "heads", spec.heads, 1, kMost));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "groups", spec.groups, 1, spec.heads));
  if (spec.heads % spec.groups != 0) {
    return InvalidArgument(kOp, "groups=", spec.groups,
                           "; need a divisor of heads=", spec.heads);
  }
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "head_dim", spec.head_dim, 1, kMost));
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "d_state", spec.d_state, 1, kMaxState));
  if (spec.chunk != 0 && spec.chunk != 1) {
    QUERN_RETURN_IF_ERROR(CheckRange(kOp, "chunk", spec.chunk, 8, kMaxChunk));
  }
  QUERN_RETURN_IF_ERROR(CheckDTypeIn(kOp, "dtype", spec.dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "state_dtype", spec.state_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "b and c", spec.BcDType(), kFloatDTypes));
  return StateUpdatePlan(spec);
}

namespace {

// A vector over heads, or a matrix over heads and rows.
absl::Status CheckPerRow(absl::string_view field, const AnyTensorView& v,
                         const StateUpdateSpec& s) {
  if (v.rank() == 0) return absl::OkStatus();
  if (s.form == SsmForm::kPerHead) {
    return CheckInput(kOp, field, v, DType::kF32, {s.heads});
  }
  return CheckInput(kOp, field, v, DType::kF32, {s.heads, s.head_dim});
}

absl::Status CheckShapes(const StateUpdateArgs& args,
                         const StateUpdateSpec& s) {
  const bool per_head = s.form == SsmForm::kPerHead;
  const int64_t tokens = args.x.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "x", args.x, s.dtype, {kAnyExtent, s.heads, s.head_dim}));
  QUERN_RETURN_IF_ERROR(
      per_head ? CheckInput(kOp, "dt", args.dt, s.dtype, {tokens, s.heads})
               : CheckInput(kOp, "dt", args.dt, s.dtype,
                            {tokens, s.heads, s.head_dim}));
  QUERN_RETURN_IF_ERROR(
      per_head ? CheckInput(kOp, "a", args.a, DType::kF32, {s.heads})
               : CheckInput(kOp, "a", args.a, DType::kF32,
                            {s.heads, s.head_dim, s.d_state}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "b", args.b, s.BcDType(), {tokens, s.groups, s.d_state}));
  QUERN_RETURN_IF_ERROR(
      CheckInput(kOp, "c", args.c, s.BcDType(), {tokens, s.groups, s.d_state}));
  QUERN_RETURN_IF_ERROR(CheckPerRow("d", args.d, s));
  QUERN_RETURN_IF_ERROR(CheckPerRow("dt_bias", args.dt_bias, s));
  if (args.z.rank() != 0) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "z", args.z, s.dtype, {tokens, s.heads, s.head_dim}));
  }
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "state", args.state, s.state_dtype,
                  {kAnyExtent, s.heads, s.head_dim, s.d_state}));
  return CheckOutput(kOp, "out", args.out, s.dtype,
                     {tokens, s.heads, s.head_dim});
}

}  // namespace

absl::Status StateUpdatePlan::CheckArgs(const StateUpdateArgs& args) const {
  QUERN_RETURN_IF_ERROR(CheckShapes(args, spec_));
  const std::pair<absl::string_view, const AnyTensorView*> inputs[] = {
      {"x", &args.x}, {"dt", &args.dt},
      {"a", &args.a}, {"b", &args.b},
      {"c", &args.c}, {"d", &args.d},
      {"z", &args.z}, {"dt_bias", &args.dt_bias}};
  for (const auto& [name, view] : inputs) {
    if (view->rank() == 0) continue;
    QUERN_RETURN_IF_ERROR(CheckApart(kOp, name, *view, "state", args.state));
    QUERN_RETURN_IF_ERROR(
        name == "x" || name == "z"
            ? CheckInPlaceOrApart(kOp, name, *view, "out", args.out)
            : CheckApart(kOp, name, *view, "out", args.out));
  }
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "state", args.state, "out", args.out));
  QUERN_RETURN_IF_ERROR(CheckBatchApart(kOp, args.batch, "state", args.state));
  QUERN_RETURN_IF_ERROR(CheckBatchApart(kOp, args.batch, "out", args.out));
  return CheckSequences(kOp, args.batch, args.x.extent(0), args.state.extent(0),
                        spec_.null_slot);
}

bool StateUpdatePlan::Chunked(const SequenceBatch& batch,
                              int64_t sequence) const {
  return spec_.chunk > 1 &&
         batch.end(sequence) - batch.begin(sequence) >= kChunkedFrom &&
         !batch.drafts() && batch.state_indices[sequence] != spec_.null_slot;
}

namespace {

// Floats of the states that a unit works on: half of an L2 of 1 MiB. All heads
// of a unit share b, c and their products.
constexpr int64_t kMostFloats = int64_t{1} << 17;
constexpr int64_t kMostHeads = 8;

StateChunkSize LargestUnit(const StateUpdateSpec& spec) {
  const int64_t rows = std::min(spec.head_dim, kMostRows);
  return {std::clamp<int64_t>(kMostFloats / (rows * spec.d_state), 1,
                              std::min(kMostHeads, spec.heads / spec.groups)),
          rows};
}

// Scratch of one worker; none where no sequence goes by chunks.
int64_t WorkerBytes(const StateUpdateSpec& spec) {
  if (spec.chunk <= 1) return 0;
  WorkspaceLayout layout;
  LayOutStateChunk(layout, spec, LargestUnit(spec));
  return layout.bytes();
}

}  // namespace

absl::StatusOr<int64_t> StateUpdatePlan::WorkspaceBytes(int64_t max_tokens,
                                                        int max_workers) const {
  return ChunkWorkspaceBytes(kOp, kChunkedFrom, WorkerBytes(spec_), max_tokens,
                             max_workers);
}

void StateUpdatePlan::Execute(const StateUpdateArgs& args, Workspace workspace,
                              Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  RunSequences(
      args.batch, args.x.extent(0) / kChunkedFrom, WorkerBytes(spec_),
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
void StateUpdatePlan::ExecuteChunks(const StateUpdateArgs& args,
                                    int64_t* chunked, int64_t count,
                                    uint8_t* memory, Executor& executor) const {
  const int64_t group_heads = spec_.heads / spec_.groups;
  const auto tasks = [&](StateChunkSize size) {
    return count * spec_.groups * DivCeil(group_heads, size.heads) *
           DivCeil(spec_.head_dim, size.rows);
  };
  StateChunkSize size = LargestUnit(spec_);
  const int64_t wanted = 4 * executor.num_workers();
  while (size.heads > 1 && tasks(size) < wanted) size.heads /= 2;
  if (tasks(size) < wanted) size.rows = std::min(size.rows, kFewRows);
  const int64_t head_blocks = DivCeil(group_heads, size.heads);
  const int64_t row_blocks = DivCeil(spec_.head_dim, size.rows);
  const auto bytes = static_cast<size_t>(WorkerBytes(spec_));
  executor.ParallelFor(tasks(size), [&](int64_t task, int worker) {
    Workspace mine(memory + static_cast<size_t>(worker) * bytes, bytes);
    const StateChunkScratch scratch = LayOutStateChunk(mine, spec_, size);
    const int64_t row = task % row_blocks * size.rows;
    task /= row_blocks;
    const int64_t head = task % head_blocks * size.heads;
    task /= head_blocks;
    StateChunks(spec_, chunks_, kernels_, blocks_, bc_blocks_, states_, args,
                scratch)
        .Run({chunked[task / spec_.groups],
              task % spec_.groups * group_heads + head,
              std::min(size.heads, group_heads - head), row,
              std::min(size.rows, spec_.head_dim - row)});
  });
}

void StateUpdatePlan::ExecuteTokens(const StateUpdateArgs& args,
                                    int64_t sequences, int64_t tokens,
                                    Executor& executor) const {
  const SequenceBatch& batch = args.batch;
  bool decode = !batch.drafts();
  for (int64_t s = 0; decode && s < batch.sequences(); ++s) {
    decode = batch.end(s) - batch.begin(s) <= 1 || Chunked(batch, s);
  }
  const bool enough =
      sequences * spec_.heads * DivCeil(spec_.head_dim, kMostRows) >=
      4 * executor.num_workers();
  int64_t rows = enough ? kMostRows : kFewRows;
  if (!decode) rows = StateDraftRows(spec_.d_state);
  const int64_t blocks = DivCeil(spec_.head_dim, rows);
  const int64_t units = batch.sequences() * spec_.heads * blocks;
  // Sequences differ in length, so that prefill has more tasks to level out.
  const int64_t cost = DivCeil(std::max<int64_t>(tokens, 1), sequences) *
                       spec_.d_state * std::min(rows, spec_.head_dim);
  const auto at = [&](int64_t i) {
    const int64_t row = i % blocks * rows;
    return StateUnit{i / blocks / spec_.heads, i / blocks % spec_.heads, row,
                     std::min(rows, spec_.head_dim - row)};
  };
  ParallelRowRanges(
      executor, units, cost, tokens <= sequences ? 4 : 32,
      [&](int64_t begin, int64_t end) {
        if (decode) {
          StateDecode worker(spec_, kernels_, blocks_, bc_blocks_, args);
          for (int64_t i = begin; i < end; ++i) {
            if (!Chunked(batch, at(i).sequence)) worker.Do(at(i));
          }
          return;
        }
        StateDrafts worker(spec_, kernels_, blocks_, bc_blocks_, args);
        for (int64_t i = begin; i < end; ++i) {
          if (Chunked(batch, at(i).sequence)) continue;
          const StateUnit next = at(std::min(i + 1, end - 1));
          worker.Do(at(i), i + 1 < end ? &next : nullptr);
        }
      });
}

}  // namespace quern
