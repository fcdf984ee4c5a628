// What libquern.so shows to the programs that load it: the functions that
// quern.h, quern_model.h and quern_named.h declare, and nothing else.

#include <elf.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <ios>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace quern {
namespace {

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::string bytes(static_cast<size_t>(std::max<int64_t>(file.tellg(), 0)),
                    '\0');
  file.seekg(0);
  file.read(&bytes[0], static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

struct Symbols {
  std::set<std::string> defined;
  std::set<std::string> undefined;
};

// The dynamic symbols of an ELF file of 64 bits.
Symbols DynamicSymbols(const std::string& file) {
  Symbols symbols;
  Elf64_Ehdr header;
  if (file.size() < sizeof(header)) return symbols;
  std::memcpy(&header, file.data(), sizeof(header));
  std::vector<Elf64_Shdr> sections(header.e_shnum);
  std::memcpy(sections.data(), file.data() + header.e_shoff,
              sections.size() * sizeof(Elf64_Shdr));
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_type != SHT_DYNSYM) continue;
    const char* const names = file.data() + sections[section.sh_link].sh_offset;
    for (size_t i = 1; i < section.sh_size / sizeof(Elf64_Sym); ++i) {
      Elf64_Sym symbol;
      std::memcpy(&symbol, file.data() + section.sh_offset + i * sizeof(symbol),
                  sizeof(symbol));
      auto& list =
          symbol.st_shndx == SHN_UNDEF ? symbols.undefined : symbols.defined;
      list.insert(names + symbol.st_name);
    }
  }
  return symbols;
}

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
