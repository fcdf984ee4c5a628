// Tables of rotary operators by name.

#include "quern/ops/registry/families/rows/rope_ops.h"

#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/families/rows/rope_variant_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace {

constexpr int64_t kPositions = 1 << 15;
constexpr int64_t kHeadDim = 128;
constexpr int64_t kTableBytes = kPositions * kHeadDim * 4;  // 16 MiB

int64_t MemoryBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

NamedArgs Args(const std::string& op, int64_t tokens) {
  const TensorMeta heads{DType::kBF16, {tokens, 2, kHeadDim}};
  NamedArgs args = {{"query", heads},
                    {"key", heads},
                    {"max_position", kPositions},
                    {"positions", TensorMeta{DType::kI64, {tokens}}}};
  if (op == "mrope") {
    args.back() = {"positions", TensorMeta{DType::kI64, {3, tokens}}};
    for (const char* const section : {"section_t", "section_h"}) {
      args.push_back({section, int64_t{20}});
    }
    args.push_back({"section_w", int64_t{24}});
  }
  if (op == "dual_chunk_rotary_embedding") {
    args.push_back({"chunk_size", kPositions / 2});
    args.push_back({"local_size", int64_t{0}});
  }
  return args;
}

// An engine whose batches vary had a table for each number of tokens: 16 GiB
// for 256 of them and 131072 positions.
TEST(RopeOpsTest, OperatorsOfARegistryShareTheirTables) {
  OpRegistry registry;
  ASSERT_EQ(RegisterRopeOps(registry), absl::OkStatus());
  ASSERT_EQ(RegisterRopeVariantOps(registry), absl::OkStatus());
  const OpDispatcher ops(registry, OpPolicy());
  for (const char* const op :
       {"rotary_embedding", "mrope", "dual_chunk_rotary_embedding"}) {
    SCOPED_TRACE(op);
    std::vector<MadeOp> made;
    const int64_t before = MemoryBytes();
    for (int64_t tokens = 1; tokens <= 16; ++tokens) {
      auto one = ops.Make(op, Args(op, tokens));
      ASSERT_TRUE(one.ok()) << one.status();
      made.push_back(*std::move(one));
    }
    EXPECT_LT(MemoryBytes() - before, 3 * kTableBytes);
  }
}

}  // namespace
}  // namespace quern
