#include "quern/ops/rope/rotary_tables.h"

#include <algorithm>
#include <utility>

#include "quern/core/status_macros.h"
#include "quern/ops/rope/rotary_rows.h"
#include "quern/ops/rope/rotary_scaling.h"

namespace quern {
namespace {

using Table = std::shared_ptr<const AlignedBuffer>;

// Whether both specs have the same rows.
bool SameRows(const RotaryEmbeddingSpec& a, const RotaryEmbeddingSpec& b) {
  return a.rot_dim == b.rot_dim && a.base == b.base && a.style == b.style &&
         a.turn == b.turn && a.scaling == b.scaling;
}

}  // namespace

absl::StatusOr<Table> RotaryTables::Get(absl::string_view op,
                                        const RotaryEmbeddingSpec& spec,
                                        absl::string_view count_field,
                                        int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Entry& entry : entries_) {
    if (entry.count != count || !SameRows(entry.spec, spec)) continue;
    if (Table table = entry.table.lock(); table != nullptr) return table;
  }
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer made,
                         MakeRotaryTable(op, spec, count_field, count));
  auto table = std::make_shared<const AlignedBuffer>(std::move(made));
  Forget();
  entries_.push_back({spec, count, table});
  return table;
}

void RotaryTables::Forget() {
  entries_.erase(
      std::remove_if(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return entry.table.expired(); }),
      entries_.end());
}

size_t RotaryTables::size() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Forget();
  return entries_.size();
}

absl::StatusOr<Table> GetRotaryTable(RotaryTables* tables, absl::string_view op,
                                     const RotaryEmbeddingSpec& spec,
                                     absl::string_view count_field,
                                     int64_t count) {
  RotaryTables own;
  return (tables != nullptr ? *tables : own).Get(op, spec, count_field, count);
}

}  // namespace quern
