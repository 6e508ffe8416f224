/* Scripted faults: `name:argument:argument`, separated by spaces, commas or semicolons.
 *
 *   init:CODE[:TIMES]       rknn_init returns CODE; always, or TIMES times
 *   version:X.Y.Z           of the runtime
 *   driver:X.Y.Z
 *   nodup                   rknn_dup_context of a dynamic model returns -1
 *   create_mem:N[:TIMES]    memory N returns NULL; TIMES in a row
 *   run:N:CODE[:TIMES]      run N returns CODE; -2 after the time-out that the caller gave
 *   nan:N[:TIMES]           run N succeeds, and output 0 is NaN
 *   hang:N:MS               run N takes MS longer, whatever time-out the caller gave
 *   slow:MS                 every run takes MS longer
 *   lost:N[:TIMES]          run N and all calls after it return -3, until every context is
 *                           destroyed and rknn_init failed TIMES times
 *   short:I                 output I is reported with half its size
 *   bounds                  every call looks for bytes written behind memory
 *
 * N counts from 1 over the whole process; +N from when the script is given. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "double.h"

typedef enum {
    F_INIT, F_VERSION, F_DRIVER, F_NODUP, F_CREATE_MEM, F_RUN, F_NAN, F_HANG, F_SLOW, F_LOST,
    F_SHORT, F_BOUNDS, FAULTS,
} fault_kind;

typedef struct {
    const char *name, *form;
    int least, most; /* arguments */
} fault_form;

static const fault_form forms[FAULTS] = {
    [F_INIT] = {"init", "init:CODE[:TIMES]", 1, 2},
    [F_VERSION] = {"version", "version:X.Y.Z", 1, 1},
    [F_DRIVER] = {"driver", "driver:X.Y.Z", 1, 1},
    [F_NODUP] = {"nodup", "nodup", 0, 0},
    [F_CREATE_MEM] = {"create_mem", "create_mem:N[:TIMES]", 1, 2},
    [F_RUN] = {"run", "run:N:CODE[:TIMES]", 2, 3},
    [F_NAN] = {"nan", "nan:N[:TIMES]", 1, 2},
    [F_HANG] = {"hang", "hang:N:MS", 2, 2},
    [F_SLOW] = {"slow", "slow:MS", 1, 1},
    [F_LOST] = {"lost", "lost:N[:TIMES]", 1, 2},
    [F_SHORT] = {"short", "short:I", 1, 1},
    [F_BOUNDS] = {"bounds", "bounds", 0, 0},
};

typedef struct {
    fault_kind kind;
    char text[64];
    long numbers[3];
    bool given[3];
} fault;

static fault faults[256];
static size_t num_faults;
static uint64_t num_created, num_runs;
static long failing_inits;

static int refuse(const char *word) {
    fprintf(stderr, "double of librknnrt: script: %s is none of", word);
    for (int i = 0; i < FAULTS; i++) {
        fprintf(stderr, " %s", forms[i].form);
    }
    fprintf(stderr, "\n");
    return -1;
}

static bool parse_number(fault *f, int i, const char *text) {
    char *end;
    f->numbers[i] = strtol(text, &end, 10);
    f->given[i] = true;
    if (*text == '+' && i == 0) {
        f->numbers[0] += (long)(f->kind == F_CREATE_MEM ? num_created : num_runs);
    }
    return *text && !*end;
}

static bool parse_arguments(fault *f, char *arguments) {
    int number = 0;
    char *rest = NULL;
    for (char *a = strtok_r(arguments, ":", &rest); a; a = strtok_r(NULL, ":", &rest)) {
        if (number >= forms[f->kind].most) {
            return false;
        }
        if (f->kind == F_VERSION || f->kind == F_DRIVER) {
            snprintf(f->text, sizeof f->text, "%s", a);
        } else if (!parse_number(f, number, a)) {
            return false;
        }
        number++;
    }
    return number >= forms[f->kind].least;
}

