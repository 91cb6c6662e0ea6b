//! The screen of `vgpu top`.

use std::collections::BTreeMap;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Gauge, Paragraph, Row, Table};
use vgpu_executor::status::{EngineStatus, GpuStatus, GuestStatus, SessionStatus, Status};

use super::controls::{Controls, Pane};
use super::rates::Rates;
use crate::units::{drain, duration, gpu_figures, gpu_name, mean_batch, size};

/// Width of a bar in a table, in cells.
const BAR: usize = 16;

/// A column of the guests' table gives way to the names of guests up to this width, and names have
/// at least [`MIN_NAME`] cells.
const FULL_NAME: usize = 20;
const MIN_NAME: usize = 12;

/// What the screen shows.
pub(super) struct View<'a> {
    pub(super) status: &'a Status,
    pub(super) rates: &'a BTreeMap<String, Rates>,
    /// The part of its time that each engine executes graphs, by device.
    pub(super) busy: &'a [f64],
    /// The part of the time of each engine's nodes that the CPU engine had, by device.
    pub(super) on_cpu: &'a [Option<f64>],
    /// Why the figures are not current, if they are not.
    pub(super) notice: Option<&'a str>,
    /// What the executor has said to a request, in place of the keys.
    pub(super) answer: Option<&'a str>,
    pub(super) controls: &'a Controls,
}

/// A column of the guests' table beside their names.
struct Column {
    name: &'static str,
    width: usize,
    /// Columns with the largest number are left out first where the screen is narrow. 0: never.
    rank: usize,
    text: fn(&GuestStatus, &Rates, &Status) -> String,
}

const COLUMNS: [Column; 11] = [
    Column {
        name: "WEIGHT",
        width: 6,
        rank: 1,
        text: |guest, _, _| guest.weight.to_string(),
    },
    Column {
        name: "PROGS",
        width: 5,
        rank: 0,
        text: |guest, _, _| guest.sessions.to_string(),
    },
    Column {
        name: "MEMORY",
        width: BAR,
        rank: 6,
        // Without a quota, the bar is relative to the memory of the engines.
        text: |guest, _, status| bar(part(guest.usage.memory, status.memory_for(guest))),
    },
    Column {
        name: "USED / QUOTA",
        width: 22,
        rank: 0,
        // The quota holds on each device.
        text: |guest, _, status| {
            let quota = guest.quota.map(|_| size(status.memory_for(guest)));
            let quota = quota.unwrap_or_else(|| "-".into());
            format!("{} / {quota}", size(guest.usage.memory))
        },
    },
    Column {
        name: "GRAPHS/S",
        width: 8,
        rank: 0,
        text: |_, rates, _| format!("{:.1}", rates.graphs),
    },
    Column {
        name: "TIME",
        width: 5,
        rank: 0,
        text: |_, rates, _| format!("{:.0} %", 100.0 * rates.busy),
    },
    Column {
        name: "BATCH",
        width: 5,
        rank: 2,
        text: |_, rates, _| mean_batch(rates.batch_members, rates.turns),
    },
    Column {
        name: "WAITING",
        width: 7,
        rank: 3,
        text: |_, rates, _| format!("{:.2}", rates.waiting),
    },
    Column {
        name: "IN",
        width: 12,
        rank: 5,
        text: |_, rates, _| format!("{}/s", size(rates.bytes_in as u64)),
    },
    Column {
        name: "OUT",
        width: 12,
        rank: 4,
        text: |_, rates, _| format!("{}/s", size(rates.bytes_out as u64)),
    },
    Column {
        name: "FAILED",
        width: 6,
        rank: 0,
        text: |guest, _, _| guest.usage.failures.to_string(),
    },
];

