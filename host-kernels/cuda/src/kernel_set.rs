//! Which kernels may be used.
//!
//! A plan uses a kernel only if the device has loaded it and nobody has disabled it. A function
//! that chooses between kernels asks `UsableKernels` when a plan is compiled, never at a launch,
//! and takes the next kernel that does the same work: of sm_90a, for any GPU, simple. A node for
//! which no kernel is left runs on the CPU engine.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use tracing::warn;
use vgpu_engine::EngineError;
use vgpu_transport::lock::lock;

use crate::device::{Device, KernelId};
use crate::source::{SOURCES, Source};

/// The simple kernels, sorted. No other kernel does their work. Every other kernel has a fallback.
pub const SIMPLE: &[&str] = &[
    "vg_adamw",
    "vg_add_id",
    "vg_add_rel_pos",
    "vg_arange",
    "vg_argmax",
    "vg_argsort",
    "vg_col2im_1d",
    "vg_conv",
    "vg_conv_depthwise",
    "vg_conv_transposed",
    "vg_copy",
    "vg_copy_same",
    "vg_count_equal",
    "vg_cross_entropy",
    "vg_cross_entropy_back",
    "vg_cumsum",
    "vg_delta_net",
    "vg_elementwise",
    "vg_fattn_simt",
    "vg_get_rows",
    "vg_get_rows_back",
    "vg_group_norm",
    "vg_hc_comb",
    "vg_hc_post",
    "vg_hc_pre",
    "vg_im2col",
    "vg_im2col_back",
    "vg_indexer",
    "vg_linear_attention",
    "vg_move",
    "vg_mul_mat",
    "vg_mul_mat_id",
    "vg_mul_vec",
    "vg_norm",
    "vg_out_prod",
    "vg_pool",
    "vg_pool_argmax",
    "vg_pool_back",
    "vg_repeat_back",
    "vg_rope",
    "vg_set_rows",
    "vg_sgd",
    "vg_soft_max",
    "vg_solve_tri",
    "vg_ssm_conv",
    "vg_ssm_scan",
    "vg_sum",
    "vg_sum_rows",
    "vg_timestep_embedding",
    "vg_upscale",
    "vg_window",
    "vg_wkv7",
];

/// The most names that an error proposes.
const MAX_PROPOSALS: usize = 3;

/// The names of all kernels, of any architecture, sorted.
pub fn names() -> &'static [&'static str] {
    static NAMES: OnceLock<Vec<&'static str>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let mut names: Vec<_> = SOURCES.iter().flat_map(Source::kernels).collect();
        names.sort_unstable();
        names
    })
}

/// Whether no other kernel does the work of this one.
pub fn is_simple(name: &str) -> bool {
    SIMPLE.binary_search(&name).is_ok()
}

/// A name that no kernel has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no kernel {name}{}", proposals(.near))]
pub struct UnknownKernel {
    /// The name, or the pattern that matches no name.
    pub name: String,
    /// The kernels with the most similar names.
    pub near: Vec<&'static str>,
}

fn proposals(near: &[&'static str]) -> String {
    match near {
        [] => String::new(),
        near => format!("; similar names: {}", near.join(", ")),
    }
}

/// The kernels that a list names: names separated by commas, in which `*` stands for any
/// characters.
///
/// # Errors
/// [`UnknownKernel`] if a name of the list matches no kernel.
pub fn parse_names(list: &str) -> Result<Vec<&'static str>, UnknownKernel> {
    let mut found = Vec::new();
    let entries = list.split(',').map(str::trim);
    for entry in entries.filter(|entry| !entry.is_empty()) {
        let before = found.len();
        found.extend(names().iter().filter(|name| matches(entry, name)));
        if found.len() == before {
            return Err(UnknownKernel {
                name: entry.into(),
                near: near(entry),
            });
        }
    }
    Ok(found)
}

/// Whether `name` has the form of `pattern`, in which `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut left) = name.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(at) = left.find(part) else {
            return false;
        };
        left = &left[at + part.len()..];
    }
    left.ends_with(last)
}

/// The kernels whose names are the most similar to `wrong`.
fn near(wrong: &str) -> Vec<&'static str> {
    let mut near: Vec<(usize, &str)> = { names().iter() }
        .map(|name| (edits(wrong, name), *name))
        .filter(|(edits, _)| *edits <= wrong.len().div_ceil(3))
        .collect();
    near.sort_unstable();
    near.truncate(MAX_PROPOSALS);
    near.into_iter().map(|(_, name)| name).collect()
}

/// The number of characters to insert, delete or replace that make `b` of `a` (Levenshtein).
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// The kernels that may be used if a device has them. A change applies to plans that are compiled
/// afterwards.
#[derive(Debug)]
pub struct KernelSet {
    /// Whether the kernel at this index of [`names`] is disabled.
    disabled: Box<[AtomicBool]>,
}

impl Default for KernelSet {
    /// All kernels.
    fn default() -> KernelSet {
        KernelSet::without(|_| false)
    }
}