static int add_word(const char *word) {
    char name[128];
    snprintf(name, sizeof name, "%s", word);
    char *colon = strchr(name, ':'), none[] = "";
    if (colon) {
        *colon = 0;
    }
    for (int kind = 0; kind < FAULTS; kind++) {
        fault f = {.kind = (fault_kind)kind};
        if (strcmp(forms[kind].name, name) == 0 && num_faults < sizeof faults / sizeof *faults &&
            parse_arguments(&f, colon ? colon + 1 : none)) {
            faults[num_faults++] = f;
            return 0;
        }
    }
    return refuse(word);
}

int script_add(const char *text) {
    char *words = strdup(text), *rest = NULL;
    int result = 0;
    for (char *w = strtok_r(words, " ,;\n\t", &rest); w; w = strtok_r(NULL, " ,;\n\t", &rest)) {
        result = add_word(w) ? -1 : result;
    }
    free(words);
    return result;
}

void script_clear(void) {
    num_faults = 0;
    num_created = num_runs = 0;
    failing_inits = 0;
}

/* -- What happens when ------------------------------------------------------------------------- */

static bool hits(const fault *f, uint64_t number, int times_at) {
    long times = f->given[times_at] ? f->numbers[times_at] : 1;
    return (long)number >= f->numbers[0] && (long)number < f->numbers[0] + times;
}

static const fault *last_of(fault_kind kind) {
    const fault *found = NULL;
    for (size_t i = 0; i < num_faults; i++) {
        found = faults[i].kind == kind ? &faults[i] : found;
    }
    return found;
}

int script_on_init(void) {
    if (contexts_any_lost()) {
        return RKNN_DEVICE_UNAVAILABLE;
    }
    if (failing_inits > 0) {
        failing_inits--;
        return RKNN_DEVICE_UNAVAILABLE;
    }
    for (size_t i = 0; i < num_faults; i++) {
        fault *f = &faults[i];
        if (f->kind == F_INIT && (!f->given[1] || f->numbers[1]-- > 0)) {
            return (int)f->numbers[0];
        }
    }
    return RKNN_OK;
}

bool script_on_create_mem(void) {
    bool fails = false;
    num_created++;
    for (size_t i = 0; i < num_faults; i++) {
        fails |= faults[i].kind == F_CREATE_MEM && hits(&faults[i], num_created, 1);
    }
    return fails;
}

static void play(job *job, fault *f, int timeout_ms) {
    if (f->kind == F_SLOW) {
        job->sleep_ms += (int)f->numbers[0];
    } else if (f->kind == F_HANG && hits(f, num_runs, 2)) {
        job->sleep_ms += (int)f->numbers[1];
    } else if (f->kind == F_NAN && hits(f, num_runs, 1)) {
        job->with_nan = true;
    } else if (f->kind == F_RUN && hits(f, num_runs, 2)) {
        job->code = (int)f->numbers[1];
        job->sleep_ms += job->code == RKNN_TIMEOUT ? timeout_ms : 0;
    } else if (f->kind == F_LOST && hits(f, num_runs, 2)) {
        job->code = RKNN_DEVICE_UNAVAILABLE;
        failing_inits = f->given[1] ? f->numbers[1] : 0;
        contexts_lose();
    }
}

void script_on_run(job *job, int timeout_ms) {
    num_runs++;
    for (size_t i = 0; i < num_faults; i++) {
        play(job, &faults[i], timeout_ms);
    }
}

bool script_shortens(uint32_t output) {
    bool shortens = false;
    for (size_t i = 0; i < num_faults; i++) {
        shortens |= faults[i].kind == F_SHORT && faults[i].numbers[0] == (long)output;
    }
    return shortens;
}

bool script_refuses_dup(void) { return last_of(F_NODUP); }

bool script_checks_bounds(void) { return last_of(F_BOUNDS); }

const char *script_version(void) {
    const fault *f = last_of(F_VERSION);
    return f ? f->text : "2.5.0";
}

const char *script_driver(void) {
    const fault *f = last_of(F_DRIVER);
    return f ? f->text : "0.9.8";
}
