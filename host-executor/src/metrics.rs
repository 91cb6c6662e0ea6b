//! Metrics in the text format of OpenMetrics, which Prometheus scrapes.
#![forbid(unsafe_code)]

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use vgpu_transport::wire::ProtocolVersion;

use crate::histogram::Distribution;
use crate::process_figures::{self, ProcessFigure};
use crate::status::{
    EngineStatus, FallbackStatus, GpuStatus, GuestStatus, SessionStatus, Status, StatusHandle,
    TenantLatency, Usage,
};

/// The media type of what [`render`] returns.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The current values of all metrics.
///
/// # Errors
/// A metric cannot be encoded; this is a bug of the host.
pub fn render(status_handle: &StatusHandle) -> Result<String, fmt::Error> {
    render_with(status_handle, status_handle.status())
}

/// The values of all metrics in a snapshot. What a snapshot does not have is as of now.
///
/// # Errors
/// A metric cannot be encoded; this is a bug of the host.
pub fn render_with(status_handle: &StatusHandle, status: Status) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(MetricsCollector {
        status,
        latencies: status_handle.latencies(),
    }));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

struct MetricsCollector {
    status: Status,
    latencies: Vec<TenantLatency>,
}

impl fmt::Debug for MetricsCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.status.fmt(f)
    }
}

/// A counter per guest: its name, its help text, and its value.
type Count = (&'static str, &'static str, fn(&Usage) -> f64);

const COUNTS: [Count; 8] = [
    (
        "vgpu_guest_graphs",
        "Graphs run; a program that decodes runs one graph per token",
        |w| w.graphs as f64,
    ),
    ("vgpu_guest_nodes", "Nodes of all graphs run", |w| {
        w.nodes as f64
    }),
    (
        "vgpu_guest_tokens",
        "Tokens of all graphs run: for each graph, the most columns of its products",
        |w| w.tokens as f64,
    ),
    (
        "vgpu_guest_turns",
        "Turns on the engine that graphs took; more than graphs if graphs yielded",
        |w| w.turns as f64,
    ),
    (
        "vgpu_guest_batch_members",
        "Graphs that ran in these turns; divided by the turns, the mean size of a batch",
        |w| w.batch_members as f64,
    ),
    (
        "vgpu_guest_received_bytes",
        "Bytes of messages and payloads from the guest",
        |w| w.bytes_in as f64,
    ),
    (
        "vgpu_guest_sent_bytes",
        "Bytes of messages and payloads to the guest",
        |w| w.bytes_out as f64,
    ),
    (
        "vgpu_guest_weights_not_sent_bytes",
        "Bytes of weights that the guest did not have to send",
        |w| w.weights_not_sent as f64,
    ),
];

impl Collector for MetricsCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let MetricsCollector { status, latencies } = self;
        for (name, help, value) in [
            (
                "vgpu_uptime_seconds",
                "Time since the executor started",
                status.uptime,
            ),
            (
                "vgpu_draining",
                "1 while the executor accepts no new sessions, else 0",
                f64::from(u8::from(status.draining.is_some())),
            ),
        ] {
            encoder
                .encode_descriptor(name, help, None, MetricType::Gauge)?
                .encode_gauge(&value)?;
        }
        engine_figures(&mut encoder, status)?;

        // The name of the sample ends with `_info`.
        let mut build =
            encoder.encode_descriptor("vgpu_build", "The executor", None, MetricType::Info)?;
        for engine in status.engines() {
            build.encode_info(&[
                ("version", status.version.as_str()),
                ("engine", engine.name.as_str()),
                ("device", engine.description.as_str()),
            ])?;
        }
        for figure in process_figures::figures() {
            let ProcessFigure {
                name, help, value, ..
            } = figure;
            match figure.is_counter {
                true => encoder
                    .encode_descriptor(name, help, None, MetricType::Counter)?
                    .encode_counter::<[(&str, &str); 0], f64, f64>(&value, None)?,
                false => encoder
                    .encode_descriptor(name, help, None, MetricType::Gauge)?
                    .encode_gauge(&value)?,
            }
        }

        let mut ends = encoder.encode_descriptor(
            "vgpu_session_ended",
            "Sessions that have ended, and guests that got none, by reason",
            None,
            MetricType::Counter,
        )?;
        for (reason, count) in status.ended.by_kind() {
            ends.encode_family(&[("reason", reason)])?
                .encode_counter::<[(&str, &str); 0], u64, f64>(&count, None)?;
        }

        protocols(&mut encoder, status)?;
        gpu_figures(&mut encoder, status)?;
        guest_figures(&mut encoder, status)?;
        type Durations = (
            &'static str,
            &'static str,
            fn(&TenantLatency) -> &Distribution,
        );
        let durations: [Durations; 2] = [
            (
                "vgpu_graph_queue_seconds",
                "How long a graph waited for the engine",
                |w| &w.queued,
            ),
            (
                "vgpu_graph_run_seconds",
                "How long a graph had the engine",
                |w| &w.ran,
            ),
        ];
        for (name, help, which) in durations {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
            for latency in latencies {
                let labels = [("guest", latency.guest.as_str())];
                histogram(family.encode_family(&labels)?, which(latency))?;
            }
        }
        Ok(())
    }
}

