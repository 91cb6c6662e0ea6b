// The C interface between ggml and a backend plugin, as this plugin needs it.
//
// The names, the order and the types of the fields are ggml's: they are the interface. The comments
// are this project's. What is the same in every supported version is here. The one structure that
// differs is in ggml-abi-v2.h and ggml-abi-v3.h, named after GGML_BACKEND_API_VERSION. tests/abi.rs
// compares every size, offset, type and value below with ggml's headers.
//
// Two rules:
//
// 1. No ids. Operators and element types are `int` here, and their enums are not declared: the
//    values differ between releases, so that the plugin asks ggml for their names.
// 2. No #include. A bare libclang, without system headers or clang's own, can read this file,
//    because only compiler built-ins are used.

#ifndef VGPU_GGML_ABI_COMMON_H
#define VGPU_GGML_ABI_COMMON_H

typedef __SIZE_TYPE__   size_t;
typedef __UINT8_TYPE__  uint8_t;
typedef __INT32_TYPE__  int32_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __INT64_TYPE__  int64_t;
typedef __UINT64_TYPE__ uint64_t;

#ifndef __cplusplus
#define bool _Bool
#endif

#ifdef __cplusplus
extern "C" {
#endif

//
// Objects, which ggml passes by pointer. The structures follow below.
//

struct ggml_backend_graph_optimize_params;
struct ggml_cgraph;
struct ggml_tensor;

// A kind of memory. The layout of this structure differs between API versions.
typedef struct ggml_backend_buffer_type * ggml_backend_buffer_type_t;
// A block of that memory, in which ggml places tensors.
typedef struct ggml_backend_buffer * ggml_backend_buffer_t;
// A point in the work of a backend that another backend can wait for.
typedef struct ggml_backend_event * ggml_backend_event_t;
// A backend: an ordered queue of graphs and copies on one device.
typedef struct ggml_backend * ggml_backend_t;
// A graph compiled by the backend for repeated use.
typedef void * ggml_backend_graph_plan_t;
// A device.
typedef struct ggml_backend_device * ggml_backend_dev_t;
// A plugin, the root of all these objects.
typedef struct ggml_backend_reg * ggml_backend_reg_t;

//
// Values with a fixed meaning
//

// How a call ended.
enum ggml_status {
    GGML_STATUS_ALLOC_FAILED = -2,
    GGML_STATUS_FAILED       = -1,
    GGML_STATUS_SUCCESS      = 0,
    GGML_STATUS_ABORTED      = 1,
};

// What a buffer is for. ggml writes it into the buffer after allocation.
enum ggml_backend_buffer_usage {
    GGML_BACKEND_BUFFER_USAGE_ANY     = 0,
    GGML_BACKEND_BUFFER_USAGE_WEIGHTS = 1,
    GGML_BACKEND_BUFFER_USAGE_COMPUTE = 2,
};

// The kind of a device. Programs offload to GPU devices first.
enum ggml_backend_dev_type {
    GGML_BACKEND_DEVICE_TYPE_CPU   = 0,
    GGML_BACKEND_DEVICE_TYPE_GPU   = 1,
    GGML_BACKEND_DEVICE_TYPE_IGPU  = 2,
    GGML_BACKEND_DEVICE_TYPE_ACCEL = 3,
    GGML_BACKEND_DEVICE_TYPE_META  = 4,
};

// Severity of a log line. CONT continues the line before it.
enum ggml_log_level {
    GGML_LOG_LEVEL_NONE  = 0,
    GGML_LOG_LEVEL_DEBUG = 1,
    GGML_LOG_LEVEL_INFO  = 2,
    GGML_LOG_LEVEL_WARN  = 3,
    GGML_LOG_LEVEL_ERROR = 4,
    GGML_LOG_LEVEL_CONT  = 5,
};

// Bits of ggml_tensor.flags.
enum ggml_tensor_flag {
    GGML_TENSOR_FLAG_INPUT   = 1,
    GGML_TENSOR_FLAG_OUTPUT  = 2,
    GGML_TENSOR_FLAG_PARAM   = 4,
    GGML_TENSOR_FLAG_LOSS    = 8,
    GGML_TENSOR_FLAG_COMPUTE = 16,
};

//
// Tensors and graphs
//

#define GGML_MAX_DIMS      4
#define GGML_MAX_SRC       10
#define GGML_MAX_OP_PARAMS 64
#define GGML_MAX_NAME      64

// An array of up to four dimensions and, at the same time, the operator that computes it.
struct ggml_tensor {
    // element type: an id of this release of ggml, see ggml_type_name
    int type;
    // where the elements live; null until allocated, and for a view until it is initialised
    struct ggml_backend_buffer * buffer;
    // elements per dimension, the fastest first
    int64_t ne[GGML_MAX_DIMS];
    // stride of each dimension in bytes; nb[0] is the size of one block of the element type
    size_t nb[GGML_MAX_DIMS];
    // operator: an id of this release of ggml, see ggml_op_name
    int op;
    // untyped arguments of the operator
    int32_t op_params[GGML_MAX_OP_PARAMS / sizeof(int32_t)];
    // bits of ggml_tensor_flag
    int32_t flags;
    // operands; null where there is none
    struct ggml_tensor * src[GGML_MAX_SRC];
    // the tensor that this one is a view of, and the offset in it in bytes
    struct ggml_tensor * view_src;
    size_t               view_offs;
    // address of the first element, in the address space of the buffer
    void * data;
    // name for people, zero-terminated
    char name[GGML_MAX_NAME];
    // for the backend's use
    void * extra;
    char padding[8];
};

// ggml's open-addressing set of tensors.
struct ggml_hash_set {
    // number of slots
    size_t size;
    // one bit per slot: taken or not
    uint32_t * used;
    // the slots
    struct ggml_tensor ** keys;
};

// Nodes in an order in which they can be computed.
struct ggml_cgraph {
    // capacity of the arrays below
    int size;
    // number of nodes: tensors that are computed
    int n_nodes;
    // number of leafs: tensors that are given
    int n_leafs;
    struct ggml_tensor ** nodes;
    struct ggml_tensor ** grads;
    struct ggml_tensor ** grad_accs;
    struct ggml_tensor ** leafs;
    // how often each tensor is an operand, by slot of visited_hash_set
    int32_t * use_counts;
    struct ggml_hash_set visited_hash_set;
    // evaluation order that the graph was built with (an enum that no backend reads)
    int order;
    // two graphs with the same uid other than 0 are the same graph
    uint64_t uid;
};

//
// Buffers
//

// What a buffer can do. Slots marked optional may be null.
struct ggml_backend_buffer_i {
    // optional; frees what `context` points to. ggml frees the structure itself
    void (*free_buffer)(ggml_backend_buffer_t buffer);
    // address that the tensors of this buffer are placed from; need not be mapped
    void * (*get_base)(ggml_backend_buffer_t buffer);
    // optional; called for each tensor that ggml has placed
    enum ggml_status (*init_tensor)(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor);
    // data access; `offset` counts from the start of the tensor, `data` is the program's memory
    void (*memset_tensor)(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, uint8_t value,
        size_t offset, size_t size);
    void (*set_tensor)(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, const void * data,
        size_t offset, size_t size);
    void (*get_tensor)(ggml_backend_buffer_t buffer, const struct ggml_tensor * tensor, void * data,
        size_t offset, size_t size);
    // optional; n_copies rows of `size` bytes, at multiples of a stride on each side
    void (*set_tensor_2d)(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor,
        const void * data, size_t offset, size_t size, size_t n_copies, size_t stride_tensor,
        size_t stride_data);
    void (*get_tensor_2d)(ggml_backend_buffer_t buffer, const struct ggml_tensor * tensor,
        void * data, size_t offset, size_t size, size_t n_copies, size_t stride_tensor,
        size_t stride_data);
    // optional; copies into this buffer from any other; false leaves the copy to ggml
    bool (*cpy_tensor)(ggml_backend_buffer_t buffer, const struct ggml_tensor * src,
        struct ggml_tensor * dst);
    // fills the whole buffer
    void (*clear)(ggml_backend_buffer_t buffer, uint8_t value);
    // optional; removes what init_tensor has attached
    void (*reset)(ggml_backend_buffer_t buffer);
};

// Made by ggml_backend_buffer_init, deleted by ggml.
struct ggml_backend_buffer {
    struct ggml_backend_buffer_i   iface;
    ggml_backend_buffer_type_t     buft;
    void *                         context;
    size_t                         size;
    enum ggml_backend_buffer_usage usage;
};

//
// Backends
//

// Given to graph_optimize.
struct ggml_backend_graph_optimize_params {
    // the memory of `tensor` is not reused before the node `until` has run
    void (*add_alloc_dep)(void * user_data, struct ggml_tensor * tensor,
        struct ggml_tensor * until);
    void * user_data;
};

// What a backend can do. Slots marked optional may be null.
struct ggml_backend_i {
    const char * (*get_name)(ggml_backend_t backend);
    // frees the backend, the structure included
    void (*free)(ggml_backend_t backend);

    // optional; copies in order with the backend's other work. The caller keeps `data` valid until
    // it synchronises
    void (*set_tensor_async)(ggml_backend_t backend, struct ggml_tensor * tensor, const void * data,
        size_t offset, size_t size);
    void (*get_tensor_async)(ggml_backend_t backend, const struct ggml_tensor * tensor, void * data,
        size_t offset, size_t size);
    void (*set_tensor_2d_async)(ggml_backend_t backend, struct ggml_tensor * tensor,
        const void * data, size_t offset, size_t size, size_t n_copies, size_t stride_tensor,
        size_t stride_data);
    void (*get_tensor_2d_async)(ggml_backend_t backend, const struct ggml_tensor * tensor,
        void * data, size_t offset, size_t size, size_t n_copies, size_t stride_tensor,
        size_t stride_data);
    bool (*cpy_tensor_async)(ggml_backend_t backend_src, ggml_backend_t backend_dst,
        const struct ggml_tensor * src, struct ggml_tensor * dst);

    // optional for a backend without asynchronous calls; returns when all work so far is done
    void (*synchronize)(ggml_backend_t backend);

    // optional; compile a graph once and compute it many times
    ggml_backend_graph_plan_t (*graph_plan_create)(ggml_backend_t backend,
        const struct ggml_cgraph * cgraph);
    void (*graph_plan_free)(ggml_backend_t backend, ggml_backend_graph_plan_t plan);
    void (*graph_plan_update)(ggml_backend_t backend, ggml_backend_graph_plan_t plan,
        const struct ggml_cgraph * cgraph);
    enum ggml_status (*graph_plan_compute)(ggml_backend_t backend, ggml_backend_graph_plan_t plan);

    // computes a graph; may return before it is done if synchronize is provided
    enum ggml_status (*graph_compute)(ggml_backend_t backend, struct ggml_cgraph * cgraph);

    // optional; records a point of this backend, and waits for a point of another
    void (*event_record)(ggml_backend_t backend, ggml_backend_event_t event);
    void (*event_wait)(ggml_backend_t backend, ggml_backend_event_t event);

    // optional; may reorder the nodes of a graph before ggml allocates it.
    //
    // `params` was added without a new API version: 0.21 passes two arguments, 0.24 and later
    // three. One declaration serves both. In C's calling conventions the caller owns the arguments,
    // and the first ones are in registers, so that an older ggml leaves the third undefined. A
    // plugin must not read `params` unless it knows that its ggml passes it.
    void (*graph_optimize)(ggml_backend_t backend, struct ggml_cgraph * cgraph,
        struct ggml_backend_graph_optimize_params * params);
};

// Identity of a backend implementation: 16 bytes chosen once.
typedef uint8_t ggml_guid[16];
typedef ggml_guid * ggml_guid_t;

struct ggml_backend {
    ggml_guid_t           guid;
    struct ggml_backend_i iface;
    ggml_backend_dev_t    device;
    void *                context;
};

struct ggml_backend_event {
    struct ggml_backend_device * device;
    void *                       context;
};

//
// Devices
//

// What a device offers. mmap_support was added later: older releases have padding in its place.
struct ggml_backend_dev_caps {
    // work and copies may continue after the call that started them
    bool async;
    // get_host_buffer_type returns a type of memory that both sides can access
    bool host_buffer;
    // buffer_from_host_ptr works
    bool buffer_from_host_ptr;
    // events work
    bool events;
    // weights may be read from a mapped file
    bool mmap_support;
};

// The properties of a device. The device owns the strings.
struct ggml_backend_dev_props {
    const char *                 name;
    const char *                 description;
    size_t                       memory_free;
    size_t                       memory_total;
    enum ggml_backend_dev_type   type;
    // PCI address such as "0000:c1:00.0", or null
    const char *                 device_id;
    struct ggml_backend_dev_caps caps;
};

// What a device can do. Slots marked optional may be null.
struct ggml_backend_device_i {
    const char * (*get_name)(ggml_backend_dev_t dev);
    const char * (*get_description)(ggml_backend_dev_t dev);
    // bytes; 0 means unknown
    void (*get_memory)(ggml_backend_dev_t dev, size_t * free, size_t * total);
    enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t dev);
    void (*get_props)(ggml_backend_dev_t dev, struct ggml_backend_dev_props * props);
    // makes a backend; `params` is free text, and may be null
    ggml_backend_t (*init_backend)(ggml_backend_dev_t dev, const char * params);
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t dev);
    // optional; memory that program and device can both access
    ggml_backend_buffer_type_t (*get_host_buffer_type)(ggml_backend_dev_t dev);
    // optional; makes a buffer of the program's memory
    ggml_backend_buffer_t (*buffer_from_host_ptr)(ggml_backend_dev_t dev, void * ptr, size_t size,
        size_t max_tensor_size);
    // whether the device can compute this node
    bool (*supports_op)(ggml_backend_dev_t dev, const struct ggml_tensor * op);
    // whether the device can use tensors in this kind of memory
    bool (*supports_buft)(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft);
    // optional; whether the node is worth computing here although its weights are elsewhere
    bool (*offload_op)(ggml_backend_dev_t dev, const struct ggml_tensor * op);
    // optional
    ggml_backend_event_t (*event_new)(ggml_backend_dev_t dev);
    void (*event_free)(ggml_backend_dev_t dev, ggml_backend_event_t event);
    void (*event_synchronize)(ggml_backend_dev_t dev, ggml_backend_event_t event);
};

