#ifndef QUERN_TOOLS_PERF_ARGS_H_
#define QUERN_TOOLS_PERF_ARGS_H_

// OP --key=value...: the command line, checked. Every refusal is one sentence.

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"

namespace quern {

struct Key {
  absl::string_view name;           // without the dashes
  absl::string_view default_value;  // as text; read like one that was given
  absl::string_view help;
};

class Args {
 public:
  // InvalidArgument: not of the form --key=value, a key that is neither in
  // `keys` nor in `common`, a key twice.
  static absl::StatusOr<Args> Parse(absl::string_view op,
                                    absl::Span<const Key> keys,
                                    absl::Span<const Key> common,
                                    absl::Span<const absl::string_view> words);

  // The value of a key of the table. InvalidArgument if it is not what is asked
  // for: a decimal integer in range, one of the choices, 0 or 1.
  absl::StatusOr<int64_t> Int(absl::string_view key, int64_t min,
                              int64_t max) const;
  // One integer or more, between commas.
  absl::StatusOr<std::vector<int64_t>> Ints(absl::string_view key, int64_t min,
                                            int64_t max) const;
  absl::StatusOr<std::string> Choice(
      absl::string_view key, absl::Span<const absl::string_view> choices) const;
  absl::StatusOr<DType> Type(absl::string_view key,
                             absl::Span<const DType> choices) const;
  absl::StatusOr<bool> Flag(absl::string_view key) const;
  const std::string& Text(absl::string_view key) const;
  // Whether the command line has it.
  bool given(absl::string_view key) const { return given_.count(key) != 0; }
  // Sets a value as the command line would.
  void Set(absl::string_view key, std::string value);
  absl::string_view op() const { return op_; }

 private:
  std::string op_;
  std::map<std::string, std::string, std::less<>> values_;
  std::set<std::string, std::less<>> given_;
};

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_ARGS_H_
