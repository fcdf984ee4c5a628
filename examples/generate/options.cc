#include "examples/generate/options.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/dtype.h"
#include "quern/core/max_isa.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/models/decoder/decoder.h"
#include "quern/ops/registry/op_policy.h"

namespace quern {
namespace {

constexpr char kWhole[] = "a whole number";
constexpr char kNumber[] = "a number";
constexpr int64_t kMaxSamples = 4096;

// Sets `to` to the choice that `value` names; returns false if there is none.
template <typename T>
bool Choose(std::initializer_list<std::pair<absl::string_view, T>> choices,
            absl::string_view value, T& to) {
  for (const auto& [name, choice] : choices) {
    if (value != name) continue;
    to = choice;
    return true;
  }
  return false;
}

// Sets `to` to the choice that name_of calls `value`; returns false if there is
// none.
template <typename T>
bool ChooseNamed(std::initializer_list<T> choices,
                 absl::string_view (*name_of)(T), absl::string_view value,
                 T& to) {
  for (const T choice : choices) {
    if (value != name_of(choice)) continue;
    to = choice;
    return true;
  }
  return false;
}

// A table in place of Abseil's flags, which need a hash table that GCC 12 does
// not compile under its sanitizers, and which exit on their own.
struct Flag {
  absl::string_view name;
  absl::string_view shown_default;
  absl::string_view help;
  absl::string_view need;
  bool (*set)(const std::string& value, GenerateOptions& options);
};

constexpr Flag kFlags[] = {
    {"prompt", "", "text to continue; default: standard input", "a text",
     [](const std::string& value, GenerateOptions& o) {
       o.prompt = value;
       return true;
     }},
    {"specials", "false",
     "names of control tokens in the text, such as <|im_start|>, are those\n"
     "      tokens; else they are text like any other. User-defined tokens "
     "are\n"
     "      tokens always",
     "true or false",
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtob(value, &o.specials);
     }},
    {"model", "",
     "GGUF file of a model that models/README.md lists, such as a Llama, "
     "Qwen3\n"
     "      or Gemma-2, in F32, F16, BF16 or a block format such as Q8_0 or "
     "Q4_K;\n"
     "      default: the one that comes with this",
     "a file",
     [](const std::string& value, GenerateOptions& o) {
       o.model = value;
       return true;
     }},
    {"weights", "file",
     "matrices as in the file (f32, bf16, f16 or a block format), or as bf16,\n"
     "      f32 or int8",
     "file, bf16, f32 or int8",
     [](const std::string& value, GenerateOptions& o) {
       return ChooseNamed({DecoderWeights::kAsInFile, DecoderWeights::kBF16,
                           DecoderWeights::kF32, DecoderWeights::kInt8},
                          &DecoderWeightsName, value, o.weights);
     }},
    {"activations", "int8",
     "what matrices in block formats multiply: rows that become int8, with a\n"
     "      scale for each 32 numbers; or exact ones. Other matrices multiply\n"
     "      exact rows always; exact is the default where --weights is not "
     "file",
     "exact or int8",
     [](const std::string& value, GenerateOptions& o) {
       return ChooseNamed(
           {DecoderActivations::kExact, DecoderActivations::kInt8},
           &DecoderActivationsName, value, o.activations.emplace());
     }},
    {"packed", "",
     "a file of packed matrices: written if there is none, else mapped, which\n"
     "      loads a model in the time that its embedding takes; with several\n"
     "      ranks, each has its own, whose path ends in the rank",
     "a path",
     [](const std::string& value, GenerateOptions& o) {
       o.packed = value;
       return true;
     }},
    {"kv", "bf16",
     "keys and values in the cache as f32, bf16, f16, i8, f8e4m3 or f8e5m2;\n"
     "      those of one byte with a scale for each token and head. Latents\n"
     "      (DeepSeek): f32, bf16, f16, or f8e4m3 with scales for blocks. "
     "Older\n"
     "      names of the last three, int8, fp8 and fp8e5m2, are taken too",
     "f32, bf16, f16, i8, f8e4m3 or f8e5m2",
     [](const std::string& value, GenerateOptions& o) {
       return ChooseNamed({DType::kF32, DType::kBF16, DType::kF16, DType::kI8,
                           DType::kF8E4M3, DType::kF8E5M2},
                          &DTypeName, value, o.kv) ||
              Choose<DType>({{"int8", DType::kI8},
                             {"fp8", DType::kF8E4M3},
                             {"fp8e5m2", DType::kF8E5M2}},
                            value, o.kv);
     }},
    {"custom_ops", "all",
     "operators that run their fast implementations, such as none,+rms_norm\n"
     "      or -rotary_embedding; the others run their references. Layers, "
     "such as\n"
     "      linear and paged_attention, run their references only by -name",
     "all or none, +operator, -operator, with commas between them",
     [](const std::string& value, GenerateOptions& o) {
       o.custom_ops = value;
       return OpPolicy::Parse(value).ok();
     }},
    {"max_tokens", "128", "stop after so many new tokens", kWhole,
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtoi(value, &o.max_tokens);
     }},
    {"samples", "1",
     "texts to write, with seed, seed + 1 and so on; several come when all "
     "are\n"
     "      complete, with a line of --- between them",
     kWhole,
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtoi(value, &o.samples);
     }},
    {"threads", "0",
     "threads, which ranks of one process share; 0: one for each available\n"
     "      core. generate_mpi: threads of each rank",
     kWhole,
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtoi(value, &o.threads);
     }},
    {"isa", "",
     "no instruction set better than this: AVX2, AVX2_VNNI, AVX3_ZEN4 and so\n"
     "      on, to repeat what happened on another CPU; default: QUERN_MAX_ISA "
     "in\n"
     "      the environment, or the best that this CPU has",
     "the name of an instruction set",
     [](const std::string& value, GenerateOptions& o) {
       o.isa = value;
       return IsaBit(value) != 0;
     }},
    {"ranks", "1",
     "ranks that hold the model together, each a part of it, as threads of\n"
     "      this process. generate_mpi: refuse to run on another number of\n"
     "      processes; default: any number that mpirun starts",
     kWhole,
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtoi(value, &o.ranks.emplace());
     }},
    {"temperature", "0.8", "0: always the likeliest token; higher: more varied",
     kNumber,
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtof(value, &o.temperature);
     }},
    {"top_k", "40", "choose among the k likeliest tokens; 0: all", kWhole,
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtoi(value, &o.top_k);
     }},
    {"top_p", "1",
     "choose among the likeliest tokens that reach this probability", kNumber,
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtof(value, &o.top_p);
     }},
    {"min_p", "0",
     "choose among the tokens with this share of the likeliest one's\n"
     "      probability, or more",
     kNumber,
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtof(value, &o.min_p);
     }},
    {"top_n_sigma", "0",
     "choose among the tokens whose logits are within so many standard\n"
     "      deviations of the largest; 0: all",
     kNumber,
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtof(value, &o.top_n_sigma);
     }},
    {"typical_p", "1",
     "choose among the tokens nearest to the entropy that reach this\n"
     "      probability",
     kNumber,
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtof(value, &o.typical_p);
     }},
    {"seed", "4", "of the random draws: the same seed gives the same text",
     "a whole number from 0 to 2^64 - 1",
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtoi(value, &o.seed);
     }},
    {"perplexity", "false",
     "instead of continuing the text, tell how well the model predicts it: e\n"
     "      to the mean of -log p, in windows of 256 tokens at most that know\n"
     "      nothing of each other; lower is better",
     "true or false",
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtob(value, &o.perplexity);
     }},
    {"stats", "false",
     "tell the speed, in tokens, bytes and operations, the memory, the "
     "kernels\n"
     "      and what ranks exchange on standard error",
     "true or false",
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtob(value, &o.stats);
     }},
    {"limits", "false",
     "measure what this machine can read and compute, beside the\n"
     "      text, and tell with --stats the fraction of it that was reached: "
     "the\n"
     "      bytes of weights, keys and values, or the operations of matrices "
     "and\n"
     "      attention, whichever take longer at these rates. Takes a second, "
     "some\n"
     "      milliseconds before each step, which then finds the caches empty, "
     "and\n"
     "      8 times the last-level cache of memory, 256 MiB at least; one rank "
     "only",
     "true or false",
     [](const std::string& value, GenerateOptions& o) {
       return absl::SimpleAtob(value, &o.limits);
     }},
};

