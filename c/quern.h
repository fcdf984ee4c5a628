#ifndef QUERN_C_QUERN_H_
#define QUERN_C_QUERN_H_

/* The C interface of Quern: operators by name on the caller's memory.
 *
 *   quern_library* library;  quern_op* norm;
 *   quern_library_create(NULL, &library, NULL, 0);
 *   const quern_argument made_of[] = {quern_tensor_argument("x", &x),
 *                                     quern_float_argument("eps", 1e-5)};
 *   quern_op_create(library, "rms_norm", NULL, made_of, 2, &norm);
 *   const quern_operand step[] = {{"x", &x, QUERN_READ_ONLY}, {"out", &y, 0}};
 *   quern_op_execute(norm, step, 2, NULL, 0, NULL);
 *   quern_destroy(norm);  quern_destroy(library);
 *
 * Every function that returns a quern_status returns QUERN_OK or says in
 * quern_message what was wrong. Refused are null pointers, strings that name
 * nothing, tensors of another dtype, shape, device or alignment, read-only
 * memory where an operator writes, options of another size, objects of another
 * kind, and objects that were destroyed. What the operators trust, they trust
 * here too: that memory is as large as its tensor says, and that nobody else
 * writes to it during a call.
 *
 * Objects. A library is created first, and every other object in it. An object
 * is used by any number of threads; a call that changes it (prepare, build)
 * and meets another call on it is refused. quern_destroy returns at once: the
 * memory goes when the last call, and the last object made with it, are done.
 * Objects that are made with another are of the same library.
 * A call on a destroyed object is refused until QUERN_REMEMBERED more have been
 * destroyed. Using a destroyed library, or a pointer that this library did not
 * return, is undefined.
 *
 * There is no global state but the cap of quern_set_max_isa: two libraries
 * share nothing else. Nothing is thrown, printed, or read from the environment
 * but QUERN_KERNELS (gemm/linear.h).
 *
 * Structs that end in _options or _functions, and quern_step, begin with their
 * size in bytes, which the caller sets: {sizeof(quern_op_options), ...}.
 * Another size is refused. Fields that are 0 or NULL have the default that
 * stands beside them. quern_tensor, quern_argument and quern_operand never
 * change.
 */

#include <stddef.h>
#include <stdint.h>

#include "quern/c/quern_tensor.h"

#if defined(__GNUC__)
#define QUERN_API __attribute__((visibility("default")))
#else
#define QUERN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface, which quern_abi_version returns. While it is
 * 0, a program and its library must be of one release: compare quern_version.
 */
#define QUERN_ABI_VERSION 0
QUERN_API int32_t quern_abi_version(void);
/* The version of the sources: "0.3.0" for a release, or "0.4.0-dev" for sources
 * between two releases, which many different trees have. */
QUERN_API const char* quern_version(void);

typedef int32_t quern_status;
enum {
  QUERN_OK = 0,
  QUERN_CANCELLED = 1,           /* a function of the caller has said so */
  QUERN_INVALID_ARGUMENT = 3,    /* what was given is wrong */
  QUERN_NOT_FOUND = 5,           /* no such operator, provider or file */
  QUERN_PERMISSION_DENIED = 7,   /* the system does not let a file be read */
  QUERN_RESOURCE_EXHAUSTED = 8,  /* no memory or threads */
  QUERN_FAILED_PRECONDITION = 9, /* destroyed, in use, or not prepared */
  QUERN_UNIMPLEMENTED = 12,      /* legal, but there is no kernel for it */
  QUERN_INTERNAL = 13,           /* a bug, here or in the caller's executor */
  QUERN_DATA_LOSS = 15           /* a file ends too early */
};

typedef struct quern_library quern_library;
typedef struct quern_executor quern_executor;
typedef struct quern_op quern_op;
typedef struct quern_linear_weights quern_linear_weights;
typedef struct quern_kv_cache quern_kv_cache;
typedef struct quern_schedule quern_schedule;

/* Functions that return text write at most capacity bytes, the last of them 0,
 * and return the length of the whole text without the 0, like snprintf. text
 * may be NULL where capacity is 0. */

