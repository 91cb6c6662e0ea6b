//! Compares the CPU engine's block formats and dot products with those of a real ggml:
//! `libggml-base` and `libggml-cpu` of the build that `cargo xtask setup` puts into the cache
//! folder, loaded with `dlopen`.
#![cfg(feature = "inproc")]

mod common;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use common::cached;
use vgpu_cpu::formats::{Format, Type};
use vgpu_cpu::gemm::{GemmArgs, Level, MatmulKernel};
use vgpu_gguf::Rng;

type ToFloat = unsafe extern "C" fn(src: *const c_void, dst: *mut f32, n: i64);
type FromFloat = unsafe extern "C" fn(src: *const f32, dst: *mut c_void, n: i64);
type VecDot = unsafe extern "C" fn(
    n: c_int,
    result: *mut f32,
    result_stride: usize,
    w: *const c_void,
    w_stride: usize,
    x: *const c_void,
    x_stride: usize,
    rows: c_int,
);

/// ggml's `struct ggml_type_traits`.
#[repr(C)]
struct Traits {
    name: *const c_char,
    block: i64,
    interleave: i64,
    bytes: usize,
    quantized: bool,
    to_float: Option<ToFloat>,
    from_float_ref: Option<FromFloat>,
}

/// ggml's `struct ggml_type_traits_cpu`.
#[repr(C)]
struct CpuTraits {
    from_float: Option<FromFloat>,
    vec_dot: Option<VecDot>,
    vec_dot_type: c_int,
    rows: i64,
}

/// `ggml_quantize_chunk`: writes the types that need to know the importance of each element.
type QuantizeChunk = unsafe extern "C" fn(
    ty: c_int,
    src: *const f32,
    dst: *mut c_void,
    start: i64,
    rows: i64,
    row_elements: i64,
    importance: *const f32,
) -> usize;

/// A loaded ggml. Never unloaded, because ggml starts threads.
struct Ggml {
    quantize_chunk: QuantizeChunk,
    traits: unsafe extern "C" fn(c_int) -> *const Traits,
    cpu_traits: unsafe extern "C" fn(c_int) -> *const CpuTraits,
}

impl Ggml {
    fn load() -> Ggml {
        let bin = cached("build-llama-0.3.36/bin");
        let (base, cpu) = (
            open(&bin.join("libggml-base.so")),
            open(&bin.join("libggml-cpu.so")),
        );
        // SAFETY: the types are those of ggml.h and ggml-cpu.h. `ggml_cpu_init` fills the tables
        // that the functions in the traits read, and may be called at any time.
        unsafe {
            let init: unsafe extern "C" fn() = std::mem::transmute(symbol(cpu, "ggml_cpu_init"));
            init();
            Ggml {
                quantize_chunk: std::mem::transmute::<*mut c_void, QuantizeChunk>(symbol(
                    base,
                    "ggml_quantize_chunk",
                )),
                traits: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int) -> *const Traits,
                >(symbol(base, "ggml_get_type_traits")),
                cpu_traits: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(c_int) -> *const CpuTraits,
                >(symbol(cpu, "ggml_get_type_traits_cpu")),
            }
        }
    }

    /// The traits of `ty`. The wire ids of types are ggml's values in the release that this test
    /// loads.
    fn traits(&self, ty: Type) -> (&'static Traits, &'static CpuTraits) {
        // SAFETY: ggml returns entries of constant tables.
        let (traits, cpu) = unsafe {
            (
                &*(self.traits)(ty as c_int),
                &*(self.cpu_traits)(ty as c_int),
            )
        };
        // SAFETY: names are constant C strings.
        let name = unsafe { CStr::from_ptr(traits.name) };
        assert_eq!(name.to_str(), Ok(ty.ggml_name()));
        (traits, cpu)
    }
}

/// Loads a library for the rest of the process.
fn open(path: &Path) -> *mut c_void {
    let name = CString::new(path.to_str().expect("the cache has a printable path")).unwrap();
    // SAFETY: the library is the ggml that xtask built, whose initialisers have no preconditions;
    // `dlerror` returns a string.
    unsafe {
        let library = libc::dlopen(name.as_ptr(), libc::RTLD_NOW);
        assert!(
            !library.is_null(),
            "cannot load {}: {}",
            path.display(),
            CStr::from_ptr(libc::dlerror()).to_string_lossy()
        );
        library
    }
}

/// A function of a library.
fn symbol(library: *mut c_void, name: &str) -> *mut c_void {
    let c_name = CString::new(name).unwrap();
    // SAFETY: the library was opened and is never closed.
    let symbol = unsafe { libc::dlsym(library, c_name.as_ptr()) };
    assert!(!symbol.is_null(), "ggml has no {name}");
    symbol
}

