// vLLM's operators of matrix products by name, against products in double, and
// what they refuse. Sums of small integers are exact in every provider.

#include "quern/ops/registry/vllm/linear_ops.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/reference_gemm.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

constexpr const char* kProviders[] = {"simd", "onednn", "reference"};

struct Product {
  int64_t m, n, k;
  bool bias = false;
  bool transposed = false;  // whether b is column-major
};

// b[k, n], row-major or column-major, with gaps between rows or columns.
template <typename T>
class Weights {
 public:
  Weights(const std::vector<T>& b, const Product& p) : p_(p) {
    const int64_t rows = p.transposed ? p.n : p.k;
    const int64_t cols = p.transposed ? p.k : p.n;
    std::vector<T> dense(b.size());
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        dense[static_cast<size_t>(i * cols + j)] =
            b[static_cast<size_t>(p.transposed ? j * p.n + i : i * p.n + j)];
      }
    }
    matrix_ = std::make_unique<StridedMatrix<T>>(dense, rows, cols, cols + 3);
  }
  AnyTensorView view() const {
    const int64_t stride = (p_.transposed ? p_.k : p_.n) + 3;
    const void* const data = matrix_->view().data();
    return p_.transposed
               ? AnyTensorView(DTypeOf<T>, data, 2, {p_.k, p_.n}, {1, stride})
               : AnyTensorView(DTypeOf<T>, data, 2, {p_.k, p_.n}, {stride, 1});
  }

 private:
  Product p_;
  std::unique_ptr<StridedMatrix<T>> matrix_;
};

class VllmLinearOpsTest : public OpFixture {
 protected:
  VllmLinearOpsTest() {
    EXPECT_EQ(RegisterVllmLinearOps(registry_), absl::OkStatus());
  }

  // Runs the operator that packs.
  void Create(const char* op, const NamedArgs& args,
              const std::vector<NamedTensor>& named) {
    const MadeOp create = Make("reference", op, args);
    std::vector<AnyTensorView> tensors;
    ASSERT_EQ(create.Bind(named, tensors), absl::OkStatus());
    ASSERT_EQ(create.op->Prepare(tensors, executor_), absl::OkStatus());
    create.op->Execute(tensors, executor_);
  }
  template <typename T>
  void CreateMm(const std::vector<T>& b, const Product& p,
                OneDnnHandler* handler) {
    const Weights<T> weights(b, p);  // freed before the product
    Create("create_onednn_mm",
           {{"b", TensorMeta{DTypeOf<T>, {p.k, p.n}}},
            {"handler", handler},
            {"primitive_cache_size", 32}},
           {{"b", weights.view()}});
  }

