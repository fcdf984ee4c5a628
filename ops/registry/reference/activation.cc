#include "quern/ops/registry/reference/activation.h"

#include <cmath>

namespace quern {
namespace {

constexpr float kSqrt2OverPi = 0.7978845608028654f;
constexpr float kSqrtHalf = 0.7071067811865476f;

float Sigmoid(float v) { return 1.0f / (1.0f + std::exp(-v)); }

// Uses a comparison in place of std::min so that NaN stays NaN.
float AtMost(float v, float limit) { return v > limit ? limit : v; }
float AtLeast(float v, float limit) { return v < limit ? limit : v; }

float GeluNew(float x, const NativeRound& rd) {
  const float cube = rd(rd(x * x) * x);
  const float sum = rd(x + rd(0.044715f * cube));
  const float tanh = rd(std::tanh(rd(kSqrt2OverPi * sum)));
  return rd(rd(0.5f * x) * rd(1.0f + tanh));
}

float GeluFast(float x, const NativeRound& rd) {
  const float a = rd(kSqrt2OverPi * x);
  const float b = rd(rd(0.044715f * x) * x);
  const float tanh = rd(std::tanh(rd(a * rd(1.0f + b))));
  return rd(rd(0.5f * x) * rd(1.0f + tanh));
}

float Xielu(const ActivationParams& p, float x, const NativeRound& rd) {
  const float linear = rd(rd(p.beta) * x);
  if (x > 0.0f) {
    return rd(rd(rd(rd(p.alpha_p) * x) * x) + linear);
  }
  const float e = rd(std::expm1(AtMost(x, rd(p.eps))));
  return rd(rd(rd(e - x) * rd(p.alpha_n)) + linear);
}

}  // namespace

float NativeActivate(NativeActivation activation,
                     const ActivationParams& params, float v,
                     const NativeRound& rd) {
  switch (activation) {
    case NativeActivation::kSilu:
      return rd(v / (1.0f + std::exp(-v)));
    case NativeActivation::kGelu:
      return rd(v * 0.5f * (1.0f + std::erf(v * kSqrtHalf)));
    case NativeActivation::kGeluTanh:
      return rd(
          0.5f * v *
          (1.0f + std::tanh(kSqrt2OverPi * (v + 0.044715f * (v * v * v)))));
    case NativeActivation::kGeluNew:
      return GeluNew(v, rd);
    case NativeActivation::kGeluFast:
      return GeluFast(v, rd);
    case NativeActivation::kQuickGelu:
      return rd(v * rd(Sigmoid(rd(1.702f * v))));
    case NativeActivation::kRelu2: {
      const float positive = AtLeast(v, 0.0f);
      return rd(positive * positive);
    }
    case NativeActivation::kFatrelu:
      return v <= params.threshold ? 0.0f : v;
    case NativeActivation::kXielu:
      return Xielu(params, v, rd);
  }
  return v;
}

float NativeSwigluOai(const ActivationParams& params, float gate, float up,
                      const NativeRound& rd) {
  const float g = AtMost(gate, params.limit);
  const float u = AtLeast(AtMost(up, params.limit), -params.limit);
  const float w = rd(g * rd(Sigmoid(rd(params.alpha * g))));
  return rd(rd(u + 1.0f) * w);
}

}  // namespace quern
