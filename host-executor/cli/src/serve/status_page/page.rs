//! The document.

use vgpu_executor::size::shown;
use vgpu_executor::status::{EngineStatus, Status};

use super::charts::{self, Series};
use super::guests::{guests, name_of, programs};
use super::history::History;
use super::html::{Part, bar, escaped, number, percent};
use super::metrics_table;
use crate::units::{drain, duration, gpu_figures, gpu_name, on_cpu};

/// The number of the colour of memory that is in no guest's buffer.
const OTHER_COLOUR: usize = 0;

/// The page for a snapshot, with the text of its metrics.
pub(in crate::serve) fn render(status: &Status, history: &History, metrics: &str) -> String {
    let names = status.guests.iter().map(|guest| guest.name.as_str());
    let series = charts::series(&names.collect::<Vec<_>>(), history);
    let colour = |guest: &str| {
        let place = series.iter().position(|one| one.guest == guest);
        place.map(|place| place + 1)
    };
    let names: Vec<&str> = status.engines().map(|engine| &engine.name[..]).collect();
    let title = escaped(&format!("vgpu: {}", names.join(", ")));
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <noscript><meta http-equiv=\"refresh\" content=\"5\"></noscript>\
         <title>{title}</title><link rel=\"icon\" href=\"data:,\">\
         <link rel=\"stylesheet\" href=\"page.css\"><script src=\"page.js\" defer></script></head>\
         <body><p id=\"notice\" role=\"status\"></p>\n<main>\n{head}\n\
         <section aria-labelledby=\"of-engine\"><h2 id=\"of-engine\">Engine</h2>{engine}</section>\n\
         <section aria-labelledby=\"of-guests\"><h2 id=\"of-guests\">Guests</h2>{guests}</section>\n\
         <section aria-labelledby=\"of-curves\"><h2 id=\"of-curves\">Last ten minutes</h2>\
         {legend}{charts}</section>\n\
         <section aria-labelledby=\"of-programs\"><h2 id=\"of-programs\">Programs</h2>\
         {programs}</section>\n\
         <section aria-labelledby=\"of-metrics\"><h2 id=\"of-metrics\">Metrics</h2>\
         <details><summary>Every figure of /metrics</summary>{table}</details></section>\n\
         </main></body></html>\n",
        head = head(status),
        engine = engine(status, history, colour),
        guests = guests(status, history, colour),
        legend = legend(&series, status.guests.len()),
        charts = charts::charts(&series),
        programs = programs(&status.sessions),
        table = metrics_table::table(metrics),
    )
}

/// The name of the executor, and what is wrong.
fn head(status: &Status) -> String {
    let engines: Vec<String> = { status.engines() }
        .map(|engine| format!("{}: {}", engine.name, engine.description))
        .collect();
    let mut text = format!(
        "<header><h1>vgpu <small>{}</small></h1><p>{}, up {}</p></header>",
        escaped(&status.version),
        escaped(&engines.join("; ")),
        duration(status.uptime)
    );
    let mut warn = |what: String| {
        text.push_str(&format!("<p class=\"warning\">{}</p>", escaped(&what)));
    };
    if let Some(draining) = &status.draining {
        warn(format!("The executor drains: {}.", drain(draining)));
    }
    for engine in status.engines() {
        if let Some(hang) = &engine.hang {
            warn(match status.has_several_engines() {
                true => format!("The engine {} hangs: {hang}.", engine.name),
                false => format!("The engine hangs: {hang}."),
            });
        }
    }
    if let Some(gpu) = &status.engine.unused_gpu {
        warn(format!("The GPU {gpu}."));
    }
    let gpus = || status.engines().filter_map(|engine| engine.gpu.as_ref());
    for reason in gpus().flat_map(|gpu| &gpu.missing) {
        warn(format!("A figure of the GPU is missing: {reason}."));
    }
    for gpu in gpus() {
        let figures = format!("{}: {}", gpu_name(gpu), gpu_figures(gpu));
        text.push_str(&format!("<p>{}</p>", escaped(&figures)));
    }
    for engine in status.engines() {
        if let Some(on_cpu) = engine.fallback.as_ref().and_then(on_cpu) {
            let figures = format!("{}: on the engine cpu {on_cpu}", engine.name);
            text.push_str(&format!("<p>{}</p>", escaped(&figures)));
        }
    }
    text
}

