//! ggml-cpu, loaded at run time: just enough of its C API to multiply two matrices.

use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use vgpu_cpu::formats::Type;

/// ggml's `struct ggml_init_params`.
#[repr(C)]
struct InitParams {
    size: usize,
    memory: *mut c_void,
    no_alloc: bool,
}

type Object = *mut c_void;

/// A loaded ggml with one CPU backend of one thread.
pub(crate) struct Ggml {
    base: Object,
    cpu: Object,
    backend: Object,
}

/// A product ready to be computed.
pub(crate) struct Product<'a> {
    ggml: &'a Ggml,
    graph: Object,
    y: Object,
    results: usize,
    contexts: [Object; 2],
    buffers: [Object; 2],
}

/// The function `name` of a library as a function of the given type, which is that in ggml's
/// headers.
macro_rules! function {
    ($library:expr, $name:literal, fn($($arg:ty),*) $(-> $result:ty)?) => {
        std::mem::transmute::<Object, unsafe extern "C" fn($($arg),*) $(-> $result)?>(
            symbol($library, $name),
        )
    };
}

fn symbol(library: Object, name: &str) -> Object {
    let c_name = CString::new(name).unwrap();
    // SAFETY: `library` was opened and is never closed. `c_name` is a C string.
    let symbol = unsafe { libc::dlsym(library, c_name.as_ptr()) };
    assert!(!symbol.is_null(), "ggml has no {name}");
    symbol
}

impl Ggml {
    /// The ggml in `$VGPU_GGML_BIN`; `None` if the variable is not set.
    pub(crate) fn load() -> Option<Ggml> {
        let folder = PathBuf::from(std::env::var_os("VGPU_GGML_BIN")?);
        let open = |name: &str| {
            let path = CString::new(folder.join(name).as_os_str().as_bytes()).unwrap();
            // SAFETY: `path` is a C string. The initialisers of the libraries of ggml only register
            // backends. After a failure, `dlerror` returns a C string.
            unsafe {
                let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
                assert!(!library.is_null(), "{:?}", CStr::from_ptr(libc::dlerror()));
                library
            }
        };
        let (base, cpu) = (open("libggml-base.so"), open("libggml-cpu.so"));
        // SAFETY: the functions have these signatures in ggml. `backend` is a CPU backend.
        let backend = unsafe {
            let backend = function!(cpu, "ggml_backend_cpu_init", fn() -> Object)();
            function!(cpu, "ggml_backend_cpu_set_n_threads", fn(Object, c_int))(backend, 1);
            backend
        };
        Some(Ggml { base, cpu, backend })
    }

    /// The product of `rows` rows of weights with `cols` columns; `None` if ggml has no such layout
    /// for the type, or was built without it.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn product(
        &self,
        ty: Type,
        k: usize,
        rows: usize,
        cols: usize,
        weights: &[u8],
        x: &[f32],
        layout: Layout,
    ) -> Option<Product<'_>> {
        // SAFETY: ggml is called as its own examples call it; the sizes of `weights` and `x` are
        // those of the tensors they are copied to.
        unsafe {
            let init = function!(self.base, "ggml_init", fn(InitParams) -> Object);
            let tensor = function!(
                self.base,
                "ggml_new_tensor_2d",
                fn(Object, c_int, i64, i64) -> Object
            );
            let mul_mat = function!(
                self.base,
                "ggml_mul_mat",
                fn(Object, Object, Object) -> Object
            );
            let new_graph = function!(self.base, "ggml_new_graph", fn(Object) -> Object);
            let expand = function!(self.base, "ggml_build_forward_expand", fn(Object, Object));
            let plain_memory = function!(self.base, "ggml_backend_cpu_buffer_type", fn() -> Object);
            let allocate = function!(
                self.base,
                "ggml_backend_alloc_ctx_tensors_from_buft",
                fn(Object, Object) -> Object
            );
            let set = function!(
                self.base,
                "ggml_backend_tensor_set",
                fn(Object, *const c_void, usize, usize)
            );
            let context = || {
                init(InitParams {
                    size: 1 << 20,
                    memory: std::ptr::null_mut(),
                    no_alloc: true,
                })
            };
            let contexts = [context(), context()];
            // Wire ids of types equal ggml's values.
            let w = tensor(contexts[0], ty as c_int, k as i64, rows as i64);
            let memory = match layout {
                Layout::Plain => plain_memory(),
                Layout::Repacked => function!(
                    self.cpu,
                    "_Z35ggml_backend_cpu_repack_buffer_typev",
                    fn() -> Object
                )(),
                Layout::Amx => self.amx_memory(),
            };
            let is_known = layout != Layout::Amx || (!memory.is_null() && AMX_TYPES.contains(&ty));
            if !is_known {
                free(self, contexts, [std::ptr::null_mut(); 2]);
                return None;
            }
            let w_buffer = allocate(contexts[0], memory);
            if layout == Layout::Repacked && !has_traits(w) {
                free(self, contexts, [w_buffer, std::ptr::null_mut()]);
                return None;
            }
            let input = tensor(contexts[1], Type::F32 as c_int, k as i64, cols as i64);
            let y = mul_mat(contexts[1], w, input);
            let graph = new_graph(contexts[1]);
            expand(graph, y);
            let buffers = [w_buffer, allocate(contexts[1], plain_memory())];
            set(w, weights.as_ptr().cast(), 0, weights.len());
            set(input, x.as_ptr().cast(), 0, size_of_val(x));
            Some(Product {
                ggml: self,
                graph,
                y,
                results: rows * cols,
                contexts,
                buffers,
            })
        }
    }
}