  template <typename T>
  void ExpectExactMm(const Product& p) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<T>) << " m " << p.m << " n " << p.n
                 << " k " << p.k << " bias " << p.bias << " transposed "
                 << p.transposed);
    const auto a = SmallIntegers<T>(rng_, p.m * p.k, -4, 4);
    const auto b = SmallIntegers<T>(rng_, p.k * p.n, -4, 4);
    const auto bias = SmallIntegers<T>(rng_, p.n, -4, 4);
    Doubles want = ReferenceGemm(p.m, p.n, p.k, ToDoubles(a), ToDoubles(b));
    if (p.bias) {
      for (size_t i = 0; i < want.size(); ++i) {
        want[i] += ToDoubles(bias)[i % static_cast<size_t>(p.n)];
      }
    }
    const StridedMatrix<T> rows(a, p.m, p.k, p.k + 5);
    for (const std::string provider : kProviders) {
      // oneDNN's kernels take no bias of the call.
      if (provider == "onednn" && p.bias) continue;
      SCOPED_TRACE(provider);
      auto handler = std::make_unique<OneDnnHandler>();
      CreateMm(b, p, handler.get());
      NamedArgs args = {{"c", TensorMeta{DTypeOf<T>, {p.m, p.n}}},
                        {"a", TensorMeta{DTypeOf<T>, {p.m, p.k}}},
                        {"handler", handler.get()}};
      StridedMatrix<T> c(p.m, p.n, p.n + 7);
      std::vector<NamedTensor> named = {{"c", c.view()}, {"a", rows.view()}};
      if (p.bias) {
        args.emplace_back("bias", TensorMeta{DTypeOf<T>, {p.n}});
        named.emplace_back("bias", DenseVector<const T>(bias.data(), p.n));
      }
      if (provider == "onednn" && !RunsOnOneDnn("onednn_mm", args)) continue;
      const MadeOp op = Make(provider, "onednn_mm", args);
      handler.reset();
      RunOn(provider, op, named, p.m);
      EXPECT_TRUE(AllEqual(c.ToDense(), ToDoubles(RoundedTo<T>(want))));
    }
  }

  // Whether oneDNN has kernels for this on this CPU.
  bool RunsOnOneDnn(const char* op, const NamedArgs& args) {
    const OpDispatcher ops(registry_, OpPolicy());
    const auto made = ops.MakeFrom("onednn", op, args);
    EXPECT_TRUE(made.ok() || absl::IsUnimplemented(made.status()))
        << made.status();
    return made.ok();
  }
  // oneDNN allocates small blocks.
  void RunOn(const std::string& provider, const MadeOp& op,
             const std::vector<NamedTensor>& named, int64_t rows) {
    if (provider != "onednn") return Run(op, named);
    std::vector<AnyTensorView> tensors;
    ASSERT_EQ(op.Bind(named, tensors), absl::OkStatus());
    auto memory = AlignedBuffer::Create(*op.op->WorkspaceBytes(rows, 1));
    ASSERT_TRUE(memory.ok());
    op.op->Execute(tensors, Workspace(*memory), executor_);
  }

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(VllmLinearOpsTest);

TEST_P(VllmLinearOpsTest, MmIsExactOnSmallIntegers) {
  for (const bool transposed : {false, true}) {
    for (const bool bias : {false, true}) {
      for (const Product& p : {Product{1, 1, 1}, Product{1, 48, 64},
                               Product{3, 17, 31}, Product{17, 33, 96}}) {
        const Product product = {p.m, p.n, p.k, bias, transposed};
        ExpectExactMm<float>(product);
        ExpectExactMm<BFloat16>(product);
        ExpectExactMm<Float16>(product);
      }
    }
  }
}

// The bias enters before the one rounding: 256 + 1 is no bf16, 257 + 1 is.
TEST_P(VllmLinearOpsTest, TheBiasIsNotRoundedApart) {
  const Product p = {1, 16, 2, true};
  std::vector<BFloat16> a, b, bias;
  for (const double x : {256.0, 1.0}) a.push_back(FromDouble<BFloat16>(x));
  for (int i = 0; i < 32; ++i) b.push_back(FromDouble<BFloat16>(1));
  for (int i = 0; i < 16; ++i) bias.push_back(FromDouble<BFloat16>(1));
  OneDnnHandler handler;
  CreateMm(b, p, &handler);
  for (const char* provider : {"simd", "reference"}) {
    std::vector<BFloat16> c(16);
    const MadeOp op = Make(provider, "onednn_mm",
                           {{"c", TensorMeta{DType::kBF16, {1, 16}}},
                            {"a", TensorMeta{DType::kBF16, {1, 2}}},
                            {"bias", TensorMeta{DType::kBF16, {16}}},
                            {"handler", &handler}});
    Run(op, {{"c", DenseMatrix(c.data(), 1, 16)},
             {"a", DenseMatrix<const BFloat16>(a.data(), 1, 2)},
             {"bias", DenseVector<const BFloat16>(bias.data(), 16)}});
    EXPECT_EQ(ToDouble(c[0]), 258);
  }
}

