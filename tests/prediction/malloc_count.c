/* Counts what malloc and its kin hand out: bytes now, and the most since the last reset. For LD_PRELOAD.
   Blocks below LARGE are left out: Python's objects would drown the tensors. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

#define LARGE 16384

static atomic_long current, peak;
static void *(*real_malloc)(size_t), *(*real_calloc)(size_t, size_t), *(*real_realloc)(void *, size_t);
static void *(*real_memalign)(size_t, size_t);
static void (*real_free)(void *);
static char early[65536]; /* dlsym itself may call calloc */
static size_t early_used;

long malloc_current(void) { return atomic_load(&current); }
long malloc_peak(void) { return atomic_load(&peak); }
void malloc_reset_peak(void) { atomic_store(&peak, atomic_load(&current)); }

static void *note(void *p) {
    long size = p ? (long)malloc_usable_size(p) : 0;
    if (size >= LARGE) {
        long now = atomic_fetch_add(&current, size) + size, top = atomic_load(&peak);
        while (now > top && !atomic_compare_exchange_weak(&peak, &top, now)) {
        }
    }
    return p;
}

static void forget(void *p) {
    long size = p ? (long)malloc_usable_size(p) : 0;
    if (size >= LARGE) atomic_fetch_sub(&current, size);
}

static int is_early(void *p) { return (char *)p >= early && (char *)p < early + sizeof early; }

static void find(void) {
    real_malloc = dlsym(RTLD_NEXT, "malloc");
    real_realloc = dlsym(RTLD_NEXT, "realloc");
    real_memalign = dlsym(RTLD_NEXT, "memalign");
    real_free = dlsym(RTLD_NEXT, "free");
    real_calloc = dlsym(RTLD_NEXT, "calloc");
}

void *malloc(size_t n) {
    if (!real_malloc) find();
    return note(real_malloc(n));
}

void *calloc(size_t n, size_t size) {
    if (!real_calloc) {
        static int finding;
        if (finding || !(finding = 1, find(), real_calloc)) {
            void *p = early + early_used;
            early_used += (n * size + 15) & ~(size_t)15;
            return early_used <= sizeof early ? p : NULL;
        }
    }
    return note(real_calloc(n, size));
}

void free(void *p) {
    if (!p || is_early(p)) return;
    if (!real_free) find();
    forget(p);
    real_free(p);
}

void *realloc(void *p, size_t n) {
    if (!real_realloc) find();
    if (is_early(p)) return malloc(n);
    forget(p);
    return note(real_realloc(p, n));
}

void *memalign(size_t align, size_t n) {
    if (!real_memalign) find();
    return note(real_memalign(align, n));
}

void *aligned_alloc(size_t align, size_t n) { return memalign(align, n); }

int posix_memalign(void **out, size_t align, size_t n) {
    void *p = memalign(align, n);
    if (!p) return ENOMEM;
    *out = p;
    return 0;
}
