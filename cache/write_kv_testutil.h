#ifndef QUERN_CACHE_WRITE_KV_TESTUTIL_H_
#define QUERN_CACHE_WRITE_KV_TESTUTIL_H_

// What the tests of write_kv share: one call through the public interface into
// a cache full of poison, compared byte by byte with the formulas of the
// header.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/write_kv.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/reference_convert.h"

namespace quern {

struct WriteKvCase {
  KvForm form = KvForm::kPaired;
  int64_t page_size = 32;
  int64_t num_pages = 3;
  int64_t heads = 2;
  int64_t head_dim = 16;
  int64_t v_head_dim = 16;
  KvScaling scaling = KvScaling::kNone;
  KvRotation rotation = KvRotation::kNone;
  int64_t rot_dim = 0;
  Stores stores = Stores::kAuto;
  std::vector<int64_t> slots;
};

inline KvLayout LayoutOf(const WriteKvCase& c, DType dtype) {
  KvLayoutSpec spec;
  spec.dtype = dtype;
  spec.kv_heads = c.heads;
  spec.head_dim = c.head_dim;
  spec.v_head_dim = c.v_head_dim;
  spec.page_size = c.page_size;
  spec.form = c.form;
  spec.scaling = c.scaling;
  return KvLayout::Create(spec).value();
}

// All slots in [begin, end), in order.
inline std::vector<int64_t> Consecutive(int64_t begin, int64_t end) {
  std::vector<int64_t> slots;
  for (int64_t slot = begin; slot < end; ++slot) slots.push_back(slot);
  return slots;
}

// The code of x, see write_kv.h.
template <typename To>
To CodeOf(double x, float inverse) {
  if (sizeof(To) > 1) return FromDouble<To>(x);
  double scaled = double{static_cast<float>(x) * inverse};
  if (std::is_same_v<To, int8_t>) scaled = std::max(scaled, -127.0);
  return FromDouble<To>(scaled, Overflow::kSaturate);
}

template <typename To>
float ScaleOfRow(const std::vector<double>& row) {
  double most = 0;
  for (const double x : row) {
    if (!std::isfinite(x)) return std::numeric_limits<float>::quiet_NaN();
    most = std::max(most, std::abs(x));
  }
  if (most == 0) return 1.0f;
  const float largest = std::is_same_v<To, int8_t>       ? 127.0f
                        : std::is_same_v<To, Float8E4M3> ? 448.0f
                                                         : 57344.0f;
  return std::max(static_cast<float>(most) / largest, 0x1p-125f);
}

template <typename From, typename To>
class WriteKvRun {
 public:
  // Rows of `choices`, at random. Cosines and sines are multiples of 1/4, so
  // that a rotation of small integers is exact.
  WriteKvRun(const WriteKvCase& c, const std::vector<From>& choices, Rng& rng)
      : case_(c),
        layout_(LayoutOf(c, DTypeOf<To>)),
        tokens_(static_cast<int64_t>(c.slots.size())),
        k_(ChosenFrom(rng, tokens_ * c.heads * c.head_dim, choices)),
        v_(ChosenFrom(rng, tokens_ * c.heads * c.v_head_dim, choices)),
        k_rows_(k_, tokens_ * c.heads, c.head_dim, c.head_dim + 3),
        v_rows_(v_, tokens_ * c.heads, c.v_head_dim, c.v_head_dim + 1),
        cache_(c.num_pages * layout_.page_bytes()),
        want_(cache_.size()) {
    for (int64_t i = 0; i < kPositions * (c.rot_dim / 2); ++i) {
      cos_.push_back(static_cast<float>(rng.Integer(-4, 4)) / 4);
      sin_.push_back(static_cast<float>(rng.Integer(-4, 4)) / 4);
    }
    for (int64_t t = 0; t < tokens_; ++t) {
      positions_.push_back(rng.Integer(0, kPositions - 1));
    }
    for (int64_t h = 0; h < c.heads; ++h) {
      k_scales_.push_back(std::ldexp(1.5f, static_cast<int>(h) - 6));
      v_scales_.push_back(std::ldexp(1.25f, static_cast<int>(h) - 5));
    }
    args_.k = TensorView<const From, 3>(
        k_rows_.view().data(), {tokens_, c.heads, c.head_dim},
        {c.heads * (c.head_dim + 3), c.head_dim + 3, 1});
    args_.v = TensorView<const From, 3>(
        v_rows_.view().data(), {tokens_, c.heads, c.v_head_dim},
        {c.heads * (c.v_head_dim + 1), c.v_head_dim + 1, 1});
    args_.slots = case_.slots;
    args_.cache = View(cache_);
    if (c.rotation != KvRotation::kNone) {
      args_.positions = positions_;
      args_.cos =
          DenseMatrix<const float>(cos_.data(), kPositions, c.rot_dim / 2);
      args_.sin =
          DenseMatrix<const float>(sin_.data(), kPositions, c.rot_dim / 2);
    }
  }

  // Runs it and returns the target of the plan.
  std::string Run(Executor& executor) {
    SCOPED_TRACE(testing::Message()
                 << DTypeName(DTypeOf<From>) << " to " << DTypeName(DTypeOf<To>)
                 << " " << KvFormName(case_.form) << " heads " << case_.heads
                 << " head_dim " << case_.head_dim << " and "
                 << case_.v_head_dim << " page_size " << case_.page_size
                 << " tokens " << tokens_ << " scaling "
                 << KvScalingName(case_.scaling) << " rotation "
                 << static_cast<int>(case_.rotation) << " of "
                 << case_.rot_dim);
    WriteKvSpec spec;
    spec.kv = layout_;
    spec.input = DTypeOf<From>;
    spec.rotation = case_.rotation;
    spec.rot_dim = case_.rot_dim;
    spec.stores = case_.stores;
    const WriteKvPlan plan = WriteKvPlan::Create(spec).value();
    const absl::Status status = plan.CheckArgs(args_);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_NO_ALLOCATION(plan.Execute(args_, executor));
    Compare();
    return plan.target();
  }

