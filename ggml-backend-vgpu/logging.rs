//! Our log lines go where ggml's go: through the callback that the program has set.
//!
//! `VGPU_LOG` filters them, in the syntax of `tracing`'s `EnvFilter` (`debug`, `ggml_vgpu=trace`, `off`); by
//! default it is `info`. Nothing is ever written to standard output.

use std::fmt::{self, Write as _};
use std::io::{Write as _, stderr};
use std::sync::{Arc, Once};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::{EnvFilter, Registry};

use crate::abi::{
    GGML_LOG_LEVEL_DEBUG, GGML_LOG_LEVEL_ERROR, GGML_LOG_LEVEL_INFO, GGML_LOG_LEVEL_WARN,
    ggml_log_level,
};
use crate::host::{Host, HostError};

/// Sends log lines to `host` from now on. The first call counts.
pub(crate) fn start(host: Arc<Host>) {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let filter = EnvFilter::try_from_env("VGPU_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
        let subscriber = Registry::default().with(filter).with(ToHost(host));
        // Fails when this copy of `tracing` has a subscriber, which only a test can have given it.
        let _ = tracing::subscriber::set_global_default(subscriber);
    });
}

/// Says that there is no ggml to work for, which leaves only standard error to say it on.
pub(crate) fn without_host(error: &HostError) {
    // `eprintln!` panics when nobody takes the line.
    let _ = writeln!(stderr(), "ggml-vgpu: no vGPU: {error}");
}

struct ToHost(Arc<Host>);

impl<S: Subscriber> Layer<S> for ToHost {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut line = String::from("ggml-vgpu:");
        event.record(&mut Line(&mut line));
        line.push('\n');
        self.0.log(level(*event.metadata().level()), &line);
    }
}

fn level(level: Level) -> ggml_log_level {
    match level {
        Level::ERROR => GGML_LOG_LEVEL_ERROR,
        Level::WARN => GGML_LOG_LEVEL_WARN,
        Level::INFO => GGML_LOG_LEVEL_INFO,
        _ => GGML_LOG_LEVEL_DEBUG,
    }
}

/// Puts the message and the fields of an event into a line.
struct Line<'a>(&'a mut String);

impl Visit for Line<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}
