/* What the double's files share. All state is guarded by one mutex, which `enter` takes and `leave`
 * gives back; it is not held while a model computes or Python runs. */
#ifndef DOUBLE_H
#define DOUBLE_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>

#include "rknn_abi.h"

/* -- The model, as rknn_compute.py states it --------------------------------------------------- */

typedef struct {
    char name[MAX_NAME];
    uint32_t dims[4];   /* n c h w */
    uint32_t native[5]; /* n c1 h w c2 */
    uint32_t w_stride, size;
    int32_t type;
    float scale;
    int32_t zero;
} tensor;

typedef struct {
    uint64_t handle;
    uint32_t n_variants, n_inputs, n_outputs;
    const tensor *tensors; /* by variant: inputs, then outputs; Python keeps them until unload */
    uint64_t weight_bytes;
} model_view;

/* Each returns 0, or a code of the runtime and a message of at most `size` bytes. */
typedef struct {
    int (*load)(const char *path, model_view *view, char *message, uint32_t size);
    int (*unload)(uint64_t handle);
    int (*compute)(uint64_t handle, uint32_t variant, void *const *inputs, void *const *outputs,
                   int with_nan, char *message, uint32_t size);
    int (*pack)(const tensor *tensor, const void *plain, int type, int fmt, void *native,
                char *message, uint32_t size);
    int (*unpack)(const tensor *tensor, const void *native, int type, void *plain, char *message,
                  uint32_t size);
} host_functions;

const host_functions *host(void); /* NULL if there is no Python in this process */

typedef struct {
    model_view view;
    int uses;
} model;

/* -- Memory ------------------------------------------------------------------------------------ */

/* What a device-side buffer is: the processor's view and the NPU's, made equal only by a flush. */
typedef struct buffer {
    struct buffer *next;
    int fd; /* -1 when its owner was destroyed and other memory still refers to it */
    ino_t inode;
    size_t size, mapped;
    uint8_t *region; /* a guard page, the host's view, a guard page */
    uint8_t *host, *device;
    int uses;
    int readers, writers; /* runs under way */
} buffer;

void poison(uint8_t *bytes, size_t size);
buffer *buffer_create(size_t size, bool cacheable); /* NULL after a message on stderr */
void buffer_close(buffer *buffer);
void buffer_release(buffer *buffer);
void buffer_check_edges(const buffer *buffer);
void buffers_check_edges(void);
buffer *buffer_of_fd(int fd); /* or NULL */
bool buffer_shows(const buffer *buffer, const uint8_t *address, size_t offset);

typedef struct mem {
    rknn_tensor_mem shown; /* first: its address is the caller's handle */
    struct mem *next;
    rknn_context context;
    buffer *buffer;
    size_t offset;
    bool owner;
} mem;

rknn_tensor_mem *memory_create(rknn_context context, uint64_t size, uint64_t flags);
rknn_tensor_mem *memory_import(rknn_context context, int fd, void *virt, uint32_t size,
                               int32_t offset);
mem *memory_find(rknn_context context, rknn_tensor_mem *shown); /* NULL after a violation */
int memory_destroy(mem *mem);
void memory_drop_orphans(void); /* memory whose context is no more */
int memory_flush(mem *mem, int mode, bool by_run);
int memory_of_context(rknn_context context);
uint8_t *memory_device(const mem *mem);

/* -- Contexts ---------------------------------------------------------------------------------- */

typedef struct {
    mem *mem;
    uint8_t *own; /* of rknn_inputs_set and rknn_outputs_get, which need no memory of the caller */
} binding;

typedef struct job {
    struct context *context;
    pthread_t thread;
    bool threaded, done, awaited;
    int code;                /* scripted, or 0; in the end the result */
    int sleep_ms;
    bool with_nan;
    uint32_t variant;
    void **inputs, **outputs; /* device copies */
    char message[512];
} job;

typedef struct context {
    struct context *next;
    rknn_context id;
    model *model;
    uint32_t flags;
    bool lost;
    bool shaped; /* rknn_set_input_shapes was called */
    bool copies; /* rknn_inputs_set was called */
    uint32_t variant;
    binding *bindings; /* inputs, then outputs */
    job *job;
    int64_t last_us;
    uint64_t frames;
} context;

