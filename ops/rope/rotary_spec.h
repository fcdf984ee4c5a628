#ifndef QUERN_OPS_ROPE_ROTARY_SPEC_H_
#define QUERN_OPS_ROPE_ROTARY_SPEC_H_

// What the rotary plans of this folder rotate, and by which angles.

#include <cstdint>

#include "quern/core/dtype.h"
#include "quern/ops/rope/rotary_scaling.h"

namespace quern {

enum class RotaryStyle : uint8_t { kHalves, kPairs };
// kBackward rotates by -angle, which undoes kForward.
enum class RotaryTurn : uint8_t { kForward, kBackward };

struct RotaryEmbeddingSpec {
  int64_t head_dim = 0;
  int64_t rot_dim = 0;        // even, 2 <= rot_dim <= head_dim
  int64_t max_positions = 0;  // positions are in [0, max_positions)
  double base = 10000.0;      // finite, > 0
  RotaryStyle style = RotaryStyle::kHalves;
  RotaryScaling scaling;
  RotaryTurn turn = RotaryTurn::kForward;
  int64_t rot_offset = 0;     // rot_offset + rot_dim <= head_dim
  DType dtype = DType::kF32;  // of x and out: f32, bf16 or f16
};

}  // namespace quern

#endif  // QUERN_OPS_ROPE_ROTARY_SPEC_H_
