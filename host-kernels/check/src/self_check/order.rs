//! In which order kernels are checked, and with which others.

use vgpu_cuda::kernel_set::{is_simple, names};

/// The persistent kernels that run a whole step.
pub(super) const MEGAKERNELS: [&str; 2] = ["vg_megakernel", "vg_megakernel_cols8"];

fn is_sm90(kernel: &str) -> bool {
    kernel.contains("_sm90")
}

/// Whether the kernel makes or reads repacked weights.
pub(super) fn reads_repacked(kernel: &str) -> bool {
    kernel == "vg_repack" || kernel.contains("_repacked")
}

/// The width of the tiles of a matrix product on sm_90a.
fn tile_of(kernel: &str) -> Option<&str> {
    let rest = kernel.strip_prefix("vg_gemm_sm90_")?;
    rest.rsplit('_').next()
}

/// Whether an engine may choose `other` where it would else use `kernel`.
fn hides(other: &str, kernel: &str) -> bool {
    let is_other_tile = tile_of(other)
        .zip(tile_of(kernel))
        .is_some_and(|(a, b)| a != b);
    is_sm90(other) && !is_sm90(kernel)
        || is_other_tile
        || other == "vg_repack" && !reads_repacked(kernel)
        || other == "vg_rope_cache" && kernel == "vg_rope_rows"
        || MEGAKERNELS.contains(&other) && !MEGAKERNELS.contains(&kernel)
}

/// The kernels that are disabled so that cases use `kernel`.
pub(super) fn hiding(kernel: &str) -> Vec<&'static str> {
    let all = names().iter().copied();
    all.filter(|other| hides(other, kernel)).collect()
}

/// The place in the order. Kernels that others need come first, and a fallback comes before its
/// kernel, so that a faulty kernel is found by its own check.
fn rank(kernel: &str) -> u32 {
    match kernel {
        "vg_upload" => 0,
        "vg_quantize_q8" | "vg_convert_f16" | "vg_split_bf16" | "vg_moe_sort" => 1,
        "vg_gemm_any" | "vg_fattn_mask_tiles" => 2,
        "vg_gemm_f32" => 3,
        "vg_rope_cache" => 7,
        "vg_repack" => 5,
        "vg_convert_f16_sm90" => 8,
        _ if MEGAKERNELS.contains(&kernel) => 10,
        _ if is_sm90(kernel) => 9,
        _ if reads_repacked(kernel) => 6,
        _ if kernel.starts_with("vg_fattn_f32_") => 3,
        _ => 4,
    }
}

/// The kernels with a fallback, in the order of the check. Those for several plans
/// (`vg_mmv_*_joint`) are off by default, and have no case.
pub(super) fn in_order() -> Vec<&'static str> {
    let mut kernels: Vec<_> = { names().iter().copied() }
        .filter(|name| !is_simple(name) && !name.ends_with("_joint"))
        .collect();
    kernels.sort_by_key(|kernel| (rank(kernel), *kernel));
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faster_kernels_are_disabled_for_the_check_of_slower_ones() {
        let general = hiding("vg_gemm_q4_0");
        assert!(general.contains(&"vg_gemm_sm90_q4_0_128") && general.contains(&"vg_repack"));
        assert!(general.contains(&"vg_megakernel") && !general.contains(&"vg_gemm_any"));
        let repacked = hiding("vg_gemm_sm90_q4_0_repacked_256");
        assert!(repacked.contains(&"vg_gemm_sm90_q4_0_repacked_128"));
        assert!(!repacked.contains(&"vg_repack") && !repacked.contains(&"vg_convert_f16_sm90"));
        assert!(hiding("vg_rope_rows").contains(&"vg_rope_cache"));
        for kernel in names() {
            assert!(!hiding(kernel).contains(kernel), "{kernel} hides itself");
        }
    }

    #[test]
    fn fallbacks_are_checked_before_the_kernel() {
        let order = in_order();
        let place = |kernel| order.iter().position(|known| *known == kernel);
        for (first, second) in [
            ("vg_upload", "vg_quantize_q8"),
            ("vg_quantize_q8", "vg_mmv_q4_k"),
            ("vg_gemm_any", "vg_gemm_q4_k"),
            ("vg_gemm_q4_k", "vg_gemm_sm90_q4_k_256"),
            ("vg_fattn_f32_128_prefill", "vg_fattn_f16_128_prefill"),
            ("vg_fattn_f16_128_prefill", "vg_fattn_sm90_128"),
            ("vg_repack", "vg_mmv_q4_0_repacked"),
            ("vg_rope_rows", "vg_rope_cache"),
            ("vg_gemm_sm90_q4_k_256", "vg_megakernel"),
        ] {
            assert!(
                place(first).is_some() && place(first) < place(second),
                "{first}, {second}"
            );
        }
        assert_eq!(place("vg_mul_vec"), None);
    }
}
