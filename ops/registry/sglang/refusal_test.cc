// What SGLang's operators of packing and attention refuse by their own names:
// one argument of the registry's example is changed at a time.

#include "quern/testing/refusal.h"

#include <cstddef>
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
#include "quern/ops/registry/sglang/sglang_ops.h"

namespace quern {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
constexpr char kDecode[] = "decode_attention_cpu";
constexpr char kExtend[] = "extend_attention_cpu";

TensorMeta I32(const std::vector<int64_t>& extents) {
  return {DType::kI32, extents};
}
TensorMeta I64(const std::vector<int64_t>& extents) {
  return {DType::kI64, extents};
}
TensorMeta F32(const std::vector<int64_t>& extents) {
  return {DType::kF32, extents};
}
TensorMeta BF16(const std::vector<int64_t>& extents) {
  return {DType::kBF16, extents};
}

struct Case {
  const char* op;
  NamedArgs changed;
  const char* words;  // behind the operator's name
  absl::StatusCode code = kInvalid;
};

// The example of f32 with other values, or with more arguments.
NamedArgs Changed(const OpRegistry& registry, const Case& c) {
  NamedArgs args = registry.Find(c.op)->example(DType::kF32);
  for (const auto& [name, value] : c.changed) {
    bool found = false;
    for (auto& [field, old] : args) {
      if (field != name) continue;
      old = value;
      found = true;
    }
    if (!found) args.emplace_back(name, value);
  }
  return args;
}

class SglangRefusalTest : public testing::Test {
 protected:
  SglangRefusalTest() {
    EXPECT_EQ(RegisterSglangPackOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterSglangAttentionOps(registry_), absl::OkStatus());
  }
  void ExpectRefused(const std::vector<Case>& cases) {
    const OpDispatcher ops(registry_, OpPolicy());
    for (const Case& c : cases) {
      SCOPED_TRACE(c.words);
      const std::string words = std::string(c.op) + ": " + c.words;
      const absl::Status made = ops.Make(c.op, Changed(registry_, c)).status();
      ExpectRefusal(made, c.code, words);
      EXPECT_EQ(made.message().rfind(words, 0), 0u) << made;
    }
  }
  MadeOp Make(const std::string& provider, const std::string& op,
              const NamedArgs& args) {
    auto made =
        OpDispatcher(registry_, OpPolicy()).MakeFrom(provider, op, args);
    EXPECT_TRUE(made.ok()) << made.status();
    return *std::move(made);
  }

