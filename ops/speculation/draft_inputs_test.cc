#include "quern/ops/speculation/draft_inputs.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/speculation/numbers_testutil.h"
#include "quern/testing/data.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Values = std::vector<int64_t>;
constexpr DType kI32 = DType::kI32;
constexpr DType kI64 = DType::kI64;
constexpr DType kU8 = DType::kU8;
constexpr DType kIndices[] = {kI32, kI64};

Values Filled(int64_t n, int64_t value) {
  return Values(static_cast<size_t>(n), value);
}

// ---- Slots.

TEST(SlotMappingTest, IsThePlaceInTheBlock) {
  for (const DType dtype : kIndices) {
    const Numbers starts(dtype, {0, 3, 3, 5}),
        positions(kI64, {0, 15, 47, 16, 17, 999}),
        // The last row is of no request; unused blocks may be anything.
        blocks(kI32, {7, -1, 2, 3, 4, 5, 9, 8, -1, -1, -1, -1}, 3, /*gap=*/1),
        slots(kI64, Filled(7, -4));
    SlotMappingSpec spec;
    spec.block_size = 16;
    RunPlan<SlotMappingPlan>(
        spec, SlotMappingArgs{starts.view(), positions.view(), blocks.view(),
                              slots.view()});
    EXPECT_EQ(slots.Read(), (Values{112, 127, 47, 128, 129, -4, -4}));
  }
}

TEST(SlotMappingTest, Refuses) {
  const auto refuse = [](const char* words, int64_t block_size,
                         const Values& starts, const Values& positions,
                         const Values& blocks, int64_t slots) {
    const Numbers s(kI32, starts), p(kI64, positions), b(kI64, blocks, 2),
        o(kI64, Filled(slots, 0));
    SlotMappingSpec spec;
    spec.block_size = block_size;
    ExpectRefusal(
        StatusOf<SlotMappingPlan>(
            spec, SlotMappingArgs{s.view(), p.view(), b.view(), o.view()}),
        words);
  };
  const Values blocks = {1, 2, 3, -4};
  refuse("positions[1]=32; need 0 <= position < 2 blocks of 16", 16, {0, 2},
         {0, 32}, blocks, 2);
  refuse("positions[0]=-1; need 0 <=", 16, {0, 2}, {-1, 3}, blocks, 2);
  refuse("block_table[1, 1]=-4; need 0 <=", 16, {0, 1, 2}, {0, 16}, blocks, 2);
  refuse("block_table[0, 0]=9223372036854775807; need 0 <=", 2, {0, 1}, {0},
         {INT64_MAX, 0}, 1);
  refuse("query_start_loc[1]=3; need 0 <=", 16, {0, 3}, {0, 1}, blocks, 5);
  refuse("query_start_loc[1]=2; need 0 <=", 16, {0, 2}, {0, 1}, blocks, 1);
  refuse("query_start_loc[2]=1; need 2 <=", 16, {0, 2, 1}, {0, 1}, blocks, 2);
  refuse("rows of block_table=2; need", 16, {0, 1, 1, 1}, {0, 1}, blocks, 2);
  refuse("query_start_loc has 0 elements; need at least 1", 16, {}, {0}, blocks,
         2);
  refuse("block_size=0; need 1 <=", 0, {0, 2}, {0, 1}, blocks, 2);
}

TEST(SlotMappingTest, RefusesATableOfThreeDimensions) {
  const Numbers starts(kI32, {0, 1}), positions(kI64, {0}), blocks(kI32, {1}),
      slots(kI64, {0});
  SlotMappingSpec spec;
  spec.block_size = 16;
  const AnyTensorView table(kI32, blocks.view().data(), 3, {1, 1, 1},
                            {1, 1, 1});
  ExpectRefusal(StatusOf<SlotMappingPlan>(
                    spec, SlotMappingArgs{starts.view(), positions.view(),
                                          table, slots.view()}),
                "block_table is [1, 1, 1]; need");
}

