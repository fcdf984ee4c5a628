// Tensors that are right, or hostile, and whose memory ends at a page that may
// not be touched.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "quern/c/quern.h"
#include "quern/c/tensor.h"
#include "quern/c/testing/call_fuzz_testutil.h"
#include "quern/core/dtype.h"
#include "quern/models/gguf/mutate_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/testing/guard_buffer.h"

namespace quern {

void OpCaller::Fill(Tensor& tensor, DType dtype) {
  uint8_t* const data = tensor.memory->data();
  const auto bytes = static_cast<size_t>(tensor.memory->size());
  if (dtype == DType::kI32 || dtype == DType::kI64) {
    // Index 0 is one of every table that is not empty.
    std::fill(data, data + bytes, uint8_t{0});
  } else if (dtype == DType::kF32) {
    for (size_t i = 0; i + 4 <= bytes; i += 4) {
      const auto x = static_cast<float>(rng_.Uniform(-2, 2));
      std::memcpy(data + i, &x, 4);
    }
  } else {
    for (size_t i = 0; i < bytes; ++i) {
      data[i] = static_cast<uint8_t>(rng_.Next());
    }
  }
  tensor.before.assign(data, data + bytes);
}

std::shared_ptr<OpCaller::Tensor> OpCaller::MakeTensor(const TensorMeta& meta,
                                                       bool hostile) {
  auto tensor = std::make_shared<Tensor>();
  tensor->shape = meta.extents;
  DType dtype = meta.dtype;
  std::vector<int64_t>& shape = tensor->shape;
  if (hostile && OneIn(2)) {
    const size_t d = At(rng_, shape.size() + 1);
    switch (rng_.Integer(0, 5)) {
      case 0:
        if (d < shape.size()) shape[d] += OneIn(2) ? 1 : -1;
        break;
      case 1:
        if (d < shape.size()) shape[d] = 0;
        break;
      case 2:
        if (d < shape.size()) shape.erase(shape.begin() + static_cast<int>(d));
        break;
      case 3:
        shape.insert(shape.begin() + static_cast<int>(d), rng_.Integer(0, 2));
        break;
      case 4:
        if (shape.size() > 1) std::swap(shape[0], shape.back());
        break;
      default:
        dtype = AnyDType();
    }
  }
  int64_t elements = 1, stride = 1;
  tensor->strides.resize(shape.size());
  const bool padded = OneIn(4);
  for (size_t d = shape.size(); d-- > 0;) {
    tensor->strides[d] = stride;
    stride *= shape[d] == 0 ? 1 : shape[d];
    if (padded && d + 1 == shape.size()) stride += rng_.Integer(0, 3);
  }
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] <= 0) {
      elements = 0;
      break;
    }
    elements += (shape[d] - 1) * tensor->strides[d];
  }
  if (elements < 0 || elements > (int64_t{1} << 22)) {
    elements = 0;
    shape.assign(1, 0);
    tensor->strides.assign(1, 1);
  }
  tensor->memory = std::make_unique<GuardBuffer<uint8_t>>(
      elements * static_cast<int64_t>(SizeOf(dtype)),
      OneIn(3) ? quern::Edge::kBegin : quern::Edge::kEnd);
  tensor->bytes = elements * static_cast<int64_t>(SizeOf(dtype));
  Fill(*tensor, dtype);
  tensor->c = quern_dense(tensor->memory->data(), c_abi::ToC(dtype),
                          static_cast<int32_t>(shape.size()), shape.data());
  if (padded || OneIn(2)) tensor->c.strides = tensor->strides.data();
  if (hostile) Spoil(*tensor);
  return tensor;
}

// The last tensor begins anywhere in the lender's memory where it fits. Its
// elements are those of the lender, so it has valid indices only if the lender
// has.
void OpCaller::Share(const Tensors& tensors) {
  if (tensors.size() < 2) return;
  const std::shared_ptr<Tensor>& last = tensors.back();
  const std::shared_ptr<Tensor>& lender = tensors[At(rng_, tensors.size() - 1)];
  const int64_t room = lender->memory->size() - last->bytes;
  if (lender->lender != nullptr || last->bytes == 0 || room < 0) return;
  if (last->c.data != last->memory->data()) return;  // spoilt
  const int64_t size = std::max<int64_t>(1, last->c.dtype.bits / 8);
  const int64_t at = OneIn(2) ? 0 : rng_.Integer(0, room / size) * size;
  last->c.data = lender->memory->data() + at;
  last->lender = lender;
}

// Fields that no memory goes with, or that leave the tensor within its memory.
void OpCaller::Spoil(Tensor& tensor) {
  quern_tensor& c = tensor.c;
  switch (rng_.Integer(0, 11)) {
    case 0:
      c.device.device_type = static_cast<int32_t>(Edge());
      if (c.device.device_type == QUERN_CPU) c.device.device_type = 2;
      break;
    case 1:
      c.ndim = OneIn(2) ? -1 : 0;
      break;
    case 2:
      c.dtype.lanes = static_cast<uint16_t>(rng_.Integer(2, 9));
      break;
    case 3:
      c.dtype.code = static_cast<uint8_t>(rng_.Integer(20, 255));
      break;
    case 4:
      c.dtype.bits = 4;
      break;
    case 5:
      c.shape = nullptr;
      break;
    case 6:
      c.data = nullptr;
      break;
    case 7:
      c.byte_offset = ~uint64_t{0} - 64;
      break;
    case 8:
      if (tensor.memory->size() == 0) break;
      c.data = static_cast<char*>(c.data) + 1;  // misaligned, or one too far
      if (c.dtype.bits == 8) c.data = tensor.memory->data();
      break;
    case 9:
      if (tensor.shape.empty()) break;
      tensor.shape[At(rng_, tensor.shape.size())] = OneIn(2) ? -1 : INT64_MIN;
      break;
    case 10:
      if (tensor.strides.empty()) break;
      tensor.strides[At(rng_, tensor.strides.size())] = OneIn(2) ? -1 : 0;
      c.strides = tensor.strides.data();
      break;
    default:
      break;
  }
}

}  // namespace quern
