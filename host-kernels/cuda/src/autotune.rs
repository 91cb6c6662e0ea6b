//! Which kernel variant of a matrix product is the fastest on a GPU.
//!
//! The kernels for any GPU can run a product of many columns, and on sm_90a also kernels with tiles
//! of two widths. Which variant is the fastest depends on the weight type and the lengths. `vgpu
//! gpu-check tune` measures it and writes a file. For products that are not in the table, a rule of
//! thumb decides (`ops/gemm_sm90.rs`).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use vgpu_transport::ir::Type;

use crate::source::SOURCES;

/// Why a text is no tuning table for a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum TuningError {
    #[error("the file is not a tuning table")]
    NotATable,
    #[error(
        "the table was measured on another GPU or with other kernels: its fingerprint is {found}, \
         {expected} is expected"
    )]
    OtherDevice { expected: String, found: String },
    #[error("line {number} is not an entry of a tuning table: {text:?}")]
    Line { number: usize, text: String },
}

/// A kernel variant of a product of many columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GemmVariant {
    /// The kernels for any GPU.
    General,
    /// The sm_90a kernels in tiles of 128 columns.
    Narrow,
    /// The sm_90a kernels in tiles of 256 columns.
    Wide,
}

impl GemmVariant {
    /// All variants.
    pub const ALL: [GemmVariant; 3] =
        [GemmVariant::General, GemmVariant::Narrow, GemmVariant::Wide];

    /// The name in files and reports.
    pub fn name(self) -> &'static str {
        match self {
            GemmVariant::General => "general",
            GemmVariant::Narrow => "narrow",
            GemmVariant::Wide => "wide",
        }
    }
}

/// Rows and columns of a result. A measurement holds for results of half to twice as many of both.
type MatrixShape = (u64, u64);

/// The fastest variants that were measured on a device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TuningTable {
    forced: Option<GemmVariant>,
    measured: BTreeMap<u8, Vec<(MatrixShape, GemmVariant)>>,
}

impl TuningTable {
    /// A table that names one variant for every product.
    pub fn forced(variant: GemmVariant) -> TuningTable {
        TuningTable {
            forced: Some(variant),
            ..TuningTable::default()
        }
    }

    /// Adds the fastest variant for weights of type `ty` and a result of `rows` by `columns`.
    pub fn record(&mut self, ty: Type, rows: u64, columns: u64, variant: GemmVariant) {
        let of_type = self.measured.entry(ty as u8).or_default();
        of_type.push(((rows, columns), variant));
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.measured.values().map(Vec::len).sum()
    }

    /// Whether the table names no variant.
    pub fn is_empty(&self) -> bool {
        self.forced.is_none() && self.measured.is_empty()
    }

    /// The variant for a result of `rows` by `columns`: that of the nearest measurement by ratio,
    /// if one is near enough.
    pub fn lookup(&self, ty: Type, rows: u64, columns: u64) -> Option<GemmVariant> {
        if self.forced.is_some() {
            return self.forced;
        }
        let apart = |a: u64, b: u64| (a.max(1) as f64 / b.max(1) as f64).log2().abs();
        let near = |&&((r, c), _): &&(MatrixShape, GemmVariant)| {
            apart(rows, r) <= MAX_LOG2_DISTANCE && apart(columns, c) <= MAX_LOG2_DISTANCE
        };
        let distance =
            |((r, c), _): &(MatrixShape, GemmVariant)| apart(rows, *r) + apart(columns, *c);
        let of_type = self.measured.get(&(ty as u8))?;
        { of_type.iter().filter(near) }
            .min_by(|a, b| distance(a).total_cmp(&distance(b)))
            .map(|(_, variant)| *variant)
    }

    /// The table as text, valid for the device and kernels with this [`fingerprint`].
    pub fn to_text(&self, fingerprint: &str) -> String {
        let mut text = format!("{HEADER}{fingerprint}\n");
        for (&ty, measured) in &self.measured {
            let Some(ty) = Type::from_id(ty) else {
                continue;
            };
            for ((rows, columns), variant) in measured {
                let (ty, variant) = (ty.ggml_name(), variant.name());
                writeln!(text, "{ty} {rows} {columns} {variant}")
                    .expect("writing to a string cannot fail");
            }
        }
        text
    }

