//! A backend of ggml that fails at every graph: ggml's CPU backend with another `graph_compute`,
//! and with results that want more memory than their elements.

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

static enum ggml_status fail(ggml_backend_t backend, struct ggml_cgraph *graph) { END }

static ggml_backend_t init(ggml_backend_dev_t dev, const char *params) {
    ggml_backend_t backend = init_backend(dev, params);
    backend->iface.graph_compute = fail;
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
    reg.iface.get_device = get_device;
    return &reg;
}
";

/// Compiles the backend in `folder`. `cache` is the folder of `cargo xtask setup`. `end` is what C
/// code does instead of computing a graph.
pub(crate) fn failing_backend(cache: &Path, folder: &Path, end: &str) -> PathBuf {
    greedy_backend(cache, folder, end, "GGML_OP_COUNT")
}

/// The same, and a result of the operator `greedy` wants four bytes more than its elements have.
pub(crate) fn greedy_backend(cache: &Path, folder: &Path, end: &str, greedy: &str) -> PathBuf {
    let build = cache.join(BUILD).canonicalize();
    let build = build.expect("`cargo xtask setup` makes it");
    let sources = cache.join(SOURCES);
    let file = folder.join("libggml-failing.so");
    let mut compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o"])
        .arg(&file)
        .args(["include", "src"].map(|name| format!("-I{}", sources.join(name).display())))
        .args([format!("-DEND={end}"), format!("-DGREEDY={greedy}")])
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
