#include "quern/ops/registry/op_policy.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace quern {
namespace {

// The truth table for the operators rms_norm, silu_and_mul, gelu_and_mul,
// relu3.
TEST(OpPolicyTest, HasTheTruthTable) {
  struct Row {
    std::string text;
    OpDefault when_silent;
    std::string enabled;
  };
  constexpr OpDefault kAll = OpDefault::kAll, kNone = OpDefault::kNone;
  for (const Row& row : {
           Row{"+rms_norm,-silu_and_mul", kAll, "1011"},
           Row{"none,-rms_norm,+relu3", kAll, "0001"},
           Row{"all,-silu_and_mul", kNone, "1011"},
           Row{"-relu3,+relu2", kAll, "1110"},
           Row{"none,-relu3,+rms_norm,+silu_and_mul", kAll, "1100"},
           Row{"-rms_norm", kAll, "0111"},
           Row{"", kNone, "0000"},
           Row{"", kAll, "1111"},
           Row{"+rms_norm", kNone, "1000"},
           Row{"-silu_and_mul,all,-silu_and_mul", kNone, "1011"},
           Row{"+relu3,none,+relu3", kAll, "0001"},
       }) {
    const auto policy = OpPolicy::Parse(row.text, row.when_silent);
    ASSERT_TRUE(policy.ok()) << row.text << ": " << policy.status();
    std::string enabled;
    for (const char* op :
         {"rms_norm", "silu_and_mul", "gelu_and_mul", "relu3"}) {
      enabled += policy->enabled(op) ? '1' : '0';
    }
    EXPECT_EQ(enabled, row.enabled) << row.text;
  }
  EXPECT_TRUE(OpPolicy().enabled("anything"));
}

TEST(OpPolicyTest, RefusesAtParse) {
  struct Case {
    std::string text, words;
  };
  for (const Case& c : {
           Case{"all,none", "has 2 of all and none; need at most one"},
           Case{"all,all", "has 2 of all and none"},
           Case{"none,none", "has 2 of all and none"},
           Case{"all,+rms_norm,all", "has 2 of all and none"},
           // `all` and `none` are counted before the other tokens are read.
           Case{"all,rms_norm,none", "has 2 of all and none"},
           Case{"rms_norm", "\"rms_norm\"; need all, none, +op or -op"},
           Case{"All", "\"All\"; need all"},
           Case{"all,", "\"\"; need all"},
           Case{"all, -op1", "\" -op1\"; need all"},
           Case{"+rms_norm,-rms_norm", "+rms_norm and -rms_norm; need one"},
       }) {
    const auto policy = OpPolicy::Parse(c.text);
    ASSERT_FALSE(policy.ok()) << c.text;
    EXPECT_EQ(policy.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(policy.status().message().find(c.words), std::string::npos)
        << policy.status();
  }
}

TEST(OpPolicyTest, DoesNotSplitTokens) {
  EXPECT_FALSE(OpPolicy::FromTokens({"all,-op1"}).ok());
  EXPECT_TRUE(OpPolicy::FromTokens({"all", "-op1"}).ok());
  // A sign alone is legal: it names an operator with an empty name, which
  // nothing has.
  EXPECT_TRUE(OpPolicy::FromTokens({"+"}).ok());
}

TEST(OpPolicyTest, KeepsTheSignedTokensInOrder) {
  const auto policy = OpPolicy::Parse("-b,none,+a,-b");
  ASSERT_TRUE(policy.ok());
  EXPECT_EQ(policy->signed_tokens(), (std::vector<std::string>{"-b", "+a"}));
}

}  // namespace
}  // namespace quern
