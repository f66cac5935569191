/* libcupyflash: loads compiled kernels and launches them.
 *
 * Plain C11 with no Python ABI, linked to nothing: the entry points of the CUDA driver are passed in
 * by cf_initialize, so one binary serves every Python and every driver. The few driver types used
 * are declared here by value, as the driver's ABI fixes them.
 *
 * A kernel takes one parameter struct by value, tensor maps first. What never changes between calls
 * of one configuration is a CfLaunch, prepared once by Python and read-only from then on; what does
 * change (stream and array addresses) is a CfArguments, one a call. cf_launch copies the parameter
 * struct to its stack, fills in addresses, encodes the tensor maps and launches; cf_run does so for
 * every launch of a CfPlan, all of them with the same arguments. No state but the driver table and
 * the list of recipes is kept, so any number of threads may launch at once, from one CfLaunch too.
 * (What a CfCounters counts belongs to Python.)
 *
 * Every function returns a CUresult (0 is success) or one of the CF_ERROR codes below; but
 * cf_xla_run, a handler of XLA's foreign function interface, returns an error object of XLA's. It
 * runs a plan without Python: a CfRecipe says which buffers of the call hold what.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define CF_EXPORT __attribute__((visibility("default")))

enum {
    CF_VERSION = 3,
    CF_MAX_POINTERS = 32,
    CF_MAX_MAPS = 12,
    CF_MAX_RANK = 5,
    CF_MAX_LAUNCHES = 4,
    CF_MAX_BUFFERS = 24,
    CF_MAX_PARAMS_BYTES = 4096,    /* what every driver accepts as kernel parameters */
    CF_TENSOR_MAP_BYTES = 128,

    CF_ERROR_STRUCT = -1,          /* struct_bytes or a count does not fit this library */
    CF_ERROR_NOT_INITIALIZED = -2, /* cf_initialize was not called */
    CF_ERROR_NO_ENTRY_POINT = -3,  /* the driver is too old for this kernel */
};

static const uint32_t CF_NO_POINTER = UINT32_MAX;

/* ---- the part of the driver's ABI that we use (cuda.h) ---------------------------------------- */

typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext;
typedef void *CUstream;
typedef void *CUfunction;
typedef void *CUkernel;
typedef void *CUlibrary;
typedef void *CUmodule;

enum {
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
    CU_TENSOR_MAP_INTERLEAVE_NONE = 0,
    CU_TENSOR_MAP_L2_PROMOTION_256B = 3,
    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0, /* elements outside the tensor read as zero */
};

typedef struct {
    int id;
    char pad[4];
    union {
        char pad[64];
        uint32_t cluster[3];
        int enabled;
    } value;
} CUlaunchAttribute;

typedef struct {
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
    CUstream stream;
    CUlaunchAttribute *attributes;
    uint32_t num_attributes;
} CUlaunchConfig;

_Static_assert(sizeof(CUlaunchAttribute) == 72, "CUlaunchAttribute of cuda.h");
_Static_assert(sizeof(CUlaunchConfig) == 56, "CUlaunchConfig of cuda.h");

/* Entry points, in the order of DRIVER_TABLE in driver.py. Those marked optional may be null. */
typedef struct {
    CUresult (*ctx_get_current)(CUcontext *);
    CUresult (*ctx_push_current)(CUcontext);
    CUresult (*ctx_pop_current)(CUcontext *);
    CUresult (*thread_exchange_stream_capture_mode)(int *);
    CUresult (*stream_is_capturing)(CUstream, int *);
    CUresult (*module_load_data)(CUmodule *, const void *);
    CUresult (*module_get_function)(CUfunction *, CUmodule, const char *);
    CUresult (*func_set_attribute)(CUfunction, int, int);
    CUresult (*launch_kernel)(CUfunction, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t,
                              uint32_t, CUstream, void **, void **);
    CUresult (*library_load_data)(CUlibrary *, const void *, void *, void *, uint32_t, void *, void *,
                                  uint32_t);                                   /* optional: 12.0 */
    CUresult (*library_get_kernel)(CUkernel *, CUlibrary, const char *);       /* optional: 12.0 */
    CUresult (*kernel_get_function)(CUfunction *, CUkernel);                   /* optional: 12.0 */
    CUresult (*func_load)(CUfunction);                                         /* optional: 12.4 */
    CUresult (*launch_kernel_ex)(const CUlaunchConfig *, CUfunction, void **, void **);
                                                                               /* optional: 11.8 */
    CUresult (*tensor_map_encode_tiled)(void *, int, uint32_t, void *, const uint64_t *,
                                        const uint64_t *, const uint32_t *, const uint32_t *, int, int,
                                        int, int);                             /* optional: 12.0 */
    CUresult (*memset_d32_async)(uint64_t, uint32_t, size_t, CUstream);
    CUresult (*get_error_name)(CUresult, const char **);
} CfDriver;

