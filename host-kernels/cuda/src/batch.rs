//! Launches of several plans as one sequence.
//!
//! The plans of several guests with the same model multiply with the same weights, one layer after
//! the other. In a batch, the columns of all members of such a product are multiplied in one launch
//! (`kernels/mmv.cuh`, `vg_mmv_*_joint`), so that each weight is read once. What is between two
//! such products, each member launches for itself. So plans can run as a batch if they have the
//! same sequence of such products, and about as much work of their own: their *key*. The numbers
//! of their tokens, and their other launches, may differ.
//!
//! Each member has scratch memory and a fault cell of its own
//! ([`OwnPlace`](crate::launch::place::OwnPlace)), and has got to one of its own launches at any
//! time. The launches of a batch are a [`LaunchSequence`], which runs in pieces, yields, and
//! becomes CUDA graphs as that of a plan does. The sequence of the last batch is kept, so that the
//! same members run it again.

use std::ops::Range;

use vgpu_transport::ir::{Graph, Op};
use zerocopy::{FromBytes as _, FromZeros as _, IntoBytes as _};

use crate::device::{Address, Device, KernelId, Launch};
use crate::graph_exec::{GraphTemplates, LaunchSequence};
use crate::kernel_set::{UsableKernels, names};
use crate::launch::grid::{MMV_THREADS, div_ceil, mmv_blocks_across};
use crate::launch::planned::PlannedLaunch;
use crate::launch::q8::{MMV_COLUMNS, q8_row_bytes};
use crate::params::{
    VG_JOINT_COLUMNS, VG_OP_ADD, VgMmvColumn, VgMmvJointParams, VgMmvParams, VgView,
};
use vgpu_engine::work::{self, Speed};

/// The most plans of a batch.
pub(crate) const MAX_BATCH: usize = 16;

/// The most columns of a joint launch.
const MAX_COLUMNS: usize = VG_JOINT_COLUMNS as usize;

/// The most bytes of scratch memory of a plan that runs in batches.
pub(crate) const MAX_OWN_SCRATCH: u64 = 16 << 20;

/// The most bytes of the activation cache of such a plan.
pub(crate) const OWN_CACHE_BYTES: u64 = 2 << 20;

/// A product of a plan that runs with those of others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct JointProduct {
    /// The index of the plan's own launch of the product.
    pub(crate) at: usize,
    /// The kernel for the columns of several plans, and the blocks of it that are resident.
    kernel: KernelId,
    resident: i64,
}

/// Finds the launches of a plan that others can share.
pub(crate) struct JointFinder<'a> {
    device: &'a dyn Device,
    kernels: &'a UsableKernels,
    /// The addresses of memory for weights. Several buffers may hold the same bytes there.
    weights: &'a [Range<Address>],
    /// For each kernel that was met, the joint one with its resident blocks.
    known: Vec<(KernelId, Option<(KernelId, i64)>)>,
}

impl<'a> JointFinder<'a> {
    pub(crate) fn new(
        (device, kernels): (&'a dyn Device, &'a UsableKernels),
        weights: &'a [Range<Address>],
    ) -> JointFinder<'a> {
        JointFinder {
            device,
            kernels,
            weights,
            known: Vec::new(),
        }
    }

    /// The joint kernel of a kernel for matrix-vector products, if it may be used, and the blocks
    /// of it that are resident at a time.
    fn joint_kernel(&mut self, kernel: KernelId) -> Option<(KernelId, i64)> {
        if let Some((_, found)) = self.known.iter().find(|(known, _)| *known == kernel) {
            return *found;
        }
        let (device, kernels) = (self.device, self.kernels);
        let find = || {
            let name = device.kernel_name(kernel);
            let base = name.strip_suffix("_cols8").unwrap_or(name);
            base.strip_prefix("vg_mmv_")?;
            let joint = format!("{base}_joint");
            let at = names().binary_search(&joint.as_str()).ok()?;
            let joint = kernels.find(names()[at]).ok()?;
            let each = device.blocks_per_sm(joint, MMV_THREADS, 0);
            Some((joint, i64::from(device.sm_count()) * i64::from(each)))
        };
        let found = find();
        self.known.push((kernel, found));
        found
    }

    /// The product that a launch is, if plans can share it: of few columns, with weights that no
    /// launch of the plan writes and that other buffers may hold.
    pub(crate) fn product(
        &mut self,
        at: usize,
        launch: &Launch,
    ) -> Option<(JointProduct, VgMmvParams)> {
        let (kernel, resident) = self.joint_kernel(launch.kernel)?;
        let params = VgMmvParams::read_from_bytes(&launch.params).ok()?;
        let products = &params.products[..params.count as usize];
        let is_shared = |w: &VgView| {
            let range = w.address_range();
            let is_in = |of: &Range<Address>| of.start <= range.start && range.end <= of.end;
            self.weights.iter().any(is_in)
        };
        let fits = params.ids.data == 0
            && params.has_constant_weights != 0
            && products[0].dst.rows() <= MMV_COLUMNS
            && products
                .iter()
                .all(|it| it.w.ne[2..] == [1, 1] && is_shared(&it.w));
        let product = JointProduct {
            at,
            kernel,
            resident,
        };
        fits.then_some((product, params))
    }
}

