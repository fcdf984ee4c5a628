// Runs on several processes, as in .ci/run mpi: mpirun -n 4 <this binary>.
// Compares, bit for bit, what ranks as processes compute with what ranks as
// threads compute; each process runs a full group of threads for that.

#include "quern/ops/parallel/mpi/mpi_communicator.h"

#include <mpi.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/parallel/parallel_linear.h"
#include "quern/ops/parallel/parallel_lm_head.h"
#include "quern/ops/parallel/ranks_testutil.h"
#include "quern/ops/parallel/thread_communicator.h"
#include "quern/ops/parallel/vocab_parallel_embedding.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using Doubles = std::vector<double>;

int Ranks() {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  return ranks;
}

std::unique_ptr<MpiCommunicator> World(int64_t scratch_bytes) {
  auto world = MpiCommunicator::Create(MPI_COMM_WORLD, scratch_bytes);
  EXPECT_TRUE(world.ok()) << world.status();
  return *std::move(world);
}

// Random numbers that are the same in every process and depend on `stream`.
Doubles Reals(uint64_t stream, int64_t count) {
  TestRng rng(stream);
  Doubles v;
  while (count-- > 0) v.push_back(rng.Uniform(-1, 1));
  return v;
}

TEST(MpiCommunicator, SumsAsThreadsDo) {
  struct Shape {
    int64_t rows, cols, stride;
  };
  for (const int64_t scratch : {int64_t{4096}, int64_t{1} << 20}) {
    const auto world = World(scratch);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const Shape& s :
           {Shape{0, 3, 3}, Shape{1, 1, 1}, Shape{3, 37, 40},
            Shape{1, 1024, 1024}, Shape{67, 259, 261}, Shape{3001, 7, 9}}) {
        const auto input = [&](int rank) {
          return std::make_unique<AnyMatrix>(
              dtype, Reals(static_cast<uint64_t>(rank), s.rows * s.cols),
              s.rows, s.cols, s.stride);
        };
        std::vector<uint32_t> want;
        RunRanks(Ranks(), [&](ThreadCommunicator& c) {
          const auto x = input(c.rank());
          c.AllReduceSum(x->view());
          if (c.rank() == 0) want = x->bits();
        });
        const auto x = input(world->rank());
        world->AllReduceSum(x->view());
        EXPECT_EQ(x->bits(), want) << DTypeName(dtype) << " " << s.rows;
      }
    }
  }
}

TEST(MpiCommunicator, GathersColumns) {
  for (const int64_t scratch : {int64_t{4096}, int64_t{1} << 20}) {
    const auto world = World(scratch);
    const int ranks = world->size(), rank = world->rank();
    // The last shard is full, cut, or empty; one shard is wider than the
    // scratch.
    for (const ColumnShards shards :
         {ColumnShards{int64_t{5} * ranks, 5}, ColumnShards{4 * ranks - 2, 4},
          ColumnShards{3, 3}, ColumnShards{3000 * ranks - 7, 3000}}) {
      for (const int64_t rows : {0, 1, 37}) {
        const Doubles all = Reals(0, rows * shards.total);
        Doubles own;
        for (int64_t i = 0; i < rows; ++i) {
          const auto row = all.begin() + i * shards.total;
          own.insert(own.end(), row + shards.Begin(rank),
                     row + shards.Begin(rank + 1));
        }
        const int64_t count = shards.Count(rank);
        const AnyMatrix shard(DType::kBF16, own, rows, count, count + 2);
        const AnyMatrix want(DType::kBF16, all, rows, shards.total,
                             shards.total);
        const AnyMatrix out(DType::kBF16, rows, shards.total, shards.total + 3);
        world->AllGatherColumns(shard.const_view(), out.view(), shards);
        EXPECT_EQ(out.bits(), want.bits());
        const int root = ranks - 1;
        const AnyMatrix at_root(DType::kBF16, rows, shards.total, shards.total);
        world->GatherColumnsToRoot(
            shard.const_view(), rank == root ? at_root.view() : AnyTensorView(),
            shards, root);
        if (rank == root) {
          EXPECT_EQ(at_root.bits(), want.bits());
        }
      }
    }
  }
}

TEST(MpiCommunicator, BroadcastsAndWaits) {
  const auto world = World(4096);
  std::vector<int> words(9000, world->rank());
  world->Broadcast(words.data(), 36000, world->size() - 1);
  EXPECT_EQ(words, std::vector<int>(9000, world->size() - 1));
  world->Barrier();
}