/// The columns for a table of `width` cells whose longest name has `longest`, and the width of the
/// names.
fn columns(width: usize, longest: usize) -> (Vec<&'static Column>, usize) {
    let wanted = longest.clamp(MIN_NAME, FULL_NAME);
    let mut kept: Vec<&Column> = COLUMNS.iter().collect();
    loop {
        // A cell between two columns.
        let taken: usize = kept.iter().map(|column| column.width + 1).sum();
        let left = width.saturating_sub(taken);
        let last = kept.iter().map(|column| column.rank).max().unwrap_or(0);
        if left >= wanted || last == 0 {
            return (kept, left.max(MIN_NAME));
        }
        kept.retain(|column| column.rank != last);
    }
}

/// A text in at most `width` cells.
fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let start: String = text.chars().take(width.saturating_sub(1)).collect();
    format!("{start}…")
}

/// How many rows of a table fit into an area with a border and a heading.
fn rows_in(area: Rect) -> usize {
    usize::from(area.height.saturating_sub(3))
}

/// The title of a table, with the part that is visible if that is not all of it.
fn title(name: &str, skipped: usize, rows: usize, all: usize, is_active: bool) -> Line<'static> {
    let last = all.min(skipped + rows);
    let text = match skipped == 0 && last == all {
        true => format!(" {name} "),
        false => format!(" {name} {} to {last} of {all} ", skipped + 1),
    };
    let style = match is_active {
        true => Style::new().add_modifier(Modifier::BOLD),
        false => Style::new(),
    };
    Line::from(text).style(style)
}

