//! A real ggml with the plugin: typed functions, and owners of ggml's objects.
//!
//! ggml comes from the build that `cargo xtask setup` puts into the cache folder.
#![allow(dead_code)] // each test uses a part

use std::env;
use std::ffi::{CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::OnceLock;

use ggml_vgpu::abi::{
    self, ggml_backend_buffer_t, ggml_backend_dev_t, ggml_backend_t, ggml_tensor,
};

use super::common::cached;

/// `enum ggml_type` of this ggml.
pub(crate) const F32: c_int = 0;
pub(crate) const I32: c_int = 26;
pub(crate) const Q8_0: c_int = 8;

/// The functions of a real ggml, and the device of the plugin.
pub(crate) struct Ggml {
    pub(crate) device: ggml_backend_dev_t,
    /// `device`, and the other devices of the executor.
    pub(crate) devices: Vec<ggml_backend_dev_t>,
    pub(crate) init: extern "C" fn(InitParams) -> *mut c_void,
    pub(crate) free: extern "C" fn(*mut c_void),
    pub(crate) new_tensor_2d: extern "C" fn(*mut c_void, c_int, i64, i64) -> *mut ggml_tensor,
    pub(crate) add:
        extern "C" fn(*mut c_void, *mut ggml_tensor, *mut ggml_tensor) -> *mut ggml_tensor,
    pub(crate) get_rows:
        extern "C" fn(*mut c_void, *mut ggml_tensor, *mut ggml_tensor) -> *mut ggml_tensor,
    pub(crate) map_custom1: extern "C" fn(
        *mut c_void,
        *mut ggml_tensor,
        Callback,
        c_int,
        *mut c_void,
    ) -> *mut ggml_tensor,
    pub(crate) dev_supports_op: extern "C" fn(ggml_backend_dev_t, *const ggml_tensor) -> bool,
    pub(crate) new_graph: extern "C" fn(*mut c_void) -> *mut abi::ggml_cgraph,
    pub(crate) build_forward_expand: extern "C" fn(*mut abi::ggml_cgraph, *mut ggml_tensor),
    pub(crate) nbytes: extern "C" fn(*const ggml_tensor) -> usize,
    pub(crate) alloc_ctx_tensors:
        extern "C" fn(*mut c_void, abi::ggml_backend_buffer_type_t) -> ggml_backend_buffer_t,
    pub(crate) buft_get_alloc_size:
        extern "C" fn(abi::ggml_backend_buffer_type_t, *const ggml_tensor) -> usize,
    buft_alloc_buffer:
        extern "C" fn(abi::ggml_backend_buffer_type_t, usize) -> ggml_backend_buffer_t,
    pub(crate) buffer_free: extern "C" fn(ggml_backend_buffer_t),
    pub(crate) buffer_set_usage:
        extern "C" fn(ggml_backend_buffer_t, abi::ggml_backend_buffer_usage),
    pub(crate) buffer_get_base: extern "C" fn(ggml_backend_buffer_t) -> *mut c_void,
    pub(crate) buffer_get_size: extern "C" fn(ggml_backend_buffer_t) -> usize,
    pub(crate) tensor_set: extern "C" fn(*mut ggml_tensor, *const c_void, usize, usize),
    pub(crate) tensor_get: extern "C" fn(*const ggml_tensor, *mut c_void, usize, usize),
    pub(crate) tensor_copy: unsafe extern "C" fn(*mut ggml_tensor, *mut ggml_tensor),
    pub(crate) tensor_memset: unsafe extern "C" fn(*mut ggml_tensor, u8, usize, usize),
    pub(crate) dev_get_props:
        unsafe extern "C" fn(ggml_backend_dev_t, *mut abi::ggml_backend_dev_props),
    pub(crate) dev_buffer_type:
        extern "C" fn(ggml_backend_dev_t) -> abi::ggml_backend_buffer_type_t,
    pub(crate) dev_init: extern "C" fn(ggml_backend_dev_t, *const c_char) -> ggml_backend_t,
    pub(crate) backend_free: extern "C" fn(ggml_backend_t),
    pub(crate) dev_host_buffer_type:
        extern "C" fn(ggml_backend_dev_t) -> abi::ggml_backend_buffer_type_t,
    pub(crate) buft_name: extern "C" fn(abi::ggml_backend_buffer_type_t) -> *const c_char,
    pub(crate) buft_is_host: extern "C" fn(abi::ggml_backend_buffer_type_t) -> bool,
    pub(crate) tensor_set_async:
        extern "C" fn(ggml_backend_t, *mut ggml_tensor, *const c_void, usize, usize),
    pub(crate) tensor_get_async:
        extern "C" fn(ggml_backend_t, *const ggml_tensor, *mut c_void, usize, usize),
    pub(crate) tensor_copy_async:
        extern "C" fn(ggml_backend_t, ggml_backend_t, *const ggml_tensor, *mut ggml_tensor),
    pub(crate) tensor_set_2d: Set2d,
    pub(crate) tensor_get_2d: Get2d,
    pub(crate) tensor_set_2d_async: Set2dAsync,
    pub(crate) tensor_get_2d_async: Get2dAsync,
    pub(crate) synchronize: extern "C" fn(ggml_backend_t),
    pub(crate) event_new: extern "C" fn(ggml_backend_dev_t) -> abi::ggml_backend_event_t,
    pub(crate) event_free: extern "C" fn(abi::ggml_backend_event_t),
    pub(crate) event_record: extern "C" fn(abi::ggml_backend_event_t, ggml_backend_t),
    pub(crate) event_wait: extern "C" fn(ggml_backend_t, abi::ggml_backend_event_t),
    pub(crate) event_synchronize: extern "C" fn(abi::ggml_backend_event_t),
    pub(crate) graph_compute:
        extern "C" fn(ggml_backend_t, *mut abi::ggml_cgraph) -> abi::ggml_status,
    pub(crate) log_set: extern "C" fn(Option<LogCallback>, *mut c_void),
    pub(crate) graph_compute_async:
        extern "C" fn(ggml_backend_t, *mut abi::ggml_cgraph) -> abi::ggml_status,
}

/// `ggml_log_callback`: level, line, the caller's pointer.
pub(crate) type LogCallback = extern "C" fn(c_int, *const c_char, *mut c_void);

/// `ggml_custom1_op_t`.
pub(crate) type Callback =
    extern "C" fn(*mut ggml_tensor, *const ggml_tensor, c_int, c_int, *mut c_void);

/// Parameters after the pointers: offset, size, number of rows, stride in the tensor, stride in
/// the data.
pub(crate) type Set2d =
    extern "C" fn(*mut ggml_tensor, *const c_void, usize, usize, usize, usize, usize);
pub(crate) type Get2d =
    extern "C" fn(*const ggml_tensor, *mut c_void, usize, usize, usize, usize, usize);
pub(crate) type Set2dAsync = extern "C" fn(
    ggml_backend_t,
    *mut ggml_tensor,
    *const c_void,
    usize,
    usize,
    usize,
    usize,
    usize,
);
pub(crate) type Get2dAsync = extern "C" fn(
    ggml_backend_t,
    *const ggml_tensor,
    *mut c_void,
    usize,
    usize,
    usize,
    usize,
    usize,
);

/// `struct ggml_init_params`.
#[repr(C)]
pub(crate) struct InitParams {
    pub(crate) mem_size: usize,
    pub(crate) mem_buffer: *mut c_void,
    pub(crate) no_alloc: bool,
}

// SAFETY: function pointers, and a device that any thread may use.
unsafe impl Send for Ggml {}
// SAFETY: nothing changes the pointers after `load`, and ggml allows calls of several threads.
unsafe impl Sync for Ggml {}

impl Ggml {
    pub(crate) fn get() -> &'static Ggml {
        static GGML: OnceLock<Ggml> = OnceLock::new();
        GGML.get_or_init(Ggml::load)
    }

    pub(crate) fn load() -> Ggml {
        let library = cached("build-llama-0.3.36/bin/libggml-base.so");
        let path = CString::new(library.to_str().expect("the cache has a UTF-8 path"))
            .expect("no NUL in a path");
        // SAFETY: the path is a C string. The initialisers of ggml have no preconditions.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!handle.is_null(), "{} cannot be loaded", library.display());
        // SAFETY: the OnceLock runs this once, and every test calls `Ggml::get` first, so that no
        // thread reads the environment meanwhile.
        unsafe {
            if env::var_os("VGPU_ENDPOINT").is_none() {
                env::set_var("VGPU_ENDPOINT", "inproc");
            }
            env::set_var("VGPU_STATS", stats_path());
        }
        assert!(
            ggml_vgpu::ggml_backend_score() > 0,
            "the executor can be reached"
        );
        let registry = ggml_vgpu::ggml_backend_init();
        // SAFETY: the registry was just made, and is never freed.
        let devices: Vec<ggml_backend_dev_t> = unsafe {
            assert_eq!((*registry).api_version, 2, "ggml 0.25 speaks API version 2");
            let iface = &(*registry).iface;
            let count = iface.get_device_count.expect("it is not optional")(registry);
            let get = iface.get_device.expect("it is not optional");
            assert_eq!(get(registry, count), ptr::null_mut());
            (0..count).map(|index| get(registry, index)).collect()
        };
        // The type of each symbol is that of the field for it.
        fn cast<F: Copy>(symbol: *mut c_void) -> F {
            assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
            // SAFETY: `F` is the type that ggml's headers declare for the symbol, in every use
            // below.
            unsafe { std::mem::transmute_copy(&symbol) }
        }
        macro_rules! symbol {
            ($name:literal) => {{
                // SAFETY: a library that is never unloaded, and a C string.
                let symbol = unsafe { libc::dlsym(handle, concat!($name, "\0").as_ptr().cast()) };
                assert!(!symbol.is_null(), "ggml has no {}", $name);
                cast(symbol)
            }};
        }
        Ggml {
            device: devices[0],
            devices,
            init: symbol!("ggml_init"),
            free: symbol!("ggml_free"),
            new_tensor_2d: symbol!("ggml_new_tensor_2d"),
            add: symbol!("ggml_add"),
            get_rows: symbol!("ggml_get_rows"),
            map_custom1: symbol!("ggml_map_custom1"),
            dev_supports_op: symbol!("ggml_backend_dev_supports_op"),
            new_graph: symbol!("ggml_new_graph"),
            build_forward_expand: symbol!("ggml_build_forward_expand"),
            nbytes: symbol!("ggml_nbytes"),
            alloc_ctx_tensors: symbol!("ggml_backend_alloc_ctx_tensors_from_buft"),
            buft_get_alloc_size: symbol!("ggml_backend_buft_get_alloc_size"),
            buft_alloc_buffer: symbol!("ggml_backend_buft_alloc_buffer"),
            buffer_free: symbol!("ggml_backend_buffer_free"),
            buffer_set_usage: symbol!("ggml_backend_buffer_set_usage"),
            buffer_get_base: symbol!("ggml_backend_buffer_get_base"),
            buffer_get_size: symbol!("ggml_backend_buffer_get_size"),
            tensor_set: symbol!("ggml_backend_tensor_set"),
            tensor_get: symbol!("ggml_backend_tensor_get"),
            tensor_copy: symbol!("ggml_backend_tensor_copy"),
            tensor_memset: symbol!("ggml_backend_tensor_memset"),
            dev_get_props: symbol!("ggml_backend_dev_get_props"),
            dev_buffer_type: symbol!("ggml_backend_dev_buffer_type"),
            dev_init: symbol!("ggml_backend_dev_init"),
            backend_free: symbol!("ggml_backend_free"),
            dev_host_buffer_type: symbol!("ggml_backend_dev_host_buffer_type"),
            buft_name: symbol!("ggml_backend_buft_name"),
            buft_is_host: symbol!("ggml_backend_buft_is_host"),
            tensor_set_async: symbol!("ggml_backend_tensor_set_async"),
            tensor_get_async: symbol!("ggml_backend_tensor_get_async"),
            tensor_copy_async: symbol!("ggml_backend_tensor_copy_async"),
            tensor_set_2d: symbol!("ggml_backend_tensor_set_2d"),
            tensor_get_2d: symbol!("ggml_backend_tensor_get_2d"),
            tensor_set_2d_async: symbol!("ggml_backend_tensor_set_2d_async"),
            tensor_get_2d_async: symbol!("ggml_backend_tensor_get_2d_async"),
            synchronize: symbol!("ggml_backend_synchronize"),
            event_new: symbol!("ggml_backend_event_new"),
            event_free: symbol!("ggml_backend_event_free"),
            event_record: symbol!("ggml_backend_event_record"),
            event_wait: symbol!("ggml_backend_event_wait"),
            event_synchronize: symbol!("ggml_backend_event_synchronize"),
            graph_compute: symbol!("ggml_backend_graph_compute"),
            log_set: symbol!("ggml_log_set"),
            graph_compute_async: symbol!("ggml_backend_graph_compute_async"),
        }
    }

    pub(crate) fn alloc(&self, size: usize) -> Option<Buffer> {
        self.alloc_on(self.device, size)
    }

    pub(crate) fn alloc_on(&self, device: ggml_backend_dev_t, size: usize) -> Option<Buffer> {
        let buffer = (self.buft_alloc_buffer)((self.dev_buffer_type)(device), size);
        (!buffer.is_null()).then_some(Buffer(buffer))
    }
}

