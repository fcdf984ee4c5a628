// What the overlay third_party/onednn/onednn.BUILD promises about the oneDNN
// that it builds.

#include <cstdlib>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>

#include "gtest/gtest.h"
#include "oneapi/dnnl/dnnl.hpp"
#include "oneapi/dnnl/dnnl_config.h"
#include "oneapi/dnnl/dnnl_version.h"

namespace quern {
namespace {

static_assert(DNNL_CPU_RUNTIME == DNNL_RUNTIME_THREADPOOL, "");
static_assert(DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_THREADPOOL, "");
static_assert(DNNL_GPU_RUNTIME == DNNL_RUNTIME_NONE, "");
static_assert(BUILD_MATMUL == 1 && BUILD_REORDER == 1, "");
static_assert(BUILD_CONVOLUTION == 0 && BUILD_PRIMITIVE_ALL == 0, "");
#ifndef DNNL_EXPERIMENTAL_UKERNEL
#error "the ukernel API is off"
#endif
#ifdef ONEDNN_BUILD_GRAPH
#error "the graph API is on"
#endif

TEST(OneDnnBuildTest, GeneratedHeadersKeepNothingOfTheirTemplates) {
  const char* paths = std::getenv("GENERATED_HEADERS");
  ASSERT_NE(paths, nullptr);
  const std::regex markup(R"(#cmakedefine|@[A-Z_]+@|\$\{)");
  std::istringstream list(paths);
  int headers = 0;
  for (std::string path; list >> path; ++headers) {
    std::ifstream file(path);
    ASSERT_TRUE(file) << path;
    int number = 0;
    for (std::string line; std::getline(file, line);) {
      ++number;
      EXPECT_FALSE(std::regex_search(line, markup))
          << path << ":" << number << ": " << line;
    }
    EXPECT_GT(number, 10) << path;
  }
  EXPECT_EQ(headers, 3);
}

TEST(OneDnnBuildTest, IsTheVersionItsHeadersName) {
  const dnnl_version_t* version = dnnl::version();
  EXPECT_EQ(version->major, DNNL_VERSION_MAJOR);
  EXPECT_EQ(version->minor, DNNL_VERSION_MINOR);
  EXPECT_EQ(version->patch, DNNL_VERSION_PATCH);
  EXPECT_STREQ(version->hash, "v3.7.2");
  EXPECT_EQ(version->cpu_runtime,
            static_cast<unsigned>(DNNL_RUNTIME_THREADPOOL));
}

}  // namespace
}  // namespace quern