NextSlotsSpec NextSpec(int64_t block_size, int64_t most, int64_t pad) {
  NextSlotsSpec spec;
  spec.block_size = block_size;
  spec.max_model_len = most;
  spec.pad_id = pad;
  return spec;
}

TEST(NextSlotsTest, AdvancesUntilTheModelsEnd) {
  // The last two requests have no room; one slot more is padded.
  const Numbers positions(kI64, {50, 98, 99, 100}),
      blocks(kI32, {0, 1, 2, 33, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, 4),
      lengths(kI32, {51, 99, 100, 101}), clamped(kI64, Filled(4, -3)),
      slots(kI64, Filled(6, -3));
  RunPlan<NextSlotsPlan>(
      NextSpec(16, 100, -1),
      NextSlotsArgs{positions.view(), blocks.view(), lengths.view(),
                    clamped.view(), slots.view()});
  EXPECT_EQ(clamped.Read(), (Values{51, 99, 0, 0}));
  // 51 is in block 3, and 99 behind the table, which takes its last block.
  EXPECT_EQ(slots.Read(), (Values{33 * 16 + 3, 7 * 16 + 3, -1, -1, -1, -1}));
  EXPECT_EQ(lengths.Read(), (Values{52, 100, 1, 1}));
}

TEST(NextSlotsTest, RandomRequestsFollowTheEquations) {
  TestRng rng;
  constexpr int64_t kRequests = 32, kBlock = 16, kMost = 512, kBlocks = 32;
  for (const DType dtype : kIndices) {
    Values positions, table, lengths, clamped, slots, after;
    for (int64_t r = 0; r < kRequests; ++r) {
      positions.push_back(rng.Integer(0, kMost + 10));
      lengths.push_back(rng.Integer(0, kMost + 10));
      for (int64_t b = 0; b < kBlocks; ++b) {
        table.push_back(rng.Integer(0, 999));
      }
      const int64_t p = positions.back() + 1;
      const bool fits = p < kMost;
      clamped.push_back(fits ? p : 0);
      after.push_back(fits ? std::min(lengths.back() + 1, kMost) : 1);
      const auto at = static_cast<size_t>(r * kBlocks + p / kBlock);
      slots.push_back(fits ? table[at] * kBlock + p % kBlock : -7);
    }
    const Numbers pos(dtype, positions), blocks(dtype, table, kBlocks),
        len(dtype, lengths), out(dtype, Filled(kRequests, 0)),
        to(kI64, Filled(kRequests, 0));
    RunPlan<NextSlotsPlan>(NextSpec(kBlock, kMost, -7),
                           NextSlotsArgs{pos.view(), blocks.view(), len.view(),
                                         out.view(), to.view()});
    EXPECT_EQ(out.Read(), clamped);
    EXPECT_EQ(to.Read(), slots);
    EXPECT_EQ(len.Read(), after);
  }
}

TEST(NextSlotsTest, Refuses) {
  const auto refuse = [](const char* words, const NextSlotsSpec& spec,
                         const Values& positions, const Values& lengths,
                         const Values& blocks, int64_t slots) {
    const Numbers p(kI64, positions), b(kI32, blocks, 2), l(kI32, lengths),
        c(kI64, Filled(2, 0)), o(kI64, Filled(slots, 0));
    ExpectRefusal(StatusOf<NextSlotsPlan>(
                      spec, NextSlotsArgs{p.view(), b.view(), l.view(),
                                          c.view(), o.view()}),
                  words);
  };
  const NextSlotsSpec spec = NextSpec(4, 8, -1);
  const Values blocks = {1, -2, 3, 4};
  refuse("positions[1]=-1; need 0 <=", spec, {0, -1}, {0, 0}, blocks, 2);
  refuse("positions[0]=9223372036854775807; need 0 <=", spec, {INT64_MAX, 0},
         {0, 0}, blocks, 2);
  refuse("seq_lens[0]=-1; need 0 <=", spec, {0, 0}, {-1, 0}, blocks, 2);
  refuse("block_table[0, 1]=-2; need 0 <=", spec, {3, 0}, {0, 0}, blocks, 2);
  refuse("out_slot_mapping has 1 elements; need at least 2", spec, {0, 0},
         {0, 0}, blocks, 1);
  refuse("rows of block_table=1; need", spec, {0, 0}, {0, 0}, {1, 2}, 2);
  refuse("block_size=0; need", NextSpec(0, 8, -1), {0, 0}, {0, 0}, blocks, 2);
  refuse("max_model_len=0; need", NextSpec(4, 0, -1), {0, 0}, {0, 0}, blocks,
         2);
}

// A request at the model's end needs no block, and any other one does.
TEST(NextSlotsTest, RefusesATableWithoutBlocks) {
  const Numbers lengths(kI32, {0, 0}), clamped(kI64, Filled(2, 0)),
      slots(kI64, Filled(2, 0));
  const AnyTensorView none(kI32, lengths.view().data(), 2, {2, 0}, {0, 1});
  const auto status = [&](const Values& values) {
    const Numbers positions(kI64, values);
    return StatusOf<NextSlotsPlan>(
        NextSpec(4, 8, -1),
        NextSlotsArgs{positions.view(), none, lengths.view(), clamped.view(),
                      slots.view()});
  };
  EXPECT_EQ(status({7, 8}), absl::OkStatus());
  ExpectRefusal(status({7, 6}), "columns of block_table=0; need");
}

// ---- Tokens between drafts.

TEST(PaddedInputsTest, RejectedTokensAreSkipped) {
  for (const DType dtype : kIndices) {
    // 3, 0, 2 and 1 drafts, of which the last request's are discarded.
    const Numbers ends(kI64, {3, 3, 5, 6}), valid(kI64, {2, 9, 3, 0}),
        starts(kI32, {0, 4, 5, 8, 10}), indices(dtype, Filled(5, -9)),
        rejected(dtype, Filled(4, -9));
    PaddedInputsSpec spec;
    spec.requests = 4;
    const PaddedInputsArgs args = {ends.view(), valid.view(), starts.view(),
                                   indices.view(), rejected.view()};
    RunPlan<PaddedInputsPlan>(spec, args);
    EXPECT_EQ(rejected.Read(), (Values{2, 0, 0, 2}));
    EXPECT_EQ(indices.Read(), (Values{1, 4, 7, 7, -9}));
    spec.requests = 5;
    ExpectRefusal(StatusOf<PaddedInputsPlan>(spec, args),
                  "cu_num_draft_tokens has 4 elements; need at least 5");
  }
  // Discarded, and at the beginning.
  const Numbers one(kI64, {1}), none(kI64, {0}), starts(kI32, {0, 2}),
      index(kI32, {5}), rejected(kI64, {5});
  PaddedInputsSpec spec;
  spec.requests = 1;
  RunPlan<PaddedInputsPlan>(
      spec, PaddedInputsArgs{one.view(), none.view(), starts.view(),
                             index.view(), rejected.view()});
  EXPECT_EQ(index.Read(), (Values{-1}));
}

TEST(PaddedInputsTest, Refuses) {
  const auto refuse = [](const char* words, const Values& ends,
                         const Values& valid, const Values& starts) {
    const Numbers e(kI64, ends), v(kI64, valid), s(kI64, starts),
        i(kI32, {0, 0}), r(kI32, {0, 0});
    PaddedInputsSpec spec;
    spec.requests = 2;
    ExpectRefusal(StatusOf<PaddedInputsPlan>(
                      spec, PaddedInputsArgs{e.view(), v.view(), s.view(),
                                             i.view(), r.view()}),
                  words);
  };
  refuse("valid_sampled_tokens_count[1]=4; need 0 <=", {1, 3}, {2, 4},
         {0, 2, 5});
  refuse("valid_sampled_tokens_count[0]=-1; need 0 <=", {1, 3}, {-1, 3},
         {0, 2, 5});
  refuse("cu_num_draft_tokens[1]=0; need 1 <=", {1, 0}, {1, 1}, {0, 2, 5});
  refuse("request 0 has 8 rejected tokens; need at most query_start_loc[1]=2",
         {7, 7}, {0, 1}, {0, 2, 5});
  refuse("query_start_loc[2]=-5; need 0 <=", {1, 1}, {1, 1}, {0, 2, -5});
  refuse("query_start_loc[2]=2147483648; need 0 <=", {1, 1}, {1, 1},
         {0, 2, int64_t{1} << 31});
  refuse("query_start_loc has 2 elements; need at least 3", {1, 1}, {1, 1},
         {0, 2});
}

TEST(NextTokensTest, TheLastValidTokenIsNext) {
  for (const DType dtype : kIndices) {
    // Padded with -1; a token of the vocabulary's size; none; discarded; the
    // last column is not looked at.
    const Numbers sampled(dtype, {5,  6, -1, 3, 7, 100, 8,  3, -1, -1,
                                  -1, 3, 5,  6, 7, 3,   -2, 0, 99, 3},
                          4, /*gap=*/1),
        discard(kU8, {0, 0, 0, 1, 0}), backup(dtype, {40, 41, 42, 43, 44}),
        next(dtype, Filled(6, -9)), valid(kI32, Filled(5, -9));
    NextTokensSpec spec;
    spec.vocab = 100;
    spec.sampled = 3;
    spec.requests = 5;
    const NextTokensArgs args = {sampled.view(), discard.view(), backup.view(),
                                 next.view(), valid.view()};
    RunPlan<NextTokensPlan>(spec, args);
    EXPECT_EQ(next.Read(), (Values{6, 8, 42, 43, 99, -9}));
    EXPECT_EQ(valid.Read(), (Values{2, 2, 0, 0, 2}));
    const auto refuse = [&](const char* words, int64_t vocab, int64_t columns,
                            int64_t requests) {
      NextTokensSpec bad;
      bad.vocab = vocab;
      bad.sampled = columns;
      bad.requests = requests;
      ExpectRefusal(StatusOf<NextTokensPlan>(bad, args), words);
    };
    refuse("vocab=0; need", 0, 3, 5);
    refuse("columns of sampled_token_ids=4; need", 100, 5, 5);
    refuse("sampled_token_ids has 5 elements; need at least 6", 100, 3, 6);
    refuse("requests=-1; need", 100, 3, -1);
  }
}

TEST(NextTokensTest, FlagsLieApartFromWhatIsWritten) {
  const Numbers sampled(kI64, {5, 6}, 1), discard(kU8, {0, 0}),
      backup(kI64, {40, 41}), next(kI64, {0, 0}), valid(kI32, {0, 0});
  NextTokensSpec spec;
  spec.vocab = 100;
  spec.sampled = 1;
  spec.requests = 2;
  NextTokensArgs args = {sampled.view(), discard.view(), backup.view(),
                         next.view(), valid.view()};
  args.discard_request_mask = Alias(args.next_token_ids, kU8, 2);
  ExpectRefusal(StatusOf<NextTokensPlan>(spec, args),
                "next_token_ids overlaps discard_request_mask");
  args.discard_request_mask = Alias(args.valid_sampled_tokens_count, kU8, 2);
  ExpectRefusal(StatusOf<NextTokensPlan>(spec, args),
                "valid_sampled_tokens_count overlaps discard_request_mask");
}

// ---- Room for drafts.

struct Inputs {
  explicit Inputs(DType ids, int64_t room)
      : tokens(ids, {10, 11, 12, 20, 21, 22, 23}),
        positions(kI64, {0, 1, 2, 7, 8, 9, 10}),
        next(ids, {50, 60}),
        out_ids(ids, Filled(room, -5)),
        out_positions(kI64, Filled(room, -5)),
        rejected(kU8, Filled(room, 77)),
        masked(kU8, Filled(room, 77)),
        added(kI32, Filled(5, -5)),
        hidden(kI32, Filled(7, -5)) {}
  ExpandInputsArgs Args(const Numbers& starts, const Numbers& last) const {
    return {tokens.view(),  positions.view(),     next.view(),
            out_ids.view(), out_positions.view(), rejected.view(),
            masked.view(),  added.view(),         hidden.view(),
            starts.view(),  last.view()};
  }
  Numbers tokens, positions, next;
  Numbers out_ids, out_positions, rejected, masked, added, hidden;
};
ExpandInputsSpec ExpandSpecOf(int64_t slots, bool shift) {
  ExpandInputsSpec spec;
  spec.padding_token = 0;
  spec.drafting_token = 99;
  spec.input_tokens = 7;
  spec.slots = slots;
  spec.shift = shift;
  return spec;
}

// Three tokens of one request, and four of another of which the last two were
// rejected.
TEST(ExpandInputsTest, KeepsTheTokensAndAddsDrafts) {
  const Numbers starts(kI32, {0, 3, 7}), last(kI32, {2, 4});
  for (const DType dtype : kIndices) {
    const Inputs in(dtype, 12);
    RunPlan<ExpandInputsPlan>(ExpandSpecOf(2, false), in.Args(starts, last));
    EXPECT_EQ(in.out_ids.Read(),
              (Values{10, 11, 12, 50, 99, 20, 21, 60, 99, 0, 0, -5}));
    EXPECT_EQ(in.out_positions.Read(),
              (Values{0, 1, 2, 3, 4, 7, 8, 9, 10, 0, 0, -5}));
    EXPECT_EQ(in.rejected.Read(),
              (Values{0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 77}));
    EXPECT_EQ(in.masked.Read(), (Values{0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 77}));
    EXPECT_EQ(in.added.Read(), (Values{3, 4, 7, 8, -5}));
    EXPECT_EQ(in.hidden.Read(), Filled(7, -5));
  }
}

TEST(ExpandInputsTest, ShiftsByOneToken) {
  const Numbers starts(kI32, {0, 3, 7}), last(kI32, {2, 4});
  const Inputs in(kI64, 10);
  RunPlan<ExpandInputsPlan>(ExpandSpecOf(2, true), in.Args(starts, last));
  EXPECT_EQ(in.out_ids.Read(), (Values{11, 12, 50, 99, 21, 60, 99, 0, 0, -5}));
  EXPECT_EQ(in.out_positions.Read(), (Values{0, 1, 2, 3, 7, 8, 9, 0, 0, -5}));
  EXPECT_EQ(in.rejected.Read(), (Values{0, 0, 0, 0, 0, 0, 0, 1, 1, 77}));
  EXPECT_EQ(in.masked.Read(), (Values{0, 0, 0, 1, 0, 0, 1, 0, 0, 77}));
  EXPECT_EQ(in.added.Read(), (Values{2, 3, 5, 6, -5}));
  EXPECT_EQ(in.hidden.Read(), (Values{0, 1, 2, 4, 5, 6, 7}));
}

TEST(ExpandInputsTest, Refuses) {
  const auto refuse = [](const char* words, const ExpandInputsSpec& spec,
                         const Values& starts, const Values& last,
                         int64_t room = 12) {
    const Inputs in(kI32, room);
    const Numbers s(kI64, starts), l(kI64, last);
    ExpectRefusal(StatusOf<ExpandInputsPlan>(spec, in.Args(s, l)), words);
  };
  const ExpandInputsSpec spec = ExpandSpecOf(2, false);
  refuse("the outputs have 10 elements; need 11 for request 1", spec, {0, 3, 7},
         {2, 4}, 10);
  refuse("query_end_loc[1]=7; need 2 <= query_end_loc[i] <= 6", spec, {0, 3, 7},
         {2, 7});
  refuse("query_end_loc[0]=-2; need -1 <=", spec, {0, 3, 7}, {-2, 4});
  refuse("query_end_loc[0]=-1; need 0 <=", ExpandSpecOf(2, true), {0, 3, 7},
         {-1, 4});
  refuse("query_start_loc[2]=8; need 3 <=", spec, {0, 3, 8}, {2, 4});
  refuse("query_start_loc[0]=-1; need 0 <=", spec, {-1, 3, 7}, {2, 4});
  refuse("query_start_loc[1]=2; need 3 <=", spec, {3, 2, 7}, {2, 4});
  refuse("query_start_loc has 2 elements; need at least 3", spec, {0, 3},
         {2, 4});
  refuse("out_new_token_indices has 5 elements; need at least 6",
         ExpandSpecOf(3, false), {0, 3, 7}, {2, 4}, 20);
  refuse("slots=0; need 1 <=", ExpandSpecOf(0, false), {0, 3, 7}, {2, 4});
  ExpandInputsSpec bad = spec;
  bad.padding_token = int64_t{1} << 31;
  refuse("padding_token=2147483648; need", bad, {0, 3, 7}, {2, 4});
  bad = spec;
  bad.drafting_token = -(int64_t{1} << 31) - 1;
  refuse("drafting_token=-2147483649; need", bad, {0, 3, 7}, {2, 4});
  bad.drafting_token = int64_t{1} << 31;
  refuse("drafting_token=2147483648; need", bad, {0, 3, 7}, {2, 4});
  bad = spec;
  bad.input_tokens = 8;
  refuse("target_token_ids has 7 elements; need at least 8", bad, {0, 3, 7},
         {2, 4});
}

// The positions of a request count from its first one, and all of them fit.
TEST(ExpandInputsTest, RefusesPositionsThatTheirTypeDoesNotHold) {
  const Numbers starts(kI32, {0, 3, 7}), last(kI32, {2, 4});
  for (const DType dtype : kIndices) {
    const int64_t most = dtype == kI32 ? INT32_MAX : INT64_MAX;
    const auto status = [&](int64_t first, int64_t second) {
      const Inputs in(kI32, 12);
      const Numbers positions(dtype, {first, 1, 2, second, 8, 9, 10}),
          out(dtype, Filled(12, -5));
      ExpandInputsArgs args = in.Args(starts, last);
      args.target_positions = positions.view();
      args.out_positions = out.view();
      return StatusOf<ExpandInputsPlan>(ExpandSpecOf(2, false), args);
    };
    // The second request has 6 tokens in the outputs.
    EXPECT_EQ(status(0, most - 6), absl::OkStatus());
    ExpectRefusal(status(0, most - 5), "target_positions[3]=");
    ExpectRefusal(status(-1, 7), "target_positions[0]=-1; need 0 <=");
  }
}

TEST(ExpandInputsTest, MasksLieApart) {
  const Numbers starts(kI32, {0, 3, 7}), last(kI32, {2, 4});
  const Inputs in(kI64, 12);
  const ExpandInputsArgs good = in.Args(starts, last);
  const auto refuse = [&](const char* words,
                          AnyTensorView ExpandInputsArgs::*mask,
                          const AnyTensorView& other) {
    ExpandInputsArgs args = good;
    args.*mask = Alias(other, kU8, 12);
    ExpectRefusal(StatusOf<ExpandInputsPlan>(ExpandSpecOf(2, false), args),
                  words);
  };
  const auto rejected = &ExpandInputsArgs::out_is_rejected_token_mask;
  const auto masked = &ExpandInputsArgs::out_is_masked_token_mask;
  refuse("out_is_rejected_token_mask overlaps out_input_ids", rejected,
         good.out_input_ids);
  refuse("out_is_rejected_token_mask overlaps target_token_ids", rejected,
         good.target_token_ids);
  refuse("out_is_masked_token_mask overlaps out_is_rejected_token_mask", masked,
         good.out_is_rejected_token_mask);
  refuse("out_is_masked_token_mask overlaps query_end_loc", masked,
         good.query_end_loc);
}

}  // namespace
}  // namespace quern
