//! The tables of guests and of their programs.

use vgpu_executor::size::shown;
use vgpu_executor::status::{GuestStatus, SessionStatus, Status};

use super::history::History;
use super::html::{Part, bar, byte_rate, escaped, number, or_dash, percent, seconds};
use crate::units::duration;

/// A guest as people read it.
pub(super) fn name_of(guest: &str) -> &str {
    match guest {
        "-" => "unnamed guests",
        name => name,
    }
}

/// The heading of a column of numbers, and what it means.
const COLUMNS: [(&str, &str); 14] = [
    ("Weight", "Share of the engine's time beside other guests"),
    ("Programs", "Connected programs"),
    ("Tokens/s", "Tokens per second in the last ten seconds"),
    ("Graphs/s", "Graphs per second in the last ten seconds"),
    ("Time", "Part of the engine's time in the last ten seconds"),
    ("Run", "Run time of a graph in the last ten seconds"),
    (
        "Queue",
        "Time of a graph in the queue in the last ten seconds",
    ),
    ("Batch", "Graphs in a batch in the last ten seconds"),
    ("In", "Received in the last ten seconds"),
    ("Out", "Sent in the last ten seconds"),
    ("Tokens", "Tokens of all graphs so far"),
    ("Graphs", "Graphs so far"),
    ("Weights not sent", "Weights that the host had already"),
    ("Failed", "Requests that were refused or failed"),
];

/// The table of guests. `series`: the number of a guest's colour, if it has one.
pub(super) fn guests(
    status: &Status,
    history: &History,
    series: impl Fn(&str) -> Option<usize>,
) -> String {
    let mut text = String::from(
        "<div class=\"scroll\" role=\"region\" aria-label=\"Guests, a table\" tabindex=\"0\">\
         <table><thead><tr><th scope=\"col\">Guest</th><th scope=\"col\">Memory</th>",
    );
    for (name, meaning) in COLUMNS {
        text.push_str(&format!(
            "<th scope=\"col\" class=\"number\" title=\"{}\">{}</th>",
            escaped(meaning),
            escaped(name)
        ));
    }
    text.push_str("</tr></thead><tbody>");
    for guest in &status.guests {
        text.push_str(&row(guest, status, history, series(&guest.name)));
    }
    text.push_str("</tbody></table></div>");
    text
}

fn row(guest: &GuestStatus, status: &Status, history: &History, series: Option<usize>) -> String {
    let GuestStatus {
        name,
        quota: _,
        weight,
        sessions,
        usage,
        by_device: _,
        devices: _,
    } = guest;
    let present = history.present(name).unwrap_or_default();
    let cells = [
        weight.to_string(),
        sessions.to_string(),
        or_dash(present.rate(present.tokens), number),
        or_dash(present.rate(present.graphs), number),
        or_dash(present.rate(present.busy), percent),
        or_dash(present.each(present.busy), seconds),
        or_dash(present.each(present.queued), seconds),
        or_dash(present.batch(), number),
        or_dash(present.rate(present.bytes_in), byte_rate),
        or_dash(present.rate(present.bytes_out), byte_rate),
        usage.tokens.to_string(),
        usage.graphs.to_string(),
        shown(usage.weights_not_sent),
        usage.failures.to_string(),
    ];
    let colour = series.map_or_else(String::new, |i| format!("<i class=\"key k{i}\"></i>"));
    let name = name_of(name);
    let memory = memory(guest, status);
    let mut text = format!(
        "<tr><th scope=\"row\">{colour}{}</th><td class=\"memory\">{memory}</td>",
        escaped(name)
    );
    for cell in cells {
        text.push_str(&format!("<td class=\"number\">{}</td>", escaped(&cell)));
    }
    text.push_str("</tr>");
    text
}

/// The memory of a guest: a bar, of which a part is shared, and the figures.
fn memory(guest: &GuestStatus, status: &Status) -> String {
    let name = name_of(&guest.name);
    let (used, shared) = (guest.usage.memory, guest.usage.weights_shared);
    let whole = status.memory_for(guest);
    let of = match guest.quota {
        Some(_) => format!("{} of {}", shown(used), shown(whole)),
        None => format!("{}, no quota", shown(used)),
    };
    let shares = match shared {
        0 => String::new(),
        shared => format!(", {} of it shared weights", shown(shared)),
    };
    let parts = [
        Part {
            series: 1,
            size: used.saturating_sub(shared),
            name: "own",
        },
        Part {
            series: 6,
            size: shared.min(used),
            name: "shared weights",
        },
    ];
    let label = format!("Memory of {name}: {of}{shares}");
    format!("{}<span>{of}{shares}</span>", bar(&label, &parts, whole))
}

/// The table of connected programs.
pub(super) fn programs(sessions: &[SessionStatus]) -> String {
    if sessions.is_empty() {
        return "<p>No program is connected.</p>".into();
    }
    let mut text = String::from(
        "<div class=\"scroll\" role=\"region\" aria-label=\"Programs, a table\" tabindex=\"0\">\
         <table><thead><tr>",
    );
    let names = ["Guest", "Program", "Endpoint"].map(|name| (name, ""));
    let numbers = [
        "Session", "PID", "UID", "Age", "Memory", "Graphs", "Tokens", "Failed",
    ];
    let numbers = numbers.map(|name| (name, " class=\"number\""));
    for (name, class) in names.into_iter().chain(numbers) {
        text.push_str(&format!("<th scope=\"col\"{class}>{name}</th>"));
    }
    text.push_str("</tr></thead><tbody>");
    for session in sessions {
        let number = |n: Option<i64>| n.map_or_else(|| "–".into(), |n| n.to_string());
        let program = session.program.as_deref().unwrap_or("(before HELLO)");
        text.push_str(&format!(
            "<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td>",
            escaped(name_of(&session.guest)),
            escaped(program),
            escaped(&session.endpoint)
        ));
        for cell in [
            session.id.to_string(),
            number(session.pid.map(i64::from)),
            number(session.uid.map(i64::from)),
            duration(session.age),
            shown(session.usage.memory),
            session.usage.graphs.to_string(),
            session.usage.tokens.to_string(),
            session.usage.failures.to_string(),
        ] {
            text.push_str(&format!("<td class=\"number\">{cell}</td>"));
        }
        text.push_str("</tr>");
    }
    text.push_str("</tbody></table></div>");
    text
}