pub(crate) struct Buffer(pub(crate) ggml_backend_buffer_t);

impl Buffer {
    pub(crate) fn base(&self) -> usize {
        (Ggml::get().buffer_get_base)(self.0) as usize
    }

    pub(crate) fn size(&self) -> usize {
        (Ggml::get().buffer_get_size)(self.0)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        (Ggml::get().buffer_free)(self.0);
    }
}

/// A host buffer of the device.
pub(crate) struct HostBuffer(pub(crate) Buffer);

impl HostBuffer {
    pub(crate) fn new(size: usize) -> HostBuffer {
        let ggml = Ggml::get();
        let buft = (ggml.dev_host_buffer_type)(ggml.device);
        let buffer = (ggml.buft_alloc_buffer)(buft, size);
        assert!(!buffer.is_null(), "{size} bytes");
        HostBuffer(Buffer(buffer))
    }

    #[allow(clippy::mut_from_ref)] // the tests use one slice at a time
    pub(crate) fn floats(&self) -> &mut [f32] {
        let len = self.0.size() / 4;
        // SAFETY: the buffer has so many bytes, aligned to 64. The tests use one slice at a time,
        // and synchronise before they read it.
        unsafe { std::slice::from_raw_parts_mut(self.0.base() as *mut f32, len) }
    }
}

