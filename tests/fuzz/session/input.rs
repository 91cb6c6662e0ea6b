//! A fuzzer's bytes as a stream of decisions.

/// The rest of the input. After its end every decision is 0.
pub(crate) struct Input<'a> {
    bytes: &'a [u8],
}

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Input<'a> {
        Input { bytes }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        match self.bytes.split_first() {
            Some((&first, rest)) => {
                self.bytes = rest;
                first
            }
            None => 0,
        }
    }

    /// A number below `count`, which is small.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        usize::from(self.byte()) % count.clamp(1, 256)
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// True once in `one_in` times; never at the end of the input.
    pub(crate) fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == one_in - 1
    }

    /// As many bytes as are left, at most `count`.
    pub(crate) fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.bytes.split_at(count.min(self.bytes.len()));
        self.bytes = rest;
        taken
    }

    pub(crate) fn u64(&mut self) -> u64 {
        let mut value = [0; 8];
        let bytes = self.take(8);
        value[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(value)
    }

    /// A number near the limits at which arithmetic overflows.
    pub(crate) fn odd_number(&mut self) -> u64 {
        match self.below(12) {
            0 => u64::from(self.byte()),
            1 => u64::from(self.byte()) << 4,
            2 => u64::from(self.byte()) << 32,
            3 => 1 << self.below(64),
            4 => (1 << self.below(64)) - 1,
            5 => u64::MAX - u64::from(self.byte()),
            6 => u64::from(u32::MAX) + u64::from(self.byte()),
            7 => (1 << 63) - u64::from(self.byte()),
            8 => u64::MAX / (u64::from(self.byte()) + 1),
            9 => u64::from(self.byte()) << 56,
            _ => self.u64(),
        }
    }

    /// A number for a parameter, usually a small one.
    pub(crate) fn float(&mut self) -> f32 {
        match self.below(16) {
            0 => f32::NAN,
            1 => f32::INFINITY,
            2 => f32::NEG_INFINITY,
            3 => f32::MAX,
            4 => f32::MIN_POSITIVE,
            5 => -0.0,
            6 => -1.0,
            7 => f32::from_bits(self.u64() as u32),
            8..=11 => f32::from(self.byte()) / 16.0,
            _ => 1.0,
        }
    }

    /// A number for a signed parameter, usually a small one.
    pub(crate) fn integer(&mut self) -> i32 {
        match self.below(8) {
            0 => self.odd_number() as u32 as i32,
            1 => i32::MIN,
            2 => i32::MAX,
            3 => -i32::from(self.byte()),
            _ => i32::from(self.byte() % 8),
        }
    }
}
