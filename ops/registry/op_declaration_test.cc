#include "quern/ops/registry/op_declaration.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/refusal.h"

namespace quern {

struct Weather {
  int64_t degrees = 0;
};
template <>
struct OpObject<const Weather> {
  static constexpr char kName[] = "Weather";
};

namespace {

enum class Way : uint8_t { kUp, kDown };

struct Spec {
  int64_t n = 0;
  float eps = 0;
  Way way = Way::kUp;
  DType dtype = DType::kF32;
  DType scale_dtype = DType::kF32;
};

struct Args {
  AnyTensorView x, state, state_out, scale, out;
};

// Notes what it is called with.
struct Seen {
  Args args;
  bool plan = false;
  bool reference = false;
};
Seen seen;

class Plan {
 public:
  static absl::StatusOr<Plan> Create(const Spec& spec) {
    if (spec.n > 0) return Plan(spec);
    return InvalidArgument("plan", "n=0; need n >= 1");
  }
  const Spec& spec() const { return spec_; }
  const char* target() const { return "a target"; }
  absl::Status CheckArgs(const Args& args) const {
    if (args.x.rank() == 2) return absl::OkStatus();
    return InvalidArgument("plan", "rows=", args.x.rank(), "; need 2");
  }
  void Execute(const Args& args, Executor&) const noexcept {
    seen.args = args;
    seen.plan = true;
  }

