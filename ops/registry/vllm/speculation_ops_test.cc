// vLLM's operators of speculation by their names, and ours for rejection
// sampling: each argument reaches its place in the plan, whose tests are in
// ops/speculation, and refusals have the words of the schema.

#include "quern/ops/registry/vllm/speculation_ops.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/families/rows/speculation_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/speculation/numbers_testutil.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Values = std::vector<int64_t>;
using Tensors = std::vector<std::pair<const char*, AnyTensorView>>;
using Scalars = std::vector<std::pair<const char*, OpArg>>;
constexpr DType kI32 = DType::kI32;
constexpr DType kI64 = DType::kI64;
constexpr DType kU8 = DType::kU8;

class VllmSpeculationTest : public testing::Test {
 protected:
  VllmSpeculationTest() {
    EXPECT_EQ(RegisterSpeculationOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterVllmSpeculationOps(registry_), absl::OkStatus());
  }
  // Makes the operator for these tensors, binds and runs it.
  absl::Status Run(const std::string& op, const Tensors& tensors,
                   const Scalars& scalars) {
    NamedArgs args;
    std::vector<NamedTensor> named;
    for (const auto& [name, view] : tensors) {
      TensorMeta meta;
      meta.dtype = view.dtype();
      for (int d = 0; d < view.rank(); ++d) {
        meta.extents.push_back(view.extent(d));
      }
      args.emplace_back(name, meta);
      named.emplace_back(name, view);
    }
    for (const auto& [name, value] : scalars) args.emplace_back(name, value);
    const OpDispatcher ops(registry_, OpPolicy());
    const auto made = ops.Make(op, args);
    if (!made.ok()) return made.status();
    std::vector<AnyTensorView> ordered;
    if (absl::Status bound = made->Bind(named, ordered); !bound.ok()) {
      return bound;
    }
    InlineExecutor executor;
    made->op->Execute(ordered, executor);
    return absl::OkStatus();
  }

  OpRegistry registry_;
};

