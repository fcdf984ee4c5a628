#ifndef QUERN_C_MODEL_MODEL_CALLER_TESTUTIL_H_
#define QUERN_C_MODEL_MODEL_CALLER_TESTUTIL_H_

// Test utility: random calls on models, states, tokenizers and samplers. Each
// is done, or refused with a code of quern.h and a sentence.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/model/handles_testutil.h"
#include "quern/c/model/model_testutil.h"
#include "quern/c/quern.h"
#include "quern/c/quern_model.h"
#include "quern/c/tensor.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/c/testing/fork_testutil.h"
#include "quern/core/dtype.h"
#include "quern/models/gguf/mutate_testutil.h"
#include "quern/testing/data.h"

namespace quern {

// The vocabulary of good files, which samplers have, too.
inline constexpr int64_t kFuzzVocab = 37;

// The calls of one thread.
class Caller {
 public:
  // Logits, sentences and explanations are looked at where no other thread
  // changes them.
  enum class Threads { kOne, kSeveral };

  Caller(const std::vector<std::string>& corpus, quern_library* library,
         quern_library* other, Handles& handles, Rng& rng, Threads threads)
      : corpus_(corpus),
        library_(library),
        other_(other),
        handles_(handles),
        rng_(rng),
        alone_(threads == Threads::kOne) {}

  void CallAny() {
    switch (rng_.Integer(0, 19)) {
      case 0:
        return CreateModel();
      case 1:
      case 2:
        return CreateState();
      case 3:
        return CreateTokenizer();
      case 4:
        return CreateSampler();
      case 5:
        return CreateExecutor();
      case 6:
      case 7:
      case 8:
        return Begin();
      case 9:
        return EndOrFork();
      case 10:
        return TellInfos();
      case 11:
      case 12:
        return Sample();
      case 13:
      case 14:
        return EncodeAndDecode();
      case 15:
        return Destroy();
      default:
        return Step();
    }
  }

  int64_t done = 0, refused = 0, steps = 0;

 private:
  using Kind = Handles::Kind;

  bool Rarely() { return rng_.Integer(0, 19) == 0; }
  template <typename T>
  T* Any(Kind kind) {
    return static_cast<T*>(handles_.Any(rng_, kind));
  }
  quern_library* AnyLibrary() {
    return Rarely() ? other_ : Rarely() ? nullptr : library_;
  }
  // A number near `usual`, or at an edge.
  int64_t Number(int64_t usual) {
    constexpr int64_t kEdges[] = {-1, 0, 1, INT32_MAX, INT64_MAX, INT64_MIN};
    return Rarely() ? kEdges[At(rng_, std::size(kEdges))] : usual;
  }
  template <typename T>
  T Sized() {
    T options = {};
    options.size = Rarely() ? sizeof(T) - 8 : sizeof(T);
    return options;
  }
  template <typename T>
  T* OrNull(T* pointer) {
    return Rarely() ? nullptr : pointer;
  }

  // Counts the call. An executor that broke its promise is the only reason for
  // QUERN_INTERNAL, and an allocation that fails should have been refused
  // before.
  bool Done(quern_status status, const void* object) {
    if (status == QUERN_OK) {
      ++done;
      return true;
    }
    ++refused;
    const std::string message = MessageOf(object);
    EXPECT_TRUE(status == QUERN_INVALID_ARGUMENT || status == QUERN_NOT_FOUND ||
                status == QUERN_RESOURCE_EXHAUSTED ||
                status == QUERN_FAILED_PRECONDITION ||
                status == QUERN_UNIMPLEMENTED || status == QUERN_DATA_LOSS ||
                status == QUERN_INTERNAL)
        << status << ": " << message;
    EXPECT_GT(message.size(), 8u);
    if (!alone_) return false;  // another thread's sentence may have come
    EXPECT_TRUE(status != QUERN_INTERNAL ||
                message.find("parallel_for") != std::string::npos)
        << message;
    EXPECT_EQ(message.find("no memory left"), std::string::npos) << message;
    EXPECT_EQ(message.find("cannot be allocated"), std::string::npos)
        << message;
    return false;
  }
  // By reference, because `made` is what the call that sets it has returned.
  template <typename T>
  void Keep(bool made, Kind kind, T*& handle) {
    EXPECT_EQ(made, handle != nullptr);
    if (made) handles_.Add(kind, handle);
  }