static CfDriver driver;
static int driver_is_set;

/* ---- structs shared with driver.py (field order and padding are checked there) ----------------- */

/* One tensor map: which address it starts from and what it covers. */
typedef struct {
    uint32_t params_offset;           /* of the 128-byte map in the parameter struct */
    uint32_t pointer_idx;             /* its base address is CfArguments.pointers[pointer_idx] */
    uint32_t data_type;               /* CUtensorMapDataType */
    uint32_t swizzle;                 /* CUtensorMapSwizzle */
    uint32_t rank;
    uint32_t box[CF_MAX_RANK];        /* elements */
    uint64_t dims[CF_MAX_RANK];       /* elements, fastest first */
    uint64_t strides[CF_MAX_RANK - 1]; /* bytes, of dims[1] and on */
    int64_t shift_bytes;              /* from that address to the map's base */
} CfTensorMap;

/* Zeroed words of device memory, one for every launch that a graph captures: launches of one stream
 * can share a tile counter, those of a graph run on whatever stream it is launched on. */
typedef struct {
    uint64_t next;                    /* address of the first that is free; advanced atomically */
    uint64_t end;
    uint64_t step;                    /* bytes from one to the next */
} CfCounters;

/* All of a launch that does not change between calls. */
typedef struct {
    uint32_t struct_bytes;            /* sizeof(CfLaunch): guards against another layout */
    uint32_t flags;                   /* bit 0: programmatic dependent launch */
    CUcontext context;                /* made current for the call, the previous one restored */
    CUfunction function;
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t cluster;                 /* blocks along x; 0 or 1: none, or fixed at compile time */
    uint32_t shared_bytes;
    const void *params;               /* the parameter struct; addresses and maps not yet filled in */
    uint32_t params_bytes;
    uint32_t num_pointers;
    uint32_t num_maps;
    uint32_t pointer_offsets[CF_MAX_POINTERS]; /* in params; CF_NO_POINTER: only a map uses it */
    uint32_t counter_idx;             /* pointer that is a tile counter, or CF_NO_POINTER */
    CfCounters *counters;             /* where a captured launch takes another from; may be null */
    CfTensorMap maps[CF_MAX_MAPS];
} CfLaunch;

/* Launches of one parameter struct, one behind the other, that share their arguments. */
typedef struct {
    uint32_t struct_bytes;            /* sizeof(CfPlan) */
    uint32_t num_launches;
    CUcontext context;                /* of all launches */
    const CfLaunch *launches[CF_MAX_LAUNCHES];
} CfPlan;

/* The rest: one a call. A null pointer stays null in the parameter struct. */
typedef struct {
    CUstream stream;
    uint64_t pointers[CF_MAX_POINTERS];
} CfArguments;

/* Where the arguments of a plan come from in a call by XLA: pointer i is offsets[i] bytes behind
 * the address of buffer buffers[i], operands first, then results; CF_NO_POINTER: null. */
typedef struct {
    const CfPlan *plan;
    uint32_t num_pointers;
    uint32_t cleared_idx;             /* pointer to a word that is set to 0 first; CF_NO_POINTER */
    uint32_t buffers[CF_MAX_POINTERS];
    uint64_t offsets[CF_MAX_POINTERS];
} CfBinding;

/* What a call site of a compiled program does, named by what it holds: the program knows the key
 * only, which is the same in every process, so that a program from a cache on disk finds its recipe
 * or an error, never another's. */
typedef struct CfRecipe {
    uint32_t struct_bytes;            /* sizeof(CfRecipe) */
    uint32_t num_bindings;
    int64_t key;
    struct CfRecipe *next;            /* written by cf_register, as nothing else ever is */
    const CfBinding *bindings;        /* one for each GPU */
    uint32_t num_operands;
    uint32_t num_results;
    int64_t elements[CF_MAX_BUFFERS]; /* of each buffer */
} CfRecipe;

