#ifndef QUERN_TOOLS_PERF_LINEAR_CASES_H_
#define QUERN_TOOLS_PERF_LINEAR_CASES_H_

// The keys m, n, k, model and layer of the linear operators: one command line,
// many shapes.
//
//   --m=4 --n=64 --k=32            one
//   --m=1,4,16                     three, of the default n and k
//   --model=llama3_8b              every layer, each with 1,4,16,64,256,1024
//   --model=llama3_8b --layer=down --m=1,2

#include <vector>

#include "absl/status/statusor.h"
#include "tools/perf/args.h"
#include "tools/perf/op.h"

namespace quern {

// For the end of an operator's table of keys.
std::vector<Key> LinearKeys(std::vector<Key> keys_of_op);

// OpEntry::cases. InvalidArgument: --m is no list of integers >= 1; --model or
// --layer is unknown, with those that are known; --n or --k beside --model;
// --layer without it.
absl::StatusOr<std::vector<OpCase>> LinearCases(const Args& args);

}  // namespace quern

#endif  // QUERN_TOOLS_PERF_LINEAR_CASES_H_
