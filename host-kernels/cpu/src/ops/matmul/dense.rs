//! MUL_MAT of one node.

use vgpu_engine::EngineError;
use vgpu_transport::ir::{Op, Precision};

use super::super::scratch::{Output, ScratchLayout};
use super::activations::{Activations, converted};
use super::hadamard;
use super::joint::DenseProducts;
use super::tiles::TiledProduct;
use super::weight_rows::WeightRows;
use crate::formats::Type;
use crate::gemm::{Activation, MatmulKernel};
use crate::kernel::{Compiled, Kernel};
use crate::operands::{Operands, parameters};

/// MUL_MAT: `dst[m, n] = weights[m] . x[n]`, batch by batch.
pub(in super::super) fn mul_mat(operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    parameters!(operands, Op::MulMat { hadamard, .. });
    let (weight, x, dst) = (operands.src(0), operands.src(1), operands.dst());
    let mut scratch = ScratchLayout::default();
    let mut kernels: Vec<Kernel> = Vec::new();
    if dst.elements() == 0 {
        return Ok(Compiled {
            kernels,
            scratch_bytes: 0,
        });
    }
    if hadamard && weight.ne[0] == weight.ne[1] {
        return Ok(hadamard::hadamard(operands));
    }
    let kernel = kernel_of(operands);
    let activations = Activations::new(operands, x, kernel);
    let output = Output::new(dst, &[weight, x], &mut scratch);
    let rows = WeightRows::new(operands, &kernel, &mut scratch);
    let product = TiledProduct::new(operands, activations, output, None, 1);
    kernels.extend(converted(operands, activations));
    kernels.push(match rows {
        // SAFETY: the activations are those of the only product, and the kernel before converts
        // them.
        WeightRows::InPlace => unsafe { DenseProducts::new(vec![product]).kernel(operands) },
        rows @ WeightRows::Converted { .. } => Box::new(move |w| {
            for tile in w.chunks(product.tiles(), 1).flatten() {
                // SAFETY: the activations were converted before the barrier before this kernel, and
                // `chunks` returns each tile to one worker.
                unsafe { product.tile(w, tile, rows) };
            }
            Ok(())
        }),
    });
    output.finish(&mut kernels);
    Ok(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}

/// The kernel of a product. A MUL_MAT without demands gets the rounded kernel, if there is one. A
/// MUL_MAT_ID gets the one with tiles, if its experts have enough columns on average.
///
/// Where a node demands that activations stay F32, weights whose own kernel rounds activations to
/// F16 or BF16, or keeps sums of activations in F16, get the kernel of F32. Where the node allows
/// BF16, this holds for those with F16. All others are multiplied with activations of 8 bits
/// whatever a node demands, as in ggml's CPU backend, which does not read the demand. The scales of
/// such activations hold values of up to 127 * 65504.
pub(super) fn kernel_of(operands: &Operands<'_>) -> MatmulKernel {
    let (weight, x) = (operands.src(0), operands.src(1));
    let kernel = |ty| MatmulKernel::of(ty).expect("the rules claim no other weights");
    let exact = kernel(weight.ty);
    let demand = operands.op().activation_precision();
    match *operands.op() {
        _ if demand.needs_f32_range() => match exact.activation {
            Activation::Typed(Type::Bf16) if demand == Precision::Bf16 => exact,
            Activation::Typed(Type::F16 | Type::Bf16 | Type::Q8_1) => kernel(Type::F32),
            _ => exact,
        },
        Op::MulMat {
            accumulator: Precision::Default,
            ..
        } => MatmulKernel::rounded(weight.ty, x.ne[0], x.ne[1]).unwrap_or(exact),
        Op::MulMatId {
            accumulator: Precision::Default,
            ..
        } => {
            let [used, tokens, ..] = operands.src(2).ne;
            let columns = used.saturating_mul(tokens) / weight.ne[2].max(1);
            let rounded = MatmulKernel::rounded(weight.ty, x.ne[0], columns);
            let has_tiles = |kernel: &MatmulKernel| kernel.activation == Activation::Tiles;
            rounded.filter(has_tiles).unwrap_or(exact)
        }
        _ => exact,
    }
}