impl Ggml {
    /// The buffer type whose products use AMX; null if ggml was built without it.
    fn amx_memory(&self) -> Object {
        // SAFETY: `cpu` is a library of ggml. If it has the function, it has this signature.
        unsafe {
            let name = c"_Z28ggml_backend_amx_buffer_typev";
            let symbol = libc::dlsym(self.cpu, name.as_ptr());
            if symbol.is_null() {
                return std::ptr::null_mut();
            }
            std::mem::transmute::<Object, unsafe extern "C" fn() -> Object>(symbol)()
        }
    }
}

/// Where the weights of a product are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// As in a model file.
    Plain,
    /// In the buffer type `CPU_REPACK`.
    Repacked,
    /// In the buffer type `AMX`.
    Amx,
}

/// The types that ggml multiplies with AMX (`qtype_has_amx_kernels`).
const AMX_TYPES: [Type; 7] = [
    Type::Q4_0,
    Type::Q4_1,
    Type::Q8_0,
    Type::Q4K,
    Type::Q5K,
    Type::Q6K,
    Type::Iq4Xs,
];

/// Whether ggml found a layout of its own for the tensor: its `extra` field, after `type`,
/// `buffer`, `ne`, `nb`, `op`, `op_params`, `flags`, `src`, `view_src`, `view_offs`, `data` and
/// `name`.
///
/// # Safety
/// `tensor` is a ggml tensor allocated in the repacking buffer type.
unsafe fn has_traits(tensor: Object) -> bool {
    const EXTRA: usize = 8 + 8 + 32 + 32 + 4 + 64 + 4 + 80 + 8 + 8 + 8 + 64;
    // SAFETY: the offset is that of `extra` in the release the cache builds.
    unsafe {
        !tensor
            .cast::<u8>()
            .add(EXTRA)
            .cast::<Object>()
            .read()
            .is_null()
    }
}

/// # Safety
/// The contexts and buffers belong to ggml and are not used again. Buffers may be null.
unsafe fn free(ggml: &Ggml, contexts: [Object; 2], buffers: [Object; 2]) {
    // SAFETY: the caller guarantees that the objects belong to ggml and are not used again. The
    // functions accept null.
    unsafe {
        let free_buffer = function!(ggml.base, "ggml_backend_buffer_free", fn(Object));
        let free_context = function!(ggml.base, "ggml_free", fn(Object));
        buffers.into_iter().for_each(|buffer| free_buffer(buffer));
        contexts
            .into_iter()
            .for_each(|context| free_context(context));
    }
}

impl Product<'_> {
    /// Computes the product.
    pub(crate) fn compute(&self) {
        // SAFETY: the graph and the backend exist as long as this product.
        let status = unsafe {
            let compute = function!(
                self.ggml.base,
                "ggml_backend_graph_compute",
                fn(Object, Object) -> c_int
            );
            compute(self.ggml.backend, self.graph)
        };
        assert_eq!(status, 0, "ggml failed to compute");
    }

    /// The results of the last computation.
    pub(crate) fn result(&self) -> Vec<f32> {
        let mut y = vec![0f32; self.results];
        // SAFETY: `y` has `results` floats, the size of the tensor.
        unsafe {
            let get = function!(
                self.ggml.base,
                "ggml_backend_tensor_get",
                fn(Object, *mut c_void, usize, usize)
            );
            get(self.y, y.as_mut_ptr().cast(), 0, size_of_val(&y[..]));
        }
        y
    }
}

impl Drop for Product<'_> {
    fn drop(&mut self) {
        // SAFETY: the product owns the contexts and buffers, and is dropped.
        unsafe { free(self.ggml, self.contexts, self.buffers) };
    }
}
