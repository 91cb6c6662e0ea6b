//! Words that one thread writes and any thread reads, without a lock.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// How often a reader tries again because the writer was writing. The writer stores a few words, so
/// more attempts fail only while the writer's thread does not run.
const MAX_ATTEMPTS: u32 = 1000;

/// `N` words that are read as they were at one time. There is one writer at a time.
#[derive(Debug)]
pub(crate) struct SeqLock<const N: usize> {
    /// Odd while the words are written.
    version: AtomicU64,
    words: [AtomicU64; N],
}

impl<const N: usize> Default for SeqLock<N> {
    fn default() -> SeqLock<N> {
        SeqLock {
            version: AtomicU64::new(0),
            words: [const { AtomicU64::new(0) }; N],
        }
    }
}

impl<const N: usize> SeqLock<N> {
    /// Replaces the words. Only one thread may call this at a time; a second one would mix words.
    pub(crate) fn write(&self, words: [u64; N]) {
        let version = self.version.load(Ordering::Relaxed);
        self.version
            .store(version.wrapping_add(1), Ordering::Relaxed);
        // A reader that sees one of the words below also sees the odd version.
        fence(Ordering::Release);
        for (word, value) in self.words.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        self.version
            .store(version.wrapping_add(2), Ordering::Release);
    }

    /// The words of one call of [`write`](SeqLock::write). `None` if the writer was in the middle
    /// of such a call at every attempt.
    pub(crate) fn read(&self) -> Option<[u64; N]> {
        for _ in 0..MAX_ATTEMPTS {
            let before = self.version.load(Ordering::Acquire);
            if before.is_multiple_of(2) {
                let words = std::array::from_fn(|i| self.words[i].load(Ordering::Relaxed));
                // Pairs with the fence of a writer whose words were read.
                fence(Ordering::Acquire);
                if self.version.load(Ordering::Relaxed) == before {
                    return Some(words);
                }
            }
            std::hint::spin_loop();
        }
        None
    }
}

/// `text` as words, cut at a character after at most `8 * N` bytes.
pub(crate) fn words_of<const N: usize>(text: &str) -> [u64; N] {
    let mut len = text.len().min(8 * N);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    let mut words = [0; N];
    for (at, byte) in text.bytes().take(len).enumerate() {
        words[at / 8] |= u64::from(byte) << (8 * (at % 8));
    }
    words
}

/// The opposite of [`words_of`].
pub(crate) fn text_of(words: &[u64]) -> String {
    let bytes = words.iter().flat_map(|word| word.to_le_bytes());
    let bytes: Vec<u8> = bytes.take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    #[test]
    fn texts_are_cut_at_a_character() {
        assert_eq!(text_of(&words_of::<2>("llama-server")), "llama-server");
        assert_eq!(text_of(&words_of::<1>("1234567ä")), "1234567");
        assert_eq!(text_of(&words_of::<1>("")), "");
    }

    #[test]
    fn readers_see_the_words_of_one_write() {
        let lock = SeqLock::<4>::default();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                for value in 1..200_000 {
                    lock.write([value; 4]);
                }
                is_over.store(true, Ordering::Relaxed);
            });
            let mut last = 0;
            while !is_over.load(Ordering::Relaxed) {
                // A writer that does not run is no failure of the reader.
                let Some(words) = lock.read() else { continue };
                assert_eq!(words, [words[0]; 4]);
                assert!(words[0] >= last);
                last = words[0];
            }
        });
        assert_eq!(lock.read(), Some([199_999; 4]));
    }

    #[test]
    fn reader_does_not_wait_for_a_writer_that_has_stopped() {
        let lock = SeqLock::<1>::default();
        lock.version.store(1, Ordering::Relaxed);
        assert_eq!(lock.read(), None);
    }
}
