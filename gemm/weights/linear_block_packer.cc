#include <cstdint>

#include "absl/types/span.h"
#include "quern/core/check.h"
#include "quern/core/executor.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/weights/block_pack.h"
#include "quern/gemm/weights/linear_sources.h"
#include "quern/gemm/weights/packed_form.h"

namespace quern {

void PackBlockSources(const LinearWeightsSpec& spec, const PackedForm& form,
                      absl::Span<const LinearSource> sources, uint8_t* to,
                      Executor& executor) {
  BlockPackSpec pack_spec;
  pack_spec.format = spec.block_format;
  pack_spec.n = form.part_n;
  pack_spec.k = spec.k;
  const auto plan = BlockPackPlan::Create(pack_spec);
  QUERN_CHECK(plan.ok());  // PackedForm has laid it out
  PackParts(*plan, form, sources, to, executor);
}

}  // namespace quern
