#ifndef QUERN_EXAMPLES_GENERATE_PROGRESS_H_
#define QUERN_EXAMPLES_GENERATE_PROGRESS_H_

// A progress bar on standard error for long work. On a terminal it appears
// after one second and is redrawn in place; elsewhere it is a line every five
// seconds.

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace quern {

class Progress {
 public:
  // `out` is standard error, or null to show nothing.
  Progress(std::string what, FILE* out) : what_(std::move(what)), out_(out) {}
  ~Progress() {
    if (shown_ && terminal_) std::fprintf(out_, "\r\033[K");
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Show(int64_t done, int64_t total) {
    const absl::Time now = absl::Now();
    if (out_ == nullptr || now < next_ || total <= 0) return;
    next_ = now + (terminal_ ? absl::Milliseconds(100) : kLineInterval);
    shown_ = true;
    const double part =
        std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
    const auto filled = static_cast<size_t>(part * 30);
    const std::string bar =
        std::string(filled, '#') + std::string(30 - filled, '.');
    std::fprintf(out_, "%s%s [%s] %3.0f %%%s", terminal_ ? "\r" : "",
                 what_.c_str(), bar.c_str(), 100 * part, terminal_ ? "" : "\n");
  }

 private:
  static constexpr absl::Duration kLineInterval = absl::Seconds(5);

  const std::string what_;
  FILE* const out_;
  const bool terminal_ = out_ != nullptr && isatty(fileno(out_)) != 0;
  bool shown_ = false;
  absl::Time next_ =
      absl::Now() + (terminal_ ? absl::Seconds(1) : kLineInterval);
};

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_PROGRESS_H_