/// The sum of four uniform numbers between -0.5 and 0.5.
fn float(random: &mut Rng) -> f32 {
    (0..4)
        .map(|_| (random.next_u64() >> 40) as f32 / (1 << 24) as f32 - 0.5)
        .sum()
}

/// Rows that distinguish quantisers: of several magnitudes, one-sided, sparse, flat, with ties.
fn rows(random: &mut Rng) -> Vec<Vec<f32>> {
    const N: usize = 1024;
    let mut rows = vec![
        vec![0.0; N],
        vec![-0.75; N],
        (0..N).map(|i| i as f32 / N as f32).collect(),
        (0..N).map(|i| (i % 256) as f32 - 127.0).collect(),
        (0..N)
            .map(|i| if i % 37 == 0 { 5.0 } else { 0.0 })
            .collect(),
        (0..N)
            .map(|i| if i < 32 { 1e-3 } else { 1e3 } * (0.1 * i as f32).sin())
            .collect(),
    ];
    for scale in [1e-20, 1e-6, 0.02, 1.0, 300.0] {
        for _ in 0..40 {
            rows.push((0..N).map(|_| scale * float(random)).collect());
        }
        rows.push((0..N).map(|_| scale * (float(random) + 1.5)).collect());
        rows.push((0..N).map(|_| scale * float(random).powi(5)).collect());
    }
    rows
}

fn formats() -> impl Iterator<Item = &'static Format> {
    Type::ALL.iter().filter_map(|&ty| Format::of(ty))
}

#[test]
fn quantisers_produce_the_bytes_of_ggml() {
    let ggml = Ggml::load();
    let mut compared = 0;
    for format in formats().filter(|format| !CODEBOOKS.contains(&format.ty)) {
        let (traits, cpu) = ggml.traits(format.ty);
        let ours = format.quantize_row;
        let Some(theirs) = cpu.from_float.or(traits.from_float_ref) else {
            continue;
        };
        compared += 1;
        for x in rows(&mut Rng::new(7, 0)) {
            let mut expected = vec![0; format.row_bytes(x.len())];
            let mut got = expected.clone();
            // SAFETY: the vectors hold the row.
            unsafe {
                theirs(x.as_ptr(), expected.as_mut_ptr().cast(), x.len() as i64);
                ours(x.as_ptr(), got.as_mut_ptr(), x.len());
            }
            for (block, (got, expected)) in got
                .chunks(format.bytes)
                .zip(expected.chunks(format.bytes))
                .enumerate()
            {
                let x = &x[block * format.block..][..format.block];
                if format.ty == Type::Iq4Nl && x.iter().all(|x| x.abs() < 1e-15) {
                    // A block of values near zero: ggml leaves the quants of the block before.
                    assert_eq!(got[..2], expected[..2]);
                    continue;
                }
                assert_eq!(got, expected, "{:?}, block {block}: {x:?}", format.ty);
            }
        }
    }
    assert!(
        compared >= 23,
        "only {compared} formats have quantisers on both sides"
    );
}

/// Formats whose quants are indices into codebooks. ggml's CPU backend does not write them. ggml's
/// quantising tool does, with other bytes for every importance matrix.
const CODEBOOKS: [Type; 7] = [
    Type::Iq1S,
    Type::Iq1M,
    Type::Iq2Xxs,
    Type::Iq2Xs,
    Type::Iq2S,
    Type::Iq3Xxs,
    Type::Iq3S,
];

#[test]
fn codebook_quantisers_have_at_most_the_error_of_ggml() {
    let ggml = Ggml::load();
    for format in CODEBOOKS.map(|ty| Format::of(ty).unwrap()) {
        // Relative to the sum of squares of a row, summed over all rows.
        let (mut ours, mut theirs) = (0.0, 0.0);
        for x in rows(&mut Rng::new(17, 0)) {
            let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
            if squares < 1e-2 {
                continue; // the scale, a half-precision float, is 0 or nearly 0
            }
            let error = |bytes: &[u8]| -> f64 {
                let mut y = vec![0.0f32; x.len()];
                // SAFETY: the vectors hold the row.
                unsafe { (format.dequantize_row)(bytes.as_ptr(), y.as_mut_ptr(), y.len()) };
                let terms = x.iter().zip(&y);
                terms
                    .map(|(&x, &y)| (f64::from(x) - f64::from(y)).powi(2))
                    .sum::<f64>()
                    / squares
            };
            let mut bytes = vec![0; format.row_bytes(x.len())];
            let importance = vec![1.0f32; x.len()];
            let n = x.len() as i64;
            // SAFETY: the vectors hold the row, and an importance for each of its elements.
            let written = unsafe {
                let ty = format.ty as c_int;
                let out = bytes.as_mut_ptr().cast();
                (ggml.quantize_chunk)(ty, x.as_ptr(), out, 0, 1, n, importance.as_ptr())
            };
            assert_eq!(written, bytes.len());
            theirs += error(&bytes);
            // SAFETY: the vectors hold the row.
            unsafe { (format.quantize_row)(x.as_ptr(), bytes.as_mut_ptr(), x.len()) };
            ours += error(&bytes);
        }
        println!("{:?}: {ours:.4}, ggml {theirs:.4}", format.ty);
        assert!(
            ours <= theirs,
            "{:?}: an error of {ours}, of ggml {theirs}",
            format.ty
        );
    }
}