  std::string AnyFile() {
    const std::string& file = corpus_[At(rng_, corpus_.size())];
    if (rng_.Integer(0, 2) > 0) return file;
    return Mutate(rng_, file, corpus_, 3000);
  }
  template <typename Options>
  void Name(Options& options, const std::vector<char>& bytes) {
    if (!Rarely()) options.bytes = bytes.data();
    if (!Rarely()) options.num_bytes = bytes.size();
    if (Rarely()) options.path = "no/such/file";
  }

  void CreateModel() {
    constexpr const char* kWeights[] = {"file", "bf16", "f32",
                                        "int8", "int3", ""};
    auto options = Sized<quern_model_options>();
    const std::string file = AnyFile();
    // The copy has the exact size, so that a sanitizer sees a read beyond it.
    const std::vector<char> bytes(file.begin(), file.end());
    Name(options, bytes);
    if (rng_.Integer(0, 1) == 0) options.weights = kWeights[At(rng_, 6)];
    if (Rarely()) options.activations = "int8";
    options.max_context = Number(rng_.Integer(0, 100));
    options.max_bytes = rng_.Integer(0, 9) == 0 ? -1 : int64_t{32} << 20;
    options.progress = [](void* count, int64_t read, int64_t all) {
      EXPECT_LE(read, all);
      ++*static_cast<int*>(count);
    };
    int told = 0;
    options.progress_context = &told;
    quern_library* const library = AnyLibrary();
    auto* const executor = Any<quern_executor>(Kind::kExecutors);
    quern_model* model = nullptr;
    const bool made =
        Done(quern_model_create(library, OrNull(&options), executor, &model),
             library);
    EXPECT_TRUE(!made || told > 0);
    Keep(made, Kind::kModels, model);
  }
  void CreateState() {
    constexpr const char* kTypes[] = {"f32", "bf16",   "f16",    "i8",
                                      "u8",  "f8e4m3", "f8e5m2", "f12"};
    auto options = Sized<quern_model_state_options>();
    options.max_sequences = Number(3);
    options.max_step_tokens = Number(20);
    options.cache_tokens = Number(rng_.Integer(0, 96));
    options.page_size = Number(16);
    if (rng_.Integer(0, 1) == 0) options.cache_dtype = kTypes[At(rng_, 8)];
    options.max_bytes = rng_.Integer(0, 9) == 0 ? 1000 : int64_t{16} << 20;
    quern_library* const library = AnyLibrary();
    quern_model_state* state = nullptr;
    Keep(Done(quern_model_state_create(library, Any<quern_model>(Kind::kModels),
                                       &options, &state),
              library),
         Kind::kStates, state);
  }
  void CreateTokenizer() {
    auto options = Sized<quern_tokenizer_options>();
    const std::string file = AnyFile();
    const std::vector<char> bytes(file.begin(), file.end());
    Name(options, bytes);
    quern_library* const library = AnyLibrary();
    quern_tokenizer* tokenizer = nullptr;
    Keep(Done(quern_tokenizer_create(library, OrNull(&options), &tokenizer),
              library),
         Kind::kTokenizers, tokenizer);
  }
  void CreateSampler() {
    quern_library* const library = AnyLibrary();
    quern_sampler* sampler = nullptr;
    // Not the legal INT32_MAX, which Sample may give as a shape of less memory.
    const int64_t vocab = Rarely() ? rng_.Integer(-1, 1) : kFuzzVocab;
    Keep(Done(quern_sampler_create(library, vocab, &sampler), library),
         Kind::kSamplers, sampler);
  }
  void CreateExecutor() {
    quern_executor* executor = nullptr;
    quern_library* const library = AnyLibrary();
    auto functions = Sized<quern_executor_functions>();
    functions.num_workers = [](void*) -> int32_t { return 2; };
    functions.parallel_for = rng_.Integer(0, 2) == 0 ? &ForkBadly : &ForkWell;
    Keep(Done(quern_executor_create_from(library, &functions, &executor),
              library),
         Kind::kExecutors, executor);
  }

