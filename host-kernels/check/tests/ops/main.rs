//! Every operator against a slow reference, on every engine.

mod attention;
#[path = "../common/mod.rs"]
mod common;
mod conv;
mod copy;
mod deepseek;
mod elementwise;
mod glu;
mod hostile;
mod image;
mod matmul;
mod movement;
mod norm;
mod recurrent;
mod reduce;
mod rope;
mod rows;
#[path = "../../../shim/device.rs"]
mod shim;
mod softmax;
mod training;
mod unary;

#[global_allocator]
static ALLOCATOR: common::counting::Counting = common::counting::Counting;

/// Instantiates test bodies for an engine.
macro_rules! for_engine {
    ($engine:ident: $($family:ident { $($test:ident)* })*) => {$(
        mod $family {
            $(
                #[test]
                fn $test() {
                    crate::$family::$test(super::$engine());
                }
            )*
        }
    )*};
}

mod cpu {
    use std::sync::OnceLock;

    use vgpu_cpu::CpuEngine;
    use vgpu_engine::Engine;

    /// Three threads: work that does not divide evenly, on any machine.
    fn engine() -> &'static dyn Engine {
        static ENGINE: OnceLock<CpuEngine> = OnceLock::new();
        let engine = || CpuEngine::new(3, None).expect("an engine").with_checks();
        ENGINE.get_or_init(engine)
    }

    for_engine! {
        engine:
        attention {
            types_shapes_and_options many_tokens_and_long_contexts usual_widths_and_types
            what_is_hidden_does_not_count quantized_caches
        }
        conv { conv_2d conv_3d depthwise transposed im2col im2col_3d col2im_1d }
        copy { same_type transpositions conversions integers }
        deepseek { mixing_factors mixing indexer }
        elementwise {
            binary in_place quantized_sum add_id ids_are_checked scale_and_clamp refusals
        }
        glu { two_sources halves }
        hostile { huge_lengths_of_nothing overlapping_memory rows_far_apart }
        image { pooling upscale shrink timestep_embedding windows relative_positions }
        matmul {
            mul_mat few_and_many_columns mul_mat_of_many_tiles mul_mat_over_its_own_sources
            hadamard mul_mat_id few_and_many_tokens_of_experts experts_with_many_columns
            experts_are_checked out_prod
            mul_mat_of_what_was_multiplied_before activations_beyond_f16
        }
        movement {
            repeat repeat_back concat set_and_acc diagonals padding reflection roll constants
        }
        norm { of_rows of_groups gradients }
        recurrent {
            ssm_conv ssm_scan scan_ids_are_checked rwkv6_and_gated rwkv7 delta_net triangular
        }
        reduce { sums argmax count_equal argsort special_values }
        rope { modes_types_and_strides forth_and_back_in_place }
        rows { get get_back set ids_are_checked }
        softmax { masks_biases_and_sinks special_values_and_in_place }
        training { loss steps }
        unary { every_kind in_place parameters special_values }
    }
}

mod cuda {
    use std::sync::{Arc, OnceLock};

    use vgpu_cuda::CudaEngine;
    use vgpu_engine::Engine;

    use super::shim::Shim;

    /// The CUDA engine over the shim: its kernels run on the CPU.
    fn engine() -> &'static dyn Engine {
        static ENGINE: OnceLock<CudaEngine> = OnceLock::new();
        ENGINE.get_or_init(|| CudaEngine::new(Arc::new(Shim::default())).expect("an engine"))
    }

    for_engine! {
        engine:
        attention {
            types_shapes_and_options many_tokens_and_long_contexts usual_widths_and_types
            what_is_hidden_does_not_count
        }
        conv { conv_2d conv_3d depthwise transposed im2col im2col_3d col2im_1d }
        copy { same_type transpositions conversions integers }
        deepseek { mixing_factors mixing indexer }
        elementwise {
            binary in_place quantized_sum add_id ids_are_checked scale_and_clamp refusals
        }
        glu { two_sources halves }
        hostile { huge_lengths_of_nothing overlapping_memory rows_far_apart }
        image { pooling upscale shrink timestep_embedding windows relative_positions }
        matmul {
            mul_mat few_and_many_columns mul_mat_of_many_tiles mul_mat_over_its_own_sources
            hadamard mul_mat_id few_and_many_tokens_of_experts experts_are_checked out_prod
            activations_beyond_f16
        }
        movement {
            repeat repeat_back concat set_and_acc diagonals padding reflection roll constants
        }
        norm { of_rows of_groups gradients }
        recurrent {
            ssm_conv ssm_scan scan_ids_are_checked rwkv6_and_gated rwkv7 delta_net triangular
        }
        reduce { sums argmax count_equal argsort special_values }
        rope { modes_types_and_strides forth_and_back_in_place }
        rows { get get_back set ids_are_checked }
        softmax { masks_biases_and_sinks special_values_and_in_place }
        training { loss steps }
        unary { every_kind in_place parameters special_values }
    }
}

mod sm_90a {
    use std::sync::{Arc, OnceLock};

    use vgpu_cuda::CudaEngine;
    use vgpu_engine::Engine;

    use super::shim::Shim;

    /// The CUDA engine over the shim, with the kernels for sm_90a.
    fn engine() -> &'static dyn Engine {
        static ENGINE: OnceLock<CudaEngine> = OnceLock::new();
        ENGINE.get_or_init(|| CudaEngine::new(Arc::new(Shim::sm90())).expect("an engine"))
    }

    for_engine! {
        engine:
        attention { usual_widths_and_types many_tokens_of_pairs }
        matmul {
            many_columns_of_groups few_columns_on_tensor_cores mul_mat_of_many_tiles
            few_and_many_tokens_of_experts experts_are_checked mul_mat_of_what_was_multiplied_before
        }
    }
}
