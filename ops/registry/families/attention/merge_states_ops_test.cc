// merge_states, and merge_attn_states by vLLM's name, against sums in double.

#include "quern/ops/registry/families/attention/merge_states_ops.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_fixture_testutil.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/registry/vllm/merge_states_ops.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/reference_convert.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

constexpr const char* kProviders[] = {"simd", "reference"};
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Size {
  int64_t tokens, heads, dim;
  int64_t a_tokens = -1;

  int64_t rows() const { return tokens * heads; }
  size_t count() const { return static_cast<size_t>(rows() * dim); }
};

// Two parts of [tokens, heads] rows, and what the operator wrote. The numbers
// of a row are at token * heads + head, whatever the operator's layout.
template <typename T>
struct Parts {
  std::vector<T> a, b, out;
  std::vector<float> a_lse, b_lse, lse;
};

class MergeStatesOpsTest : public OpFixture {
 protected:
  MergeStatesOpsTest() {
    EXPECT_EQ(RegisterMergeStatesOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterVllmMergeStatesOps(registry_), absl::OkStatus());
  }

  template <typename T>
  Parts<T> Random(const Size& s) {
    return {UniformReals<T>(rng_, s.rows() * s.dim),
            UniformReals<T>(rng_, s.rows() * s.dim),
            std::vector<T>(s.count(), Poison<T>()),
            UniformReals(rng_, s.rows(), -9, 9),
            UniformReals(rng_, s.rows(), -9, 9),
            std::vector<float>(static_cast<size_t>(s.rows()), 99)};
  }

  template <typename T>
  void Merge(const std::string& provider, const Size& s, Parts<T>& p) {
    const AnyTensorView out = View(p.out, s), a = View(p.a, s),
                        b = View(p.b, s);
    const TensorMeta state{DTypeOf<T>, {s.tokens, s.heads, s.dim}};
    const TensorMeta lse{DType::kF32, {s.tokens, s.heads}};
    Run(Make(provider, "merge_states",
             {{"prefix", state},
              {"prefix_lse", lse},
              {"suffix", state},
              {"suffix_lse", lse}}),
        {{"prefix", a},
         {"prefix_lse", Lse(p.a_lse, s)},
         {"suffix", b},
         {"suffix_lse", Lse(p.b_lse, s)},
         {"out0", out},
         {"out1", Lse(p.lse, s)}});
  }

  // By vLLM's name, whose lse are [heads, tokens], with a gap between heads.
  template <typename T>
  void MergeByHead(const std::string& provider, const Size& s, Parts<T>& p) {
    const TensorMeta state{DTypeOf<T>, {s.tokens, s.heads, s.dim}};
    const TensorMeta lse{DType::kF32, {s.heads, s.tokens}};
    std::vector<float> a_lse = ByHead(p.a_lse, s), b_lse = ByHead(p.b_lse, s);
    std::vector<float> out_lse(a_lse.size(), 99);
    const auto view = [&](std::vector<float>& values) {
      return MatrixView<float>(values.data(), {s.heads, s.tokens},
                               {s.tokens + 3, 1});
    };
    Run(Make(provider, "merge_attn_states",
             {{"output", state},
              {"output_lse", lse},
              {"prefix_output", state},
              {"prefix_lse", lse},
              {"suffix_output", state},
              {"suffix_lse", lse},
              {"prefill_tokens_with_context", s.a_tokens}}),
        {{"output", View(p.out, s)},
         {"output_lse", view(out_lse)},
         {"prefix_output", View(p.a, s)},
         {"prefix_lse", view(a_lse)},
         {"suffix_output", View(p.b, s)},
         {"suffix_lse", view(b_lse)}});
    for (int64_t t = 0; t < s.tokens; ++t) {
      for (int64_t h = 0; h < s.heads; ++h) {
        p.lse[static_cast<size_t>(t * s.heads + h)] =
            out_lse[static_cast<size_t>(h * (s.tokens + 3) + t)];
      }
    }
    for (int64_t h = 0; h < s.heads; ++h) {  // the gaps are left alone
      EXPECT_EQ(out_lse[static_cast<size_t>(h * (s.tokens + 3) + s.tokens)],
                99);
    }
  }

