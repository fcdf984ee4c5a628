#ifndef QUERN_OPS_ROPE_ROTARY_TABLES_H_
#define QUERN_OPS_ROPE_ROTARY_TABLES_H_

// Tables of cosines and sines that several rotary plans share. A table of
// 131072 positions takes 64 MiB and 0.2 s for a head of 128, and plans for
// other dtypes or head sizes need the same one.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/aligned_buffer.h"
#include "quern/ops/rope/rotary_spec.h"

namespace quern {

// A plan that is given one of these takes its table from here. A table is freed
// with the last plan that has it. Safe to use concurrently: whoever asks for a
// table that another thread is making waits for it.
class RotaryTables {
 public:
  // Returns the table's rows for positions [0, count), which depend on the
  // spec's rot_dim, base, style, scaling and turn. Refusals are those of
  // MakeRotaryTable (rotary_rows.h).
  absl::StatusOr<std::shared_ptr<const AlignedBuffer>> Get(
      absl::string_view op, const RotaryEmbeddingSpec& spec,
      absl::string_view count_field, int64_t count);

  // Number of tables that plans have now.
  size_t size();

 private:
  struct Entry {
    RotaryEmbeddingSpec spec;
    int64_t count;
    std::weak_ptr<const AlignedBuffer> table;
  };
  void Forget();  // the tables that no plan has any more

  std::mutex mutex_;
  std::vector<Entry> entries_;  // guarded by mutex_
};

// Returns a table of `tables`, or a new one if `tables` is null.
absl::StatusOr<std::shared_ptr<const AlignedBuffer>> GetRotaryTable(
    RotaryTables* tables, absl::string_view op, const RotaryEmbeddingSpec& spec,
    absl::string_view count_field, int64_t count);

}  // namespace quern

#endif  // QUERN_OPS_ROPE_ROTARY_TABLES_H_
