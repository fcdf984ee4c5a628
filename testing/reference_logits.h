#ifndef QUERN_TESTING_REFERENCE_LOGITS_H_
#define QUERN_TESTING_REFERENCE_LOGITS_H_

// capped = cap * tanh(logit / cap)

#include <cmath>

#include "quern/testing/reference_convert.h"

namespace quern {

// The capped logit, not rounded.
inline double ReferenceSoftCap(double logit, double cap) {
  return cap * std::tanh(logit / cap);
}

// The capped logit after quotient, tanh and product were each rounded to f32
// and then to T: what a framework gives whose operators on 16-bit logits
// compute in f32.
template <typename T>
double ReferenceSteppedSoftCap(double logit, double cap) {
  const auto round = [](double x) {
    return ToDouble(FromDouble<T>(ToDouble(FromDouble<float>(x))));
  };
  return round(round(std::tanh(round(logit / cap))) * cap);
}

}  // namespace quern

#endif  // QUERN_TESTING_REFERENCE_LOGITS_H_
