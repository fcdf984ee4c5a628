#ifndef QUERN_MODELS_DECODER_LOADING_MODEL_WORK_H_
#define QUERN_MODELS_DECODER_LOADING_MODEL_WORK_H_

// Private: the matrices of a rank, counted by how often a step multiplies by
// them.

#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/decoder/decoder_work.h"

namespace quern {

struct ModelWork {
  // Bytes of matrices, and operations of one row.
  DecoderWork every;   // by which every token is multiplied
  DecoderWork output;  // of the logits
  DecoderWork routed;  // all experts that routers choose from
  // Experts of a layer, which are of one size, and those that a token has.
  int64_t experts = 1, experts_used = 1;
  int64_t embedding_row_bytes = 0;

  // Adds a matrix to one of the groups. It multiplies rows of this type, or of
  // int8 where `int8_blocks` and the matrix is in blocks.
  static void Add(const LinearWeights& weights, DType rows, bool int8_blocks,
                  DecoderWork& group);

  // The work of a step of so many tokens, `logit_rows` of which have logits,
  // without its cache and attention. Different tokens are taken to have
  // different experts as long as there are some: no step reads more.
  DecoderWork Step(int64_t tokens, int64_t logit_rows) const;
};

}  // namespace quern

#endif  // QUERN_MODELS_DECODER_LOADING_MODEL_WORK_H_
