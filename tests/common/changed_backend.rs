//! ggml's CPU backend with changes: one that fails at every graph, one that lacks an operator, and
//! what backends for GPUs do. Such a backend computes later, in a time that is known; it has a
//! queue for graphs, and for copies between them; it uses more memory for a result than its
//! elements have; it reads quantised rows in larger units; it computes nodes together, and does not
//! store what only they read.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folders of the cache with ggml's CPU backend and with its sources.
const BUILD: &str = "build-llama-0.3.36/bin";
const SOURCES: &str = "llama-cpp-python-0.3.36/vendor/llama.cpp/ggml";

/// Copies of the backend's objects, since other tests of the process have the originals.
const SOURCE: &str = r#"
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <ggml-backend-impl.h>
#include <ggml-impl.h>

static ggml_backend_reg_t real;
static struct ggml_backend_reg reg;
static struct ggml_backend_device devices[2];
static ggml_backend_t (*init_backend)(ggml_backend_dev_t, const char *);

static struct ggml_backend_buffer_type buffer_type;

static ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t dev) { return &buffer_type; }

static bool is_greedy(const struct ggml_tensor *node) { return node->op == GREEDY; }

// As `ggml-cuda` has it.
static size_t row_padding(const struct ggml_tensor *tensor) {
    bool is_whole = !ggml_is_quantized(tensor->type) || tensor->ne[0] % 512 == 0;
    return READS_ROWS && !is_whole ? ggml_row_size(tensor->type, 512 - tensor->ne[0] % 512) : 0;
}

// Whether the driver refuses buffers.
int refuses;

// KiB of all calls that clear memory.
int cleared_kib;

static void (*real_clear)(ggml_backend_buffer_t, uint8_t);
static void (*real_memset)(ggml_backend_buffer_t, struct ggml_tensor *, uint8_t, size_t, size_t);

static void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    cleared_kib += buffer->size / 1024;
    real_clear(buffer, value);
}

static void memset_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor, uint8_t value,
                          size_t offset, size_t size) {
    cleared_kib += size / 1024;
    real_memset(buffer, tensor, value, offset, size);
}

// Calls of `set_tensor` and `get_tensor` of buffers, of `set_tensor_async`, `get_tensor_async` and
// `synchronize`, graphs that were computed, asynchronous copies with memory that is not pinned, and
// buffers that were freed while something in the queue uses them.
int calls[8];

enum { SETS, GETS, ASYNC_SETS, ASYNC_GETS, WAITS, GRAPHS, UNPINNED, FREED_EARLY };

static void called(int what) { __atomic_fetch_add(&calls[what], 1, __ATOMIC_RELAXED); }

// What a backend with a queue was given and has not done.
static struct work {
    struct ggml_cgraph *graph; // or a copy:
    struct ggml_tensor *to;
    const struct ggml_tensor *from;
    char *host;
    size_t offset;
    size_t size;
} queue[256];

static int queued;

static void (*real_free)(ggml_backend_buffer_t);
static void (*real_set)(ggml_backend_buffer_t, struct ggml_tensor *, const void *, size_t, size_t);
static void (*real_get)(ggml_backend_buffer_t, const struct ggml_tensor *, void *, size_t, size_t);

static bool uses(const struct ggml_cgraph *graph, ggml_backend_buffer_t buffer) {
    for (int i = 0; i < graph->n_nodes; i++) {
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            struct ggml_tensor *source = graph->nodes[i]->src[j];
            if (source && source->buffer == buffer) {
                return true;
            }
        }
        if (graph->nodes[i]->buffer == buffer) {
            return true;
        }
    }
    return false;
}

static void free_buffer(ggml_backend_buffer_t buffer) {
    for (int i = 0; i < queued; i++) {
        struct work *work = &queue[i];
        const struct ggml_tensor *tensor = work->to ? work->to : work->from;
        if (tensor ? tensor->buffer == buffer : uses(work->graph, buffer)) {
            called(FREED_EARLY);
        }
    }
    real_free(buffer);
}

// At once, as copies of buffers are: nothing orders them with the queue.
static void set(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor, const void *from,
                size_t offset, size_t size) {
    called(SETS);
    real_set(buffer, tensor, from, offset, size);
}

