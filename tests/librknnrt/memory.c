/* Memory: each buffer has the processor's view and the NPU's own copy. Only flushes make them equal,
 * so that a flush left out shows in the results. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "double.h"

#define CACHE_LINE 64
#define EDGE 0xa5
#define MAX_FREED 4096

typedef struct {
    uint8_t *start;
    size_t size, asked;
} freed_region;

static buffer *buffers;
static mem *mems, *freed_mems; /* handles of destroyed memory are never used again */
static freed_region freed[MAX_FREED];
static size_t num_freed;

/* NaN as float16, so that what nobody wrote cannot pass for a result. */
void poison(uint8_t *bytes, size_t size) {
    for (size_t i = 0; i < size; i++) {
        bytes[i] = i % 2 ? 0x7e : 0x5a;
    }
}

static size_t page(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* -- Touching what must not be touched --------------------------------------------------------- */

static struct sigaction previous_action;

static bool within(const void *address, const uint8_t *start, size_t size) {
    return (const uint8_t *)address >= start && (const uint8_t *)address < start + size;
}

static void tell_of_touch(const void *address) {
    for (buffer *b = buffers; b; b = b->next) {
        if (within(address, b->region, b->mapped + 2 * page())) {
            violation(V_FREED, "%s memory of %zu bytes was touched, %td bytes from its start",
                      within(address, b->host, b->mapped) ? "destroyed" : "a guard page of", b->size,
                      (const uint8_t *)address - b->host);
        }
    }
    for (size_t i = 0; i < num_freed && i < MAX_FREED; i++) {
        if (within(address, freed[i].start, freed[i].size)) {
            violation(V_FREED, "destroyed memory of %zu bytes was touched, %td bytes from its start",
                      freed[i].asked, (const uint8_t *)address - freed[i].start - page());
        }
    }
}

/* Reports, then lets the fault happen again under the handler that was there before. */
static void on_fault(int number, siginfo_t *info, void *unused) {
    (void)number, (void)unused;
    if (enter_if_free()) {
        outside_calls();
        tell_of_touch(info->si_addr);
        report_write();
        leave();
    }
    sigaction(SIGSEGV, &previous_action, NULL);
}

static void watch_faults(void) {
    static bool watching;
    if (!watching) {
        struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
        watching = sigaction(SIGSEGV, &action, &previous_action) == 0;
    }
}

/* -- Buffers ----------------------------------------------------------------------------------- */

static bool map_host(buffer *b) {
    struct stat status;
    b->fd = memfd_create("librknnrt-double", MFD_CLOEXEC);
    if (b->fd < 0 || ftruncate(b->fd, (off_t)b->mapped) != 0 || fstat(b->fd, &status) != 0) {
        return false;
    }
    b->inode = status.st_ino;
    b->region = mmap(NULL, b->mapped + 2 * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b->region == MAP_FAILED) {
        return false;
    }
    b->host = b->region + page();
    return mmap(b->host, b->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, b->fd, 0) !=
           MAP_FAILED;
}

static buffer *buffer_create(size_t size, bool cacheable) {
    buffer *b = calloc(1, sizeof *b);
    b->size = size;
    b->mapped = (size + page() - 1) / page() * page();
    if (!map_host(b)) {
        perror("double of librknnrt: memory");
        if (b->fd >= 0) {
            close(b->fd);
        }
        free(b);
        return NULL;
    }
    poison(b->host, size);
    memset(b->host + size, EDGE, b->mapped - size);
    b->device = b->host;
    if (cacheable) {
        b->device = malloc(size);
        poison(b->device, size);
    }
    b->next = buffers;
    buffers = b;
    live.fds++;
    live.bytes += size;
    return b;
}

/* The addresses stay reserved, so that whoever still uses them is noticed. */
static void retire_host(buffer *b) {
    mmap(b->region, b->mapped + 2 * page(), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    freed_region *slot = &freed[num_freed++ % MAX_FREED];
    if (slot->start) {
        munmap(slot->start, slot->size);
    }
    *slot = (freed_region){b->region, b->mapped + 2 * page(), b->size};
}

static void buffer_close(buffer *b) {
    close(b->fd);
    b->fd = -1;
    live.fds--;
    mprotect(b->host, b->mapped, PROT_NONE);
}

static void buffer_release(buffer *b) {
    if (--b->uses) {
        return;
    }
    live.bytes -= b->size;
    buffer **link = &buffers;
    while (*link != b) {
        link = &(*link)->next;
    }
    *link = b->next;
    if (b->device != b->host) {
        free(b->device);
    }
    retire_host(b);
    free(b);
}

void memory_check_edges(const buffer *b) {
    for (size_t i = b->size; b->fd >= 0 && i < b->mapped; i++) {
        if (b->host[i] != EDGE) {
            violation(V_EDGE, "memory of %zu bytes: byte %zu was written", b->size, i);
            memset(b->host + b->size, EDGE, b->mapped - b->size); /* once is enough */
        }
    }
}

void memory_check_all_edges(void) {
    for (buffer *b = buffers; b; b = b->next) {
        memory_check_edges(b);
    }
}

/* -- Memory, which refers to a buffer or to a part of one -------------------------------------- */

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
    watch_faults();
    if (script_on_create_mem()) {
        return NULL;
    }
    buffer *b = buffer_create(size, !(flags & ALLOC_NON_CACHEABLE));
    return b ? memory_add(context, b, true, 0, (uint32_t)size, b->fd, b->host) : NULL;
}

static buffer *buffer_of_fd(int fd) {
    struct stat status;
    buffer *found = NULL;
    if (fstat(fd, &status) == 0) {
        for (buffer *b = buffers; b; b = b->next) {
            found = b->inode == status.st_ino && b->fd >= 0 ? b : found;
        }
    }
    return found;
}

/* Whether an address shows the buffer: the owner's, or any other mapping of its fd. */
static bool maps(const buffer *b, const uint8_t *virt, size_t offset) {
    if (virt == b->host + offset) {
        return true;
    }
    bool found = false;
    FILE *file = fopen("/proc/self/maps", "r");
    char line[512];
    while (file && fgets(line, sizeof line, file)) {
        unsigned long long start, end, at, inode;
        if (sscanf(line, "%llx-%llx %*s %llx %*s %llu", &start, &end, &at, &inode) == 4) {
            found |= inode == b->inode && within(virt, (uint8_t *)(uintptr_t)start, end - start) &&
                     (uintptr_t)virt - start + at == offset;
        }
    }
    if (file) {
        fclose(file);
    }
    return found;
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
    if (virt && !maps(b, virt, (size_t)offset)) {
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
    memory_check_edges(b);
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
    memory_check_edges(b);
    uint8_t *host = b->host + m->offset, *device = b->device + m->offset;
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