pub(super) fn draw(frame: &mut Frame<'_>, view: &View<'_>) {
    let guests = view.controls.guests(view.status, view.rates);
    let sessions = view.controls.sessions(view.status);
    let wanted = u16::try_from(guests.len() + 3).unwrap_or(u16::MAX);
    // Each engine has a box, and each GPU a line, as far as there is room for the tables.
    let engines: Vec<&EngineStatus> = view.status.engines().collect();
    let shown = usize::from(frame.area().height / 2 / 3).clamp(1, engines.len());
    let gpus: Vec<&GpuStatus> = { engines.iter() }
        .take(shown)
        .filter_map(|engine| engine.gpu.as_ref())
        .collect();
    let height = |rows: usize| u16::try_from(rows).unwrap_or(u16::MAX);
    let [head, boxes, lines, table, programs, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(height(3 * shown)),
        Constraint::Length(height(gpus.len())),
        Constraint::Length(wanted.min(frame.area().height / 2)),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_head(frame, head, view);
    let areas = Layout::vertical(vec![Constraint::Length(3); shown]).split(boxes);
    for ((device, engine), &area) in engines.iter().enumerate().zip(areas.iter()) {
        let hidden = match device + 1 == shown {
            true => engines.len() - shown,
            false => 0,
        };
        draw_engine(frame, area, view, (device, engine), hidden);
    }
    let areas = Layout::vertical(vec![Constraint::Length(1); gpus.len()]).split(lines);
    for (figures, &area) in gpus.into_iter().zip(areas.iter()) {
        draw_gpu(frame, area, figures);
    }
    draw_guests(frame, table, &guests, view);
    draw_sessions(frame, programs, &sessions, view);
    let text = view
        .answer
        .map_or_else(|| view.controls.help(), str::to_owned);
    let keys = Line::from(format!(" {text}"));
    frame.render_widget(keys.style(Style::new().add_modifier(Modifier::DIM)), foot);
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, view: &View<'_>) {
    let Status {
        version, uptime, ..
    } = view.status;
    let mut line = vec![
        Span::styled(" vgpu ", Style::new().add_modifier(Modifier::BOLD)),
        Span::raw(format!(
            "{version}  up {}  {} programs",
            duration(*uptime),
            view.status.sessions.len()
        )),
    ];
    if view.status.engine.unused_gpu.is_some() {
        // `vgpu ps` says which, and why.
        let style = Style::new().fg(Color::Yellow);
        line.push(Span::styled("  a GPU is not used", style));
    }
    if let Some(draining) = &view.status.draining {
        let style = Style::new().fg(Color::Yellow).add_modifier(Modifier::BOLD);
        line.push(Span::styled(
            format!("  drains: {}", drain(draining)),
            style,
        ));
    }
    if let Some(notice) = view.notice {
        let style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
        line.push(Span::styled(format!("  {notice}"), style));
    }
    frame.render_widget(Line::from(line), area);
}

/// A device with its engine. `hidden`: how many further ones have no room.
fn draw_engine(
    frame: &mut Frame<'_>,
    area: Rect,
    view: &View<'_>,
    (device, engine): (usize, &EngineStatus),
    hidden: usize,
) {
    let total = engine.memory_total;
    let guests = view.status.memory_of_guests(device);
    let others = view.status.memory_of_others(device);
    let used = guests.saturating_add(others);
    let busy = view.busy.get(device).copied().unwrap_or(0.0);
    let [memory, time] =
        Layout::horizontal([Constraint::Percentage(60), Constraint::Percentage(40)]).areas(area);
    let title = match hidden {
        0 => format!(" {}: {} ", engine.name, engine.description),
        hidden => format!(" {}: {}; {hidden} more ", engine.name, engine.description),
    };
    let time_title = match view.on_cpu.get(device).copied().flatten() {
        Some(part) => format!(" time, {:.0} % on cpu ", 100.0 * part),
        None => " time ".to_owned(),
    };
    let beside = match others {
        0 => String::new(),
        others => format!(" + other {}", size(others)),
    };
    let gauge = Gauge::default()
        .block(Block::bordered().title(title))
        .gauge_style(Style::new().fg(colour(used as f64 / total.max(1) as f64)))
        .ratio(part(used, total))
        .label(format!(
            "memory {}{beside} of {}",
            size(guests),
            size(total)
        ));
    frame.render_widget(gauge, memory);
    let gauge = Gauge::default()
        .block(Block::bordered().title(time_title))
        .gauge_style(Style::new().fg(Color::Cyan))
        .ratio(busy.clamp(0.0, 1.0))
        .label(format!("busy {:.0} %", 100.0 * busy));
    frame.render_widget(gauge, time);
}

/// What the driver says of the GPU. `vgpu ps` says why a figure is missing.
fn draw_gpu(frame: &mut Frame<'_>, area: Rect, gpu: &GpuStatus) {
    let mut line = vec![Span::raw(format!(
        " {}: {}",
        gpu_name(gpu),
        gpu_figures(gpu)
    ))];
    if !gpu.missing.is_empty() {
        let style = Style::new().fg(Color::Yellow);
        line.push(Span::styled("  figures are missing", style));
    }
    frame.render_widget(Line::from(line), area);
}

fn draw_guests(frame: &mut Frame<'_>, area: Rect, guests: &[&GuestStatus], view: &View<'_>) {
    let longest = guests.iter().map(|guest| guest.name.chars().count()).max();
    // Without the border.
    let inside = usize::from(area.width.saturating_sub(2));
    let (columns, name_width) = columns(inside, longest.unwrap_or(0));
    let rows = rows_in(area);
    let skip = view.controls.skipped(Pane::Guests, guests.len(), rows);
    let lines = guests.iter().skip(skip).take(rows).map(|guest| {
        let rates = view.rates.get(&guest.name).copied().unwrap_or_default();
        let cells = columns
            .iter()
            .map(|column| (column.text)(guest, &rates, view.status));
        Row::new(
            [shortened(&guest.name, name_width)]
                .into_iter()
                .chain(cells),
        )
    });
    let widths = columns.iter().map(|column| column.width);
    let widths = [name_width].into_iter().chain(widths);
    let widths = widths.map(|width| Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX)));
    let names = ["GUEST"]
        .into_iter()
        .chain(columns.iter().map(|column| column.name));
    let is_active = view.controls.pane() == Pane::Guests;
    let title = title("guests", skip, rows, guests.len(), is_active);
    let table = Table::new(lines, widths)
        .header(Row::new(names).style(Style::new().add_modifier(Modifier::BOLD)))
        .block(Block::bordered().title(title));
    frame.render_widget(table, area);
}

