// The names of known_names.txt are registered, but for those that it calls
// missing, which are not.

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace {

constexpr char kPath[] = "ops/registry/known_names.txt";

// Compares one line, which is not a comment, and adds its name to `seen`.
void ExpectTold(const OpRegistry& registry, const std::string& line,
                std::set<std::string>& seen) {
  std::istringstream words(line);
  std::string name, mark, rest;
  words >> name >> mark >> rest;
  EXPECT_TRUE((mark.empty() || mark == "missing") && rest.empty())
      << kPath << ": \"" << line << "\"; need a name, or a name and missing";
  EXPECT_TRUE(seen.insert(name).second) << kPath << " has " << name << " twice";
  if (mark == "missing") {
    EXPECT_EQ(registry.Find(name), nullptr)
        << name << " is registered; delete the word missing in " << kPath;
  } else {
    EXPECT_NE(registry.Find(name), nullptr)
        << name << " is not registered; write missing behind it in " << kPath;
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
  // Seven of vLLM's CPU backend, 38 custom ops and layers, and SGLang's.
  EXPECT_EQ(seen.size(), 7u + 38u + 12u);
}

}  // namespace
}  // namespace quern