    /// Parses a text of [`TuningTable::to_text`].
    ///
    /// # Errors
    /// [`TuningError`] if the text is not a table, or a table of another device or of other
    /// kernels.
    pub fn parse(text: &str, fingerprint: &str) -> Result<TuningTable, TuningError> {
        let mut lines = text.lines();
        let first = lines.next().unwrap_or_default();
        let of = first.strip_prefix(HEADER).ok_or(TuningError::NotATable)?;
        if of != fingerprint {
            return Err(TuningError::OtherDevice {
                expected: fingerprint.to_owned(),
                found: of.to_owned(),
            });
        }
        let mut table = TuningTable::default();
        for (number, line) in lines.enumerate() {
            let wrong = || TuningError::Line {
                number: number + 2,
                text: line.to_owned(),
            };
            let words: Vec<&str> = line.split(' ').collect();
            let [ty, rows, columns, variant] = words[..] else {
                return Err(wrong());
            };
            let ty = { Type::ALL.iter().copied() }.find(|known| known.ggml_name() == ty);
            let variant = { GemmVariant::ALL.into_iter() }.find(|known| known.name() == variant);
            let [rows, columns] = [rows, columns].map(|word| word.parse().ok());
            match (ty, rows, columns, variant) {
                (Some(ty), Some(rows), Some(columns), Some(variant)) => {
                    table.record(ty, rows, columns, variant);
                }
                _ => return Err(wrong()),
            }
        }
        Ok(table)
    }
}

/// The start of the first line.
const HEADER: &str = "vgpu kernel tuning, ";

/// The largest ratio to a measurement, as a power of two.
const MAX_LOG2_DISTANCE: f64 = 1.0;

/// A hash of all that measurements depend on: the device, and the sources of all kernels.
pub fn fingerprint(device: &str) -> String {
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
    fn nearest_measured_size_is_used() {
        let mut table = TuningTable::default();
        assert!(table.is_empty());
        assert_eq!(table.lookup(Type::Q4K, 4096, 512), None);
        table.record(Type::Q4K, 4096, 512, GemmVariant::Wide);
        table.record(Type::Q4K, 4096, 128, GemmVariant::Narrow);
        table.record(Type::Q4K, 1024, 512, GemmVariant::General);
        table.record(Type::F16, 4096, 512, GemmVariant::General);
        for (rows, columns, expected) in [
            (4096, 512, Some(GemmVariant::Wide)),
            (5120, 700, Some(GemmVariant::Wide)),
            (4096, 100, Some(GemmVariant::Narrow)),
            (1500, 512, Some(GemmVariant::General)),
            (4096, 4096, None),
            (100, 512, None),
        ] {
            assert_eq!(table.lookup(Type::Q4K, rows, columns), expected);
        }
        assert_eq!(table.lookup(Type::Q6K, 4096, 512), None);
        let forced = TuningTable::forced(GemmVariant::Narrow);
        assert_eq!(forced.lookup(Type::Q6K, 1, 1), Some(GemmVariant::Narrow));
    }

    #[test]
    fn tuning_files_round_trip_and_apply_to_the_same_gpu_only() {
        let mut table = TuningTable::default();
        table.record(Type::Mxfp4, 4096, 512, GemmVariant::Wide);
        table.record(Type::Q4K, 1024, 64, GemmVariant::General);
        let here = fingerprint("NVIDIA H200, driver 13.0");
        let text = table.to_text(&here);
        assert_eq!(TuningTable::parse(&text, &here), Ok(table));
        let there = fingerprint("NVIDIA H100, driver 13.0");
        let refused = TuningTable::parse(&text, &there).unwrap_err().to_string();
        assert!(refused.contains("another GPU"), "{refused}");
        for (wrong, expected) in [
            (String::new(), "not a tuning table"),
            (format!("{text}q4_K 1 2\n"), "line 4"),
            (format!("{text}q4_K 1 -2 wide\n"), "line 4"),
            (format!("{text}q4_K 1 2 widest\n"), "line 4"),
        ] {
            let refused = TuningTable::parse(&wrong, &here).unwrap_err().to_string();
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
