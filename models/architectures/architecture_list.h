#ifndef QUERN_MODELS_ARCHITECTURES_ARCHITECTURE_LIST_H_
#define QUERN_MODELS_ARCHITECTURES_ARCHITECTURE_LIST_H_

// Private: every architecture, in the order in which refusals list them. Each
// is defined in a file of its own.

#include "quern/models/architectures/architecture.h"

namespace quern {

#define QUERN_ARCHITECTURES(X) \
  X(kLlama)                    \
  X(kQwen2)                    \
  X(kQwen2Vl)                  \
  X(kQwen2Moe)                 \
  X(kQwen3)                    \
  X(kQwen3Moe)                 \
  X(kQwen3Vl)                  \
  X(kQwen3VlMoe)               \
  X(kGemma2)                   \
  X(kGemma3)                   \
  X(kOlmo2)                    \
  X(kOlmoe)                    \
  X(kExaone4)                  \
  X(kSmolLm3)                  \
  X(kPhi3)                     \
  X(kGlm4)                     \
  X(kGlm4Moe)                  \
  X(kHunyuanDense)             \
  X(kErnie45)                  \
  X(kSeedOss)                  \
  X(kLfm2)                     \
  X(kLfm2Moe)                  \
  X(kGranite)                  \
  X(kGraniteMoe)               \
  X(kGraniteHybrid)            \
  X(kDeepseek2)                \
  X(kGptOss)                   \
  X(kQwen3Next)

#define QUERN_DECLARE(name) extern const Architecture name;
QUERN_ARCHITECTURES(QUERN_DECLARE)
#undef QUERN_DECLARE

}  // namespace quern

#endif  // QUERN_MODELS_ARCHITECTURES_ARCHITECTURE_LIST_H_
