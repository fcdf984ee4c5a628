#include "quern/ops/rope/dual_chunk_rotary.h"

#include <algorithm>
#include <utility>

#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/rope/rotary_rows.h"

namespace quern {
namespace {

constexpr char kOp[] = "dual_chunk_rotary_embedding";

}  // namespace

absl::StatusOr<DualChunkRotaryPlan> DualChunkRotaryPlan::Create(
    const DualChunkRotarySpec& spec, RotaryTables* tables) {
  QUERN_RETURN_IF_ERROR(CheckRotarySpec(kOp, spec.rotary));
  constexpr int64_t kMaxChunk = int64_t{1} << 40;
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "chunk", spec.chunk, 1, kMaxChunk));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kOp, "local", spec.local, 0, spec.chunk - 1));
  // The largest position is m + chunk, where m < chunk - local.
  QUERN_ASSIGN_OR_RETURN(
      std::shared_ptr<const AlignedBuffer> table,
      GetRotaryTable(tables, kOp, spec.rotary, "2 * chunk - local",
                     2 * spec.chunk - spec.local));
  return DualChunkRotaryPlan(spec, std::move(table));
}

DualChunkRotaryPlan::DualChunkRotaryPlan(
    const DualChunkRotarySpec& spec, std::shared_ptr<const AlignedBuffer> table)
    : spec_(spec),
      kernels_(GetRotaryEmbeddingKernels(spec.rotary.dtype)),
      table_(std::move(table)) {}

absl::Status DualChunkRotaryPlan::CheckArgs(
    const DualChunkRotaryArgs& args) const {
  const RotaryEmbeddingSpec& rotary = spec_.rotary;
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "query", args.query, rotary.dtype,
                                   {kAnyExtent, kAnyExtent, rotary.head_dim}));
  int64_t copies = 0;
  if (!CheckedMul(kCopies, args.query.extent(1), &copies)) {
    return InvalidArgument(kOp, "query has ", args.query.extent(1),
                           " heads; need ", kCopies,
                           " times as many to be below 2^63");
  }
  const int64_t tokens = args.query.extent(0);
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "key", args.key, rotary.dtype,
                                   {tokens, kAnyExtent, rotary.head_dim}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kOp, "query_out", args.query_out,
                                    rotary.dtype,
                                    {tokens, copies, rotary.head_dim}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "key_out", args.key_out, rotary.dtype,
                  {tokens, args.key.extent(1), rotary.head_dim}));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "query", args.query, "query_out", args.query_out));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "key", args.key, "query_out", args.query_out));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "query", args.query, "key_out", args.key_out));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "query_out", args.query_out, "key_out", args.key_out));
  QUERN_RETURN_IF_ERROR(
      CheckInPlaceOrApart(kOp, "key", args.key, "key_out", args.key_out));
  const AnyTensorView positions = args.positions.tensor();
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "positions", positions, "query_out", args.query_out));
  QUERN_RETURN_IF_ERROR(
      CheckApart(kOp, "positions", positions, "key_out", args.key_out));
  return CheckRotaryPositions(kOp, args.positions, tokens,
                              rotary.max_positions);
}

void DualChunkRotaryPlan::Execute(const DualChunkRotaryArgs& args,
                                  Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  if (IsEmpty(args.query) && IsEmpty(args.key)) return;
  const RotaryEmbeddingSpec& rotary = spec_.rotary;
  const int64_t heads = args.query.extent(1);
  const int64_t length = spec_.chunk - spec_.local;
  const int64_t size = static_cast<int64_t>(SizeOf(rotary.dtype));
  const int64_t row_floats = RotaryRowFloats(rotary.style, rotary.rot_dim);
  const auto row = [&](int64_t position) {
    return table_->data<float>() + position * row_floats;
  };
  const AnyTensorView& all = args.query_out;
  const auto copy = [&](int64_t c) {
    // Uses the stride between heads even where a copy has a single head,
    // because the copies follow one another as heads do.
    char* const data = static_cast<char*>(all.mutable_data()) +
                       c * heads * all.stride(1) * size;
    return AnyTensorView(rotary.dtype, static_cast<void*>(data), 3,
                         {all.extent(0), heads, rotary.head_dim},
                         {all.stride(0), all.stride(1), 1});
  };
  ParallelRows(
      executor, args.query.extent(0),
      2 * ((1 + kCopies) * heads + 2 * args.key.extent(1)) * rotary.head_dim,
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const int64_t m = args.positions[t] % length;
          const int64_t at[kCopies] = {m, std::min(m + length, spec_.chunk),
                                       std::min(2 * length - 1, spec_.chunk),
                                       m + length, m + spec_.chunk};
          RotateToken(kernels_, rotary, row(m), args.key, args.key_out, t);
          if (heads == 0) continue;
          for (int64_t c = 0; c < kCopies; ++c) {
            RotateToken(kernels_, rotary, row(at[c]), args.query, copy(c), t);
          }
        }
      });
}

}  // namespace quern