const Flag* FindFlag(absl::string_view name) {
  for (const Flag& flag : kFlags) {
    if (flag.name == name) return &flag;
  }
  return nullptr;
}

// Accepts --name=value, --name value, and a boolean flag without a value, with
// one or two dashes.
absl::Status ParseFlags(int argc, char** argv, GenerateOptions& options) {
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument.size() < 2 || argument[0] != '-') {
      return absl::InvalidArgumentError(
          absl::StrCat("'", argument,
                       "' is not a flag; put the text to continue into "
                       "--prompt=\"...\""));
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
      return absl::OkStatus();
    }
    const Flag* flag = FindFlag(name);
    if (flag == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is no flag --", name, "; --help lists them"));
    }
    if (!value.has_value()) {
      if (flag->need == "true or false") {
        value = "true";
      } else if (i + 1 < argc) {
        value = argv[++i];
      } else {
        return absl::InvalidArgumentError(
            absl::StrCat("--", name, " needs a value"));
      }
    }
    if (!flag->set(*value, options)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", name, "=", *value,
                       " is not a value of that flag: need ", flag->need));
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
  if (o.samples < 1 || o.samples > kMaxSamples) {
    return refuse("--samples=", o.samples, "; need 1 to ", kMaxSamples);
  }
  if (o.activations == DecoderActivations::kInt8 &&
      o.weights != DecoderWeights::kAsInFile) {
    return refuse("--activations=int8 with other --weights than file; need ",
                  "--weights=file, whose blocks they multiply");
  }
  if (o.samples > 1 && o.perplexity) {
    return refuse("--samples=", o.samples,
                  " with --perplexity, which writes no text; need one of them");
  }
  if (o.threads < 0 || o.threads > HwyExecutor::kMaxWorkers) {
    return refuse("--threads=", o.threads, "; need 0 to ",
                  HwyExecutor::kMaxWorkers);
  }
  if (o.ranks.value_or(1) < 1) {
    return refuse("--ranks=", *o.ranks, "; need at least 1");
  }
  if (o.limits && !o.stats) {
    return refuse("--limits without --stats, which tells them; need both");
  }
  if (o.limits && o.ranks.value_or(1) > 1) {
    return refuse("--limits with --ranks=", *o.ranks,
                  "; need one rank, whose threads measure them");
  }
  if (!std::isfinite(o.temperature) || o.temperature < 0) {
    return refuse("--temperature=", o.temperature, "; need 0 or more");
  }
  if (o.top_k < 0) return refuse("--top_k=", o.top_k, "; need 0 or more");
  if (!(o.top_p > 0 && o.top_p <= 1)) {
    return refuse("--top_p=", o.top_p, "; need more than 0 and at most 1");
  }
  if (!(o.min_p >= 0 && o.min_p <= 1)) {
    return refuse("--min_p=", o.min_p, "; need 0 to 1");
  }
  if (!std::isfinite(o.top_n_sigma) || o.top_n_sigma < 0) {
    return refuse("--top_n_sigma=", o.top_n_sigma, "; need 0 or more");
  }
  if (!(o.typical_p > 0 && o.typical_p <= 1)) {
    return refuse("--typical_p=", o.typical_p,
                  "; need more than 0 and at most 1");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GenerateOptions> ParseOptions(int argc, char** argv) {
  GenerateOptions options;
  if (absl::Status status = ParseFlags(argc, argv, options);
      !status.ok() || options.help) {
    if (!status.ok()) return status;
    return options;
  }
  if (absl::Status status = CheckOptions(options); !status.ok()) return status;
  return options;
}

absl::Status CapIsa(const GenerateOptions& options) {
  constexpr char kVariable[] = "QUERN_MAX_ISA";
  const char* const variable = std::getenv(kVariable);
  const bool flag = !options.isa.empty();
  if (!flag && (variable == nullptr || *variable == '\0')) {
    return absl::OkStatus();
  }
  const absl::Status status =
      SetMaxIsa(flag ? options.isa : std::string(variable));
  if (status.ok()) return status;
  return absl::InvalidArgumentError(
      absl::StrCat(flag ? "--isa" : kVariable, ": ", status.message()));
}

std::string HelpText() {
  std::string text =
      "Continues a text with a language model, on the CPU.\n\n"
      "  generate --prompt=\"In the beginning\"\n"
      "  echo \"In the beginning\" | generate --temperature=0 --stats\n\n"
      "The text comes on standard output, token by token, until the model "
      "ends it,\n--max_tokens is reached or the model's context is full. "
      "Exit code: 0, or 1 if\nsomething failed, or 2 if the command line is "
      "wrong, or 130 if Ctrl-C came\nwhile the model was loaded.\n\n";
  for (const Flag& flag : kFlags) {
    absl::StrAppend(&text, "  --", flag.name,
                    flag.shown_default.empty()
                        ? ""
                        : absl::StrCat(" (", flag.shown_default, ")"),
                    "\n      ", flag.help, "\n");
  }
  return text;
}

}  // namespace quern
