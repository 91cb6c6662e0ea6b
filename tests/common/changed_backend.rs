//! ggml's CPU backend with changes: one that fails at every graph, one whose results want more
//! memory than their elements, and one that computes like a GPU: later, and in a time that is
//! known.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folders of the cache with ggml's CPU backend and with its sources.
const BUILD: &str = "build-llama-0.3.36/bin";
const SOURCES: &str = "llama-cpp-python-0.3.36/vendor/llama.cpp/ggml";

/// Copies of the backend's objects, since other tests of the process have the originals.
const SOURCE: &str = r"
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <ggml-backend-impl.h>

static ggml_backend_reg_t real;
static struct ggml_backend_reg reg;
static struct ggml_backend_device device;
static ggml_backend_t (*init_backend)(ggml_backend_dev_t, const char *);

static struct ggml_backend_buffer_type buffer_type;

static ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t dev) { return &buffer_type; }

static size_t get_alloc_size(ggml_backend_buffer_type_t buft, const struct ggml_tensor *tensor) {
    return ggml_nbytes(tensor) + (tensor->op == GREEDY ? 4 : 0);
}

static enum ggml_status (*compute)(ggml_backend_t, struct ggml_cgraph *);
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

static void synchronize(ggml_backend_t backend) {
    for (double left = idle_at - now(); left > 0; left = idle_at - now()) {
        usleep(1 + 1e6 * left);
    }
}

static enum ggml_backend_dev_type get_type(ggml_backend_dev_t dev) { return TYPE; }

static enum ggml_status fail(ggml_backend_t backend, struct ggml_cgraph *graph) { END }

static ggml_backend_t init(ggml_backend_dev_t dev, const char *params) {
    ggml_backend_t backend = init_backend(dev, params);
    compute = backend->iface.graph_compute;
    backend->iface.graph_compute = fail;
    backend->iface.synchronize = NODE_TIME ? synchronize : backend->iface.synchronize;
    return backend;
}

static ggml_backend_dev_t get_device(ggml_backend_reg_t r, size_t index) { return &device; }

ggml_backend_reg_t ggml_backend_init(void) {
    void *library = dlopen(REAL, RTLD_NOW);
    ggml_backend_reg_t (*real_init)(void) = dlsym(library, SYMBOL);
    real = real_init();
    reg = *real;
    device = *reg.iface.get_device(real, 0);
    init_backend = device.iface.init_backend;
    device.iface.init_backend = init;
    buffer_type = *device.iface.get_buffer_type(&device);
    buffer_type.iface.get_alloc_size = get_alloc_size;
    device.iface.get_buffer_type = get_buffer_type;
    device.iface.get_type = get_type;
    reg.iface.get_device = get_device;
    return &reg;
}
";

/// What of the backend is changed.
pub(crate) struct Changes<'a> {
    /// What C code does instead of computing a graph: `return compute_later(backend, graph);` for a
    /// device with a `node_time`.
    pub(crate) end: &'a str,
    /// The operator whose results want four bytes more than their elements have.
    pub(crate) greedy: &'a str,
    /// What a node takes, in microseconds of a device that computes after the call. 0: as it is.
    pub(crate) node_time: u32,
    /// `enum ggml_backend_dev_type` of the device.
    pub(crate) kind: &'a str,
}

impl Default for Changes<'_> {
    fn default() -> Self {
        Changes {
            end: "return compute(backend, graph);",
            greedy: "GGML_OP_COUNT",
            node_time: 0,
            kind: "GGML_BACKEND_DEVICE_TYPE_CPU",
        }
    }
}

/// Compiles the backend with these changes in `folder`. `cache` is the folder of `cargo xtask
/// setup`.
pub(crate) fn changed_backend(cache: &Path, folder: &Path, changes: &Changes<'_>) -> PathBuf {
    let build = cache.join(BUILD).canonicalize();
    let build = build.expect("`cargo xtask setup` makes it");
    let sources = cache.join(SOURCES);
    let file = folder.join("libggml-failing.so");
    let mut compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o"])
        .arg(&file)
        .args(["include", "src"].map(|name| format!("-I{}", sources.join(name).display())))
        .args([
            format!("-DEND={}", changes.end),
            format!("-DGREEDY={}", changes.greedy),
            format!("-DNODE_TIME={}", changes.node_time),
            format!("-DTYPE={}", changes.kind),
        ])
        .arg(format!(
            "-DREAL=\"{}\"",
            build.join("libggml-cpu.so").display()
        ))
        .arg("-DSYMBOL=\"ggml_backend_init\"")
        // No function of it is called here: the engine looks for them.
        .arg("-Wl,--no-as-needed")
        .arg(build.join("libggml-base.so"))
        .arg(format!("-Wl,-rpath,{}", build.display()))
        .stdin(Stdio::piped())
        .spawn()
        .expect("a C compiler");
    let mut stdin = compiler.stdin.take().expect("piped");
    stdin.write_all(SOURCE.as_bytes()).expect("it reads");
    drop(stdin);
    assert!(compiler.wait().expect("it ends").success());
    file
}
