//! Where the supported releases of ggml differ in what they write into a node. The numbers are
//! those of [`Since`], which the engine over a backend of ggml uses, too.
//!
//! docs/ggml-versions.md has the same differences with their reasons and tests, beside those that
//! need nothing here.
//!
//! `ggml_version()` names the last release before a build. Most programs carry a build between two
//! releases, so that a word may be written under the number of the release before the one that
//! introduced it. ggml leaves a word that it does not write 0. For all words here but those of
//! DSV4_HC_PRE, 0 also is the value of a node that does not use the feature. A word that is not 0
//! under an older number has an unknown meaning, and the node is refused.
//!
//! What builds of the oldest supported number may write has no entry: the offset of ROPE (word 15),
//! which came in 0.21.0.

use vgpu_transport::ir::OpKind;

use crate::abi::versions::Since;
use crate::ggml::Version;

/// A word of `op_params` that some supported releases do not write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Added {
    /// The operators that have the word.
    pub(super) ops: &'static [OpKind],
    pub(super) word: usize,
    /// The lowest number that a build with the word has.
    pub(super) from: Version,
}

/// A source that became optional: null stands for the identity.
#[derive(Clone, Copy, Debug)]
pub(super) struct Optional {
    pub(super) op: OpKind,
    pub(super) source: usize,
    /// The lowest number that a build with the option has.
    pub(super) from: Version,
}

/// All differences between the supported releases.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table<'a> {
    /// Every word that was added to an operator after the oldest supported release.
    pub(super) added: &'a [Added],
    /// Every source that became optional after the oldest supported release.
    pub(super) optional: &'a [Optional],
    /// The first number under which every build writes the words of DSV4_HC_PRE. Below, a node
    /// without them is one that neither scales nor has gates.
    pub(super) hc_pre_has_parameters: Version,
    /// The lowest number of a build with the values of `enum ggml_prec` other than default and F32.
    pub(super) precisions: Version,
}

/// The table that the plugin uses.
pub(super) const TABLE: Table<'static> = Table {
    added: &[
        // The precision of the second source (`ggml_prec_set_src`), in builds after 0.23.0.
        Added {
            ops: &[OpKind::MulMat, OpKind::MulMatId],
            word: 3,
            from: Since::PRECISIONS.some_builds,
        },
        // The precision of the sum (`ggml_prec_set_acc`), in the same builds. MUL_MAT has always
        // had it.
        Added {
            ops: &[OpKind::MulMatId],
            word: 0,
            from: Since::PRECISIONS.some_builds,
        },
        // n_kv_max, in builds after 0.22.0. How many entries of a row of the mask are finite.
        Added {
            ops: &[OpKind::FlashAttnExt],
            word: 4,
            from: Since::N_KV_MAX.some_builds,
        },
        // scale and gated, in 0.25.0.
        Added {
            ops: &[OpKind::Dsv4HcPre],
            word: 0,
            from: Since::HC_PRE_PARAMETERS.some_builds,
        },
        Added {
            ops: &[OpKind::Dsv4HcPre],
            word: 1,
            from: Since::HC_PRE_PARAMETERS.some_builds,
        },
    ],
    // comb, in 0.25.0.
    optional: &[Optional {
        op: OpKind::Dsv4HcPost,
        source: 3,
        from: Since::HC_POST_WITHOUT_COMB.some_builds,
    }],
    hc_pre_has_parameters: Since::HC_PRE_PARAMETERS.every_build,
    precisions: Since::PRECISIONS.some_builds,
};

/// What builds of one number write into nodes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Release<'a> {
    number: Version,
    table: &'a Table<'a>,
}

impl Release<'static> {
    /// The builds whose `ggml_version()` is `number`.
    pub(super) fn of(number: Version) -> Release<'static> {
        Release {
            number,
            table: &TABLE,
        }
    }
}

impl<'a> Release<'a> {
    /// The builds of `number` as `table` describes them.
    #[cfg(test)]
    pub(super) fn by(table: &'a Table<'a>, number: Version) -> Release<'a> {
        Release { number, table }
    }

    /// Whether a build may write the word `word` of an operator of kind `op`, provided that the
    /// newest supported release does.
    pub(super) fn writes(&self, op: OpKind, word: usize) -> bool {
        let mut added = self.table.added.iter();
        added
            .find(|added| added.word == word && added.ops.contains(&op))
            .is_none_or(|added| self.number >= added.from)
    }

    /// The factor of DSV4_HC_PRE that a node without parameters has. `None` if every build writes
    /// the parameters. With them, a factor of 0 without gates does not occur.
    pub(super) fn hc_pre_scale(&self) -> Option<f32> {
        (self.number < self.table.hc_pre_has_parameters).then_some(1.0)
    }

    /// Whether null as source `source` of an operator of kind `op` has a meaning, provided that it
    /// has one in the newest supported release.
    pub(super) fn is_optional(&self, op: OpKind, source: usize) -> bool {
        let mut optional = self.table.optional.iter();
        optional
            .find(|optional| optional.op == op && optional.source == source)
            .is_none_or(|optional| self.number >= optional.from)
    }

    /// Whether a build may have all values of `enum ggml_prec`, and not only default and F32.
    pub(super) fn has_all_precisions(&self) -> bool {
        self.number >= self.table.precisions
    }
}
