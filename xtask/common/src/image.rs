//! The container image of the executor: what files in `deploy/` rely on.

/// The name, without a tag.
pub const NAME: &str = "ggml-vgpu";
/// The command.
pub const PROGRAM: &str = "/usr/bin/vgpu";
/// The plugin, which containers of guests get from the image.
pub const PLUGIN: &str = "/usr/lib/vgpu/libggml-vgpu.so";
/// Where the command that the image starts with listens.
pub const SOCKET: &str = "/run/vgpu/vgpu.sock";
/// Where kernels are kept.
pub const CACHE: &str = "/var/cache/vgpu";
/// The empty folders, which belong to root.
pub const FOLDERS: [&str; 3] = ["/tmp", "/run/vgpu", CACHE];
