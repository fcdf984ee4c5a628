// SGLang's operators of speculation by their names: each argument reaches its
// place in the plan, whose tests are in ops/speculation, and refusals have the
// words of the schema.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/registry/sglang/sglang_ops.h"
#include "quern/ops/speculation/numbers_testutil.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Values = std::vector<int64_t>;
using Tensors = std::vector<std::pair<const char*, const Numbers*>>;
using Integers = std::vector<std::pair<const char*, int64_t>>;
constexpr DType kI32 = DType::kI32;
constexpr DType kI64 = DType::kI64;
constexpr DType kU8 = DType::kU8;

class SglangSpeculationTest : public testing::Test {
 protected:
  SglangSpeculationTest() {
    EXPECT_EQ(RegisterSglangSpeculationOps(registry_), absl::OkStatus());
  }
  // Makes the operator for these tensors, binds and runs it; `out` is what it
  // returns, if anything.
  absl::Status Run(const char* op, const Tensors& tensors,
                   const Integers& integers, const Numbers* out = nullptr) {
    NamedArgs args;
    std::vector<NamedTensor> named;
    for (const auto& [name, numbers] : tensors) {
      const AnyTensorView view = numbers->view();
      TensorMeta meta;
      meta.dtype = view.dtype();
      for (int d = 0; d < view.rank(); ++d) {
        meta.extents.push_back(view.extent(d));
      }
      args.emplace_back(name, meta);
      named.emplace_back(name, view);
    }
    for (const auto& [name, value] : integers) args.emplace_back(name, value);
    if (out != nullptr) named.emplace_back("out", out->view());
    const OpDispatcher ops(registry_, OpPolicy());
    const auto made = ops.Make(op, args);
    if (!made.ok()) return made.status();
    EXPECT_EQ(made->provider, "reference");
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

TEST_F(SglangSpeculationTest, Trees) {
  const Numbers parents(kI64, {-1, 0, 1}, 3), selected(kI64, {0, 1, 2}, 3),
      length(kI64, {5}), mask(kU8, Values(36, 1)), positions(kI64, Values(4)),
      index(kI64, Values(4), 4), child(kI64, Values(4), 4),
      sibling(kI64, Values(4), 4);
  const auto build = [&](int64_t mode, const Numbers& to) {
    return Run("build_tree_kernel_efficient_cpu",
               {{"parent_list", &parents},
                {"selected_index", &selected},
                {"verified_seq_len", &length},
                {"tree_mask", &to},
                {"positions", &positions},
                {"retrive_index", &index},
                {"retrive_next_token", &child},
                {"retrive_next_sibling", &sibling}},
               {{"topk", 2},
                {"depth", 2},
                {"draft_token_num", 4},
                {"tree_mask_mode", mode}});
  };
  ASSERT_EQ(build(0, mask), absl::OkStatus());
  EXPECT_EQ(positions.Read(), (Values{5, 6, 6, 7}));
  EXPECT_EQ(index.Read(), (Values{0, 1, 2, 3}));
  EXPECT_EQ(child.Read(), (Values{1, 3, -1, -1}));
  EXPECT_EQ(sibling.Read(), (Values{-1, 2, -1, -1}));
  const Numbers square(kU8, Values(16, 1));
  ASSERT_EQ(build(1, square), absl::OkStatus());
  EXPECT_EQ(square.Read(), (Values{1, 0, 0, 0, 1, 1, 0, 0,  //
                                   1, 0, 1, 0, 1, 1, 0, 1}));
  ExpectRefusal(build(2, square),
                "build_tree_kernel_efficient_cpu: tree_mask_mode=2; need 0");

  const Numbers found(kI64, Values(4)), found_index(kI64, Values(4), 4),
      found_child(kI64, Values(4), 4), found_sibling(kI64, Values(4), 4);
  const auto find = [&](int64_t batch, int64_t nodes) {
    return Run("reconstruct_indices_from_tree_mask_cpu",
               {{"tree_mask", &square},
                {"verified_seq_len", &length},
                {"positions", &found},
                {"retrive_index", &found_index},
                {"retrive_next_token", &found_child},
                {"retrive_next_sibling", &found_sibling}},
               {{"batch_size", batch}, {"draft_token_num", nodes}});
  };
  ASSERT_EQ(find(1, 4), absl::OkStatus());
  EXPECT_EQ(found.Read(), positions.Read());
  EXPECT_EQ(found_index.Read(), index.Read());
  EXPECT_EQ(found_child.Read(), child.Read());
  EXPECT_EQ(found_sibling.Read(), sibling.Read());
  ExpectRefusal(find(-1, 4), "batch_size=-1; need 0 <= batch_size");
  ExpectRefusal(find(1, 0), "draft_token_num=0; need 1 <= draft_token_num");

  const Numbers predicts(kI32, Values(4, -1)), accepted(kI32, Values(3, -1), 3),
      count(kI32, {9}), candidates(kI64, {9, 7, 8, 5}, 4),
      target(kI64, {7, 5, 0, 3}, 4);
  ASSERT_EQ(Run("verify_tree_greedy_cpu",
                {{"predicts", &predicts},
                 {"accept_index", &accepted},
                 {"accept_token_num", &count},
                 {"candidates", &candidates},
                 {"retrive_index", &index},
                 {"retrive_next_token", &child},
                 {"retrive_next_sibling", &sibling},
                 {"target_predict", &target}},
                {}),
            absl::OkStatus());
  EXPECT_EQ(predicts.Read(), (Values{7, 5, -1, 3}));
  EXPECT_EQ(accepted.Read(), (Values{0, 1, 3}));
  EXPECT_EQ(count.Read(), (Values{2}));
}

TEST_F(SglangSpeculationTest, Slots) {
  const Numbers rows(kI64, {1, 0}), start(kI32, {1, 0}), end(kI32, {3, 1}),
      pool(kI32, {10, 11, 12, 13, 14, 15, 16, 17}, 4), out(kI64, Values(3)),
      given(kI64, {91, 92, 93});
  const auto copy = [&](const char* op, const Numbers& slots, int64_t length) {
    return Run(op,
               {{"req_pool_indices", &rows},
                {"req_to_token", &pool},
                {"start_offset", &start},
                {"end_offset", &end},
                {"out_cache_loc", &slots}},
               {{"pool_len", length}});
  };
  ASSERT_EQ(copy("assign_extend_cache_locs_cpu", out, 4), absl::OkStatus());
  EXPECT_EQ(out.Read(), (Values{15, 16, 10}));
  ASSERT_EQ(copy("assign_req_to_token_pool_cpu", given, 4), absl::OkStatus());
  EXPECT_EQ(pool.Read(), (Values{93, 11, 12, 13, 14, 91, 92, 17}));
  ExpectRefusal(copy("assign_extend_cache_locs_cpu", out, 5),
                "assign_extend_cache_locs_cpu: req_to_token is [2, 4]");

  const Numbers lengths(kI64, {1, 0}), drafts(kI64, Values(4)),
      expanded(kI32, Values(16, -1), 4);
  const auto list = [&](int64_t steps) {
    return Run("assign_draft_cache_locs_contiguous_cpu",
               {{"req_pool_indices", &rows},
                {"req_to_token", &pool},
                {"seq_lens", &lengths},
                {"out_cache_loc", &drafts}},
               {{"pool_len", 4}, {"topk", 2}, {"num_steps", steps}});
  };
  const auto expand = [&](int64_t topk) {
    return Run("build_draft_decode_metadata_cpu",
               {{"req_to_token", &pool},
                {"req_pool_indices", &rows},
                {"seq_lens", &lengths}},
               {{"topk", topk}, {"num_steps", 1}, {"pool_len", 4}}, &expanded);
  };
  ASSERT_EQ(list(1), absl::OkStatus());
  EXPECT_EQ(drafts.Read(), (Values{91, 92, 93, 11}));
  ExpectRefusal(list(2), "seq_lens[0]=1; need 0 <= seq_lens[i] <= 0");
  ASSERT_EQ(expand(2), absl::OkStatus());
  EXPECT_EQ(expanded.Read(), (Values{14, 91, -1, -1, 14, 92, -1, -1,  //
                                     93, -1, -1, -1, 11, -1, -1, -1}));
  ExpectRefusal(expand(0), "build_draft_decode_metadata_cpu: topk=0; need 1");
}

TEST_F(SglangSpeculationTest, Tokens) {
  const Numbers tokens(kI32, {1, 2, 3, 4, 5, 6}, 3), lengths(kI32, {3, 1}),
      bonus(kI32, Values(2));
  const auto fill = [&](int64_t stride) {
    return Run("fill_bonus_tokens_cpu",
               {{"accept_tokens", &tokens},
                {"accept_lens", &lengths},
                {"bonus_tokens", &bonus}},
               {{"accept_stride", stride}});
  };
  ASSERT_EQ(fill(3), absl::OkStatus());
  EXPECT_EQ(bonus.Read(), (Values{3, 4}));
  ExpectRefusal(fill(-1), "accept_stride=-1; need");

  const Numbers index(kI32, {2, -1, 0}), slots(kI64, {50, 51, 52}),
      out(kI64, Values(3));
  ASSERT_EQ(Run("fill_accept_out_cache_loc_cpu",
                {{"accept_index", &index},
                 {"out_cache_loc", &slots},
                 {"accept_out_cache_loc", &out}},
                {}),
            absl::OkStatus());
  EXPECT_EQ(out.Read(), (Values{52, 50, 0}));

  const Numbers ids(kI64, {1, 2, 3, 4}), starts(kI32, {0, 2}),
      counts(kI64, {2, 2}), next(kI64, {70, 80}), places(kI64, {0, 3});
  ASSERT_EQ(Run("rotate_input_ids_cpu",
                {{"input_ids", &ids},
                 {"extend_start_loc", &starts},
                 {"extend_seq_lens", &counts},
                 {"topk_index", &next},
                 {"select_index", &places}},
                {}),
            absl::OkStatus());
  EXPECT_EQ(ids.Read(), (Values{70, 2, 4, 80}));
}

}  // namespace
}  // namespace quern
