//! What a drain says.

use std::time::Duration;

/// The outcome of a drain. `silent`: the virtual machines that do not know of it, and why.
pub(super) fn drains(deadline: Option<Duration>, silent: &[String]) -> String {
    let end = match deadline {
        Some(limit) => format!("those that are open after {limit:?} are ended"),
        None => "those that are open go on".into(),
    };
    format!("the executor drains: no new sessions, {end}{}", but(silent))
}

/// The outcome of `vgpu drain --undo`.
pub(super) fn accepts(did_drain: bool, silent: &[String]) -> String {
    let what = match did_drain {
        true => "the executor accepts sessions again",
        false => "the executor did not drain, and accepts sessions",
    };
    format!("{what}{}", but(silent))
}

fn but(silent: &[String]) -> String {
    match silent {
        [] => String::new(),
        silent => format!(
            "; not told to the processes of virtual machines: {}",
            silent.join("; ")
        ),
    }
}
