//! Which plans can run as a batch.
//!
//! The plans of several guests with the same model multiply with the same weights, one layer after
//! the other. Their products run together, and each weight is read once
//! ([`JointKernel`](crate::kernel::JointKernel)). What is between two such products, every plan
//! computes for itself. So plans can run as a batch if they have the same sequence of such
//! products, in the same phases: their *key*.

use std::collections::HashMap;
use std::mem::size_of;
use std::sync::{Arc, Mutex, Weak};

use crate::barrier_schedule::Phase;
use crate::thread_team::lock;

/// The most plans of a batch.
pub(crate) const MAX_BATCH: usize = 16;

/// The plans with one key.
#[derive(Debug)]
pub(crate) struct BatchGroup {
    /// The number of the key, which no other key of the runner has.
    pub(crate) number: u64,
    key: Box<[u64]>,
}

impl BatchGroup {
    /// Bytes of host memory of the key and of its entry in the table.
    pub(crate) fn bytes(&self) -> usize {
        2 * size_of_val(&*self.key) + size_of::<BatchGroup>() + ENTRY_BYTES
    }
}

/// Bytes of an entry of the table besides its key, and what the allocator adds.
const ENTRY_BYTES: usize = 128;

/// The keys of the plans of a runner.
#[derive(Debug, Default)]
pub(crate) struct BatchKeys(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Box<[u64]>, Weak<BatchGroup>>,
    numbers: u64,
    /// Entries of plans that no longer exist are removed when there are so many entries.
    clean_at: usize,
}

/// The fewest entries of which those that are not used are removed.
const MIN_CLEANED: usize = 64;

impl BatchKeys {
    /// The plans with the key of these phases; `None` if none of them is a product that plans can
    /// run together.
    pub(crate) fn group_of(&self, phases: &[Phase]) -> Option<Arc<BatchGroup>> {
        let mut key = vec![phases.len() as u64];
        for (i, phase) in phases.iter().enumerate() {
            if let Some(kernel) = phase.joint() {
                key.push(i as u64);
                key.extend(kernel.key());
            }
        }
        if key.len() == 1 {
            return None;
        }
        let key = key.into_boxed_slice();
        let mut table = lock(&self.0);
        if let Some(group) = table.entries.get(&key).and_then(Weak::upgrade) {
            return Some(group);
        }
        if table.entries.len() >= table.clean_at {
            table.entries.retain(|_, group| group.strong_count() > 0);
            table.clean_at = (2 * table.entries.len()).max(MIN_CLEANED);
        }
        table.numbers += 1;
        let group = Arc::new(BatchGroup {
            number: table.numbers,
            key: key.clone(),
        });
        table.entries.insert(key, Arc::downgrade(&group));
        Some(group)
    }
}