fn draw_sessions(frame: &mut Frame<'_>, area: Rect, sessions: &[&SessionStatus], view: &View<'_>) {
    if sessions.is_empty() {
        let nobody = Paragraph::new(match view.status.sessions.is_empty() {
            true => " no program is connected",
            false => " no program of these guests is connected",
        });
        frame.render_widget(nobody.block(Block::bordered().title(" programs ")), area);
        return;
    }
    // The number of a session of a virtual machine is long with `--isolate`.
    let ids = sessions.iter().map(|session| session.id.to_string().len());
    let id_width = ids.max().unwrap_or(0).clamp(6, 20) as u16;
    let widths = [
        Constraint::Length(id_width),
        Constraint::Fill(1),
        Constraint::Length(8),
        Constraint::Length(7),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Fill(1),
    ];
    let fixed = id_width + 8 + 7 + 10 + 10 + 6;
    let text_width = usize::from(area.width.saturating_sub(2 + fixed)) / 2;
    let rows = rows_in(area);
    let skip = view.controls.skipped(Pane::Programs, sessions.len(), rows);
    let lines = sessions.iter().skip(skip).take(rows).map(|session| {
        let number = |n: Option<i64>| n.map_or_else(|| "-".into(), |n| n.to_string());
        let program = session.program.as_deref().unwrap_or("-");
        Row::new([
            session.id.to_string(),
            shortened(&session.guest, text_width),
            number(session.pid.map(i64::from)),
            duration(session.age),
            size(session.usage.memory),
            session.usage.graphs.to_string(),
            shortened(program, text_width),
        ])
    });
    let names = ["ID", "GUEST", "PID", "AGE", "MEMORY", "GRAPHS", "PROGRAM"];
    let is_active = view.controls.pane() == Pane::Programs;
    let title = title("programs", skip, rows, sessions.len(), is_active);
    let table = Table::new(lines, widths)
        .header(Row::new(names).style(Style::new().add_modifier(Modifier::BOLD)))
        .block(Block::bordered().title(title));
    frame.render_widget(table, area);
}

fn part(used: u64, whole: u64) -> f64 {
    match whole {
        0 => 0.0,
        whole => (used as f64 / whole as f64).clamp(0.0, 1.0),
    }
}

fn bar(part: f64) -> String {
    let full = (part * BAR as f64).round() as usize;
    format!("{}{}", "█".repeat(full), "░".repeat(BAR - full))
}

