//! The engines of a guest, by their class.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use super::kind::EngineKind;

/// Which of the executor's engines a guest has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineChoice {
    /// Each CUDA engine.
    Cuda,
    /// Each engine over a backend of ggml.
    Ggml,
    /// The CPU engine.
    Cpu,
    /// The engines of the first class that the executor has, in the order CUDA, ggml, CPU.
    Auto,
}

impl EngineChoice {
    /// The classes, in the order in which [`Auto`](EngineChoice::Auto) looks for them.
    const CLASSES: [EngineChoice; 3] = [EngineChoice::Cuda, EngineChoice::Ggml, EngineChoice::Cpu];

    /// The positions of the guest's engines among those of the executor, in their order. Empty: the
    /// executor has no such engine.
    pub fn positions(self, engines: &[EngineKind]) -> Vec<usize> {
        let of = |class: EngineChoice| -> Vec<usize> {
            let all = engines.iter().enumerate();
            let own = all.filter(|(_, kind)| class.includes(kind));
            own.map(|(position, _)| position).collect()
        };
        match self {
            EngineChoice::Auto => {
                let mut found = EngineChoice::CLASSES.into_iter().map(of);
                let first = found.find(|positions| !positions.is_empty());
                first.unwrap_or_default()
            }
            class => of(class),
        }
    }

    /// Whether the engines that an operator names can have one for the guest. What `auto` stands
    /// for is known only when the engines are chosen.
    pub fn may_be_among(self, named: &[EngineKind]) -> bool {
        let may_be = |kind: &EngineKind| *kind == EngineKind::Auto || self.includes(kind);
        self == EngineChoice::Auto || named.iter().any(may_be)
    }

    /// Whether an engine is one of this class.
    fn includes(self, kind: &EngineKind) -> bool {
        match kind {
            EngineKind::Cpu => self == EngineChoice::Cpu,
            EngineKind::Cuda(_) | EngineKind::AllCuda => self == EngineChoice::Cuda,
            EngineKind::Ggml(_) | EngineKind::AllGgml(_) | EngineKind::AnyGgml => {
                self == EngineChoice::Ggml
            }
            EngineKind::Auto => false,
        }
    }
}

/// A text that names no class of engines.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown class of engines {0:?}: expected cuda, ggml, cpu or auto. `devices` gives a guest \
     single engines"
)]
pub struct ParseEngineChoiceError(String);

impl FromStr for EngineChoice {
    type Err = ParseEngineChoiceError;

    fn from_str(text: &str) -> Result<EngineChoice, ParseEngineChoiceError> {
        match text {
            "cuda" => Ok(EngineChoice::Cuda),
            "ggml" => Ok(EngineChoice::Ggml),
            "cpu" => Ok(EngineChoice::Cpu),
            "auto" => Ok(EngineChoice::Auto),
            _ => Err(ParseEngineChoiceError(text.into())),
        }
    }
}

impl fmt::Display for EngineChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EngineChoice::Cuda => "cuda",
            EngineChoice::Ggml => "ggml",
            EngineChoice::Cpu => "cpu",
            EngineChoice::Auto => "auto",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engines(names: &[&str]) -> Vec<EngineKind> {
        let parsed = names.iter().map(|name| name.parse().expect("an engine"));
        parsed.collect()
    }

    #[test]
    fn a_guest_has_all_engines_of_its_class_in_their_order() {
        let all = engines(&["cpu", "ggml:/a.so:V0", "cuda:1", "ggml:/a.so:V1", "cuda:0"]);
        for (choice, positions) in [
            (EngineChoice::Cuda, &[2, 4][..]),
            (EngineChoice::Ggml, &[1, 3]),
            (EngineChoice::Cpu, &[0]),
            (EngineChoice::Auto, &[2, 4]),
        ] {
            assert_eq!(choice.positions(&all), positions, "{choice}");
        }
        let without_cuda = engines(&["cpu", "ggml:/a.so"]);
        assert_eq!(EngineChoice::Auto.positions(&without_cuda), [1]);
        assert!(EngineChoice::Cuda.positions(&without_cuda).is_empty());
        assert_eq!(EngineChoice::Auto.positions(&engines(&["cpu"])), [0]);
    }

    #[test]
    fn what_auto_stands_for_may_be_of_any_class() {
        let all = [EngineChoice::Cuda, EngineChoice::Ggml, EngineChoice::Cpu];
        for (named, expected) in [
            ("auto", [true, true, true]),
            ("ggml", [false, true, false]),
            ("ggml:/a.so:all", [false, true, false]),
            ("cuda:all", [true, false, false]),
            ("cpu", [false, false, true]),
        ] {
            let named_engines = engines(&[named]);
            let may_be = all.map(|choice| choice.may_be_among(&named_engines));
            assert_eq!(may_be, expected, "{named}");
            assert!(EngineChoice::Auto.may_be_among(&named_engines), "{named}");
        }
    }

    #[test]
    fn names_of_classes_round_trip() {
        for name in ["cuda", "ggml", "cpu", "auto"] {
            let choice: EngineChoice = name.parse().expect(name);
            assert_eq!(choice.to_string(), name);
        }
        // An engine is no class.
        let error = "cuda:0".parse::<EngineChoice>().unwrap_err().to_string();
        assert!(
            error.contains("expected cuda, ggml, cpu or auto"),
            "{error}"
        );
    }
}
