#include "quern/cache/kv_cache.h"

#include <cstdint>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/check.h"
#include "quern/core/math_util.h"
#include "quern/core/status_macros.h"

namespace quern {
namespace {

constexpr char kOp[] = "kv_cache";

}  // namespace

absl::StatusOr<KvCache> KvCache::Create(const KvLayout& layout,
                                        int64_t num_pages, int64_t num_layers) {
  if (layout == KvLayout()) return InvalidArgument(kOp, "layout is empty");
  QUERN_RETURN_IF_ERROR(CheckRange(kOp, "num_pages", num_pages, 0,
                                   std::numeric_limits<int32_t>::max()));
  QUERN_RETURN_IF_ERROR(CheckAtLeast(kOp, "num_layers", num_layers, 0));
  int64_t bytes = 0;
  if (!CheckedMul(layout.page_bytes(), num_pages, &bytes) ||
      !CheckedMul(bytes, num_layers, &bytes)) {
    return InvalidArgument(
        kOp, "num_pages=", num_pages, ", num_layers=", num_layers, " pages of ",
        layout.page_bytes(), " bytes; need at most 2^63 - 1 bytes in all");
  }
  QUERN_ASSIGN_OR_RETURN(AlignedBuffer memory, AlignedBuffer::Create(bytes));
  return KvCache(layout, num_pages, num_layers, std::move(memory));
}

KvCacheView KvCache::Layer(int64_t layer) {
  QUERN_DCHECK(0 <= layer && layer < num_layers_);
  uint8_t* data = memory_.data();
  if (data != nullptr) data += layer * num_pages_ * layout_.page_bytes();
  return KvCacheView(layout_, num_pages_, data);
}

}  // namespace quern
