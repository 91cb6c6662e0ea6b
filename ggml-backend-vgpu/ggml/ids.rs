//! From the host's ids to ours, by name.
//!
//! ggml's enum values move between releases, its names do not. The names are in arrays that
//! `ggml_op_name` and its siblings index without a bounds check, and nothing in the interface says
//! how long the arrays are: reading them from end to end would take a table of lengths for every
//! release and every development build in between. So nothing is enumerated. An id is looked up
//! when a tensor of the host first shows it, which proves that it is in range, and remembered.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::sync::OnceLock;

/// Ids at or above this are unknown; ggml has about a hundred operators, fewer of anything else.
const MAX_IDS: usize = 512;

/// A function that indexes one of the arrays of names.
type Name = unsafe extern "C" fn(c_int) -> *const c_char;

/// What the ids of one of the host's enums mean to us.
pub struct Ids<T> {
    name: Name,
    parse: fn(&str) -> Option<T>,
    seen: Box<[OnceLock<Option<T>>; MAX_IDS]>,
}

impl<T: Copy> Ids<T> {
    /// `name` is the host's function, `parse` finds our equivalent of a name, if there is one.
    ///
    /// # Safety
    /// `name` must be safe to call with every id of its enum and return null or a C string that is
    /// never freed or changed.
    pub(super) unsafe fn new(name: Name, parse: fn(&str) -> Option<T>) -> Self {
        Self {
            name,
            parse,
            seen: Box::new([const { OnceLock::new() }; MAX_IDS]),
        }
    }

    /// What `id` means, or `None` if it has no equivalent here.
    ///
    /// # Safety
    /// `id` must be a value of the host's enum, read from a tensor that the host made.
    pub unsafe fn get(&self, id: c_int) -> Option<T> {
        let slot = self.seen.get(usize::try_from(id).ok()?)?;
        *slot.get_or_init(|| {
            // SAFETY: `new` was promised that `name` accepts every id of the enum, our caller
            // promises that this is one.
            let name = unsafe { (self.name)(id) };
            if name.is_null() {
                return None; // the id of a type that ggml has retired
            }
            // SAFETY: not null, so `new` was promised a C string that stays.
            (self.parse)(unsafe { CStr::from_ptr(name) }.to_str().ok()?)
        })
    }
}

impl<T: fmt::Debug> fmt::Debug for Ids<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seen = self
            .seen
            .iter()
            .enumerate()
            .filter_map(|(id, slot)| Some((id, slot.get()?)));
        f.debug_map().entries(seen).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    static CALLS: AtomicUsize = AtomicUsize::new(0);

    unsafe extern "C" fn name(id: c_int) -> *const c_char {
        CALLS.fetch_add(1, Ordering::Relaxed);
        let names = [
            c"F32".as_ptr(),
            std::ptr::null(),
            c"new".as_ptr(),
            c"\xff".as_ptr(),
        ];
        names[usize::try_from(id).expect("ids out of range are not asked for")]
    }

    #[test]
    fn an_id_is_asked_for_once_and_only_in_range() {
        // SAFETY: `name` answers ids 0 to 3 with static strings or null.
        let ids = unsafe { Ids::new(name, |name| (name == "F32").then_some('f')) };
        // SAFETY: 0 to 3 are the ids of `name`; the others never reach it.
        let get = |id| unsafe { ids.get(id) };
        assert_eq!(get(0), Some('f'));
        assert_eq!(get(0), Some('f'));
        assert_eq!(CALLS.load(Ordering::Relaxed), 1);
        assert_eq!([get(1), get(2), get(3)], [None; 3]);
        assert_eq!(CALLS.load(Ordering::Relaxed), 4);
        assert_eq!(
            [get(-1), get(c_int::MIN), get(512), get(c_int::MAX)],
            [None; 4]
        );
        assert_eq!(CALLS.load(Ordering::Relaxed), 4);
        assert_eq!(
            format!("{ids:?}"),
            "{0: Some('f'), 1: None, 2: None, 3: None}"
        );
    }
}
