#ifndef QUERN_OPS_EMBEDDING_VOCAB_EMBEDDING_KERNELS_H_
#define QUERN_OPS_EMBEDDING_VOCAB_EMBEDDING_KERNELS_H_

// Private seam between the plan (plain C++) and the SIMD translation unit.

#include <cstddef>

#include "quern/core/dtype.h"

namespace quern {

struct VocabEmbeddingKernels {
  const char* target;
  // out[i] = round(scale * row[i]), i < n. row and out have the dtypes that the
  // kernel was chosen for.
  void (*convert)(const void* row, float scale, void* out, size_t n);
};

// The kernel of the best instruction set this CPU supports, for f32, bf16 or
// f16.
VocabEmbeddingKernels GetVocabEmbeddingKernels(DType weight, DType out);

}  // namespace quern

#endif  // QUERN_OPS_EMBEDDING_VOCAB_EMBEDDING_KERNELS_H_