  template <typename T>
  static AnyTensorView View(std::vector<T>& values, const Size& s) {
    return TensorView<T, 3>(values.data(), {s.tokens, s.heads, s.dim},
                            {s.heads * s.dim, s.dim, 1});
  }
  static AnyTensorView Lse(std::vector<float>& values, const Size& s) {
    return DenseMatrix(values.data(), s.tokens, s.heads);
  }
  static std::vector<float> ByHead(const std::vector<float>& rows,
                                   const Size& s) {
    std::vector<float> turned(static_cast<size_t>(s.heads * (s.tokens + 3)),
                              99);
    for (int64_t t = 0; t < s.tokens; ++t) {
      for (int64_t h = 0; h < s.heads; ++h) {
        turned[static_cast<size_t>(h * (s.tokens + 3) + t)] =
            rows[static_cast<size_t>(t * s.heads + h)];
      }
    }
    return turned;
  }

  // The bounds of merge_states_test.cc.
  template <typename T>
  static void ExpectNear(const Size& s, const Parts<T>& p) {
    std::vector<double> want, want_lse;
    for (size_t r = 0; r < p.a_lse.size(); ++r) {
      const bool merged =
          s.a_tokens < 0 || static_cast<int64_t>(r) < s.a_tokens * s.heads;
      const double a = merged ? double{p.a_lse[r]} : double{-kInf};
      const double b = double{p.b_lse[r]};
      const double lse =
          std::max(a, b) + std::log1p(std::exp(-std::abs(a - b)));
      want_lse.push_back(lse);
      for (size_t d = 0; d < static_cast<size_t>(s.dim); ++d) {
        const size_t i = r * static_cast<size_t>(s.dim) + d;
        want.push_back(std::exp(a - lse) * ToDouble(p.a[i]) +
                       std::exp(b - lse) * ToDouble(p.b[i]));
      }
    }
    const double eps = std::ldexp(1.0, -24);
    EXPECT_TRUE(AllWithin(p.out, want, [&](double x, int64_t) {
      return (2 * 6 + 2 * 3 + 3) * eps + UnitRoundoff<T>() * std::abs(x) +
             (DTypeOf<T> == DType::kF16 ? 0x1p-25 : 0);
    }));
    EXPECT_TRUE(AllWithin(p.lse, want_lse, [&](double x, int64_t) {
      return (6 + 4) * eps + std::abs(x) * eps;
    }));
  }

