/* rknn_query. */
#include <stdio.h>
#include <string.h>

#include "double.h"

enum { FORM_PLAIN, FORM_NATIVE, FORM_NHWC };

static uint32_t item_bytes(const tensor *t) { return t->type == TYPE_INT8 ? 1 : 2; }

/* What a scripted `short` makes of an output: half the channels, or half the width. */
static tensor shortened(const tensor *t) {
    tensor s = *t;
    if (s.native[1] > 1) {
        s.native[1] = t->native[1] / 2;
        s.dims[1] = s.native[1] * s.native[4];
        s.size = t->size / t->native[1] * s.native[1];
    } else {
        s.dims[3] = s.native[3] = (t->dims[3] + 1) / 2;
        s.size = t->size / 2;
    }
    return s;
}

static void fill(rknn_tensor_attr *attr, const tensor *t, int form, bool output) {
    const uint32_t *d = t->dims;
    bool native = form == FORM_NATIVE, nchw = form == FORM_PLAIN && output;
    uint32_t plain[4] = {d[0], nchw ? d[1] : d[2], nchw ? d[2] : d[3], nchw ? d[3] : d[1]};
    attr->n_dims = native ? 5 : 4;
    memcpy(attr->dims, native ? t->native : plain, attr->n_dims * sizeof(uint32_t));
    attr->n_elems = 1;
    for (uint32_t i = 0; i < attr->n_dims; i++) {
        attr->n_elems *= attr->dims[i];
    }
    attr->size = attr->n_elems * item_bytes(t);
    attr->fmt = native ? FMT_NC1HWC2 : nchw ? FMT_NCHW : FMT_NHWC;
    attr->w_stride = native ? t->w_stride : d[3];
    attr->size_with_stride = native ? t->size : attr->size;
}

static void describe(rknn_tensor_attr *attr, uint32_t index, const tensor *t, int form,
                     bool output) {
    tensor shown = output && script_shortens(index) ? shortened(t) : *t;
    memset(attr, 0, sizeof *attr);
    attr->index = index;
    memcpy(attr->name, t->name, sizeof attr->name);
    attr->type = t->type;
    attr->qnt_type = t->type == TYPE_INT8 ? QNT_AFFINE : QNT_NONE;
    attr->zp = t->zero;
    attr->scale = t->scale;
    fill(attr, &shown, form, output);
}

void describe_native(rknn_tensor_attr *attr, uint32_t index, const tensor *t, bool output) {
    describe(attr, index, t, FORM_NATIVE, output);
}

typedef struct {
    int command, form;
    bool output, current;
} attr_query;

static const attr_query attr_queries[] = {
    {QUERY_INPUT_ATTR, FORM_PLAIN, false, false},
    {QUERY_OUTPUT_ATTR, FORM_PLAIN, true, false},
    {QUERY_NATIVE_INPUT_ATTR, FORM_NATIVE, false, false},
    {QUERY_NATIVE_OUTPUT_ATTR, FORM_NATIVE, true, false},
    {QUERY_NATIVE_NHWC_INPUT_ATTR, FORM_NHWC, false, false},
    {QUERY_NATIVE_NHWC_OUTPUT_ATTR, FORM_NHWC, true, false},
    {QUERY_CURRENT_INPUT_ATTR, FORM_PLAIN, false, true},
    {QUERY_CURRENT_OUTPUT_ATTR, FORM_PLAIN, true, true},
    {QUERY_CURRENT_NATIVE_INPUT_ATTR, FORM_NATIVE, false, true},
    {QUERY_CURRENT_NATIVE_OUTPUT_ATTR, FORM_NATIVE, true, true},
};

static bool is_size(uint32_t size, size_t expected) {
    if (size != expected) {
        violation(V_ARGUMENT, "info of %u bytes, the struct has %zu", size, expected);
    }
    return size == expected;
}

