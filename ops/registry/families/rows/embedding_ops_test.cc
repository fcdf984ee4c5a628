#include "quern/ops/registry/families/rows/embedding_ops.h"

#include <cmath>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/ops/parallel/vocab_shard.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/data.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

class EmbeddingOpsTest : public IsaTest {
 protected:
  EmbeddingOpsTest() {
    EXPECT_EQ(RegisterEmbeddingOps(registry_), absl::OkStatus());
  }
  // Makes an operator by provider simd, or by provider reference.
  MadeOp Make(const std::string& name, const NamedArgs& args, bool simd) {
    const OpDispatcher ops(registry_, OpPolicy());
    auto made = ops.MakeFrom(simd ? "simd" : "reference", name, args);
    EXPECT_TRUE(made.ok()) << made.status();
    if (simd) {
      const std::lock_guard<std::mutex> lock(proof_);  // ranks are threads
      EXPECT_RAN_ON(*made->op);
    }
    return *std::move(made);
  }
  absl::Status Refusal(const std::string& name, const NamedArgs& args) {
    return OpDispatcher(registry_, OpPolicy()).Make(name, args).status();
  }
  void Run(const MadeOp& made, const std::vector<AnyTensorView>& tensors) {
    ASSERT_EQ(made.op->CheckArgs(tensors), absl::OkStatus());
    made.op->Execute(tensors, executor_);
  }

  OpRegistry registry_;
  InlineExecutor executor_;
  std::mutex proof_;
};
QUERN_INSTANTIATE_ISA_TEST(EmbeddingOpsTest);

// All 65536 logits of each dtype.
TEST_P(EmbeddingOpsTest, LogitsOf16BitsAreThoseOfTheReference) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const double cap : {0.0, 30.0}) {
      for (const double scale : {1.0, 0.3}) {
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << " " << cap << " " << scale);
        const NamedArgs args = {{"logits", TensorMeta{dtype, {256, 256}}},
                                {"soft_cap", cap},
                                {"scale", scale}};
        std::vector<uint16_t> bits[2];
        for (const bool simd : {false, true}) {
          std::vector<uint16_t>& logits = bits[simd ? 1 : 0];
          for (uint32_t i = 0; i < 65536; ++i) {
            logits.push_back(static_cast<uint16_t>(i));
          }
          Run(Make("logits_processor", args, simd),
              {AnyTensorView(dtype, static_cast<void*>(logits.data()), 2,
                             {256, 256}, {256, 1})});
        }
        WithType(dtype, [&](auto type) {
          using T = decltype(type);
          for (uint32_t i = 0; i < 65536; ++i) {
            const double x = ToDouble(FromBits<T>(i));
            const double got = ToDouble(FromBits<T>(bits[1][i]));
            if (std::isnan(x)) {
              ASSERT_TRUE(std::isnan(got)) << i;
            } else {
              ASSERT_EQ(bits[1][i], bits[0][i]) << x;
            }
            if (cap == 0 && scale == 1) {
              ASSERT_EQ(bits[0][i], i);
            }
          }
        });
      }
    }
  }
}

// A result computed by hand, at a logit where leaving out any one rounding
// shows.
TEST_P(EmbeddingOpsTest, LogitsAreRoundedAtEachStep) {
  const NamedArgs args = {{"logits", TensorMeta{DType::kBF16, {1, 1}}},
                          {"soft_cap", 3.0},
                          {"scale", 0.3}};
  for (const bool simd : {false, true}) {
    const AnyMatrix x(DType::kBF16, {3.71875}, 1, 1, 1);
    Run(Make("logits_processor", args, simd), {x.view()});
    // The steps are 1.2421875 after the division by 3, 0.84765625 after tanh,
    // and 2.546875 after the cap.
    EXPECT_EQ(x.doubles(), std::vector<double>{0.765625});
  }
}