/* Why the last call on `object` failed; for a function that makes an object, of
 * the library. Empty if none has. Another thread's failure may take its place.
 * Says what is wrong with a null pointer, and of a destroyed object that it was
 * destroyed or what it said last. Do not destroy a library while another thread
 * is in any call on it, this one included. */
QUERN_API size_t quern_message(const void* object, char* text, size_t capacity);
/* What `object` is: the kernels, instruction set, sizes. Empty where the object
 * is not one, was destroyed, or is being changed by another call. */
QUERN_API size_t quern_explain(const void* object, char* text, size_t capacity);
/* Destroys any object of this header; NULL is none, and QUERN_OK. A library
 * destroys everything in it; QUERN_FAILED_PRECONDITION while a call is running.
 */
QUERN_API quern_status quern_destroy(void* object);
#define QUERN_REMEMBERED 4096

/* ---- Libraries ---------------------------------------------------------- */

typedef struct quern_library_options {
  size_t size;
  /* Which operators run their fast implementations: "all", "none,+rms_norm",
   * as ops/registry/op_policy.h says. NULL: all. */
  const char* policy;
} quern_library_options;

/* Registers every operator. `options` may be NULL. What is wrong is written to
 * `message`, as functions that return text do, because there is no object yet
 * to ask; it may be NULL where capacity is 0. */
QUERN_API quern_status
quern_library_create(const quern_library_options* options,
                     quern_library** library, char* message, size_t capacity);

/* Caps the instruction set of whatever this process makes from now on, in all
 * libraries, so that what happened on one CPU can be repeated on a better one:
 * "AVX2", "AVX2_VNNI", "AVX3_ZEN4"; NULL lifts the cap. One that this CPU does
 * not reach changes nothing. What exists keeps its kernels; quern_explain tells
 * them. No other call may be running. Refused are names of no instruction set,
 * and a cap below all kernels of this library; `message` is that of
 * quern_library_create. */
QUERN_API quern_status quern_set_max_isa(const char* isa, char* message,
                                         size_t capacity);

/* The schemas of all operators, a line for each:
 *   rms_norm(Tensor x, Tensor? weight, float eps=1e-06, ..) -> Tensor
 * ops/registry/op_schema.h has the grammar, and the headers beside it say what
 * each operator computes and refuses. Empty where the library is NULL. */
QUERN_API size_t quern_ops(const quern_library* library, char* text,
                           size_t capacity);

/* The equation of an operator, and the shapes and dtypes of its tensors, in
 * lines. Empty where the name or the library is NULL or no operator has it. */
QUERN_API size_t quern_op_doc(const quern_library* library, const char* name,
                              char* text, size_t capacity);

/* ---- Executors -------------------------------------------------------------
 *
 * Where a call takes an executor, NULL is the calling thread.
 */

/* A pool of `workers` threads, the calling one among them: 1 to 127, or 0 for
 * one on each core. Calls from several threads at once take turns. */
QUERN_API quern_status quern_executor_create_pool(quern_library* library,
                                                  int32_t workers,
                                                  quern_executor** executor);

/* Does one task. `worker` is in [0, num_workers); tasks with equal `worker`
 * must not overlap. */
typedef void (*quern_task)(void* task_context, int64_t task, int32_t worker);
typedef struct quern_executor_functions {
  size_t size;
  void* context;
  /* Asked once, at creation: 1 to 65536. */
  int32_t (*num_workers)(void* context);
  /* Calls run(task_context, task, worker) once for each task in
   * [0, num_tasks), in any order and on any threads, and returns when all have
   * returned. What they wrote is then visible to the caller. */
  void (*parallel_for)(void* context, int64_t num_tasks, quern_task run,
                       void* task_context);
} quern_executor_functions;

/* The caller's threads. A call that finds that tasks were left out, repeated,
 * or run by a worker that does not exist returns QUERN_INTERNAL; what it has
 * written is then unspecified. The functions must not throw. */
QUERN_API quern_status quern_executor_create_from(
    quern_library* library, const quern_executor_functions* functions,
    quern_executor** executor);

/* ---- Operators ---------------------------------------------------------- */