/// What the launches of a product have in common if one joint launch can do the work of all.
pub(crate) fn extend_key(key: &mut Vec<u64>, params: &VgMmvParams) {
    key.extend([
        u64::from(params.count) << 32 | u64::from(params.unit),
        u64::from(params.c[0].to_bits()) << 32 | u64::from(params.c[1].to_bits()),
        u64::from(params.splits_rows),
    ]);
    for it in &params.products[..params.count as usize] {
        let VgView {
            data,
            ne,
            nb,
            type_,
            ..
        } = it.w;
        key.extend([data, u64::from(type_)]);
        key.extend(ne.map(|n| n as u64));
        key.extend(nb.map(|n| n as u64));
        let add = if it.add.data == 0 { 0 } else { it.add.nb[0] };
        key.extend([it.dst.ne[0], it.dst.nb[0], add].map(|n| n as u64));
    }
}

/// Whether most products of a graph are of few columns. Of a prompt, only the last one is.
pub(crate) fn is_of_few_tokens(graph: &Graph) -> bool {
    let products = { graph.nodes.iter() }.filter(|node| matches!(node.op, Op::MulMat { .. }));
    let columns = products.map(|node| graph.dst(node).shape.ne[1]);
    let few = columns.clone().filter(|&n| n <= MMV_COLUMNS as u64);
    2 * few.count() > columns.count()
}

/// How much work a graph is, relative to that of its products with weights, and in all.
pub(crate) fn work_of(graph: &Graph, speed: &Speed) -> (u64, u64) {
    let (mut joint, mut own) = (0u64, 0u64);
    for node in &graph.nodes {
        let time = work::of(graph, node).time(speed).as_nanos();
        let time = u64::try_from(time).unwrap_or(u64::MAX);
        let to = match node.op {
            Op::MulMat { .. } => &mut joint,
            _ => &mut own,
        };
        *to = to.saturating_add(time);
    }
    // Members wait for each other. So what a plan computes for itself is of one order of magnitude,
    // relative to its products, or no more than four times as much as these.
    let ratio = u64::from((own / joint.max(1)).max(1).ilog2() / 2);
    (ratio, own.saturating_add(joint).max(1))
}

/// The columns of a launch.
fn columns(params: &VgMmvParams) -> impl Iterator<Item = VgMmvColumn> {
    let VgMmvParams { x, .. } = *params;
    let count = params.count as usize;
    let products = params.products;
    let [_, n1, n2, n3] = products[0].dst.ne;
    let batches = (0..n3).flat_map(move |i3| (0..n2).map(move |i2| (i2, i3)));
    let indices = batches.flat_map(move |(i2, i3)| (0..n1).map(move |i1| [i1, i2, i3]));
    let quants = params.quants;
    let tile = q8_row_bytes(&x);
    let scales = params.scales;
    indices.enumerate().map(move |(number, at)| {
        let mut column = VgMmvColumn {
            x: match quants {
                0 => address(&x, at),
                quants => quants + number as u64 * tile,
            },
            scales: scales + number as u64 * tile / 2,
            ..VgMmvColumn::default()
        };
        for (m, it) in products[..count].iter().enumerate() {
            column.dst[m] = address(&it.dst, at);
            // A bias may have one row for all columns.
            let row: [i64; 3] = std::array::from_fn(|d| match it.add.ne[d + 1] {
                1 => 0,
                _ => at[d],
            });
            column.add[m] = match it.add.data {
                0 => 0,
                _ => address(&it.add, row),
            };
        }
        column
    })
}

