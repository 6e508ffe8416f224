/* Buffers: the processor's view and the NPU's own copy, made equal only by flushes, so that a flush
 * left out shows in the results; and guards around them. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "double.h"

#define EDGE 0xa5
#define MAX_FREED 4096

typedef struct {
    uint8_t *start;
    size_t size, asked;
} freed_region;

static buffer *buffers;
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

static void tell(const char *what, size_t size, const void *address, const uint8_t *start) {
    violation(V_FREED, "%s memory of %zu bytes was touched, %td bytes from its start", what, size,
              (const uint8_t *)address - start);
}

static void tell_of_touch(const void *address) {
    for (buffer *b = buffers; b; b = b->next) {
        if (within(address, b->region, b->mapped + 2 * page())) {
            bool inside = within(address, b->host, b->mapped);
            tell(inside ? "destroyed" : "a guard page of", b->size, address, b->host);
        }
    }
    for (size_t i = 0; i < num_freed && i < MAX_FREED; i++) {
        if (within(address, freed[i].start, freed[i].size)) {
            tell("destroyed", freed[i].asked, address, freed[i].start + page());
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
    watch_faults();
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

buffer *buffer_create(size_t size, bool cacheable) {
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

/* The owner is gone, and its fd and view with it; the device's copy stays. */
void buffer_close(buffer *b) {
    close(b->fd);
    b->fd = -1;
    live.fds--;
    mprotect(b->host, b->mapped, PROT_NONE);
}

void buffer_release(buffer *b) {
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

void buffer_check_edges(const buffer *b) {
    for (size_t i = b->size; b->fd >= 0 && i < b->mapped; i++) {
        if (b->host[i] != EDGE) {
            violation(V_EDGE, "memory of %zu bytes: byte %zu was written", b->size, i);
            memset(b->host + b->size, EDGE, b->mapped - b->size); /* once is enough */
        }
    }
}

void buffers_check_edges(void) {
    for (buffer *b = buffers; b; b = b->next) {
        buffer_check_edges(b);
    }
}

buffer *buffer_of_fd(int fd) {
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
bool buffer_shows(const buffer *b, const uint8_t *virt, size_t offset) {
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
