// Libraries of the C interface, and structs of another size.

#include <cstddef>
#include <string>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/c/testing/norm_testutil.h"
#include "quern/core/version.h"

namespace quern {
namespace {

using LibraryTest = NormInC;

TEST_F(LibraryTest, ListsSchemas) {
  std::string text(quern_ops(library_.get(), nullptr, 0), '\0');
  quern_ops(library_.get(), &text[0], text.size() + 1);
  EXPECT_NE(text.find("\nrms_norm(Tensor x, Tensor? weight, float eps=1e-06"),
            std::string::npos);
  EXPECT_EQ(text.back(), '\n');
  char small[5] = "....";
  EXPECT_EQ(quern_ops(library_.get(), small, sizeof(small)), text.size());
  EXPECT_EQ(std::string(small), text.substr(0, 4));
  EXPECT_EQ(quern_ops(nullptr, small, sizeof(small)), 0u);
  EXPECT_STREQ(small, "");
}

TEST_F(LibraryTest, SaysWhatAnOperatorComputes) {
  char text[1000] = "";
  const size_t size =
      quern_op_doc(library_.get(), "rms_norm", text, sizeof(text));
  EXPECT_EQ(std::string(text).size(), size);
  EXPECT_NE(std::string(text).find("x[.., hidden]"), std::string::npos) << text;
  EXPECT_EQ(quern_op_doc(library_.get(), "no_such", text, sizeof(text)), 0u);
  EXPECT_STREQ(text, "");
  EXPECT_EQ(quern_op_doc(library_.get(), nullptr, nullptr, 0), 0u);
  EXPECT_EQ(quern_op_doc(nullptr, "rms_norm", nullptr, 0), 0u);
}

// A better CPU's user repeats what happened on one with AVX2.
TEST_F(LibraryTest, CapsTheInstructionSetOfWhatIsMade) {
  const quern_argument x = quern_tensor_argument("x", x_in_c_.get());
  const auto made = [&] {
    quern_op* op = nullptr;
    EXPECT_EQ(quern_op_create(library_.get(), "rms_norm", nullptr, &x, 1, &op),
              QUERN_OK);
    char text[200] = "";
    quern_explain(op, text, sizeof(text));
    quern_destroy(op);
    return std::string(text);
  };
  const std::string best = made();
  char text[300] = "";
  ASSERT_EQ(quern_set_max_isa("AVX2", text, sizeof(text)), QUERN_OK) << text;
  EXPECT_NE(made().find("AVX2"), std::string::npos) << made();
  EXPECT_EQ(quern_set_max_isa("avx9", text, sizeof(text)),
            QUERN_INVALID_ARGUMENT);
  EXPECT_NE(std::string(text).find("isa=\"avx9\" is no instruction set"),
            std::string::npos)
      << text;
  EXPECT_EQ(quern_set_max_isa("avx9", nullptr, 0), QUERN_INVALID_ARGUMENT);
  // A refusal leaves the cap as it was.
  EXPECT_NE(made().find("AVX2"), std::string::npos) << made();
  ASSERT_EQ(quern_set_max_isa(nullptr, nullptr, 0), QUERN_OK);
  EXPECT_EQ(made(), best);
}

TEST_F(LibraryTest, RefusesOptionsOfAnotherSize) {
  const quern_argument x = quern_tensor_argument("x", x_in_c_.get());
  quern_op* op = nullptr;
  for (const size_t size : {size_t{0}, sizeof(quern_op_options) - 1,
                            sizeof(quern_op_options) + 8}) {
    const quern_op_options options = {size, nullptr};
    ExpectRefused(
        quern_op_create(library_.get(), "rms_norm", &options, &x, 1, &op),
        library_.get(), QUERN_INVALID_ARGUMENT,
        "size=" + std::to_string(size) + "; need 16");
  }
  quern_executor* executor = nullptr;
  quern_executor_functions functions = {};
  ExpectRefused(
      quern_executor_create_from(library_.get(), &functions, &executor),
      library_.get(), QUERN_INVALID_ARGUMENT, "size=0; need 32");
  functions.size = sizeof(functions);
  ExpectRefused(
      quern_executor_create_from(library_.get(), &functions, &executor),
      library_.get(), QUERN_INVALID_ARGUMENT, "is null");
  ExpectRefused(quern_executor_create_from(library_.get(), nullptr, &executor),
                library_.get(), QUERN_INVALID_ARGUMENT, "functions is null");
  ExpectRefused(quern_executor_create_pool(library_.get(), -1, &executor),
                library_.get(), QUERN_INVALID_ARGUMENT, "-1");
  quern_rotary_scaling* scaling = nullptr;
  quern_rotary_scaling_options rotary = {};
  ExpectRefused(quern_rotary_scaling_create(library_.get(), &rotary, &scaling),
                library_.get(), QUERN_INVALID_ARGUMENT, "size=0; need");
  rotary.size = sizeof(rotary);
  ExpectRefused(quern_rotary_scaling_create(library_.get(), &rotary, &scaling),
                library_.get(), QUERN_INVALID_ARGUMENT, "kind is null");
  rotary.kind = "longrope";
  rotary.num_factors = 2;
  ExpectRefused(quern_rotary_scaling_create(library_.get(), &rotary, &scaling),
                library_.get(), QUERN_INVALID_ARGUMENT,
                "short_factors is null");
  rotary.num_factors = 0;
  rotary.untruncated = 2;
  ExpectRefused(quern_rotary_scaling_create(library_.get(), &rotary, &scaling),
                library_.get(), QUERN_INVALID_ARGUMENT,
                "untruncated=2; need 0 <= untruncated <= 1");
  quern_library* library = nullptr;
  char text[200];
  const quern_library_options small = {8, nullptr};
  EXPECT_EQ(quern_library_create(&small, &library, text, sizeof(text)),
            QUERN_INVALID_ARGUMENT);
  EXPECT_STREQ(text,
               "quern_library_options: size=8; need 16, as "
               "sizeof(quern_library_options) is in this version");
  const quern_library_options policy = {sizeof(policy), "all,none"};
  EXPECT_EQ(quern_library_create(&policy, &library, text, sizeof(text)),
            QUERN_INVALID_ARGUMENT);
  EXPECT_NE(std::string(text), "");
  EXPECT_EQ(quern_library_create(nullptr, nullptr, nullptr, 0),
            QUERN_INVALID_ARGUMENT);
}

TEST(QuernVersionTest, IsTold) {
  EXPECT_EQ(quern_abi_version(), QUERN_ABI_VERSION);
  EXPECT_STREQ(quern_version(), QUERN_VERSION_STRING);
  LibraryInC library;
  EXPECT_EQ(
      ExplanationOf(library.get()).rfind("Quern " QUERN_VERSION_STRING ", ", 0),
      0u);
}

}  // namespace
}  // namespace quern
