// The version is the same wherever it stands.

#include "quern/core/version.h"

#include <fstream>
#include <regex>
#include <sstream>
#include <string>

#include "gtest/gtest.h"

namespace quern {
namespace {

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// What the expression's first group matches, in the first place that it does.
std::string Find(const std::string& text, const char* expression) {
  std::smatch match;
  return std::regex_search(text, match, std::regex(expression)) ? match[1].str()
                                                                : "no match";
}

TEST(VersionTest, StringIsMadeOfTheNumbers) {
  EXPECT_EQ(std::to_string(QUERN_VERSION_MAJOR) + "." +
                std::to_string(QUERN_VERSION_MINOR) + "." +
                std::to_string(QUERN_VERSION_PATCH),
            QUERN_VERSION_STRING);
}

TEST(VersionTest, IsThatOfTheModule) {
  EXPECT_EQ(Find(ReadFile("MODULE.bazel"),
                 R"re(\nmodule\([^)]*\bversion = "([^"]*)")re"),
            QUERN_VERSION_STRING);
}

TEST(VersionTest, IsTheNewestOfTheChangelog) {
  const std::string changelog = ReadFile("CHANGELOG.md");
  EXPECT_EQ(Find(changelog, R"(\n## \[(\d+\.\d+\.\d+)\])"),
            QUERN_VERSION_STRING);
  EXPECT_EQ(
      Find(changelog, R"(\n## \[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d)\n)").size(),
      10u)
      << "the newest release has no date";
}

TEST(VersionTest, IsThatOfTheFrontPage) {
  EXPECT_EQ(Find(ReadFile("README.md"), R"(This is version (\d+\.\d+\.\d+)\.)"),
            QUERN_VERSION_STRING);
}

}  // namespace
}  // namespace quern