/// A gauge or a counter of each engine: its name, its help text, its type, and its value.
type EngineFigure = (
    &'static str,
    &'static str,
    MetricType,
    fn(&EngineStatus) -> f64,
);

const ENGINE_FIGURES: [EngineFigure; 10] = [
    (
        "vgpu_engine_memory_bytes",
        "Memory that guests may use in all",
        MetricType::Gauge,
        |engine| engine.memory_total as f64,
    ),
    (
        "vgpu_engine_memory_free_bytes",
        "Memory that an allocation could still get",
        MetricType::Gauge,
        |engine| engine.memory_free as f64,
    ),
    (
        "vgpu_engine_kept_scratch_bytes",
        "Memory of the host that the engine keeps for the next graph",
        MetricType::Gauge,
        |engine| engine.kept_scratch as f64,
    ),
    (
        "vgpu_turn_age_seconds",
        "How long the present turn on the engine has lasted; 0 if no graph runs",
        MetricType::Gauge,
        |engine| engine.turn.unwrap_or(0.0),
    ),
    (
        "vgpu_engine_hangs",
        "1 if the engine has not come back from a turn or a call for long, else 0",
        MetricType::Gauge,
        |engine| f64::from(u8::from(engine.hang.is_some())),
    ),
    (
        "vgpu_weights_bytes",
        "Weights in the weight store",
        MetricType::Gauge,
        |engine| engine.weights.bytes as f64,
    ),
    (
        "vgpu_weights_disk_bytes",
        "Weights in the cache on disk, which all engines share; with the first engine",
        MetricType::Gauge,
        |engine| engine.weights.disk_bytes as f64,
    ),
    (
        "vgpu_weights_not_sent_bytes",
        "Bytes of weights that guests did not have to send",
        MetricType::Counter,
        |engine| engine.weights.not_sent as f64,
    ),
    (
        "vgpu_weights_from_disk_bytes",
        "Part of the bytes not sent that came from the cache on disk",
        MetricType::Counter,
        |engine| engine.weights.from_disk as f64,
    ),
    (
        "vgpu_weights_merged_bytes",
        "Bytes of weights that were sent and turned out to be duplicates",
        MetricType::Counter,
        |engine| engine.weights.merged as f64,
    ),
];

/// The figures of the engines.
fn engine_figures(encoder: &mut DescriptorEncoder<'_>, status: &Status) -> fmt::Result {
    for (name, help, kind, figure) in ENGINE_FIGURES {
        let mut family = encoder.encode_descriptor(name, help, None, kind)?;
        for engine in status.engines() {
            let labels = [("engine", engine.name.as_str())];
            encode_number(family.encode_family(&labels)?, kind, figure(engine))?;
        }
    }
    fallback_figures(encoder, status)
}

/// A counter of where nodes ran: its name, its help text, and its values for the device and for the
/// CPU engine.
type FallbackFigure = (&'static str, &'static str, fn(&FallbackStatus) -> [f64; 2]);

const FALLBACK_FIGURES: [FallbackFigure; 2] = [
    (
        "vgpu_engine_nodes",
        "Nodes that ran on the device of the engine, and on the CPU engine in its place",
        |it| [it.device_nodes as f64, it.cpu_nodes as f64],
    ),
    (
        "vgpu_engine_node_seconds",
        "How long the device of the engine had work, and the CPU engine in its place",
        |it| [it.device_seconds, it.cpu_seconds],
    ),
];

