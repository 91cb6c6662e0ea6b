//! The operators, one file for each family, as in the CPU engine. A family's file has `rules()`, the type
//! combinations it runs, and `compile()`, which turns a node into launches, if it is one of its own.

pub(super) mod attention;
#[cfg(test)]
mod bench;
mod conv;
mod deepseek;
mod elementwise;
pub(super) mod fused;
mod hopper;
mod hopper_attention;
mod image;
mod matmul;
mod movement;
mod norm;
#[cfg(test)]
mod planes_tests;
mod recurrent;
mod reduce;
pub(super) mod rope;
mod training;
pub(super) mod vector;

use vgpu_transport::ir::{Op, Rule, Type, TypeSet};

use super::plan::Builder;
use vgpu_engine::EngineError;
use vgpu_engine::types::FLOATS;

/// The types that real numbers can be written to.
pub(super) const WRITABLE: TypeSet = FLOATS.union(TypeSet::of(&[
    Type::Q4_0,
    Type::Q4_1,
    Type::Q5_0,
    Type::Q5_1,
    Type::Q8_0,
    Type::Iq4Nl,
]));

/// The types that can be read as real numbers.
pub(super) const READABLE: TypeSet = WRITABLE.union(TypeSet::of(&[
    Type::Q8_1,
    Type::Q1_0,
    Type::Q2_0,
    Type::Mxfp4,
    Type::Nvfp4,
    Type::Q2K,
    Type::Q3K,
    Type::Q4K,
    Type::Q5K,
    Type::Q6K,
    Type::Q8K,
    Type::Iq1S,
    Type::Iq1M,
    Type::Iq2Xxs,
    Type::Iq2Xs,
    Type::Iq2S,
    Type::Iq3Xxs,
    Type::Iq3S,
    Type::Iq4Xs,
    Type::Tq1_0,
    Type::Tq2_0,
]));

/// Everything the engine runs.
pub(super) fn rules() -> Vec<Rule> {
    [
        super::host::rules(),
        attention::rules(),
        conv::rules(),
        deepseek::rules(),
        elementwise::rules(),
        image::rules(),
        matmul::rules(),
        movement::rules(),
        norm::rules(),
        recurrent::rules(),
        reduce::rules(),
        rope::rules(),
        training::rules(),
    ]
    .concat()
}

/// Turns a node into launches, if it belongs to the family.
type Family = fn(&Op, &mut Builder<'_>) -> Option<Result<(), EngineError>>;

const FAMILIES: [Family; 12] = [
    attention::compile,
    conv::compile,
    deepseek::compile,
    elementwise::compile,
    image::compile,
    matmul::compile,
    movement::compile,
    norm::compile,
    recurrent::compile,
    reduce::compile,
    rope::compile,
    training::compile,
];

/// Turns a node into launches. Its destination is not empty.
pub(super) fn compile(op: &Op, b: &mut Builder<'_>) -> Result<(), EngineError> {
    FAMILIES
        .iter()
        .find_map(|compile| compile(op, b))
        .unwrap_or_else(|| Err(b.unsupported("the engine has no kernel for it")))
}

/// `n / by`, rounded up; of extents, which are not negative.
fn div_ceil(n: i64, by: i64) -> i64 {
    (n as u64).div_ceil(by as u64) as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_transport::ir::{Capabilities, OpKind};

    use vgpu_cpu::CpuEngine;
    use vgpu_engine::Engine as _;

    /// Every combination of types that a rule allows: the operator, its variants, the destination's and the first
    /// sources' types.
    fn combinations(capabilities: &Capabilities) -> std::collections::BTreeSet<String> {
        let mut all = std::collections::BTreeSet::new();
        for rule in capabilities.rules() {
            let mut rows = vec![Vec::new()];
            for set in std::iter::once(&rule.dst).chain(&rule.src) {
                rows = rows
                    .iter()
                    .flat_map(|row| {
                        set.iter().map(|ty| {
                            let mut row: Vec<Type> = row.clone();
                            row.push(ty);
                            row
                        })
                    })
                    .filter(|row| !rule.same_type || row.iter().all(|ty| *ty == row[0]))
                    .collect();
            }
            let (op, variants, dense) = (rule.op, rule.variants, rule.dense_rows);
            all.extend(
                rows.iter()
                    .map(|row| format!("{op:?} {variants:x} {dense:x} {row:?}")),
            );
        }
        all
    }

    /// A guest's graph is not split for want of an operator that the CPU engine has, and no operator runs on one engine
    /// only.
    #[test]
    fn the_engine_runs_what_the_cpu_engine_runs() {
        let cpu = CpuEngine::new(1, None).expect("an engine");
        let (ours, theirs) = (
            combinations(&Capabilities::new(rules())),
            combinations(cpu.capabilities()),
        );
        let missing: Vec<_> = theirs.difference(&ours).collect();
        assert!(missing.is_empty(), "{} missing: {missing:?}", missing.len());
        // A kernel that reads any element of any type also reads weights of types that ggml quantises activations to;
        // the CPU engine has no products with those.
        let readers = [OpKind::MulMat, OpKind::MulMatId, OpKind::FlashAttnExt];
        let more: Vec<_> = ours
            .difference(&theirs)
            .filter(|rule| {
                !readers
                    .iter()
                    .any(|op| rule.starts_with(&format!("{op:?} ")))
            })
            .collect();
        assert!(more.is_empty(), "{} more: {more:?}", more.len());
    }
}