  const GuardBuffer<uint8_t>& cache() const { return cache_; }

 private:
  static constexpr int64_t kPositions = 7;

  KvCacheView View(GuardBuffer<uint8_t>& buffer) {
    KvCacheView view(layout_, case_.num_pages, buffer.data());
    if (case_.scaling == KvScaling::kPerTensor ||
        case_.scaling == KvScaling::kPerHead) {
      view.set_scales({k_scales_.data(), 0, 1}, {v_scales_.data(), 0, 1});
    }
    return view;
  }

  // Writes what is expected, element by element; where that is NaN, or
  // unspecified, anything that is the same is expected.
  void Compare() {
    const KvCacheView want = View(want_);
    for (int64_t t = 0; t < tokens_; ++t) {
      if (case_.slots[static_cast<size_t>(t)] < 0) continue;
      for (int64_t h = 0; h < case_.heads; ++h) {
        CompareRow(want, t, h, false);
        CompareRow(want, t, h, true);
      }
    }
    for (int64_t i = 0; i < cache_.size(); ++i) {
      if (cache_[i] != want_[i]) {
        ADD_FAILURE() << "byte " << i << " of the cache is " << int{cache_[i]}
                      << "; want " << int{want_[i]};
        return;
      }
    }
  }

  void CompareRow(const KvCacheView& want, int64_t token, int64_t head,
                  bool value) {
    const KvCacheView got = View(cache_);
    const int64_t slot = case_.slots[static_cast<size_t>(token)];
    const int64_t page = slot / layout_.page_size();
    const int64_t offset = slot % layout_.page_size();
    const std::vector<double> row = Row(token, head, value);
    float inverse = 1.0f;
    bool specified = true;
    if (layout_.scaling() == KvScaling::kPerTokenHead) {
      const float scale = ScaleOfRow<To>(row);
      const auto scales = [&](const KvCacheView& view) {
        return (value ? view.VScales(page, head) : view.KScales(page, head)) +
               offset;
      };
      inverse = 1.0f / scale;
      specified = !std::isnan(scale);
      *scales(want) =
          std::isnan(scale) && std::isnan(*scales(got)) ? *scales(got) : scale;
    } else if (layout_.scaling() != KvScaling::kNone) {
      inverse =
          1.0f / *(value ? got.VScales(page, head) : got.KScales(page, head));
    }
    const int64_t stored = value ? layout_.v_head_dim() : layout_.k_row();
    for (int64_t d = 0; d < stored; ++d) {
      const int64_t at =
          value ? layout_.VOffset(offset, d) : layout_.KOffset(offset, d);
      const auto element = [&](const KvCacheView& view) {
        return (value ? view.V(page, head) : view.K(page, head)) +
               at * static_cast<int64_t>(sizeof(To));
      };
      To code = {};  // what completes the last pair
      if (d < static_cast<int64_t>(row.size())) {
        code = CodeOf<To>(row[static_cast<size_t>(d)], inverse);
      }
      To written;
      std::memcpy(&written, element(got), sizeof(To));
      const bool both_nan =
          std::isnan(ToDouble(code)) && std::isnan(ToDouble(written));
      const bool unspecified =
          !specified && d < static_cast<int64_t>(row.size());
      std::memcpy(element(want), both_nan || unspecified ? &written : &code,
                  sizeof(To));
    }
  }

  // The numbers that are stored.
  std::vector<double> Row(int64_t token, int64_t head, bool value) const {
    const int64_t dim = value ? case_.v_head_dim : case_.head_dim;
    const From* x =
        (value ? v_ : k_).data() + (token * case_.heads + head) * dim;
    std::vector<double> row;
    for (int64_t d = 0; d < dim; ++d) row.push_back(ToDouble(x[d]));
    if (value || case_.rotation == KvRotation::kNone) return row;
    const int64_t half = case_.rot_dim / 2;
    const bool pairs = case_.rotation == KvRotation::kPairs;
    const int64_t angles = positions_[static_cast<size_t>(token)] * half;
    for (int64_t j = 0; j < half; ++j) {
      double& a = row[static_cast<size_t>(pairs ? 2 * j : j)];
      double& b = row[static_cast<size_t>(pairs ? 2 * j + 1 : j + half)];
      const double c = double{cos_[static_cast<size_t>(angles + j)]};
      const double s = double{sin_[static_cast<size_t>(angles + j)]};
      const double turned = a * c - b * s;
      b = b * c + a * s;
      a = turned;
    }
    return row;
  }

  WriteKvCase case_;
  KvLayout layout_;
  int64_t tokens_;
  std::vector<From> k_, v_;
  StridedMatrix<From> k_rows_, v_rows_;  // gaps between rows, a guard behind
  GuardBuffer<uint8_t> cache_, want_;
  std::vector<float> k_scales_, v_scales_, cos_, sin_;
  std::vector<int64_t> positions_;
  WriteKvArgs args_;
};

}  // namespace quern

#endif  // QUERN_CACHE_WRITE_KV_TESTUTIL_H_
