#include "examples/generate/input.h"

#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace quern {
namespace {

constexpr char kShippedModel[] = "models/quern_kjv_4m/quern-kjv-4m.bf16.gguf";

bool Readable(const std::string& path) {
  return access(path.c_str(), R_OK) == 0;
}

// Bazel puts the model among the program's runfiles. `bazel run` starts in
// their root; otherwise they lie beside the binary.
absl::StatusOr<std::string> FindShippedModel() {
  std::vector<std::string> roots = {""};
  for (const char* variable : {"RUNFILES_DIR", "TEST_SRCDIR"}) {
    if (const char* value = std::getenv(variable); value != nullptr) {
      roots.push_back(absl::StrCat(value, "/quern/"));
      roots.push_back(absl::StrCat(value, "/_main/"));
    }
  }
  std::string self(4096, '\0');
  const ssize_t size = readlink("/proc/self/exe", &self[0], self.size());
  if (size > 0) {
    self.resize(static_cast<size_t>(size));
    for (const char* root : {".runfiles/quern/", ".runfiles/_main/",
                             ".runfiles/quern~/", ".runfiles/quern+/"}) {
      roots.push_back(self + root);
    }
  }
  for (const std::string& root : roots) {
    if (Readable(root + kShippedModel)) return root + kShippedModel;
  }
  return absl::NotFoundError(
      absl::StrCat("cannot find the model that comes with this program (",
                   kShippedModel, "); name one with --model=FILE.gguf"));
}

}  // namespace

std::string CallersPath(const std::string& path) {
  const char* directory = std::getenv("BUILD_WORKING_DIRECTORY");
  if (directory == nullptr || path.empty() || path[0] == '/') return path;
  return absl::StrCat(directory, "/", path);
}

absl::StatusOr<std::string> ModelPath(const std::string& model) {
  if (model.empty()) return FindShippedModel();
  return CallersPath(model);
}

absl::StatusOr<std::string> ReadPrompt() {
  if (isatty(STDIN_FILENO) != 0) {
    std::fprintf(stderr, "Type the text to continue; end it with Ctrl-D.\n");
  }
  constexpr size_t kMaxBytes = 16 << 20;
  std::string text;
  char piece[4096];
  size_t got;
  while ((got = std::fread(piece, 1, sizeof(piece), stdin)) > 0) {
    text.append(piece, got);
    if (text.size() > kMaxBytes) {
      return absl::InvalidArgumentError(
          "standard input is longer than 16 MiB: too long for a prompt");
    }
  }
  if (std::ferror(stdin) != 0) {
    return absl::UnavailableError("cannot read the prompt from standard input");
  }
  if (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

}  // namespace quern
