#include "examples/generate/rank_group.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace quern {

absl::Status RankGroup::Agree(const absl::Status& own) {
  if (size() == 1) return own;
  const std::vector<int> codes = Gather(own.raw_code());
  const auto failed = [](int code) { return code != 0; };
  const auto first = std::find_if(codes.begin(), codes.end(), failed);
  if (first == codes.end()) return absl::OkStatus();
  const auto root = static_cast<int>(first - codes.begin());
  std::string message(own.message());
  auto bytes = static_cast<int64_t>(message.size());
  communicator_->Broadcast(&bytes, sizeof(bytes), root);
  message.resize(static_cast<size_t>(bytes));
  if (bytes > 0) communicator_->Broadcast(&message[0], bytes, root);
  if (root != leader_ && !std::all_of(codes.begin(), codes.end(), failed)) {
    message = absl::StrCat("rank ", root, " of ", size(), ": ", message);
  }
  return absl::Status(static_cast<absl::StatusCode>(*first), message);
}

}  // namespace quern
