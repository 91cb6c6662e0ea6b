//! The log of this test program, kept for its tests.

use std::cell::RefCell;
use std::fmt::{self, Write as _};
use std::sync::{Mutex, OnceLock};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use vgpu_transport::lock::lock;

/// The lines so far, each with the fields of its spans.
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The fields of all spans. Their numbers are the positions plus 1.
static SPANS: Mutex<Vec<String>> = Mutex::new(Vec::new());

thread_local! {
    /// The numbers of the spans that this thread is in.
    static ENTERED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// Keeps what this program logs from now on at the levels `info`, `warn` and `error`.
pub(crate) fn keep() {
    static IS_KEPT: OnceLock<()> = OnceLock::new();
    IS_KEPT.get_or_init(|| tracing::subscriber::set_global_default(Kept).expect("the first one"));
}

/// The lines that contain `text`.
pub(crate) fn lines_with(text: &str) -> Vec<String> {
    let lines = lock(&LINES);
    let lines = lines.iter().filter(|line| line.contains(text));
    lines.cloned().collect()
}

struct Kept;

impl Subscriber for Kept {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut fields = Fields(String::new());
        attributes.record(&mut fields);
        let mut spans = lock(&SPANS);
        spans.push(fields.0);
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let spans = lock(&SPANS);
        let entered = ENTERED.with_borrow(Clone::clone).into_iter();
        let mut line = Fields(entered.map(|id| spans[id as usize - 1].as_str()).collect());
        drop(spans);
        event.record(&mut line);
        let mut lines = lock(&LINES);
        lines.push(line.0);
    }

    fn enter(&self, id: &Id) {
        ENTERED.with_borrow_mut(|entered| entered.push(id.into_u64()));
    }

    fn exit(&self, _: &Id) {
        ENTERED.with_borrow_mut(|entered| {
            entered.pop();
        });
    }
}

/// Fields as text.
struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = write!(self.0, " {field}={value:?}"); // a string takes everything
    }
}