struct ggml_backend_device {
    struct ggml_backend_device_i iface;
    ggml_backend_reg_t           reg;
    void *                       context;
};

//
// The plugin
//

// What a plugin can do.
struct ggml_backend_reg_i {
    const char * (*get_name)(ggml_backend_reg_t reg);
    size_t (*get_device_count)(ggml_backend_reg_t reg);
    ggml_backend_dev_t (*get_device)(ggml_backend_reg_t reg, size_t index);
    // optional; functions beyond this interface, by name
    void * (*get_proc_address)(ggml_backend_reg_t reg, const char * name);
};

struct ggml_backend_reg {
    // must equal ggml's GGML_BACKEND_API_VERSION, otherwise ggml unloads the plugin
    int                       api_version;
    struct ggml_backend_reg_i iface;
    void *                    context;
};

//
// Functions. `NAME_fn` is the type of the function NAME.
//

// Exported by the plugin. A score of 0 means: not on this machine.
typedef int ggml_backend_score_fn(void);
typedef ggml_backend_reg_t ggml_backend_init_fn(void);

// Exported by ggml and found at run time. The four name functions index an array without a bounds
// check.
typedef const char * ggml_version_fn(void);
typedef const char * ggml_commit_fn(void);
typedef const char * ggml_op_name_fn(int op);
typedef const char * ggml_unary_op_name_fn(int op);
typedef const char * ggml_glu_op_name_fn(int op);
typedef const char * ggml_type_name_fn(int type);
typedef size_t ggml_nbytes_fn(const struct ggml_tensor * tensor);
typedef void ggml_log_internal_fn(enum ggml_log_level level, const char * format, ...);
typedef ggml_backend_buffer_t ggml_backend_buffer_init_fn(ggml_backend_buffer_type_t buft,
    struct ggml_backend_buffer_i iface, void * context, size_t size);

