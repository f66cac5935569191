/* A CUDA driver that launches nothing and remembers what it was asked (test_launch.py).
 *
 * Two devices. A context is 0x1000 + device, a function is 0x2000 + the device of the context that
 * was current when it was loaded. A tensor map holds its own description, so that a test reads back
 * from the parameter struct of a launch what was encoded into it. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    CAPTURE_IMPLICIT = 906,
};
enum { PARAMS_BYTES = 2048, NUM_DEVICES = 2, NUM_REMEMBERED = 8 };

typedef struct {
    uint32_t grid[3], block[3];
    uint32_t shared_bytes;
    uint64_t stream;
    uint64_t attributes;
    uint32_t num_attributes;
} LaunchConfig;

typedef struct {
    uint64_t pointer;
    uint32_t data_type, rank, swizzle, promotion, interleave, fill;
    uint32_t dims[5];
    uint32_t box[5];
    uint64_t strides[4];
    uint8_t unused[24];
} EncodedMap;

_Static_assert(sizeof(EncodedMap) == 128, "size of a CUtensorMap");

typedef struct {
    uint64_t context, function, stream;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes, cluster;
    uint8_t params[PARAMS_BYTES];
} Launched;

typedef struct {
    uint64_t launches, loads, pushes, pops, waits;
    uint64_t context, function, stream;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes, cluster, dependent, num_attributes;
    uint64_t attribute_function, attribute_context;
    uint32_t attribute, attribute_value;
    uint64_t relaxed_loads;
    uint64_t capturing_stream, fail_launch_with;
    uint64_t waiting_stream, event_stream;
    uint64_t allocations, allocated_bytes, allocated_in, relaxed_allocations;
    uint64_t cleared_from, cleared_bytes, cleared_with, cleared_on, awaited_stream;
    uint64_t open_streams, fail_clear_with;
    uint8_t params[PARAMS_BYTES];
    uint64_t params_bytes;
    uint64_t words_cleared, cleared_word, word_cleared_on, launches_before_clearing;
    Launched last[NUM_REMEMBERED]; /* launch n at n % NUM_REMEMBERED */
} Log;

static Log record;
static __thread uint64_t stack[8];
static __thread int depth;
static __thread int capture_mode;

static uint64_t current(void) { return depth ? stack[depth - 1] : 0; }

EXPORT Log *stub_log(void) { return &record; }
EXPORT void stub_reset(void) { memset(&record, 0, sizeof record); }
EXPORT uint64_t stub_current_context(void) { return current(); }

EXPORT int cuInit(unsigned flags) { return (int)flags; }
EXPORT int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
EXPORT int cuDeviceGetCount(int *count) { *count = NUM_DEVICES; return SUCCESS; }
EXPORT int cuDeviceGet(int *device, int index) {
    *device = index;
    return index < NUM_DEVICES ? SUCCESS : 101;
}
EXPORT int cuDeviceGetName(char *name, int bytes, int device) {
    (void)device;
    strncpy(name, "Stub H200", (size_t)bytes);
    return SUCCESS;
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
        case 16: *value = 132; break;
        case 38: *value = 50 << 20; break;
        case 75: *value = 9; break;
        case 76: *value = 0; break;
        case 97: *value = 232448; break;
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}
EXPORT int cuDevicePrimaryCtxRetain(uint64_t *context, int device) {
    *context = 0x1000u + (unsigned)device;
    return SUCCESS;
}
EXPORT int cuCtxGetCurrent(uint64_t *context) { *context = current(); return SUCCESS; }
EXPORT int cuCtxPushCurrent_v2(uint64_t context) {
    stack[depth++] = context;
    ++record.pushes;
    return SUCCESS;
}
EXPORT int cuCtxPopCurrent_v2(uint64_t *context) {
    *context = stack[--depth];
    ++record.pops;
    return SUCCESS;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
    int previous = capture_mode;
    capture_mode = *mode;
    *mode = previous;
    return SUCCESS;
}

