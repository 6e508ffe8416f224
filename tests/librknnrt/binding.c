/* The calls that compare what they are given with what was queried, and settings. */
#include <string.h>

#include "double.h"

#define CACHE_LINE 64

/* -- rknn_set_io_mem --------------------------------------------------------------------------- */

/* Inputs and outputs are numbered alike, so the name tells which is meant. */
static bool find_tensor(const context *c, const rknn_tensor_attr *attr, bool *output) {
    const model_view *view = &c->model->view;
    for (uint32_t i = 0; i < view->n_inputs + view->n_outputs; i++) {
        *output = i >= view->n_inputs;
        uint32_t index = *output ? i - view->n_inputs : i;
        const tensor *t = context_tensor(c, c->variant, *output, index);
        if (!strncmp(t->name, attr->name, sizeof t->name)) {
            if (attr->index != index) {
                violation(V_INDEX, "%s has index %u, not %u", t->name, index, attr->index);
            }
            return attr->index == index;
        }
    }
    violation(V_INDEX, "no tensor of the name %.255s", attr->name);
    return false;
}

static bool is_as_queried(const rknn_tensor_attr *attr, const rknn_tensor_attr *queried,
                          bool output) {
    if (attr->fmt != queried->fmt || attr->type != queried->type ||
        (!output && attr->pass_through != 1)) {
        violation(V_FORMAT, "%s: fmt %d, type %d, pass_through %d; native are %d, %d, 1",
                  queried->name, attr->fmt, attr->type, attr->pass_through, queried->fmt,
                  queried->type);
        return false;
    }
    if (attr->n_dims != queried->n_dims || attr->w_stride != queried->w_stride ||
        attr->size_with_stride != queried->size_with_stride ||
        memcmp(attr->dims, queried->dims, sizeof attr->dims) != 0) {
        violation(V_DIMS, "%s: dims or strides are not the current variant's", queried->name);
        return false;
    }
    return true;
}

static int bind(context *c, mem *m, const rknn_tensor_attr *attr) {
    bool output;
    if (context_needs_shapes(c) || !find_tensor(c, attr, &output)) {
        return RKNN_PARAM_INVALID;
    }
    rknn_tensor_attr queried;
    const tensor *t = context_tensor(c, c->variant, output, attr->index);
    describe_native(&queried, attr->index, t, output);
    if (!is_as_queried(attr, &queried, output)) {
        return RKNN_PARAM_INVALID;
    }
    if (m->shown.size < queried.size_with_stride || m->shown.size < t->size) {
        violation(V_SIZE, "%s takes %u bytes, the memory has %u", t->name, t->size, m->shown.size);
        return RKNN_PARAM_INVALID;
    }
    size_t into = m->offset % CACHE_LINE; /* a flush would take a neighbour's bytes along */
    if (into) {
        violation(V_ALIGN, "%s: the memory begins %zu bytes into a cache line", t->name, into);
        return RKNN_PARAM_INVALID;
    }
    c->bindings[(output ? c->model->view.n_inputs : 0) + attr->index].mem = m;
    return RKNN_OK;
}

int rknn_set_io_mem(rknn_context id, rknn_tensor_mem *shown, rknn_tensor_attr *attr) {
    enter(CALL_IO_MEM);
    int code = RKNN_PARAM_INVALID;
    context *c = context_find(id, &code);
    mem *m = c ? memory_find(id, shown) : NULL;
    if (m && c->job) {
        violation(V_RACE, "memory is bound during a run");
    } else if (m && !attr) {
        violation(V_ARGUMENT, "a null pointer");
    } else if (m) {
        code = bind(c, m, attr);
    }
    leave();
    return code;
}

/* -- rknn_set_input_shapes --------------------------------------------------------------------- */

static bool is_variant(const context *c, uint32_t variant, const rknn_tensor_attr *attrs) {
    for (uint32_t i = 0; i < c->model->view.n_inputs; i++) {
        const uint32_t *d = context_tensor(c, variant, false, i)->dims, *given = attrs[i].dims;
        if (given[0] != d[0] || given[1] != d[2] || given[2] != d[3] || given[3] != d[1]) {
            return false;
        }
    }
    return true;
}

static bool check_shapes(const context *c, uint32_t number, const rknn_tensor_attr *attrs) {
    if (!attrs || number != c->model->view.n_inputs) {
        violation(V_ARGUMENT, "%u inputs of %u, or a null pointer", number,
                  c->model->view.n_inputs);
        return false;
    }
    for (uint32_t i = 0; i < number; i++) {
        /* 4-D inputs are stated as NHWC, whatever the graph has. */
        if (attrs[i].index != i || attrs[i].n_dims != 4 || attrs[i].fmt != FMT_NHWC) {
            violation(V_FORMAT, "input %u: index %u, %u dims, fmt %d instead of 4 dims as NHWC", i,
                      attrs[i].index, attrs[i].n_dims, attrs[i].fmt);
            return false;
        }
    }
    return true;
}

static int set_shapes(context *c, uint32_t number, const rknn_tensor_attr *attrs) {
    if (!check_shapes(c, number, attrs)) {
        return RKNN_PARAM_INVALID;
    }
    for (uint32_t v = 0; v < c->model->view.n_variants; v++) {
        if (is_variant(c, v, attrs)) {
            if (v != c->variant || !c->shaped) {
                context_unbind(c); /* after a switch, rknn_set_io_mem must be called again */
            }
            c->variant = v;
            c->shaped = true;
            return RKNN_OK;
        }
    }
    violation(V_SHAPES, "the shapes are not those of any variant");
    return RKNN_PARAM_INVALID;
}

int rknn_set_input_shapes(rknn_context id, uint32_t number, rknn_tensor_attr *attrs) {
    enter(CALL_SHAPES);
    int code = RKNN_FAIL;
    context *c = context_find(id, &code);
    if (c && c->job) {
        violation(V_RACE, "shapes are set during a run");
    } else if (c) {
        code = set_shapes(c, number, attrs);
    }
    leave();
    return code;
}

/* -- Settings without effect on results -------------------------------------------------------- */

int rknn_set_core_mask(rknn_context id, int mask) {
    int code = RKNN_OK;
    enter(CALL_CORE_MASK);
    bool meant = mask == 0xffff || (mask >= 0 && mask <= 7 && mask != 5 && mask != 6);
    if (context_find(id, &code) && !meant) {
        violation(V_ARGUMENT, "core mask %d", mask);
        code = RKNN_PARAM_INVALID;
    }
    leave();
    return code;
}

int rknn_set_batch_core_num(rknn_context id, int number) {
    int code = RKNN_OK;
    enter(CALL_BATCH_CORES);
    if (context_find(id, &code) && (number < 1 || number > 3)) {
        violation(V_ARGUMENT, "%d cores", number);
        code = RKNN_PARAM_INVALID;
    }
    leave();
    return code;
}

static int set_other_mem(call which, rknn_context id, rknn_tensor_mem *shown) {
    int code = RKNN_OK;
    enter(which);
    if (context_find(id, &code) && !memory_find(id, shown)) {
        code = RKNN_PARAM_INVALID;
    }
    leave();
    return code;
}

int rknn_set_weight_mem(rknn_context id, rknn_tensor_mem *shown) {
    return set_other_mem(CALL_WEIGHT_MEM, id, shown);
}

int rknn_set_internal_mem(rknn_context id, rknn_tensor_mem *shown) {
    return set_other_mem(CALL_INTERNAL_MEM, id, shown);
}