static void get(ggml_backend_buffer_t buffer, const struct ggml_tensor *tensor, void *to,
                size_t offset, size_t size) {
    called(GETS);
    real_get(buffer, tensor, to, offset, size);
}

static ggml_backend_buffer_t (*real_alloc)(ggml_backend_buffer_type_t, size_t);

// Memory of the host that the device copies from and to by itself.
static struct ggml_backend_buffer_type host_buffer_type;
static char *pinned, *pinned_end;

static ggml_backend_buffer_t alloc_host(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = real_alloc(&buffer_type, size);
    if (PINNED) {
        buffer->buft = buft;
        pinned = buffer->iface.get_base(buffer);
        pinned_end = pinned + size;
        memset(pinned, 0xa5, size);
    }
    return buffer;
}

static ggml_backend_buffer_type_t get_host_buffer_type(ggml_backend_dev_t dev) {
    return &host_buffer_type;
}

// As the memory of a GPU, a new buffer has the bytes of whoever had it before.
static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = refuses ? NULL : real_alloc(buft, size);
    if (buffer && OLD_BYTES) {
        memset(buffer->iface.get_base(buffer), 0xa5, size);
        real_clear = buffer->iface.clear;
        real_memset = buffer->iface.memset_tensor;
        buffer->iface.clear = clear;
        buffer->iface.memset_tensor = memset_tensor;
    }
    if (buffer && QUEUES) {
        real_free = buffer->iface.free_buffer;
        real_set = buffer->iface.set_tensor;
        real_get = buffer->iface.get_tensor;
        buffer->iface.free_buffer = free_buffer;
        buffer->iface.set_tensor = set;
        buffer->iface.get_tensor = get;
    }
    return buffer;
}

static size_t get_alloc_size(ggml_backend_buffer_type_t buft, const struct ggml_tensor *tensor) {
    return ggml_nbytes(tensor) + (is_greedy(tensor) ? 4 : 0) + row_padding(tensor);
}

static bool (*real_supports)(ggml_backend_dev_t, const struct ggml_tensor *);

static bool supports(ggml_backend_dev_t dev, const struct ggml_tensor *node) {
    return node->op != LACKS && real_supports(dev, node);
}

static enum ggml_status (*real_compute)(ggml_backend_t, struct ggml_cgraph *);

// The nodes from `first` on that a kernel may compute together, by ggml's own rules.
static int group(const struct ggml_cgraph *graph, int first) {
    enum ggml_op ops[8];
    int nodes[8];
    int count = 0;
    for (int i = first; i < graph->n_nodes && count < 8; i++, count++) {
        ops[count] = graph->nodes[i]->op;
        nodes[count] = i;
    }
    for (; count > 1; count--) {
        int last = nodes[count - 1];
        if (ggml_can_fuse_ext(graph, nodes, ops, count) ||
            ggml_can_fuse_subgraph_ext(graph, nodes, count, ops, &last, 1)) {
            return count;
        }
    }
    return 1;
}

static void ruin(struct ggml_tensor *tensor) { memset(tensor->data, 0xff, ggml_nbytes(tensor)); }

// Whether a kernel may write to the result before it has read all sources of the group.
static bool may_be_early(struct ggml_tensor **nodes, int count) {
    struct ggml_tensor *result = nodes[count - 1];
    if (result->op == GGML_OP_SET_ROWS || !ggml_is_contiguous(result)) {
        return false;
    }
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < GGML_MAX_SRC; j++) {
            struct ggml_tensor *source = nodes[i]->src[j];
            if (source && source->data == result->data) {
                return false;
            }
        }
    }
    return true;
}

int fused_groups;

static enum ggml_status compute_groups(ggml_backend_t backend, struct ggml_cgraph *graph) {
    for (int i = 0; i < graph->n_nodes;) {
        int count = group(graph, i);
        fused_groups += count > 1;
        if (count > 1 && may_be_early(graph->nodes + i, count)) {
            ruin(graph->nodes[i + count - 1]);
        }
        for (int j = i; j < i + count; j++) {
            struct ggml_cgraph one = ggml_graph_view(graph, j, j + 1);
            enum ggml_status status = real_compute(backend, &one);
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }
        }
        for (int j = i; j + 1 < i + count; j++) {
            if (graph->nodes[j]->data != graph->nodes[i + count - 1]->data) {
                ruin(graph->nodes[j]);
            }
        }
        i += count;
    }
    return GGML_STATUS_SUCCESS;
}

