//! MUL_MAT, MUL_MAT_ID, OUT_PROD: products of matrices.
//!
//! The first two multiply rows of weights with columns of activations. A first kernel brings the
//! activations to the type that the weights are multiplied with ([`Activations`]), a second deals
//! tiles of the result to the threads; for MUL_MAT_ID, the tokens are grouped by expert in between.
//!
//! No result depends on how many threads there are: columns are cut by sizes alone, and how rows are
//! cut makes no difference to a product (see [`crate::cpu::gemm`]).

use vgpu_transport::ir::{Op, OpKind, Precision, Rule, Type, TypeSet};

use super::gather::{RowReader, real_types};
use super::glu::gate;
use super::staging::{Layout, Output};
use crate::cpu::formats::Format;
use crate::cpu::gemm::MatmulKernel;
use crate::cpu::mix::Mix;
use crate::cpu::plan::{Compiled, Fault, Kernel, Operands, check_index};
use crate::cpu::pool::Worker;
use crate::cpu::simd::{Simd, Task, chunks, dispatch};
use crate::cpu::view::View;
use crate::engine::EngineError;

/// Most columns in a tile, and most rows where the weights are unpacked for all columns of a tile: what
/// [`crate::cpu::gemm`] takes at once.
const TILE_COLUMNS: usize = 256;
const TILE_ROWS: usize = 256;

/// Bytes of weights in a tile of few columns: enough to make the dealing of tiles cheap.
const TILE_WEIGHT_BYTES: usize = 128 << 10;

/// Rows are cut into multiples of a cache line of results, so that no two threads write to the same.
const LINE_FLOATS: usize = 16;

/// Elements of a column that a thread converts at once, a multiple of every block.
const PIECE: usize = 2048;

/// What this file runs.
pub(super) fn rules() -> Vec<Rule> {
    let f32 = TypeSet::of(&[Type::F32]);
    let plain = TypeSet::of(&[Type::F32, Type::F16, Type::Bf16]);
    let weights: Vec<Type> = Type::ALL
        .iter()
        .copied()
        .filter(|&ty| MatmulKernel::of(ty).is_some())
        .collect();
    let weights = TypeSet::of(&weights);
    vec![
        Rule::new(OpKind::MulMat, f32, &[weights, real_types()]),
        Rule::new(OpKind::MulMatId, f32, &[weights, real_types()]),
        Rule::new(OpKind::OutProd, f32, &[real_types(), plain]),
    ]
}

/// Columns of activations in the type that a weight is multiplied with.
#[derive(Clone, Copy)]
struct Activations {
    source: View,
    reader: RowReader,
    kernel: MatmulKernel,
    /// Whether the columns are used as they are in the source, not converted in kept memory.
    in_place: bool,
    /// Whether a node before has converted them.
    done: bool,
    /// Whether each thread converts the rows that it has just made.
    by_rows: bool,
    /// Bytes of one column in the activation type.
    column_bytes: usize,
}

impl Activations {
    fn new(operands: &Operands<'_>, source: View, kernel: MatmulKernel) -> Activations {
        let format = Format::of(kernel.activation).expect("every weight's activation is a format");
        let column_bytes = format.row_bytes(source.ne[0]);
        let in_place = source.ty == kernel.activation && source.dense_rows();
        let bytes = (source.rows().checked_mul(column_bytes))
            .expect("converted columns are a small multiple of operands that were validated");
        let done = in_place || operands.keep(source, kernel.activation, bytes);
        Activations {
            source,
            reader: RowReader::new(&source),
            kernel,
            in_place,
            done,
            by_rows: !done && operands.follows_rows(source),
            column_bytes,
        }
    }

    /// Strides of dimensions 1 to 3 of the converted columns, in bytes.
    fn strides(&self) -> [usize; 3] {
        let View { ne, nb, .. } = self.source;
        match self.in_place {
            true => [nb[1], nb[2], nb[3]],
            false => {
                let column = self.column_bytes;
                [column, column * ne[1], column * ne[1] * ne[2]]
            }
        }
    }

    /// Where the first converted column lies.
    fn base(&self, w: &Worker<'_>) -> *const u8 {
        match self.in_place {
            true => self.source.ptr(),
            false => w.kept(),
        }
    }

