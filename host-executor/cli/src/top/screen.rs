//! The screen of `vgpu top`.

use std::collections::BTreeMap;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Gauge, Paragraph, Row, Table};
use vgpu_executor::status::Status;

use super::rates::Rates;
use crate::units::{duration, size};

/// Width of a bar in a table, in cells.
const BAR: usize = 16;

/// What the screen shows.
pub(super) struct View<'a> {
    pub(super) status: &'a Status,
    pub(super) rates: &'a BTreeMap<String, Rates>,
    /// Why the figures are not current, if they are not.
    pub(super) notice: Option<&'a str>,
    /// Sessions above the visible part.
    pub(super) skip: usize,
}

pub(super) fn draw(frame: &mut Frame<'_>, view: &View<'_>) {
    let guests = view.status.guests.len() as u16;
    let [head, engine, table, sessions, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(3),
        Constraint::Length((guests + 3).min(frame.area().height / 2)),
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_head(frame, head, view);
    draw_engine(frame, engine, view);
    draw_guests(frame, table, view);
    draw_sessions(frame, sessions, view);
    let keys = Line::from(" q quit   ↑ ↓ scroll").style(Style::new().add_modifier(Modifier::DIM));
    frame.render_widget(keys, foot);
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
    if let Some(notice) = view.notice {
        let style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
        line.push(Span::styled(format!("  {notice}"), style));
    }
    frame.render_widget(Line::from(line), area);
}

fn draw_engine(frame: &mut Frame<'_>, area: Rect, view: &View<'_>) {
    let engine = &view.status.engine;
    let total = engine.memory_total;
    let used = total.saturating_sub(engine.memory_free);
    let busy: f64 = view.rates.values().map(|rates| rates.busy).sum();
    let [memory, time] =
        Layout::horizontal([Constraint::Percentage(60), Constraint::Percentage(40)]).areas(area);
    let title = format!(" {}: {} ", engine.name, engine.description);
    let gauge = Gauge::default()
        .block(Block::bordered().title(title))
        .gauge_style(Style::new().fg(colour(used as f64 / total.max(1) as f64)))
        .ratio(part(used, total))
        .label(format!("memory {} of {}", size(used), size(total)));
    frame.render_widget(gauge, memory);
    let gauge = Gauge::default()
        .block(Block::bordered().title(" time "))
        .gauge_style(Style::new().fg(Color::Cyan))
        .ratio(busy.clamp(0.0, 1.0))
        .label(format!("busy {:.0} %", 100.0 * busy));
    frame.render_widget(gauge, time);
}

fn draw_guests(frame: &mut Frame<'_>, area: Rect, view: &View<'_>) {
    let rows = view.status.guests.iter().map(|guest| {
        let rates = view.rates.get(&guest.name).copied().unwrap_or_default();
        // Without a quota, the bar is relative to the engine's memory.
        let whole = guest.quota.unwrap_or(view.status.engine.memory_total);
        let used = guest.usage.memory;
        let quota = guest.quota.map_or_else(|| "-".into(), size);
        Row::new([
            guest.name.clone(),
            guest.weight.to_string(),
            guest.sessions.to_string(),
            bar(part(used, whole)),
            format!("{} / {quota}", size(used)),
            format!("{:.1}", rates.graphs),
            format!("{:.0} %", 100.0 * rates.busy),
            format!("{:.2}", rates.waiting),
            format!("{}/s", size(rates.bytes_in as u64)),
            format!("{}/s", size(rates.bytes_out as u64)),
            guest.usage.failures.to_string(),
        ])
    });
    let widths = [
        Constraint::Fill(2),
        Constraint::Length(6),
        Constraint::Length(5),
        Constraint::Length(BAR as u16),
        Constraint::Length(22),
        Constraint::Length(8),
        Constraint::Length(5),
        Constraint::Length(7),
        Constraint::Length(12),
        Constraint::Length(12),
        Constraint::Length(6),
    ];
    let names = [
        "GUEST", "WEIGHT", "PROGS", "MEMORY", "", "GRAPHS/S", "TIME", "WAITING", "IN", "OUT",
        "FAILED",
    ];
    let table = Table::new(rows, widths)
        .header(Row::new(names).style(Style::new().add_modifier(Modifier::BOLD)))
        .block(Block::bordered().title(" guests "));
    frame.render_widget(table, area);
}

fn draw_sessions(frame: &mut Frame<'_>, area: Rect, view: &View<'_>) {
    let sessions = &view.status.sessions;
    if sessions.is_empty() {
        let nobody = Paragraph::new(" no program is connected");
        frame.render_widget(nobody.block(Block::bordered().title(" programs ")), area);
        return;
    }
    let rows = sessions.iter().skip(view.skip).map(|session| {
        let number = |n: Option<i64>| n.map_or_else(|| "-".into(), |n| n.to_string());
        Row::new([
            session.id.to_string(),
            session.guest.clone(),
            number(session.pid.map(i64::from)),
            duration(session.age),
            size(session.usage.memory),
            session.usage.graphs.to_string(),
            session.program.clone().unwrap_or_else(|| "-".into()),
        ])
    });
    let widths = [
        Constraint::Length(6),
        Constraint::Fill(1),
        Constraint::Length(8),
        Constraint::Length(7),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Fill(2),
    ];
    let names = ["ID", "GUEST", "PID", "AGE", "MEMORY", "GRAPHS", "PROGRAM"];
    let table = Table::new(rows, widths)
        .header(Row::new(names).style(Style::new().add_modifier(Modifier::BOLD)))
        .block(Block::bordered().title(" programs "));
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