// Two requests with two drafts and one; the second is verified greedily.
TEST_F(VllmSpeculationTest, Rejection) {
  const Numbers ends(kI64, {2, 3}), drafts(kI64, {1, 2, 3}),
      argmax(kI64, {1, 9, 3}), bonus(kI64, {70, 71}, 1), greedy(kU8, {0, 1}),
      recovered(kI64, Values(3, -1));
  std::vector<float> target(3 * 4, 0.25f), draft(3 * 4, 0.25f),
      uniform = {0.5f, 0.5f, 0.5f}, inv_q(2 * 4, 1.0f);
  draft[1 * 4 + 2] = 0.75f;  // draft 1 is token 2, of a quotient of 1 / 3
  target[1 * 4 + 3] = 0.5f;
  target[0 * 4 + 2] = 0.75f;
  target[2 * 4 + 0] = 0.75f;
  const auto probs = DenseMatrix(target.data(), 3, 4);
  const auto draft_probs = DenseMatrix(draft.data(), 3, 4);
  for (const bool vllm : {false, true}) {
    Scalars limits, more;
    if (vllm) {
      limits = {{"max_spec_len", int64_t{2}}};
      more = {{"vocab_size", int64_t{4}}, {"no_draft_probs", false}};
    }
    ASSERT_EQ(Run(vllm ? "sample_recovered_tokens_kernel_impl"
                       : "sample_recovered_tokens",
                  {{"output_token_ids", recovered.view()},
                   {"cu_num_draft_tokens", ends.view()},
                   {"draft_token_ids", drafts.view()},
                   {"draft_probs", draft_probs},
                   {"target_probs", probs},
                   {"inv_q", DenseMatrix(inv_q.data(), 2, 4)}},
                  more),
              absl::OkStatus());
    EXPECT_EQ(recovered.Read(), (Values{2, 3, 0}));
    const Numbers out(kI64, Values(6, -1), 3);
    const std::string greedily = vllm ? "rejection_greedy_sample_kernel_impl"
                                      : "rejection_sample_greedy";
    ASSERT_EQ(Run(greedily,
                  {{"output_token_ids", out.view()},
                   {"cu_num_draft_tokens", ends.view()},
                   {"draft_token_ids", drafts.view()},
                   {"target_argmax", argmax.view()},
                   {"bonus_token_ids", bonus.view()},
                   {"is_greedy", greedy.view()}},
                  limits),
              absl::OkStatus());
    EXPECT_EQ(out.Read(), (Values{-1, -1, -1, 3, 71, -1}));
    Scalars all = limits;
    all.insert(all.end(), more.begin(), more.end());
    const Tensors random = {{"output_token_ids", out.view()},
                            {"cu_num_draft_tokens", ends.view()},
                            {"draft_token_ids", drafts.view()},
                            {"draft_probs", draft_probs},
                            {"target_probs", probs},
                            {"bonus_token_ids", bonus.view()},
                            {"recovered_token_ids", recovered.view()},
                            {"uniform_probs", DenseVector(uniform.data(), 3)},
                            {"is_greedy", greedy.view()}};
    const std::string randomly =
        vllm ? "rejection_random_sample_kernel_impl" : "rejection_sample";
    ASSERT_EQ(Run(randomly, random, all), absl::OkStatus());
    EXPECT_EQ(out.Read(), (Values{1, 3, -1, 3, 71, -1}));
    if (!vllm) continue;
    all[0].second = int64_t{1};
    ExpectRefusal(Run(randomly, random, all), "2 drafts; need at most 1");
    all[0].second = int64_t{-2};
    ExpectRefusal(Run(randomly, random, all), "max_spec_len=-2; need");
    all[0].second = int64_t{2};
    all[1].second = int64_t{0};
    ExpectRefusal(Run(randomly, random, all),
                  "vocab_size=0; need 1 <= vocab_size");
    Tensors without = random;
    without.erase(without.begin() + 3);
    all[1].second = int64_t{4};
    ExpectRefusal(Run(randomly, without, all), "draft_probs is missing");
    all[2].second = true;
    EXPECT_EQ(Run(randomly, without, all), absl::OkStatus());
  }
  const Numbers in(kI32, {5, 0}), out(kI32, Values(3));
  for (const char* name : {"expand_kernel_impl", "expand_to_tokens"}) {
    ASSERT_EQ(Run(name,
                  {{"output", out.view()},
                   {"input", in.view()},
                   {"cu_num_tokens", ends.view()}},
                  {{"replace_from", int64_t{0}}, {"replace_to", int64_t{8}}}),
              absl::OkStatus());
    EXPECT_EQ(out.Read(), (Values{5, 5, 8}));
  }
}

TEST_F(VllmSpeculationTest, Slots) {
  const Numbers starts(kI32, {0, 1, 2}), positions(kI64, {3, 0}),
      blocks(kI32, {4, 5, 6, 7}, 2), slots(kI64, Values(3));
  ASSERT_EQ(Run("compute_slot_mapping_kernel_impl",
                {{"query_start_loc", starts.view()},
                 {"positions", positions.view()},
                 {"block_table", blocks.view()},
                 {"slot_mapping", slots.view()}},
                {{"block_size", int64_t{2}}}),
            absl::OkStatus());
  EXPECT_EQ(slots.Read(), (Values{11, 12, 0}));
  const Numbers lengths(kI32, {4, 1}), clamped(kI64, Values(2));
  ASSERT_EQ(Run("eagle_step_slot_mapping_metadata_kernel_impl",
                {{"positions", positions.view()},
                 {"block_table", blocks.view()},
                 {"seq_lens", lengths.view()},
                 {"out_clamped_positions", clamped.view()},
                 {"out_slot_mapping", slots.view()}},
                {{"block_size", int64_t{2}},
                 {"max_model_len", int64_t{4}},
                 {"pad_id", int64_t{-7}}}),
            absl::OkStatus());
  EXPECT_EQ(slots.Read(), (Values{-7, 13, -7}));
  EXPECT_EQ(clamped.Read(), (Values{0, 1}));
  EXPECT_EQ(lengths.Read(), (Values{1, 2}));
}