    /// Converts this thread's part of the columns, unless that is done.
    fn convert(&self, w: &Worker<'_>) {
        if self.done {
            return;
        }
        let k = self.source.ne[0];
        let pieces = k.div_ceil(PIECE);
        let format = Format::of(self.kernel.activation).expect("as in `new`");
        let mut buffer = [0f32; PIECE];
        let units = match self.by_rows {
            true => {
                let rows = w.share(self.source.rows());
                rows.start * pieces..rows.end * pieces
            }
            false => w.share(self.source.rows() * pieces),
        };
        for unit in units {
            let (column, start) = (unit / pieces, unit % pieces * PIECE);
            let n = PIECE.min(k - start);
            let row = self.source.row_ptr(self.source.row_index(column));
            let to = column * self.column_bytes + format.row_bytes(start);
            // SAFETY: the row and its elements lie in the source; the place in kept memory is this
            // piece's alone, inside what `new` asked for; blocks divide `PIECE` and, by the IR's rules, `k`.
            unsafe {
                let values = match self.reader.in_place(row) {
                    Some(row) => row.add(start),
                    None => {
                        self.reader.read(row, start, n, buffer.as_mut_ptr());
                        buffer.as_ptr()
                    }
                };
                (self.kernel.quantize_activation)(values, w.kept().add(to), n);
            }
        }
    }
}

/// How many of `columns` make a tile: as equal parts as whole cache lines of results allow.
fn tile_columns(columns: usize) -> usize {
    let tiles = columns.div_ceil(TILE_COLUMNS).max(1);
    columns.div_ceil(tiles).max(1).next_multiple_of(LINE_FLOATS)
}

/// How many rows of weights make a tile of `columns`, beside `others` tiles of the same rows.
fn tile_rows(
    kernel: &MatmulKernel,
    k: usize,
    rows: usize,
    columns: usize,
    others: usize,
    workers: usize,
) -> usize {
    let format = Format::of(kernel.weight).expect("every weight type is a format");
    let most = if columns < kernel.panel_cols {
        TILE_WEIGHT_BYTES / format.row_bytes(k).max(1)
    } else {
        TILE_ROWS
    };
    // At least four tiles for each thread, if there are rows enough.
    let cuts = (4 * workers).div_ceil(others.max(1));
    most.min(rows.div_ceil(cuts))
        .max(1)
        .next_multiple_of(LINE_FLOATS.next_multiple_of(kernel.row_tile.max(1)))
}

/// One level of the loops over tiles: how often, and the bytes to step in each operand.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Loop {
    count: usize,
    w: usize,
    x: usize,
    dst: usize,
}

impl Loop {
    const ONCE: Loop = Loop {
        count: 1,
        w: 0,
        x: 0,
        dst: 0,
    };
}

/// The loops around the product of two matrices.
struct Nest {
    /// The columns that are multiplied with the same weights at once.
    columns: Loop,
    /// The others.
    outer: [Loop; 4],
}

impl Nest {
    /// Weights repeat over groups of activations. Where the columns of all of a group lie at equal
    /// distances they are taken as one matrix, so that the weights are read once.
    fn new(weight: &View, x: &View, x_strides: [usize; 3], dst_strides: [usize; 3]) -> Nest {
        let repeats = [x.ne[2] / weight.ne[2].max(1), x.ne[3] / weight.ne[3].max(1)];
        let step = |count, d: usize| Loop {
            count,
            w: 0,
            x: x_strides[d],
            dst: dst_strides[d],
        };
        let mut same_weights = vec![step(x.ne[1], 0), step(repeats[0], 1), step(repeats[1], 2)];
        same_weights.retain(|l| l.count != 1);
        let mut folded: Vec<Loop> = Vec::new();
        for l in same_weights {
            match folded.last_mut() {
                Some(inner) if l.x == inner.x * inner.count && l.dst == inner.dst * inner.count => {
                    inner.count *= l.count;
                }
                _ => folded.push(l),
            }
        }
        let weights = [0, 1].map(|d| Loop {
            count: weight.ne[d + 2],
            w: weight.nb[d + 2],
            x: x_strides[d + 1].saturating_mul(repeats[d]),
            dst: dst_strides[d + 1].saturating_mul(repeats[d]),
        });
        let mut rest = folded.iter().skip(1).copied();
        Nest {
            columns: folded.first().copied().unwrap_or(Loop::ONCE),
            outer: [
                rest.next().unwrap_or(Loop::ONCE),
                rest.next().unwrap_or(Loop::ONCE),
                weights[0],
                weights[1],
            ],
        }
    }