TEST_P(VllmLinearOpsTest, StaysEnabledUnlessItIsNamed) {
  OneDnnHandler handler;
  CreateMm(std::vector<float>(64, 1), {1, 8, 8}, &handler);
  const NamedArgs args = {{"c", TensorMeta{DType::kF32, {1, 8}}},
                          {"a", TensorMeta{DType::kF32, {1, 8}}},
                          {"handler", &handler}};
  const OpDispatcher none(registry_, *OpPolicy::Parse("none"));
  const auto kept = none.Make("onednn_mm", args);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(kept->provider, "simd");
  EXPECT_RAN_ON(*kept->op);
  const OpDispatcher without(registry_, *OpPolicy::Parse("-onednn_mm"));
  EXPECT_EQ(without.Make("onednn_mm", args)->provider, "reference");
}

TEST_P(VllmLinearOpsTest, MmRefusesByName) {
  OneDnnHandler empty, handler;
  CreateMm(std::vector<float>(32 * 16, 1), {1, 16, 32}, &handler);
  const OpDispatcher ops(registry_, OpPolicy());
  const TensorMeta a = {DType::kF32, {2, 32}}, c = {DType::kF32, {2, 16}};
  const NamedArgs good = {{"c", c}, {"a", a}, {"handler", &handler}};
  EXPECT_RAN_ON(*Make("simd", "onednn_mm", good).op);
  const struct {
    const char* name;
    OpArg value;
    const char* words;
  } kCases[] = {
      {"handler", &empty, "onednn_mm: handler has no weights; need those that"},
      {"a", TensorMeta{DType::kF32, {2, 31}}, "a is f32[2, 31]; need [2, 32]"},
      {"a", TensorMeta{DType::kF32, {2, 1, 32}},
       "a is f32[2, 1, 32]; need [2, 32]"},
      {"c", TensorMeta{DType::kF32, {2, 17}}, "c is f32[2, 17]; need [2, 16]"},
      {"bias", TensorMeta{DType::kF32, {15}}, "bias is f32[15]; need [16]"},
      {"bias", TensorMeta{DType::kBF16, {16}}, "bias is bf16[16]; need f32"},
  };
  for (const auto& refused : kCases) {
    SCOPED_TRACE(refused.words);
    NamedArgs args;
    for (const auto& arg : good) {
      if (arg.first != refused.name) args.push_back(arg);
    }
    args.emplace_back(refused.name, refused.value);
    ExpectRefusal(ops.Make("onednn_mm", args).status(), refused.words);
  }
  NamedArgs bytes = {{"c", c}, {"handler", &handler}};
  bytes.emplace_back("a", TensorMeta{DType::kI8, {2, 32}});
  ExpectRefusal(ops.Make("onednn_mm", bytes).status(),
                absl::StatusCode::kUnimplemented, "a is i8");
  NamedArgs biased = good;
  biased.emplace_back("bias", TensorMeta{DType::kF32, {16}});
  ExpectRefusal(ops.MakeFrom("onednn", "onednn_mm", biased).status(),
                absl::StatusCode::kUnimplemented, "adds no residual");

  const TensorMeta b = {DType::kF32, {32, 16}};
  ExpectRefusal(
      ops.Make("create_onednn_mm",
               {{"b", TensorMeta{DType::kI8, {32, 16}}}, {"handler", &handler}})
          .status(),
      absl::StatusCode::kUnimplemented, "b is i8");
  ExpectRefusal(
      ops.Make("create_onednn_mm",
               {{"b", TensorMeta{DType::kF32, {32}}}, {"handler", &handler}})
          .status(),
      "create_onednn_mm: b is f32[32]; need [n, n]");
  ExpectRefusal(
      ops.Make("create_onednn_mm",
               {{"b", b}, {"handler", &handler}, {"primitive_cache_size", -1}})
          .status(),
      "primitive_cache_size=-1");
  // A refusal leaves the handler as it was.
  const MadeOp create =
      Make("reference", "create_onednn_mm", {{"b", b}, {"handler", &handler}});
  std::vector<float> data(2 * 32 * 16);
  std::vector<AnyTensorView> tensors = {
      AnyTensorView(DType::kF32, data.data(), 2, {32, 16}, {32, 2})};
  ExpectRefusal(create.op->Prepare(tensors, executor_),
                "b has strides 32 and 2; need one of 1");
  EXPECT_EQ(handler.weights.spec().n, 16);
}

}  // namespace
}  // namespace quern
