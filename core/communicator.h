#ifndef QUERN_CORE_COMMUNICATOR_H_
#define QUERN_CORE_COMMUNICATOR_H_

// How operators talk to the other ranks of a sharded model: they are handed a
// Communicator, they never own one. Ranks as threads of one process are
// ops/parallel/thread_communicator.h, ranks as processes
// ops/parallel/mpi/mpi_communicator.h; SelfCommunicator is a model in one
// piece.
//
// Every call but rank() and size() is collective: all ranks make the same calls
// in the same order, with the same shapes, dtypes and roots, else some of them
// wait for ever or get something else. That is for the program to see to, as
// Execute's arguments are: no call returns a status, and an implementation that
// loses a rank aborts. One thread of a rank at a time. Work is done on the
// calling thread; nothing is allocated.
//
// What a call computes does not depend on timing, and is the same on every rank
// that gets it.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"

namespace quern {

// `total` columns in shards of `width`: rank r holds [Begin(r), Begin(r + 1)).
// The last ranks hold fewer, or none, where total < width * size.
struct ColumnShards {
  int64_t total = 0;
  int64_t width = 0;

  constexpr int64_t Begin(int rank) const {
    return std::min(rank * width, total);
  }
  constexpr int64_t Count(int rank) const {
    return Begin(rank + 1) - Begin(rank);
  }
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;  // in [0, size())
  virtual int size() const = 0;  // >= 1

  // Returns when all ranks have called it.
  virtual void Barrier() noexcept = 0;

  // x = x_0 + x_1 + ... + x_(size - 1), element by element, in place, on every
  // rank. x[rows, cols] is f32, bf16 or f16, with any row stride. The sum is
  // made in f32, in the order of ranks, and rounded once to x's dtype, to
  // nearest even. NaN and infinities go the way of f32 addition; -0 where all
  // are -0.
  virtual void AllReduceSum(const AnyTensorView& x) noexcept = 0;

  // Copies `bytes` bytes at `data` from rank `root` to all others.
  virtual void Broadcast(void* data, int64_t bytes, int root) noexcept = 0;

  // out[i, shards.Begin(r) + j] = shard of rank r[i, j]
  //
  // shard[rows, shards.Count(rank())], out[rows, shards.total], of one dtype
  // and any row strides. A shard lies at its own place in out, or apart from
  // it. Every rank gets out.
  void AllGatherColumns(const AnyTensorView& shard, const AnyTensorView& out,
                        const ColumnShards& shards) noexcept {
    Gather(shard, out, shards, kEveryRank);
  }
  // Like AllGatherColumns, but only rank `root` gets `out`; that of other ranks
  // is not used.
  void GatherColumnsToRoot(const AnyTensorView& shard, const AnyTensorView& out,
                           const ColumnShards& shards, int root = 0) noexcept {
    Gather(shard, out, shards, root);
  }

  // out[r * bytes, (r + 1) * bytes) = in of rank r, on every rank.
  void AllGather(const void* in, void* out, int64_t bytes) noexcept {
    Gather(Bytes(in, bytes), Bytes(out, bytes * size()),
           {bytes * size(), bytes}, kEveryRank);
  }
  // Like AllGather, but only rank `root` gets `out`; that of other ranks may be
  // null.
  void GatherToRoot(const void* in, void* out, int64_t bytes,
                    int root = 0) noexcept {
    Gather(Bytes(in, bytes), Bytes(out, bytes * size()),
           {bytes * size(), bytes}, root);
  }

 protected:
  static constexpr int kEveryRank = -1;

  // `receiver` is a rank or kEveryRank. There are rows and columns.
  virtual void GatherColumns(const AnyTensorView& shard,
                             const AnyTensorView& out,
                             const ColumnShards& shards,
                             int receiver) noexcept = 0;

 private:
  void Gather(const AnyTensorView& shard, const AnyTensorView& out,
              const ColumnShards& shards, int receiver) noexcept {
    QUERN_DCHECK(kEveryRank <= receiver && receiver < size());
    QUERN_DCHECK(shard.extent(1) == shards.Count(rank()));
    QUERN_DCHECK((receiver != kEveryRank && receiver != rank()) ||
                 (out.extent(1) == shards.total &&
                  out.extent(0) == shard.extent(0) &&
                  out.dtype() == shard.dtype()));
    if (shard.extent(0) == 0 || shards.total == 0) return;
    GatherColumns(shard, out, shards, receiver);
  }
  static AnyTensorView Bytes(const void* data, int64_t bytes) {
    return AnyTensorView(DType::kU8, data, 2, {1, bytes}, {bytes, 1});
  }
  static AnyTensorView Bytes(void* data, int64_t bytes) {
    return AnyTensorView(DType::kU8, data, 2, {1, bytes}, {bytes, 1});
  }
};

// Copies a matrix of equal shape and dtype; `to` is `from`, or apart from it.
inline void CopyColumns(const AnyTensorView& from, const AnyTensorView& to) {
  if (from.data() == to.data()) return;
  const auto size = static_cast<int64_t>(SizeOf(from.dtype()));
  const char* source = static_cast<const char*>(from.data());
  char* target = static_cast<char*>(to.mutable_data());
  if (from.extent(1) == 0) return;
  for (int64_t i = 0; i < from.extent(0); ++i) {
    std::memcpy(target + i * to.stride(0) * size,
                source + i * from.stride(0) * size,
                static_cast<size_t>(from.extent(1) * size));
  }
}

// The only rank.
class SelfCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void Barrier() noexcept override {}
  void AllReduceSum(const AnyTensorView& /*x*/) noexcept override {}
  void Broadcast(void* /*data*/, int64_t /*bytes*/,
                 int root) noexcept override {
    QUERN_DCHECK(root == 0);
  }

 private:
  void GatherColumns(const AnyTensorView& shard, const AnyTensorView& out,
                     const ColumnShards& /*shards*/,
                     int /*receiver*/) noexcept override {
    CopyColumns(shard, out);
  }
};

}  // namespace quern

#endif  // QUERN_CORE_COMMUNICATOR_H_
