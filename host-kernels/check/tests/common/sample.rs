//! A sample of the cases of tests that take minutes.

/// The environment variable with the seed of a sample. `cargo xtask test` sets it without `--full`;
/// where it is not set, all cases run.
const VARIABLE: &str = "VGPU_TEST_SAMPLE";

/// One in twelve cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Decides which cases are taken.
    pub(crate) seed: u64,
}

impl Sample {
    /// The sample that the environment asks for.
    pub(crate) fn asked() -> Option<Sample> {
        let seed = std::env::var(VARIABLE).ok()?;
        let seed = { seed.parse() }.unwrap_or_else(|_| panic!("{VARIABLE}={seed} is no number"));
        Some(Sample { seed })
    }

    /// One case in how many is taken.
    pub(crate) fn one_in(self) -> usize {
        12
    }

    /// Whether the case with this number is taken.
    pub(crate) fn has(self, case: usize) -> bool {
        let one_in = self.one_in();
        case % one_in == (self.seed % one_in as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twelve_seeds_take_every_case_once() {
        for case in 0..20 {
            let by = (20..32).filter(|&seed| Sample { seed }.has(case));
            assert_eq!(by.count(), 1, "{case}");
        }
    }
}
