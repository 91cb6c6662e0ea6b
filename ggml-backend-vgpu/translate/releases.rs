//! Where the supported releases of ggml differ in what they write into a node: the one place.
//!
//! docs/ggml-versions.md has the same differences with their reasons and tests, beside those that
//! need nothing here.
//!
//! `ggml_version()` names the last release before a build. Most programs carry a build between two
//! releases, so that a word may be written under the number of the release before the one that
//! introduced it. ggml leaves a word that it does not write 0. For all words here but those of
//! DSV4_HC_PRE, 0 also is the value of a node that does not use the feature. A word that is not 0
//! under an older number has an unknown meaning, and the node is refused.

use vgpu_transport::ir::OpKind;

use crate::ggml::Version;

/// A word of `op_params` that some supported releases do not write.
struct Added {
    /// The operators that have the word.
    ops: &'static [OpKind],
    word: usize,
    /// The lowest number that a build with the word has.
    from: Version,
}

/// Every word that was added to an operator after the oldest supported release.
const ADDED: &[Added] = &[
    // n_offs, in 0.21.0. The element at which the rotation begins.
    Added {
        ops: &[OpKind::Rope],
        word: 15,
        from: Version::new(0, 20),
    },
    // The precision of the second source (`ggml_prec_set_src`), in 0.23.0.
    Added {
        ops: &[OpKind::MulMat, OpKind::MulMatId],
        word: 3,
        from: Version::new(0, 22),
    },
    // n_kv_max, in 0.23.0. How many entries of a row of the mask are finite.
    Added {
        ops: &[OpKind::FlashAttnExt],
        word: 4,
        from: Version::new(0, 22),
    },
    // scale and gated, in 0.25.0.
    Added {
        ops: &[OpKind::Dsv4HcPre],
        word: 0,
        from: Version::new(0, 24),
    },
    Added {
        ops: &[OpKind::Dsv4HcPre],
        word: 1,
        from: Version::new(0, 24),
    },
];

/// The first number under which every build writes the words of DSV4_HC_PRE. Below, a node without
/// them is one that neither scales nor has gates.
const HC_PRE_HAS_PARAMETERS: Version = Version::new(0, 25);

/// The sources that became optional: null stands for the identity. The number is the lowest that a
/// build with the option has.
const OPTIONAL: &[(OpKind, usize, Version)] = &[(OpKind::Dsv4HcPost, 3, Version::new(0, 24))];

/// The lowest number of a build with the values of `enum ggml_prec` other than default and F32,
/// which came in 0.23.0.
const PRECISIONS: Version = Version::new(0, 22);

/// Whether a build of `release` may write the word `word` of an operator of kind `op`, provided
/// that the newest supported release does.
pub(super) fn writes(release: Version, op: OpKind, word: usize) -> bool {
    ADDED
        .iter()
        .find(|added| added.word == word && added.ops.contains(&op))
        .is_none_or(|added| release >= added.from)
}

/// The factor of DSV4_HC_PRE that a node without parameters has. `None` if every build of `release`
/// writes the parameters. With them, a factor of 0 without gates does not occur.
pub(super) fn hc_pre_scale(release: Version) -> Option<f32> {
    (release < HC_PRE_HAS_PARAMETERS).then_some(1.0)
}

/// Whether null as source `source` of an operator of kind `op` has a meaning in `release`, provided
/// that it has one in the newest supported release.
pub(super) fn is_optional(release: Version, op: OpKind, source: usize) -> bool {
    OPTIONAL
        .iter()
        .find(|&&(of, at, _)| of == op && at == source)
        .is_none_or(|&(_, _, from)| release >= from)
}

/// Whether a build of `release` may have all values of `enum ggml_prec`, and not only default and
/// F32.
pub(super) fn has_all_precisions(release: Version) -> bool {
    release >= PRECISIONS
}
