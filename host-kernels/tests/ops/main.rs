//! Every operator against a slow reference, on every engine.

#[path = "../common/mod.rs"]
mod common;
mod conv;
mod copy;
mod elementwise;
mod glu;
mod image;
mod movement;
mod norm;
mod reduce;
mod rows;
mod unary;

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

    use vgpu_kernels::Engine;
    use vgpu_kernels::cpu::CpuEngine;

    /// Three threads: shares that do not divide evenly, on any machine.
    fn engine() -> &'static dyn Engine {
        static ENGINE: OnceLock<CpuEngine> = OnceLock::new();
        ENGINE.get_or_init(|| CpuEngine::new(3, None).expect("an engine"))
    }

    for_engine! {
        engine:
        conv { conv_2d conv_3d depthwise transposed im2col im2col_3d col2im_1d }
        copy { same_type conversions integers }
        elementwise { binary in_place quantized_sum add_id ids_are_checked scale_and_clamp refusals }
        glu { two_sources halves }
        image { pooling upscale shrink timestep_embedding windows relative_positions }
        movement {
            repeat repeat_back concat set_and_acc diagonals padding reflection roll constants
        }
        norm { of_rows of_groups gradients }
        reduce { sums argmax count_equal argsort special_values }
        rows { get get_back set ids_are_checked }
        unary { every_kind in_place parameters special_values }
    }
}