/// The address of the first element of a row.
fn address(of: &VgView, [i1, i2, i3]: [i64; 3]) -> Address {
    of.data
        .wrapping_add_signed(i1 * of.nb[1] + i2 * of.nb[2] + i3 * of.nb[3])
}

/// A plan as a member of a batch, at the launch that it has got to.
pub(crate) struct Member<'a> {
    pub(crate) launches: &'a [Launch],
    pub(crate) joint: &'a [JointProduct],
    pub(crate) done: usize,
}

impl Member<'_> {
    /// The products that are done.
    pub(crate) fn passed(&self) -> usize {
        passed(self.joint, self.done)
    }
}

/// How many of the products are before launch `done`.
pub(crate) fn passed(joint: &[JointProduct], done: usize) -> usize {
    joint.partition_point(|product| product.at < done)
}

/// The members whose work a launch is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Owners(pub(crate) Vec<u8>);

/// The launches of the members of a batch, in an order in which they can run.
pub(crate) struct Joined {
    /// The numbers of the plans.
    pub(crate) members: Vec<u64>,
    /// The launch that each member has got to.
    pub(crate) done: Vec<usize>,
    pub(crate) sequence: LaunchSequence,
    /// For each launch.
    pub(crate) owners: Vec<Owners>,
    /// Launches of the sequence that `done` accounts for.
    counted: usize,
    starts: Vec<usize>,
}

impl Joined {
    /// The sequence for these members, whose plans have the numbers `numbers`. `is_apart`: each
    /// product is a launch for each member. `group`: the number of their key.
    pub(crate) fn new(
        members: &[Member<'_>],
        numbers: Vec<u64>,
        (group, is_apart): (u64, bool),
        templates: &GraphTemplates,
    ) -> Joined {
        let mut steps: Vec<PlannedLaunch> = Vec::new();
        let mut owners: Vec<Owners> = Vec::new();
        let mut add = |launch: Launch, of: Owners, may_yield: bool| {
            steps.push(PlannedLaunch {
                launch,
                node: steps.len(),
                may_yield,
                // A plan with a divided node runs alone.
                is_long: false,
                covers: 1,
            });
            owners.push(of);
        };
        let products = members.first().map_or(0, |member| member.joint.len());
        let first = members.iter().map(Member::passed).min().unwrap_or(0);
        for product in first..=products {
            let here: Vec<usize> = (0..members.len())
                .filter(|&m| members[m].passed() <= product)
                .collect();
            for &m in &here {
                let Member {
                    launches,
                    joint,
                    done,
                } = members[m];
                let begin = match product.checked_sub(1) {
                    Some(before) => done.max(joint[before].at + 1),
                    None => done,
                };
                let end = joint.get(product).map_or(launches.len(), |it| it.at);
                for launch in &launches[begin..end] {
                    add(launch.clone(), Owners(vec![m as u8]), true);
                }
            }
            if product == products {
                break;
            }
            let own = |m: usize| &members[m].launches[members[m].joint[product].at];
            let parts = if is_apart {
                here.iter().map(|&m| vec![m]).collect()
            } else {
                parts(&here, |m| own(m).grid_columns())
            };
            let count = parts.len();
            for (i, part) in parts.into_iter().enumerate() {
                let launch = match part[..] {
                    [m] => own(m).clone(),
                    _ => joint_launch(
                        &members[part[0]].joint[product],
                        part.iter().map(|&m| own(m)),
                    ),
                };
                let of = part.iter().map(|&m| m as u8).collect();
                add(launch, Owners(of), i + 1 == count);
            }
        }
        // No plan has memory at the highest address.
        let memory = templates.memory([usize::MAX, group as usize].into_iter());
        Joined {
            members: numbers,
            done: members.iter().map(|member| member.done).collect(),
            starts: members.iter().map(|member| member.done).collect(),
            // Sequences of one key with the same kernels share CUDA graphs.
            sequence: LaunchSequence::new(steps, &memory, templates),
            owners,
            counted: 0,
        }
    }

    /// Brings `done` up to the launches that were handed to the device: those before `end`.
    pub(crate) fn count_to(&mut self, end: usize) {
        for owners in &self.owners[self.counted..end.max(self.counted)] {
            for &m in &owners.0 {
                self.done[m as usize] += 1;
            }
        }
        self.counted = self.counted.max(end);
    }

    /// Begins again.
    pub(crate) fn rewind(&mut self) {
        self.sequence.rewind();
        self.counted = 0;
        self.done.clone_from(&self.starts);
    }

    /// Whether the members have got to where the sequence begins.
    pub(crate) fn begins_at(&self, done: &[usize]) -> bool {
        self.starts == done
    }
}

/// Divides members so that the columns of each part fit a launch.
fn parts(members: &[usize], columns: impl Fn(usize) -> usize) -> Vec<Vec<usize>> {
    let mut parts: Vec<Vec<usize>> = Vec::new();
    let mut left = 0;
    for &m in members {
        let columns = columns(m);
        match parts.last_mut() {
            Some(part) if columns <= left => part.push(m),
            _ => {
                parts.push(vec![m]);
                left = MAX_COLUMNS;
            }
        }
        left -= columns.min(left);
    }
    parts
}

impl Launch {
    /// The columns of a launch of matrix-vector products.
    fn grid_columns(&self) -> usize {
        read(self).products[0].dst.rows() as usize
    }
}

/// The parameters of a launch that [`JointFinder::product`] has found.
fn read(launch: &Launch) -> VgMmvParams {
    VgMmvParams::read_from_bytes(&launch.params).expect("the parameters of a product")
}

/// One launch for the products of several plans.
fn joint_launch<'l>(product: &JointProduct, each: impl Iterator<Item = &'l Launch>) -> Launch {
    let mut params = VgMmvJointParams::new_zeroed();
    let mut count = 0;
    for launch in each {
        let own = read(launch);
        for column in columns(&own) {
            params.column[count] = column;
            count += 1;
        }
        params.of = VgMmvParams { quants: 0, ..own };
    }
    params.columns = count as u32;
    let of = &params.of;
    let pairs = match of.unit {
        VG_OP_ADD => { of.products[..of.count as usize].iter() }
            .map(|it| div_ceil(it.dst.ne[0], 2))
            .sum(),
        _ => of.products[0].dst.ne[0],
    };
    let groups = div_ceil(count as i64, MMV_COLUMNS);
    let across = mmv_blocks_across(pairs, product.resident / groups, of.splits_rows != 0);
    Launch {
        kernel: product.kernel,
        grid: [across as u32, groups as u32, 1],
        threads: [MMV_THREADS, 1, 1],
        shared: 0,
        params: params.as_bytes().to_vec(),
        cooperative: false,
    }
}

