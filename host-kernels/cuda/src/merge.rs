//! Short launches that do not depend on each other, as one launch.
//!
//! Before attention of few tokens there are three launches: ROPE of the queries, ROPE and SET_ROWS
//! of the keys, SET_ROWS of the values. Each takes less time than the gap between two launches.

use zerocopy::{FromBytes, Immutable, IntoBytes as _, KnownLayout};

use crate::device::{KernelId, Launch};
use crate::kernel_set::UsableKernels;
use crate::launch::grid::div_ceil;
use crate::launch::planned::PlannedLaunch;
use crate::params::*;

/// The most blocks of a merged launch. Longer launches are not merged: the gaps are short beside
/// them.
const MAX_BLOCKS: i64 = 1024;

/// The kernels of launches that merge, and the kernel of the merged launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MergeKernels {
    rope: KernelId,
    rope_rows: KernelId,
    set_rows: KernelId,
    merged: KernelId,
}

impl MergeKernels {
    /// The kernels, if all of them may be used.
    pub(crate) fn of(kernels: &UsableKernels) -> Option<MergeKernels> {
        Some(MergeKernels {
            rope: kernels.find("vg_rope").ok()?,
            rope_rows: kernels.find("vg_rope_rows").ok()?,
            set_rows: kernels.find("vg_set_rows").ok()?,
            merged: kernels.find("vg_rope_cache").ok()?,
        })
    }

    /// The launches with those merged that can be. `None` if there are none.
    pub(crate) fn merge(&self, plain: &[PlannedLaunch]) -> Option<Vec<PlannedLaunch>> {
        let mut all = Vec::with_capacity(plain.len());
        let mut at = 0;
        while at < plain.len() {
            let (launch, count) = match self.merged(&plain[at..]) {
                Some((launch, count)) => (launch, count),
                None => (plain[at].launch.clone(), 1),
            };
            all.push(PlannedLaunch {
                launch,
                node: plain[at].node,
                may_yield: plain[at + count - 1].may_yield,
                is_long: plain[at..at + count].iter().any(|step| step.is_long),
                covers: count,
            });
            at += count;
        }
        (all.len() < plain.len()).then_some(all)
    }

    /// One launch for the first two or three of `plain`, and their number.
    fn merged(&self, plain: &[PlannedLaunch]) -> Option<(Launch, usize)> {
        let first = plain.first()?;
        let threads = first.launch.threads;
        let mut params = VgRopeCacheParams::default();
        let mut parts = Vec::new();
        let mut rest = plain.iter().map(|step| &step.launch).peekable();
        let mut next_of = |kernel| rest.next_if(|launch: &&Launch| launch.kernel == kernel);
        if let Some(launch) = next_of(self.rope) {
            params.query = read(launch)?;
            params.query_blocks = launch.grid[0];
            let VgRopeParams {
                dst,
                src,
                positions,
                factors,
                ..
            } = params.query;
            parts.push((dst, vec![src, positions, factors]));
        }
        if let Some(launch) = next_of(self.rope_rows).filter(|it| it.threads == threads) {
            params.key = read(launch)?;
            params.key_blocks = launch.grid[0];
            let VgRopeRowsParams {
                rope, cache, ids, ..
            } = params.key;
            parts.push((cache, vec![rope.src, rope.positions, rope.factors, ids]));
            if let Some(launch) = next_of(self.set_rows) {
                let value: VgRowsParams = read(launch)?;
                // Rows of a quantised type have a kernel of their own.
                if [VG_F32, VG_F16, VG_BF16].contains(&value.dst.type_) {
                    params.value = value;
                    let blocks = div_ceil(value.src.elements(), i64::from(threads[0]));
                    params.value_blocks = u32::try_from(blocks).ok()?;
                    parts.push((value.dst, vec![value.src, value.ids]));
                }
            }
        }
        let blocks = [params.query_blocks, params.key_blocks, params.value_blocks];
        let blocks: i64 = blocks.into_iter().map(i64::from).sum();
        let is_independent = |at: usize| {
            let (written, _) = &parts[at];
            let mut others = { parts.iter().enumerate() }.filter(|(other, _)| *other != at);
            others.all(|(_, (dst, read))| {
                !written.overlaps(dst) && !read.iter().any(|read| written.overlaps(read))
            })
        };
        let fits = parts.len() > 1 && blocks <= MAX_BLOCKS && (0..parts.len()).all(is_independent);
        let launch = Launch {
            kernel: self.merged,
            grid: [blocks as u32, 1, 1],
            threads,
            shared: 0,
            params: params.as_bytes().to_vec(),
            cooperative: false,
        };
        fits.then_some((launch, parts.len()))
    }
}

/// The parameter structure of a launch, if it has the size of `T`.
fn read<T: FromBytes + KnownLayout + Immutable>(launch: &Launch) -> Option<T> {
    T::read_from_bytes(&launch.params).ok()
}
