// Calls on executors, weights, caches, schedules and the objects of
// quern_named.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/quern_named.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/c/testing/call_fuzz_testutil.h"
#include "quern/c/testing/fork_testutil.h"
#include "quern/core/dtype.h"
#include "quern/models/gguf/mutate_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/testing/guard_buffer.h"

namespace quern {

void OpCaller::MakeGoodObjects() {
  quern_executor* pool = nullptr;
  Keep(quern_executor_create_pool(library_, 2, &pool) == QUERN_OK, kExecutors,
       pool);
  quern_kv_cache_options of = {};
  of.size = sizeof(of);
  of.dtype = "f32";
  of.kv_heads = of.num_layers = 1;
  of.head_dim = of.page_size = 16;
  of.num_pages = 8;
  quern_kv_cache* cache = nullptr;
  Keep(quern_kv_cache_create(library_, &of, &cache) == QUERN_OK, kCaches,
       cache);
  quern_schedule_options on = {};
  on.size = sizeof(on);
  on.q_heads = 2;
  on.window_left = on.window_right = -1;
  quern_schedule* schedule = nullptr;
  Keep(quern_schedule_create(library_, cache, &on, &schedule) == QUERN_OK,
       kSchedules, schedule);
}

void OpCaller::CallAny() {
  switch (rng_.Integer(0, 31)) {
    case 0:
      return CreateExecutor();
    case 1:
      return CreateWeights();
    case 2:
      return CreateCacheAndSchedule();
    case 3:
      return BuildSchedule();
    case 4:
      return CreateNamed();
    case 5:
      return TellTexts();
    case 6:
      return Destroy();
    default:
      if (made_.empty() || OneIn(3)) return CreateOp();
      return UseOp(OneIn(2) ? made_.back() : made_[At(rng_, made_.size())]);
  }
}

void OpCaller::CreateExecutor() {
  quern_executor* executor = nullptr;
  quern_library* const library = AnyLibrary();
  Begin("executor_create");
  if (OneIn(2)) {
    // Numbers of threads between 4 and 127 are legal, and not wanted here.
    const int64_t workers = Number(rng_.Integer(1, 3));
    const int32_t few =
        workers > 3 && workers < 128 ? 3 : static_cast<int32_t>(workers);
    Keep(
        Done(quern_executor_create_pool(library, few == 0 ? 1 : few, &executor),
             library),
        kExecutors, executor);
    return;
  }
  auto functions = Sized<quern_executor_functions>();
  functions.num_workers = [](void*) -> int32_t { return 2; };
  if (OneIn(8)) functions.num_workers = [](void*) -> int32_t { return -1; };
  functions.parallel_for = OneIn(3) ? &ForkBadly : &ForkWell;
  if (OneIn(24)) functions.parallel_for = nullptr;
  Keep(Done(quern_executor_create_from(library, OrNull(&functions), &executor),
            library),
       kExecutors, executor);
}

void OpCaller::CreateWeights() {
  constexpr const char* kFormats[] = {
      "f32",        "bf16",     "f16",    "i8_channel", "i4_group",
      "e4m3_block", "i8_group", "blocks", "none",       nullptr};
  constexpr const char* kLayouts[] = {"nk",      "kn",     "awq", "gptq",
                                      "gptq_v2", "blocks", "x",   nullptr};
  constexpr const char* kBlocks[] = {"Q4_K",   "Q8_0", "Q6_K",
                                     "IQ4_NL", "Z",    nullptr};
  auto options = Sized<quern_linear_weights_options>();
  options.n = Number(OneIn(2) ? 48 : rng_.Integer(1, 70));
  options.k = Number(OneIn(2) ? 64 : rng_.Integer(1, 300));
  options.format = kFormats[At(rng_, std::size(kFormats))];
  options.group_size = Number(OneIn(2) ? 0 : 32);
  options.block_format = kBlocks[At(rng_, std::size(kBlocks))];
  options.gated = static_cast<int32_t>(rng_.Integer(0, OneIn(20) ? 2 : 1));
  options.reserved = OneIn(30) ? 1 : 0;
  const int64_t n = options.n > 0 && options.n < 400 ? options.n : 3;
  const int64_t k = options.k > 0 && options.k < 400 ? options.k : 3;
  quern_linear_source source = {};
  source.layout = kLayouts[At(rng_, OneIn(2) ? 2 : std::size(kLayouts))];
  const bool kn = source.layout != nullptr && source.layout[0] == 'k';
  std::vector<std::shared_ptr<Tensor>> tensors;
  const auto add = [&](const TensorMeta& meta) {
    tensors.push_back(MakeTensor(meta, OneIn(16)));
    return &tensors.back()->c;
  };
  constexpr DType kCodes[] = {DType::kF32, DType::kBF16, DType::kF16,
                              DType::kI8,  DType::kI32,  DType::kF8E4M3,
                              DType::kU8};
  const DType dtype =
      options.format == nullptr || OneIn(3)
          ? kCodes[At(rng_, std::size(kCodes))]
      : options.format[0] == 'f' && options.format[1] == '3' ? DType::kF32
      : options.format[0] == 'f'                             ? DType::kF16
      : options.format[0] == 'b' && options.format[1] == 'f' ? DType::kBF16
      : options.format[0] == 'e'                             ? DType::kF8E4M3
      : options.format[0] == 'b'                             ? DType::kU8
                                                             : DType::kI8;
  const int64_t columns = OneIn(3) ? k / 2 + OneIn(4) : k;
  source.codes = OrNull(add({dtype, kn ? std::vector<int64_t>{columns, n}
                                       : std::vector<int64_t>{n, columns}}));
  if (OneIn(2)) {
    source.scales = add({OneIn(3) ? AnyDType() : DType::kF32,
                         OneIn(2) ? std::vector<int64_t>{n}
                                  : std::vector<int64_t>{n, (k + 127) / 128}});
  }
  if (OneIn(3)) source.zeros = add({AnyDType(), {n, (k + 127) / 128}});
  if (OneIn(6)) source.g_idx = add({DType::kI32, {k}});
  if (OneIn(3)) source.bias = add({DType::kF32, {n}});
  source.block_n = Number(0);
  quern_library* const library = AnyLibrary();
  quern_linear_weights* weights = nullptr;
  Begin("linear_weights_pack");
  const bool packed = Keep(
      Done(quern_linear_weights_pack(
               library, OrNull(&options), OrNull(&source), OneIn(24) ? 0 : 1,
               OneIn(24) ? static_cast<size_t>(Edge()) : sizeof(source),
               Any<quern_executor>(kExecutors), &weights),
           library),
      kWeights, weights);
  if (!packed) return;
  const void* bytes = nullptr;
  size_t count = 0;
  if (!Done(quern_linear_weights_bytes(weights, OrNull(&bytes), &count),
            weights)) {
    return;
  }
  // The packed bytes again, with a wrong length or a wrong byte in their head.
  const auto* const begin = static_cast<const char*>(bytes);
  std::string copy(begin, begin + count);
  if (OneIn(2)) {
    copy = Mutate(rng_, copy, {copy}, 256);
    if (copy.size() > count) copy.resize(count);
  }
  // Such bytes are looked at by adopt alone: what they contain is trusted.
  GuardBuffer<uint8_t> memory(std::vector<uint8_t>(copy.begin(), copy.end()),
                              quern::Edge::kBegin);
  quern_linear_weights* adopted = nullptr;
  Begin("linear_weights_adopt");
  if (Done(quern_linear_weights_adopt(library, OrNull(memory.data()),
                                      copy.size(), &adopted),
           library)) {
    EXPECT_FALSE(ExplanationOf(adopted).empty());
    EXPECT_C_OK(quern_destroy(adopted), adopted);
  }
}

void OpCaller::CreateCacheAndSchedule() {
  constexpr const char* kTypes[] = {"f32", "bf16",   "f16",    "i8",
                                    "u8",  "f8e4m3", "f8e5m2", nullptr};
  constexpr const char* kForms[] = {"plain", "paired", "latent", "x", nullptr};
  constexpr const char* kScalings[] = {"none",      "per_token", "per_head",
                                       "per_block", "x",         nullptr};
  auto of = Sized<quern_kv_cache_options>();
  of.dtype = kTypes[At(rng_, std::size(kTypes))];
  of.form = OneIn(2) ? nullptr : kForms[At(rng_, std::size(kForms))];
  of.scaling = OneIn(2) ? nullptr : kScalings[At(rng_, std::size(kScalings))];
  of.kv_heads = Number(rng_.Integer(1, 3));
  of.head_dim = Number(OneIn(2) ? 16 : rng_.Integer(1, 40));
  of.v_head_dim = Number(0);
  of.page_size = Number(16);
  of.num_pages = Number(rng_.Integer(1, 8));
  of.num_layers = Number(rng_.Integer(1, 2));
  quern_library* const library = AnyLibrary();
  quern_kv_cache* cache = nullptr;
  Begin("kv_cache_create");
  if (Keep(Done(quern_kv_cache_create(library, OrNull(&of), &cache), library),
           kCaches, cache)) {
    quern_tensor pages = {};
    Done(quern_kv_cache_pages(cache, Number(0), OrNull(&pages)), cache);
  }
  auto on = Sized<quern_schedule_options>();
  on.q_heads = Number(rng_.Integer(1, 6));
  on.window_left = Number(-1);
  on.window_right = Number(-1);
  on.max_sequences = Number(0);
  on.max_kv_len = Number(0);
  quern_schedule* schedule = nullptr;
  Begin("schedule_create");
  Keep(Done(quern_schedule_create(library, Any<quern_kv_cache>(kCaches),
                                  OrNull(&on), &schedule),
            library),
       kSchedules, schedule);
}

void OpCaller::BuildSchedule() {
  const auto count = static_cast<size_t>(rng_.Integer(0, 3));
  std::vector<int64_t> q_lens(count), kv_lens(count);
  int64_t slots = 0;
  for (size_t i = 0; i < count; ++i) {
    q_lens[i] = Number(rng_.Integer(0, 4));
    kv_lens[i] =
        Number(std::min(q_lens[i], int64_t{100}) + rng_.Integer(0, 30));
    if (q_lens[i] > 0 && q_lens[i] < 100) slots += q_lens[i];
  }
  // As many as the longest sequence may need: 64 tokens in pages of one.
  std::vector<int32_t> pages(count * 80);
  for (int32_t& page : pages) {
    page = static_cast<int32_t>(OneIn(40) ? Number(-1) : rng_.Integer(0, 7));
  }
  std::vector<int64_t> slots_of(static_cast<size_t>(slots), -9);
  auto step = Sized<quern_step>();
  step.num_sequences = OneIn(24) ? -1 : static_cast<int64_t>(count);
  step.q_lens = OrNull(q_lens.data());
  step.kv_lens = OrNull(kv_lens.data());
  step.pages = OrNull(pages.data());
  step.pages_stride = OneIn(24) ? -1 : 80;
  step.slots = OneIn(3) ? nullptr : slots_of.data();
  step.num_slots = OneIn(24) ? slots - 1 : slots;
  step.workers = static_cast<int32_t>(Number(rng_.Integer(0, 3)));
  step.reserved = OneIn(30) ? 1 : 0;
  auto* const schedule = Any<quern_schedule>(kSchedules);
  Begin("schedule_build");
  Done(quern_schedule_build(schedule, OrNull(&step)), schedule);
}

void OpCaller::CreateNamed() {
  quern_library* const library = AnyLibrary();
  Begin("create a named object");
  if (OneIn(3)) {
    quern_onednn_handler* handler = nullptr;
    Keep(Done(quern_onednn_handler_create(library, &handler), library),
         kHandlers, handler);
  } else if (OneIn(2)) {
    quern_scheduler_metadata* metadata = nullptr;
    Keep(Done(quern_scheduler_metadata_create(library, &metadata), library),
         kMetadata, metadata);
  } else {
    std::vector<quern_linear_weights*> some;
    for (int i = 0; i < 8; ++i) {
      some.push_back(Any<quern_linear_weights>(kWeights));
    }
    quern_expert_weights* experts = nullptr;
    Keep(Done(quern_expert_weights_create(
                  library, OrNull(some.data()), OrNull(some.data() + 4),
                  OneIn(8) ? 0 : static_cast<size_t>(rng_.Integer(1, 4)),
                  &experts),
              library),
         kExperts, experts);
  }
}

void OpCaller::TellTexts() {
  char text[64];
  std::memset(text, 0x7e, sizeof(text));
  void* const object = Any(static_cast<int>(rng_.Integer(0, kKinds - 1)));
  const auto capacity = static_cast<size_t>(rng_.Integer(0, 40));
  Begin("texts");
  quern_explain(object, nullptr, 0);
  quern_message(object, text, capacity);
  EXPECT_EQ(text[capacity], 0x7e);
  quern_explain(object, text, capacity);
  EXPECT_EQ(text[capacity], 0x7e);
  quern_ops(AnyLibrary(), text, capacity);
  EXPECT_EQ(text[capacity], 0x7e);
  Begin("nothing");
}

void OpCaller::Destroy() {
  void* const handle = Any(static_cast<int>(rng_.Integer(0, kKinds - 1)));
  Begin("destroy");
  Done(quern_destroy(handle), handle);
}

}  // namespace quern
