// MODULE.bazel and third_party/pins.bzl must name the same versions of the same
// code.

#include <cstddef>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <set>
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

// Maps a name that BUILD files use to its version.
using Versions = std::map<std::string, std::string>;

// Every bazel_dep of a MODULE.bazel, under its repo_name where it has one.
Versions BazelDeps(const std::string& module) {
  static const std::regex dep(R"(\nbazel_dep\(([^)]*)\))");
  static const std::regex attribute(R"((\w+) *= *\"([^\"]*)\")");
  Versions versions;
  for (std::sregex_iterator it(module.begin(), module.end(), dep), end;
       it != end; ++it) {
    const std::string arguments = (*it)[1];
    std::map<std::string, std::string> values;
    for (std::sregex_iterator a(arguments.begin(), arguments.end(), attribute),
         last;
         a != last; ++a) {
      values[(*a)[1]] = (*a)[2];
    }
    const auto repo_name = values.find("repo_name");
    versions[repo_name == values.end() ? values["name"] : repo_name->second] =
        values["version"];
  }
  return versions;
}

// Every entry of pins.bzl, with the version in its first address.
Versions Pins(const std::string& pins) {
  static const std::regex entry(
      R"re("(\w+)": dict\(\s*urls = \["[^"]*[-/]v?(\d[\d.]*\d)\.tar\.\w+"\])re");
  Versions versions;
  for (std::sregex_iterator it(pins.begin(), pins.end(), entry), end; it != end;
       ++it) {
    versions[(*it)[1]] = (*it)[2];
  }
  return versions;
}

// The repositories that MODULE.bazel takes from third_party/extensions.bzl.
std::set<std::string> FromExtension(const std::string& module) {
  static const std::regex use(R"(\nuse_repo\(archives,([^)]*)\))");
  static const std::regex name(R"(\"(\w+)\")");
  std::set<std::string> names;
  std::smatch match;
  if (!std::regex_search(module, match, use)) return names;
  const std::string arguments = match[1];
  for (std::sregex_iterator it(arguments.begin(), arguments.end(), name), end;
       it != end; ++it) {
    names.insert((*it)[1]);
  }
  return names;
}

TEST(PinsTest, ModuleNamesEveryPinInItsVersion) {
  const std::string module = ReadFile("MODULE.bazel");
  const Versions deps = BazelDeps(module);
  std::set<std::string> extension = FromExtension(module);
  const std::string text = ReadFile("third_party/pins.bzl");
  const Versions pins = Pins(text);

  // An entry that the pattern misses would not be compared.
  static const std::regex any_entry(R"(\"\w+\": dict\()");
  ASSERT_EQ(pins.size(),
            static_cast<size_t>(std::distance(
                std::sregex_iterator(text.begin(), text.end(), any_entry),
                std::sregex_iterator())));
  ASSERT_FALSE(pins.empty());

  for (const auto& [name, version] : pins) {
    const auto dep = deps.find(name);
    if (dep == deps.end()) {
      EXPECT_EQ(extension.erase(name), 1u)
          << "MODULE.bazel has neither a bazel_dep nor a use_repo for " << name;
    } else {
      EXPECT_EQ(dep->second, version) << "of " << name << " in MODULE.bazel";
    }
  }
  for (const auto& [name, version] : deps) {
    EXPECT_EQ(pins.count(name), 1u)
        << "third_party/pins.bzl has no " << name << " " << version;
  }
  // MPI is not pinned, because it is found on the machine.
  EXPECT_EQ(extension, std::set<std::string>{"mpi"});
}

}  // namespace
}  // namespace quern
