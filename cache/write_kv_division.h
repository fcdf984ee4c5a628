#ifndef QUERN_CACHE_WRITE_KV_DIVISION_H_
#define QUERN_CACHE_WRITE_KV_DIVISION_H_

// Private to write_kv: how one call is divided among workers. Task i writes the
// heads [HeadBegin(i), HeadEnd(i)) of the tokens [TokenBegin(i), TokenEnd(i)).

#include <algorithm>
#include <cstdint>

#include "quern/cache/kv_layout.h"
#include "quern/core/math_util.h"

namespace quern {

class WriteKvDivision {
 public:
  // row_elements: what one token has for one head, keys and values. tokens may
  // be 0, the others are 1 or more.
  WriteKvDivision(int64_t tokens, int64_t heads, int64_t row_elements,
                  int64_t workers)
      : tokens_(tokens), heads_(heads) {
    if (tokens == 0) return;
    constexpr int64_t kGroup = KvLayout::kGroupTokens;
    const int64_t most = workers == 1 ? 1 : kTasksPerWorker * workers;
    const int64_t worth = std::clamp(
        tokens * heads * row_elements / kMinTaskElements, int64_t{1}, most);
    const int64_t share = tokens / (kTasksPerWorker * workers);
    token_step_ =
        std::clamp(share / kGroup * kGroup, kMinTaskTokens, kMaxTaskTokens);
    // One head cannot be divided, but the tokens of a decode step can: each
    // goes to a page of its own.
    if (DivCeil(tokens, token_step_) * heads < worth) {
      token_step_ = std::max(tokens * heads / worth, int64_t{1});
    }
    const int64_t token_tasks = DivCeil(tokens, token_step_);
    head_step_ =
        DivCeil(heads, std::clamp(worth / token_tasks, int64_t{1}, heads));
    head_tasks_ = DivCeil(heads, head_step_);
    tasks_ = token_tasks * head_tasks_;
  }

  int64_t tasks() const { return tasks_; }
  int64_t TokenBegin(int64_t task) const {
    return task / head_tasks_ * token_step_;
  }
  int64_t TokenEnd(int64_t task) const {
    return std::min(tokens_, TokenBegin(task) + token_step_);
  }
  int64_t HeadBegin(int64_t task) const {
    return task % head_tasks_ * head_step_;
  }
  int64_t HeadEnd(int64_t task) const {
    return std::min(heads_, HeadBegin(task) + head_step_);
  }

 private:
  // Several tasks for each worker level out slow ones.
  static constexpr int64_t kTasksPerWorker = 4;
  // A task of fewer elements costs less than starting it.
  static constexpr int64_t kMinTaskElements = 4096;
  // Tokens of one task, where there are enough: so many that the prefetch of
  // the next group hits the same worker, so few that all workers have some.
  static constexpr int64_t kMinTaskTokens = 2 * KvLayout::kGroupTokens;
  static constexpr int64_t kMaxTaskTokens = 16 * KvLayout::kGroupTokens;

  int64_t tokens_;
  int64_t heads_;
  int64_t token_step_ = 1;
  int64_t head_step_ = 1;
  int64_t head_tasks_ = 1;
  int64_t tasks_ = 0;
};

}  // namespace quern

#endif  // QUERN_CACHE_WRITE_KV_DIVISION_H_