#[test]
fn dequantised_values_equal_those_of_ggml() {
    let ggml = Ggml::load();
    let mut random = Rng::new(11, 0);
    for format in formats() {
        let (traits, _) = ggml.traits(format.ty);
        // ggml has no conversion for F32.
        let Some(theirs) = traits.to_float else {
            continue;
        };
        let n = 16 * format.block;
        for _ in 0..200 {
            // Any bytes are a block. Scales that are infinite or NaN must agree, too.
            let bytes: Vec<u8> = (0..format.row_bytes(n))
                .map(|_| random.next_u64() as u8)
                .collect();
            let (mut got, mut expected) = (vec![0.0f32; n], vec![0.0f32; n]);
            // SAFETY: the vectors hold the row.
            unsafe {
                theirs(bytes.as_ptr().cast(), expected.as_mut_ptr(), n as i64);
                (format.dequantize_row)(bytes.as_ptr(), got.as_mut_ptr(), n);
            }
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                assert!(
                    got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(),
                    "{:?}, element {i}: {got:?} instead of {expected:?}",
                    format.ty
                );
            }
        }
    }
}

/// A row of quantised numbers.
fn weights(format: &Format, k: usize, random: &mut Rng) -> Vec<u8> {
    let mut row = vec![0u8; format.row_bytes(k)];
    let values: Vec<f32> = (0..k).map(|_| float(random)).collect();
    // SAFETY: the vectors hold the row.
    unsafe { (format.quantize_row)(values.as_ptr(), row.as_mut_ptr(), k) };
    row
}

#[test]
fn dot_products_agree_with_ggml_up_to_the_order_of_sums() {
    let ggml = Ggml::load();
    const K: usize = 4096;
    let mut random = Rng::new(13, 0);
    for format in formats() {
        let Some(scalar) = MatmulKernel::at(format.ty, Level::Scalar) else {
            continue;
        };
        let (_, cpu) = ggml.traits(format.ty);
        let dot = cpu
            .vec_dot
            .expect("ggml multiplies with every type that the engine multiplies with");
        assert_eq!(
            cpu.vec_dot_type,
            scalar.activation.format().ty as c_int,
            "{:?}",
            format.ty
        );
        let activation = scalar.activation.format();
        let w = weights(format, K, &mut random);
        let x_values: Vec<f32> = (0..K).map(|_| float(&mut random)).collect();
        let mut x = vec![0; activation.row_bytes(K)];
        let mut w_values = vec![0.0; K];
        let mut expected = 0.0;
        // SAFETY: the vectors hold the rows.
        unsafe {
            (format.dequantize_row)(w.as_ptr(), w_values.as_mut_ptr(), K);
            (scalar.quantize_activation)(x_values.as_ptr(), x.as_mut_ptr(), K);
            dot(
                K as c_int,
                &mut expected,
                0,
                w.as_ptr().cast(),
                0,
                x.as_ptr().cast(),
                0,
                1,
            );
        }
        let size: f32 = w_values
            .iter()
            .zip(&x_values)
            .map(|(w, x)| (w * x).abs())
            .sum();
        for level in Level::ALL.into_iter().filter(|level| level.is_supported()) {
            let kernel = MatmulKernel::at(format.ty, level).unwrap();
            let mut got = f32::NAN;
            // SAFETY: one row, one column, one result.
            unsafe {
                (kernel.gemm)(&GemmArgs {
                    k: K,
                    w: w.as_ptr(),
                    w_stride: w.len(),
                    rows: 1,
                    x: x.as_ptr(),
                    x_stride: x.len(),
                    cols: 1,
                    dst: &mut got,
                    dst_stride: 1,
                    table: None,
                });
            }
            assert!(
                (got - expected).abs() <= 2e-6 * size,
                "{:?} at {level:?}: {got} instead of {expected}, magnitudes add up to {size}",
                format.ty
            );
        }
    }
}
