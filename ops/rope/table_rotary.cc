#include "quern/ops/rope/table_rotary.h"

#include <cstddef>

#include "quern/core/check_args.h"
#include "quern/core/status_macros.h"
#include "quern/ops/load_row.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/rope/rotary_rows.h"

namespace quern {
namespace {

constexpr char kOp[] = "rotary_by_table";

absl::Status CheckSections(const TableRotarySpec& spec) {
  if (spec.sections.empty()) return absl::OkStatus();
  if (spec.sections.size() != 3) {
    return InvalidArgument(kOp, "there are ", spec.sections.size(),
                           " sections; need 3, or none");
  }
  const int64_t half = spec.rotary.rot_dim / 2;
  int64_t pairs = 0;
  for (size_t s = 0; s < 3; ++s) {
    const int64_t section = spec.sections[s];
    if (section < 0 || section > half - pairs) {
      return InvalidArgument(kOp, "sections[", s, "]=", section,
                             "; need 0 <= section <= ", half - pairs,
                             ", the pairs that are left");
    }
    pairs += section;
  }
  if (pairs == half) return absl::OkStatus();
  return InvalidArgument(kOp, "sections have ", pairs, " pairs; need ", half);
}

}  // namespace

absl::StatusOr<TableRotaryPlan> TableRotaryPlan::Create(
    const TableRotarySpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRotarySpec(kOp, spec.rotary));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "rot_dim", spec.rotary.rot_dim, 2, kMaxMadeRotDim));
  QUERN_RETURN_IF_ERROR(
      CheckDTypeIn(kOp, "table_dtype", spec.table_dtype, kFloatDTypes));
  QUERN_RETURN_IF_ERROR(CheckSections(spec));
  return TableRotaryPlan(spec);
}

TableRotaryPlan::TableRotaryPlan(const TableRotarySpec& spec)
    : spec_(spec),
      kernels_(GetRotaryEmbeddingKernels(spec.rotary.dtype)),
      table_blocks_(GetRowBlockKernels(spec.table_dtype, spec.rotary.dtype)) {}

absl::Status TableRotaryPlan::CheckArgs(const TableRotaryArgs& args) const {
  const RotaryEmbeddingSpec& rotary = spec_.rotary;
  const bool has_key = args.key.x.rank() != 0;
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "query", args.query.x, rotary.dtype,
                                   {kAnyExtent, kAnyExtent, rotary.head_dim}));
  const int64_t tokens = args.query.x.extent(0);
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "table", args.table, spec_.table_dtype,
                                   {rotary.max_positions, rotary.rot_dim}));
  const size_t streams = spec_.sections.empty() ? 1 : 3;
  for (size_t s = 0; s < streams; ++s) {
    QUERN_RETURN_IF_ERROR(CheckRotaryPositions(kOp, args.positions[s], tokens,
                                               rotary.max_positions));
  }
  const auto check = [&](const char* name, const TableRotaryHeads& heads,
                         const char* out_name) -> absl::Status {
    QUERN_RETURN_IF_ERROR(CheckInput(kOp, name, heads.x, rotary.dtype,
                                     {tokens, kAnyExtent, rotary.head_dim}));
    QUERN_RETURN_IF_ERROR(
        CheckOutput(kOp, out_name, heads.out, rotary.dtype,
                    {tokens, heads.x.extent(1), rotary.head_dim}));
    QUERN_RETURN_IF_ERROR(
        CheckInPlaceOrApart(kOp, name, heads.x, out_name, heads.out));
    QUERN_RETURN_IF_ERROR(
        CheckApart(kOp, "table", args.table, out_name, heads.out));
    for (size_t s = 0; s < streams; ++s) {
      QUERN_RETURN_IF_ERROR(CheckApart(
          kOp, "positions", args.positions[s].tensor(), out_name, heads.out));
    }
    return absl::OkStatus();
  };
  QUERN_RETURN_IF_ERROR(check("query", args.query, "query_out"));
  if (!has_key) return absl::OkStatus();
  QUERN_RETURN_IF_ERROR(check("key", args.key, "key_out"));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "query", args.query.x, "key_out", args.key.out));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "key", args.key.x, "query_out", args.query.out));
  return CheckApart(kOp, "query_out", args.query.out, "key_out", args.key.out);
}

size_t TableRotaryPlan::StreamOf(int64_t j) const {
  const std::vector<int64_t>& sections = spec_.sections;
  if (spec_.interleaved) {
    const auto s = static_cast<size_t>(j % 3);
    return j < 3 * sections[s] ? s : 0;
  }
  if (j < sections[0]) return 0;
  return j < sections[0] + sections[1] ? 1 : 2;
}

// Makes the kernels' row of a token.
void TableRotaryPlan::MakeRow(const TableRotaryArgs& args, int64_t token,
                              float* row) const {
  const RotaryEmbeddingSpec& rotary = spec_.rotary;
  const int64_t half = rotary.rot_dim / 2;
  const size_t streams = spec_.sections.empty() ? 1 : 3;
  const size_t size = SizeOf(spec_.table_dtype);
  const float sign = rotary.turn == RotaryTurn::kBackward ? -1.0f : 1.0f;
  // A row of the table, and room for the last vector that LoadRow stores.
  alignas(64) float angles[kMaxMadeRotDim + 64];
  for (size_t s = 0; s < streams; ++s) {
    const auto at =
        static_cast<size_t>(args.positions[s][token] * args.table.RowStride());
    LoadRow(table_blocks_,
            static_cast<const char*>(args.table.data()) + at * size,
            rotary.rot_dim, size, angles);
    for (int64_t j = 0; j < half; ++j) {
      if (streams > 1 && StreamOf(j) != s) continue;
      SetRotaryPair(rotary.style, rotary.rot_dim, j, angles[j],
                    sign * angles[half + j], row);
    }
  }
}

void TableRotaryPlan::Execute(const TableRotaryArgs& args,
                              Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const TableRotaryHeads &query = args.query, &key = args.key;
  const bool has_key = key.x.rank() != 0;
  if (IsEmpty(query.x) && IsEmpty(key.x)) return;
  const int64_t heads = query.x.extent(1) + (has_key ? key.x.extent(1) : 0);
  ParallelRows(executor, query.x.extent(0), 2 * heads * spec_.rotary.head_dim,
               [&](int64_t begin, int64_t end) {
                 alignas(64) float row[2 * kMaxMadeRotDim];
                 for (int64_t t = begin; t < end; ++t) {
                   MakeRow(args, t, row);
                   RotateToken(kernels_, spec_.rotary, row, query.x, query.out,
                               t);
                   if (!has_key) continue;
                   RotateToken(kernels_, spec_.rotary, row, key.x, key.out, t);
                 }
               });
}

}  // namespace quern
