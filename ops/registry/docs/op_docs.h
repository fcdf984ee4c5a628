#ifndef QUERN_OPS_REGISTRY_DOCS_OP_DOCS_H_
#define QUERN_OPS_REGISTRY_DOCS_OP_DOCS_H_

#include "absl/strings/string_view.h"

namespace quern {

// Returns what a caller by name must know of an operator that RegisterAllOps
// defines: its equation, and the shapes and dtypes of its tensors, in lines.
// Empty for other names. The header that defines the operator says more.
absl::string_view OpDoc(absl::string_view op);

// Like OpDoc, for operators on rows that have only another project's name.
// OpDoc calls it.
absl::string_view NamedOpDoc(absl::string_view op);
// What operators by the names of vLLM's CPU backend do. NamedOpDoc calls it.
absl::string_view VllmOpDoc(absl::string_view op);

// Like OpDoc, for SGLang's products of packed weights. NamedOpDoc calls it.
absl::string_view ProductOpDoc(absl::string_view op);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_DOCS_OP_DOCS_H_
