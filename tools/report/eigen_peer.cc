// Times x[m, k] times weights[n, k] transposed, 4096 x 4096, by Eigen, in f32
// and in bf16. peers.py compiles it with the machine's compiler for the
// machine's own instruction set, outside of Bazel, and passes on what it
// prints.
//
// usage: eigen_peer THREADS M...
//
// One JSON object a line, as peers.py prints them: weights are rotated over
// four matrices, and the time is the median of 15 runs after two. Eigen
// multiplies a single row on one thread.

#include <Eigen/Core>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#ifdef __clang__
#define COMPILER __VERSION__
#else
#define COMPILER "GCC " __VERSION__
#endif

namespace {

constexpr int kN = 4096, kK = 4096, kSets = 4, kWarmUp = 2, kRuns = 15;

template <typename T>
using Rows = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// The median time of call(i), where i counts the runs.
template <typename Call>
double MedianUs(const Call& call) {
  std::vector<double> times;
  for (int i = 0; i < kWarmUp + kRuns; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    call(i);
    const std::chrono::duration<double, std::micro> time =
        std::chrono::steady_clock::now() - begin;
    if (i >= kWarmUp) times.push_back(time.count());
  }
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2];
}

// A sum has 256 terms of one weight, a power of two. Every partial sum is then
// exact in bf16 too, in which Eigen keeps the sums of bf16 products.
constexpr int kTerms = 256;
float WeightOf(int set, int n) { return std::ldexp(1.0f, -((set + n) % 4)); }

template <typename T>
Rows<T> WeightsOf(int set) {
  Rows<T> weights = Rows<T>::Zero(kN, kK);
  for (int n = 0; n < kN; ++n) {
    for (int term = 0; term < kTerms; ++term) {
      const int k = term * (kK / kTerms) + n % (kK / kTerms);
      weights(n, k) = T(WeightOf(set, n));
    }
  }
  return weights;
}

// Returns false if a product is wrong.
template <typename T>
bool Measure(const char* dtype, const std::vector<int>& rows) {
  std::vector<Rows<T>> weights;
  for (int s = 0; s < kSets; ++s) weights.push_back(WeightsOf<T>(s));
  for (const int m : rows) {
    const Rows<T> x = Rows<T>::Constant(m, kK, T(1));
    Rows<T> out = Rows<T>::Zero(m, kN);
    const double us = MedianUs(
        [&](int i) { out.noalias() = x * weights[i % kSets].transpose(); });
    const int last = (kWarmUp + kRuns - 1) % kSets;
    for (int row = 0; row < m; ++row) {
      for (int n = 0; n < kN; ++n) {
        const float want = kTerms * WeightOf(last, n);
        const float got = static_cast<float>(out(row, n));
        if (got == want) continue;
        std::fprintf(stderr, "eigen_peer: %s: out(%d, %d)=%g; need %g\n", dtype,
                     row, n, static_cast<double>(got),
                     static_cast<double>(want));
        return false;
      }
    }
    std::printf("{\"peer\": \"eigen\", \"version\": \"Eigen %d.%d.%d, " COMPILER
                "\", \"op\": \"linear\", \"dtype\": \"%s\", \"m\": %d, "
                "\"flops\": %.0f, "
                "\"median_us\": %.1f}\n",
                EIGEN_WORLD_VERSION, EIGEN_MAJOR_VERSION, EIGEN_MINOR_VERSION,
                dtype, m, 2.0 * m * kN * kK, us);
    std::fflush(stdout);
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> rows;
  for (int i = 2; i < argc; ++i) rows.push_back(std::atoi(argv[i]));
  if (rows.empty()) return 2;
  Eigen::setNbThreads(std::atoi(argv[1]));
  return Measure<float>("f32", rows) && Measure<Eigen::bfloat16>("bf16", rows)
             ? 0
             : 1;
}
