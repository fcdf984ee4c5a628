#include <algorithm>
#include <limits>

#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/ops/speculation/draft_inputs.h"
#include "quern/ops/speculation/index_table.h"
#include "quern/ops/speculation/long_enough.h"

namespace quern {
namespace {

constexpr char kExpand[] = "expand_inputs";
constexpr int64_t kMaxI32 = std::numeric_limits<int32_t>::max();

// Request r of the step that expands inputs.
struct Expanded {
  Expanded(const ExpandInputsSpec& spec, const IndexTable& starts,
           const IndexTable& last, int64_t r)
      : begin(starts.At(r)),
        end(starts.At(r + 1)),
        kept(last.At(r) - begin + (spec.shift ? 0 : 1)),
        rejected(end - last.At(r) - 1),
        out(begin + r * (spec.slots - (spec.shift ? 1 : 0))),
        count(kept + spec.slots + rejected) {}
  int64_t begin, end;  // its tokens
  int64_t kept, rejected;
  int64_t out, count;  // its tokens in the outputs
};

}  // namespace

absl::Status Check(const ExpandInputsSpec& spec) {
  QUERN_RETURN_IF_ERROR(
      CheckAtLeast(kExpand, "input_tokens", spec.input_tokens, 0));
  return CheckRange(kExpand, "slots", spec.slots, 1, kMaxI32);
}

absl::Status Check(const ExpandInputsSpec& spec, const ExpandInputsArgs& args) {
  const DType ids = IndexDTypeOf(args.target_token_ids);
  const DType position = IndexDTypeOf(args.target_positions);
  QUERN_RETURN_IF_ERROR(CheckIn(kExpand, "target_token_ids",
                                args.target_token_ids, spec.input_tokens));
  QUERN_RETURN_IF_ERROR(
      CheckIn(kExpand, "target_positions", args.target_positions, 0));
  QUERN_RETURN_IF_ERROR(
      CheckIn(kExpand, "query_end_loc", args.query_end_loc, 0));
  const int64_t n = args.query_end_loc.extent(0);
  QUERN_RETURN_IF_ERROR(CheckRange(kExpand, "requests", n, 0, kMaxI32));
  QUERN_RETURN_IF_ERROR(
      CheckIn(kExpand, "query_start_loc", args.query_start_loc, n + 1));
  QUERN_RETURN_IF_ERROR(CheckInput(kExpand, "next_token_ids",
                                   args.next_token_ids, ids, {kAnyExtent}));
  QUERN_RETURN_IF_ERROR(
      CheckLongEnough(kExpand, "next_token_ids", args.next_token_ids, n));
  QUERN_RETURN_IF_ERROR(
      CheckOut(kExpand, "out_input_ids", args.out_input_ids, ids, 0));
  QUERN_RETURN_IF_ERROR(
      CheckOut(kExpand, "out_positions", args.out_positions, position, 0));
  QUERN_RETURN_IF_ERROR(CheckOut(kExpand, "out_is_rejected_token_mask",
                                 args.out_is_rejected_token_mask, DType::kU8,
                                 0));
  QUERN_RETURN_IF_ERROR(CheckOut(kExpand, "out_is_masked_token_mask",
                                 args.out_is_masked_token_mask, DType::kU8, 0));
  QUERN_RETURN_IF_ERROR(CheckOut(kExpand, "out_new_token_indices",
                                 args.out_new_token_indices, n * spec.slots));
  QUERN_RETURN_IF_ERROR(CheckOut(kExpand, "out_hidden_state_mapping",
                                 args.out_hidden_state_mapping, 0));
  QUERN_RETURN_IF_ERROR(CheckRange(kExpand, "padding_token", spec.padding_token,
                                   -MostOf(args.out_input_ids) - 1,
                                   MostOf(args.out_input_ids)));
  QUERN_RETURN_IF_ERROR(
      CheckRange(kExpand, "drafting_token", spec.drafting_token,
                 -MostOf(args.out_input_ids) - 1, MostOf(args.out_input_ids)));
  const IndexTable starts(args.query_start_loc), last(args.query_end_loc),
      positions(args.target_positions);
  QUERN_RETURN_IF_ERROR(CheckAllApart(
      kExpand,
      {{"out_input_ids", args.out_input_ids},
       {"out_positions", args.out_positions},
       {"out_is_rejected_token_mask", args.out_is_rejected_token_mask},
       {"out_is_masked_token_mask", args.out_is_masked_token_mask},
       {"out_new_token_indices", args.out_new_token_indices},
       {"out_hidden_state_mapping", args.out_hidden_state_mapping}},
      {{"target_token_ids", args.target_token_ids},
       {"target_positions", args.target_positions},
       {"next_token_ids", args.next_token_ids},
       {"query_start_loc", args.query_start_loc},
       {"query_end_loc", args.query_end_loc}}));
  // Outputs of the last request end behind those of all others.
  const int64_t room =
      std::min({args.out_input_ids.extent(0), args.out_positions.extent(0),
                args.out_is_rejected_token_mask.extent(0),
                args.out_is_masked_token_mask.extent(0),
                MostOf(args.out_new_token_indices),
                MostOf(args.out_hidden_state_mapping)});
  const int64_t tokens =
      std::min(spec.input_tokens, args.target_positions.extent(0));
  int64_t begin = 0;
  for (int64_t r = 0; r < n; ++r) {
    QUERN_RETURN_IF_ERROR(CheckElement(kExpand, "query_start_loc", r,
                                       starts.At(r), begin, tokens - 1));
    QUERN_RETURN_IF_ERROR(CheckElement(kExpand, "query_start_loc", r + 1,
                                       starts.At(r + 1), starts.At(r), tokens));
    begin = starts.At(r + 1);
    QUERN_RETURN_IF_ERROR(CheckElement(kExpand, "query_end_loc", r, last.At(r),
                                       starts.At(r) - (spec.shift ? 0 : 1),
                                       starts.At(r + 1) - 1));
    const Expanded e(spec, starts, last, r);
    if (e.out + e.count > room) {
      return InvalidArgument(kExpand, "the outputs have ", room,
                             " elements; need ", e.out + e.count,
                             " for request ", r);
    }
    QUERN_RETURN_IF_ERROR(CheckElement(kExpand, "target_positions", e.begin,
                                       positions.At(e.begin), 0,
                                       MostOf(args.out_positions) - e.count));
    if (spec.shift) {
      QUERN_RETURN_IF_ERROR(CheckLongEnough(kExpand, "out_hidden_state_mapping",
                                            args.out_hidden_state_mapping,
                                            e.end));
    }
  }
  return absl::OkStatus();
}

void Run(const ExpandInputsSpec& spec, const ExpandInputsArgs& args) {
  const IndexTable starts(args.query_start_loc), last(args.query_end_loc),
      positions(args.target_positions), tokens(args.target_token_ids),
      next(args.next_token_ids), ids(args.out_input_ids),
      places(args.out_positions), rejected(args.out_is_rejected_token_mask),
      masked(args.out_is_masked_token_mask), added(args.out_new_token_indices),
      hidden(args.out_hidden_state_mapping);
  const int64_t shift = spec.shift ? 1 : 0;
  for (int64_t r = 0; r < last.rows(); ++r) {
    const Expanded e(spec, starts, last, r);
    for (int64_t j = 0; j < e.count; ++j) {
      const int64_t to = e.out + j, more = j - e.kept;
      const bool is_new = 0 <= more && more < spec.slots;
      const bool is_rejected = more >= spec.slots;
      ids.Set(more < 0      ? tokens.At(e.begin + shift + j)
              : more == 0   ? next.At(r)
              : is_rejected ? spec.padding_token
                            : spec.drafting_token,
              to);
      places.Set(is_rejected ? 0 : positions.At(e.begin) + j, to);
      rejected.Set(is_rejected ? 1 : 0, to);
      masked.Set(is_new && more > 0 ? 1 : 0, to);
      if (is_new) added.Set(to, r * spec.slots + more);
    }
    for (int64_t t = e.begin; spec.shift && t < e.end; ++t) {
      hidden.Set(e.out + t - e.begin, t);
    }
  }
}

}  // namespace quern
