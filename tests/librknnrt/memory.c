/* Memory: what programs hold of buffers, and how they flush it. */
#include <stdlib.h>
#include <string.h>

#include "double.h"

static mem *mems, *freed_mems; /* handles of destroyed memory are never used again */

static rknn_tensor_mem *memory_add(rknn_context context, buffer *b, bool owner, size_t offset,
                                   uint32_t size, int fd, void *virt) {
    mem *m = calloc(1, sizeof *m);
    m->shown = (rknn_tensor_mem){.virt_addr = virt,
                                 .phys_addr = 0x80000000u + (uint64_t)b->inode * 4096 + offset,
                                 .fd = fd,
                                 .offset = (int32_t)offset,
                                 .size = size};
    m->context = context;
    m->buffer = b;
    m->offset = offset;
    m->owner = owner;
    m->next = mems;
    mems = m;
    b->uses++;
    live.mems++;
    return &m->shown;
}

rknn_tensor_mem *memory_create(rknn_context context, uint64_t size, uint64_t flags) {
    if (size == 0 || size > UINT32_MAX) {
        violation(V_ARGUMENT, "memory of %llu bytes", (unsigned long long)size);
        return NULL;
    }
    if (flags & ~(uint64_t)(ALLOC_CACHEABLE | ALLOC_NON_CACHEABLE | ALLOC_TRY_SRAM) ||
        (flags & ALLOC_CACHEABLE && flags & ALLOC_NON_CACHEABLE)) {
        violation(V_ARGUMENT, "flags %#llx", (unsigned long long)flags);
        return NULL;
    }
    if (script_on_create_mem()) {
        return NULL;
    }
    buffer *b = buffer_create(size, !(flags & ALLOC_NON_CACHEABLE));
    return b ? memory_add(context, b, true, 0, (uint32_t)size, b->fd, b->host) : NULL;
}

/* The documented way to share: memory of another context's fd is the same memory. */
rknn_tensor_mem *memory_import(rknn_context context, int fd, void *virt, uint32_t size,
                               int32_t offset) {
    buffer *b = buffer_of_fd(fd);
    if (!b) {
        violation(V_FD, "fd %d is not memory of the device", fd);
        return NULL;
    }
    if (size == 0 || offset < 0 || (size_t)offset + size > b->size) {
        violation(V_SIZE, "%u bytes at %d of memory of %zu", size, offset, b->size);
        return NULL;
    }
    if (virt && !buffer_shows(b, virt, (size_t)offset)) {
        violation(V_FD, "virt_addr is not where fd %d is mapped", fd);
        return NULL;
    }
    return memory_add(context, b, false, (size_t)offset, size, fd, virt);
}

static bool listed(const mem *list, const rknn_tensor_mem *shown) {
    while (list && &list->shown != shown) {
        list = list->next;
    }
    return list;
}

mem *memory_find(rknn_context context, rknn_tensor_mem *shown) {
    if (!listed(mems, shown)) {
        violation(V_MEM, listed(freed_mems, shown) ? "the memory was destroyed" : "unknown memory");
        return NULL;
    }
    mem *m = (mem *)shown;
    if (m->context != context) {
        violation(V_MEM, "the memory is of another context: share it by its fd");
        return NULL;
    }
    return m;
}

uint8_t *memory_device(const mem *m) { return m->buffer->device + m->offset; }

int memory_of_context(rknn_context context) {
    int number = 0;
    for (mem *m = mems; m; m = m->next) {
        number += m->context == context;
    }
    return number;
}

int memory_destroy(mem *m) {
    buffer *b = m->buffer;
    if (b->readers || b->writers) {
        violation(V_RACE, "memory is destroyed while a run uses it");
        return RKNN_FAIL;
    }
    buffer_check_edges(b);
    contexts_forget_mem(m);
    mem **link = &mems;
    while (*link != m) {
        link = &(*link)->next;
    }
    *link = m->next;
    m->next = freed_mems;
    freed_mems = m;
    m->shown = (rknn_tensor_mem){.fd = -1};
    live.mems--;
    if (m->owner) {
        buffer_close(b);
    }
    buffer_release(b);
    return RKNN_OK;
}

