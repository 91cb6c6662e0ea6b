//! The capabilities of an engine: a list of rules, which the host sends in the handshake.

use std::sync::Arc;

use super::check::{Refusal, check};
use super::codec::{DecodeError, Reader, Word, Writer};
use super::graph::Shape;
use super::ops::{Op, OpKind};
use super::types::TypeSet;

/// One form in which an engine supports an operator. An engine does not support an operator without
/// a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The operator.
    pub op: OpKind,
    /// The covered variants ([`Op::variant`]), one bit each; `!0` for all.
    pub variants: u32,
    /// The types of the destination.
    pub dst: TypeSet,
    /// The types of the first sources. The rule does not restrict the types of absent sources and
    /// of sources behind the list; the operator's own rules ([`check`]) do.
    pub src: Vec<TypeSet>,
    /// Whether the listed sources and the destination must have the same type.
    pub same_type: bool,
    /// The sources, one bit each, whose rows must be dense ([`Shape::has_dense_rows`]).
    pub dense_rows: u32,
}

impl Rule {
    /// A rule for any variant of `op`, with these types of the destination and of the first
    /// sources.
    pub fn new(op: OpKind, dst: TypeSet, src: &[TypeSet]) -> Rule {
        Rule {
            op,
            variants: !0,
            dst,
            src: src.to_vec(),
            same_type: false,
            dense_rows: 0,
        }
    }

    /// A rule whose first `sources` sources and destination have the same type out of `types`.
    pub fn uniform(op: OpKind, types: TypeSet, sources: usize) -> Rule {
        Rule {
            same_type: true,
            ..Rule::new(op, types, &vec![types; sources])
        }
    }

    /// The same rule, with sources that must have dense rows, one bit each.
    pub fn dense(self, sources: u32) -> Rule {
        Rule {
            dense_rows: sources,
            ..self
        }
    }

    fn covers(&self, op: &Op, dst: &Shape, src: &[Option<&Shape>]) -> bool {
        let listed = || {
            src.iter()
                .zip(&self.src)
                .filter_map(|(s, set)| s.map(|s| (s, set)))
        };
        self.op == op.kind()
            && self.variants >> op.variant() & 1 == 1
            && self.dst.contains(dst.ty)
            && listed().all(|(s, set)| set.contains(s.ty))
            && (!self.same_type || listed().all(|(s, _)| s.ty == dst.ty))
            && src
                .iter()
                .enumerate()
                .all(|(i, s)| self.dense_rows >> i & 1 == 0 || s.is_none_or(Shape::has_dense_rows))
    }
}

/// All operations that an engine supports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Capabilities {
    rules: Arc<[Rule]>,
}

impl Capabilities {
    /// The capabilities of these rules.
    pub fn new(mut rules: Vec<Rule>) -> Capabilities {
        rules.sort_by_key(|rule| rule.op); // a stable sort keeps the order of an operator's rules
        Capabilities {
            rules: rules.into(),
        }
    }

    /// The rules, in order of operators.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Checks that the operation is well-formed and that a rule covers it. The guest answers ggml's
    /// `supports_op` with this function, and the host validates graphs with it.
    ///
    /// # Errors
    ///
    /// [`Refusal::Malformed`] for an operation that [`check`] refuses, and [`Refusal::NotCapable`]
    /// for one without a rule.
    pub fn accept(&self, op: &Op, dst: &Shape, src: &[Option<&Shape>]) -> Result<(), Refusal> {
        check(op, dst, src)?;
        let first = self.rules.partition_point(|rule| rule.op < op.kind());
        let covered = self.rules[first..]
            .iter()
            .take_while(|rule| rule.op == op.kind())
            .any(|rule| rule.covers(op, dst, src));
        if covered {
            Ok(())
        } else {
            Err(Refusal::NotCapable { op: op.kind() })
        }
    }

    /// The rules, for what was checked with them.
    pub(super) fn shared_rules(&self) -> Arc<[Rule]> {
        Arc::clone(&self.rules)
    }

    /// Encodes the capabilities in words.
    pub fn encode(&self) -> Vec<u32> {
        let mut out = Writer::default();
        out.u32(self.rules.len() as u32);
        for rule in &*self.rules {
            out.u32(
                rule.op as u32 | (rule.src.len() as u32) << 16 | u32::from(rule.same_type) << 24,
            );
            out.u32(rule.variants);
            out.u32(rule.dense_rows);
            rule.dst.bits().put(&mut out);
            for set in &rule.src {
                set.bits().put(&mut out);
            }
        }
        out.words
    }

    /// Decodes the capabilities. The decoder skips rules for unknown operators: a newer host may
    /// support operators that an older guest does not know.
    ///
    /// # Errors
    ///
    /// A [`DecodeError`] for malformed words. The host is at fault.
    pub fn decode(words: &[u32]) -> Result<Capabilities, DecodeError> {
        let mut words = Reader::new(words);
        let count = words.u32()?;
        let mut rules = Vec::new();
        for _ in 0..count {
            let head = words.u32()?;
            let variants = words.u32()?;
            let dense_rows = words.u32()?;
            let dst = TypeSet::from_bits(u64::get(&mut words)?);
            let mut src = Vec::new();
            for _ in 0..head >> 16 & 0xff {
                src.push(TypeSet::from_bits(u64::get(&mut words)?));
            }
            if let Some(op) = OpKind::from_id(head as u16) {
                rules.push(Rule {
                    op,
                    variants,
                    dst,
                    src,
                    same_type: head >> 24 & 1 == 1,
                    dense_rows,
                });
            }
        }
        match words.remaining() {
            0 => Ok(Capabilities::new(rules)),
            extra => Err(DecodeError::Trailing { extra }),
        }
    }
}
