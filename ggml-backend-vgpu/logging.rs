//! The plugin's log lines go through ggml's log, to the callback that the program has set.
//!
//! `VGPU_LOG` filters them: a level (`off`, `error`, `warn`, `info`, `debug`, `trace`), or a list
//! of `MODULE=LEVEL`, such as `info,ggml_vgpu::session=debug`. The default is `info`.

use std::fmt::{self, Write as _};
use std::io::{Write as _, stderr};
use std::sync::{Arc, Once};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

use crate::abi::{
    GGML_LOG_LEVEL_DEBUG, GGML_LOG_LEVEL_ERROR, GGML_LOG_LEVEL_INFO, GGML_LOG_LEVEL_WARN,
    ggml_log_level,
};
use crate::ggml::{Ggml, GgmlError};
use crate::program_exit;

/// Sends log lines to the log of `ggml` from now on. Later calls have no effect.
pub(crate) fn start(ggml: Arc<Ggml>) {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let named = std::env::var("VGPU_LOG").ok();
        let named = named.filter(|named| !named.is_empty());
        let filter = named
            .and_then(|named| named.parse::<Targets>().ok())
            .unwrap_or_else(|| Targets::new().with_default(Level::INFO));
        let subscriber = Registry::default().with(filter).with(GgmlLog(ggml));
        // Fails if there is a subscriber already. Only a test can have set one.
        let _ = tracing::subscriber::set_global_default(subscriber);
    });
}

/// Reports on standard error that there is no usable ggml, and so no log of ggml.
pub(crate) fn without_ggml(error: &GgmlError) {
    // Not `eprintln!`, which panics if standard error is closed.
    let _ = writeln!(stderr(), "ggml-vgpu: no vGPU: {error}");
}

/// Writes events to the log of ggml.
struct GgmlLog(Arc<Ggml>);

impl<S: Subscriber> Layer<S> for GgmlLog {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if program_exit::has_begun() {
            return;
        }
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

/// Appends the message and the fields of an event to a line.
struct Line<'a>(&'a mut String);

impl Visit for Line<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}