void memory_drop_orphans(void) {
    for (mem *m = mems, *next; m; m = next) {
        next = m->next;
        if (!context_lives(m->context)) {
            memory_destroy(m);
        }
    }
}

/* -- Flushes ----------------------------------------------------------------------------------- */

static void copy(uint8_t *to, const uint8_t *from, size_t size, flushes *counted) {
    if (to != from) { /* else it is not cached */
        memcpy(to, from, size);
        counted->flushes++;
        counted->bytes += size;
    }
}

int memory_flush(mem *m, int mode, bool by_run) {
    buffer *b = m->buffer;
    /* A flush to the device writes what a run reads; one from it reads what a run writes. */
    if (!by_run && (b->writers || (b->readers && mode & SYNC_TO_DEVICE))) {
        violation(V_RACE, "memory is flushed while a run uses it");
        return RKNN_FAIL;
    }
    if (b->fd < 0) {
        violation(V_MEM, "the memory's owner, whose view this is, was destroyed");
        return RKNN_PARAM_INVALID;
    }
    buffer_check_edges(b);
    uint8_t *host = b->host + m->offset, *device = b->device + m->offset;
    bool reads = b->readers && mode & SYNC_TO_DEVICE;
    if (reads && memcmp(host, device, m->shown.size) != 0) {
        violation(V_RACE, "a run flushes new content into memory that another run reads");
        return RKNN_FAIL;
    }
    if (mode & SYNC_TO_DEVICE) {
        copy(device, host, m->shown.size, &flushed[0][by_run]);
    }
    if (mode & SYNC_FROM_DEVICE) {
        copy(host, device, m->shown.size, &flushed[1][by_run]);
    }
    return RKNN_OK;
}

int double_peek(const rknn_tensor_mem *shown, void *bytes, uint32_t size) {
    enter_quietly();
    bool known = listed(mems, shown) && size <= shown->size;
    if (known) {
        memcpy(bytes, memory_device((const mem *)shown), size);
    }
    leave();
    return known ? RKNN_OK : RKNN_PARAM_INVALID;
}

/* -- The calls --------------------------------------------------------------------------------- */

rknn_tensor_mem *rknn_create_mem(rknn_context id, uint32_t size) {
    int code;
    enter(CALL_CREATE_MEM);
    rknn_tensor_mem *shown = context_find(id, &code) ? memory_create(id, size, 0) : NULL;
    leave();
    return shown;
}

rknn_tensor_mem *rknn_create_mem2(rknn_context id, uint64_t size, uint64_t flags) {
    int code;
    enter(CALL_CREATE_MEM2);
    rknn_tensor_mem *shown = context_find(id, &code) ? memory_create(id, size, flags) : NULL;
    leave();
    return shown;
}

rknn_tensor_mem *rknn_create_mem_from_fd(rknn_context id, int32_t fd, void *virt, uint32_t size,
                                         int32_t offset) {
    int code;
    enter(CALL_FROM_FD);
    rknn_tensor_mem *shown =
        context_find(id, &code) ? memory_import(id, fd, virt, size, offset) : NULL;
    leave();
    return shown;
}

int rknn_destroy_mem(rknn_context id, rknn_tensor_mem *shown) {
    enter(CALL_DESTROY_MEM);
    int code = RKNN_OK;
    context_find(id, &code); /* of a lost device, memory may be destroyed too */
    if (code == RKNN_OK || code == RKNN_DEVICE_UNAVAILABLE) {
        mem *m = memory_find(id, shown);
        code = m ? memory_destroy(m) : RKNN_PARAM_INVALID;
    }
    leave();
    return code;
}

int rknn_mem_sync(rknn_context id, rknn_tensor_mem *shown, int mode) {
    enter(CALL_SYNC);
    int code = RKNN_PARAM_INVALID;
    if (context_find(id, &code)) {
        mem *m = memory_find(id, shown);
        if (m && (mode < SYNC_TO_DEVICE || mode > (SYNC_TO_DEVICE | SYNC_FROM_DEVICE))) {
            violation(V_ARGUMENT, "mode %d", mode);
        } else if (m) {
            code = memory_flush(m, mode, false);
        }
    }
    leave();
    return code;
}
