//! What a container gets: the guest plugin, the folder with a socket, and the environment to find
//! both.

use crate::options::Options;

/// Where a container has the guest plugin.
const PLUGIN: &str = "/usr/lib/vgpu/libggml-vgpu.so";

/// The same for an Ollama, which takes the only library of the folder that `OLLAMA_LLM_LIBRARY`
/// names below its own folder of libraries. The path is that of Ollama's image.
const OLLAMA: &str = "/usr/lib/ollama/vgpu/libggml-vgpu.so";

/// Where a container has the folder with its socket.
const FOLDER: &str = "/run/vgpu";

/// A file or folder of the host that a container gets, which it cannot change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    /// The path in the container.
    pub(crate) container: &'static str,
    /// The path on the host.
    pub(crate) host: String,
}

/// The files and folders that a container with the socket of this [folder](Options::folder) gets.
pub(crate) fn mounts(options: &Options, folder: &str) -> [Mount; 3] {
    let folder = options.folder(folder).display().to_string();
    let plugin = options.plugin.display().to_string();
    let mount = |container, host: &String| Mount {
        container,
        host: host.clone(),
    };
    [
        mount(PLUGIN, &plugin),
        mount(OLLAMA, &plugin),
        mount(FOLDER, &folder),
    ]
}

/// The variables of a container. Those of its pod come after these, and may say otherwise.
pub(crate) fn variables() -> [(&'static str, String); 5] {
    [
        ("GGML_BACKEND_PATH", PLUGIN.into()),
        ("VGPU_ENDPOINT", format!("unix:{FOLDER}/vgpu.sock")),
        // A container that asks for a device does not want its own CPU.
        ("VGPU_REQUIRED", "1".into()),
        ("OLLAMA_LLM_LIBRARY", "vgpu".into()),
        ("OLLAMA_FLASH_ATTENTION", "1".into()),
    ]
}
