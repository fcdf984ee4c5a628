#ifndef QUERN_TESTING_FILES_H_
#define QUERN_TESTING_FILES_H_

#include <fstream>
#include <sstream>
#include <string>

namespace quern {

// The bytes of a file; none if there is no such file. Read by blocks, because
// a sanitizer watches a loop over bytes.
inline std::string FileBytes(const std::string& path) {
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  return bytes.str();
}

}  // namespace quern

#endif  // QUERN_TESTING_FILES_H_