// Exported by ggml, for a program that computes with backends. These hide the layout of a buffer
// type.
typedef size_t ggml_backend_buft_get_max_size_fn(ggml_backend_buffer_type_t buft);
typedef size_t ggml_backend_buft_get_alloc_size_fn(ggml_backend_buffer_type_t buft,
    const struct ggml_tensor * tensor);
typedef ggml_backend_buffer_t ggml_backend_buft_alloc_buffer_fn(ggml_backend_buffer_type_t buft,
    size_t size);
typedef void ggml_backend_buffer_free_fn(ggml_backend_buffer_t buffer);
typedef void ggml_backend_free_fn(ggml_backend_t backend);
// Replaces what prints log lines. A text may be a part of a line.
typedef void ggml_log_set_fn(
    void (*callback)(enum ggml_log_level level, const char * text, void * user_data),
    void * user_data);

// Arguments of ggml_init, by value.
struct ggml_init_params {
    // bytes of the memory that tensors and graphs are made in
    size_t mem_size;
    // that memory, or null: ggml allocates it
    void * mem_buffer;
    // whether tensors get no memory for their elements
    bool no_alloc;
};

// Memory in which ggml makes tensors.
struct ggml_context;
typedef struct ggml_context * ggml_init_fn(struct ggml_init_params params);
typedef void ggml_free_fn(struct ggml_context * ctx);
typedef struct ggml_tensor * ggml_new_tensor_1d_fn(struct ggml_context * ctx, int type,
    int64_t ne0);
typedef struct ggml_tensor * ggml_trunc_fn(struct ggml_context * ctx, struct ggml_tensor * a);
typedef struct ggml_tensor * ggml_geglu_quick_fn(struct ggml_context * ctx,
    struct ggml_tensor * a);

#ifdef __cplusplus
}
#endif

#endif
