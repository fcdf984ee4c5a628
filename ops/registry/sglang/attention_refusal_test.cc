// What SGLang's operators of attention refuse: when they are made, and when
// they are prepared.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/registry/sglang/attention_testutil.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

class SglangAttentionRefusalTest : public SglangAttentionFixture {};
QUERN_INSTANTIATE_ISA_TEST(SglangAttentionRefusalTest);

TEST_P(SglangAttentionRefusalTest, RefusesTreesThatItHasNotSeen) {
  SglangCase c;
  c.heads = SglangHeads(16);
  c.trees = true;
  SglangStep<float> s = StepOf<float>(c, {{2, 37}, {2, 9}});
  s.tree_mask = {1, 0, 1, 1, 1, 0, 0, 1};
  SglangBuffers<float> buffers(c, s);
  NamedArgs args;
  std::vector<NamedTensor> named;
  SetUpCall(false, c, s, buffers, {}, args, named);
  const MadeOp op = Make("simd", "extend_attention_cpu", args);
  std::vector<AnyTensorView> tensors;
  ASSERT_EQ(op.tensors.Arrange(named, tensors), absl::OkStatus());
  EXPECT_EQ(op.op->Prepare(tensors, executor_), absl::OkStatus());
  EXPECT_EQ(op.CheckArgs(tensors), absl::OkStatus());
  s.tree_mask[6] = 1;
  ExpectRefusal(op.CheckArgs(tensors),
                "row 3 of tree_mask is not the one that Prepare was given");
  s.extend_lens = {1, 3};
  s.starts = {0, 1};
  ExpectRefusal(op.op->Prepare(tensors, executor_),
                "new tokens of request 0=1; need 2, as tree_mask has drafts");
}

TEST_P(SglangAttentionRefusalTest, RefusesWhenMadeAndWhenPrepared) {
  SglangCase c;
  c.heads = SglangHeads(16);
  SglangStep<float> s = StepOf<float>(c, kSglangExtend);
  SglangBuffers<float> buffers(c, s);
  NamedArgs good;
  std::vector<NamedTensor> named;
  SetUpCall(false, c, s, buffers, {}, good, named);
  const OpDispatcher ops(registry_, OpPolicy());
  const struct {
    const char* name;
    OpArg value;
    absl::StatusCode code;
    const char* words;
  } kCases[] = {
      {"q_extend", TensorMeta{DType::kF32, {9, 4, 8}},
       absl::StatusCode::kInvalidArgument,
       "q_extend is f32[9, 4, 8]; need [9, 4, 16]"},
      {"o_extend", TensorMeta{DType::kF32, {9, 4, 8}},
       absl::StatusCode::kInvalidArgument,
       "o_extend is f32[9, 4, 8]; need [9, 4, 16]"},
      {"k_buffer", TensorMeta{DType::kU8, {480, 2, 16}},
       absl::StatusCode::kInvalidArgument,
       "v_buffer is f32[480, 2, 16]; need u8[480, 2, 16], as k_buffer is"},
      {"seq_lens", TensorMeta{DType::kF32, {3}},
       absl::StatusCode::kUnimplemented, "seq_lens is f32"},
      {"req_pool_indices", TensorMeta{DType::kI64, {2}},
       absl::StatusCode::kInvalidArgument, "seq_lens is i64[3]; need [2]"},
      {"extend_start_loc", TensorMeta{DType::kI32, {4}},
       absl::StatusCode::kInvalidArgument,
       "extend_start_loc is i32[4]; need [3]"},
      {"k_extend", TensorMeta{DType::kF32, {9, 2, 16}},
       absl::StatusCode::kInvalidArgument, "need both new keys and new values"},
      {"sinks", TensorMeta{DType::kF32, {3}},
       absl::StatusCode::kInvalidArgument, "sinks is f32[3]; need [4]"},
      {"is_cross_attn", true, absl::StatusCode::kInvalidArgument,
       "encoder_lens is missing; need it with is_cross_attn"},
      {"tree_mask", TensorMeta{DType::kU8, {81}},
       absl::StatusCode::kInvalidArgument,
       "tree_mask is u8[81]; need u8[27], a row of 3 for each new token"},
  };
  for (const auto& refused : kCases) {
    SCOPED_TRACE(refused.words);
    NamedArgs args;
    for (const auto& arg : good) {
      if (arg.first != refused.name) args.push_back(arg);
    }
    args.emplace_back(refused.name, refused.value);
    ExpectRefusal(ops.Make("extend_attention_cpu", args).status(), refused.code,
                  refused.words);
  }

  const MadeOp op = Make("simd", "extend_attention_cpu", good);
  EXPECT_RAN_ON(*op.op);
  std::vector<AnyTensorView> tensors;
  ASSERT_EQ(op.tensors.Arrange(named, tensors), absl::OkStatus());
  ExpectRefusal(op.CheckArgs(tensors), absl::StatusCode::kFailedPrecondition,
                "has no schedule; need a call of Prepare before");
  const auto prepare = [&] { return op.op->Prepare(tensors, executor_); };
  EXPECT_EQ(prepare(), absl::OkStatus());
  EXPECT_EQ(op.CheckArgs(tensors), absl::OkStatus());
  s.seq_lens[1] += 1;
  ExpectRefusal(op.CheckArgs(tensors), "request 1 has 3 new tokens of 4; Prep");
  ExpectRefusal(prepare(), "need a slot of 480");  // -1 in the table
  s.seq_lens[1] = 81;
  ExpectRefusal(prepare(), "need at most the 80 tokens of req_to_token");
  s.seq_lens[1] = 2;
  ExpectRefusal(prepare(), "q_len");
  s.seq_lens[1] = 3;
  s.pool[0] = kSglangRequests;
  ExpectRefusal(prepare(), "req_pool_indices[0]=6; need a row of the 6");
  s.pool[0] = 3;
  s.starts[2] = 7;
  ExpectRefusal(prepare(), "extend_start_loc[2]=7; need 8");
  // After a refusal, nothing is prepared.
  ExpectRefusal(op.CheckArgs(tensors), absl::StatusCode::kFailedPrecondition,
                "has no schedule");
}

}  // namespace
}  // namespace quern
