// The objects of quern_named.h, from the operators that fill them to those that
// read them. python/tests/torch_names_test.py has the numbers of attention and
// experts.

#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/quern_named.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/core/dtype.h"

namespace quern {
namespace {

using Operands = std::vector<quern_operand>;

class NamedTest : public testing::Test {
 protected:
  quern_op* Make(const char* name, const std::vector<quern_argument>& of) {
    quern_op* op = nullptr;
    EXPECT_C_OK(quern_op_create(library_.get(), name, nullptr, of.data(),
                                of.size(), &op),
                library_.get());
    return op;
  }
  quern_onednn_handler* Handler() {
    quern_onednn_handler* handler = nullptr;
    EXPECT_C_OK(quern_onednn_handler_create(library_.get(), &handler),
                library_.get());
    return handler;
  }
  // Packs b_, times `by`, into the handler.
  void Fill(quern_onednn_handler* handler, float by) {
    for (int i = 0; i < 6; ++i) b_[i] = by * static_cast<float>(i);
    quern_op* pack =
        Make("create_onednn_mm", {quern_tensor_argument("b", b_tensor_.get()),
                                  quern_object_argument("handler", handler)});
    const quern_operand b = {"b", b_tensor_.get(), QUERN_READ_ONLY};
    EXPECT_C_OK(quern_op_prepare(pack, &b, 1, nullptr), pack);
    EXPECT_C_OK(quern_destroy(pack), pack);
  }
  quern_op* Product(quern_onednn_handler* handler) {
    return Make("onednn_mm", {quern_tensor_argument("c", c_tensor_.get()),
                              quern_tensor_argument("a", a_tensor_.get()),
                              quern_object_argument("handler", handler)});
  }
  void ExpectProduct(quern_op* op, float by) {
    const quern_operand step[] = {{"c", c_tensor_.get(), 0},
                                  {"a", a_tensor_.get(), QUERN_READ_ONLY}};
    int64_t bytes = 0;
    ASSERT_C_OK(quern_op_workspace_bytes(op, 1, nullptr, &bytes), op);
    std::vector<uint8_t> memory(static_cast<size_t>(bytes) + QUERN_ALIGNMENT);
    auto at = reinterpret_cast<uintptr_t>(memory.data());
    at = (at + QUERN_ALIGNMENT - 1) / QUERN_ALIGNMENT * QUERN_ALIGNMENT;
    EXPECT_C_OK(quern_op_execute(op, step, 2, reinterpret_cast<void*>(at),
                                 static_cast<size_t>(bytes), nullptr),
                op);
    EXPECT_EQ(c_[0], by * (0 * 1 + 2 * 10 + 4 * 100));
    EXPECT_EQ(c_[1], by * (1 * 1 + 3 * 10 + 5 * 100));
  }