// Whether activations of 0 give 0 behind each row.
static bool rows_are_padded(const struct ggml_cgraph *graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const struct ggml_tensor *rows = graph->nodes[i]->src[0];
        enum ggml_op op = graph->nodes[i]->op;
        bool is_product = op == GGML_OP_MUL_MAT || op == GGML_OP_MUL_MAT_ID;
        size_t padding = is_product ? row_padding(rows) : 0;
        for (size_t at = 0; at < padding; at++) {
            if (((const char *) rows->data)[ggml_nbytes(rows) + at] != 0) {
                return false;
            }
        }
    }
    return true;
}

static enum ggml_status compute(ggml_backend_t backend, struct ggml_cgraph *graph) {
    if (!rows_are_padded(graph)) {
        return GGML_STATUS_FAILED;
    }
    if (FUSES) {
        return compute_groups(backend, graph);
    }
    enum ggml_status status = real_compute(backend, graph);
    for (int i = 0; i < graph->n_nodes; i++) {
        struct ggml_tensor *node = graph->nodes[i];
        if (is_greedy(node)) {
            memset((char *) node->data + ggml_nbytes(node), 0xff, 4);
        }
    }
    return status;
}

static double idle_at;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static enum ggml_status compute_later(ggml_backend_t backend, struct ggml_cgraph *graph) {
    enum ggml_status status = compute(backend, graph);
    double begin = now();
    idle_at = (idle_at < begin ? begin : idle_at) + 1e-6 * NODE_TIME * ggml_graph_n_nodes(graph);
    return status;
}

static void add(struct work work) {
    if (queued == sizeof(queue) / sizeof(queue[0])) {
        abort();
    }
    queue[queued++] = work;
}

static void copy_later(struct work work) {
    if (work.host < pinned || work.host + work.size > pinned_end) {
        called(UNPINNED);
    }
    add(work);
}

// The bytes are read when the copy is carried out.
static void set_async(ggml_backend_t backend, struct ggml_tensor *to, const void *from,
                      size_t offset, size_t size) {
    called(ASYNC_SETS);
    copy_later((struct work){.to = to, .host = (char *) from, .offset = offset, .size = size});
}

static void get_async(ggml_backend_t backend, const struct ggml_tensor *from, void *to,
                      size_t offset, size_t size) {
    called(ASYNC_GETS);
    copy_later((struct work){.from = from, .host = to, .offset = offset, .size = size});
}

static enum ggml_status compute_queued(ggml_backend_t backend, struct ggml_cgraph *graph) {
    double begin = now();
    idle_at = (idle_at < begin ? begin : idle_at) + 1e-6 * NODE_TIME * ggml_graph_n_nodes(graph);
    add((struct work){.graph = graph});
    return GGML_STATUS_SUCCESS;
}

static void carry_out(ggml_backend_t backend) {
    for (int i = 0; i < queued; i++) {
        struct work *work = &queue[i];
        if (work->to) {
            memcpy((char *) work->to->data + work->offset, work->host, work->size);
        } else if (work->from) {
            memcpy(work->host, (char *) work->from->data + work->offset, work->size);
        } else {
            called(GRAPHS);
            if (compute(backend, work->graph) != GGML_STATUS_SUCCESS) {
                abort();
            }
        }
    }
    queued = 0;
}

static void synchronize(ggml_backend_t backend) {
    called(WAITS);
    carry_out(backend);
    for (double left = idle_at - now(); left > 0; left = idle_at - now()) {
        usleep(1 + 1e6 * left);
    }
}

static void (*real_memory)(ggml_backend_dev_t, size_t *, size_t *);

static void get_memory(ggml_backend_dev_t dev, size_t *free, size_t *total) {
    real_memory(dev, free, total);
    *free = *total > USED ? *total - USED : 0;
    LATER_MEMORY
}

static enum ggml_backend_dev_type get_type(ggml_backend_dev_t dev) { return TYPE; }

static enum ggml_status fail(ggml_backend_t backend, struct ggml_cgraph *graph) { END }

// Graphs that each device has computed.
int computed[2];

static enum ggml_status count(ggml_backend_t backend, struct ggml_cgraph *graph) {
    __atomic_fetch_add(&computed[backend->device - devices], 1, __ATOMIC_RELAXED);
    return fail(backend, graph);
}

