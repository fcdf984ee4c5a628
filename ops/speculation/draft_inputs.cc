#include "quern/ops/speculation/draft_inputs.h"

#include <algorithm>
#include <limits>

#include "quern/core/check_args.h"
#include "quern/core/dtype.h"
#include "quern/core/status_macros.h"
#include "quern/ops/speculation/index_table.h"
#include "quern/ops/speculation/long_enough.h"

namespace quern {
namespace {

constexpr char kMapping[] = "slot_mapping";
constexpr char kPadded[] = "padded_inputs";
constexpr char kNext[] = "next_tokens";
constexpr char kSlots[] = "next_slots";
constexpr int64_t kMaxI32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxI64 = std::numeric_limits<int64_t>::max();

absl::Status CheckTable(const char* op, const AnyTensorView& table,
                        int64_t rows) {
  QUERN_RETURN_IF_ERROR(
      CheckIndexInput(op, "block_table", table, {kAnyExtent, kAnyExtent}));
  return CheckAtLeast(op, "rows of block_table", table.extent(0), rows);
}

// Blocks of i64 beyond this have slots that i64 does not hold.
absl::Status CheckBlock(const char* op, const IndexTable& blocks, int64_t r,
                        int64_t block, int64_t block_size) {
  const int64_t id = blocks.At(r, block);
  if (0 <= id && id < kMaxI64 / block_size) return absl::OkStatus();
  return InvalidArgument(op, "block_table[", r, ", ", block, "]=", id,
                         "; need 0 <= block < ", kMaxI64 / block_size);
}
absl::Status CheckBlockSize(const char* op, int64_t block_size) {
  return CheckRange(op, "block_size", block_size, 1, kMaxI32);
}

}  // namespace

absl::Status Check(const SlotMappingSpec& spec) {
  return CheckBlockSize(kMapping, spec.block_size);
}

absl::Status Check(const SlotMappingSpec& spec, const SlotMappingArgs& args) {
  QUERN_RETURN_IF_ERROR(
      CheckIn(kMapping, "query_start_loc", args.query_start_loc, 1));
  QUERN_RETURN_IF_ERROR(CheckIn(kMapping, "positions", args.positions, 0));
  QUERN_RETURN_IF_ERROR(
      CheckOut(kMapping, "slot_mapping", args.slot_mapping, DType::kI64, 0));
  const int64_t requests = args.query_start_loc.extent(0) - 1;
  QUERN_RETURN_IF_ERROR(CheckTable(kMapping, args.block_table, requests));
  QUERN_RETURN_IF_ERROR(
      CheckAllApart(kMapping, {{"slot_mapping", args.slot_mapping}},
                    {{"query_start_loc", args.query_start_loc},
                     {"positions", args.positions},
                     {"block_table", args.block_table}}));
  const IndexTable starts(args.query_start_loc), positions(args.positions),
      blocks(args.block_table);
  QUERN_RETURN_IF_ERROR(CheckEnds(
      kMapping, "query_start_loc", starts,
      std::min(args.positions.extent(0), args.slot_mapping.extent(0))));
  for (int64_t r = 0; r < requests; ++r) {
    for (int64_t t = starts.At(r); t < starts.At(r + 1); ++t) {
      const int64_t block = positions.At(t) / spec.block_size;
      if (positions.At(t) < 0 || block >= blocks.cols()) {
        return InvalidArgument(kMapping, "positions[", t, "]=", positions.At(t),
                               "; need 0 <= position < ", blocks.cols(),
                               " blocks of ", spec.block_size);
      }
      QUERN_RETURN_IF_ERROR(
          CheckBlock(kMapping, blocks, r, block, spec.block_size));
    }
  }
  return absl::OkStatus();
}

void Run(const SlotMappingSpec& spec, const SlotMappingArgs& args) {
  const IndexTable starts(args.query_start_loc), positions(args.positions),
      blocks(args.block_table), slots(args.slot_mapping);
  for (int64_t r = 0; r + 1 < starts.rows(); ++r) {
    for (int64_t t = starts.At(r); t < starts.At(r + 1); ++t) {
      const int64_t p = positions.At(t);
      slots.Set(blocks.At(r, p / spec.block_size) * spec.block_size +
                    p % spec.block_size,
                t);
    }
  }
}

absl::Status Check(const PaddedInputsSpec& spec) {
  return CheckRange(kPadded, "requests", spec.requests, 0, kMaxI64 - 1);
}

absl::Status Check(const PaddedInputsSpec& spec, const PaddedInputsArgs& args) {
  const int64_t n = spec.requests;
  QUERN_RETURN_IF_ERROR(
      CheckIn(kPadded, "cu_num_draft_tokens", args.cu_num_draft_tokens, n));
  QUERN_RETURN_IF_ERROR(CheckIn(kPadded, "valid_sampled_tokens_count",
                                args.valid_sampled_tokens_count, n));
  QUERN_RETURN_IF_ERROR(
      CheckIn(kPadded, "query_start_loc", args.query_start_loc, n + 1));
  QUERN_RETURN_IF_ERROR(CheckOut(kPadded, "token_indices_to_sample",
                                 args.token_indices_to_sample, n));
  QUERN_RETURN_IF_ERROR(
      CheckOut(kPadded, "num_rejected_tokens", args.num_rejected_tokens, n));
  QUERN_RETURN_IF_ERROR(CheckAllApart(
      kPadded,
      {{"token_indices_to_sample", args.token_indices_to_sample},
       {"num_rejected_tokens", args.num_rejected_tokens}},
      {{"cu_num_draft_tokens", args.cu_num_draft_tokens},
       {"valid_sampled_tokens_count", args.valid_sampled_tokens_count},
       {"query_start_loc", args.query_start_loc}}));
  const IndexTable ends(args.cu_num_draft_tokens),
      valid(args.valid_sampled_tokens_count), starts(args.query_start_loc);
  const int64_t most = std::min(MostOf(args.token_indices_to_sample),
                                MostOf(args.num_rejected_tokens));
  int64_t begin = 0;
  for (int64_t r = 0; r < n; ++r) {
    QUERN_RETURN_IF_ERROR(CheckElement(kPadded, "cu_num_draft_tokens", r,
                                       ends.At(r), begin, kMaxI64 - 1));
    const int64_t drafts = ends.At(r) - begin;
    begin = ends.At(r);
    QUERN_RETURN_IF_ERROR(CheckElement(kPadded, "query_start_loc", r + 1,
                                       starts.At(r + 1), 0, most));
    if (drafts == 0) continue;
    QUERN_RETURN_IF_ERROR(CheckElement(kPadded, "valid_sampled_tokens_count", r,
                                       valid.At(r), 0, drafts + 1));
    const int64_t rejected = drafts + 1 - valid.At(r);
    if (rejected > starts.At(r + 1)) {
      return InvalidArgument(kPadded, "request ", r, " has ", rejected,
                             " rejected tokens; need at most query_start_loc[",
                             r + 1, "]=", starts.At(r + 1));
    }
  }
  return absl::OkStatus();
}

void Run(const PaddedInputsSpec& spec, const PaddedInputsArgs& args) {
  const IndexTable ends(args.cu_num_draft_tokens),
      valid(args.valid_sampled_tokens_count), starts(args.query_start_loc),
      indices(args.token_indices_to_sample), rejected(args.num_rejected_tokens);
  int64_t begin = 0;
  for (int64_t r = 0; r < spec.requests; ++r) {
    const int64_t drafts = ends.At(r) - begin;
    begin = ends.At(r);
    const int64_t count = drafts > 0 ? drafts + 1 - valid.At(r) : 0;
    rejected.Set(count, r);
    indices.Set(starts.At(r + 1) - 1 - count, r);
  }
}

absl::Status Check(const NextTokensSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kNext, "vocab", spec.vocab, 1));
  QUERN_RETURN_IF_ERROR(CheckRange(kNext, "sampled", spec.sampled, 0, kMaxI32));
  return CheckAtLeast(kNext, "requests", spec.requests, 0);
}

