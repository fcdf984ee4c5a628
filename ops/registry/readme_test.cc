#include <fstream>
#include <sstream>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace {

TEST(OpsReadmeTest, HasTheTableThatTheRegistryPrints) {
  OpRegistry registry;
  ASSERT_EQ(RegisterAllOps(registry), absl::OkStatus());
  const auto table = ListOps(registry);
  ASSERT_TRUE(table.ok()) << table.status();
  std::ifstream file("ops/README.md");
  ASSERT_TRUE(file) << "ops/README.md";
  std::stringstream readme;
  readme << file.rdbuf();
  EXPECT_NE(readme.str().find(*table), std::string::npos)
      << "ops/README.md has another table than `./bazelw run //tools/ops` "
         "prints:\n"
      << *table;
}

}  // namespace
}  // namespace quern
