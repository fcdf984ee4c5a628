#include "quern/ops/speculation/recovered_tokens.h"

#include <limits>

#include "absl/status/status.h"
#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/ops/parallel_rows.h"
#include "quern/ops/speculation/index_table.h"

namespace quern {
namespace {

constexpr char kOp[] = "recovered_tokens";
constexpr BestToken kNothing = {-1.0f, 0};

const float* RowOf(const AnyTensorView& matrix, int64_t row) {
  return static_cast<const float*>(matrix.data()) + row * matrix.RowStride();
}

absl::Status CheckRows(const char* field, const AnyTensorView& view,
                       int64_t rows, const RecoveredTokensSpec& spec) {
  const int64_t vocab = spec.vocab;
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, field, view, DType::kF32,
                                   {rows, spec.wider ? kAnyExtent : vocab}));
  if (view.extent(1) >= vocab) return absl::OkStatus();
  return InvalidArgument(kOp, field, " has ", view.extent(1),
                         " columns; need at least vocab=", vocab);
}

}  // namespace

absl::StatusOr<RecoveredTokensPlan> RecoveredTokensPlan::Create(
    const RecoveredTokensSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "vocab", spec.vocab, 1,
                                   std::numeric_limits<int32_t>::max()));
  return RecoveredTokensPlan(spec, GetRecoveredTokensKernels());
}

absl::Status RecoveredTokensPlan::CheckArgs(
    const RecoveredTokensArgs& args) const {
  QUERN_RETURN_IF_ERROR(CheckIndexOutput(kOp, "output_token_ids",
                                         args.output_token_ids, {kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckIndexInput(
      kOp, "cu_num_draft_tokens", args.cu_num_draft_tokens, {kAnyExtent}));
  const int64_t tokens = args.output_token_ids.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckIndexInput(kOp, "draft_token_ids", args.draft_token_ids, {tokens}));
  QUERN_RETURN_IF_ERROR(
      CheckRows("target_probs", args.target_probs, tokens, spec_));
  if (spec_.draft_probs) {
    QUERN_RETURN_IF_ERROR(
        CheckRows("draft_probs", args.draft_probs, tokens, spec_));
  }
  QUERN_RETURN_IF_ERROR(CheckRows("inv_q", args.inv_q,
                                  args.cu_num_draft_tokens.extent(0), spec_));
  QUERN_RETURN_IF_ERROR(
      CheckAllApart(kOp, {{"output_token_ids", args.output_token_ids}},
                    {{"cu_num_draft_tokens", args.cu_num_draft_tokens},
                     {"draft_token_ids", args.draft_token_ids},
                     {"draft_probs", args.draft_probs},
                     {"target_probs", args.target_probs},
                     {"inv_q", args.inv_q}}));
  const IndexTable ends(args.cu_num_draft_tokens), drafts(args.draft_token_ids);
  QUERN_RETURN_IF_ERROR(CheckEnds(kOp, "cu_num_draft_tokens", ends, tokens));
  if (spec_.draft_probs || ends.rows() == 0) return absl::OkStatus();
  for (int64_t t = 0; t < ends.At(ends.rows() - 1); ++t) {
    QUERN_RETURN_IF_ERROR(CheckElement(kOp, "draft_token_ids", t, drafts.At(t),
                                       0, spec_.vocab - 1));
  }
  return absl::OkStatus();
}

int64_t RecoveredTokensPlan::TokenOf(const RecoveredTokensArgs& args, int64_t t,
                                     int64_t r) const {
  const float* const p = RowOf(args.target_probs, t);
  const float* const inv_q = RowOf(args.inv_q, r);
  if (spec_.draft_probs) {
    return kernels_
        .difference(p, RowOf(args.draft_probs, t), inv_q, 0, spec_.vocab,
                    kNothing)
        .token;
  }
  const int64_t draft = IndexTable(args.draft_token_ids).At(t);
  BestToken best = kernels_.probability(p, inv_q, 0, draft, kNothing);
  const float without = 0.0f * inv_q[draft];
  if (without > best.value) best = {without, draft};
  return kernels_.probability(p, inv_q, draft + 1, spec_.vocab, best).token;
}

void RecoveredTokensPlan::Execute(const RecoveredTokensArgs& args,
                                  Executor& executor) const noexcept {
  QUERN_DCHECK_OK(CheckArgs(args));
  const IndexTable ends(args.cu_num_draft_tokens), out(args.output_token_ids);
  if (ends.rows() == 0) return;
  ParallelRows(executor, ends.At(ends.rows() - 1), 2 * spec_.vocab,
               [&](int64_t begin, int64_t end) {
                 int64_t r = 0;
                 for (int64_t t = begin; t < end; ++t) {
                   while (ends.At(r) <= t) ++r;
                   out.Set(TokenOf(args, t, r), t);
                 }
               });
}

}  // namespace quern
