/* Contexts: a model, its current variant, and the memory bound to it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "double.h"

#define FIRST_ID 0x5eed00000000 /* more than an int holds: who passes one is noticed */

static context *contexts;
static rknn_context last_id = FIRST_ID;

static context *context_at(rknn_context id) {
    context *c = contexts;
    while (c && c->id != id) {
        c = c->next;
    }
    return c;
}

bool context_lives(rknn_context id) { return context_at(id); }

context *context_find(rknn_context id, int *code) {
    context *c = context_at(id);
    if (!c) {
        bool destroyed = id > FIRST_ID && id <= last_id;
        violation(V_CONTEXT, destroyed ? "the context was destroyed" : "unknown context");
        *code = RKNN_CTX_INVALID;
    } else if (c->lost) {
        *code = RKNN_DEVICE_UNAVAILABLE;
        return NULL;
    }
    return c;
}

const tensor *context_tensor(const context *c, uint32_t variant, bool output, uint32_t index) {
    const model_view *view = &c->model->view;
    uint32_t one = view->n_inputs + view->n_outputs;
    return &view->tensors[variant * one + (output ? view->n_inputs : 0) + index];
}

uint32_t context_tensors(const context *c) {
    return c->model->view.n_inputs + c->model->view.n_outputs;
}

static uint64_t input_bytes(const context *c, uint32_t variant) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < c->model->view.n_inputs; i++) {
        bytes += context_tensor(c, variant, false, i)->size;
    }
    return bytes;
}

uint32_t context_largest(const context *c) {
    uint32_t largest = 0;
    for (uint32_t v = 1; v < c->model->view.n_variants; v++) {
        largest = input_bytes(c, v) > input_bytes(c, largest) ? v : largest;
    }
    return largest;
}

/* Of a dynamic model nothing is current before rknn_set_input_shapes. */
bool context_needs_shapes(const context *c) {
    if (c->model->view.n_variants > 1 && !c->shaped) {
        violation(V_SHAPES, "a dynamic model, and rknn_set_input_shapes was not called");
        return true;
    }
    return false;
}

void context_unbind(context *c) {
    for (uint32_t i = 0; i < context_tensors(c); i++) {
        free(c->bindings[i].own);
        c->bindings[i] = (binding){NULL, NULL};
    }
}

uint8_t *binding_device(const binding *b) { return b->mem ? memory_device(b->mem) : b->own; }

uint8_t *binding_own(binding *b, uint32_t size) {
    if (!b->own) {
        b->own = malloc(size);
        poison(b->own, size);
    }
    b->mem = NULL;
    return b->own;
}

void contexts_forget_mem(const mem *mem) {
    for (context *c = contexts; c; c = c->next) {
        for (uint32_t i = 0; i < context_tensors(c); i++) {
            if (c->bindings[i].mem == mem) {
                c->bindings[i].mem = NULL;
            }
        }
    }
}

void contexts_lose(void) {
    for (context *c = contexts; c; c = c->next) {
        c->lost = true;
    }
}

bool contexts_any_lost(void) {
    context *c = contexts;
    while (c && !c->lost) {
        c = c->next;
    }
    return c;
}

static rknn_context context_add(model *model, uint32_t flags) {
    context *c = calloc(1, sizeof *c);
    c->id = ++last_id;
    c->model = model;
    c->flags = flags;
    c->bindings = calloc(model->view.n_inputs + model->view.n_outputs, sizeof *c->bindings);
    c->variant = context_largest(c);
    c->next = contexts;
    contexts = c;
    model->uses++;
    live.contexts++;
    return c->id;
}

/* -- rknn_init --------------------------------------------------------------------------------- */

static int check_init(const rknn_context *out, const void *path, uint32_t size, uint32_t flags) {
    if (!out || !path) {
        violation(V_ARGUMENT, "a null pointer");
    } else if (size && !getenv("HEADRACE_DOUBLE_MODEL")) {
        violation(V_ARGUMENT, "a model in memory: give the double a path, with size 0, or the path "
                              "of that model in HEADRACE_DOUBLE_MODEL");
    } else if (flags & ~(uint32_t)FLAGS_KNOWN || flags & (FLAG_ASYNC | FLAG_SHARE_WEIGHT_MEM)) {
        violation(V_ARGUMENT, "flags %#x: unknown, or not played by the double", flags);
    } else {
        return script_on_init();
    }
    return RKNN_PARAM_INVALID;
}

static int load(const char *path, model *model) {
    const host_functions *functions = host();
    if (!functions) {
        return RKNN_FAIL;
    }
    char message[512] = "";
    int code = functions->load(path, &model->view, message, sizeof message);
    if (code != RKNN_OK) {
        fprintf(stderr, "double of librknnrt: %s: %s\n", path, message);
    }
    return code;
}

int rknn_init(rknn_context *out, void *path, uint32_t size, uint32_t flags, void *extend) {
    (void)extend;
    enter(CALL_INIT);
    int code = check_init(out, path, size, flags);
    leave();
    if (code != RKNN_OK) {
        return code;
    }
    model *loaded = calloc(1, sizeof *loaded);
    code = load(size ? getenv("HEADRACE_DOUBLE_MODEL") : path, loaded);
    if (code != RKNN_OK) {
        free(loaded);
        return code;
    }
    enter_quietly();
    *out = context_add(loaded, flags);
    leave();
    return RKNN_OK;
}

int rknn_dup_context(rknn_context *in, rknn_context *out) {
    enter(CALL_DUP);
    int code = RKNN_PARAM_INVALID;
    if (!in || !out) {
        violation(V_ARGUMENT, "a null pointer");
    } else {
        context *c = context_find(*in, &code);
        if (c && c->model->view.n_variants > 1 && script_refuses_dup()) {
            code = RKNN_FAIL;
        } else if (c) {
            *out = context_add(c->model, c->flags);
            code = RKNN_OK;
        }
    }
    leave();
    return code;
}

/* -- rknn_destroy ------------------------------------------------------------------------------ */

static void context_remove(const context *c) {
    context **link = &contexts;
    while (*link != c) {
        link = &(*link)->next;
    }
    *link = c->next;
    live.contexts--;
}

static void context_free(context *c) {
    context_unbind(c);
    free(c->bindings);
    free(c);
}

/* NULL and a code after a violation. A lost context may be destroyed. */
static context *destroyable(rknn_context id, int *code) {
    context_find(id, code);
    context *c = *code == RKNN_CTX_INVALID ? NULL : context_at(id);
    if (c && c->job && !c->job->threaded) {
        violation(V_RACE, "the context is destroyed during its run");
        *code = RKNN_FAIL;
        return NULL;
    }
    if (c && c->job && !c->lost) {
        violation(V_RACE, "the context is destroyed before rknn_wait");
    }
    return c;
}

int rknn_destroy(rknn_context id) {
    int code = RKNN_OK;
    enter(CALL_DESTROY);
    context *c = destroyable(id, &code);
    if (!c) {
        leave();
        return code;
    }
    if (c->job) {
        run_join(c);
    }
    context_remove(c);
    int left = memory_of_context(id);
    if (left) {
        violation(V_LEAK, "%d pieces of memory of the context were not destroyed", left);
    }
    model *unused = --c->model->uses ? NULL : c->model;
    context_free(c);
    if (!live.contexts) {
        report_write();
    }
    leave();
    if (unused) {
        host()->unload(unused->view.handle);
        free(unused);
    }
    return RKNN_OK;
}