fn colour(part: f64) -> Color {
    match part {
        p if p > 0.95 => Color::Red,
        p if p > 0.8 => Color::Yellow,
        _ => Color::Green,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_has_a_line_in_a_small_terminal() {
        use ratatui::Terminal;
        use ratatui::backend::TestBackend;
        use vgpu_executor::status::{SessionEnds, WeightsStatus};

        let mut status = Status {
            version: "1".into(),
            uptime: 1.0,
            engine: EngineStatus {
                name: "cuda:0".into(),
                description: "NVIDIA L4".into(),
                memory_total: 1,
                memory_free: 1,
                kept_scratch: 0,
                unused_gpu: None,
                gpu: Some(GpuStatus {
                    address: "0000:01:00.0".into(),
                    temperature: Some(51),
                    missing: vec!["no power".into()],
                    ..GpuStatus::default()
                }),
                turn: None,
                hang: None,
                fallback: None,
                weights: WeightsStatus::default(),
            },
            further_engines: Vec::new(),
            draining: None,
            guests: Vec::new(),
            sessions: Vec::new(),
            ended: SessionEnds::default(),
        };
        let screen = |status: &Status| {
            let mut terminal = Terminal::new(TestBackend::new(80, 24)).expect("a terminal");
            let view = View {
                status,
                rates: &BTreeMap::new(),
                busy: &[],
                on_cpu: &[],
                notice: None,
                answer: None,
                controls: &Controls::default(),
            };
            terminal.draw(|frame| draw(frame, &view)).expect("a screen");
            terminal.backend().to_string()
        };
        let text = screen(&status);
        let line = "GPU 0000:01:00.0: busy -, memory - of -, 51 °C, -  figures are missing";
        assert!(text.contains(line), "{text}");
        status.engine.gpu = None;
        assert!(!screen(&status).contains("GPU"));
        // `vgpu ps` says which, and why.
        status.engine.unused_gpu = Some("cuda:0 (NVIDIA L4) is not used: no driver".into());
        let text = screen(&status);
        let head = text.lines().next().unwrap_or_default();
        assert!(head.contains("a GPU is not used"), "{text}");
        status.engine.unused_gpu = None;
        assert!(!screen(&status).contains("is not used"));
        // Each device has a box. Those that have no room are counted.
        for device in 1..6 {
            status.further_engines.push(EngineStatus {
                name: format!("cuda:{device}"),
                ..status.engine.clone()
            });
        }
        let text = screen(&status);
        for shown in ["cuda:0: NVIDIA L4", "cuda:3: NVIDIA L4; 2 more", "guests"] {
            assert!(text.contains(shown), "{text}");
        }
        assert!(!text.contains("cuda:4"), "{text}");
    }

    #[test]
    fn part_of_the_cpu_engine_has_room_in_a_small_terminal() {
        use ratatui::Terminal;
        use ratatui::backend::TestBackend;
        use vgpu_executor::status::{FallbackStatus, SessionEnds};

        use super::super::rates::on_cpu;

        let mut status = Status {
            version: "1".into(),
            uptime: 1.0,
            engine: EngineStatus {
                name: "ggml:Vulkan0".into(),
                description: "AMD Radeon RX 7900 XTX (RADV NAVI31)".into(),
                ..EngineStatus::default()
            },
            further_engines: Vec::new(),
            draining: None,
            guests: Vec::new(),
            sessions: Vec::new(),
            ended: SessionEnds::default(),
        };
        let at = |device_seconds, cpu_seconds| {
            Some(FallbackStatus {
                device_seconds,
                cpu_seconds,
                ..FallbackStatus::default()
            })
        };
        status.engine.fallback = at(100.0, 50.0);
        let before = status.clone();
        assert_eq!(on_cpu(&before, &status), [None], "nothing has run");
        status.engine.fallback = at(100.6, 50.2);
        let parts = on_cpu(&before, &status);
        let screen = |on_cpu: &[Option<f64>]| {
            let mut terminal = Terminal::new(TestBackend::new(80, 24)).expect("a terminal");
            let view = View {
                status: &status,
                rates: &BTreeMap::new(),
                busy: &[0.8],
                on_cpu,
                notice: None,
                answer: None,
                controls: &Controls::default(),
            };
            terminal.draw(|frame| draw(frame, &view)).expect("a screen");
            terminal.backend().to_string()
        };
        let text = screen(&parts);
        assert!(text.contains("time, 25 % on cpu"), "{text}");
        assert!(!screen(&[None]).contains("on cpu"));
    }

    #[test]
    fn names_have_room_at_every_width() {
        for width in [60, 78, 98, 108, 120, 148, 300] {
            for longest in [1, 12, 64] {
                let (columns, name) = columns(width, longest);
                let taken: usize = columns.iter().map(|column| column.width + 1).sum();
                assert!(name >= MIN_NAME, "{width}");
                assert!(taken + name <= width.max(63), "{width}: {taken} + {name}");
            }
        }
        assert_eq!(columns(148, 5).0.len(), COLUMNS.len());
        assert_eq!(shortened("0123456789", 10), "0123456789");
        assert_eq!(shortened("0123456789", 9), "01234567…");
    }
}