/// The figures of engines that leave nodes to the CPU engine and count them.
fn fallback_figures(encoder: &mut DescriptorEncoder<'_>, status: &Status) -> fmt::Result {
    let engines = || {
        let engines = status.engines();
        engines.filter_map(|engine| Some((engine.name.as_str(), engine.fallback.as_ref()?)))
    };
    if engines().next().is_none() {
        return Ok(());
    }
    for (name, help, figure) in FALLBACK_FIGURES {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (engine, fallback) in engines() {
            for (ran_on, value) in ["device", "cpu"].into_iter().zip(figure(fallback)) {
                let labels = [("engine", engine), ("ran_on", ran_on)];
                encode_number(family.encode_family(&labels)?, MetricType::Counter, value)?;
            }
        }
    }
    Ok(())
}

/// A sample of a gauge, or else of a counter.
fn encode_number(mut sample: MetricEncoder<'_>, kind: MetricType, value: f64) -> fmt::Result {
    match kind {
        MetricType::Gauge => sample.encode_gauge(&value),
        _ => sample.encode_counter::<[(&str, &str); 0], f64, f64>(&value, None),
    }
}

/// A gauge of each guest on each device: its name, its help text, and its value.
type GuestGauge = (
    &'static str,
    &'static str,
    fn(&GuestStatus, &Usage) -> Option<f64>,
);

const GUEST_GAUGES: [GuestGauge; 4] = [
    (
        "vgpu_guest_memory_used_bytes",
        "Memory of the engine that the guest uses",
        |_, usage| Some(usage.memory as f64),
    ),
    (
        "vgpu_guest_memory_quota_bytes",
        "Quota of the guest; absent without a quota",
        |guest, _| guest.quota.map(|quota| quota as f64),
    ),
    (
        "vgpu_guest_weights_shared_bytes",
        "Memory of the guest that is a shared copy, first uploaded to another buffer",
        |_, usage| Some(usage.weights_shared as f64),
    ),
    (
        "vgpu_guest_weight",
        "Share of the engine's time, relative to the other guests",
        |guest, _| Some(f64::from(guest.weight)),
    ),
];

/// The figures of the guests. Those of a device name its engine.
fn guest_figures(encoder: &mut DescriptorEncoder<'_>, status: &Status) -> fmt::Result {
    let (name, help) = ("vgpu_guest_sessions", "Connected programs");
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for guest in &status.guests {
        family
            .encode_family(&[("guest", guest.name.as_str())])?
            .encode_gauge(&(guest.sessions as f64))?;
    }
    for (name, help, figure) in GUEST_GAUGES {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (engine, guests) in status.by_device() {
            for (guest, usage) in guests {
                if let Some(value) = figure(guest, usage) {
                    let labels = [("guest", &guest.name[..]), ("engine", &engine.name)];
                    family.encode_family(&labels)?.encode_gauge(&value)?;
                }
            }
        }
    }
    for (name, help, figure) in COUNTS {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (engine, guests) in status.by_device() {
            for (guest, usage) in guests {
                let labels = [("guest", &guest.name[..]), ("engine", &engine.name)];
                encode_number(
                    family.encode_family(&labels)?,
                    MetricType::Counter,
                    figure(usage),
                )?;
            }
        }
    }
    let mut family = encoder.encode_descriptor(
        "vgpu_guest_failures",
        "Requests that were refused or failed, by reason",
        None,
        MetricType::Counter,
    )?;
    for guest in &status.guests {
        for (reason, count) in guest.usage.failure_reasons.by_reason() {
            family
                .encode_family(&[("guest", guest.name.as_str()), ("reason", reason)])?
                .encode_counter::<[(&str, &str); 0], u64, f64>(&count, None)?;
        }
    }
    Ok(())
}

/// A figure of a GPU: its name, its help text, and its value.
type GpuFigure = (&'static str, &'static str, fn(&GpuStatus) -> Option<f64>);

