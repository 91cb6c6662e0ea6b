//! Random numbers for cases and tests.

use vgpu_gguf::Rng;

/// A random generator with a fixed sequence for each seed.
#[derive(Debug)]
pub struct Random(Rng);

impl Random {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Random {
        Random(Rng::new(seed, 0))
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// An integer below `n`, nearly uniform; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0.below(n.max(1))
    }

    /// Whether this is one of so many, by chance.
    pub fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    /// A multiple of 2^-23 in [-1, 1).
    pub fn number(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// A number between `low` and `high`.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// One of several.
    ///
    /// # Panics
    /// If there are none.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }
}
