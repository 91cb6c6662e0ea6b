//! A backend of ggml that counts its buffers and what is copied, refuses buffers beyond a number as
//! a driver does, and calls the test before it makes one.
#![allow(dead_code)] // each test binary uses a part of this module

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use crate::changed_backend::compile;

/// Copies of the objects of another backend, whose buffers are counted.
const SOURCE: &str = r#"
#include <dlfcn.h>
#include <limits.h>
#include <ggml-backend-impl.h>

// The buffers that there are, and the most that there may be (`maxMemoryAllocationCount`).
int buffers;
int limit = INT_MAX;

// The buffers that were refused for that.
int refused;

// Calls that read from buffers and their bytes, and those that write.
int copied[4];

void (*on_alloc)(void);

static ggml_backend_reg_t real;
static struct ggml_backend_reg reg;
static struct ggml_backend_device device;
static struct ggml_backend_buffer_type buffer_type;

static ggml_backend_buffer_t (*real_alloc)(ggml_backend_buffer_type_t, size_t);
static void (*real_free)(ggml_backend_buffer_t);
static void (*real_set)(ggml_backend_buffer_t, struct ggml_tensor *, const void *, size_t, size_t);
static void (*real_get)(ggml_backend_buffer_t, const struct ggml_tensor *, void *, size_t, size_t);

static void add(int *to, int more) { __atomic_fetch_add(to, more, __ATOMIC_RELAXED); }

static void free_buffer(ggml_backend_buffer_t buffer) {
    add(&buffers, -1);
    real_free(buffer);
}

static void get(ggml_backend_buffer_t buffer, const struct ggml_tensor *tensor, void *to,
                size_t offset, size_t size) {
    add(&copied[0], 1);
    add(&copied[1], size);
    real_get(buffer, tensor, to, offset, size);
}

static void set(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor, const void *from,
                size_t offset, size_t size) {
    add(&copied[2], 1);
    add(&copied[3], size);
    real_set(buffer, tensor, from, offset, size);
}

static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    if (on_alloc) {
        on_alloc();
    }
    if (__atomic_load_n(&buffers, __ATOMIC_RELAXED) >= limit) {
        add(&refused, 1);
        return NULL;
    }
    ggml_backend_buffer_t buffer = real_alloc(buft, size);
    if (buffer) {
        add(&buffers, 1);
        real_free = buffer->iface.free_buffer;
        real_get = buffer->iface.get_tensor;
        real_set = buffer->iface.set_tensor;
        buffer->iface.free_buffer = free_buffer;
        buffer->iface.get_tensor = get;
        buffer->iface.set_tensor = set;
    }
    return buffer;
}

// The other backend makes its queues for its own device.
static ggml_backend_t init_backend(ggml_backend_dev_t dev, const char *params) {
    ggml_backend_dev_t of = real->iface.get_device(real, 0);
    return of->iface.init_backend(of, params);
}

static ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t dev) { return &buffer_type; }

static ggml_backend_dev_t get_device(ggml_backend_reg_t r, size_t index) { return &device; }

static size_t get_device_count(ggml_backend_reg_t r) { return 1; }

ggml_backend_reg_t ggml_backend_init(void) {
    void *library = dlopen(REAL, RTLD_NOW);
    ggml_backend_reg_t (*real_init)(void) = dlsym(library, "ggml_backend_init");
    real = real_init();
    reg = *real;
    device = *reg.iface.get_device(real, 0);
    buffer_type = *device.iface.get_buffer_type(&device);
    real_alloc = buffer_type.iface.alloc_buffer;
    buffer_type.iface.alloc_buffer = alloc_buffer;
    device.iface.get_buffer_type = get_buffer_type;
    device.iface.init_backend = init_backend;
    reg.iface.get_device = get_device;
    reg.iface.get_device_count = get_device_count;
    return &reg;
}
"#;

/// Compiles such a backend over the one at `real` in `folder`. `cache` is the folder of `cargo
/// xtask setup`.
pub(crate) fn counted_backend(cache: &Path, folder: &Path, real: &Path) -> PathBuf {
    let file = folder.join("libggml-counted.so");
    compile(cache, &file, SOURCE, real, &[]);
    file
}

/// What a call has copied from buffers of the backend and to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Copied {
    pub(crate) reads: u64,
    pub(crate) read: u64,
    pub(crate) writes: u64,
    pub(crate) written: u64,
}

/// What `call` copies, in the backend at `path`.
pub(crate) fn copied_by<T>(path: &Path, call: impl FnOnce() -> T) -> (T, Copied) {
    let counters = || crate::backend_counters::counters::<4>(path, c"copied").expect("loaded");
    let before = counters();
    let outcome = call();
    let after = counters();
    let more = |at: usize| u64::from(after[at].wrapping_sub(before[at]).cast_unsigned());
    let copied = Copied {
        reads: more(0),
        read: more(1),
        writes: more(2),
        written: more(3),
    };
    (outcome, copied)
}

/// Makes the backend at `path` call this function before it makes a buffer.
pub(crate) fn on_alloc(path: &Path, call: Option<extern "C" fn()>) {
    let path = CString::new(path.as_os_str().as_bytes()).expect("no zero byte");
    let name: &CStr = c"on_alloc";
    // SAFETY: the library is loaded and never unloaded. The variable is a pointer to a function
    // without arguments, of which null is `None`, and the test does not call the backend meanwhile.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        assert!(!library.is_null(), "the backend is loaded");
        let found = libc::dlsym(library, name.as_ptr());
        assert!(!found.is_null(), "{name:?}");
        *found.cast::<Option<extern "C" fn()>>() = call;
    }
}
