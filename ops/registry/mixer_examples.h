#ifndef QUERN_OPS_REGISTRY_MIXER_EXAMPLES_H_
#define QUERN_OPS_REGISTRY_MIXER_EXAMPLES_H_

// Private: the examples of arguments of the layers in mixer_ops.h, whose
// weights live as long as the program.

#include "quern/core/dtype.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {

NamedArgs ShortConvExample(DType dtype);
NamedArgs MambaExample(DType dtype);
NamedArgs Plamo2Example(DType dtype);
NamedArgs Mamba2Example(DType dtype);
NamedArgs DeltaNetExample(DType dtype);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_MIXER_EXAMPLES_H_
