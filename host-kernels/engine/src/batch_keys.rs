//! The keys of plans that can run as a batch, and others that plans have in common.

use std::collections::HashMap;
use std::mem::size_of;
use std::sync::{Arc, Mutex, Weak};

use vgpu_transport::lock::lock;

/// The plans of an engine with one key, and what the engine knows of them as a whole.
#[derive(Debug)]
pub struct BatchGroup<S = ()> {
    /// The number of the key, which no other key of the table has.
    pub number: u64,
    /// What the engine keeps as long as a plan has the key.
    pub state: S,
    key: Box<[u64]>,
    table: Weak<Mutex<Table<S>>>,
}

impl<S> BatchGroup<S> {
    /// Bytes of host memory of the key and of its entry in the table.
    pub fn bytes(&self) -> usize {
        2 * size_of_val(&*self.key) + size_of::<BatchGroup<S>>() + ENTRY_BYTES
    }
}

impl<S> Drop for BatchGroup<S> {
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

/// The keys of the plans of an engine.
#[derive(Debug)]
pub struct BatchKeys<S = ()>(Arc<Mutex<Table<S>>>);

impl<S> Default for BatchKeys<S> {
    fn default() -> BatchKeys<S> {
        BatchKeys(Arc::new(Mutex::new(Table {
            entries: HashMap::new(),
            numbers: 0,
        })))
    }
}

#[derive(Debug)]
struct Table<S> {
    entries: HashMap<Box<[u64]>, Weak<BatchGroup<S>>>,
    numbers: u64,
}

impl<S: Default> BatchKeys<S> {
    /// The plans with this key.
    pub fn group(&self, key: Box<[u64]>) -> Arc<BatchGroup<S>> {
        let mut table = lock(&self.0);
        if let Some(group) = table.entries.get(&key).and_then(Weak::upgrade) {
            return group;
        }
        table.numbers += 1;
        let group = Arc::new(BatchGroup {
            number: table.numbers,
            state: S::default(),
            key: key.clone(),
            table: Arc::downgrade(&self.0),
        });
        table.entries.insert(key, Arc::downgrade(&group));
        group
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_in_memory_as_long_as_a_plan_has_it() {
        let keys: BatchKeys = BatchKeys::default();
        let key = |i: u64| vec![i; 100].into_boxed_slice();
        let len = || lock(&keys.0).entries.len();
        let groups: Vec<_> = (0..1000).map(|i| keys.group(key(i))).collect();
        let again = keys.group(key(7));
        assert_eq!(again.number, groups[7].number);
        assert_eq!(len(), 1000);
        drop(groups);
        assert_eq!(len(), 1, "the one that is still there");
        drop(again);
        assert_eq!(len(), 0);
        assert!(lock(&keys.0).entries.capacity() < 100);
    }
}
