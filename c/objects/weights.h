#ifndef QUERN_C_OBJECTS_WEIGHTS_H_
#define QUERN_C_OBJECTS_WEIGHTS_H_

// Private to c/. What quern_linear_weights is.

#include <string>

#include "quern/c/object.h"
#include "quern/gemm/linear_weights.h"

namespace quern {
namespace c_abi {

class WeightsObject final : public Object {
 public:
  explicit WeightsObject(const LinearWeights& weights) : weights_(weights) {}
  std::string Explain() const override;
  const LinearWeights& weights() const { return weights_; }

 private:
  LinearWeights weights_;
};

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_OBJECTS_WEIGHTS_H_
