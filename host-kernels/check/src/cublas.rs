//! cuBLASLt's matrix products, as a reference for measurements, if the library is installed.
//!
//! The library of CUDA 13 or 12 is loaded at run time; the functions used here are the same in
//! both.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::time::Duration;

use cudarc::driver::sys;
use libloading::Library;
use vgpu_transport::ir::Type;

use super::CheckError;
use super::rates::median_time;

/// File names of the library, the newest first.
const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];

/// Workspace in bytes.
const WORKSPACE: usize = 64 << 20;

/// Products between two synchronisations, which hides the launch latency.
const BATCH: usize = 8;

// From cublas_api.h, cublasLt.h and library_types.h.
const CUDA_R_32F: c_int = 0;
const CUDA_R_16F: c_int = 2;
const CUDA_R_16BF: c_int = 14;
const CUBLAS_COMPUTE_32F: c_int = 68;
const CUBLAS_OP_T: c_int = 1;
const DESC_TRANSA: c_int = 3;
const PREF_MAX_WORKSPACE_BYTES: c_int = 1;

type Handle = *mut c_void;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Default)]
struct Choice {
    algorithm: [u64; 8],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

const _: () = assert!(size_of::<Choice>() == 96);

type Make = unsafe extern "C" fn(*mut Handle) -> c_int;
type Drop1 = unsafe extern "C" fn(Handle) -> c_int;
type MakeProduct = unsafe extern "C" fn(*mut Handle, c_int, c_int) -> c_int;
type MakeLayout = unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> c_int;
type Set = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int;
type Choose = unsafe extern "C" fn(
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    Handle,
    c_int,
    *mut Choice,
    *mut c_int,
) -> c_int;
type Multiply = unsafe extern "C" fn(
    Handle,
    Handle,
    *const c_void,
    u64,
    Handle,
    u64,
    Handle,
    *const c_void,
    u64,
    Handle,
    u64,
    Handle,
    *const [u64; 8],
    u64,
    usize,
    sys::CUstream,
) -> c_int;

/// The library. The process never unloads it: unloading does not undo the library's initialisation
/// of the process.
pub(super) struct Cublas {
    cublas: &'static Library,
}

impl Cublas {
    /// Loads the library.
    ///
    /// # Errors
    ///
    /// [`CheckError::CublasMissing`].
    pub(super) fn load() -> Result<Cublas, CheckError> {
        let mut reason = String::new();
        for name in NAMES {
            // SAFETY: `name` is a library of NVIDIA, whose initialisers set up only its own state.
            match unsafe { Library::new(name) } {
                Ok(library) => {
                    let library = Box::leak(Box::new(library));
                    return Ok(Cublas { cublas: library });
                }
                Err(error) if reason.is_empty() => reason = error.to_string(),
                Err(_) => {}
            }
        }
        Err(CheckError::CublasMissing { reason })
    }

