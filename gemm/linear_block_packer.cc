#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/executor.h"
#include "quern/gemm/block_traits.h"
#include "quern/gemm/block_unpack.h"
#include "quern/gemm/linear_sources.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/packed_form.h"
#include "quern/packing/block_panels.h"

namespace quern {

void PackBlockSources(const LinearWeightsSpec& spec, const PackedForm& form,
                      absl::Span<const LinearSource> sources, uint8_t* to,
                      Executor& executor) {
  std::vector<const uint8_t*> rows;  // of all sources
  for (const LinearSource& source : sources) {
    const Rows<uint8_t> of_source(source.codes);
    for (int64_t n = 0; n < ColumnsOf(source); ++n) {
      rows.push_back(of_source[n]);
    }
  }
  const auto layout = BlockPanels::Create(
      BlockTraitsOf(spec.block_format).codes, spec.k, form.part_n);
  QUERN_CHECK(layout.ok());  // PackedForm has laid it out
  const int64_t record_bytes =
      BlockFileBytes(spec.block_format, BlockPanels::kRecordBlocks);
  for (int64_t part = 0; part < form.parts; ++part) {
    PackBlockPanels(
        *layout,
        [&](int64_t n, int64_t record, BlockRecord* column) {
          const auto row = static_cast<size_t>(part * form.part_n + n);
          UnpackRecord(spec.block_format, rows[row] + record * record_bytes,
                       layout->RecordBlocks(record), column);
        },
        to + form.panels + part * form.part_bytes, executor);
  }
}

}  // namespace quern