  LibraryInC library_;
  float a_[3] = {1, 10, 100};
  float b_[6] = {};
  float c_[2] = {};
  TensorInC a_tensor_{DType::kF32, a_, {1, 3}};
  TensorInC b_tensor_{DType::kF32, b_, {3, 2}};
  TensorInC c_tensor_{DType::kF32, c_, {1, 2}};
};

TEST_F(NamedTest, AHandlerServesTheOperatorsThatWereMadeWithIt) {
  quern_onednn_handler* const handler = Handler();
  EXPECT_EQ(ExplanationOf(handler), "no weights yet");
  Fill(handler, 1);
  EXPECT_EQ(ExplanationOf(handler), "f32 weights, n=2, k=3");
  quern_op* const first = Product(handler);
  Fill(handler, -2);
  quern_op* const second = Product(handler);
  // An operator goes on with what the handler had when it was made.
  ExpectProduct(first, 1);
  ExpectProduct(second, -2);
  EXPECT_C_OK(quern_destroy(handler), handler);
  ExpectProduct(first, 1);
}

TEST_F(NamedTest, RefusesHandlersThatAreEmptyDestroyedOrNone) {
  quern_onednn_handler* const handler = Handler();
  const auto refused = [&](void* object, quern_status code,
                           const std::string& words) {
    const quern_argument of[] = {quern_tensor_argument("c", c_tensor_.get()),
                                 quern_tensor_argument("a", a_tensor_.get()),
                                 quern_object_argument("handler", object)};
    quern_op* op = nullptr;
    ExpectRefused(
        quern_op_create(library_.get(), "onednn_mm", nullptr, of, 3, &op),
        library_.get(), code, words);
  };
  refused(handler, QUERN_INVALID_ARGUMENT, "handler");
  quern_scheduler_metadata* metadata = nullptr;
  EXPECT_C_OK(quern_scheduler_metadata_create(library_.get(), &metadata),
              library_.get());
  EXPECT_EQ(ExplanationOf(metadata), "a schedule of 0 sequences");
  refused(metadata, QUERN_INVALID_ARGUMENT, "handler");
  EXPECT_C_OK(quern_destroy(handler), handler);
  refused(handler, QUERN_FAILED_PRECONDITION, "was destroyed");
  ExpectRefused(quern_onednn_handler_create(library_.get(), nullptr),
                library_.get(), QUERN_INVALID_ARGUMENT, "the result is null");
}

TEST_F(NamedTest, AHandlerThatWasDestroyedIsNotFilled) {
  quern_onednn_handler* const handler = Handler();
  quern_op* const pack =
      Make("create_onednn_mm", {quern_tensor_argument("b", b_tensor_.get()),
                                quern_object_argument("handler", handler)});
  EXPECT_C_OK(quern_destroy(handler), handler);
  const quern_operand b = {"b", b_tensor_.get(), QUERN_READ_ONLY};
  ExpectRefused(quern_op_prepare(pack, &b, 1, nullptr), pack,
                QUERN_FAILED_PRECONDITION, "was destroyed");
}

class ExpertsTest : public NamedTest {
 protected:
  quern_linear_weights* Weights(quern_library* library) {
    quern_linear_weights_options options = {};
    options.size = sizeof(options);
    options.n = 2;
    options.k = 3;
    quern_linear_source source = {};
    source.layout = "kn";
    source.codes = b_tensor_.get();
    quern_linear_weights* weights = nullptr;
    EXPECT_C_OK(quern_linear_weights_pack(library, &options, &source, 1,
                                          sizeof(source), nullptr, &weights),
                library);
    return weights;
  }
  void ExpectExpertsRefused(quern_linear_weights* const* gate_up,
                            quern_linear_weights* const* down, size_t count,
                            quern_status code, const std::string& words) {
    quern_expert_weights* experts = nullptr;
    ExpectRefused(quern_expert_weights_create(library_.get(), gate_up, down,
                                              count, &experts),
                  library_.get(), code, words);
    EXPECT_EQ(experts, nullptr);
  }
};

TEST_F(ExpertsTest, ShareTheirWeights) {
  quern_linear_weights* const both[] = {Weights(library_.get()),
                                        Weights(library_.get())};
  quern_expert_weights* experts = nullptr;
  ASSERT_C_OK(
      quern_expert_weights_create(library_.get(), both, both, 2, &experts),
      library_.get());
  for (quern_linear_weights* weights : both) {
    EXPECT_C_OK(quern_destroy(weights), weights);
  }
  EXPECT_EQ(ExplanationOf(experts),
            "2 experts, gate_up: f32 weights, n=2, k=3; down: f32 weights, "
            "n=2, k=3");
  EXPECT_C_OK(quern_destroy(experts), experts);
}

// Tasks of experts read the order of routes that other tasks wrote. So an
// executor that leaves tasks out must not leave that order unwritten.
TEST_F(ExpertsTest, AreSafeOnAnExecutorThatLeavesTasksOut) {
  const auto weights = [&](int64_t n, int64_t k, int32_t gated) {
    quern_linear_weights_options options = {};
    options.size = sizeof(options);
    options.n = n;
    options.k = k;
    options.gated = gated;
    std::vector<float> values(static_cast<size_t>(n * k), 0.5f);
    TensorInC codes(DType::kF32, values.data(), {n, k});
    quern_linear_source source = {};
    source.codes = codes.get();
    quern_linear_weights* made = nullptr;
    EXPECT_C_OK(quern_linear_weights_pack(library_.get(), &options, &source, 1,
                                          sizeof(source), nullptr, &made),
                library_.get());
    return made;
  };
  quern_linear_weights* const gate_up[] = {weights(8, 6, 1), weights(8, 6, 1)};
  quern_linear_weights* const down[] = {weights(6, 4, 0), weights(6, 4, 0)};
  quern_expert_weights* experts = nullptr;
  ASSERT_C_OK(
      quern_expert_weights_create(library_.get(), gate_up, down, 2, &experts),
      library_.get());

  constexpr int64_t kTokens = 5000, kTopK = 2;  // routes for several tasks
  std::vector<float> x(kTokens * 6, 0.25f), routes(kTokens * kTopK, 0.5f);
  std::vector<float> out(x.size()), want(x.size());
  std::vector<int32_t> ids(kTokens * kTopK);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % 2);
  TensorInC x_in_c(DType::kF32, x.data(), {kTokens, 6});
  TensorInC routes_in_c(DType::kF32, routes.data(), {kTokens, kTopK});
  TensorInC ids_in_c(DType::kI32, ids.data(), {kTokens, kTopK});
  TensorInC out_in_c(DType::kF32, out.data(), {kTokens, 6});
  quern_op* const op =
      Make("fused_experts_cpu",
           {quern_tensor_argument("hidden_states", x_in_c.get()),
            quern_object_argument("experts", experts),
            quern_tensor_argument("topk_weights", routes_in_c.get()),
            quern_tensor_argument("topk_ids", ids_in_c.get())});
  const quern_operand step[] = {
      {"hidden_states", x_in_c.get(), QUERN_READ_ONLY},
      {"topk_weights", routes_in_c.get(), QUERN_READ_ONLY},
      {"topk_ids", ids_in_c.get(), QUERN_READ_ONLY},
      {"out", out_in_c.get(), 0}};
  quern_executor_functions functions = {};
  functions.size = sizeof(functions);
  functions.num_workers = [](void*) -> int32_t { return 4; };
  functions.parallel_for = [](void*, int64_t, quern_task, void*) {};
  quern_executor* idle = nullptr;
  ASSERT_C_OK(quern_executor_create_from(library_.get(), &functions, &idle),
              library_.get());
  int64_t bytes = 0;
  ASSERT_C_OK(quern_op_workspace_bytes(op, kTokens, idle, &bytes), op);
  // Poison that is an index far out of range.
  std::vector<uint8_t> memory(static_cast<size_t>(bytes) + QUERN_ALIGNMENT,
                              0x7f);
  auto at = reinterpret_cast<uintptr_t>(memory.data());
  at = (at + QUERN_ALIGNMENT - 1) / QUERN_ALIGNMENT * QUERN_ALIGNMENT;
  const auto execute = [&](quern_executor* executor) {
    return quern_op_execute(op, step, 4, reinterpret_cast<void*>(at),
                            static_cast<size_t>(bytes), executor);
  };
  ExpectRefused(execute(idle), op, QUERN_INTERNAL,
                "the executor's parallel_for ran 0 of ");
  want.swap(out);
  out_in_c->data = out.data();
  EXPECT_C_OK(execute(nullptr), op);
  EXPECT_EQ(out, want);
}

TEST_F(ExpertsTest, Refuse) {
  LibraryInC other;
  quern_linear_weights* const ours = Weights(library_.get());
  quern_linear_weights* const null = nullptr;
  quern_linear_weights* const theirs = Weights(other.get());
  auto* const handler = reinterpret_cast<quern_linear_weights*>(Handler());
  const quern_status invalid = QUERN_INVALID_ARGUMENT;
  ExpectExpertsRefused(&ours, &ours, 0, invalid, "count=0");
  ExpectExpertsRefused(nullptr, &ours, 1, invalid, "gate_up is null");
  ExpectExpertsRefused(&ours, nullptr, 1, invalid, "down is null");
  ExpectExpertsRefused(&ours, &null, 1, invalid, "down[0]");
  ExpectExpertsRefused(&theirs, &ours, 1, invalid, "of another library");
  ExpectExpertsRefused(&ours, &handler, 1, invalid,
                       "is of kind oneDNN handler; need linear weights");
  EXPECT_C_OK(quern_destroy(ours), ours);
  ExpectExpertsRefused(&ours, &ours, 1, QUERN_FAILED_PRECONDITION,
                       "was destroyed");
}

}  // namespace
}  // namespace quern
