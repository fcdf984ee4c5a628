#ifndef TESTING_DATA_H_
#define TESTING_DATA_H_

#include <cstddef>
#include <cstdint>
#include <vector>

// A matrix of ones, of `rows` rows and `columns` columns.
inline std::vector<int8_t> Ones(int64_t rows, int64_t columns) {
  return std::vector<int8_t>(static_cast<size_t>(rows * columns), int8_t{1});
}

#endif  // TESTING_DATA_H_