    /// How often the outer loops run.
    fn batches(&self) -> usize {
        self.outer.iter().map(|l| l.count).product()
    }

    /// Bytes from the beginning of each operand in round `batch` of the outer loops.
    fn offsets(&self, mut batch: usize) -> Loop {
        let mut at = Loop::ONCE;
        for l in &self.outer {
            let i = batch % l.count;
            batch /= l.count;
            at.w += i * l.w;
            at.x += i * l.x;
            at.dst += i * l.dst;
        }
        at
    }
}

/// MUL_MAT: `dst[m, n] = weights[m] . x[n]`, batch by batch.
pub(super) fn mul_mat(operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    let (weight, x, dst) = (operands.src(0), operands.src(1), operands.dst());
    let mut scratch = Layout::default();
    let mut kernels: Vec<Kernel> = Vec::new();
    if dst.elements() == 0 {
        return Ok(Compiled {
            kernels,
            scratch_bytes: 0,
        });
    }
    if matches!(operands.op(), Op::MulMat { hadamard: true, .. }) && weight.ne[0] == weight.ne[1] {
        return Ok(hadamard(x, dst, operands.workers()));
    }
    let kernel = kernel_of(operands);
    let activations = Activations::new(operands, x, kernel);
    let output = Output::new(dst, &[weight, x], &mut scratch);
    let product = Product::new(operands, activations, output, 1);
    kernels.extend(converted(operands, activations));
    kernels.push(Box::new(move |w| {
        for tile in w.chunks(product.tiles(), 1).flatten() {
            // SAFETY: conversion has finished, a barrier ago; no other tile has these results.
            unsafe { product.tile(w, tile) };
        }
        Ok(())
    }));
    output.finish(&mut kernels);
    Ok(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}

/// How a MUL_MAT is computed.
fn kernel_of(operands: &Operands<'_>) -> MatmulKernel {
    let (weight, x) = (operands.src(0), operands.src(1));
    let exact = MatmulKernel::of(weight.ty).expect("the rules claim no other weights");
    match operands.op() {
        Op::MulMat {
            accumulator: Precision::Default,
            ..
        } => MatmulKernel::rounded(weight.ty, x.ne[0], x.ne[1]).unwrap_or(exact),
        _ => exact,
    }
}

/// The kernel that converts the activations of MUL_MAT, if one has to.
fn converted(operands: &Operands<'_>, activations: Activations) -> Option<Kernel> {
    (!activations.done).then(|| -> Kernel {
        operands.converts_first(activations.source);
        Box::new(move |w| {
            activations.convert(w);
            Ok(())
        })
    })
}

/// A MUL_MAT, cut into tiles.
struct Product {
    kernel: MatmulKernel,
    weight: View,
    activations: Activations,
    output: Output,
    nest: Nest,
    columns: usize,
    grain_columns: usize,
    column_tiles: usize,
    grain_rows: usize,
    row_tiles: usize,
    /// Tiles of the same rows.
    others: usize,
}

impl Product {
    /// `beside`: how many products are computed at once, this one included.
    fn new(
        operands: &Operands<'_>,
        activations: Activations,
        output: Output,
        beside: usize,
    ) -> Product {
        let (weight, x, kernel) = (operands.src(0), operands.src(1), activations.kernel);
        let nest = Nest::new(&weight, &x, activations.strides(), output.strides());
        let (k, rows) = (weight.ne[0], weight.ne[1]);
        let columns = nest.columns.count;
        let grain_columns = tile_columns(columns);
        let column_tiles = columns.div_ceil(grain_columns);
        let others = column_tiles * nest.batches();
        let at_once = grain_columns.min(columns);
        let workers = operands.workers();
        let grain_rows = tile_rows(&kernel, k, rows, at_once, others * beside, workers);
        Product {
            kernel,
            weight,
            activations,
            output,
            nest,
            columns,
            grain_columns,
            column_tiles,
            grain_rows,
            row_tiles: rows.div_ceil(grain_rows),
            others,
        }
    }

    /// How many tiles there are. Neighbouring ones share their activations, which stay in the cache.
    fn tiles(&self) -> usize {
        self.others * self.row_tiles
    }

    /// Computes a tile.
    ///
    /// # Safety
    /// The activations have been converted, a barrier ago. Nobody else computes this tile.
    unsafe fn tile(&self, w: &Worker<'_>, tile: usize) {
        let row = tile % self.row_tiles * self.grain_rows;
        let column = tile / self.row_tiles % self.column_tiles * self.grain_columns;
        let at = self.nest.offsets(tile / self.row_tiles / self.column_tiles);
        let columns = self.nest.columns;
        // SAFETY: the tile's rows, columns and results are inside the operands; no other tile has these results, which
        // overlap no source.
        unsafe {
            let out = self.output.base(w.scratch());
            self.multiply(
                w,
                (at.w, row),
                at.x + column * columns.x,
                self.grain_columns.min(self.columns - column),
                out.add(at.dst + column * columns.dst)
                    .cast::<f32>()
                    .add(row),
                columns.dst / size_of::<f32>(),
            );
        }
    }

    /// The rows of weights of a tile from `row` on, times `columns` columns of activations, which lie `x` bytes behind the
    /// first.
    ///
    /// # Safety
    /// As [`Product::tile`]; rows and columns are inside the operands, which lie `weights` bytes behind the first, and the
    /// results have room in `out`, whose columns are `stride` floats apart.
    unsafe fn multiply(
        &self,
        w: &Worker<'_>,
        (weights, row): (usize, usize),
        x: usize,
        columns: usize,
        out: *mut f32,
        stride: usize,
    ) {
        let weight = &self.weight;
        // SAFETY: the caller's promise.
        unsafe {
            (self.kernel.gemm)(
                weight.ne[0],
                weight.ptr().add(weights + row * weight.nb[1]),
                weight.nb[1],
                self.grain_rows.min(weight.ne[1] - row),
                self.activations.base(w).add(x),
                self.nest.columns.x,
                columns,
                out,
                stride,
            );
        }
    }
}

/// Products of the same activations: their tiles are dealt together.
pub(super) fn products(nodes: &[Operands<'_>]) -> Option<Compiled> {
    let first = nodes.first()?;
    let kernel = kernel_of(first);
    let is_plain = |node: &Operands<'_>| {
        let weight = node.src(0);
        matches!(
            node.op(),
            Op::MulMat {
                hadamard: false,
                ..
            }
        ) && kernel_of(node).activation == kernel.activation
            && node.dst().distinct_rows()
            && !weight.overlaps(&node.dst())
            && !first.src(1).overlaps(&node.dst())
    };
    if !nodes.iter().all(is_plain) {
        return None;
    }
    let mut scratch = Layout::default();
    let activations = Activations::new(first, first.src(1), kernel);
    let each = nodes.iter().map(|node| {
        let output = Output::new(node.dst(), &[node.src(0), node.src(1)], &mut scratch);
        let activations = Activations {
            kernel: kernel_of(node),
            ..activations
        };
        Product::new(node, activations, output, nodes.len())
    });
    let products: Vec<Product> = each.collect();
    let tiles = products.iter().map(Product::tiles).sum();
    let mut kernels: Vec<Kernel> = Vec::from_iter(converted(first, activations));
    kernels.push(Box::new(move |w| {
        for mut tile in w.chunks(tiles, 1).flatten() {
            for product in &products {
                if tile < product.tiles() {
                    // SAFETY: as in MUL_MAT; the destinations of a group are apart from each other.
                    unsafe { product.tile(w, tile) };
                    break;
                }
                tile -= product.tiles();
            }
        }
        Ok(())
    }));
    Some(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}

/// Two products of few columns and the unit that one of them gates. Nobody wants the products themselves.
pub(super) fn gated(nodes: &[Operands<'_>]) -> Option<Compiled> {
    let [one, other, unit] = nodes else {
        return None;
    };
    let Op::Glu {
        kind, alpha, limit, ..
    } = *unit.op()
    else {
        return None;
    };
    let (kernel, dst, x) = (kernel_of(one), unit.dst(), one.src(1));
    let is_plain = |node: &Operands<'_>| {
        matches!(
            node.op(),
            Op::MulMat {
                hadamard: false,
                ..
            }
        ) && kernel_of(node).activation == kernel.activation
            && node.src(0).ty == one.src(0).ty
            && node.src(0).ne == one.src(0).ne
            && !node.src(0).overlaps(&dst)
            && node.src(0).rows() == node.src(0).ne[1]
    };
    let fits = [one, other].into_iter().all(is_plain)
        && x.rows() == x.ne[1]
        && dst.ty == Type::F32
        && dst.dense_rows()
        && dst.distinct_rows()
        && !x.overlaps(&dst)
        && dst.rows() == x.ne[1]
        && dst.ne[0] == one.src(0).ne[1];
    if !fits {
        return None;
    }
    let (activated, factor) = match unit.src(0) == one.dst() {
        true => (one, other),
        false => (other, one),
    };
    let mut scratch = Layout::default();
    let activations = Activations::new(one, x, kernel);
    let product = |node: &Operands<'_>, scratch: &mut Layout| {
        let activations = Activations {
            kernel: kernel_of(node),
            ..activations
        };
        let output = Output::new(dst, &[], scratch);
        Product::new(node, activations, output, 1)
    };
    let [activated, factor] = [activated, factor].map(|node| product(node, &mut scratch));
    let rows = activated.weight.ne[1];
    // Weights of one type and size are cut alike.
    let grain = activated.grain_rows;
    let columns = x.ne[1];
    // Each thread has a tile of each product.
    let tile_floats = (grain * columns).next_multiple_of(LINE_FLOATS);
    let own = scratch.room(2 * one.workers(), tile_floats * size_of::<f32>());
    let mut kernels: Vec<Kernel> = Vec::from_iter(converted(one, activations));
    kernels.push(Box::new(move |w| {
        // SAFETY: the parts are this thread's own, inside what was asked for.
        let [a, b] = unsafe {
            let own = w.scratch().add(own).cast::<f32>();
            [0, 1].map(|i| own.add((2 * w.index() + i) * tile_floats))
        };
        for tile in w.chunks(rows.div_ceil(grain), 1).flatten() {
            let row = tile * grain;
            let n = grain.min(rows - row);
            // SAFETY: conversion has finished, a barrier ago; the rows are inside the weights, of which `multiply` takes as
            // many as a tile has; no other tile has these results.
            unsafe {
                activated.multiply(w, (0, row), 0, columns, a, grain);
                factor.multiply(w, (0, row), 0, columns, b, grain);
                for column in 0..columns {
                    let to = dst.row_ptr([column, 0, 0]).cast::<f32>().add(row);
                    let from = [a, b].map(|x| x.add(column * grain).cast_const());
                    gate([alpha, limit], kind, to, from, n);
                }
            }
        }
        Ok(())
    }));
    Some(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}

/// MUL_MAT whose weights are known to be the normalised Hadamard matrix, in `n log n` steps a column.
fn hadamard(x: View, dst: View, workers: usize) -> Compiled {
    let reader = RowReader::new(&x);
    let n = x.ne[0];
    let mut scratch = Layout::default();
    let own = scratch.room(workers, n * size_of::<f32>());
    Compiled {
        kernels: vec![Box::new(move |w| {
            // SAFETY: each thread has `n` floats of scratch to itself.
            let column = unsafe {
                let start = w.scratch().add(own).cast::<f32>().add(w.index() * n);
                start.write_bytes(0, n);
                std::slice::from_raw_parts_mut(start, n)
            };
            for row in w.share(x.rows()) {
                let index = x.row_index(row);
                // SAFETY: the row lies in the source, and in the destination, whose rows are dense.
                unsafe { reader.read(x.row_ptr(index), 0, n, column.as_mut_ptr()) };
                dispatch(WalshHadamard(column));
                let to = dst.row_ptr(index).cast::<f32>();
                // SAFETY: as above.
                unsafe { to.copy_from_nonoverlapping(column.as_ptr(), n) };
            }
            Ok(())
        })],
        scratch_bytes: scratch.bytes(),
    }
}

/// The fast Walsh-Hadamard transform of a power of two of floats, which leaves their norm as it is.
struct WalshHadamard<'a>(&'a mut [f32]);

impl Task for WalshHadamard<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let x = self.0;
        let scale = 1.0 / (x.len() as f32).sqrt();
        x.iter_mut().for_each(|x| *x *= scale);
        let mut half = 1;
        while half < x.len() {
            for pair in x.chunks_exact_mut(2 * half) {
                let (a, b) = pair.split_at_mut(half);
                chunks::<S>(half, |i, n| {
                    let (u, v) = (simd.load(&a[i..i + n]), simd.load(&b[i..i + n]));
                    (u + v).store(&mut a[i..i + n]);
                    (u - v).store(&mut b[i..i + n]);
                });
            }
            half *= 2;
        }
    }
}