EXPORT int cuLibraryLoadData(uint64_t *library, const char *code, void *a, void *b, unsigned c,
                             void *d, void *e, unsigned f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    ++record.loads;
    record.relaxed_loads += capture_mode == 2;
    *library = 0x3000;
    return memcmp(code, "BAD", 3) == 0 ? INVALID_IMAGE : SUCCESS;
}
EXPORT int cuLibraryGetKernel(uint64_t *kernel, uint64_t library, const char *name) {
    *kernel = library + 1;
    return name[0] ? SUCCESS : 500;
}
EXPORT int cuKernelGetFunction(uint64_t *function, uint64_t kernel) {
    (void)kernel;
    *function = 0x2000 + (current() & 0xf);
    return SUCCESS;
}
EXPORT int cuFuncLoad(uint64_t function) { (void)function; return SUCCESS; }
EXPORT int cuModuleLoadData(uint64_t *module, const void *code) {
    (void)module, (void)code;
    return INVALID_VALUE; /* the library interface is there: this one is not used */
}
EXPORT int cuModuleGetFunction(uint64_t *function, uint64_t module, const char *name) {
    (void)function, (void)module, (void)name;
    return INVALID_VALUE;
}
EXPORT int cuFuncSetAttribute(uint64_t function, int attribute, int value) {
    record.attribute_function = function;
    record.attribute_context = current();
    record.attribute = (unsigned)attribute;
    record.attribute_value = (unsigned)value;
    return SUCCESS;
}

EXPORT int cuTensorMapEncodeTiled(EncodedMap *map, int data_type, uint32_t rank, uint64_t address,
                                  const uint64_t *dims, const uint64_t *strides, const uint32_t *box,
                                  const uint32_t *element_strides, int interleave, int swizzle,
                                  int promotion, int fill) {
    if ((uintptr_t)map % 64 || address % 16 || rank < 1 || rank > 5) return INVALID_VALUE;
    memset(map, 0, sizeof *map);
    map->pointer = address;
    map->data_type = (unsigned)data_type;
    map->rank = rank;
    map->swizzle = (unsigned)swizzle;
    map->promotion = (unsigned)promotion;
    map->interleave = (unsigned)interleave;
    map->fill = (unsigned)fill;
    for (uint32_t axis = 0; axis < rank; ++axis) {
        if (element_strides[axis] != 1 || box[axis] < 1 || box[axis] > 256) return INVALID_VALUE;
        map->dims[axis] = (uint32_t)dims[axis];
        map->box[axis] = box[axis];
        if (axis == 0) continue;
        if (strides[axis - 1] % 16 || strides[axis - 1] == 0) return INVALID_VALUE;
        map->strides[axis - 1] = strides[axis - 1];
    }
    return SUCCESS;
}

EXPORT int cuLaunchKernel(void) { return INVALID_VALUE; /* cuLaunchKernelEx is there */ }
EXPORT int cuLaunchKernelEx(const LaunchConfig *config, uint64_t function, void **params,
                            void **extra) {
    if (extra || (uintptr_t)params[0] % 64) return INVALID_VALUE;
    Launched *launched = &record.last[record.launches++ % NUM_REMEMBERED];
    record.context = current();
    record.function = function;
    record.stream = config->stream;
    memcpy(record.grid, config->grid, sizeof record.grid);
    memcpy(record.block, config->block, sizeof record.block);
    record.shared_bytes = config->shared_bytes;
    record.num_attributes = config->num_attributes;
    record.cluster = record.dependent = 0;
    for (uint32_t index = 0; index < config->num_attributes; ++index) {
        const char *attribute = (const char *)config->attributes + 72 * index;
        int id;
        uint32_t value;
        memcpy(&id, attribute, sizeof id);
        memcpy(&value, attribute + 8, sizeof value);
        if (id == 4) record.cluster = value;
        if (id == 6) record.dependent = value;
    }
    memcpy(record.params, params[0], record.params_bytes);
    launched->context = record.context;
    launched->function = function;
    launched->stream = record.stream;
    memcpy(launched->grid, record.grid, sizeof record.grid);
    memcpy(launched->block, record.block, sizeof record.block);
    launched->shared_bytes = record.shared_bytes;
    launched->cluster = record.cluster;
    memcpy(launched->params, params[0], record.params_bytes);
    return (int)record.fail_launch_with;
}

