//! The names of engines.
#![forbid(unsafe_code)]

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Which engine executes graphs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineKind {
    /// The CPU engine.
    Cpu,
    /// The CUDA engine on the GPU with this ordinal.
    Cuda(u32),
    /// A CUDA engine on each GPU.
    AllCuda,
    /// The engine over a backend of ggml.
    Ggml(GgmlBackend),
    /// An engine over each GPU of the backend of ggml in this file.
    AllGgml(PathBuf),
    /// An engine over each GPU of the first backend of ggml on this machine that has one.
    AnyGgml,
    /// A CUDA engine on each GPU where it starts, else a backend of ggml where guests may end their
    /// process, else the CPU engine.
    Auto,
}

/// A backend library of ggml and a device of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GgmlBackend {
    /// The file of the backend, such as `/usr/lib/ollama/vulkan/libggml-vulkan.so`.
    pub path: PathBuf,
    /// ggml's name of the device, such as `Vulkan1`. `None`: the backend's first one.
    pub device: Option<String>,
}

impl EngineKind {
    /// Whether a guest can end the process: kernels of ggml trust the indices in tensors, and end
    /// the process on what they do not expect.
    pub fn needs_trust(&self) -> bool {
        matches!(
            self,
            EngineKind::Ggml(_) | EngineKind::AllGgml(_) | EngineKind::AnyGgml
        )
    }
}

/// A text that names no engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected cpu, cuda, cuda:N, cuda:N,M, cuda:all, ggml, ggml:PATH, ggml:PATH:DEVICE, \
     ggml:PATH:DEVICE,DEVICE, ggml:PATH:all or auto"
)]
pub struct ParseEngineKindError;

impl FromStr for EngineKind {
    type Err = ParseEngineKindError;

    fn from_str(text: &str) -> Result<EngineKind, ParseEngineKindError> {
        match text {
            "cpu" => Ok(EngineKind::Cpu),
            "cuda" => Ok(EngineKind::Cuda(0)),
            "cuda:all" => Ok(EngineKind::AllCuda),
            "ggml" => Ok(EngineKind::AnyGgml),
            "auto" => Ok(EngineKind::Auto),
            _ if text.starts_with("ggml:") => parse_ggml(&text["ggml:".len()..]),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse().ok())
                .map(EngineKind::Cuda)
                .ok_or(ParseEngineKindError),
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EngineKind::Cpu => f.write_str("cpu"),
            EngineKind::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            EngineKind::AllCuda => f.write_str("cuda:all"),
            EngineKind::AllGgml(path) => write!(f, "ggml:{}:all", path.display()),
            EngineKind::Ggml(GgmlBackend { path, device }) => {
                write!(f, "ggml:{}", path.display())?;
                device.iter().try_for_each(|device| write!(f, ":{device}"))
            }
            EngineKind::AnyGgml => f.write_str("ggml"),
            EngineKind::Auto => f.write_str("auto"),
        }
    }
}

/// Reads `PATH` or `PATH:DEVICE`. A device has no slash in its name.
fn parse_ggml(text: &str) -> Result<EngineKind, ParseEngineKindError> {
    let (path, device) = match text.rsplit_once(':') {
        Some((path, device)) if !device.contains('/') => (path, Some(device)),
        _ => (text, None),
    };
    if path.is_empty() || device.is_some_and(str::is_empty) {
        return Err(ParseEngineKindError);
    }
    if device == Some("all") {
        return Ok(EngineKind::AllGgml(path.into()));
    }
    Ok(EngineKind::Ggml(GgmlBackend {
        path: path.into(),
        device: device.map(str::to_owned),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_engines_round_trip() {
        let device = |path: &str, device: Option<&str>| {
            EngineKind::Ggml(GgmlBackend {
                path: path.into(),
                device: device.map(str::to_owned),
            })
        };
        for (text, kind) in [
            ("cpu", EngineKind::Cpu),
            ("cuda:3", EngineKind::Cuda(3)),
            ("cuda:all", EngineKind::AllCuda),
            ("ggml:/x.so:all", EngineKind::AllGgml("/x.so".into())),
            ("auto", EngineKind::Auto),
            ("ggml", EngineKind::AnyGgml),
            ("ggml:/a/libggml-hip.so", device("/a/libggml-hip.so", None)),
            ("ggml:/a:b/x.so", device("/a:b/x.so", None)),
            ("ggml:x.so:Vulkan1", device("x.so", Some("Vulkan1"))),
        ] {
            assert_eq!(text.parse(), Ok(kind.clone()));
            assert_eq!(kind.to_string(), text);
        }
        for text in ["", "ggml:", "ggml::CPU", "ggml:x.so:", "cuda:x", "tpu"] {
            assert_eq!(
                text.parse::<EngineKind>(),
                Err(ParseEngineKindError),
                "{text}"
            );
        }
    }
}