/// What the plans of a key have in common.
#[derive(Default)]
pub(crate) struct BatchState {
    /// Whether the device has refused a joint launch: each product is a launch for each member.
    pub(crate) is_apart: bool,
    /// The sequence of the last batch from the first launches on, and one from where its members
    /// had got to.
    pub(crate) whole: Option<Joined>,
    pub(crate) rest: Option<Joined>,
}

impl std::fmt::Debug for BatchState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchState")
            .field("is_apart", &self.is_apart)
            .finish_non_exhaustive()
    }
}

impl BatchState {
    /// The sequence for these members, where they have got to.
    pub(crate) fn sequence(
        &mut self,
        members: &[Member<'_>],
        numbers: Vec<u64>,
        group: u64,
        templates: &GraphTemplates,
    ) -> &mut Joined {
        let done: Vec<usize> = members.iter().map(|member| member.done).collect();
        let is_whole = done.iter().all(|&done| done == 0);
        let goes_on = |it: &Joined| it.members == numbers && it.done == done;
        if is_whole || self.whole.as_ref().is_some_and(goes_on) {
            let slot = &mut self.whole;
            if let Some(whole) = slot.as_mut().filter(|it| it.members == numbers) {
                if is_whole && whole.begins_at(&done) {
                    whole.rewind();
                }
            } else {
                *slot = None;
            }
            return slot.get_or_insert_with(|| {
                Joined::new(members, numbers, (group, self.is_apart), templates)
            });
        }
        self.rest = self.rest.take().filter(goes_on);
        let is_apart = self.is_apart;
        { &mut self.rest }
            .get_or_insert_with(|| Joined::new(members, numbers, (group, is_apart), templates))
    }
}
