//! Which of several kernels multiplies: the one that was the fastest on this GPU, where that was measured.
//!
//! Products of many columns can be done by the kernels for any GPU, and on Hopper GPUs by others in tiles of two widths. Which
//! is the fastest depends on the type of the weights and on extents; `vgpu gpu-check tune` measures it and keeps the outcome in
//! a file. What was not measured is chosen by a rule of thumb (`ops/hopper.rs`).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use vgpu_transport::ir::Type;

use super::source::SOURCES;

/// How a product of many columns can be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// By the kernels for any GPU.
    General,
    /// By those for Hopper GPUs, in tiles of 128 columns.
    Narrow,
    /// By the same, in tiles of 256 columns.
    Wide,
}

impl Way {
    /// All of them.
    pub const ALL: [Way; 3] = [Way::General, Way::Narrow, Way::Wide];

    /// A word for it.
    pub fn name(self) -> &'static str {
        match self {
            Way::General => "general",
            Way::Narrow => "narrow",
            Way::Wide => "wide",
        }
    }
}

/// Rows and columns of a result: what was measured for these counts for those that are less than twice or half of either.
type Extents = (u64, u64);

/// What was measured.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choices {
    always: Option<Way>,
    measured: BTreeMap<u8, Vec<(Extents, Way)>>,
}

impl Choices {
    /// This way for everything that can be done so.
    pub fn always(way: Way) -> Choices {
        Choices {
            always: Some(way),
            ..Choices::default()
        }
    }

    /// Notes the fastest way for weights of type `ty` and a result of so many rows and columns.
    pub fn note(&mut self, ty: Type, rows: u64, columns: u64, way: Way) {
        let of_type = self.measured.entry(ty as u8).or_default();
        of_type.push(((rows, columns), way));
    }

    /// How many were noted.
    pub fn len(&self) -> usize {
        self.measured.values().map(Vec::len).sum()
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.always.is_none() && self.measured.is_empty()
    }

    /// The way for a result of so many rows and columns, if something near was measured: the nearest, by factors.
    pub fn of(&self, ty: Type, rows: u64, columns: u64) -> Option<Way> {
        if self.always.is_some() {
            return self.always;
        }
        let apart = |a: u64, b: u64| (a.max(1) as f64 / b.max(1) as f64).log2().abs();
        let near = |&&((r, c), _): &&(Extents, Way)| {
            apart(rows, r) <= MOST_APART && apart(columns, c) <= MOST_APART
        };
        let distance = |((r, c), _): &(Extents, Way)| apart(rows, *r) + apart(columns, *c);
        let of_type = self.measured.get(&(ty as u8))?;
        { of_type.iter().filter(near) }
            .min_by(|a, b| distance(a).total_cmp(&distance(b)))
            .map(|(_, way)| *way)
    }

    /// As the text of a file, good for the device and program that `stamp` is of.
    pub fn text(&self, stamp: &str) -> String {
        let mut text = format!("{HEADER}{stamp}\n");
        for (&ty, measured) in &self.measured {
            let Some(ty) = Type::from_id(ty) else {
                continue;
            };
            for ((rows, columns), way) in measured {
                let (ty, way) = (ty.ggml_name(), way.name());
                writeln!(text, "{ty} {rows} {columns} {way}").expect("a string grows");
            }
        }
        text
    }

    /// Reads such a text. An error says what is wrong with it.
    pub fn read(text: &str, stamp: &str) -> Result<Choices, String> {
        let mut lines = text.lines();
        let first = lines.next().unwrap_or_default();
        let of = first.strip_prefix(HEADER).ok_or("not a file of choices")?;
        if of != stamp {
            return Err("measured on another GPU or with other kernels".into());
        }
        let mut choices = Choices::default();
        for (number, line) in lines.enumerate() {
            let wrong = || format!("line {}: {line:?} is no choice", number + 2);
            let words: Vec<&str> = line.split(' ').collect();
            let [ty, rows, columns, way] = words[..] else {
                return Err(wrong());
            };
            let ty = { Type::ALL.iter().copied() }.find(|known| known.ggml_name() == ty);
            let way = { Way::ALL.into_iter() }.find(|known| known.name() == way);
            let [rows, columns] = [rows, columns].map(|word| word.parse().ok());
            match (ty, rows, columns, way) {
                (Some(ty), Some(rows), Some(columns), Some(way)) => {
                    choices.note(ty, rows, columns, way);
                }
                _ => return Err(wrong()),
            }
        }
        Ok(choices)
    }
}

/// A line that begins so is the first one.
const HEADER: &str = "vgpu's choices of kernels, ";

/// What extents that a choice is good for may be apart from those that were measured, as a power of two.
const MOST_APART: f64 = 1.0;

/// What changes with anything that choices depend on: the device, and the text of all kernels.
pub fn stamp(device: &str) -> String {
    let mut hash = blake3::Hasher::new();
    hash.update(device.as_bytes());
    for source in SOURCES {
        hash.update(source.code_name("", (0, 0)).as_bytes());
    }
    hash.finalize().to_hex()[..32].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_that_was_measured_counts() {
        let mut choices = Choices::default();
        assert!(choices.is_empty());
        assert_eq!(choices.of(Type::Q4K, 4096, 512), None);
        choices.note(Type::Q4K, 4096, 512, Way::Wide);
        choices.note(Type::Q4K, 4096, 128, Way::Narrow);
        choices.note(Type::Q4K, 1024, 512, Way::General);
        choices.note(Type::F16, 4096, 512, Way::General);
        for (rows, columns, expected) in [
            (4096, 512, Some(Way::Wide)),
            (5120, 700, Some(Way::Wide)),
            (4096, 100, Some(Way::Narrow)),
            (1500, 512, Some(Way::General)),
            (4096, 4096, None),
            (100, 512, None),
        ] {
            assert_eq!(choices.of(Type::Q4K, rows, columns), expected);
        }
        assert_eq!(choices.of(Type::Q6K, 4096, 512), None);
        let always = Choices::always(Way::Narrow);
        assert_eq!(always.of(Type::Q6K, 1, 1), Some(Way::Narrow));
    }

    #[test]
    fn files_are_read_as_they_were_written_and_on_the_same_gpu_alone() {
        let mut choices = Choices::default();
        choices.note(Type::Mxfp4, 4096, 512, Way::Wide);
        choices.note(Type::Q4K, 1024, 64, Way::General);
        let here = stamp("NVIDIA H200, driver 13.0");
        let text = choices.text(&here);
        assert_eq!(Choices::read(&text, &here), Ok(choices));
        let there = stamp("NVIDIA H100, driver 13.0");
        let refused = Choices::read(&text, &there).unwrap_err();
        assert!(refused.contains("another GPU"), "{refused}");
        for (wrong, expected) in [
            (String::new(), "not a file"),
            (format!("{text}q4_K 1 2\n"), "line 4"),
            (format!("{text}q4_K 1 -2 wide\n"), "line 4"),
            (format!("{text}q4_K 1 2 widest\n"), "line 4"),
        ] {
            let refused = Choices::read(&wrong, &here).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