    /// Seconds of a product of `n` by `n` weights with `columns` columns, on GPU `ordinal`.
    ///
    /// # Errors
    ///
    /// If the driver or cuBLASLt fails, or cuBLASLt does not multiply `ty`.
    pub(super) fn seconds(
        &self,
        ordinal: u32,
        ty: Type,
        n: u64,
        columns: u64,
        time: Duration,
    ) -> Result<f64, CheckError> {
        // SAFETY: the call takes no pointer, and tries to load NVIDIA's driver library.
        if !unsafe { sys::is_culib_present() } {
            return Err(CheckError::DriverMissing);
        }
        // SAFETY: the pointers are to the local variables `device` and `context`. This thread
        // retains the primary context, makes it current for `measure` and releases it once.
        // `measure` frees its memory and handles before it returns.
        unsafe {
            let mut device = 0;
            driver("cuInit", sys::cuInit(0))?;
            driver(
                "cuDeviceGet",
                sys::cuDeviceGet(&mut device, ordinal as c_int),
            )?;
            let mut context = ptr::null_mut();
            let retained = sys::cuDevicePrimaryCtxRetain(&mut context, device);
            driver("cuDevicePrimaryCtxRetain", retained)?;
            let outcome = driver("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))
                .and_then(|()| self.measure(ty, n, columns, time));
            sys::cuDevicePrimaryCtxRelease_v2(device);
            outcome
        }
    }

    /// [`Cublas::seconds`] in the current context.
    ///
    /// # Safety
    /// A CUDA context is current on this thread until the function returns.
    unsafe fn measure(
        &self,
        ty: Type,
        n: u64,
        columns: u64,
        time: Duration,
    ) -> Result<f64, CheckError> {
        let operand_type = match ty {
            Type::F16 => CUDA_R_16F,
            Type::Bf16 => CUDA_R_16BF,
            other => return Err(CheckError::CublasType(other)),
        };
        // SAFETY: the functions have these types in cublasLt.h since CUDA 11. Every handle comes
        // from `made` and is dropped at the end of the block.
        // Pointers to attributes are to constants of the length passed with them. `room` holds
        // device memory of the sizes that the layouts `a`, `b` and `c` and `WORKSPACE` name.
        unsafe {
            let multiply: Multiply = self.function(b"cublasLtMatmul\0")?;
            let handle = self.made(b"cublasLtDestroy\0", |to| {
                self.function::<Make>(b"cublasLtCreate\0")
                    .map(|make| make(to))
            })?;
            let product = self.made(b"cublasLtMatmulDescDestroy\0", |to| {
                let make: MakeProduct = self.function(b"cublasLtMatmulDescCreate\0")?;
                Ok(make(to, CUBLAS_COMPUTE_32F, CUDA_R_32F))
            })?;
            let set: Set = self.function(b"cublasLtMatmulDescSetAttribute\0")?;
            let transposed = ptr::from_ref(&CUBLAS_OP_T).cast();
            library(
                "cublasLtMatmulDescSetAttribute",
                set(product.0, DESC_TRANSA, transposed, 4),
            )?;
            let layout = |ty: c_int, rows: u64, columns: u64| {
                self.made(b"cublasLtMatrixLayoutDestroy\0", |to| {
                    let make: MakeLayout = self.function(b"cublasLtMatrixLayoutCreate\0")?;
                    Ok(make(to, ty, rows, columns, rows as i64))
                })
            };
            // cuBLAS is column-major: row-major weights are a transposed matrix.
            let (a, b) = (
                layout(operand_type, n, n)?,
                layout(operand_type, n, columns)?,
            );
            let c = layout(CUDA_R_32F, n, columns)?;
            let preference = self.made(b"cublasLtMatmulPreferenceDestroy\0", |to| {
                let make: Make = self.function(b"cublasLtMatmulPreferenceCreate\0")?;
                Ok(make(to))
            })?;
            let prefer: Set = self.function(b"cublasLtMatmulPreferenceSetAttribute\0")?;
            let most = ptr::from_ref(&WORKSPACE).cast();
            let code = prefer(
                preference.0,
                PREF_MAX_WORKSPACE_BYTES,
                most,
                size_of::<usize>(),
            );
            library("cublasLtMatmulPreferenceSetAttribute", code)?;
            let choose: Choose = self.function(b"cublasLtMatmulAlgoGetHeuristic\0")?;
            let (mut choice, mut found) = (Choice::default(), 0);
            let code = choose(
                handle.0,
                product.0,
                a.0,
                b.0,
                c.0,
                c.0,
                preference.0,
                1,
                &mut choice,
                &mut found,
            );
            library("cublasLtMatmulAlgoGetHeuristic", code)?;
            if found == 0 {
                return Err(CheckError::CublasAlgorithm);
            }
            let room = [
                2 * n * n,
                2 * n * columns,
                4 * n * columns,
                WORKSPACE as u64,
            ];
            let room: Vec<DeviceMemory> = room
                .into_iter()
                .map(|size| DeviceMemory::new(size))
                .collect::<Result<_, _>>()?;
            let (one, zero) = (1f32, 0f32);
            let run = || {
                for _ in 0..BATCH {
                    let code = multiply(
                        handle.0,
                        product.0,
                        ptr::from_ref(&one).cast(),
                        room[0].0,
                        a.0,
                        room[1].0,
                        b.0,
                        ptr::from_ref(&zero).cast(),
                        room[2].0,
                        c.0,
                        room[2].0,
                        c.0,
                        &choice.algorithm,
                        room[3].0,
                        WORKSPACE,
                        ptr::null_mut(),
                    );
                    library("cublasLtMatmul", code)?;
                }
                driver(
                    "cuStreamSynchronize",
                    sys::cuStreamSynchronize(ptr::null_mut()),
                )
            };
            Ok(median_time(time, run)? / BATCH as f64)
        }
    }

    /// The library's function `name`, which ends with a zero byte.
    ///
    /// # Safety
    /// `F` is the type that cublasLt.h declares for the function.
    unsafe fn function<F: Copy>(&self, name: &'static [u8]) -> Result<F, CheckError> {
        // SAFETY: `F` is the function's type. The library is never unloaded, so the pointer that
        // is copied out of the symbol stays valid.
        let found = unsafe { self.cublas.get::<F>(name) };
        found.map(|f| *f).map_err(|_| CheckError::CublasFunction {
            name: String::from_utf8_lossy(name)
                .trim_end_matches('\0')
                .to_owned(),
        })
    }

    /// A handle created by `make`, destroyed by the function called `destroy`.
    fn made(
        &self,
        destroy: &'static [u8],
        make: impl FnOnce(*mut Handle) -> Result<c_int, CheckError>,
    ) -> Result<Owned, CheckError> {
        // SAFETY: `destroy` names one of the functions `cublasLt*Destroy`, which all have the type
        // `Drop1` in cublasLt.h.
        let destroy: Drop1 = unsafe { self.function(destroy) }?;
        let mut handle = ptr::null_mut();
        library("creating a cuBLASLt handle", make(&mut handle)?)?;
        Ok(Owned(handle, destroy))
    }
}

/// An owned cuBLASLt handle.
struct Owned(Handle, Drop1);

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: `made` got the handle from the library together with this function, and only
        // this drop passes the handle to it.
        unsafe { (self.1)(self.0) };
    }
}

