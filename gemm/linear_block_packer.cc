#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/executor.h"
#include "quern/gemm/block_pack.h"
#include "quern/gemm/linear_sources.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/packed_form.h"

namespace quern {

void PackBlockSources(const LinearWeightsSpec& spec, const PackedForm& form,
                      absl::Span<const LinearSource> sources, uint8_t* to,
                      Executor& executor) {
  const std::vector<const uint8_t*> rows = RowsOfCodes(sources);
  BlockPackSpec pack_spec;
  pack_spec.format = spec.block_format;
  pack_spec.n = form.part_n;
  pack_spec.k = spec.k;
  const auto plan = BlockPackPlan::Create(pack_spec);
  QUERN_CHECK(plan.ok());  // PackedForm has laid it out
  for (int64_t part = 0; part < form.parts; ++part) {
    plan->Pack(absl::MakeConstSpan(rows).subspan(
                   static_cast<size_t>(part * form.part_n),
                   static_cast<size_t>(form.part_n)),
               to + form.panels + part * form.part_bytes, executor);
  }
}

}  // namespace quern
