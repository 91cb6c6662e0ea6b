//! The status page: what the metrics say, for people with a browser.
//!
//! The page is one HTML document with curves as SVG, so that it needs no script to show figures.
//! Its script asks for the document again every two seconds while somebody looks, and changes what
//! differs. Nothing else is loaded from anywhere. The history of the curves is a by-product: a
//! sample is kept of each answer to a browser or to Prometheus, and none is taken otherwise.

mod charts;
mod guests;
mod history;
mod html;
mod metrics_table;
mod page;

pub(super) use history::History;
pub(super) use page::render;

/// The stylesheet.
pub(super) const STYLE: &str = include_str!("page.css");

/// The script.
pub(super) const SCRIPT: &str = include_str!("page.js");

/// What the page may load and do: its own stylesheet and script, and no form, frame or other site.
/// A name that a guest chooses is escaped, and could load nothing if it were not.
pub(super) const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; \
    connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'";