enum {
  QUERN_ARGUMENT_TENSOR = 1, /* its dtype and shape; data is not read */
  QUERN_ARGUMENT_INT = 2,
  QUERN_ARGUMENT_FLOAT = 3,
  QUERN_ARGUMENT_BOOL = 4,
  QUERN_ARGUMENT_TEXT = 5,
  QUERN_ARGUMENT_OBJECT = 6 /* an object of this header */
};

/* A parameter of the schema by its name. An optional one is left out, or has
 * value.tensor or value.object NULL. */
typedef struct quern_argument {
  const char* name;
  int32_t type;     /* QUERN_ARGUMENT_.. */
  int32_t reserved; /* 0 */
  union {
    const quern_tensor* tensor;
    int64_t integer; /* a BOOL is 0 or 1 */
    double real;
    const char* text;
    void* object;
  } value;
} quern_argument;

static inline quern_argument quern_argument_of(const char* name, int32_t type) {
  quern_argument argument;
  argument.name = name;
  argument.type = type;
  argument.reserved = 0;
  argument.value.integer = 0;
  return argument;
}
static inline quern_argument quern_tensor_argument(const char* name,
                                                   const quern_tensor* tensor) {
  quern_argument a = quern_argument_of(name, QUERN_ARGUMENT_TENSOR);
  a.value.tensor = tensor;
  return a;
}
static inline quern_argument quern_int_argument(const char* name, int64_t i) {
  quern_argument a = quern_argument_of(name, QUERN_ARGUMENT_INT);
  a.value.integer = i;
  return a;
}
static inline quern_argument quern_float_argument(const char* name, double x) {
  quern_argument a = quern_argument_of(name, QUERN_ARGUMENT_FLOAT);
  a.value.real = x;
  return a;
}
static inline quern_argument quern_bool_argument(const char* name, int yes) {
  quern_argument a = quern_argument_of(name, QUERN_ARGUMENT_BOOL);
  a.value.integer = yes ? 1 : 0;
  return a;
}
static inline quern_argument quern_text_argument(const char* name,
                                                 const char* text) {
  quern_argument a = quern_argument_of(name, QUERN_ARGUMENT_TEXT);
  a.value.text = text;
  return a;
}
static inline quern_argument quern_object_argument(const char* name,
                                                   void* object) {
  quern_argument a = quern_argument_of(name, QUERN_ARGUMENT_OBJECT);
  a.value.object = object;
  return a;
}

typedef struct quern_op_options {
  size_t size;
  const char* provider; /* "simd", "reference"; NULL: as the policy says */
} quern_op_options;

/* Chooses an implementation. `options` may be NULL. Objects among the arguments
 * may be destroyed afterwards; the operator keeps what it needs of them.
 * Schemas' LinearWeights are quern_linear_weights, their KvLayout is a
 * quern_kv_cache, their AttentionStep a quern_schedule, their RotaryScaling a
 * quern_rotary_scaling; quern_named.h has their OneDnnHandler,
 * SchedulerMetadata and ExpertWeights. An operator that needs an
 * object of another type cannot be made here. */
QUERN_API quern_status quern_op_create(quern_library* library, const char* name,
                                       const quern_op_options* options,
                                       const quern_argument* arguments,
                                       size_t num_arguments, quern_op** op);

/* Number `index` of the tensors that the operator returns: dtype and shape, for
 * the rows that it was made with, and no data. The shape lives as long as the
 * operator. QUERN_NOT_FOUND from the first index on that does not exist. */
QUERN_API quern_status quern_op_returned(quern_op* op, size_t index,
                                         quern_tensor* tensor);

/* A tensor of an execution by its name: that of the schema's parameter, or
 * "out" for the tensor that is returned, "out0", "out1" for several. */
typedef struct quern_operand {
  const char* name;
  const quern_tensor* tensor; /* NULL: left out */
  uint64_t flags;             /* QUERN_READ_ONLY or 0 */
} quern_operand;
/* The operator must not write here. The bit is DLPack's. */
enum { QUERN_READ_ONLY = 1 };