 private:
  explicit Plan(const Spec& spec) : spec_(spec) {}
  Spec spec_;
};

using Op = OpDeclaration<Plan, Spec, Args>;

Op Declared() {
  Op op("walk");
  op.In("x", &Args::x, {kLeading, Times(2, &Spec::n)}, &Spec::dtype)
      .InOut("state", &Args::state, &Args::state_out, Like("x"), Like("x"))
      .Maybe("scale", &Args::scale, {&Spec::n}, &Spec::scale_dtype)
      .Attr("eps", 1e-6, &Spec::eps)
      .Choice<Way>("way", "up", {{"up", Way::kUp}, {"down", Way::kDown}},
                   &Spec::way)
      .Out("half", &Args::out, {Like("x"), &Spec::n}, DType::kI8)
      .InPlace("x", "out")
      .Word("rows", "x")
      .Reference([](const Spec&, const Args& args) {
        seen.args = args;
        seen.reference = true;
      })
      .Example({{"x", {3, 8}}, {"state", {3, 8}}, {"scale", {4}}});
  return op;
}

class OpDeclarationTest : public testing::Test {
 protected:
  void SetUp() override {
    seen = Seen();
    ASSERT_EQ(Declared().AddTo(registry_), absl::OkStatus());
  }
  absl::Status Refused(const NamedArgs& args) {
    return registry_.InferShapes("walk", args).status();
  }
  OpRegistry registry_;
};

TEST_F(OpDeclarationTest, HasASchemaInTheOrderOfItsCalls) {
  EXPECT_EQ(registry_.Find("walk")->schema.Print(),
            "walk(Tensor x, Tensor(a1!) state, Tensor? scale, float eps=1e-06, "
            "str way=\"up\") -> Tensor");
}

TEST_F(OpDeclarationTest, InfersWhatIsReturned) {
  const TensorMeta x = {DType::kBF16, {2, 3, 8}};
  const auto shapes = registry_.InferShapes("walk", {{"x", x}, {"state", x}});
  ASSERT_TRUE(shapes.ok()) << shapes.status();
  EXPECT_EQ(*shapes,
            std::vector<TensorMeta>({TensorMeta{DType::kI8, {2, 3, 4}}}));
}

TEST_F(OpDeclarationTest, RefusesWhatDoesNotFit) {
  const TensorMeta x = {DType::kF32, {3, 8}};
  const struct {
    NamedArgs args;
    const char* need;
  } cases[] = {
      {{{"x", TensorMeta{DType::kF32, {}}}, {"state", x}},
       "walk: x has rank 0; need at least 1"},
      {{{"x", TensorMeta{DType::kF32, {3, 7}}}, {"state", x}},
       "walk: x is f32[3, 7]; need a multiple of 2 for 7"},
      {{{"x", x}, {"state", TensorMeta{DType::kF32, {8, 3}}}},
       "walk: state is f32[8, 3]; need f32[3, 8], as x is"},
      {{{"x", x}, {"state", TensorMeta{DType::kBF16, {3, 8}}}},
       "walk: state is bf16[3, 8]; need f32[3, 8], as x is"},
      {{{"x", x}, {"state", x}, {"scale", TensorMeta{DType::kF32, {8}}}},
       "walk: scale is f32[8]; need [4]"},
      {{{"x", x}, {"state", x}, {"scale", TensorMeta{DType::kF32, {1, 4}}}},
       "walk: scale is f32[1, 4]; need [4]"},
      {{{"x", x}, {"state", x}, {"way", "left"}},
       "walk: way=\"left\"; need \"up\" or \"down\""},
      {{{"x", x}}, "walk: state is missing"},
  };
  for (const auto& c : cases) ExpectRefusal(Refused(c.args), c.need);
  // What the plan alone knows.
  const OpDispatcher ops(registry_, OpPolicy());
  const TensorMeta none = {DType::kF32, {3, 0}};
  ExpectRefusal(ops.Make("walk", {{"x", none}, {"state", none}}).status(),
                "walk: n=0; need n >= 1");
}

TEST_F(OpDeclarationTest, BindsTensorsToTheArgumentsOfThePlan) {
  const OpDispatcher ops(registry_, OpPolicy());
  const TensorMeta meta = {DType::kF32, {2, 3, 8}};
  alignas(64) float x[64], state[48], scale[4];
  alignas(64) int8_t out[24];
  const AnyTensorView xs(DType::kF32, x, 3, {2, 3, 8}, {24, 8, 1});
  const AnyTensorView states(DType::kF32, state, 3, {2, 3, 8}, {24, 8, 1});
  const AnyTensorView scales(DType::kF32, scale, 1, {4}, {1});
  const AnyTensorView outs(DType::kI8, out, 3, {2, 3, 4}, {12, 4, 1});
  InlineExecutor executor;
  for (const char* provider : {"simd", "reference"}) {
    seen = Seen();
    const auto made = ops.MakeFrom(provider, "walk",
                                   {{"x", meta},
                                    {"state", meta},
                                    {"scale", TensorMeta{DType::kF32, {4}}}});
    ASSERT_TRUE(made.ok()) << made.status();
    const std::vector<AnyTensorView> tensors = {xs, states, scales, outs};
    ASSERT_EQ(made->CheckArgs(tensors), absl::OkStatus());
    made->op->Execute(tensors, executor);
    EXPECT_EQ(seen.plan, provider == std::string("simd"));
    EXPECT_EQ(seen.reference, provider == std::string("reference"));
    EXPECT_EQ(seen.args.x.data(), x);
    EXPECT_EQ(seen.args.x.extent(0), 6);  // folded
    EXPECT_EQ(seen.args.state.data(), state);
    EXPECT_EQ(seen.args.state_out.data(), state);
    EXPECT_EQ(seen.args.scale.rank(), 1);
    EXPECT_EQ(seen.args.out.extent(0), 6);
    EXPECT_EQ(seen.args.out.extent(1), 4);
    // Rows that do not fold are the plan's to refuse, in the schema's words.
    const std::vector<AnyTensorView> apart = {
        AnyTensorView(DType::kF32, x, 3, {2, 3, 8}, {25, 8, 1}), states, scales,
        outs};
    ExpectRefusal(made->CheckArgs(apart), "walk: x=3; need 2");
    // Both in one call: the same tensors arrive, and none after a refusal.
    const AnyTensorView out_before = seen.args.out;
    seen = Seen();
    EXPECT_EQ(made->CheckAndExecute(apart, Workspace(), executor),
              made->CheckArgs(apart));
    EXPECT_FALSE(seen.plan || seen.reference);
    EXPECT_EQ(made->CheckAndExecute(tensors, Workspace(), executor),
              absl::OkStatus());
    EXPECT_NE(seen.plan, seen.reference);
    EXPECT_TRUE(SameView(seen.args.out, out_before));
    // A step's rows are those of x.
    EXPECT_EQ(made->tensors.Rows(tensors), 6);
    // x and out may share memory; x and state may not.
    const std::vector<AnyTensorView> shared = {xs, xs, scales, outs};
    EXPECT_FALSE(made->CheckArgs(shared).ok());
  }
}

TEST_F(OpDeclarationTest, GivesItsExampleInAnyDType) {
  const NamedArgs args = registry_.Find("walk")->example(DType::kBF16);
  ASSERT_EQ(args.size(), 3u);
  EXPECT_EQ(std::get<TensorMeta>(args[1].second),
            (TensorMeta{DType::kBF16, {3, 8}}));
}

TEST_F(OpDeclarationTest, ANameIsTakenOnce) {
  EXPECT_EQ(Declared().AddTo(registry_).code(),
            absl::StatusCode::kAlreadyExists);
}

// A plan that is made from more than its Spec, and packs weights.
class Packer {
 public:
  explicit Packer(absl::string_view provider) : provider_(provider) {}
  const char* target() const { return "a target"; }
  std::string Explain(int64_t rows) const {
    return provider_ + (rows > 1 ? " of many" : " of one");
  }
  absl::Status Prepare(const Args& args, Executor&) {
    packed_ = args.scale.data();
    return absl::OkStatus();
  }
  absl::Status CheckArgs(const Args& args) const {
    return packed_ == args.scale.data() ? absl::OkStatus()
                                        : InvalidArgument("packer", "no scale");
  }
  void Execute(const Args&, Executor&) const noexcept {}

