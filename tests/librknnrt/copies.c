/* The copying calls, which RKNNLite uses: tensors in plain layouts, memory of the runtime's. */
#include <stdlib.h>
#include <string.h>

#include "double.h"

static uint64_t plain_bytes(const tensor *t, int type) {
    uint64_t item = type == TYPE_FLOAT32 ? 4 : type == TYPE_FLOAT16 ? 2 : 1;
    return item * t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
}

static int set_input(context *c, const rknn_input *input) {
    if (input->index >= c->model->view.n_inputs || !input->buf) {
        violation(V_INDEX, "input %u, or a null pointer", input->index);
        return RKNN_INPUT_INVALID;
    }
    const tensor *t = context_tensor(c, c->variant, false, input->index);
    uint64_t bytes = input->pass_through ? t->size : plain_bytes(t, input->type);
    if (input->size != bytes) {
        violation(V_SIZE, "%s takes %llu bytes, not %u", t->name, (unsigned long long)bytes,
                  input->size);
        return RKNN_INPUT_INVALID;
    }
    uint8_t *native = binding_own(&c->bindings[input->index], t->size);
    if (input->pass_through) {
        memcpy(native, input->buf, t->size);
        return RKNN_OK;
    }
    char message[512] = "";
    leave(); /* Python packs */
    int code =
        host()->pack(t, input->buf, input->type, input->fmt, native, message, sizeof message);
    enter_quietly();
    if (code != RKNN_OK) {
        violation(V_FORMAT, "%s", message);
    }
    return code;
}

int rknn_inputs_set(rknn_context id, uint32_t number, rknn_input *inputs) {
    int code = RKNN_OK;
    enter(CALL_INPUTS_SET);
    context *c = context_find(id, &code);
    if (c && (!inputs || context_needs_shapes(c))) {
        code = RKNN_INPUT_INVALID;
    }
    for (uint32_t i = 0; c && code == RKNN_OK && i < number; i++) {
        c->copies = true;
        code = set_input(c, &inputs[i]);
    }
    leave();
    return code;
}

static int get_output(context *c, rknn_output *output) {
    if (output->index >= c->model->view.n_outputs) {
        violation(V_INDEX, "output %u of %u", output->index, c->model->view.n_outputs);
        return RKNN_OUTPUT_INVALID;
    }
    const tensor *t = context_tensor(c, c->variant, true, output->index);
    const uint8_t *native = binding_device(&c->bindings[c->model->view.n_inputs + output->index]);
    int type = output->want_float ? TYPE_FLOAT32 : t->type;
    uint64_t bytes = plain_bytes(t, type);
    if (!native || (output->is_prealloc && (!output->buf || output->size < bytes))) {
        violation(native ? V_SIZE : V_UNBOUND, "output %s: %llu bytes, or no run before", t->name,
                  (unsigned long long)bytes);
        return RKNN_OUTPUT_INVALID;
    }
    if (!output->is_prealloc) {
        output->buf = malloc(bytes);
        live.outputs++;
    }
    output->size = (uint32_t)(script_shortens(output->index) ? bytes / 2 : bytes);
    char message[512] = "";
    leave(); /* Python unpacks */
    int code = host()->unpack(t, native, type, output->buf, message, sizeof message);
    enter_quietly();
    return code;
}

int rknn_outputs_get(rknn_context id, uint32_t number, rknn_output *outputs,
                     rknn_output_extend *extend) {
    (void)extend;
    int code = RKNN_OK;
    enter(CALL_OUTPUTS_GET);
    context *c = context_find(id, &code);
    if (c && (!outputs || c->job)) {
        violation(outputs ? V_RACE : V_ARGUMENT, "a null pointer, or a run under way");
        code = RKNN_OUTPUT_INVALID;
    }
    for (uint32_t i = 0; c && code == RKNN_OK && i < number; i++) {
        code = get_output(c, &outputs[i]);
    }
    leave();
    return code;
}

int rknn_outputs_release(rknn_context id, uint32_t number, rknn_output *outputs) {
    int code = RKNN_OK;
    enter(CALL_OUTPUTS_RELEASE);
    context_find(id, &code);
    for (uint32_t i = 0; code != RKNN_CTX_INVALID && outputs && i < number; i++) {
        if (!outputs[i].is_prealloc && outputs[i].buf) {
            free(outputs[i].buf);
            outputs[i].buf = NULL;
            live.outputs--;
        }
    }
    leave();
    return code == RKNN_CTX_INVALID ? code : RKNN_OK;
}
