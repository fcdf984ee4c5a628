// Packs one weight matrix with Quern, as an engine would at load time.

#include <cstdint>
#include <cstdio>
#include <vector>

#include "quern/core/aligned_buffer.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/packing/vnni_layout.h"
#include "quern/packing/vnni_pack.h"

int main() {
  const int64_t n = 33, k = 130;  // not a multiple of any block size
  std::vector<int8_t> weights(static_cast<size_t>(n * k), int8_t{1});

  const auto layout = quern::VnniLayout::Create(quern::DType::kI8, k, n);
  if (!layout.ok()) {
    std::fprintf(stderr, "%s\n", layout.status().ToString().c_str());
    return 1;
  }
  quern::VnniPackSpec spec;
  spec.layout = *layout;
  const auto plan = quern::VnniPackPlan::Create(spec);
  auto packed = quern::AlignedBuffer::Create(layout->bytes());
  if (!plan.ok() || !packed.ok()) {
    std::fprintf(stderr, "%s %s\n", plan.status().ToString().c_str(),
                 packed.status().ToString().c_str());
    return 1;
  }
  const auto executor = quern::HwyExecutor::CreateForThisMachine();
  plan->Pack(quern::DenseMatrix<const int8_t>(weights.data(), n, k),
             packed->data(), *executor);
  std::printf("packed %lld x %lld int8 weights into %lld bytes with %s\n",
              static_cast<long long>(n), static_cast<long long>(k),
              static_cast<long long>(layout->bytes()), plan->target());
  return 0;
}
