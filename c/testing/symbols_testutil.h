#ifndef QUERN_C_TESTING_SYMBOLS_TESTUTIL_H_
#define QUERN_C_TESTING_SYMBOLS_TESTUTIL_H_

// Test utility: what an ELF file of 64 bits shows and needs.

#include <elf.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <ios>
#include <set>
#include <string>
#include <vector>

namespace quern {

inline std::string Read(const std::string& path) {
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
  std::string soname;            // the name that programs remember
  std::set<std::string> needed;  // sonames of the libraries that it loads
};

// Calls fn(entry, names) for each Entry of the sections of this type in an ELF
// file of 64 bits. `names` is the table of names that belongs to the section.
template <typename Entry, typename Fn>
void ForEntries(const std::string& file, uint32_t type, const Fn& fn) {
  Elf64_Ehdr header;
  if (file.size() < sizeof(header)) return;
  std::memcpy(&header, file.data(), sizeof(header));
  std::vector<Elf64_Shdr> sections(header.e_shnum);
  std::memcpy(sections.data(), file.data() + header.e_shoff,
              sections.size() * sizeof(Elf64_Shdr));
  for (const Elf64_Shdr& section : sections) {
    if (section.sh_type != type) continue;
    const char* const names = file.data() + sections[section.sh_link].sh_offset;
    for (size_t i = 0; i < section.sh_size / sizeof(Entry); ++i) {
      Entry entry;
      std::memcpy(&entry, file.data() + section.sh_offset + i * sizeof(entry),
                  sizeof(entry));
      fn(entry, names);
    }
  }
}

inline Symbols DynamicSymbols(const std::string& file) {
  Symbols symbols;
  ForEntries<Elf64_Sym>(
      file, SHT_DYNSYM, [&](const Elf64_Sym& symbol, const char* names) {
        // Sections, and the first entry, are local symbols without a name.
        if (ELF64_ST_BIND(symbol.st_info) == STB_LOCAL) return;
        auto& list =
            symbol.st_shndx == SHN_UNDEF ? symbols.undefined : symbols.defined;
        list.insert(names + symbol.st_name);
      });
  ForEntries<Elf64_Dyn>(file, SHT_DYNAMIC,
                        [&](const Elf64_Dyn& entry, const char* names) {
                          if (entry.d_tag == DT_SONAME)
                            symbols.soname = names + entry.d_un.d_val;
                          if (entry.d_tag != DT_NEEDED) return;
                          symbols.needed.insert(names + entry.d_un.d_val);
                        });
  return symbols;
}

}  // namespace quern

#endif  // QUERN_C_TESTING_SYMBOLS_TESTUTIL_H_
