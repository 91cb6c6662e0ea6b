//! The engines of an executor.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;

use super::kind::{EngineKind, GgmlBackend, ParseEngineKindError};

/// The engines that an operator asks for, in the order of the devices that guests see. At least
/// one.
///
/// The text names engines separated by commas. Behind `cuda:0` and behind a device of ggml, a
/// number or a name alone is another device of the same: `cuda:0,1`,
/// `ggml:/usr/lib/ollama/vulkan/libggml-vulkan.so:Vulkan0,Vulkan1`. What follows `ggml:` is a path
/// with its devices to the end of the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineList(Vec<EngineKind>);

impl EngineList {
    /// The engines of several lists, in their order. `None` if there is no list.
    pub fn join(lists: impl IntoIterator<Item = EngineList>) -> Option<EngineList> {
        let kinds: Vec<EngineKind> = lists.into_iter().flat_map(|list| list.0).collect();
        (!kinds.is_empty()).then_some(EngineList(kinds))
    }

    /// The engines.
    pub fn kinds(&self) -> &[EngineKind] {
        &self.0
    }

    /// The first engine that a guest can end ([`EngineKind::needs_trust`]).
    pub fn needs_trust(&self) -> Option<&EngineKind> {
        self.0.iter().find(|kind| kind.needs_trust())
    }
}

impl From<EngineKind> for EngineList {
    fn from(kind: EngineKind) -> EngineList {
        EngineList(vec![kind])
    }
}

impl FromStr for EngineList {
    type Err = ParseEngineKindError;

    fn from_str(text: &str) -> Result<EngineList, ParseEngineKindError> {
        let mut kinds: Vec<EngineKind> = Vec::new();
        let mut parts = text.split(',');
        // A path may have commas, so that `ggml:` takes all that follows.
        let ggml = match text.strip_prefix("ggml:") {
            Some(_) => Some(0),
            None => text.find(",ggml:").map(|comma| comma + 1),
        };
        if let Some(at) = ggml {
            parts = text[..at.saturating_sub(1)].split(',');
        }
        for part in parts.filter(|_| ggml != Some(0)) {
            let is_number = part.bytes().all(|byte| byte.is_ascii_digit());
            let further = match (kinds.last(), part.parse::<u32>()) {
                (Some(EngineKind::Cuda(_)), Ok(n)) if is_number => Some(EngineKind::Cuda(n)),
                _ => None,
            };
            kinds.push(match further {
                Some(kind) => kind,
                None => part.parse()?,
            });
        }
        if let Some(at) = ggml {
            kinds.extend(devices_of_ggml(&text[at..])?);
        }
        Ok(EngineList(kinds))
    }
}

/// Reads `ggml:PATH` or `ggml:PATH:DEVICE,DEVICE...`.
fn devices_of_ggml(text: &str) -> Result<Vec<EngineKind>, ParseEngineKindError> {
    let first: EngineKind = text.parse()?;
    let EngineKind::Ggml(GgmlBackend {
        path,
        device: Some(devices),
    }) = &first
    else {
        return Ok(vec![first]);
    };
    // Engines behind a backend have a flag of their own: a path may have commas.
    if path.as_os_str().to_string_lossy().contains(",ggml:") {
        return Err(ParseEngineKindError);
    }
    let devices = devices.split(',').map(|device| match device {
        "" | "all" => Err(ParseEngineKindError),
        device => Ok(EngineKind::Ggml(GgmlBackend {
            path: path.clone(),
            device: Some(device.to_owned()),
        })),
    });
    devices.collect()
}

impl fmt::Display for EngineList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, kind) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str(", ")?;
            }
            kind.fmt(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_engines_are_read() {
        for (text, kinds) in [
            ("auto", &["auto"][..]),
            ("cuda:all", &["cuda:all"]),
            ("cuda:0,1,7", &["cuda:0", "cuda:1", "cuda:7"]),
            ("cuda,3", &["cuda:0", "cuda:3"]),
            ("cuda:1,cpu", &["cuda:1", "cpu"]),
            ("ggml:/a.so:V0,V1", &["ggml:/a.so:V0", "ggml:/a.so:V1"]),
            ("ggml:/a,b.so", &["ggml:/a,b.so"]),
            ("ggml:/a.so:all", &["ggml:/a.so:all"]),
            ("cpu,ggml:/a,b.so:V0", &["cpu", "ggml:/a,b.so:V0"]),
        ] {
            let list: EngineList = text.parse().expect(text);
            let read: Vec<String> = list.kinds().iter().map(EngineKind::to_string).collect();
            assert_eq!(read, kinds, "{text}");
        }
        for text in [
            "",
            "cpu,",
            ",cpu",
            "cpu,1",
            "cuda:0,x",
            "cuda:0,-1",
            "cuda:0,+1",
            "cpu,,ggml:/a.so",
            "ggml:/a.so:V0,",
            "ggml:/a.so:all,V0",
            "ggml:/a.so:V0,ggml:/b.so:V1",
        ] {
            let read = text.parse::<EngineList>();
            assert_eq!(read, Err(ParseEngineKindError), "{text}");
        }
    }

    #[test]
    fn lists_are_joined_in_their_order() {
        let lists = ["cuda:1", "cpu"].map(|text| text.parse().expect(text));
        let joined = EngineList::join(lists).expect("two lists");
        assert_eq!(joined.to_string(), "cuda:1, cpu");
        assert_eq!(EngineList::join([]), None);
    }
}