TEST_P(EmbeddingOpsTest, GathersRowsOfAnyDType) {
  TestRng rng;
  const std::vector<int32_t> rows = {4, 0, 4};
  for (const DType dtype :
       {DType::kF32, DType::kBF16, DType::kF16, DType::kF8E4M3, DType::kF8E5M2,
        DType::kI32, DType::kI8, DType::kU8}) {
    const NamedArgs args = {{"x", TensorMeta{dtype, {5, 7}}},
                            {"rows", TensorMeta{DType::kI32, {3}}}};
    const auto size = static_cast<int64_t>(SizeOf(dtype));
    std::vector<uint8_t> x;
    for (int64_t i = 0; i < 5 * 9 * size; ++i) {
      x.push_back(static_cast<uint8_t>(rng.Integer(0, 255)));
    }
    for (const bool simd : {false, true}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " " << simd);
      std::vector<uint8_t> out(static_cast<size_t>(3 * 8 * size), 0x55);
      Run(Make("gather_rows", args, simd),
          {AnyTensorView(dtype, static_cast<const void*>(x.data()), 2, {5, 7},
                         {9, 1}),
           DenseVector<const int32_t>(rows.data(), 3),
           AnyTensorView(dtype, static_cast<void*>(out.data()), 2, {3, 7},
                         {8, 1})});
      for (int64_t i = 0; i < 3 * 8 * size; ++i) {
        const int64_t row = rows[static_cast<size_t>(i / (8 * size))];
        const int64_t byte = i % (8 * size);
        ASSERT_EQ(out[static_cast<size_t>(i)],
                  byte < 7 * size
                      ? x[static_cast<size_t>(row * 9 * size + byte)]
                      : 0x55)
            << i;
      }
    }
  }
}

// Lookups in a table over ranks equal those in the whole table of 70 original
// ids and 3 added ids.
TEST_P(EmbeddingOpsTest, LooksUpRowsOfATableOverRanks) {
  TestRng rng;
  constexpr int64_t kVocab = 70, kAdded = 3, kHidden = 17;
  const std::vector<double> table =
      ToDoubles(UniformReals(rng, (kVocab + kAdded) * kHidden));
  const std::vector<int32_t> ids = {69, 0, 72, 63, 64, 70, 0};
  const auto tokens = static_cast<int64_t>(ids.size());
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const AnyMatrix whole(dtype, table, kVocab + kAdded, kHidden, kHidden);
    for (const int ranks : {1, 2, 4}) {
      RunRanks(ranks, [&](ThreadCommunicator& c) {
        VocabSpec vocab;
        vocab.original = kVocab;
        vocab.added = kAdded;
        const auto shard = VocabShard::Create(vocab, c.rank(), c.size());
        ASSERT_TRUE(shard.ok()) << shard.status();
        std::vector<double> own(static_cast<size_t>(shard->rows() * kHidden));
        for (int64_t id = 0; id < kVocab + kAdded; ++id) {
          const int64_t row = shard->RowOf(id);
          for (int64_t i = 0; row >= 0 && i < kHidden; ++i) {
            own[static_cast<size_t>(row * kHidden + i)] =
                table[static_cast<size_t>(id * kHidden + i)];
          }
        }
        const AnyMatrix weight(dtype, own, shard->rows(), kHidden, kHidden + 1);
        for (const bool simd : {false, true}) {
          const AnyMatrix out(dtype, tokens, kHidden, kHidden + 2);
          Run(Make("vocab_parallel_embedding",
                   {{"ids", TensorMeta{DType::kI32, {tokens}}},
                    {"weight", TensorMeta{dtype, {shard->rows(), kHidden}}},
                    {"ranks", &c},
                    {"vocab", kVocab},
                    {"added", kAdded}},
                   simd),
              {DenseVector<const int32_t>(ids.data(), tokens),
               weight.const_view(), out.view()});
          const std::vector<double> rows = whole.doubles();
          std::vector<double> want;
          for (const int32_t id : ids) {
            want.insert(want.end(), rows.begin() + id * kHidden,
                        rows.begin() + (id + 1) * kHidden);
          }
          EXPECT_EQ(out.doubles(), want) << c.rank() << c.size() << simd;
        }
      });
    }
  }
  SelfCommunicator self;
  const TensorMeta some = {DType::kI32, {4}}, weight = {DType::kF32, {73, 8}};
  ExpectRefusal(Refusal("vocab_parallel_embedding", {{"ids", some},
                                                     {"weight", weight},
                                                     {"ranks", &self},
                                                     {"vocab", int64_t{70}}}),
                "rows of weight=73");
  ExpectRefusal(
      Refusal("vocab_parallel_embedding",
              {{"ids", some}, {"weight", weight}, {"vocab", int64_t{70}}}),
      "vocab=70, added=0 without ranks");
}