/* Memory that nobody touches: each allocation of a device lies 1 GiB behind the one before. */
EXPORT int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    if (!current()) return INVALID_CONTEXT;
    *address = 0x500000000000u + ((current() & 0xf) << 40) + (++record.allocations << 30);
    record.allocated_bytes = bytes;
    record.allocated_in = current();
    record.relaxed_allocations += capture_mode == 2;
    return SUCCESS;
}
EXPORT int cuStreamCreate(uint64_t *stream, unsigned flags) {
    *stream = 0x6000;
    ++record.open_streams;
    return flags == 1 ? SUCCESS : INVALID_VALUE; /* a blocking one would wait for stream 0 */
}
EXPORT int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, uint64_t stream) {
    if (stream != 0x6000 || !record.open_streams) return INVALID_VALUE;
    record.cleared_from = address;
    record.cleared_bytes = bytes;
    record.cleared_with = value;
    record.cleared_on = stream;
    return (int)record.fail_clear_with;
}
EXPORT int cuMemsetD32Async(uint64_t address, unsigned value, size_t words, uint64_t stream) {
    if (!current()) return INVALID_CONTEXT;
    if (value != 0 || words != 1 || address % 4) return INVALID_VALUE;
    ++record.words_cleared;
    record.cleared_word = address;
    record.word_cleared_on = stream;
    record.launches_before_clearing = record.launches;
    return SUCCESS;
}
EXPORT int cuStreamSynchronize(uint64_t stream) {
    record.awaited_stream = stream;
    return SUCCESS;
}
EXPORT int cuStreamDestroy_v2(uint64_t stream) {
    --record.open_streams;
    return stream == 0x6000 ? SUCCESS : INVALID_VALUE;
}

EXPORT int cuStreamIsCapturing(uint64_t stream, int *status) {
    if (record.capturing_stream && stream == 0) return CAPTURE_IMPLICIT;
    *status = record.capturing_stream != 0 && stream == record.capturing_stream;
    return SUCCESS;
}
EXPORT int cuEventCreate(uint64_t *event, unsigned flags) {
    *event = 0x4000;
    return flags == 2 ? SUCCESS : INVALID_VALUE;
}
EXPORT int cuEventRecord(uint64_t event, uint64_t stream) {
    (void)event;
    record.event_stream = stream;
    return SUCCESS;
}
EXPORT int cuEventQuery(uint64_t event) { (void)event; return SUCCESS; }
EXPORT int cuEventDestroy_v2(uint64_t event) { (void)event; return SUCCESS; }
EXPORT int cuStreamWaitEvent(uint64_t stream, uint64_t event, unsigned flags) {
    (void)event, (void)flags;
    record.waiting_stream = stream;
    ++record.waits;
    return SUCCESS;
}
EXPORT int cuPointerGetAttribute(int *value, int attribute, uint64_t pointer) {
    *value = (int)(pointer >> 40 & 1);
    return attribute == 9 ? SUCCESS : INVALID_VALUE;
}
EXPORT int cuGetErrorName(int result, const char **text) {
    *text = result == INVALID_IMAGE ? "CUDA_ERROR_INVALID_IMAGE" : "CUDA_ERROR_STUB";
    return SUCCESS;
}
EXPORT int cuGetErrorString(int result, const char **text) {
    (void)result;
    *text = "as the test asked";
    return SUCCESS;
}
