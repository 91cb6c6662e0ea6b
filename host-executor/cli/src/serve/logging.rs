//! The log of `vgpu serve`, on standard error.

use std::io::{IsTerminal, stderr};

use anyhow::{Context as _, anyhow};
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Registry, fmt, reload};
use vgpu_executor::config::{LogFormat, Settings};
use vgpu_executor::{log_queue, service};

/// Starts the thread that writes the log. A process that gives up its files while it has one thread
/// does so afterwards.
pub(super) fn start_writer() -> anyhow::Result<()> {
    log_queue::start().context("no thread for the log")
}

/// The log, with a filter that can be changed.
pub(super) struct Logging {
    filter: reload::Handle<Targets, Registry>,
}

impl Logging {
    pub(super) fn start(settings: &Settings) -> anyhow::Result<Logging> {
        let (layer, filter) = reload::Layer::new(filter(settings)?);
        if settings.log_format == LogFormat::Json {
            log_queue::use_json(now);
        }
        // A line that cannot be written (a full disk) is lost. Reporting the error on standard
        // error would panic.
        let registry = tracing_subscriber::registry().with(layer);
        let layer = || {
            fmt::layer()
                .with_writer(log_queue::writer)
                .log_internal_errors(false)
        };
        match (settings.log_format, service::is_journal()) {
            (LogFormat::Text, false) => registry
                .with(layer().with_ansi(stderr().is_terminal()))
                .init(),
            (LogFormat::Json, false) => registry.with(layer().json()).init(),
            // The journal has the time of each line.
            (LogFormat::Text, true) => {
                let format = WithPriority(fmt::format().without_time());
                registry
                    .with(layer().with_ansi(false).event_format(format))
                    .init();
            }
            (LogFormat::Json, true) => {
                let format = WithPriority(fmt::format().json());
                registry.with(layer().json().event_format(format)).init();
            }
        }
        Ok(Logging { filter })
    }

    /// Parses the filter of the settings.
    pub(super) fn check(&self, settings: &Settings) -> anyhow::Result<Targets> {
        filter(settings)
    }

    /// Changes the filter.
    pub(super) fn change(&mut self, filter: Targets) {
        // Fails only if the subscriber is gone, and then there is no log.
        let _ = self.filter.reload(filter);
    }
}

/// Checks the log filter of the settings.
pub(super) fn check(settings: &Settings) -> anyhow::Result<()> {
    filter(settings).map(drop)
}

/// The time as the log's other lines have it.
fn now() -> String {
    let mut text = String::new();
    // Fails if the text does.
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text
}

/// A format of log lines, each with the priority by which the journal files it (`sd-daemon(3)`).
struct WithPriority<F>(F);

impl<S, N, F> FormatEvent<S, N> for WithPriority<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        writer.write_str(service::priority(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

fn filter(settings: &Settings) -> anyhow::Result<Targets> {
    let (source, filter) = match &settings.log {
        Some(filter) => ("--log", filter.clone()),
        None => (
            "VGPU_LOG",
            { std::env::var("VGPU_LOG").ok() }
                .filter(|filter| !filter.is_empty())
                .unwrap_or_else(|| "info".into()),
        ),
    };
    parse(&filter).map_err(|why| {
        anyhow!(
            "{source}: {filter:?} is not a log filter ({why}); try info, debug or \
             vgpu_executor=trace"
        )
    })
}

/// Why a text is not a log filter.
#[derive(Debug, thiserror::Error)]
enum FilterError {
    #[error("the filter names no level")]
    Empty,
    #[error("{0:?} is not a level")]
    Level(String),
    #[error("{0:?} is not the name of a crate or module")]
    Target(String),
}

/// Parses levels and `crate=level`, separated by commas. [`Targets`] alone would take a mistyped
/// level for the name of a crate that logs nothing.
fn parse(filter: &str) -> Result<Targets, FilterError> {
    let mut targets = Targets::new();
    let parts: Vec<&str> = { filter.split(',') }
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .collect();
    if parts.is_empty() {
        return Err(FilterError::Empty);
    }
    for part in parts {
        // An empty text is a level for the parser.
        let level = |text: &str| match text.trim().parse::<LevelFilter>() {
            Ok(level) if !text.is_empty() => Ok(level),
            _ => Err(FilterError::Level(text.to_owned())),
        };
        targets = match part.split_once('=') {
            None => targets.with_default(level(part)?),
            Some((target, text)) => {
                let target = target.trim();
                let is_path = |c: char| c.is_ascii_alphanumeric() || "_:-".contains(c);
                if target.is_empty() || !target.chars().all(is_path) {
                    return Err(FilterError::Target(target.to_owned()));
                }
                targets.with_target(target, level(text)?)
            }
        };
    }
    Ok(targets)
}