CF_EXPORT int cf_version(void) { return CF_VERSION; }

CF_EXPORT uint32_t cf_launch_bytes(void) { return (uint32_t)sizeof(CfLaunch); }

CF_EXPORT uint32_t cf_tensor_map_bytes(void) { return (uint32_t)sizeof(CfTensorMap); }

CF_EXPORT uint32_t cf_plan_bytes(void) { return (uint32_t)sizeof(CfPlan); }

CF_EXPORT uint32_t cf_binding_bytes(void) { return (uint32_t)sizeof(CfBinding); }

CF_EXPORT uint32_t cf_recipe_bytes(void) { return (uint32_t)sizeof(CfRecipe); }

CF_EXPORT uint32_t cf_arguments_bytes(void) { return (uint32_t)sizeof(CfArguments); }

CF_EXPORT int cf_initialize(const CfDriver *table, uint32_t table_bytes) {
    if (table_bytes != sizeof(CfDriver)) return CF_ERROR_STRUCT;
    driver = *table;
    driver_is_set = 1;
    return 0;
}

/* Makes `context` current on this thread; *pushed says whether leave() has something to undo. */
static CUresult enter(CUcontext context, int *pushed) {
    CUcontext current = NULL;
    *pushed = 0;
    CUresult result = driver.ctx_get_current(&current);
    if (result != 0 || current == context) return result;
    result = driver.ctx_push_current(context);
    *pushed = result == 0;
    return result;
}

static void leave(int pushed) {
    CUcontext popped;
    if (pushed) driver.ctx_pop_current(&popped);
}

static CUresult load_function(const void *cubin, const char *name, CUfunction *function) {
    CUresult result;
    if (driver.library_load_data && driver.library_get_kernel && driver.kernel_get_function) {
        CUlibrary library;
        CUkernel kernel;
        result = driver.library_load_data(&library, cubin, NULL, NULL, 0, NULL, NULL, 0);
        if (result == 0) result = driver.library_get_kernel(&kernel, library, name);
        if (result == 0) result = driver.kernel_get_function(function, kernel);
    } else {
        CUmodule module;
        result = driver.module_load_data(&module, cubin);
        if (result == 0) result = driver.module_get_function(function, module, name);
    }
    return result;
}

/* Loads `cubin` into `context` and returns the handle of its kernel `name`, ready to launch with
 * `shared_bytes` of dynamic shared memory. What is loaded stays loaded until the process ends.
 *
 * Another thread may be capturing a graph in global mode, which a module load would invalidate; the
 * relaxed mode for this thread prevents that. func_load defeats lazy loading, which would otherwise
 * load the code at the first launch, perhaps in a capture. */
CF_EXPORT int cf_load(CUcontext context, const void *cubin, const char *name, uint32_t shared_bytes,
                      CUfunction *function) {
    if (!driver_is_set) return CF_ERROR_NOT_INITIALIZED;
    int pushed;
    CUresult result = enter(context, &pushed);
    if (result != 0) return result;
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver.thread_exchange_stream_capture_mode(&mode);
    result = load_function(cubin, name, function);
    if (result == 0 && driver.func_load) result = driver.func_load(*function);
    if (result == 0) {
        result = driver.func_set_attribute(*function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                           (int)shared_bytes);
    }
    driver.thread_exchange_stream_capture_mode(&mode);
    leave(pushed);
    return result;
}