/* Gives an operator that packs its weights those weights, and others nothing to
 * do: ops/registry says which, and which must be prepared for each step. Takes
 * all operands of an execution. Later executions name the same weights, in the
 * same memory, and their executors have no more workers than this one. No other
 * call on the operator may be running. */
QUERN_API quern_status quern_op_prepare(quern_op* op,
                                        const quern_operand* operands,
                                        size_t num_operands,
                                        quern_executor* executor);

/* The rows of an execution on these operands, which quern_op_workspace_bytes
 * takes. Most operators count the first dimension of their first tensor; linear
 * layers and mixer2_gated_rms_norm count all dimensions but the last, and
 * selective_state_update the first dimension of x. Only shapes are read.
 * Without operands: the rows of the tensors that the operator was made with. */
QUERN_API quern_status quern_op_rows(quern_op* op,
                                     const quern_operand* operands,
                                     size_t num_operands, int64_t* rows);

/* Bytes that an execution needs on this executor for up to max_rows rows, which
 * quern_op_rows counts. */
QUERN_API quern_status quern_op_workspace_bytes(quern_op* op, int64_t max_rows,
                                                quern_executor* executor,
                                                int64_t* bytes);

/* Runs the operator. `workspace` begins at a multiple of QUERN_ALIGNMENT and is
 * free again afterwards; it may be NULL where no bytes are needed. Operands in
 * the order of the schema are found fastest. A successful call allocates
 * nothing. Exception: expert operators on an executor of your own allocate one
 * byte for each task. Any number of threads at once, each with its own
 * workspace.
 *
 * A call with several faults reports one: the executor's; else that of the
 * first operand, in the order given, that is no tensor of the operator; else
 * what the operator refuses of its tensors; else the workspace's. */
QUERN_API quern_status quern_op_execute(quern_op* op,
                                        const quern_operand* operands,
                                        size_t num_operands, void* workspace,
                                        size_t workspace_bytes,
                                        quern_executor* executor);
#define QUERN_ALIGNMENT 64

/* ---- Linear weights: the argument `weights` of linear and of the mixers ----
 *
 * Names of formats and layouts, and the dtypes and shapes that go with them,
 * are those of gemm/linear_weights.h.
 */

typedef struct quern_linear_weights_options {
  size_t size;
  int64_t n, k;
  const char* format;       /* "bf16", "i4_group"; NULL: that of a float layout
                             * by the dtype of codes */
  int64_t group_size;       /* 0: 128; -1: all k */
  const char* block_format; /* of "blocks": "Q4_K" */
  int32_t gated;            /* 1: for a gated activation */
  int32_t reserved;         /* 0 */
} quern_linear_weights_options;

/* Some columns of the weights; several sources are stacked along n. */
typedef struct quern_linear_source {
  const char* layout; /* "kn", "awq", "gptq"; NULL: "nk" */
  const quern_tensor* codes;
  /* These four are NULL where the format has none. */
  const quern_tensor* scales;
  const quern_tensor* zeros;
  const quern_tensor* g_idx;
  const quern_tensor* bias;
  int64_t block_n; /* 0: 128 */
} quern_linear_source;

/* Copies and packs. `source_size` is sizeof(quern_linear_source). */
QUERN_API quern_status quern_linear_weights_pack(
    quern_library* library, const quern_linear_weights_options* options,
    const quern_linear_source* sources, size_t num_sources, size_t source_size,
    quern_executor* executor, quern_linear_weights** weights);

/* The packed form: one run of bytes that describes itself, for a file. It lives
 * as long as the weights. */
QUERN_API quern_status quern_linear_weights_bytes(quern_linear_weights* weights,
                                                  const void** bytes,
                                                  size_t* num_bytes);
/* Weights in a packed form that stays the caller's: at a multiple of
 * QUERN_ALIGNMENT, unchanged as long as these weights or anything made with
 * them. */
QUERN_API quern_status
quern_linear_weights_adopt(quern_library* library, const void* bytes,
                           size_t num_bytes, quern_linear_weights** weights);

/* ---- Rotary scaling: the argument `scaling` of rotary_embedding ----------
 *
 * How a model stretches its angles to longer contexts; equations and bounds
 * are those of ops/rope/rotary_scaling.h, which are checked when an operator is
 * made.
 */