bool context_lives(rknn_context id);
context *context_find(rknn_context id, int *code); /* NULL and a code after a violation or loss */
const tensor *context_tensor(const context *c, uint32_t variant, bool output, uint32_t index);
uint32_t context_largest(const context *c);
void context_unbind(context *c);
void contexts_forget_mem(const mem *mem);
void contexts_lose(void);
bool contexts_any_lost(void);
uint32_t context_tensors(const context *c);
bool context_needs_shapes(const context *c); /* after a violation */
int run_join(context *c);
void describe_native(rknn_tensor_attr *attr, uint32_t index, const tensor *t, bool output);
uint8_t *binding_device(const binding *b); /* NULL if nothing is bound */
uint8_t *binding_own(binding *b, uint32_t size);

/* -- Scripted faults --------------------------------------------------------------------------- */

int script_add(const char *text); /* 0, or -1 after a message on stderr */
void script_clear(void);
int script_on_init(void); /* a code */
bool script_on_create_mem(void);
void script_on_run(job *job, int timeout_ms);
bool script_shortens(uint32_t output);
bool script_refuses_dup(void);
bool script_checks_bounds(void);
const char *script_version(void);
const char *script_driver(void);

/* -- Bookkeeping ------------------------------------------------------------------------------- */

typedef enum {
    V_CONTEXT = 1,  /* an unknown or destroyed context */
    V_MEM = 2,      /* unknown, destroyed, or another context's memory */
    V_LEAK = 3,     /* a context destroyed before its memory */
    V_ARGUMENT = 4, /* a null pointer, size, flag or mode that means nothing */
    V_INDEX = 5,    /* no tensor of that name or index */
    V_SIZE = 6,     /* memory or data of the wrong size */
    V_FORMAT = 7,   /* fmt, type or pass_through other than queried */
    V_DIMS = 8,     /* dims or strides other than queried */
    V_ALIGN = 9,    /* memory that begins within a cache line */
    V_UNBOUND = 10, /* a run without all inputs and outputs */
    V_SHAPES = 11,  /* a dynamic model used before, or without, valid input shapes */
    V_EDGE = 12,    /* bytes written behind the end of memory */
    V_FREED = 13,   /* freed memory, or a guard page, touched */
    V_NUMBER = 14,  /* NaN or infinity in an input on the device */
    V_RACE = 15,    /* memory touched, or a context used, during its run */
    V_FD = 16,      /* an fd that is not device memory */
} violation_kind;

typedef enum {
    CALL_INIT, CALL_DUP, CALL_DESTROY, CALL_QUERY, CALL_INPUTS_SET, CALL_OUTPUTS_GET,
    CALL_OUTPUTS_RELEASE, CALL_RUN, CALL_WAIT, CALL_CORE_MASK, CALL_BATCH_CORES, CALL_SHAPES,
    CALL_CREATE_MEM, CALL_CREATE_MEM2, CALL_FROM_FD, CALL_DESTROY_MEM, CALL_IO_MEM, CALL_WEIGHT_MEM,
    CALL_INTERNAL_MEM, CALL_SYNC, CALLS,
} call;

typedef struct {
    uint64_t contexts, mems, bytes, fds, outputs;
} live_counts;

typedef struct {
    uint64_t flushes, bytes;
} flushes;

extern live_counts live;
extern flushes flushed[2][2]; /* [from the device][by a run] */

void enter(call call);
void enter_quietly(void);
bool enter_if_free(void);
void leave(void);
pthread_mutex_t *big_lock(void);
void outside_calls(void); /* what follows happens in the caller's code */
void violation(violation_kind kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
void report_write(void);

#pragma GCC visibility push(default)

void double_attach(const host_functions *functions); /* by rknn_compute.py */
int double_script(const char *text);
void double_reset(void);
void double_counts(uint64_t counts[5]);
const char *double_violations(void);
const char *double_trace(void);
const char *double_report(void);
int double_peek(const rknn_tensor_mem *mem, void *bytes, uint32_t size);

#pragma GCC visibility pop

#endif