absl::Status Check(const NextTokensSpec& spec, const NextTokensArgs& args) {
  const int64_t n = spec.requests;
  const DType ids = IndexDTypeOf(args.sampled_token_ids);
  QUERN_RETURN_IF_ERROR(CheckInput(kNext, "sampled_token_ids",
                                   args.sampled_token_ids, ids,
                                   {kAnyExtent, kAnyExtent}));
  QUERN_RETURN_IF_ERROR(
      CheckLongEnough(kNext, "sampled_token_ids", args.sampled_token_ids, n));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kNext, "columns of sampled_token_ids",
                                     args.sampled_token_ids.extent(1),
                                     spec.sampled));
  QUERN_RETURN_IF_ERROR(CheckInput(kNext, "discard_request_mask",
                                   args.discard_request_mask, DType::kU8,
                                   {kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckLongEnough(kNext, "discard_request_mask",
                                        args.discard_request_mask, n));
  QUERN_RETURN_IF_ERROR(CheckInput(kNext, "backup_next_token_ids",
                                   args.backup_next_token_ids, ids,
                                   {kAnyExtent}));
  QUERN_RETURN_IF_ERROR(CheckLongEnough(kNext, "backup_next_token_ids",
                                        args.backup_next_token_ids, n));
  QUERN_RETURN_IF_ERROR(
      CheckOut(kNext, "next_token_ids", args.next_token_ids, ids, n));
  QUERN_RETURN_IF_ERROR(CheckOut(kNext, "valid_sampled_tokens_count",
                                 args.valid_sampled_tokens_count, n));
  return CheckAllApart(
      kNext,
      {{"next_token_ids", args.next_token_ids},
       {"valid_sampled_tokens_count", args.valid_sampled_tokens_count}},
      {{"sampled_token_ids", args.sampled_token_ids},
       {"discard_request_mask", args.discard_request_mask},
       {"backup_next_token_ids", args.backup_next_token_ids}});
}

void Run(const NextTokensSpec& spec, const NextTokensArgs& args) {
  const IndexTable sampled(args.sampled_token_ids),
      discarded(args.discard_request_mask), backup(args.backup_next_token_ids),
      next(args.next_token_ids), valid(args.valid_sampled_tokens_count);
  for (int64_t r = 0; r < spec.requests; ++r) {
    int64_t count = 0, last = backup.At(r);
    for (int64_t i = 0; discarded.At(r) == 0 && i < spec.sampled; ++i) {
      const int64_t token = sampled.At(r, i);
      if (token < 0 || token >= spec.vocab) continue;
      ++count;
      last = token;
    }
    next.Set(last, r);
    valid.Set(count, r);
  }
}

absl::Status Check(const NextSlotsSpec& spec) {
  QUERN_RETURN_IF_ERROR(CheckBlockSize(kSlots, spec.block_size));
  return CheckRange(kSlots, "max_model_len", spec.max_model_len, 1, kMaxI32);
}

absl::Status Check(const NextSlotsSpec& spec, const NextSlotsArgs& args) {
  QUERN_RETURN_IF_ERROR(CheckIn(kSlots, "positions", args.positions, 0));
  const int64_t n = args.positions.extent(0);
  QUERN_RETURN_IF_ERROR(CheckTable(kSlots, args.block_table, n));
  QUERN_RETURN_IF_ERROR(CheckOut(kSlots, "seq_lens", args.seq_lens, n));
  QUERN_RETURN_IF_ERROR(
      CheckOut(kSlots, "out_clamped_positions", args.out_clamped_positions, n));
  QUERN_RETURN_IF_ERROR(CheckOut(kSlots, "out_slot_mapping",
                                 args.out_slot_mapping, DType::kI64, n));
  QUERN_RETURN_IF_ERROR(CheckAllApart(
      kSlots,
      {{"seq_lens", args.seq_lens},
       {"out_clamped_positions", args.out_clamped_positions},
       {"out_slot_mapping", args.out_slot_mapping}},
      {{"positions", args.positions}, {"block_table", args.block_table}}));
  const IndexTable positions(args.positions), lengths(args.seq_lens),
      blocks(args.block_table);
  for (int64_t r = 0; r < n; ++r) {
    QUERN_RETURN_IF_ERROR(
        CheckElement(kSlots, "positions", r, positions.At(r), 0, kMaxI64 - 1));
    QUERN_RETURN_IF_ERROR(
        CheckElement(kSlots, "seq_lens", r, lengths.At(r), 0, kMaxI64 - 1));
    if (positions.At(r) + 1 >= spec.max_model_len) continue;
    QUERN_RETURN_IF_ERROR(
        CheckAtLeast(kSlots, "columns of block_table", blocks.cols(), 1));
    const int64_t block =
        std::min((positions.At(r) + 1) / spec.block_size, blocks.cols() - 1);
    QUERN_RETURN_IF_ERROR(
        CheckBlock(kSlots, blocks, r, block, spec.block_size));
  }
  return absl::OkStatus();
}

void Run(const NextSlotsSpec& spec, const NextSlotsArgs& args) {
  const IndexTable positions(args.positions), blocks(args.block_table),
      lengths(args.seq_lens), clamped(args.out_clamped_positions),
      slots(args.out_slot_mapping);
  for (int64_t r = 0; r < slots.rows(); ++r) {
    if (r >= positions.rows()) {
      slots.Set(spec.pad_id, r);
      continue;
    }
    const int64_t p = positions.At(r) + 1;
    const bool fits = p < spec.max_model_len;
    clamped.Set(fits ? p : 0, r);
    lengths.Set(fits ? std::min(lengths.At(r) + 1, spec.max_model_len) : 1, r);
    if (!fits) {
      slots.Set(spec.pad_id, r);
      continue;
    }
    const int64_t block = std::min(p / spec.block_size, blocks.cols() - 1);
    slots.Set(blocks.At(r, block) * spec.block_size + p % spec.block_size, r);
  }
}

}  // namespace quern
