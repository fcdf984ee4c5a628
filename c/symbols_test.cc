// What libquern.so shows to the programs that load it: the functions that
// quern.h, quern_model.h and quern_named.h declare, and nothing else.

#include <cctype>
#include <cstddef>
#include <set>
#include <string>

#include "gtest/gtest.h"
#include "quern/c/testing/symbols_testutil.h"

namespace quern {
namespace {

// The words "quern_..." before a "(" on lines that begin a declaration.
std::set<std::string> DeclaredFunctions(const std::string& header) {
  std::set<std::string> names;
  const std::string mark = "QUERN_API ";
  for (size_t at = header.find(mark); at != std::string::npos;
       at = header.find(mark, at + 1)) {
    const size_t end = header.find('(', at);
    if (end == std::string::npos || header.compare(at - 1, 1, "\n") != 0) {
      continue;
    }
    size_t begin = end;
    while (std::isalnum(static_cast<unsigned char>(header[begin - 1])) != 0 ||
           header[begin - 1] == '_') {
      --begin;
    }
    names.insert(header.substr(begin, end - begin));
  }
  return names;
}

TEST(SymbolsTest, AreTheFunctionsOfTheHeaders) {
  std::set<std::string> declared = DeclaredFunctions(Read("c/quern.h"));
  EXPECT_EQ(declared.count("quern_model_create"), 0u);
  declared.merge(DeclaredFunctions(Read("c/quern_model.h")));
  declared.merge(DeclaredFunctions(Read("c/quern_named.h")));
  const Symbols symbols = DynamicSymbols(Read("c/libquern.so"));
  EXPECT_EQ(symbols.defined, declared);
  EXPECT_EQ(declared.count("quern_op_execute"), 1u);
  EXPECT_EQ(declared.count("quern_model_create"), 1u);
  EXPECT_EQ(declared.count("quern_onednn_handler_create"), 1u);
}

// A program may have a copy of Quern of its own, which this one must not call.
TEST(SymbolsTest, AreNotTakenFromAnotherCopy) {
  const Symbols symbols = DynamicSymbols(Read("c/libquern.so"));
  EXPECT_GT(symbols.undefined.size(), 0u);
  for (const std::string& name : symbols.undefined) {
    EXPECT_EQ(name.find("quern"), std::string::npos) << name;
  }
}

}  // namespace
}  // namespace quern