// The backends that were made.
int made;

// Whether the driver refuses further ones.
int refuses_backends;

static ggml_backend_t init(ggml_backend_dev_t dev, const char *params) {
    if (refuses_backends) {
        return NULL;
    }
    made++;
    ggml_backend_t backend = init_backend(dev, params);
    backend->device = dev;
    real_compute = backend->iface.graph_compute;
    backend->iface.graph_compute = count;
    backend->iface.synchronize = NODE_TIME || QUEUES ? synchronize : backend->iface.synchronize;
    if (QUEUES) {
        // As fast as the time of the nodes says, on any number of processors.
        ggml_backend_set_n_threads_t set_threads =
            real->iface.get_proc_address(real, "ggml_backend_set_n_threads");
        set_threads(backend, 1);
    }
    if (COPIES) {
        backend->iface.set_tensor_async = set_async;
        backend->iface.get_tensor_async = get_async;
    }
    return backend;
}

static const char *get_name(ggml_backend_reg_t r) { return NAME; }

static size_t get_device_count(ggml_backend_reg_t r) { return DEVICES; }

static ggml_backend_dev_t get_device(ggml_backend_reg_t r, size_t index) {
    return &devices[index];
}

static const char *get_device_name(ggml_backend_dev_t dev) { return DEVICE_NAME; }

static const char *get_second_name(ggml_backend_dev_t dev) { return "second"; }

ggml_backend_reg_t ggml_backend_init(void) {
    void *library = dlopen(REAL, RTLD_NOW);
    ggml_backend_reg_t (*real_init)(void) = dlsym(library, SYMBOL);
    real = real_init();
    reg = *real;
    devices[0] = *reg.iface.get_device(real, 0);
    init_backend = devices[0].iface.init_backend;
    devices[0].iface.init_backend = init;
    buffer_type = *devices[0].iface.get_buffer_type(&devices[0]);
    buffer_type.iface.get_alloc_size = get_alloc_size;
    real_alloc = buffer_type.iface.alloc_buffer;
    buffer_type.iface.alloc_buffer = alloc_buffer;
    host_buffer_type = buffer_type;
    host_buffer_type.iface.alloc_buffer = alloc_host;
    devices[0].iface.get_host_buffer_type = COPIES ? get_host_buffer_type : NULL;
    devices[0].iface.get_name = get_device_name;
    devices[0].iface.get_buffer_type = get_buffer_type;
    devices[0].iface.get_type = get_type;
    real_memory = devices[0].iface.get_memory;
    devices[0].iface.get_memory = get_memory;
    real_supports = devices[0].iface.supports_op;
    devices[0].iface.supports_op = supports;
    devices[1] = devices[0];
    devices[1].iface.get_name = get_second_name;
    reg.iface.get_device_count = get_device_count;
    reg.iface.get_device = get_device;
    reg.iface.get_name = get_name;
    return &reg;
}
"#;

/// What waits in the backend until somebody calls `synchronize`. The library counts calls in
/// `calls`.
#[allow(dead_code)] // each test binary uses a part of this module
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Queue {
    /// Nothing, whatever time nodes take.
    None,
    /// Graphs, with `end: "return compute_queued(backend, graph);"`.
    Graphs,
    /// Graphs and asynchronous copies, in one order.
    GraphsAndCopies,
    /// The same, and there is no pinned memory: the host buffer type gives other memory.
    WithoutPinned,
}

