#include "examples/generate/options.h"

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "core/hwy_executor.h"

ABSL_FLAG(std::string, model, "",
          "GGUF file of a Llama model; default: the one that comes with this");
ABSL_FLAG(std::optional<std::string>, prompt, std::nullopt,
          "text to continue; default: standard input");
ABSL_FLAG(int64_t, max_tokens, 128, "stop after so many new tokens");
ABSL_FLAG(int, threads, 0, "threads; 0: one for each available core");
ABSL_FLAG(float, temperature, 0.8f,
          "0: always the likeliest token; higher: more varied");
ABSL_FLAG(int64_t, top_k, 40, "choose among the k likeliest tokens; 0: all");
ABSL_FLAG(float, top_p, 1.0f,
          "choose among the likeliest tokens that reach this probability");
ABSL_FLAG(uint64_t, seed, 4,
          "of the random draws: the same seed gives the same text");
ABSL_FLAG(bool, stats, false,
          "tell the speed, the memory and the kernels on standard error");

namespace quern {
namespace {

// In the order of the help text.
constexpr absl::string_view kFlags[] = {"prompt",  "model",       "max_tokens",
                                        "threads", "temperature", "top_k",
                                        "top_p",   "seed",        "stats"};

absl::CommandLineFlag* FindOwnFlag(absl::string_view name) {
  for (const absl::string_view own : kFlags) {
    if (name == own) return absl::FindCommandLineFlag(name);
  }
  return nullptr;  // a library's flag is not ours
}

// --name=value, --name value, and --stats alone; one dash does as well.
absl::Status ParseFlags(int argc, char** argv, bool* help) {
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument.size() < 2 || argument[0] != '-') {
      return absl::InvalidArgumentError(
          absl::StrCat("'", argument,
                       "' is not a flag; put the text to "
                       "continue into --prompt=\"...\""));
    }
    absl::string_view name = argument;
    name.remove_prefix(argument[1] == '-' ? 2 : 1);
    std::optional<std::string> value;
    if (const size_t equals = name.find('='); equals != name.npos) {
      value = std::string(name.substr(equals + 1));
      name = name.substr(0, equals);
    }
    if (name == "help" || name == "h") {
      *help = true;
      return absl::OkStatus();
    }
    absl::CommandLineFlag* flag = FindOwnFlag(name);
    if (flag == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is no flag --", name, "; --help lists them"));
    }
    if (!value.has_value()) {
      if (flag->IsOfType<bool>()) {
        value = "true";
      } else if (i + 1 < argc) {
        value = argv[++i];
      } else {
        return absl::InvalidArgumentError(
            absl::StrCat("--", name, " needs a value"));
      }
    }
    std::string error;
    if (!flag->ParseFrom(*value, &error)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--", name, "=", *value, " is not a value of that flag: need ",
          flag->IsOfType<bool>()    ? "true or false"
          : flag->IsOfType<float>() ? "a number"
                                    : "a whole number in range"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const GenerateOptions& o) {
  const auto refuse = [](const auto&... pieces) {
    return absl::InvalidArgumentError(absl::StrCat(pieces...));
  };
  if (o.max_tokens < 1) {
    return refuse("--max_tokens=", o.max_tokens, "; need at least 1");
  }
  if (o.threads < 0 || o.threads > HwyExecutor::kMaxWorkers) {
    return refuse("--threads=", o.threads, "; need 0 to ",
                  HwyExecutor::kMaxWorkers);
  }
  if (!std::isfinite(o.temperature) || o.temperature < 0) {
    return refuse("--temperature=", o.temperature, "; need 0 or more");
  }
  if (o.top_k < 0) return refuse("--top_k=", o.top_k, "; need 0 or more");
  if (!(o.top_p > 0 && o.top_p <= 1)) {
    return refuse("--top_p=", o.top_p, "; need more than 0 and at most 1");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GenerateOptions> ParseOptions(int argc, char** argv) {
  GenerateOptions o;
  if (absl::Status status = ParseFlags(argc, argv, &o.help); !status.ok()) {
    return status;
  }
  o.model = absl::GetFlag(FLAGS_model);
  o.prompt = absl::GetFlag(FLAGS_prompt);
  o.max_tokens = absl::GetFlag(FLAGS_max_tokens);
  o.threads = absl::GetFlag(FLAGS_threads);
  o.temperature = absl::GetFlag(FLAGS_temperature);
  o.top_k = absl::GetFlag(FLAGS_top_k);
  o.top_p = absl::GetFlag(FLAGS_top_p);
  o.seed = absl::GetFlag(FLAGS_seed);
  o.stats = absl::GetFlag(FLAGS_stats);
  if (absl::Status status = CheckOptions(o); !status.ok() && !o.help) {
    return status;
  }
  return o;
}

std::string HelpText() {
  std::string text =
      "Continues a text with a language model, on the CPU.\n\n"
      "  generate --prompt=\"In the beginning\"\n"
      "  echo \"In the beginning\" | generate --temperature=0 --stats\n\n"
      "The text comes on standard output, token by token, until the model "
      "ends it,\n--max_tokens is reached or the model's context is full. "
      "Exit code: 0, or 1 if\nsomething failed, or 2 if the command line is "
      "wrong.\n\n";
  for (const absl::string_view name : kFlags) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    const std::string value = flag->DefaultValue();
    absl::StrAppend(&text, "  --", name,
                    value.empty() ? "" : absl::StrCat(" (", value, ")"),
                    "\n      ", flag->Help(), "\n");
  }
  return text;
}

}  // namespace quern
