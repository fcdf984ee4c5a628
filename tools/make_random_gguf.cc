// Writes a GGUF file of random weights in the shape of a real model, for
// measurements of speed. --help explains the options.

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "quern/core/status_macros.h"
#include "quern/models/architectures/decoder_config.h"
#include "quern/models/gguf/gguf.h"
#include "quern/tools/random_model.h"

namespace quern {
namespace {

struct Options {
  const RandomModelShape* shape = nullptr;
  GgufTensorType type = GgufTensorType::kBF16;
  std::string out;
  int64_t layers = 0;  // 0: as many as the shape has
  uint64_t seed = 1;
  bool help = false;
};

// The shape that is written, with as many layers as were asked for.
RandomModelShape ShapeOf(const Options& options) {
  RandomModelShape shape = *options.shape;
  if (options.layers > 0) shape.layers = options.layers;
  return shape;
}

std::string ShapeNames() {
  return absl::StrJoin(RandomModelShapes(), ", ",
                       [](std::string* out, const RandomModelShape& shape) {
                         absl::StrAppend(out, shape.name);
                       });
}

struct Flag {
  absl::string_view name;
  absl::string_view shown_default;
  absl::string_view help;
  absl::string_view need;  // empty: a shape's name
  bool (*set)(const std::string& value, Options& options);
};

constexpr Flag kFlags[] = {
    {"shape", "", "whose layers: one of the shapes below", "",
     [](const std::string& value, Options& o) {
       for (const RandomModelShape& shape : RandomModelShapes()) {
         if (shape.name == value) o.shape = &shape;
       }
       return o.shape != nullptr && o.shape->name == value;
     }},
    {"out", "", "the file to write; one of that name is replaced", "a file",
     [](const std::string& value, Options& o) {
       o.out = value;
       return !value.empty();
     }},
    {"dtype", "bf16", "of the matrices: bf16, f16, f32 or q8_0",
     "bf16, f16, f32 or q8_0",
     [](const std::string& value, Options& o) {
       if (value == "bf16") {
         o.type = GgufTensorType::kBF16;
       } else if (value == "f16") {
         o.type = GgufTensorType::kF16;
       } else if (value == "f32") {
         o.type = GgufTensorType::kF32;
       } else if (value == "q8_0") {
         o.type = GgufTensorType::kQ8_0;
       } else {
         return false;
       }
       return true;
     }},
    {"layers", "the shape's",
     "how many layers: some of a model that does not fit into memory cost "
     "what\n"
     "      they cost there; they are its first, of which one must attend. Of "
     "fewer\n"
     "      than 4 of qwen3_next_80b_a3b the last attends",
     "a whole number, 1 to 4096",
     [](const std::string& value, Options& o) {
       static_assert(DecoderConfig::kMaxLayers == 4096, "see above");
       return absl::SimpleAtoi(value, &o.layers) && o.layers > 0 &&
              o.layers <= DecoderConfig::kMaxLayers;
     }},
    {"seed", "1", "of the weights: the same seed gives the same file",
     "a whole number, 0 or more",
     [](const std::string& value, Options& o) {
       return absl::SimpleAtoi(value, &o.seed);
     }},
};

const Flag* FindFlag(absl::string_view name) {
  for (const Flag& flag : kFlags) {
    if (flag.name == name) return &flag;
  }
  return nullptr;
}

// Accepts --name=value and --name value, with one or two dashes.
absl::StatusOr<Options> ParseOptions(int argc, char** argv) {
  Options options;
  const auto refuse = [](const auto&... pieces) {
    return absl::InvalidArgumentError(absl::StrCat(pieces...));
  };
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument.size() < 2 || argument[0] != '-') {
      return refuse("'", argument, "' is not a flag; --help lists them");
    }
    absl::string_view name = argument;
    name.remove_prefix(argument[1] == '-' ? 2 : 1);
    std::optional<std::string> value;
    if (const size_t equals = name.find('='); equals != name.npos) {
      value = std::string(name.substr(equals + 1));
      name = name.substr(0, equals);
    }
    if (name == "help" || name == "h") {
      options.help = true;
      return options;
    }
    const Flag* flag = FindFlag(name);
    if (flag == nullptr) {
      return refuse("there is no flag --", name, "; --help lists them");
    }
    if (!value.has_value()) {
      if (i + 1 == argc) return refuse("--", name, " needs a value");
      value = argv[++i];
    }
    if (!flag->set(*value, options)) {
      return refuse("--", name, "=", *value,
                    " is not a value of that flag: need ",
                    flag->need.empty() ? absl::StrCat("one of ", ShapeNames())
                                       : std::string(flag->need));
    }
  }
  if (options.shape == nullptr) {
    return refuse("--shape is missing; need one of ", ShapeNames());
  }
  if (options.out.empty()) return refuse("--out=FILE is missing");
  QUERN_RETURN_IF_ERROR(CheckRandomModel(ShapeOf(options)));
  return options;
}