typedef struct quern_rotary_scaling quern_rotary_scaling;

typedef struct quern_rotary_scaling_options {
  size_t size;
  const char* kind; /* "none", "linear", "dynamic_ntk", "llama3", "yarn",
                     * "longrope" */
  double factor;    /* 0: 1 */
  int64_t original; /* context length of training; all but none and linear */
  int64_t target;   /* context length to serve; dynamic_ntk and longrope */
  double low_freq, high_freq;    /* llama3; 0: 1 and 4 */
  double beta_fast, beta_slow;   /* yarn; 0: 32 and 1 */
  double attention_factor;       /* yarn; 0: 1 */
  double mscale, mscale_all_dim; /* yarn; 0: none */
  /* longrope: rot_dim / 2 numbers each, which are copied. */
  const double* short_factors;
  const double* long_factors;
  int64_t num_factors;
  int32_t untruncated; /* yarn; 1: the range may end within a pair of elements,
                        * as gpt-oss has it (truncate: false). 0 or 1 */
} quern_rotary_scaling_options;

QUERN_API quern_status quern_rotary_scaling_create(
    quern_library* library, const quern_rotary_scaling_options* options,
    quern_rotary_scaling** scaling);

/* ---- Paged attention: the arguments `layout` and `step` ------------------ */

typedef struct quern_kv_cache_options {
  size_t size;
  const char* dtype;   /* "bf16", "f16", "f32", "i8", "f8e4m3", "f8e5m2" */
  const char* form;    /* "plain", "paired", "latent"; NULL: by page_size */
  const char* scaling; /* "per_token_head" (i8, f8e4m3, f8e5m2), "per_block"
                        * (latent, f8e4m3); NULL: "none", which i8 has not */
  int64_t kv_heads, head_dim;
  int64_t v_head_dim; /* 0: head_dim */
  int64_t page_size;  /* tokens */
  int64_t num_pages, num_layers;
} quern_kv_cache_options;

/* Allocates the pages of all layers; what they contain is unspecified. */
QUERN_API quern_status quern_kv_cache_create(
    quern_library* library, const quern_kv_cache_options* options,
    quern_kv_cache** cache);

/* The operators' tensor `cache`: u8[num_pages, bytes of a page] of one layer.
 * It lives as long as the cache and the operators made with it. */
QUERN_API quern_status quern_kv_cache_pages(quern_kv_cache* cache,
                                            int64_t layer, quern_tensor* pages);

typedef struct quern_schedule_options {
  size_t size;
  int64_t q_heads;
  int64_t window_left, window_right; /* -1: none */
  /* Limits of all steps, so that workspaces can be sized once; each is 0 for
   * none, and then a workspace is sized for the step that was built. */
  int64_t max_sequences, max_kv_len;
} quern_schedule_options;

/* How the steps of operators with these heads and windows are divided. Has no
 * sequences before the first step is built. */
QUERN_API quern_status quern_schedule_create(
    quern_library* library, quern_kv_cache* cache,
    const quern_schedule_options* options, quern_schedule** schedule);

/* One step: sequence s has kv_lens[s] tokens, the last q_lens[s] of them new.
 * Its pages are pages[s * pages_stride ..], as many as kv_lens[s] tokens need.
 */
typedef struct quern_step {
  size_t size;
  int64_t num_sequences;
  const int64_t* q_lens;
  const int64_t* kv_lens;
  const int32_t* pages;
  int64_t pages_stride;
  int64_t* slots;    /* out, for write_kv: a slot for each new token; or NULL */
  int64_t num_slots; /* the sum of q_lens */
  int32_t workers;   /* workers of the executor; 0: 1 */
  int32_t reserved;  /* 0 */
} quern_step;

/* Before the executions of each step. A wrong step is refused and leaves the
 * schedule without sequences. While another call uses the schedule, the step is
 * refused and the schedule stays as it is. */
QUERN_API quern_status quern_schedule_build(quern_schedule* schedule,
                                            const quern_step* step);

#ifdef __cplusplus
}
#endif

#endif /* QUERN_C_QUERN_H_ */