/// Columns of one expert that are multiplied with the same rows.
#[derive(Clone, Copy)]
struct ExpertTile {
    expert: usize,
    /// The first column, counted in the order of experts.
    first: usize,
    columns: usize,
}

/// Which columns go to which expert, written by one thread into scratch and read by all.
///
/// A *pair* is a choice of an expert by a token, `token * used + slot`; each gives one column of the
/// result.
#[derive(Clone, Copy)]
struct Grouping {
    ids: View,
    experts: usize,
    pairs: usize,
    /// The most columns in a tile.
    grain: usize,
    most_tiles: usize,
    /// Offsets in scratch: the expert of each pair (`u32`), where each expert's columns begin
    /// (`usize`, one more than experts), the pairs in order of experts (`usize`), the tiles, and how
    /// many there are (`usize`).
    chosen: usize,
    starts: usize,
    order: usize,
    tiles: usize,
    count: usize,
}

impl Grouping {
    fn new(ids: View, experts: usize, grain: usize, scratch: &mut Layout) -> Grouping {
        let pairs = ids.ne[0] * ids.ne[1];
        let most_tiles = pairs.min(experts) + pairs / grain;
        Grouping {
            ids,
            experts,
            pairs,
            grain,
            most_tiles,
            chosen: scratch.room(pairs, size_of::<u32>()),
            starts: scratch.room(experts + 1, size_of::<usize>()),
            order: scratch.room(pairs, size_of::<usize>()),
            tiles: scratch.room(most_tiles, size_of::<ExpertTile>()),
            count: scratch.room(1, size_of::<usize>()),
        }
    }

