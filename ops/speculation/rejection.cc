#include "quern/ops/speculation/rejection.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/ops/speculation/index_table.h"

namespace quern {
namespace {

constexpr char kOp[] = "rejection";
constexpr int64_t kMaxVocab = std::numeric_limits<int32_t>::max();

absl::Status CheckMaxDrafts(int64_t max_drafts) {
  return CheckAtLeast(kOp, "max_drafts", max_drafts, -1);
}

// A vector or a column of token ids, which all have the type of
// output_token_ids.
absl::Status CheckIds(const char* field, const AnyTensorView& view,
                      const RejectionArgs& args, int64_t rows,
                      bool column = false) {
  const DType dtype = IndexDTypeOf(args.output_token_ids);
  return column && view.rank() == 2
             ? CheckInput(kOp, field, view, dtype, {rows, 1})
             : CheckInput(kOp, field, view, dtype, {rows});
}

absl::Status CheckProbs(const char* field, const AnyTensorView& view,
                        int64_t tokens, int64_t vocab, bool wider) {
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, field, view, DType::kF32,
                                   {tokens, wider ? kAnyExtent : vocab}));
  if (view.extent(1) >= vocab) return absl::OkStatus();
  return InvalidArgument(kOp, field, " has ", view.extent(1),
                         " columns; need at least vocab=", vocab);
}

// What both ways have. The lengths are read.
absl::Status CheckShared(const RejectionArgs& args, int64_t max_drafts) {
  QUERN_RETURN_IF_ERROR(CheckIndexInput(
      kOp, "cu_num_draft_tokens", args.cu_num_draft_tokens, {kAnyExtent}));
  const int64_t requests = args.cu_num_draft_tokens.extent(0);
  QUERN_RETURN_IF_ERROR(CheckIndexOutput(
      kOp, "output_token_ids", args.output_token_ids, {requests, kAnyExtent}));
  QUERN_RETURN_IF_ERROR(
      CheckIds("draft_token_ids", args.draft_token_ids, args, kAnyExtent));
  QUERN_RETURN_IF_ERROR(CheckIds("bonus_token_ids", args.bonus_token_ids, args,
                                 requests, /*column=*/true));
  if (args.is_greedy.rank() != 0) {
    QUERN_RETURN_IF_ERROR(
        CheckInput(kOp, "is_greedy", args.is_greedy, DType::kU8, {requests}));
  }
  QUERN_RETURN_IF_ERROR(
      CheckAllApart(kOp, {{"output_token_ids", args.output_token_ids}},
                    {{"cu_num_draft_tokens", args.cu_num_draft_tokens},
                     {"draft_token_ids", args.draft_token_ids},
                     {"bonus_token_ids", args.bonus_token_ids},
                     {"is_greedy", args.is_greedy},
                     {"target_argmax", args.target_argmax},
                     {"draft_probs", args.draft_probs},
                     {"target_probs", args.target_probs},
                     {"uniform_probs", args.uniform_probs},
                     {"recovered_token_ids", args.recovered_token_ids}}));
  const IndexTable ends(args.cu_num_draft_tokens);
  QUERN_RETURN_IF_ERROR(CheckEnds(kOp, "cu_num_draft_tokens", ends,
                                  args.draft_token_ids.extent(0)));
  int64_t most = args.output_token_ids.extent(1) - 1;
  if (max_drafts >= 0) most = std::min(most, max_drafts);
  int64_t begin = 0;
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t drafts = ends.At(r) - begin;
    if (drafts > most) {
      return InvalidArgument(kOp, "cu_num_draft_tokens gives request ", r, " ",
                             drafts, " drafts; need at most ", most);
    }
    begin = ends.At(r);
  }
  return absl::OkStatus();
}

// Whether request r is verified.
bool IsVerified(const RejectionArgs& args, int64_t r, bool greedy) {
  if (args.is_greedy.rank() == 0) return true;
  return (static_cast<const uint8_t*>(args.is_greedy.data())[r] != 0) == greedy;
}

// Verifies requests. accepts(t, draft): whether draft t is accepted.
template <class Accepts>
void Verify(const RejectionArgs& args, const AnyTensorView& replacement,
            bool greedy, const Accepts& accepts) {
  const IndexTable ends(args.cu_num_draft_tokens), drafts(args.draft_token_ids),
      bonus(args.bonus_token_ids), out(args.output_token_ids),
      instead(replacement);
  int64_t begin = 0;
  for (int64_t r = 0; r < ends.rows(); ++r) {
    const int64_t first = begin, end = ends.At(r);
    begin = end;
    if (!IsVerified(args, r, greedy)) continue;
    int64_t t = first;
    for (; t < end && accepts(t, drafts.At(t)); ++t) {
      out.Set(drafts.At(t), r, t - first);
    }
    out.Set(t < end ? instead.At(t) : bonus.At(r), r, t - first);
  }
}

