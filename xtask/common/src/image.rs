//! The container images: of the executor, on which files in `deploy/` rely, and of llama-server.

/// The name of the executor's image, without a tag.
pub const NAME: &str = "ggml-vgpu";
/// The name of the image of llama-server with the plugin, without a tag.
pub const LLAMA_NAME: &str = "ggml-vgpu-llama-server";
/// The folder of llama-server and its libraries.
pub const LLAMA_FOLDER: &str = "/app";
/// llama-server in its image.
pub const LLAMA_SERVER: &str = "/app/llama-server";
/// The command of the executor's image.
pub const PROGRAM: &str = "/usr/bin/vgpu";
/// The plugin, which containers of guests get from the image.
pub const PLUGIN: &str = "/usr/lib/vgpu/libggml-vgpu.so";
/// Where the command that the image starts with listens.
pub const SOCKET: &str = "/run/vgpu/vgpu.sock";
/// Where kernels are kept.
pub const CACHE: &str = "/var/cache/vgpu";
/// The empty folders, which belong to root.
pub const FOLDERS: [&str; 3] = ["/tmp", "/run/vgpu", CACHE];
