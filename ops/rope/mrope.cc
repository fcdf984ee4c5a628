#include "quern/ops/rope/mrope.h"

#include <utility>

#include "quern/core/check_args.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/rope/rotary_rows.h"

namespace quern {
namespace {

constexpr char kOp[] = "mrope";

absl::Status CheckSections(const MropeSpec& spec) {
  const int64_t half = spec.rotary.rot_dim / 2;
  int64_t pairs = 0;
  for (size_t s = 0; s < spec.sections.size(); ++s) {
    const int64_t section = spec.sections[s];
    if (section < 0 || section > half - pairs) {
      return InvalidArgument(kOp, "sections[", s, "]=", section,
                             "; need 0 <= section <= ", half - pairs,
                             ", the pairs that are left");
    }
    if (spec.order == MropeOrder::kSplit && section != spec.sections[0]) {
      return InvalidArgument(kOp, "sections[", s, "]=", section, "; need ",
                             spec.sections[0], ", as the first");
    }
    pairs += section;
  }
  if (pairs != half) {
    return InvalidArgument(kOp, "sections have ", pairs, " pairs; need ", half);
  }
  if (spec.order == MropeOrder::kInterleaved && spec.sections.size() != 3) {
    return InvalidArgument(kOp, "there are ", spec.sections.size(),
                           " sections; need 3 to interleave");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<MropePlan> MropePlan::Create(const MropeSpec& spec,
                                            RotaryTables* tables) {
  QUERN_RETURN_IF_ERROR(CheckRotarySpec(kOp, spec.rotary));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "rot_dim", spec.rotary.rot_dim, 2, kMaxMadeRotDim));
  QUERN_RETURN_IF_ERROR(CheckSections(spec));
  std::vector<Source> sources;
  int64_t begin = 0;
  for (size_t s = 0; s < spec.sections.size(); ++s) {
    const bool split = spec.order == MropeOrder::kSplit;
    for (int64_t i = 0; i < spec.sections[s]; ++i) {
      sources.push_back({static_cast<int64_t>(s), split ? i : begin + i});
    }
    begin += spec.sections[s];
  }
  if (spec.order == MropeOrder::kInterleaved) {
    for (Source& source : sources) {
      const int64_t j = source.index, s = j % 3;
      source.stream = j < 3 * spec.sections[static_cast<size_t>(s)] ? s : 0;
    }
  }
  // MakeRow reads the table pair by pair: all cosines, then all sines.
  RotaryEmbeddingSpec table_spec = spec.rotary;
  table_spec.style = RotaryStyle::kHalves;
  if (spec.order == MropeOrder::kSplit) {
    table_spec.rot_dim = 2 * spec.sections[0];
  }
  QUERN_ASSIGN_OR_RETURN(
      std::shared_ptr<const AlignedBuffer> table,
      GetRotaryTable(tables, kOp, table_spec, "max_positions",
                     spec.rotary.max_positions));
  return MropePlan(spec, std::move(sources), table_spec.rot_dim / 2,
                   std::move(table));
}

MropePlan::MropePlan(const MropeSpec& spec, std::vector<Source> sources,
                     int64_t spectrum,
                     std::shared_ptr<const AlignedBuffer> table)
    : spec_(spec),
      kernels_(GetRotaryEmbeddingKernels(spec.rotary.dtype)),
      sources_(std::move(sources)),
      spectrum_(spectrum),
      table_(std::move(table)) {}

absl::Status MropePlan::CheckArgs(IndexView positions, const AnyTensorView& x,
                                  const AnyTensorView& out) const {
  const RotaryEmbeddingSpec& rotary = spec_.rotary;
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "x", x, rotary.dtype,
                                   {kAnyExtent, kAnyExtent, rotary.head_dim}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "out", out, rotary.dtype,
                  {x.extent(0), x.extent(1), rotary.head_dim}));
  QUERN_RETURN_IF_ERROR(CheckInPlaceOrApart(kOp, "x", x, "out", out));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "positions", positions.tensor(), "out", out));
  return CheckPositions(positions, x.extent(0));
}

absl::Status MropePlan::CheckQkArgs(IndexView positions, const AnyTensorView& q,
                                    const AnyTensorView& k) const {
  const RotaryEmbeddingSpec& rotary = spec_.rotary;
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "q", q, rotary.dtype,
                                    {kAnyExtent, kAnyExtent, rotary.head_dim}));
  QUERN_RETURN_IF_ERROR(CheckOutput(
      kOp, "k", k, rotary.dtype, {q.extent(0), kAnyExtent, rotary.head_dim}));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "q", q, "k", k));
  const AnyTensorView numbers = positions.tensor();
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "positions", numbers, "q", q));
  QUERN_RETURN_IF_ERROR(CheckApart(kOp, "positions", numbers, "k", k));
  return CheckPositions(positions, q.extent(0));
}

absl::Status MropePlan::CheckPositions(IndexView positions,
                                       int64_t tokens) const {
  int64_t count = 0;
  if (!CheckedMul(streams(), tokens, &count)) {
    return InvalidArgument(kOp, "tokens=", tokens, "; need ", streams(),
                           " times as many to be below 2^63");
  }
  return CheckRotaryPositions(kOp, positions, count,
                              spec_.rotary.max_positions);
}

void MropePlan::MakeRow(IndexView positions, int64_t tokens, int64_t token,
                        float* row) const {
  const float* const table = table_->data<float>();
  for (size_t j = 0; j < sources_.size(); ++j) {
    const Source source = sources_[j];
    const float* const from =
        table + positions[source.stream * tokens + token] * 2 * spectrum_ +
        source.index;
    SetRotaryPair(spec_.rotary.style, spec_.rotary.rot_dim,
                  static_cast<int64_t>(j), from[0], from[spectrum_], row);
  }
}

void MropePlan::Execute(IndexView positions, const AnyTensorView& x,
                        const AnyTensorView& out,
                        Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(positions, x, out));
  if (IsEmpty(x)) return;
  const int64_t tokens = x.extent(0);
  ParallelRows(executor, tokens, 2 * x.extent(1) * spec_.rotary.head_dim,
               [&](int64_t begin, int64_t end) {
                 alignas(64) float row[2 * kMaxMadeRotDim];
                 for (int64_t t = begin; t < end; ++t) {
                   MakeRow(positions, tokens, t, row);
                   RotateToken(kernels_, spec_.rotary, row, x, out, t);
                 }
               });
}

void MropePlan::ExecuteQk(IndexView positions, const AnyTensorView& q,
                          const AnyTensorView& k,
                          Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckQkArgs(positions, q, k));
  if (IsEmpty(q) && IsEmpty(k)) return;
  const int64_t tokens = q.extent(0);
  ParallelRows(executor, tokens,
               2 * (q.extent(1) + k.extent(1)) * spec_.rotary.head_dim,
               [&](int64_t begin, int64_t end) {
                 alignas(64) float row[2 * kMaxMadeRotDim];
                 for (int64_t t = begin; t < end; ++t) {
                   MakeRow(positions, tokens, t, row);
                   RotateToken(kernels_, spec_.rotary, row, q, q, t);
                   RotateToken(kernels_, spec_.rotary, row, k, k, t);
                 }
               });
}

}  // namespace quern
