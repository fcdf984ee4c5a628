#ifndef QUERN_TOOLS_PERF_LINEAR_LINEAR_CASES_H_
#define QUERN_TOOLS_PERF_LINEAR_LINEAR_CASES_H_

// The keys kernels, activation, residual, m, n, k, model and layer of the
// linear operators: one command line, many shapes.
//
//   --m=4 --n=64 --k=32            one
//   --m=1,4,16                     three, of the default n and k
//   --model=llama3_8b              every layer, each with 1,4,16,64,256,1024
//   --model=llama3_8b --layer=down --m=1,2

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "quern/gemm/epilogue.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"

namespace quern {

// The key activation: one of the names of gemm/epilogue.h.
absl::StatusOr<LinearActivation> LinearActivationOf(const Args& args);

// The isa that Explain() of a linear layer names: our instruction set, or
// oneDNN's name of the kernel without the types.
std::string LinearIsa(const std::string& explained);

// kernels, activation and residual, then the keys of one operator, then m, n,
// k, model and layer.
std::vector<Key> LinearKeys(std::vector<Key> keys_of_op);

// OpEntry::cases. InvalidArgument: --m is no list of integers >= 1; --model or
// --layer is unknown, with those that are known; --n or --k beside --model;
// --layer without it.
absl::StatusOr<std::vector<OpCase>> LinearCases(const Args& args);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LINEAR_LINEAR_CASES_H_
