/* A CUDA driver without a GPU, for tests: it counts launches and, where asked to, writes down what it was told.
 *
 * A function's handle is the address of a Function, which the test owns.
 */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t count, sizes[256];
} Function;

typedef struct {
    int id;
    char padding[4];
    unsigned char value[64];
} Attribute;

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned attribute_count;
} Config;

/* What one launch was told, and where. */
typedef struct {
    uint64_t function, stream, context;
    uint32_t grid[3], block[3], shared, attribute_count;
    Attribute attributes[4];
    uint64_t bytes; /* of parameters, one after the other */
    unsigned char parameters[2048];
} Record;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Record records[64];
static int64_t launched, recorded, recording, failing_status, failing_after = -1;
static char home; /* its address is the context of every thread until another is set */
static __thread void *current = &home, *pushed[8];
static __thread int depth;

int64_t standin_launched(void) { return launched; }
int64_t standin_recorded(void) { return recorded; }
const Record *standin_record(int64_t index) { return &records[index]; }
void standin_begin(int64_t record) { launched = recorded = 0, recording = record, failing_after = -1; }
void standin_fail(int64_t status, int64_t after) { failing_status = status, failing_after = after; }
void standin_set_context(void *context) { current = context; }
void *standin_context(void) { return current; }

static void record(const Config *config, const Function *function, void **parameters)
{
    Record *into = &records[recorded++ % 64];
    memset(into, 0, sizeof *into);
    into->function = (uint64_t)(uintptr_t)function;
    into->stream = (uint64_t)(uintptr_t)config->stream;
    into->context = (uint64_t)(uintptr_t)current;
    memcpy(into->grid, config->grid, sizeof into->grid);
    memcpy(into->block, config->block, sizeof into->block);
    into->shared = config->shared;
    into->attribute_count = config->attribute_count;
    memcpy(into->attributes, config->attributes, config->attribute_count * sizeof(Attribute));
    for (int64_t i = 0; i < function->count; i++) {
        memcpy(into->parameters + into->bytes, parameters[i], (size_t)function->sizes[i]);
        into->bytes += (uint64_t)function->sizes[i];
    }
}

int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra)
{
    (void)extra;
    if (!recording && failing_after < 0) {
        launched++;
        return 0;
    }
    pthread_mutex_lock(&lock);
    const int failed = failing_after >= 0 && launched >= failing_after;
    if (!failed) {
        launched++;
        record(config, function, parameters);
    }
    pthread_mutex_unlock(&lock);
    return failed ? (int)failing_status : 0;
}

int cuGetErrorName(int status, const char **name)
{
    *name = status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
    return *name ? 0 : 1;
}

int cuGetErrorString(int status, const char **text) { return cuGetErrorName(status, text); }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }

int cuCtxPushCurrent_v2(void *context)
{
    pushed[depth++] = current;
    current = context;
    return 0;
}

int cuCtxPopCurrent_v2(void **context)
{
    *context = current;
    current = pushed[--depth];
    return 0;
}

int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size)
{
    const Function *of = function;
    if ((int64_t)index >= of->count)
        return 1;
    *offset = 0;
    *size = (size_t)of->sizes[index];
    return 0;
}

/* What Triton's launchers need beside these. */
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = &home; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { (void)function, (void)attribute, (void)value; return 0; }
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer)
{
    (void)attribute;
    memcpy(data, &pointer, sizeof pointer);
    return 0;
}
