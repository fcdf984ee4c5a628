#ifndef QUERN_TESTING_REFUSAL_H_
#define QUERN_TESTING_REFUSAL_H_

#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace quern {

// `status` has this code, and its message these words.
inline void ExpectRefusal(const absl::Status& status, absl::StatusCode code,
                          const std::string& words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(std::string(status.message()).find(words), std::string::npos)
      << status << "\nlacks: " << words;
}

// Expects InvalidArgument with these words.
inline void ExpectRefusal(const absl::Status& status,
                          const std::string& words) {
  ExpectRefusal(status, absl::StatusCode::kInvalidArgument, words);
}

}  // namespace quern

#endif  // QUERN_TESTING_REFUSAL_H_