/// Owned device memory.
struct DeviceMemory(sys::CUdeviceptr);

impl DeviceMemory {
    /// Allocates `size` bytes.
    ///
    /// # Safety
    /// A CUDA context is current on this thread until the value is dropped.
    unsafe fn new(size: u64) -> Result<DeviceMemory, CheckError> {
        let mut address = 0;
        // SAFETY: the pointer is to the local variable `address`, and a context is current.
        driver("cuMemAlloc", unsafe {
            sys::cuMemAlloc_v2(&mut address, size as usize)
        })?;
        let room = DeviceMemory(address);
        // Not zeros: a GPU draws less power with zeros, and is faster.
        // SAFETY: `address` has just been allocated with `size` bytes in the current context.
        driver("cuMemsetD8", unsafe {
            sys::cuMemsetD8_v2(address, 0x3a, size as usize)
        })?;
        Ok(room)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory, and only this drop frees it. A measurement ends with
        // a synchronisation; after a failed call `cuMemFree` itself waits for the kernels.
        unsafe { sys::cuMemFree_v2(self.0) };
    }
}

fn driver(call: &'static str, code: sys::CUresult) -> Result<(), CheckError> {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(CheckError::Driver { call, code }),
    }
}

fn library(call: &'static str, code: c_int) -> Result<(), CheckError> {
    match code {
        0 => Ok(()),
        status => Err(CheckError::Cublas { call, status }),
    }
}
