//! From the ids of ggml's enums to the plugin's own, by name.
//!
//! The values of ggml's enums differ between releases, the names do not. ggml keeps the names in
//! arrays that `ggml_op_name` and its siblings index without a bounds check, and no function
//! returns the lengths of the arrays. A table of lengths would need an entry for every release and
//! every development build. So the plugin does not enumerate ids: it looks an id up when a tensor
//! of ggml has it, which proves that the id is in range, and remembers the result.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::sync::OnceLock;

/// Ids at or above this have no translation. ggml has about 100 operators, and fewer types and
/// kinds.
const MAX_IDS: usize = 512;

/// A function of ggml that indexes an array of names.
type Name = unsafe extern "C" fn(c_int) -> *const c_char;

/// The translation of the ids of one of ggml's enums.
pub struct Ids<T> {
    name: Name,
    parse: fn(&str) -> Option<T>,
    seen: Box<[OnceLock<Option<T>>; MAX_IDS]>,
}

impl<T: Copy> Ids<T> {
    /// `name` is ggml's function. `parse` translates a name; `None` if the name has no translation.
    ///
    /// # Safety
    ///
    /// `name` must accept every id of the enum, and return null or a C string that is never freed
    /// or changed.
    pub(super) unsafe fn new(name: Name, parse: fn(&str) -> Option<T>) -> Self {
        Self {
            name,
            parse,
            seen: Box::new([const { OnceLock::new() }; MAX_IDS]),
        }
    }

    /// The translation of `id`; `None` if it has none.
    ///
    /// # Safety
    ///
    /// `id` must be a value of ggml's enum, read from a tensor that ggml has made.
    pub unsafe fn get(&self, id: c_int) -> Option<T> {
        let slot = self.seen.get(usize::try_from(id).ok()?)?;
        *slot.get_or_init(|| {
            // SAFETY: `id` is a value of the enum (this function's contract), and `name` accepts
            // every value (the contract of `new`).
            let name = unsafe { (self.name)(id) };
            if name.is_null() {
                return None; // the id of a type that ggml has removed
            }
            // SAFETY: a C string that is never freed, because it is not null: the contract of
            // `new`.
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
        names[usize::try_from(id).expect("ids out of range are not looked up")]
    }

    #[test]
    fn ids_are_looked_up_once_and_only_in_range() {
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
