#include "quern/ops/speculation/draft_slots.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/ops/speculation/index_table.h"

namespace quern {
namespace {

constexpr char kCopy[] = "copy_slots";
constexpr char kDraft[] = "draft_slots";
constexpr char kBonus[] = "bonus_tokens";
constexpr char kAccepted[] = "accepted_slots";
constexpr char kRotate[] = "rotate_tokens";
constexpr int64_t kMaxI32 = std::numeric_limits<int32_t>::max();

const int32_t* RowOf(const AnyTensorView& matrix, int64_t row) {
  return static_cast<const int32_t*>(matrix.data()) + row * matrix.RowStride();
}

// The rows of requests, and the matrix that has them, which is checked as what
// is read even where it is written.
absl::Status CheckPool(const char* op, const AnyTensorView& req_pool_indices,
                       const AnyTensorView& req_to_token, int64_t pool_len) {
  QUERN_RETURN_IF_ERROR(CheckInput(op, "req_to_token", req_to_token,
                                   DType::kI32, {kAnyExtent, pool_len}));
  QUERN_RETURN_IF_ERROR(
      CheckIndexInput(op, "req_pool_indices", req_pool_indices, {kAnyExtent}));
  return CheckElements(op, "req_pool_indices", IndexTable(req_pool_indices), 0,
                       req_to_token.extent(0) - 1);
}

// Room for drafts behind the tokens of each request.
absl::Status CheckDrafts(const DraftSlotsSpec& spec,
                         const AnyTensorView& req_pool_indices,
                         const AnyTensorView& req_to_token,
                         const AnyTensorView& seq_lens) {
  QUERN_RETURN_IF_ERROR(
      CheckPool(kDraft, req_pool_indices, req_to_token, spec.pool_len));
  QUERN_RETURN_IF_ERROR(CheckIndexInput(kDraft, "seq_lens", seq_lens,
                                        {req_pool_indices.extent(0)}));
  return CheckElements(kDraft, "seq_lens", IndexTable(seq_lens), 0,
                       spec.pool_len - spec.topk * spec.num_steps);
}

}  // namespace

absl::Status Check(const CopySlotsSpec& spec) {
  return CheckRange(kCopy, "pool_len", spec.pool_len, 0, kMaxI32);
}

absl::Status Check(const CopySlotsSpec& spec, const CopySlotsArgs& args) {
  QUERN_RETURN_IF_ERROR(CheckPool(kCopy, args.req_pool_indices,
                                  args.req_to_token, spec.pool_len));
  const int64_t requests = args.req_pool_indices.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckIndexInput(kCopy, "start_offset", args.start_offset, {requests}));
  QUERN_RETURN_IF_ERROR(
      CheckIndexInput(kCopy, "end_offset", args.end_offset, {requests}));
  const bool to_rows = spec.to == SlotCopy::kToRows;
  if (to_rows) {
    QUERN_RETURN_IF_ERROR(CheckOutput(kCopy, "req_to_token", args.req_to_token,
                                      DType::kI32,
                                      {kAnyExtent, spec.pool_len}));
    QUERN_RETURN_IF_ERROR(CheckInput(kCopy, "out_cache_loc", args.out_cache_loc,
                                     DType::kI64, {kAnyExtent}));
  } else {
    QUERN_RETURN_IF_ERROR(CheckOutput(
        kCopy, "out_cache_loc", args.out_cache_loc, DType::kI64, {kAnyExtent}));
  }
  const NamedView pool = {"req_to_token", args.req_to_token};
  const NamedView vector = {"out_cache_loc", args.out_cache_loc};
  QUERN_RETURN_IF_ERROR(
      CheckAllApart(kCopy, {to_rows ? pool : vector},
                    {to_rows ? vector : pool,
                     {"req_pool_indices", args.req_pool_indices},
                     {"start_offset", args.start_offset},
                     {"end_offset", args.end_offset}}));
  const IndexTable starts(args.start_offset), ends(args.end_offset),
      slots(args.out_cache_loc);
  int64_t at = 0;
  for (int64_t b = 0; b < requests; ++b) {
    QUERN_RETURN_IF_ERROR(
        CheckElement(kCopy, "start_offset", b, starts.At(b), 0, spec.pool_len));
    QUERN_RETURN_IF_ERROR(CheckElement(kCopy, "end_offset", b, ends.At(b),
                                       starts.At(b), spec.pool_len));
    const int64_t count = ends.At(b) - starts.At(b);
    if (count > slots.rows() - at) {
      return InvalidArgument(kCopy, "out_cache_loc has ", slots.rows(),
                             " slots; need ", at + count, " for request ", b);
    }
    for (int64_t i = at; to_rows && i < at + count; ++i) {
      QUERN_RETURN_IF_ERROR(
          CheckElement(kCopy, "out_cache_loc", i, slots.At(i), 0, kMaxI32));
    }
    at += count;
  }
  return absl::OkStatus();
}

