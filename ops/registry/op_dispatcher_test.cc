#include "quern/ops/registry/op_dispatcher.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/refusal.h"

namespace quern {

// Object types of an embedder: Notes, which operators may change, and Sizes,
// which they only read.
struct Notes {
  int64_t count = 0;
};
struct Sizes {
  int64_t rows = 0;
};
template <>
struct OpObject<Notes> {
  static constexpr char kName[] = "Notes";
};
template <>
struct OpObject<const Sizes> {
  static constexpr char kName[] = "Sizes";
};

namespace {

using Bound = absl::StatusOr<std::unique_ptr<BoundOp>>;
using Metas = absl::StatusOr<std::vector<TensorMeta>>;

// Writes a number that identifies the implementation.
template <int kWho>
class Writes final : public BoundOp {
 public:
  const char* target() const override { return "scalar"; }
  absl::Status CheckArgs(absl::Span<const AnyTensorView>) const override {
    return absl::OkStatus();
  }
  void Execute(absl::Span<const AnyTensorView> tensors, Workspace,
               Executor&) const noexcept override {
    static_cast<float*>(tensors[1].mutable_data())[0] = kWho;
  }
};
template <int kWho>
Bound Make(const TensorMeta&, double) {
  return std::unique_ptr<BoundOp>(new Writes<kWho>());
}
Bound OnlyF32(const TensorMeta& x, double scale) {
  if (x.dtype != DType::kF32) return absl::UnimplementedError("f32 only");
  return Make<1>(x, scale);
}
Metas Same(const TensorMeta& x, double) { return std::vector<TensorMeta>{x}; }

OpRegistry Registry() {
  OpRegistry registry;
  for (const char* name : {"first", "second"}) {
    EXPECT_TRUE(registry
                    .Define<&Same>(std::string(name) +
                                   "(Tensor x, float scale=1.0) -> Tensor")
                    .ok());
    EXPECT_TRUE(registry.Add<&Make<9>>(name, "reference").ok());
    EXPECT_TRUE(registry.Add<&OnlyF32>(name, "simd").ok());
    EXPECT_TRUE(registry.Add<&Make<2>>(name, "onednn").ok());
  }
  return registry;
}

NamedArgs Args(DType dtype = DType::kF32) {
  return {{"x", TensorMeta{dtype, {2, 3}}}};
}

float WhoRan(const BoundOp& op) {
  float x = 0, out = 0;
  InlineExecutor executor;
  const std::vector<AnyTensorView> tensors = {DenseVector(&x, 1),
                                              DenseVector(&out, 1)};
  op.Execute(tensors, executor);
  return out;
}

TEST(OpDispatcherTest, TakesTheFirstThatIsImplemented) {
  const OpRegistry registry = Registry();
  const OpDispatcher ops(registry, OpPolicy());
  const auto f32 = ops.Make("first", Args());
  ASSERT_TRUE(f32.ok()) << f32.status();
  EXPECT_EQ(f32->provider, "simd");
  EXPECT_EQ(WhoRan(*f32->op), 1);
  const auto bf16 = ops.Make("first", Args(DType::kBF16));
  ASSERT_TRUE(bf16.ok());
  EXPECT_EQ(bf16->provider, "onednn");
}

// Copies x to out, but refuses an x that begins with a negative number.
class Picky final : public BoundOp {
 public:
  const char* target() const override { return "scalar"; }
  absl::Status CheckArgs(absl::Span<const AnyTensorView> t) const override {
    if (*static_cast<const float*>(t[0].data()) >= 0) return absl::OkStatus();
    return absl::InvalidArgumentError("first: x is negative");
  }
  void Execute(absl::Span<const AnyTensorView> t, Workspace workspace,
               Executor&) const noexcept override {
    auto* const out = static_cast<float*>(t[1].mutable_data());
    std::copy_n(static_cast<const float*>(t[0].data()), 6, out);
    out[0] += static_cast<float>(workspace.bytes_left());
  }
};
Bound MakePicky(const TensorMeta&, double) {
  return std::unique_ptr<BoundOp>(new Picky());
}

// An operator that does not override CheckAndExecute, as an embedder's: it
// refuses what CheckArgs refuses, in the same words, and then writes nothing.
// op_matrix_test.cc asks the same of every operator.
TEST(OpDispatcherTest, ChecksAndExecutesInOneCall) {
  OpRegistry registry = Registry();
  ASSERT_EQ(registry.Override<&MakePicky>("first", "mine"), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  const auto made = ops.Make("first", Args());
  ASSERT_EQ(made.status(), absl::OkStatus());
  alignas(64) uint8_t memory[64];
  InlineExecutor executor;
  float x[6] = {1, 2, 3, 4, 5, 6}, out[6];
  const AnyTensorView xs = DenseMatrix<const float>(x, 2, 3);
  const AnyTensorView outs = DenseMatrix(out, 2, 3);
  const auto call = [&](const std::vector<AnyTensorView>& tensors) {
    std::fill_n(out, 6, -7.0f);
    const absl::Status status = made->CheckAndExecute(
        tensors, Workspace(memory, sizeof(memory)), executor);
    if (!status.ok()) {
      EXPECT_EQ(status, made->CheckArgs(tensors));
      EXPECT_EQ(std::count(out, out + 6, -7.0f), 6) << "wrote: " << status;
    }
    return status;
  };
  EXPECT_EQ(call({xs, outs}), absl::OkStatus());
  EXPECT_EQ(std::vector<float>(out, out + 6),
            (std::vector<float>{65, 2, 3, 4, 5, 6}));
  // OpTensors::Check is the first to refuse, and the operator the second.
  ExpectRefusal(call({xs}), "first: ");
  ExpectRefusal(call({xs, DenseVector(out, 6)}), "first: out ");
  ExpectRefusal(call({xs, DenseMatrix<const float>(out, 2, 3)}),
                "first: out is read-only");
  ExpectRefusal(call({outs, outs}), "first: out overlaps x");
  x[0] = -1;
  ExpectRefusal(call({xs, outs}), "first: x is negative");
}

TEST(OpDispatcherTest, RunsTheReferenceOfWhatIsDisabled) {
  const OpRegistry registry = Registry();
  const auto policy = OpPolicy::Parse("-first");
  const OpDispatcher ops(registry, *policy);
  EXPECT_EQ(ops.Make("first", Args())->provider, "reference");
  EXPECT_EQ(ops.Make("second", Args())->provider, "simd");
  EXPECT_EQ(ops.Make("first", Args(), OpEnable::kAlways)->provider, "simd");
  // Counts record what was constructed: the reference once, simd once.
  EXPECT_EQ(ops.Counts("first").disabled, 1);
  EXPECT_EQ(ops.Counts("first").enabled, 1);
}

TEST(OpDispatcherTest, KeepsLayersEnabledUnlessTheyAreNamed) {
  OpRegistry registry = Registry();
  ASSERT_TRUE(registry
                  .Define<&Same>("layer(Tensor x, float scale=1.0) -> Tensor",
                                 nullptr, OpKind::kLayer)
                  .ok());
  ASSERT_TRUE(registry.Add<&Make<9>>("layer", "reference").ok());
  ASSERT_TRUE(registry.Add<&Make<1>>("layer", "simd").ok());
  struct Case {
    const char* policy;
    bool first, layer;
  };
  for (const Case& c :
       {Case{"all", true, true}, Case{"none", false, true},
        Case{"none,+layer", false, true}, Case{"-layer", true, false},
        Case{"none,-layer", false, false}}) {
    const auto policy = OpPolicy::Parse(c.policy);
    const OpDispatcher ops(registry, *policy);
    EXPECT_EQ(ops.enabled("first"), c.first) << c.policy;
    EXPECT_EQ(ops.enabled("layer"), c.layer) << c.policy;
    EXPECT_EQ(ops.Make("layer", Args())->provider,
              c.layer ? "simd" : "reference");
    EXPECT_EQ(ops.Counts("layer").disabled, c.layer ? 0 : 1);
    EXPECT_EQ(ops.Make("layer", Args(), OpEnable::kAlways)->provider, "simd");
  }
}

TEST(OpDispatcherTest, TakesTheProviderThatIsNamed) {
  OpRegistry registry = Registry();
  ASSERT_TRUE(registry.Override<&Make<7>>("first", "mine").ok());
  const auto policy = OpPolicy::Parse("-first");
  const OpDispatcher ops(registry, *policy);
  const char* const providers[] = {"simd", "onednn", "reference", "mine"};
  const float ran[] = {1, 2, 9, 7};
  for (int i = 0; i < 4; ++i) {
    const auto made = ops.MakeFrom(providers[i], "first", Args());
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(made->provider, providers[i]);
    EXPECT_EQ(WhoRan(*made->op), ran[i]);
  }
  EXPECT_EQ(ops.Counts("first").enabled, 3);
  EXPECT_EQ(ops.Counts("first").disabled, 1);
  EXPECT_EQ(ops.MakeFrom("simd", "first", Args(DType::kBF16)).status().code(),
            absl::StatusCode::kUnimplemented);
  for (const char* provider : {"mine", "", "Simd"}) {
    const absl::Status none = ops.MakeFrom(provider, "second", Args()).status();
    EXPECT_EQ(none.code(), absl::StatusCode::kNotFound);
    EXPECT_NE(none.message().find(std::string("second has no provider \"") +
                                  provider + "\"; need one of "),
              std::string::npos)
        << none;
  }
  EXPECT_EQ(ops.Counts("second").enabled, 0);
}

Bound Nothing(const TensorMeta&, double) { return std::unique_ptr<BoundOp>(); }

TEST(OpDispatcherTest, RefusesAMakerThatMadeNothing) {
  OpRegistry registry = Registry();
  ASSERT_TRUE(registry.Override<&Nothing>("first", "mine").ok());
  const OpDispatcher ops(registry, OpPolicy());
  const absl::Status status = ops.Make("first", Args()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(status.message().find("the maker of mine made nothing"),
            std::string::npos);
  EXPECT_EQ(ops.Counts("first").enabled, 0);
}

TEST(OpDispatcherTest, CountsConstructionsNotCalls) {
  const OpRegistry registry = Registry();
  const auto policy = OpPolicy::Parse("-second");
  const OpDispatcher ops(registry, *policy);
  const auto made = ops.Make("first", Args());
  WhoRan(*made->op);
  WhoRan(*made->op);
  EXPECT_TRUE(ops.Make("first", Args()).ok());
  EXPECT_TRUE(ops.Make("second", Args()).ok());
  EXPECT_FALSE(ops.Make("second", {}).ok());
  EXPECT_EQ(ops.Counts("first").enabled, 2);
  EXPECT_EQ(ops.Counts("first").disabled, 0);
  EXPECT_EQ(ops.Counts("second").enabled, 0);
  EXPECT_EQ(ops.Counts("second").disabled, 1);
  EXPECT_EQ(ops.Counts("third").enabled, 0);
}

TEST(OpDispatcherTest, WarnsOfTokensThatDidNothing) {
  const OpRegistry registry = Registry();
  const auto policy = OpPolicy::Parse("-second,+third,+first,+");
  const OpDispatcher ops(registry, *policy);
  EXPECT_TRUE(ops.Warnings().empty());  // no operator was constructed yet
  ASSERT_TRUE(ops.Make("first", Args()).ok());
  EXPECT_EQ(ops.Warnings(),
            (std::vector<std::string>{
                "op policy: \"-second\": the operator is not used",
                "op policy: \"+third\": no operator has this name",
                "op policy: \"+\": no operator has this name"}));
}

TEST(OpDispatcherTest, AnEmbeddersOperatorTakesTheNameAndThePolicy) {
  OpRegistry registry = Registry();
  ASSERT_TRUE(registry.Override<&Make<7>>("first", "mine").ok());
  {
    const OpDispatcher ops(registry, OpPolicy());
    const auto made = ops.Make("first", Args());
    EXPECT_EQ(made->provider, "mine");
    EXPECT_EQ(WhoRan(*made->op), 7);
    EXPECT_EQ(ops.Make("second", Args())->provider, "simd");
    EXPECT_EQ(ops.Counts("first").enabled, 1);
  }
  const auto policy = OpPolicy::Parse("-first");
  const OpDispatcher off(registry, *policy);
  EXPECT_EQ(off.Make("first", Args())->provider, "reference");
  const absl::Status again = registry.Override<&Make<8>>("first", "other");
  EXPECT_EQ(again.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_NE(again.message().find("first is overridden by mine already"),
            std::string::npos);
}

TEST(OpRegistryTest, RefusesASignatureThatIsNotTheSchema) {
  OpRegistry registry;
  for (const char* text :
       {"f(Tensor x) -> Tensor", "f(Tensor(a0!) x, float s) -> ()",
        "f(Tensor? x, float s) -> ()", "f(Tensor x, int s) -> ()",
        "f(Tensor x, float? s) -> ()"}) {
    const absl::Status status = registry.Define<&Same>(text);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find("the shape function of f is a function of "
                                    "f(Tensor , float )"),
              std::string::npos)
        << status;
  }
  EXPECT_TRUE(registry.Define<&Same>("f(Tensor x, float s) -> Tensor").ok());
  EXPECT_EQ(registry.Define<&Same>("f(Tensor x, float s) -> Tensor").code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(registry.Add<&Make<1>>("g", "simd").code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(registry.Add<&Make<1>>("f", "simd").ok());
  EXPECT_EQ(registry.Add<&Make<1>>("f", "simd").code(),
            absl::StatusCode::kAlreadyExists);
}

TEST(OpRegistryTest, RefusesRulesThatTheSchemaDoesNotBear) {
  OpRegistry registry = Registry();
  EXPECT_EQ(registry.Declare("third", {}).code(), absl::StatusCode::kNotFound);
  ExpectRefusal(registry.Declare("first", {{{"y", "out"}}}),
                "first has no tensor y; need one of x, out");
  ExpectRefusal(registry.Declare("first", {{}, OpRows::kFirst, "z"}),
                "first has no tensor z");
  ExpectRefusal(registry.Declare("first", {{{"x", "x"}}}),
                "x and x of first are in place, and neither is written");
  EXPECT_EQ(registry.Declare("first", {{{"x", "out"}}}), absl::OkStatus());
}

// Returns a shape whose extent is the number of ranks.
Metas Every(const MutatedMeta& a, const std::optional<TensorMeta>&,
            const std::optional<MutatedMeta>&, int64_t, double, bool,
            const std::string&, Communicator* ranks) {
  return std::vector<TensorMeta>{
      {a.dtype, {ranks == nullptr ? 0 : ranks->size()}}};
}

TEST(OpRegistryTest, KnowsEveryTypeOfAParameter) {
  OpRegistry registry;
  EXPECT_EQ(registry.Define<&Every>(
                "f(Tensor(a0!) a, Tensor? b, Tensor(a2!)? c, int i, float d, "
                "bool e=False, str s=\"x\", Communicator? ranks) -> Tensor"),
            absl::OkStatus());
  const TensorMeta meta = {DType::kF32, {1}};
  EXPECT_TRUE(
      registry
          .InferShapes("f", {{"a", meta}, {"i", int64_t{1}}, {"d", int64_t{2}}})
          .ok());
  SelfCommunicator self;
  const auto shapes = registry.InferShapes(
      "f", {{"a", meta}, {"i", int64_t{1}}, {"d", 2.0}, {"ranks", &self}});
  ASSERT_TRUE(shapes.ok()) << shapes.status();
  EXPECT_EQ((*shapes)[0].extents, std::vector<int64_t>{1});
  // An optional argument may be given as an empty OpArg.
  EXPECT_TRUE(
      registry
          .InferShapes(
              "f", {{"a", meta}, {"b", OpArg()}, {"i", int64_t{1}}, {"d", 1.0}})
          .ok());
  struct Case {
    NamedArgs args;
    std::string words;
  };
  for (const Case& c : {
           Case{{{"a", OpArg()}}, "f: a is of another type; need Tensor"},
           Case{{{"a", meta}, {"d", 1.0}}, "f: i is missing; need int"},
           Case{{{"a", meta}, {"z", 1.0}}, "f: has no z; need those of f("},
           Case{{{"a", meta}, {"a", meta}}, "f: a is given twice"},
           Case{{{"a", 1.0}}, "f: a is of another type; need Tensor"},
           Case{{{"i", 1.5}}, "f: i is of another type; need int"},
           Case{{{"ranks", 1.5}},
                "f: ranks is of another type; need Communicator"},
           Case{{{"d", &self}}, "f: d is of another type; need float"},
           Case{{{"a", TensorMeta{DType::kF32, {2, -1}}}},
                "f: a has an extent of -1; need 0 or more"},
       }) {
    const auto shapes = registry.InferShapes("f", c.args);
    EXPECT_EQ(shapes.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(shapes.status().message().find(c.words), std::string::npos)
        << shapes.status();
  }
}

Metas Counted(Notes* notes, const Sizes* sizes, const Sizes* more) {
  ++notes->count;
  return std::vector<TensorMeta>{
      {DType::kF32, {sizes->rows, more == nullptr ? -1 : more->rows}}};
}

TEST(OpRegistryTest, LendsObjectsByTheirType) {
  OpRegistry registry;
  ASSERT_EQ(registry.Define<&Counted>(
                "f(Notes notes, Sizes sizes, Sizes? more) -> Tensor"),
            absl::OkStatus());
  ExpectRefusal(
      registry.Define<&Counted>(
          "g(Notes notes, Notes sizes, Sizes? more) -> Tensor"),
      "g(Notes , Sizes , Sizes? ) -> Tensor; need g(Notes , Notes , ");
  Notes notes;
  Sizes sizes = {5};
  const Sizes seven = {7};
  const auto shapes = registry.InferShapes(
      "f", {{"notes", &notes}, {"sizes", &sizes}, {"more", &seven}});
  ASSERT_TRUE(shapes.ok()) << shapes.status();
  EXPECT_EQ((*shapes)[0].extents, (std::vector<int64_t>{5, 7}));
  EXPECT_EQ(notes.count, 1);
  // A null pointer counts as an omitted argument.
  const Sizes* const none = nullptr;
  const auto without = registry.InferShapes(
      "f", {{"notes", &notes}, {"sizes", &sizes}, {"more", none}});
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_EQ((*without)[0].extents, (std::vector<int64_t>{5, -1}));

  const auto refusal = [&](const NamedArgs& args) {
    return registry.InferShapes("f", args).status();
  };
  ExpectRefusal(refusal({{"notes", &notes}}),
                "f: sizes is missing; need Sizes");
  ExpectRefusal(refusal({{"notes", &notes}, {"sizes", none}}),
                "f: sizes is null; need Sizes");
  ExpectRefusal(refusal({{"notes", &sizes}, {"sizes", &sizes}}),
                "f: notes is Sizes; need Notes");
  ExpectRefusal(refusal({{"notes", "text"}, {"sizes", &sizes}}),
                "f: notes is of another type; need Notes");
  EXPECT_EQ(notes.count, 2);
}

TEST(OpArgTest, TakesNumbersAndLiteralsAsTheyAre) {
  const uint32_t unsigned_number = 7;
  EXPECT_EQ(std::get<int64_t>(OpArg(1)), 1);
  EXPECT_EQ(std::get<int64_t>(OpArg(int8_t{-3})), -3);
  EXPECT_EQ(std::get<int64_t>(OpArg(unsigned_number)), 7);
  EXPECT_EQ(std::get<int64_t>(OpArg(size_t{9})), 9);
  EXPECT_EQ(std::get<double>(OpArg(~uint64_t{0})), 0x1p64);
  EXPECT_EQ(std::get<double>(OpArg(0.5f)), 0.5);
  EXPECT_EQ(std::get<bool>(OpArg(true)), true);
  EXPECT_EQ(std::get<std::string>(OpArg("tanh")), "tanh");
  const NamedArgs args = {{"eps", 1}, {"approximate", "tanh"}};
  EXPECT_TRUE(std::holds_alternative<int64_t>(args[0].second));
  EXPECT_TRUE(std::holds_alternative<std::string>(args[1].second));
}

}  // namespace
}  // namespace quern