TEST_P(EmbeddingOpsTest, LooksUpRowsOfATable) {
  TestRng rng;
  const std::vector<int32_t> ids = {2, 2, 0};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const NamedArgs args = {{"ids", TensorMeta{DType::kI32, {3}}},
                            {"weight", TensorMeta{dtype, {3, 17}}}};
    const AnyMatrix weight(dtype, ToDoubles(UniformReals(rng, 3 * 17)), 3, 17,
                           19);
    const auto table = weight.bits();
    for (const bool simd : {false, true}) {
      const AnyMatrix out(dtype, 3, 17, 18);
      Run(Make("vocab_parallel_embedding", args, simd),
          {DenseVector<const int32_t>(ids.data(), 3), weight.const_view(),
           out.view()});
      const auto bits = out.bits();
      for (size_t i = 0; i < bits.size(); ++i) {
        ASSERT_EQ(bits[i],
                  table[static_cast<size_t>(ids[i / 17]) * 17 + i % 17]);
      }
    }
  }
}

TEST_P(EmbeddingOpsTest, Refuse) {
  const TensorMeta ids = {DType::kI32, {2}}, table = {DType::kF16, {3, 4}};
  const auto unimplemented = absl::StatusCode::kUnimplemented;
  ExpectRefusal(
      Refusal("logits_processor", {{"logits", TensorMeta{DType::kI8, {3, 4}}}}),
      unimplemented, "logits_processor: logits is i8; need f32 or bf16 or f16");
  ExpectRefusal(
      Refusal("logits_processor", {{"logits", TensorMeta{DType::kF16, {4}}}}),
      "logits_processor: logits is f16[4]; need [n, n]");
  ExpectRefusal(
      Refusal("logits_processor", {{"logits", table}, {"soft_cap", -1.0}}),
      "soft_cap=-1");
  ExpectRefusal(
      Refusal("logits_processor", {{"logits", table}, {"scale", 1e300}}),
      "scale=inf");
  ExpectRefusal(
      Refusal("vocab_parallel_embedding",
              {{"ids", ids}, {"weight", TensorMeta{DType::kF8E4M3, {3, 4}}}}),
      unimplemented, "weight_dtype is f8e4m3");
  ExpectRefusal(Refusal("gather_rows", {{"x", table}, {"rows", table}}),
                "gather_rows: rows is f16[3, 4]; need [n]");

  const AnyMatrix w(DType::kF16, std::vector<double>(12), 3, 4, 4);
  const AnyMatrix out(DType::kF16, 2, 4, 4), f32(DType::kF32, 2, 4, 4);
  std::vector<int32_t> at = {0, 3};
  const auto view = DenseVector<const int32_t>(at.data(), 2);
  for (const bool simd : {false, true}) {
    const MadeOp rows =
        Make("gather_rows", {{"x", table}, {"rows", ids}}, simd);
    ExpectRefusal(rows.op->CheckArgs({w.const_view(), view, out.view()}),
                  "rows[1]=3; need 0 <= row < 3");
    ExpectRefusal(rows.op->CheckArgs({w.const_view(), out.view(), view}),
                  "rows");
    const MadeOp embedding = Make("vocab_parallel_embedding",
                                  {{"ids", ids}, {"weight", table}}, simd);
    ExpectRefusal(embedding.op->CheckArgs({view, w.const_view(), out.view()}),
                  "ids[1]=3; need 0 <= id < 3");
    ExpectRefusal(embedding.op->CheckArgs({view, w.const_view()}),
                  "tensors=2; need 3");
    const MadeOp logits =
        Make("logits_processor", {{"logits", TensorMeta{DType::kF16, {2, 4}}}},
             simd);
    EXPECT_EQ(logits.op->CheckArgs({out.view()}), absl::OkStatus());
    ExpectRefusal(logits.op->CheckArgs({f32.view()}), "logits is f32");
    ExpectRefusal(logits.op->CheckArgs({out.const_view()}), "logits");
  }
}

}  // namespace
}  // namespace quern