void Run(const CopySlotsSpec& spec, const CopySlotsArgs& args) {
  const IndexTable rows(args.req_pool_indices), pool(args.req_to_token),
      starts(args.start_offset), ends(args.end_offset),
      slots(args.out_cache_loc);
  int64_t at = 0;
  for (int64_t b = 0; b < rows.rows(); ++b) {
    for (int64_t t = starts.At(b); t < ends.At(b); ++t, ++at) {
      if (spec.to == SlotCopy::kToRows) {
        pool.Set(slots.At(at), rows.At(b), t);
      } else {
        slots.Set(pool.At(rows.At(b), t), at);
      }
    }
  }
}

absl::Status Check(const DraftSlotsSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckRange(kDraft, "pool_len", spec.pool_len, 0, kMaxI32));
  QUERN_RETURN_IF_ERROR(CheckRange(kDraft, "topk", spec.topk, 1, kMaxI32));
  return CheckRange(kDraft, "num_steps", spec.num_steps, 0,
                    kMaxI32 / spec.topk);
}

absl::Status Check(const DraftSlotsSpec& spec, const DraftSlotsArgs& args) {
  QUERN_RETURN_IF_ERROR(CheckDrafts(spec, args.req_pool_indices,
                                    args.req_to_token, args.seq_lens));
  const int64_t requests = args.req_pool_indices.extent(0);
  QUERN_RETURN_IF_ERROR(CheckRange(kDraft, "requests", requests, 0, kMaxI32));
  QUERN_RETURN_IF_ERROR(
      CheckAllApart(kDraft, {{"out_cache_loc", args.out_cache_loc}},
                    {{"req_pool_indices", args.req_pool_indices},
                     {"req_to_token", args.req_to_token},
                     {"seq_lens", args.seq_lens}}));
  return CheckOutput(kDraft, "out_cache_loc", args.out_cache_loc, DType::kI64,
                     {requests * spec.topk * spec.num_steps});
}

void Run(const DraftSlotsSpec& spec, const DraftSlotsArgs& args) {
  const IndexTable rows(args.req_pool_indices), lengths(args.seq_lens);
  auto* out = static_cast<int64_t*>(args.out_cache_loc.mutable_data());
  for (int64_t b = 0; b < rows.rows(); ++b) {
    const int32_t* const slots =
        RowOf(args.req_to_token, rows.At(b)) + lengths.At(b);
    out = std::copy_n(slots, spec.topk * spec.num_steps, out);
  }
}

absl::Status Check(const DraftRowsSpec& spec) {
  return Check(static_cast<const DraftSlotsSpec&>(spec));
}

