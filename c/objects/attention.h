#ifndef QUERN_C_OBJECTS_ATTENTION_H_
#define QUERN_C_OBJECTS_ATTENTION_H_

// Private to c/. What quern_kv_cache and quern_schedule are.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "quern/attention/attention_spec.h"
#include "quern/attention/schedule.h"
#include "quern/c/object.h"
#include "quern/cache/kv_cache.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/ops/registry/families/attention/attention_ops.h"

namespace quern {
namespace c_abi {

class KvCacheObject final : public Object {
 public:
  explicit KvCacheObject(KvCache cache)
      : cache_(std::move(cache)),
        shape_{cache_.num_pages(), cache_.layout().page_bytes()} {}

  std::string Explain() const override;
  const KvLayout& layout() const { return cache_.layout(); }
  int64_t num_pages() const { return cache_.num_pages(); }
  // InvalidArgument: a layer that does not exist.
  absl::Status Pages(int64_t layer, quern_tensor& pages);

 private:
  KvCache cache_;
  int64_t shape_[2];
};

class ScheduleObject final : public Object {
 public:
  // `cache` is held, and `spec` has its layout.
  ScheduleObject(Borrowed cache, const AttentionSpec& spec,
                 const AttentionLimits& limits)
      : cache_(std::move(cache)), spec_(spec) {
    step_.limits = limits;
  }

  std::string Explain() const override;
  // What operators are made with and read. Its address does not change.
  const AttentionStep& step() const { return step_; }
  // After a refusal the step has no sequences.
  absl::Status Build(const quern_step& step);

 private:
  absl::Status CheckStep(const quern_step& step) const;
  absl::Status Fill(const quern_step& step);

  Borrowed cache_;
  AttentionSpec spec_;
  AttentionStep step_;
  PageTableStorage table_;
  AttentionScheduleStorage schedule_;
};

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_OBJECTS_ATTENTION_H_