  OpRegistry registry_;
};

TEST_F(SglangRefusalTest, AttentionNamesTheArgument) {
  ExpectRefused({
      {kDecode,
       {{"req_to_token", I32({4})}},
       "req_to_token is i32[4]; need [n, n]"},
      {kDecode,
       {{"req_to_token", F32({4, 32})}},
       "req_to_token is f32",
       kUnimplemented},
      {kDecode, {{"seq_lens", I64({2, 1})}}, "seq_lens is i64[2, 1]; need [2]"},
      {kDecode,
       {{"req_pool_indices", I64({3})}},
       "req_pool_indices is i64[3]; need [2"},
      {kDecode,
       {{"encoder_lens", I64({3})}},
       "encoder_lens is i64[3]; need [2]"},
      {kDecode,
       {{"is_cross_attn", true}},
       "encoder_lens is missing; need it with is_cross_attn"},
      {kDecode,
       {{"seq_lens", I64({3})}, {"req_pool_indices", I64({3})}},
       "req_pool_indices is i64[3]; need [2]"},
      {kDecode,
       {{"query", F32({2, 2, 8})}},
       "query is f32[2, 2, 8]; need [2, 2, 16]"},
      {kDecode,
       {{"output", F32({2, 2, 8})}},
       "output is f32[2, 2, 8]; need [2, 2, 16]"},
      {kDecode,
       {{"v_buffer", F32({63, 1, 16})}},
       "v_buffer is f32[63, 1, 16]; need f32[64, "},
      {kDecode,
       {{"k_buffer", TensorMeta{DType::kI8, {64, 1, 16}}},
        {"v_buffer", TensorMeta{DType::kI8, {64, 1, 16}}}},
       "k_buffer is i8",
       kUnimplemented},
      {kDecode, {{"key", F32({2, 1, 16})}}, "need both new keys and new"},
      {kDecode,
       {{"key", F32({3, 1, 16})}, {"value", F32({2, 1, 16})}},
       "key is f32[3, 1, 16]; need [2, 1, 16], as the buffers are"},
      {kDecode,
       {{"key", F32({2, 1, 16})}, {"value", BF16({2, 1, 16})}},
       "value is bf16[2, 1, 16]; need f32[2, 1, 16]"},
      {kDecode,
       {{"key", F32({2, 1, 16})}, {"value", F32({2, 1, 16})}},
       "loc is missing; need i64[2], the slots of key and value"},
      {kDecode,
       {{"key", F32({2, 1, 16})},
        {"value", F32({2, 1, 16})},
        {"loc", I32({2})}},
       "loc is i32[2]; need i64[2]"},
      {kDecode, {{"sinks", F32({3})}}, "sinks is f32[3]; need [2]"},
      {kDecode, {{"sinks", I32({2})}}, "sinks is i32", kUnimplemented},
      {kExtend,
       {{"extend_seq_lens", I32({3})}},
       "extend_seq_lens is i32[3]; need [2]"},
      {kExtend,
       {{"extend_seq_lens", F32({2})}},
       "extend_seq_lens is f32",
       kUnimplemented},
      {kExtend,
       {{"extend_start_loc", I32({1})}},
       "extend_start_loc is i32[1]; need [2"},
      {kExtend,
       {{"k_extend", F32({4, 2, 16})}},
       "v_extend is f32[4, 1, 16]; need f32[4, 2, 16], as k_extend is"},
  });
}

TEST_F(SglangRefusalTest, PackingNamesTheOperatorThatWasCalled) {
  for (const char* op : {"convert_weight_packed", "pack_vnni"}) {
    ExpectRefused({
        {op, {{"weight", BF16({48})}}, "weight has rank 1; need [n, k] or"},
        {op, {{"weight", BF16({1, 2, 32, 32})}}, "weight has rank 4; need"},
        {op, {{"weight", F32({32, 32})}}, "dtype=f32", kUnimplemented},
        {op, {{"weight", BF16({48, 33})}}, "bf16 w[n=48, k=33]; need n % 16"},
    });
    const NamedArgs args = {{"weight", TensorMeta{DType::kI8, {32, 32}}}};
    std::vector<int8_t> w(32 * 36), out(32 * 40);
    const AnyTensorView weight = DenseMatrix<const int8_t>(w.data(), 32, 32);
    const AnyTensorView packed = DenseMatrix(out.data(), 32, 36);
    const std::string name = std::string(op) + ": ";
    for (const char* provider : {"simd", "reference"}) {
      const MadeOp made = Make(provider, op, args);
      EXPECT_EQ(made.CheckArgs({weight, packed}), absl::OkStatus());
      const std::pair<std::vector<AnyTensorView>, std::string> cases[] = {
          {{DenseMatrix<const int8_t>(w.data(), 32, 31), packed}, "weight is"},
          {{weight, DenseMatrix(out.data(), 32, 35)}, "out is [32, 35]"},
          {{weight, DenseMatrix<const int8_t>(out.data(), 32, 36)},
           "out is read-only"},
          {{weight, DenseMatrix(w.data(), 32, 36)}, "out overlaps weight"},
          {{weight, MatrixView<int8_t>(out.data(), {32, 36}, {40, 1})},
           "out has gaps; need a dense tensor"},
      };
      for (const auto& [tensors, words] : cases) {
        ExpectRefusal(made.CheckArgs(tensors), name + words);
      }
    }
    // Few columns are transposed.
    const MadeOp few = Make("reference", op, {{"weight", BF16({3, 5})}});
    std::vector<BFloat16> rows(16);
    std::vector<float> columns(16);
    const AnyTensorView three = DenseMatrix<const BFloat16>(rows.data(), 3, 5);
    EXPECT_EQ(few.CheckArgs({three, DenseMatrix(columns.data(), 5, 3)}),
              absl::OkStatus());
    ExpectRefusal(few.CheckArgs({three, DenseMatrix(columns.data(), 3, 5)}),
                  name + "out is [3, 5]; need [5, 3]");
    ExpectRefusal(few.CheckArgs({DenseMatrix<const BFloat16>(rows.data(), 5, 3),
                                 DenseMatrix(columns.data(), 5, 3)}),
                  name + "weight is [5, 3]; need [3, 5]");
  }
}

TEST_F(SglangRefusalTest, CompensationNamesTheArgument) {
  constexpr char kOp[] = "s8s8_compensation";
  ExpectRefused({
      {kOp,
       {{"packed", TensorMeta{DType::kU8, {32, 68}}}},
       "packed is u8",
       kUnimplemented},
      {kOp,
       {{"packed", TensorMeta{DType::kI8, {32}}}},
       "packed is i8[32]; need [n"},
      {kOp,
       {{"packed", TensorMeta{DType::kI8, {32, 3}}}},
       "packed is i8[32, 3]; need [32"},
  });
  const MadeOp made =
      Make("simd", kOp, {{"packed", TensorMeta{DType::kI8, {32, 68}}}});
  std::vector<int8_t> packed(32 * 72);
  std::vector<int32_t> sums(32);
  const AnyTensorView from = DenseMatrix<const int8_t>(packed.data(), 32, 68);
  const AnyTensorView to = DenseVector(sums.data(), 32);
  EXPECT_EQ(made.CheckArgs({from, to}), absl::OkStatus());
  ExpectRefusal(
      made.CheckArgs(
          {MatrixView<const int8_t>(packed.data(), {32, 68}, {72, 1}), to}),
      "s8s8_compensation: row stride of packed=72; need 68");
  ExpectRefusal(made.CheckArgs({from, DenseVector(sums.data(), 31)}),
                "s8s8_compensation: out is [31]; need [32]");
}

}  // namespace
}  // namespace quern