/// A ggml context with a graph in it.
pub(crate) struct Graph(pub(crate) *mut c_void);

impl Graph {
    pub(crate) fn new() -> Graph {
        let params = InitParams {
            mem_size: 4 << 20,
            mem_buffer: ptr::null_mut(),
            no_alloc: true,
        };
        Graph((Ggml::get().init)(params))
    }

    pub(crate) fn tensor(&self, ty: c_int, ne: [i64; 2]) -> *mut ggml_tensor {
        (Ggml::get().new_tensor_2d)(self.0, ty, ne[0], ne[1])
    }

    pub(crate) fn add(&self, a: *mut ggml_tensor, b: *mut ggml_tensor) -> *mut ggml_tensor {
        (Ggml::get().add)(self.0, a, b)
    }

    pub(crate) fn get_rows(&self, a: *mut ggml_tensor, ids: *mut ggml_tensor) -> *mut ggml_tensor {
        (Ggml::get().get_rows)(self.0, a, ids)
    }

    /// The graph that computes `result`.
    pub(crate) fn towards(&self, result: *mut ggml_tensor) -> *mut abi::ggml_cgraph {
        let cgraph = (Ggml::get().new_graph)(self.0);
        (Ggml::get().build_forward_expand)(cgraph, result);
        cgraph
    }

