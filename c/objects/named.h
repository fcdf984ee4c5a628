#ifndef QUERN_C_OBJECTS_NAMED_H_
#define QUERN_C_OBJECTS_NAMED_H_

// Private to c/. What the objects of quern_named.h are.

#include <string>
#include <utility>
#include <vector>

#include "quern/c/object.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/registry/vllm/attention_ops.h"
#include "quern/ops/registry/vllm/linear_ops.h"

namespace quern {
namespace c_abi {

class HandlerObject final : public Object {
 public:
  std::string Explain() const override;
  OneDnnHandler& handler() { return handler_; }

 private:
  OneDnnHandler handler_;
};

class MetadataObject final : public Object {
 public:
  std::string Explain() const override;
  SchedulerMetadata& metadata() { return metadata_; }

 private:
  SchedulerMetadata metadata_;
};

class ExpertsObject final : public Object {
 public:
  // `held` are the weights' objects, whose adopted bytes must stay.
  ExpertsObject(ExpertWeights experts, std::vector<Borrowed> held)
      : held_(std::move(held)), experts_(std::move(experts)) {}
  std::string Explain() const override;
  const ExpertWeights& experts() const { return experts_; }

 private:
  std::vector<Borrowed> held_;
  ExpertWeights experts_;
};

}  // namespace c_abi
}  // namespace quern

#endif  // QUERN_C_OBJECTS_NAMED_H_
