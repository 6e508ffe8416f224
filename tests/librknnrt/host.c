/* Finds the Python that loaded the double, and has it import rknn_compute.py from beside it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "double.h"

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static const host_functions *attached;

void double_attach(const host_functions *functions) { attached = functions; }

/* As bytes.fromhex reads it: no character of a path needs an escape. */
static char *hex(const char *text) {
    size_t length = strlen(text);
    char *digits = malloc(2 * length + 1);
    for (size_t i = 0; i < length; i++) {
        sprintf(digits + 2 * i, "%02x", (unsigned char)text[i]);
    }
    digits[2 * length] = 0;
    return digits;
}

static char *program(void) {
    Dl_info self;
    char *path = NULL, *text = NULL;
    if (!dladdr((void *)double_attach, &self) || !(path = realpath(self.dli_fname, NULL))) {
        return NULL;
    }
    char *slash = strrchr(path, '/');
    *slash = 0;
    char *folder = hex(path);
    /* Its own globals, not those of the program that is running. */
    int length = asprintf(&text,
                          "exec(\"import os, runpy\\n"
                          "folder = os.fsdecode(bytes.fromhex('%s'))\\n"
                          "start = runpy.run_path(os.path.join(folder, 'rknn_compute.py'))\\n"
                          "start['attach'](%llu)\", {})\n",
                          folder, (unsigned long long)(uintptr_t)double_attach);
    free(folder);
    free(path);
    return length < 0 ? NULL : text;
}

static void start(void) {
    int (*ensure)(void) = NULL, (*run)(const char *) = NULL;
    void (*release)(int) = NULL;
    *(void **)&ensure = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    *(void **)&release = dlsym(RTLD_DEFAULT, "PyGILState_Release");
    *(void **)&run = dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
    char *text = ensure && release && run ? program() : NULL;
    if (!text) {
        fprintf(stderr, "double of librknnrt: no Python in this process to compute with\n");
        return;
    }
    int state = ensure();
    if (run(text) != 0) {
        fprintf(stderr, "double of librknnrt: rknn_compute.py could not be started\n");
    }
    release(state);
    free(text);
}

const host_functions *host(void) {
    pthread_mutex_lock(&starting);
    if (!attached) {
        start();
    }
    pthread_mutex_unlock(&starting);
    return attached;
}
