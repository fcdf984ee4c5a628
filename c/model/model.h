#ifndef QUERN_C_MODEL_MODEL_H_
#define QUERN_C_MODEL_MODEL_H_

// Private to c/. What quern_model and quern_model_state are.

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/c/object.h"
#include "quern/c/quern_model.h"
#include "quern/models/decoder/decoder.h"

namespace quern {
namespace c_abi {

class ModelObject final : public Object {
 public:
  explicit ModelObject(Decoder model) : model_(std::move(model)) {}

  std::string Explain() const override;
  const Decoder& model() const { return model_; }

 private:
  Decoder model_;
};

class ModelStateObject final : public Object {
 public:
  // `model` is held, and `state` is made with it.
  ModelStateObject(Borrowed model, DecoderState state)
      : model_(std::move(model)),
        state_(std::move(state)),
        shape_{0, decoder().config().vocab} {}

  std::string Explain() const override;
  const DecoderState& state() const { return state_; }
  DecoderState& state() { return state_; }
  // InvalidArgument: a sequence that does not exist.
  absl::StatusOr<int64_t> Length(int32_t sequence) const;
  // After a refusal `logits` has no rows.
  absl::Status Forward(const quern_model_step* step, quern_executor* handle,
                       quern_tensor* logits);

 private:
  const Decoder& decoder() const { return model_.As<ModelObject>().model(); }
  // What `logits` is until the next step.
  quern_tensor Show(const float* data, int64_t rows);

  Borrowed model_;
  DecoderState state_;
  int64_t shape_[2];
};

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_MODEL_MODEL_H_