static CUresult encode_map(const CfTensorMap *map, uint64_t pointer, void *target) {
    static const uint32_t element_strides[CF_MAX_RANK] = {1, 1, 1, 1, 1};
    if (!driver.tensor_map_encode_tiled) return CF_ERROR_NO_ENTRY_POINT;
    return driver.tensor_map_encode_tiled(
        target, (int)map->data_type, map->rank, (void *)(uintptr_t)pointer, map->dims, map->strides,
        map->box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, (int)map->swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/* Writes the finished parameter struct to `params`. The launch's context must be current: a thread
 * without one cannot encode a tensor map. */
static int encode(const CfLaunch *launch, const CfArguments *arguments, void *params) {
    if (launch->struct_bytes != sizeof(CfLaunch) || launch->params_bytes > CF_MAX_PARAMS_BYTES ||
        launch->num_maps > CF_MAX_MAPS || launch->num_pointers > CF_MAX_POINTERS) {
        return CF_ERROR_STRUCT;
    }
    memcpy(params, launch->params, launch->params_bytes);
    for (uint32_t idx = 0; idx < launch->num_pointers; ++idx) {
        uint32_t offset = launch->pointer_offsets[idx];
        if (offset == CF_NO_POINTER) continue;
        if (offset + sizeof(uint64_t) > launch->params_bytes) return CF_ERROR_STRUCT;
        memcpy((char *)params + offset, &arguments->pointers[idx], sizeof(uint64_t));
    }
    for (uint32_t idx = 0; idx < launch->num_maps; ++idx) {
        const CfTensorMap *map = &launch->maps[idx];
        if ((size_t)map->params_offset + CF_TENSOR_MAP_BYTES > launch->params_bytes ||
            map->pointer_idx >= launch->num_pointers || map->rank > CF_MAX_RANK) {
            return CF_ERROR_STRUCT;
        }
        uint64_t base = arguments->pointers[map->pointer_idx] + (uint64_t)map->shift_bytes;
        CUresult result = encode_map(map, base, (char *)params + map->params_offset);
        if (result != 0) return result;
    }
    return 0;
}

static CUresult launch_encoded(const CfLaunch *launch, CUstream stream, void *params) {
    void *arguments[1] = {params};
    CUlaunchAttribute attributes[2] = {{0}, {0}};
    CUlaunchConfig config = {
        .grid = {launch->grid[0], launch->grid[1], launch->grid[2]},
        .block = {launch->block[0], launch->block[1], launch->block[2]},
        .shared_bytes = launch->shared_bytes,
        .stream = stream,
        .attributes = attributes,
    };
    if (launch->cluster > 1) {
        CUlaunchAttribute *attribute = &attributes[config.num_attributes++];
        attribute->id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attribute->value.cluster[0] = launch->cluster;
        attribute->value.cluster[1] = 1;
        attribute->value.cluster[2] = 1;
    }
    if (launch->flags & 1u) {
        CUlaunchAttribute *attribute = &attributes[config.num_attributes++];
        attribute->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute->value.enabled = 1;
    }
    if (driver.launch_kernel_ex) {
        return driver.launch_kernel_ex(&config, launch->function, arguments, NULL);
    }
    if (config.num_attributes != 0) return CF_ERROR_NO_ENTRY_POINT;
    return driver.launch_kernel(launch->function, config.grid[0], config.grid[1], config.grid[2],
                                config.block[0], config.block[1], config.block[2],
                                config.shared_bytes, stream, arguments, NULL);
}

/* The arguments, with a counter of its own in place of the stream's if a graph is being captured.
 * Without a free one it is null: the kernel then deals its tiles out by position. (An error of the
 * question means no: the default stream, while another stream is captured.) */
static CfArguments with_counter(const CfLaunch *launch, const CfArguments *arguments) {
    CfArguments own = *arguments;
    int status = 0;
    if (launch->counter_idx >= CF_MAX_POINTERS || own.pointers[launch->counter_idx] == 0) return own;
    if (driver.stream_is_capturing(own.stream, &status) != 0 ||
        status != CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        return own;
    }
    CfCounters *counters = launch->counters;
    uint64_t address = 0;
    if (counters != NULL) {
        address = __atomic_load_n(&counters->next, __ATOMIC_RELAXED);
        while (address < counters->end &&
               !__atomic_compare_exchange_n(&counters->next, &address, address + counters->step, 1,
                                            __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
        if (address >= counters->end) address = 0;
    }
    own.pointers[launch->counter_idx] = address;
    return own;
}

/* Writes the finished parameter struct to `params`, which must be 64-byte aligned (a tensor map is
 * encoded in place). */
CF_EXPORT int cf_encode(const CfLaunch *launch, const CfArguments *arguments, void *params) {
    if (!driver_is_set) return CF_ERROR_NOT_INITIALIZED;
    int pushed;
    int result = enter(launch->context, &pushed);
    if (result != 0) return result;
    result = encode(launch, arguments, params);
    leave(pushed);
    return result;
}

static int launch_here(const CfLaunch *launch, const CfArguments *arguments) {
    _Alignas(64) char params[CF_MAX_PARAMS_BYTES];
    CfArguments own = with_counter(launch, arguments);
    int result = encode(launch, &own, params);
    return result != 0 ? result : launch_encoded(launch, own.stream, params);
}

/* Launches on arguments->stream of the launch's context. The thread's current context is the same
 * afterwards, whatever the outcome. Does not synchronise and allocates nothing. */
CF_EXPORT int cf_launch(const CfLaunch *launch, const CfArguments *arguments) {
    if (!driver_is_set) return CF_ERROR_NOT_INITIALIZED;
    int pushed;
    int result = enter(launch->context, &pushed);
    if (result != 0) return result;
    result = launch_here(launch, arguments);
    leave(pushed);
    return result;
}

/* The same for all launches of a plan, in order; none behind the first that fails. */
CF_EXPORT int cf_run(const CfPlan *plan, const CfArguments *arguments) {
    if (!driver_is_set) return CF_ERROR_NOT_INITIALIZED;
    if (plan->struct_bytes != sizeof(CfPlan) || plan->num_launches > CF_MAX_LAUNCHES) {
        return CF_ERROR_STRUCT;
    }
    int pushed;
    int result = enter(plan->context, &pushed);
    for (uint32_t idx = 0; result == 0 && idx < plan->num_launches; ++idx) {
        result = launch_here(plan->launches[idx], arguments);
    }
    leave(pushed);
    return result;
}

/* ---- the part of XLA's foreign function interface that we use (C ABI, version 0.1 and on) ---- */

/* Every struct begins with its size, up to the end of its last member, without padding. */
#define XLA_BYTES(type, last) (offsetof(type, last) + sizeof(((type *)0)->last))

enum {
    XLA_MAJOR = 0,
    XLA_OLDEST_MINOR = 1,
    XLA_NEWEST_MINOR = 3, /* that these declarations were compared with */
    XLA_EXTENSION_METADATA = 1,
    XLA_STAGE_EXECUTE = 3,
    XLA_TYPE_BUFFER = 1,
    XLA_ATTRIBUTE_SCALAR = 3,
    XLA_ELEMENT_S64 = 5,
    XLA_TRAIT_COMMAND_BUFFER = 1, /* only enqueues, always the same: may be captured and replayed */

    XLA_INVALID_ARGUMENT = 3,
    XLA_NOT_FOUND = 5,
    XLA_FAILED_PRECONDITION = 9,
    XLA_INTERNAL = 13,
};

typedef struct XlaError XlaError;

typedef struct XlaExtension {
    size_t struct_bytes;
    int type;
    struct XlaExtension *next;
} XlaExtension;

typedef struct {
    size_t struct_bytes;
    XlaExtension *extensions;
    int major, minor;
} XlaVersion;

typedef struct {
    size_t struct_bytes;
    XlaVersion version;
    uint32_t traits;
} XlaMetadata;

typedef struct {
    XlaExtension extension;
    XlaMetadata *metadata;
} XlaMetadataExtension;

typedef struct {
    size_t struct_bytes;
    XlaExtension *extensions;
    const char *message;
    int code;
} XlaErrorArguments;

typedef struct {
    size_t struct_bytes;
    XlaExtension *extensions;
    void *context;
    void *stream; /* out */
} XlaStreamArguments;

typedef struct {
    size_t struct_bytes;
    XlaExtension *extensions;
    XlaVersion version;
    const void *internal;
    XlaError *(*create_error)(XlaErrorArguments *);
    void *get_error_message, *destroy_error, *register_handler;
    XlaError *(*get_stream)(XlaStreamArguments *);
} XlaApi;

typedef struct {
    size_t struct_bytes;
    XlaExtension *extensions;
    int element_type;
    void *data;
    int64_t rank;
    int64_t *dims;
} XlaBuffer;

typedef struct {
    const char *text;
    size_t length;
} XlaSpan;

typedef struct {
    int element_type;
    void *value;
} XlaScalar;

/* Operands or results. */
typedef struct {
    size_t struct_bytes;
    XlaExtension *extensions;
    int64_t size;
    int *types;
    void **items;
} XlaItems;

typedef struct {
    size_t struct_bytes;
    XlaExtension *extensions;
    int64_t size;
    int *types;
    XlaSpan **names;
    void **items;
} XlaAttributes;

typedef struct {
    size_t struct_bytes;
    XlaExtension *extensions;
    const XlaApi *api;
    void *context;
    int stage;
    XlaItems operands, results;
    XlaAttributes attributes;
} XlaFrame;

__attribute__((format(printf, 3, 4))) static XlaError *fail(const XlaFrame *frame, int code,
                                                            const char *format, ...) {
    char text[256];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    XlaErrorArguments arguments = {
        .struct_bytes = XLA_BYTES(XlaErrorArguments, code), .message = text, .code = code};
    return frame->api->create_error(&arguments);
}

static XlaError *fail_with(const XlaFrame *frame, const char *doing, int result) {
    const char *name = NULL;
    if (result > 0) driver.get_error_name(result, &name);
    return fail(frame, XLA_INTERNAL, "cupyflash: %s: %s (%d)", doing,
                name ? name : "error of libcupyflash", result);
}

/* The newest version that both know: a runtime refuses what is newer than itself, and one day what
 * is too old. */
static XlaError *tell_version(const XlaFrame *frame, XlaMetadata *metadata) {
    if (metadata->struct_bytes < XLA_BYTES(XlaMetadata, traits)) {
        return fail(frame, XLA_INVALID_ARGUMENT, "cupyflash: metadata of %zu bytes",
                    metadata->struct_bytes);
    }
    int minor = frame->api ? frame->api->version.minor : XLA_OLDEST_MINOR;
    if (minor > XLA_NEWEST_MINOR) minor = XLA_NEWEST_MINOR;
    if (minor < XLA_OLDEST_MINOR) minor = XLA_OLDEST_MINOR;
    metadata->version = (XlaVersion){
        .struct_bytes = XLA_BYTES(XlaVersion, minor), .major = XLA_MAJOR, .minor = minor};
    metadata->traits = XLA_TRAIT_COMMAND_BUFFER;
    return NULL;
}

enum { NUM_BUCKETS = 256 };

static CfRecipe *buckets[NUM_BUCKETS]; /* lists that only ever grow, at their heads */

/* Makes a recipe known for the rest of the process; it must stay where it is. */
CF_EXPORT int cf_register(CfRecipe *recipe) {
    if (recipe->struct_bytes != sizeof(CfRecipe)) return CF_ERROR_STRUCT;
    if (recipe->num_operands + recipe->num_results > CF_MAX_BUFFERS) return CF_ERROR_STRUCT;
    for (uint32_t idx = 0; idx < recipe->num_bindings; ++idx) {
        const CfBinding *binding = &recipe->bindings[idx];
        if (binding->num_pointers > CF_MAX_POINTERS) return CF_ERROR_STRUCT;
        for (uint32_t pointer = 0; pointer < binding->num_pointers; ++pointer) {
            uint32_t buffer = binding->buffers[pointer];
            if (buffer != CF_NO_POINTER && buffer >= recipe->num_operands + recipe->num_results) {
                return CF_ERROR_STRUCT;
            }
        }
    }
    CfRecipe **bucket = &buckets[(uint64_t)recipe->key % NUM_BUCKETS];
    recipe->next = __atomic_load_n(bucket, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(bucket, &recipe->next, recipe, 1, __ATOMIC_RELEASE,
                                        __ATOMIC_RELAXED)) {
    }
    return 0;
}

static XlaError *find_recipe(const XlaFrame *frame, const CfRecipe **found) {
    const XlaAttributes *attributes = &frame->attributes;
    static const char name[] = "recipe";
    const XlaScalar *scalar = NULL;
    if (attributes->size == 1 && attributes->types[0] == XLA_ATTRIBUTE_SCALAR &&
        attributes->names[0]->length == sizeof name - 1 &&
        memcmp(attributes->names[0]->text, name, sizeof name - 1) == 0) {
        scalar = attributes->items[0];
    }
    if (scalar == NULL || scalar->element_type != XLA_ELEMENT_S64) {
        return fail(frame, XLA_INVALID_ARGUMENT,
                    "cupyflash: expected one attribute, recipe, int64");
    }
    int64_t key;
    memcpy(&key, scalar->value, sizeof key);
    CfRecipe **bucket = &buckets[(uint64_t)key % NUM_BUCKETS];
    const CfRecipe *recipe = __atomic_load_n(bucket, __ATOMIC_ACQUIRE);
    while (recipe != NULL && recipe->key != key) recipe = recipe->next;
    *found = recipe;
    if (recipe != NULL) return NULL;
    return fail(frame, XLA_NOT_FOUND,
                "cupyflash: this program was lowered in another process, or for other GPUs; trace "
                "and compile it in this one");
}

/* Addresses of all buffers, operands first, each checked against the recipe. */
static XlaError *read_buffers(const XlaFrame *frame, const CfRecipe *recipe, uint64_t *addresses) {
    const XlaItems *items[2] = {&frame->operands, &frame->results};
    const uint32_t counts[2] = {recipe->num_operands, recipe->num_results};
    uint32_t buffer_idx = 0;
    for (int side = 0; side < 2; ++side) {
        const char *what = side == 0 ? "operand" : "result";
        if (items[side]->size != counts[side]) {
            return fail(frame, XLA_INVALID_ARGUMENT, "cupyflash: expected %u %ss, got %lld",
                        counts[side], what, (long long)items[side]->size);
        }
        for (uint32_t idx = 0; idx < counts[side]; ++idx, ++buffer_idx) {
            if (items[side]->types[idx] != XLA_TYPE_BUFFER) {
                return fail(frame, XLA_INVALID_ARGUMENT, "cupyflash: %s %u is no buffer", what,
                            idx);
            }
            const XlaBuffer *buffer = items[side]->items[idx];
            int64_t elements = 1;
            for (int64_t axis = 0; axis < buffer->rank; ++axis) elements *= buffer->dims[axis];
            uint64_t address = (uint64_t)(uintptr_t)buffer->data;
            if (elements != recipe->elements[buffer_idx] || address % 16 != 0) {
                return fail(frame, XLA_INVALID_ARGUMENT,
                            "cupyflash: %s %u: expected %lld elements at a multiple of 16 bytes, "
                            "got %lld at 0x%llx",
                            what, idx, (long long)recipe->elements[buffer_idx],
                            (long long)elements, (unsigned long long)address);
            }
            addresses[buffer_idx] = address;
        }
    }
    return NULL;
}

/* The handler of every call site: enqueues the plan of its recipe on XLA's stream. */
CF_EXPORT XlaError *cf_xla_run(XlaFrame *frame) {
    for (XlaExtension *one = frame->extensions; one != NULL; one = one->next) {
        if (one->type == XLA_EXTENSION_METADATA) {
            return tell_version(frame, ((XlaMetadataExtension *)one)->metadata);
        }
    }
    if (frame->struct_bytes < XLA_BYTES(XlaFrame, attributes) ||
        frame->stage != XLA_STAGE_EXECUTE) {
        return fail(frame, XLA_INVALID_ARGUMENT, "cupyflash: a call of another kind, stage %d",
                    frame->stage);
    }
    const CfRecipe *recipe = NULL;
    XlaError *error = find_recipe(frame, &recipe);
    if (error != NULL) return error;
    uint64_t addresses[CF_MAX_BUFFERS];
    error = read_buffers(frame, recipe, addresses);
    if (error != NULL) return error;

    CUcontext context = NULL;
    int result = driver.ctx_get_current(&context);
    if (result != 0) return fail_with(frame, "cuCtxGetCurrent", result);
    const CfBinding *binding = NULL;
    for (uint32_t idx = 0; idx < recipe->num_bindings; ++idx) {
        if (recipe->bindings[idx].plan->context == context) binding = &recipe->bindings[idx];
    }
    if (binding == NULL) {
        return fail(frame, XLA_FAILED_PRECONDITION,
                    "cupyflash: the program runs on a GPU that was not there when it was lowered");
    }
    XlaStreamArguments stream = {
        .struct_bytes = XLA_BYTES(XlaStreamArguments, stream), .context = frame->context};
    error = frame->api->get_stream(&stream);
    if (error != NULL) return error;

    CfArguments arguments = {.stream = stream.stream};
    for (uint32_t idx = 0; idx < binding->num_pointers; ++idx) {
        uint32_t buffer = binding->buffers[idx];
        if (buffer != CF_NO_POINTER) {
            arguments.pointers[idx] = addresses[buffer] + binding->offsets[idx];
        }
    }
    if (binding->cleared_idx != CF_NO_POINTER) {
        uint64_t word = arguments.pointers[binding->cleared_idx];
        result = driver.memset_d32_async(word, 0, 1, arguments.stream);
        if (result != 0) return fail_with(frame, "clearing a tile counter", result);
    }
    result = cf_run(binding->plan, &arguments);
    return result == 0 ? NULL : fail_with(frame, "kernel launch", result);
}
