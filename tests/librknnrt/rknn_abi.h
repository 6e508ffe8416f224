/* What the double plays of the runtime's C interface: functions, codes, and structs by their
 * documented offsets, which are the same on all LP64 systems. */
#ifndef RKNN_ABI_H
#define RKNN_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef uint64_t rknn_context;

enum {
    RKNN_OK = 0,
    RKNN_FAIL = -1,
    RKNN_TIMEOUT = -2,
    RKNN_DEVICE_UNAVAILABLE = -3,
    RKNN_MALLOC_FAIL = -4,
    RKNN_PARAM_INVALID = -5,
    RKNN_MODEL_INVALID = -6,
    RKNN_CTX_INVALID = -7,
    RKNN_INPUT_INVALID = -8,
    RKNN_OUTPUT_INVALID = -9,
};

enum { TYPE_FLOAT32 = 0, TYPE_FLOAT16 = 1, TYPE_INT8 = 2 };
enum { FMT_NCHW = 0, FMT_NHWC = 1, FMT_NC1HWC2 = 2, FMT_UNDEFINED = 3 };
enum { QNT_NONE = 0, QNT_AFFINE = 2 };
enum { SYNC_TO_DEVICE = 1, SYNC_FROM_DEVICE = 2 };
enum { ALLOC_CACHEABLE = 1, ALLOC_NON_CACHEABLE = 2, ALLOC_TRY_SRAM = 4 };

enum {
    FLAG_ASYNC = 0x4,
    FLAG_SHARE_WEIGHT_MEM = 0x20,
    FLAG_DISABLE_FLUSH_INPUT = 0x4000,
    FLAG_DISABLE_FLUSH_OUTPUT = 0x8000,
    FLAGS_KNOWN = 0x3ffff,
};

enum {
    QUERY_IN_OUT_NUM = 0,
    QUERY_INPUT_ATTR = 1,
    QUERY_OUTPUT_ATTR = 2,
    QUERY_PERF_RUN = 4,
    QUERY_SDK_VERSION = 5,
    QUERY_MEM_SIZE = 6,
    QUERY_CUSTOM_STRING = 7,
    QUERY_NATIVE_INPUT_ATTR = 8,
    QUERY_NATIVE_OUTPUT_ATTR = 9,
    QUERY_NATIVE_NHWC_INPUT_ATTR = 10,
    QUERY_NATIVE_NHWC_OUTPUT_ATTR = 11,
    QUERY_INPUT_DYNAMIC_RANGE = 13,
    QUERY_CURRENT_INPUT_ATTR = 14,
    QUERY_CURRENT_OUTPUT_ATTR = 15,
    QUERY_CURRENT_NATIVE_INPUT_ATTR = 16,
    QUERY_CURRENT_NATIVE_OUTPUT_ATTR = 17,
};

#define MAX_DIMS 16
#define MAX_NAME 256
#define MAX_SHAPES 512

typedef struct {
    uint32_t index, n_dims, dims[MAX_DIMS];
    char name[MAX_NAME];
    uint32_t n_elems, size;
    int32_t fmt, type, qnt_type;
    int8_t fl;
    int32_t zp;
    float scale;
    uint32_t w_stride, size_with_stride;
    uint8_t pass_through;
    uint32_t h_stride;
} rknn_tensor_attr;

typedef struct {
    void *virt_addr;
    uint64_t phys_addr;
    int32_t fd, offset;
    uint32_t size, flags;
    void *priv;
} rknn_tensor_mem;

typedef struct {
    uint32_t index;
    void *buf;
    uint32_t size;
    uint8_t pass_through;
    int32_t type, fmt;
} rknn_input;

typedef struct {
    uint8_t want_float, is_prealloc;
    uint32_t index;
    void *buf;
    uint32_t size;
} rknn_output;

typedef struct {
    uint64_t frame_id;
    int32_t non_block, timeout_ms, fence_fd;
} rknn_run_extend;

typedef struct {
    uint64_t frame_id;
} rknn_output_extend;

typedef struct {
    uint32_t total_weight, total_internal;
    uint64_t total_dma;
    uint32_t total_sram, free_sram, reserved[10];
} rknn_mem_size;

typedef struct {
    uint32_t index, shape_number;
    int32_t fmt;
    char name[MAX_NAME];
    uint32_t dyn_range[MAX_SHAPES][MAX_DIMS], n_dims;
} rknn_input_range;

typedef struct {
    uint32_t n_input, n_output;
} rknn_input_output_num;

typedef struct {
    char api[256], drv[256];
} rknn_sdk_version;

typedef struct {
    int64_t us;
} rknn_perf_run;

typedef struct {
    char text[1024];
} rknn_custom_string;