/// The memory of each engine as a bar.
fn memory_bars(status: &Status, colour: impl Fn(&str) -> Option<usize>) -> String {
    let mut text = String::new();
    for (device, (engine, guests)) in status.by_device().enumerate() {
        let (total, others) = (engine.memory_total, status.memory_of_others(device));
        // Weights that several guests share count once, for the guest that uploaded them.
        let mut parts: Vec<Part<'_>> = guests
            .map(|(guest, usage)| Part {
                series: colour(&guest.name).unwrap_or(OTHER_COLOUR),
                size: usage.memory.saturating_sub(usage.weights_shared),
                name: name_of(&guest.name),
            })
            .collect();
        parts.push(Part {
            series: OTHER_COLOUR,
            size: others,
            name: "other",
        });
        let which = match status.has_several_engines() {
            true => &engine.name,
            false => "the engine",
        };
        let label = format!(
            "Memory of {which}: {} of {} used by guests, other {}, free {}",
            shown(status.memory_of_guests(device)),
            shown(total),
            shown(others),
            shown(engine.memory_free)
        );
        let bar = bar(&label, &parts, total);
        text.push_str(&format!("{bar}<p class=\"note\">{}</p>", escaped(&label)));
    }
    text
}

/// The memory of the engines as bars, and the figures of all of them.
fn engine(status: &Status, history: &History, colour: impl Fn(&str) -> Option<usize>) -> String {
    let of_all = |figure: fn(&EngineStatus) -> u64| -> u64 {
        status.engines().map(figure).fold(0, u64::saturating_add)
    };
    let devices = 0..status.engines().count();
    let (guests, others) = devices.fold((0, 0), |(guests, others): (u64, u64), device| {
        (
            guests.saturating_add(status.memory_of_guests(device)),
            others.saturating_add(status.memory_of_others(device)),
        )
    });
    let turn = { status.engines() }
        .filter_map(|engine| engine.turn)
        .reduce(f64::max);
    let present = status.guests.iter();
    let present: Vec<_> = present
        .filter_map(|guest| history.present(&guest.name))
        .collect();
    let sum = |rate: fn(&super::history::Counts) -> Option<f64>| {
        (!present.is_empty()).then(|| present.iter().filter_map(rate).sum::<f64>())
    };
    let shared: u64 = status
        .guests
        .iter()
        .map(|guest| guest.usage.weights_shared)
        .sum();
    let dash = || "–".to_owned();
    let ended = { status.ended.by_kind() }.filter(|&(_, count)| count > 0);
    let ended: Vec<String> = ended
        .map(|(kind, count)| format!("{kind} {count}"))
        .collect();
    let figures = [
        ("Memory of guests", shown(guests)),
        ("Other memory", shown(others)),
        ("Free memory", shown(of_all(|engine| engine.memory_free))),
        ("Memory", shown(of_all(|engine| engine.memory_total))),
        ("Programs", status.programs().to_string()),
        (
            "Tokens/s",
            sum(|c| c.rate(c.tokens)).map_or_else(dash, number),
        ),
        (
            "Graphs/s",
            sum(|c| c.rate(c.graphs)).map_or_else(dash, number),
        ),
        ("Busy", sum(|c| c.rate(c.busy)).map_or_else(dash, percent)),
        (
            "Present turn",
            turn.map_or_else(|| "none".to_owned(), duration),
        ),
        (
            "Weights in the store",
            shown(of_all(|engine| engine.weights.bytes)),
        ),
        ("Weights shared", shown(shared)),
        (
            "Weights not sent",
            shown(of_all(|engine| engine.weights.not_sent)),
        ),
        (
            "Weights from disk",
            shown(of_all(|engine| engine.weights.from_disk)),
        ),
        (
            "Weights merged",
            shown(of_all(|engine| engine.weights.merged)),
        ),
        (
            "Weights on disk",
            shown(of_all(|engine| engine.weights.disk_bytes)),
        ),
        (
            "Ended sessions",
            match ended.is_empty() {
                true => "none".to_owned(),
                false => ended.join(", "),
            },
        ),
    ];
    let figures = figures.into_iter().map(|(name, value)| {
        format!(
            "<div><dt>{}</dt><dd>{}</dd></div>",
            escaped(name),
            escaped(&value)
        )
    });
    format!(
        "{}<dl>{}</dl>",
        memory_bars(status, colour),
        figures.collect::<String>()
    )
}

/// Which colour is which guest.
fn legend(series: &[Series<'_>], guests: usize) -> String {
    let keys = series.iter().enumerate().map(|(i, one)| {
        let name = escaped(name_of(one.guest));
        format!("<li><i class=\"key k{}\"></i>{name}</li>", i + 1)
    });
    let rest = match guests - series.len() {
        0 => String::new(),
        1 => "<li>not shown: a guest that has used the engine less</li>".to_owned(),
        rest => format!("<li>not shown: {rest} guests that have used the engine less</li>"),
    };
    format!(
        "<ul class=\"legend\" aria-label=\"Guests in the curves\">{}{rest}</ul>",
        keys.collect::<String>()
    )
}