  int32_t AnySequence() { return static_cast<int32_t>(rng_.Integer(-1, 3)); }
  void Begin() {
    auto* const state = Any<quern_model_state>(Kind::kStates);
    int32_t sequence = -1;
    if (Done(quern_model_state_begin(state, OrNull(&sequence)), state)) {
      EXPECT_GE(sequence, 0);
    }
  }
  void EndOrFork() {
    auto* const state = Any<quern_model_state>(Kind::kStates);
    int32_t forked = -1;
    int64_t length = -1;
    if (rng_.Integer(0, 1) == 0) {
      Done(quern_model_state_end(state, AnySequence()), state);
    } else if (Done(quern_model_state_fork(state, AnySequence(),
                                           OrNull(&forked)),
                    state)) {
      EXPECT_GE(forked, 0);
    }
    if (Done(quern_model_state_length(state, AnySequence(), OrNull(&length)),
             state)) {
      EXPECT_GE(length, 0);
    }
  }
  void Step() {
    auto* const state = Any<quern_model_state>(Kind::kStates);
    auto* const executor = Any<quern_executor>(Kind::kExecutors);
    std::vector<std::vector<int32_t>> tokens(
        static_cast<size_t>(rng_.Integer(0, 3)));
    std::vector<quern_model_item> items;
    for (std::vector<int32_t>& ids : tokens) {
      ids.resize(static_cast<size_t>(rng_.Integer(1, 18)));
      for (int32_t& id : ids) {
        id = static_cast<int32_t>(Rarely() ? Number(-5)
                                           : rng_.Integer(0, kFuzzVocab - 1));
      }
      items.push_back(
          {AnySequence(), Rarely() ? 1 : 0, OrNull(ids.data()),
           Rarely() ? rng_.Integer(-1, 0) : static_cast<int64_t>(ids.size())});
    }
    auto step = Sized<quern_model_step>();
    step.items = OrNull(items.data());
    step.num_items = items.size();
    step.all_logits = static_cast<int32_t>(rng_.Integer(0, Rarely() ? 2 : 1));
    step.reserved = Rarely() ? 1 : 0;
    quern_tensor logits = {};
    const bool stepped =
        Done(quern_model_state_forward(state, OrNull(&step), executor, &logits),
             state);
    if (stepped) ++steps;
    if (!alone_ || !stepped) return;
    size_t rows = items.size();
    if (step.all_logits == 1) {
      rows = 0;
      for (const auto& ids : tokens) rows += ids.size();
    }
    EXPECT_EQ(RowsInC(logits).size(), rows);
  }