absl::Status Check(const DraftRowsSpec& spec, const DraftRowsArgs& args) {
  QUERN_RETURN_IF_ERROR(CheckDrafts(spec, args.req_pool_indices,
                                    args.req_to_token, args.seq_lens));
  const int64_t requests = args.req_pool_indices.extent(0);
  QUERN_RETURN_IF_ERROR(CheckRange(kDraft, "requests", requests, 0, kMaxI32));
  QUERN_RETURN_IF_ERROR(
      CheckAllApart(kDraft, {{"out", args.out}},
                    {{"req_to_token", args.req_to_token},
                     {"req_pool_indices", args.req_pool_indices},
                     {"seq_lens", args.seq_lens}}));
  return CheckOutput(kDraft, "out", args.out, DType::kI32,
                     {requests * spec.topk, spec.pool_len});
}

void Run(const DraftRowsSpec& spec, const DraftRowsArgs& args) {
  const IndexTable rows(args.req_pool_indices), lengths(args.seq_lens);
  for (int64_t b = 0; b < rows.rows(); ++b) {
    const int32_t* const from = RowOf(args.req_to_token, rows.At(b));
    const int64_t length = lengths.At(b);
    for (int64_t c = 0; c < spec.topk; ++c) {
      auto* to = static_cast<int32_t*>(args.out.mutable_data()) +
                 (b * spec.topk + c) * args.out.RowStride();
      to = std::copy_n(from, length, to);
      std::copy_n(from + length + c * spec.num_steps, spec.num_steps, to);
    }
  }
}

absl::Status Check(const BonusTokensSpec& spec) {
  return CheckAtLeast(kBonus, "stride", spec.stride, 0);
}

absl::Status Check(const BonusTokensSpec& spec, const BonusTokensArgs& args) {
  QUERN_RETURN_IF_ERROR(CheckIndexInput(
      kBonus, "accept_tokens", args.accept_tokens, {kAnyExtent, spec.stride}));
  const int64_t requests = args.accept_tokens.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckIndexInput(kBonus, "accept_lens", args.accept_lens, {requests}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kBonus, "bonus_tokens", args.bonus_tokens,
                                    IndexDTypeOf(args.accept_tokens),
                                    {requests}));
  QUERN_RETURN_IF_ERROR(CheckAllApart(kBonus,
                                      {{"bonus_tokens", args.bonus_tokens}},
                                      {{"accept_tokens", args.accept_tokens},
                                       {"accept_lens", args.accept_lens}}));
  return CheckElements(kBonus, "accept_lens", IndexTable(args.accept_lens), 0,
                       spec.stride);
}

void Run(const BonusTokensSpec&, const BonusTokensArgs& args) {
  const IndexTable tokens(args.accept_tokens), lengths(args.accept_lens),
      bonus(args.bonus_tokens);
  for (int64_t b = 0; b < lengths.rows(); ++b) {
    const int64_t length = lengths.At(b);
    if (length > 0) bonus.Set(tokens.At(b, length - 1), b);
  }
}

absl::Status Check(const AcceptedSlotsSpec&) { return absl::OkStatus(); }

