// Two tensors of a step in one memory.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/all_ops_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_matrix_testutil.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace {

using Dims = AnyTensorView::Dims;

int64_t BytesOf(const TensorMeta& meta) {
  return CountOf(meta) * static_cast<int64_t>(SizeOf(meta.dtype));
}

AnyTensorView DenseView(const TensorMeta& meta, uint8_t* data) {
  Dims extents{};
  std::copy(meta.extents.begin(), meta.extents.end(), extents.begin());
  return AnyTensorView(meta.dtype, static_cast<void*>(data),
                       static_cast<int>(meta.extents.size()), extents,
                       DenseStrides(meta.extents));
}

// How many bytes hold both tensors of a pair; a multiple of 64, so that they
// begin aligned.
int64_t SharedBytes(const MatrixOp& op, const SharedPair& pair) {
  const int64_t end =
      std::max(BytesOf(op.given.metas[pair.first]),
               pair.offset + BytesOf(op.given.metas[pair.second]));
  return (end + 63) / 64 * 64;
}

}  // namespace

std::vector<SharedPair> SharedPairs(const MatrixOp& op) {
  const GivenTensors& given = op.given;
  std::vector<SharedPair> pairs;
  for (size_t a = 0; a < given.size(); ++a) {
    for (size_t b = 0; b < given.size(); ++b) {
      const bool read = !given.written[a] && !given.written[b] && a < b &&
                        given.metas[a].dtype == given.metas[b].dtype;
      if (a == b || !(given.written[a] || read)) continue;
      SharedPair pair;
      pair.first = a;
      pair.second = b;
      pair.written = given.written[a];
      const std::set<std::string> names = {given.names[a], given.names[b]};
      for (const auto& [one, two] : op.definition().rules.in_place) {
        pair.declared =
            pair.declared || names == std::set<std::string>{one, two};
      }
      const auto size = static_cast<int64_t>(SizeOf(given.metas[b].dtype));
      const int64_t last =
          std::max<int64_t>(0, BytesOf(given.metas[a]) - 1) / size * size;
      for (const int64_t offset : std::set<int64_t>{0, last}) {
        pair.offset = offset;
        pair.what = absl::StrCat(given.names[b], " ", offset, " bytes behind ",
                                 given.names[a]);
        pairs.push_back(pair);
      }
    }
  }
  return pairs;
}

SharedStep::SharedStep(const MatrixOp& op, const SharedPair& pair)
    : metas_(op.given.metas),
      pair_(pair),
      offset_(pair.offset),
      memory_(SharedBytes(op, pair)),
      views_(op.given.all),
      apart_(op.given.all) {
  for (const size_t t : {pair.first, pair.second}) {
    std::copy(op.elements[t].begin(), op.elements[t].end(),
              memory_.data() + OffsetOf(t));
  }
  before_.assign(memory_.data(), memory_.data() + memory_.size());
  for (size_t t = 0; t < metas_.size(); ++t) {
    const bool shared = t == pair.first || t == pair.second;
    for (std::vector<Tensor>* const list : {&beside_, &apart_of_}) {
      list->emplace_back(metas_[t], DenseStrides(metas_[t].extents), 0);
      // Memory of its own has what the shared memory has.
      list->back().Write(shared ? Read(t) : op.elements[t]);
    }
    const size_t place = op.given.places[t];
    apart_[place] = apart_of_[t].View(false, false);
    views_[place] = shared ? DenseView(metas_[t], memory_.data() + OffsetOf(t))
                           : beside_[t].View(false, false);
  }
}

std::vector<uint8_t> SharedStep::Read(size_t t) const {
  if (t != pair_.first && t != pair_.second) return beside_[t].Read();
  const uint8_t* const begin = memory_.data() + OffsetOf(t);
  return {begin, begin + BytesOf(metas_[t])};
}

bool SharedStep::SharedIsUnchanged() const {
  return std::equal(before_.begin(), before_.end(), memory_.data());
}

}  // namespace quern
