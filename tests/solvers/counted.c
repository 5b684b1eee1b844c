/* glibc's allocator with a count of the bytes alive and of the most since it was last asked to begin anew. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic long long alive, most;

static void *taken(void *block) {
    if (!block) return block;
    long long size = (long long)malloc_usable_size(block);
    long long now = atomic_fetch_add(&alive, size) + size, known = atomic_load(&most);
    while (now > known && !atomic_compare_exchange_weak(&most, &known, now)) {}
    return block;
}

static long long size_of(void *block) { return block ? (long long)malloc_usable_size(block) : 0; }

void *malloc(size_t size) { return taken(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return taken(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return taken(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    void *block = memalign(alignment, size);
    if (!block) return ENOMEM;
    *out = block;
    return 0;
}

void *realloc(void *block, size_t size) {
    long long before = size_of(block);
    void *moved = __libc_realloc(block, size);
    if (moved || !size) atomic_fetch_sub(&alive, before);
    return taken(moved);
}

void free(void *block) {
    atomic_fetch_sub(&alive, size_of(block));
    __libc_free(block);
}

/* Else malloc would be taken for another library's than the C library's, which gives the memory here, too. */
const char *gnu_get_libc_version(void) {
    const char *(*version)(void) = (const char *(*)(void))dlsym(RTLD_NEXT, "gnu_get_libc_version");
    return version();
}

long long counted_alive(void) { return alive; }
long long counted_most(void) { return most; }
void counted_anew(void) { most = alive; }