 private:
  std::string provider_;
  const void* packed_ = nullptr;
};

TEST(OpDeclarationLayerTest, PacksAndSaysWhoMakesIt) {
  OpRegistry registry;
  OpDeclaration<Packer, Spec, Args> op("layer");
  op.Known<int64_t>(&Spec::n, [](const OpCall& call) { return call.Int("k"); })
      .In("x", &Args::x, {kLeading, &Spec::n},
          OpDType<Spec>::OneOf({DType::kF32, DType::kBF16}, {&Spec::dtype}))
      .In("scale", &Args::scale, {&Spec::n}, OpDType<Spec>::Must(Like("x")))
      .Need<int64_t>("k")
      .Layer()
      .Providers({"fast", "reference"})
      .Creates([](const Spec&, const OpCall& call) {
        return Packer(call.provider());
      })
      .ReferenceFrom([](const Spec& filled, const Packer&) {
        EXPECT_EQ(filled.n, 4);
        return std::function<void(const Args&)>([](const Args&) {});
      })
      .ExampleOf([](DType dtype) {
        return NamedArgs{{"x", TensorMeta{dtype, {2, 4}}},
                         {"scale", TensorMeta{dtype, {4}}},
                         {"k", 4}};
      });
  ASSERT_EQ(op.AddTo(registry), absl::OkStatus());
  const OpDispatcher ops(registry, *OpPolicy::Parse("none"));
  NamedArgs args = registry.Find("layer")->example(DType::kBF16);
  const auto made = ops.Make("layer", args);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->provider, "fast");
  EXPECT_EQ(made->op->Explain(2), "fast of many");
  const std::vector<BFloat16> x(8), scale(4);
  const std::vector<AnyTensorView> tensors = {
      DenseMatrix<const BFloat16>(x.data(), 2, 4),
      DenseVector<const BFloat16>(scale.data(), 4)};
  ExpectRefusal(made->CheckArgs(tensors), "layer: no scale");
  InlineExecutor executor;
  ASSERT_EQ(made->Prepare(tensors, executor), absl::OkStatus());
  EXPECT_EQ(made->CheckArgs(tensors), absl::OkStatus());
  const auto reference = ops.MakeFrom("reference", "layer", args);
  ASSERT_TRUE(reference.ok()) << reference.status();
  EXPECT_EQ(reference->op->Explain(2), "scalar");
  args[2].second = 5;
  ExpectRefusal(ops.Make("layer", args).status(),
                "layer: x is bf16[2, 4]; need [.., 5]");
  args = registry.Find("layer")->example(DType::kF16);
  ExpectRefusal(ops.Make("layer", args).status(),
                absl::StatusCode::kUnimplemented, "layer: x is f16");
  args[0].second = TensorMeta{DType::kF32, {2, 4}};
  ExpectRefusal(ops.Make("layer", args).status(),
                "layer: scale is f16[4]; need f32");
}

int64_t Twice(const Spec& spec) { return 2 * spec.n; }

TEST(OpDeclarationLayerTest, HasItsProvidersInTheirOrder) {
  OpRegistry registry;
  const auto create = [](const Spec& spec, const OpCall&) {
    return Plan::Create(spec);
  };
  Op op("layer");
  ASSERT_EQ(op.In("x", &Args::x, {kRows, &Spec::n})
                .In("y", &Args::scale, {kRows, &Twice}, DType::kI8)
                .Provider("first", create)
                .Provider("reference", create)
                .ExampleOf([](DType dtype) {
                  return NamedArgs{{"x", TensorMeta{dtype, {3, 4}}},
                                   {"y", TensorMeta{DType::kI8, {3, 8}}}};
                })
                .Layer()
                .AddTo(registry),
            absl::OkStatus());
  const OpDefinition& made = *registry.Find("layer");
  EXPECT_EQ(made.kind, OpKind::kLayer);
  ASSERT_EQ(made.implementations.size(), 2u);
  EXPECT_EQ(made.implementations[0].provider, "first");
  EXPECT_EQ(made.implementations[1].provider, "reference");
  EXPECT_TRUE(registry.InferShapes("layer", made.example(DType::kF16)).ok());
  const struct {
    TensorMeta y;
    const char* need;
  } cases[] = {
      {{DType::kI8, {2, 8}}, "layer: y is i8[2, 8]; need [3, 8]"},
      {{DType::kI8, {3, 4}}, "layer: y is i8[3, 4]; need [3, 8]"},
      {{DType::kU8, {3, 8}}, "layer: y is u8[3, 8]; need i8"},
  };
  for (const auto& c : cases) {
    NamedArgs args = made.example(DType::kF32);
    args[1].second = c.y;
    ExpectRefusal(registry.InferShapes("layer", args).status(), c.need);
  }
}

// What no call could be made with is refused before there is one.
TEST(OpDeclarationRulesTest, RefusesWhatCannotWork) {
  OpRegistry registry;
  ExpectRefusal(
      Op("f").Maybe("x", &Args::x, {kRows, &Spec::n}).Rows("x").AddTo(registry),
      "f: rows follow from x, which is optional");
  ExpectRefusal(Op("f")
                    .Maybe("x", &Args::x, {kRows, &Spec::n})
                    .In("scale", &Args::scale, Like("x"))
                    .AddTo(registry),
                "f: a shape follows from x, which is optional");
  EXPECT_EQ(Op("Bad Name!").In("x", &Args::x).AddTo(registry).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(
      Op("f").In("x", &Args::x).In("x", &Args::scale).AddTo(registry).code(),
      absl::StatusCode::kInvalidArgument);
  const auto create = [](const Spec& spec, const OpCall&) {
    return Plan::Create(spec);
  };
  ExpectRefusal(Op("f")
                    .In("x", &Args::x)
                    .Provider("simd", create)
                    .Provider("simd", create)
                    .AddTo(registry),
                "f has the provider simd twice");
}

// An optional tensor does not count the rows of a step, whatever its shape.
TEST(OpDeclarationRulesTest, RowsAreThoseOfATensorThatIsGiven) {
  OpRegistry registry;
  ASSERT_EQ(Op("f")
                .Maybe("x", &Args::x, {kRows, &Spec::n})
                .In("scale", &Args::scale, {kRows, &Spec::n})
                .AddTo(registry),
            absl::OkStatus());
  EXPECT_EQ(registry.Find("f")->rules.rows_of, "scale");
}

// A pair in place of which neither is written is a slip.
TEST(OpDeclarationRulesTest, RefusesAPairThatNobodyWrites) {
  OpRegistry registry;
  Op op("slip");
  op.In("x", &Args::x, {kLeading, &Spec::n})
      .In("y", &Args::state)
      .InPlace("x", "y");
  EXPECT_EQ(op.AddTo(registry).code(), absl::StatusCode::kInvalidArgument);
}

// A plan that is prepared, and says what runs.
class Prepared {
 public:
  static absl::StatusOr<Prepared> Make(const Spec&, const OpCall&) {
    return Prepared();
  }
  const char* target() const { return "scalar"; }
  std::string Explain(int64_t rows) const {
    return rows == 1 ? "one row" : "rows";
  }
  absl::Status Prepare(const Args& args, Executor&) {
    prepared_ = args.x.data();
    return absl::OkStatus();
  }
  absl::Status CheckArgs(const Args& args) const {
    if (args.x.data() == prepared_) return absl::OkStatus();
    return InvalidArgument("prepared", "x is not what Prepare was given");
  }
  void Execute(const Args&, Executor&) const noexcept {}

 private:
  const void* prepared_ = nullptr;
};

int64_t Half(const Spec& spec) { return spec.n / 2; }

TEST(OpDeclarationPlansTest, PreparesAndExplainsAsThePlanDoes) {
  OpRegistry registry;
  OpDeclaration<Prepared, Spec, Args> op("prepared");
  op.Layer()
      .In("x", &Args::x, {kRows, &Spec::n}, &Spec::dtype)
      .Maybe("state", &Args::state, {kRows, &Half}, Like("x"))
      .Maybe("scale", &Args::scale, {Plus(1, &Spec::n)}, DType::kF32)
      .Provider("first", &Prepared::Make)
      .Provider("reference", &Prepared::Make);
  ASSERT_EQ(op.AddTo(registry), absl::OkStatus());
  EXPECT_EQ(registry.Find("prepared")->kind, OpKind::kLayer);
  const TensorMeta x = {DType::kBF16, {3, 8}};
  const struct {
    const char* name;
    TensorMeta meta;
    const char* need;
  } cases[] = {
      {"state", {DType::kBF16, {4, 4}}, "state is bf16[4, 4]; need [3, 4]"},
      {"state", {DType::kBF16, {3, 8}}, "state is bf16[3, 8]; need [3, 4]"},
      {"state",
       {DType::kF32, {3, 4}},
       "state is f32[3, 4]; need bf16, as x is"},
      {"scale", {DType::kF32, {8}}, "scale is f32[8]; need [9]"},
      {"scale", {DType::kBF16, {9}}, "scale is bf16[9]; need f32"},
  };
  for (const auto& c : cases) {
    ExpectRefusal(
        registry.InferShapes("prepared", {{"x", x}, {c.name, c.meta}}).status(),
        c.need);
  }
  InlineExecutor executor;
  const OpDispatcher ops(registry, OpPolicy());
  for (const char* provider : {"first", "reference"}) {
    const auto made = ops.MakeFrom(provider, "prepared",
                                   {{"x", x},
                                    {"state", TensorMeta{DType::kBF16, {3, 4}}},
                                    {"scale", TensorMeta{DType::kF32, {9}}}});
    ASSERT_TRUE(made.ok()) << made.status();
    EXPECT_EQ(made->op->Explain(1), "one row");
    BFloat16 data[24], state[12];
    float scale[9];
    const std::vector<AnyTensorView> tensors = {
        AnyTensorView(DType::kBF16, data, 2, {3, 8}, {8, 1}),
        AnyTensorView(DType::kBF16, state, 2, {3, 4}, {4, 1}),
        AnyTensorView(DType::kF32, scale, 1, {9}, {1})};
    ExpectRefusal(made->CheckArgs(tensors), "x is not what Prepare was given");
    EXPECT_EQ(made->Prepare(tensors, executor), absl::OkStatus());
    EXPECT_EQ(made->CheckArgs(tensors), absl::OkStatus());
  }
}

}  // namespace
}  // namespace quern