absl::Status Check(const AcceptedSlotsSpec&, const AcceptedSlotsArgs& args) {
  QUERN_RETURN_IF_ERROR(args.accept_index.rank() == 2
                            ? CheckIndexInput(kAccepted, "accept_index",
                                              args.accept_index,
                                              {kAnyExtent, kAnyExtent})
                            : CheckIndexInput(kAccepted, "accept_index",
                                              args.accept_index, {kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckInput(kAccepted, "out_cache_loc",
                                   args.out_cache_loc, DType::kI64,
                                   {kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckOutput(kAccepted, "accept_out_cache_loc",
                                    args.accept_out_cache_loc, DType::kI64,
                                    {kAnyExtent}));
  const IndexTable indices(args.accept_index);
  QUERN_RETURN_IF_ERROR(CheckRange(kAccepted, "rows of accept_index",
                                   indices.rows(), 0, kMaxI32));
  QUERN_RETURN_IF_ERROR(CheckRange(kAccepted, "columns of accept_index",
                                   indices.cols(), 0, kMaxI32));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(
      kAccepted, "length of accept_out_cache_loc",
      args.accept_out_cache_loc.extent(0), indices.rows() * indices.cols()));
  QUERN_RETURN_IF_ERROR(CheckAllApart(
      kAccepted, {{"accept_out_cache_loc", args.accept_out_cache_loc}},
      {{"accept_index", args.accept_index},
       {"out_cache_loc", args.out_cache_loc}}));
  return CheckElements(kAccepted, "accept_index", indices, -1,
                       args.out_cache_loc.extent(0) - 1);
}

void Run(const AcceptedSlotsSpec&, const AcceptedSlotsArgs& args) {
  const IndexTable indices(args.accept_index), slots(args.out_cache_loc),
      out(args.accept_out_cache_loc);
  int64_t at = 0;
  for (int64_t i = 0; i < indices.rows(); ++i) {
    for (int64_t j = 0; j < indices.cols(); ++j) {
      if (indices.At(i, j) >= 0) out.Set(slots.At(indices.At(i, j)), at++);
    }
  }
}

absl::Status Check(const RotateTokensSpec&) { return absl::OkStatus(); }

absl::Status Check(const RotateTokensSpec&, const RotateTokensArgs& args) {
  QUERN_RETURN_IF_ERROR(CheckOutput(kRotate, "input_ids", args.input_ids,
                                    DType::kI64, {kAnyExtent}));
  const int64_t tokens = args.input_ids.extent(0);
  QUERN_RETURN_IF_ERROR(CheckIndexInput(kRotate, "extend_start_loc",
                                        args.extend_start_loc, {kAnyExtent}));
  const int64_t requests = args.extend_start_loc.extent(0);
  QUERN_RETURN_IF_ERROR(CheckIndexInput(kRotate, "extend_seq_lens",
                                        args.extend_seq_lens, {requests}));
  QUERN_RETURN_IF_ERROR(args.topk_index.rank() == 2
                            ? CheckInput(kRotate, "topk_index", args.topk_index,
                                         DType::kI64, {requests, 1})
                            : CheckInput(kRotate, "topk_index", args.topk_index,
                                         DType::kI64, {requests}));
  const bool selects = args.select_index.rank() != 0;
  if (selects) {
    QUERN_RETURN_IF_ERROR(CheckInput(kRotate, "select_index", args.select_index,
                                     DType::kI64, {requests}));
  }
  QUERN_RETURN_IF_ERROR(
      CheckAllApart(kRotate, {{"input_ids", args.input_ids}},
                    {{"extend_start_loc", args.extend_start_loc},
                     {"extend_seq_lens", args.extend_seq_lens},
                     {"topk_index", args.topk_index},
                     {"select_index", args.select_index}}));
  const IndexTable starts(args.extend_start_loc), lengths(args.extend_seq_lens),
      places(args.select_index);
  for (int64_t b = 0; b < requests; ++b) {
    QUERN_RETURN_IF_ERROR(
        CheckElement(kRotate, "extend_start_loc", b, starts.At(b), 0, tokens));
    QUERN_RETURN_IF_ERROR(CheckElement(kRotate, "extend_seq_lens", b,
                                       lengths.At(b), 0,
                                       tokens - starts.At(b)));
    if (!selects || lengths.At(b) == 0) continue;
    QUERN_RETURN_IF_ERROR(
        CheckElement(kRotate, "select_index", b, places.At(b), 0, tokens - 1));
  }
  return absl::OkStatus();
}

void Run(const RotateTokensSpec&, const RotateTokensArgs& args) {
  const IndexTable starts(args.extend_start_loc), lengths(args.extend_seq_lens),
      next(args.topk_index), places(args.select_index);
  auto* const ids = static_cast<int64_t*>(args.input_ids.mutable_data());
  for (int64_t b = 0; b < starts.rows(); ++b) {
    const int64_t start = starts.At(b), length = lengths.At(b);
    if (length == 0) continue;
    std::memmove(ids + start, ids + start + 1,
                 static_cast<size_t>(length - 1) * sizeof(int64_t));
    ids[args.select_index.rank() != 0 ? places.At(b) : start + length - 1] =
        next.At(b);
  }
}

}  // namespace quern