  void TellInfos() {
    auto of_model = Sized<quern_model_info>();
    auto of_state = Sized<quern_model_state_info>();
    auto of_tokenizer = Sized<quern_tokenizer_info>();
    auto* const model = Any<quern_model>(Kind::kModels);
    auto* const state = Any<quern_model_state>(Kind::kStates);
    auto* const tokenizer = Any<quern_tokenizer>(Kind::kTokenizers);
    if (Done(quern_model_get_info(model, OrNull(&of_model)), model)) {
      EXPECT_GT(of_model.vocab, 0);
      EXPECT_FALSE(alone_ && ExplanationOf(model).empty());
    }
    if (Done(quern_model_state_get_info(state, OrNull(&of_state)), state)) {
      EXPECT_GE(of_state.free_tokens, 0);
      EXPECT_FALSE(alone_ && ExplanationOf(state).empty());
    }
    if (Done(quern_tokenizer_get_info(tokenizer, OrNull(&of_tokenizer)),
             tokenizer)) {
      EXPECT_GE(of_tokenizer.vocab, 0);
    }
  }
  void Sample() {
    const auto rows = static_cast<size_t>(rng_.Integer(0, 8));
    constexpr float kNumbers[] = {0, 0.5f, 1, 2, -1, 1e-30f, 3e38f};
    std::vector<quern_sampling> how(rows);
    for (quern_sampling& h : how) {
      h.temperature = kNumbers[At(rng_, Rarely() ? 7 : 3)];
      h.top_p = kNumbers[At(rng_, Rarely() ? 7 : 3)];
      h.top_k = Number(rng_.Integer(0, 40));
      h.seed = rng_.Next();
    }
    std::vector<quern_sampling_filters> filters(rows);
    for (quern_sampling_filters& f : filters) {
      f.size = sizeof(f) + (Rarely() ? 1 : 0);
      f.min_p = kNumbers[At(rng_, Rarely() ? 7 : 3)];
      f.top_n_sigma = kNumbers[At(rng_, Rarely() ? 7 : 4)];
      f.typical_p = kNumbers[At(rng_, Rarely() ? 7 : 3)];
      f.reserved = Rarely() ? 1 : 0;
    }
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    constexpr float kSpecials[] = {kInfinity, -kInfinity, NAN};
    std::vector<float> data(rows * static_cast<size_t>(kFuzzVocab));
    for (float& x : data) {
      x = Rarely() ? kSpecials[At(rng_, 3)]
                   : static_cast<float>(rng_.Uniform(-3, 3));
    }
    int64_t shape[] = {Number(static_cast<int64_t>(rows)), Number(kFuzzVocab)};
    const quern_tensor logits =
        quern_dense(data.data(), c_abi::ToC(DType::kF32), 2, shape);
    std::vector<int32_t> chosen(rows, -9);
    auto* const sampler = Any<quern_sampler>(Kind::kSamplers);
    auto* const executor = Any<quern_executor>(Kind::kExecutors);
    const quern_status status =
        rng_.Integer(0, 1) == 0
            ? quern_sampler_sample(sampler, OrNull(&logits), how.data(), rows,
                                   chosen.data(), executor)
            : quern_sampler_sample_filtered(sampler, OrNull(&logits),
                                            how.data(), OrNull(filters.data()),
                                            rows, chosen.data(), executor);
    if (!Done(status, sampler)) {
      return;
    }
    for (const int32_t token : chosen) {
      EXPECT_GE(token, QUERN_NO_TOKEN);
      EXPECT_LT(token, kFuzzVocab);
    }
  }
  void EncodeAndDecode() {
    auto* const tokenizer = Any<quern_tokenizer>(Kind::kTokenizers);
    std::string text(static_cast<size_t>(rng_.Integer(0, 40)), 'a');
    for (char& c : text) c = static_cast<char>(rng_.Integer(0, 255));
    std::vector<int32_t> ids(static_cast<size_t>(rng_.Integer(0, 50)));
    size_t count = 0;
    if (!Done(quern_tokenizer_encode(
                  tokenizer, text.data(), text.size(),
                  static_cast<uint64_t>(rng_.Integer(0, Rarely() ? 7 : 3)),
                  ids.data(), ids.size(), &count),
              tokenizer)) {
      return;
    }
    ids.resize(std::min(ids.size(), count));
    if (Rarely()) ids.push_back(static_cast<int32_t>(Number(-7)));
    std::vector<char> out(static_cast<size_t>(rng_.Integer(0, 60)));
    Done(quern_tokenizer_decode(tokenizer, ids.data(), ids.size(),
                                rng_.Integer(0, 1) == 0 ? 0u : 1u, out.data(),
                                out.size(), &count),
         tokenizer);
  }
  void Destroy() {
    const auto kind = static_cast<Kind>(rng_.Integer(0, Kind::kKinds - 1));
    void* const handle = handles_.Any(rng_, kind);
    Done(quern_destroy(handle), handle);
  }

  const std::vector<std::string>& corpus_;
  quern_library* library_;
  quern_library* other_;
  Handles& handles_;
  Rng& rng_;
  bool alone_;
};

}  // namespace quern

#endif  // QUERN_C_MODEL_MODEL_CALLER_TESTUTIL_H_
