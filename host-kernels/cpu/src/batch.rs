//! Which plans can run as a batch.
//!
//! The plans of several guests with the same model multiply with the same weights, one layer after
//! the other. Their products run together, and each weight is read once
//! ([`JointKernel`](crate::kernel::JointKernel)). What is between two such products, every plan
//! computes for itself. So plans can run as a batch if they have the same sequence of such
//! products, in the same phases, and about as much work of their own: their *key*. The numbers of
//! their tokens may differ.

use std::collections::{HashMap, HashSet};
use std::mem::size_of;
use std::sync::{Arc, Mutex, Weak};

use vgpu_transport::lock::lock;

use crate::barrier_schedule::Phase;

/// The most plans of a batch.
pub(crate) const MAX_BATCH: usize = 16;

/// The plans with one key.
#[derive(Debug)]
pub(crate) struct BatchGroup {
    /// The number of the key, which no other key of the runner has.
    pub(crate) number: u64,
    key: Box<[u64]>,
    table: Weak<Mutex<Table>>,
}

impl BatchGroup {
    /// Bytes of host memory of the key and of its entry in the table.
    pub(crate) fn bytes(&self) -> usize {
        2 * size_of_val(&*self.key) + size_of::<BatchGroup>() + ENTRY_BYTES
    }
}

impl Drop for BatchGroup {
    /// Removes the entry, which nobody is charged for any more.
    fn drop(&mut self) {
        let Some(table) = self.table.upgrade() else {
            return;
        };
        let mut table = lock(&table);
        // A plan may have been compiled meanwhile, and made a group of its own.
        if { table.entries.get(&self.key) }.is_some_and(|group| group.strong_count() == 0) {
            table.entries.remove(&self.key);
            let room = 2 * table.entries.len();
            table.entries.shrink_to(room);
        }
    }
}

/// Bytes of an entry of the table besides its key, and what the allocator adds.
const ENTRY_BYTES: usize = 128;

/// The keys of the plans of a runner.
#[derive(Debug, Default)]
pub(crate) struct BatchKeys(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Box<[u64]>, Weak<BatchGroup>>,
    numbers: u64,
}

/// What a plan brings into a batch.
#[derive(Debug)]
pub(crate) struct Membership {
    pub(crate) group: Arc<BatchGroup>,
    /// The work of the plan.
    pub(crate) work: u64,
}

impl BatchKeys {
    /// The plans with the key of these phases; `None` if none of them is a product that plans can
    /// run together.
    pub(crate) fn membership(&self, phases: &[Phase]) -> Option<Membership> {
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
        let key = key.into_boxed_slice();
        let mut table = lock(&self.0);
        if let Some(group) = table.entries.get(&key).and_then(Weak::upgrade) {
            return Some(Membership { group, work });
        }
        table.numbers += 1;
        let group = Arc::new(BatchGroup {
            number: table.numbers,
            key: key.clone(),
            table: Arc::downgrade(&self.0),
        });
        table.entries.insert(key, Arc::downgrade(&group));
        Some(Membership { group, work })
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
    fn a_key_is_in_memory_as_long_as_a_plan_has_it() {
        let keys = BatchKeys::default();
        let len = || lock(&keys.0).entries.len();
        let groups: Vec<_> = (0..1000).map(|i| group_of(&keys, &phases(1, i))).collect();
        let again = group_of(&keys, &phases(1, 7));
        assert_eq!(again.number, groups[7].number);
        assert_eq!(len(), 1000);
        drop(groups);
        assert_eq!(len(), 1, "the one that is still there");
        drop(again);
        assert_eq!(len(), 0);
        assert!(lock(&keys.0).entries.capacity() < 100);
        assert!(keys.membership(&phases(1, 0)[..1]).is_none(), "no product");
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
        let membership = keys.membership(&all).expect("a product");
        assert_eq!(membership.work, 1070);
    }

    #[test]
    fn plans_with_several_columns_have_one_key_for_any_number() {
        let keys = BatchKeys::default();
        let one = keys.membership(&phases_of(10, 1, 2)).expect("a product");
        for columns in 3..32 {
            let other = { keys.membership(&phases_of(100, 1, columns)) }.expect("a product");
            assert_eq!(one.group.number, other.group.number, "{columns} columns");
            assert_eq!(other.work, 100 + 1000 * columns as u64);
        }
        let long = group_of(&keys, &phases_of(100_000, 1, 3));
        assert_ne!(one.group.number, long.number);
    }

    fn group_of(keys: &BatchKeys, phases: &[Phase]) -> Arc<BatchGroup> {
        keys.membership(phases).expect("a product").group
    }
}