    /// Allocates every tensor on the device.
    pub(crate) fn place(&self) -> Buffer {
        let ggml = Ggml::get();
        let buffer = (ggml.alloc_ctx_tensors)(self.0, (ggml.dev_buffer_type)(ggml.device));
        assert!(!buffer.is_null());
        Buffer(buffer)
    }

    pub(crate) fn set<T: Copy>(&self, tensor: *mut ggml_tensor, values: &[T]) {
        let bytes = size_of_val(values);
        assert_eq!((Ggml::get().nbytes)(tensor), bytes);
        (Ggml::get().tensor_set)(tensor, values.as_ptr().cast(), 0, bytes);
    }

    pub(crate) fn get<T: Copy + Default>(&self, tensor: *mut ggml_tensor) -> Vec<T> {
        let bytes = (Ggml::get().nbytes)(tensor);
        let mut values = vec![T::default(); bytes / size_of::<T>()];
        (Ggml::get().tensor_get)(tensor, values.as_mut_ptr().cast(), 0, bytes);
        values
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        (Ggml::get().free)(self.0);
    }
}

pub(crate) struct Backend(pub(crate) ggml_backend_t);

impl Backend {
    pub(crate) fn new() -> Backend {
        let backend = (Ggml::get().dev_init)(Ggml::get().device, ptr::null());
        assert!(!backend.is_null());
        Backend(backend)
    }

    /// Computes `result` and waits for it.
    pub(crate) fn compute(&self, graph: &Graph, result: *mut ggml_tensor) -> abi::ggml_status {
        (Ggml::get().graph_compute)(self.0, graph.towards(result))
    }

    /// Submits the graph of `result`.
    pub(crate) fn submit(&self, graph: &Graph, result: *mut ggml_tensor) -> abi::ggml_status {
        (Ggml::get().graph_compute_async)(self.0, graph.towards(result))
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        (Ggml::get().backend_free)(self.0);
    }
}

pub(crate) fn text(string: *const c_char) -> String {
    // SAFETY: the callers pass strings of the device, which are valid until the process ends.
    unsafe { std::ffi::CStr::from_ptr(string) }
        .to_string_lossy()
        .into_owned()
}

pub(crate) fn stats_path() -> PathBuf {
    // Two programs of tests may run at a time.
    let name = format!("plugin-stats-{}.json", std::process::id());
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}
