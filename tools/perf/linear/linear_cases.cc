#include "quern/tools/perf/linear/linear_cases.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "quern/core/status_macros.h"
#include "quern/gemm/epilogue.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/linear/model_shapes.h"
#include "quern/tools/perf/op.h"

namespace quern {
namespace {

constexpr int64_t kMaxRows = 1 << 20;
constexpr LinearActivation kActivations[] = {
    LinearActivation::kNone,           LinearActivation::kSilu,
    LinearActivation::kGelu,           LinearActivation::kGeluTanh,
    LinearActivation::kSiluAndMul,     LinearActivation::kGeluAndMul,
    LinearActivation::kGeluTanhAndMul, LinearActivation::kSwigluOaiAndMul,
};

OpCase WithRows(Args args, int64_t m, std::string layer) {
  args.Set("m", absl::StrCat(m));
  return {std::move(args), std::move(layer)};
}

}  // namespace

absl::StatusOr<LinearActivation> LinearActivationOf(const Args& args) {
  std::vector<absl::string_view> names;
  for (const LinearActivation activation : kActivations) {
    names.push_back(LinearActivationName(activation));
  }
  QUERN_ASSIGN_OR_RETURN(const std::string name,
                         args.Choice("activation", names));
  return kActivations[std::find(names.begin(), names.end(), name) -
                      names.begin()];
}

// "packed AVX3_ZEN4 bf16 dot, ...", "onednn brg_matmul:avx512_core a=bf16 ...".
std::string LinearIsa(const std::string& explained) {
  const std::vector<std::string> words =
      absl::StrSplit(explained, absl::ByAnyChar(" :"));
  const size_t at = words[0] == "packed" ? 1 : 2;
  return at < words.size() ? words[at] : explained;
}

std::vector<Key> LinearKeys(std::vector<Key> keys) {
  keys.insert(
      keys.begin(),
      {{"kernels", "",
        "implementations to try, in order: packed,onednn; empty: see "
        "QUERN_KERNELS"},
       {"activation", "none",
        "none, silu, gelu, gelu_tanh, or one of two halves of the columns: "
        "silu_and_mul, gelu_and_mul, gelu_tanh_and_mul"},
       {"residual", "0", "1: adds a matrix like c"}});
  for (const Key& key : std::vector<Key>{
           {"m", "auto", "rows: tokens; a list: 1,4; auto: 1, or see --model"},
           {"n", "14336", "columns of weights"},
           {"k", "4096", "columns of a"},
           {"model", "none",
            "instead of n and k, every linear layer of llama3_8b, qwen3_8b, "
            "gemma2_9b or deepseek_v2_lite, each with m=1,4,16,64,256,1024"},
           {"layer", "all", "one of the model's layers, e.g. down"}}) {
    keys.push_back(key);
  }
  return keys;
}

absl::StatusOr<std::vector<OpCase>> LinearCases(const Args& args) {
  std::vector<absl::string_view> models = {"none"};
  for (const ModelShapes& model : AllModelShapes()) {
    models.push_back(model.name);
  }
  QUERN_ASSIGN_OR_RETURN(const std::string name, args.Choice("model", models));
  const ModelShapes* model = FindModelShapes(name);

  std::vector<int64_t> rows = {1};
  if (model != nullptr) rows = {1, 4, 16, 64, 256, 1024};
  if (args.Text("m") != "auto") {
    QUERN_ASSIGN_OR_RETURN(rows, args.Ints("m", 1, kMaxRows));
  }
  std::vector<OpCase> cases;
  if (model == nullptr) {
    if (args.given("layer")) {
      return InvalidArgument(args.op(), "--layer needs --model");
    }
    for (const int64_t m : rows) cases.push_back(WithRows(args, m, ""));
    return cases;
  }

  for (const absl::string_view key : {"n", "k"}) {
    if (args.given(key)) {
      return InvalidArgument(args.op(), "--", key,
                             " beside --model, whose layers say it");
    }
  }
  std::vector<absl::string_view> layers = {"all"};
  for (const LinearShape& shape : model->layers) layers.push_back(shape.layer);
  QUERN_ASSIGN_OR_RETURN(const std::string layer, args.Choice("layer", layers));
  for (const LinearShape& shape : model->layers) {
    if (layer != "all" && layer != shape.layer) continue;
    Args of_layer = args;
    of_layer.Set("n", absl::StrCat(shape.n));
    of_layer.Set("k", absl::StrCat(shape.k));
    for (const int64_t m : rows) {
      cases.push_back(
          WithRows(of_layer, m, absl::StrCat(model->name, " ", shape.layer)));
    }
  }
  return cases;
}

}  // namespace quern
