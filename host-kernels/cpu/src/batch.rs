//! Which plans can run as a batch.
//!
//! The plans of several guests with the same model multiply with the same weights, one layer after
//! the other. Their products run together, and each weight is read once
//! ([`JointKernel`](crate::kernel::JointKernel)). What is between two such products, every plan
//! computes for itself. So plans can run as a batch if they have the same sequence of such
//! products, in the same phases, and about as much work of their own: their *key*. The numbers of
//! their tokens may differ.

use std::collections::HashSet;
use std::sync::Arc;

use vgpu_engine::BatchGroup;

use crate::barrier_schedule::Phase;

/// The most plans of a batch.
pub(crate) const MAX_BATCH: usize = 16;

/// The keys of the plans of a runner.
pub(crate) type BatchKeys = vgpu_engine::BatchKeys;

/// What a plan brings into a batch.
#[derive(Debug)]
pub(crate) struct Membership {
    pub(crate) group: Arc<BatchGroup>,
    /// The work of the plan.
    pub(crate) work: u64,
}

impl Membership {
    /// The membership of a plan with these phases; `None` if none of them is a product that plans
    /// can run together.
    pub(crate) fn of(keys: &BatchKeys, phases: &[Phase]) -> Option<Membership> {
        let mut key = vec![phases.len() as u64, 0];
        let (mut joint, mut own) = (0u64, 0u64);
        // Each kernel of a node has the work of the whole node, which counts once.
        let joint_nodes = phases.iter().filter(|phase| phase.joint().is_some());
        let mut counted: HashSet<usize> = { joint_nodes.flat_map(|phase| &phase.parts) }
            .flat_map(|part| part.nodes.iter().copied())
            .collect();
        for (i, phase) in phases.iter().enumerate() {
            match phase.joint() {
                None => {
                    for part in &phase.parts {
                        let is_new = part.nodes.is_empty()
                            || part.nodes.iter().any(|node| !counted.contains(node));
                        counted.extend(&part.nodes);
                        own = own.saturating_add(if is_new { part.work.0 } else { 0 });
                    }
                }
                Some(kernel) => {
                    let work = phase.parts.iter().map(|part| part.work.0);
                    joint = work.fold(joint, u64::saturating_add);
                    key.push(i as u64);
                    key.extend(kernel.key());
                }
            }
        }
        if key.len() == 2 {
            return None;
        }
        // Members wait for each other. So what a plan computes for itself is of one order of
        // magnitude, relative to its products, or no more than four times as much as these.
        key[1] = u64::from((own / joint.max(1)).max(1).ilog2() / 2);
        let work = own.saturating_add(joint).max(1);
        Some(Membership {
            group: keys.group(key.into_boxed_slice()),
            work,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::barrier_schedule::PlannedKernel;
    use crate::kernel::{Estimate, JointKernel, JointMember};

    /// A product that is its key.
    struct Product(u64);

    impl JointKernel for Product {
        fn key(&self) -> Vec<u64> {
            vec![self.0; 100]
        }

        fn tiles(&self) -> usize {
            1
        }

        fn has_tiles_alone(&self) -> bool {
            true
        }

        unsafe fn run(&self, _: &[JointMember<'_>], _: &mut dyn Iterator<Item = usize>) {}
    }

    /// A phase of its own work, then a product.
    fn phases(own: u64, product: u64) -> [Phase; 2] {
        phases_of(own, product, 1)
    }

    /// As [`phases`], with a product of several columns.
    fn phases_of(own: u64, product: u64, columns: usize) -> [Phase; 2] {
        let all = 1000 * columns as u64;
        [(own, None), (all, Some(product))].map(|(work, product)| {
            let node = (0, "TEST");
            let nodes = vec![usize::from(product.is_some())];
            let mut part = PlannedKernel::new(Box::new(|_| Ok(())), nodes, node, Estimate(work));
            part.joint = product.map(|key| Arc::new(Product(key)) as _);
            Phase { parts: vec![part] }
        })
    }

    #[test]
    fn plans_without_joint_products_have_no_key() {
        let keys = BatchKeys::default();
        let number = |product| group_of(&keys, &phases(1, product)).number;
        assert_ne!(number(6), number(7));
        assert!(Membership::of(&keys, &phases(1, 0)[..1]).is_none());
    }

    #[test]
    fn plans_with_much_work_of_their_own_have_other_keys() {
        let keys = BatchKeys::default();
        let groups = [1, 900, 2000, 100_000].map(|own| group_of(&keys, &phases(own, 1)));
        assert_eq!(groups[0].number, groups[1].number);
        assert_ne!(groups[0].number, groups[3].number);
    }

    /// A node of two kernels, each of which has the work of the node.
    #[test]
    fn the_work_of_a_node_counts_once() {
        let keys = BatchKeys::default();
        let [own, product] = phases(70, 1);
        let [again, _] = phases(70, 1);
        let all = [own, again, product];
        let membership = Membership::of(&keys, &all).expect("a product");
        assert_eq!(membership.work, 1070);
    }

    #[test]
    fn plans_with_several_columns_have_one_key_for_any_number() {
        let keys = BatchKeys::default();
        let one = Membership::of(&keys, &phases_of(10, 1, 2)).expect("a product");
        for columns in 3..32 {
            let other = Membership::of(&keys, &phases_of(100, 1, columns)).expect("a product");
            assert_eq!(one.group.number, other.group.number, "{columns} columns");
            assert_eq!(other.work, 100 + 1000 * columns as u64);
        }
        let long = group_of(&keys, &phases_of(100_000, 1, 3));
        assert_ne!(one.group.number, long.number);
    }

    fn group_of(keys: &BatchKeys, phases: &[Phase]) -> Arc<BatchGroup> {
        Membership::of(keys, phases).expect("a product").group
    }
}