template <class T>
void Expand(const ExpandSpec& spec, const ExpandArgs& args) {
  // Integers are compared as i64, because i32 may not hold replace_from.
  using Wide = std::conditional_t<std::is_integral_v<T>, int64_t, T>;
  const auto* const input = static_cast<const T*>(args.input.data());
  auto* const output = static_cast<T*>(args.output.mutable_data());
  const IndexTable ends(args.cu_num_tokens);
  int64_t t = 0;
  for (int64_t r = 0; r < ends.rows(); ++r) {
    const T value =
        static_cast<Wide>(input[r]) == static_cast<Wide>(spec.replace_from)
            ? static_cast<T>(spec.replace_to)
            : input[r];
    for (; t < ends.At(r); ++t) output[t] = value;
  }
}

}  // namespace

absl::Status Check(const GreedyRejectionSpec& spec) {
  return CheckMaxDrafts(spec.max_drafts);
}

absl::Status Check(const GreedyRejectionSpec& spec,
                   const GreedyRejectionArgs& args) {
  QUERN_RETURN_IF_ERROR(CheckShared(args, spec.max_drafts));
  return CheckIds("target_argmax", args.target_argmax, args,
                  args.draft_token_ids.extent(0));
}

void Run(const GreedyRejectionSpec&, const GreedyRejectionArgs& args) {
  const IndexTable argmax(args.target_argmax);
  Verify(args, args.target_argmax, /*greedy=*/true,
         [&](int64_t t, int64_t draft) { return draft == argmax.At(t); });
}

absl::Status Check(const RandomRejectionSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "vocab", spec.vocab, 1, kMaxVocab));
  return CheckMaxDrafts(spec.max_drafts);
}

absl::Status Check(const RandomRejectionSpec& spec,
                   const RandomRejectionArgs& args) {
  QUERN_RETURN_IF_ERROR(CheckShared(args, spec.max_drafts));
  const int64_t tokens = args.draft_token_ids.extent(0);
  QUERN_RETURN_IF_ERROR(
      CheckIds("recovered_token_ids", args.recovered_token_ids, args, tokens));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "uniform_probs", args.uniform_probs,
                                   DType::kF32, {tokens}));
  QUERN_RETURN_IF_ERROR(CheckProbs("target_probs", args.target_probs, tokens,
                                   spec.vocab, spec.wider));
  if (spec.draft_probs) {
    QUERN_RETURN_IF_ERROR(CheckProbs("draft_probs", args.draft_probs, tokens,
                                     spec.vocab, spec.wider));
  }
  const IndexTable ends(args.cu_num_draft_tokens), drafts(args.draft_token_ids);
  int64_t t = 0;
  for (int64_t r = 0; r < ends.rows(); ++r) {
    for (; t < ends.At(r); ++t) {
      if (!IsVerified(args, r, /*greedy=*/false)) continue;
      QUERN_RETURN_IF_ERROR(CheckElement(kOp, "draft_token_ids", t,
                                         drafts.At(t), 0, spec.vocab - 1));
    }
  }
  return absl::OkStatus();
}

void Run(const RandomRejectionSpec& spec, const RandomRejectionArgs& args) {
  const auto* const uniform =
      static_cast<const float*>(args.uniform_probs.data());
  const auto probability = [](const AnyTensorView& probs, int64_t t,
                              int64_t draft) {
    return static_cast<const float*>(
        probs.data())[t * probs.RowStride() + draft];
  };
  Verify(args, args.recovered_token_ids, /*greedy=*/false,
         [&](int64_t t, int64_t draft) {
           const float p = probability(args.target_probs, t, draft);
           const float q = spec.draft_probs
                               ? probability(args.draft_probs, t, draft)
                               : 1.0f;
           const float ratio = q > 0.0f ? p / q : 0.0f;
           return ratio >= uniform[t];  // false for NaN
         });
}

absl::Status Check(const ExpandSpec&) { return absl::OkStatus(); }

absl::Status Check(const ExpandSpec& spec, const ExpandArgs& args) {
  const DType dtype = args.input.dtype() == DType::kF32
                          ? DType::kF32
                          : IndexDTypeOf(args.input);
  QUERN_RETURN_IF_ERROR(
      CheckIndexInput(kOp, "cu_num_tokens", args.cu_num_tokens, {kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckInput(kOp, "input", args.input, dtype,
                                   {args.cu_num_tokens.extent(0)}));
  QUERN_RETURN_IF_ERROR(
      CheckOutput(kOp, "output", args.output, dtype, {kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckAllApart(
      kOp, {{"output", args.output}},
      {{"input", args.input}, {"cu_num_tokens", args.cu_num_tokens}}));
  if (dtype == DType::kI32) {
    QUERN_RETURN_IF_ERROR(CheckRange(kOp, "replace_to", spec.replace_to,
                                     std::numeric_limits<int32_t>::min(),
                                     std::numeric_limits<int32_t>::max()));
  }
  return CheckEnds(kOp, "cu_num_tokens", IndexTable(args.cu_num_tokens),
                   args.output.extent(0));
}

void Run(const ExpandSpec& spec, const ExpandArgs& args) {
  if (args.input.dtype() == DType::kF32) return Expand<float>(spec, args);
  if (args.input.dtype() == DType::kI64) return Expand<int64_t>(spec, args);
  Expand<int32_t>(spec, args);
}

}  // namespace quern
