#ifndef QUERN_GEMM_ONEDNN_ENGINE_H_
#define QUERN_GEMM_ONEDNN_ENGINE_H_

// What every use of oneDNN in this folder starts from.

#include "oneapi/dnnl/dnnl.hpp"
#include "oneapi/dnnl/dnnl_threadpool.hpp"
#include "quern/core/check.h"
#include "quern/core/dtype.h"

namespace quern {

inline const dnnl::engine& OneDnnEngine() {
  // The engine is never destroyed, because layers may outlive the statics of
  // this file.
  static const auto* const engine =
      new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *engine;
}

inline dnnl::memory::data_type ToOneDnn(DType dtype) {
  using Type = dnnl::memory::data_type;
  switch (dtype) {
    case DType::kF32:
      return Type::f32;
    case DType::kBF16:
      return Type::bf16;
    case DType::kF16:
      return Type::f16;
    case DType::kI32:
      return Type::s32;
    case DType::kI8:
      return Type::s8;
    case DType::kU8:
      return Type::u8;
    default:
      QUERN_CHECK(false);
      return Type::undef;
  }
}

// oneDNN takes pointers to what it only reads as mutable ones.
inline dnnl::memory OneDnnMemory(const dnnl::memory::desc& desc,
                                 const void* data) {
  return dnnl::memory(desc, OneDnnEngine(), const_cast<void*>(data));
}

// While it lives, primitives created on this thread are for one thread. Their
// division of the sums over k then depends on no machine's core count.
class ForOneThread {
 public:
  ForOneThread() {
    dnnl_threadpool_interop_get_max_concurrency(&before_);
    dnnl_threadpool_interop_set_max_concurrency(1);
  }
  ~ForOneThread() { dnnl_threadpool_interop_set_max_concurrency(before_); }
  ForOneThread(const ForOneThread&) = delete;
  ForOneThread& operator=(const ForOneThread&) = delete;

 private:
  int before_ = 1;
};

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_ENGINE_H_