const GPU_FIGURES: [GpuFigure; 5] = [
    (
        "vgpu_gpu_busy_ratio",
        "Part of the last sampling period of the driver in which a kernel ran",
        |gpu| gpu.busy,
    ),
    ("vgpu_gpu_memory_bytes", "Memory of the GPU", |gpu| {
        gpu.memory_total.map(|bytes| bytes as f64)
    }),
    (
        "vgpu_gpu_memory_used_bytes",
        "Memory of the GPU in use, by all programs and the driver",
        |gpu| gpu.memory_used.map(|bytes| bytes as f64),
    ),
    (
        "vgpu_gpu_temperature_celsius",
        "Temperature of the GPU",
        |gpu| gpu.temperature.map(f64::from),
    ),
    ("vgpu_gpu_power_watts", "Power that the card takes", |gpu| {
        gpu.power
    }),
];

/// The figures of the GPUs, where there are any. Figures that are missing have no sample.
fn gpu_figures(encoder: &mut DescriptorEncoder<'_>, status: &Status) -> fmt::Result {
    let gpus: Vec<&GpuStatus> = { status.engines() }
        .filter_map(|engine| engine.gpu.as_ref())
        .collect();
    if gpus.is_empty() {
        return Ok(());
    }
    for (name, help, figure) in GPU_FIGURES {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for gpu in &gpus {
            if let Some(value) = figure(gpu) {
                let labels = [("gpu", gpu.address.as_str())];
                family.encode_family(&labels)?.encode_gauge(&value)?;
            }
        }
    }
    Ok(())
}

fn protocols(encoder: &mut DescriptorEncoder<'_>, status: &Status) -> fmt::Result {
    let mut family = encoder.encode_descriptor(
        "vgpu_protocol_sessions",
        "Connected programs, by the version of the protocol that they use",
        None,
        MetricType::Gauge,
    )?;
    for version in ProtocolVersion::ALL {
        let number = version.number();
        let uses = |session: &&SessionStatus| session.protocol == Some(number);
        let count = status.sessions.iter().filter(uses).count();
        family
            .encode_family(&[("version", number.to_string())])?
            .encode_gauge(&(count as f64))?;
    }
    Ok(())
}

fn histogram(mut encoder: MetricEncoder<'_>, distribution: &Distribution) -> fmt::Result {
    let Distribution {
        buckets,
        sum,
        count,
    } = distribution;
    encoder.encode_histogram::<[(&str, &str); 0]>(*sum, *count, buckets, None)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::status::{DrainStatus, Progress, SessionEnds, StatusSource};

    /// An executor without guests.
    struct Fixed(Status);

    impl StatusSource for Fixed {
        fn status(&self) -> Status {
            self.0.clone()
        }

        fn latencies(&self) -> Vec<TenantLatency> {
            Vec::new()
        }

        fn dump(&self) -> String {
            String::new()
        }

        fn progress(&self) -> Progress {
            Progress::Runs(String::new())
        }

        fn draining(&self) -> Option<DrainStatus> {
            None
        }
    }

    #[test]
    fn nodes_of_the_cpu_engine_are_counted_for_engines_that_leave_some_to_it() {
        let engine = |name: &str, fallback| EngineStatus {
            name: name.into(),
            fallback,
            ..EngineStatus::default()
        };
        let fallback = FallbackStatus {
            device_nodes: 969,
            cpu_nodes: 31,
            device_seconds: 6.5,
            cpu_seconds: 2.0,
        };
        let render = |engine: EngineStatus| {
            let status = Status {
                version: "1".into(),
                uptime: 1.0,
                engine,
                further_engines: Vec::new(),
                guests: Vec::new(),
                sessions: Vec::new(),
                ended: SessionEnds::default(),
                draining: None,
            };
            super::render(&StatusHandle::new(Arc::new(Fixed(status)))).unwrap()
        };
        let text = render(engine("ggml:Vulkan0", Some(fallback)));
        for (name, ran_on, value) in [
            ("nodes", "device", "969.0"),
            ("nodes", "cpu", "31.0"),
            ("node_seconds", "device", "6.5"),
            ("node_seconds", "cpu", "2.0"),
        ] {
            let labels = format!("{{engine=\"ggml:Vulkan0\",ran_on=\"{ran_on}\"}}");
            let line = format!("vgpu_engine_{name}_total{labels} {value}\n");
            assert!(text.contains(&line), "{line} {text}");
        }
        assert!(!render(engine("cpu", None)).contains("vgpu_engine_node"));
    }
}
