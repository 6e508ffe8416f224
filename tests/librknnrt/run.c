/* rknn_run and rknn_wait. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "double.h"

static pthread_cond_t job_done = PTHREAD_COND_INITIALIZER;

/* -- Before: all bound, nothing in use --------------------------------------------------------- */

static int check_bound(context *c) {
    uint32_t n_inputs = c->model->view.n_inputs;
    for (uint32_t i = 0; i < context_tensors(c); i++) {
        bool output = i >= n_inputs;
        const tensor *t = context_tensor(c, c->variant, output, output ? i - n_inputs : i);
        if (output && c->copies && !binding_device(&c->bindings[i])) {
            binding_own(&c->bindings[i], t->size);
        }
        if (!binding_device(&c->bindings[i])) {
            violation(V_UNBOUND, "%s %s has no memory", output ? "output" : "input", t->name);
            return output ? RKNN_OUTPUT_INVALID : RKNN_INPUT_INVALID;
        }
    }
    return RKNN_OK;
}

static int check_idle(const context *c) {
    for (uint32_t i = 0; i < context_tensors(c); i++) {
        const mem *m = c->bindings[i].mem;
        if (m && (m->buffer->writers || (i >= c->model->view.n_inputs && m->buffer->readers))) {
            violation(V_RACE, "memory is used by a run of another context");
            return RKNN_FAIL;
        }
    }
    return RKNN_OK;
}

static int check_run(context *c) {
    if (c->job) {
        violation(V_RACE, "the context is running already, or was not waited for");
        return RKNN_FAIL;
    }
    if (context_needs_shapes(c)) {
        return RKNN_INPUT_INVALID;
    }
    int code = check_bound(c);
    return code == RKNN_OK ? check_idle(c) : code;
}

/* Unless a flag at rknn_init forbids it, a run flushes what is bound. */
static int flush_bound(const context *c, bool outputs) {
    uint32_t n_inputs = c->model->view.n_inputs, disabled =
        outputs ? FLAG_DISABLE_FLUSH_OUTPUT : FLAG_DISABLE_FLUSH_INPUT;
    uint32_t end = outputs ? context_tensors(c) : n_inputs;
    int code = RKNN_OK;
    for (uint32_t i = outputs ? n_inputs : 0; i < end && !(c->flags & disabled); i++) {
        mem *m = c->bindings[i].mem;
        if (m && code == RKNN_OK) {
            code = memory_flush(m, outputs ? SYNC_FROM_DEVICE : SYNC_TO_DEVICE, true);
        }
    }
    return code;
}

static void mark(const context *c, int change) {
    for (uint32_t i = 0; i < context_tensors(c); i++) {
        const mem *m = c->bindings[i].mem;
        if (m && i < c->model->view.n_inputs) {
            m->buffer->readers += change;
        } else if (m) {
            m->buffer->writers += change;
        }
        if (m) {
            buffer_check_edges(m->buffer);
        }
    }
}

static job *job_create(context *c, int timeout_ms) {
    job *j = calloc(1, sizeof *j);
    j->context = c;
    j->variant = c->variant;
    j->inputs = calloc(context_tensors(c), sizeof *j->inputs);
    j->outputs = j->inputs + c->model->view.n_inputs;
    for (uint32_t i = 0; i < context_tensors(c); i++) {
        j->inputs[i] = binding_device(&c->bindings[i]);
    }
    script_on_run(j, timeout_ms);
    return j;
}

/* -- During: without the lock ------------------------------------------------------------------ */

static void sleep_ms(int ms) {
    struct timespec left = {ms / 1000, ms % 1000 * 1000000L};
    while (ms > 0 && nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

static void compute(job *j) {
    sleep_ms(j->sleep_ms);
    if (j->code == RKNN_OK) {
        j->code = host()->compute(j->context->model->view.handle, j->variant, j->inputs, j->outputs,
                                  j->with_nan, j->message, sizeof j->message);
    }
}

/* -- After ------------------------------------------------------------------------------------- */

static void spoil_outputs(const context *c) {
    for (uint32_t i = 0; i < c->model->view.n_outputs; i++) {
        binding *b = &c->bindings[c->model->view.n_inputs + i];
        poison(binding_device(b), context_tensor(c, c->variant, true, i)->size);
    }
}

static int finish(context *c) {
    job *j = c->job;
    int code = j->code;
    mark(c, -1);
    if (j->message[0]) {
        violation(V_NUMBER, "%s", j->message);
    }
    if (code == RKNN_OK) {
        code = flush_bound(c, true);
    } else {
        spoil_outputs(c);
    }
    c->job = NULL;
    free(j->inputs);
    free(j);
    return code;
}

static void *run_thread(void *argument) {
    job *j = argument;
    int64_t began = now_us();
    compute(j);
    enter_quietly();
    j->context->last_us = now_us() - began;
    j->done = true;
    pthread_cond_broadcast(&job_done);
    leave();
    return NULL;
}

int run_join(context *c) {
    job *j = c->job;
    while (!j->done) {
        pthread_cond_wait(&job_done, big_lock());
    }
    if (j->threaded) {
        pthread_detach(j->thread);
    }
    return finish(c);
}

static int run_begin(context *c, rknn_run_extend *extend) {
    int code = check_run(c);
    code = code == RKNN_OK ? flush_bound(c, false) : code;
    if (code != RKNN_OK) {
        return code;
    }
    c->job = job_create(c, extend ? extend->timeout_ms : 0);
    mark(c, 1);
    if (extend) {
        extend->frame_id = ++c->frames;
    }
    if (extend && extend->non_block) {
        c->job->threaded = true;
        pthread_create(&c->job->thread, NULL, run_thread, c->job);
    }
    return RKNN_OK;
}

int rknn_run(rknn_context id, rknn_run_extend *extend) {
    int code = RKNN_OK;
    enter(CALL_RUN);
    context *c = context_find(id, &code);
    code = c ? run_begin(c, extend) : code;
    bool in_thread = c && c->job && c->job->threaded;
    job *j = c ? c->job : NULL;
    leave();
    if (code != RKNN_OK || in_thread) {
        return code;
    }
    run_thread(j);
    enter_quietly();
    code = run_join(c);
    leave();
    return code;
}

static bool wait_until(job *j, int timeout_ms) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    while (!j->done) {
        if (pthread_cond_timedwait(&job_done, big_lock(), &until) == ETIMEDOUT) {
            return j->done;
        }
    }
    return true;
}

static int wait_for(context *c, int timeout_ms) {
    c->job->awaited = true;
    if (timeout_ms <= 0 || wait_until(c->job, timeout_ms)) {
        return run_join(c);
    }
    c->job->awaited = false;
    return RKNN_TIMEOUT;
}

int rknn_wait(rknn_context id, rknn_run_extend *extend) {
    int code = RKNN_OK;
    enter(CALL_WAIT);
    context *c = context_find(id, &code);
    int timeout_ms = extend ? extend->timeout_ms : 0;
    if (c && !(c->job && c->job->threaded && !c->job->awaited)) {
        violation(V_RACE, "nothing runs that could be waited for, or another thread waits");
        code = RKNN_FAIL;
    } else if (c) {
        code = wait_for(c, timeout_ms);
    }
    leave();
    return code;
}
