// The version is the same wherever it stands.

#include "quern/core/version.h"

#include <cstdio>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <tuple>

#include "gtest/gtest.h"

namespace quern {
namespace {

const char kDev[] = "-dev";

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

std::string Numbers() {
  return std::to_string(QUERN_VERSION_MAJOR) + "." +
         std::to_string(QUERN_VERSION_MINOR) + "." +
         std::to_string(QUERN_VERSION_PATCH);
}

bool IsRelease() { return Numbers() == QUERN_VERSION_STRING; }

std::tuple<int, int, int> Parsed(const std::string& version) {
  int major = -1, minor = -1, patch = -1;
  std::sscanf(version.c_str(), "%d.%d.%d", &major, &minor, &patch);
  return {major, minor, patch};
}

TEST(VersionTest, StringIsMadeOfTheNumbers) {
  EXPECT_EQ(Numbers() + (IsRelease() ? "" : kDev), QUERN_VERSION_STRING);
}

TEST(VersionTest, IsTheSameInEveryFile) {
  const struct {
    const char* path;
    const char* expression;
  } places[] = {
      {"MODULE.bazel", R"re(\nmodule\([^)]*\bversion = "([^"]*)")re"},
      {"README.md", R"(This is version (\d+\.\d+\.\d+(-dev)?)[.:])"},
      {"python/quern/_abi.py", R"re(\nVERSION = "([^"]*)"\n)re"},
  };
  for (const auto& place : places) {
    EXPECT_EQ(Find(ReadFile(place.path), place.expression),
              QUERN_VERSION_STRING)
        << place.path;
  }
}

TEST(VersionTest, ProgramsAskCMakeForThisMinorVersion) {
  const std::string minor = std::to_string(QUERN_VERSION_MAJOR) + "." +
                            std::to_string(QUERN_VERSION_MINOR);
  for (const char* path : {"README.md", "c/README.md", "docs/install.md",
                           "examples/plain_c/CMakeLists.txt"}) {
    const std::string text = ReadFile(path);
    const std::regex expression(R"(find_package\(quern ([0-9.]+))");
    std::sregex_iterator found(text.begin(), text.end(), expression);
    EXPECT_NE(found, std::sregex_iterator()) << path;
    for (; found != std::sregex_iterator(); ++found) {
      EXPECT_EQ((*found)[1].str(), minor) << path;
    }
  }
}

// A release has a dated section of its own, the first of the changelog. Between
// two releases the first section is "Unreleased", and the release below it is
// an older one.
TEST(VersionTest, ChangelogBeginsWithIt) {
  const std::string changelog = ReadFile("CHANGELOG.md");
  const std::string first = Find(changelog, R"(\n## \[?([^\]\n]*))");
  const std::string newest = Find(changelog, R"(\n## \[(\d+\.\d+\.\d+)\])");
  if (IsRelease()) {
    EXPECT_EQ(first, QUERN_VERSION_STRING);
    EXPECT_EQ(newest, QUERN_VERSION_STRING);
  } else {
    EXPECT_EQ(first, "Unreleased");
    EXPECT_LT(Parsed(newest), Parsed(QUERN_VERSION_STRING));
  }
}

TEST(VersionTest, EveryReleaseOfTheChangelogHasADate) {
  const std::string changelog = ReadFile("CHANGELOG.md");
  const std::regex heading(R"(\n## ([^\n]*))");
  const std::regex dated(R"(\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d)");
  int releases = 0;
  for (std::sregex_iterator i(changelog.begin(), changelog.end(), heading);
       i != std::sregex_iterator(); ++i) {
    const std::string title = (*i)[1].str();
    if (title == "Unreleased") continue;
    EXPECT_TRUE(std::regex_match(title, dated)) << title;
    ++releases;
  }
  EXPECT_GE(releases, 1);
}

}  // namespace
}  // namespace quern
