#ifndef QUERN_C_QUERN_NAMED_H_
#define QUERN_C_QUERN_NAMED_H_

/* Objects that the operators of vLLM's and SGLang's names take: the arguments
 * `handler` of onednn_mm, `scheduler_metadata` of cpu_attention_with_kv_cache
 * and `experts` of fused_experts_cpu and its like.
 *
 *   quern_onednn_handler* handler;  quern_op* pack;
 *   quern_onednn_handler_create(library, &handler);
 *   const quern_argument of[] = {quern_tensor_argument("b", &b),
 *                                quern_object_argument("handler", handler)};
 *   quern_op_create(library, "create_onednn_mm", NULL, of, 2, &pack);
 *   const quern_operand weight[] = {{"b", &b, QUERN_READ_ONLY}};
 *   quern_op_prepare(pack, weight, 1, executor);
 *
 * The last call fills the handler.
 *
 * quern.h has the rules of all functions here: codes, messages, objects.
 * linear_ops.h and attention_ops.h of ops/registry/vllm and experts_ops.h of
 * ops/registry/families/linear say what the operators compute.
 */

#include <stddef.h>
#include <stdint.h>

#include "quern/c/quern.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct quern_onednn_handler quern_onednn_handler;
typedef struct quern_scheduler_metadata quern_scheduler_metadata;
typedef struct quern_expert_weights quern_expert_weights;

/* A handler without weights. quern_op_prepare of create_onednn_mm or
 * create_onednn_scaled_mm fills it, and is refused while another call uses it.
 * onednn_mm and onednn_scaled_mm share its weights from their creation on. */
QUERN_API quern_status quern_onednn_handler_create(
    quern_library* library, quern_onednn_handler** handler);

/* Metadata without a schedule. quern_op_prepare of
 * cpu_attn_get_scheduler_metadata builds one for each step, and is refused
 * while another call uses it. Workspaces are sized for the step that was built.
 */
QUERN_API quern_status quern_scheduler_metadata_create(
    quern_library* library, quern_scheduler_metadata** metadata);

/* The matrices of `count` experts: gate_up[e] has n = inter, or 2 * inter and
 * was packed with gated = 1; down[e] has k = inter. The arrays may go, and the
 * weights may be destroyed: they are shared. Their shapes are compared when an
 * operator is made. */
QUERN_API quern_status quern_expert_weights_create(
    quern_library* library, quern_linear_weights* const* gate_up,
    quern_linear_weights* const* down, size_t count,
    quern_expert_weights** experts);

#ifdef __cplusplus
}
#endif

#endif /* QUERN_C_QUERN_NAMED_H_ */
