#ifndef QUERN_MODELS_TESTING_GOLDEN_TESTUTIL_H_
#define QUERN_MODELS_TESTING_GOLDEN_TESTUTIL_H_

// Reads the golden files of models/quern_kjv_4m. tools/golden_to_text.py writes
// them and describes their lines.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "quern/testing/files.h"

namespace quern {

// Path of a file of the shipped model, relative to the runfiles root.
inline std::string ModelFile(absl::string_view name) {
  return absl::StrCat("models/quern_kjv_4m/", name);
}

inline std::string GoldenText(absl::string_view hex) {
  std::string text;
  if (hex != "-" && !absl::HexStringToBytes(hex, &text)) return "not hex";
  return text;
}

inline std::vector<int32_t> GoldenIds(absl::string_view list) {
  std::vector<int32_t> ids;
  if (list == "-") return ids;
  for (const absl::string_view item : absl::StrSplit(list, ',')) {
    int32_t id = -1;
    (void)absl::SimpleAtoi(item, &id);
    ids.push_back(id);
  }
  return ids;
}

struct GoldenPrompt {
  std::string text;
  std::vector<int32_t> ids;  // including bos
  std::vector<int32_t> greedy_ids;
  std::string greedy_text;
  std::vector<std::pair<int32_t, float>> top20;
};

struct Golden {
  std::vector<GoldenPrompt> prompts;
  int64_t windows = 0, window_tokens = 0;
  double nll = 0, perplexity = 0, first_window_nll = 0;
};

inline Golden ReadGolden() {
  Golden golden;
  for (const absl::string_view line :
       absl::StrSplit(FileBytes(ModelFile("golden.txt")), '\n')) {
    const std::vector<std::string> f = absl::StrSplit(line, ' ');
    if (f[0] == "prompt" && f.size() == 5) {
      golden.prompts.push_back({GoldenText(f[1]),
                                GoldenIds(f[2]),
                                GoldenIds(f[3]),
                                GoldenText(f[4]),
                                {}});
    } else if (f[0] == "top20" && f.size() == 2) {
      for (const absl::string_view item : absl::StrSplit(f[1], ',')) {
        const std::pair<std::string, std::string> pair =
            absl::StrSplit(item, ':');
        std::pair<int32_t, float> entry{-1, 0.0f};
        (void)absl::SimpleAtoi(pair.first, &entry.first);
        (void)absl::SimpleAtof(pair.second, &entry.second);
        golden.prompts.back().top20.push_back(entry);
      }
    } else if (f[0] == "perplexity" && f.size() == 6) {
      (void)absl::SimpleAtoi(f[1], &golden.windows);
      (void)absl::SimpleAtoi(f[2], &golden.window_tokens);
      (void)absl::SimpleAtod(f[3], &golden.nll);
      (void)absl::SimpleAtod(f[4], &golden.perplexity);
      (void)absl::SimpleAtod(f[5], &golden.first_window_nll);
    }
  }
  return golden;
}

}  // namespace quern

#endif  // QUERN_MODELS_TESTING_GOLDEN_TESTUTIL_H_
