// The names of known_names.txt are registered, but for those that it calls
// missing, which are not; and in the table of other names of
// docs/porting_ops.md the names of one column are registered, and those of the
// other are not.

#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
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
  // Names of vLLM's and SGLang's CPU backends, and of vLLM's custom ops and
  // layers.
  EXPECT_EQ(seen.size(), 119u);
}

// The text between the first two backquotes of a column.
std::string NameIn(absl::string_view column) {
  const std::vector<absl::string_view> pieces = absl::StrSplit(column, '`');
  return pieces.size() < 3 ? "" : std::string(pieces[1]);
}

TEST(KnownNamesTest, OtherNamesLeadToRegisteredOnes) {
  constexpr char kDocument[] = "docs/porting_ops.md";
  OpRegistry registry;
  ASSERT_EQ(RegisterAllOps(registry), absl::OkStatus());
  std::ifstream file(kDocument);
  ASSERT_TRUE(file.good()) << kDocument;
  std::string line, before;
  while (std::getline(file, line) && line != "## Other names") {
  }
  int rows = 0;
  while (std::getline(file, line) && !absl::StartsWith(line, "## ")) {
    if (!absl::StartsWith(line, "| `")) continue;
    const std::vector<absl::string_view> columns = absl::StrSplit(line, '|');
    ASSERT_EQ(columns.size(), 5u) << line;
    const std::string theirs = NameIn(columns[1]), ours = NameIn(columns[2]);
    EXPECT_EQ(registry.Find(theirs), nullptr) << theirs << " is ours too";
    EXPECT_NE(registry.Find(ours), nullptr) << ours << " is not registered";
    EXPECT_LT(before, theirs) << "the table is alphabetical";
    before = theirs;
    ++rows;
  }
  EXPECT_GT(rows, 10) << kDocument << " lacks the table of other names";
}

}  // namespace
}  // namespace quern