static bool is_index(const context *c, bool output, uint32_t index) {
    uint32_t number = output ? c->model->view.n_outputs : c->model->view.n_inputs;
    if (index >= number) {
        violation(V_INDEX, "%s %u of %u", output ? "output" : "input", index, number);
    }
    return index < number;
}

static int query_attr(const context *c, const attr_query *query, rknn_tensor_attr *attr) {
    if (!is_index(c, query->output, attr->index)) {
        return RKNN_PARAM_INVALID;
    }
    if (query->current && context_needs_shapes(c)) {
        return RKNN_PARAM_INVALID;
    }
    uint32_t variant = query->current ? c->variant : context_largest(c);
    const tensor *t = context_tensor(c, variant, query->output, attr->index);
    describe(attr, attr->index, t, query->form, query->output);
    return RKNN_OK;
}

static int query_range(const context *c, rknn_input_range *range) {
    uint32_t index = range->index;
    if (!is_index(c, false, index)) {
        return RKNN_PARAM_INVALID;
    }
    memset(range, 0, sizeof *range);
    range->index = index;
    range->shape_number = c->model->view.n_variants;
    range->fmt = FMT_NHWC;
    range->n_dims = 4;
    for (uint32_t v = 0; v < range->shape_number && v < MAX_SHAPES; v++) {
        rknn_tensor_attr attr;
        describe(&attr, index, context_tensor(c, v, false, index), FORM_PLAIN, false);
        memcpy(range->dyn_range[v], attr.dims, sizeof range->dyn_range[v]);
        memcpy(range->name, attr.name, sizeof range->name);
    }
    return RKNN_OK;
}

static int query_other(const context *c, int command, void *info, uint32_t size) {
    if (command == QUERY_IN_OUT_NUM && is_size(size, sizeof(rknn_input_output_num))) {
        *(rknn_input_output_num *)info =
            (rknn_input_output_num){c->model->view.n_inputs, c->model->view.n_outputs};
        return RKNN_OK;
    }
    if (command == QUERY_SDK_VERSION && is_size(size, sizeof(rknn_sdk_version))) {
        rknn_sdk_version *version = info;
        memset(version, 0, sizeof *version);
        snprintf(version->api, sizeof version->api, "%s (double@2026-01-01)", script_version());
        snprintf(version->drv, sizeof version->drv, "%s", script_driver());
        return RKNN_OK;
    }
    if (command == QUERY_MEM_SIZE && is_size(size, sizeof(rknn_mem_size))) {
        *(rknn_mem_size *)info = (rknn_mem_size){
            .total_weight = (uint32_t)c->model->view.weight_bytes, .total_dma = live.bytes};
        return RKNN_OK;
    }
    if (command == QUERY_INPUT_DYNAMIC_RANGE && is_size(size, sizeof(rknn_input_range))) {
        return query_range(c, info);
    }
    if (command == QUERY_CUSTOM_STRING && is_size(size, sizeof(rknn_custom_string))) {
        memset(info, 0, size);
        return RKNN_OK;
    }
    if (command == QUERY_PERF_RUN && is_size(size, sizeof(rknn_perf_run))) {
        ((rknn_perf_run *)info)->us = c->last_us;
        return RKNN_OK;
    }
    return RKNN_PARAM_INVALID;
}

static int query(const context *c, int command, void *info, uint32_t size) {
    if (!info) {
        violation(V_ARGUMENT, "a null pointer");
        return RKNN_PARAM_INVALID;
    }
    for (size_t i = 0; i < sizeof attr_queries / sizeof *attr_queries; i++) {
        if (attr_queries[i].command == command) {
            return is_size(size, sizeof(rknn_tensor_attr)) ? query_attr(c, &attr_queries[i], info)
                                                           : RKNN_PARAM_INVALID;
        }
    }
    return query_other(c, command, info, size);
}

int rknn_query(rknn_context id, int command, void *info, uint32_t size) {
    int code = RKNN_OK;
    enter(CALL_QUERY);
    context *c = context_find(id, &code);
    if (c) {
        code = query(c, command, info, size);
    }
    leave();
    return code;
}
