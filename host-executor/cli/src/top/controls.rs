//! The keys of `vgpu top`: which part of the tables is visible, in which order.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use vgpu_executor::status::{GuestStatus, SessionStatus, Status};

use super::rates::Rates;

/// The order of the guests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Order {
    /// By name, as the executor reports them.
    #[default]
    Name,
    Memory,
    Time,
}

impl Order {
    fn next(self) -> Order {
        match self {
            Order::Name => Order::Memory,
            Order::Memory => Order::Time,
            Order::Time => Order::Name,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Order::Name => "name",
            Order::Memory => "memory",
            Order::Time => "time",
        }
    }
}

/// Digits of the largest number of a session.
const MAX_DIGITS: usize = u64::MAX.ilog10() as usize + 1;

/// A table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Pane {
    #[default]
    Guests,
    Programs,
}

/// What the user has chosen.
#[derive(Debug, Default)]
pub(super) struct Controls {
    /// The table that the arrow keys scroll.
    pane: Pane,
    order: Order,
    /// Shown are the guests whose name contains this.
    filter: String,
    is_typing: bool,
    /// The number of the session to end, while the user types it.
    kill: Option<String>,
    /// Rows above the visible part.
    guests: Cell<usize>,
    programs: Cell<usize>,
}

/// What a key asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Show,
    Quit,
    /// End the session with this number.
    Kill(u64),
}

impl Controls {
    pub(super) fn pane(&self) -> Pane {
        self.pane
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> Next {
        let ctrl = key.modifiers.contains(KeyModifiers::CONTROL);
        if key.kind == KeyEventKind::Release {
            return Next::Show;
        }
        if ctrl {
            return match key.code {
                KeyCode::Char('c') => Next::Quit,
                _ => Next::Show,
            };
        }
        if let Some(number) = &mut self.kill {
            match key.code {
                KeyCode::Enter => {
                    let session = match number.as_str() {
                        "" => None,
                        // What is larger than every number is no session, either.
                        number => Some(number.parse().unwrap_or(u64::MAX)),
                    };
                    self.kill = None;
                    return session.map_or(Next::Show, Next::Kill);
                }
                KeyCode::Esc => self.kill = None,
                KeyCode::Backspace => drop(number.pop()),
                KeyCode::Char(digit) if digit.is_ascii_digit() && number.len() < MAX_DIGITS => {
                    number.push(digit);
                }
                _ => {}
            }
            return Next::Show;
        }
        if self.is_typing {
            match key.code {
                KeyCode::Enter => self.is_typing = false,
                KeyCode::Esc => {
                    self.is_typing = false;
                    self.filter.clear();
                }
                KeyCode::Backspace => drop(self.filter.pop()),
                KeyCode::Char(letter) => self.filter.push(letter),
                _ => {}
            }
            return Next::Show;
        }
        let skip = self.skip(self.pane);
        match key.code {
            KeyCode::Char('q') => return Next::Quit,
            KeyCode::Esc if self.filter.is_empty() => return Next::Quit,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Down | KeyCode::Char('j') => skip.set(skip.get().saturating_add(1)),
            KeyCode::Up | KeyCode::Char('k') => skip.set(skip.get().saturating_sub(1)),
            KeyCode::Tab => {
                self.pane = match self.pane {
                    Pane::Guests => Pane::Programs,
                    Pane::Programs => Pane::Guests,
                }
            }
            KeyCode::Char('s') => self.order = self.order.next(),
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Char('x') => self.kill = Some(String::new()),
            _ => {}
        }
        Next::Show
    }

    fn skip(&self, pane: Pane) -> &Cell<usize> {
        match pane {
            Pane::Guests => &self.guests,
            Pane::Programs => &self.programs,
        }
    }

    /// The rows above the visible part of a table that has `count` rows, `visible` of them at once.
    /// The arrow keys go no further than to the last row.
    pub(super) fn skipped(&self, pane: Pane, count: usize, visible: usize) -> usize {
        let skip = self.skip(pane);
        skip.set(skip.get().min(count.saturating_sub(visible)));
        skip.get()
    }

    fn is_shown(&self, guest: &str) -> bool {
        guest.to_lowercase().contains(&self.filter.to_lowercase())
    }

    /// The guests to show, in their order.
    pub(super) fn guests<'a>(
        &self,
        status: &'a Status,
        rates: &BTreeMap<String, Rates>,
    ) -> Vec<&'a GuestStatus> {
        let shown = status.guests.iter().filter(|g| self.is_shown(&g.name));
        let mut shown: Vec<&GuestStatus> = shown.collect();
        match self.order {
            Order::Name => {}
            Order::Memory => shown.sort_by_key(|guest| Reverse(guest.usage.memory)),
            Order::Time => {
                let busy = |guest: &GuestStatus| rates.get(&guest.name).map_or(0.0, |r| r.busy);
                shown.sort_by(|a, b| busy(b).total_cmp(&busy(a)));
            }
        }
        shown
    }

    /// The programs to show.
    pub(super) fn sessions<'a>(&self, status: &'a Status) -> Vec<&'a SessionStatus> {
        let shown = status.sessions.iter();
        shown.filter(|s| self.is_shown(&s.guest)).collect()
    }

    /// The keys, or what the user types.
    pub(super) fn help(&self) -> String {
        if let Some(number) = &self.kill {
            return format!("end the session with the ID: {number}_   Enter end   Esc back");
        }
        if self.is_typing {
            return format!("guests with: {}_   Enter keep   Esc all", self.filter);
        }
        let filter = match self.filter.as_str() {
            "" => "/ filter".to_owned(),
            filter => format!("/ filter: {filter}  Esc all"),
        };
        let order = self.order.name();
        format!("q quit  ↑ ↓ scroll  Tab table  s sort: {order}  x end  {filter}")
    }
}
