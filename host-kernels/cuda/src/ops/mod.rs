//! The operators, one file for each family, as in the CPU engine. The file of a family has
//! `rules()`, the combinations of types that it supports, and `compile()`, which adds the launches
//! of a node that belongs to the family.

pub(crate) mod attention;
#[cfg(test)]
mod bench;
mod conv;
mod deepseek;
mod elementwise;
mod fattn;
mod fattn_operands;
mod fattn_sm90;
pub(crate) mod fused;
mod gemm_sm90;
mod gemm_sm90_few;
mod image;
mod matmul;
pub(crate) mod mmv;
mod movement;
mod norm;
mod recurrent;
mod reduce;
#[cfg(test)]
mod repack_tests;
pub(crate) mod rope;
mod training;

use vgpu_transport::ir::{Op, Rule};

use crate::launch::builder::Builder;
use vgpu_engine::EngineError;

/// All operators and types that the engine supports.
pub(crate) fn rules() -> Vec<Rule> {
    [
        crate::cpu_fallback::rules(),
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

/// Adds the launches of a node if it belongs to the family.
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

/// Adds the launches of a node with a non-empty destination.
///
/// # Errors
/// [`EngineError::Unsupported`] if no kernel takes the operands.
pub(crate) fn compile(op: &Op, b: &mut Builder<'_>) -> Result<(), EngineError> {
    FAMILIES
        .iter()
        .find_map(|compile| compile(op, b))
        .unwrap_or_else(|| Err(b.unsupported("the engine has no kernel for the operator")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vgpu_transport::ir::{Capabilities, OpKind, Type};

    use vgpu_cpu::CpuEngine;
    use vgpu_engine::Engine as _;

    /// All combinations of types that rules allow: operator, variants, types of the destination and
    /// the first sources.
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

    /// Both engines support the same operators and types, so that a graph is not split for one of
    /// them.
    #[test]
    fn cuda_engine_supports_all_operators_of_the_cpu_engine() {
        let cpu = CpuEngine::new(1, None).expect("an engine");
        let (ours, theirs) = (
            combinations(&Capabilities::new(rules())),
            combinations(cpu.capabilities()),
        );
        let missing: Vec<_> = theirs.difference(&ours).collect();
        assert!(missing.is_empty(), "{} missing: {missing:?}", missing.len());
        // Kernels that read any element of any type also take weights of the types of quantised
        // activations; the CPU engine has no products with these.
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
