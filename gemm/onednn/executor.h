#ifndef QUERN_GEMM_ONEDNN_EXECUTOR_H_
#define QUERN_GEMM_ONEDNN_EXECUTOR_H_

// Lends the threads of an Executor to oneDNN.
//
//   OneDnnThreadpool threads(executor);
//   dnnl::stream stream = dnnl::threadpool_interop::make_stream(engine,
//                                                               &threads);
//
// How oneDNN divides a primitive among threads may decide the order of its
// sums. Who needs the same bits for any number of threads runs primitives that
// were created for one thread inside his own ParallelFor, as gemm/onednn/
// linear.cc does.

#include <cstdint>
#include <functional>

#include "core/executor.h"
#include "oneapi/dnnl/dnnl_threadpool_iface.hpp"

namespace quern {

// Synchronous: parallel_for returns when all its tasks have finished. A call
// from within a task of the same Executor, through this adapter or another,
// runs inline on the calling thread, for Executors are not reentrant.
// Holds the Executor by reference; it must live longer.
class OneDnnThreadpool final
    : public dnnl::threadpool_interop::threadpool_iface {
 public:
  explicit OneDnnThreadpool(Executor& executor) : executor_(executor) {}

  int get_num_threads() const override { return executor_.num_workers(); }
  // Whether this thread runs a task of this Executor.
  bool get_in_parallel() const override;
  void parallel_for(int n, const std::function<void(int, int)>& fn) override;
  uint64_t get_flags() const override { return 0; }

 private:
  Executor& executor_;
};

}  // namespace quern

#endif  // QUERN_GEMM_ONEDNN_EXECUTOR_H_