    /// Reads the ids, each once, and groups the pairs. For one thread.
    fn group(&self, w: &Worker<'_>) -> Result<(), Fault> {
        // SAFETY: the parts of scratch asked for in `new`, aligned to 64 bytes; until the barrier they
        // are this thread's alone. They hold integers, for which any bytes are valid.
        let (chosen, starts, order, tiles, count) = unsafe {
            let part = |offset| w.scratch().add(offset);
            (
                std::slice::from_raw_parts_mut(part(self.chosen).cast::<u32>(), self.pairs),
                std::slice::from_raw_parts_mut(part(self.starts).cast::<usize>(), self.experts + 1),
                std::slice::from_raw_parts_mut(part(self.order).cast::<usize>(), self.pairs),
                std::slice::from_raw_parts_mut(
                    part(self.tiles).cast::<ExpertTile>(),
                    self.most_tiles,
                ),
                &mut *part(self.count).cast::<usize>(),
            )
        };
        starts.fill(0);
        let used = self.ids.ne[0];
        for (pair, chosen) in chosen.iter_mut().enumerate() {
            let (slot, token) = (pair % used, pair / used);
            let id = self
                .ids
                .row_ptr([token, 0, 0])
                .wrapping_add(slot * self.ids.nb[0]);
            // Read once: what is checked is what is used, whoever changes the memory meanwhile.
            // SAFETY: an element of the ids, which are aligned i32.
            let id = unsafe { id.cast::<i32>().read_volatile() };
            let expert = check_index(i64::from(id), self.experts)?;
            *chosen = expert as u32;
            starts[expert + 1] += 1;
        }
        *count = 0;
        for expert in 0..self.experts {
            let (first, columns) = (starts[expert], starts[expert + 1]);
            starts[expert + 1] += first;
            for offset in (0..columns).step_by(self.grain) {
                tiles[*count] = ExpertTile {
                    expert,
                    first: first + offset,
                    columns: self.grain.min(columns - offset),
                };
                *count += 1;
            }
        }
        for (pair, &expert) in chosen.iter().enumerate() {
            let place = &mut starts[expert as usize];
            order[*place] = pair;
            *place += 1;
        }
        Ok(())
    }