TEST_F(VllmSpeculationTest, Tokens) {
  const Numbers ends(kI64, {1, 3}), valid(kI64, {2, 1}),
      starts(kI32, {0, 2, 5}), indices(kI32, Values(2)),
      rejected(kI64, Values(2));
  const auto prepare = [&](int64_t requests) {
    return Run("eagle_prepare_inputs_padded_kernel_impl",
               {{"cu_num_draft_tokens", ends.view()},
                {"valid_sampled_tokens_count", valid.view()},
                {"query_start_loc_gpu", starts.view()},
                {"token_indices_to_sample", indices.view()},
                {"num_rejected_tokens_gpu", rejected.view()}},
               {{"num_reqs", requests}});
  };
  ASSERT_EQ(prepare(2), absl::OkStatus());
  EXPECT_EQ(indices.Read(), (Values{1, 2}));
  EXPECT_EQ(rejected.Read(), (Values{0, 2}));
  ExpectRefusal(prepare(-1), "num_reqs=-1; need 0 <= num_reqs");

  const Numbers sampled(kI64, {5, 6, -1, 1, 2, 3}, 3), discard(kU8, {0, 1}),
      backup(kI64, {8, 9}), next(kI64, Values(2)), count(kI64, Values(2));
  const auto choose = [&](int64_t vocab, int64_t columns) {
    return Run("eagle_prepare_next_token_padded_kernel_impl",
               {{"sampled_token_ids", sampled.view()},
                {"discard_request_mask", discard.view()},
                {"backup_next_token_ids", backup.view()},
                {"next_token_ids", next.view()},
                {"valid_sampled_tokens_count", count.view()}},
               {{"vocab_size", vocab},
                {"num_sampled_tokens_per_req", columns},
                {"num_reqs", int64_t{2}}});
  };
  ASSERT_EQ(choose(6, 3), absl::OkStatus());
  EXPECT_EQ(next.Read(), (Values{5, 9}));
  EXPECT_EQ(count.Read(), (Values{1, 0}));
  ExpectRefusal(choose(6, -1), "num_sampled_tokens_per_req=-1; need");
}

TEST_F(VllmSpeculationTest, ExpandedInputs) {
  const Numbers tokens(kI64, {10, 11, 12, 20, 21}),
      positions(kI64, {0, 1, 2, 7, 8}), next(kI64, {50, 60}),
      ids(kI64, Values(7)), places(kI64, Values(7)), bad(kU8, Values(7)),
      masked(kU8, Values(7)), added(kI32, Values(4)), hidden(kI32, Values(5)),
      starts(kI32, {0, 3, 5}), last(kI32, {2, 3});
  const auto expand = [&](int64_t inputs, int64_t slots, int64_t padding) {
    return Run("copy_and_expand_eagle_inputs_kernel_impl",
               {{"target_token_ids", tokens.view()},
                {"target_positions", positions.view()},
                {"next_token_ids", next.view()},
                {"out_input_ids", ids.view()},
                {"out_positions", places.view()},
                {"out_is_rejected_token_mask", bad.view()},
                {"out_is_masked_token_mask", masked.view()},
                {"out_new_token_indices", added.view()},
                {"out_hidden_state_mapping", hidden.view()},
                {"query_start_loc", starts.view()},
                {"query_end_loc", last.view()}},
               {{"padding_token_id", padding},
                {"parallel_drafting_token_id", int64_t{99}},
                {"total_input_tokens", inputs},
                {"num_padding_slots_per_request", slots},
                {"shift_input_ids", true}});
  };
  ASSERT_EQ(expand(5, 2, -4), absl::OkStatus());
  EXPECT_EQ(ids.Read(), (Values{11, 12, 50, 99, 60, 99, -4}));
  EXPECT_EQ(places.Read(), (Values{0, 1, 2, 3, 7, 8, 0}));
  EXPECT_EQ(bad.Read(), (Values{0, 0, 0, 0, 0, 0, 1}));
  EXPECT_EQ(masked.Read(), (Values{0, 0, 0, 1, 0, 1, 0}));
  EXPECT_EQ(added.Read(), (Values{2, 3, 4, 5}));
  EXPECT_EQ(hidden.Read(), (Values{0, 1, 2, 4, 5}));
  ExpectRefusal(expand(-1, 2, 0), "total_input_tokens=-1; need");
  ExpectRefusal(expand(5, 0, 0), "num_padding_slots_per_request=0; need");
}

}  // namespace
}  // namespace quern