#define SIZE_IS(type, bytes) _Static_assert(sizeof(type) == (bytes), #type " is of another size")
#define FIELD_AT(type, field, at) \
    _Static_assert(offsetof(type, field) == (at), #type "." #field " is elsewhere")

SIZE_IS(rknn_tensor_attr, 376);
FIELD_AT(rknn_tensor_attr, index, 0);
FIELD_AT(rknn_tensor_attr, n_dims, 4);
FIELD_AT(rknn_tensor_attr, dims, 8);
FIELD_AT(rknn_tensor_attr, name, 72);
FIELD_AT(rknn_tensor_attr, n_elems, 328);
FIELD_AT(rknn_tensor_attr, size, 332);
FIELD_AT(rknn_tensor_attr, fmt, 336);
FIELD_AT(rknn_tensor_attr, type, 340);
FIELD_AT(rknn_tensor_attr, qnt_type, 344);
FIELD_AT(rknn_tensor_attr, fl, 348);
FIELD_AT(rknn_tensor_attr, zp, 352);
FIELD_AT(rknn_tensor_attr, scale, 356);
FIELD_AT(rknn_tensor_attr, w_stride, 360);
FIELD_AT(rknn_tensor_attr, size_with_stride, 364);
FIELD_AT(rknn_tensor_attr, pass_through, 368);
FIELD_AT(rknn_tensor_attr, h_stride, 372);

SIZE_IS(rknn_tensor_mem, 40);
FIELD_AT(rknn_tensor_mem, virt_addr, 0);
FIELD_AT(rknn_tensor_mem, phys_addr, 8);
FIELD_AT(rknn_tensor_mem, fd, 16);
FIELD_AT(rknn_tensor_mem, offset, 20);
FIELD_AT(rknn_tensor_mem, size, 24);
FIELD_AT(rknn_tensor_mem, flags, 28);
FIELD_AT(rknn_tensor_mem, priv, 32);

SIZE_IS(rknn_input, 32);
FIELD_AT(rknn_input, index, 0);
FIELD_AT(rknn_input, buf, 8);
FIELD_AT(rknn_input, size, 16);
FIELD_AT(rknn_input, pass_through, 20);
FIELD_AT(rknn_input, type, 24);
FIELD_AT(rknn_input, fmt, 28);

SIZE_IS(rknn_output, 24);
FIELD_AT(rknn_output, want_float, 0);
FIELD_AT(rknn_output, is_prealloc, 1);
FIELD_AT(rknn_output, index, 4);
FIELD_AT(rknn_output, buf, 8);
FIELD_AT(rknn_output, size, 16);

SIZE_IS(rknn_run_extend, 24);
FIELD_AT(rknn_run_extend, frame_id, 0);
FIELD_AT(rknn_run_extend, non_block, 8);
FIELD_AT(rknn_run_extend, timeout_ms, 12);
FIELD_AT(rknn_run_extend, fence_fd, 16);

SIZE_IS(rknn_mem_size, 64);
FIELD_AT(rknn_mem_size, total_weight, 0);
FIELD_AT(rknn_mem_size, total_internal, 4);
FIELD_AT(rknn_mem_size, total_dma, 8);
FIELD_AT(rknn_mem_size, total_sram, 16);
FIELD_AT(rknn_mem_size, free_sram, 20);

SIZE_IS(rknn_input_range, 33040);
FIELD_AT(rknn_input_range, index, 0);
FIELD_AT(rknn_input_range, shape_number, 4);
FIELD_AT(rknn_input_range, fmt, 8);
FIELD_AT(rknn_input_range, name, 12);
FIELD_AT(rknn_input_range, dyn_range, 268);
FIELD_AT(rknn_input_range, n_dims, 33036);

SIZE_IS(rknn_output_extend, 8);
SIZE_IS(rknn_input_output_num, 8);
SIZE_IS(rknn_sdk_version, 512);
SIZE_IS(rknn_perf_run, 8);
SIZE_IS(rknn_custom_string, 1024);

#pragma GCC visibility push(default)

int rknn_init(rknn_context *context, void *model, uint32_t size, uint32_t flag, void *extend);
int rknn_dup_context(rknn_context *context_in, rknn_context *context_out);
int rknn_destroy(rknn_context context);
int rknn_query(rknn_context context, int command, void *info, uint32_t size);
int rknn_inputs_set(rknn_context context, uint32_t n_inputs, rknn_input *inputs);
int rknn_outputs_get(rknn_context context, uint32_t n_outputs, rknn_output *outputs,
                     rknn_output_extend *extend);
int rknn_outputs_release(rknn_context context, uint32_t n_outputs, rknn_output *outputs);
int rknn_run(rknn_context context, rknn_run_extend *extend);
int rknn_wait(rknn_context context, rknn_run_extend *extend);
int rknn_set_core_mask(rknn_context context, int mask);
int rknn_set_batch_core_num(rknn_context context, int number);
int rknn_set_input_shapes(rknn_context context, uint32_t n_inputs, rknn_tensor_attr *attrs);
rknn_tensor_mem *rknn_create_mem(rknn_context context, uint32_t size);
rknn_tensor_mem *rknn_create_mem2(rknn_context context, uint64_t size, uint64_t flags);
rknn_tensor_mem *rknn_create_mem_from_fd(rknn_context context, int32_t fd, void *virt_addr,
                                         uint32_t size, int32_t offset);
int rknn_destroy_mem(rknn_context context, rknn_tensor_mem *mem);
int rknn_set_io_mem(rknn_context context, rknn_tensor_mem *mem, rknn_tensor_attr *attr);
int rknn_set_weight_mem(rknn_context context, rknn_tensor_mem *mem);
int rknn_set_internal_mem(rknn_context context, rknn_tensor_mem *mem);
int rknn_mem_sync(rknn_context context, rknn_tensor_mem *mem, int mode);

#pragma GCC visibility pop

#endif