    /// The tiles, and the pairs in their order.
    ///
    /// # Safety
    /// [`Grouping::group`] has finished, a barrier ago.
    unsafe fn get<'w>(&self, w: &'w Worker<'_>) -> (&'w [ExpertTile], &'w [usize]) {
        // SAFETY: the parts of scratch that `group` has filled; nobody writes to them any more.
        unsafe {
            let count = w.scratch().add(self.count).cast::<usize>().read();
            let tiles = w.scratch().add(self.tiles).cast::<ExpertTile>();
            let order = w.scratch().add(self.order).cast::<usize>();
            (
                std::slice::from_raw_parts(tiles, count),
                std::slice::from_raw_parts(order, self.pairs),
            )
        }
    }
}

/// MUL_MAT_ID: `dst[:, slot, token] = weights[:, :, ids[slot, token]] . x[:, slot % n, token]`.
pub(super) fn mul_mat_id(operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    let (weight, x, ids, dst) = (
        operands.src(0),
        operands.src(1),
        operands.src(2),
        operands.dst(),
    );
    let mut scratch = Layout::default();
    let mut kernels: Vec<Kernel> = Vec::new();
    if dst.elements() == 0 {
        return Ok(Compiled {
            kernels,
            scratch_bytes: 0,
        });
    }
    let kernel = MatmulKernel::of(weight.ty).expect("the rules claim no other weights");
    let activations = Activations::new(operands, x, kernel);
    let output = Output::new(dst, &[weight, x, ids], &mut scratch);
    let [k, rows, experts, _] = weight.ne;
    let [used, tokens, ..] = ids.ne;
    let pairs = used * tokens;

    // A single token has (nearly) one column for each expert: nothing to bring together.
    let together = tokens > 1;
    let grain_columns = if together { tile_columns(pairs) } else { 1 };
    let grouping = Grouping::new(ids, experts, grain_columns, &mut scratch);
    let others = pairs.min(experts).max(pairs.div_ceil(grain_columns));
    let at_once = pairs.div_ceil(others);
    let grain_rows = tile_rows(&kernel, k, rows, at_once, others, operands.workers());
    let row_tiles = rows.div_ceil(grain_rows);
    let gathered = scratch.room(if together { pairs } else { 0 }, activations.column_bytes);
    let tile_floats = (grain_rows * grain_columns).next_multiple_of(LINE_FLOATS);
    let results = scratch.room(operands.workers(), tile_floats * size_of::<f32>());

    // Where the column of a pair lies once it is converted.
    let x_strides = activations.strides();
    let column_of = move |pair: usize| {
        let (slot, token) = (pair % used, pair / used);
        slot % x.ne[1] * x_strides[0] + token * x_strides[1]
    };
    kernels.push(Box::new(move |w| {
        if w.index() == 0 {
            grouping.group(w)?;
        }
        activations.convert(w);
        Ok(())
    }));
    if together {
        kernels.push(Box::new(move |w| {
            // SAFETY: the step before has grouped.
            let (_, order) = unsafe { grouping.get(w) };
            let bytes = activations.column_bytes;
            for place in w.share(pairs) {
                // SAFETY: a converted column, and its place in what was asked for.
                unsafe {
                    let from = activations.base(w).add(column_of(order[place]));
                    let to = w.scratch().add(gathered + place * bytes);
                    from.copy_to_nonoverlapping(to, bytes);
                }
            }
            Ok(())
        }));
    }
    kernels.push(Box::new(move |w| {
        // SAFETY: an earlier step has grouped.
        let (tiles, order) = unsafe { grouping.get(w) };
        let [slot_stride, token_stride, _] = output.strides();
        for unit in w.chunks(tiles.len() * row_tiles, 1).flatten() {
            let tile = tiles[unit / row_tiles];
            let row = unit % row_tiles * grain_rows;
            let height = grain_rows.min(rows - row);
            // SAFETY: the tile's rows and columns are inside the operands; conversion and gathering
            // have finished, a barrier ago; the results are this thread's, and no other tile has
            // the part of the destination they are copied to.
            unsafe {
                let columns = if together {
                    w.scratch()
                        .add(gathered + tile.first * activations.column_bytes)
                } else {
                    activations
                        .base(w)
                        .add(column_of(order[tile.first]))
                        .cast_mut()
                };
                let result = w
                    .scratch()
                    .add(results)
                    .cast::<f32>()
                    .add(w.index() * tile_floats);
                (kernel.gemm)(
                    k,
                    weight
                        .ptr()
                        .add(tile.expert * weight.nb[2] + row * weight.nb[1]),
                    weight.nb[1],
                    height,
                    columns,
                    activations.column_bytes,
                    tile.columns,
                    result,
                    grain_rows,
                );
                for column in 0..tile.columns {
                    let pair = order[tile.first + column];
                    let to = pair % used * slot_stride + pair / used * token_stride;
                    let to = output.base(w.scratch()).add(to).cast::<f32>().add(row);
                    to.copy_from_nonoverlapping(result.add(column * grain_rows), height);
                }
            }
        }
        Ok(())
    }));
    output.finish(&mut kernels);
    Ok(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}

/// Rows of the result of OUT_PROD in a tile.
const OUTER_ROWS: usize = 16;

/// Columns in a tile, a multiple of every block.
const OUTER_COLUMNS: usize = 512;

/// Rows of the sources that are multiplied at once.
const OUTER_TERMS: usize = 64;

/// OUT_PROD: `dst[m, n] = sum over k of a[m, k] * b[n, k]`, batch by batch.
pub(super) fn out_prod(operands: &Operands<'_>) -> Result<Compiled, EngineError> {
    let (a, b, dst) = (operands.src(0), operands.src(1), operands.dst());
    let mut scratch = Layout::default();
    let mut kernels: Vec<Kernel> = Vec::new();
    if dst.elements() == 0 {
        return Ok(Compiled {
            kernels,
            scratch_bytes: 0,
        });
    }
    let output = Output::new(dst, &[a, b], &mut scratch);
    let (a_reader, b_reader) = (RowReader::new(&a), RowReader::new(&b));
    let [m, n, ne2, ne3] = dst.ne;
    let terms = a.ne[1];
    let (column_tiles, row_tiles) = (m.div_ceil(OUTER_COLUMNS), n.div_ceil(OUTER_ROWS));
    // Each thread has the rows of `a`, what they are multiplied with, and the sums.
    let sizes = [
        OUTER_TERMS * OUTER_COLUMNS,
        OUTER_ROWS * OUTER_TERMS,
        OUTER_ROWS * OUTER_COLUMNS,
    ];
    let each = sizes.iter().sum::<usize>();
    let own = scratch.room(operands.workers(), each * size_of::<f32>());

    kernels.push(Box::new(move |w| {
        // SAFETY: the parts are this thread's own, inside what was asked for.
        let [rows, weights, sums] = unsafe {
            let own = w.scratch().add(own).cast::<f32>().add(w.index() * each);
            [own, own.add(sizes[0]), own.add(sizes[0] + sizes[1])]
        };
        let strides = output.strides();
        for tile in w.chunks(column_tiles * row_tiles * ne2 * ne3, 1).flatten() {
            let column = tile % column_tiles * OUTER_COLUMNS;
            let row = tile / column_tiles % row_tiles * OUTER_ROWS;
            let batch = tile / column_tiles / row_tiles;
            let (i2, i3) = (batch % ne2, batch / ne2);
            let (a2, a3) = (i2 / (ne2 / a.ne[2]), i3 / (ne3 / a.ne[3]));
            let (width, height) = (OUTER_COLUMNS.min(m - column), OUTER_ROWS.min(n - row));
            // SAFETY: the buffers have room for a tile; the indices are inside the sources, whose
            // batches repeat into those of the destination; blocks divide `column` and `width`; no
            // other tile has this part of the destination.
            unsafe {
                sums.write_bytes(0, height * OUTER_COLUMNS);
                for first in (0..terms).step_by(OUTER_TERMS) {
                    let count = OUTER_TERMS.min(terms - first);
                    for t in 0..count {
                        let from = a.row_ptr([first + t, a2, a3]);
                        a_reader.read(from, column, width, rows.add(t * OUTER_COLUMNS));
                        // A column of the weights: `n` lies along the rows of `b`.
                        let from = b.row_ptr([first + t, i2, i3]);
                        let mut weight = [0f32; OUTER_ROWS];
                        b_reader.read(from, row, height, weight.as_mut_ptr());
                        for (i, &weight) in weight[..height].iter().enumerate() {
                            *weights.add(i * OUTER_TERMS + t) = weight;
                        }
                    }
                    let mix = Mix {
                        results: height,
                        terms: count,
                        n: width,
                        weights,
                        weights_stride: OUTER_TERMS,
                        weights_step: 1,
                        rows,
                        rows_stride: OUTER_COLUMNS,
                        out: sums,
                        out_stride: OUTER_COLUMNS,
                    };
                    mix.add();
                }
                for i in 0..height {
                    let to = (row + i) * strides[0] + i2 * strides[1] + i3 * strides[2];
                    let to = output.base(w.scratch()).add(to).cast::<f32>().add(column);
                    to.copy_from_nonoverlapping(sums.add(i * OUTER_COLUMNS), width);
                }
            }
        }
        Ok(())
    }));
    output.finish(&mut kernels);
    Ok(Compiled {
        kernels,
        scratch_bytes: scratch.bytes(),
    })
}
