//! The configuration file.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::num::NonZeroU32;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use toml::Spanned;
use vgpu_cpu::Threads;
use vgpu_transport::link::Endpoint;
use vgpu_transport::link::socket_file::parse_mode;

use super::settings::{
    GuestSettings, LogFormat, MetricsAddress, Settings, VmDevice, is_guest_name,
};
use crate::engine::{EngineChoice, EngineList};
use crate::identity::CertificateRule;
use crate::policy::{LinkKind, Policy};
use crate::size;
use crate::vm::{ParseVmError, VmOptions};
use crate::weights::{CacheOptions, Sharing};

/// A mistake in the text of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {reason}")]
pub struct Problem {
    /// The line, counted from 1.
    pub line: usize,
    /// The column in characters, counted from 1.
    pub column: usize,
    /// What is wrong.
    pub reason: String,
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages name every field
pub enum LoadError {
    #[error("{path}: {error}", path = path.display())]
    Read { path: PathBuf, error: io::Error },
    #[error("{path}:{problem}", path = path.display())]
    Problem { path: PathBuf, problem: Problem },
}

impl Settings {
    /// Reads a file.
    ///
    /// # Errors
    /// [`LoadError`] if the file cannot be read, or has a mistake.
    pub fn load(path: &Path) -> Result<Settings, LoadError> {
        let text = std::fs::read_to_string(path).map_err(|error| LoadError::Read {
            path: path.into(),
            error,
        })?;
        Settings::parse(&text).map_err(|problem| LoadError::Problem {
            path: path.into(),
            problem,
        })
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// [`Problem`]: the first mistake in the text.
    pub fn parse(text: &str) -> Result<Settings, Problem> {
        parse(text)
    }
}

/// The largest configuration in bytes.
const MAX_BYTES: usize = 16 << 20;

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct File {
    engine: Engine,
    server: Server,
    metrics: Metrics,
    control: Control,
    weights: WeightsTable,
    unnamed: Unnamed,
    guest: Vec<Spanned<Guest>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Engine {
    kind: Option<Engines>,
    threads: usize,
    pin: bool,
    batch: Option<bool>,
    memory: Option<Size>,
    host_memory: Option<Size>,
    /// Seconds.
    max_node_time: Option<NonZeroU32>,
    /// Seconds. 0: no limit.
    max_turn_time: Option<u32>,
    trust_guests: bool,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Server {
    listen: Vec<Spanned<Text<Endpoint>>>,
    mode: Option<Mode>,
    certs: Option<PathBuf>,
    crl: Option<PathBuf>,
    max_guests: Option<usize>,
    share_buffers: Option<bool>,
    overcommit: bool,
    vm_device: Option<VmDeviceSetting>,
    log: Option<String>,
    log_format: Option<Text<LogFormat>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Metrics {
    listen: Option<Spanned<Text<MetricsAddress>>>,
    allow_remote: bool,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Control {
    socket: Option<PathBuf>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct WeightsTable {
    share: Option<Sharing>,
    cache: Option<Cache>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Cache {
    folder: PathBuf,
    size: Size,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct Unnamed {
    accept: Option<bool>,
    programs: Option<Count>,
    memory: Option<Size>,
    weight: Option<Weight>,
    graphs_in_flight: Option<Count>,
    links: Option<Vec<Text<LinkKind>>>,
    batch: Option<bool>,
    devices: Option<Spanned<Vec<usize>>>,
    engine: Option<Spanned<Text<EngineChoice>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Guest {
    name: Spanned<String>,
    memory: Option<Size>,
    weight: Option<Weight>,
    graphs_in_flight: Option<Count>,
    links: Option<Vec<Text<LinkKind>>>,
    batch: Option<bool>,
    devices: Option<Spanned<Vec<usize>>>,
    engine: Option<Spanned<Text<EngineChoice>>>,
    #[serde(default)]
    listen: Vec<Spanned<Text<Endpoint>>>,
    mode: Option<Mode>,
    vm: Option<Spanned<Vm>>,
    #[serde(default)]
    uids: Vec<Spanned<u32>>,
    #[serde(default)]
    cids: Vec<Spanned<u32>>,
    #[serde(default)]
    certificates: Vec<Spanned<Text<CertificateRule>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Vm {
    socket: PathBuf,
    window: Option<Size>,
    silence: Option<u64>,
    mode: Option<Mode>,
    group: Option<String>,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "kebab-case")]
enum VmDeviceSetting {
    Ivshmem,
    VfioUser,
}

/// Reads the text of a file.
fn parse(text: &str) -> Result<Settings, Problem> {
    let problem = |span: Option<Range<usize>>, reason: String| {
        let (line, column) = place(text, span.map_or(0, |span| span.start));
        Problem {
            line,
            column,
            reason,
        }
    };
    if text.len() > MAX_BYTES {
        let reason = format!("{} bytes, at most {MAX_BYTES} are allowed", text.len());
        return Err(problem(None, reason));
    }
    let file: File = toml::from_str(text)
        .map_err(|error| problem(error.span(), error.message().trim().to_owned()))?;
    settings(file).map_err(|(span, reason)| problem(Some(span), reason))
}

/// Line and column of a byte, both counted from 1. The column counts characters.
fn place(text: &str, byte: usize) -> (usize, usize) {
    let mut before = byte.min(text.len());
    while !text.is_char_boundary(before) {
        before -= 1;
    }
    let before = &text[..before];
    let line = before.matches('\n').count() + 1;
    let start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (line, before[start..].chars().count() + 1)
}

/// The position of a mistake in bytes, and what is wrong.
type Mistake = (Range<usize>, String);

fn settings(file: File) -> Result<Settings, Mistake> {
    let defaults = Settings::default();
    let (unnamed_engine, unnamed_devices) = engines_of(file.unnamed.engine, file.unnamed.devices)?;
    let unnamed = policy(
        file.unnamed.memory,
        file.unnamed.weight,
        file.unnamed.graphs_in_flight,
        file.unnamed.links,
        file.unnamed.batch,
    );
    let unnamed = Policy {
        devices: unnamed_devices,
        ..unnamed
    };
    let mut used = Used::default();
    let listen = endpoints_of(file.server.listen, &mut used)?;
    let mut guests: Vec<GuestSettings> = Vec::new();
    for entry in file.guest {
        guests.push(guest(entry, &mut used)?);
    }
    let metrics = match file.metrics.listen {
        None => None,
        Some(address) => {
            let (span, Text(address)) = (address.span(), address.into_inner());
            let checked = address.check_remote(file.metrics.allow_remote);
            checked.map_err(|error| (span, error.to_string()))?;
            Some(address)
        }
    };
    Ok(Settings {
        listen,
        mode: file.server.mode.map_or(defaults.mode, |mode| mode.0),
        certs: file.server.certs,
        crl: file.server.crl,
        max_guests: file.server.max_guests.unwrap_or(defaults.max_guests),
        share_buffers: file.server.share_buffers.unwrap_or(true),
        overcommit: file.server.overcommit,
        engines: file
            .engine
            .kind
            .map_or(defaults.engines, |engines| engines.0),
        trust_guests: file.engine.trust_guests,
        threads: Threads {
            count: file.engine.threads,
            pin: file.engine.pin,
        },
        batch: file.engine.batch.unwrap_or(true),
        memory: file.engine.memory.map(|size| size.0),
        host_memory: file.engine.host_memory.map(|size| size.0),
        max_node_time: { file.engine.max_node_time }
            .map(|seconds| Duration::from_secs(seconds.get().into())),
        max_turn_time: { file.engine.max_turn_time }
            .map(|seconds| Duration::from_secs(seconds.into())),
        device: match file.server.vm_device {
            Some(VmDeviceSetting::VfioUser) => VmDevice::VfioUser,
            Some(VmDeviceSetting::Ivshmem) | None => VmDevice::Ivshmem,
        },
        log: file.server.log,
        log_format: file
            .server
            .log_format
            .map_or(LogFormat::Text, |text| text.0),
        metrics,
        metrics_allow_remote: file.metrics.allow_remote,
        control: file.control.socket,
        share_weights: file.weights.share.unwrap_or_default(),
        weights_cache: file.weights.cache.map(|cache| CacheOptions {
            folder: cache.folder,
            size: cache.size.0,
        }),
        unnamed_engine,
        unnamed_programs: file.unnamed.programs.map(|count| count.0),
        unnamed: file.unnamed.accept.unwrap_or(true).then_some(unnamed),
        guests,
    })
}

/// What may occur only once in a configuration, and the guest to which it belongs.
#[derive(Default)]
struct Used {
    names: BTreeSet<String>,
    addresses: BTreeSet<String>,
    uids: BTreeMap<u32, String>,
    cids: BTreeMap<u32, String>,
    certificates: BTreeMap<CertificateRule, String>,
}

fn guest(entry: Spanned<Guest>, used: &mut Used) -> Result<GuestSettings, Mistake> {
    let whole = entry.span();
    let entry = entry.into_inner();
    let (span, name) = (entry.name.span(), entry.name.into_inner());
    if !is_guest_name(&name) {
        let reason =
            format!("the name {name:?}: expected 1 to 64 letters, digits, `.`, `_` and `-`");
        return Err((span, reason));
    }
    if !used.names.insert(name.clone()) {
        return Err((span, format!("two guests have the name {name:?}")));
    }
    let listen = endpoints_of(entry.listen, used)?;
    let vm = match entry.vm {
        None => None,
        Some(vm) => {
            let span = vm.span();
            let vm = vm.into_inner();
            let mut options = format!("{name},socket={}", vm.socket.display());
            if let Some(window) = vm.window {
                options.push_str(&format!(",window={}", window.0));
            }
            if let Some(silence) = vm.silence {
                options.push_str(&format!(",silence={silence}"));
            }
            if let Some(Mode(mode)) = vm.mode {
                options.push_str(&format!(",mode={mode:o}"));
            }
            if let Some(group) = vm.group {
                options.push_str(&format!(",group={group}"));
            }
            let options: VmOptions = options
                .parse()
                .map_err(|error: ParseVmError| (span.clone(), error.to_string()))?;
            claim(used, span, options.socket.display().to_string())?;
            Some(options)
        }
    };
    let numbers = |numbers: Vec<Spanned<u32>>, used: &mut BTreeMap<u32, String>, what: &str| {
        let mut taken = Vec::new();
        for number in numbers {
            let (span, number) = (number.span(), number.into_inner());
            if let Some(other) = used.insert(number, name.clone()) {
                return Err((
                    span,
                    format!("{what} {number} already identifies guest {other}"),
                ));
            }
            taken.push(number);
        }
        Ok(taken)
    };
    let uids = numbers(entry.uids, &mut used.uids, "user")?;
    let cids = numbers(entry.cids, &mut used.cids, "machine")?;
    let mut certificates = Vec::new();
    for certificate in entry.certificates {
        let (span, Text(certificate)) = (certificate.span(), certificate.into_inner());
        if let Some(other) = used.certificates.insert(certificate.clone(), name.clone()) {
            return Err((
                span,
                format!("the certificate {certificate} already identifies guest {other}"),
            ));
        }
        certificates.push(certificate);
    }
    let is_identified = vm.is_some() || !listen.is_empty() || !certificates.is_empty();
    if !is_identified && uids.is_empty() && cids.is_empty() {
        let reason =
            format!("nothing identifies guest {name}: add listen, vm, uids, cids or certificates");
        return Err((whole, reason));
    }
    let mut settings = GuestSettings::new(&name);
    settings.rule.uids = uids;
    settings.rule.cids = cids;
    settings.rule.certificates = certificates;
    settings.rule.policy = policy(
        entry.memory,
        entry.weight,
        entry.graphs_in_flight,
        entry.links,
        entry.batch,
    );
    (settings.engine, settings.rule.policy.devices) = engines_of(entry.engine, entry.devices)?;
    settings.listen = listen;
    settings.vm = vm;
    if let Some(Mode(mode)) = entry.mode {
        settings.mode = mode;
    }
    Ok(settings)
}

/// The engines that a guest may use: the class of its engines, or its devices. No device: all.
fn engines_of(
    engine: Option<Spanned<Text<EngineChoice>>>,
    devices: Option<Spanned<Vec<usize>>>,
) -> Result<(Option<EngineChoice>, Vec<usize>), Mistake> {
    match (engine, devices) {
        (Some(engine), Some(_)) => {
            let reason = "`engine` and `devices` exclude each other".to_owned();
            Err((engine.span(), reason))
        }
        (Some(engine), None) => Ok((Some(engine.into_inner().0), Vec::new())),
        (None, Some(devices)) => Ok((None, devices_of(devices)?)),
        (None, None) => Ok((None, Vec::new())),
    }
}

/// The devices that a guest may use: at least one, none twice.
fn devices_of(devices: Spanned<Vec<usize>>) -> Result<Vec<usize>, Mistake> {
    let (span, devices) = (devices.span(), devices.into_inner());
    if devices.is_empty() {
        let reason = "no device: leave `devices` out for all devices".to_owned();
        return Err((span, reason));
    }
    for (at, device) in devices.iter().enumerate() {
        if devices[..at].contains(device) {
            return Err((span, format!("device {device} occurs twice")));
        }
    }
    Ok(devices)
}

fn policy(
    memory: Option<Size>,
    weight: Option<Weight>,
    graphs_in_flight: Option<Count>,
    links: Option<Vec<Text<LinkKind>>>,
    batch: Option<bool>,
) -> Policy {
    let defaults = Policy::default();
    Policy {
        memory: memory.map(|size| size.0),
        weight: weight.map_or(defaults.weight, |weight| weight.0),
        graphs_in_flight: graphs_in_flight.map_or(defaults.graphs_in_flight, |count| count.0),
        links: links.map_or(defaults.links, |links| {
            links.into_iter().map(|text| text.0).collect()
        }),
        batch: batch.unwrap_or(defaults.batch),
        devices: defaults.devices,
        memory_on: defaults.memory_on,
    }
}

fn endpoints_of(
    endpoints: Vec<Spanned<Text<Endpoint>>>,
    used: &mut Used,
) -> Result<Vec<Endpoint>, Mistake> {
    let mut claimed = Vec::new();
    for endpoint in endpoints {
        let (span, Text(endpoint)) = (endpoint.span(), endpoint.into_inner());
        match &endpoint {
            Endpoint::Inproc | Endpoint::Pci(_) => {
                let reason = format!(
                    "an executor cannot listen on {endpoint}: use unix:PATH, tcp:HOST:PORT or \
                     vsock:PORT, and `vm` of a guest for virtual machines"
                );
                return Err((span, reason));
            }
            Endpoint::Unix(path) => claim(used, span, path.display().to_string())?,
            _ => claim(used, span, endpoint.to_string())?,
        }
        claimed.push(endpoint);
    }
    Ok(claimed)
}

/// Records a listening address. Each address may occur once.
fn claim(used: &mut Used, span: Range<usize>, address: String) -> Result<(), Mistake> {
    let reason = format!("{address} is already a listening address further up");
    match used.addresses.insert(address) {
        true => Ok(()),
        false => Err((span, reason)),
    }
}

/// A value that is written as text.
struct Text<T>(T);

impl<'de, T> Deserialize<'de> for Text<T>
where
    T: FromStr,
    T::Err: std::fmt::Display,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Text).map_err(D::Error::custom)
    }
}

/// A list of engines: text such as `cuda:0,1`, or an array of texts.
struct Engines(EngineList);

impl<'de> Deserialize<'de> for Engines {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reads;
        impl<'de> Visitor<'de> for Reads {
            type Value = Engines;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an engine, such as \"cuda:0\", or an array of engines")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Engines, E> {
                text.parse().map(Engines).map_err(E::custom)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Engines, A::Error> {
                let mut lists = Vec::new();
                while let Some(Text(list)) = seq.next_element()? {
                    lists.push(list);
                }
                let joined = EngineList::join(lists);
                let joined = joined.ok_or_else(|| A::Error::custom("no engine is named"))?;
                Ok(Engines(joined))
            }
        }
        deserializer.deserialize_any(Reads)
    }
}

/// A number of bytes: text such as `24GiB`, or a number.
struct Size(u64);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reads;
        impl Visitor<'_> for Reads {
            type Value = Size;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a size, such as \"24GiB\" or a number of bytes")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Size, E> {
                size::parse(text).map(Size).map_err(E::custom)
            }

            fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<Size, E> {
                let bytes = u64::try_from(bytes);
                bytes
                    .map(Size)
                    .map_err(|_| E::custom("a size cannot be negative"))
            }

            fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<Size, E> {
                Ok(Size(bytes))
            }
        }
        deserializer.deserialize_any(Reads)
    }
}

/// Permission bits, as `chmod` takes them.
struct Mode(u32);

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mode = parse_mode(&text).map(Mode);
        mode.ok_or_else(|| {
            D::Error::custom(format!("{text:?} is not a socket mode, such as \"0660\""))
        })
    }
}

struct Weight(u32);

impl<'de> Deserialize<'de> for Weight {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let most = Policy::MAX_WEIGHT;
        let weight = i64::deserialize(deserializer)?;
        let weight = u32::try_from(weight)
            .ok()
            .filter(|w| (1..=most).contains(w));
        weight
            .map(Weight)
            .ok_or_else(|| D::Error::custom(format!("a weight is a whole number from 1 to {most}")))
    }
}

struct Count(usize);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let count = i64::deserialize(deserializer)?;
        let count = usize::try_from(count).ok().filter(|&count| count > 0);
        count
            .map(Count)
            .ok_or_else(|| D::Error::custom("at least 1 has to be possible"))
    }
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;