std::string HelpText() {
  std::string text =
      "Writes a GGUF file of random weights in the shape of a real model: for\n"
      "measurements of speed, its text means nothing.\n\n"
      "  make_random_gguf --shape=tinyllama_1.1b --out=/tmp/tinyllama.gguf\n"
      "  generate --model=/tmp/tinyllama.gguf --prompt=\"a b c\" --stats\n\n"
      "Exit code: 0, or 1 if something failed, or 2 if the command line is "
      "wrong.\n\n";
  for (const Flag& flag : kFlags) {
    absl::StrAppend(&text, "  --", flag.name,
                    flag.shown_default.empty()
                        ? ""
                        : absl::StrCat(" (", flag.shown_default, ")"),
                    "\n      ", flag.help, "\n");
  }
  absl::StrAppend(&text, "\nShapes:\n");
  for (const RandomModelShape& s : RandomModelShapes()) {
    absl::StrAppend(&text, "  ", s.name, ": ", s.layers, " layers, width ",
                    s.hidden, ", ", s.q_heads, " heads on ", s.kv_heads,
                    ", feed-forward ", s.ffn, ", vocabulary ", s.vocab, "\n");
  }
  return text;
}

// Resolves a path against the caller's directory, because `bazel run` changes
// the working directory.
std::string FromCaller(const std::string& path) {
  const char* directory = std::getenv("BUILD_WORKING_DIRECTORY");
  if (directory == nullptr || path.empty() || path[0] == '/') return path;
  return absl::StrCat(directory, "/", path);
}

absl::Status Write(const Options& options) {
  const bool terminal = isatty(STDERR_FILENO) != 0;
  int64_t shown = -1;
  const absl::Status status = WriteRandomModel(
      ShapeOf(options), options.type, options.seed, FromCaller(options.out),
      [&](int64_t done, int64_t total) {
        const int64_t percent = done / std::max<int64_t>(1, total / 100);
        if (!terminal || percent == shown) return;
        shown = percent;
        std::fprintf(stderr, "\rwriting: %3d %% of %lld MiB",
                     static_cast<int>(percent),
                     static_cast<long long>(total >> 20));
      });
  if (shown >= 0) std::fprintf(stderr, "\r\033[K");
  return status;
}

int Main(int argc, char** argv) {
  const auto complain = [](const absl::Status& status) {
    std::fprintf(stderr, "make_random_gguf: %s\n",
                 std::string(status.message()).c_str());
  };
  const absl::StatusOr<Options> options = ParseOptions(argc, argv);
  if (!options.ok()) {
    complain(options.status());
    return 2;
  }
  if (options->help) {
    std::fputs(HelpText().c_str(), stdout);
    return std::fflush(stdout) == 0 ? 0 : 1;
  }
  if (const absl::Status status = Write(*options); !status.ok()) {
    complain(status);
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) { return quern::Main(argc, argv); }
