/* The lock, what is counted under it, violations, and the report. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "double.h"

static const char *const call_names[CALLS] = {
    "rknn_init", "rknn_dup_context", "rknn_destroy", "rknn_query", "rknn_inputs_set",
    "rknn_outputs_get", "rknn_outputs_release", "rknn_run", "rknn_wait", "rknn_set_core_mask",
    "rknn_set_batch_core_num", "rknn_set_input_shapes", "rknn_create_mem", "rknn_create_mem2",
    "rknn_create_mem_from_fd", "rknn_destroy_mem", "rknn_set_io_mem", "rknn_set_weight_mem",
    "rknn_set_internal_mem", "rknn_mem_sync",
};

#define MAX_KEPT 200

typedef struct {
    violation_kind kind;
    char *text;
} kept_violation;

live_counts live;
flushes flushed[2][2];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint64_t calls[CALLS];
static uint64_t num_violations;
static kept_violation kept[MAX_KEPT];
static __thread const char *current_call = "no call";

/* -- The lock ---------------------------------------------------------------------------------- */

static void at_exit(void) {
    if (enter_if_free()) {
        report_write();
        leave();
    }
}

static void begin(void) {
    const char *script = getenv("HEADRACE_DOUBLE_SCRIPT");
    if (script && script_add(script) != 0) {
        exit(2); /* the test that wrote it would otherwise pass without its fault */
    }
    atexit(at_exit);
}

pthread_mutex_t *big_lock(void) { return &lock; }

void enter_quietly(void) {
    pthread_once(&once, begin);
    pthread_mutex_lock(&lock);
}

bool enter_if_free(void) { return pthread_mutex_trylock(&lock) == 0; }

void enter(call call) {
    enter_quietly();
    current_call = call_names[call];
    calls[call]++;
    if (script_checks_bounds()) {
        buffers_check_edges();
    }
}

void outside_calls(void) { current_call = "the caller's code"; }

void leave(void) { pthread_mutex_unlock(&lock); }

/* -- Violations -------------------------------------------------------------------------------- */

void violation(violation_kind kind, const char *format, ...) {
    char *text = NULL;
    va_list arguments;
    va_start(arguments, format);
    if (vasprintf(&text, format, arguments) < 0) {
        abort();
    }
    va_end(arguments);
    fprintf(stderr, "double of librknnrt: violation %d in %s: %s\n", kind, current_call, text);
    if (num_violations < MAX_KEPT) {
        kept_violation *v = &kept[num_violations];
        v->kind = kind;
        if (asprintf(&v->text, "%s: %s", current_call, text) < 0) {
            abort();
        }
    }
    free(text);
    num_violations++;
    report_write();
}

static uint64_t num_kept(void) { return num_violations < MAX_KEPT ? num_violations : MAX_KEPT; }

/* -- Texts ------------------------------------------------------------------------------------- */

static void put_text(FILE *out, const char *text) {
    fputc('"', out);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') {
            fprintf(out, "\\%c", *text);
        } else if ((unsigned char)*text < 32) {
            fprintf(out, "\\u%04x", *text);
        } else {
            fputc(*text, out);
        }
    }
    fputc('"', out);
}

static void put_number(FILE *out, const char *name, uint64_t number) {
    fprintf(out, "\"%s\": %llu", name, (unsigned long long)number);
}

static void put_flushes(FILE *out, const char *name, const flushes *f) {
    fprintf(out, "\"%s\": {", name);
    put_number(out, "flushes", f->flushes);
    fprintf(out, ", ");
    put_number(out, "bytes", f->bytes);
    fprintf(out, "}");
}

static void put_trace(FILE *out) {
    fprintf(out, "{\"calls\": {");
    for (int i = 0; i < CALLS; i++) {
        fprintf(out, "%s", i ? ", " : "");
        put_number(out, call_names[i], calls[i]);
    }
    fprintf(out, "}, ");
    put_flushes(out, "sync_to_device", &flushed[0][0]);
    fprintf(out, ", ");
    put_flushes(out, "sync_from_device", &flushed[1][0]);
    fprintf(out, ", ");
    put_flushes(out, "run_to_device", &flushed[0][1]);
    fprintf(out, ", ");
    put_flushes(out, "run_from_device", &flushed[1][1]);
    fprintf(out, "}");
}

static void put_report(FILE *out) {
    const struct {
        const char *name;
        uint64_t number;
    } numbers[] = {
        {"contexts", live.contexts}, {"mems", live.mems},       {"bytes", live.bytes},
        {"fds", live.fds},           {"outputs", live.outputs}, {"num_violations", num_violations},
    };
    fprintf(out, "{");
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        put_number(out, numbers[i].name, numbers[i].number);
        fprintf(out, ", ");
    }
    fprintf(out, "\"violations\": [");
    for (uint64_t i = 0; i < num_kept(); i++) {
        fprintf(out, "%s{\"kind\": %d, \"text\": ", i ? ", " : "", kept[i].kind);
        put_text(out, kept[i].text);
        fprintf(out, "}");
    }
    fprintf(out, "], \"trace\": ");
    put_trace(out);
    fprintf(out, "}\n");
}

void report_write(void) {
    const char *path = getenv("HEADRACE_DOUBLE_REPORT");
    char *part = NULL;
    if (!path || asprintf(&part, "%s.part", path) < 0) {
        return;
    }
    FILE *out = fopen(part, "w");
    if (out) {
        put_report(out);
        fclose(out);
        rename(part, path);
    } else {
        perror(part);
    }
    free(part);
}

/* -- What tests call --------------------------------------------------------------------------- */

typedef void (*writer)(FILE *);

/* The text is valid until the same function is called again. */
static const char *written(writer write, char **kept_text) {
    size_t size;
    char *text = NULL;
    FILE *out = open_memstream(&text, &size);
    enter_quietly();
    write(out);
    leave();
    fclose(out);
    free(*kept_text);
    return *kept_text = text;
}

static void put_violations(FILE *out) {
    for (uint64_t i = 0; i < num_kept(); i++) {
        fprintf(out, "%d %s\n", kept[i].kind, kept[i].text);
    }
}

const char *double_violations(void) {
    static char *text;
    return written(put_violations, &text);
}

const char *double_trace(void) {
    static char *text;
    return written(put_trace, &text);
}

const char *double_report(void) {
    static char *text;
    return written(put_report, &text);
}

void double_counts(uint64_t counts[5]) {
    enter_quietly();
    memcpy(counts, &live, sizeof live);
    leave();
}

int double_script(const char *text) {
    enter_quietly();
    int result = script_add(text);
    leave();
    return result;
}

/* Forgets faults, violations, the trace, and memory that outlived its context. */
void double_reset(void) {
    enter_quietly();
    memory_drop_orphans();
    for (uint64_t i = 0; i < num_kept(); i++) {
        free(kept[i].text);
    }
    num_violations = 0;
    memset(calls, 0, sizeof calls);
    memset(flushed, 0, sizeof flushed);
    script_clear();
    leave();
}