// Results of a miniature model: embedding, a block, logits, and their largest.
struct Results {
  std::vector<uint32_t> logits;
  std::vector<int64_t> tokens;
};
template <typename AnyCommunicator>
Results RunModel(AnyCommunicator& c) {
  const int64_t hidden = 96, inner = 64, vocab = 250, n = 5;
  const DType dtype = DType::kBF16;
  InlineExecutor executor;
  const AnyMatrix table(dtype, Reals(1, vocab * hidden), vocab, hidden, hidden);
  const AnyMatrix up_w(dtype, Reals(2, inner * hidden), inner, hidden, hidden);
  const AnyMatrix down_w(dtype, Reals(3, hidden * inner), hidden, inner, inner);

  VocabParallelEmbeddingSpec embedding;
  embedding.vocab.original = vocab;
  embedding.hidden = hidden;
  embedding.weight_dtype = embedding.out_dtype = dtype;
  const auto embed = VocabParallelEmbeddingPlan::Create(embedding, c);
  const int64_t rows = embed->shard().rows();
  const AnyMatrix shard(dtype, rows, hidden, hidden);
  EXPECT_TRUE(
      LoadVocabShard(embed->shard(), table.const_view(), shard.view()).ok());
  ColumnParallelLinearSpec up;
  up.outputs = {{inner}};
  up.k = hidden;
  const auto up_plan = ColumnParallelLinearPlan::Create(
      up, up_w.const_view(), AnyTensorView(), c, executor);
  RowParallelLinearSpec down;
  down.n = hidden;
  down.k = inner;
  const auto down_plan = RowParallelLinearPlan::Create(
      down, down_w.const_view(), AnyTensorView(), c, executor);
  ParallelLmHeadSpec head;
  head.vocab.original = vocab;
  head.hidden = hidden;
  const auto head_plan = ParallelLmHeadPlan::Create(
      head, table.const_view(), AnyTensorView(), c, executor);
  EXPECT_TRUE(up_plan.ok() && down_plan.ok() && head_plan.ok());
  AlignedBuffer up_scratch = ScratchOf(*up_plan, n, executor);
  AlignedBuffer down_scratch = ScratchOf(*down_plan, n, executor);
  AlignedBuffer head_scratch = ScratchOf(*head_plan, n, executor);

  const int64_t ids[n] = {0, 3, 130, 200, 249};
  const AnyMatrix x(dtype, n, hidden, hidden);
  const AnyMatrix h(dtype, n, up_plan->columns(), up_plan->columns());
  const AnyMatrix logits(DType::kF32, n, vocab, vocab);
  Results results;
  results.tokens.resize(n);
  embed->Execute(DenseVector(ids, n), shard.const_view(), x.view(), c,
                 executor);
  up_plan->Execute(x.const_view(), h.view(), Workspace(up_scratch), c,
                   executor);
  down_plan->Execute(h.const_view(), x.view(), Workspace(down_scratch), c,
                     executor);
  head_plan->Execute(x.const_view(), logits.view(), Workspace(head_scratch), c,
                     executor);
  head_plan->ArgMax(x.const_view(), DenseVector(results.tokens.data(), n),
                    Workspace(head_scratch), c, executor);
  results.logits = logits.bits();
  return results;
}

TEST(MpiCommunicator, AModelComputesWhatItDoesOverThreads) {
  Results want;
  RunRanks(Ranks(), [&](ThreadCommunicator& c) {
    Results results = RunModel(c);
    if (c.rank() == 0) want = std::move(results);
  });
  const auto world = World(4096);
  const Results results = RunModel(*world);
  EXPECT_EQ(results.logits, want.logits);
  EXPECT_EQ(results.tokens, want.tokens);
}

TEST(MpiCommunicator, Refuses) {
  for (const int64_t bytes : {int64_t{4095}, int64_t{1} << 31}) {
    ExpectRefusal(MpiCommunicator::Create(MPI_COMM_WORLD, bytes).status(),
                  "mpi_communicator: scratch_bytes=");
  }
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  quern::ExpectRefusal(quern::MpiCommunicator::Create(MPI_COMM_WORLD).status(),
                       "mpi_communicator: MPI is not initialised");
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  const int ranks = quern::Ranks();
  // A launcher of another MPI starts processes that each believe to be alone.
  if (argc > 1 && argv[1] != "--ranks=" + std::to_string(ranks)) {
    std::fprintf(stderr, "%s asked for, there are %d\n", argv[1], ranks);
    return 1;
  }
  const int status = RUN_ALL_TESTS();
  MPI_Finalize();
  return status;
}