/// What of the backend is changed.
pub(crate) struct Changes<'a> {
    /// What C code does instead of computing a graph: `return compute_later(backend, graph);` for a
    /// device with a `node_time`.
    pub(crate) end: &'a str,
    /// The operator whose results want four bytes more than their elements have. A run writes to
    /// these bytes.
    pub(crate) greedy: &'a str,
    /// The operator that the device lacks.
    pub(crate) lacks: &'a str,
    /// Whether products read quantised rows in units of 512 elements, and fail if there is
    /// something else than zero behind the last one.
    pub(crate) reads_rows: bool,
    /// Whether nodes are computed together where ggml allows it. The library counts such groups in
    /// `fused_groups`.
    pub(crate) fuses: bool,
    /// What a node takes, in microseconds of a device that computes after the call. 0: as it is.
    pub(crate) node_time: u32,
    /// What waits in the backend.
    pub(crate) queue: Queue,
    /// Bytes that other programs use of the device's memory.
    pub(crate) used: u64,
    /// C code that changes what the device says of its memory, in `*free` and `*total`, from the
    /// second question on.
    pub(crate) later_memory: &'a str,
    /// How many devices there are: one, or two. The second one has the name `second`. The library
    /// counts the graphs of each in `computed`.
    pub(crate) devices: usize,
    /// `enum ggml_backend_dev_type` of the device.
    pub(crate) kind: &'a str,
    /// The name of the backend.
    pub(crate) name: &'a str,
    /// The name of the first device. The library counts the backends that it makes in `made`, and
    /// makes none while `refuses_backends` is not 0.
    pub(crate) device_name: &'a str,
    /// Whether new buffers have old bytes instead of zeros. The library counts the KiB that are
    /// cleared in `cleared_kib`, and refuses buffers while `refuses` is not 0.
    pub(crate) old_bytes: bool,
}

impl Default for Changes<'_> {
    fn default() -> Self {
        Changes {
            end: "return compute(backend, graph);",
            greedy: "GGML_OP_COUNT",
            lacks: "GGML_OP_COUNT",
            reads_rows: false,
            fuses: false,
            node_time: 0,
            queue: Queue::None,
            used: 0,
            later_memory: "",
            devices: 1,
            kind: "GGML_BACKEND_DEVICE_TYPE_CPU",
            name: "CPU",
            device_name: "CPU",
            old_bytes: false,
        }
    }
}

/// Compiles the backend with these changes in `folder`. `cache` is the folder of `cargo xtask
/// setup`.
pub(crate) fn changed_backend(cache: &Path, folder: &Path, changes: &Changes<'_>) -> PathBuf {
    let file = folder.join("libggml-failing.so");
    let defined = [
        format!("END={}", changes.end),
        format!("GREEDY={}", changes.greedy),
        format!("LACKS={}", changes.lacks),
        format!("READS_ROWS={}", u8::from(changes.reads_rows)),
        format!("FUSES={}", u8::from(changes.fuses)),
        format!("NODE_TIME={}", changes.node_time),
        format!("QUEUES={}", u8::from(changes.queue != Queue::None)),
        format!(
            "COPIES={}",
            u8::from(changes.queue >= Queue::GraphsAndCopies)
        ),
        format!("PINNED={}", u8::from(changes.queue != Queue::WithoutPinned)),
        format!("USED={}", changes.used),
        format!(
            "LATER_MEMORY=static int asked; if (asked++ > 0) {{ {} }}",
            changes.later_memory
        ),
        format!("DEVICES={}", changes.devices),
        format!("TYPE={}", changes.kind),
        format!("NAME=\"{}\"", changes.name),
        format!("DEVICE_NAME=\"{}\"", changes.device_name),
        format!("OLD_BYTES={}", u8::from(changes.old_bytes)),
        "SYMBOL=\"ggml_backend_init\"".to_owned(),
    ];
    let real = cache.join(BUILD).join("libggml-cpu.so");
    compile(cache, &file, SOURCE, &real, &defined);
    file
}

/// Compiles `source` to a backend with the objects of the one at `real`. `defined` are macros.
pub(crate) fn compile(cache: &Path, file: &Path, source: &str, real: &Path, defined: &[String]) {
    let build = cache.join(BUILD).canonicalize();
    let build = build.expect("`cargo xtask setup` makes it");
    let real = real.canonicalize().expect("`cargo xtask setup` makes it");
    let sources = cache.join(SOURCES);
    let mut compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o"])
        .arg(file)
        .args(["include", "src"].map(|name| format!("-I{}", sources.join(name).display())))
        .args(defined.iter().map(|defined| format!("-D{defined}")))
        .arg(format!("-DREAL=\"{}\"", real.display()))
        // No function of it is called here: the engine looks for them.
        .arg("-Wl,--no-as-needed")
        .arg(build.join("libggml-base.so"))
        .arg(format!("-Wl,-rpath,{}", build.display()))
        .stdin(Stdio::piped())
        .spawn()
        .expect("a C compiler");
    let mut stdin = compiler.stdin.take().expect("piped");
    stdin.write_all(source.as_bytes()).expect("it reads");
    drop(stdin);
    assert!(compiler.wait().expect("it ends").success());
}
