#ifndef QUERN_C_OBJECTS_ROTARY_SCALING_H_
#define QUERN_C_OBJECTS_ROTARY_SCALING_H_

// Private to c/. What a quern_rotary_scaling is.

#include <string>
#include <utility>

#include "quern/c/object.h"
#include "quern/ops/rope/rotary_scaling.h"

namespace quern {
namespace c_abi {

class RotaryScalingObject final : public Object {
 public:
  explicit RotaryScalingObject(RotaryScaling scaling)
      : scaling_(std::move(scaling)) {}
  std::string Explain() const override;
  const RotaryScaling& scaling() const { return scaling_; }

 private:
  RotaryScaling scaling_;
};

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_OBJECTS_ROTARY_SCALING_H_