  template <typename T>
  void ExpectMatchesReference(Size s) {
    SCOPED_TRACE(testing::Message() << DTypeName(DTypeOf<T>) << " " << s.tokens
                                    << " x " << s.heads << " x " << s.dim);
    const Parts<T> parts = Random<T>(s);
    for (const char* provider : kProviders) {
      SCOPED_TRACE(provider);
      Parts<T> by_token = parts;
      Merge(provider, s, by_token);
      ExpectNear(s, by_token);
      Parts<T> by_head = parts;
      MergeByHead(provider, s, by_head);
      EXPECT_TRUE(AllBitsEqual(by_head.out, by_token.out));
      EXPECT_TRUE(AllBitsEqual(by_head.lse, by_token.lse));
      for (const int64_t a_tokens : {int64_t{0}, s.tokens / 2, s.tokens}) {
        SCOPED_TRACE(testing::Message() << "a_tokens " << a_tokens);
        Size some = s;
        some.a_tokens = a_tokens;
        Parts<T> got = parts;
        // The prefix of the others is not read.
        const auto first = static_cast<size_t>(a_tokens * s.heads);
        std::fill(got.a_lse.begin() + static_cast<int64_t>(first),
                  got.a_lse.end(), std::nanf(""));
        MergeByHead(provider, some, got);
        got.a_lse = parts.a_lse;
        ExpectNear(some, got);
        for (size_t r = first; r < got.lse.size(); ++r) {
          EXPECT_EQ(got.lse[r], parts.b_lse[r]) << r;
        }
      }
    }
  }

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(MergeStatesOpsTest);

TEST_P(MergeStatesOpsTest, MatchesTheReference) {
  for (const int64_t dim : {1, 17, 64}) {
    for (const int64_t heads : {1, 3, 65}) {
      for (const int64_t tokens : {1, 5}) {
        ExpectMatchesReference<float>({tokens, heads, dim});
        ExpectMatchesReference<BFloat16>({tokens, heads, dim});
        ExpectMatchesReference<Float16>({tokens, heads, dim});
      }
    }
  }
}

// Partitions without keys, of any of which the output may hold anything.
TEST_P(MergeStatesOpsTest, PartsWithoutKeys) {
  const Size s = {2, 4, 9};
  for (const char* provider : kProviders) {
    for (const float none : {-kInf, kInf}) {
      SCOPED_TRACE(testing::Message() << provider << " " << none);
      for (const bool by_head : {false, true}) {
        Parts<float> p = Random<float>(s);
        const std::vector<float> a = p.a, b = p.b;
        // Each token has four heads: with both, a alone, b alone, neither.
        for (size_t t = 0; t < 2; ++t) {
          p.b_lse[4 * t + 1] = none;
          p.a_lse[4 * t + 2] = none;
          p.a_lse[4 * t + 3] = none;
          p.b_lse[4 * t + 3] = -kInf;
        }
        const auto forget = [](std::vector<float>& values, size_t row) {
          std::fill_n(values.begin() + static_cast<int64_t>(9 * row), 9,
                      std::nanf(""));
        };
        for (size_t t = 0; t < 2; ++t) {
          forget(p.b, 4 * t + 1);
          forget(p.a, 4 * t + 2);
          forget(p.a, 4 * t + 3);
          forget(p.b, 4 * t + 3);
        }
        if (by_head) {
          MergeByHead(provider, s, p);
        } else {
          Merge(provider, s, p);
        }
        for (size_t t = 0; t < 2; ++t) {
          EXPECT_EQ(p.lse[4 * t + 1], p.a_lse[4 * t + 1]);
          EXPECT_EQ(p.lse[4 * t + 2], p.b_lse[4 * t + 2]);
          EXPECT_EQ(p.lse[4 * t + 3], -kInf);
          for (size_t d = 0; d < 9; ++d) {
            EXPECT_EQ(p.out[9 * (4 * t + 1) + d], a[9 * (4 * t + 1) + d]);
            EXPECT_EQ(p.out[9 * (4 * t + 2) + d], b[9 * (4 * t + 2) + d]);
            EXPECT_EQ(p.out[9 * (4 * t + 3) + d], 0.0f);
          }
        }
      }
    }
  }
}

// A suffix of +inf is taken as it is for tokens without a prefix, as vLLM does.
TEST_P(MergeStatesOpsTest, WithoutAPrefixTheSuffixIsCopied) {
  for (const char* provider : kProviders) {
    const Size s = {3, 2, 5, 1};
    Parts<float> p = Random<float>(s);
    p.b_lse[3] = kInf;
    p.b_lse[4] = -kInf;
    MergeByHead(provider, s, p);
    for (size_t r = 2; r < 6; ++r) {
      EXPECT_EQ(p.lse[r], p.b_lse[r]);
      for (size_t d = 0; d < 5; ++d) {
        EXPECT_EQ(p.out[5 * r + d], p.b[5 * r + d]);
      }
    }
  }
}

TEST_P(MergeStatesOpsTest, WritesOverAPartAndNeedsNoLse) {
  const Size s = {3, 70, 8};
  const TensorMeta state{DType::kF32, {3, 70, 8}}, lse{DType::kF32, {70, 3}};
  const Parts<float> parts = Random<float>(s);
  for (const char* provider : kProviders) {
    Parts<float> want = parts;
    MergeByHead(provider, s, want);
    Parts<float> got = parts;
    std::vector<float> a_lse(70 * 3), b_lse(70 * 3);
    for (size_t t = 0; t < 3; ++t) {
      for (size_t h = 0; h < 70; ++h) {
        a_lse[h * 3 + t] = parts.a_lse[t * 70 + h];
        b_lse[h * 3 + t] = parts.b_lse[t * 70 + h];
      }
    }
    NamedArgs args = {{"output", state},
                      {"prefix_output", state},
                      {"prefix_lse", lse},
                      {"suffix_output", state},
                      {"suffix_lse", lse}};
    std::vector<NamedTensor> named = {
        {"output", View(got.a, s)},
        {"prefix_output", View(got.a, s)},
        {"prefix_lse", DenseMatrix(a_lse.data(), 70, 3)},
        {"suffix_output", View(got.b, s)},
        {"suffix_lse", DenseMatrix(b_lse.data(), 70, 3)}};
    Run(Make(provider, "merge_attn_states", args), named);
    EXPECT_TRUE(AllBitsEqual(got.a, want.out)) << provider;
    // output in the suffix's place, and output_lse in that of its lse.
    got.a = parts.a;
    args.emplace_back("output_lse", lse);
    named[0].second = View(got.b, s);
    named.emplace_back("output_lse", DenseMatrix(b_lse.data(), 70, 3));
    Run(Make(provider, "merge_attn_states", args), named);
    EXPECT_TRUE(AllBitsEqual(got.b, want.out)) << provider;
    for (size_t t = 0; t < 3; ++t) {
      for (size_t h = 0; h < 70; ++h) {
        EXPECT_EQ(b_lse[h * 3 + t], want.lse[t * 70 + h]) << provider;
      }
    }
  }
}

TEST_P(MergeStatesOpsTest, Refusals) {
  const OpDispatcher ops(registry_, OpPolicy());
  const NamedArgs good = {{"output", TensorMeta{DType::kF32, {3, 2, 8}}},
                          {"prefix_output", TensorMeta{DType::kF32, {3, 2, 8}}},
                          {"prefix_lse", TensorMeta{DType::kF32, {2, 3}}},
                          {"suffix_output", TensorMeta{DType::kF32, {3, 2, 8}}},
                          {"suffix_lse", TensorMeta{DType::kF32, {2, 3}}}};
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kMissing = absl::StatusCode::kUnimplemented;
  const auto expect = [&](const std::string& name, const OpArg& value,
                          absl::StatusCode code, const char* words) {
    NamedArgs args;
    bool found = false;
    for (const auto& arg : good) {
      found = found || arg.first == name;
      args.push_back(arg.first == name ? NamedArgs::value_type{name, value}
                                       : arg);
    }
    if (!found) args.emplace_back(name, value);
    ExpectRefusal(ops.Make("merge_attn_states", args).status(), code, words);
  };
  const auto f32 = [](const std::vector<int64_t>& extents) {
    return OpArg(TensorMeta{DType::kF32, extents});
  };
  expect("output_lse", f32({3, 2}), kInvalid,
         "merge_attn_states: output_lse is f32[3, 2]; need [2, 3]");
  expect("prefix_lse", f32({3, 2}), kInvalid,
         "merge_attn_states: prefix_lse is f32[3, 2]; need [2, 3]");
  expect("suffix_output", f32({3, 2, 9}), kInvalid,
         "merge_attn_states: suffix_output is f32[3, 2, 9]");
  expect("prefix_output", f32({4, 2, 8}), kInvalid,
         "merge_attn_states: prefix_output is f32[4, 2, 8]; need [3, 2, 8]");
  expect("suffix_output", OpArg(TensorMeta{DType::kBF16, {3, 2, 8}}), kInvalid,
         "merge_attn_states: suffix_output is bf16[3, 2, 8]");
  expect("output", OpArg(TensorMeta{DType::kF8E4M3, {3, 2, 8}}), kMissing,
         "merge_attn_states: out");
  expect("prefill_tokens_with_context", OpArg(int64_t{-2}), kInvalid,
         "merge_attn_states: prefill_tokens_with_context=-2; need -1 or a "
         "number of tokens");

  // More tokens with a prefix than there are.
  const Size s = {3, 2, 8, 4};
  Parts<float> p = Random<float>(s);
  std::vector<float> lse(6);
  NamedArgs args = good;
  args.emplace_back("prefill_tokens_with_context", int64_t{4});
  const MadeOp op = Make("simd", "merge_attn_states", args);
  std::vector<AnyTensorView> tensors;
  ExpectRefusal(op.Bind({{"output", View(p.out, s)},
                         {"prefix_output", View(p.a, s)},
                         {"prefix_lse", DenseMatrix(lse.data(), 2, 3)},
                         {"suffix_output", View(p.b, s)},
                         {"suffix_lse", DenseMatrix(lse.data(), 2, 3)}},
                        tensors),
                kInvalid,
                "merge_attn_states: prefill_tokens_with_context=4; need at "
                "most 3, the tokens");
}

}  // namespace
}  // namespace quern
