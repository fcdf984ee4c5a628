#ifndef QUERN_OPS_CONV_CONV_EXTENTS_H_
#define QUERN_OPS_CONV_CONV_EXTENTS_H_

#include <cstdint>

namespace quern {

// Three numbers that belong to the dimensions of a video. An image has depth 1.
struct ConvExtents {
  int64_t depth = 1;
  int64_t height = 1;
  int64_t width = 1;

  friend bool operator==(const ConvExtents& a, const ConvExtents& b) {
    return a.depth == b.depth && a.height == b.height && a.width == b.width;
  }
  friend bool operator!=(const ConvExtents& a, const ConvExtents& b) {
    return !(a == b);
  }
};

}  // namespace quern

#endif  // QUERN_OPS_CONV_CONV_EXTENTS_H_
