//! What a plan brings into a batch.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use vgpu_transport::ir::Graph;

use super::split::Split;
use crate::batch::{BatchState, JointFinder, JointProduct, extend_key, work_of};
use crate::context::ExecutionContext;
use crate::device::Address;
use crate::launch::policy::SPEED;
use vgpu_engine::{ALLOCATION_BYTES, BatchGroup};

/// What a plan brings into a batch.
pub(super) struct Membership {
    pub(super) group: Arc<BatchGroup<Mutex<BatchState>>>,
    /// The work of the plan.
    pub(super) work: u64,
    /// The products that plans share, by their launches.
    pub(super) joint: Vec<JointProduct>,
}

impl Membership {
    /// The membership of a plan with these splits. `None` if it has no products that plans share.
    pub(super) fn of(
        splits: &[Split],
        graph: &Graph,
        weights: &[Range<Address>],
        context: &ExecutionContext,
    ) -> Option<Membership> {
        let [Split::Launches(sequence)] = splits else {
            return None;
        };
        let (ratio, work) = work_of(graph, &SPEED);
        let mut finder = JointFinder::new((&*context.device, &context.kernels), weights);
        let (mut key, mut joint) = (vec![ratio], Vec::new());
        for (at, launch) in sequence.launches().iter().enumerate() {
            if let Some((product, params)) = finder.product(at, launch) {
                extend_key(&mut key, &params);
                joint.push(product);
            }
        }
        joint.shrink_to_fit();
        (!joint.is_empty()).then(|| Membership {
            group: context.batch_keys.group(key.into_boxed_slice()),
            work,
            joint,
        })
    }

    /// Bytes of host memory.
    pub(super) fn bytes(&self) -> usize {
        self.joint.capacity() * size_of::<JointProduct>() + self.group.bytes() + ALLOCATION_BYTES
    }
}