impl KernelSet {
    /// All kernels but those that `is_disabled` names.
    pub fn without(is_disabled: impl Fn(&str) -> bool) -> KernelSet {
        KernelSet {
            disabled: { names().iter() }
                .map(|name| AtomicBool::new(is_disabled(name)))
                .collect(),
        }
    }

    /// Disables the kernels that `is_disabled` names, and enables all others.
    pub fn disable_only(&self, is_disabled: impl Fn(&str) -> bool) {
        for (name, disabled) in names().iter().zip(self.disabled.iter()) {
            disabled.store(is_disabled(name), Ordering::Relaxed);
        }
    }

    /// Whether the kernel is not disabled.
    pub fn allows(&self, name: &str) -> bool {
        let at = names().binary_search(&name);
        at.is_ok_and(|at| !self.disabled[at].load(Ordering::Relaxed))
    }

    /// The kernels that are disabled, sorted.
    pub fn disabled(&self) -> impl Iterator<Item = &'static str> {
        let all = names().iter().zip(self.disabled.iter());
        all.filter(|(_, disabled)| disabled.load(Ordering::Relaxed))
            .map(|(name, _)| *name)
    }
}

/// The kernels of a device that may be used.
pub(crate) struct UsableKernels {
    device: Arc<dyn Device>,
    set: Arc<KernelSet>,
    /// The kernels that the log has named because nodes run on the CPU engine without them.
    reported: Mutex<BTreeSet<&'static str>>,
    lacks_simple: bool,
}

impl UsableKernels {
    /// The kernels of `device` that `set` allows.
    pub(crate) fn new(device: Arc<dyn Device>, set: Arc<KernelSet>) -> UsableKernels {
        let mut kernels = UsableKernels {
            device,
            set,
            reported: Mutex::default(),
            lacks_simple: false,
        };
        kernels.lacks_simple = !SIMPLE.iter().all(|&name| kernels.has(name));
        kernels
    }

    /// Whether the kernel may be used.
    pub(crate) fn has(&self, name: &'static str) -> bool {
        self.set.allows(name) && self.device.kernel(name).is_ok()
    }

    /// The kernel called `name`.
    ///
    /// # Errors
    /// [`EngineError::Device`] if the device has no such kernel, or the kernel is disabled.
    pub(crate) fn find(&self, name: &'static str) -> Result<KernelId, EngineError> {
        if !self.set.allows(name) {
            return Err(EngineError::Device {
                message: format!("the kernel {name} is disabled"),
            });
        }
        self.device.kernel(name)
    }

    /// Whether a [simple](SIMPLE) kernel was missing at the start, so that any node may run on the
    /// CPU engine.
    pub(crate) fn lacks_simple(&self) -> bool {
        self.lacks_simple
    }

    /// Logs once that nodes run on the CPU engine because `kernel` is missing. `op` is the operator
    /// of the first such node.
    pub(crate) fn report_missing(&self, kernel: &'static str, op: &str) {
        let is_new = lock(&self.reported).insert(kernel);
        if is_new {
            warn!("{op} runs on the CPU engine: the kernel {kernel} is disabled or was not loaded");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simple_kernels_are_sorted_and_exist() {
        assert!(SIMPLE.is_sorted());
        for name in SIMPLE {
            assert!(names().contains(name), "{name}");
        }
        assert!(is_simple("vg_mul_vec") && !is_simple("vg_mmv_q4_k"));
    }

    #[test]
    fn lists_name_kernels_or_families() {
        let parsed = parse_names(" vg_rope, vg_fattn_sm90_*,,vg_gemm_*q4_k*_128").unwrap();
        let expected = [
            "vg_rope",
            "vg_fattn_sm90_128",
            "vg_fattn_sm90_256",
            "vg_fattn_sm90_64",
            "vg_gemm_sm90_q4_k_128",
        ];
        assert_eq!(parsed, expected);
        assert_eq!(parse_names(""), Ok(Vec::new()));
        assert_eq!(parse_names("*").map(|all| all.len()), Ok(names().len()));
        // A prefix and a suffix do not share characters.
        assert!(!matches("vg_rope_*_rows", "vg_rope_rows"));
        assert!(matches("vg_rope*_rows", "vg_rope_rows"));
    }

    #[test]
    fn unknown_names_are_refused_with_similar_ones() {
        let error = parse_names("vg_rope,vg_mmv_q4k").unwrap_err();
        assert_eq!(error.name, "vg_mmv_q4k");
        assert!(error.near.contains(&"vg_mmv_q4_k"), "{error}");
        assert!(error.to_string().contains("vg_mmv_q4_k"), "{error}");
        let error = parse_names("vg_hopper_*").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("there is no kernel vg_hopper_*")
        );
        assert_eq!(edits("kitten", "sitting"), 3);
    }

    #[test]
    fn sets_change() {
        let set = KernelSet::default();
        assert!(set.allows("vg_rope") && !set.allows("vg_unknown"));
        set.disable_only(|name| name.starts_with("vg_rope_"));
        assert!(set.allows("vg_rope"));
        assert_eq!(
            set.disabled().collect::<Vec<_>>(),
            ["vg_rope_cache", "vg_rope_rows"]
        );
        set.disable_only(|_| false);
        assert_eq!(set.disabled().count(), 0);
    }
}
