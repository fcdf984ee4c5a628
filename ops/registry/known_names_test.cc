// The names of known_names.txt are registered, but for those that it calls
// missing, which are not.

#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace {

constexpr char kPath[] = "ops/registry/known_names.txt";

// Whether the line is a name, or a name and the reason why it is missing, of
// two words or more.
bool IsTold(const std::string& line) {
  std::istringstream words(line);
  std::string name, mark, reason, more;
  words >> name >> mark >> reason >> more;
  return !name.empty() && line[0] == name[0] &&
         (mark.empty() ? line == name : mark == "missing:" && !more.empty());
}

TEST(KnownNamesTest, AMissingNameNeedsAReason) {
  EXPECT_TRUE(IsTold("rms_norm"));
  EXPECT_TRUE(IsTold("initialize missing: state of a process"));
  EXPECT_FALSE(IsTold(" rms_norm"));
  EXPECT_FALSE(IsTold("rms_norm "));
  EXPECT_FALSE(IsTold("initialize missing"));
  EXPECT_FALSE(IsTold("initialize missing:"));
  EXPECT_FALSE(IsTold("initialize missing: unknown"));
  EXPECT_FALSE(IsTold("initialize absent: state of a process"));
}

// Compares one line, which is not a comment, and adds its name to `seen`.
void ExpectTold(const OpRegistry& registry, const std::string& line,
                std::set<std::string>& seen) {
  EXPECT_TRUE(IsTold(line))
      << kPath << ": \"" << line
      << "\"; need a name, or a name, \"missing:\" and a reason";
  const std::string name = line.substr(0, line.find(' '));
  EXPECT_TRUE(seen.insert(name).second) << kPath << " has " << name << " twice";
  if (name != line) {
    EXPECT_EQ(registry.Find(name), nullptr)
        << name << " is registered; delete the words behind it in " << kPath;
  } else {
    EXPECT_NE(registry.Find(name), nullptr)
        << name << " is not registered; write why behind it in " << kPath;
  }
}

TEST(KnownNamesTest, AreRegisteredOrCalledMissing) {
  OpRegistry registry;
  ASSERT_EQ(RegisterAllOps(registry), absl::OkStatus());
  std::ifstream file(kPath);
  ASSERT_TRUE(file.good()) << kPath;
  std::set<std::string> seen;
  std::string line;
  while (std::getline(file, line)) {
    if (!line.empty() && line[0] != '#') ExpectTold(registry, line, seen);
  }
  // Names of vLLM's and SGLang's CPU backends, and of vLLM's custom ops and
  // layers.
  EXPECT_EQ(seen.size(), 184u);
}

}  // namespace
}  // namespace quern
