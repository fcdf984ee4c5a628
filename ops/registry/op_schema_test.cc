#include "quern/ops/registry/op_schema.h"

#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

TEST(OpSchemaTest, PrintsWhatItParsed) {
  for (const std::string text : {
           "nothing() -> ()",
           "silu_and_mul(Tensor x) -> Tensor",
           "rms_norm(Tensor x, Tensor? weight, float eps=1e-06) -> Tensor",
           "add(Tensor(a0!) x, Tensor(a1!)? residual, int n) -> ()",
           "f(Tensor x, int n=-3, float f=7.0, bool b=True, str s=\"a,b\") "
           "-> (Tensor, Tensor)",
           "h(Tensor x, Communicator? ranks, bool gather=False) -> Tensor",
           "linear(Tensor x, LinearWeights weights, Tensor(a2!)? y) -> Tensor",
           "g(int? n, float scale=0.1, float big=1e+30, bool c=False) -> ()",
       }) {
    const auto schema = OpSchema::Parse(text);
    ASSERT_TRUE(schema.ok()) << schema.status();
    EXPECT_EQ(schema->Print(), text);
    EXPECT_EQ(*OpSchema::Parse(schema->Print()), *schema);
  }
}

TEST(OpSchemaTest, ReadsEveryPart) {
  const auto schema = OpSchema::Parse(
      " f ( Tensor ( a0!) ? x,int  n = 4 , float e=2)->(Tensor,Tensor)");
  ASSERT_TRUE(schema.ok()) << schema.status();
  EXPECT_EQ(schema->name, "f");
  EXPECT_EQ(schema->returns, 2);
  ASSERT_EQ(schema->params.size(), 3u);
  EXPECT_EQ(schema->params[0], (OpParam{"x", OpType::kTensor, true, true, {}}));
  EXPECT_EQ(schema->params[1],
            (OpParam{"n", OpType::kInt, false, false, OpScalar(int64_t{4})}));
  EXPECT_EQ(schema->params[2],
            (OpParam{"e", OpType::kFloat, false, false, OpScalar(2.0)}));
  const auto objects = OpSchema::Parse("f(Weights w, Ranks? r) -> ()");
  ASSERT_TRUE(objects.ok()) << objects.status();
  EXPECT_EQ(objects->params[0],
            (OpParam{"w", OpType::kObject, false, false, {}, "Weights"}));
  EXPECT_EQ(objects->params[1],
            (OpParam{"r", OpType::kObject, true, false, {}, "Ranks"}));
}

TEST(OpSchemaTest, RefusesAndSaysWhere) {
  struct Case {
    std::string text, words;
  };
  for (const Case& c : {
           Case{"", "at 0: need a name of [a-z_][a-z0-9_]*"},
           Case{"Silu(Tensor x) -> Tensor", "at 0: need a name"},
           Case{"2f() -> ()", "at 0: need a name"},
           Case{"f[] -> ()", "at 1: need \"(\""},
           Case{"f(tensor x) -> ()", "at 2: need Tensor, int"},
           Case{"f(Tensor x Tensor y) -> ()", "at 11: need \",\""},
           Case{"f(Tensor x, Tensor x) -> ()", "need another name than x"},
           Case{"f(Tensor(a1!) x) -> ()", "need \"a0!)\""},
           Case{"f(Tensor x=1) -> ()", "need no default"},
           Case{"f(Linear_Weights c) -> ()", "at 2: need Tensor, int"},
           Case{"f(linearWeights c) -> ()", "str or the type of an object"},
           Case{"f(Communicator? c=1) -> ()", "need no default"},
           Case{"f(int n=1.5) -> ()", "need a default of type int"},
           Case{"f(bool n=1) -> ()", "need a default of type bool"},
           Case{"f(float n=nan) -> ()", "need a default of type float"},
           Case{"f(Tensor_x) -> ()", "at 2: need Tensor, int"},
           Case{"f(str s=\"a) -> ()", "need a closing"},
           Case{"f()", "need \"->\""},
           Case{"f() -> int", "need \"Tensor\""},
           Case{"f() -> () x", "need the end"},
       }) {
    const auto schema = OpSchema::Parse(c.text);
    ASSERT_FALSE(schema.ok()) << c.text;
    EXPECT_EQ(schema.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(schema.status().message().find(c.words), std::string::npos)
        << schema.status();
  }
}

}  // namespace
}  // namespace quern
